"""DCT: sends all elements above a threshold, and doubles the sent fraction if too
little is sent.

Gupta et al., "Training recommender systems at scale: Communication-efficient model and
data parallelism", KDD 2021 (arXiv 2010.08899). The codec
`autopar.compression.codecs.threshold` implements the thresholds, which are kept for
many steps. The policy sets this codec once for all gradients. For gradients whose gain
stays under a bound, the policy doubles the sent fraction.
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
      doublings: by gradient, the number of times that its fraction was doubled.
      below: by gradient, the number of consecutive observations with a gain under the
        bound.
    """

    doublings: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    below: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dct(Remembering):
    """See the module.

    Attributes:
      ratio: fraction of the elements that is sent.
      refresh: number of steps for which a threshold is kept; 1000 in the paper.
      every: steps between observations.
      least_gain: the least fraction of the squared norm of the values to send that must
        be sent; 0: the ratio never changes.
      patience: number of consecutive observations below ``least_gain`` before the
        fraction is doubled.
      most: the largest ratio that is set.
      state: memory of the policy.
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
