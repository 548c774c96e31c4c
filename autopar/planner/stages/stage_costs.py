"""Computes the costs of the tasks of planned stages: seconds and bytes of each part.

A *part* is a run of consecutive layers of the model. Part ``k`` is on stage ``k %
stages``, so a stage has several parts if its schedule is interleaved.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from autopar.cluster import Cluster, LinkSpec
from autopar.compression.codecs.registry import parse_codec
from autopar.cost.codecs import local_s
from autopar.cost.live import habits_of
from autopar.cost.traffic import Collective
from autopar.layouts.assignment import Assignment, kept_layout
from autopar.layouts.layout import Layout, reshard_steps, shards
from autopar.layouts.pieces import wire_layout
from autopar.planner.candidate import Candidate
from autopar.steps.stages import CutStep
from autopar_passes.graph.roles import Role
from autopar_passes.layer_loops.split import piece_arguments, piece_holders
from autopar_passes.microbatches.facts import Combine
from autopar_passes.program.equations import reads, walk
from autopar_passes.stages.cut import Phase, Task, TaskKey
from autopar_solver import TaskKind, TaskSeconds

KINDS = {
    Phase.FORWARD: TaskKind.FORWARD,
    Phase.BACKWARD: TaskKind.BACKWARD,
    Phase.BACKWARD_INPUT: TaskKind.BACKWARD_INPUT,
    Phase.BACKWARD_WEIGHT: TaskKind.BACKWARD_WEIGHT,
}


@dataclasses.dataclass(frozen=True, eq=False)
class StageCosts:
    """The costs of a pipeline.

    Attributes:
      tasks: seconds of each part's tasks and links, as input of
        `autopar_solver.stages.schedules.play`.
      step_bytes: by stage, bytes on a device that do not depend on the schedule: state,
        gradients, and one microbatch.
      copy_bytes: by stage, bytes on a device while stages send each other layers that
        they hold for others, before the microbatches and after the update.
      activation_bytes: by part, bytes of activations that a device keeps of one
        microbatch.
      sent_bytes: bytes that one device of each stage sends in a step, within the stage
        and to others.
    """

    tasks: TaskSeconds
    step_bytes: tuple[float, ...]
    copy_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    sent_bytes: tuple[float, ...]


def stage_costs(
    cut: CutStep,
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
    found: Sequence[Candidate],
) -> StageCosts:
    """Computes the cost of each task of a pipeline.

    Args:
      cut: the step as stages.
      cluster: all devices.
      devices: by stage, the positions of its devices in the cluster.
      found: by stage, the layouts and their costs.
    """
    parts, count = cut.cut.parts.count, cut.found.microbatches
    task_s = np.zeros((parts, len(TaskKind)))
    step_s = np.zeros(len(found))
    for stage, candidate in enumerate(found):
        seconds = _task_seconds(cut, stage, candidate)
        for key, value in seconds.items():
            if key.phase is Phase.UPDATE:
                step_s[stage] += value
            else:
                task_s[key.number, KINDS[key.phase]] += value / count
    layouts = [candidate.assignment for candidate in found]
    within = [0.0] * len(found)
    for stage, candidate in enumerate(found):
        pricer = candidate.pricer
        for key, c in wire_collectives(cut, stage, layouts):
            within[stage] += c.sent_bytes(pricer)
            if key.phase is Phase.UPDATE:
                step_s[stage] += c.seconds(pricer)
            else:
                task_s[key.number, KINDS[key.phase]] += c.seconds(pricer) / count
    for key, seconds in coding_s(cut, found):
        task_s[key.number, KINDS[key.phase]] += seconds
    held, copied, shared = ([0.0] * len(found) for _ in range(3))
    for holder, stage, value in copied_layers(cut):
        nbytes = _device_bytes(cut, [value], layouts[stage])
        held[holder] += nbytes
        # The holder makes a copy of the layers that it sends. If another stage runs
        # these layers, the holder also receives as many layers, which it runs itself.
        copied[holder] += nbytes * (1 + (holder != stage))
    for source, _, nbytes in sent_layers(cut, layouts):
        shared[source] += nbytes
    step_s += sent_layers_s(cut, cluster, devices, layouts)
    for source, target, value in _sent_once(cut):
        nbytes = _wire_bytes(cut, [value], layouts, source, target)
        shared[source] += nbytes
        link = link_between(cluster, devices[source], devices[target])
        step_s[source] += link.latency_s + nbytes / link.bandwidth_bytes_per_s
    links = [link_s(cut, cluster, devices, found, k) for k in range(parts - 1)]
    kept = [_activation_bytes(cut, k, found) for k in range(parts)]
    tasks = TaskSeconds(
        task_s=task_s,
        forward_link_s=np.array([link[0] for link in links]),
        backward_link_s=np.array([link[1] for link in links]),
        latency_s=np.array([link[2] for link in links]),
        step_s=step_s,
        held_bytes=np.array(kept),
        pending_bytes=np.array(kept),
    )
    return StageCosts(
        tasks,
        tuple(c.peak_memory_bytes + n for c, n in zip(found, held, strict=True)),
        tuple(
            _device_bytes(cut, _state(cut, stage), layouts[stage]) + nbytes
            for stage, nbytes in enumerate(copied)
        ),
        tuple(kept),
        tuple(
            c.communication_bytes + sum(more)
            for c, *more in zip(found, shared, within, strict=True)
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class StageMessage:
    """A value that one stage sends to another.

    Attributes:
      value: number of the value in the program of a microbatch.
      source: the sending stage.
      target: the receiving stage.
      maker: the task that computes the value; None: the value is an input of the step.
      readers: the tasks on the receiving stage that read the value.
      times: number of times that the value is sent in a step, each time in its size in
        the program.
    """

    value: int
    source: int
    target: int
    maker: TaskKey | None
    readers: tuple[TaskKey, ...]
    times: int

    @property
    def late(self) -> bool:
        """Whether updates read the value after the microbatches."""
        return self.readers[0].phase is Phase.UPDATE

    @property
    def key(self) -> TaskKey:
        """The task that sends the value: its maker, or the update task of the sending
        stage.

        Inputs, and sums over microbatches, are sent outside of the tasks of
        microbatches.
        """
        if self.maker is None or self.late:
            return TaskKey(Phase.UPDATE, self.source, 0)
        return self.maker


def stage_messages(cut: CutStep) -> tuple[StageMessage, ...]:
    """All values that stages send each other in a step.

    If several tasks of a stage read a value, the value is sent to the stage once.
    Values that an update reads are sent after the microbatches. Sums over microbatches,
    and values that are equal in all microbatches, are then sent once; rows are sent
    once for each microbatch. Rows of the batch are sent to a later stage with each
    microbatch.
    """
    count, owners = cut.found.microbatches, cut.cut.owners
    batch = {*cut.cut.parts.flow.batch}
    rows = {c.value for c in cut.found.crossings if c.combine is Combine.ROWS}
    found: dict[tuple[int, int, TaskKey | None, bool], list[TaskKey]] = {}
    for key, task in cut.cut.tasks.items():
        late = key.phase is Phase.UPDATE
        for value, maker in task.inputs:
            source = owners[value] if maker is None else maker.stage
            if source != key.stage:
                place = value, key.stage, maker, late and maker is not None
                found.setdefault(place, []).append(key)
    out: list[StageMessage] = []
    for (value, target, maker, late), readers in found.items():
        source = owners[value] if maker is None else maker.stage
        each = value in batch if maker is None else not late or value in rows
        times = count if each else 1
        out.append(StageMessage(value, source, target, maker, tuple(readers), times))
    return tuple(out)


def wire_collectives(
    cut: CutStep, stage: int, assignments: Sequence[Assignment]
) -> list[tuple[TaskKey, Collective]]:
    """The collectives within a stage that reshard values for messages to and from other
    stages.

    A value is sent in the layout that both stages can name (`wire_layout`). The task
    that computes the value reshards it to this layout. Each task that reads the value
    on another stage reshards it to the layout on that stage.

    Args:
      cut: the step as stages.
      stage: number of the stage.
      assignments: the layouts of each stage.

    Returns:
      Each collective, with the task that contains it.
    """
    own = assignments[stage]
    values = own.graph.values
    count = cut.found.microbatches
    out: dict[tuple[TaskKey, int, Layout, Layout], list[Collective]] = {}

    def add(key: TaskKey, value: int, start: Layout, end: Layout, times: int) -> None:
        steps = reshard_steps(start, end, (), "sum", tuple(own.sizes))
        nbytes = values[value].nbytes  # a value is resharded before it is encoded
        out[key, value, start, end] = [
            Collective(s, nbytes, times, value, _operator_of(own, value))
            for s in steps
            if s.kind != "slice"
        ]

    for m in stage_messages(cut):
        if stage not in (m.source, m.target):
            continue
        other = m.target if m.source == stage else m.source
        lies = kept_layout(own, m.value)
        wire = wire_of(cut, assignments, m.value, stage, other)
        if m.source == stage:
            add(m.key, m.value, lies, wire, m.times)
        else:
            for key in m.readers:
                late = key.phase is Phase.UPDATE
                add(key, m.value, wire, lies, m.times if late else count)
    return [(key, c) for (key, *_), found in out.items() for c in found]


def _operator_of(assignment: Assignment, value: int) -> int:
    """Returns the operator of a stage that computes a value, or its first reader.

    Some values of an update have no operator on the stage that computes them: values
    that other stages have computed, and values joined from all microbatches.
    """
    made = assignment.contraction.producer.get(value)
    if made is not None:
        return made.index
    readers = (op.index for op in assignment.graph.operators if value in op.inputs)
    return next(readers, 0)


def wire_of(
    cut: CutStep, assignments: Sequence[Assignment], value: int, stage: int, other: int
) -> Layout:
    """The layout in which a stage sends a value to another stage, or receives it.

    The dims that form the rows of a code are not split.
    """
    mine, theirs = assignments[stage], assignments[other]
    layout = wire_layout(
        kept_layout(mine, value), mine.sizes, kept_layout(theirs, value), theirs.sizes
    )
    code = cut.codes.get(value)
    if code is None:
        return layout
    return (*layout[: code.lead], *[()] * (len(layout) - code.lead))


def _sent_once(cut: CutStep) -> set[tuple[int, int, int]]:
    """The values that stages send each other once a step, such as weights that two
    stages read.

    A stage that reads state of another stage receives this state, and sends back its
    gradient. Small values are left out, because sending them takes negligible time.

    Returns:
      The sending stage, the receiving stage, and the value.
    """
    flow = cut.cut.parts.flow
    return {
        (m.source, m.target, m.value)
        for m in stage_messages(cut)
        if not flow.small(m.value)
        and (m.value in flow.state if m.maker is None else m.late)
    }


def copied_layers(cut: CutStep) -> Iterator[tuple[int, int, int]]:
    """Yields the pieces of stacked arrays that a step copies.

    Between steps, a piece is a part of its array on the stage that holds it. A step
    copies the piece, sends the copy to the stage that runs its layers, and gets the
    result back. No copy is made of a piece that its stage runs itself, if the stage
    holds nothing else of the array.

    Yields the stage that holds the piece, the stage that runs it, and its value.
    """
    whole, owners = cut.analysis.whole or cut.analysis, cut.cut.owners
    arguments = cut.cut.program.body.inputs
    behind = sum(len(sizes) - 1 for sizes in whole.pieces.values())
    written = len(whole.graph.inputs) - behind
    for k, places in piece_arguments(written, whole.pieces).items():
        values = [arguments[place] for place in places]
        stages = [owners[v] for v in values]
        holders = piece_holders(whole.pieces[k], stages, len(cut.stages))
        for holder, stage, value in zip(holders, stages, values, strict=True):
            if holder != stage or holders.count(holder) > 1:
                yield holder, stage, value


def _state(cut: CutStep, stage: int) -> list[int]:
    """Returns the values of the state that a stage has during a step."""
    owners = cut.cut.owners
    return [v for v in cut.cut.parts.flow.state if owners.get(v) == stage]


def sent_layers(
    cut: CutStep, assignments: Sequence[Assignment]
) -> Iterator[tuple[int, int, float]]:
    """Yields the messages of `copied_layers`, to the other stage and back.

    Each message has the sending stage, the receiving stage, and the bytes that one
    device sends.
    """
    for holder, stage, value in copied_layers(cut):
        if holder != stage:
            nbytes = _device_bytes(cut, [value], assignments[stage])
            yield holder, stage, nbytes
            yield stage, holder, nbytes


def sent_layers_s(
    cut: CutStep,
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
    assignments: Sequence[Assignment],
) -> list[float]:
    """By stage, the seconds of a step in which it sends stacked layers (`sent_layers`).

    Args:
      cut: the step as stages.
      cluster: all devices.
      devices: by stage, the positions of its devices in the cluster.
      assignments: the layouts of each stage.
    """
    out = [0.0] * len(devices)
    for source, target, nbytes in sent_layers(cut, assignments):
        link = link_between(cluster, devices[source], devices[target])
        out[source] += link.latency_s + nbytes / link.bandwidth_bytes_per_s
    return out


def _task_seconds(
    cut: CutStep, stage: int, candidate: Candidate
) -> dict[TaskKey, float]:
    """Returns the seconds of each task in a step, summed over all microbatches.

    All operators of a class cost the same in every task that runs them. A
    rematerialised operator is counted once for each run. Communication that overlaps
    with work is divided among the tasks in proportion to their seconds.
    """
    graph = candidate.assignment.graph
    tasks = _tasks_of(cut, stage)
    members: dict[int, list[int]] = defaultdict(list)
    for op in graph.operators:
        members[op.class_index].append(op.equation)
    out: dict[TaskKey, float] = defaultdict(float)
    once = TaskKey(Phase.UPDATE, stage, 0)
    work, sent = candidate.estimate.work, candidate.estimate.messages
    seconds_s = np.concatenate([work.planned_s + work.kernel_s, sent.planned_s])
    makers = [*work.table.operators.tolist(), *(c.operator for c in sent.collectives)]
    paid_once = [*work.table.update.tolist(), *sent.once.tolist()]
    for maker, seconds, update in zip(
        makers, seconds_s.tolist(), paid_once, strict=True
    ):
        if not seconds:
            continue
        if update:
            out[once] += seconds
            continue
        equations = members[graph.operators[maker].class_index]
        for index in equations:
            for key in tasks.get(index, (once,)):
                out[key] += seconds / len(equations)
    whole = sum(out.values())
    cost = candidate.cost
    hidden_s = cost.cover_s - cost.contention_s
    return {k: s * (1 - hidden_s / whole) if whole else s for k, s in out.items()}


def _tasks_of(cut: CutStep, stage: int) -> dict[int, list[TaskKey]]:
    """Maps each equation (also within a region) to the stage's tasks that run it."""
    out: dict[int, list[TaskKey]] = defaultdict(list)
    for task in cut.cut.of_stage(stage):
        for index in _needed_equations(cut, task):
            for inner in (index, *_inside(cut, index)):
                out[inner].append(task.key)
    return dict(out)


