"""Memory of an assignment on one device: what is live, and when.

The model follows what XLA does with a step:

* inputs are allocated throughout; carried outputs take the place of the inputs
  they replace (donation), beside spare copies (`autopar.steps.spares`);
* an element-wise result is fused into its readers: what it reads stays live
  until they run, and it has no buffer of its own; costly element-wise results
  with several readers, and results that a product, a reduction or a region
  reads, are written;
* the update of a parameter runs as soon as its gradient is there;
* a resharded form lives from its first reader to its last;
* what enters a loop lives until the loop ends.

XLA's GPU compiler has habits of its own (`Habits`, `habits_of`). It makes element-wise
results again rather than keep them. It writes what batched products make and read in
fixed orders of the dimensions (`autopar.steps.orders`). It runs the products that make
gradients behind others of the backward pass, where they hide messages; what these read
lives until then, also where a checkpoint was to save it. Its products have work space.

XLA's compiler for TPUs of one core fuses element-wise results into products, too. It
keeps short-lived buffers in the memory of the chip (`autopar.cost.on_chip`) and stores
arrays in tiles (`autopar.cost.tiles`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.cluster.specs import DeviceSpec
from autopar.cost.on_chip import on_chip, room_bytes
from autopar.cost.tiles import tiled_bytes
from autopar.layouts.assignment import Assignment, Way
from autopar.layouts.layout import Layout, shards
from autopar.steps.lifetimes import PLAIN, Habits, Lifetimes
from autopar_passes.graph.operators import GraphInput, Operator
from autopar_passes.graph.roles import Role

# Convolutions run on operands copied into the order that their kernels want.
_COPIES_OPERANDS = frozenset({"conv_general_dilated"})


# Read from the schedules and buffer assignments of XLA's compilers (jax 0.10.2). With
# 6 and 8 layers (36 to 56 products) nearly all wait, with 16 layers about a third. The
# bound of 48 stands between; docs/results.md has the figures.
_GPU = Habits(
    makes_again=True,
    keeps_orders=True,
    late_gradients=48,
    # openxla/xla, ``xla/service/gpu/transforms/gemm_rewriter.cc``: from Hopper on.
    workspace_bytes=2**25,
)
_HABITS = {"gpu": _GPU}
# Read from the scheduled programs of v5e (libtpu 0.0.42). The scheduler hides messages,
# too, and the same bound is assumed.
_ON_CHIP = Habits(
    makes_again=True,
    into_products=True,
    late_gradients=48,
    late_until_barrier=True,
    tiled=True,
)


def habits_of(device: DeviceSpec) -> Habits:
    """What the compiler of a device does with memory.

    TPUs of two cores write more than those of one (docs/results.md), and no rule for
    them is known. They say nothing of their vector memory, and so have no habits.
    """
    if device.on_chip_bytes:
        room = room_bytes(device.on_chip_bytes)
        return dataclasses.replace(_ON_CHIP, on_chip_bytes=room)
    found = _HABITS.get(device.kind, PLAIN)
    if device.workspace_bytes is None:
        return found
    return dataclasses.replace(found, workspace_bytes=device.workspace_bytes)


BUFFER_KINDS: tuple[str, ...] = (
    "activations",  # of the forward pass, for the backward pass
    "gradients",
    "gathered copies",  # arrays in another layout than their own
    "collective buffers",  # what a collective sends or receives
    "results",  # that take no input's place
    "temporaries",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of one device that are live in ``[start, end]`` (operator times).

    Attributes:
      value: the array.
      nbytes: bytes on one device.
      start: the first time at which it is live.
      end: the last.
      kind: what it is for, one of `BUFFER_KINDS`.
    """

    value: int
    nbytes: float
    start: int
    end: int
    kind: str = "temporaries"


