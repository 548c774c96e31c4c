"""Helps policies to pick gradients, to read what was sent, and to keep a state.

A policy is a frozen dataclass of options with one small state (`Remembering`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.compression.policies.policy import GradientReport
from autopar_errors import InputError

DENSE = "dense"
"""The codec of what is not compressed, and that of small gradients in any plan."""

MIN_ELEMENTS = 1024
"""Below this a gradient is sent as it is: the least layer of CGX (torch_cgx)."""


def canonical(text: str) -> str:
    """A codec's text as the reports of a step write it.

    Raises:
      InputError: it names no codec.

    >>> canonical(" int8:block=256 ")
    'int8'
    """
    return format_codec(parse_codec(text))


def managed_gradients(gradients: Mapping[str, GradientReport]) -> list[str]:
    """The gradients that a policy may change: those that are not sent densely.

    Where all are, those with at least `MIN_ELEMENTS`.
    """
    chosen = [name for name, report in gradients.items() if report.codec != DENSE]
    if chosen:
        return sorted(chosen)
    return sorted(n for n, r in gradients.items() if r.elements >= MIN_ELEMENTS)


def squared_norms(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Squared norms of what was sent, and of what was to be, over gradients."""
    sent = wanted = 0.0
    for report in reports:
        square = report.norm**2
        wanted += square
        sent += report.gain * square
    return sent, wanted


def norms(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients of the norms of what was sent, and of the raw gradients."""
    sent = raw = 0.0
    for report in reports:
        sent += math.sqrt(report.gain) * report.norm
        raw += report.gradient_norm
    return sent, raw


def updates(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients of the size of updates, and of that of dense gradients.

    Adam's family divides by the root of the mean square of what arrives, so that each
    element counts alike, whatever the norm of its gradient. What arrives late, in few
    large values, has the same mean and a larger square: its updates are smaller by the
    quotient of the norms. Where less arrives than comes in, so are they.
    """
    size = dense = 0.0
    for report in reports:
        raw = report.gradient_norm
        sent = math.sqrt(report.gain) * report.norm
        larger = max(raw, sent)
        size += report.elements * (min(raw, sent) / larger if larger else 1.0)
        dense += report.elements
    return size, dense


def signal(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients of the signal of what was sent, and of that of gradients.

    Gradients of which it is not measured are left out.
    """
    sent = dense = 0.0
    for report in reports:
        if report.signal is not None:
            sent += report.signal.sent
            dense += report.signal.dense
    return sent, dense


def signal_updates(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """The same of updates by Adam's family.

    These divide by the root of the mean square of what arrived: signals count in units
    of the root mean square of an element, of what was sent and of the dense gradient.
    The squares are to be those that the optimizer remembers (`moments.remembered`).
    """
    sent = dense = 0.0
    for report in reports:
        found = report.signal
        if found is None or min(found.sent_square, found.dense_square) <= 0.0:
            continue
        sent += found.sent * math.sqrt(report.elements / found.sent_square)
        dense += found.dense * math.sqrt(report.elements / found.dense_square)
    return sent, dense


def changes(
    wish: Mapping[str, str], gradients: Mapping[str, GradientReport]
) -> dict[str, str] | None:
    """The part of a wish that is not so already; None: nothing."""
    different = {
        name: codec
        for name, codec in wish.items()
        if name in gradients and gradients[name].codec != codec
    }
    return different or None


def check_count(where: str, **counts: int) -> None:
    """Raises `InputError` unless all numbers are positive."""
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{where}: {name} must be at least 1, got {value}.")


def check_share(where: str, **shares: float) -> None:
    """Raises `InputError` unless all numbers are from 0 to 1."""
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:
            raise InputError(f"{where}: {name} must be from 0 to 1, got {value}.")


class Remembering:
    """A policy with a state that is saved and restored.

    Attributes:
      state: what it remembers, a dataclass of JSON values.
    """

    state: Any

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          InputError: it is that of another policy.
        """
        restore(self.state, values, type(self).__name__)


def restore(state: Any, values: Mapping[str, Any], where: str) -> None:
    """Fills a policy's state with what `Remembering.state_dict` returned.

    Raises:
      InputError: it was saved by another policy.
    """
    fields = [field.name for field in dataclasses.fields(state)]
    if sorted(values) != sorted(fields):
        raise InputError(
            f"{where}: its saved state has {', '.join(sorted(fields))}, got "
            f"{', '.join(sorted(values)) or 'nothing'}; load what the state_dict() of "
            f"a {where} returned."
        )
    for name in fields:
        setattr(state, name, copy.deepcopy(values[name]))
