"""Decides what is beside layouts: stages, microbatches, layers that compute again.

Proposers say by name how the step may be rewritten or cut. One search judges each
proposal: it drops what cannot be faster, finds the best layouts of the rest, keeps the
fastest plan that fits, and records all of it.

*Bounds.* More microbatches and layers that compute again do more work with less memory.
So they are faster only where memory holds a plan back: where a plan that was seen on
the way and does not fit is faster. A plan that needs less than half of the memory is
not held back. Layers of a loop may be faster with room for all, too, because what they
keep is written to stacks and read again; they are priced in the layouts of the plan. A
pipeline takes no less than `least_s`.

*Layers.* The first layers compute again: what they keep is needed longest. The more of
them do, the less memory a plan needs. So the fewest layers with which a plan fits are
found by bisection, from the number on where a straight line from what every plan needs
without them to nothing meets the memory of a device. More layers are tried as long as
plans get faster: with memory to spare layouts may be faster, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from autopar.cluster import Cluster
from autopar.cost.estimate import work_of
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import unsplit
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.options import PlanOptions
from autopar.planner.programs import GAP, Planner, Programs, Unfit, program_name
from autopar.planner.replicas import plan_replicas
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
from autopar.steps.microbatches import numbers_of_microbatches
from autopar.steps.remat import layer_starts, named_values
from autopar.steps.update_batches import equations_of_update
from autopar_passes.remat.copies import DOTS, FULL, NAMES

# Numbers of layers that are tried of each level, at most and about.
_TRIED = 8
# A pipeline has to be faster by this part, as more of what it does is not predicted.
_STAGED = 0.05
# The part of the work that stages do at least: a cut leaves some small operators out.
_CUT = 0.999
# Least seconds of the solver of stages.
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
    """The fastest plan of all proposals that fits.

    Args:
      analysis: the step.
      cluster: what to plan for.
      options: hints and limits, without layouts to keep.
      plan: plans a step of one stage for options that decide all else.
      codecs: what was said about codecs.
      advise: whether the error, if no plan fits, says a size of memory that is enough.
      unfit: proposals that did not fit when the same was planned with more memory,
        which are not looked at again. Those that do not fit now are added.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: the step cannot be split, cut or planned as is asked for.
    """
    search = Programs(analysis, cluster, options, plan, codecs, unfit)
    for propose in _PROPOSERS:
        try:
            propose(search)
        except PlanError:
            raise
        except Exception as error:  # what nobody asked for must not stop a plan
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
    """Proposes replicas on groups of unequal devices."""
    asked = search.options
    if not search.cluster.groups or (
        isinstance(asked.stages, int) and asked.stages > 1
    ):
        return
    remat = None if asked.remat == "auto" else asked.remat
    alone = dataclasses.replace(asked, stages=1, schedule=None, remat=remat)
    make = functools.partial(plan_replicas, search.analysis, search.cluster, alone)
    search.judge("replicas", make, 0.0)


def _rewritten(search: Programs) -> None:
    """Proposes 1, 2, 4 ... microbatches, each with layers that compute again.

    It ends where more of them are slower, or where memory holds no plan back.
    """
    asked = search.options
    if search.cluster.groups or (isinstance(asked.stages, int) and asked.stages > 1):
        return
    _in_microbatches(search)
    search.refine()


def _in_microbatches(search: Programs) -> None:
    """Tries numbers of microbatches until they are slower, or need not be fewer."""
    asked = search.options
    for count in _counts(search):
        before = search.best
        try:
            search.fits_in(count)
        except PlanError as error:
            if before is None and not search.errors.keys() - {program_name(count, "")}:
                raise
            # More microbatches do not divide the rows either, nor keep the meaning.
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
    """Numbers of microbatches to try; of more than one those that are exact."""
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
    """Tries the most microbatches with all layers again, for what is to be said.

    Where the state alone does not fit, neither is enough. But what every plan needs,
    and the memory that is enough, are those of a plan with both.
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
    """What would be computed from each microbatch alone, and nobody asked for."""
    if search.options.coupled == "microbatch":
        return ()
    name = program_name(count, "")
    search.programs.setdefault(name, search.rewritten(count, ""))
    try:
        split = search.program(name).split
    except PlanError:
        return ()  # planning it says why
    return () if split is None else split.local


def _again(search: Programs, count: int) -> None:
    """Proposes layers that compute again, in a number of microbatches."""
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
    levels = [FULL, DOTS, *([NAMES + ",".join(names)] if names else [])]
    layered = _Layers(search, count, layers)
    try:
        if plain in search.plans:
            layered.beside(plain, levels, held=held)
        else:
            layered.to_fit(levels)
    except PlanError as error:
        search.leave_out("layers again", str(error).split("\n", 1)[0])


