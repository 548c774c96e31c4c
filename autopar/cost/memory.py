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

XLA's CPU compiler runs operators as soon as it can (`autopar.steps.breadth`), sends
sums of gradients together (`autopar.cost.joined_sums`), copies parameters that their
updates might overwrite too early (`autopar.steps.replacing`) and computes types of 16
bits in 32 (`autopar.steps.widening`).

XLA's compiler for TPUs of one core fuses element-wise results into products, too. It
keeps short-lived buffers in the memory of the chip (`autopar.cost.on_chip`) and stores
arrays in tiles (`autopar.cost.tiles`). What products of float32 read lies in bfloat16
on all TPUs (`autopar.steps.rounding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.cluster.specs import DeviceSpec
from autopar.cost.buffers import buffers
from autopar.cost.local import BUFFER_KINDS, Buffer, local_bytes
from autopar.cost.on_chip import on_chip, room_bytes
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards
from autopar.steps.lifetimes import PLAIN, Habits, Lifetimes
from autopar_passes.graph.operators import GraphInput

# Read from the schedules and buffer assignments of XLA's compilers (jax 0.10.2). With
# 6 and 8 layers (36 to 56 products) nearly all wait, with 16 layers about a third. The
# bound of 48 stands between; docs/record has the figures.
_GPU = Habits(
    makes_again=True,
    keeps_orders=True,
    late_gradients=48,
    # openxla/xla, ``xla/service/gpu/transforms/gemm_rewriter.cc``: from Hopper on.
    workspace_bytes=2**25,
)
# Read from optimised programs and buffer assignments (jaxlib 0.10.2).
_CPU = Habits(breadth_first=True, widens=True)
_HABITS = {"gpu": _GPU, "cpu": _CPU}
# Read from the scheduled programs of v5e (libtpu 0.0.42). The scheduler hides messages,
# too, and the same bound is assumed.
_ON_CHIP = Habits(
    makes_again=True,
    into_products=True,
    late_gradients=48,
    late_until_barrier=True,
    tiled=True,
    rounds=True,
)


def habits_of(device: DeviceSpec) -> Habits:
    """What the compiler of a device does with memory.

    TPUs of two cores write more than those of one (docs/record), and no rule for
    what they write is known. They say nothing of their vector memory, and only round.
    """
    if device.on_chip_bytes:
        room = room_bytes(device.on_chip_bytes)
        return dataclasses.replace(_ON_CHIP, on_chip_bytes=room)
    found = _HABITS.get(device.kind, PLAIN)
    if device.rounds_operands:
        found = dataclasses.replace(found, rounds=True)
    if found.breadth_first:
        # It joins sums of any size.
        number = device.calibrated.combined_arrays
        found = dataclasses.replace(found, joined_sums=number)
    if device.workspace_bytes is None:
        return found
    return dataclasses.replace(found, workspace_bytes=device.workspace_bytes)


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


def each_held_bytes(assignment: Assignment, *, tiled: bool = False) -> list[float]:
    """`held_bytes` of all inputs; those of equal layers are the same."""
    known: dict[tuple[object, ...], float] = {}
    graph, kernels = assignment.graph, assignment.analysis.in_kernels if tiled else ()
    out: list[float] = []
    for given in graph.inputs:
        value, layout = graph.values[given.value], assignment.home_layout(given.value)
        carried, kernel = given.output >= 0, given.value in kernels
        key = value.shape, value.dtype, layout, carried, kernel
        if key not in known:
            known[key] = held_bytes(assignment, given, tiled=tiled)
        out.append(known[key])
    return out


def input_bytes(assignment: Assignment, *, tiled: bool = False) -> float:
    """Bytes of the inputs on one device."""
    return sum(each_held_bytes(assignment, tiled=tiled))


def off_chip(found: Sequence[Buffer], life: Lifetimes) -> list[Buffer]:
    """The buffers in the memory of the device; the chip holds the others.

    Results of the step are in the device's memory when it ends.
    """
    if not life.on_chip_bytes:
        return list(found)
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
    more = overhead * life.factor - 1.0
    out["compiler's overhead"] = more * float(usage[peak])
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
    live = overhead * life.factor * float(usage.max(initial=0.0))
    state = input_bytes(assignment, tiled=life.tiled)
    return state + live + life.workspace_bytes
