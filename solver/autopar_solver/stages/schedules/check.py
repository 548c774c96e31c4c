"""Verifies a schedule's table without timing it, and counts what it keeps alive."""

import dataclasses
from collections import deque

import numpy as np

from autopar_errors import InputError
from autopar_solver.stages.schedules.tasks import ScheduleTable, TaskKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alive:
    """What one device group keeps after each of its tasks has begun.

    A microbatch is *held* by a chunk from its forward until its backward is done, and
    *pending* from the gradient of its input until that of its weights is done.

    Attributes:
        held: int64 ``[tasks, chunks]``: microbatches held while each task runs.
        pending: the same, microbatches that wait for gradients of weights.
    """

    held: np.ndarray
    pending: np.ndarray

    @property
    def most(self) -> int:
        """The most activations alive, of all chunks together."""
        return int((self.held + self.pending).sum(axis=1).max(initial=0))


def alive(table: ScheduleTable, stage: int) -> Alive:
    """Counts what a device group keeps alive while each of its tasks runs."""
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
    # What ends with a task is alive while the task runs.
    return Alive(
        held=np.cumsum(begun - ended, axis=0) + ended,
        pending=np.cumsum(kept - dropped, axis=0) - kept + dropped,
    )


def check_table(table: ScheduleTable) -> None:
    """Verifies that a table computes a whole step and cannot stop in the middle.

    Every part runs every microbatch's forward once, and either its whole backward once
    or both halves of it. Run in their orders, the groups never wait for each other in
    a circle.

    Raises:
        InputError: a task is missing, doubled, unknown, or waits forever; the message
            names it.
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
    """Runs what can run until nothing is left, or nothing can."""
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
            # Both kinds of backward that send cotangents on count as one.
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
    """What must be done before a task."""
    if kind == TaskKind.FORWARD:
        return [(kind, number, part - 1)] if part else []
    if kind == TaskKind.BACKWARD_WEIGHT:
        return [(TaskKind.BACKWARD, number, part)]
    needs = [(TaskKind.FORWARD, number, part)]
    if part + 1 < parts:
        needs.append((TaskKind.BACKWARD, number, part + 1))
    return needs
