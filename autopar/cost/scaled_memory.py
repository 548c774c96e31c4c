"""A planned step's memory as arithmetic in its batch and accumulation.

The layouts stay. A buffer grows with the batch as often as its array has dimensions
that do. The sums of gradients over microbatches are there besides.
"""

from __future__ import annotations

import dataclasses

from autopar.cost.buffers import buffers
from autopar.cost.memory import habits_of, held_bytes, off_chip, usage_by_time
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards


class ScaledMemory:
    """Most bytes live at once on a device, at other batches and accumulations."""

    def __init__(self, assignment: Assignment, pricer: Pricer) -> None:
        """Lists the buffers once."""
        analysis, device = assignment.analysis, pricer.cluster.device
        labels, graph = analysis.dim_labels, analysis.graph
        life = analysis.life(habits_of(device))
        self._life = life
        self._length = len(graph.operators)
        self._overhead = device.calibrated.memory_overhead * life.factor
        found = buffers(assignment, life)
        self._buffers = [(b, labels.degree(b.value)) for b in found]
        self._inputs = [
            (held_bytes(assignment, i, tiled=life.tiled), labels.degree(i.value))
            for i in graph.inputs
        ]
        self._sums_bytes = _sums_bytes(assignment)

    def peak_bytes(self, batch: float, accumulation: int = 1) -> float:
        """Most bytes live at once.

        Args:
          batch: of the whole step, over the planned one.
          accumulation: number of microbatches that it is cut into.
        """
        part = batch / accumulation
        live = [
            dataclasses.replace(b, nbytes=b.nbytes * part**degree)
            for b, degree in self._buffers
        ]
        usage = usage_by_time(off_chip(live, self._life), self._length)
        # The whole batch is there before it is cut.
        inputs = sum(n * (batch if degree else 1.0) for n, degree in self._inputs)
        sums = self._sums_bytes if accumulation > 1 else 0.0
        live = self._overhead * float(usage.max(initial=0.0))
        return inputs + sums + live + self._life.workspace_bytes


def _sums_bytes(assignment: Assignment) -> float:
    """Bytes of the sums of gradients over microbatches, on one device."""
    graph = assignment.graph
    total = 0.0
    for deferral in assignment.analysis.deferrals:
        for value in deferral.ends:
            if value in deferral.gradients:
                split = shards(assignment.home_layout(value), assignment.sizes)
                total += graph.values[value].nbytes / split
    return total
