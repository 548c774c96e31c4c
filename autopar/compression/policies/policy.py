"""A policy changes the codecs of gradients during training.

A policy reads the telemetry of a step at regular intervals. The policy returns the
codecs to use from the next step on, or None to keep the codecs. Each set of codecs
needs one compiled program, which is kept. So a policy that alternates between a few
sets compiles each set once. A policy that often changes parameters of codecs sets
``often = True``. With ``often`` set, parameters of codecs become inputs of the program
if possible (`autopar.compression.adjusting`).

A policy returns codecs whose only purpose is to save time as `Saving`. A run postpones
such codecs as long as compiling their program would take longer than they save. A
policy that still wants the codecs returns them again at each observation. ``horizon``
is the number of steps for which changes are expected to last, if it is more than
``every``. With ``signals = True``, steps measure the signal of the true gradient in the
messages, and reports contain it.

>>> class Halve:
...     every = 100
...     def observe(self, seen):
...         return {name: "int8" for name in seen.gradients}

The functions below help policies to select gradients, to read telemetry, and to keep a
state.

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
    """The signal of the true gradient in the messages, summed over steps.

    Inner products are between different workers, so that the noise of the workers
    cancels (`autopar.compression.signal`).

    Attributes:
      sent: inner products of sent values with the gradients of other workers.
      sent_square: squared norms of the sum of the sent values.
      dense: inner products of gradients with the gradients of other workers.
      dense_square: squared norms of the sum of the gradients.
    """

    sent: float
    sent_square: float
    dense: float
    dense_square: float

    @classmethod
    def of(cls, row: Sequence[float]) -> Self | None:
        """Reads the columns of telemetry after the sixth; None if the signal was not
        measured.
        """
        measured = len(row) > 0 and all(math.isfinite(x) for x in row)
        return cls(*(float(x) for x in row)) if measured else None


@dataclasses.dataclass(frozen=True, slots=True)
class GradientReport:
    """The telemetry of the last step for one gradient.

    Attributes:
      codec: codec of the gradient, as text.
      elements: number of elements of the whole gradient.
      wire_bytes: bytes that one device sends for the gradient in a step.
      dense_bytes: bytes that one device would send without a codec.
      norm: L2 norm of the values to send, including the residual, over all workers: the
        root of the sum of the workers' squared norms.
      relative_error: relative error of the sent values, in the L2 norm.
      gain: squared norm of the sent values, divided by that of the values to send.
      residual_norm: L2 norm of the residuals of all workers.
      gradient_norm: as ``norm``, but without the residual.
      level: with a fallback, the level that was taken; bytes and errors belong to this
        level. 0 is ``codec``, 1 is the first codec of the fallback.
      taken: with a fallback, for each level the number of steps that took it since the
        last observation or the last change of codecs; otherwise empty.
      skipped: number of steps so far that were skipped because any gradient of the step
        was not finite.
      put_off: the codec that a policy has asked for and that is postponed until it
        saves more time than its compilation takes (`Saving`); '' if none is postponed.
      signal: signal since the last observation, for a policy with ``signals = True``;
        None if not measured.

    If the norm is not finite, the error and the gain are NaN.
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
      error: relative L2 error of the values that the codec would send.
      wire_bytes: bytes that a worker sends in a step.
      rounds: rounds of communication in a step.
    """

    text: str
    error: float
    wire_bytes: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredErrors:
    """The measured errors of the codecs that were probed on one gradient.

    Attributes:
      elements: number of elements of the whole gradient.
      local_elements: number of elements that one device encodes.
      norm: L2 norm of the values that one worker has to send, including the residual;
        the root mean square over the workers.
      choices: those of the requested codecs that can send the gradient.
    """

    elements: int
    local_elements: int
    norm: float
    choices: tuple[Choice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """The facts that are passed to a policy.

    Attributes:
      step: number of completed steps.
      seconds: mean seconds of a step since the last observation, without steps that
        compiled; the same on all processes.
      gradients: report of each gradient, by name of the parameter.
      finite: whether every gradient was finite.
      measured: the errors of `ProbingPolicy.probes` by name of the parameter, for
        gradients that are large enough for a codec; empty without probes.
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
    """Codecs by gradient whose only purpose is to save time.

    The errors of the codecs in use are within the policy's limit, so the change may be
    postponed. A `Saving` is equal to a dict of the same codecs.

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
        """The text of a call that makes it."""
        return f"Saving({self._codecs!r})"


class Policy(Protocol):
    """Chooses codecs during training; every process must make the same choice."""

    @property
    def every(self) -> int:
        """Steps between observations."""
        ...

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """The codecs by gradient from now on; other gradients keep their codecs. None:
        no change.

        A plain mapping is applied at once; a `Saving` only once it saves more than it
        costs.
        """
        ...


@runtime_checkable
class ProbingPolicy(Policy, Protocol):
    """A policy that asks for the measured errors of codecs that are not in use.

    Before each observation every probe encodes the gradients of that step. The probes
    run on the devices, and only the errors are copied to the host.
    """

    @property
    def probes(self) -> tuple[str, ...]:
        """The codecs to try, as text."""
        ...


DENSE = "dense"
"""The codec of uncompressed gradients, and of small gradients in any plan."""

MIN_ELEMENTS = 1024
"""Gradients with fewer elements are sent without a codec; the value is CGX's least
layer size (torch_cgx).
"""


def canonical_text(text: str) -> str:
    """The text of a codec in the form of a step's reports.

    Raises:
      InputError: the text names no codec.

    >>> canonical_text(" int8:block=256 ")
    'int8'
    """
    return format_codec(parse_codec(text))


def managed_gradients(gradients: Mapping[str, GradientReport]) -> list[str]:
    """The gradients that a policy may change: the gradients that are not sent dense.

    If all gradients are sent dense: the gradients with at least `MIN_ELEMENTS`
    elements.
    """
    chosen = [name for name, report in gradients.items() if report.codec != DENSE]
    if chosen:
        return sorted(chosen)
    return sorted(n for n, r in gradients.items() if r.elements >= MIN_ELEMENTS)


def squared_norms(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients of the squared norms of sent values and of values to send."""
    sent = wanted = 0.0
    for report in reports:
        square = report.norm**2
        wanted += square
        sent += report.gain * square
    return sent, wanted


