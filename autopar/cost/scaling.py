"""A planned step's time as arithmetic in devices, batch and accumulation.

The layouts of a plan stay; the number of devices changes the data-parallel degree
alone. For each number of devices the items of the cost are priced once. What an item
takes is a piecewise polynomial of the batch of a microbatch: narrow products, bends
of rooflines and the algorithms of collectives are terms and bends of it. Their sum
answers a query by one look-up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar.cluster import DeviceSpec, MeshShape
from autopar.cost.collectives import collective_pieces
from autopar.cost.compute import (
    attained_flops_per_s,
    kernel_flops_per_s,
    matrix_sides,
    roofline_s,
    tabled_s,
)
from autopar.cost.hidden_curve import HiddenCurve, hidden_curve
from autopar.cost.items import CostItem, Paid, items
from autopar.cost.pieces import (
    DEGREE,
    Pieces,
    PieceSum,
    Polynomial,
    added,
    constant,
    largest,
    monomial,
    plus,
    times,
    value_at,
)
from autopar.cost.pricer import Pricer
from autopar.cost.products import rates_of
from autopar.cost.traffic import Collective
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards
from autopar.layouts.stacking import partial_along, without
from autopar.steps.analysis import Analysis
from autopar.steps.batch import BATCH, batch_rows
from autopar.steps.work import OperatorWork

# Batches over the planned one at which products with a table are priced; the planned
# one is among them. Between them a straight line is within a percent.
_SAMPLES = 2.0 ** (np.arange(-12, 13) / 2)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchCurve:
    """Seconds of a step on a fixed number of devices, by batch and accumulation.

    Attributes:
      microbatch: seconds of one microbatch, by its batch over the planned one.
      synchronisation: the same of what is paid once in a step.
      accumulate_s: seconds of adding one microbatch's gradients to the sums so far.
      hidden: what is saved because communication runs beside work; None: nothing.
    """

    microbatch: PieceSum
    synchronisation: PieceSum
    accumulate_s: float
    hidden: HiddenCurve | None = None

    def step_s(self, batch: float, accumulation: int) -> float:
        """Seconds of a step.

        Args:
          batch: of the whole step, over the planned one.
          accumulation: number of microbatches.
        """
        part = batch / accumulation
        once = self.synchronisation(part)
        if self.hidden is not None:
            once -= self.hidden.saved_s(part, accumulation)
        if accumulation == 1:
            return self.microbatch(part) + once
        return accumulation * (self.microbatch(part) + self.accumulate_s) + once


class ScaledCost:
    """The time of a planned step at other batches and numbers of devices.

    >>> # cost = ScaledCost(assignment, pricer); cost.step_s(16, 512, accumulation=2)
    """

    def __init__(self, assignment: Assignment, pricer: Pricer) -> None:
        """Prices the planned number of devices; others are priced when asked for.

        Raises:
          PlanError: the program has no batch, so its cost cannot be scaled.
        """
        self._assignment, self._pricer = assignment, pricer
        self.batch = _batch_size(assignment.analysis)
        self.devices = math.prod(assignment.sizes)
        self._axis = _data_axis(assignment)
        self._curves = {self.devices: batch_curve(assignment, pricer)}

    def step_s(self, devices: int, batch: int, accumulation: int = 1) -> float:
        """Seconds of one step.

        The first query of a number of devices prices the layouts there, in
        milliseconds; every other is arithmetic, in a few microseconds.

        Args:
          devices: number of devices; the data-parallel degree follows.
          batch: samples of the whole step.
          accumulation: number of microbatches that the batch is cut into.

        Raises:
          PlanError: the layouts cannot be kept at this number of devices, or the
            batch or accumulation is no positive number.
        """
        if batch < 1 or accumulation < 1:
            raise PlanError(
                f"step_s: batch={batch} and accumulation={accumulation} must be 1 or "
                "more."
            )
        curve = self._curves.get(devices) or self._priced(devices)
        return curve.step_s(batch / self.batch, accumulation)

    def prepare(self, devices: Sequence[int]) -> None:
        """Prices several numbers of devices ahead of the first query."""
        for count in devices:
            if count not in self._curves:
                self._priced(count)

    def _priced(self, devices: int) -> BatchCurve:
        assignment, pricer = rescaled(
            self._assignment, self._pricer, self._axis, devices
        )
        self._curves[devices] = batch_curve(assignment, pricer)
        return self._curves[devices]


def batch_curve(assignment: Assignment, pricer: Pricer) -> BatchCurve:
    """Prices an assignment as a function of its batch."""
    found = items(assignment, pricer)
    priced = [(item, item_pieces(assignment, pricer, item)) for item in found]
    terms: dict[Paid, list[Pieces]] = {paid: [] for paid in Paid}
    for item, pieces in priced:
        terms[item.paid].append(pieces)
    return BatchCurve(
        added(terms[Paid.MICROBATCH]),
        added(terms[Paid.SYNCHRONISATION]),
        _accumulate_s(assignment, pricer.cluster.device),
        hidden_curve(assignment, pricer, priced),
    )


def rescaled(
    assignment: Assignment, pricer: Pricer, axis: int | None, devices: int
) -> tuple[Assignment, Pricer]:
    """The same layouts on another number of devices.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      axis: the mesh axis that takes the change.
      devices: the new number of devices.

    Raises:
      PlanError: the other axes do not divide the devices, or an array cannot be
        split so.
    """
    sizes = assignment.sizes
    rest = math.prod(sizes) // (sizes[axis] if axis is not None else 1)
    degree, left = divmod(devices, rest)
    if axis is None or left or degree < 1:
        raise PlanError(
            f"step_s: {devices} devices do not keep the plan's layouts: "
            + (
                "no mesh axis splits the batch alone."
                if axis is None
                else f"its other axes need a multiple of {rest}."
            )
        )
    made = (*sizes[:axis], degree, *sizes[axis + 1 :])
    _check_splits(assignment, axis, made)
    axes = list(pricer.mesh.axes)
    axes[axis] = dataclasses.replace(axes[axis], size=degree)
    mesh = MeshShape(axes=tuple(axes))
    return (
        dataclasses.replace(assignment, sizes=made, _known={}),
        dataclasses.replace(pricer, mesh=mesh),
    )


def _check_splits(assignment: Assignment, axis: int, sizes: tuple[int, ...]) -> None:
    """Checks that everything but the batch can be split over an axis's new size."""
    analysis = assignment.analysis
    labels = analysis.node_labels
    for node, strategy in zip(
        analysis.contraction.nodes, assignment.strategies, strict=True
    ):
        for f, axes in enumerate(strategy):
            size, batch = node.factors[f][0], labels.get(node.index, {}).get(f) == BATCH
            parts = math.prod(sizes[a] for a in axes)
            if axis in axes and not batch and size % parts:
                raise PlanError(
                    f"step_s: a dimension of {size} cannot be split {parts} ways, as "
                    "the plan's layouts would on this number of devices."
                )


