"""The times at which values are computed and last read.

The results of this module do not depend on the layout of any array.

By default, XLA's CPU compiler runs a program in breadth-first order. Its scheduler
has a queue, which an operator joins when its last operand is complete (openxla/xla,
``BFScheduler`` in ``xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc``;
``xla_cpu_enable_concurrency_optimized_scheduler`` is on by default). Therefore
operators run in the order of their depth. The depth of an operator is the number of
kernels on the longest path from an input to the operator. Operators that read only
inputs, such as gathers of parameters, run first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.steps.fusion import is_cloned, is_elementwise, spread
from autopar.steps.ragged import RaggedCopy
from autopar.steps.rounding import NOT_ROUNDED, NOT_WIDENED, Rounded, Widened
from autopar_passes.graph.operators import (
    TO_DEVICES,
    TO_HOST,
    Operator,
    OperatorGraph,
    producers,
    users,
)
from autopar_passes.graph.roles import Role

# A barrier computes nothing. Each of its results waits for all of its operands.
_BARRIER = "optimization_barrier"


def breadth_first(graph: OperatorGraph, written: frozenset[int]) -> list[int]:
    """Returns the time at which each operator runs: its position in the new order.

    A loop counts as one kernel. The operators in the loop also run breadth first.

    Args:
      graph: the operator graph.
      written: values with a buffer of their own. An element-wise operator that writes
        none of them runs within the kernels of its readers, so it does not increase
        their depth.
    """
    queue = _Queue(written, _barrier_inputs(graph))
    times = [0] * len(graph.operators)
    for time, op in enumerate(queue.order(graph.operators)):
        times[op.index] = time
    return times


def region_ends(graph: OperatorGraph, times: Sequence[int]) -> list[int]:
    """Returns the time at which the region of each boundary operator ends.

    A region is the operators of a loop's body. Boundary operators pass values into or
    out of a region. The entry of any other operator is -1.

    Args:
      graph: the operator graph.
      times: the time at which each operator runs. The operators of a region run one
        after the other, with no others between them.
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
    """The breadth-first scheduler.

    Attributes:
      written: values that have buffers of their own.
      barriers: equation of a barrier -> the values that the barrier waits for.
    """

    written: frozenset[int]
    barriers: dict[int, list[int]]

    def order(self, operators: Sequence[Operator]) -> Iterator[Operator]:
        """Yields the operators of a computation in the order in which they run."""
        blocks = list(_blocks(operators))
        depths = self.depths(blocks)
        # Blocks (see `_blocks`) of equal depth run in the order of the program.
        for number in sorted(range(len(blocks)), key=depths.__getitem__):
            block = blocks[number]
            if len(block) == 1:
                yield block[0]
            else:
                yield from self.order(block)

    def depths(self, blocks: Sequence[Sequence[Operator]]) -> list[int]:
        """The depth of each block: the kernels on the longest path up to its end."""
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
        """Whether a block is one operator that runs in the kernels of its readers."""
        if len(block) > 1:
            return False
        op = block[0]
        within = is_elementwise(op) and self.written.isdisjoint(op.outputs)
        return within or op.kind == "input"


def _blocks(operators: Sequence[Operator]) -> Iterator[Sequence[Operator]]:
    """Yields blocks: single operators, and whole loops or branches."""
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
    """Maps each barrier's equation to its operands (one operator for each)."""
    out: dict[int, list[int]] = {}
    for op in graph.operators:
        if op.kind == _BARRIER:
            out.setdefault(op.equation, []).extend(
                v for v in op.inputs if v is not None
            )
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class Replacing:
    """Which operators must read old parameters before an update overwrites them.

    The gradients of the step are numbered. A set of gradients is an integer, in which
    each bit stands for one gradient.

    A step writes its new parameters into the buffers of the old parameters. An operator
    that runs after the update would find the new parameters there. XLA's CPU compiler
    therefore copies the old parameters first (``CopyInsertion``), unless the program
    makes sure that the operator runs before the update. The program does so if the
    update waits for a gradient that depends on the operator's result.

    Attributes:
      made_of: for each operator, the gradients that are computed from its results.
      waits_for: input that the step updates -> the gradients that the update waits for.
    """

    made_of: tuple[int, ...]
    waits_for: dict[int, int]


REPLACES_NONE = Replacing((), {})

