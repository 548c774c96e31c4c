"""Statistical efficiency: the progress per row of a batch, relative to the base batch.

Let phi be the noise scale in rows. One step on a batch of M rows makes as much progress
as ``gain`` steps on a base batch of M0 rows, for which the learning rate was tuned
(Pollux, Qiao et al., OSDI 2021)::

    gain = (1 + phi / M0) / (1 + noise / signal)        efficiency = gain * M0 / M

``noise / signal`` is the noise-to-signal ratio of the gradient that the step applies.
Without codecs this ratio is phi / M. A codec adds to it the squared error of the
decoded sum of gradients, relative to the squared norm of the mean gradient. Let the
codec C be unbiased with ``E |C(g) - g|^2 = w |g|^2``. Let each of K workers send the
gradient g_i of M / K rows, and let ``sqr`` be the squared norm of the mean gradient.
Then ``E |g_i|^2 = sqr (1 + K phi / M)``. The squared error of the mean of the workers'
gradients, relative to ``sqr``, is

* ``w / K + w phi / M``, if the errors of workers are independent, as with stochastic
  rounding (``own``). The efficiency is (phi + M0) / ((1 + w) phi + (1 + w / K) M);
* ``w + w phi / M``, if all workers make the same choice, such as the same random
  elements (``shared``). The efficiency is (phi + M0) / ((1 + w) (phi + M)).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from autopar.compression.policies.policy import GradientReport
from autopar.errors import PlanError
from autopar.runtime.noise.averages import NoiseScale


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
