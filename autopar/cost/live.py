"""The memory of a device in a step: its arrays and their lifetimes.

The model follows XLA:

* Inputs are allocated during the whole step. Carried outputs take the place of the
  inputs that they replace (donation). Additional copies may be needed
  (`autopar.steps.spares`).
* XLA fuses an element-wise result into its readers. Such a result has no buffer, and
  its operands stay live until its readers run. XLA writes two kinds of element-wise
  results to memory: costly results with several readers, and results that a product, a
  reduction, or a loop or branch reads.
* The update of a parameter runs as soon as the parameter's gradient is complete.
* A resharded copy of an array lives from its first reader to its last reader.
* An array that enters a loop lives until the loop ends.

XLA's GPU compiler differs in some ways (`Habits`, `habits_of`). It recomputes
element-wise results rather than keep them. It writes operands and results of batched
products in fixed orders of their dimensions (`autopar.steps.orders`). To hide messages,
it runs the products that make gradients later than other operators of the backward
pass. The operands of these products live until then, even if a checkpoint was meant to
free them. Its matrix products need a workspace.

XLA's CPU compiler runs operators as soon as possible (`autopar.steps.lifetimes`). It
joins sums of gradients into one message (`autopar.cost.buffers`). It copies parameters
that an update could overwrite before they are last read (`autopar.steps.lifetimes`). It
computes 16-bit types in 32 bits (`autopar.steps.rounding`).

XLA's compiler for TPUs with one core also fuses element-wise results into products. It
keeps short-lived buffers in the memory on the chip (`on_chip`) and stores arrays in
tiles (`autopar.cost.local`). On all TPUs, the operands of float32 products are stored
in bfloat16 (`autopar.steps.rounding`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.cluster.presets import USABLE_MEMORY
from autopar.cluster.specs import DeviceSpec
from autopar.cost.buffers import buffers
from autopar.cost.local import BUFFER_KINDS, Buffer, local_bytes
from autopar.cost.ragged import masks_rows
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards
from autopar.steps.lifetimes import PLAIN, Habits, Lifetimes
from autopar_passes.graph.operators import GraphInput

OVERHEAD = "compiler's overhead"
LOST = "between arrays"
WORK_SPACE = "products' work space"
SUMS = "sums over microbatches"

# `lost_bytes` ignores buffers below this fraction of the peak. They fit into gaps
# between other buffers, and without them the function is fast.
_LEAST_PART = 0.005
# Bytes of on-chip memory that the compiler reserves as workspace of a kernel
# (``xla_tpu_scoped_vmem_limit_kib``, 16384).
_KERNEL_BYTES = 2**24
# Fraction of the on-chip memory, without the workspace of kernels, that holds buffers,
# as (part, whole). Measured with a GPT and a Llama of two layers on 64 v5e, whose
# buffers would just fill the memory: 98 to 105 MB of buffers stay in the 117 MB (libtpu
# 0.0.42).
_BUFFERS = (5, 6)

# Read from the schedules and buffer assignments of XLA's compilers (jax 0.10.2). A GPT
# of 6 layers computes its first weight gradients after the backward pass of 2.5 layers,
# and a GPT of 16 layers after 7 layers.
_GPU = Habits(
    makes_again=True,
    keeps_orders=True,
    late_gradients=0.4,
    # openxla/xla, ``xla/service/gpu/transforms/gemm_rewriter.cc``: from Hopper on.
    workspace_bytes=2**25,
    # GetSchedulerMemoryLimit in ``xla/service/gpu/gpu_hlo_schedule.cc``: 0.8 of the
    # device's memory, minus the inputs, times a "slop factor" of 0.95. The division
    # converts from the usable memory of a preset to the whole memory.
    room=(0.8 / USABLE_MEMORY, 0.95),
    placed=True,
    moves_sums=True,
    masks_rows=masks_rows("gpu"),
)
# Read from optimised programs and buffer assignments (jaxlib 0.10.2).
_CPU = Habits(breadth_first=True, widens=True, masks_rows=masks_rows("cpu"))
_HABITS = {"gpu": _GPU, "cpu": _CPU}
# On v5e, which has 16.9 GB, XLA compiles to 15.7 GB a GPT that would need 18 GB.
_TPU_ROOM = (0.93, 1.0)
# Read from the scheduled programs of v5e (libtpu 0.0.42). This compiler's scheduler
# also hides messages, and is assumed to compute weight gradients as late as the
# scheduler for GPUs.
_ON_CHIP = Habits(
    makes_again=True,
    into_products=True,
    late_gradients=0.4,
    late_until_barrier=True,
    tiled=True,
    rounds=True,
    room=_TPU_ROOM,
)


def habits_of(device: DeviceSpec) -> Habits:
    """How a device's compiler uses memory, where compilers differ.

    TPUs with two cores write more results to memory than TPUs with one core
    (docs/record), by a rule that is not known. Device specs of TPUs with two cores have
    no ``on_chip_bytes``, so only the fields ``rounds`` and ``room`` are set for them.
    """
    found = _habits_of(device)
    if device.corrections.makes_room:
        return found
    return dataclasses.replace(found, room=(0.0, 0.0))


def _habits_of(device: DeviceSpec) -> Habits:
    if device.on_chip_bytes:
        room = room_bytes(device.on_chip_bytes)
        return dataclasses.replace(_ON_CHIP, on_chip_bytes=room)
    found = _HABITS.get(device.kind, PLAIN)
    if device.rounds_operands:
        found = dataclasses.replace(found, rounds=True, room=_TPU_ROOM)
    if found.breadth_first:
        # The CPU compiler joins sums of any size into one message.
        number = device.corrections.combined_arrays
        found = dataclasses.replace(found, joined_sums=number)
    if device.workspace_bytes is None:
        return found
    return dataclasses.replace(found, workspace_bytes=device.workspace_bytes)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Live:
    """The arrays that one device holds in a step, with their lifetimes.

    A time is the position of an operator in the execution order. The first ``held``
    arrays live during the whole step. These *held* arrays are the inputs with their
    additional copies and, if there are several microbatches, the sums of gradients over
    microbatches.

    Attributes:
      values: int ``[arrays]``, the value of the program that an array holds.
      nbytes: float64 ``[arrays]``, bytes on the device at the planned batch.
      first: int ``[arrays]``, the first time at which an array is live.
      last: int ``[arrays]``, the last time at which an array is live.
      degrees: int ``[arrays]``, number of dimensions that grow with the batch.
      kinds: the purpose of each array: a role of the step's inputs, `SUMS`, or one of
        `autopar.cost.local.BUFFER_KINDS`.
      held: number of arrays that are live during the whole step.
      length: number of times.
      factor: factor on the bytes of all arrays except the held ones
        (`Calibration.memory_overhead`).
      workspace_bytes: bytes of workspace for matrix products.
      on_chip_bytes: bytes of on-chip memory for arrays other than the held arrays.
      rest_part: fraction of the bytes of held arrays that is subtracted from
        ``room_bytes``.
      gaps: int ``[gaps, 3]``, an array and the two times between which the array is not
        live if memory is short (`autopar.steps.lifetimes.gaps`).
      room_bytes: limit on the bytes of arrays other than the held arrays. Above the
        limit, memory is short. ``rest_part`` lowers the limit.
      placed: whether unused bytes between arrays count (`lost_bytes`).
    """

    values: np.ndarray
    nbytes: np.ndarray
    first: np.ndarray
    last: np.ndarray
    degrees: np.ndarray
    kinds: tuple[str, ...]
    held: int
    length: int
    factor: float
    workspace_bytes: float
    on_chip_bytes: float
    rest_part: float
    gaps: np.ndarray
    room_bytes: float
    placed: bool

    def bytes_at(self, rows: float = 1.0, accumulation: int = 1) -> np.ndarray:
        """Bytes of each array, ``[arrays]``, at another batch or accumulation.

        The layouts stay the same. Memory holds a whole input of the batch, before its
        split into microbatches.

        Args:
          rows: the number of samples in a step, divided by that number in the plan.
          accumulation: number of microbatches into which the batch is split.
        """
        grown = self.nbytes * (rows / accumulation) ** self.degrees
        grown[: self.held] = self.nbytes[: self.held] * np.where(
            self.degrees[: self.held] > 0, rows, 1.0
        )
        if accumulation == 1:
            grown[[kind == SUMS for kind in self.kinds]] = 0.0
        return grown

    def timeline(self, rows: float = 1.0, accumulation: int = 1) -> np.ndarray:
        """Bytes in the memory of the device at each time, ``[length]``."""
        nbytes = self.bytes_at(rows, accumulation)
        return float(nbytes[: self.held].sum()) + self._beside(nbytes)

    def _beside(self, nbytes: np.ndarray) -> np.ndarray:
        """Bytes at each time of arrays that live during a part of the step,
        ``[length]``.

        If memory is short, the compiler frees arrays in their ``gaps``.
        """
        whole = self.factor * self._usage(nbytes, ~self._on_chip(nbytes))
        whole += self.workspace_bytes
        room = self._room(nbytes)
        if whole.max() <= room:
            return whole
        least = whole - self.factor * self._given_up(nbytes)
        return np.maximum(np.minimum(whole, room), least)

    def _room(self, nbytes: np.ndarray) -> float:
        """The limit in bytes above which the compiler frees arrays.

        Arrays that live during the whole step do not count towards the limit.
        """
        return self.room_bytes - self.rest_part * float(nbytes[: self.held].sum())

    def _is_short(self, nbytes: np.ndarray, beside: np.ndarray) -> bool:
        return bool(beside.max() >= self._room(nbytes))

    def _given_up(self, nbytes: np.ndarray) -> np.ndarray:
        """Bytes that the compiler may free early at each time, ``[length]``."""
        array, first, last = self.gaps.T
        keeps = ~self._on_chip(nbytes)[array]
        change = np.zeros(self.length + 2)
        np.add.at(change, first[keeps] + 1, nbytes[array[keeps]])
        np.add.at(change, last[keeps], -nbytes[array[keeps]])
        return np.cumsum(change)[: self.length]

    def peak_bytes(self, rows: float = 1.0, accumulation: int = 1) -> float:
        """Bytes of device memory that the step needs.

        The result is the peak of live bytes, plus the unused bytes between arrays if
        the compiler frees no array early.
        """
        nbytes = self.bytes_at(rows, accumulation)
        beside = self._beside(nbytes)
        peak = float(nbytes[: self.held].sum()) + float(beside.max())
        return peak + self._lost_bytes(nbytes, beside)

    def _lost_bytes(self, nbytes: np.ndarray, beside: np.ndarray) -> float:
        """Unused bytes between arrays; 0 if memory is short."""
        if not self.placed or self._is_short(nbytes, beside):
            return 0.0
        off = ~self._on_chip(nbytes)
        return lost_bytes(self.first[off], self.last[off], nbytes[off])

    def held_bytes(self) -> dict[str, float]:
        """Bytes of the inputs by role."""
        out = dict.fromkeys(self.kinds[: self.held], 0.0)
        out.pop(SUMS, None)
        for kind, nbytes in zip(self.kinds, self.nbytes[: self.held], strict=False):
            if kind in out:
                out[kind] += float(nbytes)
        return out

    def at_peak(self) -> dict[str, float]:
        """Bytes by kind at peak memory, of arrays that live during a part of the step.

        Bytes that the compiler frees are subtracted in proportion from all arrays that
        it may free at that time.
        """
        nbytes = self.bytes_at()
        beside, off = self._beside(nbytes), ~self._on_chip(nbytes)
        whole = self._usage(nbytes, off)
        peak = int(beside.argmax())
        there = off & (self.first <= peak) & (peak <= self.last)
        array, first, last = self.gaps.T
        gone = array[(first < peak) & (peak < last) & there[array]]
        if len(gone):
            more = self.workspace_bytes + self.factor * whole[peak] - beside[peak]
            nbytes[gone] *= 1.0 - more / (self.factor * nbytes[gone].sum())
        out = dict.fromkeys((*BUFFER_KINDS, *self.kinds), 0.0)
        for k in np.flatnonzero(there):
            out[self.kinds[k]] += float(nbytes[k])
        out[OVERHEAD] = (self.factor - 1.0) * float(nbytes[there].sum())
        out[WORK_SPACE] = self.workspace_bytes
        out[LOST] = self._lost_bytes(nbytes, beside)
        return {kind: nbytes for kind, nbytes in out.items() if nbytes}

    def _usage(self, nbytes: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Total bytes of the chosen arrays at each time, ``[length]``."""
        change = np.zeros(self.length + 2)
        np.add.at(change, self.first[chosen], nbytes[chosen])
        np.add.at(change, self.last[chosen] + 1, -nbytes[chosen])
        return np.cumsum(change)[: self.length]

    def _on_chip(self, nbytes: np.ndarray) -> np.ndarray:
        """Marks the arrays that the timeline of device memory leaves out, ``[arrays]``.

        The marked arrays are arrays in on-chip memory, and the arrays that live during
        the whole step, which are counted separately. A result of the step is never in
        on-chip memory.
        """
        out = np.zeros(len(nbytes), dtype=bool)
        out[: self.held] = True
        if self.on_chip_bytes:
            inside = np.array([k != "results" for k in self.kinds], dtype=bool) & ~out
            chip = on_chip(
                self.first[inside],
                self.last[inside],
                nbytes[inside],
                self.on_chip_bytes,
            )
            out[np.flatnonzero(inside)[chip]] = True
        return out


