"""Changes the batch size, microbatches, codecs or devices of a `ParallelStep`.

Only this module may change private attributes of `ParallelStep`. A *world* is the set
of processes and devices that run the step. When the world changes, the step keeps its
analyses and plans, and drops its compiled programs and its arrays.
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
    """A step traced for arguments of given shapes, and the setting to plan it for.

    Attributes:
      analysed: the analysis of the step for these shapes.
      setting: the cluster and the codecs to plan for.
    """

    analysed: Analysed
    setting: Setting


def call_of(
    step: ParallelStep[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> StepCall:
    """Returns a call of a step, with structs of global shapes.

    Args:
      step: the step.
      args: arrays or structs; a batch has its global shape over all processes.
      kwargs: the same for arguments that are given by name.
    """
    with updating():
        return arguments.abstract(opened_within(step.parameters, args, kwargs))


def shape_for_call(
    step: ParallelStep[..., Any],
    call: StepCall,
    *,
    codecs: str,
    microbatches: int,
    layouts: Plan | None = None,
) -> CallShape:
    """Returns the step for arguments of other shapes, on its current cluster.

    Args:
      step: a step that has a plan.
      call: the arguments, from `call_of`.
      codecs: how to send gradients, as a value of ``compression=``.
      microbatches: the number of microbatches.
      layouts: a plan whose layouts the new plan must have; None to choose layouts.

    Raises:
      TraceError: JAX cannot trace the step on these arguments.
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
    """Returns an analysed step with other codecs and microbatches.

    Args:
      step: a step that has a plan.
      analysed: the analysis of the step.
      codecs: as for `shape_for_call`.
      microbatches: as for `shape_for_call`; ignored if ``layouts`` is given, whose
        number of microbatches is used.
      layouts: as for `shape_for_call`.
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
    """Whether the user has given the layouts; such layouts must not change."""
    asked = step.setting.codecs or step.preparation.planner.options
    return step.setting.plan is not None or asked.layouts is not None


def _budget(setting: Setting, options: Any, codecs: str) -> float | None:
    """Returns the user's limit on gradient errors; None unless codecs are ``auto``."""
    asked = setting.codecs or options
    given = asked.error_budget if asked.error_budget is not None else None
    return (given or options.error_budget) if codecs == "auto" else None


def program(step: ParallelStep[..., Any], shape: CallShape, plan: Plan) -> PlannedStep:
    """Returns the compiled program of a plan; all processes must call this together.

    Raises:
      AutoparError: a process cannot build or compile the program.
    """
    preparation, world = step.preparation, step.world
    made = preparation.program(shape.analysed, plan, shape.setting)
    if not preparation.is_compiled(made):
        agreement.run_together(world, "compiling", lambda: preparation.compile(made))
    return made


def go_on(
    step: ParallelStep[..., Any], shape: CallShape, plan: Plan, state: Any
) -> Any:
    """Moves a state to another plan of a step; the next call uses this plan.

    If this raises an error before the first array is moved, nothing has changed. Each
    old array is freed as soon as its copy is complete.

    Args:
      step: the step.
      shape: the analysis and setting that the plan was made for.
      plan: the plan.
      state: the carried state.

    Returns:
      The state with the shardings of the plan.

    Raises:
      AutoparError: the program cannot be built, or the state of the codecs does not fit
        the plan.
    """
    made = Made(_setting_to_keep(step, shape.setting), plan, program(step, shape, plan))
    # Plans for later clusters use the same number of microbatches.
    hints = dataclasses.replace(shape.analysed.hints, microbatches=plan.microbatches)
    analysed = dataclasses.replace(shape.analysed, hints=hints)
    return step.adopt(analysed, made, state, consume=True)


def _setting_to_keep(step: ParallelStep[..., Any], setting: Setting) -> Setting:
    """Returns the setting for later plans, with the user's own ``layouts`` option.

    The ``layouts`` of the given setting apply only to this change of the plan.
    """
    was, asked = step.setting.codecs or step.preparation.planner.options, setting.codecs
    assert asked is not None
    codecs = dataclasses.replace(asked, layouts=was.layouts)
    return dataclasses.replace(setting, codecs=codecs)