def sum_norms(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients of the norms of sent values and of the gradients without
    residuals.
    """
    sent = raw = 0.0
    for report in reports:
        sent += math.sqrt(report.gain) * report.norm
        raw += report.gradient_norm
    return sent, raw


def sum_updates(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients of the size of updates, with codecs and with dense gradients.

    Adam's family divides by the root of the mean square of received values, so that all
    elements have equal weight, whatever the norm of their gradient. Values that arrive
    late, as a few large values, have the same mean and a larger mean square. The
    updates from such values are smaller by the ratio of the norms. Updates are also
    smaller if less arrives than the gradients contain.
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
    """Sums over gradients of the signal of sent values and of the signal of dense
    gradients.

    Gradients without a measured signal are left out.
    """
    sent = dense = 0.0
    for report in reports:
        if report.signal is not None:
            sent += report.signal.sent
            dense += report.signal.dense
    return sent, dense


def signal_updates(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """As `sum_signals`, for updates by Adam's family.

    Optimizers of Adam's family divide by the root of the mean square of received
    values. So each signal is divided by the root mean square of an element: of the sent
    values, and of the dense gradient. The squares must be the optimizer's second
    moments (`autopar.compression.policies.gravac.update_moments`).
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
    """The wanted codecs that differ from those in use; None if none differ."""
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
      state: memory of the policy, a dataclass of JSON values.
    """

    state: Any

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores a saved state.

        Raises:
          InputError: the state belongs to another policy.
        """
        restore_state(self.state, values, type(self).__name__)


def restore_state(state: Any, values: Mapping[str, Any], where: str) -> None:
    """Fills a policy's state with the result of `Remembering.state_dict`.

    Raises:
      InputError: the state was saved by another policy.
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
