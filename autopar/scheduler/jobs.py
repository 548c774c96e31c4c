"""Submitted jobs, the view of a job that a policy gets, and the times of decisions.

The simulator and the scheduler of a real cluster share one object that says when to
decide (`Rounds`). Both look regularly which jobs and nodes exist, which is cheap. A
decision of a policy is expensive. So after a look the policy decides only if a regular
interval is over, or if the jobs or nodes have changed since its last decision.
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
      batch: the batch size that the owner asks for; None: the program's own batch size.
      plan: name of the plan that the owner asks for; '' if the program has only one.
      steps: number of steps; 0 if the job ends when it reaches a quality of the model.
      duration_s: run time on the requested devices; 0 if it is not known.
      guaranteed: whether the job is promised at least the speed that it would have on
        the devices that its owner asks for.
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
          ScheduleError: a number is negative or not finite, or a number that must be
            above 0 is 0.
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
    """The error message for an invalid priority; '' if the priority is valid."""
    if 1 / LARGEST_WEIGHT <= priority <= LARGEST_WEIGHT:
        return ""
    return (
        f"priority is {priority}; give a weight from {1 / LARGEST_WEIGHT:g} to "
        f"{LARGEST_WEIGHT:g}."
    )


class Curve(Protocol):
    """How fast a job trains on each number of nodes and devices."""

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress (completed work) per second, by numbers of nodes and devices.

        The result is 0 where the job cannot run.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A curve proportional to the number of devices, for a job without measurements."""

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second: 1 for each device."""
        return np.broadcast_to(devices, np.broadcast(nodes, devices).shape) * 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Oracle:
    """True properties of a job, for policies that know the future (oracles).

    Attributes:
      remaining: number of remaining steps with the requested batch size.
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
    """What a policy can see of a waiting or running job.

    Attributes:
      name: the job's name.
      application: name of the program that the job trains.
      submitted_s: time of submission, in seconds from the beginning of the trace.
      age_s: seconds since submission.
      served_device_s: device-seconds that the job has had so far, restarts included.
      progress: work done so far: the integral of ``curve`` over the job's seconds.
      restarts: how often the job's devices have changed after its first start.
      asked: number of devices that the owner asks for.
      most: the most devices that the job can use.
      tried: the most devices that the job has run on.
      curve: progress per second for each number of nodes and devices.
      measured: whether the curve is based on measured steps.
      restart_s: seconds for which the job does not train when its devices change.
      guaranteed: whether the job is promised at least the speed that it would have on
        the devices that its owner asks for.
      floor: the guaranteed progress per second; 0: the policy computes it from the
        curve.
      oracle: true properties of the job; None unless the policy is an oracle.
      by_kind: curve for each kind of devices; for a missing kind, ``curve`` is used.
      moves: for an old and a new number of nodes and devices, the seconds for which the
        job does not train (a move); None: always `restart_s`.
      user: name of the owner.
      priority: the job's weight relative to other jobs of the same user.
      share: the user's weight relative to other users.
      least: the fewest devices that the job can use.
      cap: the most devices that the job may get under its user's quota; 0: the job may
        not run now; None: the user has no quota.
      left: work left, as the owner states it, in the unit of ``progress``; None: the
        owner states nothing, or the job has done more than was stated.
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
    left: float | None = None

    def on(self, kind: str) -> Curve:
        """The job's curve on devices of a kind."""
        return self.by_kind.get(kind, self.curve)

    def move_s(self, old: Shape, new: Shape) -> float:
        """Seconds to move from ``old`` to ``new`` (nodes, devices).

        An ``old`` of (0, 0) means that the job starts.
        """
        if self.moves is None or old == (0, 0):
            return self.restart_s
        return self.moves(old, new)


Views = Mapping[str, JobView]
"""The waiting and running jobs by name, in order of submission."""


def entitlements(jobs: Views) -> dict[str, float]:
    """Each job's entitlement: its weight when policies divide devices among jobs.

    The entitlement is the product of three numbers: the user's share divided by the
    shares of all users, the job's priority divided by the priorities of all jobs of the
    user, and the number of jobs. If all jobs are equal, each has an entitlement of 1.
    The result has no entry for jobs that may not run.
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
    """How many devices of each node an allocation has; nodes in order.

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
    """Why a policy changed the devices of a job.

    Attributes:
      job: the job's name.
      devices: number of devices after the decision.
      kept: number of devices before the decision.
      compared: a text about the alternatives that the policy compared.
      gain: predicted progress with the change, divided by the progress without it,
        minus 1; nan if the policy makes no prediction.
      cost_s: seconds for which the job stops for the change.
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
    """A policy's decision: the devices of every job.

    Attributes:
      allocations: job -> the node of each of its devices; a job without an entry waits.
      plans: job -> name of its plan, for jobs that have several plans.
      reasons: reasons for the changes of allocations.
      gap: proved bound on how far the objective is from the best possible, as a
        fraction of the best; nan if the policy proves nothing.
      waits: job -> why its user's quota does not let it run now.
    """

    allocations: Mapping[str, Allocation]
    plans: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    reasons: tuple[Reason, ...] = ()
    gap: float = float("nan")
    waits: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class Rounds:
    """When to look at the jobs and nodes, and when to let the policy decide."""

    def __init__(
        self, interval_s: float, react_s: float | None, first_s: float
    ) -> None:
        """Starts without a decision.

        Args:
          interval_s: seconds between two regular decisions. Regular decisions happen at
            multiples of the interval.
          react_s: seconds between two looks; None: a look only at each regular
            decision.
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
        """Whether the policy must decide, given the jobs and nodes that a look found.

        Args:
          now_s: the present time.
          found: the jobs and nodes that exist now.
        """
        due = now_s >= self._due_s
        if due:
            # The number of the interval must rise, so that rounding errors do not make
            # the same regular decision happen twice.
            passed = math.floor(now_s / self._interval_s)
            self._number = max(self._number, passed) + 1
            self._due_s = self._number * self._interval_s
        return due or (self._react_s is not None and found != self._left)

    def settle(self, left: Hashable) -> None:
        """Stores the jobs and nodes that a decision left, for `calls`."""
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