def live(
    assignment: Assignment,
    device: DeviceSpec,
    life: Lifetimes | None = None,
    only: Sequence[int] | None = None,
) -> Live:
    """Lists the arrays that a device holds in a step.

    Args:
      assignment: strategies as layouts.
      device: the device.
      life: the lifetimes of values; None to compute them for the device's compiler.
      only: the operators whose operands and results are listed; None for all operators.
    """
    analysis = assignment.analysis
    life = analysis.life(habits_of(device)) if life is None else life
    length = max(1, len(analysis.graph.operators))
    state = [*_inputs(assignment, length, tiled=life.tiled), *_sums(assignment, length)]
    found = [*state, *buffers(assignment, life, only)]
    degree = analysis.dim_labels.degree
    gaps = [
        (k, first, last)
        for k, b in enumerate(found)
        for first, last in life.gaps.get(b.value, ())
        if b.start <= first and last <= b.end + 1
    ]
    part, rest = life.room
    room = rest * part * device.memory_bytes if life.gaps else math.inf
    return Live(
        np.array([b.value for b in found], dtype=int),
        np.array([b.nbytes for b in found], dtype=float),
        np.array([b.start for b in found], dtype=int),
        np.array([b.end for b in found], dtype=int),
        np.array([degree(b.value) for b in found], dtype=int),
        tuple(b.kind for b in found),
        len(state),
        length,
        device.corrections.memory_overhead * life.factor,
        float(life.workspace_bytes),
        float(life.on_chip_bytes),
        rest,
        np.array(gaps, dtype=int).reshape(-1, 3),
        room,
        life.placed,
    )


