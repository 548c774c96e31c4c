"""A job that ends after its steps: placement and plan set how fast they pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from autopar.scheduler.jobs import Curve, Job, JobView, Oracle


class StepTimes(Protocol):
    """Seconds of the steps of a program."""

    @property
    def curve(self) -> Curve:
        """Steps per second by configuration."""
        ...

    @property
    def most(self) -> int:
        """The most devices that are of use."""
        ...

    def seconds(self, plan: str, placement: tuple[int, ...]) -> float:
        """Seconds of a step."""
        ...

    def asked_s(self, job: Job) -> float:
        """Seconds of a step on what a job's owner asks for."""
        ...


class StepJob:
    """One job over the plan tables of its program."""

    def __init__(
        self,
        job: Job,
        times: StepTimes,
        restart_s: float,
        *,
        ghosts: bool = False,
        one_more: bool = True,
        by_kind: Mapping[str, StepTimes] | None = None,
    ) -> None:
        """Nothing has run.

        Args:
          job: it runs ``steps`` steps.
          times: seconds of its steps.
          restart_s: seconds that a move takes.
          ghosts: repeat a slip of the published simulator, in which a job that loses
            its devices runs on where it was.
          one_more: whether it makes one step more, as the published simulator has it.
          by_kind: seconds of its steps on kinds of devices; ``times`` on others.
        """
        self.job, self.times = job, times
        self.completed_s: float | None = None
        self.placement: tuple[int, ...] = ()
        self.plan, self.failed = job.plan, ""
        self.restarts = -1
        self._restart_s, self._ghosts = restart_s, ghosts
        self._waiting_s = self._served = self._part_s = 0.0
        self._steps = 0
        self._whole = job.steps + one_more
        self._by_kind, self._kinds = dict(by_kind or {}), ("",)
        self._floor = 1.0 / times.asked_s(job) if job.guaranteed else 0.0

    @property
    def batch(self) -> int:
        """Batches do not change here."""
        return self.job.batch or 0

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for some seconds."""
        if not self.placement or self.completed_s is not None:
            return
        delay = min(self._waiting_s, seconds)
        self._waiting_s -= delay
        self._served += delay * sum(self.placement)
        now_s, seconds = now_s + delay, seconds - delay
        if seconds <= 0:
            return
        # On several kinds a step waits for the slowest.
        step_s = max(
            self._by_kind.get(kind, self.times).seconds(self.plan, self.placement)
            for kind in self._kinds
        ) / (1.0 - slowdown)
        left = self._whole - self._steps
        until = left * step_s - self._part_s
        if until <= seconds:
            self.completed_s = now_s + until
            self._served += until * sum(self.placement)
            return
        whole = max(math.floor((self._part_s + seconds) / step_s), 0)
        self._steps += whole
        self._part_s += seconds - whole * step_s
        self._served += seconds * sum(self.placement)

    def reallocate(
        self, placement: tuple[int, ...], plan: str, kinds: tuple[str, ...] = ()
    ) -> None:
        """Moves to a placement, which takes the restart's seconds; () stops it.

        The same placement on other nodes with the same plan costs nothing in the
        published simulator; here it does, unless ``ghosts`` is set.
        """
        if not placement:
            if not self._ghosts:
                self.placement = ()
            return
        if self._ghosts and placement == self.placement:
            return
        self.placement, self.plan, self._kinds = placement, plan, kinds or ("",)
        self._waiting_s = self._restart_s
        self.restarts += 1

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy may see."""
        left = None
        if oracle:
            seconds = _step_seconds(self.times.curve, self.times.most)
            left = Oracle(self._whole - self._steps, seconds)
        return JobView(
            name=self.job.name,
            application=self.job.application,
            submitted_s=self.job.submitted_s,
            age_s=now_s - self.job.submitted_s,
            served_device_s=self._served,
            progress=float(self._steps),
            restarts=max(self.restarts, 0),
            asked=self.job.devices,
            most=self.times.most,
            tried=self.times.most,
            curve=self.times.curve,
            measured=True,
            restart_s=self._restart_s,
            guaranteed=self.job.guaranteed,
            floor=self._floor,
            oracle=left,
            by_kind={kind: times.curve for kind, times in self._by_kind.items()},
        )


def _step_seconds(curve: Curve, most: int) -> tuple[float, ...]:
    """Seconds of a step on one to so many devices, on the best number of nodes.

    Up to the first number of devices on which a step cannot run.
    """
    found: list[float] = []
    for devices in range(1, most + 1):
        nodes = np.arange(1, devices + 1)
        best = float(curve.goodput(nodes, np.full_like(nodes, devices)).max())
        if best <= 0:
            break
        found.append(1.0 / best)
    return tuple(found)
