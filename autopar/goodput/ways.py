"""The ways in which a step can go on where it runs: planned once, kept by shape.

The running plan says what its layouts cost with other batches and numbers of
microbatches (`autopar.goodput.plan_terms`), and with other codecs once these have been
chosen for it. So all ways are compared without tracing the step again. The way that
seems best is planned with its own shapes: with the layouts that run, and anew from
them. The faster plan is compiled and kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from autopar.compression.codecs.registry import parse_codec
from autopar.errors import AutoparError, ClusterError, PlanError
from autopar.goodput.choice import Ratio, Way, batches
from autopar.goodput.efficiency import EXACT, CodecError, codec_error
from autopar.goodput.plan_terms import PlanCurve, layouts_of, plan_curve
from autopar.goodput.throughput import Terms
from autopar.planner.codecs.left_out import unasked
from autopar.plans import Plan
from autopar.runtime import agreement, changing_batches
from autopar.runtime.changing_batches import Shape
from autopar.runtime.moving import move_of, slowest_bytes_per_s
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.recent import Recent
from autopar.runtime.setting import Setting
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.calls import Call

# Plans that are kept.
_PLANS = 16
# How often microbatches are doubled where a batch does not fit.
_DOUBLINGS = 6
# A new plan must be so much faster than the layouts that run: part of a step.
_FASTER = 0.01


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
class Made:
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
    shape: Shape


class Ways:
    """Lists the ways to go on, and plans them."""

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
        self._base, self._most, self._codecs = base_batch, max_batch, codecs
        self._made: Recent[Hashable, Made] = Recent(_PLANS)
        self._anchors: Recent[Hashable, PlanCurve | None] = Recent(_PLANS)
        self.refused: dict[Hashable, str] = {}

    def running(self, rows: int) -> Made:
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
        return self._made.put(self._place(key), Made(key, plan, curve, shape))

    def made(self, key: Key) -> Made | None:
        """A way that is planned and compiled, or None."""
        return self._made.get(self._place(key))

    def _place(self, key: Key) -> Hashable:
        return key, self.step.plan.cluster.text

    def study(self, running: Made, *, layouts: bool = False) -> None:
        """Chooses the codecs that may be used from where the run is.

        Args:
          running: the way that runs.
          layouts: whether to look for other layouts, too.
        """
        self._anchors.put(self._anchor(running, running.key.codecs), running.curve)
        for codecs in self._codecs:
            place = self._anchor(running, codecs)
            if codecs != running.key.codecs and place not in list(self._anchors):
                self._anchors.put(place, self._studied(running, codecs, layouts))

    def movable(self, running: Made) -> bool:
        """Whether other layouts may be looked for: of one mesh, and not given."""
        return len(running.plan.stages) == 1 and not changing_batches.fixed_layouts(
            self.step
        )

    def unstudied(self, running: Made) -> int:
        """For how many codecs `study` is not done with the layouts that run."""
        known = list(self._anchors)
        return sum(
            c != running.key.codecs and self._anchor(running, c) not in known
            for c in self._codecs
        )

    def _anchor(self, running: Made, codecs: str) -> Hashable:
        """The layouts that run, whatever the batch and its codecs are."""
        return running.curve.layouts, codecs

    def _studied(self, running: Made, codecs: str, layouts: bool) -> PlanCurve | None:
        """The best plan known with other codecs; None: there is none.

        It has the layouts that run, or others that are faster with these codecs.
        """
        analysed = self.step.running.analysed
        shape_of = functools.partial(
            changing_batches.shape_of, self.step, analysed, codecs=codecs
        )
        plan: Plan | None = None
        try:
            plan = self._planned(shape_of(layouts=running.plan))
            if layouts:
                shape = shape_of(microbatches=running.plan.microbatches)
                plan = _faster(plan, self._planned(shape))
        except (AutoparError, ClusterError) as error:
            if plan is None:
                self.refused[codecs] = str(error)
                return None
        return plan_curve(analysed.analysis, plan, running.key.rows)

    def _planned(self, shape: Shape) -> Plan:
        """A plan, the same on all processes."""
        step, setting = self.step, shape.setting
        cluster = setting.cluster or step.cluster
        planner = step.preparation.planner
        with unasked():
            return agreement.agree(
                step.world,
                lambda: planner.plan(shape.analysed, cluster, setting.codecs),
            )

    def others(
        self,
        running: Made,
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
        sizes = batches(self._base, self._most, self._split(running))
        for codecs in self._codecs:
            anchor: PlanCurve | None = running.curve
            if codecs != running.key.codecs:
                anchor = self._anchors.get(self._anchor(running, codecs))
            alike = anchor is None or anchor.layouts == running.curve.layouts
            for rows in sizes:
                for count in counts:
                    key = Key(rows, count, codecs)
                    if key == running.key:
                        break
                    if self._place(key) in self.refused or rows % count:
                        continue
                    way = self._way(key, running, held, anchor, alike=alike)
                    if way is not None:
                        found[key] = way
                    break
        return found

    def _split(self, running: Made) -> int:
        """Into how many parts the plan splits the rows of a batch."""
        plan, found = running.plan, 1
        for given in self.step.running.analysed.analysis.graph.inputs:
            spec = plan.home_spec(given.path)
            if given.role is InputRole.BATCH and spec:
                axes = plan.home_axes[plan.home(given.path)]
                split = 1
                for name in spec[0]:
                    split *= dict(axes)[name]
                found = max(found, split)
        return found

    def _way(
        self,
        key: Key,
        running: Made,
        held: Sequence[Any],
        anchor: PlanCurve | None,
        *,
        alike: bool,
    ) -> Way | None:
        """A way with what is known of it; None: it cannot be.

        The anchor is what was studied of the way's codecs, with the layouts that run or
        others.
        """
        made = self.made(key)
        if made is not None:
            move_s = self._move_s(made.plan, made.shape.setting, running, held)
            return self.way(made, move_s)
        if anchor is None:
            return None
        terms = anchor.terms(key.rows, key.microbatches)
        if terms is None:
            return None
        cost_s = self.step.preparation.compile_s
        if alike:
            # Codecs may have been chosen with another batch: the work is what runs.
            own = running.curve.terms(key.rows, key.microbatches)
            if own is None:
                return None
            terms = dataclasses.replace(terms, work_s=own.work_s, fixed_s=own.fixed_s)
        else:
            cost_s += self._move_s(anchor.plan, self.step.setting, running, held)
        return self._described(key, anchor.plan, terms, cost_s)

    def way(self, made: Made, cost_s: float = 0.0, *, runs: bool = False) -> Way:
        """A planned way.

        Args:
          made: the way.
          cost_s: seconds before its first step.
          runs: whether it is the one that runs; errors of its codecs are measured.
        """
        terms = made.curve.terms()
        assert terms is not None
        return self._described(made.key, made.plan, terms, cost_s, runs=runs)

    def _described(
        self, key: Key, plan: Plan, terms: Terms, cost_s: float, *, runs: bool = False
    ) -> Way:
        ratio = self._codecs.get(key.codecs)
        error = EXACT
        if ratio is None:
            error = self._measured(plan) if runs else None
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

    def _measured(self, plan: Plan) -> CodecError | None:
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
        self, plan: Plan, setting: Setting, running: Made, held: Sequence[Any]
    ) -> float:
        """Seconds of moving the state to a plan."""
        if len(plan.stages) > 1 and plan.stages == running.plan.stages:
            return 0.0
        devices = self.step.preparation.devices(setting)
        move = move_of([x.sharding for x in held], held, plan, devices)
        return move.most_bytes / slowest_bytes_per_s(plan.cluster.read())

    def make(self, key: Key, call: Call) -> Made | None:
        """Plans and compiles a way; None where it cannot be, which is noted.

        Args:
          key: the way.
          call: the arguments of the step in it, structs.
        """
        known = self.made(key)
        if known is not None:
            return known
        try:
            made = self._best(key, call)
        except (AutoparError, ClusterError) as error:
            self.refused[self._place(key)] = str(error)
            return None
        return self._made.put(self._place(key), made)

    def why_not(self, key: Key) -> str:
        """Why a way cannot be; '' where it can, or was not tried."""
        return self.refused.get(self._place(key), "")

    def _best(self, key: Key, call: Call) -> Made:
        """The fastest of the layouts that run, of those studied and of new ones.

        It is compiled.
        """
        step, running = self.step, self.step.running
        shape_of = functools.partial(
            changing_batches.shaped,
            step,
            call,
            codecs=key.codecs,
            microbatches=key.microbatches,
        )
        found: list[tuple[Plan, Shape]] = []
        failure: Exception | None = None
        fixed = changing_batches.fixed_layouts(step)
        for layouts in self._known_layouts(running.planned.plan, key):
            try:
                shape = shape_of(layouts=layouts)
                found.append((self._planned(shape), shape))
            except (AutoparError, ClusterError) as error:
                failure = failure or error
        if not (fixed and found):
            try:
                shape = shape_of()
                found.append((self._warm(shape), shape))
            except (AutoparError, ClusterError) as error:
                failure = failure or error
        if not found:
            assert failure is not None
            raise failure
        plan = _faster(found[0][0], *(plan for plan, _ in found))
        shape = next(shape for other, shape in found if other is plan)
        changing_batches.program(step, shape, plan)
        curve = plan_curve(shape.analysed.analysis, plan, key.rows)
        return Made(key, plan, curve, shape)

    def _known_layouts(self, running: Plan, key: Key) -> list[Plan]:
        """Plans that have layouts for a way: that which runs, and that studied."""
        anchor = self._anchors.get((layouts_of(running), key.codecs))
        plans = [running] if anchor is None else [running, anchor.plan]
        found = {layouts_of(p): p for p in plans if p.microbatches == key.microbatches}
        return list(found.values())

    def _warm(self, shape: Shape) -> Plan:
        preparation, plan = self.step.preparation, self.step.plan
        with unasked():
            return preparation.warm(shape.analysed, shape.setting, plan)

    def forget(self) -> None:
        """Drops what was planned, as the devices have changed."""
        self._made.discard(lambda _: True)
        self._anchors.discard(lambda _: True)
        self.refused = {}


def _faster(first: Plan, *others: Plan) -> Plan:
    """The fastest plan; the first, where none is faster by what counts."""
    best = min(others, key=lambda x: x.predicted.step_s)
    enough = (1 - _FASTER) * first.predicted.step_s
    return best if best.predicted.step_s <= enough else first


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
