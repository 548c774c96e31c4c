"""The interface of policies, which change the codecs of gradients during training.

At regular intervals a policy gets the telemetry of a step, such as errors and norms (an
*observation*). It returns the codecs to use from the next step on, or None to keep the
codecs. Each combination of codecs needs one compiled program, which is kept: if a
policy alternates between a few combinations, each of them is compiled only once. A
policy that often changes parameters of codecs sets ``often = True``. Parameters of
codecs then become inputs of the program where this is possible
(`autopar.compression.adjusting`).

If the only purpose of a change is to save time, a policy returns the codecs as
`Saving`. The run then postpones the change as long as compiling the new program would
take longer than the change would save. As long as the policy wants a postponed change,
it must return the codecs again at each observation. A policy can state in ``horizon``
for how many steps its changes are expected to last, if it is more than ``every``. With
``signals = True``, steps measure how much of the true gradient the messages carry, and
reports contain this signal.

>>> class Halve:
...     every = 100
...     def observe(self, seen):
...         return {name: "int8" for name in seen.gradients}

The functions below help policies to select gradients, to read telemetry, and to keep a
state.

autopar's policies are frozen dataclasses with options and one small state
(`Remembering`).
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
    """How much of the true gradient the messages carry, summed over steps.

    Inner products are taken between different workers, so that the noise of the
    workers' gradients cancels on average (`autopar.compression.synchronise`).

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
        """Reads the signal from a row of telemetry; None if the signal was not
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
      dense_bytes: bytes that one device would send for it in a step without a codec.
      norm: L2 norm of the values to send (the gradient plus the residual) over all
        workers: the root of the sum of the workers' squared norms.
      relative_error: L2 norm of the error of the sent values, divided by ``norm``.
      gain: squared norm of the sent values, divided by the squared norm of the values
        to send.
      residual_norm: L2 norm of the residuals of all workers.
      gradient_norm: as ``norm``, but without the residual.
      level: with a fallback, the level that the step used, and to which bytes and
        errors refer: 0 is ``codec``, 1 is the first codec of the fallback.
      taken: with a fallback, for each level the number of steps that used it since the
        last observation or the last change of codecs; otherwise empty.
      skipped: number of steps so far that were skipped because any gradient of the step
        was not finite.
      put_off: the codec for which a policy has asked, if the run has postponed the
        change (`Saving`); otherwise ''.
      signal: the signal since the last observation, for a policy with ``signals =
        True``; None if it was not measured.

    If ``norm`` is not finite, ``relative_error`` and ``gain`` are NaN.
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
    """A codec that was tried on a gradient, with its measured error.

    Attributes:
      text: the codec.
      error: relative L2 error of the values that this codec would send.
      wire_bytes: bytes that a worker sends in a step.
      rounds: rounds of communication in a step.
    """

    text: str
    error: float
    wire_bytes: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredErrors:
    """The errors of several codecs on one gradient, measured without sending.

    Attributes:
      elements: number of elements of the whole gradient.
      local_elements: number of elements that one device encodes.
      norm: L2 norm of the values that a worker has to send (gradient plus residual), as
        a root mean square over the workers.
      choices: the requested codecs, without those that cannot send the gradient.
    """

    elements: int
    local_elements: int
    norm: float
    choices: tuple[Choice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What a policy learns at an observation.

    Attributes:
      step: number of completed steps.
      seconds: mean seconds of a step since the last observation, without steps that
        compiled; equal on all processes.
      gradients: name of a parameter -> report of its gradient.
      finite: whether every gradient was finite.
      measured: name of a parameter -> errors of the codecs `ProbingPolicy.probes`, for
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
    """A change of codecs whose only purpose is to save time: gradient -> codec.

    The error of the codecs in use is not too large, so the run may postpone the change.
    A `Saving` is equal to a dict with the same codecs.

    >>> Saving({"params/w": "int4"}) == {"params/w": "int4"}
    True
    """

    __slots__ = ("_codecs",)

    def __init__(self, codecs: Mapping[str, str]) -> None:
        """Stores a copy of the codecs."""
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
        """The text of a Python call that makes this object."""
        return f"Saving({self._codecs!r})"


class Policy(Protocol):
    """Chooses codecs during training; every process must make the same choice."""

    @property
    def every(self) -> int:
        """Steps between observations."""
        ...

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """Gradient -> codec from now on; other gradients keep their codecs. None: no
        change.

        The run applies a plain mapping at once, and a `Saving` once it saves more time
        than its compilation takes.
        """
        ...


@runtime_checkable
class ProbingPolicy(Policy, Protocol):
    """A policy that asks for the measured errors of codecs that are not in use.

    In the step before each observation, each of the codecs in `probes` encodes the
    gradients, without sending anything. The devices run these codecs, and only the
    errors are copied to the host.
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
    """The text of a codec as reports write it.

    Raises:
      InputError: the text is not the text of a codec.

    >>> canonical_text(" int8:block=256 ")
    'int8'
    """
    return format_codec(parse_codec(text))


def managed_gradients(gradients: Mapping[str, GradientReport]) -> list[str]:
    """The gradients whose codecs a policy may change: those that are not sent dense.

    If all gradients are sent dense, the result has the gradients with at least
    `MIN_ELEMENTS` elements.
    """
    chosen = [name for name, report in gradients.items() if report.codec != DENSE]
    if chosen:
        return sorted(chosen)
    return sorted(n for n, r in gradients.items() if r.elements >= MIN_ELEMENTS)


def squared_norms(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients: of the squared norms of sent values, and of values to
    send.
    """
    sent = wanted = 0.0
    for report in reports:
        square = report.norm**2
        wanted += square
        sent += report.gain * square
    return sent, wanted


def sum_norms(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Sums over gradients: of the norms of sent values, and of the norms of gradients
    without residuals.
    """
    sent = raw = 0.0
    for report in reports:
        sent += math.sqrt(report.gain) * report.norm
        raw += report.gradient_norm
    return sent, raw


def sum_updates(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """Two sums of the sizes of Adam's updates: with codecs, and with dense gradients.

    Adam and similar optimizers divide an element by the root mean square of the values
    received for it, so all elements matter equally, whatever the norm of their
    gradient. Delayed values arrive as a few large ones: they have the same mean and a
    larger mean square, so the updates from them are smaller, by the ratio of the norms.
    Updates are also smaller if codecs send less than the gradients contain.
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
    """Sums over gradients: of the signal of sent values, and of the signal of dense
    gradients.

    Gradients without a measured signal are not counted.
    """
    sent = dense = 0.0
    for report in reports:
        if report.signal is not None:
            sent += report.signal.sent
            dense += report.signal.dense
    return sent, dense


def signal_updates(reports: Iterable[GradientReport]) -> tuple[float, float]:
    """The same sums as `sum_signals`, but for the updates that Adam makes.

    Adam and similar optimizers divide by the root mean square of received values. So
    the signal of sent values is divided by the root mean square of the elements of sent
    values, and the signal of the dense gradient by that of the elements of the dense
    gradient. The squares in the reports must be the optimizer's second moments
    (`autopar.compression.policies.gravac.update_moments`).
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
    """The codecs in ``wish`` that differ from the codecs in use; None if none does."""
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
    """Base of policies with a state, which is saved and restored with the run.

    Attributes:
      state: what the policy remembers, a dataclass of JSON values.
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
    """Sets the fields of a policy's state to the result of `Remembering.state_dict`.

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
