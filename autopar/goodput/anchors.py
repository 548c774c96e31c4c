"""The plans by which ways are judged before they are planned themselves.

The layouts that run say what they take with other batches, and with other codecs once
these have been chosen for them. They may be the best for one batch and one codec alone:
what is exchanged, or computed on all devices, to avoid sums of gradients is dear with
larger batches, and with codecs that make sums cheap. So layouts are searched for with
each codec, too: for the largest batch, or for the one that runs where it stays.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from autopar.errors import AutoparError
from autopar.goodput.plan_terms import PlanCurve, plan_curve
from autopar.planner.codecs.left_out import unasked
from autopar.plans import Plan
from autopar.runtime import agreement, changing_batches
from autopar.runtime.changing_batches import Shape
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.recent import Recent
from autopar_passes.program.calls import Call

# What is kept: layouts times codecs.
_STUDIED = 16
# Other layouts must be so much faster than those that run: part of a step.
_FASTER = 0.01
# How often the largest batch is halved where it does not fit.
_HALVINGS = 3

CallOf = Callable[[int], Call]
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

    def unstudied(self, running: PlanCurve, own: str) -> int:
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
                    found = self._studied(running, codecs, layouts=free)
            if searches and largest is not None and found:
                found = (*found, *self._larger(running, codecs, *largest))
            self._known.put(place, found)
        if searches and largest is not None:
            self._searched.put(running.layouts, True)

    def _studied(
        self, running: PlanCurve, codecs: str, *, layouts: bool
    ) -> tuple[PlanCurve, ...]:
        """The plans with other codecs and the batch that runs; none is possible: ()."""
        analysed = self.step.running.analysed
        shape_of = functools.partial(
            changing_batches.shape_of, self.step, analysed, codecs=codecs
        )
        plans: list[Plan] = []
        try:
            plans.append(planned(self.step, shape_of(layouts=running.plan)))
            if layouts:
                parts = running.plan.microbatches
                plans.append(planned(self.step, shape_of(microbatches=parts)))
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
                shape = changing_batches.shaped(
                    self.step, call_of(rows), codecs=codecs, microbatches=parts
                )
                plan = planned(self.step, shape)
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


def planned(step: ParallelStep[..., object], shape: Shape) -> Plan:
    """A plan, the same on all processes.

    Args:
      step: the step.
      shape: what it is for.
    """
    setting, planner = shape.setting, step.preparation.planner
    cluster = setting.cluster or step.cluster
    with unasked():
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
