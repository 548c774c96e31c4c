"""Limits the gain that scales the learning rate, if large batches make the loss rise.

The gain of a step is the number of steps with the base batch that make as much progress
(`autopar.goodput.gain`). The learning rate is scaled by the gain. The
formula of the gain uses the noise of gradients, but not the curvature of the loss. An
update that is too large for the curvature makes the loss rise, and may make the
training diverge. Therefore the guard watches the losses of steps while the gain is
above 1. If they rise, the guard lowers an upper limit of the gain.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# The number of recent losses to keep, and the number of losses that are needed before a
# loss can count as an outlier.
_KEPT, _FEWEST = 16, 8
# A loss is an outlier if it lies `_FAR` standard deviations above the median of the
# recent losses. `_IN_A_ROW` successive outliers are an alarm, which lowers the limit of
# the gain. (One in a thousand normal numbers lies more than 3 standard deviations above
# the mean.)
_FAR, _IN_A_ROW = 6.0, 2
# For a normal distribution: standard deviation divided by median absolute deviation.
_SIGMA = 1.4826
# For this number of steps after an alarm, no loss counts as an outlier.
_REST = 10
# The limit of the gain is doubled after `_CALM` steps without an alarm. Each further
# alarm multiplies this number of steps by `_LONGER`.
_CALM, _LONGER = 256, 4


@dataclasses.dataclass(frozen=True, slots=True)
class LossGuard:
    """Recent losses and the limit of the gain; `with_step` returns a new guard.

    Attributes:
      most: the largest allowed gain.
      alarms: number of alarms so far.
      losses: recent losses, without outliers.
      far: number of successive outliers among the losses, up to the last step.
      rest: for this number of next steps, no loss counts as an outlier.
      calm: steps since the last alarm, or since the limit of the gain was last doubled.
    """

    most: float = math.inf
    alarms: int = 0
    losses: tuple[float, ...] = ()
    far: int = 0
    rest: int = 0
    calm: int = 0

    @property
    def limit(self) -> float:
        """The loss above which a new loss is an outlier."""
        if len(self.losses) < _FEWEST:
            return math.inf
        usual = statistics.median(self.losses)
        spread = statistics.median(abs(x - usual) for x in self.losses)
        # Equal losses have a spread of 0. Because of the second operand of `max`,
        # rounding errors then do not count as outliers.
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
        """The guard as data that JSON can hold."""
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
    """The loss among a step's results; None if no result is surely the loss.

    The loss is the only floating-point scalar, or else the only floating-point scalar
    whose name contains "loss".

    Args:
      result: the results of a step, any tree.
      alone: whether this process is the only one. If not, the loss must be an array
        that is replicated on all devices of all processes, because all processes must
        see the same loss.
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
