"""Simulates a schedule's table: the begin and the end of each task in seconds.

Each stage runs its tasks in order. A task begins as soon as the stage is free and the
task's input has arrived. Links are queues, first in first out, with one link from each
stage to each other stage. A message starts when its link is free, occupies the link for
its transfer seconds, and arrives one latency after that.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque
from typing import NamedTuple

import numpy as np

from autopar_errors import InputError

# Builds the tables of the published schedules, for any number of microbatches.
#
# - GPipe (Huang et al., 2019): all forward passes, then all backward passes. - 1F1B
# (Narayanan et al., PipeDream-Flush, 2021): stage ``i`` of ``S`` begins with ``S -   i
# - 1`` forward passes, and then alternates between forward and backward. At most ``S
# - i`` microbatches are alive: forward passes of which the backward pass has not ended.
# - Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021): each stage has several
# chunks,   so all stages have work sooner, by a factor equal to the number of chunks. -
# ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023): the backward pass is split.
# Gradients of weights wait while gradients of inputs are sent to the previous stage.
#
# A schedule's table lists the tasks of each stage in the order in which the stage runs
# them.
#
# Each stage runs on its own devices. With ``chunks`` chunks per stage, the chain of
# layers is cut into ``chunks * stages`` *parts*: part ``k`` is chunk ``k // stages`` of
# stage ``k % stages``. Part ``k`` sends activations to part ``k + 1``, and receives
# gradients of activations from it.


class TaskKind(enum.IntEnum):
    """The computation of a task."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3


class ScheduleKind(enum.Enum):
    """The published schedules."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """A kind of schedule, and the number of chunks of each stage.

    Raises:
        InputError: there is no chunk, or several chunks without interleaving.

    >>> Schedule(ScheduleKind.INTERLEAVED, 2).name
    'interleaved x2'
    """

    kind: ScheduleKind
    chunks: int = 1

    def __post_init__(self) -> None:
        """Checks the number of chunks."""
        if self.chunks < 1:
            raise InputError(f"Schedule: chunks must be at least 1, got {self.chunks}.")
        if self.chunks > 1 and self.kind is not ScheduleKind.INTERLEAVED:
            raise InputError(
                f"Schedule: {self.kind.value} has one chunk a group, got "
                f"{self.chunks}: use ScheduleKind.INTERLEAVED for more."
            )

    @property
    def name(self) -> str:
        """The name of the schedule in messages."""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        return self.kind.value + chunks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and gradients of weights are separate tasks."""
        return self.kind is ScheduleKind.ZERO_BUBBLE


class ScheduleTask(NamedTuple):
    """One computation of one microbatch on one chunk of a stage."""

    kind: TaskKind
    microbatch: int
    chunk: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleTable:
    """The tasks of each stage, in the order in which the stage runs them.

    Attributes:
        stages: the number of stages.
        microbatches: the number of microbatches of a step.
        chunks: the number of parts of the model that each stage has.
        orders: for each stage, int64 ``[tasks, 3]``: kind, microbatch and chunk of each
            task.
    """

    stages: int
    microbatches: int
    chunks: int
    orders: tuple[np.ndarray, ...]

    @property
    def parts(self) -> int:
        """The number of parts of the model."""
        return self.stages * self.chunks

    def tasks(self, stage: int) -> tuple[ScheduleTask, ...]:
        """Returns the tasks of one stage, in order."""
        rows = self.orders[stage].tolist()
        return tuple(ScheduleTask(TaskKind(kind), m, chunk) for kind, m, chunk in rows)

    def part(self, stage: int, chunk: int) -> int:
        """Returns the part of the model that is a stage's chunk."""
        return chunk * self.stages + stage


