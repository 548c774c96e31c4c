"""A job that trains by its curve, and moves as an elastic run of this project does.

It is what a real scheduler runs: a start takes a while, a change of devices a short
pause. While the processes of new devices start, the job trains on those it has.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Curve, Job, JobView, Oracle, Shape


class StepCurve(Curve, Protocol):
    """A curve that knows the seconds of steps."""

    def step_s(self, nodes: int, devices: int) -> float:
        """Seconds of a step; infinite where nothing runs."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What moves take, in seconds.

    Attributes:
      start_s: from a start to the first step.
      join_s: until the processes of more devices are there; the job trains meanwhile.
      change_s: the pause of a job whose devices change.
    """

    start_s: float
    join_s: float
    change_s: float

    def move_s(self, old: Shape, new: Shape) -> float:
        """What a policy is told that a move costs."""
        del new
        return self.start_s if old == (0, 0) else self.change_s


class CurveJob:
    """One job over its curve."""

    goes_on = True  # where it loses some of its nodes

    def __init__(self, job: Job, curve: StepCurve, most: int, moves: Moves) -> None:
        """Nothing has run.

        Args:
          job: it runs ``steps`` steps of ``batch`` samples.
          curve: its steps and goodput by configuration.
          most: no more devices are of use.
          moves: what moves take.
        """
        self.job, self._curve, self._most, self._moves = job, curve, most, moves
        self.completed_s: float | None = None
        self.placement: tuple[int, ...] = ()
        self.plan = self.failed = ""
        self.restarts = -1
        self._trains: tuple[int, ...] = ()  # on these, until the others have joined
        self._joins_s = self._waits_s = self._served = self._steps = 0.0

    @property
    def batch(self) -> int:
        """Batches do not change here."""
        return self.job.batch or 0

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for some seconds."""
        end_s = now_s + seconds
        while now_s < end_s and self.completed_s is None and self.placement:
            part = self._next_part(end_s - now_s)
            if self._waits_s > 0:
                self._waits_s -= part
            else:
                part = self._train(now_s, part, slowdown)
                self._join(part)
            self._served += part * sum(self.placement)
            now_s += part

    def _next_part(self, left_s: float) -> float:
        """Seconds until something changes."""
        if self._waits_s > 0:
            return min(left_s, self._waits_s)
        return min(left_s, self._joins_s) if self._joins_s > 0 else left_s

    def _train(self, now_s: float, seconds: float, slowdown: float) -> float:
        """Does steps; returns the seconds until the last one, if it is among them."""
        step_s = self._curve.step_s(len(self._trains), sum(self._trains))
        if not math.isfinite(step_s):
            raise ScheduleError(
                f"job {self.job.name!r} cannot run on {sum(self._trains)} devices of "
                f"{len(self._trains)} nodes, by its curve."
            )
        step_s /= 1.0 - slowdown
        until = (self.job.steps - self._steps) * step_s
        if until <= seconds:
            self.completed_s, self._steps = now_s + until, float(self.job.steps)
            return until
        self._steps += seconds / step_s
        return seconds

    def _join(self, seconds: float) -> None:
        if self._joins_s > 0:
            self._joins_s -= seconds
            if self._joins_s <= 0:
                self._trains, self._waits_s = self.placement, self._moves.change_s

    def reallocate(self, placement: tuple[int, ...], plan: str) -> None:
        """Moves to a placement; () stops it, its state saved."""
        del plan
        grows = bool(self._trains) and sum(placement) > sum(self._trains)
        if placement and not self.placement:
            self._trains, self._waits_s = placement, self._moves.start_s
        elif grows:
            self._joins_s = self._moves.join_s
        else:
            self._trains, self._waits_s = placement, self._moves.change_s
        if not grows:
            self._joins_s = 0.0
        self.restarts += bool(placement)
        self.placement = placement

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy may see."""
        left = Oracle(self.job.steps - self._steps, ()) if oracle else None
        return JobView(
            name=self.job.name,
            application=self.job.application,
            submitted_s=self.job.submitted_s,
            age_s=now_s - self.job.submitted_s,
            served_device_s=self._served,
            progress=self._steps * self.batch,
            restarts=max(self.restarts, 0),
            asked=self.job.devices,
            most=self._most,
            tried=self._most,
            curve=self._curve,
            measured=True,
            restart_s=self._moves.start_s,
            guaranteed=self.job.guaranteed,
            oracle=left,
            moves=self._moves.move_s,
        )
