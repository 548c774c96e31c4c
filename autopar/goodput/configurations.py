"""The best plan, batch and accumulation of a step on configurations of devices.

A step is planned at the batch that it was written for, and asked for other batches by
arithmetic. It is planned at the largest batch too, and where the best batch is far from
the planned one, again at that batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from autopar.cluster import Cluster
from autopar.errors import AutoparError, InfeasibleError, PlanError, ScheduleError
from autopar.goodput.batched import Batches, PlanAtBatches, ProgramAtBatches, prepare
from autopar.goodput.curves import CurvePoint
from autopar.planner.cache import PlanCache
from autopar.planner.codecs.sites import without_warnings
from autopar.planner.options import PlanOptions, as_written
from autopar.planner.plan import plan_analysis
from autopar.planner.warm import can_be_warm, warm_plan
from autopar.plans import Plan
from autopar.steps.microbatches import in_microbatches

# A step is planned again where the best microbatch is so many times the planned one.
_FAR = 2.0
# Halvings of a batch that does not fit.
_HALVINGS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WantedCurve:
    """What a curve is made of.

    Attributes:
      program: the step.
      batches: that may be chosen.
      options: of the planner.
      cache: keeps plans; None: nothing does.
      anew: whether each configuration is planned from nothing, which proves how good
        its plan is, and not from the plan of the one before.
    """

    program: ProgramAtBatches
    batches: Batches
    options: PlanOptions
    cache: PlanCache | None = None
    anew: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FoundPoint:
    """A configuration's point, and its plan, if there is one."""

    point: CurvePoint
    plan: Plan | None = None


def chain(wanted: WantedCurve, clusters: list[Cluster]) -> Iterator[FoundPoint]:
    """Plans configurations, each from the plan of the one before.

    Yields:
      One for each cluster, in order; what cannot run says why.
    """
    running: Plan | None = None
    for cluster in clusters:
        found = configuration(wanted, cluster, running)
        running = found.plan or running
        yield found


def configuration(
    wanted: WantedCurve, cluster: Cluster, running: Plan | None
) -> FoundPoint:
    """The best of one configuration.

    Args:
      wanted: the step, and what may be chosen.
      cluster: equal devices.
      running: a plan to begin the search with.
    """
    blank = CurvePoint(
        cluster=str(cluster),
        kind="" if cluster.groups else cluster.device.name,
        nodes=len(cluster.hosts),
        devices=cluster.num_devices,
    )
    try:
        return _best_found(wanted, cluster, running, blank)
    except AutoparError as error:
        return FoundPoint(_change(blank, reason=str(error).split("\n", 1)[0]))


def _best_found(
    wanted: WantedCurve, cluster: Cluster, running: Plan | None, blank: CurvePoint
) -> FoundPoint:
    if cluster.groups:
        raise ScheduleError(
            f"{cluster} has several kinds of devices; a configuration has one."
        )
    first = _first(wanted, cluster, running)
    found = [(_best_batch(wanted, first, cluster, blank), first)]
    # A small batch may have a plan that no larger one should have.
    largest = wanted.batches.most // cluster.num_devices * cluster.num_devices
    for rows in (largest, 0):
        point, plan = max(found, key=lambda each: each[0].goodput)
        rows = rows or point.batch // point.accumulation
        if max(rows / plan.rows, plan.rows / max(rows, 1)) < _FAR or not rows:
            continue
        # A plan that runs is there already.
        with contextlib.suppress(AutoparError):
            again = _planned_at(wanted, cluster, rows, plan.plan)
            found.append((_best_batch(wanted, again, cluster, blank), again))
    point, plan = max(found, key=lambda each: each[0].goodput)
    return FoundPoint(point, plan.plan)


