"""Seconds of layers on a submesh, for each number of microbatches.

The items of a step's cost are added up by layer. What an item takes depends on the
rows of a microbatch: products by their table, the rest by piecewise polynomials
(`autopar.cost.scaling`). Layers that stand for others are priced alone.

Communication that nothing waits for runs beside the work of its own layer: gathers of
parameters beside each microbatch's, sums of gradients beside the backward pass of the
last microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from autopar.cluster.specs import DeviceSpec
from autopar.cost.combining import SUMS
from autopar.cost.items import Paid, paid_of, parts_of
from autopar.cost.pieces import Pieces, value_at
from autopar.cost.products import rates_of
from autopar.cost.reassociation import compiled_traffic
from autopar.cost.scaling import collective_pieces_of, tabled_at, work_pieces
from autopar.cost.traffic import Collective, joined
from autopar.layouts.assignment import Assignment
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.submeshes import Submesh
from autopar.steps.work import OperatorWork
from autopar_passes.graph.roles import Role

# Columns of a table of seconds.
FORWARD, INPUT, WEIGHT, STEP, AGAIN = range(5)
_COLUMNS = 5


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSeconds:
    """Seconds of example layers, float64 ``[examples, scales]``.

    Attributes:
      forward: of one microbatch.
      backward_input: gradients that an earlier layer waits for.
      backward_weight: the other gradients.
      step: once a step.
      again: of computing activations again, before the backward pass of a microbatch.
    """

    forward: np.ndarray
    backward_input: np.ndarray
    backward_weight: np.ndarray
    step: np.ndarray
    again: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class SecondsPricer:
    """Prices layers; what operators take is kept, for submeshes share it.

    Attributes:
      layers: the layers.
      scales: rows of a microbatch over those of the program, for each number of them.
    """

    layers: LayerMap
    scales: np.ndarray
    _known: dict[object, np.ndarray] = dataclasses.field(default_factory=dict)

    def price(self, submesh: Submesh) -> LayerSeconds:
        """Seconds of the example layers on a submesh."""
        shape = (_COLUMNS, len(self.layers.examples), len(self.scales))
        work, waiting, free = (np.zeros(shape) for _ in range(3))
        self._add_work(submesh, work)
        self._add_communication(submesh, waiting, free)
        known = submesh.pricer.cluster.device.calibrated
        return _overlapped(work, waiting, free, known.overlap, known.contention)

    def _add_work(self, submesh: Submesh, out: np.ndarray) -> None:
        analysis, assignment = self.layers.analysis, submesh.assignment
        device = submesh.pricer.cluster.device
        works = analysis.works(streamed=device.streams)
        for member, runs in self._runs.items():
            work = works[member]
            strategy = assignment.works_as(work.op)
            parts = parts_of(analysis.contraction, submesh.pricer, work.op, strategy)
            seconds = self._run_s(assignment, device, work, parts)
            for (column, row), trips in runs.items():
                out[column, row] += trips * seconds

    @functools.cached_property
    def _runs(self) -> dict[int, dict[tuple[int, int], float]]:
        """How often the operators of a class run, by column and example layer."""
        layers = self.layers
        out: dict[int, dict[tuple[int, int], float]] = {}
        works = layers.analysis.works()
        for index in layers.operators:
            op = layers.analysis.graph.operators[index]
            if op.class_index not in works or layers.layer[index] < 0:
                continue
            row = layers.row[int(layers.layer[index])]
            runs = out.setdefault(op.class_index, {})
            for column in self._columns(index):
                runs[column, row] = runs.get((column, row), 0.0) + op.trips
        return out

    def _run_s(
        self,
        assignment: Assignment,
        device: DeviceSpec,
        work: OperatorWork,
        parts: tuple[int, ...],
    ) -> np.ndarray:
        """Seconds of one run of an operator, with the start of its kernel."""
        key = (work.op.index, parts, device)
        known = self._known.get(key)
        if known is None:
            scales = self.scales
            update = work.op.role is Role.UPDATE
            if update:
                scales = np.ones_like(scales)
            tabled = work.is_matrix and work.op.kernel is None
            if tabled and rates_of(device, work.itemsize) is not None:
                known = tabled_at(assignment, work, parts, device, scales)
            else:
                known = _at(work_pieces(assignment, work, parts, device), scales)
            known = known + (device.kernel_latency_s if work.kernel else 0.0)
            self._known[key] = known
        return known

    def _add_communication(
        self, submesh: Submesh, waiting: np.ndarray, free: np.ndarray
    ) -> None:
        layers, assignment, pricer = self.layers, submesh.assignment, submesh.pricer
        for c, layer in self._collectives(submesh):
            once = paid_of(assignment, c) is Paid.SYNCHRONISATION
            columns = (STEP,) if once else self._columns(c.operator)
            scales = self.scales
            if once:
                # Sums of gradients are as large whatever the microbatch is.
                scales = np.ones_like(scales)
            seconds = _at(collective_pieces_of(assignment, pricer, c), scales)
            summed = c.place is not None and c.step.kind in SUMS
            hides = c.place is not None and (summed or not once)
            for column in columns:
                (free if hides else waiting)[column, layers.row[layer]] += seconds

    def _columns(self, operator: int) -> tuple[int, ...]:
        """The columns in which an operator counts."""
        again = self.layers.again(operator)
        return (self.layers.column(operator), AGAIN)[: 2 if again else 1]

    def _collectives(self, submesh: Submesh) -> list[tuple[Collective, int]]:
        """The collectives of example layers, each with its layer.

        Messages are those of all layers: a collective travels with those of the layers
        that are like its own.
        """
        layers = self.layers
        found = [
            (c, layers.layer_of(c.operator, c.value))
            for c in compiled_traffic(
                submesh.assignment, submesh.pricer, layers.operators
            )
        ]
        found = [(c, layer) for c, layer in found if layer in layers.row]
        times = np.bincount(layers.kept, minlength=layers.count)
        whole = [c for c, layer in found for _ in range(times[layer])]
        sent = joined(submesh.pricer, whole)
        middles = np.cumsum([0] + [int(times[layer]) for _, layer in found])
        return [
            (sent[(first + last) // 2], layer)
            for (_, layer), first, last in zip(
                found, middles[:-1].tolist(), middles[1:].tolist(), strict=True
            )
        ]


def _at(pieces: Pieces, scales: Sequence[float] | np.ndarray) -> np.ndarray:
    """A piecewise polynomial at some points."""
    return np.array([value_at(pieces.at(x), x) for x in map(float, scales)])


def _overlapped(
    work: np.ndarray,
    waiting: np.ndarray,
    free: np.ndarray,
    share: float,
    contention: float,
) -> LayerSeconds:
    """Adds work and communication, of which a part runs beside the work.

    Args:
      work: float64 ``[columns, examples, scales]``, seconds of work.
      waiting: of communication that something waits for.
      free: of communication that may run beside work.
      share: part of the work that it may run beside.
      contention: seconds of work lost for each second of it.
    """
    saved = np.zeros_like(work)
    backward = work[INPUT] + work[WEIGHT]
    gathers = free[INPUT] + free[WEIGHT]
    beside = {
        FORWARD: np.minimum(free[FORWARD], share * work[FORWARD]),
        AGAIN: np.minimum(free[AGAIN], share * work[AGAIN]),
        STEP: np.minimum(free[STEP], np.maximum(0.0, share * backward - gathers)),
    }
    hidden = np.minimum(gathers, share * backward)
    part = np.divide(hidden, gathers, out=np.zeros_like(hidden), where=gathers > 0)
    beside[INPUT], beside[WEIGHT] = part * free[INPUT], part * free[WEIGHT]
    for column, seconds in beside.items():
        saved[column] = (1.0 - contention) * seconds
    total = work + waiting + free - saved
    return LayerSeconds(*total)
