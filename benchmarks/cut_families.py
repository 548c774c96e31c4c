"""Families of codes at stage cuts at equal bytes, and where in a model they harm.

    python benchmarks/cut_families.py
    python benchmarks/cut_families.py --places first last --ratios 16 --add
    python benchmarks/cut_families.py --widths 512 2048 --add

A GPT and an LSTM with four layers, 64 wide, learn the text of Python's own sources
(``network/language_model.py``). Activations and cotangents behind layers are sent as
codes. The families are those of MCBench (arXiv 2301.02654), each in ``1 / --ratios`` of
the bytes of float32 in both directions together:

- ``linear``: a matrix E makes z = x E, and a matrix D makes x' = z D. Both are
  parameters that train with the model (MCBench's autoencoder). ``linear-int8`` sends z
  and its cotangent as int8, and ``linear`` as bfloat16;
- ``random``: E has random orthonormal columns, and D is its transpose;
- ``principal``: likewise with the principal components of the rows that are sent. They
  are computed for each batch and sent with the code: the best low rank;
- ``topk``: the largest elements, ``cut_codecs="topk"``;
- ``eden``: random rotations and few levels, ``cut_codecs="eden"``.

A family may also be the text of codecs, such as ``eden:levels=32/eden:levels=6``. The
cotangents of ``random``, ``principal`` and ``topk`` are sent by the matrix or at the
positions of their activations. The places are ``first``, ``last`` and ``all``: the cut
behind the first layer, that before the last, and both with the one between.

``gpt-two-layers`` and ``lstm-two-layers`` are the models of ``network/cut_codecs.py``
with their optimizers, and their cut is the place ``first``. ``recommendation`` is its
recommendation model. The place ``clicks`` is the cut between its towers, with two
arrays. ``--widths`` predicts steps of a GPT over links of different rates.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_models
from flax import linen as nn
from small_models import EXACTLY, Cuts, Family, Model, Params, Trainer

import autopar
from autopar.compression.cut_codes import (
    CutCode,
    array_codecs,
    keeps_some,
    parse_cut_codecs,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "network"))
import language_model  # noqa: E402
import lstm  # noqa: E402
import recommendation  # noqa: E402

LAYERS, WIDTH, HEADS, SEQ, ROWS = 4, 64, 4, 32, 16
# With 0.002, the losses of the GPT differ by .14 between two seeds.
LEARNING_RATES = {"gpt": 1e-3, "lstm": 2e-3}
PLACES = {
    "first": ("1",),
    "last": ("3",),
    "all": ("1", "2", "3"),
    "clicks": ("dense", "pairs"),
}
HELD_OUT_ROWS = 256
# Elements of a row of codes, and of a block of eden: scales take few bytes.
ROW = 1024


# The models.


def language(
    name: str, net: nn.Module, prefix: str, seq: int = SEQ, rows: int = ROWS
) -> Model:
    """A language model with cuts behind the modules ``<prefix>1`` and so on.

    Args:
      name: name of the model.
      net: tokens -> logits.
      prefix: of the names of its layers, which are numbered from 0.
      seq: characters of a sequence.
      rows: sequences of a batch.
    """
    sizes = language_model.Sizes(seq=seq, batch=rows)

    def logits(params: Params, batch: Any, cuts: Cuts) -> Any:
        def behind(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            made = call(*args, **kwargs)
            layer = context.module.name or ""
            number = layer.removeprefix(prefix)
            if context.method_name != "__call__" or not (
                layer.startswith(prefix) and number.isdigit()
            ):
                return made
            x, *rest = made if isinstance(made, tuple) else (made,)
            place = str(int(number) + 1)
            sent = cuts(place, f"x{place}", x.reshape(-1, x.shape[-1])).reshape(x.shape)
            return (sent, *rest) if isinstance(made, tuple) else sent

        with nn.intercept_methods(behind):
            own = {k: v for k, v in params.items() if k != "codes"}
            return net.apply({"params": own}, batch["x"])

    def renamed(data: Any) -> Any:
        return {"x": data["inputs"], "y": data["targets"]}

    def batches(seed: int) -> Iterator[Any]:
        step = 0
        while True:
            yield renamed(language_model.batch(sizes, seed, step))
            step += 1

    @jax.jit
    def random_params(seed: Any) -> Any:
        return net.init(jax.random.key(seed), jnp.zeros((1, seq), jnp.int32))["params"]

    def init(seed: int) -> Params:
        return jax.device_get(random_params(seed))

    return Model(
        init=init,
        logits=logits,
        loss=small_models.class_loss,
        batches=batches,
        held_out=renamed(language_model.evaluation_batch(sizes, HELD_OUT_ROWS)),
        rows=rows,
        learning_rate=LEARNING_RATES[name],
        places=PLACES,
    )


def gpt_model(layers: int = LAYERS, seq: int = SEQ, rows: int = ROWS) -> Model:
    """A GPT."""
    net = language_model.gpt.GPT(
        layers=layers, d_model=WIDTH, heads=HEADS, vocab=language_model.VOCAB,
        max_seq=seq, dropout=0.0, scan=False, remat=False, dtype="float32",
        attention="plain",
    )  # fmt: skip
    return language("gpt", net, "block_", seq, rows)


def lstm_model(layers: int = LAYERS, seq: int = SEQ, rows: int = ROWS) -> Model:
    """An LSTM."""
    net = lstm.CharLSTM(
        layers=layers, d_model=WIDTH, vocab=language_model.VOCAB, dtype="float32"
    )
    return language("lstm", net, "lstm_", seq, rows)


CLICKS, TABLE_ROWS, TABLES, DENSE, HELD_OUT_SEED = 512, 4096, 8, 13, 1 << 20


def recommendation_model() -> Model:
    """A recommendation model with cuts before its upper tower: ``dense`` and ``pairs``.

    The arrays are the lower tower's results, and the products of pairs of vectors.
    """
    tables = tuple(max(TABLE_ROWS >> t, 64) for t in range(TABLES))
    net = recommendation.Recommender(
        sizes=tables, width=WIDTH, bottom=(2 * WIDTH,), top=(2 * WIDTH, 2 * WIDTH)
    )

    def logits(params: Params, batch: Any, cuts: Cuts) -> Any:
        def before(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if context.module.name != "top" or context.method_name != "__call__":
                return call(*args, **kwargs)
            arrays = jnp.split(args[0], [WIDTH], axis=1)
            names = PLACES["clicks"]
            sent = [cuts(n, n, x) for n, x in zip(names, arrays, strict=True)]
            return call(jnp.concatenate(sent, axis=1), **kwargs)

        with nn.intercept_methods(before):
            own = {k: v for k, v in params.items() if k != "codes"}
            return net.apply({"params": own}, batch["dense"], batch["ids"])

    def clicks(rows: int, seed: int) -> Any:
        made = recommendation.example_data.click_batches(rows, tables, DENSE, seed)
        return next(made)

    def batches(seed: int) -> Iterator[Any]:
        step = 0
        while True:
            yield clicks(CLICKS, (seed << 24) + step)
            step += 1

    @jax.jit
    def random_params(seed: Any) -> Any:
        ids = jnp.zeros((1, TABLES), jnp.int32)
        return net.init(jax.random.key(seed), jnp.zeros((1, DENSE)), ids)["params"]

    def loss(found: Any, batch: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(found, batch["clicks"]).mean()

    return Model(
        init=lambda seed: jax.device_get(random_params(seed)),
        logits=logits,
        loss=loss,
        batches=batches,
        held_out=clicks(1 << 14, HELD_OUT_SEED),
        rows=CLICKS,
        learning_rate=2e-3,
        places=PLACES,
    )


def two_layers(name: str) -> Model:
    """A model of ``network/cut_codecs.py``, with its optimizer."""

    def optimizer(steps: int) -> optax.GradientTransformation:
        sizes = language_model.Sizes(learning_rate=2e-3, decay_steps=max(steps, 400))
        rate = language_model.schedule(sizes)
        if name == "gpt":
            return optax.adamw(rate, b2=language_model.B2, weight_decay=0.01)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    return MODELS[name](layers=2)._replace(optimizer=optimizer)


MODELS: dict[str, Callable[..., Model]] = {
    "gpt": gpt_model,
    "lstm": lstm_model,
    "gpt-two-layers": functools.partial(two_layers, "gpt"),
    "lstm-two-layers": functools.partial(two_layers, "lstm"),
    "recommendation": recommendation_model,
}


# The families.


def through_code(
    texts: str, masked: bool = False, row: int = ROW
) -> Callable[[Any], Any]:
    """Sends rows (m, c) by codecs of cuts.

    Args:
      texts: the codecs, as in ``cut_codecs=``.
      masked: whether cotangents are sent at the positions of their activations.
      row: elements of a row of codes.
    """

    def flat(x: Any) -> Any:
        return x.reshape(-1, row) if x.size % row == 0 else x.reshape(1, -1)

    texts_of = parse_cut_codecs(texts)

    def code(x: Any, way: int, mask: bool = False) -> CutCode:
        return CutCode(texts_of[way], flat(x).shape, "float32", mask)

    @jax.custom_vjp
    def send(x: Any) -> Any:
        return forward(x)[0]

    def forward(x: Any) -> Any:
        made = code(x, 0).encode(flat(x))
        return code(x, 0).decode(made).reshape(x.shape), made if masked else None

    def backward(made: Any, g: Any) -> Any:
        own = code(g, 1, masked)
        return (own.decode(own.encode(flat(g), made), made).reshape(g.shape),)

    send.defvjp(forward, backward)
    return send


def as_bfloat16(z: Any) -> Any:
    """Rounds numbers to bfloat16, and their cotangents."""
    # A cast and its transposition alone may be removed by the compiler.
    return jax.lax.reduce_precision(z.astype(jnp.bfloat16).astype(jnp.float32), 8, 7)


def linear(ratio: float, int8: bool) -> Family:
    """A trained linear code."""
    bits = 8.0 + 16 / 256 if int8 else 16.0
    send = through_code("int8") if int8 else as_bfloat16

    def code_width(width: int) -> int:
        return int(32 * width / ratio / bits)

    def init(random: np.random.Generator, width: int) -> Params:
        basis = orthonormal(random, width, code_width(width))
        return {"encode": basis, "decode": basis.T.copy()}

    return Family(
        init,
        lambda params, x: send(x @ params["encode"]) @ params["decode"],
        lambda shape: 2 * round(shape[0] * code_width(shape[1]) * bits / 8),
    )


def orthonormal(random: np.random.Generator, width: int, count: int) -> np.ndarray:
    """Random orthonormal columns (width, count), float32."""
    made, _ = np.linalg.qr(random.standard_normal((width, count)))
    return made.astype(np.float32)


def random_projection(ratio: float) -> Family:
    """A projection on a random subspace, that of all steps."""

    def code_width(width: int) -> int:
        return int(2 * width / ratio)

    def send(_: Params, x: Any) -> Any:
        random = np.random.default_rng(1)
        basis = orthonormal(random, x.shape[1], code_width(x.shape[1]))
        return as_bfloat16(x @ basis) @ basis.T

    return Family(
        lambda random, width: {},
        send,
        lambda shape: 2 * 2 * shape[0] * code_width(shape[1]),
    )


def principal(ratio: float) -> Family:
    """A projection on the principal components of the rows of a batch."""

    def rank(shape: tuple[int, int]) -> int:
        # Activations are sent with the basis, cotangents without it.
        rows, width = shape
        return int(2 * 4 * rows * width / ratio / (2 * (2 * rows + width)))

    def send(_: Params, x: Any) -> Any:
        exact = jax.lax.stop_gradient(x)
        _, vectors = jnp.linalg.eigh(exact.T @ exact)
        basis = as_bfloat16(vectors[:, -rank(x.shape) :])
        return as_bfloat16(x @ basis) @ basis.T

    def nbytes(shape: tuple[int, int]) -> int:
        return 2 * rank(shape) * (2 * shape[0] + shape[1])

    return Family(lambda random, width: {}, send, nbytes)


def coded(texts: str) -> Family:
    """Codecs as in ``cut_codecs=``; rows of `WIDTH` have the first of several."""

    def of_width(width: int) -> tuple[str, bool, int]:
        own = "/".join(
            codecs[0 if width == WIDTH else -1]
            for codecs in map(array_codecs, parse_cut_codecs(texts))
        )
        ahead, back = parse_cut_codecs(own)
        return own, ahead == back and keeps_some(ahead), width if "+" in texts else ROW

    def nbytes(shape: tuple[int, int]) -> int:
        own, masked, row = of_width(shape[1])
        whole = (math.prod(shape) // row, row)
        parts = zip(parse_cut_codecs(own), (False, masked), strict=True)
        return sum(CutCode(text, whole, "float32", m).nbytes for text, m in parts)

    return Family(
        lambda random, width: {},
        lambda _, x: through_code(*of_width(x.shape[1]))(x),
        nbytes,
    )


def family_of(name: str, ratio: int) -> Family:
    """A family by its name, or codecs by their text."""
    return FAMILIES[name](ratio) if name in FAMILIES else coded(name)


# The ratios of topk follow from its bytes: positions as bits, and int8 values.
FAMILIES: dict[str, Callable[[int], Family]] = {
    "none": lambda ratio: EXACTLY,
    "linear": functools.partial(linear, int8=False),
    "linear-int8": functools.partial(linear, int8=True),
    "random": random_projection,
    "principal": principal,
    "topk": lambda ratio: coded(f"topk:ratio={ {8: 0.43, 16: 0.18}[ratio] }"),
    "eden": lambda ratio: coded(f"eden:levels={ {8: 16, 16: 4}[ratio] },block={ROW}"),
}


def records(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, family, ratio, place and seed."""
    for name in options.models:
        model = MODELS[name]()
        arms = [
            (family, ratio, place)
            for family in options.families
            for ratio in ([1] if family == "none" else options.ratios)
            for place in (["all"] if family == "none" else options.places)
        ]
        for family, ratio, place in arms:
            send = family_of(family, ratio)
            trainer = Trainer(model, send, PLACES[place], options.steps)
            for seed in options.seeds:
                row = {"model": name, "family": family, "ratio": ratio, "place": place}
                row |= {"seed": seed, "steps": options.steps}
                yield row | trainer.row(seed)


