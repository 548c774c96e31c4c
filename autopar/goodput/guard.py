"""Caps the gain of steps where it makes the loss rise.

A gain says how many steps with the base batch a larger step is worth. It knows the
noise of gradients and not the curvature of the loss: steps that are too large for that
make the loss rise, and within some steps past all bounds. So losses are watched while
the gain is over 1.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# Losses that are kept, and the fewest that say what is usual.
_KEPT, _FEWEST = 16, 8
# A loss is far off that is so many standard deviations above the usual; so many in a
# row are an alarm. One in a thousand normal numbers is beyond 3.
_FAR, _IN_A_ROW = 6.0, 2
# Of a normal distribution the standard deviation over the median deviation.
_SIGMA = 1.4826
# Steps in which a smaller gain may show before it is judged.
_REST = 10
# Steps after which a cap is doubled, after the first alarm; 4 times as many after each.
_CALM, _LONGER = 256, 4


@dataclasses.dataclass(frozen=True, slots=True)
class LossGuard:
    """The losses of late, and the cap; `with_step` returns another one.

    Attributes:
      most: no larger gain is allowed.
      alarms: how often the loss rose.
      losses: the usual ones of late.
      far: how many of the last steps in a row were far off.
      rest: steps for which nothing is judged.
      calm: steps since the last alarm, or since the cap was doubled.
    """

    most: float = math.inf
    alarms: int = 0
    losses: tuple[float, ...] = ()
    far: int = 0
    rest: int = 0
    calm: int = 0

    @property
    def limit(self) -> float:
        """A loss above it is far off."""
        if len(self.losses) < _FEWEST:
            return math.inf
        usual = statistics.median(self.losses)
        spread = statistics.median(abs(x - usual) for x in self.losses)
        # Losses that are all alike have no spread; rounding is none of a gain's doing.
        return usual + max(_FAR * _SIGMA * spread, 1e-3 * abs(usual))

    def with_step(self, loss: float, gain: float) -> LossGuard:
        """Takes a step.

        Args:
          loss: of the step; one that is not finite is far off.
          gain: that the step had; at 1 or below, the loss is none of its doing.
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
        """What `to_data` returned."""
        return cls(
            most=math.inf if data["most"] is None else float(data["most"]),
            alarms=int(data["alarms"]),
            losses=tuple(data["losses"]),
            far=int(data["far"]),
            rest=int(data["rest"]),
            calm=int(data["calm"]),
        )


def loss_in(result: Any, *, alone: bool = True) -> float | None:
    """The loss among what a step returned; None: it is not known which it is.

    It is the only real number, or the only one whose name holds "loss".

    Args:
      result: any tree.
      alone: whether this process trains alone. Otherwise only an array counts that is
        the same on all devices of all processes, for all must see the same.
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
    """Whether all real numbers of what a step returned are finite."""
    found = [np.asarray(x) for x in jax.tree.leaves(result)]
    kinds = [x for x in found if np.issubdtype(x.dtype, np.floating)]
    return all(bool(np.isfinite(x).all()) for x in kinds)