def make_table(schedule: Schedule, stages: int, microbatches: int) -> ScheduleTable:
    """Builds the table of a schedule.

    Args:
        schedule: the schedule, with its number of chunks.
        stages: the number of stages.
        microbatches: the number of microbatches of a step; it may be less than
            ``stages``.

    Raises:
        InputError: there is no stage or no microbatch.

    >>> table = make_table(Schedule(ScheduleKind.ONE_F_ONE_B), 2, 2)
    >>> [f"{task.kind.name[0]}{task.microbatch}" for task in table.tasks(0)]
    ['F0', 'F1', 'B0', 'B1']
    """
    if stages < 1 or microbatches < 1:
        raise InputError(
            "make_table: stages and microbatches must be at least 1, got "
            f"{stages} and {microbatches}."
        )
    if schedule.kind is ScheduleKind.INTERLEAVED:
        order = _interleave
    elif schedule.kind is ScheduleKind.ZERO_BUBBLE:
        order = _zero_bubble
    elif schedule.kind is ScheduleKind.GPIPE:
        order = _gpipe
    else:
        order = _one_f_one_b
    return ScheduleTable(
        stages=stages,
        microbatches=microbatches,
        chunks=schedule.chunks,
        orders=tuple(
            order(stages, microbatches, schedule.chunks, stage)
            for stage in range(stages)
        ),
    )


