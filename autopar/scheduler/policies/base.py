"""The interface of scheduling policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from autopar.scheduler.jobs import Allocation, Decisions, Reason, Views
from autopar.scheduler.nodes import Nodes

Adapts = Literal["nothing", "devices", "batch"]
"""The part of an owner's request that a policy may change; ``batch``: devices too."""


class SchedulingPolicy(Protocol):
    """Decides in each round which devices each job gets.

    A policy may keep state between rounds. It draws random numbers only from its own
    generator. So a new instance that sees the same rounds makes the same decisions.
    """

    @property
    def name(self) -> str:
        """The name by which a user selects the policy."""
        ...

    @property
    def adapts(self) -> Adapts:
        """Which parts of a request (devices, batch, plan) the policy may change."""
        ...

    @property
    def oracle(self) -> bool:
        """Whether the policy sees the true remaining work of jobs (`Oracle`)."""
        ...

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Decides which devices each job has until the next decision.

        Args:
          now_s: seconds since the beginning of the trace.
          jobs: the waiting and running jobs.
          nodes: the cluster.
          current: allocations of running jobs.
        """
        ...


def changes(
    jobs: Views,
    current: Mapping[str, Allocation],
    chosen: Mapping[str, Allocation],
    compared: str,
) -> tuple[Reason, ...]:
    """Makes reasons for changes of devices, for a policy without predictions."""
    found: list[Reason] = []
    for name, view in jobs.items():
        old, new = current.get(name, ()), chosen.get(name, ())
        if old != new:
            found.append(
                Reason(
                    job=name,
                    devices=len(new),
                    kept=len(old),
                    compared=compared,
                    cost_s=view.restart_s if new else 0.0,
                )
            )
    return tuple(found)


def with_counts(
    counts: Mapping[str, int],
    order: Iterable[str],
    current: Mapping[str, Allocation],
    nodes: Nodes,
) -> dict[str, Allocation]:
    """Places jobs with given numbers of devices; moves only jobs whose number changes.

    Args:
      counts: number of devices by job.
      order: the jobs, in the order in which they are placed.
      current: allocations of running jobs.
      nodes: the cluster.
    """
    chosen = {k: v for k, v in current.items() if len(v) == counts.get(k)}
    free = nodes.free(chosen)
    for name in order:
        if counts[name] and name not in chosen:
            chosen[name] = take_fullest(free, counts[name])
    return chosen


def take_fullest(free: list[int], count: int) -> Allocation:
    """Takes devices from the node with the most free devices, then from the next.

    Args:
      free: number of free devices by node; the taken devices are subtracted from it.
      count: number of devices to take, at most all free devices.
    """
    taken: list[int] = []
    while len(taken) < count:
        node = free.index(max(free))
        number = min(free[node], count - len(taken))
        taken += [node] * number
        free[node] -= number
    return tuple(taken)
