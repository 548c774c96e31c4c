"""The measured noise scale: its accuracy, its cost, and the rows that it predicts.

    python benchmarks/goodput.py --rows norms
    python benchmarks/goodput.py --rows overhead
    python benchmarks/goodput.py --rows samples --optimizer sgd --seeds 5

``norms``: residual layers are trained under plans for 8 simulated devices. One device
  computes the gradients of single rows and sums them over the groups of each plan. The
  table compares the step's sum of squared norms, and the squared norm of the mean, with
  these sums.

``overhead``: CPU seconds of steps with and without measurement, in turns. Measured
  steps repeat with a period, and each turn is a whole number of periods.

``samples``: a character model is trained with other batch sizes and codecs until its
  held-out loss reaches a level. The number of rows is predicted from the noise scale of
  one training with the base batch and dense gradients, and from the rows in which this
  training reached the level. The error of unbiased codecs comes from a short training
  with the base batch. The progress ratio of biased codecs comes from trainings with
  seeds that are not in the table. "naive" ignores the codec, like a noise scale that
  does not account for codecs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import goodput_samples
import jax
import jax.numpy as jnp
import numpy as np
import workloads
from jax.sharding import PartitionSpec

import autopar

ROWS, LAYERS = 2048, 4
WIDTHS = {"norms": 64, "overhead": 512}
# Steps of a turn. With codecs, one step in 32 is measured.
PERIOD = {"codecs": 32, "dense": 1}
DATA = {"batch": PartitionSpec("data")}
REPLICATED = {**DATA, "w/*": PartitionSpec()}
MODEL = {
    "w/*/up": PartitionSpec(None, "model"),
    "w/*/down": PartitionSpec("model"),
    "w/*/bias": PartitionSpec("model"),
}
# Plan -> number of microbatches, and options of the planner.
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (1, {"axis_names": ("data",), "pins": REPLICATED}),
    "fsdp": (
        1,
        {"axis_names": ("data",), "pins": {**DATA, "w/*": PartitionSpec("data")}},
    ),
    "tensor": (
        4,
        {"axis_names": ("model",), "pins": {"batch": PartitionSpec(), **MODEL}},
    ),
    "two axes": (1, {"axis_names": ("data", "model"), "pins": {**DATA, **MODEL}}),
    "pipeline": (4, {"stages": 2}),
    "accumulated": (4, {"axis_names": ("data",), "pins": REPLICATED}),
    "int8": (
        1,
        {"axis_names": ("data",), "pins": REPLICATED, "compression": "int8"},
    ),
    "powersgd": (
        1,
        {
            "axis_names": ("data",),
            "pins": REPLICATED,
            "compression": "powersgd:rank=4",
        },
    ),
}


def loss_of(w: Any, batch: Any) -> Any:
    """The loss of some residual layers."""
    x = batch
    for layer in w:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean((x - 1.0) ** 2)


def step(w: Any, batch: Any) -> Any:
    """One step of plain gradient descent."""
    loss, grads = jax.value_and_grad(loss_of)(w, batch)
    return jax.tree.map(lambda a, g: a - 0.01 * g, w, grads), loss


def weights(width: int) -> Any:
    """The weights of all layers."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(draw.standard_normal(shape) / width**0.5, jnp.float32)

    return [
        {
            "up": normal(width, width),
            "down": normal(width, width),
            "bias": normal(width),
        }
        for _ in range(LAYERS)
    ]


def rows_of(width: int, rows: int = ROWS) -> np.ndarray:
    """The batch."""
    draw = np.random.default_rng(1)
    return draw.standard_normal((rows, width)).astype(np.float32)


def parallel(microbatches: int, options: dict[str, Any], *, noise: bool) -> Any:
    """The step under a plan for 8 devices."""
    many = {} if microbatches == 1 else {"microbatches": microbatches}
    return autopar.parallelize(
        step, cluster="8:cpu", noise_scale=noise, **many, **options
    )


