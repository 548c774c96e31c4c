"""What a search proposes, and how each proposal is judged, where that is asked for."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator

_RECORD: contextvars.ContextVar[list[Proposal] | None] = contextvars.ContextVar(
    "autopar_proposals", default=None
)
_PROGRAM: contextvars.ContextVar[str] = contextvars.ContextVar(
    "autopar_program", default=""
)


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """One proposal of a search.

    Attributes:
      proposer: what made it.
      mesh: the sizes of the mesh's axes.
      step_s: predicted seconds of a step; None: no plan came of it.
      peak_bytes: most bytes live at once on one device; 0 without a plan.
      note: why no plan came of it; else ''.
      cpu_s: seconds of the CPU that it took.
      program: what is computed again, and in how many microbatches; '': as written.
    """

    proposer: str
    mesh: str
    step_s: float | None = None
    peak_bytes: float = 0.0
    note: str = ""
    cpu_s: float = 0.0
    program: str = dataclasses.field(default_factory=_PROGRAM.get)


@contextlib.contextmanager
def recorded_proposals() -> Generator[list[Proposal]]:
    """A list to which all proposals are added that are made within."""
    found: list[Proposal] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


@contextlib.contextmanager
def of_program(text: str) -> Generator[None]:
    """Within it, proposals are of a program that is split or computes again."""
    token = _PROGRAM.set(text)
    try:
        yield
    finally:
        _PROGRAM.reset(token)


def program_text() -> str:
    """The program that is planned, behind a comma; '' where none is named."""
    name = _PROGRAM.get()
    return f", {name}" if name else ""


def record(proposal: Proposal) -> None:
    """Adds a proposal where they are recorded."""
    known = _RECORD.get()
    if known is not None:
        known.append(proposal)
