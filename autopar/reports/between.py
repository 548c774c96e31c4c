"""The predicted bytes that processes send to each other in a step of a plan.

The bytes are those of the messages that the cost model prices. In an all-to-all, a
device sends equal parts to all other devices. In all other collectives, it sends around
a ring. All-reduces send to the previous device of the ring, and other collectives to
the next device, as in gloo (``gloo/allreduce.cc``, ``gloo/allgather.cc``), which XLA
uses between CPUs. Stages send each other the values of
`autopar.planner.stages.stage_costs.stage_messages`, cut into pieces
(`autopar.layouts.pieces`). Bytes that stay inside a process do not count.

Between CPUs, gloo's headers count, too. For each message, the sender sends a notice and
a header, and the receiver a notice (``Pair::send`` and ``Pair::recv`` in
``gloo/transport/tcp/pair.cc``). Each is `_HEADER_BYTES` long. An array is sent in
several messages: in an all-reduce at least two of each part, of which small arrays have
fewer; in an all-gather the halves of each part; in an all-to-all or a permutation one.
XLA passes the arrays to gloo one by one (``gloo_communicator.cc``). A reduce-scatter of
codecs exchanges halves between partners, if their number is a power of two
(``gloo/reduce_scatter.h``). For other numbers a ring is assumed.

Processes that run several stages also gather a few bytes in each step (`_checks`).

Some messages are left out because their size does not grow with the model: headers of
TCP and of JAX's transfer servers, the messages of the coordination service,
measurements (the noise scale, and telemetry of codecs between stages), the flags of the
check for numbers that are not finite, and results of a step, such as the loss, that all
processes receive.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.collectives import collective_bytes
from autopar.layouts.assignment import kept_layout
from autopar.layouts.layout import Layout
from autopar.layouts.pieces import Blocks, blocks_of, landings
from autopar.planner.stages.stage_costs import copied_layers, stage_messages, wire_of
from autopar.plans import Plan
from autopar.reports.explain import BoundPlan, bind_plan
from autopar.reports.gradients import codec_rows
from autopar.reports.staged import BoundStages, bind_stages
from autopar.steps.analysis import Analysis
from autopar_passes.program.equations import walk
from autopar_passes.stages.cut import Phase

# (sending process, receiving process) -> bytes in a step.
BytesBetween = Mapping[tuple[int, int], float]

# Sizes in gloo, in bytes: the preamble of a message (six words,
# ``gloo/transport/tcp/pair.h``), the content of a notice (an int,
# ``gloo/reduce_scatter.h``), and the largest segment of an all-reduce
# (``gloo/allreduce.h``).
_HEADER_BYTES, _NOTICE_BYTES, _SEGMENT_BYTES = 48, 4, 2**20


def bytes_between(
    analysis: Analysis, plan: Plan, cluster: Cluster, process_of: Sequence[int]
) -> BytesBetween:
    """The bytes that each process sends to each other process in a step.

    Args:
      analysis: the step on the whole batch.
      plan: the plan.
      cluster: all devices.
      process_of: for each device, by position in the cluster, the number of its
        process. Bytes between hosts are sums over pairs of their processes.

    Raises:
      PlanError: the plan is for another step or cluster.
    """
    out: dict[tuple[int, int], float] = defaultdict(float)

    def send(source: int, target: int, nbytes: float) -> None:
        pair = process_of[source], process_of[target]
        if pair[0] != pair[1] and nbytes:
            out[pair] += nbytes

    stages: Sequence[BoundPlan]
    if len(plan.stages) == 1:
        stages = [bind_plan(analysis, plan, cluster)]
    else:
        found = bind_stages(analysis, plan, cluster)
        stages = found.stages
        is_gloo = cluster.device.kind == "cpu"
        for message in (
            *_between_stages(found, process_of),
            *_checks(process_of, is_gloo),
        ):
            send(*message)
    for stage in stages:
        for message in _within_stage(stage):
            send(*message)
    return dict(out)


# Within a stage.


def _within_stage(bound: BoundPlan) -> Iterator[tuple[int, int, float]]:
    """Yields the collectives' messages: sender, receiver and bytes in a step."""
    pricer, values = bound.pricer, bound.assignment.graph.values
    grid = np.asarray(bound.plan.stage.devices).reshape(pricer.sizes)
    is_gloo = pricer.cluster.device.kind == "cpu"
    for c in bound.collectives:
        kind = pricer.runs_as(c.step.kind)
        if kind != "slice":
            element_bytes = values[c.value].dtype.itemsize
            for group in _groups(grid, c.step.axes):
                for sent in _collective(kind, c.size, group, element_bytes, is_gloo):
                    yield (*sent[:2], c.trips * sent[2])
    names = pricer.mesh.names
    for row in codec_rows(bound.plan.gradients, pricer):
        axes = [names.index(name) for name in row.axes]
        for group in _groups(grid, axes) if row.sent_bytes else ():
            size = row.sent_bytes / collective_bytes(row.kind, 1, len(group))
            yield from _collective(row.kind, size, group, 4, is_gloo)


