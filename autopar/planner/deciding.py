"""Decides pipeline stages, microbatches and rematerialised layers.

Functions of this module make named proposals of how to rewrite the step or cut it into
stages. One search (`autopar.planner.programs.Programs`) judges all proposals. It drops
proposals that cannot be faster than the best plan so far, finds the best layouts of all
other proposals, keeps the fastest plan that fits the memory, and records every
proposal.

*Bounds.* More microbatches and more rematerialised layers mean more work and less
memory. So they make a step faster only if *memory slows the plan*: with more memory per
device, another plan would be faster. The search assumes that memory does not slow a
plan that needs less than half of it. Layers of a loop are an exception. Rematerialising
such layers may be faster even with enough memory, because without it their activations
are written to stacked arrays and read again. For such layers, the search estimates the
seconds of a step in the layouts of the best plan without rematerialisation. For the
step of a pipeline, `least_s` computes a lower bound in seconds.

*Layers.* The first layers are rematerialised, because their activations stay in memory
longest. A plan needs less memory if more layers are rematerialised. The search finds
the fewest layers with which a plan fits by bisection. It starts at an estimate, which
assumes that the memory falls linearly with the number of rematerialised layers, down to
zero for all layers. The search then tries more layers as long as plans get faster,
because with more free memory faster layouts may fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.cost.estimate import work_of
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import unsplit
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.deadline import OutOfTimeError
from autopar.planner.infeasible import size_text
from autopar.planner.options import PlanOptions, of_one_stage
from autopar.planner.programs import (
    EASY,
    GAP,
    Planner,
    Programs,
    Unfit,
    program_name,
)
from autopar.planner.replicas import is_tight, plan_replicas
from autopar.planner.search import candidate_meshes
from autopar.planner.stages.entry import (
    PipelineLimits,
    best_pipeline,
    issue_s,
    plan_pipeline,
)
from autopar.planner.stages.plan import SCHEDULES, divisors
from autopar.planner.stages.submeshes import slice_shapes
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.steps.for_devices import equations_of_update
from autopar.steps.microbatches import numbers_of_microbatches
from autopar.steps.offload import asked_state, carried_state
from autopar.steps.remat import (
    has_kernels,
    layer_starts,
    named_values,
    repeats_kernels,
)
from autopar_passes.graph.roles import InputRole
from autopar_passes.remat.copies import DOTS, FULL, KERNELS, NAMES

# About how many numbers of rematerialised layers the search tries at most, for each
# level of rematerialisation (which activations of a layer are kept).
_TRIED = 8
# A pipeline is preferred only if its step is shorter by this fraction than that of the
# best plan of one stage, because the cost model leaves out more of a pipeline's seconds
# than of a single stage's.
_STAGED = 0.05
# The stages of a cut must together do at least this fraction of the step's FLOPs: some
# small operators are in no stage.
_CUT = 0.999
# How many amounts of state in host memory are tried at most.
_OFFLOADED = 3
# The least time limit of the solver of stages, in seconds.
_LEAST_S = 1.0


def decide(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    plan: Planner,
    codecs: CodecRequest,
    *,
    advise: bool = True,
    unfit: Unfit | None = None,
) -> Plan:
    """Returns the fastest plan of all proposals that fit the memory.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      options: hints and limits; the option ``layouts`` is not set.
      plan: finds the layouts of a step of one stage. Its options have already decided
        microbatches and rematerialisation.
      codecs: the user's request about codecs.
      advise: if no plan fits, whether the error states a memory size that is enough.
      unfit: proposals that did not fit when the same step was planned with more memory
        per device. They are not tried again. Proposals that do not fit now are added to
        ``unfit``.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: the step cannot be split, cut or planned as the options say.
    """
    offload = asked_state(analysis, options.offload)
    if offload and (why := _cannot_offload(cluster)):
        raise PlanError(f"offload={options.offload!r}: {why}. Leave offload out.")
    search = Programs(analysis, cluster, options, plan, codecs, unfit, offload)
    for propose in _PROPOSERS:
        try:
            propose(search)
        except PlanError:
            raise
        # The next proposers only note what they would try.
        except OutOfTimeError:
            if search.best is None:  # A caller knows a plan.
                raise
        # A proposal of the planner may fail without an error for the user.
        except Exception as error:
            asked_for = (options.stages, options.microbatches, options.remat)
            if search.best is None or None not in asked_for:
                raise
            warnings.warn(
                f"autopar: a plan was found; others were not looked at, as {error!r} "
                "was raised, a fault of autopar. stages=1, microbatches=1, remat=0 "
                "leaves them out.",
                RuntimeWarning,
                stacklevel=2,
            )
    if search.best is None:
        raise search.failure(advise=advise)
    return search.write_plan()


def _replicas(search: Programs) -> None:
    """Proposes one replica of the step on each group of equal devices."""
    asked = search.options
    if not search.cluster.groups or (
        isinstance(asked.stages, int) and asked.stages > 1
    ):
        return
    if asked.remat != "auto":
        _in_replicas(search, "replicas", asked.microbatches, asked.remat)
        return
    plain = _in_replicas(search, "replicas", asked.microbatches, None)
    if plain is not None and not is_tight(plain, search.cluster):
        why = "they save memory, which does not hold the plan back"
        search.leave_out("replicas, layers again", why)
        return
    count = asked.microbatches if plain is None else _shares_of(plain, asked)
    for level in (FULL, DOTS):
        most = _in_replicas(search, f"replicas, remat all:{level}", count, level)
        if most is None:
            continue
        count = _shares_of(most, asked)
        for number in _numbers(len(most.remat.layers))[-2::-1]:
            remat = f"{number}:{level}"
            made = _in_replicas(search, f"replicas, remat {remat}", count, remat)
            if made is None or search.best is not made:
                break


def _in_replicas(
    search: Programs, name: str, microbatches: Any, remat: Any
) -> Plan | None:
    """Proposes replicas with given microbatches and rematerialised layers.

    Returns the plan; None if no such plan fits or can be made.
    """
    options = of_one_stage(
        search.options, schedule=None, microbatches=microbatches, remat=remat
    )

    def make() -> Plan:
        return plan_replicas(search.analysis, search.cluster, options, search.codecs)

    search.judge(name, make, 0.0)
    return search.plans.get(name)


def _shares_of(plan: Plan, asked: PlanOptions) -> Any:
    """Returns a plan's number of microbatches, or the user's numbers for replicas."""
    shares = isinstance(asked.microbatches, tuple)
    return asked.microbatches if shares else plan.microbatches


def _rewritten(search: Programs) -> None:
    """Proposes 1, 2, 4 ... microbatches, each with rematerialised layers.

    The proposals end when more microbatches make the step slower, or when memory no
    longer slows the best plan.
    """
    asked = search.options
    if search.cluster.groups or (isinstance(asked.stages, int) and asked.stages > 1):
        return
    _in_microbatches(search)
    search.refine()


def _in_microbatches(search: Programs) -> None:
    """Tries growing numbers of microbatches.

    The trials end when more microbatches are slower, or when memory no longer slows the
    plan.
    """
    asked = search.options
    for count in _counts(search):
        before = search.best
        try:
            if asked.remat == "auto" and _kept_kernels(search, count):
                return
            search.fits_in(count)
        except PlanError as error:
            if before is None and not search.errors.keys() - {program_name(count, "")}:
                raise
            # If this number of microbatches does not divide the rows, or changes the
            # result, the same holds for larger numbers.
            search.leave_out(f"{count} microbatches", str(error).split("\n", 1)[0])
            return
        if search.best is None and search.too_large():
            _least_memory(search)
            return
        free_s = search.free_s(program_name(count, ""))
        if before is not None and free_s >= before.predicted.step_s:
            why = "they are slower with room for everything, too"
            search.leave_out(f"layers again in {count} microbatches, and more", why)
            return
        if asked.remat == "auto":
            _again(search, count)
        if before is not None and search.best is before:
            return
        if asked.microbatches != "auto":
            return
        plain = program_name(count, "")
        if plain in search.plans and not search.is_held_back(plain):
            why = "they need less memory, which does not hold the plan back"
            search.leave_out("more microbatches", why)
            return


def _counts(search: Programs) -> Iterator[int]:
    """Yields the numbers of microbatches to try.

    Several microbatches are tried only if they do not change the step's results.
    """
    asked = search.options
    if asked.microbatches != "auto":
        yield asked.count
        return
    yield 1
    try:
        numbers = numbers_of_microbatches(search.analysis)
    except PlanError as error:
        search.leave_out("more microbatches", str(error).split("\n", 1)[0])
        return
    for count in numbers:
        if count > 1:
            found = _local(search, count)
            if found:
                search.leave_out(
                    f"{count} microbatches", f"{found[0]} would be of each"
                )
                return
            yield count


def _least_memory(search: Programs) -> None:
    """Tries the most microbatches with all layers rematerialised, for the error
    message.

    If the state by itself does not fit, no plan fits. The program with the least memory
    is planned all the same, because the error message takes two numbers from it: the
    memory that every plan needs, and a memory size that is enough.
    """
    asked = search.options
    counts = [asked.count]
    if asked.microbatches == "auto":
        counts = list(numbers_of_microbatches(search.analysis))
    for count in reversed(counts):
        with contextlib.suppress(PlanError):
            if count > 1 and asked.microbatches == "auto" and _local(search, count):
                continue
            remat = ""
            if asked.remat == "auto":
                couple = asked.coupled == "microbatch"
                layers = layer_starts(search.analysis, count, couple=couple)
                remat = f"{len(layers)}:{FULL}" if layers else ""
            search.fits_in(count, remat)
            return


def _local(search: Programs, count: int) -> tuple[str, ...]:
    """Returns the names of values that each microbatch would compute from its own rows.

    If microbatches compute a value that depends on several rows, such as batch
    statistics, from their own rows, the result of the step changes. Values for which
    the user has allowed this are left out.
    """
    if search.options.coupled == "microbatch":
        return ()
    name = program_name(count, "")
    search.programs.setdefault(name, search.rewritten(count, ""))
    try:
        split = search.program(name).split
    except PlanError:
        return ()  # Planning the step raises this error again.
    return () if split is None else split.local


def _kept_kernels(search: Programs, count: int) -> bool:
    """Proposes that the step's own checkpoints keep the results of attention kernels.

    The program has less work than the step as it is written, and needs more memory.

    Returns:
      Whether no other program can be faster: if memory does not slow the plan of this
      one, neither the step as it is written nor more microbatches help.
    """
    if not repeats_kernels(search.analysis):
        return False
    remat = f"0:{KERNELS}"
    try:
        if not search.fits_in(count, remat):
            return False
    except PlanError:  # Planning the step as it is written raises this error again.
        return False
    if search.is_held_back(program_name(count, remat)):
        return False
    why = "they need less memory, which does not hold the plan back"
    search.leave_out("the step as it is written, and more microbatches", why)
    return True


def _again(search: Programs, count: int) -> None:
    """Proposes numbers of rematerialised layers, for one number of microbatches."""
    plain = program_name(count, "")
    held = plain not in search.plans or search.is_held_back(plain)
    own = equations_of_update(search.analysis)
    loops = any(
        e.primitive == "scan" and e.params["length"] > 1 and e.index not in own
        for e in search.analysis.program.body.equations
    )
    if not held and not loops:
        why = "they save memory, which does not hold the plan back, and no stacks"
        search.leave_out("layers again", why)
        return
    couple = search.options.coupled == "microbatch"
    try:
        layers = len(layer_starts(search.analysis, count, couple=couple))
    except PlanError as error:
        search.leave_out("layers again", str(error).split("\n", 1)[0])
        return
    names = named_values(search.analysis, count, couple=couple)
    # Kernels that the step's own checkpoints repeat are a proposal of `_kept_kernels`.
    kept = has_kernels(search.analysis) and not repeats_kernels(search.analysis)
    kernels = [KERNELS] if kept else []
    levels = [FULL, DOTS, *kernels, *([NAMES + ",".join(names)] if names else [])]
    layered = _Layers(search, count, layers)
    try:
        if plain in search.plans:
            layered.beside(plain, levels, held=held)
        else:
            layered.to_fit(levels)
    except PlanError as error:
        search.leave_out("layers again", str(error).split("\n", 1)[0])


class _Layers:
    """Proposals of rematerialised layers, at one number of microbatches."""

    def __init__(self, search: Programs, count: int, layers: int) -> None:
        self.search, self.count, self.layers = search, count, layers

    def fits_with(self, remat: str) -> bool:
        return self.search.fits_in(self.count, remat)

    def plan_with(self, remat: str) -> Plan | None:
        return self.search.plans.get(program_name(self.count, remat))

    def beside(self, plain: str, levels: Sequence[str], *, held: bool) -> None:
        """Tries rematerialised layers although a plan without rematerialisation
        fits.
        """
        numbers = _numbers(self.layers)
        for level in levels:
            if held:
                self.more(level, numbers)
                self.more(level, numbers[::-1])
                continue
            other = program_name(self.count, f"{self.layers}:{level}")
            options = self.search.rewritten(self.count, f"{self.layers}:{level}")
            self.search.programs.setdefault(other, options)
            same_s = self.search.priced_s(plain, plain)
            if self.search.priced_s(plain, other) < same_s:
                # Only all layers are tried. If memory slows no plan, fewer layers have
                # no advantage: they remove fewer stacked arrays.
                self.fits_with(f"{self.layers}:{level}")

    def to_fit(self, levels: Sequence[str]) -> None:
        """Finds the fewest rematerialised layers with which a plan fits, and tries
        larger numbers.
        """
        least = 1
        for level in levels:
            first = self.fewest(level, least)
            if first is None:
                if level == FULL:
                    return
                continue
            # A level that keeps more activations of each layer has to rematerialise at
            # least as many layers.
            least = max(least, first) if level == FULL else least
            above = [k for k in _numbers(self.layers) if k > first]
            if self.may_gain(level, first):
                self.more(level, above)
            if self.search.best is self.plan_with(f"{self.layers - 1}:{level}"):
                self.more(level, above[::-1])

    def may_gain(self, level: str, first: int) -> bool:
        """Whether a plan with more rematerialised layers than needed may be faster.

        The plan with the most rematerialised layers has the most free memory, so it may
        use faster layouts. If even these layouts would not make the step with the
        fewest rematerialised layers faster, more of them only add work.
        """
        numbers = range(1, self.layers + 1)
        most = max(n for n in numbers if self.plan_with(f"{n}:{level}") is not None)
        if first == most:
            return False
        few, many = (program_name(self.count, f"{n}:{level}") for n in (first, most))
        free_s = self.search.priced_s(many, few)
        return free_s < (1 - GAP) * self.search.priced_s(few, few)

    def fewest(self, level: str, least: int) -> int | None:
        """Returns the fewest rematerialised layers with which a plan fits; or None.

        The number is at least ``least``. None means that no plan fits.

        Each further rematerialised layer lowers the memory of the plan, except for the
        model's last layer: the backward pass begins with it and needs its activations
        at once.
        """
        top = max(self.layers - 1, least)
        if not self.fits_with(f"{top}:{level}"):
            if top == self.layers or self.last_too_few(f"{top}:{level}", top):
                return None
            top = self.layers
            if not self.fits_with(f"{top}:{level}"):
                return None
        few = self.too_few(top)
        return first_that(lambda n: self.fits_with(f"{n}:{level}"), least - 1, top, few)

    def last_too_few(self, remat: str, layers: int) -> bool:
        """Whether a plan does not fit for a reason other than its last layer.

        Rematerialising the last layer saves less memory than rematerialising any other
        layer, because the backward pass needs its activations at once. The result is
        true if the plan would not fit even if the last layer saved as much as the
        others.
        """
        errors = (self.search.errors[program_name(self.count, r)] for r in ("", remat))
        none, most = (getattr(error, "least_bytes", 0.0) for error in errors)
        saved = max(0.0, none - most) / layers
        return most - saved > self.search.cluster.memory_bytes

    def too_few(self, layers: int) -> int:
        """Returns the largest number of rematerialised layers that cannot be enough.

        The memory is assumed to fall linearly with the number of rematerialised layers.

        With ``layers`` rematerialised layers, the memory is zero at best. So a line
        from the memory without rematerialisation down to zero is a lower bound of the
        memory.

        Args:
          layers: a number of layers with which a plan fits.
        """
        error = self.search.errors[program_name(self.count, "")]
        need = error.least_bytes if isinstance(error, InfeasibleError) else 0.0
        limit = self.search.cluster.memory_bytes
        return math.floor((1 - limit / need) * layers) if need > limit else 0

    def more(self, level: str, numbers: Sequence[int]) -> None:
        """Tries numbers of rematerialised layers as long as plans get faster."""
        for number in numbers:
            remat, before = f"{number}:{level}", self.search.best
            fits = self.fits_with(remat)
            best = self.search.best
            if best is before and (not fits or best is not self.plan_with(remat)):
                return


def first_that(holds: Callable[[int], bool], low: int, high: int, few: int) -> int:
    """Returns the least number for which a condition holds, by bisection.

    The condition must also hold for all larger numbers.

    The search is a bisection. Numbers up to ``few`` are tested only if the condition
    holds for ``few + 1``.

    >>> first_that(lambda n: n >= 5, 0, 12, few=4)
    5

    Args:
      holds: the condition; called for few numbers between ``low`` and ``high``.
      low: a number for which the condition does not hold.
      high: a number for which the condition holds.
      few: a number for which the condition is not likely to hold.
    """
    begin = min(max(few, low), high - 1)
    first = _bisect(holds, begin, high)
    if first > begin + 1 or begin == low or not holds(begin):
        return first
    return _bisect(holds, low, begin)


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _numbers(layers: int) -> list[int]:
    """The numbers of rematerialised layers to try: all if the step has few layers, and
    some of them if it has many layers.
    """
    apart = -(-layers // _TRIED)
    return sorted({*range(apart, layers + 1, apart), max(1, layers - 1), layers})


def _host_memory(search: Programs) -> None:
    """Proposes to keep optimizer state and parameters in host memory.

    An array of optimizer state is copied to the devices and back to the host once per
    step. All of them are tried first, then the largest ones, with half of the bytes and
    so on, as long as plans get faster. Parameters are also read by the forward and the
    backward pass. They are tried, together with all optimizer state, if memory still
    holds the plan back.
    """
    cluster, best = search.cluster, search.best
    state = carried_state(search.analysis, InputRole.OPTIMIZER_STATE)
    parameters = carried_state(search.analysis, InputRole.PARAMETER)
    if search.options.offload != "auto" or not parameters:
        return
    if why := _cannot_offload(cluster):
        search.leave_out("state in the memory of the hosts", why)
        return
    nbytes = sum(size for _, size in state)
    copies_s = 2.0 * nbytes / cluster.num_devices / cluster.device.host_bytes_per_s
    if best is not None:
        name = next((n for n, p in search.plans.items() if p is best), "")
        free_s = search.free_s(name) if name in search.slowed else 0.0
        easy = name in search.slowed and not search.is_held_back(name)
        least_s = free_s + copies_s / 2 ** (_OFFLOADED - 1)
        if easy or (not best.remat.layers and least_s >= best.predicted.step_s):
            why = "it saves memory, which does not hold the plan back"
            search.leave_out("state in the memory of the hosts", why)
            return
    whole = _halves_on_host(search, "optimizer state", state, [])
    best = search.best
    limit = EASY * cluster.memory_bytes
    if best is None or (best is whole and best.predicted.peak_memory_bytes > limit):
        _halves_on_host(search, "parameters", parameters, [p for p, _ in state])


def _halves_on_host(
    search: Programs, what: str, state: Sequence[tuple[str, int]], others: Sequence[str]
) -> Plan | None:
    """Proposes to keep all arrays of state in host memory, then half of the bytes ...

    The proposals end when plans get no faster.

    Args:
      search: the search.
      what: a text for the arrays.
      state: path and bytes of each array, the largest first.
      others: paths of other arrays in host memory.

    Returns:
      The plan with all arrays in host memory; None if there is none.
    """
    whole, nbytes = "", float(sum(size for _, size in state))
    for _ in range(_OFFLOADED if state else 0):
        sizes = itertools.accumulate(size for _, size in state)
        chosen = [p for (p, _), n in zip(state, sizes, strict=True) if n <= nbytes]
        before = search.best
        name = f"{size_text(nbytes, ' ')} of {what} in the memory of the hosts"
        whole = whole or name
        paths = [*others, *chosen]
        search.judge(name, functools.partial(_plan_on_host, search, paths), 0.0)
        if search.best is before:
            break
        nbytes /= 2
    return search.plans.get(whole)


def _cannot_offload(cluster: Cluster) -> str:
    """Returns why optimizer state cannot be in host memory; '' if it can."""
    if cluster.groups:
        return "replicas on unequal devices keep their state in the devices' memory"
    if cluster.device.kind == "tpu":
        # Measured with libtpu 0.0.42: for 9.7 GB of state, the compiled program copied
        # 10.8 GB to the devices at once.
        return "XLA's compiler for TPU brings all of it back to the devices at once"
    return ""


def _plan_on_host(search: Programs, paths: Sequence[str]) -> Plan:
    """Returns the fastest plan of one stage that keeps given state in host memory."""
    options = of_one_stage(search.options, offload="none")
    inner = Programs(
        search.analysis,
        search.cluster,
        options,
        search.plan,
        search.codecs,
        offload=paths,
    )
    try:
        _rewritten(inner)
    except OutOfTimeError:
        if inner.best is None:
            raise
    if inner.best is None:
        raise inner.failure(advise=False)
    return inner.write_plan()


def _pipelines(search: Programs) -> None:
    """Proposes pipelines with the user's number of stages, or the best number."""
    analysis, cluster, asked = search.analysis, search.cluster, search.options
    if asked.stages in (None, 1):
        return
    if isinstance(asked.stages, int):
        make = functools.partial(plan_pipeline, analysis, cluster, asked)
        make = functools.partial(make, asked.stages, search.codecs)
        search.judge(f"{asked.stages} stages", make, 0.0)
        return
    if search.best is None and search.too_large():
        return
    asked_for = search.said.stages == "auto" or search.best is None
    if not asked_for and any(op.rule.whole for op in analysis.graph.operators):
        search.leave_out("stages", "a shard_map of the step is code of its mesh")
        return
    most_s = search.most_s(_STAGED)
    limits = _limits_of_pipelines(search, most_s)
    if isinstance(limits, str):
        search.leave_out("stages", limits)
        return
    begin = time.thread_time()
    limited = asked
    if search.best is not None and asked.seconds is not None:
        # The search of stages may take about as long as the search of one stage.
        own_s = max(_LEAST_S, begin - search.begin_s)
        limited = dataclasses.replace(asked, seconds=min(asked.seconds, own_s))
    make = functools.partial(best_pipeline, analysis, cluster, limited, search.codecs)
    make = functools.partial(make, most_s=most_s, limits=limits)
    search.judge("stages", make, _STAGED)


