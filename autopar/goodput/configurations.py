"""The best plan, batch and gradient accumulation on each configuration of devices.

The planner plans a step at the batch size that the step was written for. Formulas
(`StepEstimate`) then give the seconds that the layouts of this plan need at other batch
sizes and numbers of microbatches. The planner also plans the step at the largest batch.
If the best batch size differs much from these two, the planner plans the step again at
the best batch size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import msgspec

from autopar.cluster import Cluster
from autopar.compression.codecs.registry import parse_codec
from autopar.cost.estimate import StepEstimate, estimate
from autopar.cost.pricer import Pricer
from autopar.errors import AutoparError, InfeasibleError, PlanError, ScheduleError
from autopar.goodput.choice import CodecError, efficiency
from autopar.goodput.curves import CurvePoint
from autopar.planner.cache import PlanCache
from autopar.planner.codecs.sites import without_warnings
from autopar.planner.options import PlanOptions, as_written
from autopar.planner.plan import plan_analysis
from autopar.planner.record import restore
from autopar.planner.search import plan_mesh
from autopar.planner.warm import can_be_warm, warm_plan
from autopar.plans import Plan
from autopar.steps.analysis import Analysis, analyse_call
from autopar.steps.batch import fails_with, rows_axes, samples
from autopar.steps.microbatches import in_microbatches

# Number of batch sizes to try in each doubling from the base batch to the largest
# batch.
_PER_DOUBLING = 4
# The most microbatches; numbers of microbatches are powers of two.
_MOST_MICROBATCHES = 2**10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batch sizes from which the best one is chosen.

    Attributes:
      base: rows of the batch that the program was written for.
      most: rows of the largest allowed batch.
      noise_scale: noise scale of the gradients, in rows. If it is None (not known),
        only the base batch is considered.

    Raises:
      ScheduleError: a number is out of its range.
    """

    base: int
    most: int
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.base < 1:
            raise ScheduleError(f"the base batch is {self.base} rows; give at least 1.")
        if self.most < self.base:
            raise ScheduleError(
                f"the largest batch, {self.most} rows, is below the base batch of "
                f"{self.base}; give at least as many rows."
            )
        phi = self.noise_scale
        if phi is not None and not (math.isfinite(phi) and phi >= 0):
            raise ScheduleError(
                f"the noise scale is {phi}; give a finite number of at least 0."
            )

    def sizes(self, parts: int, devices: int) -> list[int]:
        """The batch sizes to try, in rows, from the base batch to the largest batch.

        All batches except for the base batch are multiples of the number of devices, so
        that every plan can split them.

        Args:
          parts: number of parts into which the plan splits rows.
          devices: number of devices of the configuration.
        """
        base = [self.base] if self.base % parts == 0 else []
        if self.noise_scale is None:
            return base
        unit = math.lcm(parts, devices)
        count = round(_PER_DOUBLING * math.log2(self.most / self.base)) + 1
        ratio = (self.most / self.base) ** (1 / max(count - 1, 1))
        near = {unit * round(self.base * ratio**k / unit) for k in range(count)}
        return sorted({*base, *(n for n in near if self.base <= n <= self.most)})

    def efficiency(self, rows: int, error: CodecError) -> float:
        """Progress per row with this batch size, divided by that of the base batch."""
        if self.noise_scale is None:
            return 1.0
        return efficiency(self.noise_scale, rows, self.base, error)


