"""Compiles plans near the memory limit, to check that they fit.

A plan is compiled by the compiler for its kind of device. The devices need not be
present. XLA's CPU compiler is always available; compilers for accelerators are used if
they are installed. A plan whose predicted memory is far below the limit is not
compiled. The `autopar.plans.Plan` then has no memory figure from a compiler, and the
printed plan says so.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator

import msgspec

from autopar.cluster import Cluster
from autopar.compilers.compiled import check_target, compile_for
from autopar.compilers.targets import CPU, TARGETS, Target
from autopar.cost.breakdown import NEAR_LIMIT
from autopar.errors import CompileError, InfeasibleError, PlanError
from autopar.planner.deadline import deadline
from autopar.planner.infeasible import round_up, size_text
from autopar.planner.options import PlanOptions, decide_open
from autopar.planner.programs import Unfit
from autopar.plans import Plan
from autopar.plans.files import ClusterData
from autopar.progress import say
from autopar.runtime.placement import abstract_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import Analysis
from autopar.units import bytes_text

# The largest number of plans to compile; each plan needs less memory than the one
# before.
_MOST_PLANS = 3
# A search that finds a plan for at most this factor times the memory may find one that
# fits where the compiler makes room. The compiler frees the operands of products of
# gradients: up to a third of the memory of a Llama of 32 layers with long rows.
_CLOSE = 1.5
# The memory limit for the next plan is also multiplied by this factor, because the
# predicted memory of that plan may be too small.
_BELOW = 0.995


def plan_that_fits(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    find: Callable[[Cluster, Unfit], Plan],
) -> Plan:
    """Finds a plan; if it is near the memory limit, checks by compiling that it fits.

    If the compiled program of a plan needs more memory than a device has, the plan is
    dropped. The search then runs again with a lower memory limit: the smaller of the
    old limit and the plan's predicted memory, times the device's memory over the
    compiled program's memory.

    Args:
      analysis: the step.
      cluster: the cluster to plan for.
      options: the options, whose ``compile_check`` says whether plans are compiled.
      find: finds a plan for a cluster, such as ``cluster`` with less memory per device.
        Its second argument lists programs that did not fit before, which it skips.

    Raises:
      InfeasibleError: no plan fits.
    """
    with deadline(options.planning_seconds):
        return _plan_that_fits(analysis, cluster, options, find)


def _plan_that_fits(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    find: Callable[[Cluster, Unfit], Plan],
) -> Plan:
    """As `plan_that_fits`, without a limit of all searches together."""
    unfit: Unfit = {}
    target = _target(cluster) if options.compile_check else None
    # Groups of unequal devices have no common compiler, and no common memory limit.
    memory = 0 if target is None else cluster.memory_bytes
    try:
        found = find(cluster, unfit)
    except InfeasibleError as error:
        # If no option is untried, the search has already tried the programs that need
        # the least memory. The compiler then makes enough room only if little is
        # lacking.
        pinned = decide_open(options).untried_options
        close = (error.enough_bytes or math.inf) <= _CLOSE * memory
        if target is None or target.kind == CPU.kind or not (pinned or close):
            raise
        return _with_room_made(analysis, cluster, target, find, error)
    # Seconds of all searches together. Tracing and analysing the step happened once,
    # before.
    solve_s = found.seconds.solve
    compile_s = 0.0
    allowed = float(memory)
    tried = 0
    while target is not None and _is_near(found, memory):
        start = time.perf_counter()
        held = _compiled_bytes(analysis, found, cluster, target)
        compile_s += time.perf_counter() - start
        if held <= memory:
            return _with_compiled(found, cluster, held, solve_s, compile_s)
        expected, tried = found.predicted.peak_memory_bytes, tried + 1
        failure = InfeasibleError(
            f"no plan fits on {cluster}: XLA's compiler for {target.name} needs "
            f"{bytes_text(held)} on each device for the fastest plan, which is "
            f"predicted to take {bytes_text(expected)} of {bytes_text(memory)}.\n"
            f"  try: {'; or '.join(_fixes(options, held))}; compile_check=False takes "
            "the prediction"
        )
        if tried == _MOST_PLANS:
            raise failure
        allowed = _BELOW * min(allowed, expected) * memory / held
        device = dataclasses.replace(cluster.device, memory_bytes=int(allowed))
        try:
            found = find(dataclasses.replace(cluster, device=device), unfit)
        except InfeasibleError as error:
            raise failure from error
        solve_s += found.seconds.solve
    return _with_compiled(found, cluster, 0.0, solve_s, compile_s)


def _with_room_made(
    analysis: Analysis,
    cluster: Cluster,
    target: Target,
    find: Callable[[Cluster, Unfit], Plan],
    failure: InfeasibleError,
) -> Plan:
    """Finds a plan that fits only if the compiler reduces memory, and compiles it.

    A compiler may reschedule a program until it fits, so that it needs less memory than
    predicted.

    Args:
      analysis: the step.
      cluster: the cluster to plan for.
      target: the compiler for the cluster's devices.
      find: finds a plan for a cluster.
      failure: the search's error, which says that no plan fits. It is raised if the
        compiled program does not fit either.
    """
    say("no plan fits; looking for one that fits where the compiler makes room")
    device = cluster.device
    makes_room = dataclasses.replace(device.corrections, makes_room=True)
    roomy = dataclasses.replace(device, calibration=makes_room)
    try:
        found = find(dataclasses.replace(cluster, device=roomy), {})
    except PlanError:
        raise failure from None
    start = time.perf_counter()
    held = 0.0
    if len(found.stages) == 1:
        held = _compiled_bytes(analysis, found, cluster, target)
    if not 0 < held <= cluster.memory_bytes:
        raise failure
    spent_s = time.perf_counter() - start
    return _with_compiled(found, cluster, held, found.seconds.solve, spent_s)


def _fixes(options: PlanOptions, held: float) -> Iterator[str]:
    """Yields advice for a plan whose compiled program is too large."""
    if held:
        enough = size_text(round_up(held))
        yield f"memory={enough}, which the compiler needs for that plan"
    untried = decide_open(options).untried_options
    if untried:
        yield ", ".join(untried)
    yield "more devices or a smaller batch"


def _is_near(plan: Plan, memory: float) -> bool:
    """Whether a plan is a single program that may not fit.

    A program that keeps state in the memory of the host always counts as one: such
    plans are made where memory is short.
    """
    one = len(plan.stages) == 1 and not plan.replicas
    near = plan.predicted.peak_memory_bytes > NEAR_LIMIT * memory
    return one and (near or bool(plan.offload))


def _part_of(plan: Plan, cluster: Cluster) -> Cluster:
    """Returns the part of a cluster that a plan uses, with its full memory."""
    planned = plan.cluster.read()
    if planned.num_devices == cluster.num_devices:
        return cluster
    return dataclasses.replace(planned, device=cluster.device)


def _with_compiled(
    found: Plan, cluster: Cluster, held: float, solve_s: float, compile_s: float
) -> Plan:
    """Returns the plan for the given cluster, with the compiler's memory and times."""
    given = ClusterData.of(_part_of(found, cluster))
    if found.cluster != given:
        found = msgspec.structs.replace(found, cluster=given).with_checks()
    own = found.seconds
    seconds = msgspec.structs.replace(
        own,
        solve=solve_s,
        compile=compile_s,
        total=own.total - own.solve + solve_s + compile_s,
    )
    return msgspec.structs.replace(found, compiled_memory_bytes=held, seconds=seconds)