def _data_axis(assignment: Assignment) -> int | None:
    """The outermost mesh axis that splits the batch; None: none does."""
    analysis = assignment.analysis
    labels = analysis.node_labels
    found: set[int] = set()
    for node, strategy in zip(
        analysis.contraction.nodes, assignment.strategies, strict=True
    ):
        if node.kind == "contraction":
            known = labels.get(node.index, {})
            split = [s for f, s in enumerate(strategy) if known.get(f) == BATCH]
            found.update(*split)
    return min(found, default=None)


def _batch_size(analysis: Analysis) -> int:
    """Samples of the planned step."""
    rows = batch_rows(analysis.graph)
    if rows < 2:
        raise PlanError("step_s: the step has no batch of several rows.")
    return rows


def _accumulate_s(assignment: Assignment, device: DeviceSpec) -> float:
    """Seconds of adding every gradient to its sum: two reads and a write.

    Where the sum over devices waits for all microbatches, each device adds up its own
    part of it, whole.
    """
    graph = assignment.graph
    total = 0.0
    for deferral in assignment.analysis.deferrals:
        axes = partial_along(assignment, deferral)
        for value in deferral.ends:
            if value in deferral.gradients:
                held_so = without(assignment.home_layout(value), axes)
                split = shards(held_so, assignment.sizes)
                held = graph.values[value]
                total += float(
                    roofline_s(
                        held.size / split,
                        3.0 * held.nbytes / split,
                        str(held.dtype),
                        device,
                        is_matrix=False,
                    )
                )
    return total


def item_pieces(assignment: Assignment, pricer: Pricer, item: CostItem) -> Pieces:
    """Seconds of an item as a function of the batch over the planned one.

    At 1 they are those of the item's cost.
    """
    analysis = assignment.analysis
    if item.work is not None:
        trips = analysis.trips[item.operator]
        device = pricer.cluster.device
        found = work_pieces(assignment, item.work, item.parts, device).scaled(trips)
        fixed = monomial(item.cost.kernel_s, 0)
        return Pieces(tuple((x, plus(p, fixed)) for x, p in found.pieces))
    if item.collective is not None:
        return collective_pieces_of(assignment, pricer, item.collective)
    return constant(0.0)