class ProgramAtBatches:
    """A step that can be analysed at any batch."""

    def __init__(self, analysis: Analysis) -> None:
        """Stores the analysis at the batch that the step was written for.

        Raises:
          PlanError: the step has no batch.
        """
        self.rows = samples(analysis.graph)
        if not self.rows:
            raise PlanError(
                "the step has no batch, whose goodput could be told: its last argument "
                "must hold arrays with a row for each sample."
            )
        self._known = {self.rows: analysis}

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the step at the batch that it was written for."""
        return self._known[self.rows].fingerprint

    def at(self, rows: int) -> Analysis:
        """The analysis of the step with a batch of ``rows`` rows.

        Raises:
          PlanError: the batch cannot have this number of rows, or the step fails on it.
        """
        if rows not in self._known:
            self._known[rows] = _with_rows(self._known[self.rows], self.rows, rows)
        return self._known[rows]


def _with_rows(analysis: Analysis, before: int, rows: int) -> Analysis:
    origin = analysis.origin
    if origin is None:
        raise PlanError(f"the step cannot be traced anew with {rows} rows.")
    arrays = list(origin.call.arrays)
    for k, given in enumerate(analysis.graph.inputs):
        shape = tuple(analysis.graph.values[given.value].shape)
        if given.rows < 0:
            continue
        if given.output >= 0:
            raise PlanError(
                f"'{given.path}' is state with a part for each row of the batch, so "
                "the step cannot be planned for another number of rows."
            )
        dim = given.rows
        scaled, rest = divmod(shape[dim] * rows, before)
        if rest or not scaled:
            raise PlanError(
                f"input '{given.path}' has {shape[dim]} rows for a batch of {before}, "
                f"and cannot be made for one of {rows}."
            )
        made = (*shape[:dim], scaled, *shape[dim + 1 :])
        arrays[k] = jax.ShapeDtypeStruct(made, arrays[k].dtype)
    call = dataclasses.replace(origin.call, arrays=arrays)
    try:
        return analyse_call(origin.step, call)
    except PlanError:
        raise
    except Exception as error:
        # The user's step is known to run only with the batch size that it was written
        # for. With another batch size it may raise any exception.
        raise PlanError(fails_with(f"{rows} rows", error)) from error


@dataclasses.dataclass(frozen=True, slots=True)
class PlanAtBatches:
    """A plan for one batch, with its seconds and memory at other batches.

    Attributes:
      plan: the plan.
      rows: rows of the batch that the plan was made for.
      estimate: the estimate of a step, which can be evaluated at other batches.
      parts: number of parts into which the rows of a microbatch are split.
      error: the error of the plan's codecs.
    """

    plan: Plan
    rows: int
    estimate: StepEstimate
    parts: int
    error: CodecError

    def step_s(self, rows: int, accumulation: int) -> float:
        """Seconds of a step.

        Codecs are assumed to save as many seconds as at the planned batch size.
        """
        coded_s = self.plan.predicted.step_s - self.estimate.seconds()
        scaled_s = self.estimate.seconds(rows / self.rows, accumulation)
        return max(scaled_s + coded_s, 1e-12)

    def peak_bytes(self, factor: float, accumulation: int) -> float:
        """Peak bytes of a device; codecs are assumed to hold as many bytes as planned.

        Args:
          factor: rows of the batch divided by rows of the planned batch.
          accumulation: number of microbatches.
        """
        held = self.plan.predicted.peak_memory_bytes - self.estimate.live.peak_bytes()
        return self.estimate.live.peak_bytes(factor, accumulation) + held

    def splits(self, rows: int) -> Iterator[int]:
        """Yields the numbers of microbatches into which the plan can split a batch."""
        count = 1
        while count <= _MOST_MICROBATCHES and rows % (count * self.parts) == 0:
            yield count
            count *= 2


def prepare_batches(
    program: ProgramAtBatches, rows: int, cluster: Cluster, plan: Plan
) -> PlanAtBatches:
    """A plan of a program, prepared for evaluation at other batches."""
    analysis = program.at(rows)
    assignment = restore(analysis, plan)
    pricer = Pricer(cluster, plan_mesh(cluster, plan.axis_names, plan.axis_sizes))
    sizes = plan.mesh["axes"]
    splits = [
        math.prod(sizes[name] for name in axes)
        for axes in rows_axes(analysis.graph, plan.inputs)
    ]
    return PlanAtBatches(
        plan,
        rows,
        estimate(assignment, pricer),
        max(splits, default=1),
        error_of(plan),
    )


def error_of(plan: Plan) -> CodecError:
    """The expected error of a plan's unbiased codecs.

    Biased codecs use error feedback, and no formula tells how much they slow training
    down. This function treats biased codecs as exact. `autopar.goodput.following`
    measures the progress of training with them.
    """
    own = shared = 0.0
    workers = 1
    for gradient in plan.gradients if len(plan.stages) == 1 else ():
        if not gradient.codec:
            continue
        codec, squared = parse_codec(gradient.codec), gradient.error**2
        workers = max(workers, gradient.workers)
        # Stochastic rounding gives each worker an error that is independent of the
        # others'. A codec that sends random elements draws the same elements on all
        # workers, so they share its error.
        if getattr(codec, "rounding", "") == "stochastic":
            own = max(own, squared)
        elif getattr(codec, "unbiased", False):
            # A codec that sends random elements scales them up, to be unbiased.
            # Therefore its squared error exceeds the squared norm of the elements that
            # it does not send.
            scaled = squared / (1 - squared) if squared < 1 else math.inf
            shared = max(shared, scaled)
    return CodecError(own=own, shared=shared, workers=workers)


# A step is planned again if the rows of the best microbatch and of the planned
# microbatch differ by at least this factor.
_FAR = 2.0
# The largest number of times that a batch is halved because it does not fit the memory.
_HALVINGS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WantedCurve:
    """The inputs from which a goodput curve is computed.

    Attributes:
      program: the step.
      batches: the batches that may be chosen.
      options: options of the planner.
      cache: a cache of plans; None: no cache.
      anew: whether the planner makes a full search for each configuration, which proves
        how far its plan may be from the best plan. If False, the search starts from the
        plan of the previous configuration.
    """

    program: ProgramAtBatches
    batches: Batches
    options: PlanOptions
    cache: PlanCache | None = None
    anew: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FoundPoint:
    """A point of the curve, and its plan; None if the program cannot run there."""

    point: CurvePoint
    plan: Plan | None = None


def chain(wanted: WantedCurve, clusters: list[Cluster]) -> Iterator[FoundPoint]:
    """Plans configurations, each starting from the plan of the previous one.

    Yields:
      A point for each cluster, in order. If the program cannot run on the cluster,
      `CurvePoint.reason` says why.
    """
    running: Plan | None = None
    for cluster in clusters:
        found = configuration(wanted, cluster, running)
        running = found.plan or running
        yield found


def configuration(
    wanted: WantedCurve, cluster: Cluster, running: Plan | None
) -> FoundPoint:
    """The best plan and batch size on one configuration of devices.

    Args:
      wanted: the step, batch sizes and options of the planner.
      cluster: a cluster with one kind of devices.
      running: a plan from which the search starts.
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
    # The best plan for a small batch may be slow for a large batch, so the planner also
    # plans the largest batch.
    largest = wanted.batches.most // cluster.num_devices * cluster.num_devices
    for rows in (largest, 0):
        point, plan = max(found, key=lambda each: each[0].goodput)
        rows = rows or point.batch // point.accumulation
        if max(rows / plan.rows, plan.rows / max(rows, 1)) < _FAR or not rows:
            continue
        # If planning another batch fails, the first plan stays.
        with contextlib.suppress(AutoparError):
            again = _planned_at(wanted, cluster, rows, plan.plan)
            found.append((_best_batch(wanted, again, cluster, blank), again))
    point, plan = max(found, key=lambda each: each[0].goodput)
    return FoundPoint(point, plan.plan)


