"""Policies that choose codecs by measured errors: L-GreCo, and across all families.

L-GreCo sends the least bytes with no more error than one common codec for all layers
(Alimohammadi et al., "L-GreCo: Layerwise-adaptive gradient compression for efficient
data-parallel deep learning", MLSys 2024, arXiv 2210.17357): all layers use codecs of
one family, and each layer gets its own parameter. The parameters minimise the bytes,
while the sum of the errors over the layers is at most that of a reference codec (see
`autopar_solver.selection.lgreco`). The published code measures errors on the average of
the last steps' gradients. `LGreCo` measures errors on the gradient of one step plus the
residual, which contains the errors of earlier steps.

`AcrossFamilies` minimises seconds, and weighs errors in the metric of the optimizer.
With ``r`` the relative error of a gradient::

    minimise    sum bytes / bandwidth + rounds latency + elements encode_s
    subject to  sum w r^2 <= budget^2 sum w

For Adam, ``w`` is the number of elements of the gradient, because Adam divides each
element by the root of its mean square, so that all elements have equal weight. For SGD,
``w`` is the squared norm of the gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from autopar.compression.policies.policy import (
    DENSE,
    Choice,
    GradientReport,
    MeasuredErrors,
    Observation,
    Remembering,
    Saving,
    canonical_text,
    changed_part,
    check_count,
)
from autopar.compression.policies.probe import (
    QUANTISERS,
    powersgd_family,
    topk_family,
)
from autopar_errors import InputError
from autopar_solver import CodecSelection, LGreCoProblem, solve_lgreco, solve_selection

Chooser = Callable[[Mapping[str, MeasuredErrors]], Mapping[str, str]]
Reports = Mapping[str, GradientReport]
# Returns whether the error of the codecs in use is within the policy's limit.
Judge = Callable[[Mapping[str, MeasuredErrors], Reports], bool]

# Fraction of a budget by which sums in different order may differ.
ROUNDING = 1e-9


@dataclasses.dataclass(slots=True)
class ChoiceState:
    """The memory of a choosing policy between observations.

    Attributes:
      codecs: codecs of the last choice; empty before the first choice.
    """

    codecs: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


def set_codecs(policy: Any, reference: str, options: Sequence[str]) -> None:
    """Converts a policy's codecs to the text form of reports."""
    if not options:
        raise InputError(f"{type(policy).__name__}: needs at least one option.")
    object.__setattr__(policy, "reference", canonical_text(reference))
    object.__setattr__(
        policy, "options", tuple(canonical_text(text) for text in options)
    )


def with_codec(
    measured: Mapping[str, MeasuredErrors], must: str
) -> tuple[list[str], list[MeasuredErrors]]:
    """The gradients that can use a codec, by name."""
    names = [
        name
        for name in sorted(measured)
        if any(choice.text == must for choice in measured[name].choices)
    ]
    return names, [measured[name] for name in names]


def error_in_use(measured: MeasuredErrors, report: GradientReport) -> float:
    """The relative error of the codec in use: from a probe if there is one, otherwise
    from the report.
    """
    found = (c.error for c in measured.choices if c.text == report.codec)
    return next(found, report.relative_error)


def update_choice(
    state: ChoiceState, choose: Chooser, within: Judge, seen: Observation
) -> Mapping[str, str] | None:
    """Chooses again if errors were measured; returns the codecs that change.

    The changes count as `Saving` unless the error of the codecs in use is over the
    limit.

    Args:
      state: state of the policy.
      choose: chooses codecs for measured errors.
      within: says whether the error of the codecs in use is within the limit.
      seen: the observation.
    """
    if not seen.finite:
        return None
    known = {n: found for n, found in seen.measured.items() if n in seen.gradients}
    if known:
        state.codecs.update(choose(known))
    wish = changed_part(state.codecs, seen.gradients)
    if wish is None or (known and not within(known, seen.gradients)):
        return wish
    return Saving(wish)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LGreCo(Remembering):
    """See the module.

    Attributes:
      reference: codec whose error, summed over the layers, is the error budget.
      options: codecs to choose from in addition to the reference; default: PowerSGD
        with ranks from 2 to 8.
      every: steps between choices.
      alpha: budget as a multiple of the reference's error.
      horizon: number of steps for which a choice is expected to last, if more than
        ``every``.
      state: memory of the policy.
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
        """The codecs for gradients with measured errors.

        Gradients that cannot use the reference are left out. If rounding leaves no
        choice within the budget, all gradients are left out.
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
        return update_choice(self.state, self.choose, self._within, seen)

    def _within(self, measured: Mapping[str, MeasuredErrors], reports: Reports) -> bool:
        """Whether the error of the codecs in use is at most that of the reference."""
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


Optimizer = Literal["adam", "sgd"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrossFamilies(Remembering):
    """See the module.

    Attributes:
      bandwidth_bytes_per_s: bandwidth of the link of one device.
      latency_s: latency of one round of communication.
      options: codecs to choose from; dense is always included.
      budget: the largest relative error of all gradients together, in the optimizer's
        metric; None: the error of the reference.
      reference: codec that defines the budget.
      optimizer: the optimizer that defines the metric.
      encode_s_per_element: by name of a codec, seconds to encode and decode an element;
        0 for codecs that are not named.
      every: steps between choices.
      horizon: number of steps for which a choice is expected to last, if more than
        ``every``.
      state: memory of the policy.
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
        """The codecs for gradients with measured errors; see `LGreCo.choose`."""
        names, every = with_codec(measured, DENSE)
        if not names:
            return {}
        # The reference may be chosen only if it is listed among the options.
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
        return update_choice(self.state, self.choose, self._within, seen)

    def _within(self, measured: Mapping[str, MeasuredErrors], reports: Reports) -> bool:
        """Whether the error of the codecs in use is within the budget."""
        names, every = with_codec(measured, DENSE)
        parts = self._parts(every)
        lost = math.fsum(
            part * error_in_use(m, reports[name]) ** 2
            for part, name, m in zip(parts, names, every, strict=True)
        )
        return lost <= self._budget(every, parts) * (1.0 + ROUNDING)

    def _parts(self, every: Sequence[MeasuredErrors]) -> list[float]:
        """The weight of each gradient's squared error; the weights add up to 1."""
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
        """The largest allowed sum of weighted squared errors."""
        if self.budget is not None:
            return self.budget**2
        return math.fsum(
            part * choice.error**2
            for part, measured in zip(parts, every, strict=True)
            for choice in measured.choices
            if choice.text == self.reference
        )
