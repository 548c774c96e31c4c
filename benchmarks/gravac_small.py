"""GraVAC and its static levels on small models that compile and train in minutes.

    python benchmarks/gravac_small.py --seeds 3

The models are small versions of those of `benchmarks/policies.py`: the GPT with one
layer of width 64 (Adam), and the n-gram network with 1024 rows for each length (SGD
with momentum). The computing time of a step is taken as ``--compute-ms`` of the large
model, divided by the ratio of the models' sizes. So the ratio of computation to
communication is that of the large model. ``--steps`` and ``--most-steps`` have the same
meaning as in `policies.py`.
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
# Each model in its large and its small version.
MODELS: dict[str, tuple[Build, Build]] = {
    "gpt": (
        functools.partial(policies.language_model.build, sizes=policies.GPT),
        functools.partial(policies.language_model.build, sizes=SMALL_GPT),
    ),
    "n-grams": (policies.ngrams, functools.partial(policies.ngrams, rows=SMALL_ROWS)),
}


def shifted(build: Build, by: int) -> Build:
    """The model with later seeds."""
    return lambda seed: build(seed + by)


def parameters(trainer: policies.Trainer) -> int:
    """The number of parameters of a model."""
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
