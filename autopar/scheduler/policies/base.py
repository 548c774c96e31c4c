"""What a policy is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from autopar.scheduler.jobs import Allocation, Decisions, Reason, Views
from autopar.scheduler.nodes import Nodes

Adapts = Literal["nothing", "devices", "batch"]
"""What a policy may change of what an owner asks for; ``batch`` includes devices."""


class SchedulingPolicy(Protocol):
    """Gives devices to jobs, round by round.

    A policy remembers what it needs between rounds, and draws from its own generator:
    the same rounds get the same decisions.
    """

    @property
    def name(self) -> str:
        """As it is asked for."""
        ...

    @property
    def adapts(self) -> Adapts:
        """What it changes."""
        ...

    @property
    def oracle(self) -> bool:
        """Whether it sees what is left of a job."""
        ...

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """The allocations from now on.

        Args:
          now_s: seconds since the beginning of the trace.
          jobs: those that wait or run.
          nodes: the cluster.
          current: allocations of jobs that run.
        """
        ...


def changes(
    jobs: Views,
    current: Mapping[str, Allocation],
    chosen: Mapping[str, Allocation],
    compared: str,
) -> tuple[Reason, ...]:
    """The reasons of a policy that predicts nothing, for jobs whose devices change."""
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
    """Gives jobs so many devices; those whose number stays are not moved.

    Args:
      counts: job -> how many devices.
      order: the jobs, in the order in which they are placed.
      current: allocations of jobs that run.
      nodes: the cluster.
    """
    chosen = {k: v for k, v in current.items() if len(v) == counts.get(k)}
    free = nodes.free(chosen)
    for name in order:
        if counts[name] and name not in chosen:
            chosen[name] = take_fullest(free, counts[name])
    return chosen


def take_fullest(free: list[int], count: int) -> Allocation:
    """Takes devices from the node with most of them free, then from the next.

    Args:
      free: devices that are free, by node; what is taken is subtracted.
      count: how many; they must be there.
    """
    taken: list[int] = []
    while len(taken) < count:
        node = free.index(max(free))
        number = min(free[node], count - len(taken))
        taken += [node] * number
        free[node] -= number
    return tuple(taken)