def _inputs(assignment: Assignment, length: int, *, tiled: bool) -> Iterator[Buffer]:
    held = each_held_bytes(assignment, tiled=tiled)
    for given, nbytes in zip(assignment.graph.inputs, held, strict=True):
        yield Buffer(given.value, nbytes, 0, length - 1, given.role.value)


def _sums(assignment: Assignment, length: int) -> Iterator[Buffer]:
    """The sums of gradients over microbatches, on one device."""
    graph = assignment.graph
    for deferral in assignment.analysis.deferrals:
        for value in deferral.ends:
            if value in deferral.gradients:
                split = shards(assignment.home_layout(value), assignment.sizes)
                nbytes = graph.values[value].nbytes / split
                yield Buffer(value, nbytes, 0, length - 1, SUMS)


def held_bytes(
    assignment: Assignment, given: GraphInput, *, tiled: bool = False
) -> float:
    """Bytes of an input on one device, with spare copies if the input is carried."""
    layout = assignment.home_layout(given.value)
    split = shards(layout, assignment.sizes)
    copies = 1.0
    if given.output >= 0:
        copies = float(assignment.analysis.spares.copies(split))
    return copies * local_bytes(assignment, given.value, layout, tiled=tiled)


def each_held_bytes(assignment: Assignment, *, tiled: bool = False) -> list[float]:
    """`held_bytes` of each input, computed once for equal inputs."""
    known: dict[tuple[object, ...], float] = {}
    graph, kernels = assignment.graph, assignment.analysis.in_kernels if tiled else ()
    out: list[float] = []
    for given in graph.inputs:
        value, layout = graph.values[given.value], assignment.home_layout(given.value)
        carried, kernel = given.output >= 0, given.value in kernels
        key = value.shape, value.dtype, value.on_host, layout, carried, kernel
        if key not in known:
            known[key] = held_bytes(assignment, given, tiled=tiled)
        out.append(known[key])
    return out


