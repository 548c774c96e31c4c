"""Decides what is beside layouts: stages, microbatches, layers that compute again.

Proposers say by name how the step may be rewritten or cut. One search judges each
proposal: it drops what cannot be faster, finds the best layouts of the rest, keeps the
fastest plan that fits, and records all of it.

*Bounds.* More microbatches and layers that compute again do more work with less memory.
So they are faster only where memory holds a plan back: where a plan for devices with
room for everything is faster. A plan that needs less than half of the memory is not
held back. Layers of a loop may be faster with room for all, too, because what they keep
is written to stacks and read again; they are priced in the layouts of the plan. A
pipeline takes no less than the work of one device divided by all, its bubble, and the
issue of its tasks.

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
from typing import NamedTuple, Protocol

import msgspec

from autopar.cluster import Cluster
from autopar.cost.estimate import work_of
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import unsplit
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.infeasible import size_text
from autopar.planner.kept_layouts import priced
from autopar.planner.options import PlanOptions, decided
from autopar.planner.proposals import Proposal, of_program, record
from autopar.planner.remat import as_asked
from autopar.planner.replicas import plan_replicas
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import TimeOutError
from autopar.planner.stages.entry import (
    Limits,
    best_pipeline,
    issue_s,
    plan_pipeline,
)
from autopar.planner.stages.plan import SCHEDULES, divisors
from autopar.planner.stages.submeshes import slice_shapes
from autopar.plans import Plan
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.steps.microbatches import numbers_of_microbatches
from autopar.steps.remat import layer_starts, named_values
from autopar_passes.graph.roles import InputRole
from autopar_passes.remat.levels import DOTS, FULL, NAMES


class Planned(NamedTuple):
    """A plan, and how many times as long it takes as with room for everything."""

    plan: Plan
    slowed: float


class Planner(Protocol):
    """Plans the layouts of a step of one stage."""

    def __call__(
        self,
        program: Analysis,
        on: Cluster,
        asked: PlanOptions,
        untried: Sequence[str] | None = None,
        *,
        quick: bool = False,
        most_s: float = math.inf,
    ) -> Planned:
        """Finds them.

        Args:
          program: the step as the options ask for it.
          on: the cluster.
          asked: options that decide all but layouts and codecs.
          untried: where nothing fits, the error says what would be enough, and these
            options; None: it does not.
          quick: whether one problem is solved on each mesh, which shows about how fast
            a plan is.
          most_s: seconds of a plan that is known; where none can be faster, the search
            ends.
        """
        ...


# Numbers of layers that are tried of each level, at most and about.
_TRIED = 8
# A plan that needs less than this part of the memory is not held back by it.
_EASY = 0.5
# A plan slower by less than this part is as fast: the solver's own gap. A pipeline has
# to be faster by more, as more of what it does is not predicted.
_GAP, _STAGED = 0.005, 0.05
# Most seconds of the solver on a mesh for a program that is looked at quickly.
_QUICK_S = 2.0
# Programs that are planned in full: so many, within this part of the fastest one.
_REFINED, _NEAR = 3, 0.03
# Programs that are kept for a second look.
_PROGRAMS = 4
# Bytes of a device that holds whatever is planned for it.
_UNLIMITED = 10**18
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
) -> Plan:
    """The fastest plan of all proposals that fits.

    Args:
      analysis: the step.
      cluster: what to plan for.
      options: hints and limits, without layouts to keep.
      plan: plans a step of one stage for options that decide all else.
      codecs: what was said about codecs.
      advise: whether the error, if no plan fits, says a size of memory that is enough.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: the step cannot be split, cut or planned as is asked for.
    """
    search = _Search(analysis, cluster, options, plan, codecs)
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
    return search.written()


class _Search:
    """The plans that were proposed, and the fastest of them that fits."""

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        options: PlanOptions,
        plan: Planner,
        codecs: CodecRequest,
    ) -> None:
        self.analysis, self.cluster, self.options = analysis, cluster, decided(options)
        self.said, self.plan, self.codecs = options, plan, codecs
        self.best: Plan | None = None
        self.plans: dict[str, Plan] = {}
        self.errors: dict[str, PlanError] = {}
        # Why something was not tried, by what it is.
        self.left_out: dict[str, str] = {}
        self.programs: dict[str, PlanOptions] = {}
        # The last programs that were looked at.
        self.analyses: dict[str, Analysis] = {}
        # Seconds of a step by the plan whose layouts it has, and its program.
        self.seconds: dict[tuple[str, str], float] = {}
        # Programs whose layouts are not the best that there are.
        self.quick: set[str] = set()
        # How much memory slows plans (`Planned.slowed`).
        self.slowed: dict[str, float] = {}
        self.begin_s = time.thread_time()

    def judge(self, name: str, make: Callable[[], Plan | None], gain: float) -> None:
        """Finds the plan of a proposal, and keeps it where it is the fastest.

        Args:
          name: of the proposal.
          make: finds its plan; None: none is as fast as the best one.
          gain: the part of a step that it must save to be worth it.
        """
        if name in self.plans or name in self.errors:
            return
        begin = time.thread_time()
        try:
            found = make()
        except TimeOutError as error:  # what is so hard to fit counts as too large
            self.errors[name] = InfeasibleError(str(error))
            found = None
        except PlanError as error:
            self.errors[name] = error
            found = None
        if found is not None:
            self.plans[name] = found
            most_s = self.most_s(gain)
            if found.predicted.step_s < most_s:
                self.best = found
        if name not in self.programs:
            _record(name, found, self.errors.get(name), time.thread_time() - begin)

    def most_s(self, gain: float = 0.0) -> float:
        """Seconds of a step that a plan may take at most to be kept."""
        best = self.best
        return math.inf if best is None else (1 - gain) * best.predicted.step_s

    def leave_out(self, what: str, why: str) -> None:
        """Records that something is not tried, and why."""
        say(f"{what}: {why}")
        self.left_out[what] = why
        record(Proposal(what, "", note=f"not tried: {why}"))

    def rewritten(self, count: int, remat: str) -> PlanOptions:
        """The options of a plan of one stage in microbatches, with layers again."""
        asked = self.options
        said = asked.remat if asked.remat != "auto" else remat or None
        return dataclasses.replace(
            asked, stages=1, schedule=None, microbatches=count, remat=said
        )

    def program(self, name: str) -> Analysis:
        """The step as a program's options ask for it; see `as_asked`."""
        found = self.analyses.pop(name, None)
        if found is None:
            found = as_asked(self.analysis, self.programs[name])
        self.analyses[name] = found
        for old in list(self.analyses)[:-_PROGRAMS]:
            del self.analyses[old]
        return found

    def tried(self, count: int, remat: str = "") -> bool:
        """Whether a plan in microbatches, with layers computed again, fits.

        Raises:
          PlanError: the step cannot be planned as it is written.
        """
        name = _name(count, remat)
        options = self.programs.setdefault(name, self.rewritten(count, remat))
        quick = bool(self.plans or self.errors)
        if quick and name not in self.plans and self.codecs.mode == "none":
            self.quick.add(name)
            limit_s = min(options.seconds or _QUICK_S, _QUICK_S)
            options = dataclasses.replace(options, seconds=limit_s)

        def find() -> Plan:
            with of_program(name):
                program = self.program(name)
                found, slowed = self.plan(program, self.cluster, options, quick=quick)
            self.slowed[name] = slowed
            return found

        self.judge(name, find, 0.0)
        error = self.errors.get(name)
        if error is not None and not isinstance(error, InfeasibleError):
            raise error
        return name in self.plans

    def refine(self) -> None:
        """Plans the fastest programs in full that were looked at quickly.

        One is left out where a bound of all its plans is no less than the best plan.
        """
        near_s = (1 + _NEAR) * self.best.predicted.step_s if self.best else 0.0
        known = self.quick & self.plans.keys()
        found = {n: self.plans[n].predicted.step_s for n in known}
        near = [n for n in sorted(found, key=lambda n: found[n]) if found[n] <= near_s]
        for name in near[:_REFINED]:
            if self.plans[name].solver.bound >= self.most_s(_GAP):
                continue
            say(f"planning in full: {name}")
            options, most_s = self.programs[name], self.most_s()
            with of_program(name):
                program = self.program(name)
                plan, _ = self.plan(program, self.cluster, options, most_s=most_s)
            self.plans[name] = plan
            if plan.predicted.step_s < self.most_s():
                self.best = plan

    def held(self, name: str) -> bool:
        """Whether memory holds a plan back: with room for everything it is faster."""
        plan = self.plans[name]
        easy = plan.predicted.peak_memory_bytes <= _EASY * self.cluster.memory_bytes
        return not easy and self.slowed[name] > 1 + _GAP

    def priced_s(self, name: str, other: str) -> float:
        """Seconds of a step of another program in the layouts of a plan.

        They are 0 where no layouts of the rest are found in time.
        """
        if (name, other) not in self.seconds:
            before, after = self.program(name), self.program(other)
            found_s = 0.0
            with contextlib.suppress(PlanError):
                roomy = _roomy(self.cluster)
                found_s = priced(self.plans[name], before, after, roomy).step_s
            self.seconds[name, other] = found_s
        return self.seconds[name, other]

    def too_large(self) -> bool:
        """Whether the state alone does not fit, however it is split."""
        if self.cluster.groups:
            return False
        graph = self.analysis.graph
        state = sum(
            graph.values[i.value].nbytes
            for i in graph.inputs
            if i.role is not InputRole.BATCH
        )
        return state > self.cluster.memory_bytes * self.cluster.num_devices

    def failure(self, *, advise: bool) -> PlanError:
        """The error where no plan fits, of what needs least memory."""
        unfit = {n: e for n, e in self.errors.items() if isinstance(e, InfeasibleError)}
        programs = [name for name in unfit if name in self.programs]
        others = {n: e for n, e in self.errors.items() if n not in unfit}
        if not programs:
            known = {*self.errors, *self.left_out}
            alone = self.options.stages == "auto" and "stages" not in known
            if self.cluster.groups and alone:
                return PlanError(
                    f"one kind of devices alone trains fastest on {self.cluster}: plan "
                    "for a part of it, cluster.groups[0] and so on. Not tried: "
                    f"replicas: {self.errors['replicas']}"
                )
            return [*others.values(), *unfit.values()][0]
        name = programs[-1]
        error: PlanError = unfit[name]
        if advise:
            try:
                with of_program(name):
                    program, options = self.program(name), self.programs[name]
                    self.plan(program, self.cluster, options, self.untried())
            except PlanError as found:
                error = found
        said = {n: str(e).split("\n", 1)[0] for n, e in others.items()}
        known = {**self.left_out, **said}.items()
        reasons = [f"\n  not tried: {what}: {why}" for what, why in known]
        if reasons and isinstance(error, InfeasibleError):
            made = InfeasibleError(f"{error}{''.join(reasons)}")
            made.least_bytes, made.enough_bytes = error.least_bytes, error.enough_bytes
            return made
        return error

    def untried(self) -> tuple[str, ...]:
        """Options with which less is kept for the backward pass, not in use."""
        asked = self.options
        said = {
            "remat='auto'": asked.remat in (None, 0, "none"),
            "microbatches='auto'": asked.microbatches in (None, 1),
            "stages='auto'": asked.stages in (None, 1),
        }
        return tuple(text for text, is_off in said.items() if is_off)

    def written(self) -> Plan:
        """The best plan, with what was decided and what it gained."""
        best = self.best
        assert best is not None
        count, plain = best.microbatches, self.plans.get(_name(1, ""))
        narrowed = self.options.one_stage
        lines = [f"one stage: {narrowed}"] if narrowed else []
        if len(best.stages) > 1 and self.options.stages == "auto":
            ones = [self.plans[n] for n in self.programs if n in self.plans]
            one = min(ones, key=lambda p: p.predicted.step_s, default=None)
            lines.append(self.gained(f"{len(best.stages)} stages", best, one, "one"))
        if len(best.stages) == 1 and self.options.microbatches == "auto" and count > 1:
            lines.append(self.gained(f"{count} microbatches", best, plain, "one"))
        if best.remat.layers and self.options.remat == "auto":
            without = self.plans.get(_name(count, ""))
            what = f"{len(best.remat.layers)} of {len(best.remat.starts)} layers again"
            lines.append(self.gained(what, best, without, "none"))
        return msgspec.structs.replace(best, decided=tuple(lines)) if lines else best

    def gained(self, what: str, best: Plan, other: Plan | None, than: str) -> str:
        """What a decision gains over the best plan without it."""
        if other is not None:
            times = other.predicted.step_s / best.predicted.step_s
            return f"{what}: {times:.3g} times as fast as {than}"
        fits = f"{what}: fits in {size_text(best.predicted.peak_memory_bytes, ' ')}"
        bytes_ = [
            e.least_bytes
            for n, e in self.errors.items()
            if isinstance(e, InfeasibleError) and n in self.programs and e.least_bytes
        ]
        least = min(bytes_, default=0.0)
        if least <= best.predicted.peak_memory_bytes:
            return f"{fits}, none was found to fit without"
        return f"{fits}, {size_text(least, ' ')} without"


