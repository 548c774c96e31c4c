"""Stores the state of a scheduler in an SQLite file, to continue after a crash.

Every change of a job is one transaction. The scheduler writes a change before it
carries the change out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import msgspec

from autopar.dispatch.specs import Handed, JobSpec
from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Decisions
from autopar.scheduler.users import UserLimits, Users

_SCHEMA = 3
# States of a job. Pending: its earliest start has not come. Waiting: it has no devices.
# Running: it has devices. Stopping: it is giving its devices back. The last three
# states are final.
PENDING, WAITING, RUNNING, STOPPING = "pending", "waiting", "running", "stopping"
DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
ENDED = (DONE, FAILED, CANCELLED)
# What the owner of a job can wish: that it does not run for now, or never again.
HOLD, CANCEL = "hold", "cancel"

_TABLES = """
create table if not exists facts (key text primary key, value text not null);
create table if not exists nodes (
  number integer primary key, name text not null unique, devices integer not null,
  kind text not null);
create table if not exists jobs (
  number integer primary key, name text not null unique, handed text not null,
  state text not null, reason text not null, attempt integer not null,
  places text not null, started_s real, ended_s real, step integer not null,
  position integer not null, devices integer not null, step_s real, loss real,
  finite integer not null, told_s real, served_device_s real not null,
  tried integer not null, moves integer not null, losses integer not null,
  handed_s real not null default 0, wish text not null default '',
  batch integer not null default 0, noise_scale real,
  microbatches integer not null default 1, scheme text not null default '',
  codecs text not null default '', worth real, submission text not null default '');
create table if not exists decisions (
  number integer primary key, at_s real not null, job text not null,
  kept integer not null, devices integer not null, gain real, cost_s real not null,
  compared text not null, gap real);
create table if not exists spans (
  number integer primary key, job text not null, start_s real not null, end_s real,
  places text not null);
"""
# Version of the schema -> columns that it added.
_ADDED = {
    2: ("handed_s real not null default 0", "wish text default ''"),
    3: (
        "batch integer not null default 0",
        "noise_scale real",
        "microbatches integer not null default 1",
        "scheme text not null default ''",
        "codecs text not null default ''",
        "worth real",
        "submission text not null default ''",
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The stored data of a job.

    Times are in seconds since the scheduler's first start. The last report is the last
    line of progress that the job wrote.

    Attributes:
      name: unique name of the job.
      handed: the job as submitted.
      state: one of `PENDING`, `WAITING`, `RUNNING`, `STOPPING` and `ENDED`.
      reason: why the job failed, or why it waits; '' if it does neither.
      attempt: how often its processes have been started.
      places: name of a node -> number of its devices that the job has.
      started_s: time of the first start; None if the job has not started.
      ended_s: time of the end.
      step: number of steps done, in the last report.
      position: number of samples consumed, in the last report.
      devices: number of devices on which it trained, in the last report.
      step_s: seconds of a step, in the last report.
      loss: loss in the last report; None if it is not known or not finite.
      finite: whether the loss in the last report was finite.
      told_s: time of the last report.
      served_device_s: device-seconds that the job has had so far.
      tried: largest number of devices that the job has had.
      moves: how often its devices have changed after its first start.
      losses: how often in succession its processes were lost without a step between. If
        the script itself ended them, this does not count.
      handed_s: time when the job was submitted.
      wish: the last wish of its owner: `HOLD`, `CANCEL`, or '' for a job that should
        run.
      batch: rows of a step, in the last report.
      noise_scale: the last reported noise scale of its gradients, in rows; None if no
        report had one.
      microbatches: number of microbatches, in the last report.
      scheme: name of the known parallelism scheme that its plan's layouts resemble.
      codecs: the codecs of its gradients, separated by spaces.
      worth: progress of its steps in rows of the base batch (the rows that would make
        the same progress in batches of the base size); None if it was not reported.
      submission: id of the submission, if it came from another machine; otherwise ''.
    """

    name: str
    handed: Handed
    state: str = PENDING
    reason: str = ""
    attempt: int = 0
    places: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    started_s: float | None = None
    ended_s: float | None = None
    step: int = 0
    position: int = 0
    devices: int = 0
    step_s: float | None = None
    loss: float | None = None
    finite: bool = True
    told_s: float | None = None
    served_device_s: float = 0.0
    tried: int = 0
    moves: int = 0
    losses: int = 0
    handed_s: float = 0.0
    wish: str = ""
    batch: int = 0
    noise_scale: float | None = None
    microbatches: int = 1
    scheme: str = ""
    codecs: str = ""
    worth: float | None = None
    submission: str = ""

    @property
    def submitted_s(self) -> float:
        """The job's earliest start, in seconds since the scheduler's first start."""
        return self.handed_s + self.handed.spec.submitted_s

    @property
    def given_devices(self) -> int:
        """The number of devices that the scheduler has given the job."""
        return sum(self.places.values())

    @property
    def active(self) -> bool:
        """Whether the job waits for devices or has some.

        If the owner holds or cancels the job, the job is active only until it has given
        its devices back.
        """
        waits = self.state == WAITING and not self.wish
        return waits or self.state in (RUNNING, STOPPING)

    @property
    def shown_state(self) -> str:
        """The state as a word for people; also "held" and "cancelling"."""
        if self.wish == CANCEL and self.state not in ENDED:
            return "cancelling"
        held = self.wish == HOLD and self.state in (PENDING, WAITING)
        return "held" if held else self.state

    @property
    def data(self) -> dict[str, Any]:
        """The job as plain data for people and programs."""
        spec = self.handed.spec
        shown = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "handed"
        }
        return {
            **shown,
            "state": self.shown_state,
            "places": dict(self.places),
            "application": self.handed.application,
            "submitted_s": self.submitted_s,
            "asked": spec.devices,
            "guaranteed": spec.guaranteed,
            "user": self.handed.user,
            "priority": spec.priority,
        }