def lost_bytes(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray) -> float:
    """Bytes lost to fragmentation: the size of the memory block minus peak live bytes.

    XLA places the buffers of a program at fixed addresses, the largest first. Each
    buffer goes into the smallest gap that is large enough, between the placed buffers
    whose lifetimes overlap with its own (openxla/xla,
    ``GlobalDecreasingSizeBestFitHeap`` in
    ``xla/service/heap_simulator/heap_simulator.cc``).

    >>> first, last = np.array([0, 1, 2]), np.array([0, 1, 2])
    >>> lost_bytes(first, last, np.array([4.0, 6.0, 5.0]))
    0.0

    Args:
      first: int ``[buffers]``, the first time of each buffer.
      last: int ``[buffers]``, the last time of each buffer.
      nbytes: float64 ``[buffers]``, bytes of each buffer.
    """
    if not len(nbytes):
        return 0.0
    times = int(last.max()) + 2
    whole = _most(first, last, nbytes, times)
    large = np.flatnonzero(nbytes > _LEAST_PART * whole)
    first, last, nbytes = first[large], last[large], nbytes[large]
    # Of buffers of equal size, the one that lives longest comes first.
    order = np.lexsort((first - last, -nbytes))
    first, last, nbytes = first[order], last[order], nbytes[order]
    begins, ends = np.zeros(len(nbytes)), np.zeros(len(nbytes))
    for k, size in enumerate(nbytes):
        beside = np.flatnonzero((first[:k] <= last[k]) & (last[:k] >= first[k]))
        begins[k] = _hole(begins[beside], ends[beside], float(size))
        ends[k] = begins[k] + size
    top = float(ends.max(initial=0.0))
    return max(0.0, top - _most(first, last, nbytes, times))


