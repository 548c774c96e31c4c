"""Solves programs with HiGHS.

HiGHS takes the arrays as they are: building a PuLP model would take longer than solving
most programs.
"""

import highspy
import numpy as np

from autopar_solver.ilp.program import IntegerProgram, ProgramAnswer, StopCriteria

TOLERANCE = 1e-9
"""By how much rows may be broken; the least HiGHS accepts is 1e-10."""


_SHORT: dict[str, bool | float | str] = {
    "presolve": "off",
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}
"""What HiGHS leaves out of a program that is reduced: its simplification, and smaller
programs that it makes of this one. Each takes longer than it saves. A version of HiGHS
that lacks one of these options goes on without."""


class _Quiet(highspy.Highs):
    """A solver that prints nothing.

    Since 1.16, `highspy.Highs` enables its callbacks as it is made, and HiGHS prints
    its version before anybody can ask it for silence.
    """

    def enableCallbacks(self) -> None:
        """Asks for silence first."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def solve_highs(
    program: IntegerProgram, stop: StopCriteria, start: np.ndarray | None
) -> ProgramAnswer:
    """Solves a program with HiGHS on one thread: same input, same answer."""
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
        The values of all variables, and for each named row what one unit less on its
        right side would add to the cost.
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
        # Below the cutoff HiGHS may stop without a bound of its own.
        proved = min(float(info.objective_function_value), stop.cutoff)
        bound = max(bound, proved - stop.gap)
    return ProgramAnswer(values, bound, finished)