def _first(
    wanted: WantedCurve, cluster: Cluster, running: Plan | None
) -> PlanAtBatches:
    """A plan at the program's batch, or at a batch near it.

    A batch that does not fit into memory is halved, because it can run as microbatches.
    A batch that the number of devices does not divide is made larger, if a larger batch
    is allowed.

    Raises:
      InfeasibleError: no batch fits; the error is the one for the program's own batch.
      PlanError: no batch can be split; the error is the one for the program's own
        batch.
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
    analysis = wanted.program.at(rows)
    # The curve has separate points for fewer devices and for other batch sizes.
    # Therefore this plan must use all devices and this batch size.
    options = dataclasses.replace(as_written(wanted.options), may_idle=False)
    warm = (
        not wanted.anew
        and running is not None
        and running.structure == analysis.structure
        and can_be_warm(cluster, options, running)
    )

    def make() -> Plan:
        with without_warnings():  # the point names codecs in use; one device uses none
            return search()

    def search() -> Plan:
        if warm and running is not None:
            return warm_plan(analysis, cluster, options, running)
        return plan_analysis(analysis, cluster, options)

    if wanted.cache is None:
        return prepare_batches(wanted.program, rows, cluster, make())
    # A cached plan that a full search found is at least as good as the plan of a search
    # from the previous configuration.
    kept = wanted.cache.find(analysis, cluster, options)
    if kept is None:
        cache = PlanCache(wanted.cache.folder / "warm") if warm else wanted.cache
        kept = cache.plan(analysis, cluster, options, make)
    return prepare_batches(wanted.program, rows, cluster, kept)


def _best_batch(
    wanted: WantedCurve, made: PlanAtBatches, cluster: Cluster, blank: CurvePoint
) -> CurvePoint:
    """The point with the most goodput: of all batch sizes and accumulations that fit.

    Raises:
      InfeasibleError: no batch fits.
      PlanError: no batch can be split.
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
                    codecs=codecs_of_plan(made.plan),
                    **_error_fields(made.error),
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
    """Whether the options allow this batch to be split into microbatches."""
    count = next((n for n in range(2, rows + 1) if rows % n == 0), 1)
    couple = wanted.options.coupled == "microbatch"
    try:
        in_microbatches(wanted.program.at(rows), count, couple=couple)
    except PlanError:
        return False
    return count > 1


def _error_fields(error: CodecError) -> dict[str, Any]:
    """The error of codecs as fields of a point; no fields if the error is infinite."""
    own, shared, workers = dataclasses.astuple(error)
    if not math.isfinite(own + shared):
        return {}
    return {"own_error": own, "shared_error": shared, "workers": workers}


def codecs_of_plan(plan: Plan) -> tuple[str, ...]:
    """The codecs with which a plan sends gradients; () if it uses none."""
    if len(plan.stages) > 1:
        return ()
    return tuple(sorted({g.codec for g in plan.gradients} - {"", "dense"}))


def _change(point: CurvePoint, **fields: Any) -> CurvePoint:
    return msgspec.structs.replace(point, **fields)
