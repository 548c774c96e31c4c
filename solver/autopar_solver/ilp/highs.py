"""Solves mixed-integer and linear programs with HiGHS.

HiGHS takes the arrays directly. For most programs, building a PuLP model would take
longer than solving them.

The module also solves one linear program (`highest_minimum`). Several planes are linear
functions of weights ``w`` between 0 and 1. The program finds the weights at which the
lowest plane is as high as possible. It maximises this height ``h`` such that

    h <= heights[i] + slopes[i] @ w    for each plane i       (under_plane)
    sum of w over the members of g <= 1  for each group g     (once)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import highspy
import numpy as np

from autopar_errors import InputError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IntegerProgram:
    """A mixed-integer program: minimise ``costs @ v``, ``lower <= A v <= upper``.

    The first ``num_binary`` variables are binary. All variables are between 0 and
    ``most``, which is 0 for a forbidden variable. ``A`` is stored by rows: row ``r``
    has the entries ``starts[r]:starts[r + 1]`` of ``columns`` and ``values``. ``names``
    are the names of the last rows; all earlier rows are equalities. ``reduced`` asks a
    backend to skip its presolve, if it can, because the program is already reduced.
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
    """The limits at which a backend may stop.

    Attributes:
        seconds: wall-clock time; None for no limit.
        gap: the difference of cost and bound at which a solution counts as optimal, in
            the units of ``costs``.
        cutoff: only solutions with lower costs are searched; ``inf`` for all solutions.
        branches: the largest number of nodes of the search tree; None for no limit.
            Unlike seconds, this limit does not depend on the machine.
    """

    seconds: float | None
    gap: float
    cutoff: float = np.inf
    branches: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ProgramAnswer:
    """The result of a backend.

    Attributes:
        values: the values of all variables; None if no solution was found.
        bound: a lower bound of the cost; ``inf`` if there is no solution below the
            cutoff.
        finished: whether the program was solved to the gap or to infeasibility.
    """

    values: np.ndarray | None
    bound: float
    finished: bool


Backend = Callable[[IntegerProgram, StopCriteria, np.ndarray | None], ProgramAnswer]
"""``(program, stop, start) -> answer``; ``start`` holds values of all variables."""


TOLERANCE = 1e-9
"""Largest violation of a row; HiGHS accepts 1e-10 at the least."""


_SHORT: dict[str, bool | float | str] = {
    "presolve": "off",
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}
"""HiGHS options for a reduced program: no presolve, and no heuristics that solve
smaller programs, because each takes longer than it saves. A version of HiGHS without
one of these options ignores it."""


class _Quiet(highspy.Highs):
    """A solver that prints nothing.

    Since 1.16, the constructor of `highspy.Highs` enables callbacks, and HiGHS then
    prints its version before a caller can disable output.
    """

    def enableCallbacks(self) -> None:
        """Disables output before callbacks are enabled."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def solve_highs(
    program: IntegerProgram, stop: StopCriteria, start: np.ndarray | None
) -> ProgramAnswer:
    """Solves a program with HiGHS on one thread; equal inputs give equal answers."""
    highs = _Quiet()
    _set_options(highs, stop)
    if program.reduced:
        for name, off in _SHORT.items():
            highs.setOptionValue(name, off)
    highs.passModel(_model(program))
    if start is not None:
        highs.setSolution(
            len(start), np.arange(len(start), dtype=np.int32), start.astype(np.float64)
        )
    highs.run()
    return _answer(highs, stop)


def solve_without_integrality(
    program: IntegerProgram,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Solves the linear relaxation; None if it has no solution.

    Returns:
        The values of all variables, and for each named row the increase of the cost if
        its right-hand side decreases by one unit.
    """
    highs = _Quiet()
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        highs.setOptionValue(name, value)
    size, rows = len(program.costs), program.num_rows
    highs.addVars(size, np.zeros(size), program.most)
    highs.changeColsCost(size, np.arange(size, dtype=np.int32), program.costs)
    highs.addRows(
        rows,
        program.lower,
        program.upper,
        len(program.values),
        program.starts[:-1].astype(np.int32),
        program.columns.astype(np.int32),
        program.values,
    )
    highs.run()
    kinds = highspy.HighsModelStatus
    status = highs.getModelStatus()
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return None
    assert status == kinds.kOptimal, status
    solution = highs.getSolution()
    duals = -np.array(solution.row_dual)[rows - len(program.names) :]
    return np.array(solution.col_value), duals