def buffers(
    assignment: Assignment, life: Lifetimes, only: Sequence[int] | None = None
) -> list[Buffer]:
    """Lists the buffers of one step, without those of the inputs.

    Args:
      assignment: strategies as layouts.
      life: when values are made and last needed.
      only: the operators that count, as makers and as readers; None: all of them.
    """
    graph = assignment.graph
    among = graph.operators if only is None else [graph.operators[k] for k in only]
    ends: dict[int, int] = {}
    forms: dict[tuple[object, ...], list[float]] = {}
    out: list[Buffer] = []
    read_by, ways = assignment.analysis.readings.of, assignment.ways
    for op in among:
        until = max(life.reads[op.index], op.until)
        start = life.time[op.index]
        for reading in read_by[op.index]:
            made = life.copies.get((reading.value, op.index))
            if made is not None:
                out.append(_copy(assignment, life, reading.value, made, until))
                continue
            for source, way in zip(reading.sources, ways[reading.group], strict=True):
                _read(assignment, life, source, way, (start, until), ends, forms)
            if op.kind in _COPIES_OPERANDS:
                layout = assignment.layout(op, op.rule.operands[reading.slot])
                nbytes = local_bytes(
                    assignment, reading.value, layout, tiled=life.tiled
                )
                out.append(Buffer(reading.value, nbytes, start, start))
    for key, (nbytes, start, end) in forms.items():
        value = int(str(key[0]))
        out.append(Buffer(value, nbytes, int(start), int(end), "gathered copies"))
        # The collective's own result, before it is copied into place.
        out.append(Buffer(value, nbytes, int(start), int(start), "collective buffers"))
    out.extend(_homes(assignment, life, ends, among))
    return out


