"""Chooses how a training goes on: its batch, microbatches and codecs.

A way to go on is worth its goodput: rows a second, times what a row is worth. Both are
uncertain, so ways are judged by the quotient of goodputs of which it is nearly sure
that it is reached. A way whose program must be compiled, or whose state must move,
first costs seconds in which nothing is trained. It is taken only where, until the next
change is expected, it still finishes more than the way that runs; of ways that finish
the rest of a job, the one is best that does so first. So a choice does not swing: gains
within what is uncertain are none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from autopar.errors import PlanError
from autopar.goodput.efficiency import EXACT, CodecError, efficiency
from autopar.goodput.throughput import Interval, Terms, Throughput

# Batches that come into question: this many for each doubling.
_EACH_DOUBLING = 2


@dataclasses.dataclass(frozen=True, slots=True)
class PhiRange:
    """A noise scale, and within what it lies.

    Attributes:
      phi: in rows.
      low: nearly sure that it is no lower.
      high: nor higher; infinite where noise may hide the mean gradient.
    """

    phi: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """Checks the order."""
        if not 0 <= self.low <= self.phi <= self.high:
            raise PlanError(
                f"PhiRange: expected 0 <= low <= phi <= high, got {self.low}, "
                f"{self.phi}, {self.high}."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """What a row with biased codecs is worth, beside one without: measured.

    Attributes:
      value: the most likely.
      low: nearly sure that it is no lower.
      high: nor higher.
    """

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to go on.

    Attributes:
      rows: of a batch.
      microbatches: into how many it is split.
      codecs: how gradients are sent, as ``compression=`` says it.
      terms: seconds that a plan predicts.
      error: of unbiased codecs.
      ratio: of biased ones.
      cost_s: seconds before the first step.
    """

    rows: int
    microbatches: int = 1
    codecs: str = "none"
    terms: Terms
    error: CodecError = EXACT
    ratio: Ratio = Ratio()
    cost_s: float = 0.0

    @property
    def name(self) -> str:
        """The way in a few words."""
        parts = f" in {self.microbatches} parts" if self.microbatches > 1 else ""
        return f"{self.rows} rows{parts}, codecs {self.codecs}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A way and what it is worth.

    Attributes:
      way: the way.
      step_s: seconds of a step.
      efficiency: progress of a row beside one of the base batch.
      goodput: rows of the base batch that a second's rows are worth.
      least: of its goodput over that of the way that runs, what is nearly sure.
      pays: work until the next change, or pace of the rest of the job, over that of
        the way that runs, nearly sure.
    """

    way: Way
    step_s: float
    efficiency: float
    goodput: float
    least: float
    pays: float

    def to_data(self) -> dict[str, Any]:
        """The way as a line of a ledger has it."""
        numbers = ("step_s", "efficiency", "goodput", "least", "pays")
        return {
            "rows": self.way.rows,
            "microbatches": self.way.microbatches,
            "codecs": self.way.codecs,
            "cost_s": json_number(self.way.cost_s),
            **{name: json_number(getattr(self, name)) for name in numbers},
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a comparison found.

    Attributes:
      chosen: the best; that of the running way if nothing pays.
      current: the way that runs.
      compared: all ways.
      horizon_s: seconds until the next change is expected.
    """

    chosen: Judged
    current: Judged
    compared: tuple[Judged, ...]
    horizon_s: float

    @property
    def changes(self) -> bool:
        """Whether another way than the running one was chosen."""
        return self.chosen is not self.current


def batches(base: int, most: int, split: int) -> tuple[int, ...]:
    """The batches that come into question, from the base batch to the largest.

    They are two for each doubling, each divisible by ``split``; the base batch is one
    in any case.

    >>> batches(32, 128, 8)
    (32, 48, 64, 88, 128)

    Args:
      base: rows of the base batch.
      most: rows of the largest.
      split: into how many parts a plan splits them.

    Raises:
      PlanError: the largest is smaller than the base batch.
    """
    if most < base or base < 1 or split < 1:
        raise PlanError(
            f"max_batch={most} must be at least base_batch={base}, and both positive."
        )
    found = {base, most // split * split}
    count = math.ceil(_EACH_DOUBLING * math.log2(most / base))
    for k in range(1, count):
        rows = base * 2 ** (k / _EACH_DOUBLING)
        found.add(int(rows / split + 0.5) * split)
    sizes = sorted(rows for rows in found if base <= rows <= most)
    # Two may have been rounded to one, which leaves a doubling without a middle.
    middles = [
        max((a + b) // 2 // split * split, a // split * split + split)
        for a, b in itertools.pairwise(sizes)
        if b >= 2 * a and b - a > split
    ]
    return tuple(sorted({*sizes, *middles}))


def decide(
    current: Way,
    others: Sequence[Way],
    times: Throughput,
    phi: PhiRange,
    *,
    base_batch: int,
    horizon_s: float,
    sigmas: float,
    rest_s: float = math.inf,
    most_gain: float = math.inf,
) -> Decision:
    """Compares ways to go on with the one that runs.

    Args:
      current: the way that runs, with a cost of 0.
      others: the others.
      times: predicts seconds of steps.
      phi: the noise scale.
      base_batch: rows of the base batch.
      horizon_s: seconds until the next change is expected.
      sigmas: standard deviations of step times within which a gain is none.
      rest_s: seconds that the rest of the job takes the way that runs.
      most_gain: no step is worth more steps with the base batch.
    """

    current_s = times.step_s(current.terms).seconds

    def judge(way: Way, over: Interval) -> Judged:
        seconds = current_s * over.seconds
        worth = _efficiency(way, phi.phi, base_batch, most_gain) * way.ratio.value
        least = 1.0
        if way is not current:
            _, slowest = over.bounds(sigmas)
            least = _least(way, current, slowest, phi, base_batch, most_gain)
        left = max(0.0, 1.0 - way.cost_s / horizon_s) if horizon_s > 0 else 0.0
        if rest_s > 0:
            left = min(left, 1.0 / (1.0 + way.cost_s * least / rest_s))
        return Judged(
            way=way,
            step_s=seconds,
            efficiency=worth,
            goodput=way.rows / seconds * worth,
            least=least,
            pays=least * left if way is not current else 1.0,
        )

    ratios = times.ratios([way.terms for way in others], current.terms)
    runs = judge(current, Interval(1.0, 0.0))
    found = (runs, *map(judge, others, ratios))
    best = max(found, key=lambda x: x.pays)
    return Decision(best if best.pays > 1.0 else runs, runs, found, horizon_s)


def _least(
    way: Way,
    current: Way,
    slowest: float,
    phi: PhiRange,
    base_batch: int,
    most_gain: float,
) -> float:
    """The quotient of goodputs that is nearly sure.

    A step of the way takes at most ``slowest`` times as long, nearly surely.
    """
    rows = min(
        _efficiency(way, x, base_batch, most_gain)
        / _efficiency(current, x, base_batch, most_gain)
        for x in (phi.low, phi.phi, phi.high)
    )
    kept = 1.0
    if way.codecs != current.codecs:
        kept = way.ratio.low / current.ratio.high
    return way.rows / current.rows / slowest * rows * kept


def _efficiency(way: Way, phi: float, base_batch: int, most_gain: float) -> float:
    """At least a trace, so that quotients stay numbers."""
    error = way.error
    if math.isinf(error.own + error.shared):
        return 1e-12
    return max(efficiency(phi, way.rows, base_batch, error, most_gain), 1e-12)


def json_number(number: float) -> float | None:
    """A number that JSON can hold; None: it is not finite."""
    return number if math.isfinite(number) else None
