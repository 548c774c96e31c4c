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

from autopar_solver.allocation.solve import (
    Allocated,
    AllocationProblem,
    check_allocation,
    deal_out,
    solve_allocation,
)
from autopar_solver.ilp.highs import highest_minimum
from autopar_solver.selection.lgreco import (
    LGreCoProblem,
    LGreCoResult,
    solve_lgreco,
    solve_lgreco_ilp,
)
from autopar_solver.selection.problem import (
    CodecSelection,
    SelectionCost,
    SelectionResult,
    check_selection,
    fits_budgets,
    recompute,
    wire_weights,
)
from autopar_solver.selection.program import SelectionRelaxation, solve_relaxation
from autopar_solver.selection.solve import solve_selection
from autopar_solver.sharding.contest import (
    read_contest_instance,
    read_contest_solution,
    write_contest_instance,
    write_contest_solution,
)
from autopar_solver.sharding.problem import (
    ChoiceEvaluation,
    MemoryTerm,
    ReductionReport,
    ShardingProblem,
    Solution,
    check_solution,
    evaluate_choices,
    memory_profile,
)
from autopar_solver.sharding.rounds import (
    InfeasibilityExplanation,
    LiveTerm,
    explain_infeasibility,
    solve,
)
from autopar_solver.stages.completion import (
    check_stages,
    evaluate_pipeline,
    task_seconds,
)
from autopar_solver.stages.problem import (
    BindingMemory,
    DeviceGroup,
    LayerCosts,
    Pipeline,
    PipelineCost,
    SharedParameter,
    StageProblem,
    StageSolution,
    SubmeshOption,
)
from autopar_solver.stages.schedules.play import (
    Schedule,
    ScheduleKind,
    ScheduleTable,
    ScheduleTask,
    TaskKind,
    TaskSeconds,
    TaskTimes,
    check_table,
    count_alive,
    equal_parts,
    make_table,
    play,
)
from autopar_solver.stages.solve import solve_stages
from autopar_solver.status import Status

__all__ = [
    "Allocated",
    "AllocationProblem",
    "BindingMemory",
    "ChoiceEvaluation",
    "CodecSelection",
    "DeviceGroup",
    "InfeasibilityExplanation",
    "LGreCoProblem",
    "LGreCoResult",
    "LayerCosts",
    "LiveTerm",
    "MemoryTerm",
    "Pipeline",
    "PipelineCost",
    "ReductionReport",
    "Schedule",
    "ScheduleKind",
    "ScheduleTable",
    "ScheduleTask",
    "SelectionCost",
    "SelectionRelaxation",
    "SelectionResult",
    "ShardingProblem",
    "SharedParameter",
    "Solution",
    "StageProblem",
    "StageSolution",
    "Status",
    "SubmeshOption",
    "TaskKind",
    "TaskSeconds",
    "TaskTimes",
    "check_allocation",
    "check_selection",
    "check_solution",
    "check_stages",
    "check_table",
    "count_alive",
    "deal_out",
    "equal_parts",
    "evaluate_choices",
    "evaluate_pipeline",
    "explain_infeasibility",
    "fits_budgets",
    "highest_minimum",
    "make_table",
    "memory_profile",
    "play",
    "read_contest_instance",
    "read_contest_solution",
    "recompute",
    "solve",
    "solve_allocation",
    "solve_lgreco",
    "solve_lgreco_ilp",
    "solve_relaxation",
    "solve_selection",
    "solve_stages",
    "task_seconds",
    "wire_weights",
    "write_contest_instance",
    "write_contest_solution",
]

# Names from the previous release, kept so that old code still works.
Evaluation = ChoiceEvaluation
Task = ScheduleTask