def _tasks(kind: TaskKind, microbatches: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    kinds = np.full(len(microbatches), int(kind))
    return np.stack([kinds, microbatches, chunks], axis=1)


def _alternating(
    forwards: np.ndarray, backwards: np.ndarray, warm_up: int
) -> np.ndarray:
    """``warm_up`` forwards, then forward and backward in turns, then the rest."""
    late = len(forwards) - warm_up
    pairs = np.stack([forwards[warm_up:], backwards[:late]], axis=1)
    return np.concatenate([forwards[:warm_up], pairs.reshape(-1, 3), backwards[late:]])


def _gpipe(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    numbers, zeros = np.arange(microbatches), np.zeros(microbatches, np.int64)
    forwards = _tasks(TaskKind.FORWARD, numbers, zeros)
    return np.concatenate([forwards, _tasks(TaskKind.BACKWARD, numbers, zeros)])


def _one_f_one_b(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    numbers, zeros = np.arange(microbatches), np.zeros(microbatches, np.int64)
    return _alternating(
        _tasks(TaskKind.FORWARD, numbers, zeros),
        _tasks(TaskKind.BACKWARD, numbers, zeros),
        min(stages - stage - 1, microbatches),
    )


def _interleave(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    """The interleaved order: rounds of ``stages`` microbatches through all chunks.

    Megatron's order requires that ``microbatches`` is a multiple of ``stages``. For
    other numbers, the order is built for the next multiple, and the tasks of
    microbatches that do not exist are removed. The remaining tasks still have a valid
    order.
    """
    rounds = -(-microbatches // stages)
    place = np.arange(rounds * stages * chunks)
    number = place // (stages * chunks) * stages + place % stages
    chunk = place // stages % chunks
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    order = _alternating(
        _tasks(TaskKind.FORWARD, number, chunk),
        _tasks(TaskKind.BACKWARD, number, chunks - 1 - chunk),
        min(warm_up, len(place)),
    )
    return order[order[:, 1] < microbatches]


def _zero_bubble(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    """1F1B in which stage ``i`` delays gradients of weights by ``i`` microbatches.

    Each stage then has at most ``stages`` live microbatches, as many as the first stage
    has in 1F1B. Gradients of activations reach each stage without waiting for gradients
    of weights.
    """
    order = _one_f_one_b(stages, microbatches, chunks, stage)
    numbers = np.arange(microbatches)
    weights = _tasks(TaskKind.BACKWARD_WEIGHT, numbers, np.zeros_like(numbers))
    late = min(stage, microbatches)
    backward = order[:, 0] == TaskKind.BACKWARD
    order[backward, 0] = TaskKind.BACKWARD_INPUT
    before = np.flatnonzero(backward)[late:] + 1
    order = np.insert(order, before, weights[: microbatches - late], axis=0)
    return np.concatenate([order, weights[microbatches - late :]])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alive:
    """The microbatches that one stage keeps after each of its tasks has begun.

    A chunk *holds* a microbatch from the microbatch's forward pass until its backward
    pass ends. A microbatch is *pending* from the end of its gradient of inputs until
    the end of its gradient of weights.

    Attributes:
        held: int64 ``[tasks, chunks]``: microbatches that each chunk holds while each
          task runs.
        pending: int64 ``[tasks, chunks]``: microbatches that are pending while each
            task runs.
    """

    held: np.ndarray
    pending: np.ndarray

    @property
    def most(self) -> int:
        """The largest number of microbatches held at once, over all chunks together."""
        return int((self.held + self.pending).sum(axis=1).max(initial=0))


def count_alive(table: ScheduleTable, stage: int) -> Alive:
    """Counts the microbatches that a stage keeps while each of its tasks runs."""
    order = table.orders[stage]
    kind, chunk = order[:, 0], order[:, 2]
    places = np.arange(len(order))
    begun, ended, kept = np.zeros((3, len(order), table.chunks), np.int64)
    begun[places, chunk] = kind == TaskKind.FORWARD
    ended[places, chunk] = (kind == TaskKind.BACKWARD) | (
        kind == TaskKind.BACKWARD_INPUT
    )
    kept[places, chunk] = kind == TaskKind.BACKWARD_INPUT
    dropped = np.zeros_like(kept)
    dropped[places, chunk] = kind == TaskKind.BACKWARD_WEIGHT
    # Microbatches that a task releases are still live while the task runs.
    return Alive(
        held=np.cumsum(begun - ended, axis=0) + ended,
        pending=np.cumsum(kept - dropped, axis=0) - kept + dropped,
    )


def check_table(table: ScheduleTable) -> None:
    """Verifies that a table computes a whole step and cannot deadlock.

    Every part must run each microbatch's forward pass once. Every part must also run
    either the whole backward pass once, or both of its halves: gradients of inputs, and
    gradients of weights. If all stages run their tasks in order, no stages may wait for
    each other in a circle.

    Raises:
        InputError: a task is missing, repeated, unknown, or waits forever; the message
            names the task.
    """
    if len(table.orders) != table.stages:
        raise InputError(
            f"schedule: {len(table.orders)} orders for {table.stages} stages."
        )
    for stage in range(table.stages):
        _check_tasks(table, stage)
    _run(table)


def _check_tasks(table: ScheduleTable, stage: int) -> None:
    seen = table.tasks(stage)
    found = set(seen)
    for task in seen:
        inside = 0 <= task.microbatch < table.microbatches
        if not (inside and 0 <= task.chunk < table.chunks):
            raise InputError(f"schedule: stage {stage} has no task {task}.")
    if len(found) != len(seen):
        twice = next(task for task in seen if seen.count(task) > 1)
        raise InputError(f"schedule: stage {stage} runs {twice} twice.")
    for microbatch in range(table.microbatches):
        for chunk in range(table.chunks):
            kinds = {kind for kind in TaskKind if (kind, microbatch, chunk) in found}
            if kinds not in _COMPLETE:
                names = ", ".join(sorted(kind.name for kind in kinds)) or "nothing"
                raise InputError(
                    f"schedule: stage {stage} runs {names} of microbatch {microbatch}, "
                    f"chunk {chunk}: a forward and one whole backward are needed."
                )


_COMPLETE = (
    {TaskKind.FORWARD, TaskKind.BACKWARD},
    {TaskKind.FORWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT},
)


def _run(table: ScheduleTable) -> None:
    """Runs tasks until all tasks have run, or no task can run."""
    done = set[tuple[TaskKind, int, int]]()
    at = [0] * table.stages
    todo = deque(range(table.stages))
    tasks = [table.tasks(stage) for stage in range(table.stages)]
    while todo:
        stage = todo.popleft()
        begin = at[stage]
        for kind, number, chunk in tasks[stage][begin:]:
            part = table.part(stage, chunk)
            if not all(
                need in done for need in _needs(table.parts, kind, number, part)
            ):
                break
            # A whole backward task and a task for gradients of inputs both send
            # gradients to the previous part, so they count as one kind here.
            sent = TaskKind.BACKWARD if kind == TaskKind.BACKWARD_INPUT else kind
            done.add((sent, number, part))
            at[stage] += 1
        if at[stage] > begin:
            todo.extend(other for other in range(table.stages) if other not in todo)
    for stage, place in enumerate(at):
        if place < len(tasks[stage]):
            raise InputError(
                f"schedule: stage {stage} waits forever for {tasks[stage][place]}."
            )


def _needs(
    parts: int, kind: TaskKind, number: int, part: int
) -> list[tuple[TaskKind, int, int]]:
    """Returns the tasks that must end before a task begins."""
    if kind == TaskKind.FORWARD:
        return [(kind, number, part - 1)] if part else []
    if kind == TaskKind.BACKWARD_WEIGHT:
        return [(TaskKind.BACKWARD, number, part)]
    needs = [(TaskKind.FORWARD, number, part)]
    if part + 1 < parts:
        needs.append((TaskKind.BACKWARD, number, part + 1))
    return needs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskSeconds:
    """Seconds and bytes of the parts of a pipeline.

    Attributes:
        task_s: float64 ``[parts, 4]``, by `TaskKind`. A column is ignored if the
            schedule does not have tasks of its kind.
        forward_link_s: ``[parts - 1]``, seconds for which the activations of a
            microbatch occupy the link from part ``k`` to ``k + 1``.
        backward_link_s: like ``forward_link_s``, for gradients of activations from part
            ``k + 1`` to ``k``.
        latency_s: ``[parts - 1]``, the latency between parts ``k`` and ``k + 1``.
        step_s: ``[stages]``, seconds of each stage's work that runs once per step,
            after its last task.
        held_bytes: ``[parts]``, bytes of one microbatch's activations while it is held
            (`Alive`).
        pending_bytes: ``[parts]``, bytes of one microbatch while it is pending
            (`Alive`).
        blocking: whether a stage cannot compute while it sends.
    """

    task_s: np.ndarray
    forward_link_s: np.ndarray
    backward_link_s: np.ndarray
    latency_s: np.ndarray
    step_s: np.ndarray
    held_bytes: np.ndarray
    pending_bytes: np.ndarray
    blocking: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTimes:
    """The times at which the tasks of a table run.

    Attributes:
        starts_s: for each stage, the start of each of its tasks, in seconds.
        ends_s: for each stage, the end of each of its tasks, before its result is sent.
        makespan_s: the time at which all stages have finished their tasks and their
            work that runs once per step.
        busy_s: ``[stages]``, seconds for which each stage computes, including its work
            once per step. Sending is included if it blocks the stage.
        peak_microbatches: ``[stages]``, the largest number of microbatches held at
          once.
        peak_bytes: ``[stages]``, the largest number of bytes of activations held at
          once.
    """

    starts_s: tuple[np.ndarray, ...]
    ends_s: tuple[np.ndarray, ...]
    makespan_s: float
    busy_s: np.ndarray
    peak_microbatches: np.ndarray
    peak_bytes: np.ndarray

    @property
    def bubble(self) -> np.ndarray:
        """``[stages]``, the share of the makespan in which each stage is idle."""
        if self.makespan_s == 0:
            return np.zeros_like(self.busy_s)
        return 1 - self.busy_s / self.makespan_s


def equal_parts(
    table: ScheduleTable, forward_s: float, backward_s: float, weight_s: float = 0.0
) -> TaskSeconds:
    """Returns the seconds and bytes of equal parts.

    Communication takes no time, and a held microbatch takes one byte.

    Args:
        table: the table of the parts.
        forward_s: seconds of the forward pass of one microbatch on one part.
        backward_s: seconds of the gradients of inputs and weights together.
        weight_s: the seconds of ``backward_s`` that the gradients of weights take.
    """
    row = np.zeros(len(TaskKind))
    row[TaskKind.FORWARD], row[TaskKind.BACKWARD] = forward_s, backward_s
    row[TaskKind.BACKWARD_INPUT] = backward_s - weight_s
    row[TaskKind.BACKWARD_WEIGHT] = weight_s
    none = np.zeros(table.parts - 1)
    return TaskSeconds(
        task_s=np.tile(row, (table.parts, 1)),
        forward_link_s=none,
        backward_link_s=none,
        latency_s=none,
        step_s=np.zeros(table.stages),
        held_bytes=np.ones(table.parts),
        pending_bytes=np.ones(table.parts),
    )


def play(table: ScheduleTable, seconds: TaskSeconds) -> TaskTimes:
    """Simulates a table on stages and links.

    Raises:
        InputError: the seconds do not have the table's shape, or a task waits forever.

    >>> from autopar_solver.stages.schedules.play import make_table
    >>> from autopar_solver.stages.schedules.play import Schedule, ScheduleKind
    >>> table = make_table(Schedule(ScheduleKind.ONE_F_ONE_B), 4, 16)
    >>> timeline = play(table, equal_parts(table, 1.0, 2.0))
    >>> [round(float(share), 3) for share in timeline.bubble]
    [0.158, 0.158, 0.158, 0.158]
    """
    _check_shapes(table, seconds)
    player = _Player(table, seconds)
    pairs = [np.array(times).reshape(-1, 2) for times in player.run()]
    stages = range(table.stages)
    return TaskTimes(
        starts_s=tuple(pair[:, 0] for pair in pairs),
        ends_s=tuple(pair[:, 1] for pair in pairs),
        makespan_s=float((np.array(player.clock) + seconds.step_s).max()),
        busy_s=np.array(player.busy) + seconds.step_s,
        peak_microbatches=np.array(
            [count_alive(table, stage).most for stage in stages]
        ),
        peak_bytes=np.array([_peak_bytes(table, seconds, stage) for stage in stages]),
    )


def makespan_s(table: ScheduleTable, seconds: TaskSeconds) -> float:
    """Computes only the makespan of `play`."""
    _check_shapes(table, seconds)
    player = _Player(table, seconds)
    player.run()
    return float((np.array(player.clock) + seconds.step_s).max())


def _peak_bytes(table: ScheduleTable, seconds: TaskSeconds, stage: int) -> float:
    counts = count_alive(table, stage)
    parts = [table.part(stage, chunk) for chunk in range(table.chunks)]
    held = counts.held @ seconds.held_bytes[parts]
    return float((held + counts.pending @ seconds.pending_bytes[parts]).max(initial=0))


def _check_shapes(table: ScheduleTable, seconds: TaskSeconds) -> None:
    parts = table.parts
    expected = {
        "task_s": (parts, len(TaskKind)),
        "forward_link_s": (parts - 1,),
        "backward_link_s": (parts - 1,),
        "latency_s": (parts - 1,),
        "step_s": (table.stages,),
        "held_bytes": (parts,),
        "pending_bytes": (parts,),
    }
    for field, shape in expected.items():
        got = getattr(seconds, field)
        if got.shape != shape:
            raise InputError(f"play: {field} must have shape {shape}, got {got.shape}.")
        if not (np.isfinite(got) & (got >= 0)).all():
            raise InputError(f"play: {field} must be finite and not negative: {got}.")


class _Player:
    """The state of a simulation: clocks of stages and links, and arrival times."""

    def __init__(self, table: ScheduleTable, seconds: TaskSeconds) -> None:
        """Starts when only the input of the first part has arrived."""
        self.table = table
        self.blocking = seconds.blocking
        self.task_s: list[list[float]] = seconds.task_s.tolist()
        # Indexed by direction and sending part. Direction 0 goes to the next part,
        # direction 1 to the previous part.
        self.link_s: list[list[float]] = [
            [*seconds.forward_link_s.tolist(), 0.0],
            [0.0, *seconds.backward_link_s.tolist()],
        ]
        self.latency_s: list[float] = [0.0, *seconds.latency_s.tolist(), 0.0]
        parts, count = table.parts, table.microbatches
        waiting = [[math.inf] * count for _ in range(parts)]
        self.forward_at = [[0.0] * count, *waiting[1:]]
        self.backward_at = [[math.inf] * count for _ in range(parts)]
        self.input_done = [[math.inf] * count for _ in range(parts)]
        self.link_free: dict[tuple[int, int], float] = {}
        self.clock = [0.0] * table.stages
        self.busy = [0.0] * table.stages

    def run(self) -> list[list[tuple[float, float]]]:
        """Returns the start and the end of each task, by stage."""
        orders: list[list[list[int]]] = [rows.tolist() for rows in self.table.orders]
        times: list[list[tuple[float, float]]] = [[] for _ in orders]
        todo = deque(range(len(orders)))
        while todo:
            stage = todo.popleft()
            for group in self._advance(stage, orders[stage], times[stage]):
                if group not in todo:
                    todo.append(group)
        for stage, done in enumerate(times):
            if len(done) < len(orders[stage]):
                kind, number, chunk = orders[stage][len(done)]
                raise InputError(
                    f"play: stage {stage} waits forever for {TaskKind(kind).name} of "
                    f"microbatch {number}, chunk {chunk}."
                )
        return times

    def _advance(
        self, stage: int, order: list[list[int]], times: list[tuple[float, float]]
    ) -> set[int]:
        """Runs a stage's tasks until the input of one is missing.

        Returns the stages that it sent messages to.
        """
        told = set[int]()
        for place in range(len(times), len(order)):
            kind, number, chunk = order[place]
            part = chunk * self.table.stages + stage
            ready = self._ready(kind, number, part)
            if ready == math.inf:
                break
            start = max(self.clock[stage], ready)
            end = start + self.task_s[part][kind]
            times.append((start, end))
            self.clock[stage] = end
            self.busy[stage] += end - start
            if kind == TaskKind.FORWARD:
                self._after_forward(number, part, end, told)
            elif kind != TaskKind.BACKWARD_WEIGHT:
                self._after_backward(number, part, end, told)
        return told

    def _ready(self, kind: int, number: int, part: int) -> float:
        if kind == TaskKind.FORWARD:
            return self.forward_at[part][number]
        if kind == TaskKind.BACKWARD_WEIGHT:
            return self.input_done[part][number]
        return self.backward_at[part][number]

    def _after_forward(
        self, number: int, part: int, end: float, told: set[int]
    ) -> None:
        if part + 1 == self.table.parts:
            self.backward_at[part][number] = end
        else:
            arrival = self._send(0, part, part + 1, end, told)
            self.forward_at[part + 1][number] = arrival

    def _after_backward(
        self, number: int, part: int, end: float, told: set[int]
    ) -> None:
        self.input_done[part][number] = end
        if part:
            arrival = self._send(1, part, part - 1, end, told)
            self.backward_at[part - 1][number] = arrival

    def _send(
        self, direction: int, part: int, other: int, end: float, told: set[int]
    ) -> float:
        """Sends a message that is complete at ``end``; returns its arrival time."""
        source, target = part % self.table.stages, other % self.table.stages
        if source == target:
            return end
        told.add(target)
        seconds = self.link_s[direction][part]
        leaves = end
        if self.blocking:
            self.clock[source] = end + seconds
            self.busy[source] += seconds
        else:
            leaves = max(end, self.link_free.get((source, target), 0.0))
            self.link_free[source, target] = leaves + seconds
        return leaves + seconds + self.latency_s[max(part, other)]
