"""When values are made and last needed.

This part of the memory model does not depend on any layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.steps.breadth import region_ends
from autopar.steps.fusion import is_elementwise, spread
from autopar.steps.replacing import NONE, Replacing, replacing
from autopar.steps.rounded import NOT_ROUNDED, Rounded
from autopar.steps.widening import NOT_WIDENED, Widened
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetimes:
    """The times at which values are made and read, the same for all assignments.

    Attributes:
      time: when each operator runs; an update runs once its gradient is there.
      written: values with a buffer of their own.
      reads: per operator, when its results are last needed (its own time, or
        that of the readers it is fused into).
      until: for a boundary operator, when the last operator of its region has run.
      order: the operator that runs at each time.
      copies: values that an operator reads in another order of their dimensions than
        others do, with that operator (`autopar.steps.orders`): when they are made.
      workspace_bytes: what matrix products take to work in, if there are any.
      on_chip_bytes: as in `Habits`.
      tiled: as in `Habits`.
      joined_sums: as in `Habits`.
      widens: as in `Habits`.
      widened: values that are widened in memory.
      rounded: values of float32 that are in memory in bfloat16.
      early: when values are made, if all that they suffice for is made at once: other
        layouts and orders of them. Empty where that is made for its first reader.
      zeros: values that begin as zeros, which are there from the start.
      spread: arrays that are written at the size of a larger one
        (`autopar.steps.fusion.spread`).
      factor: on the peak of the buffers, beside that of the device.
      replacing: the gradients that updates wait for, where parameters are copied
        that may be read later.
    """

    time: tuple[int, ...]
    written: frozenset[int]
    reads: tuple[int, ...]
    until: tuple[int, ...]
    order: tuple[int, ...]
    copies: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    workspace_bytes: int = 0
    on_chip_bytes: int = 0
    tiled: bool = False
    joined_sums: int = 0
    widens: bool = False
    widened: Widened = NOT_WIDENED
    rounded: Rounded = NOT_ROUNDED
    early: Mapping[int, int] = dataclasses.field(default_factory=dict)
    zeros: frozenset[int] = frozenset()
    spread: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    replacing: Replacing = NONE
    factor: float = 1.0

    def starts(self, op: Operator, value: int) -> int:
        """When there is first a buffer for a result of an operator."""
        return 0 if value in self.zeros else self.time[op.index]

    def arrives(self, value: int, reader: int) -> int:
        """When a value is brought into the layout in which an operator reads it."""
        when = self.time[reader]
        return min(self.early.get(value, when), when)

    def needs(self, op: Operator) -> int:
        """Until when an operator needs what it reads.

        A loop holds what it reads to its end. What it stacks is copied, at once where
        operators run as soon as they can.
        """
        own = self.reads[op.index]
        copied = bool(self.early) and op.kind == "stack_step"
        return own if copied else max(own, self.until[op.index])


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
      breadth_first: whether operators run as soon as they can
        (`autopar.steps.breadth`).
      joined_sums: how many sums of gradients one message carries, whatever their size
        (`autopar.cost.joined_sums`); 0: each is sent when it is there.
      widens: whether types of 16 bits are computed in 32 (`autopar.steps.widening`).
      rounds: whether products of float32 read bfloat16 (`autopar.steps.rounding`).
    """

    breadth_first: bool = False
    joined_sums: int = 0
    widens: bool = False
    rounds: bool = False
    makes_again: bool = False
    into_products: bool = False
    late_until_barrier: bool = False
    tiled: bool = False
    on_chip_bytes: int = 0
    keeps_orders: bool = False
    late_gradients: int = 0
    workspace_bytes: int = 0


PLAIN = Habits()
# With the 1.05 of the preset `cpu` it makes the 1.2 that was chosen by hand when whole
# steps were counted in the order of the program, too.
_NOT_EARLY = 1.2 / 1.05


def lifetimes(
    graph: OperatorGraph,
    written: frozenset[int],
    late: Mapping[int, int] | None = None,
    most: int = 0,
    copies: Mapping[tuple[int, int], bool] | None = None,
    times: Sequence[int] | None = None,
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
      times: when each operator runs; None: in the order of the program, but for
        updates.
    """
    readers: dict[int, list[int]] = {}
    for op in graph.operators:
        for v in set(op.inputs):
            if v is not None:
                readers.setdefault(v, []).append(op.index)
    time = list(times) if times is not None else _schedule(graph)
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
    until = tuple(op.until for op in graph.operators)
    order = tuple(range(len(time)))
    return Lifetimes(tuple(time), written, tuple(reads), until, order, made)


def made_early(
    life: Lifetimes, graph: OperatorGraph, floating: frozenset[int]
) -> Lifetimes:
    """The lifetimes where operators run as soon as they can.

    Args:
      life: with the times of `autopar.steps.breadth.breadth_first`.
      graph: the operator graph.
      floating: values that each reader makes anew.
    """
    time = life.time
    return dataclasses.replace(
        life,
        until=tuple(region_ends(graph, time)),
        order=tuple(sorted(range(len(time)), key=time.__getitem__)),
        early={v: time[op.index] for op in graph.operators for v in op.outputs},
        zeros=_zeros(graph),
        spread=spread(graph, floating),
        replacing=replacing(graph),
    )


def in_program_order(life: Lifetimes) -> Lifetimes:
    """The lifetimes of programs that each run as soon as they can, and wait for others.

    What one of them makes early is there while it runs. That is not followed: a factor
    stands for it.

    Args:
      life: in the order of the step.
    """
    return dataclasses.replace(life, factor=_NOT_EARLY)


def _zeros(graph: OperatorGraph) -> frozenset[int]:
    """Values that begin as zeros: what loops stack, and what is scattered into zeros.

    Zeros need no input, so they are written first of all.
    """
    of_nothing: set[int] = set()
    out: set[int] = set()
    for op in graph.operators:
        arrays = {v for v in op.inputs if v is not None}
        into_zeros = op.kind.startswith("scatter") and op.inputs[0] in of_nothing
        if op.kind == "stack_step" or into_zeros:
            out.update(op.outputs)
        elif op.kind != "input" and arrays <= of_nothing:
            of_nothing.update(op.outputs)
    return frozenset(out)


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