def work_pieces(
    assignment: Assignment,
    work: OperatorWork,
    parts: Sequence[int],
    device: DeviceSpec,
) -> Pieces:
    """Seconds of one run as a function of the batch; the formulas of `compute`.

    Args:
      assignment: of the program.
      work: what the operator does.
      parts: into how many parts each factor of its rule is split.
      device: the device.
    """
    labels, op = assignment.analysis.dim_labels, work.op
    growing = labels.batch_factors(op.index)
    shards_of = math.prod(parts)
    kernel = op.kernel if work.is_matrix else None
    if kernel is not None:
        rate = kernel_flops_per_s(kernel, device)
    else:
        rate = attained_flops_per_s(work.dtype, device, work.is_matrix)
    compute = monomial(op.flops / shards_of / rate, _degree(len(growing)))
    memory = _memory(assignment, work, work.memory_parts(parts), device)
    if kernel is not None:
        return largest(compute, memory)
    if not work.is_matrix:
        slower = device.calibrated.vector_slowdown
        return largest(times(compute, slower), times(memory, slower))
    if rates_of(device, work.itemsize) is not None:
        return _tabled_pieces(assignment, work, parts, device)
    sides = matrix_sides(op.rule, np.array([parts], dtype=float))[0]
    degrees = [sum(f in growing for f in factors) for factors in work.sides]
    half = device.calibrated.half_rate_side
    for side, degree in zip(sides, degrees, strict=True):
        # flops / (side / (side + half)): a wasted tile is a term of a lower degree.
        compute = plus(compute, _lowered(times(compute, half / float(side)), degree))
    found = largest(compute, memory)
    passes = device.calibrated.patch_passes
    if not (passes and work.unfolds):
        return found
    patches = 2.0 * sides[0] * sides[2] * work.itemsize
    bandwidth = device.memory_bandwidth_bytes_per_s
    extra = monomial(passes * patches / bandwidth, _degree(degrees[0] + degrees[2]))
    return Pieces(tuple((x, plus(p, extra)) for x, p in found.pieces))


def _tabled_pieces(
    assignment: Assignment,
    work: OperatorWork,
    parts: Sequence[int],
    device: DeviceSpec,
) -> Pieces:
    """Seconds of a product by a table: straight between sampled batches."""
    seconds = tabled_at(assignment, work, parts, device, _SAMPLES)
    slopes = np.diff(seconds) / np.diff(_SAMPLES)
    lines = [
        (start, (value - slope * start, slope, 0.0, 0.0))
        for start, value, slope in zip(
            _SAMPLES.tolist(), seconds.tolist(), slopes.tolist(), strict=False
        )
    ]
    return Pieces(((0.0, lines[0][1]), *lines[1:]))


def tabled_at(
    assignment: Assignment,
    work: OperatorWork,
    parts: Sequence[int],
    device: DeviceSpec,
    batches: np.ndarray,
) -> np.ndarray:
    """Seconds of one run of a product by a table, at some batches.

    Args:
      assignment: of the program.
      work: what the product does.
      parts: into how many parts each factor of its rule is split.
      device: the device, which has a table.
      batches: over the planned one.
    """
    labels, op = assignment.analysis.dim_labels, work.op
    growing = labels.batch_factors(op.index)
    split = np.array([parts], dtype=float)
    degrees = [sum(f in growing for f in factors) for factors in work.sides]
    sides = matrix_sides(op.rule, split) * batches[:, None] ** np.array(degrees)
    flops = op.flops / math.prod(parts) * batches ** len(growing)
    memory = _memory(assignment, work, work.memory_parts(parts), device)
    nbytes = np.array([value_at(memory, x) for x in batches.tolist()])
    nbytes *= device.memory_bandwidth_bytes_per_s
    return tabled_s(work, flops, nbytes, sides, device)


def _degree(count: int) -> int:
    """Products of more than three batches are taken for a cube."""
    return min(count, DEGREE)


def _lowered(p: Polynomial, degree: int) -> Polynomial:
    """A polynomial divided by a power of x; its terms never fall below a constant."""
    out = [0.0] * (DEGREE + 1)
    for power, coefficient in enumerate(p):
        out[max(0, power - degree)] += coefficient
    a, b, c, d = out
    return (a, b, c, d)


def _memory(
    assignment: Assignment, work: OperatorWork, shards_of: float, device: DeviceSpec
) -> Polynomial:
    """Seconds of an operator's memory traffic."""
    analysis = assignment.analysis
    total = monomial(0.0, 0)
    bandwidth = device.memory_bandwidth_bytes_per_s
    for value, nbytes in work.traffic:
        degree = _degree(analysis.dim_labels.degree(value))
        total = plus(total, monomial(nbytes / bandwidth / shards_of, degree))
    return total


def collective_pieces_of(
    assignment: Assignment, pricer: Pricer, collective: Collective
) -> Pieces:
    """Seconds of a collective as a function of the batch."""
    degree = _degree(assignment.analysis.dim_labels.degree(collective.value))
    if degree == 0 or collective.size <= 0:
        return constant(collective.seconds(pricer))
    whole = pricer.whole(collective.step, collective.size, collective.message_bytes)
    part = collective.size / whole
    axes = tuple(pricer.mesh.axes[a] for a in collective.step.axes)
    move = monomial(
        collective.trips * pricer.move_s(collective.step, collective.size), degree
    )
    factor = collective.trips * pricer.skew(axes) * part
    pieces: list[tuple[float, Polynomial]] = []
    for size, latency, slope in collective_pieces(
        pricer.runs_as(collective.step.kind), axes
    ):
        wire = plus(monomial(latency, 0), monomial(slope * whole, degree))
        start = (size / whole) ** (1.0 / degree)
        pieces.append((start, plus(times(wire, factor), move)))
    return Pieces(tuple(pieces))