_FIELDS = tuple(f.name for f in dataclasses.fields(JobRecord))


class Store:
    """The SQLite file with a scheduler's state. Only one scheduler writes jobs; others
    read.
    """

    def __init__(self, path: pathlib.Path, *, reads: bool = False) -> None:
        """Opens the file.

        Args:
          path: path of the file.
          reads: whether the caller only reads. The file must then exist.

        Raises:
          ScheduleError: the file cannot be opened, or has an unknown schema.
        """
        if reads and not path.is_file():
            raise ScheduleError(
                f"{path.parent}: there is no scheduler's state; `autopar schedule "
                "JOBS.toml --state DIR` makes one."
            )
        self.path = path
        try:
            self._open(reads)
        except sqlite3.Error as error:
            raise ScheduleError(f"{path}: {error}.") from error
        found = self.fact("schema")
        if found in ("1", "2"):
            self._migrate(int(found))
        elif found != str(_SCHEMA):
            raise ScheduleError(
                f"{path}: it is of schema {found}, and this version reads schema "
                f"{_SCHEMA}; take another --state."
            )

    def _open(self, reads: bool) -> None:
        self._file = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
        self._file.execute("pragma busy_timeout = 30000")
        if reads:
            return
        self._file.execute("pragma journal_mode = wal")
        self._file.executescript(_TABLES)
        self._file.execute(
            "insert or ignore into facts values ('schema', ?)", (str(_SCHEMA),)
        )

    def _migrate(self, found: int) -> None:
        """Adds the columns that a file with an earlier schema lacks."""
        with self._all_or_nothing():
            for schema in range(found + 1, _SCHEMA + 1):
                for column in _ADDED[schema]:
                    self._file.execute(f"alter table jobs add column {column}")
            self._file.execute(
                "update facts set value = ? where key = 'schema'", (str(_SCHEMA),)
            )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def fact(self, key: str) -> str | None:
        """The text that is stored under a key; None if there is none."""
        rows = self._rows("select value from facts where key = ?", key)
        return str(rows[0][0]) if rows else None

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Returns the rows that a statement selects.

        Raises:
          ScheduleError: the file is damaged.
        """
        try:
            return self._file.execute(statement, values).fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            raise ScheduleError(f"{self.path}: it is damaged: {error}.") from error

    def set_facts(self, facts: Mapping[str, str]) -> None:
        """Stores texts under keys, in one transaction."""
        with self._all_or_nothing():
            self._file.executemany(
                "insert or replace into facts values (?, ?)", list(facts.items())
            )

    def users(self) -> dict[str, UserLimits]:
        """The quotas and shares of users that were stored last."""
        text = self.fact("users")
        try:
            return msgspec.json.decode(text or "{}", type=dict[str, UserLimits])
        except (msgspec.MsgspecError, ScheduleError) as error:
            raise ScheduleError(f"{self.path}: users are damaged: {error}.") from error

    def set_users(self, users: Users) -> None:
        """Stores the quotas and shares of users."""
        self.set_facts({"users": msgspec.json.encode(users).decode()})

    def begin_s(self, now: float) -> float:
        """When the scheduler first started, in seconds since the epoch; times count
        from it.

        Args:
          now: the present time, which is stored if no start has been stored yet.
        """
        self._file.execute(
            "insert or ignore into facts values ('begin_s', ?)", (str(now),)
        )
        found = self.seconds("begin_s")
        return now if found is None else found

    def seconds(self, key: str) -> float | None:
        """The seconds that are stored under a key; None if there are none.

        Raises:
          ScheduleError: the stored text is not a number.
        """
        text = self.fact(key)
        try:
            return None if text is None else float(text)
        except ValueError as error:
            raise ScheduleError(f"{self.path}: {key} is {text!r}, no time.") from error

    def add_jobs(
        self, jobs: Iterable[Handed], at_s: float = 0.0, submission: str = ""
    ) -> None:
        """Adds all jobs, or none if one cannot be added.

        Args:
          jobs: the submitted jobs.
          at_s: time of the submission, in seconds since the scheduler's first start.
          submission: id of the submission; '' if it has none.

        Raises:
          ScheduleError: there is already a job with one of the names.
        """
        with self._all_or_nothing():
            for job in jobs:
                self._add(job, at_s, submission)

    def jobs_of(self, submission: str) -> dict[str, JobSpec]:
        """Name -> job, for the jobs of a submission; empty if it was not stored."""
        return {
            name: job.handed.spec
            for name, job in self.jobs().items()
            if job.submission == submission
        }

    def _add(self, job: Handed, at_s: float, submission: str) -> None:
        name = job.spec.name
        row = _row(
            JobRecord(name=name, handed=job, handed_s=at_s, submission=submission)
        )
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        try:
            self._file.execute(
                f"insert into jobs ({names}) values ({marks})", tuple(row.values())
            )
        except sqlite3.IntegrityError as error:
            raise ScheduleError(f"job {job.spec.name!r} is there already.") from error

    def job(self, name: str) -> JobRecord:
        """Returns the job with a name.

        Raises:
          ScheduleError: there is no such job.
        """
        jobs = self.jobs()
        if name not in jobs:
            raise ScheduleError(
                f"job {name!r}: there is none; there are {', '.join(jobs) or 'none'}."
            )
        return jobs[name]

    def jobs(self) -> dict[str, JobRecord]:
        """Name -> job, for all jobs in the order of their submission."""
        names = ", ".join(_FIELDS)
        rows = self._rows(f"select {names} from jobs order by number")
        try:
            return {row[0]: _record(row) for row in rows}
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise ScheduleError(f"{self.path}: a job is damaged: {error}.") from error

    def wishes(self) -> dict[str, str]:
        """Name of a job -> the wish of its owner."""
        return dict(self._rows("select name, wish from jobs order by number"))

    def wish(self, names: Iterable[str], wish: str) -> None:
        """Stores a wish for some jobs; never replaces the wish `CANCEL`."""
        with self._all_or_nothing():
            self._file.executemany(
                "update jobs set wish = ? where name = ? and wish != ?",
                [(wish, name, CANCEL) for name in names],
            )

    def update(self, job: JobRecord, **fields: Any) -> JobRecord:
        """Changes fields of a job; returns the changed job.

        Args:
          job: the job as it is stored now.
          **fields: the new values of fields.
        """
        changed = dataclasses.replace(job, **fields)
        row = {key: _column(key, getattr(changed, key)) for key in fields}
        sets = ", ".join(f"{key} = ?" for key in row)
        self._file.execute(
            f"update jobs set {sets} where name = ?", (*row.values(), job.name)
        )
        return changed

    def number(self, name: str, devices: int, kind: str) -> int:
        """The number of a node, which never changes; a new node gets the next
        number.
        """
        self._file.execute(
            "insert into nodes (number, name, devices, kind) select count(*), ?, ?, ? "
            "from nodes where true on conflict (name) do update set "
            "devices = excluded.devices, kind = excluded.kind",
            (name, devices, kind),
        )
        return int(self._rows("select number from nodes where name = ?", name)[0][0])

    def nodes(self) -> list[tuple[str, int, str]]:
        """Name, devices and kind of every node so far, in the order of their
        numbers.
        """
        rows = self._rows("select name, devices, kind from nodes order by number")
        return self._check(rows, list[tuple[str, int, str]], "a node")

    def add_decisions(self, at_s: float, decisions: Decisions) -> None:
        """Stores a decision: a row for each job whose devices it changes."""
        rows = [
            (at_s, r.job, r.kept, r.devices, r.gain, r.cost_s, r.compared,
             decisions.gap)
            for r in decisions.reasons
        ]  # fmt: skip
        with self._all_or_nothing():
            self._file.executemany(
                "insert into decisions (at_s, job, kept, devices, gain, cost_s, "
                "compared, gap) values (?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def decisions(self) -> list[dict[str, Any]]:
        """All decisions so far: a row for each change of a job's devices."""
        names = tuple(_Decision.__annotations__)
        rows = self._rows(f"select {', '.join(names)} from decisions order by number")
        lines = [dict(zip(names, row, strict=True)) for row in rows]
        return self._check(lines, list[_Decision], "a decision")

    def span(self, job: str, at_s: float, places: Mapping[str, int]) -> None:
        """Stores which devices a job has from time ``at_s`` on."""
        with self._all_or_nothing():
            self._file.execute(
                "update spans set end_s = ? where job = ? and end_s is null",
                (at_s, job),
            )
            if places:
                self._file.execute(
                    "insert into spans (job, start_s, places) values (?, ?, ?)",
                    (job, at_s, json.dumps(dict(places))),
                )

    def spans(self) -> list[dict[str, Any]]:
        """Which devices each job had over time, as periods."""
        rows = self._rows(
            "select job, start_s, end_s, places from spans order by number"
        )
        try:
            lines = [
                {"job": j, "start_s": s, "end_s": e, "places": json.loads(p)}
                for j, s, e, p in rows
            ]
        except (TypeError, ValueError, RecursionError) as error:
            raise ScheduleError(f"{self.path}: a span is damaged: {error}.") from error
        return self._check(lines, list[_Span], "a span")

    def _check(self, found: Any, kind: Any, what: str) -> Any:
        """Converts stored data to a type, and checks it.

        Raises:
          ScheduleError: the data do not have this type.
        """
        try:
            return msgspec.convert(found, kind)
        except msgspec.MsgspecError as error:
            text = f"{self.path}: {what} is damaged: {error}."
            raise ScheduleError(text) from error

    def _all_or_nothing(self) -> _Transaction:
        return _Transaction(self._file)