def _target(cluster: Cluster) -> Target | None:
    """Returns the compiler for a cluster's devices; None if it is not installed."""
    if cluster.groups:
        return None
    kind, name = cluster.device.kind, cluster.device.name
    target = CPU if kind == CPU.kind else TARGETS.get(name)
    if target is None or target.kind != kind:
        return None
    try:
        check_target(target, cluster)
    except PlanError:
        return None
    return target


# Part of the error of XLA's TPU compiler for a program that is too large.
_USED = re.compile(r"Used ([\d.]+)([MG]) of")
_UNITS = {"M": 2**20, "G": 2**30}


def _compiled_bytes(
    analysis: Analysis, plan: Plan, cluster: Cluster, target: Target
) -> float:
    """Returns the memory of one device according to the compiler, in bytes.

    Returns 0 if the compiler refuses the program and its error names no size.
    """
    say(f"compiling the plan for {target.name}")
    step = planned_step(analysis, plan, abstract_mesh(plan))
    try:
        part = _part_of(plan, cluster)
        lowered = [step.lower(target.platform)]
        given = plan.compiler_options
        (found,) = compile_for(lowered, target, part, None, given)
    except CompileError as error:
        used = _USED.search(str(error))
        return float(used[1]) * _UNITS[used[2]] if used else 0.0
    return float(found.memory.peak_bytes)
