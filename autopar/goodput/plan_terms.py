"""The terms of a plan's predicted step, at its batch and at others.

Where the layouts stay, `autopar.cost.estimate` says what another batch takes. A plan of
several stages, or one that cannot be scaled, is scaled by its rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from autopar.cost.estimate import StepEstimate, estimate
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.goodput.throughput import Terms
from autopar.layouts.assignment import Assignment, unsplit
from autopar.planner.record import restore
from autopar.planner.search import plan_mesh
from autopar.plans import Plan
from autopar.plans.checks import digest
from autopar.steps.analysis import Analysis

# A batch, over the planned one, that is next to nothing.
_NOTHING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCurve:
    """The terms of a plan by the rows of its batch.

    Attributes:
      plan: the plan.
      rows: rows that it was made for.
      devices: number of devices.
      hosts: number of hosts.
      estimate: what a step does in its layouts; None: its stages have several.
      layouts: digits that tell what the plan decides besides the batch and the codecs.
      analysis: of the step that the plan is for.
    """

    plan: Plan
    rows: int
    devices: int
    hosts: int
    estimate: StepEstimate | None
    layouts: str
    analysis: Analysis = dataclasses.field(repr=False, compare=False)
    # What was asked for before: each decision of a loop asks for all of it again.
    _known: dict[tuple[int, int], Terms | None] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @functools.cached_property
    def alone(self) -> StepEstimate | None:
        """What one device does that does everything; None likewise."""
        if self.estimate is None:
            return None
        pricer = self.estimate.pricer
        whole = unsplit(self.estimate.assignment.analysis, pricer.sizes)
        return estimate(whole, pricer)

    def terms(
        self, rows: int | None = None, microbatches: int | None = None
    ) -> Terms | None:
        """What the plan predicts of a step; None: it says nothing of such a step.

        Args:
          rows: of the batch; None: those that it was made for.
          microbatches: into how many they are split; None: as in the plan. Others are
            known where they are a multiple of the plan's.
        """
        rows = self.rows if rows is None else rows
        parts = self.plan.microbatches if microbatches is None else microbatches
        if (rows, parts) not in self._known:
            self._known[rows, parts] = self._terms(rows, parts)
        return self._known[rows, parts]

    def lost_part(self, rows: int) -> float:
        """The part of a step's seconds that other layouts may save.

        It is what devices take, besides the update and the sums behind it, for more
        than an equal share of what one device would do: for work that several do, and
        for waiting.

        Args:
          rows: of the batch.
        """
        terms = self.terms(rows)
        if terms is None or self.alone is None or not terms.predicted_s > 0:
            return 0.0
        fixed_s = self.alone.microbatch_s(_NOTHING)
        grows_s = self.alone.microbatch_s(rows / self.rows) - fixed_s
        repeated_s = max(0.0, terms.work_s - grows_s / self.devices)
        gathers_s = max(0.0, terms.fixed_s - terms.microbatches * fixed_s)
        return (repeated_s + gathers_s) / terms.predicted_s

    def _terms(self, rows: int, microbatches: int) -> Terms | None:
        own = self.plan.microbatches
        times, rest = divmod(microbatches, own)
        if rest or (times > 1 and self.estimate is None):
            return None
        work, fixed, sync = self._seconds(rows / self.rows, times)
        return Terms(
            devices=self.devices,
            hosts=self.hosts,
            rows=rows,
            microbatches=own * times,
            work_s=max(0.0, work),
            fixed_s=max(0.0, fixed),
            sync_s=max(0.0, sync),
        )

    def _seconds(self, ratio: float, times: int) -> tuple[float, float, float]:
        """Seconds of work, of what is fixed and of synchronisation.

        Args:
          ratio: of the batch to the planned one.
          times: into how many parts each microbatch is split once more.
        """
        predicted, found = self.plan.predicted, self.estimate
        if found is None:
            sync = predicted.step_s - predicted.compute_s
            return predicted.compute_s * ratio, 0.0, sync
        # What codecs, which the estimate does not hold, change of a synchronisation.
        coded = predicted.step_s - found.seconds()
        fixed = times * found.microbatch_s(_NOTHING)
        work = times * found.microbatch_s(ratio / times) - fixed
        if times > 1:
            fixed += times * found.accumulate_s
        return work, fixed, found.seconds(ratio, times) - work - fixed + coded


def layouts_of(plan: Plan) -> str:
    """Digits that tell what a plan decides besides the batch and the codecs.

    Args:
      plan: the plan.
    """
    homes = tuple((p, plan.home(p), plan.home_spec(p)) for p in sorted(plan.shapes))
    devices = tuple(stage.devices for stage in plan.stages)
    work = tuple((n.name, n.axes) for stage in plan.stages for n in stage.nodes)
    name = plan.cluster.text
    return digest((name, devices, plan.home_axes, plan.microbatches, homes, work))


def plan_curve(analysis: Analysis, plan: Plan, rows: int) -> PlanCurve:
    """The terms of a plan.

    Args:
      analysis: of the step that it is for.
      plan: the plan.
      rows: of that step's batch.
    """
    cluster = plan.cluster.read()
    found: StepEstimate | None = None
    if len(plan.stages) == 1 and not cluster.groups:
        with contextlib.suppress(PlanError):
            found = estimate(*_price(analysis, plan))
    hosts = max(1, len(cluster.hosts))
    return PlanCurve(
        plan=plan,
        rows=rows,
        devices=cluster.num_devices,
        hosts=hosts,
        estimate=found,
        layouts=layouts_of(plan),
        analysis=analysis,
    )


def _price(analysis: Analysis, plan: Plan) -> tuple[Assignment, Pricer]:
    cluster = plan.cluster.read()
    mesh = plan_mesh(cluster, plan.axis_names, plan.axis_sizes)
    return restore(analysis, plan), Pricer(cluster, mesh)