def _needed_equations(cut: CutStep, task: Task) -> list[int]:
    """Returns the equations of a task whose results are read.

    Compilers remove the other equations.

    A task that rematerialises activations also has equations whose results only the
    next part reads.
    """
    equations = cut.cut.parts.flow.equations
    wanted = set(task.outputs)
    out: list[int] = []
    for index in reversed(task.equations):
        eqn = equations[index]
        if wanted.intersection(eqn.outputs) or eqn.source.effects:
            out.append(index)
            wanted.update(reads(eqn))
    return out[::-1]


def _inside(cut: CutStep, index: int) -> Iterable[int]:
    eqn = cut.cut.parts.flow.equations[index]
    return [e.index for region in eqn.regions for e in walk(region)]


def _device_bytes(cut: CutStep, values: Iterable[int], assignment: Assignment) -> float:
    """Returns the bytes of values on one device of a stage."""
    return sum(
        cut.analysis.graph.values[v].nbytes
        / shards(assignment.home_layout(v), assignment.sizes)
        for v in values
    )


def _wire_bytes(
    cut: CutStep,
    values: Iterable[int],
    assignments: Sequence[Assignment],
    source: int,
    target: int,
) -> float:
    """Returns the bytes of values that one device of a stage sends to another stage."""
    sizes = assignments[source].sizes
    return sum(
        cut.sent_bytes(v) / shards(wire_of(cut, assignments, v, source, target), sizes)
        for v in values
    )


