"""Final loss with each codec, compared with dense gradients after as many steps.

    python benchmarks/compression_quality.py                  # the whole table
    python benchmarks/compression_quality.py dense sign@25    # some rows
    python benchmarks/compression_quality.py --optimizer sgd --steps 1000

A small GPT is trained on text that comes with Python, with data parallelism over four
simulated devices (see `data_parallel`). ``sign@25`` means 25 steps with dense
gradients, and then the codec sign. The learning rates are those that are best for dense
gradients with one seed: of 0.7, 1, 1.5, 3 and 5e-3 for Adam, and of 0.1, 0.3 and 1 for
SGD. The seed determines the initialisation and the batches.

Losses are those of the held-out text after the last step, in nats per character; "sd"
is the sample standard deviation over the seeds. A codec's distance is the difference
between its mean and that of dense gradients, in units of the latter's sd. The
differences per seed show how much of the distance is chance. Bytes are those that one
worker sends in the last step, including the small gradients that are always dense. The
bytes of a warm-up are not included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import data_parallel
import workloads
from data_parallel import Run, Trainer, spread

LEARNING_RATES: dict[data_parallel.Optimizer, float] = {"adam": 1e-3, "sgd": 0.3}
SETTINGS = (
    "dense", "bf16", "int8", "fp8", "int4", "sign", "threshold:ratio=0.01",
    "topk:ratio=0.01", "topk:ratio=0.05", "predicted:ratio=0.05",
    "powersgd:rank=4", "powersgd:rank=8", "powersgd:rank=16",
    "powersgd:rank=8,values=int8", "powersgd:rank=16,values=int8",
    "sign@25", "topk:ratio=0.01@25", "topk:ratio=0.1@25", "topk:ratio=0.25@25",
)  # fmt: skip


def losses_of(trainer: Trainer, setting: str, seeds: Sequence[int]) -> list[Run]:
    """The runs of a codec, with or without a warm-up."""
    codec, _, warm_up = setting.partition("@")
    return [trainer.run(codec, seed, warm_up=int(warm_up or 0)) for seed in seeds]


def describe(setting: str, runs: Sequence[Run], dense: Sequence[Run]) -> None:
    """Prints the row of one setting."""
    mean, deviation = spread([run.loss for run in runs])
    of_dense, sd = spread([run.loss for run in dense])
    pairs = [run.loss - other.loss for run, other in zip(runs, dense, strict=True)]
    nbytes = runs[0].last_nbytes
    distance = (mean - of_dense) / sd
    workloads.row(
        setting,
        f"{mean:.4f} ± {deviation:.4f}",
        "" if setting == "dense" else f"{distance:+.2f}",
        "" if setting == "dense" else ("yes" if distance <= 1 else "no"),
        ", ".join(f"{pair:+.4f}" for pair in pairs),
        f"{nbytes / 1e3:.1f}",
        f"{dense[0].last_nbytes / nbytes:.1f}",
    )


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", help="codecs, such as int4 or sign@25")
    parser.add_argument("--steps", type=int, default=data_parallel.STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", choices=tuple(LEARNING_RATES), default="adam")
    parser.add_argument("--learning-rate", type=float)
    given = parser.parse_args()
    seeds = range(given.seeds)
    rate = given.learning_rate or LEARNING_RATES[given.optimizer]
    sizes = data_parallel.SIZES._replace(learning_rate=rate)
    trainer = Trainer(given.steps, sizes, given.optimizer)
    started_s = time.perf_counter()
    dense = losses_of(trainer, "dense", seeds)
    workloads.row(
        "codec", "final loss ± sd", "distance, sd of dense", "within one sd",
        "difference by seed", "kB a step", "fewer bytes than dense",
    )  # fmt: skip
    workloads.row(*["---"] * 7)
    for setting in given.settings or SETTINGS:
        runs = dense if setting == "dense" else losses_of(trainer, setting, seeds)
        describe(setting, runs, dense)
    print(
        f"\n{data_parallel.parameters(trainer):,} parameters, {given.optimizer} at "
        f"{rate:g}, {given.steps} steps of "
        f"{trainer.sizes.batch * trainer.sizes.seq} characters, {given.seeds} seeds, "
        f"{time.perf_counter() - started_s:.0f} s."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
