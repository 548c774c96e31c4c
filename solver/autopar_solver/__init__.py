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

from autopar_solver.lgreco import (
    LGreCoProblem,
    LGreCoResult,
    solve_lgreco,
    solve_lgreco_ilp,
)
from autopar_solver.problem import MemoryTerm, ShardingProblem
from autopar_solver.selection import (
    CodecSelection,
    SelectionCost,
    SelectionResult,
    recompute,
    wire_weights,
)
from autopar_solver.selection_ilp import solve_selection
from autopar_solver.selection_relaxation import SelectionRelaxation, solve_relaxation
from autopar_solver.solution import ReductionReport, Solution, Status
from autopar_solver.solve import solve

__all__ = [
    "CodecSelection",
    "LGreCoProblem",
    "LGreCoResult",
    "MemoryTerm",
    "ReductionReport",
    "SelectionCost",
    "SelectionRelaxation",
    "SelectionResult",
    "ShardingProblem",
    "Solution",
    "Status",
    "recompute",
    "solve",
    "solve_lgreco",
    "solve_lgreco_ilp",
    "solve_relaxation",
    "solve_selection",
    "wire_weights",
]
