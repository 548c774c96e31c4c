"""A step that outlives its world: what it knows stays, what lies on devices goes.

These functions belong to `ParallelStep` and change it from outside its module, which is
full; nothing else may.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.cluster import Cluster
from autopar.planner.cache import PlanCache
from autopar.runtime import arguments
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import World
from autopar_passes.program.nnx_objects import updating
from autopar_passes.program.trace import opened_within


def study(step: ParallelStep[..., Any], *args: Any, **kwargs: Any) -> None:
    """Analyses a step on these arguments; it is planned and compiled elsewhere.

    Args:
      step: the step.
      args: arrays or structs, those of a batch over all processes.
      kwargs: those that are given by name.
    """
    with updating():
        call = opened_within(step._parameters, args, kwargs)
    step.preparation.analyse(arguments.abstract(call))


def enter(
    step: ParallelStep[..., Any],
    world: World,
    cluster: Cluster,
    *,
    donate: bool,
    cache: PlanCache | None = None,
) -> None:
    """Goes on in another world, with no plan yet; the old world's devices are gone.

    Analyses and plans are kept. Codecs and the noise scale start anew, unless their
    state is assigned.

    Args:
      step: the step.
      world: its processes and devices.
      cluster: what to plan for.
      donate: whether calls consume the carried state.
      cache: where plans are kept, unless they are kept elsewhere.
    """
    if step._current is not None:
        step._codecs.start_anew()
        step._noise.start_anew()
    step._world, step._current = world, None
    step._setting = dataclasses.replace(step._setting, cluster=cluster, devices=None)
    step._store.clear()
    step._store.donate = donate
    step.preparation.enter(cache)
    step._batches.enter()


def is_pure(step: ParallelStep[..., Any]) -> bool:
    """Whether a call of the step that is prepared changes nothing: it only returns.

    Codecs and the noise scale keep state, arguments may be consumed, and a program that
    is not there yet is compiled.
    """
    current = step.running
    keeps = current.planned.sums is not None or current.planned.noise is not None
    return current.ready and not keeps and not step._store.donate


def load(step: ParallelStep[..., Any], function: Any) -> None:
    """Runs a compiled program in the place of the one that is prepared.

    Args:
      step: the step.
      function: of the same arguments in the same places; all processes have it.
    """
    current = step.running
    planned = dataclasses.replace(current.planned, function=function)
    step.preparation.load_program(planned)
    step._current = dataclasses.replace(current, planned=planned, ready=True, full=None)
