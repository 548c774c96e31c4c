"""Reads traces with only submission time, number of devices and duration of each job.

A trace of this kind has no measured step times. So a job's work is set to its duration
on the devices that it asks for, and its speed is assumed to be a power of the number of
devices.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib

import numpy as np

from autopar.scheduler.jobs import Job
from autopar.scheduler.simulator.jobs import StepJob
from autopar.scheduler.simulator.tables import read_rows

COLUMNS = ("name", "submitted_s", "devices", "duration_s")
RESTART_S = 60.0
SCALING = 0.8
"""Exponent of the speed as a power of the number of devices."""

_MOST_DEVICES = 64
_LEAST_S = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class PowerScaling:
    """Step times if speed is a power of the number of devices.

    Attributes:
      asked: number of devices that the owner asks for.
      step_s: seconds of a step on these devices.
      there: number of devices that the cluster has.
    """

    asked: int
    step_s: float = 1.0
    there: int = _MOST_DEVICES

    @property
    def most(self) -> int:
        """The most devices that the job may use: 64, or more if it asks for more."""
        return max(_MOST_DEVICES, min(self.asked, self.there))

    @property
    def curve(self) -> PowerScaling:
        """This object itself, because it is also a curve."""
        return self

    def seconds(self, plan: str, placement: tuple[int, ...]) -> float:
        """Seconds of a step."""
        del plan
        return float(self.step_s * (self.asked / sum(placement)) ** SCALING)

    def asked_s(self, job: Job) -> float:
        """Seconds of a step on the devices that the job's owner asks for."""
        return self.seconds(job.plan, (job.devices,))

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Steps per second."""
        shape = np.broadcast(nodes, devices).shape
        speeds = (devices / self.asked) ** SCALING / self.step_s
        return np.broadcast_to(speeds, shape)


def read_jobs(path: pathlib.Path) -> list[tuple[str, Job]]:
    """Reads the jobs of a table, each with its file and line.

    Raises:
      ScheduleError: a row is invalid; the message names the row.
    """
    return [
        (
            row.where,
            timed_job(
                row.text("name"),
                row.number("submitted_s", 0.0),
                row.whole("devices", 1),
                row.number("duration_s", _LEAST_S),
                **row.owner(),
            ),
        )
        for row in read_rows(path, COLUMNS)
    ]


def timed_job(
    name: str,
    submitted_s: float,
    devices: int,
    seconds: float,
    *,
    user: str = "",
    priority: float = 1.0,
) -> Job:
    """A job whose run time on the requested devices is all that is known.

    The run time is divided into equal steps of at most one second.
    """
    return Job(
        name=name,
        application=name,
        submitted_s=submitted_s,
        devices=devices,
        steps=math.ceil(seconds),
        duration_s=seconds,
        user=user,
        priority=priority,
    )


def running(
    jobs: list[tuple[str, Job]], devices: int, restart_s: float = RESTART_S
) -> list[StepJob]:
    """Makes jobs that can be simulated on a cluster with ``devices`` devices."""
    return [
        StepJob(
            job,
            PowerScaling(job.devices, job.duration_s / job.steps, devices),
            restart_s,
            one_more=False,
        )
        for _, job in jobs
    ]
