"""DCT: all above a threshold is sent, and a larger share where that is too little.

Gupta et al., "Training recommender systems at scale: Communication-efficient model
and data parallelism", KDD 2021 (arXiv 2010.08899). The thresholds, kept for many
steps, are the codec `autopar.compression.codecs.threshold`; this sets it once for all
gradients, and doubles the share of those whose gain stays under a bound.
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
    """The memory of Dct between observations.

    Attributes:
      doublings: by gradient, how often its share was doubled.
      below: by gradient, observations in a row with a gain under the bound.
    """

    doublings: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    below: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dct(Remembering):
    """See the module.

    Attributes:
      ratio: share of the elements that is sent.
      refresh: steps for which a threshold is kept; 1000 in the paper.
      every: steps between observations.
      least_gain: of the squared norm of what is to be sent, the part that must be;
        0 never changes the ratio.
      patience: observations in a row below it before the share is doubled.
      most: the largest ratio that is set.
      state: what it remembers.
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
