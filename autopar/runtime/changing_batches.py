"""A step that goes on with another batch, microbatches or codecs, or in another world.

These functions belong to `ParallelStep` and change it from outside its module, which is
full; nothing else may. In another world what the step knows stays, and what lies on
devices goes.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.cache import PlanCache
from autopar.plans import Plan
from autopar.runtime import agreement, arguments
from autopar.runtime.noise.averages import NoiseOptions
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.planned import PlannedStep
from autopar.runtime.preparation import Made, Setting
from autopar.runtime.step_planner import Analysed
from autopar.runtime.world import World
from autopar_passes.program.calls import StepCall
from autopar_passes.program.static_leaves import updating
from autopar_passes.program.trace import opened_within


@dataclasses.dataclass(frozen=True, slots=True)
class CallShape:
    """A step on arguments of some shapes, and what it is to be planned for.

    Attributes:
      analysed: the step on these arguments.
      setting: the cluster and codecs.
    """

    analysed: Analysed
    setting: Setting


def call_of(
    step: ParallelStep[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> StepCall:
    """A call of a step, with structs of global shapes.

    Args:
      step: the step.
      args: arrays or structs, those of a batch over all processes.
      kwargs: those that are given by name.
    """
    with updating():
        return arguments.abstract(opened_within(step._parameters, args, kwargs))


def shape_for_call(
    step: ParallelStep[..., Any],
    call: StepCall,
    *,
    codecs: str,
    microbatches: int,
    layouts: Plan | None = None,
) -> CallShape:
    """The step on arguments of other shapes, where it runs now.

    Args:
      step: a step that has a plan.
      call: the arguments, of `call_of`.
      codecs: how gradients are to be sent, as ``compression=`` says it.
      microbatches: into how many the batch is to be split.
      layouts: a plan whose layouts are to be kept.

    Raises:
      TraceError: JAX cannot trace the step on them.
    """
    found = step.preparation.analyse(call)
    return shape_of(
        step, found, codecs=codecs, microbatches=microbatches, layouts=layouts
    )


def shape_of(
    step: ParallelStep[..., Any],
    analysed: Analysed,
    *,
    codecs: str,
    microbatches: int | None = None,
    layouts: Plan | None = None,
) -> CallShape:
    """A step that is analysed, with other codecs and microbatches.

    Args:
      step: a step that has a plan.
      analysed: the step.
      codecs: as for `shape_for_call`.
      microbatches: likewise; those of ``layouts`` hold where they are given.
      layouts: likewise.
    """
    parts = None if layouts is not None else microbatches
    hints = dataclasses.replace(analysed.hints, microbatches=parts)
    setting, options = step.setting, step.preparation.planner.options
    cluster = setting.cluster or step.plan.cluster.read()
    asked = dataclasses.replace(
        setting.codecs or options,
        compression=codecs,
        error_budget=_budget(setting, options, codecs),
        layouts=layouts,
    )
    made = Setting(cluster=cluster, devices=setting.devices, codecs=asked)
    return CallShape(dataclasses.replace(analysed, hints=hints), made)


def fixed_layouts(step: ParallelStep[..., Any]) -> bool:
    """Whether the user has given the layouts, which then stay."""
    asked = step.setting.codecs or step.preparation.planner.options
    return step.setting.plan is not None or asked.layouts is not None


def _budget(setting: Setting, options: Any, codecs: str) -> float | None:
    """The error budget that was given, which holds for ``auto`` alone."""
    asked = setting.codecs or options
    given = asked.error_budget if asked.error_budget is not None else None
    return (given or options.error_budget) if codecs == "auto" else None


def program(step: ParallelStep[..., Any], shape: CallShape, plan: Plan) -> PlannedStep:
    """The compiled program of a plan; all processes must call it together.

    Raises:
      AutoparError: it cannot be built or compiled on all processes.
    """
    preparation, world = step.preparation, step.world
    made = preparation.program(shape.analysed, plan, shape.setting)
    if not preparation.is_compiled(made):
        agreement.run_together(world, "compiling", lambda: preparation.compile(made))
    return made


def go_on(
    step: ParallelStep[..., Any], shape: CallShape, plan: Plan, state: Any
) -> Any:
    """Moves a state to another plan of a step, which runs from the next call on.

    Where this raises before the state is moved, nothing has changed. The old arrays
    are freed as they are moved.

    Args:
      step: the step.
      shape: what the plan is for.
      plan: the plan.
      state: the carried state.

    Returns:
      The state where the plan wants it.

    Raises:
      AutoparError: the program cannot be built, or codecs cannot go on with it.
    """
    made = Made(_setting_to_keep(step, shape.setting), plan, program(step, shape, plan))
    # A cluster to come is planned for with as many microbatches.
    hints = dataclasses.replace(shape.analysed.hints, microbatches=plan.microbatches)
    analysed = dataclasses.replace(shape.analysed, hints=hints)
    return step.adopt(analysed, made, state, consume=True)


def _setting_to_keep(step: ParallelStep[..., Any], setting: Setting) -> Setting:
    """The setting of steps to come; layouts were kept for this change alone."""
    was, asked = step.setting.codecs or step.preparation.planner.options, setting.codecs
    assert asked is not None
    codecs = dataclasses.replace(asked, layouts=was.layouts)
    return dataclasses.replace(setting, codecs=codecs)


def begin_with(step: ParallelStep[..., Any], *, codecs: str, microbatches: int) -> None:
    """Lets a step that has no plan yet begin as an earlier run was left.

    Args:
      step: the step.
      codecs: how gradients are sent, as ``compression=`` says it.
      microbatches: into how many the batch is split.
    """
    planner = step.preparation.planner
    planner.options = dataclasses.replace(planner.options, microbatches=microbatches)
    setting, options = step.setting, planner.options
    asked = dataclasses.replace(
        setting.codecs or options,
        compression=codecs,
        error_budget=_budget(setting, options, codecs),
    )
    step._setting = dataclasses.replace(setting, codecs=asked)


def measures_noise(step: ParallelStep[..., Any]) -> NoiseOptions | None:
    """How the step measures the noise of its gradients; None: it does not."""
    return step._store.noise


def measure_noise(step: ParallelStep[..., Any], options: NoiseOptions) -> None:
    """Lets a step measure the noise of its gradients, if it does not yet.

    Raises:
      PlanError: it has programs already that do not measure it.
    """
    if step._store.noise is not None:
        return
    if step._current is not None:
        raise PlanError(
            f"{step.__name__}: it has run without noise_scale=. Give "
            "autopar.parallelize(..., noise_scale=True)."
        )
    step._store.noise = options


def guard(step: ParallelStep[..., Any]) -> None:
    """Lets a step that is not finite leave its state as it was, from now on."""
    if not step._store.guard:
        step._store.clear()
        step._store.guard, step._current = True, None


def study_step(step: ParallelStep[..., Any], *args: Any, **kwargs: Any) -> None:
    """Analyses a step on these arguments; it is planned and compiled elsewhere.

    Args:
      step: the step.
      args: arrays or structs, those of a batch over all processes.
      kwargs: those that are given by name.
    """
    with updating():
        call = opened_within(step._parameters, args, kwargs)
    step.preparation.analyse(arguments.abstract(call))


def enter_world(
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