def _groups(grid: np.ndarray, axes: Sequence[int]) -> list[list[int]]:
    """The groups of devices in which a collective over axes of a mesh runs."""
    last = np.moveaxis(grid, sorted(axes), range(grid.ndim - len(axes), grid.ndim))
    return last.reshape(-1, math.prod(grid.shape[a] for a in axes)).tolist()


def _collective(
    kind: str, nbytes: float, group: Sequence[int], element_bytes: int, is_gloo: bool
) -> Iterator[tuple[int, int, float]]:
    """Yields what the devices of a collective send: sender, receiver and bytes.

    Args:
      kind: kind of collective that the device's compiler emits.
      nbytes: size of the collective in bytes (`autopar.cluster.specs.Kind`).
      group: its devices.
      element_bytes: bytes of an element of the array.
      is_gloo: whether gloo runs the collective. Then the bytes of gloo's headers are
        added.
    """
    count = len(group)
    if is_gloo and kind == "reduce_scatter" and not count & (count - 1):
        for k, to, data in _halving(nbytes, count):
            yield group[k], group[to], data + 2 * _HEADER_BYTES + _NOTICE_BYTES
        return
    for k, to, data, messages in _messages(kind, nbytes, count, element_bytes):
        headers = _HEADER_BYTES * messages * is_gloo
        yield group[k], group[to], data + 2 * headers
        yield group[to], group[k], headers


def _messages(
    kind: str, nbytes: float, count: int, element_bytes: int
) -> Iterator[tuple[int, int, float, int]]:
    """Yields sender, receiver, bytes and number of messages of ring algorithms."""
    if kind == "all_reduce":
        # Each device owns one part of the array. Around the ring, it first sends
        # partial sums of all parts except its own. Then it sends all complete parts
        # except the part that the receiver owns.
        parts = _ring_parts(nbytes, count, element_bytes)
        for k in range(count):
            data, messages = (2 * sum(x) - x[k] - x[k - 1] for x in parts)
            yield k, (k - 1) % count, data, int(messages)
        return
    for k in range(count if nbytes else 0):
        if kind == "all_to_all":
            for other in range(1, count):
                yield k, (k + other) % count, nbytes / count, 1
        elif kind == "collective_permute":
            yield k, (k + 1) % count, nbytes, 1
        else:
            data, messages = nbytes * (count - 1) / count, 2 * (count - 1)
            yield k, (k + 1) % count, data, messages


def _halving(nbytes: float, count: int) -> Iterator[tuple[int, int, float]]:
    """Yields the messages of gloo's reduce-scatter: sender, receiver and bytes.

    Partners exchange halves, quarters and so on. Each device then has the part whose
    number is its own with the bits in reverse order, and sends the part to its owner.
    """
    bits = (count - 1).bit_length()
    for k in range(count):
        for bit in range(bits):
            yield k, k ^ (1 << bit), nbytes / 2 ** (bit + 1)
        owner = int(f"{k:0{bits}b}"[::-1], 2)
        if owner != k:
            yield k, owner, nbytes / count


