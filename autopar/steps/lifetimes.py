"""When values are made and last needed.

This part of the memory model does not depend on any layout.

The order in which XLA's CPU compiler runs a program: breadth first.

Its scheduler is a queue. An operator joins it when the last of its operands has run
(openxla/xla, ``BFScheduler`` in
``xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc``;
``xla_cpu_enable_concurrency_optimized_scheduler`` is on by default). So operators run
by their depth: the number of kernels on the longest way to them from an input. What is
made of inputs alone, such as gathered parameters, is made first of all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.steps.fusion import is_cloned, is_elementwise, spread
from autopar.steps.rounding import NOT_ROUNDED, NOT_WIDENED, Rounded, Widened
from autopar_passes.graph.operators import Operator, OperatorGraph, readers
from autopar_passes.graph.roles import Role

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


@dataclasses.dataclass(frozen=True, slots=True)
class Replacing:
    """Which readings an update must not overtake: sets of gradients, as bits.

    A step writes its new parameters in the place of the old ones. What still reads the
    old ones then would read the new. Where the program itself does not order the two,
    XLA's CPU compiler copies the old ones first (``CopyInsertion``). An update is
    behind a reading if a gradient that it waits for is made of what is read.

    Attributes:
      made_of: by operator, the gradients that are made of its results.
      waits_for: by input that is replaced, the gradients that its update waits for.
    """

    made_of: tuple[int, ...]
    waits_for: dict[int, int]


REPLACES_NONE = Replacing((), {})

# The last time at which a result is there before it is given up, and the first behind.
Gap = tuple[int, int]


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
      gaps: the times between which results are not there where memory is short.
      room: as in `Habits`.
      placed: as in `Habits`.
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
    replacing: Replacing = REPLACES_NONE
    gaps: Mapping[int, tuple[Gap, ...]] = dataclasses.field(default_factory=dict)
    room: tuple[float, float] = (0.0, 0.0)
    placed: bool = False
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
      late_gradients: the part of the operators that make gradients which has run
        naturally before the first of them does; the rest of the pass they share evenly.
      workspace_bytes: what a library takes for its matrix products to work in.
      into_products: whether element-wise results are made again in products, too, and
        written for a gather alone (`autopar.steps.fusion.looked_up`).
      late_until_barrier: whether these products run before the next barrier of a layer
        that is computed again, where they hide its gathers.
      on_chip_bytes: memory of the chip itself that holds buffers instead of the
        device's (`autopar.cost.live.on_chip`).
      tiled: whether arrays lie in tiles (`autopar.cost.local`).
      breadth_first: whether operators run as soon as they can
        (`autopar.steps.lifetimes`).
      joined_sums: how many sums of gradients one message carries, whatever their size
        (`autopar.cost.buffers`); 0: each is sent when it is there.
      widens: whether types of 16 bits are computed in 32 (`autopar.steps.rounding`).
      rounds: whether products of float32 read bfloat16 (`autopar.steps.rounding`).
      room: the part of a device's memory, and of what the inputs leave of that, beyond
        which results are given up for a while (`gaps`); 0: they never are.
      placed: whether what is lost between buffers counts
        (`autopar.cost.live.lost_bytes`).
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
    late_gradients: float = 0.0
    workspace_bytes: int = 0
    room: tuple[float, float] = (0.0, 0.0)
    placed: bool = False


PLAIN = Habits()
# With the 1.05 of the preset `cpu` it makes the 1.2 that was chosen by hand when whole
# steps were counted in the order of the program, too.
_NOT_EARLY = 1.2 / 1.05


def lifetimes(
    graph: OperatorGraph,
    written: frozenset[int],
    late: Mapping[int, int] | None = None,
    part: float = 0.0,
    copies: Mapping[tuple[int, int], bool] | None = None,
    times: Sequence[int] | None = None,
) -> Lifetimes:
    """Derives the order of operators, and when each result is last needed.

    Args:
      graph: the operator graph.
      written: values with a buffer of their own (`autopar.steps.fusion.Fusion`).
      late: operators that run late, each with the last operator of its loop, or of the
        program.
      part: as in `Habits.late_gradients`.
      copies: `autopar.steps.orders.copies_in_orders`. What an element-wise operator
        makes is made again for them, so what it reads lives until then.
      times: when each operator runs; None: in the order of the program, but for
        updates.
    """
    read_by: dict[int, list[int]] = {}
    for op in graph.operators:
        for v in set(op.inputs):
            if v is not None:
                read_by.setdefault(v, []).append(op.index)
    time = list(times) if times is not None else _schedule(graph)
    reads = list(time)
    for index, until in _late(graph, late or {}, part).items():
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
            ends = [reads[r] for v in op.outputs for r in read_by.get(v, [])]
            reads[op.index] = max([time[op.index], *ends])
    until = tuple(op.until for op in graph.operators)
    order = tuple(range(len(time)))
    return Lifetimes(tuple(time), written, tuple(reads), until, order, made)


def made_early(
    life: Lifetimes, graph: OperatorGraph, floating: frozenset[int]
) -> Lifetimes:
    """The lifetimes where operators run as soon as they can.

    Args:
      life: with the times of `autopar.steps.lifetimes.breadth_first`.
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


