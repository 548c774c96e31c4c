"""GraVAC against its static levels on models that compile and train in minutes.

    python benchmarks/gravac_small.py --seeds 3

The study of `benchmarks/policies.py` on its two models, made small: the GPT with one
layer of width 64 (Adam), and the network over n-grams with 1024 rows for each length
(SGD with momentum). What a step computes is taken to last ``--compute-ms`` of the large
model, divided by how much smaller this one is, so that computation and messages are to
each other what they are there. ``--steps`` and ``--most-steps`` are those of the study.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import policies

SMALL_GPT = policies.GPT._replace(layers=1, d_model=64)
SMALL_ROWS = 1 << 10

Build = Callable[[int], Any]
# Each model as it is there, and small.
MODELS: dict[str, tuple[Build, Build]] = {
    "gpt": (
        functools.partial(policies.language_model.build, sizes=policies.GPT),
        functools.partial(policies.language_model.build, sizes=SMALL_GPT),
    ),
    "n-grams": (policies.ngrams, functools.partial(policies.ngrams, rows=SMALL_ROWS)),
}


def shifted(build: Build, by: int) -> Build:
    """The model of later seeds."""
    return lambda seed: build(seed + by)


def parameters(trainer: policies.Trainer) -> int:
    """How many numbers a model learns."""
    return sum(math.prod(shape) for shape in trainer.shapes.values())


def main() -> int:
    """Prints a table for each model and seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=tuple(MODELS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--most-steps", type=int, default=700)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mbit", type=float, nargs="+", default=(100,))
    parser.add_argument("--compute-ms", type=float, default=30.0)
    parser.add_argument(
        "--gains", nargs="+", default=("updates", "signal", "signal-updates")
    )
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for name, (large, small) in MODELS.items():
        for seed in range(given.seeds) if given.only in (None, name) else ():
            trainer = policies.Trainer(shifted(small, seed))
            smaller = parameters(policies.Trainer(large)) / parameters(trainer)
            policies.gravac_study(
                f"{name}, seed {seed}, {smaller:.1f} times smaller", trainer,
                given.steps, given.most_steps, given.mbit,
                1e-3 * given.compute_ms / smaller, given.gains,
                policies.RATES.get(name),
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