def coding_s(
    cut: CutStep, found: Sequence[Candidate]
) -> Iterator[tuple[TaskKey, float]]:
    """Yields the seconds of a microbatch in which a task encodes or decodes a value.

    A codec's measured or counted seconds are those of encoding and decoding together.
    Half of them are taken for each.
    """
    layouts = [candidate.assignment for candidate in found]
    for m in stage_messages(cut):
        code = cut.codes.get(m.value)
        if code is None or m.maker is None:
            continue
        shape = cut.analysis.graph.values[m.value].shape
        codec = parse_codec(code.codec)
        wire = wire_of(cut, layouts, m.value, m.source, m.target)
        for key in (m.maker, *m.readers):
            device = found[key.stage].pricer.cluster.device
            parts = shards(wire, layouts[m.source].sizes)
            yield key, local_s(codec, shape, device) / 2 / parts


def _activation_bytes(cut: CutStep, part: int, found: Sequence[Candidate]) -> float:
    """Bytes that a device keeps of a microbatch from its forward to its
    backward pass.
    """
    stage = cut.cut.stage_of[part]
    batch = cut.cut.parts.flow.batch
    kept = {
        value
        for key, task in cut.cut.tasks.items()
        if key.phase in KINDS and key.phase is not Phase.FORWARD and key.number == part
        for value, maker in task.inputs
        if (maker is None and value in batch)
        or (maker is not None and maker.phase is Phase.FORWARD)
    }
    # Codes that the stage has sent and keeps as masks (`cut_codecs.with_codes`).
    sent = {~v for v in kept if v < 0}
    kept -= {~v for v in sent}
    encoded = kept.intersection(cut.codes)
    if encoded:
        encoded -= _made(cut, stage)
    nbytes = _device_bytes(cut, kept - encoded, found[stage].assignment)
    assignments = [candidate.assignment for candidate in found]
    for m in stage_messages(cut) if encoded or sent else ():
        if (m.target == stage and m.value in encoded) or (
            m.source == stage and m.value in sent
        ):
            nbytes += _wire_bytes(cut, [m.value], assignments, m.source, m.target)
    return nbytes


