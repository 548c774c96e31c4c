"""Jobs as they are handed in, and what a policy may see of them.

When decisions are made: in every interval, and where something happens at once.

The simulator and the scheduler of a real cluster ask the same object. A look at the
jobs and nodes is cheap, a decision is not: a look is followed by a decision where the
interval is over, or where something differs from what the last decision left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import numpy as np

from autopar.errors import ScheduleError

LARGEST_WEIGHT = 1000.0
"""The largest priority of a job and share of a user; 1 over it is the least."""

Allocation = tuple[int, ...]
"""The node of each device of a job; devices of one node stand next to each other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it is handed in.

    Attributes:
      name: unique in a trace.
      application: which program it trains.
      submitted_s: when it is handed in, in seconds from the beginning of the trace.
      devices: how many devices its owner asks for.
      batch: the batch its owner asks for; None where the program's own is kept.
      plan: the plan its owner asks for; '' where there is one only.
      steps: how many steps it runs; 0 where it ends at a quality instead.
      duration_s: its run time on what it asks for; 0 where it is not known.
      guaranteed: whether it is promised to be as fast as on what it asks for.
      user: whose it is; '' where nobody says.
      priority: its weight beside other jobs of its user.
    """

    name: str
    application: str
    submitted_s: float
    devices: int = 1
    batch: int | None = None
    plan: str = ""
    steps: int = 0
    duration_s: float = 0.0
    guaranteed: bool = False
    user: str = ""
    priority: float = 1.0

    def __post_init__(self) -> None:
        """Refuses numbers that no job can have.

        Raises:
          ScheduleError: a number is negative, zero or not finite.
        """
        if not (math.isfinite(self.submitted_s) and self.submitted_s >= 0):
            raise ScheduleError(
                f"job {self.name!r}: it is submitted at {self.submitted_s} s; give a "
                "time of at least 0."
            )
        if self.devices < 1:
            raise ScheduleError(
                f"job {self.name!r}: it asks for {self.devices} devices; give at "
                "least 1."
            )
        if not (math.isfinite(self.duration_s) and self.duration_s >= 0):
            raise ScheduleError(
                f"job {self.name!r}: its duration is {self.duration_s} s; give a "
                "time of at least 0."
            )
        if wrong := wrong_priority(self.priority):
            raise ScheduleError(f"job {self.name!r}: {wrong}")


def wrong_priority(priority: float) -> str:
    """What is wrong with a priority; '' if nothing is."""
    if 1 / LARGEST_WEIGHT <= priority <= LARGEST_WEIGHT:
        return ""
    return (
        f"priority is {priority}; give a weight from {1 / LARGEST_WEIGHT:g} to "
        f"{LARGEST_WEIGHT:g}."
    )


class Curve(Protocol):
    """Progress per second of one job on each configuration."""

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second on so many nodes and devices; 0 where it cannot run."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """The curve of a job that nothing is known of: each device helps as much."""

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """As many units of progress per second as there are devices."""
        return np.broadcast_to(devices, np.broadcast(nodes, devices).shape) * 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Oracle:
    """What only a policy that is named an oracle may see.

    Attributes:
      remaining: steps that are left at the batch asked for.
      step_s: seconds of a step by number of devices, from 1.
    """

    remaining: float
    step_s: tuple[float, ...]


Shape = tuple[int, int]
"""How many nodes and how many devices a job has."""

MoveSeconds = Callable[[Shape, Shape], float]
"""Seconds of a move from one shape to another."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What a policy sees of a job that waits or runs.

    Attributes:
      name: of the job.
      application: which program it trains.
      submitted_s: when it was handed in.
      age_s: seconds since then.
      served_device_s: device-seconds it has had, restarts included.
      progress: what it has done, in the units of its curve times seconds.
      restarts: how often it has moved; 0 for a first start.
      asked: the devices its owner asks for.
      most: no more devices are of use.
      tried: the most devices that it ran on.
      curve: its progress per second by configuration.
      measured: whether its curve comes from steps that were measured.
      restart_s: seconds that a move takes.
      guaranteed: whether it is promised to be as fast as on what it asks for.
      floor: the progress per second that this means; 0: what its curve says of it.
      oracle: only for a policy that is named an oracle.
      by_kind: its curve on kinds of devices; `curve` on those that are missing.
      moves: seconds of a move by what it moves from and to; `restart_s` where None.
      user: whose it is.
      priority: its weight beside other jobs of its user.
      share: the weight of its user beside other users.
      least: it cannot use fewer devices.
      cap: the most devices that its user's quota leaves it; 0: it may not run now, and
        None: there is no quota.
    """

    name: str
    application: str
    submitted_s: float
    age_s: float
    served_device_s: float
    progress: float
    restarts: int
    asked: int
    most: int
    tried: int
    curve: Curve
    measured: bool
    restart_s: float
    guaranteed: bool = False
    floor: float = 0.0
    oracle: Oracle | None = None
    by_kind: Mapping[str, Curve] = dataclasses.field(default_factory=dict[str, Curve])
    moves: MoveSeconds | None = None
    user: str = ""
    priority: float = 1.0
    share: float = 1.0
    least: int = 1
    cap: int | None = None

    def on(self, kind: str) -> Curve:
        """Its curve on devices of a kind."""
        return self.by_kind.get(kind, self.curve)

    def move_s(self, old: Shape, new: Shape) -> float:
        """Seconds of a move from a shape, (0, 0) for none, to another."""
        if self.moves is None or old == (0, 0):
            return self.restart_s
        return self.moves(old, new)


Views = Mapping[str, JobView]
"""The jobs that wait or run, by name, in the order they were handed in."""


def entitlements(jobs: Views) -> dict[str, float]:
    """What each job is entitled to beside the mean of all; 1 where all are alike.

    A user's share over those of all users, times a job's priority over those of the
    user's jobs, times the number of jobs. A job that may not run counts for nobody.
    """
    run = {name: view for name, view in jobs.items() if view.cap != 0}
    shares = {view.user: view.share for view in run.values()}
    whole = sum(shares.values())
    own = dict.fromkeys(shares, 0.0)
    for view in run.values():
        own[view.user] += view.priority
    return {
        name: len(run) * view.priority / own[view.user] * (view.share / whole)
        for name, view in run.items()
    }


def placement_of(allocation: Allocation) -> tuple[int, ...]:
    """How many devices an allocation has on each of its nodes, in order.

    >>> placement_of((5, 5, 5, 2))
    (3, 1)
    """
    counts: list[int] = []
    last = None
    for node in allocation:
        if node == last:
            counts[-1] += 1
        else:
            counts.append(1)
        last = node
    return tuple(counts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a job got what it got.

    Attributes:
      job: its name.
      devices: what it gets.
      kept: what it had.
      compared: what else was looked at, in words.
      gain: predicted progress with the choice over that without, less 1; nan where a
        policy predicts nothing.
      cost_s: seconds the move takes.
    """

    job: str
    devices: int
    kept: int
    compared: str
    gain: float = float("nan")
    cost_s: float = 0.0

    @property
    def text(self) -> str:
        """One line for people."""
        gain = "" if self.gain != self.gain else f", gain {self.gain:+.1%}"
        return (
            f"{self.job}: {self.kept} -> {self.devices} devices{gain}, "
            f"{self.cost_s:g} s to move ({self.compared})"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The allocation of every job.

    Attributes:
      allocations: the nodes of each job's devices; a job that is missing waits.
      plans: the plan of each job that has plans to choose from.
      reasons: of the jobs whose allocation changes.
      gap: how far the allocation may be from the best, relative; nan where a policy
        proves nothing.
      waits: why jobs may not run now, by name, where their users' quotas are used up.
    """

    allocations: Mapping[str, Allocation]
    plans: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    reasons: tuple[Reason, ...] = ()
    gap: float = float("nan")
    waits: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class Rounds:
    """The times of looks, and which of them call for a decision."""

    def __init__(
        self, interval_s: float, react_s: float | None, first_s: float
    ) -> None:
        """Nothing was decided.

        Args:
          interval_s: seconds between two decisions that nothing calls for; they are
            made at multiples of it.
          react_s: seconds between two looks; None: looks are at decisions alone.
          first_s: when the first decision is due.

        Raises:
          ScheduleError: an interval is not above 0.
        """
        check_times(interval_s, react_s)
        self._interval_s, self._react_s = interval_s, react_s
        self._due_s, self._number = first_s, 0
        self._left: Hashable = None

    def until_look_s(self, now_s: float) -> float:
        """Seconds until the next look; 0 where it is late."""
        left_s = max(self._due_s - now_s, 0.0)
        return left_s if self._react_s is None else min(self._react_s, left_s)

    def calls(self, now_s: float, found: Hashable) -> bool:
        """Whether a look calls for a decision.

        Args:
          now_s: when it is.
          found: the jobs and nodes that are there.
        """
        due = now_s >= self._due_s
        if due:
            # A number that rises, so that no rounding makes the same time due twice.
            passed = math.floor(now_s / self._interval_s)
            self._number = max(self._number, passed) + 1
            self._due_s = self._number * self._interval_s
        return due or (self._react_s is not None and found != self._left)

    def settle(self, left: Hashable) -> None:
        """Takes what a decision left: what differs from it calls for the next one."""
        self._left = left


def check_times(interval_s: float, react_s: float | None) -> None:
    """Refuses times between decisions that cannot be.

    Raises:
      ScheduleError: one of them is not above 0, or not finite.
    """
    if not (math.isfinite(interval_s) and interval_s > 0):
        raise ScheduleError(
            f"the interval is {interval_s} s; give more than 0 seconds."
        )
    if react_s is not None and not (math.isfinite(react_s) and react_s > 0):
        raise ScheduleError(
            f"a look follows another after {react_s} s; give more than 0 seconds, or "
            "none for decisions in every interval alone."
        )
