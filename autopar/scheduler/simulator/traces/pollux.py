"""Reads the workloads and tables that were published with Pollux."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job
from autopar.scheduler.models import pollux_form
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Adapts
from autopar.scheduler.simulator.jobs import EpochJob, Fit, MeasuredSteps
from autopar.scheduler.simulator.tables import Application, read_rows

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
RESTART_S = 30.0
"""Seconds of a restart in the published simulator."""

# From the published simulator: the epochs of each program, the largest number of
# samples per device of yolov3, and the batch size of ncf. If a policy may change batch
# sizes, ncf always runs on one device with this batch size, which is its largest.
_EPOCHS = {
    "bert": 2,
    "cifar10": 100,
    "ncf": 10,
    "imagenet": 90,
    "deepspeech2": 80,
    "yolov3": 50,
}
_MOST_LOCAL = {"yolov3": 8}
_FIXED_BATCH = {"ncf": 32768}


def read_applications(folder: pathlib.Path) -> dict[str, Application]:
    """Reads the programs of a folder that has one folder for each program.

    Raises:
      ScheduleError: the folder has no program, or a table is invalid.
    """
    found = {
        path.name: Application(
            path,
            epochs=_EPOCHS.get(path.name),
            most_local=_MOST_LOCAL.get(path.name),
            fixed_batch=_FIXED_BATCH.get(path.name),
            single=path.name in _FIXED_BATCH,
        )
        for path in sorted(folder.glob("*"))
        if (path / "placements.csv").is_file()
    }
    if not found:
        raise ScheduleError(
            f"{folder}: no folder in it has a placements.csv; name the folder of "
            "tables that belongs to the trace."
        )
    return found


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
            submitted_s=row.number("time", 0.0),
            devices=row.whole("num_replicas", 1),
            batch=row.whole("batch_size", 1),
            **row.owner(),
        )
        found.append((row.where, job))
    return found


def running(
    jobs: list[tuple[str, Job]],
    applications: Mapping[str, Application],
    nodes: Nodes,
    adapts: Adapts,
    restart_s: float = RESTART_S,
    fit: Fit = pollux_form.fit,
    *,
    pools: bool = False,
) -> list[EpochJob]:
    """The jobs, ready to be simulated.

    Args:
      jobs: the result of `read_jobs`.
      applications: the programs by name.
      nodes: the cluster.
      adapts: which part of a job's request the policy may change.
      restart_s: seconds for which a job stops when its devices change.
      fit: fits a model of a step's seconds.
      pools: whether all jobs of a program share their measurements.

    Raises:
      ScheduleError: a job's application is not in the tables, or its batch size was not
        measured.
    """
    made: list[EpochJob] = []
    pool: dict[str, MeasuredSteps] = {}
    for where, job in jobs:
        application = applications.get(job.application)
        if application is None:
            raise ScheduleError(
                f"{where}: application {job.application!r} has no tables; there are "
                f"{', '.join(applications)}."
            )
        if job.batch is not None and adapts != "batch":
            try:
                application.completion_epoch(job.batch)
            except ScheduleError as error:
                raise ScheduleError(f"{where}: {error}") from None
        own = MeasuredSteps(fit)
        known = pool.setdefault(job.application, own) if pools else own
        made.append(EpochJob(job, application, adapts, restart_s, nodes, known))
    return made
