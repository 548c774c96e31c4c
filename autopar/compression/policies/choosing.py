"""Policies that choose a codec for each gradient by measured errors.

L-GreCo sends as few bytes as possible, with no more error than a common codec of all
layers would make (Alimohammadi et al., "L-GreCo: Layerwise-adaptive gradient
compression for efficient data-parallel deep learning", MLSys 2024, arXiv 2210.17357):
all layers use codecs of one family, such as PowerSGD, and each layer gets its own
parameter, such as the rank. L-GreCo chooses the parameters that send the fewest bytes,
among those for which the sum of the layers' errors is at most the sum with a reference
codec (see `autopar_solver.selection.lgreco`). The published code measures errors on the
mean of the last steps' gradients. `LGreCo` measures them on the gradient of one step
plus the residual, which contains the errors of earlier steps.

`AcrossFamilies` chooses among codecs of all families. This policy minimises the seconds
of communication and encoding per step, and weights the error of a gradient by how much
it matters to the optimizer. Let ``r`` be the relative error of a gradient, and ``w``
its weight::

    minimise    sum bytes / bandwidth + rounds latency + elements encode_s
    subject to  sum w r^2 <= budget^2 sum w

For Adam, ``w`` is the number of elements of the gradient: Adam divides each element by
the root of its mean square, so that all elements matter equally. For SGD, ``w`` is the
squared norm of the gradient.
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
# A function that tells whether the error of the codecs in use is within the policy's
# limit.
Judge = Callable[[Mapping[str, MeasuredErrors], Reports], bool]

# Sums of the same numbers in different orders differ by at most this fraction. It is
# ignored when an error is compared with its limit.
ROUNDING = 1e-9


@dataclasses.dataclass(slots=True)
class ChoiceState:
    """What `LGreCo` and `AcrossFamilies` remember from one observation to the next.

    Attributes:
      codecs: gradient -> codec of the last choice; empty before the first choice.
    """

    codecs: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


def set_codecs(policy: Any, reference: str, options: Sequence[str]) -> None:
    """Writes the codecs in a policy's options in the form that reports use."""
    if not options:
        raise InputError(f"{type(policy).__name__}: needs at least one option.")
    object.__setattr__(policy, "reference", canonical_text(reference))
    object.__setattr__(
        policy, "options", tuple(canonical_text(text) for text in options)
    )


def with_codec(
    measured: Mapping[str, MeasuredErrors], must: str
) -> tuple[list[str], list[MeasuredErrors]]:
    """The gradients that can be sent by the codec ``must``: names and measured
    errors.
    """
    names = [
        name
        for name in sorted(measured)
        if any(choice.text == must for choice in measured[name].choices)
    ]
    return names, [measured[name] for name in names]


def error_in_use(measured: MeasuredErrors, report: GradientReport) -> float:
    """The relative error of the codec in use: the probed or else the reported error."""
    found = (c.error for c in measured.choices if c.text == report.codec)
    return next(found, report.relative_error)


def update_choice(
    state: ChoiceState, choose: Chooser, within: Judge, seen: Observation
) -> Mapping[str, str] | None:
    """Chooses codecs if errors were measured; returns the codecs that change.

    If the error of the codecs in use is within the limit, the changes only save time,
    and are returned as `Saving`.

    Args:
      state: state of the policy.
      choose: chooses codecs for measured errors.
      within: tells whether the error of the codecs in use is within the limit.
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
    """L-GreCo: fewest bytes with at most the error of a reference codec.

    Attributes:
      reference: codec whose error, summed over the gradients, is the limit.
      options: codecs to choose from in addition to the reference; default: PowerSGD
        with ranks from 2 to 8.
      every: number of steps between choices.
      alpha: factor by which the limit is multiplied.
      horizon: number of steps for which a choice is expected to last, if it is more
        than ``every``.
      state: what the policy remembers.
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
        """Chooses codecs for gradients whose errors were measured.

        The result has no codec for gradients that the reference codec cannot send. The
        result is empty if, by rounding errors, no choice is within the limit.
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
        """Whether the codecs in use have at most the error of the reference."""
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
    """Chooses among all codecs: the fewest seconds per step within an error budget.

    Attributes:
      bandwidth_bytes_per_s: bandwidth of the link of one device.
      latency_s: latency of one round of communication, in seconds.
      options: codecs to choose from; the codec ``dense`` is always among them.
      budget: the largest relative error (L2 norm) of all gradients together, with the
        optimizer's weights; None: the error with the reference.
      reference: codec whose error is the budget if ``budget`` is None.
      optimizer: the optimizer that decides the weights.
      encode_s_per_element: name of a codec -> seconds to encode and decode an element;
        0 for other codecs.
      every: number of steps between choices.
      horizon: number of steps for which a choice is expected to last, if it is more
        than ``every``.
      state: what the policy remembers.
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
        """Chooses codecs for gradients whose errors were measured; see
        `LGreCo.choose`.
        """
        names, every = with_codec(measured, DENSE)
        if not names:
            return {}
        # The reference may be chosen only if it is one of the options.
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
        """Whether the codecs in use have at most the error ``budget``."""
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
        """The error budget as a limit on the sum of weighted squared errors."""
        if self.budget is not None:
            return self.budget**2
        return math.fsum(
            part * choice.error**2
            for part, measured in zip(parts, every, strict=True)
            for choice in measured.choices
            if choice.text == self.reference
        )
