"""L-GreCo: the least bytes with no more error than one codec makes for all layers.

Alimohammadi et al., "L-GreCo: Layerwise-adaptive gradient compression for efficient
data-parallel deep learning", MLSys 2024 (arXiv 2210.17357): of one family, each layer
gets the parameter with which the bytes are least, while the errors, summed over the
layers, are not more than those of a reference (see `autopar_solver.selection.lgreco`).

The published code averages the gradients of the last steps before it encodes them;
here it is the gradient of one step with the residual, which holds what the steps
before have not sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from autopar.compression.policies.measured import (
    ROUNDING,
    ChoiceState,
    Reports,
    error_in_use,
    observed,
    set_codecs,
    with_codec,
)
from autopar.compression.policies.policy import MeasuredErrors, Observation
from autopar.compression.policies.probe import powersgd_family
from autopar.compression.policies.signals import check_count, restore, saved
from autopar_errors import InputError
from autopar_solver import LGreCoProblem, solve_lgreco


@dataclasses.dataclass(frozen=True, kw_only=True)
class LGreCo:
    """See the module.

    Attributes:
      reference: codec whose error, summed over the layers, is the budget.
      options: codecs to choose from, beside the reference; default: ranks from
        half to twice four.
      every: steps between choices.
      alpha: budget as a multiple of the reference's error.
      horizon: steps for which a choice stays, if more than ``every``.
      state: what it remembers.
    """

    often: ClassVar[bool] = True

    reference: str = "powersgd"
    options: tuple[str, ...] = powersgd_family(4)
    every: int = 100
    alpha: float = 1.0
    horizon: int = 0
    state: ChoiceState = dataclasses.field(
        default_factory=ChoiceState, init=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        set_codecs(self, self.reference, self.options)
        check_count("LGreCo", every=self.every)
        if not 0 < self.alpha < math.inf:
            raise InputError(f"LGreCo: alpha must be positive, got {self.alpha}.")

    @property
    def probes(self) -> tuple[str, ...]:
        """See `autopar.compression.policies.policy.ProbingPolicy`."""
        return tuple(dict.fromkeys((self.reference, *self.options)))

    def choose(self, measured: Mapping[str, MeasuredErrors]) -> Mapping[str, str]:
        """The codecs for gradients of which this was measured.

        Left out are those for which the reference cannot be used, and all where
        rounding leaves no choice within the budget.
        """
        names, found = with_codec(measured, self.reference)
        if not names:
            return {}
        problem = LGreCoProblem(
            error=tuple(
                np.array([m.norm * choice.error for choice in m.choices]) for m in found
            ),
            size=tuple(np.array([c.wire_bytes for c in m.choices]) for m in found),
            reference=tuple(
                [c.text for c in m.choices].index(self.reference) for m in found
            ),
            alpha=self.alpha,
        )
        picked = solve_lgreco(problem).choices
        chosen = zip(names, found, picked, strict=True) if picked else ()
        return {name: m.choices[choice].text for name, m, choice in chosen}

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policies.policy.Policy`."""
        return observed(self.state, self.choose, self._within, seen)

    def _within(self, measured: Mapping[str, MeasuredErrors], reports: Reports) -> bool:
        """Whether the codecs in use lose no more than the reference would."""
        names, found = with_codec(measured, self.reference)
        lost = math.fsum(
            m.norm * error_in_use(m, reports[name])
            for name, m in zip(names, found, strict=True)
        )
        budget = self.alpha * math.fsum(
            m.norm * choice.error
            for m in found
            for choice in m.choices
            if choice.text == self.reference
        )
        return lost <= budget * (1.0 + ROUNDING)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return saved(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          InputError: it is that of another policy.
        """
        restore(self.state, values, "LGreCo")
