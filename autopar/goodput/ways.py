"""Lists and plans the batch sizes, microbatches and codecs that a step can change to.

A *way* is one choice of batch size, number of microbatches and codecs
(`autopar.goodput.choice.Way`). The running way is the choice in use, with the running
plan. If layouts stay, the running plan gives an estimate of the seconds of a step for
any batch size and number of microbatches (`autopar.goodput.throughput`). For other
codecs, a codec is first chosen for each gradient. Therefore all ways can be compared
without tracing the step again. Then only the best way is planned for its own batch size
and microbatches: once with the running layouts, and once by a search that starts from
these layouts. The faster of the two plans is compiled and cached.
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
from autopar.goodput.choice import EXACT, CodecError, Ratio, Way, batches, codec_error
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

# Anchors are the plans from which the seconds of ways are estimated.
#
# The running plan is the first anchor. The layouts of this plan may be the best ones
# only for its batch size and codecs. To avoid sums of gradients, a plan may exchange
# activations, or compute the same on all devices. This takes long with larger batches,
# and is unnecessary if codecs make sums fast. Therefore layouts are also searched with
# each codec: for the largest batch, or for the present batch if the batch size is
# fixed.

# The number of pairs of layouts and codecs whose plans are cached.
_STUDIED = 16
# Other layouts are preferred to the running layouts only if their step is shorter by at
# least this fraction.
_FASTER = 0.01
# If the largest batch does not fit into memory, it is halved this many times at most.
_HALVINGS = 3

CallOf = Callable[[int], StepCall]
T = TypeVar("T")


class Anchors:
    """Plans with other codecs or layouts than the running plan (the anchors)."""

    def __init__(self, step: ParallelStep[..., object], codecs: Iterable[str]) -> None:
        """Starts without plans.

        Args:
          step: the step.
          codecs: codecs that may be used, as texts of the option ``compression=``.
        """
        self.step, self.codecs = step, tuple(codecs)
        # Called before each plan is made; an error that it raises ends `study`.
        self.check: Callable[[], None] = lambda: None
        # (digest of layouts, codecs) -> plans; () if no plan is possible.
        self._known: Recent[tuple[str, str], tuple[PlanCurve, ...]] = Recent(_STUDIED)
        self._searched: Recent[str, bool] = Recent(_STUDIED)

    def of(self, running: PlanCurve, own: str, codecs: str) -> tuple[PlanCurve, ...]:
        """The plans with these codecs; plans with the running layouts come first.

        Args:
          running: the running plan.
          own: codecs of the running plan.
          codecs: codecs that the plans must use.
        """
        found = self._known.get((running.layouts, codecs))
        if found is None:
            return (running,) if codecs == own else ()
        return (running, *found[1:]) if codecs == own else found

    def count_unstudied(self, running: PlanCurve, own: str) -> int:
        """The number of codecs with which `study` has not yet planned these layouts."""
        others = (c for c in self.codecs if c != own)
        return sum(self._known.get((running.layouts, c)) is None for c in others)

    def searches(self, running: PlanCurve) -> int:
        """The number of searches for other layouts that `study` still has to make."""
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
        """Makes plans with each of the allowed codecs, starting from the running plan.

        Args:
          running: the running plan.
          own: codecs of the running plan.
          layouts: whether to search for other layouts, too.
          largest: rows of the largest batch, and a function that gives the step's
            arguments for a number of rows; layouts are searched for this batch. None:
            layouts are searched for the running batch.
        """
        searches = layouts and self.searches(running) > 0
        grows = largest is not None and largest[0] > running.rows
        for codecs in self.codecs:
            place = running.layouts, codecs
            found = self._known.get(place)
            self.check()
            if found is None:
                found = (running,)
                if codecs != own:
                    free = searches and not grows
                    found = self._study(running, codecs, layouts=free)
            if searches and largest is not None and found:
                self.check()
                found = (*found, *self._larger(running, codecs, *largest))
            self._known.put(place, found)
        if searches and largest is not None:
            self._searched.put(running.layouts, True)

    def _study(
        self, running: PlanCurve, codecs: str, *, layouts: bool
    ) -> tuple[PlanCurve, ...]:
        """Plans with other codecs at the present batch size; () if none is possible."""
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
        """A plan for the largest batch, halved until the plan fits; () if none fits."""
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
        """The number of parts into which a plan splits the rows of a batch."""
        found = 1
        for given in self.step.running.analysed.analysis.graph.inputs:
            spec = plan.home_spec(given.path)
            if 0 <= given.rows < len(spec):
                sizes = dict(plan.home_axes[plan.home(given.path)])
                axes = spec[given.rows]
                found = max(found, math.prod(sizes[name] for name in axes))
        return found

    def forget(self) -> None:
        """Forgets all plans, because the devices have changed."""
        self._known.discard(lambda _: True)
        self._searched.discard(lambda _: True)


def plan_for_all(step: ParallelStep[..., object], shape: CallShape) -> Plan:
    """Plans a step such that all processes get the same plan.

    Args:
      step: the step.
      shape: the shapes and settings to plan for.
    """
    setting, planner = shape.setting, step.preparation.planner
    cluster = setting.cluster or step.cluster
    with without_warnings():
        return agreement.agree(
            step.world, lambda: planner.plan(shape.analysed, cluster, setting.codecs)
        )


def fastest(found: Sequence[T], seconds: Callable[[T], float]) -> T:
    """The first candidate, or the fastest if it saves the fraction `_FASTER`.

    Args:
      found: the candidates, at least one.
      seconds: returns the seconds of a candidate.
    """
    best = min(found, key=seconds)
    return best if seconds(best) <= (1 - _FASTER) * seconds(found[0]) else found[0]


# The number of planned and compiled ways that are cached.
_PLANS = 16
# For each batch size, this many numbers of microbatches are tried at most. Each is
# twice the previous one.
_DOUBLINGS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The choices that define a way.

    Attributes:
      rows: rows of a batch.
      microbatches: number of microbatches into which a batch is split.
      codecs: the codecs of gradients, as a text of the option ``compression=``.
    """

    rows: int
    microbatches: int
    codecs: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedWay:
    """A way with its plan.

    Attributes:
      key: the choices that define the way.
      plan: the plan.
      curve: predicts the plan's step times at other batch sizes.
      shape: the shapes and settings of the plan.
    """

    key: Key
    plan: Plan
    curve: PlanCurve
    shape: CallShape


