"""Makes the jobs of a trace, whichever kind of file it is."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from autopar.errors import ScheduleError
from autopar.scheduler.models import corrected_form, pollux_form
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.simulator.engine import RunningJob
from autopar.scheduler.simulator.tables import ENCODING, column_names
from autopar.scheduler.simulator.traces import philly, pollux, recorded, rubick

_RECORDS = {
    "Philly's JSON": recorded.read_philly_log,
    "philly.csv": recorded.read_philly_table,
    "sacct -P": recorded.read_sacct,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The jobs of a file, and what it does not say of them.

    Attributes:
      jobs: ready to be simulated.
      left_out: how many jobs of the file are not among them, by the reason.
      alike: kinds of devices that count as one, because no table distinguishes them.
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
    """The jobs of `read_trace`, with the tables of one folder or none."""
    given = {} if tables is None else {"": tables}
    return read_trace(trace, given, nodes, policy, restart_s).jobs


def read_trace(
    trace: pathlib.Path,
    tables: Mapping[str, pathlib.Path],
    nodes: Nodes,
    policy: SchedulingPolicy,
    restart_s: float | None = None,
) -> Trace:
    """The jobs of a trace; its head line tells what it is.

    Args:
      trace: a CSV file, the output of ``sacct -P``, or Philly's log in JSON.
      tables: folders with measured tables by kind of devices, or one under '' for all;
        ``../traces`` beside the trace's folder where there is none.
      nodes: the cluster.
      policy: what it adapts decides what a job may change.
      restart_s: seconds of a move; those of the published simulator where None.

    Raises:
      ScheduleError: the file is none that is known, or a row is wrong.
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
                # Only the published policy is repeated with the published slip.
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
    """The folders by kind; none where one is for all.

    Raises:
      ScheduleError: a kind has tables and no node, or nodes and no tables.
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
    """Which of `_RECORDS` a file is; '' for none."""
    if any(name.startswith(("[", "{")) for name in head):
        return "Philly's JSON"
    if set(recorded.PHILLY) <= head:
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