class _Decision(TypedDict):
    """A stored decision about a job."""

    at_s: float
    job: str
    kept: int
    devices: int
    gain: float | None
    cost_s: float
    compared: str
    gap: float | None


class _Span(TypedDict):
    """A stored period during which a job had the same devices."""

    job: str
    start_s: float
    end_s: float | None
    places: dict[str, int]


class _Transaction:
    """A context in which either all statements take effect, or none."""

    def __init__(self, file: sqlite3.Connection) -> None:
        self._file = file

    def __enter__(self) -> None:
        self._file.execute("begin immediate")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.execute("commit" if kind is None else "rollback")


def _row(job: JobRecord) -> dict[str, Any]:
    """Column -> value, for a job."""
    return {name: _column(name, getattr(job, name)) for name in _FIELDS}


def _column(name: str, value: Any) -> Any:
    """The value of a field in the form that SQLite stores."""
    if name == "handed":
        return msgspec.json.encode(value).decode()
    if name == "places":
        return json.dumps(dict(value))
    return int(value) if name == "finite" else value


def _record(row: tuple[Any, ...]) -> JobRecord:
    fields = dict(zip(_FIELDS, row, strict=True))
    for name in ("handed", "places"):
        fields[name] = json.loads(fields[name])
    fields["finite"] = bool(fields["finite"])
    return msgspec.convert(fields, JobRecord)


def _learn_types() -> None:
    """Makes msgspec inspect all types that this module reads.

    The store calls this function in advance, because msgspec crashes if two threads
    inspect a type for the first time at the same moment.
    """
    read = (list[tuple[str, int, str]], list[_Decision], list[_Span])
    for kind in (JobRecord, dict[str, UserLimits], *read):
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(None, kind)


_learn_types()