class Ways:
    """Lists and plans the ways: choices of batch size, microbatches and codecs.

    Attributes:
      step: the step.
      most: rows of the largest batch.
      anchors: plans from which the seconds of unplanned ways are estimated.
      refused: the ways that could not be planned or compiled, with reasons.
    """

    def __init__(
        self,
        step: ParallelStep[..., Any],
        *,
        base_batch: int,
        max_batch: int,
        codecs: Mapping[str, Ratio | None],
    ) -> None:
        """Starts without plans.

        Args:
          step: the step.
          base_batch: rows of the base batch.
          max_batch: rows of the largest batch.
          codecs: allowed codecs, as texts of the option ``compression=``; biased codecs
            need their measured progress ratio.
        """
        self.step = step
        self._base, self.most, self._codecs = base_batch, max_batch, codecs
        self._made: Recent[Hashable, PlannedWay] = Recent(_PLANS)
        self.anchors = Anchors(step, codecs)
        self.refused: dict[Hashable, str] = {}

    def running(self, rows: int) -> PlannedWay:
        """The choice now in use, with a batch of ``rows`` rows."""
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
        """The way if it is already planned and compiled; otherwise None."""
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
        """Makes plans with each of the allowed codecs (`Anchors.study`).

        Args:
          running: the running way.
          layouts: whether to search for other layouts, too.
          call_of: gives the step's arguments for a number of rows, as
            `jax.ShapeDtypeStruct`; layouts are then searched for the largest batch. If
            None, layouts are searched for the present batch size.
        """
        largest = None if call_of is None else (self.most, call_of)
        key = running.key
        self.anchors.study(running.curve, key.codecs, layouts=layouts, largest=largest)

    def count_unstudied(self, running: PlannedWay) -> int:
        """The number of codecs with which `study` has not yet planned these layouts."""
        return self.anchors.count_unstudied(running.curve, running.key.codecs)

    def searches(self, running: PlannedWay) -> int:
        """The number of searches for other layouts that `study` still has to make."""
        return self.anchors.searches(running.curve)

    def others(
        self,
        running: PlannedWay,
        held: Sequence[Any],
        parts: int | None,
        *,
        alone: bool = False,
    ) -> dict[Key, Way]:
        """All ways that can be changed to, without the running way.

        Each batch size is listed with the smallest number of microbatches that could be
        planned so far. A plan is used only for batches whose microbatches it can split.

        Args:
          running: the running way.
          held: a `jax.ShapeDtypeStruct` of each array of the state, with its sharding.
          parts: the number of microbatches, if the user fixes it.
          alone: whether a step has only one group of gradients. To measure their noise,
            it takes two groups. Then all ways have at least two microbatches.
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
        sizes = batches(self._base, self.most, max(splits.values()) * counts[0])
        for codecs in self._codecs:
            for rows in sizes:
                for count in counts:
                    key = Key(rows, count, codecs)
                    if key == running.key:
                        break
                    if self._place(key) in self.refused or rows % count:
                        continue
                    fit = [
                        c
                        for c in curves[codecs]
                        if not rows % (splits[c.layouts] * count)
                    ]
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
        """A way with its estimated seconds and cost; None if no plan tells them.

        Args:
          key: the choices that define the way.
          running: the running way.
          held: a `jax.ShapeDtypeStruct` of each array of the state, with its sharding.
          curves: known plans with the way's codecs.
          moves: digest of layouts -> seconds to move the state to these layouts.
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
        """The plan from which a way is estimated, and the estimated seconds.

        The result is None if no plan can give the seconds.
        """
        found: list[tuple[PlanCurve, Terms]] = []
        for curve in curves:
            terms = curve.terms(key.rows, key.microbatches)
            if terms is None:
                continue
            if curve.layouts == running.layouts:
                # The codecs of the anchor's plan may have been chosen at another batch
                # size. So the seconds of work are taken from the running plan.
                own = running.terms(key.rows, key.microbatches)
                if own is None:
                    continue
                terms = dataclasses.replace(
                    terms, work_s=own.work_s, fixed_s=own.fixed_s
                )
            found.append((curve, terms))
        return fastest(found, lambda x: x[1].predicted_s) if found else None

    def way(self, made: PlannedWay, cost_s: float = 0.0, *, runs: bool = False) -> Way:
        """A planned way as a `Way`.

        Args:
          made: the planned way.
          cost_s: seconds without training before the first step in this way.
          runs: whether the way is in use. If so, the measured errors of its codecs are
            used.
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
        """The measured error of the unbiased codecs in use; None: it is not known."""
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
        """Seconds to move the state to the layouts of a plan."""
        if len(plan.stages) > 1 and plan.stages == running.plan.stages:
            return 0.0
        devices = self.step.preparation.devices(setting)
        move = move_of([x.sharding for x in held], held, plan, devices)
        return move.most_bytes / slowest_bytes_per_s(plan.cluster.read())

    def make(self, key: Key, call: StepCall, running: PlannedWay) -> PlannedWay | None:
        """Plans and compiles a way; None if it fails (`refused` has the reason).

        Args:
          key: the choices that define the way.
          call: the step's arguments in this way, as `jax.ShapeDtypeStruct`.
          running: the running way.
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
        """Why a way could not be planned; '' if it could, or was not tried."""
        return self.refused.get(self._place(key), "")

    def _best(self, key: Key, call: StepCall, running: PlannedWay) -> PlannedWay:
        """Plans a way and compiles the fastest plan.

        The candidates are the running layouts, the layouts of the plan from which the
        way was estimated, and the result of a new search.
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
            self.anchors.check()
            try:
                shape = shape_of(layouts=layouts)
                found.append((plan_for_all(step, shape), shape))
            except AutoparError as error:
                failure = failure or error
        if not (fixed and found):
            self.anchors.check()
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
        self.anchors.check()
        changing_batches.program(step, shape, plan)
        curve = plan_curve(shape.analysed.analysis, plan, key.rows)
        return PlannedWay(key, plan, curve, shape)

    def _known_layouts(self, key: Key, running: PlannedWay) -> tuple[list[Plan], bool]:
        """Plans with layouts for a way, and whether a full search is needed.

        The plans are the running plan, and the plan from which the way's seconds were
        estimated. The result leaves out a plan with another number of microbatches than
        the way has. If this is a plan with other layouts, a full search is needed,
        because a short search from the running layouts may miss its layouts.
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
        """Forgets all plans, because the devices have changed."""
        self._made.discard(lambda _: True)
        self.anchors.forget()
        self.refused = {}


def expected_error(plan: Plan) -> CodecError:
    """The expected error of a plan's codecs.

    A codec with error feedback is biased. The codec leaves out a part of the gradient,
    whose norm is e times the gradient's norm, and sends most of this part later. Until
    a run has measured how fast it trains with the codec, this function assumes a
    squared error of e^2 / (1 - e^2). This is the error of an unbiased codec that sends
    the same fraction of the squared norm. If all workers draw the same elements, the
    error counts as shared.
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
