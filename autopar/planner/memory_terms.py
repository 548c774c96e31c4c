"""Memory terms of the solver's problem: the bytes that each choice of a node occupies.

A *node* is a group of operators or an input, and a *choice* gives it a strategy, with
the layouts of its arrays. A *term* holds the bytes on one device under each strategy,
during an interval of the step.

The exact memory model (`autopar.cost.live`) knows the layouts before and after a
resharding. A term depends on the strategy of one node only, so the terms leave out the
short-lived copies between two nodes. The search therefore computes the exact peak
memory of the solver's answer. If the peak is over the memory of a device, the search
lowers the limit of the problem and solves again. The workspace of matrix products is
not a term: `fixed_bytes` returns this workspace, and the limit of the problem is
reduced by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autopar.cost.buffers import held_until
from autopar.cost.live import habits_of
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import shards
from autopar.layouts.strategies import Copy, Mode, Space, partial_axes
from autopar.steps.analysis import Analysis
from autopar.steps.lifetimes import kept_times
from autopar.steps.nodes import Home
from autopar.steps.rounding import WIDER
from autopar.steps.uses import HomeValue
from autopar_passes.graph.operators import Operator
from autopar_passes.rules.factor_rule import Dims
from autopar_solver import MemoryTerm


def fixed_bytes(analysis: Analysis, pricer: Pricer) -> float:
    """Returns the bytes on a device that every choice needs in addition to the terms.

    The terms also count arrays that stay in on-chip memory and need no device memory.
    So the bytes of these arrays at the peak are subtracted. Every choice has the same
    such bytes.
    """
    life = analysis.life(habits_of(pricer.cluster.device))
    return float(life.workspace_bytes - life.on_chip_bytes)


def memory_terms(
    analysis: Analysis, pricer: Pricer, spaces: Sequence[Space], copies: Sequence[Copy]
) -> tuple[MemoryTerm, ...]:
    """The terms of all nodes: the bytes under each strategy, with their interval.

    Args:
      analysis: the step.
      pricer: prices on the mesh.
      spaces: the strategies of each node, with the layouts that they imply.
      copies: the copies of arrays in other layouts, which have several readers.
    """
    writer = _TermWriter(analysis, pricer, spaces)
    terms = [*writer.inputs(), *writer.homes(), *writer.partials(), *writer.orders()]
    terms.extend(writer.ragged())
    terms.extend(writer.arrivals(analysis.sources.values()))
    for copy in copies:
        terms.extend(writer.copy(copy))
    return tuple(terms)


def least_terms(
    analysis: Analysis, pricer: Pricer, spaces: Sequence[Space]
) -> tuple[MemoryTerm, ...]:
    """Returns the memory that every choice needs, for a lower bound of the peak.

    `memory_terms` may count more bytes than the exact model. It keeps a value until its
    last reader has run, although a resharded copy may have replaced the value earlier.
    The terms here keep a value only until its last reader starts, and leave out copies
    between two layouts.
    """
    writer = _TermWriter(analysis, pricer, spaces)
    homes = writer.homes(least=True)
    return (*writer.inputs(), *homes, *writer.orders(), *writer.ragged())


class _TermWriter:
    def __init__(
        self, analysis: Analysis, pricer: Pricer, spaces: Sequence[Space]
    ) -> None:
        self.graph = analysis.graph
        self.contraction = analysis.contraction
        self.spares = analysis.spares
        self.life = analysis.life(habits_of(pricer.cluster.device))
        self.spaces = spaces
        self.sizes = pricer.sizes
        known = pricer.cluster.device.corrections.memory_overhead
        self.overhead = known * self.life.factor
        self.length = len(analysis.graph.operators)
        self.cache: dict[tuple[int, Dims, int], np.ndarray] = {}
        self.summing = analysis.independent.summing
        summed = (o for o in self.graph.operators if o.class_index in self.summing)
        self.last_sum = max((self.life.time[o.index] for o in summed), default=0)

    def usage(self, node: int, dims: Dims, nbytes: int) -> np.ndarray:
        """Returns the bytes on one device under each strategy of a node."""
        key = (node, dims, nbytes)
        if key not in self.cache:
            layouts = self.spaces[node].layouts(dims)
            self.cache[key] = np.array(
                [nbytes / shards(x, self.sizes) for x in layouts]
            )
        return self.cache[key]

    def inputs(self) -> Iterator[MemoryTerm]:
        for given in self.graph.inputs:
            home = self.contraction.homes.get(given.value)
            if home is not None:
                nbytes = self.graph.values[given.value].device_nbytes
                usage = self.usage(home.node, home.dims, nbytes)
                if given.output >= 0 and nbytes:
                    usage = usage * self.spares.copies(nbytes / usage)
                yield MemoryTerm(node=home.node, start=0, end=self.length, usage=usage)

    def homes(self, *, least: bool = False) -> Iterator[MemoryTerm]:
        graph = self.graph
        replaced = {graph.outputs[i.output] for i in graph.inputs if i.output >= 0}
        ends = self.last_starts() if least else self.last_reads()
        for op in graph.operators:
            for value in op.outputs:
                home = self.contraction.homes.get(value)
                if home is None or value not in self.life.written or value in replaced:
                    continue
                start = self.life.starts(op, value)
                end = max(start, ends.get(value, start), held_until(op, self.life))
                for first, last in kept_times(
                    start, end, self.life.gaps.get(value, ())
                ):
                    yield self.buffer(home, value, first, last, least=least)

    def orders(self) -> Iterator[MemoryTerm]:
        """Transposed copies of arrays, which are made under every choice."""
        for (value, reader), start in self.life.copies.items():
            home = self.contraction.homes.get(value)
            op = self.graph.operators[reader]
            if home is not None and op.class_index in self.contraction.node_of:
                end = self.life.needs(op)
                yield self.buffer(home, value, start, end)

    def ragged(self) -> Iterator[MemoryTerm]:
        """The copies of operands of ragged products (`Lifetimes.ragged`)."""
        for (reader, slot), copies in self.life.ragged.items():
            op = self.graph.operators[reader]
            index, value = self.contraction.node_of.get(op.class_index), op.inputs[slot]
            if index is None or value is None:
                continue
            dims = self.contraction.nodes[index].dims(op, op.rule.operands[slot])
            nbytes = self.overhead * self.graph.values[value].device_nbytes
            for copy in copies:
                usage = self.usage(index, dims, int(copy.times * nbytes))
                start, end = copy.start, copy.end + 1
                yield MemoryTerm(node=index, start=start, end=end, usage=usage)

    def partials(self) -> Iterator[MemoryTerm]:
        """Adds partial results of contractions, until their reduction ends."""
        for op in self.graph.operators:
            index = self.contraction.node_of.get(op.class_index)
            if index is None or self.contraction.nodes[index].kind != "contraction":
                continue
            node = self.contraction.nodes[index]
            start = self.life.time[op.index]
            for value, dims in zip(op.outputs, op.rule.results, strict=True):
                own = node.dims(op, dims)
                nbytes = int(self.overhead * self.graph.values[value].device_nbytes)
                usage = self.usage(index, own, nbytes)
                yield MemoryTerm(node=index, start=start, end=start + 1, usage=usage)
                if self.life.joined_sums and op.class_index in self.summing:
                    yield self.waiting(op, usage)

    def waiting(self, op: Operator, usage: np.ndarray) -> MemoryTerm:
        """Returns the memory of a gradient that waits to be sent.

        The message is sent when the last of the gradients that share it is computed.
        """
        node = self.contraction.node(op)
        reduced = node.factors_reduced(op)
        strategies = self.spaces[node.index].strategies
        partial = np.array([bool(partial_axes(s, reduced)) for s in strategies])
        start = self.life.time[op.index] + 1
        return MemoryTerm(
            node=node.index,
            start=start,
            end=max(start, self.last_sum) + 1,
            usage=np.where(partial, usage, 0.0),
        )

    def arrivals(self, sources: Iterable[HomeValue]) -> Iterator[MemoryTerm]:
        """Adds the receive buffer of the resharding for each reader."""
        for source in sources:
            for use in source.foreign:
                for value, (first, _, _) in use.readers.items():
                    part = self.overhead * self.life.rounded.brought_part(value)
                    nbytes = int(part * self.graph.values[value].device_nbytes)
                    usage = self.usage(use.node, use.dims, nbytes)
                    start = self.life.arrives(value, first)
                    yield MemoryTerm(
                        node=use.node, start=start, end=start + 1, usage=usage
                    )

    def buffer(
        self, home: Home, value: int, start: int, end: int, *, least: bool = False
    ) -> MemoryTerm:
        part = self.overhead * self.life.rounded.part(value)
        nbytes = int(part * self.graph.values[value].device_nbytes)
        if value in self.life.widened.operands and not least:
            nbytes *= WIDER
        usage = self.usage(home.node, home.dims, nbytes)
        return MemoryTerm(node=home.node, start=start, end=end + 1, usage=usage)

    def last_reads(self) -> dict[int, int]:
        ends: dict[int, int] = {}
        for op in self.graph.operators:
            until = self.life.needs(op)
            for value in op.inputs:
                if value is not None and (value, op.index) not in self.life.copies:
                    ends[value] = max(ends.get(value, 0), until)
        return ends

    def last_starts(self) -> dict[int, int]:
        ends: dict[int, int] = {}
        for op in self.graph.operators:
            if op.kind != "return" and op.class_index in self.contraction.node_of:
                for value in op.inputs:
                    if value is not None and (value, op.index) not in self.life.copies:
                        start = self.life.time[op.index]
                        ends[value] = max(ends.get(value, 0), start)
        return ends

    def copy(self, copy: Copy) -> Iterator[MemoryTerm]:
        layouts = copy.space.layouts(copy.dims)
        held = np.array([m is not Mode.SAME for m in copy.modes], dtype=float)
        split = np.array([shards(x, self.sizes) for x in layouts], dtype=float)
        spans: dict[int, list[int]] = {}
        for use in copy.uses:
            for value, (first, last, _) in use.readers.items():
                start = self.life.arrives(value, first)
                until = self.life.needs(self.graph.operators[last])
                span = spans.setdefault(value, [start, until])
                span[0], span[1] = min(span[0], start), max(span[1], until)
        cache: dict[float, np.ndarray] = {}
        for value, (start, end) in spans.items():
            part = self.life.rounded.brought_part(value)
            nbytes = part * self.graph.values[value].device_nbytes
            if nbytes not in cache:
                cache[nbytes] = self.overhead * nbytes * held / split
            usage = cache[nbytes]
            yield MemoryTerm(node=copy.node, start=start, end=end + 1, usage=usage)