def local_bytes(
    assignment: Assignment, value: int, layout: Layout, *, tiled: bool
) -> float:
    """Bytes of an array's part on one device, in the layout given.

    Args:
      assignment: of the program.
      value: the array.
      layout: of it.
      tiled: whether arrays lie in tiles. What hand-written kernels read and write is
        row-major then (the layouts of ``jax/_src/tpu_custom_call.py``, jax 0.10.2).
    """
    known, sizes = assignment.graph.values[value], assignment.sizes
    if not tiled:
        return known.nbytes / shards(layout, sizes)
    item_bytes = known.nbytes / max(1, math.prod(known.shape))
    parts = (math.prod(sizes[a] for a in axes) for axes in layout)
    shape = [-(-n // part) for n, part in zip(known.shape, parts, strict=True)]
    row_major = value in assignment.analysis.in_kernels
    return tiled_bytes(shape, item_bytes, row_major=row_major)


def _read(
    assignment: Assignment,
    life: Lifetimes,
    source: int,
    way: Way,
    span: tuple[int, int],
    ends: dict[int, int],
    forms: dict[tuple[object, ...], list[float]],
) -> None:
    """Notes that an operator needs a value from a time on until another."""
    steps, fresh = way
    start, until = span
    ends[source] = max(ends.get(source, 0), start if steps else until)
    if not steps:
        return
    key = (source, fresh, *(s.layout for s in steps))
    known = forms.get(key)
    if known is None:
        nbytes = local_bytes(assignment, source, steps[-1].layout, tiled=life.tiled)
        forms[key] = [nbytes, start, until]
    else:
        known[1], known[2] = min(known[1], start), max(known[2], until)


def _homes(
    assignment: Assignment,
    life: Lifetimes,
    ends: dict[int, int],
    among: Sequence[Operator],
) -> Iterable[Buffer]:
    """The buffers of results, before and after their reduction."""
    graph = assignment.graph
    replaced = {graph.outputs[i.output] for i in graph.inputs if i.output >= 0}
    last = len(graph.operators) - 1
    kept = {v for v in graph.outputs if v is not None}
    for op in among:
        for slot, value in enumerate(op.outputs):
            if value not in life.written or value in replaced:
                continue
            start = life.time[op.index]
            end = last if value in kept else max(start, ends.get(value, start))
            end = max(end, held_until(op))
            home = assignment.home_layout(value)
            if value in graph.accumulated:
                yield _accumulator(assignment, life, value, end)
                end = start
            kind = "results" if value in kept else _kind(assignment, op, end)
            nbytes = local_bytes(assignment, value, home, tiled=life.tiled)
            yield Buffer(value, nbytes, start, end, kind)
            if op.class_index in assignment.contraction.node_of:
                own = assignment.layout(op, op.rule.results[slot])
                split = shards(own, assignment.sizes)
                same = split == shards(home, assignment.sizes)
                if not same or assignment.partial(op):
                    nbytes = local_bytes(assignment, value, own, tiled=life.tiled)
                    yield Buffer(value, nbytes, start, start, "collective buffers")


def _copy(
    assignment: Assignment, life: Lifetimes, value: int, start: int, end: int
) -> Buffer:
    """A value in another order of its dimensions, made for the operator that reads it.

    It is made of what the value is made of, in the value's layout.
    """
    layout = assignment.home_layout(value)
    return Buffer(
        value, local_bytes(assignment, value, layout, tiled=life.tiled), start, end
    )


def _accumulator(
    assignment: Assignment, life: Lifetimes, value: int, end: int
) -> Buffer:
    """What the microbatches of a step add to, from the first of them on."""
    held = assignment.stacked(value)
    layout = assignment.home_layout(value) if held is None else held[1]
    nbytes = local_bytes(assignment, value, layout, tiled=life.tiled)
    return Buffer(value, nbytes, 0, end, "gradients")


def _kind(assignment: Assignment, op: Operator, end: int) -> str:
    """What the result of an operator is for that lives until some time."""
    if op.role is Role.BACKWARD and op.class_index in assignment.independent.summing:
        return "gradients"
    if op.role is Role.FORWARD and assignment.graph.operators[end].role != op.role:
        return "activations"
    return "temporaries"


def held_until(op: Operator) -> int:
    """The end of the region whose carry or stacked result an operator makes."""
    return -1 if op.kind == "slice_step" else op.until


def held_bytes(
    assignment: Assignment, given: GraphInput, *, tiled: bool = False
) -> float:
    """Bytes of an input on one device, with the spare copies of what is carried."""
    layout = assignment.home_layout(given.value)
    split = shards(layout, assignment.sizes)
    copies = 1.0
    if given.output >= 0:
        copies = float(assignment.analysis.spares.copies(split))
    return copies * local_bytes(assignment, given.value, layout, tiled=tiled)


def input_bytes(assignment: Assignment, *, tiled: bool = False) -> float:
    """Bytes of the inputs on one device."""
    return sum(held_bytes(assignment, i, tiled=tiled) for i in assignment.graph.inputs)


def off_chip(found: Sequence[Buffer], life: Lifetimes) -> list[Buffer]:
    """The buffers in the memory of the device; the chip holds the others.

    Results of the step are in the device's memory when it ends.
    """
    inside = [b for b in found if b.kind != "results"]
    held = on_chip(
        np.array([b.start for b in inside], dtype=int),
        np.array([b.end for b in inside], dtype=int),
        np.array([b.nbytes for b in inside]),
        life.on_chip_bytes,
    )
    on = {id(b) for b, chip in zip(inside, held, strict=True) if chip}
    return [b for b in found if id(b) not in on]


def usage_by_time(found: Sequence[Buffer], length: int) -> np.ndarray:
    """Sums buffers: bytes live at each operator time."""
    change = np.zeros(length + 2)
    starts = np.array([b.start for b in found], dtype=int)
    ends = np.array([b.end + 1 for b in found], dtype=int)
    sizes = np.array([b.nbytes for b in found])
    np.add.at(change, starts, sizes)
    np.add.at(change, ends, -sizes)
    return np.cumsum(change)[:length]


def memory_at_peak(
    assignment: Assignment, life: Lifetimes, overhead: float
) -> dict[str, float]:
    """Bytes of one device by kind, at the time when most are live.

    The inputs are left out. With the inputs the sum is `peak_memory_bytes`; the
    overhead stands under ``compiler's overhead``, what products take to work in under
    ``products' work space``.
    """
    found = off_chip(buffers(assignment, life), life)
    usage = usage_by_time(found, len(assignment.graph.operators))
    if not len(usage):
        return {}
    peak = int(usage.argmax())
    out = dict.fromkeys(BUFFER_KINDS, 0.0)
    for buffer in found:
        if buffer.start <= peak <= buffer.end:
            out[buffer.kind] += buffer.nbytes
    out["compiler's overhead"] = (overhead - 1.0) * float(usage[peak])
    out["products' work space"] = float(life.workspace_bytes)
    return {kind: nbytes for kind, nbytes in out.items() if nbytes}


def peak_memory_bytes(
    assignment: Assignment, life: Lifetimes, overhead: float
) -> float:
    """Most bytes live at once on one device.

    Args:
      assignment: strategies as layouts.
      life: when values are made and last needed.
      overhead: factor on the peak of the buffers (`Calibration.memory_overhead`).
    """
    found = off_chip(buffers(assignment, life), life)
    usage = usage_by_time(found, len(assignment.graph.operators))
    live = overhead * float(usage.max(initial=0.0))
    state = input_bytes(assignment, tiled=life.tiled)
    return state + live + life.workspace_bytes