def _set_options(highs: highspy.Highs, stop: StopCriteria) -> None:
    options: dict[str, bool | int | float | str] = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": stop.gap,
        "mip_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
    }
    if stop.seconds is not None:
        options["time_limit"] = max(stop.seconds, 0.01)
    if stop.branches is not None:
        options["mip_max_nodes"] = stop.branches
    if np.isfinite(stop.cutoff):
        options["objective_bound"] = stop.cutoff
    for name, value in options.items():
        highs.setOptionValue(name, value)


def _model(program: IntegerProgram) -> highspy.HighsLp:
    size = len(program.costs)
    model = highspy.HighsLp()
    model.num_col_ = size
    model.num_row_ = program.num_rows
    model.col_cost_ = program.costs
    model.col_lower_ = np.zeros(size)
    model.col_upper_ = program.most
    model.row_lower_ = program.lower
    model.row_upper_ = program.upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.num_col_ = size
    model.a_matrix_.num_row_ = program.num_rows
    model.a_matrix_.start_ = program.starts.astype(np.int32)
    model.a_matrix_.index_ = program.columns.astype(np.int32)
    model.a_matrix_.value_ = program.values
    kinds = [highspy.HighsVarType.kInteger] * program.num_binary
    kinds += [highspy.HighsVarType.kContinuous] * (size - program.num_binary)
    model.integrality_ = kinds
    return model


def _answer(highs: highspy.Highs, stop: StopCriteria) -> ProgramAnswer:
    status = highs.getModelStatus()
    info = highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kObjectiveBound):
        return ProgramAnswer(None, np.inf, True)
    found = info.primal_solution_status == 2  # kSolutionStatusFeasible
    values = np.array(highs.getSolution().col_value) if found else None
    bound = float(info.mip_dual_bound)
    finished = status == kinds.kOptimal
    if finished:
        # With a cutoff, HiGHS may stop without a bound.
        proved = min(float(info.objective_function_value), stop.cutoff)
        bound = max(bound, proved - stop.gap)
    return ProgramAnswer(values, bound, finished)


def highest_minimum(
    heights: Sequence[float] | np.ndarray, slopes: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Returns the weights at which the minimum of several planes is highest.

    Args:
        heights: ``[planes]``, the height of each plane at weights of 0; not negative.
        slopes: ``[planes, weights]``, the slope of each plane along each weight.
        groups: ``[groups, weights]``, true for the members of each group.

    Returns:
        ``[weights]``; if several sets of weights are optimal, one of them.

    Raises:
        InputError: there is no plane, a height is negative, or the shapes of the arrays
            do not match.

    >>> highest_minimum([1.0, 3.0], np.array([[2.0], [-2.0]]), np.array([[True]]))
    array([0.5])
    """
    base = np.asarray(heights, np.float64)
    planes, weights = slopes.shape
    if len(base) != planes or groups.shape[1] != weights or not planes:
        raise InputError(
            f"highest_minimum: {len(base)} heights, slopes {slopes.shape} and groups "
            f"{groups.shape} do not fit together; give a row of slopes for each "
            "height, one at least, and a column for each weight."
        )
    if base.min() < 0:
        raise InputError(f"highest_minimum: a height is negative: {base.min():g}.")
    answer = solve_without_integrality(_program(base, slopes, groups))
    # A solution always exists, because weights of 0 are feasible.
    assert answer is not None
    return answer[0][:weights]


def _program(
    base: np.ndarray, slopes: np.ndarray, groups: np.ndarray
) -> IntegerProgram:
    """The program over the weights and the height, in units of the largest height."""
    planes, weights = slopes.shape
    scale = base.max() or 1.0
    under = np.hstack([-slopes / scale, np.full((planes, 1), 1.0 / scale)])
    once = np.hstack([groups.astype(np.float64), np.zeros((len(groups), 1))])
    matrix = np.vstack([under, once])
    rows, size = matrix.shape
    return IntegerProgram(
        costs=np.append(np.zeros(weights), -1.0),
        most=np.append(np.ones(weights), np.inf),
        num_binary=0,
        starts=np.arange(rows + 1) * size,
        columns=np.tile(np.arange(size), rows),
        values=matrix.ravel(),
        lower=np.full(rows, -np.inf),
        upper=np.append(base / scale, np.ones(len(groups))),
        names=(
            *(f"under_plane_{i}" for i in range(planes)),
            *(f"once_{g}" for g in range(len(groups))),
        ),
    )
