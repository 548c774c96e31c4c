"""The order in which one process issues the tasks of all stages."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from autopar.runtime.threads import Threads
from autopar_passes.stages.cut import Phase, TaskKey
from autopar_solver import ScheduleTable, TaskKind

_PHASES = {
    TaskKind.FORWARD: Phase.FORWARD,
    TaskKind.BACKWARD: Phase.BACKWARD,
    TaskKind.BACKWARD_INPUT: Phase.BACKWARD_INPUT,
    TaskKind.BACKWARD_WEIGHT: Phase.BACKWARD_WEIGHT,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Issue:
    """A task of one microbatch.

    Attributes:
      key: the task.
      microbatch: number of the microbatch; -1: the task runs once in the step.
    """

    key: TaskKey
    microbatch: int


def issue_order(table: ScheduleTable) -> tuple[Issue, ...]:
    """All tasks of a schedule in an order in which one process can issue them.

    Each task comes after the tasks that it waits for. The tasks of a stage keep the
    order of the schedule. The function takes tasks from the stages in turn, so that no
    stage gets far ahead of the others.
    """
    orders = [list(table.tasks(stage)) for stage in range(table.stages)]
    places = [0] * table.stages
    done: set[tuple[TaskKind, int, int]] = set()
    out: list[Issue] = []
    while any(place < len(o) for place, o in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            if places[stage] == len(order):
                continue
            kind, microbatch, chunk = order[places[stage]]
            part = table.part(stage, chunk)
            if all(
                (k, microbatch, p) in done for k, p in _waits_for(table, kind, part)
            ):
                done.add((kind, microbatch, part))
                out.append(Issue(TaskKey(_PHASES[kind], stage, part), microbatch))
                places[stage] += 1
    return tuple(out)


def _waits_for(
    table: ScheduleTable, kind: TaskKind, part: int
) -> Iterator[tuple[TaskKind, int]]:
    """Yields the tasks of the same microbatch that a task waits for."""
    if kind is TaskKind.FORWARD:
        if part:
            yield TaskKind.FORWARD, part - 1
        return
    if kind is TaskKind.BACKWARD_WEIGHT:
        yield TaskKind.BACKWARD_INPUT, part
        return
    yield TaskKind.FORWARD, part
    if part + 1 < table.parts:
        yield kind, part + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A task of a microbatch, with the tasks that must be issued before it.

    Attributes:
      issue: the task.
      number: number of the task in the order of all tasks.
      waits_for: numbers of the tasks of other stages whose results the task reads.
      tells: numbers of the threads that have tasks which read results of this task.
    """

    issue: Issue
    number: int
    waits_for: tuple[int, ...]
    tells: tuple[int, ...]


def turns(
    order: Sequence[Issue],
    stages: Sequence[Sequence[int]],
    waits_for: Mapping[TaskKey, Sequence[TaskKey]],
) -> list[list[Turn]]:
    """Returns the tasks of each thread, in order.

    Args:
      order: the tasks of all stages; each task comes after the tasks it waits for.
      stages: for each thread the stages of this process that it runs.
      waits_for: task -> tasks of these stages whose results it reads in the same
        microbatch.
    """
    threads = {stage: k for k, own in enumerate(stages) for stage in own}
    numbers = {issue: k for k, issue in enumerate(order)}
    needs: dict[int, tuple[int, ...]] = {}
    readers: dict[int, dict[int, None]] = {}
    for issue, number in numbers.items():
        makers = [Issue(key, issue.microbatch) for key in waits_for[issue.key]]
        needs[number] = tuple(numbers[maker] for maker in makers)
        if issue.key.stage in threads:
            for maker in needs[number]:
                readers.setdefault(maker, {})[threads[issue.key.stage]] = None
    return [
        [
            Turn(issue, number, needs[number], tuple(readers.get(number, ())))
            for issue, number in numbers.items()
            if issue.key.stage in own
        ]
        for own in stages
    ]


def run_in_threads(
    executor: Threads,
    by_stage: Sequence[Sequence[Turn]],
    run: Callable[[Issue], None],
    join: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> None:
    """Issues tasks in several threads.

    Each thread keeps the order of its tasks. It issues a task after all tasks that the
    task waits for have been issued. Each thread has an inbox. It receives the numbers
    of those issued tasks for which the thread waits.

    Args:
      executor: has a thread for each list of ``by_stage``.
      by_stage: the tasks of each thread, in order (`turns`).
      run: function that issues one task.
      join: calls its argument, a function that waits for all threads.

    Raises:
      Exception: the first error of a task; after an error no more tasks are issued.
    """
    inboxes = [queue.SimpleQueue[int | None]() for _ in by_stage]
    failed = threading.Event()

    def work(own: Sequence[Turn], inbox: queue.SimpleQueue[int | None]) -> None:
        issued: set[int | None] = set()
        for turn in own:
            while not (failed.is_set() or issued.issuperset(turn.waits_for)):
                issued.add(inbox.get())
            if failed.is_set():
                return
            run(turn.issue)
            for reader in turn.tells:
                inboxes[reader].put(turn.number)

    def run_guarded(own: Sequence[Turn], inbox: queue.SimpleQueue[int | None]) -> None:
        try:
            work(own, inbox)
        except BaseException:
            failed.set()
            for other in inboxes:
                other.put(None)  # wakes the thread
            raise

    futures = [
        executor.submit(run_guarded, own, inbox)
        for own, inbox in zip(by_stage, inboxes, strict=True)
    ]
    join(lambda: wait(futures))
    for future in futures:
        future.result()
