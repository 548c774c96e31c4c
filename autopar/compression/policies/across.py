"""Chooses among all families of codecs at once, for the least time.

Seconds are minimised, and errors are counted as the optimizer does. With ``r`` the
relative error of a gradient::

    minimise    sum bytes / bandwidth + rounds latency + elements encode_s
    subject to  sum w r^2 <= budget^2 sum w

with ``w`` its number of elements for Adam, which divides each element by the root
of its mean square so that all weigh the same, and its squared norm for SGD.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

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
from autopar.compression.policies.policy import Choice, MeasuredErrors, Observation
from autopar.compression.policies.probe import (
    QUANTISERS,
    powersgd_family,
    topk_family,
)
from autopar.compression.policies.signals import DENSE, check_count, restore, saved
from autopar_errors import InputError
from autopar_solver import CodecSelection, solve_selection

Optimizer = Literal["adam", "sgd"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrossFamilies:
    """See the module.

    Attributes:
      bandwidth_bytes_per_s: of the link of one device.
      latency_s: of a round of communication.
      options: codecs to choose from; dense is always one.
      budget: the largest relative error of all gradients together, in the
        optimizer's metric; None: that of the reference.
      reference: codec that defines the budget.
      optimizer: whose metric counts.
      encode_s_per_element: by name of a codec, seconds to encode and decode an
        element; those not named take none.
      every: steps between choices.
      horizon: steps for which a choice stays, if more than ``every``.
      state: what it remembers.
    """

    often: ClassVar[bool] = True

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    options: tuple[str, ...] = (*QUANTISERS, *powersgd_family(4), *topk_family())
    budget: float | None = None
    reference: str = "int4"
    optimizer: Optimizer = "adam"
    encode_s_per_element: Mapping[str, float] = dataclasses.field(
        default_factory=dict[str, float]
    )
    every: int = 100
    horizon: int = 0
    state: ChoiceState = dataclasses.field(
        default_factory=ChoiceState, init=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        set_codecs(self, self.reference, self.options)
        check_count("AcrossFamilies", every=self.every)
        if not (self.bandwidth_bytes_per_s > 0 and self.latency_s >= 0):
            raise InputError(
                "AcrossFamilies: bandwidth_bytes_per_s must be positive and latency_s "
                f"not negative, got {self.bandwidth_bytes_per_s} and {self.latency_s}."
            )
        if self.budget is not None and not self.budget >= 0:
            raise InputError(
                f"AcrossFamilies: budget must not be negative, got {self.budget}."
            )
        if self.optimizer not in ("adam", "sgd"):
            raise InputError(
                "AcrossFamilies: optimizer must be adam or sgd, got "
                f"{self.optimizer!r}."
            )

    @property
    def probes(self) -> tuple[str, ...]:
        """See `autopar.compression.policies.policy.ProbingPolicy`."""
        return tuple(dict.fromkeys((DENSE, self.reference, *self.options)))

    def choose(self, measured: Mapping[str, MeasuredErrors]) -> Mapping[str, str]:
        """The codecs for gradients of which this was measured; see `LGreCo.choose`."""
        names, every = with_codec(measured, DENSE)
        if not names:
            return {}
        # The reference is one of the options only if it is listed.
        allowed = {DENSE, *self.options}
        found = [tuple(c for c in m.choices if c.text in allowed) for m in every]
        parts = self._parts(every)
        problem = CodecSelection(
            wire_s=tuple(np.array([self._wire_s(c) for c in row]) for row in found),
            local_s=tuple(
                np.array([self._local_s(c, m.local_elements) for c in row])
                for m, row in zip(every, found, strict=True)
            ),
            error=tuple(
                np.array([part * choice.error**2 for choice in row])
                for part, row in zip(parts, found, strict=True)
            ),
            ready_s=(0.0,) * len(names),
            backward_s=0.0,
            error_budget=self._budget(every, parts),
        )
        picked = solve_selection(problem).choices
        return {
            name: row[choice].text
            for name, row, choice in zip(names, found, picked, strict=True)
        }

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policies.policy.Policy`."""
        return observed(self.state, self.choose, self._within, seen)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return saved(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          InputError: it is that of another policy.
        """
        restore(self.state, values, "AcrossFamilies")

    def _within(self, measured: Mapping[str, MeasuredErrors], reports: Reports) -> bool:
        """Whether the codecs in use lose no more than the budget."""
        names, every = with_codec(measured, DENSE)
        parts = self._parts(every)
        lost = math.fsum(
            part * error_in_use(m, reports[name]) ** 2
            for part, name, m in zip(parts, names, every, strict=True)
        )
        return lost <= self._budget(every, parts) * (1.0 + ROUNDING)

    def _parts(self, every: Sequence[MeasuredErrors]) -> list[float]:
        """The weight of each gradient's squared error; they add up to 1."""
        weights = [self._weight(m) for m in every]
        total = math.fsum(weights) or 1.0
        return [weight / total for weight in weights]

    def _weight(self, measured: MeasuredErrors) -> float:
        if self.optimizer == "adam":
            return float(measured.elements)
        return measured.norm**2

    def _wire_s(self, choice: Choice) -> float:
        moving = choice.wire_bytes / self.bandwidth_bytes_per_s
        return moving + choice.rounds * self.latency_s

    def _local_s(self, choice: Choice, elements: int) -> float:
        name = choice.text.partition(":")[0]
        return elements * self.encode_s_per_element.get(name, 0.0)

    def _budget(self, every: Sequence[MeasuredErrors], parts: Sequence[float]) -> float:
        """The largest sum of weighted squares."""
        if self.budget is not None:
            return self.budget**2
        return math.fsum(
            part * choice.error**2
            for part, measured in zip(parts, every, strict=True)
            for choice in measured.choices
            if choice.text == self.reference
        )
