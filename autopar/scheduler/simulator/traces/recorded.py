"""Reads what clusters recorded of their jobs: Philly's log and table, Slurm's sacct.

Such a record has no measured tables: a job's work is its run time on what it had. What
never had a GPU is left out, and counted.
"""

from __future__ import annotations

import collections
import datetime
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job
from autopar.scheduler.simulator.tables import Row, read_rows
from autopar.scheduler.simulator.traces.philly import timed_job

PHILLY = ("timestamp", "duration", "num_gpus")
SACCT = ("JobID", "Submit", "Elapsed")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")
_GPU_DIGITS = 9
_GPU = re.compile(r"gres/gpu(?::([^=,]+))?=(\d+)")

Rows = list[tuple[str, Job]]
"""Jobs, each with where it stands in its file."""

Left = collections.Counter[str]
"""How many jobs were left out, by the reason."""


def read_philly_table(path: pathlib.Path) -> tuple[Rows, Left]:
    """The jobs of ``philly.csv``, as Pollux and Sia have it: it has no names.

    Raises:
      ScheduleError: a row is wrong; it is named.
    """
    found = [
        _Recorded(
            where=row.where,
            name=f"job-{number}",
            submitted=_date(row.where, "timestamp", row.text("timestamp")),
            devices=row.whole("num_gpus"),
            seconds=row.number("duration", 0.0),
        )
        for number, row in enumerate(read_rows(path, PHILLY))
    ]
    return _jobs(found)


def read_sacct(path: pathlib.Path) -> tuple[Rows, Left]:
    """The jobs of ``sacct -P`` with JobID, Submit, Elapsed and AllocTRES or ReqTRES.

    A job that began again has a row for each time (``--duplicates``): it has run for
    the sum of them.

    Raises:
      ScheduleError: a row is wrong; it is named.
    """
    found: dict[str, _Recorded] = {}
    for row in read_rows(path, SACCT, delimiter="|"):
        name = row.text("JobID")
        if "." in name:  # a step of a job: 17.batch, 17_4.extern, 17+0.0+1
            continue
        if not {"AllocTRES", "ReqTRES"} & row.cells.keys():
            raise ScheduleError(
                f"{path}: it has no column AllocTRES or ReqTRES, which say the GPUs; "
                "add one to --format."
            )
        before = found.get(name)
        submitted = _date(row.where, "Submit", row.text("Submit"))
        devices, seconds = _gpus(row), _elapsed_s(row)
        if before is not None:
            submitted = before.submitted or submitted
            devices = max(devices, before.devices)
            seconds += before.seconds
        found[name] = _Recorded(
            where=row.where,
            name=name,
            submitted=submitted,
            devices=devices,
            seconds=seconds,
        )
    return _jobs(found.values())


