"""Records the proposals of a search and their results, if the caller asks for it."""

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
      proposer: name of the rule or problem that made the proposal.
      mesh: the sizes of the mesh's axes.
      step_s: predicted seconds of a step; None: the proposal led to no plan.
      peak_bytes: most bytes live at once on one device; 0 without a plan.
      note: the reason why the proposal led to no plan; '' if it did.
      cpu_s: CPU seconds that the proposal took.
      program: rematerialised layers and number of microbatches, as text; '': the user's
        step without a change.
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
    """A context that yields a list, to which every proposal made in the context is
    added.
    """
    found: list[Proposal] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


@contextlib.contextmanager
def of_program(text: str) -> Generator[None]:
    """A context whose proposals are recorded as proposals for a certain program.

    Args:
      text: the program's rematerialised layers and number of microbatches.
    """
    token = _PROGRAM.set(text)
    try:
        yield
    finally:
        _PROGRAM.reset(token)


def program_text() -> str:
    """Returns the current program as text after a comma; '' if no program is named."""
    name = _PROGRAM.get()
    return f", {name}" if name else ""


def record(proposal: Proposal) -> None:
    """Adds a proposal to the list of `recorded_proposals`, if there is one."""
    known = _RECORD.get()
    if known is not None:
        known.append(proposal)
