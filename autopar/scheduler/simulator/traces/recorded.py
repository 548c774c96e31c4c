"""Reads what real clusters recorded of jobs: Philly's log and table, Slurm's sacct.

A cluster's record of a job has no step times. So a job's work is set to its run time on
the devices that it had. Jobs that never had a GPU are not simulated; their number is
reported.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import datetime
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job
from autopar.scheduler.models import corrected_form, pollux_form
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.simulator.engine import RunningJob
from autopar.scheduler.simulator.tables import ENCODING, Row, column_names, read_rows
from autopar.scheduler.simulator.traces import philly, pollux, rubick
from autopar.scheduler.simulator.traces.philly import timed_job

PHILLY = ("timestamp", "duration", "num_gpus")
SACCT = ("JobID", "Submit", "Elapsed")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")
_GPU_DIGITS = 9
_GPU = re.compile(r"gres/gpu(?::([^=,]+))?=(\d+)")

Rows = list[tuple[str, Job]]
"""Jobs, each with its position in its file."""

Left = collections.Counter[str]
"""The number of jobs that were left out, by reason."""


def read_philly_table(path: pathlib.Path) -> tuple[Rows, Left]:
    """Reads ``philly.csv``, as used by Pollux and Sia, in which jobs have no names.

    Raises:
      ScheduleError: a row is invalid; the message names the row.
    """
    found = [
        _Recorded(
            where=row.where,
            name=f"job-{number}",
            submitted=_date(row.where, "timestamp", row.text("timestamp")),
            devices=row.whole("num_gpus"),
            seconds=row.number("duration", 0.0),
            **row.owner(),
        )
        for number, row in enumerate(read_rows(path, PHILLY))
    ]
    return _jobs(found)


def read_sacct(path: pathlib.Path) -> tuple[Rows, Left]:
    """Reads ``sacct -P`` with JobID, Submit, Elapsed, and AllocTRES or ReqTRES.

    A job that was restarted has one row per start (``--duplicates``). Its run time is
    the sum over these rows.

    Raises:
      ScheduleError: a row is invalid; the message names the row.
    """
    found: dict[str, _Recorded] = {}
    for row in read_rows(path, SACCT, delimiter="|"):
        name = row.text("JobID")
        if "." in name:  # a job's step, such as 17.batch, 17_4.extern, 17+0.0+1
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
            user=row.text("User") if "User" in row.cells else "",
        )
    return _jobs(found.values())


def read_philly_log(path: pathlib.Path) -> tuple[Rows, Left]:
    """Reads the jobs in Microsoft's ``cluster_job_log``, a JSON list.

    A job may have several attempts. The job's run time is the sum over its attempts.
    Its number of GPUs is the largest number of an attempt.

    Raises:
      ScheduleError: the file or a job in it is invalid; the message names the file or
        the job.
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
        user: str = "",
        priority: float = 1.0,
    ) -> None:
        self.user, self.priority = user, priority
        self.where, self.name, self.submitted = where, name, submitted
        self.devices, self.seconds = devices, seconds


def _jobs(recorded: Iterable[_Recorded]) -> tuple[Rows, Left]:
    """The jobs that ran on GPUs, in order of submission; and how many are left out.

    Submission times are seconds since the first submission.
    """
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
                user=job.user,
                priority=job.priority,
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
            continue  # it did not start, or its record was lost
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
        user=str(job.get("user", ""))[:200],
    )


def _logged_gpus(where: str, detail: Any) -> Iterator[int]:
    """Yields the number of GPUs on each node of an attempt."""
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
    """Parses a time in one of these files; None if the text is not a time."""
    if text is None or text in ("", "None", "Unknown", "N/A"):
        return None
    cut = re.sub(r" [A-Z]{3,4}$", "", str(text))  # Philly's times may end with PST
    try:
        found = datetime.datetime.fromisoformat(cut)
        # Some rows of a file may have a time zone, and other rows none.
        if found.utcoffset() is not None:
            found = found.astimezone(datetime.UTC)
        return found.replace(tzinfo=None)
    except (ValueError, OverflowError):  # no valid date
        raise ScheduleError(
            f"{where}: {key} is {text!r:.80}; give a time such as 2017-10-09 07:01:55."
        ) from None


def _elapsed_s(row: Row) -> float:
    """Seconds of a text ``[DD-]HH:MM:SS``; 0 if the text has another form."""
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
    """The number of GPUs of a job; if it is not recorded, the number requested."""
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