def _ring_parts(
    nbytes: float, count: int, element_bytes: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Bytes of each device's part of an all-reduce, and messages that send it.

    The array is cut into segments of equal size, at least two for each part. The last
    segments may be shorter. Empty segments are not sent.

    >>> _ring_parts(40.0, 4, element_bytes=4)
    ([16.0, 16.0, 8.0, 0.0], [2, 2, 1, 0])
    """
    each = max(2, math.ceil(nbytes / _SEGMENT_BYTES / count))
    segment = element_bytes * math.ceil(nbytes / (each * count) / element_bytes)
    starts = segment * np.arange(each * count).reshape(count, each)
    sent = np.clip(float(nbytes) - starts, 0, segment)
    return sent.sum(1).tolist(), (sent > 0).sum(1).tolist()


# Between stages.


def _checks(
    process_of: Sequence[int], is_gloo: bool
) -> Iterator[tuple[int, int, float]]:
    """Yields the messages by which processes learn whether a step goes well.

    The processes all-gather 40 bytes before a step (`Links.begin`), 1 byte after the
    first part of the step and 1 byte after the last part (`Links.together`). JAX runs
    this all-gather on every local device.
    """
    devices: dict[int, list[int]] = defaultdict(list)
    for device, process in enumerate(process_of):
        devices[process].append(device)
    for group in zip(*(devices[p] for p in sorted(devices)), strict=False):
        for nbytes in (40, 1, 1):
            whole = nbytes * len(group)
            yield from _collective("all_gather", whole, group, 1, is_gloo)


def _between_stages(
    bound: BoundStages, process_of: Sequence[int]
) -> Iterator[tuple[int, int, float]]:
    """Yields messages between stages, and of rows of the batch.

    Each message is (sending device, receiving device, bytes).
    """
    cut, values = bound.cut, bound.cut.analysis.graph.values
    places = _ProcessPlaces(bound, process_of)
    for m in stage_messages(cut):
        nbytes = m.times * cut.sent_bytes(m.value)
        yield from places.messages(
            places.wire(m.value, m.source, m.target),
            places.wire(m.value, m.target, m.source),
            nbytes,
        )
    for holder, stage, value in copied_layers(cut):
        # A piece has the same layout on both stages.
        layout = bound.stages[stage].assignment.home_layout(value)
        shape, nbytes = values[value].shape, values[value].nbytes
        here, there = (places.blocks(s, layout, shape) for s in (holder, stage))
        yield from places.messages(here, there, nbytes)
        yield from places.messages(there, here, nbytes)
    yield from _results(bound, places)
    yield from _rows(bound, places)


class _ProcessPlaces:
    """Finds the devices that hold the blocks of each value of a pipeline.

    Devices are given by their positions in the cluster.
    """

    def __init__(self, bound: BoundStages, process_of: Sequence[int]) -> None:
        """Stores the stages, and the process of each device."""
        self.bound = bound
        self.process_of = process_of
        self.graph = bound.cut.analysis.graph

    def blocks(self, stage: int, layout: Layout, shape: Sequence[int]) -> Blocks:
        """The blocks of an array on a stage."""
        own = self.bound.stages[stage]
        return blocks_of(layout, shape, own.pricer.sizes, own.plan.stage.devices)

    def wire(self, value: int, stage: int, other: int) -> Blocks:
        """The blocks of a value on a stage, for a message to or from another stage."""
        layouts = [own.assignment for own in self.bound.stages]
        cut = self.bound.cut
        layout, code = wire_of(cut, layouts, value, stage, other), cut.codes.get(value)
        if code is not None:
            return self.blocks(stage, layout[: code.lead], code.struct.shape)
        return self.blocks(stage, layout, self.graph.values[value].shape)

    def home(self, value: int, stage: int) -> Blocks:
        """The blocks of a value on a stage between steps."""
        layout = self.bound.stages[stage].assignment.home_layout(value)
        return self.blocks(stage, layout, self.graph.values[value].shape)

    def messages(
        self, have: Blocks, need: Blocks, nbytes: float
    ) -> Iterator[tuple[int, int, float]]:
        """Yields the messages that move an array of ``nbytes`` between placements."""
        size = math.prod(max(end for _, end in dim) for dim in zip(*have, strict=True))
        process: Callable[[Any], int] = self.process_of.__getitem__
        for landing in landings(have, need, process):
            for piece in landing.pieces:
                part = math.prod(piece.shape) / size
                yield piece.device, landing.devices[0], part * nbytes


def _results(
    bound: BoundStages, places: _ProcessPlaces
) -> Iterator[tuple[int, int, float]]:
    """Yields messages of state that one stage computes and another stage keeps."""
    cut, graph = bound.cut.cut, bound.cut.analysis.graph
    given = {v: k for k, v in cut.parts.flow.carried_values.items()}
    for key, task in cut.tasks.items():
        for value in task.outputs:
            if key.phase is not Phase.UPDATE or value not in given:
                continue
            owner = cut.owners[given[value]]
            if owner != key.stage:
                here = places.home(value, key.stage)
                there = places.home(given[value], owner)
                yield from places.messages(here, there, graph.values[value].nbytes)


def _rows(
    bound: BoundStages, places: _ProcessPlaces
) -> Iterator[tuple[int, int, float]]:
    """Yields messages of the rows of the batch.

    At first each process has an equal number of rows. Rows are sent to the devices of
    the stage that reads them. Arrays that the step reads before its loop over
    microbatches are then sent to all processes.
    """
    cut, found = bound.cut, bound.cut.found
    whole = cut.analysis.whole or cut.analysis
    first: dict[int, int] = {}
    for device, process in enumerate(places.process_of):
        first.setdefault(process, device)
    leads = [first[p] for p in sorted(first)]
    arguments = cut.cut.program.body.inputs
    ahead = _read_ahead(found.ahead)
    for k, rows in found.batch.items():
        if k >= found.own:
            continue
        value = whole.graph.values[whole.graph.inputs[k].value]
        shape, nbytes, owner = value.shape, value.nbytes, cut.cut.owners[arguments[k]]
        split = tuple((0,) if d == rows.dim else () for d in range(len(shape)))
        have = blocks_of(split, shape, (len(leads),), leads)
        own = bound.stages[owner]
        layout = kept_layout(own.assignment, arguments[k])
        lies = tuple(
            axes if not n % math.prod(own.pricer.sizes[a] for a in axes) else ()
            for axes, n in zip(layout, shape, strict=True)
        )
        there = places.blocks(owner, lies, shape)
        yield from places.messages(have, there, nbytes)
        if k in ahead:
            for lead in leads:
                every = {tuple((0, n) for n in shape): (lead,)}
                yield from places.messages(there, every, nbytes)


def _read_ahead(program: Any) -> frozenset[int]:
    """The flat arguments that the step reads before the loop over microbatches."""
    if program is None:
        return frozenset()
    atoms = [a for eqn in walk(program.body) for a in eqn.inputs]
    read = {a for a in (*atoms, *program.body.outputs) if isinstance(a, int)}
    return frozenset(k for k, v in enumerate(program.body.inputs) if v in read)
