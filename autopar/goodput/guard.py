"""Caps the gain of steps where a gain above 1 makes the loss rise.

The gain of a step is the number of steps with the base batch that make as much
progress. The formula of the gain uses the noise of gradients, but not the curvature of
the loss. Steps that are too large for the curvature make the loss rise, and may make
the training diverge. Therefore the guard watches losses while the gain is above 1.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# The most losses that are kept, and the fewest losses that define a limit.
_KEPT, _FEWEST = 16, 8
# A loss is an outlier if it lies `_FAR` standard deviations above the median.
# `_IN_A_ROW` successive outliers are an alarm. (One in a thousand normal numbers lies
# more than 3 standard deviations above the mean.)
_FAR, _IN_A_ROW = 6.0, 2
# The standard deviation of a normal distribution over its median absolute deviation.
_SIGMA = 1.4826
# After an alarm, losses are not judged for this number of steps.
_REST = 10
# The cap is doubled after this number of steps without an alarm. The number is 4 times
# as large after each further alarm.
_CALM, _LONGER = 256, 4


@dataclasses.dataclass(frozen=True, slots=True)
class LossGuard:
    """Recent losses and the cap of the gain; `with_step` returns a new guard.

    Attributes:
      most: the largest allowed gain.
      alarms: number of alarms so far.
      losses: recent losses, without outliers.
      far: number of successive outliers up to the last step.
      rest: number of following steps that are not judged.
      calm: steps since the last alarm or the last doubling of the cap.
    """

    most: float = math.inf
    alarms: int = 0
    losses: tuple[float, ...] = ()
    far: int = 0
    rest: int = 0
    calm: int = 0

    @property
    def limit(self) -> float:
        """The limit above which a loss is an outlier."""
        if len(self.losses) < _FEWEST:
            return math.inf
        usual = statistics.median(self.losses)
        spread = statistics.median(abs(x - usual) for x in self.losses)
        # Equal losses have no spread. The second term ignores rounding errors.
        return usual + max(_FAR * _SIGMA * spread, 1e-3 * abs(usual))

    def with_step(self, loss: float, gain: float) -> LossGuard:
        """Adds a step.

        Args:
          loss: the loss of the step; a loss that is not finite is an outlier.
          gain: the gain of the step; a gain of at most 1 never causes an alarm.
        """
        if self.rest:
            return dataclasses.replace(self, rest=self.rest - 1)
        if gain > 1 and not loss <= self.limit:
            far = self.far + 1
            if far < _IN_A_ROW:
                return dataclasses.replace(self, far=far)
            return dataclasses.replace(
                self,
                most=max(1.0, gain / 2),
                alarms=self.alarms + 1,
                far=0,
                rest=_REST,
                calm=0,
            )
        losses = (*self.losses, loss)[-_KEPT:] if math.isfinite(loss) else self.losses
        calm, most = self.calm + 1, self.most
        if math.isfinite(most) and calm >= _CALM * _LONGER ** (self.alarms - 1):
            calm, most = 0, 2 * most
        return dataclasses.replace(self, losses=losses, far=0, calm=calm, most=most)

    def to_data(self) -> dict[str, Any]:
        """The guard as JSON can hold it."""
        most = self.most if math.isfinite(self.most) else None
        return {**dataclasses.asdict(self), "most": most, "losses": list(self.losses)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LossGuard:
        """The guard from the result of `to_data`."""
        return cls(
            most=math.inf if data["most"] is None else float(data["most"]),
            alarms=int(data["alarms"]),
            losses=tuple(data["losses"]),
            far=int(data["far"]),
            rest=int(data["rest"]),
            calm=int(data["calm"]),
        )


def loss_in(result: Any, *, alone: bool = True) -> float | None:
    """The loss among the results of a step; None if it cannot be identified.

    The loss is the only floating-point scalar, or the only one whose name contains
    "loss".

    Args:
      result: the results of a step, any tree.
      alone: whether this is the only process. Otherwise the loss must be an array that
        is replicated on all devices of all processes, because all processes must see
        the same loss.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(result)
    found = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in leaves
        if np.ndim(leaf) == 0 and np.issubdtype(np.asarray(leaf).dtype, np.floating)
    }
    named = [leaf for name, leaf in found.items() if "loss" in name.lower()]
    chosen = list(found.values()) if len(found) == 1 else named
    if len(chosen) != 1:
        return None
    if not alone:
        array = chosen[0]
        shared = isinstance(array, jax.Array) and not array.is_fully_addressable
        if not (shared and array.is_fully_replicated):
            return None
    return float(chosen[0])


def finite(result: Any) -> bool:
    """Whether all floating-point results of a step are finite."""
    found = [np.asarray(x) for x in jax.tree.leaves(result)]
    kinds = [x for x in found if np.issubdtype(x.dtype, np.floating)]
    return all(bool(np.isfinite(x).all()) for x in kinds)