def gaps(
    graph: OperatorGraph, life: Lifetimes, prompt: Lifetimes, where: Sequence[int]
) -> dict[int, tuple[Gap, ...]]:
    """When results are given up where a program needs more memory than there is.

    XLA's scheduler for GPUs then keeps no product waiting, but in loops: there it does
    not see what lies outside. And results of the forward pass are made again for the
    backward pass: an instruction is cloned before its next reader (openxla/xla,
    ``xla/hlo/transforms/simplifiers/hlo_rematerialization.cc``). Calls of libraries,
    loops and kernels are not cloned: on GPUs products are such calls.

    Args:
      graph: the operator graph.
      life: when values are made and last needed.
      prompt: the same where no product waits.
      where: of each operator, the last operator of its computation.
    """
    read_by: dict[int, list[Operator]] = {}
    for op in graph.operators:
        for v in set(op.inputs):
            if v in life.written:
                read_by.setdefault(v, []).append(op)
    out: dict[int, tuple[Gap, ...]] = {}
    for op in graph.operators:
        for value in life.written.intersection(op.outputs):
            read = read_by.get(value, [])
            found: list[Gap] = []
            needed = max((prompt.needs(r) for r in read), default=-1)
            in_loop = where[op.index] < where[-1]
            if not in_loop and max((life.needs(r) for r in read), default=-1) > needed:
                found.append((needed, max(life.needs(r) for r in read) + 1))
            backward = [r for r in read if r.role is Role.BACKWARD]
            inside = all(where[r.index] == where[op.index] for r in read)
            if op.role is Role.FORWARD and backward and inside and is_cloned(op):
                before = [prompt.reads[r.index] for r in read if r not in backward]
                first = max([life.time[op.index], *before])
                last = min(life.time[r.index] for r in backward)
                if last > first + 1:
                    found.append((first, last))
            if found:
                out[value] = tuple(found)
    return out


def kept_times(start: int, end: int, gaps: Sequence[Gap]) -> list[tuple[int, int]]:
    """The times at which a result is there where memory is short: first and last ones.

    >>> kept_times(2, 20, [(9, 12), (14, 21)])
    [(2, 9), (12, 14)]
    """
    out: list[tuple[int, int]] = []
    for first, last in sorted(gaps):
        if start <= first and last <= end + 1:
            out.append((start, first))
            start = last
    return [*out, (start, end)] if start <= end else out


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
    graph: OperatorGraph, gradients: Mapping[int, int], part: float
) -> dict[int, int]:
    """When operators run that make gradients: behind others of the backward pass.

    Nothing but messages and updates waits for them, so a scheduler that fills a program
    from its end puts them there; what they read lives until then. In the order of
    the program the one in place i of n runs with that in place ``part n + (1 - part)
    i``. One in a loop stays in it.
    """
    backward = (op.index for op in graph.operators if op.role is Role.BACKWARD)
    last = max(backward, default=0)
    order = sorted(gradients)
    number = len(order)
    out: dict[int, int] = {}
    for place, index in enumerate(order):
        then = min(number - 1, math.ceil(part * number + (1 - part) * place))
        after = order[then] if part else index
        out[index] = min(last, gradients[index], after)
    return out


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


def replacing(graph: OperatorGraph) -> Replacing:
    """Finds the gradients that updates wait for, and what these are made of."""
    read = readers(graph.operators)
    bits: dict[int, int] = {}
    for op in graph.operators:
        for value in op.outputs:
            roles = {r.role for r, _ in read.get(value, []) if r.kind != "return"}
            if op.role is Role.BACKWARD and Role.UPDATE in roles:
                bits[value] = 1 << len(bits)
    behind = [0] * len(graph.operators)
    for op in reversed(graph.operators):
        for value in op.outputs:
            behind[op.index] |= bits.get(value, 0)
            for reader, _ in read.get(value, []):
                if reader.role is not Role.UPDATE:
                    behind[op.index] |= behind[reader.index]
    return Replacing(tuple(behind), _waits(graph, bits))


def _waits(graph: OperatorGraph, bits: dict[int, int]) -> dict[int, int]:
    """The gradients that the update of each replaced input waits for."""
    made = dict(bits)
    for op in graph.operators:
        if op.role is Role.UPDATE:
            needed = 0
            for value in op.inputs:
                needed |= made.get(value, 0) if value is not None else 0
            made.update((v, needed) for v in op.outputs)
    ends = [(i.value, graph.outputs[i.output]) for i in graph.inputs if i.output >= 0]
    return {
        old: made.get(new, 0) for old, new in ends if new is not None and new != old
    }
