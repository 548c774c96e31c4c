"""Bytes of L-GreCo's codecs within one family, and of codecs chosen across families.

    python benchmarks/lgreco_comparison.py                  # the whole table
    python benchmarks/lgreco_comparison.py --rank 16        # another reference

A small GPT is trained on text that comes with Python, with data parallelism over four
simulated devices (see `data_parallel`). Every run except the dense one begins with
dense gradients, and goes on with PowerSGD of the reference rank. In the last ten of
these steps it averages samples: a worker's gradients plus residuals. From the samples
it chooses a codec for each gradient once, and keeps this codec to the end:

- L-GreCo (arXiv 2210.17357) chooses the fewest bytes among PowerSGD's ranks from half
  to twice the reference. The sum of the L2 norms of the errors is at most that of the
  reference (`autopar.compression.policies.LGreCo`). Factors are float32 as published,
  and also int8, to separate the effect of the factors' dtype;
- ours chooses the fewest bytes among all families. The error is at most that of the
  reference in the metric of Adam: squared relative errors, weighted by the number of
  elements (`autopar.compression.policies.AcrossFamilies`).

Losses are those of the held-out text after the last step, in nats per character.
"distance" is the difference of the means from dense gradients, in units of the latter's
sample standard deviation over the seeds. Bytes are those that one worker sends in a
step after the choice, including small gradients that are always dense.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import data_parallel
import numpy as np
import workloads
from data_parallel import Run, Trainer, spread

from autopar.compression.codecs.lowrank import PowerSGD
from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.compression.policies import AcrossFamilies, LGreCo, Probe
from autopar.compression.policies.probe import (
    QUANTISERS,
    powersgd_family,
    topk_family,
)

WARM_UP = 25
CHOOSE_AT = 50
SAMPLED = 10
# With this bandwidth the fastest choice is the one with the fewest bytes; any other
# value would do.
BANDWIDTH_BYTES_PER_S = 100e6 / 8


@dataclasses.dataclass(slots=True)
class Chooser:
    """Takes samples during a run, and changes the codecs once.

    Attributes:
      trainer: trainer of the run.
      policy: chooses.
      codec: codec of the steps before the choice.
      seed: seed of the run.
      chosen: gradient -> chosen codec, for the gradients that the policy changes.
      sums: sums of the samples.
    """

    trainer: Trainer
    policy: LGreCo | AcrossFamilies
    codec: str
    seed: int
    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    sums: dict[str, np.ndarray] = dataclasses.field(
        default_factory=dict[str, np.ndarray]
    )

    def __call__(self, k: int, state: Any) -> None:
        """Called before step ``k``; see `data_parallel.Hook`."""
        if CHOOSE_AT - SAMPLED <= k < CHOOSE_AT:
            self._sample(k, state)
        elif k == CHOOSE_AT:
            self.chosen = self.policy.choose(self.sums)
            self.trainer.compiled(self.codec).recode(self.chosen)

    def _sample(self, k: int, state: Any) -> None:
        """Adds the first worker's gradients and residuals, as in L-GreCo's published
        code.
        """
        step = self.trainer.compiled(self.codec)
        batch = self.trainer.batch(self.seed, k)
        kept = step.compression_state["gradients"]
        for name, parts in self.trainer.partial_gradients(state, batch).items():
            residual = kept[name]["residual"]
            sample = parts[0] if isinstance(residual, tuple) else parts[0] + residual[0]
            old = self.sums.get(name, np.float32(0))
            self.sums[name] = old + np.asarray(sample) / SAMPLED


def chosen_runs(
    trainer: Trainer,
    policy: LGreCo | AcrossFamilies,
    codec: str,
    seeds: Sequence[int],
) -> tuple[list[Run], list[Mapping[str, str]]]:
    """A run for each seed, and the codecs chosen in it."""
    runs: list[Run] = []
    choices: list[Mapping[str, str]] = []
    for seed in seeds:
        chooser = Chooser(trainer, policy, codec, seed)
        runs.append(trainer.run(codec, seed, warm_up=WARM_UP, hook=chooser))
        choices.append(chooser.chosen)
    return runs, choices


def describe(name: str, runs: Sequence[Run], dense: Sequence[Run]) -> float:
    """Prints the row of a method; returns its bytes."""
    mean, deviation = spread([run.loss for run in runs])
    of_dense, sd = spread([run.loss for run in dense])
    nbytes = sum(run.last_nbytes for run in runs) / len(runs)
    workloads.row(
        name,
        f"{mean:.4f} ± {deviation:.4f}",
        f"{(mean - of_dense) / sd:+.2f}",
        ", ".join(
            f"{run.loss - other.loss:+.4f}"
            for run, other in zip(runs, dense, strict=True)
        ),
        f"{nbytes / 1e3:.1f}",
        f"{dense[0].last_nbytes / nbytes:.1f}",
    )
    return nbytes


def with_int8_factors(family: Sequence[str]) -> tuple[str, ...]:
    """The same ranks, with factors in int8."""
    codecs = [parse_codec(text) for text in family]
    assert all(isinstance(codec, PowerSGD) for codec in codecs)
    return tuple(
        format_codec(dataclasses.replace(codec, values="int8")) for codec in codecs
    )


def policies_of(rank: int, options: Sequence[str]) -> dict[str, Any]:
    """Name -> the method that is compared."""
    probe = Probe(data_parallel.DEVICES)
    reference = f"powersgd:rank={rank}"
    family = powersgd_family(rank)
    in_int8 = with_int8_factors(family)
    wider = with_int8_factors(powersgd_family(rank, gamma=0.25))
    return {
        "L-GreCo": LGreCo(probe=probe, reference=reference, options=family),
        "L-GreCo, int8 factors": LGreCo(
            probe=probe, reference=reference, options=in_int8
        ),
        "ours": AcrossFamilies(
            probe=probe,
            bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S,
            reference=reference,
            options=tuple(dict.fromkeys((*family, *wider, *options))),
        ),
    }


def compare(trainer: Trainer, rank: int, options: Sequence[str], seeds: range) -> None:
    """Prints the table and the chosen codecs."""
    reference = f"powersgd:rank={rank}"
    dense = [trainer.run("dense", seed) for seed in seeds]
    uniform = [trainer.run(reference, seed, warm_up=WARM_UP) for seed in seeds]
    workloads.row(
        "method", "final loss ± sd", "distance, sd of dense", "difference by seed",
        "kB a step", "fewer bytes than dense",
    )  # fmt: skip
    workloads.row(*["---"] * 6)
    describe("dense", dense, dense)
    describe(f"{reference} everywhere", uniform, dense)
    nbytes: dict[str, float] = {}
    all_choices: dict[str, list[Mapping[str, str]]] = {}
    for name, policy in policies_of(rank, options).items():
        runs, all_choices[name] = chosen_runs(trainer, policy, reference, seeds)
        nbytes[name] = describe(name, runs, dense)
    print()
    for name in list(nbytes)[:-1]:
        ratio = nbytes[name] / nbytes["ours"]
        print(f"ours sends {ratio:.2f} times fewer bytes than {name}.")
    print()
    workloads.row("gradient", *all_choices)
    workloads.row(*["---"] * (1 + len(all_choices)))
    for gradient in sorted(all_choices["ours"][0]):
        counts = [Counter(c[gradient] for c in found) for found in all_choices.values()]
        cells = [", ".join(f"{n} {text}" for text, n in c.items()) for c in counts]
        workloads.row(gradient.removeprefix("state/params/"), *cells)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, default=8, help="of the reference")
    parser.add_argument("--steps", type=int, default=data_parallel.STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--options",
        nargs="*",
        default=[*QUANTISERS, *topk_family((0.01, 0.1))],
        help="codecs of other families that ours may choose",
    )
    given = parser.parse_args()
    started_s = time.perf_counter()
    trainer = Trainer(given.steps)
    compare(trainer, given.rank, given.options, range(given.seeds))
    print(
        f"\n{data_parallel.parameters(trainer):,} parameters, {given.steps} steps of "
        f"{trainer.sizes.batch * trainer.sizes.seq} characters, {given.seeds} seeds, "
        f"{time.perf_counter() - started_s:.0f} s."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
