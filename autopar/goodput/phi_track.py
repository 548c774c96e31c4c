"""How sure the noise scale is: what its averages hold, and how far steps scatter.

Each step gives an estimate of the squared norm of the mean gradient and of the variance
of a row's gradient. The averages of `autopar.runtime.noise` hold many of them. How far
single steps scatter, over the root of how many are averaged, is how far off an average
may be.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from autopar.goodput.choice import PhiRange
from autopar.runtime.noise.averages import NoiseScale

# Steps whose scatter is kept, and the fewest that say anything.
_KEPT, _FEWEST = 64, 5


@dataclasses.dataclass(frozen=True, slots=True)
class PhiTrack:
    """The latest single estimates; `with_step` returns another one.

    Attributes:
      sqr: squared norms of the mean gradient that steps found.
      var: variances of one row's gradient that steps found.
      last: the averages as they were read last; None: none yet.
    """

    sqr: tuple[float, ...] = ()
    var: tuple[float, ...] = ()
    last: NoiseScale | None = None

    def with_step(self, scale: NoiseScale) -> PhiTrack:
        """Takes the averages after a step, if it has measured finite gradients."""
        numbers = (scale.local, scale.total, scale.sqr, scale.var)
        seen = self.last is not None and scale.steps == self.last.steps
        if seen or scale.steps < 1 or not all(map(math.isfinite, numbers)):
            return self
        n = max(scale.groups, 2)
        rows = scale.rows * (2 if scale.groups < 2 else 1)
        sqr = (n * scale.total - scale.local) / (n - 1)
        var = (scale.local - scale.total) * rows / (n - 1)
        return PhiTrack((*self.sqr, sqr)[-_KEPT:], (*self.var, var)[-_KEPT:], scale)

    def range(self, decay: float, base_batch: float, sigmas: float) -> PhiRange | None:
        """Within what the noise scale lies; None: too few steps have run.

        Args:
          decay: of the averages, in a step with the base batch.
          base_batch: rows of the base batch.
          sigmas: standard deviations.
        """
        scale = self.last
        if scale is None or len(self.sqr) < _FEWEST or math.isnan(scale.phi):
            return None
        keep = decay ** (scale.rows / base_batch)
        held = min(float(scale.steps), (1 + keep) / max(1 - keep, 1e-9))
        # A gradient in one group is compared with the step before, which is biased.
        wide = sigmas * (2.0 if scale.biased else 1.0) / math.sqrt(held)
        sqr = wide * statistics.stdev(self.sqr)
        var = wide * statistics.stdev(self.var)
        low = max(0.0, scale.var - var) / (scale.sqr + sqr) if scale.sqr + sqr else 0.0
        rest = scale.sqr - sqr
        high = (scale.var + var) / rest if rest > 0 else math.inf
        return PhiRange(scale.phi, min(low, scale.phi), max(high, scale.phi))

    def to_data(self) -> dict[str, Any]:
        """The track as JSON can hold it."""
        last = None if self.last is None else dataclasses.asdict(self.last)
        return {"sqr": list(self.sqr), "var": list(self.var), "last": last}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> PhiTrack:
        """What `to_data` returned."""
        found: dict[str, Any] | None = data.get("last")
        last: NoiseScale | None = None
        if found is not None:
            fields: dict[str, Any] = dict(found)
            fields["left_out"] = tuple(found.get("left_out", ()))
            fields["excess"] = math.nan if found["excess"] is None else found["excess"]
            last = NoiseScale(**fields)
        return cls(tuple(data["sqr"]), tuple(data["var"]), last)
