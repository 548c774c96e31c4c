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

from autopar_solver.problem import MemoryTerm, ShardingProblem
from autopar_solver.solution import ReductionReport, Solution, Status
from autopar_solver.solve import solve

__all__ = [
    "MemoryTerm",
    "ReductionReport",
    "ShardingProblem",
    "Solution",
    "Status",
    "solve",
]