def _made(cut: CutStep, stage: int) -> set[int]:
    """Returns the values that the tasks of a stage compute for other tasks."""
    return {v for task in cut.cut.of_stage(stage) for v in task.outputs}


def _sent_values(cut: CutStep, part: int, other: int, *, forward: bool) -> set[int]:
    """Returns the values that tasks of one part send to another part."""
    source, target = _of_part(cut, part, forward), _of_part(cut, other, None)
    keys = {t.key for t in source}
    return {v for task in target for v, maker in task.inputs if maker in keys}


def _of_part(cut: CutStep, part: int, forward: bool | None) -> list[Task]:
    return [
        t
        for key, t in cut.cut.tasks.items()
        if key.phase is not Phase.UPDATE
        and key.number == part
        and (forward is None or (key.phase is Phase.FORWARD) is forward)
    ]


def link_s(
    cut: CutStep,
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
    found: Sequence[Candidate],
    part: int,
) -> tuple[float, float, float]:
    """Returns the seconds of a part's link forward and backward, and its latency.

    Activations are sent forward to the next part, cotangents back.
    """
    one, two = cut.cut.stage_of[part], cut.cut.stage_of[part + 1]
    if one == two:
        return 0.0, 0.0, 0.0
    link = link_between(cluster, devices[one], devices[two])
    ahead, back = link_bytes(cut, [c.assignment for c in found], part)
    rate = link.bandwidth_bytes_per_s
    return ahead / rate, back / rate, link.latency_s


