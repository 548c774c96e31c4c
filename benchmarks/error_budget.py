"""Measured errors of gradients against predicted ones, all kinds of codecs together.

    python benchmarks/error_budget.py

A model is trained exactly: ``digits`` or ``characters`` of ``small_models.py``, or
``gpt`` or ``lstm`` of ``cut_families.py``. Then the gradient of a probe batch is
computed exactly and coarsely, as `WORKERS` workers with the same number of rows would
compute it:

- gathers: each matrix is replaced by ``decode(encode(matrix))`` in the forward and
  backward pass (``gather_codecs=``);
- cuts: activations and cotangents at two `CUTS` are encoded (``cut_codecs=``);
- sums: each worker's gradient of a matrix is encoded, and so is the sum
  (``compression=``, two shots, without error feedback).

The error of a gradient is the root mean square over all elements of matrices of the
relative L2 error of their matrix, as in the planner's budget. It is measured on *probe
batches*, of data that no training has seen. There are three predictions, in all of
which the squares of the errors of all kinds add up:

- *stated*, that of the planner: a gathered parameter's error counts as an equal error
  of its gradient, and an error of cotangents counts `COTANGENT_WEIGHT` times;
- *fitted*: the stated error of each kind times a factor, the root mean square of
  measured over stated errors of arms with this kind alone, over the seeds ``--fit``
  of ``--fit-models``;
- *calibrated*: likewise with factors of the training itself, which are measured on
  calibration batches. Their rows are neither trained on nor among those of the probes.

Arms with several kinds are part of no fit, and neither are the seeds ``--seeds`` nor
models that are not among ``--fit-models``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import cut_families
import jax
import numpy as np
import small_models
from small_models import Cuts, Model, Params

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.cut_codes import EXACT, CutCode
from autopar.planner.stages.cut_choice import COTANGENT_WEIGHT

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKERS = 4
MODELS = {**small_models.MODELS, "gpt": cut_families.gpt_model,
          "lstm": cut_families.lstm_model}  # fmt: skip
CUTS = {"digits": ("2", "4"), "characters": ("2", "4"), "gpt": ("1", "3"),
        "lstm": ("1", "3")}  # fmt: skip
KINDS = ("sums", "gathers", "activations", "cotangents")
BAR = 0.25


class Arm(NamedTuple):
    """The codec of each kind; `EXACT`: none."""

    sums: str = EXACT
    gathers: str = EXACT
    activations: str = EXACT
    cotangents: str = EXACT

    @property
    def kinds(self) -> list[str]:
        """The kinds with a codec."""
        return [k for k, text in zip(KINDS, self, strict=True) if text != EXACT]


ALONE = (
    Arm(sums="int8"),
    Arm(gathers="int8"),
    Arm(activations="int8"),
    Arm(cotangents="eden:levels=8"),
)
TOGETHER = (
    Arm("int8", "int8", "int8", "eden:levels=8"),
    Arm("int4", "int8", "eden:levels=32", "eden:levels=6"),
)


def recoded(text: str, rows: Any) -> Any:
    """Rows, (m, c), decoded from their codes."""
    if text == EXACT:
        return rows
    code = CutCode(text, rows.shape, str(rows.dtype))
    return code.decode(code.encode(rows))


def straight_through(text: str, array: Any) -> Any:
    """A coarse parameter, whose gradient is taken for that of the exact one."""
    coarse = recoded(text, array.reshape(1, -1)).reshape(array.shape)
    return array + jax.lax.stop_gradient(coarse - array)


def family(arm: Arm) -> small_models.Family:
    """The codes of an arm's cuts, in one direction or in both."""

    @jax.custom_vjp
    def sent(x: Any) -> Any:
        return recoded(arm.activations, x)

    sent.defvjp(lambda x: (sent(x), None), lambda _, g: (recoded(arm.cotangents, g),))
    return small_models.Family(lambda *_: {}, lambda _, x: sent(x), lambda _: 0)


def matrices(params: Params) -> dict[str, Any]:
    """The arrays that have codecs, by path."""
    found, _ = jax.tree.flatten_with_path(params)
    return {jax.tree_util.keystr(k): x for k, x in found if x.ndim >= 2}


def gradients(
    model: Model, places: Sequence[str], arm: Arm, params: Params, batches: Any
) -> dict[str, Any]:
    """The mean gradient of matrices over workers.

    Args:
      model: the model.
      places: its cuts.
      arm: the codecs.
      params: the parameters.
      batches: the rows of each worker, with a leading dim.
    """

    def loss(params: Params, batch: Any) -> Any:
        params = jax.tree.map(
            lambda x: straight_through(arm.gathers, x) if x.ndim >= 2 else x, params
        )
        cuts = Cuts(family(arm), places, {})
        return model.loss(model.logits(params, batch, cuts), batch)

    each = jax.lax.map(lambda batch: matrices(jax.grad(loss)(params, batch)), batches)

    def summed(own: Any) -> Any:
        mean = recoded(arm.sums, own.reshape(WORKERS, -1)).mean(axis=0)
        return recoded(arm.sums, mean[None]).reshape(own.shape[1:])

    return {name: summed(own) for name, own in each.items()}


def error_of(coarse: dict[str, Any], exact: dict[str, Any]) -> float:
    """The error of a gradient; see the module."""
    squares, elements = 0.0, 0
    for name, array in exact.items():
        relative = np.linalg.norm(coarse[name] - array) / np.linalg.norm(array)
        squares += array.size * float(relative) ** 2
        elements += array.size
    return math.sqrt(squares / elements)


