"""When values are made and last needed.

This part of the memory model does not depend on any layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.steps.fusion import is_elementwise
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetimes:
    """The times at which values are made and read, the same for all assignments.

    Attributes:
      time: when each operator runs; an update runs once its gradient is there.
      written: values with a buffer of their own.
      reads: per operator, when its results are last needed (its own time, or
        that of the readers it is fused into).
      copies: values that an operator reads in another order of their dimensions than
        others do, with that operator (`autopar.steps.orders`): when they are made.
      workspace_bytes: what matrix products take to work in, if there are any.
      on_chip_bytes: as in `Habits`.
      tiled: as in `Habits`.
    """

    time: tuple[int, ...]
    written: frozenset[int]
    reads: tuple[int, ...]
    copies: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    workspace_bytes: int = 0
    on_chip_bytes: int = 0
    tiled: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
    """What a compiler does with memory, beyond what all of them do.

    Attributes:
      makes_again: whether element-wise results are made again in each reader where
        that moves fewer bytes (`autopar.steps.fusion.made_again`).
      keeps_orders: whether batched products fix the order of dimensions
        (`autopar.steps.orders`).
      late_gradients: how many products that make gradients wait at once, to run
        behind others of the backward pass.
      workspace_bytes: what a library takes for its matrix products to work in.
      into_products: whether element-wise results are made again in products, too, and
        written for a gather alone (`autopar.steps.fusion.looked_up`).
      late_until_barrier: whether these products run before the next barrier of a layer
        that is computed again, where they hide its gathers.
      on_chip_bytes: memory of the chip itself that holds buffers instead of the
        device's (`autopar.cost.on_chip`).
      tiled: whether arrays lie in tiles (`autopar.cost.tiles`).
    """

    makes_again: bool = False
    into_products: bool = False
    late_until_barrier: bool = False
    tiled: bool = False
    on_chip_bytes: int = 0
    keeps_orders: bool = False
    late_gradients: int = 0
    workspace_bytes: int = 0


PLAIN = Habits()


def lifetimes(
    graph: OperatorGraph,
    written: frozenset[int],
    late: Mapping[int, int] | None = None,
    most: int = 0,
    copies: Mapping[tuple[int, int], bool] | None = None,
) -> Lifetimes:
    """Derives the order of operators, and when each result is last needed.

    Args:
      graph: the operator graph.
      written: values with a buffer of their own (`autopar.steps.fusion.Fusion`).
      late: products that run late (`Habits.late_gradients`), each with the last
        operator of its loop, or of the program.
      most: how many of them wait at once.
      copies: as in `autopar.steps.orders.Orders`. What an element-wise operator makes
        is made again for them, so what it reads lives until then.
    """
    readers: dict[int, list[int]] = {}
    for op in graph.operators:
        for v in set(op.inputs):
            if v is not None:
                readers.setdefault(v, []).append(op.index)
    time = _schedule(graph)
    reads = list(time)
    for index, until in _late(graph, late or {}, most).items():
        reads[index] = max(reads[index], until)
    maker = {v: op for op in graph.operators for v in op.outputs}
    made: dict[tuple[int, int], int] = {}
    for (value, reader), at_once in (copies or {}).items():
        op = maker[value]
        made[value, reader] = when = time[op.index if at_once else reader]
        if is_elementwise(op):
            reads[op.index] = max(reads[op.index], when)
    for op in reversed(graph.operators):
        if op.kind != "return" and written.isdisjoint(op.outputs):
            ends = [reads[r] for v in op.outputs for r in readers.get(v, [])]
            reads[op.index] = max([time[op.index], *ends])
    return Lifetimes(tuple(time), written, tuple(reads), made)


def until_barriers(
    graph: OperatorGraph, gradients: Mapping[int, int]
) -> dict[int, int]:
    """When products run at the latest that make gradients, with barriers between.

    Behind the barrier of a layer under ``jax.checkpoint`` its parameters are gathered
    again. These messages are what the products of the layer above can hide.

    Args:
      graph: the operator graph.
      gradients: the products, each with the last operator of its loop, or of the
        program.
    """
    barriers = [
        op.index
        for op in graph.operators
        if op.kind == "optimization_barrier" and op.role is Role.BACKWARD
    ]
    return {
        index: min((b for b in barriers if index < b < end), default=end)
        for index, end in gradients.items()
    }


def _late(
    graph: OperatorGraph, gradients: Mapping[int, int], most: int
) -> dict[int, int]:
    """When products run that make gradients: behind others of the backward pass.

    A scheduler that hides communication keeps them for the messages that come,
    because nothing else waits for them; what they read lives until then. A product in
    a loop stays in it.
    """
    backward = (op.index for op in graph.operators if op.role is Role.BACKWARD)
    last = max(backward, default=0)
    order = sorted(gradients)
    following = [*order[most:], *([last] * most)]
    return {
        index: min(last, gradients[index], after)
        for index, after in zip(order, following, strict=False)
    }


def _schedule(graph: OperatorGraph) -> list[int]:
    """Program order, but for updates, which run once what they read is there."""
    made: dict[int, int] = {}
    time: list[int] = []
    for op in graph.operators:
        when = op.index
        if op.role is Role.UPDATE and op.inputs:
            when = max((made.get(v, 0) for v in op.inputs if v is not None), default=0)
        time.append(when)
        made.update((v, when) for v in op.outputs)
    return time
