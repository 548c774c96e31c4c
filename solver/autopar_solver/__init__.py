"""Chooses one strategy per operator at the least total cost that fits in memory.

>>> import numpy as np
>>> problem = ShardingProblem(
...     name="pair",
...     node_costs=(np.array([1.0, 2.0]), np.array([0.0])),
...     edges=((0, 1),),
...     edge_costs=(np.array([[5.0], [1.0]]),),
... )
>>> solve(problem).choices
(1, 0)
"""

from autopar_solver.selection.check import (
    check_selection,
    fits_budgets,
    recompute,
    wire_weights,
)
from autopar_solver.selection.lgreco import (
    LGreCoProblem,
    LGreCoResult,
    solve_lgreco,
    solve_lgreco_ilp,
)
from autopar_solver.selection.problem import CodecSelection
from autopar_solver.selection.relaxation import SelectionRelaxation, solve_relaxation
from autopar_solver.selection.solution import SelectionCost, SelectionResult
from autopar_solver.selection.solve import solve_selection
from autopar_solver.sharding.check import (
    Evaluation,
    check_solution,
    evaluate_choices,
    memory_profile,
)
from autopar_solver.sharding.contest import (
    read_contest_instance,
    read_contest_solution,
    write_contest_instance,
    write_contest_solution,
)
from autopar_solver.sharding.infeasibility import (
    InfeasibilityExplanation,
    LiveTerm,
    explain_infeasibility,
)
from autopar_solver.sharding.problem import MemoryTerm, ShardingProblem
from autopar_solver.sharding.solution import ReductionReport, Solution
from autopar_solver.sharding.solve import solve
from autopar_solver.status import Status

__all__ = [
    "CodecSelection",
    "Evaluation",
    "InfeasibilityExplanation",
    "LGreCoProblem",
    "LGreCoResult",
    "LiveTerm",
    "MemoryTerm",
    "ReductionReport",
    "SelectionCost",
    "SelectionRelaxation",
    "SelectionResult",
    "ShardingProblem",
    "Solution",
    "Status",
    "check_selection",
    "check_solution",
    "evaluate_choices",
    "explain_infeasibility",
    "fits_budgets",
    "memory_profile",
    "read_contest_instance",
    "read_contest_solution",
    "recompute",
    "solve",
    "solve_lgreco",
    "solve_lgreco_ilp",
    "solve_relaxation",
    "solve_selection",
    "wire_weights",
    "write_contest_instance",
    "write_contest_solution",
]