# A gap: a result is not in memory between two times. The pair has the last time before
# the gap, and the first time after it.
Gap = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetimes:
    """The times at which values are computed and read, equal for all shardings.

    Attributes:
      time: the time at which each operator runs; an update runs when its gradient is
        ready.
      written: values that have buffers of their own.
      reads: for each operator, the last time at which its operands are read: the time
        at which the operator itself runs, or the last reader that it is fused into.
      until: for an operator that passes values into or out of a region, the time at
        which the region's last operator runs.
      order: for each time, the operator that runs.
      copies: a value and an operator that reads the value in another order of
        dimensions than other readers do (`autopar.steps.orders`) -> the time at which
        the copy in that order is written.
      workspace_bytes: bytes of the workspace of the matrix products; 0 if the program
        has no product.
      on_chip_bytes: see `Habits`.
      tiled: see `Habits`.
      joined_sums: see `Habits`.
      widens: see `Habits`.
      widened: 16-bit values that are in memory in 32 bits.
      rounded: float32 values that are in memory in bfloat16.
      early: value -> the time at which it is computed. It is set if the compiler runs
        every operator as soon as its operands are ready, also the operators that bring
        a value into another layout or order of dimensions. It is empty if the compiler
        runs such an operator just before the first reader.
      zeros: values that begin as zeros; their buffers are in memory from the start.
      spread: arrays that are written in the larger shape of a result
        (`autopar.steps.fusion.spread`).
      gaps: value -> the times between which the value is not in memory, if the program
        needs more memory than the device has.
      room: see `Habits`.
      placed: see `Habits`.
      moves_sums: see `Habits`.
      factor: factor on the predicted peak memory of the buffers, in addition to the
        correction factor of the device.
      replacing: the gradients that updates wait for, if the compiler copies parameters
        that operators may read after the update.
      ragged: the copies of operands of ragged products, by operator and operand.
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
    moves_sums: bool = False
    factor: float = 1.0
    ragged: Mapping[tuple[int, int], Sequence[RaggedCopy]] = dataclasses.field(
        default_factory=dict
    )

    def starts(self, op: Operator, value: int) -> int:
        """Returns the first time at which a buffer holds a result of an operator."""
        return 0 if value in self.zeros else self.time[op.index]

    def arrives(self, value: int, reader: int) -> int:
        """The time at which a value is resharded for an operator that reads it."""
        when = self.time[reader]
        return min(self.early.get(value, when), when)

    def needs(self, op: Operator) -> int:
        """Returns the last time at which an operator needs its operands.

        A loop needs its operands until its end. Values that a loop stacks are copied
        out of it: a compiler that runs operators as soon as it can makes this copy at
        once.
        """
        own = self.reads[op.index]
        copied = bool(self.early) and op.kind == "stack_step"
        return own if copied else max(own, self.until[op.index])


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
    """How one compiler uses memory, where compilers differ.

    Attributes:
      makes_again: whether the compiler recomputes an element-wise result in each reader
        if that moves fewer bytes (`autopar.steps.fusion.made_again`).
      keeps_orders: whether batched products fix the order of dimensions in memory
        (`autopar.steps.orders`).
      late_gradients: a fraction p. Of the operators that compute gradients, the first
        runs at the time at which, in program order, the fraction p of them would have
        run. All of them are spread evenly over the rest of the pass (`_late`).
      workspace_bytes: bytes of the workspace that a library reserves for matrix
        products.
      into_products: whether the compiler also recomputes element-wise results within
        matrix products. It then writes such a result to memory only for a gather
        (`autopar.steps.fusion.looked_up`).
      late_until_barrier: whether products that compute gradients run before the next
        barrier of a rematerialised layer, so that they overlap with the gathers of that
        layer.
      on_chip_bytes: on-chip memory that holds buffers in place of the device's memory
        (`autopar.cost.live.on_chip`).
      tiled: whether arrays are stored in tiles (`autopar.cost.local`).
      breadth_first: whether operators run in breadth-first order
        (`autopar.steps.lifetimes`).
      joined_sums: the number of sums of gradients over devices that share one message,
        whatever their size (`autopar.cost.buffers`). With 0, each sum has a separate
        message, which is sent when the gradient is ready.
      widens: whether the compiler computes 16-bit types in 32 bits
        (`autopar.steps.rounding`).
      rounds: whether products of float32 arrays read their operands in bfloat16
        (`autopar.steps.rounding`).
      room: two fractions. The first is the fraction of the device's memory that the
        compiler may use. The second applies to this usable memory minus the inputs: if
        the buffers besides the inputs exceed this part of it, the compiler frees
        results for some time (`gaps`). With a second fraction of 0, it never does.
      placed: whether the memory model counts unused memory between buffers
        (`autopar.cost.live.lost_bytes`).
      moves_sums: whether the compiler moves sums that a loop's body writes as
        collectives into the next iteration (`autopar.cost.combining.is_moved`). Their
        operands are then in memory during the whole loop.
      masks_rows: whether the compiler masks the rows of ragged products
        (`autopar.steps.ragged`).
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
    moves_sums: bool = False
    masks_rows: bool = False


