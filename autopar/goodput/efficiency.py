"""Statistical efficiency: the progress of a row in a batch, against the base batch.

With noise scale phi, a step on a batch of M rows moves the loss as far as a batch of M0
rows does in ``gain`` steps (Pollux, Qiao et al., OSDI 2021)::

    gain = (1 + phi / M0) / (1 + noise / signal)        efficiency = gain * M0 / M

``noise / signal`` is that of the gradient which the step applies. Without codecs it is
phi / M. A codec adds the squared error of the sum that it makes. Let it be unbiased,
``E |C(g) - g|^2 = w |g|^2``, and let K workers send g_i of M / K rows each. Then
``E |g_i|^2 = sqr (1 + K phi / M)``, and the error of their mean is

* ``w / K + w phi / M`` of ``sqr``, if each worker errs by itself, as in stochastic
  rounding: ``own``. The efficiency is (phi + M0) / ((1 + w) phi + (1 + w / K) M);
* ``w + w phi / M`` of ``sqr``, if all make the same choice, as where the same elements
  are drawn: ``shared``. The efficiency is (phi + M0) / ((1 + w) (phi + M)).
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
    """How much unbiased codecs err, as parts of the squared norm of what they send.

    Attributes:
      own: error that each worker makes by itself, w.
      shared: error that all workers make together.
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
        """The squared error of the applied gradient, as a part of ``sqr``.

        Args:
          phi_over_batch: phi / M.
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
    """Steps with the base batch that one step is worth.

    Args:
      phi: the noise scale in rows, of uncompressed gradients; infinite where noise
        hides the mean gradient.
      batch: rows of the batch, M.
      base_batch: rows of the base batch, M0.
      error: of the codecs.
      most: no larger gain is returned.

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
    """Progress of a row in a batch, as a part of its progress in the base batch.

    Args:
      phi: as for `gain`.
      batch: rows of the batch, M.
      base_batch: rows of the base batch, M0.
      error: of the codecs.
      most: no gain counts for more.

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
    """Rows of the base batch that a second's rows are worth.

    Args:
      rows_per_s: rows that are processed in a second.
      phi: as for `gain`.
      batch: rows of the batch, M.
      base_batch: rows of the base batch, M0.
      error: of the codecs.
    """
    return rows_per_s * efficiency(phi, batch, base_batch, error)


def codec_error(
    scale: NoiseScale, reports: Mapping[str, GradientReport], workers: int
) -> CodecError:
    """The error of unbiased codecs, from what was measured while training.

    What each worker loses is in the telemetry. What the sum loses beyond that is
    shared: elements drawn alike on all workers, or a sum that is rounded once more.

    Args:
      scale: `ParallelStep.noise_scale`.
      reports: `ParallelStep.telemetry`; gradients that are not in it are exact.
      workers: number of workers that send, K.

    Raises:
      PlanError: nothing was measured yet, or a gradient is not finite.
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
