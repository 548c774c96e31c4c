"""The order in which XLA's CPU compiler runs a program: breadth first.

Its scheduler is a queue. An operator joins it when the last of its operands has run
(openxla/xla, ``BFScheduler`` in
``xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc``;
``xla_cpu_enable_concurrency_optimized_scheduler`` is on by default). So operators run
by their depth: the number of kernels on the longest way to them from an input. What is
made of inputs alone, such as gathered parameters, is made first of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autopar.steps.fusion import is_elementwise
from autopar_passes.graph.operators import Operator, OperatorGraph

# It makes nothing, but what leaves it waits for all that enters it.
_BARRIER = "optimization_barrier"


def breadth_first(graph: OperatorGraph, written: frozenset[int]) -> list[int]:
    """When each operator runs: a permutation of the operators.

    A loop is one kernel, whose operators run breadth first, too.

    Args:
      graph: the operator graph.
      written: values with a buffer of their own. An element-wise operator that writes
        none runs within its readers, and adds nothing to their depth.
    """
    queue = _Queue(written, _barrier_inputs(graph))
    times = [0] * len(graph.operators)
    for time, op in enumerate(queue.order(graph.operators)):
        times[op.index] = time
    return times


def region_ends(graph: OperatorGraph, times: Sequence[int]) -> list[int]:
    """When the region of each boundary operator ends; -1 for the others.

    Args:
      graph: the operator graph.
      times: when each operator runs. Those of a region run together.
    """
    first: dict[int, int] = {}
    for op in graph.operators:
        if op.until >= 0:
            first.setdefault(op.equation, op.index)
    ends: dict[int, int] = {}
    out: list[int] = []
    for op in graph.operators:
        if op.until >= 0 and op.equation not in ends:
            ends[op.equation] = max(times[first[op.equation] : op.until + 1])
        out.append(ends[op.equation] if op.until >= 0 else -1)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class _Queue:
    """The scheduler.

    Attributes:
      written: values with a buffer of their own.
      barriers: what each barrier waits for, by its equation.
    """

    written: frozenset[int]
    barriers: dict[int, list[int]]

    def order(self, operators: Sequence[Operator]) -> Iterator[Operator]:
        """The operators of a computation as they run."""
        blocks = list(_blocks(operators))
        depths = self.depths(blocks)
        # The program's own order holds among blocks of one depth.
        for number in sorted(range(len(blocks)), key=depths.__getitem__):
            block = blocks[number]
            if len(block) == 1:
                yield block[0]
            else:
                yield from self.order(block)

    def depths(self, blocks: Sequence[Sequence[Operator]]) -> list[int]:
        """The number of kernels before each block, and itself."""
        made: dict[int, int] = {}
        out: list[int] = []
        for block in blocks:
            inputs = [
                v for op in block for v in self.barriers.get(op.equation, op.inputs)
            ]
            depth = max((made[v] for v in inputs if v in made), default=0)
            if not self.is_fused(block):
                depth += 1
            if block[0].kind == "return":
                depth = max(out, default=0)
            made.update((v, depth) for op in block for v in op.outputs)
            out.append(depth)
        return out

    def is_fused(self, block: Sequence[Operator]) -> bool:
        """Whether a block is an operator that runs within its readers' kernels."""
        if len(block) > 1:
            return False
        op = block[0]
        within = is_elementwise(op) and self.written.isdisjoint(op.outputs)
        return within or op.kind == "input"


def _blocks(operators: Sequence[Operator]) -> Iterator[Sequence[Operator]]:
    """The operators of a computation one by one, those of a region in it together."""
    whole = operators[0].equation if operators[0].until >= 0 else -1
    block: list[Operator] = []
    until = -1
    for op in operators:
        own = op.until >= 0 and op.equation == whole and len(operators) > 1
        until = until if own and not block else max(until, op.until)
        block.append(op)
        if op.index >= until:
            yield block
            block = []


def _barrier_inputs(graph: OperatorGraph) -> dict[int, list[int]]:
    """What each barrier waits for, by its equation; every value has an operator."""
    out: dict[int, list[int]] = {}
    for op in graph.operators:
        if op.kind == _BARRIER:
            out.setdefault(op.equation, []).extend(
                v for v in op.inputs if v is not None
            )
    return out
