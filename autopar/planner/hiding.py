"""Weights of what is hidden, found with the plans that they are for.

Where communication runs beside work, the time of a plan is a maximum, which is no sum
over decisions. At fixed weights of the stretches of a step (`autopar.cost.overlap`)
it is one, and its least value is a lower bound of every plan. So the problem is
solved at some weights, the weights are moved to where the bound of the plans known so
far is highest (Kelley's cutting planes), and so on, until the best plan found is
proved or rounds run out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cluster.calibration import Calibration
from autopar.cost.overlap import Stretch, Timeline
from autopar.steps.positions import PASSES
from autopar_solver import highest_minimum

# A solution whose bound is nearer than this part of its time is proved.
PROVED = 1e-3

Weights = Mapping[Stretch, float]


@dataclasses.dataclass(frozen=True)
class Plane:
    """The time of one plan as a linear function of weights.

    Attributes:
      base_s: with no weight anywhere: everything is hidden.
      passes: its work and communication.
    """

    base_s: float
    passes: tuple[Timeline, ...]

    def slope_s(self, stretch: Stretch, known: Calibration) -> float:
        """Seconds for each unit of weight on a stretch."""
        passes = [t for t in self.passes if t.role is stretch.role]
        excess = sum(t.excess_s(stretch, known.overlap) for t in passes)
        return (1.0 - known.contention) * excess

    def tightest(self, known: Calibration) -> list[Stretch]:
        """The stretches that decide how much is exposed."""
        found = [t.tightest(known.overlap) for t in self.passes]
        return [
            s
            for s, t in zip(found, self.passes, strict=True)
            if t.excess_s(s, known.overlap) > 0
        ]


def plane_of(seconds: float, passes: Sequence[Timeline], known: Calibration) -> Plane:
    """The plane of a plan.

    Args:
      seconds: of a step of it.
      passes: its work and communication.
      known: how far communication may run beside work.
    """
    exposed = sum(t.exposed_s(known.overlap) for t in passes)
    return Plane(seconds - (1.0 - known.contention) * exposed, tuple(passes))


def best_weights(planes: Sequence[Plane], known: Calibration) -> dict[Stretch, float]:
    """The weights at which the least of some plans' planes is highest.

    Args:
      planes: those of the plans known so far, one at least.
      known: how far communication may run beside work.

    Returns:
      Weights of the stretches that decide for one of the plans.
    """
    stretches = list(dict.fromkeys(s for p in planes for s in p.tightest(known)))
    if not stretches:
        return {}
    slopes = np.array([[p.slope_s(s, known) for s in stretches] for p in planes])
    passes = np.array([[s.role is role for s in stretches] for role in PASSES])
    found = highest_minimum([p.base_s for p in planes], slopes, passes)
    return {s: float(w) for s, w in zip(stretches, found, strict=True) if w > 1e-9}