def norms(plans: Sequence[str]) -> None:
    """Prints the errors of each plan's norms, relative to those of one device."""
    workloads.row("plan", "groups", "squared norms", "norm of the mean", "left out")
    workloads.row("---", "---", "---", "---", "---")
    width = WIDTHS["norms"]
    for name in plans:
        microbatches, options = PLANS[name]
        run = parallel(microbatches, options, noise=True)
        run(weights(width), rows_of(width))
        found = run.noise_scale
        wanted = _expected(width, found.groups // microbatches, microbatches)
        workloads.row(
            name, found.groups, f"{found.local / wanted[0] - 1:+.1e}",
            f"{found.total / wanted[1] - 1:+.1e}", ", ".join(found.left_out) or "none",
        )  # fmt: skip


def _expected(width: int, replicas: int, microbatches: int) -> tuple[float, float]:
    """The norms, computed from the gradients of single rows over a plan's groups."""
    w, batch = weights(width), rows_of(width)
    one = jax.jit(
        lambda rows: jax.vmap(jax.grad(lambda w, r: loss_of(w, r[None])), (None, 0))(
            w, rows
        )
    )
    parts = np.arange(ROWS).reshape(replicas, -1)
    means: list[np.ndarray] = []
    for part in parts:
        for m in range(microbatches):
            leaves = jax.tree.leaves(one(batch[part[m::microbatches]]))
            flat = [np.asarray(x, np.float64).mean(0).ravel() for x in leaves]
            means.append(np.concatenate(flat))
    found = np.stack(means)
    return float(np.square(found).sum(1).mean()), float(np.square(found.mean(0)).sum())


def overhead(plans: Sequence[str], turns: int, rows: int) -> None:
    """Prints the CPU seconds of steps with and without the measurement."""
    workloads.row("plan", "CPU s without", "CPU s with", "quotient (median of pairs)")
    workloads.row("---", "---", "---", "---")
    for name in plans:
        microbatches, options = PLANS[name]
        found: dict[bool, list[float]] = {False: [], True: []}
        runners = {on: _runner(microbatches, options, rows, noise=on) for on in found}
        for turn in range(turns):
            for on in (False, True) if turn % 2 else (True, False):
                found[on].append(runners[on]())
        pairs = [b / a for a, b in zip(found[False], found[True], strict=True)]
        medians = [statistics.median(found[on]) for on in found]
        workloads.row(
            name, *(f"{m:.3f}" for m in medians), f"{statistics.median(pairs):.3f}"
        )


def _runner(
    microbatches: int, options: dict[str, Any], rows: int, *, noise: bool
) -> Callable[[], float]:
    """Returns a function that runs steps and returns the CPU seconds of one step."""
    width = WIDTHS["overhead"]
    run = parallel(microbatches, options, noise=noise)
    held, batch = [weights(width)], jnp.asarray(rows_of(width, rows))

    steps = PERIOD["codecs" if "compression" in options else "dense"]

    def once() -> float:
        begin = time.process_time()
        for _ in range(steps):
            held[0], loss = run(held[0], batch)
        jax.block_until_ready((held[0], loss))
        return (time.process_time() - begin) / steps

    for _ in range(2):
        once()
    return once


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the requested rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="norms,overhead,samples")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--batch", type=int, default=ROWS, help="rows, for overhead")
    goodput_samples.add_arguments(parser)
    given = parser.parse_args(arguments)
    plans = given.plans.split(",")
    if unknown := [name for name in plans if name not in PLANS]:
        parser.error(f"--plans {unknown[0]!r}: expected some of {', '.join(PLANS)}")
    for row in given.rows.split(","):
        match row:
            case "norms":
                norms(plans)
            case "overhead":
                overhead(plans, given.turns, given.batch)
            case "samples":
                goodput_samples.table(given)
            case _:
                parser.error(f"--rows {row!r}: expected norms, overhead or samples")


if __name__ == "__main__":
    main()
