"""Carries out a change of the cluster: chooses a plan, compiles it, moves the state."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax

from autopar.cluster import Cluster
from autopar.plans import Plan
from autopar.runtime.parallel_step import ParallelStep


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a change.

    Attributes:
      state: the state under the new plan.
      plan: the new plan.
      compared: the plans that were compared, as lines of the ledger have them.
      chosen: name of the one that was taken.
      plan_s: seconds of planning.
      compile_s: seconds of compiling.
      move_s: seconds of moving the state.
    """

    state: Any
    plan: Plan
    compared: tuple[dict[str, Any], ...]
    chosen: str
    plan_s: float
    compile_s: float
    move_s: float


def change(
    step: ParallelStep[..., Any], cluster: Cluster, state: Any, deadline_s: float
) -> Outcome:
    """Moves a step and its state to another cluster.

    Args:
      step: a step that has a plan.
      cluster: to move to.
      state: the carried state.
      deadline_s: seconds since the epoch at which devices go.

    Raises:
      AutoparError: the step cannot be planned there; nothing has changed.
    """
    del deadline_s
    begin = time.perf_counter()
    preparation, running = step.preparation, step.running
    setting = preparation.moved(step.setting, cluster)
    plan = preparation.plan(running.analysed, setting)
    planned_at = time.perf_counter()
    preparation.made_for(running.analysed, step.setting, cluster, plan=plan)
    compiled_at = time.perf_counter()
    moved = step.replan(cluster, state, plan=plan, consume=True)
    jax.block_until_ready(jax.tree.leaves(moved))
    return Outcome(
        state=moved,
        plan=plan,
        compared=(),
        chosen="new",
        plan_s=planned_at - begin,
        compile_s=compiled_at - planned_at,
        move_s=time.perf_counter() - compiled_at,
    )