def link_bytes(
    cut: CutStep, assignments: Sequence[Assignment], part: int
) -> tuple[float, float]:
    """Returns the bytes of a microbatch on the link between a part and the next part.

    The first number is what one device sends from ``part`` to the next part
    (activations), the second what one device sends from the next part back to ``part``
    (cotangents).

    A value that skips parts is counted on the link into the part that reads it. Parts
    on the same stage send each other nothing.

    Args:
      cut: the step as stages.
      assignments: the layouts of each stage.
      part: the first of the two parts.
    """
    one, two = cut.cut.stage_of[part], cut.cut.stage_of[part + 1]
    if one == two:
        return 0.0, 0.0
    ahead: set[int] = set()
    back: set[int] = set()
    for k in range(part + 1):
        if cut.cut.stage_of[k] != two:
            ahead |= _sent_values(cut, k, part + 1, forward=True)
            back |= _sent_values(cut, part + 1, k, forward=False)
    return (
        _wire_bytes(cut, ahead, assignments, one, two),
        _wire_bytes(cut, back, assignments, two, one),
    )


def link_between(
    cluster: Cluster, first: Sequence[int], second: Sequence[int]
) -> LinkSpec:
    """Returns the slowest link that messages between two sets of devices take.

    Each device of the first set sends to one device of the second set, all at the same
    time.
    """
    parts = cluster.groups or (cluster,)
    begin = 0
    group_of: dict[int, tuple[int, int]] = {}
    for number, part in enumerate(parts):
        for k in range(part.num_devices):
            group_of[begin + k] = (number, k)
        begin += part.num_devices
    (a, x), (b, y) = group_of[first[0]], group_of[second[0]]
    if a != b:
        assert cluster.between is not None
        return cluster.between
    levels = parts[a].levels
    block = parts[a].num_devices
    for level in levels:
        block //= level.size
        if x // block != y // block:
            return level.link
    return levels[-1].link


