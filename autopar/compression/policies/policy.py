"""A policy changes how gradients are sent while training goes on.

A policy looks at the telemetry of a step every so often and answers with the
codecs to use from the next step on, or None to leave them. Each set of codecs is
one compiled program, kept, so a policy that goes back and forth between a few
sets compiles each of them once. A policy that changes parameters of codecs often says
so by ``often = True``: they become inputs of the program where they can
(`autopar.compression.adjusting`).

Codecs that are to save time, and no more, are answered as `Saving`. They wait while
their program would take longer to compile than they save. A policy that still wants
them asks again at each observation. ``horizon`` is the number of steps for which its
changes stay, if it knows more than ``every``. One that says ``signals = True`` finds in
its reports what the messages carry of the true gradient; steps measure it then.

>>> class Halve:
...     every = 100
...     def observe(self, seen):
...         return {name: "int8" for name in seen.gradients}

Helps policies to pick gradients, to read what was sent, and to keep a state.

A policy is a frozen dataclass of options with one small state (`Remembering`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, final, runtime_checkable

from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar_errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """What messages carry of the true gradient, summed over steps.

    Products are between different workers, so that their noise is left out
    (`autopar.compression.signal`).

    Attributes:
      sent: products of what is sent and the gradients of others.
      sent_square: squared norms of the sum of what is sent.
      dense: products of the gradients and those of others.
      dense_square: squared norms of the sum of the gradients.
    """

    sent: float
    sent_square: float
    dense: float
    dense_square: float

    @classmethod
    def of(cls, row: Sequence[float]) -> Self | None:
        """From the columns of telemetry behind the sixth; None: not measured."""
        measured = len(row) > 0 and all(math.isfinite(x) for x in row)
        return cls(*(float(x) for x in row)) if measured else None


@dataclasses.dataclass(frozen=True, slots=True)
class GradientReport:
    """The telemetry of the last step for one gradient.

    Attributes:
      codec: how it was sent, as text.
      elements: of the whole gradient.
      wire_bytes: bytes that one device sends for it in a step.
      dense_bytes: bytes that one device would send without a codec.
      norm: L2 norm over all workers of what was to be sent, residual included:
        the root of the sum of the squares of the workers' norms.
      relative_error: of what was sent, in the L2 norm.
      gain: squared norm of what was sent, as a part of that of what was to be.
      residual_norm: L2 norm of the residuals of all workers.
      gradient_norm: as ``norm``, of the gradient alone, without residual.
      level: with a fall-back, the level that was taken, and of which the bytes and
        errors are: 0 is ``codec``, 1 the first to fall back to.
      taken: with a fall-back, for each level the number of steps that took it since
        the last observation, or since other codecs came into use; else empty.
      skipped: steps so far that were skipped because a gradient, this one or another,
        was not finite.
      put_off: the codec that a policy has asked for and that waits until it pays for
        its compilation (`Saving`); '' where none does.
      signal: since the last observation, for a policy that asks for it (``signals =
        True``); None where it is not measured.

    Where the norm is not finite, the error and the gain are NaN.
    """

    codec: str
    elements: int
    wire_bytes: float
    dense_bytes: float
    norm: float
    relative_error: float
    gain: float
    residual_norm: float
    gradient_norm: float
    level: int = 0
    taken: tuple[int, ...] = ()
    skipped: int = 0
    put_off: str = ""
    signal: Signal | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One codec for one gradient.

    Attributes:
      text: the codec.
      error: relative L2 error of what would be sent.
      wire_bytes: that a worker sends in a step.
      rounds: of communication in a step.
    """

    text: str
    error: float
    wire_bytes: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredErrors:
    """The measured errors of the codecs that were probed on one gradient.

    Attributes:
      elements: of the whole gradient.
      local_elements: of what one device encodes.
      norm: L2 norm of what one worker has to send of the whole gradient, residual
        included; the root mean square over the workers.
      choices: the codecs that can be used for it, of those that were asked for.
    """

    elements: int
    local_elements: int
    norm: float
    choices: tuple[Choice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """The facts that a policy sees.

    Attributes:
      step: number of steps done.
      seconds: of a step, the mean since the last observation, without those that
        compiled; the same on all processes.
      gradients: by name of the parameter.
      finite: whether every gradient was.
      measured: the errors of `ProbingPolicy.probes`, by name of the parameter, for
        gradients worth a codec; empty without probes.
    """

    step: int
    seconds: float
    gradients: Mapping[str, GradientReport]
    finite: bool
    measured: Mapping[str, MeasuredErrors] = dataclasses.field(
        default_factory=dict[str, MeasuredErrors]
    )


@final
class Saving(Mapping[str, str]):
    """Codecs by gradient that are to save time, while those in use lose no more than
    the policy allows.

    They are equal to a dict of the same codecs.

    >>> Saving({"params/w": "int4"}) == {"params/w": "int4"}
    True
    """

    __slots__ = ("_codecs",)

    def __init__(self, codecs: Mapping[str, str]) -> None:
        """Takes a copy of the codecs."""
        self._codecs = dict(codecs)

    def __getitem__(self, name: str) -> str:
        """The codec of a gradient."""
        return self._codecs[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the gradients."""
        return iter(self._codecs)

    def __len__(self) -> int:
        """The number of gradients."""
        return len(self._codecs)

    def __repr__(self) -> str:
        """As it is written."""
        return f"Saving({self._codecs!r})"


class Policy(Protocol):
    """Chooses codecs while training; the same on every process."""

    @property
    def every(self) -> int:
        """Steps between observations."""
        ...

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """The codecs by gradient from now on; those left out stay; None: all stay.

        A plain mapping is followed at once, `Saving` where it pays.
        """
        ...


@runtime_checkable
class ProbingPolicy(Policy, Protocol):
    """A policy that asks for the measured errors of codecs that are not in use.

    Before each observation every probe encodes the gradients of that step. This runs
    on the devices, and only the errors leave them.
    """

    @property
    def probes(self) -> tuple[str, ...]:
        """The codecs to try, as text."""
        ...


DENSE = "dense"
"""The codec of what is not compressed, and that of small gradients in any plan."""

MIN_ELEMENTS = 1024
"""Below this a gradient is sent as it is: the least layer of CGX (torch_cgx)."""


def canonical_text(text: str) -> str:
    """A codec's text as the reports of a step write it.

    Raises:
      InputError: it names no codec.

    >>> canonical_text(" int8:block=256 ")
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


def sum_norms(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients of the norms of what was sent, and of the raw gradients."""
    sent = raw = 0.0
    for report in reports:
        sent += math.sqrt(report.gain) * report.norm
        raw += report.gradient_norm
    return sent, raw


def sum_updates(reports: Iterable[GradientReport]) -> tuple[float, float]:
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


def sum_signals(reports: Iterable[GradientReport]) -> tuple[float, float]:
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


def changed_part(
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
        restore_state(self.state, values, type(self).__name__)


def restore_state(state: Any, values: Mapping[str, Any], where: str) -> None:
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
