"""An integer program as a value, when its solver may stop, and what it answers."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IntegerProgram:
    """A mixed-integer program: minimise ``costs @ v``, ``lower <= A v <= upper``.

    The first ``num_binary`` variables are binary. All lie between 0 and ``most``, which
    is 0 for a variable that may not be used. ``A`` is stored by rows: row ``r`` has the
    entries ``starts[r]:starts[r + 1]`` of ``columns`` and ``values``. ``names`` belong
    to the last rows; the rows before them are equalities. ``reduced`` says that it is
    small for what it is: a backend that can leave its own reductions out does so.
    """

    costs: np.ndarray
    most: np.ndarray
    num_binary: int
    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    names: tuple[str, ...]
    reduced: bool = False

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.lower)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StopCriteria:
    """When a backend may stop.

    Attributes:
        seconds: wall-clock time; None for no limit.
        gap: absolute difference of cost and bound that counts as proved, in the
            program's units.
        cutoff: only better costs are of interest; ``inf`` if all are.
        branches: nodes of the search tree; a limit that does not depend on the
            machine. None for no limit.
    """

    seconds: float | None
    gap: float
    cutoff: float = np.inf
    branches: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ProgramAnswer:
    """What a backend found.

    Attributes:
        values: of all variables; None if nothing was found.
        bound: no solution is cheaper; ``inf`` if there is none under the cutoff.
        finished: whether the program was solved to the gap or to infeasibility.
    """

    values: np.ndarray | None
    bound: float
    finished: bool


Backend = Callable[[IntegerProgram, StopCriteria, np.ndarray | None], ProgramAnswer]
"""``(program, stop, start) -> answer``; ``start`` holds values of all variables."""