PLAIN = Habits()
# The device preset `cpu` multiplies predicted memory by 1.05. Its product with this
# factor is 1.2, a value that was chosen when whole steps were modelled in program
# order.
_NOT_EARLY = 1.2 / 1.05


def lifetimes(
    graph: OperatorGraph,
    written: frozenset[int],
    late: Mapping[int, int] | None = None,
    part: float = 0.0,
    copies: Mapping[tuple[int, int], bool] | None = None,
    times: Sequence[int] | None = None,
) -> Lifetimes:
    """Derives the order of operators and the last time at which each value is read.

    Args:
      graph: the operator graph.
      written: values with a buffer of their own (`autopar.steps.fusion.Fusion`).
      late: operator that runs late -> the last operator of its loop, or of the program
        if it is in no loop.
      part: the fraction `Habits.late_gradients`.
      copies: the result of `autopar.steps.orders.copies_in_orders`. An element-wise
        result is recomputed for each copy, so the operands of the operator stay in
        memory until then.
      times: the time at which each operator runs. If it is None, operators run in
        program order, except updates.
    """
    read_by = users(graph.operators)
    time = list(times) if times is not None else _schedule(graph)
    reads = list(time)
    for index, until in _late(graph, late or {}, part).items():
        reads[index] = max(reads[index], until)
    maker = producers(graph.operators)
    made: dict[tuple[int, int], int] = {}
    for (value, reader), at_once in (copies or {}).items():
        op = maker[value]
        made[value, reader] = when = time[op.index if at_once else reader]
        if is_elementwise(op):
            reads[op.index] = max(reads[op.index], when)
    for op in reversed(graph.operators):
        if op.kind != "return" and written.isdisjoint(op.outputs):
            ends = [reads[r.index] for v in op.outputs for r in read_by.get(v, [])]
            reads[op.index] = max([time[op.index], *ends])
    until = tuple(op.until for op in graph.operators)
    order = tuple(range(len(time)))
    return Lifetimes(tuple(time), written, tuple(reads), until, order, made)


