"""HiGHS, handed arrays: building a PuLP model costs more than solving most programs."""

import highspy
import numpy as np

from autopar_solver.ilp.backend import Answer, Limits
from autopar_solver.ilp.program import Program

TOLERANCE = 1e-9
"""By how much rows may be broken; the least HiGHS accepts is 1e-10."""


def solve_highs(program: Program, limits: Limits, start: np.ndarray | None) -> Answer:
    """Solves a program with HiGHS on one thread: same input, same answer."""
    highs = highspy.Highs()
    _set_options(highs, limits)
    highs.passModel(_model(program))
    if start is not None:
        highs.setSolution(
            len(start), np.arange(len(start), dtype=np.int32), start.astype(np.float64)
        )
    highs.run()
    return _answer(highs, limits)


def _set_options(highs: highspy.Highs, limits: Limits) -> None:
    options: dict[str, bool | int | float | str] = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": limits.gap,
        "mip_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
    }
    if limits.seconds is not None:
        options["time_limit"] = max(limits.seconds, 0.01)
    if limits.nodes is not None:
        options["mip_max_nodes"] = limits.nodes
    if np.isfinite(limits.cutoff):
        options["objective_bound"] = limits.cutoff
    for name, value in options.items():
        highs.setOptionValue(name, value)


def _model(program: Program) -> highspy.HighsLp:
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


def _answer(highs: highspy.Highs, limits: Limits) -> Answer:
    status = highs.getModelStatus()
    info = highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kObjectiveBound):
        return Answer(None, np.inf, True)
    found = info.primal_solution_status == 2  # kSolutionStatusFeasible
    values = np.array(highs.getSolution().col_value) if found else None
    bound = float(info.mip_dual_bound)
    finished = status == kinds.kOptimal
    if finished:
        # Below the cutoff HiGHS may stop without a bound of its own.
        proved = min(float(info.objective_function_value), limits.cutoff)
        bound = max(bound, proved - limits.gap)
    return Answer(values, bound, finished)
