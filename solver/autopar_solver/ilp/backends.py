"""The solver backends by name."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pulp

from autopar_errors import InputError
from autopar_solver.ilp.highs import (
    Backend,
    IntegerProgram,
    ProgramAnswer,
    StopCriteria,
    solve_highs,
)

# Solves programs with CBC through PuLP.
#
# PuLP ships CBC, so CBC is available even where HiGHS does not run.


def solve_cbc(
    program: IntegerProgram, stop: StopCriteria, start: np.ndarray | None
) -> ProgramAnswer:
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
        timeLimit=stop.seconds,
        maxNodes=stop.branches,
        gapRel=0.0,
        gapAbs=stop.gap,
        warmStart=start is not None,
        options=["primalTolerance 1e-9"],
    )
    model.solve(solver)
    return _answer(model, program, variables, stop)


def _add_variables(
    model: pulp.LpProblem, program: IntegerProgram
) -> list[pulp.LpVariable]:
    # LpBinary is not used, because PuLP would then ignore the bound of 0.
    kinds = [pulp.LpInteger] * program.num_binary
    kinds += [pulp.LpContinuous] * (len(program.costs) - program.num_binary)
    return [
        model.add_variable(f"v{index}", 0, most, kind)
        for index, (most, kind) in enumerate(
            zip(program.most.tolist(), kinds, strict=True)
        )
    ]


def _add_row(
    model: pulp.LpProblem,
    program: IntegerProgram,
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
    program: IntegerProgram,
    variables: list[pulp.LpVariable],
    stop: StopCriteria,
) -> ProgramAnswer:
    if model.status == pulp.LpStatusInfeasible:
        return ProgramAnswer(None, np.inf, True)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return ProgramAnswer(None, -np.inf, False)
    values = np.array([variable.value() or 0.0 for variable in variables])
    finished = model.sol_status == pulp.LpSolutionOptimal
    # PuLP does not return CBC's bound; only a finished solve proves a bound.
    cost = float(values @ program.costs)
    return ProgramAnswer(values, cost - stop.gap if finished else -np.inf, finished)


BackendName = Literal["highs", "cbc"]


def backend_of(name: str) -> Backend:
    """Returns the backend with a given name.

    Raises:
        InputError: there is no backend of this name.
    """
    backends: dict[str, Backend] = {"highs": solve_highs, "cbc": solve_cbc}
    if name not in backends:
        raise InputError(f'backend {name!r}: there are only "highs" and "cbc".')
    return backends[name]
