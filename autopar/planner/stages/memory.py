"""Bytes of layers on one device of a submesh, for each number of microbatches.

What a device holds all the time are parameters, moments and the sums of gradients.
Activations are what the forward pass makes and the backward pass reads; they belong to
the layer that reads them last. The rest is transient: it lives while a layer runs.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from autopar.cluster.specs import DeviceSpec
from autopar.cost.live import SUMS, Live, habits_of, live
from autopar.layouts.layout import shards
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.submeshes import Submesh
from autopar.steps.lifetimes import Lifetimes, in_program_order
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, eq=False)
class LayerBytes:
    """Bytes of example layers.

    Attributes:
      state: float64 ``[examples]``, parameters, moments and the batch.
      gradients: ``[examples]``, sums of gradients over microbatches.
      accumulated: ``[examples]``, what is read and written to add a microbatch's
        gradients to their sums.
      activations: ``[examples, scales]``, from the forward to the backward pass.
      transient: ``[examples, scales]``, beside that while a layer runs.
    """

    state: np.ndarray
    gradients: np.ndarray
    accumulated: np.ndarray
    activations: np.ndarray
    transient: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BytesPricer:
    """Counts bytes of layers.

    Attributes:
      layers: the layers.
      scales: rows of a microbatch over those of the program, for each number of them.
    """

    layers: LayerMap
    scales: np.ndarray

    def price(self, submesh: Submesh) -> LayerBytes:
        """Bytes of the example layers on a device of a submesh."""
        device = submesh.pricer.cluster.device
        found = live(submesh.assignment, device, self.life(device), self.around)
        grown = found.nbytes[:, None] * self.scales ** found.degrees[:, None]
        keeper = self.keepers(found)
        layers = self.layers
        activations = np.zeros((len(layers.examples), len(self.scales)))
        state = np.zeros(len(layers.examples))
        for layer, row in layers.row.items():
            activations[row] = grown[keeper == layer].sum(axis=0)
        producer = layers.analysis.contraction.producer
        for k in range(found.held):
            if found.kinds[k] != SUMS:
                layer = int(layers.layer[producer[int(found.values[k])].index])
                if layer in layers.row:
                    state[layers.row[layer]] += found.nbytes[k]
        rest = keeper < 0
        rest[: found.held] = False
        return LayerBytes(
            state,
            *self.gradients(submesh),
            found.factor * activations,
            found.factor * self.transient(found, rest, grown) + found.workspace_bytes,
        )

    def life(self, device: DeviceSpec) -> Lifetimes:
        """When values live: products of gradients run where they stand."""
        habits = dataclasses.replace(habits_of(device), late_gradients=0)
        analysis = self.layers.analysis
        if habits.breadth_first:
            return in_program_order(analysis.life())
        return analysis.life(habits)

    @functools.cached_property
    def around(self) -> tuple[int, ...]:
        """The operators of example layers, their readers, and the makers they read."""
        graph = self.layers.analysis.graph
        producer = self.layers.analysis.contraction.producer
        within = set(self.layers.operators)
        made = {v for k in within for v in graph.operators[k].outputs}
        out = set(within)
        for op in graph.operators:
            if op.kind != "return" and made.intersection(op.inputs):
                out.add(op.index)
        for k in within:
            op = graph.operators[k]
            if op.kind != "return":
                out.update(producer[v].index for v in op.inputs if v is not None)
        return tuple(sorted(out))

    def keepers(self, found: Live) -> np.ndarray:
        """For each array the layer whose backward pass it waits for; -1: none."""
        layers, graph = self.layers, self.layers.analysis.graph
        producer = layers.analysis.contraction.producer
        forward = {v for v, op in producer.items() if op.role is Role.FORWARD}
        roles = np.array([op.role is Role.BACKWARD for op in graph.operators])
        # What begins in the backward pass is gathered anew for it.
        waits = np.array([int(v) in forward for v in found.values], dtype=bool)
        waits &= roles[found.last] & ~roles[found.first]
        waits[: found.held] = False
        return np.where(waits, layers.layer[found.last], -1)

    def transient(
        self, found: Live, chosen: np.ndarray, grown: np.ndarray
    ) -> np.ndarray:
        """The most bytes of the chosen arrays at once while each example layer runs."""
        layers = self.layers
        out = np.zeros((len(layers.examples), len(self.scales)))
        change = np.zeros((found.length + 1, len(self.scales)))
        np.add.at(change, found.first[chosen], grown[chosen])
        last = np.minimum(found.last[chosen], found.length - 1)
        np.add.at(change, last + 1, -grown[chosen])
        usage = np.cumsum(change[: found.length], axis=0)
        for layer, row in layers.row.items():
            within = (layers.layer == layer) & layers.in_passes
            if within.any():
                out[row] = usage[within].max(axis=0)
        return out

    def gradients(self, submesh: Submesh) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the sums of gradients, and of adding to them, by example layer.

        Sums are as products leave them. A product is read, and the sum read and
        written; what lies between the two is fused into the addition.
        """
        held = np.zeros(len(self.layers.examples))
        moved = np.zeros(len(self.layers.examples))
        assignment = submesh.assignment
        values = assignment.graph.values
        for value, maker in self.layers.gradients.items():
            layer = int(self.layers.layer[maker])
            if layer not in self.layers.row:
                continue
            op = assignment.graph.operators[maker]
            layout = assignment.home_layout(value)
            if op.class_index in assignment.contraction.node_of:
                layout = assignment.layout(op, op.rule.results[0])
            split = shards(layout, assignment.sizes)
            row = self.layers.row[layer]
            held[row] += values[value].nbytes / split
            made = values[op.outputs[0]].nbytes
            moved[row] += (made + 2 * values[value].nbytes) / split
        return held, moved
