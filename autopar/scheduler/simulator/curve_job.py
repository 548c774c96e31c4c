"""A job that trains by its curve, and moves as an elastic run of this project does.

It is what a real scheduler runs: a start takes a while, a change of devices a short
pause. While the processes of new devices start, the job trains on those it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Curve, Job, JobView, MoveSeconds, Oracle, Shape


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
      by_pair: the pause by what it changes from and to; `change_s` where None.
      told_s: what a policy is told that any change takes; the truth where None.
    """

    start_s: float
    join_s: float
    change_s: float
    by_pair: MoveSeconds | None = None
    told_s: float | None = None

    def move_s(self, old: Shape, new: Shape) -> float:
        """What a move takes; from (0, 0) for a start."""
        if old == (0, 0):
            return self.start_s
        return self.change_s if self.by_pair is None else self.by_pair(old, new)

    def seconds_told(self, old: Shape, new: Shape) -> float:
        """What a policy is told that a move takes."""
        if old == (0, 0) or self.told_s is None:
            return self.move_s(old, new)
        return self.told_s


class CurveJob:
    """One job over its curve."""

    goes_on = True  # where it loses some of its nodes

    def __init__(
        self,
        job: Job,
        curve: StepCurve,
        most: int,
        moves: Moves,
        by_kind: Mapping[str, StepCurve] | None = None,
    ) -> None:
        """Nothing has run.

        Args:
          job: it runs ``steps`` steps of ``batch`` samples.
          curve: its steps and goodput by configuration.
          most: no more devices are of use.
          moves: what moves take.
          by_kind: its curve on kinds of devices; ``curve`` on those that are missing.
        """
        self.job, self._curve, self._most, self._moves = job, curve, most, moves
        self._by_kind = dict(by_kind or {})
        self._kinds: tuple[str, ...] = ()
        self._pause_s = 0.0
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
        # On several kinds a step waits for the slowest.
        step_s = max(
            self._by_kind.get(kind, self._curve).step_s(*_shape(self._trains))
            for kind in self._kinds or ("",)
        )
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
                self._trains, self._waits_s = self.placement, self._pause_s

    def reallocate(
        self, placement: tuple[int, ...], plan: str, kinds: tuple[str, ...] = ()
    ) -> None:
        """Moves to a placement; () stops it, its state saved."""
        del plan
        larger = bool(self._trains) and sum(placement) > sum(self._trains)
        grows = larger and kinds == self._kinds and self._moves.join_s > 0
        if placement:
            self._pause_s = self._moves.move_s(_shape(self._trains), _shape(placement))
        if grows:
            self._joins_s = self._moves.join_s
        else:
            self._trains, self._waits_s = placement, self._pause_s
            self._joins_s = 0.0
        self._kinds = kinds
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
            by_kind=self._by_kind,
            moves=self._moves.seconds_told,
        )


def _shape(placement: tuple[int, ...]) -> Shape:
    return len(placement), sum(placement)