def _limits_of_pipelines(search: Programs, most_s: float) -> PipelineLimits | str:
    """Limits of the pipelines that may be faster than the best plan of one stage.

    Args:
      search: holds the best plan of one stage, if one fits.
      most_s: seconds of a step that a pipeline may take at most.

    Returns:
      The largest number of stages and of microbatches with which a pipeline may be
      faster, or the reason why no pipeline can be faster.
    """
    cluster, best = search.cluster, search.best
    if cluster.num_devices == 1:
        return "there is one device"
    if best is None or best.worth is None or cluster.groups:
        return PipelineLimits()
    every = cluster.num_devices
    sizes = [math.prod(shape) for shape in slice_shapes(cluster)]
    largest = max((n for n in sizes if n < every), default=1)
    alone_s, starts_s = alone_on(search.analysis, cluster)
    least = functools.partial(least_s, alone_s / every, starts_s, every / largest)
    rows = max(1, batch_rows(search.analysis.graph))
    asked = search.options.microbatches
    counts = [n for n in divisors(rows) if asked in ("auto", n)] or [1]
    stages = [
        n for n in range(2, every + 1) if any(least(n, m) < most_s for m in counts)
    ]
    if not stages:
        return "the work of two stages, their bubble and their tasks take as long"
    few = [m for m in counts if any(least(n, m) < most_s for n in stages)]
    return PipelineLimits(stages=max(stages), microbatches=max(few), alone=False)


