"""CBC through PuLP, which ships it: the fallback where HiGHS cannot be installed."""

import numpy as np
import pulp

from autopar_solver.ilp.backend import Answer, Limits
from autopar_solver.ilp.program import Program


def solve_cbc(program: Program, limits: Limits, start: np.ndarray | None) -> Answer:
    """Solves a program with CBC on one thread."""
    model = pulp.LpProblem("autopar", pulp.LpMinimize)
    variables = _add_variables(model, program)
    pairs = zip(variables, program.costs.tolist(), strict=True)
    model += pulp.LpAffineExpression(list(pairs))
    for row in range(program.num_rows):
        _add_row(model, program, variables, row)
    if start is not None:
        for variable, value in zip(variables, start.tolist(), strict=True):
            variable.setInitialValue(value)
    solver = pulp.PULP_CBC_CMD(
        msg=False,
        threads=1,
        timeLimit=limits.seconds,
        maxNodes=limits.nodes,
        gapRel=0.0,
        gapAbs=limits.gap,
        warmStart=start is not None,
        options=["primalTolerance 1e-9"],
    )
    model.solve(solver)
    return _answer(model, program, variables, limits)


def _add_variables(model: pulp.LpProblem, program: Program) -> list[pulp.LpVariable]:
    kinds = [pulp.LpBinary] * program.num_binary
    kinds += [pulp.LpContinuous] * (len(program.costs) - program.num_binary)
    return [
        model.add_variable(f"v{index}", 0, most, kind)
        for index, (most, kind) in enumerate(
            zip(program.most.tolist(), kinds, strict=True)
        )
    ]


def _add_row(
    model: pulp.LpProblem,
    program: Program,
    variables: list[pulp.LpVariable],
    row: int,
) -> None:
    entries = slice(program.starts[row], program.starts[row + 1])
    columns = program.columns[entries].tolist()
    values = program.values[entries].tolist()
    total = pulp.LpAffineExpression(
        [(variables[c], value) for c, value in zip(columns, values, strict=True)]
    )
    first_cut = program.num_rows - len(program.names)
    if row < first_cut:
        model += total == float(program.lower[row]), f"equal_{row}"
    else:
        model += total <= float(program.upper[row]), program.names[row - first_cut]


def _answer(
    model: pulp.LpProblem,
    program: Program,
    variables: list[pulp.LpVariable],
    limits: Limits,
) -> Answer:
    if model.status == pulp.LpStatusInfeasible:
        return Answer(None, np.inf, True)
    if model.sol_status not in (
        pulp.LpSolutionOptimal,
        pulp.LpSolutionIntegerFeasible,
    ):
        return Answer(None, -np.inf, False)
    values = np.array([variable.value() or 0.0 for variable in variables])
    finished = model.sol_status == pulp.LpSolutionOptimal
    # PuLP does not pass on CBC's bound; only a finished solve proves one.
    cost = float(values @ program.costs)
    return Answer(values, cost - limits.gap if finished else -np.inf, finished)
