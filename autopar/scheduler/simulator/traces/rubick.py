"""Reads the workloads and plan tables that were published with Rubick."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job
from autopar.scheduler.simulator.jobs import StepJob
from autopar.scheduler.simulator.plan_tables import PlanTimes
from autopar.scheduler.simulator.tables import read_rows

COLUMNS = (
    "name",
    "submission_time",
    "duration",
    "application",
    "num_gpus",
    "exec_plan",
    "steps",
    "is_sla",
)
RESTART_S = 260.0
"""Seconds of a restart in the published simulator."""


def read_plan_times(folder: pathlib.Path, names: Iterable[str]) -> dict[str, PlanTimes]:
    """Reads the tables of programs, from a folder with one folder for each program.

    The result has no entry for a program without a folder. If a job needs this program,
    `running` raises an error that names the job.

    Raises:
      ScheduleError: a table is invalid.
    """
    there = {path.parent.name for path in folder.glob("*/placements.csv")}
    return {name: PlanTimes(folder / name) for name in sorted({*names} & there)}


def read_jobs(path: pathlib.Path) -> list[tuple[str, Job]]:
    """Reads the jobs of a workload, each with its file and line.

    Raises:
      ScheduleError: a row is invalid; the message names the row.
    """
    found: list[tuple[str, Job]] = []
    for row in read_rows(path, COLUMNS):
        job = Job(
            name=row.text("name"),
            application=row.text("application"),
            submitted_s=row.number("submission_time", 0.0),
            devices=row.whole("num_gpus", 1),
            plan=row.text("exec_plan"),
            steps=row.whole("steps", 1),
            duration_s=row.number("duration", 0.0),
            guaranteed=row.whole("is_sla", 0) > 0,
            **row.owner(),
        )
        found.append((row.where, job))
    return found


def running(
    jobs: list[tuple[str, Job]],
    times: Mapping[str, PlanTimes],
    restart_s: float = RESTART_S,
    *,
    ghosts: bool = False,
    by_kind: Mapping[str, Mapping[str, PlanTimes]] | None = None,
) -> list[StepJob]:
    """The jobs, ready to be simulated.

    Args:
      jobs: the result of `read_jobs`.
      times: program -> seconds of its steps.
      restart_s: seconds for which a job stops when its devices change.
      ghosts: whether to repeat an error of the published simulator (`StepJob`).
      by_kind: kind of devices -> program -> seconds of its steps.

    Raises:
      ScheduleError: a job's application is not in the tables.
    """
    made: list[StepJob] = []
    for where, job in jobs:
        if job.application not in times:
            raise ScheduleError(
                f"{where}: application {job.application!r} has no tables; there are "
                f"{', '.join(times) or 'none'}."
            )
        kinds: dict[str, PlanTimes] = {}
        for kind, of in (by_kind or {}).items():
            if job.application not in of:
                raise ScheduleError(
                    f"{where}: application {job.application!r} has no tables of kind "
                    f"{kind!r}; add them to the folder of that kind."
                )
            kinds[kind] = of[job.application]
        own = times[job.application]
        made.append(StepJob(job, own, restart_s, ghosts=ghosts, by_kind=kinds))
    return made