def alone_on(analysis: Analysis, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a step on one device, and the seconds of launching its kernels.

    The seconds of launching kernels leave out the kernels of the optimizer update.
    """
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    work = work_of(unsplit(analysis, pricer.sizes), pricer)
    starts_s = work.kernel_s[~work.table.update]
    return float(work.planned_s.sum() + work.kernel_s.sum()), float(starts_s.sum())


def least_s(
    each_s: float, starts_s: float, slices: float, stages: int, microbatches: int
) -> float:
    """A lower bound of the seconds of a pipeline's step, including kernel launches.

    The first microbatch goes through all stages before later microbatches can keep the
    stages busy. During this wait the first microbatch runs on the devices of one stage
    only. If each stage has several virtual stages (interleaving), this wait is divided
    by their number. With one microbatch, later stages may compute gradients of weights
    during the wait. Gradients of weights are at most half of the work, because each
    product for them is as large as a product of the forward pass.

    A stage launches its kernels once for each microbatch, whatever its number of
    devices. At least one stage has as many kernels as the mean of all stages. So a step
    takes at least as long as that stage needs for its launches.

    >>> least_s(0.080, 0.0, 2, stages=2, microbatches=1) > 1.4 * 0.080
    True
    >>> least_s(0.0, 0.010, 2, stages=2, microbatches=4) > 2 * 0.010
    True

    Args:
      each_s: seconds that each device computes in a step if all devices do equal work.
      starts_s: seconds of launching all kernels of one microbatch.
      slices: the number of all devices divided by the number of devices in the stage
        that has most devices.
      stages: number of stages.
      microbatches: number of microbatches.
    """
    chunks = max(s.chunks for s in SCHEDULES) if microbatches > 1 else 2
    work_s = (1 + (slices - 1) / (chunks * microbatches)) * each_s
    begun_s = (microbatches + (stages - 1) / chunks) * starts_s / stages
    return _CUT * max(work_s, begun_s) + issue_s(stages, microbatches)


_PROPOSERS: tuple[Callable[[Programs], None], ...] = (
    _replicas,
    _rewritten,
    _host_memory,
    _pipelines,
)
