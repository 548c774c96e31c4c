"""The arrays that one device holds in a step, and when: its memory.

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

XLA's CPU compiler runs operators as soon as it can (`autopar.steps.lifetimes`), sends
sums of gradients together (`autopar.cost.buffers`), copies parameters that their
updates might overwrite too early (`autopar.steps.lifetimes`) and computes types of 16
bits in 32 (`autopar.steps.rounding`).

XLA's compiler for TPUs of one core fuses element-wise results into products, too. It
keeps short-lived buffers in the memory of the chip (`on_chip`) and stores
arrays in tiles (`autopar.cost.local`). What products of float32 read lies in bfloat16
on all TPUs (`autopar.steps.rounding`).
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
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards
from autopar.steps.lifetimes import PLAIN, Habits, Lifetimes
from autopar_passes.graph.operators import GraphInput

OVERHEAD = "compiler's overhead"
LOST = "between arrays"
WORK_SPACE = "products' work space"
SUMS = "sums over microbatches"

# Of buffers that are placed, smaller ones fill holes; leaving them out bounds the work.
_LEAST_PART = 0.005
# Of the chip's memory, what the compiler gives to one kernel to work in
# (``xla_tpu_scoped_vmem_limit_kib``, 16384).
_KERNEL_BYTES = 2**24
# Of the rest, what buffers take. A GPT and a Llama of two layers on 64 v5e, whose
# buffers would fill the chip once, leave 98 to 105 of 117 MB of them on it
# (libtpu 0.0.42).
_BUFFERS = (5, 6)

# Read from the schedules and buffer assignments of XLA's compilers (jax 0.10.2): GPTs
# of 6 and 16 layers make the gradients of no layer until 2.5 and 7 have been passed.
_GPU = Habits(
    makes_again=True,
    keeps_orders=True,
    late_gradients=0.4,
    # openxla/xla, ``xla/service/gpu/transforms/gemm_rewriter.cc``: from Hopper on.
    workspace_bytes=2**25,
    # GetSchedulerMemoryLimit, ``xla/service/gpu/gpu_hlo_schedule.cc``: 0.8 of the
    # memory, of which presets give a part, less the inputs, times a "slop factor".
    room=(0.8 / USABLE_MEMORY, 0.95),
    placed=True,
)
# Read from optimised programs and buffer assignments (jaxlib 0.10.2).
_CPU = Habits(breadth_first=True, widens=True)
_HABITS = {"gpu": _GPU, "cpu": _CPU}
# A GPT of 18 GB on v5e (16.9 GB) is compiled to 15.7 GB.
_TPU_ROOM = (0.93, 1.0)
# Read from the scheduled programs of v5e (libtpu 0.0.42). The scheduler hides messages,
# too, and the same bound is assumed.
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
    """What the compiler of a device does with memory.

    TPUs of two cores write more than those of one (docs/record), and no rule for
    what they write is known. They say nothing of their vector memory, and only round.
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
        # It joins sums of any size.
        number = device.corrections.combined_arrays
        found = dataclasses.replace(found, joined_sums=number)
    if device.workspace_bytes is None:
        return found
    return dataclasses.replace(found, workspace_bytes=device.workspace_bytes)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Live:
    """The arrays that one device holds in a step, each with when it is there.

    Times are those of operators. The first ``held`` arrays are there all the time: the
    inputs, with the spare copies of what is carried, and the sums of gradients over
    microbatches, which only steps of several microbatches have.

    Attributes:
      values: int ``[arrays]``, the value of the program.
      nbytes: float64 ``[arrays]``, bytes on the device at the planned batch.
      first: int ``[arrays]``, the first time at which an array is there.
      last: int ``[arrays]``, the last one.
      degrees: int ``[arrays]``, how many dimensions grow with the batch.
      kinds: what each is for: a role of the step's inputs, `SUMS`, or one of
        `autopar.cost.local.BUFFER_KINDS`.
      held: how many arrays are there all the time.
      length: the number of times.
      factor: on the bytes of the others (`Calibration.memory_overhead`).
      workspace_bytes: what matrix products take to work in.
      on_chip_bytes: what the memory of the chip itself holds of the others.
      rest_part: the part of the bytes of inputs that is taken off ``room_bytes``.
      gaps: int ``[gaps, 3]``, an array, and the times between which the compiler gives
        it up where memory is short.
      room_bytes: bytes beside the inputs beyond which it does that, before these are
        taken off.
      placed: whether what is lost between arrays counts (`lost_bytes`).
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

        The layouts stay. The whole batch is there before it is cut into microbatches.

        Args:
          rows: of the whole step, over the planned ones.
          accumulation: number of microbatches that the batch is cut into.
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
        """Bytes beside what is held at each time, with what the compiler gives up."""
        whole = self.factor * self._usage(nbytes, ~self._on_chip(nbytes))
        whole += self.workspace_bytes
        room = self._room(nbytes)
        if whole.max() <= room:
            return whole
        least = whole - self.factor * self._given_up(nbytes)
        return np.maximum(np.minimum(whole, room), least)

    def _room(self, nbytes: np.ndarray) -> float:
        """Bytes beside what is held beyond which the compiler gives arrays up."""
        return self.room_bytes - self.rest_part * float(nbytes[: self.held].sum())

    def _is_short(self, nbytes: np.ndarray, beside: np.ndarray) -> bool:
        return bool(beside.max() >= self._room(nbytes))

    def _given_up(self, nbytes: np.ndarray) -> np.ndarray:
        """Bytes at each time that the compiler may give up, ``[length]``."""
        array, first, last = self.gaps.T
        keeps = ~self._on_chip(nbytes)[array]
        change = np.zeros(self.length + 2)
        np.add.at(change, first[keeps] + 1, nbytes[array[keeps]])
        np.add.at(change, last[keeps], -nbytes[array[keeps]])
        return np.cumsum(change)[: self.length]

    def peak_bytes(self, rows: float = 1.0, accumulation: int = 1) -> float:
        """Bytes of the device that the step needs.

        The most that is there at once, with what is lost between the arrays where
        nothing is given up for room.
        """
        nbytes = self.bytes_at(rows, accumulation)
        beside = self._beside(nbytes)
        peak = float(nbytes[: self.held].sum()) + float(beside.max())
        return peak + self._lost_bytes(nbytes, beside)

    def _lost_bytes(self, nbytes: np.ndarray, beside: np.ndarray) -> float:
        """Bytes between arrays, where nothing is given up for room."""
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
        """Bytes beside the inputs, by kind, at the time when most are there.

        Of what the compiler gives up for room each kind has its part.
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
        """Sums the chosen arrays: bytes at each time."""
        change = np.zeros(self.length + 2)
        np.add.at(change, self.first[chosen], nbytes[chosen])
        np.add.at(change, self.last[chosen] + 1, -nbytes[chosen])
        return np.cumsum(change)[: self.length]

    def _on_chip(self, nbytes: np.ndarray) -> np.ndarray:
        """Which arrays are not in the device's memory: those held are counted apart.

        Results of the step are in the device's memory when it ends.
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
    """Lists what a device holds in a step.

    Args:
      assignment: strategies as layouts.
      device: the device.
      life: when values are made and last needed; None: as the device's compiler has it.
      only: the operators that count, as makers and as readers; None: all of them.
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


