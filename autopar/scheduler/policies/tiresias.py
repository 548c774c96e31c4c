"""Tiresias: the jobs with the least attained service run first, in two queues.

Gu et al., "Tiresias: A GPU cluster manager for distributed deep learning", NSDI 2019,
with the two queues and the threshold of the simulator that was published with Pollux.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.scheduler.jobs import Allocation, Decisions, Views
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Adapts, changes, take_fullest

QUEUE_DEVICE_S = 16 * 3600.0
"""Device-seconds after which a job goes into the second queue."""


class Tiresias:
    """Two queues; inside a queue, who came first; jobs get what they ask for."""

    name = "tiresias"
    adapts: Adapts = "nothing"
    oracle = False

    def __init__(self, queue_device_s: float = QUEUE_DEVICE_S) -> None:
        """Nothing has run."""
        self._limit = queue_device_s
        self._first: list[str] = []
        self._second: list[str] = []
        self._running: dict[str, bool] = {}
        self._looked_s: dict[str, float] = {}
        self._executed_s: dict[str, float] = {}

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Runs the queues' jobs in order while their devices fit."""
        self._forget(jobs)
        for name in jobs:
            if name not in self._running:
                self._running[name] = False
                self._first.append(name)
        for name, view in jobs.items():
            self._demote(name, now_s, view.asked)
        left = nodes.total
        chosen = {k: v for k, v in current.items() if k in jobs}
        order = [*self._first, *self._second]
        for name in order:
            self._running[name] = jobs[name].asked <= left
            if self._running[name]:
                left -= jobs[name].asked
            else:
                chosen.pop(name, None)
        free = nodes.free(chosen)
        for name in order:
            if self._running[name] and not chosen.get(name):
                chosen[name] = take_fullest(free, jobs[name].asked)
        why = "least attained service first, two queues"
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, why)
        )

    def _forget(self, jobs: Views) -> None:
        self._first = [name for name in self._first if name in jobs]
        self._second = [name for name in self._second if name in jobs]
        for kept in (self._running, self._looked_s, self._executed_s):
            for name in [name for name in kept if name not in jobs]:
                del kept[name]

    def _demote(self, name: str, now_s: float, devices: int) -> None:
        """Counts the time since the last look, and moves the job if it had enough."""
        if self._running[name]:
            spent = now_s - self._looked_s.get(name, 0.0)
            self._executed_s[name] = self._executed_s.get(name, 0.0) + spent
            if name in self._first and self._executed_s[name] * devices >= self._limit:
                self._first.remove(name)
                self._second.append(name)
        self._looked_s[name] = now_s