def _name(count: int, remat: str) -> str:
    """What a program computes again, and in how many microbatches."""
    parts = [f"{count} microbatches"] if count > 1 else []
    parts += [f"remat {remat}"] if remat else []
    return ", ".join(parts) or "as written"


def _record(
    name: str, found: Plan | None, error: PlanError | None, cpu_s: float
) -> None:
    if found is None:
        note = "none is faster" if error is None else str(error).split("\n", 1)[0]
        record(Proposal(name, "", note=note, cpu_s=cpu_s))
        return
    expected = found.predicted
    what = f"{len(found.stages)} stages, {found.microbatches} microbatches"
    name = f"{name}: {what}" if len(found.stages) > 1 else name
    made = expected.step_s, expected.peak_memory_bytes
    record(Proposal(name, "", *made, cpu_s=cpu_s))


def _replicas(search: _Search) -> None:
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


def _rewritten(search: _Search) -> None:
    """Proposes 1, 2, 4 ... microbatches, each with layers that compute again.

    It ends where more of them are slower, or where memory holds no plan back.
    """
    asked = search.options
    if search.cluster.groups or (isinstance(asked.stages, int) and asked.stages > 1):
        return
    _in_microbatches(search)
    search.refine()


def _in_microbatches(search: _Search) -> None:
    """Tries numbers of microbatches until they are slower, or need not be fewer."""
    asked = search.options
    for count in _counts(search):
        before = search.best
        try:
            search.tried(count)
        except PlanError as error:
            if before is None and not search.errors.keys() - {_name(count, "")}:
                raise
            # More microbatches do not divide the rows either, nor keep the meaning.
            search.leave_out(f"{count} microbatches", str(error).split("\n", 1)[0])
            return
        if search.best is None and search.too_large():
            return
        if asked.remat == "auto":
            _again(search, count)
        if before is not None and search.best is before:
            return
        if asked.microbatches != "auto":
            return
        plain = _name(count, "")
        if plain in search.plans and not search.held(plain):
            why = "they need less memory, which does not hold the plan back"
            search.leave_out("more microbatches", why)
            return


