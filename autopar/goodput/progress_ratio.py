"""The progress of biased codecs with error feedback, measured by losses.

A codec that is biased has no formula: what it leaves out is sent later, and how much
that costs depends on the loss. So it is measured. Two trainings see the same rows in
the same order, one with the codec and one without. Where both reach the same loss, the
quotient of their rows is the progress ratio.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar.errors import PlanError

# Loss levels at which two trainings are compared.
_LEVELS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressRatio:
    """Progress of a row with a codec, as a part of that without.

    Attributes:
      value: the mean over pairs of trainings.
      stderr: its standard error; infinite for one pair, which says nothing of it.
      pairs: number of pairs.
    """

    value: float
    stderr: float
    pairs: int

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, by Student's t."""
        if self.pairs < 2:
            return (-math.inf, math.inf)
        half = _T95[min(self.pairs - 1, len(_T95)) - 1] * self.stderr
        return self.value - half, self.value + half


# Student's t at 97.5 % for 1, 2 ... degrees of freedom (NIST handbook, 1.3.6.7.2).
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def progress_ratio(
    dense: Sequence[Sequence[float]], coded: Sequence[Sequence[float]]
) -> ProgressRatio:
    """Compares pairs of trainings on the same rows.

    Args:
      dense: losses of the steps of each training without the codec.
      coded: of each training with it, with the same batches.

    Raises:
      PlanError: the numbers of trainings differ, a loss is not finite, or two trainings
        have no loss in common.
    """
    if len(dense) != len(coded) or not dense:
        raise PlanError(
            f"progress_ratio: {len(dense)} trainings without the codec and "
            f"{len(coded)} with it; expected as many of each, and at least one."
        )
    found = [_ratio(a, b) for a, b in zip(dense, coded, strict=True)]
    spread = float(np.std(found, ddof=1)) if len(found) > 1 else math.inf
    return ProgressRatio(
        float(np.mean(found)), spread / math.sqrt(len(found)), len(found)
    )


def _ratio(dense: Sequence[float], coded: Sequence[float]) -> float:
    """The mean over loss levels that both reach."""
    one, other = _lowest(dense), _lowest(coded)
    high, low = min(one[0], other[0]), max(one[-1], other[-1])
    if not low < high:
        raise PlanError(
            "progress_ratio: two trainings have no loss in common: one goes from "
            f"{one[0]:.4g} to {one[-1]:.4g}, the other from {other[0]:.4g} to "
            f"{other[-1]:.4g}. Train longer."
        )
    # Not the first levels, which one step may cross.
    levels = np.linspace(high, low, _LEVELS + 1)[_LEVELS // 4 :]
    quotients = [steps_to(one, level) / steps_to(other, level) for level in levels]
    return float(np.mean(quotients))


def _lowest(losses: Sequence[float]) -> np.ndarray:
    found = np.asarray(losses, float)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise PlanError("progress_ratio: expected losses of steps, all of them finite.")
    return np.minimum.accumulate(found)


def steps_to(losses: Sequence[float] | np.ndarray, level: float) -> float:
    """Steps until losses that never rise reach a level, between steps linearly.

    Args:
      losses: of steps, none above the one before.
      level: at most the first loss; infinity is returned for one below the last.
    """
    values = np.asarray(losses, float)
    below = np.flatnonzero(values <= level)
    if not below.size:
        return math.inf
    k = int(below[0])
    if k == 0:
        return 1.0
    before, after = values[k - 1], values[k]
    return k + float((before - level) / (before - after))
