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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, Self, final, runtime_checkable


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
