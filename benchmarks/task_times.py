"""Records when the tasks of a pipeline run."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar_passes.stages.cut import TaskKey


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """A task that has run.

    Attributes:
      key: the task.
      microbatch: number of the microbatch; -1 for a task of the whole step.
      issued_s: when the task was issued, in seconds since the start of the step.
      begin_s: when the task could begin: its inputs were ready, and the previous task
        of the stage had ended.
      end_s: when the results of the task were ready.
    """

    key: TaskKey
    microbatch: int
    issued_s: float
    begin_s: float
    end_s: float


class Recorder:
    """Watches the tasks of one step, with a thread for each stage that waits for
    results.

    If a task ends while its stage's thread waits for an earlier task, it is recorded
    when that task ends. It cannot end much earlier, because it runs on the same devices
    after that task.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts without tasks; the step begins now.

        Args:
          clock: seconds now.
        """
        self._clock = clock
        self._begin = clock()
        self._watchers: dict[int, _Watcher] = {}
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._begin

    def issued(
        self,
        key: TaskKey,
        microbatch: int,
        issued_s: float,
        made: Any,
        makers: Sequence[TaskKey],
    ) -> None:
        """Records that a task was issued.

        Args:
          key: the task.
          microbatch: number of the microbatch; -1 for a task of the whole step.
          issued_s: when the task was issued (`now`).
          made: its results.
          makers: the tasks whose results this task reads.
        """
        with self._lock:
            if key.stage not in self._watchers:
                self._watchers[key.stage] = _Watcher(self.now)
            watcher = self._watchers[key.stage]
        watcher.todo.put(_Issued(key, microbatch, issued_s, made, tuple(makers)))

    def finished(self) -> list[Ran]:
        """Waits for all tasks; returns when each ran, by stage and time."""
        for watcher in self._watchers.values():
            watcher.todo.put(None)
            watcher.thread.join()
        stages = [self._watchers[k].done for k in sorted(self._watchers)]
        return _ran(stages)


@dataclasses.dataclass(frozen=True, slots=True)
class _Issued:
    key: TaskKey
    microbatch: int
    issued_s: float
    made: Any
    makers: tuple[TaskKey, ...]


class _Watcher:
    """Waits for the results of one stage's tasks, one after the other."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.todo: queue.SimpleQueue[_Issued | None] = queue.SimpleQueue()
        self.done: list[tuple[_Issued, float]] = []
        self._now = now
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while (task := self.todo.get()) is not None:
            # The next task consumes the sums and reuses their memory.
            for array in jax.tree.leaves(task.made):
                with contextlib.suppress(RuntimeError):
                    array.block_until_ready()
            self.done.append((dataclasses.replace(task, made=None), self._now()))


def _ran(stages: Sequence[Sequence[tuple[_Issued, float]]]) -> list[Ran]:
    """Computes when tasks could begin, and when they ended."""
    ends = {(t.key, t.microbatch): end for done in stages for t, end in done}
    out: list[Ran] = []
    for done in stages:
        free = 0.0
        for task, end in done:
            there = [
                ends[maker, number]
                for maker in task.makers
                for number in (task.microbatch, -1)
                if (maker, number) in ends
            ]
            begin = min(end, max([free, task.issued_s, *there]))
            out.append(Ran(task.key, task.microbatch, task.issued_s, begin, end))
            free = end
    return out
