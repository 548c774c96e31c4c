"""The predicted bytes that processes send to each other in a step of a plan.

The bytes are those of the messages that the cost model prices. Each device of a
collective sends the bytes given by `autopar.cost.collectives.collective_bytes`. In an
all-to-all, a device sends equal parts to all other devices. In all other collectives,
it sends around a ring. All-reduces send to the previous device of the ring, and other
collectives to the next device, as in gloo (``gloo/allreduce.cc``,
``gloo/allgather.cc``), which XLA uses between CPUs. Stages send each other the values
of `autopar.planner.stages.stage_costs.stage_messages`, cut into pieces
(`autopar.layouts.pieces`). Bytes that stay inside a process do not count.

Some messages are left out because their size does not grow with the model: headers, the
messages of the coordination service, measurements (the noise scale, and telemetry of
codecs between stages), and results of a step, such as the loss, that all processes
receive.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.layouts.floating import kept_layout
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
        for message in _between_stages(found, process_of):
            send(*message)
    for stage in stages:
        for message in _within_stage(stage):
            send(*message)
    return dict(out)


# Within a stage.


def _within_stage(bound: BoundPlan) -> Iterator[tuple[int, int, float]]:
    """Yields the collectives' messages: sender, receiver and bytes in a step."""
    pricer, devices = bound.pricer, bound.plan.stage.devices
    for c in bound.collectives:
        kind = pricer.runs_as(c.step.kind)
        # If the compiler uses an all-reduce in place of a reduce-scatter, twice as many
        # bytes are sent.
        ratio = 2.0 if kind != c.step.kind else 1.0
        nbytes = ratio * c.sent_bytes(pricer)
        yield from _collective(kind, c.step.axes, nbytes, pricer.sizes, devices)
    names = pricer.mesh.names
    for row in codec_rows(bound.plan.gradients, pricer):
        axes = tuple(names.index(name) for name in row.axes)
        yield from _collective(row.kind, axes, row.sent_bytes, pricer.sizes, devices)


def _collective(
    kind: str,
    axes: Sequence[int],
    nbytes: float,
    sizes: Sequence[int],
    devices: Sequence[int],
) -> Iterator[tuple[int, int, float]]:
    """Yields the messages of a collective in which each device sends ``nbytes``."""
    if not nbytes:
        return
    grid = np.asarray(devices).reshape(sizes)
    last = np.moveaxis(grid, sorted(axes), range(grid.ndim - len(axes), grid.ndim))
    count = math.prod(sizes[a] for a in axes)
    for group in last.reshape(-1, count).tolist():
        for k, device in enumerate(group):
            if kind == "all_to_all":
                others = [d for d in group if d != device]
            else:
                behind = -1 if kind == "all_reduce" else 1
                others = [group[(k + behind) % count]]
            for other in others:
                yield device, other, nbytes / len(others)


# Between stages.


def _between_stages(
    bound: BoundStages, process_of: Sequence[int]
) -> Iterator[tuple[int, int, float]]:
    """Yields messages between stages, and of rows of the batch.

    Each message is (sending device, receiving device, bytes).
    """
    cut, values = bound.cut, bound.cut.analysis.graph.values
    places = _ProcessPlaces(bound, process_of)
    for m in stage_messages(cut):
        nbytes = m.times * values[m.value].nbytes
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
        layout = wire_of(layouts, value, stage, other)
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
