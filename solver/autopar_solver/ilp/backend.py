"""What a backend answers, and the choice of backend by name."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from autopar_solver.ilp.program import Program

BackendName = Literal["highs", "cbc"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """When a backend may stop.

    Attributes:
        seconds: wall-clock time; None for no limit.
        gap: absolute difference of cost and bound that counts as proved, in the
            program's units.
        cutoff: only better costs are of interest; ``inf`` if all are.
        nodes: branches of the search tree; a limit that does not depend on the
            machine. None for no limit.
    """

    seconds: float | None
    gap: float
    cutoff: float = np.inf
    nodes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a backend found.

    Attributes:
        values: of all variables; None if nothing was found.
        bound: no solution is cheaper; ``inf`` if there is none under the cutoff.
        finished: whether the program was solved to the gap or to infeasibility.
    """

    values: np.ndarray | None
    bound: float
    finished: bool


Backend = Callable[[Program, Limits, np.ndarray | None], Answer]
"""``(program, limits, start) -> answer``; ``start`` holds values of all variables."""


def backend(name: str) -> Backend:
    """The backend of a name.

    Raises:
        ValueError: there is none.
    """
    if name == "highs":
        from autopar_solver.ilp.highs import solve_highs

        return solve_highs
    if name == "cbc":
        from autopar_solver.ilp.cbc import solve_cbc

        return solve_cbc
    raise ValueError(f'backend {name!r}: there are only "highs" and "cbc".')
