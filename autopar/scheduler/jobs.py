"""Submitted jobs, the view of a job that a policy gets, and the times of decisions.

The simulator and the scheduler of a real cluster share one object for the times of
decisions (`Rounds`). To look at the jobs and nodes is cheap. A decision is expensive.
Therefore a decision follows a look only in two cases: an interval is over, or the jobs
or nodes have changed since the last decision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import numpy as np

from autopar.errors import ScheduleError

LARGEST_WEIGHT = 1000.0
"""The largest priority of a job and share of a user; the smallest is its inverse."""

Allocation = tuple[int, ...]
"""The node of each device of a job; devices of the same node are adjacent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job.

    Attributes:
      name: the job's name, unique in a trace.
      application: name of the program that the job trains.
      submitted_s: time of submission, in seconds from the beginning of the trace.
      devices: number of devices that the owner asks for.
      batch: the batch that the owner asks for; None to keep the program's own batch.
      plan: the plan that the owner asks for; '' if the program has only one plan.
      steps: number of steps; 0 if the job ends at a quality instead.
      duration_s: run time on the requested devices; 0 if it is not known.
      guaranteed: whether the job is guaranteed its speed on the requested devices.
      user: the owner; '' if the trace names none.
      priority: the job's weight relative to other jobs of the same user.
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
        """Checks the numbers of the job.

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
    """An error message for a priority; '' if the priority is valid."""
    if 1 / LARGEST_WEIGHT <= priority <= LARGEST_WEIGHT:
        return ""
    return (
        f"priority is {priority}; give a weight from {1 / LARGEST_WEIGHT:g} to "
        f"{LARGEST_WEIGHT:g}."
    )


class Curve(Protocol):
    """Progress per second of one job on each configuration."""

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second by nodes and devices; 0 where the job cannot run."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A linear curve, for a job without measurements."""

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """One unit of progress per second and device."""
        return np.broadcast_to(devices, np.broadcast(nodes, devices).shape) * 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Oracle:
    """True properties of a job, which only oracle policies may see.

    Attributes:
      remaining: remaining steps at the requested batch.
      step_s: seconds of a step on 1, 2, ... devices.
    """

    remaining: float
    step_s: tuple[float, ...]


Shape = tuple[int, int]
"""The number of nodes and the number of devices of a job."""

MoveSeconds = Callable[[Shape, Shape], float]
"""Seconds of a move from one shape to another."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The view that a policy gets of a waiting or running job.

    Attributes:
      name: the job's name.
      application: name of the program that the job trains.
      submitted_s: time of submission.
      age_s: seconds since submission.
      served_device_s: device-seconds that the job has received, including restarts.
      progress: work done so far, in units of ``curve`` times seconds.
      restarts: number of moves; the first start does not count.
      asked: number of devices that the owner asks for.
      most: the most devices that the job can use.
      tried: the most devices that the job has run on.
      curve: progress per second by configuration.
      measured: whether the curve comes from measured steps.
      restart_s: seconds of a move.
      guaranteed: whether the job is guaranteed its speed on the requested devices.
      floor: the guaranteed progress per second; 0: the policy takes it from the curve.
      oracle: true properties of the job, only for oracle policies.
      by_kind: curves by kind of devices; `curve` for kinds that are missing.
      moves: seconds of a move by old and new shape; None: `restart_s`.
      user: the owner.
      priority: the job's weight relative to other jobs of the same user.
      share: the user's weight relative to other users.
      least: the fewest devices that the job can use.
      cap: the most devices that the job may get under its user's quota; 0: the job may
        not run now; None: the user has no quota.
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
        """The job's curve on devices of a kind."""
        return self.by_kind.get(kind, self.curve)

    def move_s(self, old: Shape, new: Shape) -> float:
        """Seconds of a move between two shapes; an ``old`` of (0, 0) is a start."""
        if self.moves is None or old == (0, 0):
            return self.restart_s
        return self.moves(old, new)


Views = Mapping[str, JobView]
"""The waiting and running jobs by name, in order of submission."""


def entitlements(jobs: Views) -> dict[str, float]:
    """The entitlement of each job, relative to the mean of all jobs.

    The entitlement is the product of three numbers: the user's share divided by the
    shares of all users, the job's priority divided by the priorities of all jobs of the
    user, and the number of jobs. It is 1 if all jobs are equal. Jobs that may not run
    are left out.
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
    """The number of devices that an allocation has on each of its nodes, in order.

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
    """The reason for a change of a job's devices.

    Attributes:
      job: the job's name.
      devices: number of devices after the decision.
      kept: number of devices before the decision.
      compared: the alternatives that the policy compared, in words.
      gain: predicted relative gain of progress by the change; nan if the policy
        predicts nothing.
      cost_s: seconds of the move.
    """

    job: str
    devices: int
    kept: int
    compared: str
    gain: float = float("nan")
    cost_s: float = 0.0

    @property
    def text(self) -> str:
        """The reason as one line of text."""
        gain = "" if self.gain != self.gain else f", gain {self.gain:+.1%}"
        return (
            f"{self.job}: {self.kept} -> {self.devices} devices{gain}, "
            f"{self.cost_s:g} s to move ({self.compared})"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The allocation of every job.

    Attributes:
      allocations: the nodes of each job's devices; a job without an entry waits.
      plans: the plan of each job that has several plans.
      reasons: reasons for the changes of allocations.
      gap: relative optimality gap of the allocations; nan if the policy proves none.
      waits: reasons, by job, why jobs may not run now because of their users' quotas.
    """

    allocations: Mapping[str, Allocation]
    plans: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    reasons: tuple[Reason, ...] = ()
    gap: float = float("nan")
    waits: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class Rounds:
    """The times of looks at jobs and nodes, and which looks call for a decision."""

    def __init__(
        self, interval_s: float, react_s: float | None, first_s: float
    ) -> None:
        """Starts without a decision.

        Args:
          interval_s: seconds between two regular decisions, which are made at multiples
            of the interval.
          react_s: seconds between two looks; None: looks only at regular decisions.
          first_s: time of the first decision.

        Raises:
          ScheduleError: an interval is not above 0.
        """
        check_times(interval_s, react_s)
        self._interval_s, self._react_s = interval_s, react_s
        self._due_s, self._number = first_s, 0
        self._left: Hashable = None

    def until_look_s(self, now_s: float) -> float:
        """Seconds until the next look; 0 if the look is overdue."""
        left_s = max(self._due_s - now_s, 0.0)
        return left_s if self._react_s is None else min(self._react_s, left_s)

    def calls(self, now_s: float, found: Hashable) -> bool:
        """Whether a look calls for a decision.

        Args:
          now_s: the present time.
          found: the present jobs and nodes.
        """
        due = now_s >= self._due_s
        if due:
            # The number always rises, so that rounding makes no time due twice.
            passed = math.floor(now_s / self._interval_s)
            self._number = max(self._number, passed) + 1
            self._due_s = self._number * self._interval_s
        return due or (self._react_s is not None and found != self._left)

    def settle(self, left: Hashable) -> None:
        """Stores the jobs and nodes after a decision, for comparison by `calls`."""
        self._left = left


def check_times(interval_s: float, react_s: float | None) -> None:
    """Checks the times between decisions.

    Raises:
      ScheduleError: a time is not above 0, or not finite.
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
