"""The decorator: a train step that plans itself on its first call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from autopar.cluster import Cluster
from autopar.compression.fallback import LEAST_GAIN, Fallback
from autopar.compression.policies.policy import Policy
from autopar.errors import PlanError
from autopar.planner.hints import LogicalRules, Pins
from autopar.planner.options import (
    SOLVER_SECONDS,
    PlanOptions,
    as_cluster,
    as_plan,
)
from autopar.plans import Plan
from autopar.runtime.codec_run import CodecRun
from autopar.runtime.last_batch import checked
from autopar.runtime.parallel_step import ParallelStep, Setting
from autopar.runtime.program_store import PROGRAMS, ProgramStore
from autopar.runtime.world import World

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
    pins: Pins | None = ...,
    logical_axis_rules: LogicalRules | None = ...,
    axis_names: Sequence[str] | None = ...,
    max_axes: int | None = ...,
    seconds: float | None = ...,
    split_batch: bool = ...,
    compression: str = ...,
    error_budget: float | None = ...,
    layouts: Plan | str | os.PathLike[str] | None = ...,
    static_argnames: Sequence[str] = ...,
    last_batch: str = ...,
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
    pins: Pins | None = ...,
    logical_axis_rules: LogicalRules | None = ...,
    axis_names: Sequence[str] | None = ...,
    max_axes: int | None = ...,
    seconds: float | None = ...,
    split_batch: bool = ...,
    compression: str = ...,
    error_budget: float | None = ...,
    layouts: Plan | str | os.PathLike[str] | None = ...,
    static_argnames: Sequence[str] = ...,
    last_batch: str = ...,
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
    pins: Pins | None = None,
    logical_axis_rules: LogicalRules | None = None,
    axis_names: Sequence[str] | None = None,
    max_axes: int | None = None,
    seconds: float | None = SOLVER_SECONDS,
    split_batch: bool = True,
    compression: str = "none",
    error_budget: float | None = None,
    layouts: Plan | str | os.PathLike[str] | None = None,
    static_argnames: Sequence[str] = (),
    last_batch: str = "run",
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
      fallback: codecs to try, in this order, in a step in which the plan's codecs
        send too little; the last one always sends. Needs ``compression=``.
      least_gain: the least part of the gradients' squared norm that a codec must
        send; below it the next codec of ``fallback`` is tried.
      pins: path pattern of an input -> its ``PartitionSpec``; this option and those
        below as for `autopar.plan`.
      logical_axis_rules: Flax's rules, pairs of a logical name and mesh axes.
      axis_names: names of the mesh axes, outermost first.
      max_axes: most mesh axes to try.
      seconds: time limit of the solver, for each mesh.
      split_batch: whether it is an error if no mesh axis divides the batch.
      compression: how gradients are sent: ``none``, ``auto``, or a codec as text.
      error_budget: for ``auto``, the largest relative error of the gradients.
      layouts: a plan whose layouts are kept, or its JSON file.
      static_argnames: names of arguments that are part of the program, as for
        ``jax.jit``; flags (``bool``), texts and members of enumerations always are.
      last_batch: what a batch of fewer rows than the planned one does, such as the
        last of an epoch: ``run`` as it is, split over as many devices as divide it;
        ``drop`` the rows that the plan's split does not divide; ``pad`` it with its
        last row, which then counts more than once.

    Raises:
      ClusterError: the text describes no cluster.
      PlanError: options contradict each other, or there is no such plan or codec.
    """
    given = None if plan is None else as_plan(plan)
    named = None if cluster is None else as_cluster(cluster)
    options = PlanOptions(
        pins=pins,
        logical_axis_rules=logical_axis_rules,
        axis_names=axis_names,
        max_axes=max_axes,
        seconds=seconds,
        split_batch=split_batch,
        compression=compression,
        error_budget=error_budget,
        layouts=None if layouts is None else as_plan(layouts, "layouts"),
    )
    if given is not None:
        _check_given(named, options)
    safer = _fallback(fallback, least_gain, None if given else compression)
    fewer = checked(last_batch)
    chosen = None if devices is None else tuple(devices)

    def decorate(function: Callable[..., Any]) -> ParallelStep[..., Any]:
        return ParallelStep(
            function,
            setting=Setting(cluster=named, plan=given, devices=chosen),
            options=options,
            store=ProgramStore(donate=donate, fallback=safer, capacity=programs),
            codecs=CodecRun(policy),
            world=world,
            static=_names(static_argnames),
            fewer=fewer,
        )

    return decorate if step is None else decorate(step)


def _names(static: Sequence[str]) -> tuple[str, ...]:
    return (static,) if isinstance(static, str) else tuple(static)


def _check_given(cluster: Cluster | None, options: PlanOptions) -> None:
    """Checks that nothing is said beside a plan that it would have to overrule."""
    if cluster is not None:
        raise PlanError("parallelize: give cluster= or plan=, not both.")
    said = {
        "compression": options.compression != "none",
        "error_budget": options.error_budget is not None,
        "layouts": options.layouts is not None,
    }
    if ignored := [f"{name}=" for name, given in said.items() if given]:
        raise PlanError(
            f"parallelize: {', '.join(ignored)} has no effect with plan=, which has "
            "its own codecs. For other codecs on its layouts, leave plan= out and "
            "give layouts=plan."
        )


def _fallback(
    codecs: str | Sequence[str], least_gain: float, compression: str | None
) -> Fallback | None:
    """The fallback that was asked for, or None."""
    if not codecs:
        return None
    if compression == "none":
        raise PlanError(
            "parallelize: fallback= has no effect without codecs; give compression= "
            "as well."
        )
    try:
        return Fallback(codecs, least_gain)
    except ValueError as error:
        raise PlanError(f"parallelize: fallback={codecs!r}: {error}") from error
