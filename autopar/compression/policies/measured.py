"""Serves the policies that choose codecs by measured errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.compression.policies.policy import (
    GradientReport,
    MeasuredErrors,
    Observation,
    Saving,
)
from autopar.compression.policies.signals import canonical, changes
from autopar_errors import InputError

Chooser = Callable[[Mapping[str, MeasuredErrors]], Mapping[str, str]]
Reports = Mapping[str, GradientReport]
# Whether the codecs in use lose no more than the policy allows.
Judge = Callable[[Mapping[str, MeasuredErrors], Reports], bool]

# Part of a budget by which sums in another order may differ.
ROUNDING = 1e-9


@dataclasses.dataclass(slots=True)
class ChoiceState:
    """The memory of a policy that chooses, between observations.

    Attributes:
      codecs: those of the last choice; empty before.
    """

    codecs: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


def set_codecs(policy: Any, reference: str, options: Sequence[str]) -> None:
    """Writes a policy's codecs as the reports do."""
    if not options:
        raise InputError(f"{type(policy).__name__}: needs at least one option.")
    object.__setattr__(policy, "reference", canonical(reference))
    object.__setattr__(policy, "options", tuple(canonical(text) for text in options))


def with_codec(
    measured: Mapping[str, MeasuredErrors], must: str
) -> tuple[list[str], list[MeasuredErrors]]:
    """The gradients that a codec can be used for, by name."""
    names = [
        name
        for name in sorted(measured)
        if any(choice.text == must for choice in measured[name].choices)
    ]
    return names, [measured[name] for name in names]


def error_in_use(measured: MeasuredErrors, report: GradientReport) -> float:
    """The relative error of the codec in use, as probed if it was."""
    found = (c.error for c in measured.choices if c.text == report.codec)
    return next(found, report.relative_error)


def observed(
    state: ChoiceState, choose: Chooser, within: Judge, seen: Observation
) -> Mapping[str, str] | None:
    """Chooses anew where something was measured; says what differs.

    What differs is to save time unless the codecs in use lose too much.

    Args:
      state: of the policy.
      choose: the codecs for what was measured.
      within: whether those in use lose no more than the policy allows.
      seen: the observation.
    """
    if not seen.finite:
        return None
    known = {n: found for n, found in seen.measured.items() if n in seen.gradients}
    if known:
        state.codecs.update(choose(known))
    wish = changes(state.codecs, seen.gradients)
    if wish is None or (known and not within(known, seen.gradients)):
        return wish
    return Saving(wish)
