"""The order in which one process issues the tasks of all stages."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from autopar_passes import jax_compat
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
    """A task of a microbatch.

    Attributes:
      key: the task.
      microbatch: of which microbatch.
    """

    key: TaskKey
    microbatch: int


def issue_order(table: ScheduleTable) -> tuple[Issue, ...]:
    """All tasks of a schedule, each after those that it waits for.

    Stages take turns, so that none is issued far ahead of another. Each stage keeps the
    order of the schedule.
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
    """The tasks of the same microbatch that a task waits for."""
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


class Threads:
    """Threads that work in the background, and never keep the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        """Starts them.

        Args:
          count: how many.
          name: of each, before its number.
        """
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for number in range(count):
            thread = threading.Thread(
                target=self._serve, name=f"{name}_{number}", daemon=True
            )
            thread.start()

    def _serve(self) -> None:
        while True:
            self._work.get()()

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """Calls a function in one of the threads, under this thread's JAX options."""
        future: Future[None] = Future()
        options = jax_compat.thread_options()  # contexts serve one thread, once

        def work() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    for option in options:
                        stack.enter_context(option)
                    function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._work.put(work)
        return future


def run_in_threads(
    executor: Threads,
    by_stage: Sequence[Sequence[Issue]],
    run: Callable[[Issue], None],
    waits_for: Mapping[TaskKey, Sequence[TaskKey]],
    join: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> None:
    """Issues the tasks of each stage in a thread of its own.

    A stage keeps its order, and issues a task once the tasks of other stages that it
    waits for are issued.

    Args:
      executor: has a thread for each stage.
      by_stage: the tasks of each stage, in order.
      run: issues one task.
      waits_for: task -> tasks of other stages that it reads of, of its microbatch.
      join: waits for the threads by a function that it is given.

    Raises:
      Exception: the first that a task raised; the others are not issued any more.
    """
    issued: set[tuple[TaskKey, int]] = set()
    failed = False
    changed = threading.Condition()

    def ready(issue: Issue) -> bool:
        number = issue.microbatch
        return failed or all((k, number) in issued for k in waits_for[issue.key])

    def work(issues: Sequence[Issue]) -> None:
        nonlocal failed
        for issue in issues:
            with changed:
                changed.wait_for(lambda issue=issue: ready(issue))
                if failed:
                    return
            try:
                run(issue)
            except BaseException:
                with changed:
                    failed = True
                    changed.notify_all()
                raise
            with changed:
                issued.add((issue.key, issue.microbatch))
                changed.notify_all()

    futures = [executor.submit(work, issues) for issues in by_stage]
    join(lambda: wait(futures))
    for future in futures:
        future.result()