def _counts(search: _Search) -> Iterator[int]:
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


def _local(search: _Search, count: int) -> tuple[str, ...]:
    """What would be computed from each microbatch alone, and nobody asked for."""
    if search.options.coupled == "microbatch":
        return ()
    name = _name(count, "")
    search.programs.setdefault(name, search.rewritten(count, ""))
    try:
        split = search.program(name).split
    except PlanError:
        return ()  # planning it says why
    return () if split is None else split.local


def _again(search: _Search, count: int) -> None:
    """Proposes layers that compute again, in a number of microbatches."""
    plain = _name(count, "")
    held = plain not in search.plans or search.held(plain)
    equations = search.analysis.program.body.equations
    loops = any(e.primitive == "scan" and e.params["length"] > 1 for e in equations)
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

    def __init__(self, search: _Search, count: int, layers: int) -> None:
        self.search, self.count, self.layers = search, count, layers

    def tried(self, remat: str) -> bool:
        return self.search.tried(self.count, remat)

    def known(self, remat: str) -> Plan | None:
        return self.search.plans.get(_name(self.count, remat))

    def beside(self, plain: str, levels: Sequence[str], *, held: bool) -> None:
        """Tries layers where a plan fits that computes nothing again."""
        numbers = _numbers(self.layers)
        for level in levels:
            if held:
                self.more(level, numbers)
                self.more(level, numbers[::-1])
                continue
            other = _name(self.count, f"{self.layers}:{level}")
            options = self.search.rewritten(self.count, f"{self.layers}:{level}")
            self.search.programs.setdefault(other, options)
            same_s = self.search.priced_s(plain, plain)
            if self.search.priced_s(plain, other) < same_s:
                # Fewer layers save fewer stacks, and memory holds nothing back.
                self.tried(f"{self.layers}:{level}")

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
            if self.search.best is self.known(f"{self.layers - 1}:{level}"):
                self.more(level, above[::-1])

    def may_gain(self, level: str, first: int) -> bool:
        """Whether other layouts than fit with the fewest layers are faster.

        The plan with most layers has memory to spare. Where its layouts are no faster
        with the fewest layers, more of them only compute more.
        """
        numbers = range(1, self.layers + 1)
        most = max(n for n in numbers if self.known(f"{n}:{level}") is not None)
        if first == most:
            return False
        few, many = (_name(self.count, f"{n}:{level}") for n in (first, most))
        free_s = self.search.priced_s(many, few)
        return free_s < (1 - _GAP) * self.search.priced_s(few, few)

    def fewest(self, level: str, least: int) -> int | None:
        """The fewest layers with which a plan fits, ``least`` or more; None: none.

        With more layers the plan needs less memory, but for the last layer: its
        activations are needed as soon as they are made.
        """
        top = max(self.layers - 1, least)
        if not self.tried(f"{top}:{level}"):
            if top == self.layers or self.last_too_few(f"{top}:{level}", top):
                return None
            top = self.layers
            if not self.tried(f"{top}:{level}"):
                return None
        few = self.too_few(top)
        return first_that(lambda n: self.tried(f"{n}:{level}"), least - 1, top, few)

    def last_too_few(self, remat: str, layers: int) -> bool:
        """Whether one more layer is not enough, if it saves what the others do.

        The last layer saves less: its activations are needed as soon as they are made.
        """
        errors = (self.search.errors[_name(self.count, r)] for r in ("", remat))
        none, most = (getattr(error, "least_bytes", 0.0) for error in errors)
        saved = max(0.0, none - most) / layers
        return most - saved > self.search.cluster.memory_bytes

    def too_few(self, layers: int) -> int:
        """With so many layers no plan fits if what is needed falls evenly with layers.

        It falls at most to nothing, so fewer of them cannot be enough.

        Args:
          layers: with which a plan fits.
        """
        error = self.search.errors[_name(self.count, "")]
        need = error.least_bytes if isinstance(error, InfeasibleError) else 0.0
        limit = self.search.cluster.memory_bytes
        return math.floor((1 - limit / need) * layers) if need > limit else 0

    def more(self, level: str, numbers: Sequence[int]) -> None:
        """Tries numbers of layers as long as plans get faster."""
        for number in numbers:
            remat, before = f"{number}:{level}", self.search.best
            fits = self.tried(remat)
            best = self.search.best
            if best is before and (not fits or best is not self.known(remat)):
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
    first = _bisected(holds, begin, high)
    if first > begin + 1 or begin == low or not holds(begin):
        return first
    return _bisected(holds, low, begin)


def _bisected(holds: Callable[[int], bool], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _numbers(layers: int) -> list[int]:
    """The numbers of layers that are tried: all of few, some of many."""
    apart = -(-layers // _TRIED)
    return sorted({*range(apart, layers + 1, apart), max(1, layers - 1), layers})


def _roomy(cluster: Cluster) -> Cluster:
    """A cluster whose devices hold whatever is planned for them."""
    device = dataclasses.replace(cluster.device, memory_bytes=_UNLIMITED)
    return dataclasses.replace(cluster, device=device)


def _pipelines(search: _Search) -> None:
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


def _limits_of_pipelines(search: _Search, most_s: float) -> Limits | str:
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
        return Limits()
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
    return Limits(stages=max(stages), microbatches=max(few), alone=False)


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


_PROPOSERS: tuple[Callable[[_Search], None], ...] = (_replicas, _rewritten, _pipelines)
