"""The ways in which a step can go on where it runs: planned once, kept by shape.

The running plan says what its layouts cost with other batches and numbers of
microbatches (`autopar.goodput.throughput`), and with other codecs once these have been
chosen for it. So all ways are compared without tracing the step again. The way that
seems best is planned with its own shapes: with the layouts that run, and anew from
them. The faster plan is compiled and kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from autopar.compression.codecs.registry import parse_codec
from autopar.errors import AutoparError, PlanError
from autopar.goodput.choice import Ratio, Way, batches
from autopar.goodput.efficiency import EXACT, CodecError, codec_error
from autopar.goodput.throughput import PlanCurve, Terms, plan_curve
from autopar.planner.codecs.sites import without_warnings
from autopar.plans import Plan
from autopar.runtime import agreement, changing_batches
from autopar.runtime.changing_batches import CallShape
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.preparation import Setting
from autopar.runtime.recent import Recent
from autopar.runtime.state_mover import move_of, slowest_bytes_per_s
from autopar_passes.program.calls import StepCall

# The plans by which ways are judged before they are planned themselves.
#
# The layouts that run say what they take with other batches, and with other codecs once
# these have been chosen for them. They may be the best for one batch and one codec
# alone: what is exchanged, or computed on all devices, to avoid sums of gradients is
# dear with larger batches, and with codecs that make sums cheap. So layouts are
# searched for with each codec, too: for the largest batch, or for the one that runs
# where it stays.

# What is kept: layouts times codecs.
_STUDIED = 16
# Other layouts must be so much faster than those that run: part of a step.
_FASTER = 0.01
# How often the largest batch is halved where it does not fit.
_HALVINGS = 3

CallOf = Callable[[int], StepCall]
T = TypeVar("T")


class Anchors:
    """What was studied from the layouts that run."""

    def __init__(self, step: ParallelStep[..., object], codecs: Iterable[str]) -> None:
        """Has studied nothing yet.

        Args:
          step: the step.
          codecs: what gradients may be sent by, as ``compression=`` says it.
        """
        self.step, self.codecs = step, tuple(codecs)
        # By layouts and codecs; none where they are not possible.
        self._known: Recent[tuple[str, str], tuple[PlanCurve, ...]] = Recent(_STUDIED)
        self._searched: Recent[str, bool] = Recent(_STUDIED)

    def of(self, running: PlanCurve, own: str, codecs: str) -> tuple[PlanCurve, ...]:
        """The plans with some codecs, those with the layouts that run first.

        Args:
          running: the plan that runs.
          own: its codecs.
          codecs: the codecs.
        """
        found = self._known.get((running.layouts, codecs))
        if found is None:
            return (running,) if codecs == own else ()
        return (running, *found[1:]) if codecs == own else found

    def count_unstudied(self, running: PlanCurve, own: str) -> int:
        """For how many codecs `study` is not done with the layouts that run."""
        others = (c for c in self.codecs if c != own)
        return sum(self._known.get((running.layouts, c)) is None for c in others)

    def searches(self, running: PlanCurve) -> int:
        """How many searches `study` makes to find other layouts; 0: none any more."""
        stays = len(running.plan.stages) > 1
        if stays or changing_batches.fixed_layouts(self.step):
            return 0
        return 0 if self._searched.get(running.layouts) else len(self.codecs)

    def study(
        self,
        running: PlanCurve,
        own: str,
        *,
        layouts: bool = False,
        largest: tuple[int, CallOf] | None = None,
    ) -> None:
        """Chooses the codecs that may be used from where the run is.

        Args:
          running: the plan that runs.
          own: its codecs.
          layouts: whether to look for other layouts, too.
          largest: rows of the largest batch, which other layouts are looked for with,
            and the arguments of the step with a number of rows; None: they are looked
            for with the batch that runs.
        """
        searches = layouts and self.searches(running) > 0
        grows = largest is not None and largest[0] > running.rows
        for codecs in self.codecs:
            place = running.layouts, codecs
            found = self._known.get(place)
            if found is None:
                found = (running,)
                if codecs != own:
                    free = searches and not grows
                    found = self._study(running, codecs, layouts=free)
            if searches and largest is not None and found:
                found = (*found, *self._larger(running, codecs, *largest))
            self._known.put(place, found)
        if searches and largest is not None:
            self._searched.put(running.layouts, True)

    def _study(
        self, running: PlanCurve, codecs: str, *, layouts: bool
    ) -> tuple[PlanCurve, ...]:
        """The plans with other codecs and the batch that runs; none is possible: ()."""
        analysed = self.step.running.analysed
        shape_of = functools.partial(
            changing_batches.shape_of, self.step, analysed, codecs=codecs
        )
        plans: list[Plan] = []
        try:
            plans.append(plan_for_all(self.step, shape_of(layouts=running.plan)))
            if layouts:
                parts = running.plan.microbatches
                plans.append(plan_for_all(self.step, shape_of(microbatches=parts)))
        except AutoparError:
            pass  # no plan is possible with these codecs
        return tuple(plan_curve(analysed.analysis, p, running.rows) for p in plans)

    def _larger(
        self, running: PlanCurve, codecs: str, most: int, call_of: CallOf
    ) -> tuple[PlanCurve, ...]:
        """A plan for the largest batch, or for the largest that fits."""
        parts = running.plan.microbatches
        for rows in (most >> k for k in range(_HALVINGS)):
            if rows <= running.rows:
                break
            with contextlib.suppress(AutoparError):
                shape = changing_batches.shape_for_call(
                    self.step, call_of(rows), codecs=codecs, microbatches=parts
                )
                plan = plan_for_all(self.step, shape)
                return (plan_curve(shape.analysed.analysis, plan, rows),)
        return ()

    def split(self, plan: Plan) -> int:
        """Into how many parts a plan splits the rows of a batch."""
        found = 1
        for given in self.step.running.analysed.analysis.graph.inputs:
            spec = plan.home_spec(given.path)
            if 0 <= given.rows < len(spec):
                sizes = dict(plan.home_axes[plan.home(given.path)])
                axes = spec[given.rows]
                found = max(found, math.prod(sizes[name] for name in axes))
        return found

    def forget(self) -> None:
        """Drops what was studied, as the devices have changed."""
        self._known.discard(lambda _: True)
        self._searched.discard(lambda _: True)


def plan_for_all(step: ParallelStep[..., object], shape: CallShape) -> Plan:
    """A plan, the same on all processes.

    Args:
      step: the step.
      shape: what it is for.
    """
    setting, planner = shape.setting, step.preparation.planner
    cluster = setting.cluster or step.cluster
    with without_warnings():
        return agreement.agree(
            step.world, lambda: planner.plan(shape.analysed, cluster, setting.codecs)
        )


def fastest(found: Sequence[T], seconds: Callable[[T], float]) -> T:
    """The fastest; the first, where none is faster by what counts.

    Args:
      found: what is compared, at least one.
      seconds: what one takes.
    """
    best = min(found, key=seconds)
    return best if seconds(best) <= (1 - _FASTER) * seconds(found[0]) else found[0]


# Plans that are kept.
_PLANS = 16
# How often microbatches are doubled where a batch does not fit.
_DOUBLINGS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """What a way decides.

    Attributes:
      rows: of a batch.
      microbatches: into how many it is split.
      codecs: how gradients are sent, as ``compression=`` says it.
    """

    rows: int
    microbatches: int
    codecs: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedWay:
    """A way that is planned.

    Attributes:
      key: the way.
      plan: its plan.
      curve: the terms of the plan.
      shape: what it was planned for.
    """

    key: Key
    plan: Plan
    curve: PlanCurve
    shape: CallShape


class Ways:
    """Lists the ways to go on, and plans them.

    Attributes:
      step: the step.
      most: rows of the largest batch.
      anchors: what ways are judged by before they are planned.
      refused: the ways that cannot be planned, and why.
    """

    def __init__(
        self,
        step: ParallelStep[..., Any],
        *,
        base_batch: int,
        max_batch: int,
        codecs: Mapping[str, Ratio | None],
    ) -> None:
        """Has planned nothing yet.

        Args:
          step: the step.
          base_batch: rows of the base batch.
          max_batch: rows of the largest.
          codecs: what gradients may be sent by, as ``compression=`` says it, with what
            was measured of a row's worth where they are biased.
        """
        self.step = step
        self._base, self.most, self._codecs = base_batch, max_batch, codecs
        self._made: Recent[Hashable, PlannedWay] = Recent(_PLANS)
        self.anchors = Anchors(step, codecs)
        self.refused: dict[Hashable, str] = {}

    def running(self, rows: int) -> PlannedWay:
        """The way that runs, with a batch of so many rows."""
        running, setting = self.step.running, self.step.setting
        plan = running.planned.plan
        asked = setting.codecs or self.step.preparation.planner.options
        codecs = asked.compression if setting.plan is None else plan.compression.mode
        key = Key(rows, plan.microbatches, codecs)
        known = self._made.get(self._place(key))
        if known is not None and known.plan is plan:
            return known
        analysed = running.analysed
        shape = changing_batches.shape_of(
            self.step, analysed, codecs=codecs, microbatches=plan.microbatches
        )
        curve = plan_curve(analysed.analysis, plan, rows)
        return self._made.put(self._place(key), PlannedWay(key, plan, curve, shape))

    def find(self, key: Key) -> PlannedWay | None:
        """A way that is planned and compiled, or None."""
        return self._made.get(self._place(key))

    def _place(self, key: Key) -> Hashable:
        return key, self.step.plan.cluster.text

    def study(
        self,
        running: PlannedWay,
        *,
        layouts: bool = False,
        call_of: CallOf | None = None,
    ) -> None:
        """Chooses the codecs that may be used from where the run is.

        Args:
          running: the way that runs.
          layouts: whether to look for other layouts, too.
          call_of: the arguments of the step with a number of rows, structs; other
            layouts are looked for with the largest batch. None: with the one that runs.
        """
        largest = None if call_of is None else (self.most, call_of)
        key = running.key
        self.anchors.study(running.curve, key.codecs, layouts=layouts, largest=largest)

    def count_unstudied(self, running: PlannedWay) -> int:
        """For how many codecs `study` is not done with the layouts that run."""
        return self.anchors.count_unstudied(running.curve, running.key.codecs)

    def searches(self, running: PlannedWay) -> int:
        """How many searches `study` makes to find other layouts; 0: none any more."""
        return self.anchors.searches(running.curve)

    def others(
        self,
        running: PlannedWay,
        held: Sequence[Any],
        parts: int | None,
        *,
        alone: bool = False,
    ) -> dict[Key, Way]:
        """The ways to go on besides the running one.

        Each batch is split into as few microbatches as are not known to be too few.

        Args:
          running: the way that runs.
          held: structs of the state's arrays, with where they lie.
          parts: the number of microbatches, if it is given.
          alone: whether gradients are seen in one group; two microbatches are two.
        """
        found: dict[Key, Way] = {}
        own = running.key.microbatches
        least = 2 * own if alone and own == 1 else own
        counts = [parts] if parts else [least * 2**k for k in range(_DOUBLINGS)]
        curves = {
            codecs: self.anchors.of(running.curve, running.key.codecs, codecs)
            for codecs in self._codecs
        }
        own_layouts = running.curve.layouts
        known = {c.layouts: c.plan for c in itertools.chain(*curves.values())}
        known[own_layouts] = running.plan
        splits = {name: self.anchors.split(plan) for name, plan in known.items()}
        moves = {
            name: self._move_s(plan, self.step.setting, running, held)
            for name, plan in known.items()
            if name != own_layouts
        }
        sizes = batches(self._base, self.most, max(splits.values()))
        for codecs in self._codecs:
            for rows in sizes:
                fit = [c for c in curves[codecs] if not rows % splits[c.layouts]]
                for count in counts:
                    key = Key(rows, count, codecs)
                    if key == running.key:
                        break
                    if self._place(key) in self.refused or rows % count:
                        continue
                    way = self._way(key, running, held, fit, moves)
                    if way is not None:
                        found[key] = way
                    break
        return found

    def _way(
        self,
        key: Key,
        running: PlannedWay,
        held: Sequence[Any],
        curves: Sequence[PlanCurve],
        moves: Mapping[str, float],
    ) -> Way | None:
        """A way with what is known of it; None: it cannot be.

        The curves are what was studied of the way's codecs, and ``moves`` what it takes
        to move to other layouts.
        """
        made = self.find(key)
        if made is not None:
            move_s = self._move_s(made.plan, made.shape.setting, running, held)
            return self.way(made, move_s)
        found = self._anchor(key, running.curve, curves)
        if found is None:
            return None
        anchor, terms = found
        compile_s = self.step.preparation.compile_s
        cost_s = compile_s + moves.get(anchor.layouts, 0.0)
        return self._describe(key, anchor.plan, terms, cost_s)

    def _anchor(
        self, key: Key, running: PlanCurve, curves: Sequence[PlanCurve]
    ) -> tuple[PlanCurve, Terms] | None:
        """The plan that a way is judged by, and what it takes; None: there is none."""
        found: list[tuple[PlanCurve, Terms]] = []
        for curve in curves:
            terms = curve.terms(key.rows, key.microbatches)
            if terms is None:
                continue
            if curve.layouts == running.layouts:
                # Codecs may have been chosen with another batch: the work is what runs.
                own = running.terms(key.rows, key.microbatches)
                if own is None:
                    continue
                terms = dataclasses.replace(
                    terms, work_s=own.work_s, fixed_s=own.fixed_s
                )
            found.append((curve, terms))
        return fastest(found, lambda x: x[1].predicted_s) if found else None

    def way(self, made: PlannedWay, cost_s: float = 0.0, *, runs: bool = False) -> Way:
        """A planned way.

        Args:
          made: the way.
          cost_s: seconds before its first step.
          runs: whether it is the one that runs; errors of its codecs are measured.
        """
        terms = made.curve.terms()
        assert terms is not None
        return self._describe(made.key, made.plan, terms, cost_s, runs=runs)

    def _describe(
        self, key: Key, plan: Plan, terms: Terms, cost_s: float, *, runs: bool = False
    ) -> Way:
        ratio = self._codecs.get(key.codecs)
        error = EXACT
        if ratio is None:
            error = self._measured_error(plan) if runs else None
            error = error or expected_error(plan)
        return Way(
            rows=key.rows,
            microbatches=key.microbatches,
            codecs=key.codecs,
            terms=terms,
            error=error,
            ratio=ratio or Ratio(),
            cost_s=cost_s,
        )

    def _measured_error(self, plan: Plan) -> CodecError | None:
        """The error of unbiased codecs in use; None: it is not known."""
        sent = [g for g in plan.gradients if g.codec not in ("", "dense")]
        if not sent or any(g.feedback for g in sent):
            return None
        workers = max(g.workers for g in sent)
        with contextlib.suppress(PlanError):
            scale, reports = self.step.noise_scale, self.step.telemetry
            return codec_error(scale, reports, workers)
        return None

    def _move_s(
        self, plan: Plan, setting: Setting, running: PlannedWay, held: Sequence[Any]
    ) -> float:
        """Seconds of moving the state to a plan."""
        if len(plan.stages) > 1 and plan.stages == running.plan.stages:
            return 0.0
        devices = self.step.preparation.devices(setting)
        move = move_of([x.sharding for x in held], held, plan, devices)
        return move.most_bytes / slowest_bytes_per_s(plan.cluster.read())

    def make(self, key: Key, call: StepCall, running: PlannedWay) -> PlannedWay | None:
        """Plans and compiles a way; None where it cannot be, which is noted.

        Args:
          key: the way.
          call: the arguments of the step in it, structs.
          running: the way that runs.
        """
        known = self.find(key)
        if known is not None:
            return known
        try:
            made = self._best(key, call, running)
        except AutoparError as error:
            self.refused[self._place(key)] = str(error)
            return None
        return self._made.put(self._place(key), made)

    def why_not(self, key: Key) -> str:
        """Why a way cannot be; '' where it can, or was not tried."""
        return self.refused.get(self._place(key), "")

    def _best(self, key: Key, call: StepCall, running: PlannedWay) -> PlannedWay:
        """The fastest of the layouts that run, of those studied and of new ones.

        It is compiled.
        """
        step = self.step
        shape_of = functools.partial(
            changing_batches.shape_for_call,
            step,
            call,
            codecs=key.codecs,
            microbatches=key.microbatches,
        )
        found: list[tuple[Plan, CallShape]] = []
        failure: Exception | None = None
        fixed = changing_batches.fixed_layouts(step)
        known, anew = self._known_layouts(key, running)
        for layouts in known:
            try:
                shape = shape_of(layouts=layouts)
                found.append((plan_for_all(step, shape), shape))
            except AutoparError as error:
                failure = failure or error
        if not (fixed and found):
            try:
                shape = shape_of()
                plan = plan_for_all(step, shape) if anew else self._warm(shape)
                found.append((plan, shape))
            except AutoparError as error:
                failure = failure or error
        if not found:
            assert failure is not None
            raise failure
        plan, shape = fastest(found, lambda x: x[0].predicted.step_s)
        changing_batches.program(step, shape, plan)
        curve = plan_curve(shape.analysed.analysis, plan, key.rows)
        return PlannedWay(key, plan, curve, shape)

    def _known_layouts(self, key: Key, running: PlannedWay) -> tuple[list[Plan], bool]:
        """Plans that have layouts for a way, and whether others must be searched for.

        They are the plan that runs, and the one that the way was judged by. That one
        may have layouts that a short search from those that run misses.
        """
        own = running.curve
        curves = self.anchors.of(own, running.key.codecs, key.codecs)
        found = self._anchor(key, own, curves)
        plans = [running.plan]
        if found is not None and found[0].layouts != own.layouts:
            plans.append(found[0].plan)
        kept = [p for p in plans if p.microbatches == key.microbatches]
        anew = len(plans) > 1 and plans[-1].microbatches != key.microbatches
        return kept, anew

    def _warm(self, shape: CallShape) -> Plan:
        preparation, plan = self.step.preparation, self.step.plan
        with without_warnings():
            return preparation.warm(shape.analysed, shape.setting, plan)

    def forget(self) -> None:
        """Drops what was planned, as the devices have changed."""
        self._made.discard(lambda _: True)
        self.anchors.forget()
        self.refused = {}


def expected_error(plan: Plan) -> CodecError:
    """The error of a plan's codecs as they are expected to err.

    A codec with error feedback is biased. Of what it leaves out, e of the norm, most is
    sent later; until its progress has been measured it counts like an unbiased codec
    that keeps as much: e^2 / (1 - e^2). Where all workers draw the same elements, they
    err together.
    """
    sent = [g for g in plan.gradients if g.codec not in ("", "dense")]
    if not sent:
        return EXACT
    square = plan.compression.error**2
    if any(g.feedback for g in sent):
        square = square / (1 - square) if square < 1 else float("inf")
    workers = max(g.workers for g in sent)
    codecs = [parse_codec(g.codec) for g in sent]
    if all(getattr(codec, "unbiased", False) for codec in codecs):
        return CodecError(shared=square, workers=workers)
    return CodecError(own=square, workers=workers)