class _Layers:
    """Proposals of layers that compute again, in one number of microbatches."""

    def __init__(self, search: Programs, count: int, layers: int) -> None:
        self.search, self.count, self.layers = search, count, layers

    def fits_with(self, remat: str) -> bool:
        return self.search.fits_in(self.count, remat)

    def plan_with(self, remat: str) -> Plan | None:
        return self.search.plans.get(program_name(self.count, remat))

    def beside(self, plain: str, levels: Sequence[str], *, held: bool) -> None:
        """Tries layers where a plan fits that computes nothing again."""
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
                # Fewer layers save fewer stacks, and memory holds nothing back.
                self.fits_with(f"{self.layers}:{level}")

    def to_fit(self, levels: Sequence[str]) -> None:
        """Finds the fewest layers with which a plan fits, and tries more."""
        least = 1
        for level in levels:
            first = self.fewest(level, least)
            if first is None:
                if level == FULL:
                    return
                continue
            # What keeps more of each layer has to compute as many of them again.
            least = max(least, first) if level == FULL else least
            above = [k for k in _numbers(self.layers) if k > first]
            if self.may_gain(level, first):
                self.more(level, above)
            if self.search.best is self.plan_with(f"{self.layers - 1}:{level}"):
                self.more(level, above[::-1])

    def may_gain(self, level: str, first: int) -> bool:
        """Whether other layouts than fit with the fewest layers are faster.

        The plan with most layers has memory to spare. Where its layouts are no faster
        with the fewest layers, more of them only compute more.
        """
        numbers = range(1, self.layers + 1)
        most = max(n for n in numbers if self.plan_with(f"{n}:{level}") is not None)
        if first == most:
            return False
        few, many = (program_name(self.count, f"{n}:{level}") for n in (first, most))
        free_s = self.search.priced_s(many, few)
        return free_s < (1 - GAP) * self.search.priced_s(few, few)

    def fewest(self, level: str, least: int) -> int | None:
        """The fewest layers with which a plan fits, ``least`` or more; None: none.

        With more layers the plan needs less memory, but for the last layer: its
        activations are needed as soon as they are made.
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
        """Whether one more layer is not enough, if it saves what the others do.

        The last layer saves less: its activations are needed as soon as they are made.
        """
        errors = (self.search.errors[program_name(self.count, r)] for r in ("", remat))
        none, most = (getattr(error, "least_bytes", 0.0) for error in errors)
        saved = max(0.0, none - most) / layers
        return most - saved > self.search.cluster.memory_bytes

    def too_few(self, layers: int) -> int:
        """With so many layers no plan fits if what is needed falls evenly with layers.

        It falls at most to nothing, so fewer of them cannot be enough.

        Args:
          layers: with which a plan fits.
        """
        error = self.search.errors[program_name(self.count, "")]
        need = error.least_bytes if isinstance(error, InfeasibleError) else 0.0
        limit = self.search.cluster.memory_bytes
        return math.floor((1 - limit / need) * layers) if need > limit else 0

    def more(self, level: str, numbers: Sequence[int]) -> None:
        """Tries numbers of layers as long as plans get faster."""
        for number in numbers:
            remat, before = f"{number}:{level}", self.search.best
            fits = self.fits_with(remat)
            best = self.search.best
            if best is before and (not fits or best is not self.plan_with(remat)):
                return


def first_that(holds: Callable[[int], bool], low: int, high: int, few: int = 0) -> int:
    """The first number for which something holds that holds for all larger ones.

    What is left is bisected. Numbers up to ``few`` are asked for only if it holds for
    the number behind them.

    >>> first_that(lambda n: n >= 5, 0, 12, few=4)
    5

    Args:
      holds: is asked for few numbers between ``low`` and ``high``.
      low: it does not hold for this one.
      high: it holds for this one.
      few: it is not likely to hold for this one.
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
    """The numbers of layers that are tried: all of few, some of many."""
    apart = -(-layers // _TRIED)
    return sorted({*range(apart, layers + 1, apart), max(1, layers - 1), layers})


def _pipelines(search: Programs) -> None:
    """Proposes pipelines: so many stages as are asked for, or the best."""
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
        # The search of stages takes about as long as that of one stage.
        own_s = max(_LEAST_S, begin - search.begin_s)
        limited = dataclasses.replace(asked, seconds=min(asked.seconds, own_s))
    make = functools.partial(best_pipeline, analysis, cluster, limited, search.codecs)
    make = functools.partial(make, most_s=most_s, limits=limits)
    search.judge("stages", make, _STAGED)


def _limits_of_pipelines(search: Programs, most_s: float) -> PipelineLimits | str:
    """The pipelines that may be better than the best plan of one stage.

    Args:
      search: with the best plan of one stage, where one fits.
      most_s: seconds of a step that a pipeline may take at most.

    Returns:
      The most stages and microbatches of such pipelines, or why there are none.
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
    """Seconds of a step on one device, and those of starting its kernels.

    Kernels of the update are left out of the second ones.
    """
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    work = work_of(unsplit(analysis, pricer.sizes), pricer)
    starts_s = work.kernel_s[~work.table.update]
    return float(work.planned_s.sum() + work.kernel_s.sum()), float(starts_s.sum())


def least_s(
    each_s: float, starts_s: float, slices: float, stages: int, microbatches: int
) -> float:
    """Seconds that a step in stages takes at least, the issue of its tasks included.

    The first microbatch goes through all stages before the next ones can keep them
    busy, on no more devices at a time than a stage has. Stages that have several parts
    in turn wait for as small a part of that. With one microbatch, weights' gradients of
    the later stages may be made meanwhile: at most half of the work, as each product
    of them is as large as one of the forward pass.

    A stage starts its kernels for each microbatch, however many devices it has. Some
    stage has as many kernels as the mean. So a step takes that long, too.

    >>> least_s(0.080, 0.0, 2, stages=2, microbatches=1) > 1.4 * 0.080
    True
    >>> least_s(0.0, 0.010, 2, stages=2, microbatches=4) > 2 * 0.010
    True

    Args:
      each_s: seconds of each device where all do an even part of the work.
      starts_s: seconds of starting all kernels of a microbatch.
      slices: all devices over those of the largest stage.
      stages: how many there are.
      microbatches: likewise.
    """
    chunks = max(s.chunks for s in SCHEDULES) if microbatches > 1 else 2
    work_s = (1 + (slices - 1) / (chunks * microbatches)) * each_s
    begun_s = (microbatches + (stages - 1) / chunks) * starts_s / stages
    return _CUT * max(work_s, begun_s) + issue_s(stages, microbatches)


_PROPOSERS: tuple[Callable[[Programs], None], ...] = (_replicas, _rewritten, _pipelines)