_RECORDS = {
    "Philly's JSON": read_philly_log,
    "philly.csv": read_philly_table,
    "sacct -P": read_sacct,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The jobs of a trace file, and what could not be read from it.

    Attributes:
      jobs: the jobs, ready to be simulated.
      left_out: for each reason, the number of jobs of the file that are not simulated
        for this reason.
      alike: kinds of devices of the cluster that count as one kind, because there are
        no tables for each kind.
    """

    jobs: Sequence[RunningJob]
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    alike: tuple[str, ...] = ()


def jobs_of(
    trace: pathlib.Path,
    tables: pathlib.Path | None,
    nodes: Nodes,
    policy: SchedulingPolicy,
    restart_s: float | None = None,
) -> Sequence[RunningJob]:
    """Reads the jobs of a trace (`read_trace`), with at most one folder of tables."""
    given = {} if tables is None else {"": tables}
    return read_trace(trace, given, nodes, policy, restart_s).jobs


def read_trace(
    trace: pathlib.Path,
    tables: Mapping[str, pathlib.Path],
    nodes: Nodes,
    policy: SchedulingPolicy,
    restart_s: float | None = None,
) -> Trace:
    """Reads the jobs of a trace file; recognises the format by the first line.

    Args:
      trace: a CSV file, the output of ``sacct -P``, or Philly's log in JSON.
      tables: kind of devices -> folder with measured tables; or '' -> one folder for
        all kinds. If empty, the tables are read from ``../traces``, relative to the
        trace's folder.
      nodes: the cluster.
      policy: the policy; `SchedulingPolicy.adapts` says which part of a job's request
        may change.
      restart_s: seconds for which a job stops when its devices change; None: as in the
        published simulator.

    Raises:
      ScheduleError: the file has no known format, or a row is invalid.
    """
    head = _head(trace)
    kinds = tuple(dict.fromkeys(nodes.kinds))
    by_kind = _by_kind(tables, kinds)
    alike = kinds if len(kinds) > 1 and not by_kind else ()
    folder = next(iter(tables.values()), trace.parent.parent / "traces")
    if set(pollux.COLUMNS) <= head:
        _refuse_kinds(by_kind, trace)
        known = pollux.read_applications(folder)
        fit = pollux_form.fit if policy.name == "pollux" else corrected_form.fit
        seconds = pollux.RESTART_S if restart_s is None else restart_s
        rows, pools = pollux.read_jobs(trace), getattr(policy, "pools", False)
        jobs = pollux.running(
            rows, known, nodes, policy.adapts, seconds, fit, pools=pools
        )
        return Trace(jobs=jobs, alike=alike)
    if set(rubick.COLUMNS) <= head:
        rows = rubick.read_jobs(trace)
        names = [job.application for _, job in rows]
        seconds = rubick.RESTART_S if restart_s is None else restart_s
        return Trace(
            jobs=rubick.running(
                rows,
                rubick.read_plan_times(folder, names),
                seconds,
                # The error of Rubick's published simulator is repeated only for
                # Rubick's policy.
                ghosts=policy.name == "rubick",
                by_kind={
                    kind: rubick.read_plan_times(of, names)
                    for kind, of in by_kind.items()
                },
            ),
            alike=alike,
        )
    _refuse_kinds(by_kind, trace)
    seconds = philly.RESTART_S if restart_s is None else restart_s
    if set(philly.COLUMNS) <= head:
        rows = philly.read_jobs(trace)
        return Trace(jobs=philly.running(rows, nodes.total, seconds), alike=alike)
    record = _record(trace, head)
    if record:
        rows, left = _RECORDS[record](trace)
        jobs = philly.running(rows, nodes.total, seconds)
        return Trace(jobs=jobs, left_out=left, alike=alike)
    raise ScheduleError(
        f"{trace}: its columns are {column_names(sorted(head))}; known traces "
        f"have {', '.join(pollux.COLUMNS)}; or {', '.join(rubick.COLUMNS)}; or "
        f"{', '.join(philly.COLUMNS)}; or are {', '.join(_RECORDS)}."
    )


def _by_kind(
    tables: Mapping[str, pathlib.Path], kinds: tuple[str, ...]
) -> dict[str, pathlib.Path]:
    """Kind of devices -> folder; empty if there is one folder for all kinds.

    Raises:
      ScheduleError: a kind has tables but no nodes, or nodes but no tables.
    """
    if not tables or "" in tables:
        return {}
    for kind in tables:
        if kind not in kinds:
            raise ScheduleError(
                f"tables of kind {kind!r}: the cluster has no such devices; its kinds "
                f"are {', '.join(kinds)}."
            )
    for kind in kinds:
        if kind not in tables:
            raise ScheduleError(
                f"devices of kind {kind!r} have no tables; add --tables {kind}=DIR."
            )
    return dict(tables)


def _refuse_kinds(by_kind: Mapping[str, pathlib.Path], trace: pathlib.Path) -> None:
    if by_kind:
        raise ScheduleError(
            f"{trace}: tables by kind of devices are read for traces with the columns "
            f"{', '.join(rubick.COLUMNS)}; give one folder, or none, with this one."
        )


def _record(trace: pathlib.Path, head: set[str]) -> str:
    """The format of a file as a key of `_RECORDS`; '' if it has another format."""
    if any(name.startswith(("[", "{")) for name in head):
        return "Philly's JSON"
    if set(PHILLY) <= head:
        return "philly.csv"
    words = {word for name in head for word in name.split("|")}
    return "sacct -P" if "JobID" in words and any("|" in n for n in head) else ""


def _head(trace: pathlib.Path) -> set[str]:
    try:
        with trace.open(newline="", encoding=ENCODING) as file:
            first = file.readline(65536)
        return {name.strip() for name in next(csv.reader([first]), [])}
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{trace}: it cannot be read: {error}.") from error