# Link -> two devices that it joins.
LINKS = {
    "100 Mbit/s": "2x1:h100,network=100Mb/s",
    "1000 Mbit/s": "2x1:h100,network=1000Mb/s",
    "10000 Mbit/s": "2x1:h100,network=10000Mb/s",
    "NVLink": "1x2:h100",
}


def predictions(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Predicted seconds of a step of a GPT in two stages, by width, link and codecs."""
    for width in options.widths:
        sizes = language_model.Sizes(
            layers=LAYERS, d_model=width, heads=width // 64, seq=512, batch=32
        )
        workload = language_model.build(0, sizes)
        args = jax.eval_shape(lambda w=workload: (w.create(), w.batch(0)))
        for link, cluster in LINKS.items():
            for texts in ("none", "eden:levels=32/eden:levels=6"):
                plan = autopar.plan(
                    workload.step, *args, cluster=autopar.Cluster.parse(cluster),
                    stages=2, schedule="1f1b", microbatches=4, cut_codecs=texts,
                    seconds=2.0,
                )  # fmt: skip
                row = {"model": "gpt", "width": width, "link": link, "codecs": texts}
                yield row | {"step_s": plan.predicted.step_s}


def save(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Adds a row to the data of ``--out``."""
    command = " ".join(["python", "benchmarks/cut_families.py", *sys.argv[1:]])
    old: dict[str, Any] = {"commands": [], "records": []}
    if options.out.exists():
        old = json.loads(options.out.read_text())
    commands = list(dict.fromkeys([*old["commands"], command]))
    made = {"commands": commands, "records": [*old["records"], row]}
    options.out.write_text(json.dumps(made, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", default=["gpt", "lstm"])
    add("--families", nargs="+", default=list(FAMILIES), help="or texts of codecs")
    add("--ratios", type=int, nargs="+", default=[8, 16])
    add("--places", nargs="+", default=["all"])
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--steps", type=int, default=600)
    add("--widths", type=int, nargs="+", help="predict steps instead of training")
    add("--out", type=pathlib.Path, default=ROOT / "docs/data/cut_families.json")
    add("--add", action="store_true", help="to the data of --out")
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    if not options.add and options.out.exists():
        options.out.unlink()
    for row in predictions(options) if options.widths else records(options):
        print(json.dumps(row), flush=True)
        save(options, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
