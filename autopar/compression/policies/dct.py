"""DCT: sends all elements above a threshold, and lowers the threshold if need be.

The policy lowers the threshold of a gradient of which too little is sent.

Gupta et al., "Training recommender systems at scale: Communication-efficient model and
data parallelism", KDD 2021 (arXiv 2010.08899). The codec
`autopar.compression.codecs.threshold` sends elements above a threshold, which it uses
for many steps. At the start the policy gives all gradients this codec. The gain of a
gradient is the squared norm of what is sent divided by the squared norm of what should
be sent. If the gain of a gradient stays below a bound, the policy doubles the fraction
of its elements that are sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from autopar.compression.policies.policy import (
    Observation,
    Remembering,
    canonical_text,
    changed_part,
    check_count,
    check_share,
    managed_gradients,
)
from autopar_errors import InputError


@dataclasses.dataclass(slots=True)
class DctState:
    """What Dct remembers from one observation to the next.

    Attributes:
      doublings: gradient -> how often its fraction was doubled.
      below: gradient -> number of the last consecutive observations with a gain below
        the bound.
    """

    doublings: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    below: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dct(Remembering):
    """DCT's policy, as described in the module docstring.

    Attributes:
      ratio: fraction of the elements that are sent at the start.
      refresh: number of steps after which a threshold is computed anew; 1000 in the
        paper.
      every: number of steps between observations.
      least_gain: the bound on the gain; 0: the fraction never changes.
      patience: number of consecutive observations below ``least_gain`` after which the
        fraction is doubled.
      most: the largest fraction that the policy sets.
      state: what the policy remembers.
    """

    often: ClassVar[bool] = True

    ratio: float = 0.01
    refresh: int = 1000
    every: int = 100
    least_gain: float = 0.0
    patience: int = 3
    most: float = 0.25
    state: DctState = dataclasses.field(
        default_factory=DctState, init=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        check_count(
            "Dct", refresh=self.refresh, every=self.every, patience=self.patience
        )
        check_share("Dct", least_gain=self.least_gain)
        if not 0.0 < self.ratio <= self.most <= 1.0:
            raise InputError(
                "Dct: needs 0 < ratio <= most <= 1, got ratio="
                f"{self.ratio}, most={self.most}."
            )

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policies.policy.Policy`."""
        state = self.state
        if not seen.finite:
            return None
        if not state.doublings:
            state.doublings = dict.fromkeys(managed_gradients(seen.gradients), 0)
            state.below = dict.fromkeys(state.doublings, 0)
        for name, report in seen.gradients.items():
            if name not in state.doublings or report.codec != self._codec(name):
                continue
            low = report.gain < self.least_gain
            state.below[name] = state.below[name] + 1 if low else 0
            if state.below[name] >= self.patience and self._share(name) < self.most:
                state.doublings[name] += 1
                state.below[name] = 0
        return changed_part(
            {n: self._codec(n) for n in state.doublings}, seen.gradients
        )

    def _share(self, name: str) -> float:
        return min(self.most, self.ratio * 2 ** self.state.doublings[name])

    def _codec(self, name: str) -> str:
        return canonical_text(
            f"threshold:ratio={self._share(name)},every={self.refresh}"
        )
