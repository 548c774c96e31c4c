"""Reads Philly-style traces and tables of jobs: when, how many devices, how long.

Such a trace has no measured tables. A job's work is its duration on the devices it asks
for; on other numbers it runs by a power of them.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from autopar.scheduler.jobs import Job
from autopar.scheduler.simulator.step_job import StepJob
from autopar.scheduler.simulator.tables import read_rows

COLUMNS = ("name", "submitted_s", "devices", "duration_s")
RESTART_S = 60.0
SCALING = 0.8
"""Exponent of the speed in the number of devices."""

_MOST_DEVICES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class PowerScaling:
    """A step is one second on the devices asked for; a power of them on others."""

    asked: int

    @property
    def most(self) -> int:
        """No job gets more than this."""
        return _MOST_DEVICES

    @property
    def curve(self) -> PowerScaling:
        """It is its own curve."""
        return self

    def seconds(self, plan: str, placement: tuple[int, ...]) -> float:
        """Seconds of a step."""
        del plan
        return float((self.asked / sum(placement)) ** SCALING)

    def asked_s(self, job: Job) -> float:
        """Seconds of a step on what a job's owner asks for."""
        return self.seconds(job.plan, (job.devices,))

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Steps per second."""
        shape = np.broadcast(nodes, devices).shape
        return np.broadcast_to((devices / self.asked) ** SCALING, shape)


def read_jobs(path: pathlib.Path) -> list[tuple[str, Job]]:
    """The jobs of a table, each with its file and line.

    Raises:
      ScheduleError: a row is wrong; it is named.
    """
    found: list[tuple[str, Job]] = []
    for row in read_rows(path, COLUMNS):
        duration_s = row.number("duration_s", 1.0)
        job = Job(
            name=row.text("name"),
            application=row.text("name"),
            submitted_s=row.number("submitted_s", 0.0),
            devices=row.whole("devices", 1),
            steps=round(duration_s),
            duration_s=duration_s,
        )
        found.append((row.where, job))
    return found


def running(jobs: list[tuple[str, Job]], restart_s: float = RESTART_S) -> list[StepJob]:
    """The jobs, ready to be simulated."""
    return [StepJob(job, PowerScaling(job.devices), restart_s) for _, job in jobs]
