"""Trains small steps with each strategy on 8 simulated devices, and on one device.

    python benchmarks/strategy_numerics.py [--only TEXT] [--json FILE]

A strategy is a way to run operators that a sharding of arrays cannot express. Each
strategy is planned in five modes: as written, in 2 microbatches, with layers under
``jax.checkpoint``, with gradients in int8, and in 2 stages. A row has the largest
relative differences from `jax.jit` on one device: of losses, of the optimizer state
after the first step, and of the whole state after the last step. The difference of an
array is divided by its largest magnitude. The first momentum of most steps is the
gradient (SGD). A row also has what the plan says of the strategy, or the reason why it
was refused.

With int8, the relative L2 error of the first optimizer state is that of the codec. The
row has it also for the plan that only divides the rows of the batch. With bfloat16, the
row has this error against a run in float32, of the plan and of one device. It also has
the differences of one device whose sums are taken in another order: the features of all
layers are permuted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from workloads import commit

import autopar

DATA = pathlib.Path(__file__).parents[1] / "docs" / "data" / "strategy_numerics.json"
STEPS = 3
WIDTH, SEQUENCE, ROWS = 32, 256, 4
EXPERTS, CHOSEN, INNER, VOCABULARY = 8, 2, 64, 256
Tree = Any
# A step (state, batch) -> (state, loss), its state and a batch.
Training = tuple[Callable[..., Any], Tree, jax.Array]
MODES: dict[str, dict[str, Any]] = {
    "as written": {"stages": 1, "microbatches": 1, "remat": 0},
    "microbatches": {"stages": 1, "microbatches": 2, "remat": 0},
    "recomputed": {"stages": 1, "microbatches": 1},
    "int8": {"stages": 1, "microbatches": 1, "remat": 0, "compression": "int8"},
    "stages": {"stages": 2, "microbatches": 2},
}


def devices(text: str = "8:cpu", memory_bytes: int = 1 << 30) -> autopar.Cluster:
    """A cluster of devices so slow that all work is worth splitting."""
    cluster = autopar.Cluster.parse(text)
    rates = tuple((d, 1e-4 * rate) for d, rate in cluster.device.peak_flops_per_s)
    known = dataclasses.replace(cluster.device.corrections, arrays_apart=False)
    device = dataclasses.replace(
        cluster.device,
        peak_flops_per_s=rates,
        calibration=known,
        memory_bytes=memory_bytes,
    )
    return dataclasses.replace(cluster, device=device)


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Random weights whose sums over the first dimension have a variance of 1/4."""
    return 0.5 * jax.random.normal(key, shape) / np.sqrt(shape[-2])