def _first(
    wanted: WantedCurve, cluster: Cluster, running: Plan | None
) -> PlanAtBatches:
    """A plan at the program's batch, or as near to it as one can be made.

    A batch that does not fit is halved: it is cut into microbatches. One that the
    devices do not divide is made larger, if it may be.

    Raises:
      InfeasibleError: no batch fits; that of the program's own.
      PlanError: no batch can be split; likewise.
    """
    rows, devices = wanted.program.rows, cluster.num_devices
    first: PlanError | None = None
    for _ in range(_HALVINGS):
        try:
            return _planned_at(wanted, cluster, rows, running)
        except InfeasibleError as error:
            first = first or error
            if rows % 2:
                raise first from error
            rows //= 2
        except PlanError as error:
            larger = -(-rows // devices) * devices
            if first is not None or not rows < larger <= wanted.batches.most:
                raise (first or error) from error
            first, rows = error, larger
    assert first is not None
    raise first


def _planned_at(
    wanted: WantedCurve, cluster: Cluster, rows: int, running: Plan | None
) -> PlanAtBatches:
    analysis, options = wanted.program.at(rows), as_written(wanted.options)
    warm = (
        not wanted.anew
        and running is not None
        and running.structure == analysis.structure
        and can_be_warm(cluster, options, running)
    )

    def make() -> Plan:
        with (
            without_warnings()
        ):  # the point says which codecs are used; on one device none is
            return search()

    def search() -> Plan:
        if warm and running is not None:
            return warm_plan(analysis, cluster, options, running)
        return plan_analysis(analysis, cluster, options)

    if wanted.cache is None:
        return prepare(wanted.program, rows, cluster, make())
    # A plan that was searched for in full is as good for a curve.
    kept = wanted.cache.find(analysis, cluster, options)
    if kept is None:
        cache = PlanCache(wanted.cache.folder / "warm") if warm else wanted.cache
        kept = cache.plan(analysis, cluster, options, make)
    return prepare(wanted.program, rows, cluster, kept)


def _best_batch(
    wanted: WantedCurve, made: PlanAtBatches, cluster: Cluster, blank: CurvePoint
) -> CurvePoint:
    """The batch and accumulation with the most goodput of those that fit.

    Raises:
      InfeasibleError: none fits.
      PlanError: none can be split.
    """
    batches = wanted.batches
    splittable = functools.cache(lambda: _may_accumulate(wanted, made.rows))
    best: CurvePoint | None = None
    least_bytes = math.inf
    for rows in batches.sizes(made.parts, cluster.num_devices):
        factor = rows / made.rows
        for count in made.splits(rows):
            if count > 1 and not splittable():
                break
            peak = made.peak_bytes(factor, count)
            least_bytes = min(least_bytes, peak)
            if peak > cluster.memory_bytes:
                continue
            step_s = made.step_s(rows, count)
            worth = batches.efficiency(rows, made.error)
            goodput = rows / step_s * worth
            if best is None or goodput > best.goodput * (1 + 1e-9):
                best = _change(
                    blank,
                    batch=rows,
                    accumulation=count,
                    step_s=step_s,
                    efficiency=worth,
                    goodput=goodput,
                    peak_memory_bytes=peak,
                    plan=made.plan.digest,
                    scheme="" if made.plan.worth is None else made.plan.worth.scheme,
                    codecs=_codecs(made.plan),
                )
    if best is not None:
        return best
    if least_bytes < math.inf:
        raise InfeasibleError(
            f"no batch fits: {least_bytes / 1e9:.3g} GB are needed at least, and a "
            f"device has {cluster.memory_bytes / 1e9:.3g} GB."
        )
    raise PlanError(
        f"no batch from {batches.base} to {batches.most} rows can be split into the "
        f"{made.parts} parts of the plan; allow a larger batch."
    )


def _may_accumulate(wanted: WantedCurve, rows: int) -> bool:
    """Whether the batch may be cut into microbatches."""
    count = next((n for n in range(2, rows + 1) if rows % n == 0), 1)
    couple = wanted.options.coupled == "microbatch"
    try:
        in_microbatches(wanted.program.at(rows), count, couple=couple)
    except PlanError:
        return False
    return count > 1


def _codecs(plan: Plan) -> tuple[str, ...]:
    if len(plan.stages) > 1:
        return ()
    return tuple(sorted({g.codec for g in plan.gradients} - {"", "dense"}))


def _change(point: CurvePoint, **fields: Any) -> CurvePoint:
    return msgspec.structs.replace(point, **fields)