def _hole(begins: np.ndarray, ends: np.ndarray, size: float) -> float:
    """The address of the smallest gap of at least ``size`` bytes, or else the end."""
    if not len(begins):
        return 0.0
    order = np.argsort(begins)
    free = np.concatenate(([0.0], np.maximum.accumulate(ends[order])))
    room = begins[order] - free[:-1]
    fits = np.flatnonzero(room >= size)
    if len(fits):
        return float(free[fits[np.argmin(room[fits])]])
    return float(free[-1])


def _most(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray, times: int) -> float:
    """The largest number of bytes that are live at the same time."""
    change = np.zeros(times)
    np.add.at(change, first, nbytes)
    np.add.at(change, last + 1, -nbytes)
    return float(np.cumsum(change).max(initial=0.0))


def room_bytes(chip_bytes: int) -> int:
    """Bytes of buffers that the memory on the chip of a TPU can hold.

    The compiler controls a TPU's vector memory. XLA's memory space assignment places
    buffers there as long as there is room (openxla/xla,
    ``xla/service/memory_space_assignment``). These buffers take no device memory. A
    buffer that waits long for its reader is moved to device memory.

    Part of the on-chip memory is reserved as workspace of kernels. One sixth of the
    rest is not available for buffers: it holds operands that are prefetched for the
    next kernel, or is lost between buffers.
    """
    part, whole = _BUFFERS
    return max(0, chip_bytes - _KERNEL_BYTES) * part // whole


def on_chip(
    starts: np.ndarray, ends: np.ndarray, sizes: np.ndarray, room: float
) -> np.ndarray:
    """Marks the buffers that are in on-chip memory for their whole lifetime.

    If live buffers exceed the on-chip memory, the buffer with the longest lifetime is
    removed first, until the rest fits at every time. A long-lived buffer occupies room
    that many short-lived buffers could use in turn (Belady, IBM Systems Journal 5(2),
    1966).

    Args:
      starts: the first time of each buffer.
      ends: the last time of each buffer.
      sizes: bytes of each buffer.
      room: bytes of buffers that the chip holds.

    Returns:
      One truth value for each buffer.
    """
    held = np.full(len(sizes), room > 0)
    if not held.any():
        return held
    change = np.zeros(int(ends.max()) + 2)
    np.add.at(change, starts, sizes)
    np.add.at(change, ends + 1, -sizes)
    live = np.cumsum(change)
    for index in np.argsort(starts - ends, kind="stable"):
        span = live[starts[index] : ends[index] + 1]
        if span.max() > room:
            span -= sizes[index]
            held[index] = False
    return held
