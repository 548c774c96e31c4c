"""Chooses how a training continues: its batch, microbatches and codecs.

A *way* (`Way`) is one choice of batch size, number of microbatches and codecs. The
*running* way is the choice with which the job trains now. The value of a way is its
goodput: rows per second times efficiency, the progress per row. Rows per second and
efficiency are estimates with errors. Therefore `decide` compares a bound: a way's
goodput divided by the running way's goodput is almost surely larger than this bound. A
change to a way costs seconds without training, because a program must be compiled or
the state must move. `decide` chooses a way only if it finishes more work than the
running way until the next expected change of devices, with these seconds included. If
the job ends before that change, the way that finishes the job first is best. A gain
that is smaller than its uncertainty does not count, so that the choice does not
oscillate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.compression.policies.policy import GradientReport
from autopar.errors import PlanError
from autopar.goodput.throughput import Interval, Terms, Throughput
from autopar.runtime.noise.averages import NoiseScale

# Statistical efficiency: the progress per row of a batch, relative to the base batch.
#
# Let phi be the noise scale in rows. One step on a batch of M rows makes as much
# progress as ``gain`` steps on a base batch of M0 rows, for which the learning rate
# was tuned (Pollux, Qiao et al., OSDI 2021)::
#
#     gain = (1 + phi / M0) / (1 + noise / signal)        efficiency = gain * M0 / M
#
# ``noise / signal`` is the noise-to-signal ratio of the gradient that the step
# applies. Without codecs this ratio is phi / M. A codec adds to it the squared error
# of the decoded sum of gradients, relative to the squared norm of the mean gradient.
# Let the codec C be unbiased with ``E |C(g) - g|^2 = w |g|^2``. Let each of K workers
# send the gradient g_i of M / K rows, and let ``sqr`` be the squared norm of the mean
# gradient. Then ``E |g_i|^2 = sqr (1 + K phi / M)``. The squared error of the mean of
# the workers' gradients, relative to ``sqr``, is
#
# * ``w / K + w phi / M``, if the errors of workers are independent, as with stochastic
#   rounding (``own``). The efficiency is (phi + M0) / ((1 + w) phi + (1 + w / K) M);
# * ``w + w phi / M``, if all workers make the same choice, such as the same random
#   elements (``shared``). The efficiency is (phi + M0) / ((1 + w) (phi + M)).


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodecError:
    """Squared error of unbiased codecs, relative to the gradient's squared norm.

    Attributes:
      own: w (module docstring) of codecs whose errors are independent on each worker.
      shared: w of codecs whose error is the same on all workers.
      workers: number of workers, K.
    """

    own: float = 0.0
    shared: float = 0.0
    workers: int = 1

    def __post_init__(self) -> None:
        """Checks ranges."""
        if not (self.own >= 0 and self.shared >= 0 and self.workers >= 1):
            raise PlanError(
                "CodecError: expected errors of at least 0 and at least one worker, "
                f"got own={self.own}, shared={self.shared}, workers={self.workers}."
            )

    def of_sqr(self, phi_over_batch: float) -> float:
        """The squared error that codecs add to the mean gradient, relative to ``sqr``.

        Args:
          phi_over_batch: noise scale in rows, divided by the rows of the batch, phi /
            M.
        """
        own = self.own * (1 / self.workers + phi_over_batch)
        return own + self.shared * (1 + phi_over_batch)


EXACT = CodecError()


def gain(
    phi: float,
    batch: float,
    base_batch: float,
    error: CodecError = EXACT,
    most: float = math.inf,
) -> float:
    """The number of base-batch steps that make as much progress as one step.

    Args:
      phi: the noise scale of uncompressed gradients, in rows; infinite if the mean
        gradient cannot be distinguished from zero.
      batch: rows of the batch, M.
      base_batch: rows of the base batch, M0.
      error: the error of the codecs.
      most: upper limit of the result.

    >>> gain(100.0, 400, 100)
    1.6

    Raises:
      PlanError: a number is out of its range.
    """
    _check(phi, batch, base_batch)
    if math.isinf(phi):
        noise = 1 + error.own + error.shared
        return min(batch / base_batch / noise, most)
    signal = 1 + phi / batch + error.of_sqr(phi / batch)
    return min((1 + phi / base_batch) / signal, most)


def efficiency(
    phi: float,
    batch: float,
    base_batch: float,
    error: CodecError = EXACT,
    most: float = math.inf,
) -> float:
    """Progress per row in a batch of M rows, divided by that with the base batch.

    Args:
      phi: the noise scale, as for `gain`.
      batch: rows of the batch, M.
      base_batch: rows of the base batch, M0.
      error: the error of the codecs.
      most: upper limit of the gain from which the efficiency follows.

    >>> efficiency(100.0, 400, 100)
    0.4

    Raises:
      PlanError: a number is out of its range.
    """
    return gain(phi, batch, base_batch, error, most) * base_batch / batch


def goodput(
    rows_per_s: float,
    phi: float,
    batch: float,
    base_batch: float,
    error: CodecError = EXACT,
) -> float:
    """Progress per second: rows of the base batch that would make the same progress.

    Args:
      rows_per_s: rows processed per second.
      phi: the noise scale, as for `gain`.
      batch: rows of the batch, M.
      base_batch: rows of the base batch, M0.
      error: the error of the codecs.
    """
    return rows_per_s * efficiency(phi, batch, base_batch, error)


def codec_error(
    scale: NoiseScale, reports: Mapping[str, GradientReport], workers: int
) -> CodecError:
    """The squared error of unbiased codecs, measured during training.

    The telemetry holds each worker's independent error. All workers share the rest of
    the measured error of the sum: they draw the same elements, or the sum is rounded
    once more.

    Args:
      scale: `ParallelStep.noise_scale`.
      reports: `ParallelStep.telemetry`; gradients without a report are exact.
      workers: number of workers that send gradients, K.

    Raises:
      PlanError: no step was measured yet, or a gradient is not finite.
    """
    squares = [(r.relative_error * r.norm) ** 2 for r in reports.values()]
    norms = [r.norm**2 for r in reports.values()]
    if math.isnan(scale.sqr) or not math.isfinite(sum(squares) + sum(norms)):
        raise PlanError(
            "codec_error: no step with finite gradients was measured yet. Call it "
            "after steps with noise_scale=True and codecs."
        )
    own = sum(squares) / sum(norms) if sum(norms) else 0.0
    noise = scale.var / scale.rows
    rest = scale.excess - own * (scale.sqr / workers + noise)
    energy = scale.sqr + noise
    return CodecError(
        own=own, shared=max(0.0, rest / energy) if energy else 0.0, workers=workers
    )


def _check(phi: float, batch: float, base_batch: float) -> None:
    if not (phi >= 0 and 0 < batch < math.inf and 0 < base_batch < math.inf):
        raise PlanError(
            "efficiency: expected a noise scale of at least 0 and batches of more than "
            f"0 rows, got phi={phi}, batch={batch}, base_batch={base_batch}."
        )


# The number of candidate batch sizes in each doubling of the batch size.
_EACH_DOUBLING = 2


@dataclasses.dataclass(frozen=True, slots=True)
class PhiRange:
    """An estimate of the noise scale of gradients, with a lower and an upper bound.

    Attributes:
      phi: the most likely noise scale, in rows.
      low: almost sure lower bound.
      high: almost sure upper bound; infinite if the noise may be so large that the mean
        gradient cannot be distinguished from zero.
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
    """Measured progress per row with biased codecs, divided by that without codecs.

    Attributes:
      value: the most likely ratio.
      low: almost sure lower bound.
      high: almost sure upper bound.
    """

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A choice of batch size, number of microbatches and codecs to train on with.

    Attributes:
      rows: rows of a batch.
      microbatches: number of microbatches into which a batch is split.
      codecs: the codecs of gradients, as a text of the option ``compression=``.
      terms: seconds of a step, as a plan predicts them.
      error: the squared error that unbiased codecs add to the gradient.
      ratio: progress per row with biased codecs, divided by that without codecs; None
        for unbiased codecs.
      cost_s: seconds without training before the first step in this way.
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
        """A short name of the way, for logs."""
        parts = f" in {self.microbatches} parts" if self.microbatches > 1 else ""
        return f"{self.rows} rows{parts}, codecs {self.codecs}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A way with its step time, efficiency and goodput.

    Attributes:
      way: the way.
      step_s: seconds of a step.
      efficiency: progress per row, divided by that with the base batch.
      goodput: progress per second, in rows of the base batch.
      least: almost sure lower bound on this goodput divided by the running way's
        goodput.
      pays: ``least`` with the cost of the change included. The value is the smaller of
        two ratios to the running way: of the work done until the next expected change,
        and of the speed over the rest of the job. The change pays off if it is above 1.
    """

    way: Way
    step_s: float
    efficiency: float
    goodput: float
    least: float
    pays: float

    def to_data(self) -> dict[str, Any]:
        """The way and its value as data for a line of a ledger."""
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
    """The result of a comparison of ways.

    Attributes:
      chosen: the best way; the running way if no change pays off.
      current: the running way.
      compared: all compared ways, including the running way.
      horizon_s: seconds until the next expected change of devices.
    """

    chosen: Judged
    current: Judged
    compared: tuple[Judged, ...]
    horizon_s: float

    @property
    def changes(self) -> bool:
        """Whether the chosen way is not the running way."""
        return self.chosen is not self.current


def batches(base: int, most: int, split: int) -> tuple[int, ...]:
    """The candidate batches, from the base batch to the largest.

    There are two candidates per doubling of the batch. All candidates except the base
    batch are divisible by ``split``.

    >>> batches(32, 128, 8)
    (32, 48, 64, 88, 128)

    Args:
      base: rows of the base batch.
      most: rows of the largest batch.
      split: number of parts into which a plan splits the rows.

    Raises:
      PlanError: the largest batch is smaller than the base batch.
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
    # Rounding to multiples of `split` may have made two candidates equal. Other
    # candidates between their neighbours are then added.
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
    """Compares the running way with other choices of batch, microbatches and codecs.

    Args:
      current: the running way, with a cost of 0.
      others: the other ways.
      times: predicts seconds of steps.
      phi: the noise scale.
      base_batch: rows of the base batch.
      horizon_s: seconds until the next expected change of devices.
      sigmas: number of standard deviations on each side of a predicted step time that
        its uncertainty interval covers.
      rest_s: seconds that the rest of the job takes with the running way.
      most_gain: upper limit of a step's gain: how many steps with the base batch make
        as much progress as one step (`autopar.goodput.gain`).
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
    """An almost sure lower bound on a way's goodput divided by the running way's.

    ``slowest`` is an almost sure upper bound on the way's step time divided by the
    running way's step time.
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
    """The efficiency of a way.

    The result is at least a tiny positive number, because callers divide by it.
    """
    error = way.error
    if math.isinf(error.own + error.shared):
        return 1e-12
    return max(efficiency(phi, way.rows, base_batch, error, most_gain), 1e-12)


def json_number(number: float) -> float | None:
    """The number if it is finite, else None, because JSON has no infinity."""
    return number if math.isfinite(number) else None
