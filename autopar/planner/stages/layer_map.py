"""Maps each operator of a microbatch's program to its layer.

Layers with the same operators cost the same. So one of them, the *example layer*,
represents all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_dims
from autopar_passes.graph.operators import Operator
from autopar_passes.graph.roles import Role
from autopar_passes.stages.layers import top_level
from autopar_passes.stages.parts import Parts, parts_of, sums_over_parts

NOWHERE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class LayerMap:
    """The layers of a program.

    Attributes:
      analysis: analysis of one microbatch, or of the whole batch.
      starts: the forward equation at which each layer begins.
      parts: the layer of each equation.
      batch: input values that are split into microbatches.
      layer: int array ``[operators]``, the layer of each operator; `NOWHERE` for the
        operators that return the step's results.
      kept: ``[layers]``, the example layer of each layer.
    """

    analysis: Analysis
    starts: tuple[int, ...]
    parts: Parts
    batch: frozenset[int]
    layer: np.ndarray
    kept: np.ndarray

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.starts)

    @functools.cached_property
    def examples(self) -> tuple[int, ...]:
        """The example layers, in order."""
        return tuple(sorted({int(k) for k in self.kept}))

    @functools.cached_property
    def row(self) -> dict[int, int]:
        """Example layer -> its index among the example layers."""
        return {layer: k for k, layer in enumerate(self.examples)}

    @functools.cached_property
    def operators(self) -> tuple[int, ...]:
        """The operators of the example layers, and operators that return results of the
        step.
        """
        wanted = np.isin(self.layer, [*self.examples, NOWHERE])
        return tuple(int(k) for k in np.flatnonzero(wanted))

    @functools.cached_property
    def _columns(self) -> np.ndarray:
        """The column of each operator (see `column`), ``[operators]``."""
        operators = self.analysis.graph.operators
        ahead, above = sent_back(self), self._above
        once = self.parts.flow.once
        out = np.zeros(len(operators), int)
        for op in operators:
            if op.role is Role.BACKWARD and above.get(op.equation) not in once:
                out[op.index] = 1 if above.get(op.equation) in ahead else 2
            elif op.role is not Role.FORWARD or op.kind == "return":
                out[op.index] = 3
        return out

    @functools.cached_property
    def of_equation(self) -> dict[int, int]:
        """Top-level equation -> its layer; the first layer if several layers have the
        equation.
        """
        return {
            self._above[op.equation]: int(self.layer[op.index])
            for op in self.analysis.graph.operators
            if op.equation in self._above
        }

    @functools.cached_property
    def in_passes(self) -> np.ndarray:
        """Whether each operator runs in every microbatch, ``[operators]``."""
        return self._columns < 3

    @functools.cached_property
    def gradients(self) -> dict[int, int]:
        """Each gradient that is accumulated over microbatches -> the operator that
        computes it.

        The result of the operator is a partial sum over devices, and so is the
        accumulated gradient.
        """
        return {
            value: maker
            for deferral in self.analysis.deferrals
            for maker, ends in deferral.reach
            for value in ends
            if value in deferral.gradients
        }

    @functools.cached_property
    def _again(self) -> frozenset[int]:
        return needed_again(self)

    @functools.cached_property
    def _above(self) -> dict[int, int]:
        return top_level(self.analysis.program)

    def again(self, operator: int) -> bool:
        """Whether an operator runs again if its layer is rematerialised."""
        op = self.analysis.graph.operators[operator]
        return self._above.get(op.equation) in self._again

    def column(self, operator: int) -> int:
        """Returns the kind of task of an operator, as a number.

        0 is the forward pass, 1 gradients of inputs, 2 gradients of weights, and 3 work
        that runs once per step.
        """
        return int(self._columns[operator])

    def layer_of(self, operator: int, value: int) -> int:
        """Returns the layer of a collective, from its operator and its array."""
        layer = int(self.layer[operator])
        if layer == NOWHERE:
            maker = self.analysis.contraction.producer[value]
            layer = int(self.layer[maker.index])
        return layer

    def spread(self, rows: np.ndarray) -> np.ndarray:
        """Expands rows of example layers to rows of all layers, along the first
        axis.
        """
        return rows[[self.row[int(k)] for k in self.kept]]


def sent_back(layers: LayerMap) -> frozenset[int]:
    """Returns the backward equations that an earlier layer waits for."""
    flow = layers.parts.flow
    layer = layers.of_equation
    out: set[int] = set()
    for index in reversed(flow.equations):
        if flow.roles[index] is not Role.BACKWARD:
            continue
        for value in flow.equations[index].outputs:
            for reader in flow.readers.get(value, ()):
                if flow.roles[reader] is not Role.BACKWARD:
                    continue
                earlier = layer.get(reader, NOWHERE) < layer.get(index, NOWHERE)
                if earlier or reader in out:
                    out.add(index)
    return frozenset(out)


def needed_again(layers: LayerMap) -> frozenset[int]:
    """The forward equations whose results their layer's own backward pass needs.

    If a layer is rematerialised, the backward pass runs these equations again. Results
    that only the next layer reads are not computed again.
    """
    flow = layers.parts.flow
    layer = layers.of_equation
    out: set[int] = set()
    for index in reversed(flow.equations):
        if flow.roles[index] is not Role.FORWARD:
            continue
        for value in flow.equations[index].outputs:
            for reader in flow.readers.get(value, ()):
                needs = reader in out or flow.roles[reader] is Role.BACKWARD
                if needs and layer.get(reader) == layer.get(index):
                    out.add(index)
    return frozenset(out)


def batch_inputs(analysis: Analysis) -> frozenset[int]:
    """Returns the inputs that are split into microbatches."""
    inputs = analysis.graph.inputs
    return frozenset(inputs[k].value for k in batch_dims(analysis.graph, 1))


def layer_map(
    analysis: Analysis, starts: Sequence[int], batch: Collection[int] | None
) -> LayerMap:
    """Assigns a layer to every operator.

    Args:
      analysis: the program.
      starts: the forward equation at which each layer begins.
      batch: input values that are split into microbatches; None: all inputs of the
        batch.
    """
    split = batch_inputs(analysis) if batch is None else frozenset(batch)
    program, graph = analysis.program, analysis.graph
    parts = parts_of(program, graph, starts, batch=split)
    if late := sums_over_parts(parts):
        once = parts.flow.once | late
        parts = parts_of(program, graph, starts, batch=split, once=once)
    layer = _layers(analysis, parts)
    return LayerMap(
        analysis, tuple(starts), parts, split, layer, _examples(analysis, parts, layer)
    )


def _layers(analysis: Analysis, parts: Parts) -> np.ndarray:
    """Returns the layer of each operator."""
    operators = analysis.graph.operators
    above = top_level(analysis.program)
    out = np.full(len(operators), NOWHERE)
    unknown: list[Operator] = []
    for op in operators:
        found = parts.part.get(above.get(op.equation, -1))
        if op.kind == "input":
            found = parts.homes.get(op.outputs[0])
        if found is not None:
            out[op.index] = found
        elif op.kind != "return":
            unknown.append(op)
    readers: dict[int, list[int]] = {}
    for op in operators:
        for value in op.inputs:
            if value is not None and op.kind != "return":
                readers.setdefault(value, []).append(op.index)
    for op in reversed(unknown):
        # An operator that several layers share counts in the first layer that reads its
        # result.
        found = {
            int(out[r]): operators[r].role is Role.BACKWARD
            for v in op.outputs
            for r in reversed(readers.get(v, []))
            if out[r] != NOWHERE
        }
        ahead = [k for k, backward in found.items() if not backward]
        out[op.index] = min(ahead, default=min(found, default=0))
    return out


def _examples(analysis: Analysis, parts: Parts, layer: np.ndarray) -> np.ndarray:
    """Returns an example layer for each layer.

    If several layers have the same operators, the second of them is the example layer:
    the first may read values that the others do not read.
    """
    classes: list[Counter[int]] = [Counter() for _ in range(parts.count)]
    for op in analysis.graph.operators:
        if layer[op.index] != NOWHERE:
            classes[int(layer[op.index])][op.class_index] += 1
    groups: dict[frozenset[tuple[int, int]], list[int]] = {}
    for k, found in enumerate(classes):
        groups.setdefault(frozenset(found.items()), []).append(k)
    out = np.zeros(parts.count, int)
    for members in groups.values():
        out[members] = members[min(1, len(members) - 1)]
    return out