def lost_bytes(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray) -> float:
    """Bytes of a block of memory beyond the most that is live at once.

    XLA places the buffers of a program at fixed addresses, the largest first, each in
    the smallest hole that it fits among those that are there at some time of its own
    (openxla/xla, ``GlobalDecreasingSizeBestFitHeap`` in
    ``xla/service/heap_simulator/heap_simulator.cc``).

    >>> first, last = np.array([0, 1, 2]), np.array([0, 1, 2])
    >>> lost_bytes(first, last, np.array([4.0, 6.0, 5.0]))
    0.0

    Args:
      first: int ``[buffers]``, the first time of each buffer.
      last: int ``[buffers]``, the last one.
      nbytes: float64 ``[buffers]``.
    """
    if not len(nbytes):
        return 0.0
    times = int(last.max()) + 2
    whole = _most(first, last, nbytes, times)
    large = np.flatnonzero(nbytes > _LEAST_PART * whole)
    first, last, nbytes = first[large], last[large], nbytes[large]
    # Of one size, those that are there longest come first.
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
    """Where the smallest hole of a size begins, or else what is there ends."""
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
    """Most bytes live at once."""
    change = np.zeros(times)
    np.add.at(change, first, nbytes)
    np.add.at(change, last + 1, -nbytes)
    return float(np.cumsum(change).max(initial=0.0))


def room_bytes(chip_bytes: int) -> int:
    """What a chip's memory holds of buffers, in bytes.

    A TPU's vector memory is under the compiler's control. XLA's memory space assignment
    places a buffer there where there is room for it, and such a buffer takes no memory
    of the device (openxla/xla, ``xla/service/memory_space_assignment``). What waits
    long is moved out, and then the device's memory holds it.

    Kernels have a part to work in. A sixth of the rest holds what arrives for the next
    kernel while one runs, and what is lost between buffers.
    """
    part, whole = _BUFFERS
    return max(0, chip_bytes - _KERNEL_BYTES) * part // whole


def on_chip(
    starts: np.ndarray, ends: np.ndarray, sizes: np.ndarray, room: float
) -> np.ndarray:
    """Which buffers lie on the chip, for their whole life.

    Where more is live than the chip holds, the buffer that lives longest goes first,
    until the rest fits at every time: it takes the room that many others could use one
    after the other (Belady, IBM Systems Journal 5(2), 1966).

    Args:
      starts: the first time of each buffer.
      ends: the last.
      sizes: bytes.
      room: bytes that the chip holds.

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