def saved_bytes(
    cut: CutStep, layers: Sequence[int], recomputed: Collection[int], found: Candidate
) -> float:
    """Bytes of one microbatch's activations that rematerialisation saves on a device.

    The search of a stage counts the activations of all of its layers at once.
    Rematerialised activations exist for only one layer at a time. So only those of the
    layer with the most bytes are counted.

    Args:
      cut: the step as stages.
      layers: the forward equation at which each layer begins.
      recomputed: the layers of the stage that are rematerialised.
      found: the stage's layouts.
    """
    sizes = recomputed_bytes(cut, layers, recomputed, found).values()
    return sum(sizes) - max(sizes, default=0.0)


def recomputed_bytes(
    cut: CutStep, layers: Sequence[int], recomputed: Collection[int], found: Candidate
) -> dict[int, float]:
    """Layer of a stage -> bytes of its rematerialised activations on a device.

    The bytes are those of one microbatch. Layers without such activations are left out.

    Args:
      cut: the step as stages.
      layers: the forward equation at which each layer begins.
      recomputed: the layers of the stage that are rematerialised.
      found: the stage's layouts.
    """
    flow = cut.cut.parts.flow
    order = {index: k for k, index in enumerate(flow.equations)}
    begins = [order[start] for start in layers]
    analysis, device = found.assignment.analysis, found.pricer.cluster.device
    life = analysis.life(habits_of(device))
    known = {i.value for i in analysis.graph.inputs}
    held: dict[int, list[int]] = {}
    for value, maker in flow.maker.items():
        layer = max(0, bisect.bisect_right(begins, order[maker]) - 1)
        if layer not in recomputed or maker not in cut.again:
            continue
        read = any(flow.roles[r] is Role.BACKWARD for r in flow.readers.get(value, ()))
        if read and value in life.written and value not in known:
            held.setdefault(layer, []).append(value)
    overhead = device.corrections.memory_overhead * life.factor
    return {
        layer: overhead * _device_bytes(cut, values, found.assignment)
        for layer, values in held.items()
    }
