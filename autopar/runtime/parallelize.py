"""The decorator: a train step that plans itself on its first call."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast, overload

import jax

from autopar.cluster import Cluster
from autopar.compilers.options import CompilerOptions
from autopar.compression.policies.policy import Policy
from autopar.compression.synchronise import Fallback
from autopar.errors import PlanError
from autopar.planner.cache import PlanCache
from autopar.planner.hints import LogicalRules, Pins
from autopar.planner.option_texts import (
    LEAST_GAIN,
    PROGRAMS,
    SOLVER_SECONDS,
    TELEMETRY_EVERY,
)
from autopar.planner.options import (
    DEFAULTS,
    PlanOptions,
    as_cluster,
    as_plan,
    changed_options,
)
from autopar.plans import Plan
from autopar.runtime.arguments import LastBatch
from autopar.runtime.codec_run import CodecRun
from autopar.runtime.comparing import Comparer, Comparison
from autopar.runtime.noise.averages import NoiseOptions, noise_options
from autopar.runtime.parallel_step import ParallelStep, Setting
from autopar.runtime.program_store import ProgramStore
from autopar.runtime.world import World
from autopar.steps.spares import Spares
from autopar_errors import check_path, check_type
from autopar_passes.program.calls import (
    BatchNames,
    NamedRoles,
    Parameters,
    argument_names,
)

P = ParamSpec("P")
R = TypeVar("R")


@overload
def parallelize(
    step: Callable[P, R],
    /,
    *,
    cluster: Cluster | str | None = ...,
    plan: Plan | str | os.PathLike[str] | None = ...,
    devices: Sequence[Any] | None = ...,
    world: World | None = ...,
    donate: bool = ...,
    programs: int = ...,
    policy: Policy | None = ...,
    fallback: str | Sequence[str] = ...,
    least_gain: float = ...,
    telemetry_every: int = ...,
    noise_scale: bool | NoiseOptions = ...,
    comparison: Comparison | None = ...,
    pins: Pins | None = ...,
    logical_axis_rules: LogicalRules | None = ...,
    axis_names: Sequence[str] | None = ...,
    max_axes: int | None = ...,
    seconds: float | None = ...,
    planning_seconds: float | None = ...,
    split_batch: bool = ...,
    compile_check: bool = ...,
    compression: str = ...,
    error_budget: float | None = ...,
    gather_codecs: str = ...,
    cut_codecs: str | Mapping[str, str] = ...,
    cut_error_budget: float | None = ...,
    layouts: Plan | str | os.PathLike[str] | None = ...,
    microbatches: int | str | Sequence[int] | None = ...,
    coupled: str = ...,
    stages: int | str | None = ...,
    schedule: str | None = ...,
    remat: int | str | None = ...,
    offload: str | None = ...,
    compiler_options: CompilerOptions | None = ...,
    static_argnames: Sequence[str] = ...,
    batch_argnames: BatchNames = ...,
    frozen_argnames: str | Sequence[str] = ...,
    whole_argnames: str | Sequence[str] = ...,
    last_batch: str = ...,
    cache: str | os.PathLike[str] | None = ...,
) -> ParallelStep[P, R]: ...
@overload
def parallelize(
    *,
    cluster: Cluster | str | None = ...,
    plan: Plan | str | os.PathLike[str] | None = ...,
    devices: Sequence[Any] | None = ...,
    world: World | None = ...,
    donate: bool = ...,
    programs: int = ...,
    policy: Policy | None = ...,
    fallback: str | Sequence[str] = ...,
    least_gain: float = ...,
    telemetry_every: int = ...,
    noise_scale: bool | NoiseOptions = ...,
    comparison: Comparison | None = ...,
    pins: Pins | None = ...,
    logical_axis_rules: LogicalRules | None = ...,
    axis_names: Sequence[str] | None = ...,
    max_axes: int | None = ...,
    seconds: float | None = ...,
    planning_seconds: float | None = ...,
    split_batch: bool = ...,
    compile_check: bool = ...,
    compression: str = ...,
    error_budget: float | None = ...,
    gather_codecs: str = ...,
    cut_codecs: str | Mapping[str, str] = ...,
    cut_error_budget: float | None = ...,
    layouts: Plan | str | os.PathLike[str] | None = ...,
    microbatches: int | str | Sequence[int] | None = ...,
    coupled: str = ...,
    stages: int | str | None = ...,
    schedule: str | None = ...,
    remat: int | str | None = ...,
    offload: str | None = ...,
    compiler_options: CompilerOptions | None = ...,
    static_argnames: Sequence[str] = ...,
    batch_argnames: BatchNames = ...,
    frozen_argnames: str | Sequence[str] = ...,
    whole_argnames: str | Sequence[str] = ...,
    last_batch: str = ...,
    cache: str | os.PathLike[str] | None = ...,
) -> Callable[[Callable[P, R]], ParallelStep[P, R]]: ...
def parallelize(
    step: Callable[..., Any] | None = None,
    /,
    *,
    cluster: Cluster | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    devices: Sequence[Any] | None = None,
    world: World | None = None,
    donate: bool = True,
    programs: int = PROGRAMS,
    policy: Policy | None = None,
    fallback: str | Sequence[str] = (),
    least_gain: float = LEAST_GAIN,
    telemetry_every: int = TELEMETRY_EVERY,
    noise_scale: bool | NoiseOptions = False,
    comparison: Comparison | None = None,
    pins: Pins | None = None,
    logical_axis_rules: LogicalRules | None = None,
    axis_names: Sequence[str] | None = None,
    max_axes: int | None = None,
    seconds: float | None = SOLVER_SECONDS,
    planning_seconds: float | None = None,
    split_batch: bool = True,
    compile_check: bool = True,
    compression: str = "none",
    error_budget: float | None = None,
    gather_codecs: str = "none",
    cut_codecs: str | Mapping[str, str] = "none",
    cut_error_budget: float | None = None,
    layouts: Plan | str | os.PathLike[str] | None = None,
    microbatches: int | str | Sequence[int] | None = None,
    coupled: str = "refuse",
    stages: int | str | None = None,
    schedule: str | None = None,
    remat: int | str | None = None,
    offload: str | None = None,
    compiler_options: CompilerOptions | None = None,
    static_argnames: Sequence[str] = (),
    batch_argnames: BatchNames = None,
    frozen_argnames: str | Sequence[str] = (),
    whole_argnames: str | Sequence[str] = (),
    last_batch: str = "run",
    cache: str | os.PathLike[str] | None = None,
) -> Any:
    """Decorates a train step so that it runs under the plan found for it.

    The step keeps its signature. State that comes back with the structure of
    an argument is carried, and consumed by the call (``donate``). Batches may be
    numpy or JAX arrays; under ``jax.distributed`` each process passes its part.

    Args:
      step: the train step; absent when used as ``@parallelize(...)``.
      cluster: what to plan for, or its text, such as ``2x4:h100``; default: the
        devices of the world.
      plan: a plan made before, or its JSON file, instead of planning on the first
        call.
      devices: the devices to run on, or their ids; default: those that the cluster
        names, or the first of the world.
      world: the processes and devices that the step may use; default: all of JAX's.
      donate: whether a call consumes the carried state.
      programs: most compiled programs to keep, by plan and devices.
      policy: changes the codecs of gradients while training; see
        `autopar.compression.policies.policy`. Needs ``compression=``.
      fallback: codecs to try, in this order, in a step in which the plan's codecs send
        too little; the last one always sends. Needs ``compression=``.
      least_gain: the least part of the gradients' squared norm that a codec must send;
        below it the next codec of ``fallback`` is tried.
      telemetry_every: the telemetry of codecs is measured in one step of so many; in
        all of them with a policy or a fallback.
      noise_scale: whether each step measures how noisy its gradients are, or how it
        does; read `ParallelStep.noise_scale`.
      comparison: when training with codecs is compared with exact training, beside it;
        codecs that cost progress are then made milder (page 'Gradient compression' of
        the documentation).
      pins: path pattern of an input -> its ``PartitionSpec``, as in
        ``{"state/params/*/kernel": PartitionSpec(None, "tensor")}``.
      logical_axis_rules: Flax's rules, pairs of a logical name and mesh axes; they pin
        the arguments that ``nn.with_logical_partitioning`` has named.
      axis_names: names of the mesh axes, outermost first; their number is that of the
        axes.
      max_axes: most mesh axes to try; None: two, or one for each level of the cluster.
      seconds: time limit of the solver, for each mesh, in seconds of its own work: a
        busy machine does not shorten it. Without a limit it goes on until the plan is
        proved optimal, and the same call always gives the same plan; with one, calls
        may give different plans, whose times differ by at most the solver's gap.
      planning_seconds: time limit of the whole search for a plan, in seconds of the
        clock: all meshes, microbatches, rematerialised layers, stages and codecs
        together. When it is over, the search ends with the best plan so far, and the
        plan says what was not tried; without any plan the search goes on to the first
        one. The work under way, tracing and the compile check are not cut short. None:
        no limit.
      split_batch: whether it is an error if no mesh axis divides the rows of the batch;
        False: the step is then planned without data parallelism.
      compile_check: whether plans near the limit of memory are compiled for the
        cluster's devices, which need not be there, and dropped where they do not fit
        (page 'Compilers without devices' of the documentation).
      compression: how gradients are sent between devices: ``none`` as they are;
        ``auto`` each as trains fastest within the error budget, chosen together with
        the layouts; or the text of a codec for all of them, such as ``int8`` or
        ``powersgd:rank=4``.
      error_budget: for ``compression='auto'`` and ``gather_codecs='auto'``, the
        largest relative error of the gradients, in the optimizer's metric, with that
        of gathered parameters; None: that of int4 codes.
      gather_codecs: how sharded parameters are gathered over slow links: ``none`` as
        they are; ``auto`` as codes where that is faster, within the error budget; or
        the text of a codec, such as ``int8``, for all parameters that are gathered
        between hosts (page 'Gradient compression' of the documentation).
      cut_codecs: how pipeline stages send each other activations and cotangents:
        ``none`` as they are; ``auto`` each as trains fastest within the budget of
        errors; or the text of a codec, such as ``int8``, for both or, as in
        ``int4/int8``, for activations and for cotangents; or a dictionary of the two
        (page 'Pipeline stages' of the documentation).
      cut_error_budget: for ``cut_codecs='auto'``, the largest relative error of the
        codecs of all stage cuts together; None: 0.045.
      layouts: a plan whose layouts are kept, or its JSON file; only the codecs are
        chosen. It may be of another batch size, and edited (page 'Plan files' of the
        documentation).
      microbatches: into how many microbatches the batch is split, which run one after
        the other before the update; ``auto``: as is fastest of what fits. On groups of
        unequal devices also how many each replica runs, such as ``[8, 4]``. None: as
        the plan given as ``layouts`` says, else ``auto`` (page 'Microbatches' of the
        documentation).
      coupled: what is done where the loss of a row depends on the other rows:
        ``refuse`` to split the batch, or take each ``microbatch`` for the batch.
      stages: into how many pipeline stages the step is cut; ``auto``: as is fastest of
        what fits. None: ``auto``, or one where other options need one stage (page
        'Pipeline stages' of the documentation).
      schedule: in which order stages run their microbatches: ``gpipe``, ``1f1b``,
        ``interleaved`` or ``zero-bubble``; None: as is fastest, or ``1f1b`` where the
        number of stages is given.
      remat: how many layers compute their activations again in the backward pass
        instead of keeping them: a number, ``all``, or with a level: ``4:dots`` keeps
        matrix products, ``4:kernels`` results of attention kernels, ``4:names=a,b`` the
        values that `jax.ad_checkpoint.checkpoint_name` names a and b; ``auto``: as is
        fastest of what fits; 0: as the step says; ``0:kernels``: the same, but
        attention kernels run once; ``none`` drops the step's own ``jax.checkpoint``.
        None: as the plan given as ``layouts`` says, else ``auto``, or 0 where the
        number of stages is given (page 'Rematerialisation' of the documentation).
      offload: which state lies in the memory of the hosts between steps: ``optimizer``:
        all arrays of optimizer state; ``state``: these and all parameters; ``none``:
        what the step itself puts there; ``auto``: as much optimizer state, and then
        parameters, as is fastest, where memory is short. None: as the plan given as
        ``layouts`` says, else ``auto``, or ``none`` where the number of stages is given
        (page 'Memory of the hosts' of the documentation).
      compiler_options: options of XLA's compiler for the programs of the plan, by name,
        as in ``{'xla_gpu_enable_pipelined_collectives': True}``; the plan records them,
        and compilations without devices use them, too. Predictions do not know what
        they change. None: those of the plan given as ``layouts``.
      static_argnames: names of arguments that are part of the program, as for
        ``jax.jit``; flags (``bool``), texts and members of enumerations always are.
      batch_argnames: names of the arguments that hold the batch, or patterns of paths
        such as ``batch/*``; with the dimension of the rows where it is not found:
        ``{"batch/x": 1}``. None: found from what the step does with its arguments.
      frozen_argnames: names of arguments that the step does not return and that are the
        same for all rows, such as the weights of a teacher; without names they are
        found, as the batch is.
      whole_argnames: names of arguments of which each of several processes passes the
        whole array, instead of rows of its own. Plans then exchange no rows; the
        processes check in each step that they pass equal values.
      last_batch: what a batch of fewer rows than the planned one does, such as the last
        of an epoch: ``run`` as it is, split over as many devices as divide it; ``drop``
        the rows that the plan's split does not divide; ``pad`` it with its last row,
        which then counts more than once.
      cache: a folder where plans and, by JAX's compilation cache, compiled programs are
        kept for the next process; None: that of ``AUTOPAR_CACHE``, or none.

    Raises:
      ClusterError: the text describes no cluster.
      PlanError: options contradict each other, or there is no such plan or codec.
      TraceError: the step has no argument of a name that is given as static.
    """
    given = None if plan is None else as_plan(plan)
    named = None if cluster is None else as_cluster(cluster)
    options = PlanOptions(
        pins=pins,
        logical_axis_rules=logical_axis_rules,
        axis_names=axis_names,
        max_axes=max_axes,
        seconds=seconds,
        planning_seconds=planning_seconds,
        split_batch=split_batch,
        compile_check=compile_check,
        compression=compression,
        error_budget=error_budget,
        gather_codecs=gather_codecs,
        cut_codecs=cut_codecs,
        cut_error_budget=cut_error_budget,
        layouts=None if layouts is None else as_plan(layouts, "layouts"),
        microbatches=microbatches,
        coupled=coupled,
        stages=stages,
        schedule=schedule,
        spares=Spares(always=(not donate) + 2 * (comparison is not None)),
        remat=remat,
        offload=offload,
        compiler_options=compiler_options,
        donate=donate,
        programs=programs,
        fallback=fallback,
        least_gain=least_gain,
        telemetry_every=telemetry_every,
        last_batch=last_batch,
        cache=cache,
        static_argnames=static_argnames,
        batch_argnames=batch_argnames,
        frozen_argnames=frozen_argnames,
        whole_argnames=whole_argnames,
    )
    if given is not None:
        _check_given(named, options)
        options = dataclasses.replace(
            options, compiler_options=given.compiler_options or None
        )
    coded = compression != "none" if given is None else _has_codecs(given)
    safer = _fallback(fallback, least_gain, coded=coded)
    signals = _check_policy(policy, coded=coded, alone=safer is None)
    noise = noise_options(noise_scale)
    _check_comparison(comparison, alone=policy is None and safer is None)
    kept = _plan_cache(cache or os.environ.get("AUTOPAR_CACHE") or None)
    for where, option, kind, wanted in (
        ("devices", devices, Iterable, "devices of JAX"),
        ("world", world, World, "an autopar.runtime.world.World"),
    ):
        if option is not None:
            check_type(f"parallelize: {where}=", option, kind, wanted)
    chosen = None if devices is None else tuple(devices)
    if chosen == ():
        raise PlanError(
            "parallelize: devices=[] names no device: leave it out for all devices."
        )
    static = argument_names("static_argnames", static_argnames)
    roles = NamedRoles.of(batch_argnames, frozen_argnames, whole_argnames)

    def decorate(function: Callable[..., Any]) -> ParallelStep[..., Any]:
        _check_step(function)
        return ParallelStep(
            function,
            setting=Setting(cluster=named, plan=given, devices=chosen),
            options=options,
            store=ProgramStore(
                donate=donate,
                fallback=safer,
                noise=noise,
                signals=signals,
                every=telemetry_every if policy is None else 1,
                capacity=programs,
            ),
            codecs=CodecRun(policy),
            comparer=None if comparison is None else Comparer(comparison),
            world=world,
            parameters=Parameters.of(function, static, roles),
            fewer=cast("LastBatch", options.last_batch),
            cache=kept,
        )

    return decorate if step is None else decorate(step)


def _check_comparison(comparison: Comparison | None, *, alone: bool) -> None:
    """Checks the option ``comparison``.

    Args:
      comparison: the option.
      alone: whether neither a policy nor fallbacks change codecs.
    """
    if comparison is None:
        return
    wanted = "an autopar.runtime.comparing.Comparison"
    check_type("parallelize: comparison=", comparison, Comparison, wanted)
    if not alone:
        raise PlanError(
            "parallelize: comparison= makes codecs milder by the loss, and policy= and "
            "fallback= change them by errors. Leave one of them out."
        )


def _check_step(step: Any) -> None:
    """Checks that a step can be called."""
    if not callable(step):
        raise PlanError(
            f"parallelize: expected a train step, a function, got {step!r}."
        )


def _plan_cache(folder: str | os.PathLike[str] | None) -> PlanCache | None:
    """The cache of plans in a folder; the folder also gets JAX's compilation cache.

    Raises:
      PlanError: the folder cannot be made.
    """
    if folder is None:
        return None
    check_path("parallelize: cache=", folder)
    path = pathlib.Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"parallelize: cache={os.fspath(folder)!r} cannot be used as a folder: "
            f"{error.strerror}."
        ) from error
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(path / "programs"))
    return PlanCache(path / "plans")


# The options that may be given beside a plan: they apply to plans of later re-plans.
_REPLANS = (
    "pins",
    "logical_axis_rules",
    "axis_names",
    "max_axes",
    "seconds",
    "planning_seconds",
    "split_batch",
    "compile_check",
)


def _check_given(cluster: Cluster | None, options: PlanOptions) -> None:
    """Checks that no option contradicts a plan that the user gave."""
    if cluster is not None:
        raise PlanError("parallelize: give cluster= or plan=, not both.")
    if ignored := [
        f"{name}=" for name in changed_options(options) if name not in _REPLANS
    ]:
        raise PlanError(
            f"parallelize: {', '.join(ignored)} has no effect with plan=, which has "
            "its own codecs and microbatches. For others, leave plan= out and "
            "give layouts=plan."
        )


def _has_codecs(plan: Plan) -> bool:
    """Whether a plan sends any gradient by a codec."""
    return any(g.codec for stage in plan.stages for g in stage.gradients)


_WITHOUT = "has no effect without codecs; give compression=, or a plan that has codecs."


def _check_policy(policy: Policy | None, *, coded: bool, alone: bool) -> bool:
    """Checks that the step has codecs which a policy can change.

    Returns:
      Returns whether the policy reads the signal of what is sent.
    """
    if policy is not None and not coded:
        raise PlanError(f"parallelize: policy= {_WITHOUT}")
    signals = bool(getattr(policy, "signals", False))
    if signals and not alone:
        raise PlanError(
            "parallelize: this policy asks for the signal of what is sent, which is "
            "not measured with fallback=; leave one of the two out."
        )
    return signals


def _fallback(
    codecs: str | Sequence[str], least_gain: float, *, coded: bool
) -> Fallback | None:
    """The fallback that was asked for, or None."""
    if not codecs:
        if least_gain != DEFAULTS.least_gain:
            raise PlanError(
                f"parallelize: least_gain={least_gain!r} is what fallback= needs; give "
                "the codecs to fall back to."
            )
        return None
    if not coded:
        raise PlanError(f"parallelize: fallback= {_WITHOUT}")
    try:
        return Fallback(codecs, least_gain)
    except ValueError as error:
        raise PlanError(f"parallelize: fallback={codecs!r}: {error}") from error