def begin_with(step: ParallelStep[..., Any], *, codecs: str, microbatches: int) -> None:
    """Sets the codecs and microbatches of an earlier run in a step without a plan.

    Args:
      step: the step.
      codecs: how gradients are sent, as a value of ``compression=``.
      microbatches: the number of microbatches.
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
    """Returns how the step measures the noise of gradients; None if it does not."""
    return step._store.noise


def measure_noise(step: ParallelStep[..., Any], options: NoiseOptions) -> None:
    """Lets a step measure the noise of its gradients from the next program on.

    Raises:
      PlanError: the step already has a program without this measurement.
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
    """Turns the guard on: the old state is kept if a result is not finite."""
    if not step._store.guard:
        step._store.clear()
        step._store.guard, step._current = True, None


def is_guarded(step: ParallelStep[..., Any]) -> bool:
    """Whether `guard` was called."""
    return step._store.guard


def study_step(step: ParallelStep[..., Any], *args: Any, **kwargs: Any) -> None:
    """Analyses a step on these arguments, without planning or compiling it.

    Args:
      step: the step.
      args: arrays or structs; a batch has its global shape over all processes.
      kwargs: the same for arguments that are given by name.
    """
    with updating():
        call = opened_within(step.parameters, args, kwargs)
    step.preparation.analyse(arguments.abstract(call))


def read_rows(step: ParallelStep[..., Any], position: int) -> None:
    """Tells a step that processes read the rows of an argument that they need.

    Plans then price no exchange of rows.

    Args:
      step: the step, before it is planned.
      position: position of the argument.
    """
    known = step.parameters
    name, roles = known.positional(position + 1)[position], known.roles
    if name not in roles.read:
        roles = dataclasses.replace(roles, read=(*roles.read, name))
        step.parameters = dataclasses.replace(known, roles=roles)


def enter_world(
    step: ParallelStep[..., Any],
    world: World,
    cluster: Cluster,
    *,
    donate: bool,
    cache: PlanCache | None = None,
) -> None:
    """Moves a step to another world, after the devices of the old world were lost.

    Afterwards the step has no plan in use, but keeps its analyses and all plans that it
    made. Codec states (such as residuals) and the averages of the noise scale are
    reset, unless the caller assigns saved ones.

    Args:
      step: the step.
      world: the processes and devices of the new world.
      cluster: the cluster to plan for.
      donate: whether calls consume the carried state.
      cache: the folder of saved plans, used if the step has no such folder yet.
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


def known_errors(step: ParallelStep[..., Any]) -> dict[str, dict[str, float]]:
    """The errors of codecs that a running step has measured, by gradient and codec."""
    return step._codecs.known_errors


def assume_errors(
    step: ParallelStep[..., Any], errors: Mapping[str, Mapping[str, float]]
) -> None:
    """Plans a step with errors of codecs that another process has measured."""
    step._codecs.assume_errors(errors)


def remember_plan(step: ParallelStep[..., Any], cluster: Cluster, plan: Plan) -> None:
    """Remembers a plan that the next world of the same devices uses for a cluster."""
    setting = dataclasses.replace(step._setting, cluster=cluster, devices=None)
    step.preparation.remember_for_next(step.running.analysed, setting, plan)


def is_pure(step: ParallelStep[..., Any]) -> bool:
    """Whether a call of the prepared step changes nothing outside its results.

    A call is not pure if the step updates codec state or the averages of the noise
    scale, if it donates its arguments, or if it first has to compile the program.
    """
    current = step.running
    keeps = current.planned.sums is not None or current.planned.noise is not None
    return current.ready and not keeps and not step._store.donate


def load(step: ParallelStep[..., Any], function: Any) -> None:
    """Replaces the step's program, which is not compiled yet, by a compiled one.

    Args:
      step: the step.
      function: the compiled program, for arguments with the same shapes and shardings.
        All processes must make this call with their compiled program.
    """
    current = step.running
    planned = dataclasses.replace(current.planned, function=function)
    step.preparation.load_program(planned)
    step._current = dataclasses.replace(current, planned=planned, ready=True, full=None)