def stated(arm: Arm, params: Params, cuts: int) -> dict[str, float]:
    """Kind -> the error that the planner states for it, with so many cuts."""
    shapes = [x.shape for x in matrices(params).values()]
    sizes = [math.prod(shape) for shape in shapes]

    def whole(text: str) -> float:
        errors = [parse_codec(text).error(shape) for shape in shapes]
        squares = sum(n * e * e for n, e in zip(sizes, errors, strict=True))
        return math.sqrt(squares / sum(sizes))

    rows = (64, small_models.WIDTH)
    factors = {"activations": 1.0, "cotangents": COTANGENT_WEIGHT}
    out = {k: whole(getattr(arm, k)) for k in arm.kinds if k not in factors}
    for kind in set(arm.kinds) & set(factors):
        error = parse_codec(getattr(arm, kind)).error(rows)
        out[kind] = math.sqrt(cuts) * factors[kind] * error
    return out


def held_out_batches(model: Model, count: int) -> tuple[list[Any], list[Any]]:
    """Batches of all workers for calibration and for probes, of different rows."""
    random, length = np.random.default_rng(1 << 20), len(model.held_out["y"])
    order = random.permutation(length)
    shape = WORKERS, model.rows

    def batches(rows: np.ndarray) -> list[Any]:
        drawn = [random.choice(rows, shape) for _ in range(count)]
        return [{k: x[own] for k, x in model.held_out.items()} for own in drawn]

    return batches(order[: length // 2]), batches(order[length // 2 :])


def records(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, arm and seed, with errors of the root mean square."""
    rows: list[dict[str, Any]] = []
    for name in options.models:
        model, places = MODELS[name](), CUTS[name]
        seeds = [*options.fit, *options.seeds]
        trainer = small_models.Trainer(model, small_models.EXACTLY, (), options.steps)
        trained = [trainer.train(seed)[0] for seed in seeds]
        held_out = held_out_batches(model, options.probes)
        runs = {
            arm: jax.jit(functools.partial(gradients, model, places, arm))
            for arm in (Arm(), *ALONE, *TOGETHER)
        }
        for seed, params in zip(seeds, trained, strict=True):
            exact = [
                [jax.device_get(runs[Arm()](params, b)) for b in batches]
                for batches in held_out
            ]
            for arm in (*ALONE, *TOGETHER):
                calibration, measured = (
                    _root_mean_square(
                        error_of(jax.device_get(runs[arm](params, b)), e)
                        for b, e in zip(batches, gradient, strict=True)
                    )
                    for batches, gradient in zip(held_out, exact, strict=True)
                )
                row = {"model": name, "seed": seed, "arm": arm._asdict()}
                row |= {"measured": measured, "calibration": calibration}
                rows.append(row | {"errors": stated(arm, params, len(places))})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(float(np.mean(np.square(list(values)))))


def factors_of(rows: Sequence[dict[str, Any]], of: str) -> dict[str, float]:
    """Kind -> measured over stated error of the arms with this kind alone.

    Args:
      rows: the rows to fit.
      of: the measured error, ``measured`` or ``calibration``.
    """
    return {
        kind: _root_mean_square(
            row[of] / row["errors"][kind]
            for row in rows
            if list(row["errors"]) == [kind]
        )
        for kind in KINDS
    }


def predicted(row: dict[str, Any], factors: dict[str, float]) -> float:
    """The predicted error of a row, with a factor for each kind."""
    return math.hypot(*(factors[k] * error for k, error in row["errors"].items()))


def _summary(
    rows: Sequence[dict[str, Any]], model: str, by: str, seeds: Sequence[int]
) -> str:
    """How far predictions of all kinds together are off, for a model."""
    ratios = [
        row["measured"] / row[by]
        for row in rows
        if row["model"] == model
        and row["seed"] in seeds
        and len(row["errors"]) == len(KINDS)
    ]
    within = sum(abs(ratio - 1) <= BAR for ratio in ratios)
    return (
        f"{within} of {len(ratios)} within {BAR}, {min(ratios):.2f} to "
        f"{max(ratios):.2f} times as large"
    )


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), choices=MODELS)
    add("--fit-models", nargs="+", default=["digits", "characters"], choices=MODELS)
    add("--fit", type=int, nargs="+", default=[10, 11], help="seeds of the fit")
    add("--seeds", type=int, nargs="+", default=[3, 4, 5])
    add("--steps", type=int, default=300)
    add("--probes", type=int, default=12, help="batches")
    add("--out", type=pathlib.Path, default=ROOT / "docs/data/error_budget.json")
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    rows = records(options)
    own_rows = [
        r for r in rows if r["seed"] in options.fit and r["model"] in options.fit_models
    ]
    fitted = factors_of(own_rows, "measured")
    for row in rows:
        same = ("model", "seed")
        own = [r for r in rows if all(r[k] == row[k] for k in same)]
        row["stated"] = predicted(row, dict.fromkeys(KINDS, 1.0))
        row["fitted"] = predicted(row, fitted)
        row["calibrated"] = predicted(row, factors_of(own, "calibration"))
    summary = {
        f"{name}, {by}": _summary(rows, name, by, options.seeds)
        for name in options.models
        for by in ("stated", "fitted", "calibrated")
    }
    command = " ".join(["python", "benchmarks/error_budget.py", *sys.argv[1:]])
    made = {
        "command": command,
        "factors": fitted,
        "summary": summary,
        "records": rows,
    }
    options.out.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps({"factors": fitted, "summary": summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