def read_philly_log(path: pathlib.Path) -> tuple[Rows, Left]:
    """The jobs of Microsoft's ``cluster_job_log``, a JSON list.

    A job has run for the sum of its attempts, on the most GPUs that one of them had.

    Raises:
      ScheduleError: the file or a job in it is wrong; it is named.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ScheduleError(f"{path}: it cannot be read as JSON: {error}.") from error
    if not isinstance(data, list):
        raise ScheduleError(f"{path}: it is no list of jobs, as cluster_job_log is.")
    return _jobs(_read_logged(path, number, job) for number, job in enumerate(data, 1))


class _Recorded:
    """A job as a cluster recorded it."""

    def __init__(
        self,
        *,
        where: str,
        name: str,
        submitted: datetime.datetime | None,
        devices: int,
        seconds: float,
    ) -> None:
        self.where, self.name, self.submitted = where, name, submitted
        self.devices, self.seconds = devices, seconds


def _jobs(recorded: Iterable[_Recorded]) -> tuple[Rows, Left]:
    """The jobs that ran on GPUs, in seconds from the first of them, in order."""
    ran: list[tuple[datetime.datetime, _Recorded]] = []
    left: Left = collections.Counter()
    for job in recorded:
        if job.seconds <= 0:
            left["never ran"] += 1
        elif job.devices < 1:
            left["had no GPU"] += 1
        elif job.submitted is None:
            raise ScheduleError(f"{job.where}: it has run, and was never submitted.")
        else:
            ran.append((job.submitted, job))
    ran.sort(key=lambda pair: pair[0])
    rows = [
        (
            job.where,
            timed_job(
                job.name,
                (submitted - ran[0][0]).total_seconds(),
                job.devices,
                job.seconds,
            ),
        )
        for submitted, job in ran
    ]
    return rows, left


def _read_logged(path: pathlib.Path, number: int, job: Any) -> _Recorded:
    where = f"{path}: job {number}"
    if not isinstance(job, Mapping):
        raise ScheduleError(f"{where}: it is no JSON object.")
    name = str(job.get("jobid", ""))[:200] or f"job-{number}"
    where = f"{where} ({name})"
    attempts = job.get("attempts")
    if not isinstance(attempts, list):
        raise ScheduleError(f"{where}: attempts is {attempts!r:.80}; give a list.")
    devices, seconds = 0, 0.0
    for attempt in attempts:
        if not isinstance(attempt, Mapping):
            raise ScheduleError(
                f"{where}: an attempt is {attempt!r:.80}; give an object."
            )
        begin, end = (
            _date(where, key, attempt.get(key)) for key in ("start_time", "end_time")
        )
        if begin is None or end is None:
            continue  # it did not start, or was lost
        if end < begin:
            raise ScheduleError(f"{where}: an attempt ends before it starts.")
        seconds += (end - begin).total_seconds()
        devices = max(devices, sum(_logged_gpus(where, attempt.get("detail"))))
    return _Recorded(
        where=where,
        name=name,
        submitted=_date(where, "submitted_time", job.get("submitted_time")),
        devices=devices,
        seconds=seconds,
    )


def _logged_gpus(where: str, detail: Any) -> Iterator[int]:
    """GPUs of each node of an attempt."""
    nodes = [] if detail is None else detail
    if not isinstance(nodes, list):
        raise ScheduleError(f"{where}: detail is {detail!r:.80}; give a list of nodes.")
    for node in nodes:
        gpus = node.get("gpus") if isinstance(node, Mapping) else None
        if not isinstance(gpus, list):
            raise ScheduleError(
                f"{where}: gpus of a node is {gpus!r:.80}; give a list."
            )
        yield len(gpus)


def _date(where: str, key: str, text: Any) -> datetime.datetime | None:
    """A time as these files write it; None where there is none."""
    if text is None or text in ("", "None", "Unknown", "N/A"):
        return None
    cut = re.sub(r" [A-Z]{3,4}$", "", str(text))  # Philly's times may end with PST
    try:
        found = datetime.datetime.fromisoformat(cut)
        # Some rows of a file may name a zone and others not.
        if found.utcoffset() is not None:
            found = found.astimezone(datetime.UTC)
        return found.replace(tzinfo=None)
    except (ValueError, OverflowError):  # the first and last days of the calendar
        raise ScheduleError(
            f"{where}: {key} is {text!r:.80}; give a time such as 2017-10-09 07:01:55."
        ) from None


def _elapsed_s(row: Row) -> float:
    """Seconds of ``[DD-]HH:MM:SS``; 0 where there are none."""
    text = row.text("Elapsed")
    if text in ("", "INVALID", "Unknown"):
        return 0.0
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{row.where}: Elapsed is {text!r}; give [DD-]HH:MM:SS, as sacct does."
        )
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    found = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not math.isfinite(found):
        raise ScheduleError(f"{row.where}: Elapsed is {text!r}; that is no time.")
    return found


def _gpus(row: Row) -> int:
    """GPUs by what a job had, or else asked for."""
    for column in ("AllocTRES", "ReqTRES"):
        text = row.cells.get(column, "")
        found = _GPU.findall(text)
        if found:
            if any(len(count) > _GPU_DIGITS for _, count in found):
                raise ScheduleError(
                    f"{row.where}: {column} is {text[:80]!r}; no job has so many GPUs."
                )
            whole = [int(count) for kind, count in found if not kind]
            return whole[0] if whole else sum(int(count) for _, count in found)
    return 0
