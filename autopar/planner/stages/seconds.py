"""Seconds of layers on a submesh, for each number of microbatches.

The work and the messages of a step (`autopar.cost.estimate`) are added up by layer, at
the rows of each microbatch. Layers that stand for others are priced alone.

Communication that nothing waits for runs beside the work of its own layer: gathers of
parameters beside each microbatch's, sums of gradients beside the backward pass of the
last microbatch.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from autopar.cost.combining import SUMS
from autopar.cost.estimate import messages_of, work_of
from autopar.cost.reassociation import compiled_traffic
from autopar.cost.traffic import Collective, joined
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.submeshes import Submesh

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
    """Prices layers.

    Attributes:
      layers: the layers.
      scales: rows of a microbatch over those of the program, for each number of them.
    """

    layers: LayerMap
    scales: np.ndarray

    def price(self, submesh: Submesh) -> LayerSeconds:
        """Seconds of the example layers on a submesh."""
        shape = (_COLUMNS, len(self.layers.examples), len(self.scales))
        work, waiting, free = (np.zeros(shape) for _ in range(3))
        self._add_work(submesh, work)
        self._add_communication(submesh, waiting, free)
        known = submesh.pricer.cluster.device.calibrated
        return _overlapped(work, waiting, free, known.overlap, known.contention)

    def _add_work(self, submesh: Submesh, out: np.ndarray) -> None:
        work = work_of(submesh.assignment, submesh.pricer)
        table = work.table
        # The update is the same whatever a microbatch is.
        run_s = np.where(
            table.update[:, None], work.run_s(np.ones(1)), work.run_s(self.scales)
        )
        run_s += work.device.kernel_latency_s * table.kernels[:, None]
        row_of = {member: row for row, member in enumerate(table.operators.tolist())}
        places, trips = self._runs
        members = [row_of[member] for _, _, member in places]
        columns, rows = np.array([place[:2] for place in places], int).reshape(-1, 2).T
        np.add.at(out, (columns, rows), trips[:, None] * run_s[members])

    @functools.cached_property
    def _runs(self) -> tuple[list[tuple[int, int, int]], np.ndarray]:
        """The columns, example layers and classes of operators, and how often they run.

        ``[places]``.
        """
        layers = self.layers
        out: dict[tuple[int, int, int], float] = {}
        works = layers.analysis.works()
        for index in layers.operators:
            op = layers.analysis.graph.operators[index]
            if op.class_index not in works or layers.layer[index] < 0:
                continue
            row = layers.row[int(layers.layer[index])]
            for column in self._columns(index):
                place = column, row, op.class_index
                out[place] = out.get(place, 0.0) + op.trips
        return list(out), np.array(list(out.values()), float)

    def _add_communication(
        self, submesh: Submesh, waiting: np.ndarray, free: np.ndarray
    ) -> None:
        layers, assignment = self.layers, submesh.assignment
        found = self._collectives(submesh)
        sent = messages_of(assignment, submesh.pricer, [c for c, _ in found])
        # Sums of gradients are as large whatever the microbatch is.
        each_s = np.where(
            sent.once[:, None], sent.planned_s[:, None], sent.seconds(self.scales)
        )
        for (c, layer), once, seconds in zip(
            found, sent.once.tolist(), each_s, strict=True
        ):
            summed = c.place is not None and c.step.kind in SUMS
            hides = c.place is not None and (summed or not once)
            for column in (STEP,) if once else self._columns(c.operator):
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