def made_early(
    life: Lifetimes, graph: OperatorGraph, floating: frozenset[int]
) -> Lifetimes:
    """Returns the lifetimes of a program whose operators run breadth first.

    Args:
      life: lifetimes with the times of `autopar.steps.lifetimes.breadth_first`.
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).
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
    """Returns the lifetimes of a stage that consists of several programs.

    Each program runs its operators as soon as it can, but waits for other programs.
    Results that a program computes early stay in memory while the program runs. Their
    lifetimes are not modelled; instead, the peak is multiplied by a factor.

    Args:
      life: lifetimes in program order.
    """
    return dataclasses.replace(life, factor=_NOT_EARLY)


def gaps(
    graph: OperatorGraph, life: Lifetimes, prompt: Lifetimes, where: Sequence[int]
) -> dict[int, tuple[Gap, ...]]:
    """Finds the times at which results are not in memory if memory is short.

    If a program needs more memory than the device has, XLA's scheduler for GPUs does
    not delay products that are outside loops. Within a loop it still delays products,
    because it does not see the memory use outside the loop. The compiler also
    rematerialises results of the forward pass for the backward pass: it clones an
    instruction before the next reader (openxla/xla,
    ``xla/hlo/transforms/simplifiers/hlo_rematerialization.cc``). The compiler does not
    clone calls of libraries, loops and kernels. On GPUs, products are calls of
    libraries.

    Args:
      graph: the operator graph.
      life: the times at which values are computed and last read.
      prompt: the times at which values are computed and last read if no product is
        delayed.
      where: for each operator, the last operator of its computation.
    """
    read_by = users(graph.operators)
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
    """Returns the first and last times of the intervals in which a result is in memory.

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
    """Finds values that begin as zeros: stacks of loops, and scatters into zeros.

    An array of zeros needs no input, so it is written at the start of the program.
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
    """Returns the latest time at which each product that computes a gradient runs.

    The parameters of a layer under ``jax.checkpoint`` are gathered again after the
    barrier of that layer. The products of the layer above can overlap with these
    gathers, so they run before the next barrier.

    Args:
      graph: the operator graph.
      gradients: product -> the last operator of its loop, or of the program if it is in
        no loop.
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
    """Returns the times at which delayed operators that compute gradients run.

    Only messages and updates wait for gradients. A scheduler that fills a program from
    its end therefore puts the operators that compute gradients late in the backward
    pass, and their operands stay in memory until then. Suppose that there are n of
    these operators. The operator with number i runs at the time at which the one with
    number ``part * n + (1 - part) * i`` would run in program order. An operator in a
    loop stays in the loop.
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
    """Program order, except that an update runs as soon as its operands are ready.

    A copy of state from host memory to the devices, and what is computed from it, runs
    just before its first reader. Behind microbatches all gradients are ready at once.
    Arrays whose state is in host memory are then updated in turn (`_in_turn`).
    """
    made: dict[int, int] = {}
    time: list[int] = []
    copied = set[int]()
    for op in graph.operators:
        when = op.index
        if op.role is Role.UPDATE and op.inputs:
            when = max((made.get(v, 0) for v in op.inputs if v is not None), default=0)
            if op.kind == TO_DEVICES or not copied.isdisjoint(op.inputs):
                copied.update(op.outputs)
        time.append(when)
        made.update((v, when) for v in op.outputs)
    if copied and graph.accumulated:
        for place, op in enumerate(turns := _in_turn(graph), len(time) - len(turns)):
            time[op.index] = place
    read_by = users(graph.operators) if copied else {}
    for op in reversed(graph.operators):
        if not copied.isdisjoint(op.outputs):
            readers = [time[r.index] for v in op.outputs for r in read_by.get(v, ())]
            time[op.index] = max(time[op.index], min(readers, default=0))
    return time


def _in_turn(graph: OperatorGraph) -> list[Operator]:
    """The operators of the update, those of one array after those of another one.

    An optimizer updates the first moments of all arrays, then all second moments, and
    so on. XLA's scheduler for GPUs prefers operators that free memory, so it updates
    one array after the other.
    """
    tail = [op for op in graph.operators if op.role is Role.UPDATE]
    maker = producers(tail)
    kept = {op.inputs[0]: op for op in tail if op.kind == TO_HOST}
    # The results on the host that an operator's results are computed from.
    needs: dict[int, frozenset[int]] = {}
    for op in tail:
        given = (needs.get(v, ()) for v in op.inputs if v is not None)
        found = frozenset[int]().union(*given)
        needs |= {v: found | {v} if v in kept else found for v in op.outputs}
    order: dict[int, Operator] = {}
    for last in sorted(tail, key=lambda op: -max(len(needs[v]) for v in op.outputs)):
        left = [last]
        while left:
            top = left[-1]
            before = [maker[v] for v in top.inputs if v in maker]
            if missing := [op for op in before if op.index not in order]:
                left += reversed(missing)
                continue
            left.pop()
            order[top.index] = top
            left += [kept[v] for v in top.outputs if v in kept]
    return list(order.values())


def replacing(graph: OperatorGraph) -> Replacing:
    """Finds the gradients that updates wait for, and which operators they depend on."""
    read = users(graph.operators)
    bits: dict[int, int] = {}
    for op in graph.operators:
        for value in op.outputs:
            roles = {r.role for r in read.get(value, []) if r.kind != "return"}
            if op.role is Role.BACKWARD and Role.UPDATE in roles:
                bits[value] = 1 << len(bits)
    behind = [0] * len(graph.operators)
    for op in reversed(graph.operators):
        for value in op.outputs:
            behind[op.index] |= bits.get(value, 0)
            for reader in read.get(value, []):
                if reader.role is not Role.UPDATE:
                    behind[op.index] |= behind[reader.index]
    return Replacing(tuple(behind), _waits(graph, bits))


def _waits(graph: OperatorGraph, bits: dict[int, int]) -> dict[int, int]:
    """Input that the step updates -> the gradients that its update waits for."""
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
