"""Simulated jobs for a scheduler; they train by a clock that tests advance."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.dispatch.backend import ClusterNode, Ending, Look
from autopar.dispatch.scheduler import Scheduler, SchedulerSettings
from autopar.dispatch.specs import Handed, JobSpec
from autopar.dispatch.store import JobRecord, Store
from autopar.dispatch.views import MoveTimes
from autopar.elastic.processes.members import SUSPENDED
from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.users import UserLimits

BATCH = 8


def curve(*goodputs: float) -> CurveTable:
    """A goodput for each number of nodes with one device each."""
    made = [
        CurvePoint(
            cluster=f"{n}x1:cpu", kind="cpu", nodes=n, devices=n, batch=BATCH,
            step_s=BATCH / g, goodput=g,
        )
        for n, g in enumerate(goodputs, 1)
    ]  # fmt: skip
    return CurveTable(points=tuple(made), base_batch=BATCH)


HALVES = curve(8.0, 15.0, 21.0, 26.0)


def handed(name: str, *, table: CurveTable | None = HALVES, **fields: Any) -> Handed:
    spec = JobSpec(name=name, script="train.py", **fields)
    return Handed(spec=spec, folder="/", curve=table, owner="owner")


@dataclasses.dataclass
class Training:
    """The simulated processes of a job."""

    attempt: int
    places: Mapping[str, int]
    at_s: float
    ending: Ending | None = None
    suspends: bool = False


class Trainings:
    """The simulated processes of all jobs, in place of those of `ProcessRuns`."""

    def __init__(self, clock: Clock, steps: Mapping[str, int]) -> None:
        """Starts with no running job.

        Args:
          clock: the clock by which the jobs train.
          steps: the number of steps of each job.
        """
        self.clock, self.steps = clock, dict(steps)
        self.of: dict[str, Training] = {}
        self.done: dict[str, float] = {}
        self.told: dict[str, int] = {}
        self.started: list[tuple[str, int]] = []
        self.moved: list[tuple[str, dict[str, int]]] = []
        self.fails: dict[str, Ending] = {}
        self.losses: dict[str, float] = {}
        self.tells: dict[str, Mapping[str, Any]] = {}
        self.deaf: set[str] = set()

    def start(self, job: JobRecord) -> None:
        known = self.of.get(job.name)
        if known is not None and known.ending is None:
            return
        self.started.append((job.name, job.attempt))
        ending = self.fails.get(job.name)
        self.of[job.name] = Training(
            job.attempt, dict(job.places), self.clock.now, ending
        )

    def look(self, job: JobRecord) -> Look:
        found = self.of.get(job.name)
        if found is None or found.attempt != job.attempt:
            return Look(alive=False)
        self._train(job, found)
        done = int(self.done.get(job.name, 0.0))
        lines: tuple[Mapping[str, Any], ...] = ()
        if done > self.told.get(job.name, 0):
            self.told[job.name] = done
            lines = (self._line(job, found, done),)
        if found.ending is None and done >= self.steps[job.name]:
            found.ending = Ending(code=0)
        wanted = None if found.ending else sum(found.places.values())
        alive = found.ending is None
        return Look(alive=alive, ending=found.ending, wanted=wanted, lines=lines)

    def move(self, job: JobRecord) -> str:
        if job.name in self.deaf:
            return "its process does not answer"
        found = self.of[job.name]
        self._train(job, found)
        if found.places != job.places:
            self.moved.append((job.name, dict(job.places)))
        found.places = dict(job.places)
        return ""

    def suspend(self, job: JobRecord) -> str:
        if job.name in self.deaf:
            return "its process does not answer"
        found = self.of[job.name]
        self._train(job, found)
        found.ending = found.ending or Ending(code=SUSPENDED, reason="suspended")
        return ""

    def kill(self, job: JobRecord) -> None:
        self.of[job.name].ending = Ending(code=130, reason="interrupted.")

    def lose(self, name: str) -> None:
        """Simulates that all workers of a job die."""
        reason = "0 of at least 1 workers are left"
        self.of[name].ending = Ending(code=1, reason=reason, lost=True)

    def _train(self, job: JobRecord, found: Training) -> None:
        seconds, found.at_s = self.clock.now - found.at_s, self.clock.now
        count = sum(found.places.values())
        if found.ending is None and count:
            rate = (job.handed.curve or HALVES).points[count - 1].goodput / BATCH
            done = self.done.get(job.name, 0.0) + seconds * rate
            self.done[job.name] = min(done, self.steps[job.name])

    def _line(self, job: JobRecord, found: Training, done: int) -> Mapping[str, Any]:
        loss = self.losses.get(job.name, 1.0 / done)
        return {
            "kind": "progress",
            "time_s": self.clock.now,
            "step": done,
            "position": done * BATCH,
            "batch": BATCH,
            "devices": sum(found.places.values()),
            "steps": 0,
            "step_s": None,
            "loss": loss if loss == loss else None,
            "finite": loss == loss,
            **self.tells.get(job.name, {}),
        }


class Clock:
    """A clock in seconds that advances only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Cluster:
    """A cluster of nodes with one device each."""

    def __init__(self, count: int) -> None:
        self.found = [ClusterNode(f"n{k}", 1) for k in range(count)]
        self.words: Mapping[str, str] = {}

    def places(self) -> Sequence[ClusterNode]:
        return tuple(self.found)

    def close(self) -> None:
        pass


class World:
    """A scheduler of simulated jobs, which tests can stop and start again."""

    def __init__(
        self,
        folder: pathlib.Path,
        jobs: Sequence[Handed],
        steps: Mapping[str, int],
        *,
        nodes: int = 4,
        policy: str = "goodput",
        users: Mapping[str, UserLimits] | None = None,
    ) -> None:
        self.users = users or {}
        self.path, self.policy = folder / "state.sqlite", policy
        self.clock, self.cluster = Clock(), Cluster(nodes)
        self.trainings = Trainings(self.clock, steps)
        store = Store(self.path)
        store.add_jobs(jobs)
        store.close()
        self.said: list[str] = []
        self.scheduler = self.again()

    def again(self) -> Scheduler:
        """Starts a new scheduler and drops the old one, as if it had been killed."""
        self.scheduler = Scheduler(
            Store(self.path),
            self.cluster,
            self.trainings,
            policy_of(self.policy),
            SchedulerSettings(
                interval_s=10.0,
                moves=MoveTimes(start_s=5.0, change_s=1.0),
                users=self.users,
            ),
            clock=self.clock,
            sleep=self.clock.sleep,
            say=self.said.append,
        )
        return self.scheduler

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.round()
            self.clock.sleep(10.0)

    def given(self) -> dict[str, int]:
        return {
            n: job.given_devices
            for n, job in self.scheduler.jobs.items()
            if job.given_devices
        }

    def states(self) -> dict[str, str]:
        return {name: job.state for name, job in self.scheduler.jobs.items()}
