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
from autopar.cost.buffers import buffers
from autopar.cost.items import held_items
from autopar.cost.local import Buffer
from autopar.cost.memory import habits_of
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
        known = submesh.pricer.cluster.device
        life = self.life(known)
        found = buffers(submesh.assignment, life, self.around)
        kept = [(b, layer) for b in found if (layer := self.keeper(b)) is not None]
        activations = np.zeros((len(self.layers.examples), len(self.scales)))
        for buffer, layer in kept:
            if layer in self.layers.row:
                activations[self.layers.row[layer]] += self.scaled(buffer)
        ids = {id(b) for b, _ in kept}
        rest = [b for b in found if id(b) not in ids]
        overhead = known.calibrated.memory_overhead * life.factor
        return LayerBytes(
            self.state(submesh),
            *self.gradients(submesh),
            overhead * activations,
            overhead * self.transient(rest) + life.workspace_bytes,
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

    def scaled(self, buffer: Buffer) -> np.ndarray:
        """Bytes of a buffer at each size of a microbatch."""
        labels = self.layers.analysis.dim_labels
        return buffer.nbytes * self.scales ** labels.degree(buffer.value)

    def keeper(self, buffer: Buffer) -> int | None:
        """The layer whose backward pass keeps a buffer waiting; None: none does."""
        analysis = self.layers.analysis
        maker = analysis.contraction.producer[buffer.value]
        last = analysis.graph.operators[buffer.end]
        if maker.role is not Role.FORWARD or last.role is not Role.BACKWARD:
            return None
        begun = analysis.graph.operators[buffer.start]
        if begun.role is Role.BACKWARD:  # gathered anew for the backward pass
            return None
        layer = int(self.layers.layer[buffer.end])
        return layer if layer >= 0 else None

    def transient(self, found: list[Buffer]) -> np.ndarray:
        """The most bytes of these buffers at once while each example layer runs."""
        layers = self.layers
        out = np.zeros((len(layers.examples), len(self.scales)))
        length = len(layers.layer)
        change = np.zeros((length + 1, len(self.scales)))
        for buffer in found:
            nbytes = self.scaled(buffer)
            change[buffer.start] += nbytes
            change[min(buffer.end, length - 1) + 1] -= nbytes
        usage = np.cumsum(change[:length], axis=0)
        for layer, row in layers.row.items():
            within = layers.layer == layer
            within &= layers.in_passes
            if within.any():
                out[row] = usage[within].max(axis=0)
        return out

    def state(self, submesh: Submesh) -> np.ndarray:
        """Bytes of the inputs, each in the layer that holds it."""
        out = np.zeros(len(self.layers.examples))
        for item in held_items(submesh.assignment):
            layer = int(self.layers.layer[item.operator])
            if layer in self.layers.row:
                out[self.layers.row[layer]] += item.cost.held_bytes
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