def updating(
    loss_of: Callable[..., jax.Array], optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """The training step of a loss."""

    def step(state: Tree, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": moments}, loss

    return step


def made(
    loss_of: Callable[..., jax.Array],
    params: Tree,
    batch: jax.Array,
    optimizer: optax.GradientTransformation | None = None,
) -> Training:
    """A training of parameters."""
    chosen = optimizer or optax.sgd(0.05, momentum=0.9)
    state = {"params": params, "opt": chosen.init(params)}
    return updating(loss_of, chosen), state, batch


def written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of (rows, tokens, heads, head_dim), written out."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def windowed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention in a window, with limited scores and a bias of distances."""
    away = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = 2.0 * jnp.tanh(scores / 2.0) - 0.1 * away
    scores = jnp.where((away >= 0) & (away < 20), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def attention(
    attend: Callable[..., jax.Array] = written, heads: int = 2, key_heads: int = 2
) -> Any:
    """Two layers of attention."""
    dim = WIDTH // heads

    def layer(x: jax.Array, p: Tree) -> jax.Array:
        q, k, v = (
            (x @ p[n].astype(x.dtype)).reshape(*x.shape[:2], -1, dim) for n in "qkv"
        )
        k, v = (jnp.repeat(y, heads // key_heads, axis=2) for y in (k, v))
        out = attend(q, k, v).reshape(x.shape)
        return x + jnp.tanh(out @ p["o"].astype(x.dtype))

    def training(
        dtype: Any = jnp.float32, order: Any = None, *, again: bool = False
    ) -> Training:
        run = jax.checkpoint(layer) if again else layer
        keys = iter(jax.random.split(jax.random.key(0), 9))
        kept = key_heads * dim
        widths = {"q": WIDTH, "k": kept, "v": kept, "o": WIDTH}
        params = [
            {n: normal(next(keys), WIDTH, w) for n, w in widths.items()}
            for _ in range(2)
        ]
        x = jax.random.normal(next(keys), (ROWS, SEQUENCE, WIDTH))
        if order is not None:
            # The features of the rows of q, k and v, and of the columns of o.
            x = x[..., order]
            params = [
                {n: p[n][order] for n in "qkv"} | {"o": p["o"][:, order]}
                for p in params
            ]

        def loss_of(params: Tree, x: jax.Array) -> jax.Array:
            y = x.astype(dtype)
            for p in params:
                y = run(y, p)
            goal = jnp.roll(x, 1, axis=1)
            return jnp.mean((y.astype(jnp.float32) - goal) ** 2)

        return made(loss_of, params, x)

    return training


def experts(*, again: bool = False) -> Training:
    """Two layers of experts without a capacity."""

    def products(rows: jax.Array, sizes: jax.Array, p: Tree) -> jax.Array:
        up = jax.lax.ragged_dot(rows, p["up"], sizes)
        return jax.lax.ragged_dot(jax.nn.silu(up), p["down"], sizes)

    def layer(y: jax.Array, p: Tree) -> jax.Array:
        y = y + jnp.tanh(y @ p["mix"])
        x = y.reshape(-1, WIDTH)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
        keys = chosen.reshape(-1)
        order = jnp.argsort(keys)
        sizes = jnp.bincount(keys, length=EXPERTS)
        rows = products(x[order // CHOSEN], sizes, p)[jnp.argsort(order)]
        rows = rows.reshape(*chosen.shape, -1)
        return y + jnp.einsum("tkd,tk->td", rows, weights).reshape(y.shape)

    run = jax.checkpoint(layer) if again else layer

    def loss_of(params: Tree, x: jax.Array) -> jax.Array:
        y = x
        for p in params:
            y = run(y, p)
        return jnp.mean((y - x[..., ::-1]) ** 2)

    shapes = {
        "mix": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    }
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = [{n: normal(next(keys), *s) for n, s in shapes.items()} for _ in range(2)]
    x = jax.random.normal(next(keys), (64, 4, WIDTH))
    return made(loss_of, params, x)


def layers(
    optimizer: optax.GradientTransformation | None = None, *, again: bool = False
) -> Training:
    """Four dense layers."""

    def layer(y: jax.Array, p: Tree) -> jax.Array:
        return y + jnp.tanh(y @ p["up"]) @ p["down"]

    run = jax.checkpoint(layer) if again else layer

    def loss_of(params: Tree, x: jax.Array) -> jax.Array:
        y = x
        for p in params:
            y = run(y, p)
        return jnp.mean((y - x[:, ::-1]) ** 2)

    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = [
        {
            "up": normal(next(keys), WIDTH, 2 * WIDTH),
            "down": normal(next(keys), 2 * WIDTH, WIDTH),
        }
        for _ in range(4)
    ]
    x = jax.random.normal(next(keys), (32, WIDTH))
    return made(loss_of, params, x, optimizer)


def vocabulary(*, again: bool = False) -> Training:
    """Two layers, and a cross-entropy of 16 rows of 4096 tokens."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w)

    run = jax.checkpoint(layer) if again else layer

    def loss_of(params: Tree, tokens: jax.Array) -> jax.Array:
        x = params["table"][tokens]
        for w in params["layers"]:
            x = run(x, w)
        found = optax.softmax_cross_entropy_with_integer_labels(
            x @ params["head"], jnp.roll(tokens, -1, axis=1)
        )
        return found.mean()

    keys = iter(jax.random.split(jax.random.key(0), 5))
    params = {
        "table": normal(next(keys), VOCABULARY, WIDTH),
        "layers": [normal(next(keys), WIDTH, WIDTH) for _ in range(2)],
        "head": normal(next(keys), WIDTH, VOCABULARY),
    }
    tokens = jax.random.randint(next(keys), (16, 4096), 0, VOCABULARY)
    return made(loss_of, params, tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy and a step for which it is planned.

    Attributes:
      make: makes the training.
      cluster: the devices.
      options: options of the plan.
      stage_options: options of the plan in stages, in place of ``options``.
      keys: how devices share keys and values: the plan is edited so. '' keeps what the
        planner chose.
      shown: words that a plan with the strategy has.
      less: part of the memory with which microbatches are planned, so that the strategy
        pays there, too; 0: all of it.
      dtype: type of the activations.
    """

    make: Callable[..., Training]
    cluster: autopar.Cluster
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    stage_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    keys: str = ""
    shown: str = ""
    less: float = 0.0
    dtype: Any = jnp.float32


SPLIT = {"axis_names": ("sequence",), "max_axes": 1}
FEW_BYTES = 2_900_000


def split(make: Any, keys: str, dtype: Any = jnp.float32) -> Strategy:
    """Attention whose sequence the devices split."""
    words = {"ring": "around a ring", "gather": "gathered"}
    return Strategy(
        make=make,
        cluster=devices(memory_bytes=FEW_BYTES),
        options=SPLIT | {"pins": {"batch": P(None, "sequence")}},
        keys=keys,
        shown=words[keys],
        less=0.52,
        dtype=dtype,
    )


def strategies() -> dict[str, Strategy]:
    """Each strategy by its name."""
    adam, muon = optax.adam(1e-3), optax.contrib.muon(1e-3)
    found = {
        "attention, ring": split(attention(), "ring"),
        "attention, gathered keys": split(attention(), "gather"),
        "attention, one key head, ring": split(attention(key_heads=1), "ring"),
        "attention, one key head, gathered": split(attention(key_heads=1), "gather"),
        "attention in a window": split(attention(windowed), "gather"),
        "attention, ring, bfloat16": split(attention(), "ring", jnp.bfloat16),
        "attention, heads by all-to-all": Strategy(
            make=attention(heads=8, key_heads=8),
            cluster=devices(memory_bytes=4 * FEW_BYTES),
            options=SPLIT | {"pins": {"batch": P(None, "sequence")}},
            shown="attention by blocks",
        ),
        "experts, slots": Strategy(
            make=experts,
            cluster=devices(),
            options={
                "axis_names": ("data",),
                "pins": {
                    "batch": P("data"),
                    "*/up": P("data"),
                    "*/down": P("data"),
                    "*/router": P(),
                    "*/mix": P(),
                },
            },
            shown="slots for",
        ),
        "experts, rows in blocks": Strategy(
            make=experts,
            cluster=devices(),
            options={
                "axis_names": ("data",),
                "pins": {"batch": P("data"), "state/*": P()},
            },
            shown="rows sorted in 8 blocks",
        ),
        "matrices of Muon": Strategy(
            make=functools.partial(layers, muon),
            cluster=devices(),
            shown="update in batches",
        ),
        "state on the host": Strategy(
            make=functools.partial(layers, adam),
            cluster=devices(),
            options={"offload": "state"},
            shown="host",
        ),
        "loss in blocks": Strategy(
            make=vocabulary,
            cluster=devices(memory_bytes=20_000_000),
            options={"axis_names": ("data",), "pins": {"state/*": P()}},
            shown="loss in",
        ),
    }
    for count in (5, 6, 7):
        found[f"32 rows on {count} devices"] = Strategy(
            make=layers,
            cluster=devices(f"{count}:cpu"),
            shown="padded to" if count != 6 else "",
        )
    return found


def trained(step: Any, state: Tree, batch: jax.Array) -> tuple[Any, Tree, Tree]:
    """Losses, the optimizer state after the first step, and the last state."""
    losses, first = list[float](), None
    for _ in range(STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
        if first is None:
            first = jax.tree.map(np.asarray, state["opt"])
    return np.asarray(losses), first, jax.tree.map(np.asarray, state)


def difference(got: Tree, expected: Tree) -> float:
    """The largest difference of an array, divided by its largest magnitude."""
    out = 0.0
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        out = max(out, float(abs(a - b).max()) / max(float(abs(b).max()), 1e-12))
    return out


def error(got: Tree, expected: Tree) -> float:
    """The relative L2 error of all arrays together."""
    pairs = list(zip(*map(jax.tree.leaves, (got, expected)), strict=True))
    off = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return (off / sum(float((b**2).sum()) for _, b in pairs)) ** 0.5


def planned(given: Strategy, training: Training, options: dict[str, Any]) -> Any:
    """The planned step and its plan, with the strategy if the plan can have it."""
    step, state, batch = training
    cluster = given.cluster
    if given.less and options["microbatches"] == 2:
        device = cluster.device
        few = int(given.less * device.memory_bytes)
        device = dataclasses.replace(device, memory_bytes=few)
        cluster = dataclasses.replace(cluster, device=device)
    if options["stages"] == 2:
        cluster = devices(f"{cluster.num_devices}:cpu")  # with memory for whole scores
    asked: dict[str, Any] = {"cluster": cluster, "seconds": 2, **options}
    plan = autopar.plan(step, state, batch, **asked)
    if given.keys and plan.stages[0].attention:
        data = json.loads(json.dumps(plan.to_json()))
        for stage in data["stages"]:
            for kernel in stage["attention"]:
                kernel["keys"] = given.keys
        edited = autopar.Plan.from_json(json.dumps(data))
        if len(plan.stages) == 1:
            kept = {k: v for k, v in asked.items() if k in ("cluster", "compression")}
            plan = autopar.plan(step, state, batch, layouts=edited, **kept)
    return autopar.parallelize(step, plan=plan, donate=False), plan


def said(plan: autopar.Plan) -> str:
    """The lines of a plan that name strategies."""
    heads = ("plan ", "decided ", "keys ", "scheme ", "offload ", "update ", "host ")
    return " | ".join(
        " ".join(line.split())
        for line in str(plan).splitlines()
        if line.startswith(heads)
    )


def row(name: str, mode: str) -> dict[str, Any]:
    """The figures of a strategy in a mode."""
    given = strategies()[name]
    options = given.options | MODES[mode]
    if mode == "stages":
        options = given.stage_options | MODES[mode]
    bfloat16 = given.dtype == jnp.bfloat16
    make = functools.partial(given.make, again=mode == "recomputed")
    training = make(given.dtype) if bfloat16 else make()
    step, state, batch = training
    expected = trained(jax.jit(step), state, batch)
    found: dict[str, Any] = {"strategy": name, "mode": mode}
    try:
        run, plan = planned(given, training, options)
        got = trained(run, state, batch)
    except autopar.AutoparError as error_:
        return found | {"refused": str(error_).splitlines()[0]}
    found |= {
        "plan": said(plan),
        "chosen": given.shown in str(plan),
        "losses": difference(got[0], expected[0]),
        "first": difference(got[1], expected[1]),
        "state": difference(got[2], expected[2]),
    }
    if mode == "int8":
        rows: Any = {"axis_names": ("data",), "max_axes": 1, "pins": {"state/*": P()}}
        whole = dataclasses.replace(given, keys="", cluster=devices("4:cpu"))
        try:
            other, _ = planned(whole, training, rows | MODES[mode])
            without = error(trained(other, state, batch)[1], expected[1])
        except autopar.AutoparError as error_:
            found["codec_refused"] = str(error_).splitlines()[0]
        else:
            found["codec_error"] = without
        found["error"] = error(got[1], expected[1])
    if bfloat16:
        exact = trained(*_jitted(make()))
        found["error"] = error(got[1], exact[1])
        found["plain_error"] = error(expected[1], exact[1])
        order = np.random.default_rng(0).permutation(WIDTH)
        back = np.argsort(order)
        permuted = trained(*_jitted(make(given.dtype, order)))
        moved = [
            {n: p[n][back] for n in "qkv"} | {"o": p["o"][:, back]}
            for p in permuted[1][0].trace
        ]
        found["spread_losses"] = difference(permuted[0], expected[0])
        found["spread_first"] = difference(moved, expected[1][0].trace)
    return found


def _jitted(training: Training) -> Training:
    return jax.jit(training[0]), *training[1:]


def measure(name: str, mode: str) -> dict[str, Any]:
    """A row, in a process of its own."""
    command = [sys.executable, __file__, "--row", name, mode]
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"strategy": name, "mode": mode, "failed": words[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the rows, and writes each as soon as it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="a part of the strategies' names")
    parser.add_argument("--json", type=pathlib.Path, default=DATA, help="data file")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(row(*asked.row)))
        return
    rows = list[dict[str, Any]]()
    if asked.only and asked.json.exists():
        rows = json.loads(asked.json.read_text())["rows"]
        rows = [r for r in rows if asked.only not in r["strategy"]]
    for name in strategies():
        if asked.only not in name:
            continue
        for mode in MODES:
            rows.append(found := measure(name, mode))
            print(json.dumps(found), flush=True)
            words = "python benchmarks/strategy_numerics.py"
            data = {"command": words, "at": commit(), "rows": rows}
            asked.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
