"""The work of ``autopar jobs``: shows, submits and ends the jobs of a scheduler."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import time
from collections.abc import Generator, Sequence
from typing import Any

from autopar.cli.commands.clusters import SubmitCommand
from autopar.cli.output import Result
from autopar.dispatch.owners import carry_out, record_wish
from autopar.dispatch.running import ProcessRuns
from autopar.dispatch.specs import JobSpec, check, read_specs, read_users
from autopar.dispatch.store import DONE, ENDED, JobRecord, Store
from autopar.elastic.processes.records import command
from autopar.errors import ScheduleError
from autopar.goodput.curves import CurvePoint
from autopar.terminal import columns
from autopar.units import seconds_text
from autopar.whole_files import FileLock, holder

STATE_FILE = "state.sqlite"
_HEADING = (
    "job", "user", "state", "devices", "asked", "submitted", "started", "ended", "step",
    "step takes", "predicted", "batch", "noise", "plan", "loss", "moves", "why",
)  # fmt: skip


def read_submitted(
    asked: SubmitCommand,
) -> tuple[list[tuple[str, JobSpec]], pathlib.Path]:
    """Reads the submitted jobs, each with its place in the file, and their folder.

    Raises:
      ScheduleError: the table is wrong.
    """
    if asked.file.suffix != ".toml":
        spec = JobSpec(
            name=asked.name or asked.file.stem,
            script=asked.file.name,
            args=tuple(asked.words or ()),
            devices=asked.devices,
            guaranteed=asked.guaranteed,
            user=asked.user,
            priority=asked.priority,
        )
        return [(str(asked.file), spec)], asked.file.absolute().parent
    said = (asked.words, asked.name, asked.devices > 1, asked.guaranteed)
    if any((*said, asked.user, asked.priority != 1)):
        raise ScheduleError(
            f"{asked.file}: a table says all of its jobs; leave out what follows it, "
            "and all options of a script's job."
        )
    if read_users(asked.file):
        raise ScheduleError(
            f"{asked.file}: [users] is for who runs the scheduler: give it to "
            "`autopar schedule`, and leave it out here."
        )
    return read_specs(asked.file), asked.file.resolve().parent


def take_jobs(
    state: pathlib.Path,
    specs: Sequence[tuple[str, JobSpec]],
    folder: pathlib.Path,
    *,
    owner: str | None = None,
    submission: str = "",
) -> Result:
    """Adds jobs to the state of a scheduler.

    Args:
      state: the folder of the state.
      specs: the jobs, each with its place in the submitted file.
      folder: the folder in which the scripts run.
      owner: the user who submits the jobs; None for the user of this process.
      submission: the name of the submission. If it was accepted before, no job is
        added.

    Raises:
      ScheduleError: a job is wrong, or its name is taken. No job is added then.
    """
    for where, spec in specs:
        if spec.target:
            raise ScheduleError(
                f"{where}: the curve of its target is planned by "
                "`autopar schedule JOBS.toml`; hand it in there, or make a file with "
                "`autopar goodput --out` and name that as curve."
            )
    state.mkdir(parents=True, exist_ok=True)
    store = Store(state / STATE_FILE)
    try:
        known = store.jobs_of(submission) if submission else {}
        if known and known != {spec.name: spec for _, spec in specs}:
            raise ScheduleError(
                f"submission {submission!r} was of {', '.join(known)}, as they were "
                "then; hand others in without --id, or with another one."
            )
        if not known:
            jobs = [check(spec, folder, where, owner) for where, spec in specs]
            now = time.time()
            store.add_jobs(jobs, now - store.begin_s(now), submission)
    finally:
        store.close()
    again = " already: it was taken before, and is the same" if known else ""
    lines = [f"job {spec.name} is submitted{again}" for _, spec in specs]
    if not _scheduler(state):
        lines.append(
            "no scheduler runs: `autopar schedule --state "
            f"{state} --nodes 1x2` starts one"
        )
    return Result("\n".join(lines))


def wish(state: pathlib.Path, names: Sequence[str], wanted: str) -> Result:
    """Cancels, holds or releases jobs.

    If a scheduler uses the state, it receives the request; otherwise the state is
    changed directly.

    Raises:
      ScheduleError: there is no such job, or it has ended.
    """
    with _store(state) as store:
        jobs = record_wish(store, names, wanted)
        lock = FileLock(state / "lock")
        if not lock.take():
            told = (
                f"the scheduler (process {_scheduler(state)}) does it at its next look"
            )
            return Result("\n".join(f"job {n}: {told}" for n in names))
        try:
            runs = ProcessRuns(state / "jobs", {})
            found = carry_out(store, runs, [job.name for job in jobs])
        finally:
            lock.free()
    lines = [f"job {name} is {shown}" for name, shown in found.items()]
    return Result("\n".join([*lines, "no scheduler runs"]))


def show(state: pathlib.Path, name: str, *, as_json: bool) -> Result:
    """Shows all facts about one job.

    Raises:
      ScheduleError: there is no job of this name.
    """
    with _store(state) as store:
        job = store.job(name)
        decided = [line for line in store.decisions() if line["job"] == name]
        spans = [span for span in store.spans() if span["job"] == name]
        figures = _figures(store, state)
    spec, folder = job.handed.spec, state / "jobs" / name
    data: dict[str, Any] = {
        **job.data,
        "script": str(pathlib.Path(job.handed.folder) / spec.script),
        "args": list(spec.args),
        "folder": str(folder),
        "output": str(folder / "output"),
        "hangs": _hangs(folder) if job.given_devices else [],
        "predicted_step_s": None if (p := planned_point(job)) is None else p.step_s,
    }
    if as_json:
        return Result.of({**data, **figures, "decisions": decided, "spans": spans})
    shown = {
        "job": name,
        "user": job.handed.user,
        "state": f"{job.shown_state}{f': {job.reason}' if job.reason else ''}",
        "script": " ".join([str(data["script"]), *spec.args]),
        "output": data["output"],
        "devices": _devices(job),
        "submitted": f"{job.submitted_s:.0f} s",
        "started": _time(job.started_s),
        "ended": _time(job.ended_s),
        "steps": str(job.step),
        "step takes": "" if job.step_s is None else seconds_text(job.step_s),
        "predicted": _predicted_text(job),
        "batch": str(job.batch or ""),
        "noise scale": f"{_noise(job)} rows" if _noise(job) else "",
        "plan": _plan(job),
        "loss": "" if job.loss is None else f"{job.loss:.6g}",
        "moves": str(job.moves),
        "guaranteed": "yes" if spec.guaranteed else "no",
        "priority": "" if spec.priority == 1 else f"{spec.priority:g}",
    }
    lines = [f"{key:<12}{value}" for key, value in shown.items() if value]
    lines += [f"{'hangs':<12}{text}" for text in data["hangs"]]
    lines += ["", *(_decision(line) for line in decided)] if decided else []
    return Result("\n".join([*lines, "", _age(figures)]))


def _hangs(folder: pathlib.Path) -> list[str]:
    """Returns a sentence for each worker of a job for which other workers wait."""
    try:
        return command(folder, command="status")["status"]["hangs"]
    except (OSError, ValueError, KeyError):
        return []  # the job starts or ends, or its version cannot answer


def _devices(job: JobRecord) -> str:
    where = ", ".join(f"{n} of {node}" for node, n in job.places.items())
    return f"{job.given_devices} of {job.handed.spec.devices} asked for" + (
        f" ({where})" if where else ""
    )


def logs(state: pathlib.Path, name: str, lines: int, *, follow: bool) -> Result:
    """Returns the last lines of the output of a job.

    Raises:
      ScheduleError: there is no such job, or the job has printed nothing.
    """
    with _store(state) as store:
        job = store.job(name)
    path = state / "jobs" / name / "output"
    try:
        with path.open(errors="replace") as file:
            text = "".join(collections.deque(file, lines))
            if follow:
                print(text, end="", flush=True)
                _follow(state, name, file)
                return Result("")
    except FileNotFoundError:
        raise ScheduleError(
            f"job {name!r} is {job.shown_state} and has printed nothing yet: it did "
            "not start."
        ) from None
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror}.") from error
    return Result(text.rstrip("\n"))


def _follow(state: pathlib.Path, name: str, file: Any) -> None:
    """Prints new output until the job has ended."""
    while True:
        with _store(state) as store:
            ended = store.job(name).state in ENDED
        print(file.read(), end="", flush=True)
        if ended:
            return
        time.sleep(0.5)


@contextlib.contextmanager
def _store(state: pathlib.Path) -> Generator[Store]:
    """Opens the state of a scheduler, which must exist."""
    store = Store(state / STATE_FILE, reads=True)
    try:
        yield store
    finally:
        store.close()


def _scheduler(state: pathlib.Path) -> int:
    """Returns the process id of the scheduler that uses a state; 0 if there is none."""
    return holder(state / "lock")


def _figures(store: Store, state: pathlib.Path) -> dict[str, Any]:
    """Returns the scheduler's process id, if one runs, and the age of its figures."""
    begin, looked = store.seconds("begin_s"), store.seconds("looked_s")
    age_s = None
    if begin is not None and looked is not None:
        age_s = max(time.time() - begin - looked, 0.0)
    return {"scheduler": _scheduler(state) or None, "age_s": age_s}


def _age(figures: dict[str, Any]) -> str:
    """Returns the figures of `_figures` in words."""
    age_s, process = figures["age_s"], figures["scheduler"]
    old = "no scheduler has looked yet"
    if age_s is not None:
        old = f"the figures are {_duration(age_s)} old"
    if process:
        return f"a scheduler runs (process {process}); {old}"
    return f"no scheduler runs; {old}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def jobs(folder: pathlib.Path, *, decisions: bool, as_json: bool) -> Result:
    """Shows the jobs in a scheduler's state, and the decisions about them if requested.

    Raises:
      ScheduleError: there is no such state.
    """
    with _store(folder) as store:
        records, decided = tuple(store.jobs().values()), store.decisions()
        facts = {key: store.fact(key) for key in ("policy", "backend", "begin_s")}
        spans, figures = store.spans(), _figures(store, folder)
    if as_json:
        return Result.of(
            {
                **facts,
                **figures,
                "jobs": [job.data for job in records],
                "decisions": decided,
                "spans": spans,
            }
        )
    lines = [*job_lines(records), _age(figures)]
    running = [job.name for job in records if job.given_devices]
    if running and not figures["scheduler"]:
        lines.append(
            f"jobs that run go on; `autopar jobs cancel {' '.join(running)} --state "
            f"{folder}` ends them"
        )
    if decisions:
        lines += ["", *(_decision(line) for line in decided)]
    return Result("\n".join(lines))


def _decision(line: dict[str, object]) -> str:
    gain = line["gain"]
    words = "" if not isinstance(gain, float) else f", gain {gain:+.1%}"
    return (
        f"{line['at_s']:.0f} s: {line['job']}: {line['kept']} -> {line['devices']} "
        f"devices{words} ({line['compared']})"
    )


def job_lines(records: Sequence[JobRecord]) -> list[str]:
    """Returns a table of jobs, and a line with the number of finished jobs."""
    if not records:
        return ["no job was handed in yet"]
    rows = [_HEADING, *(_row(job) for job in records)]
    done = [j for j in records if j.state == DONE and j.ended_s is not None]
    lines = columns(rows, right=[*range(3, 13), 14, 15])
    open_ = sum(job.state not in ENDED for job in records)
    text = f"{len(done)} of {len(records)} jobs are done, {open_} are open"
    if done:
        spent = [(j.ended_s or 0.0) - j.submitted_s for j in done]
        text += f"; average completion {sum(spent) / len(spent):,.1f} s"
    return [*lines, "", text]


def _row(job: JobRecord) -> tuple[str, ...]:
    spec = job.handed.spec
    return (
        job.name,
        job.handed.user,
        job.shown_state,
        str(job.given_devices),
        str(spec.devices),
        _time(job.submitted_s),
        _time(job.started_s),
        _time(job.ended_s),
        str(job.step),
        "" if job.step_s is None else seconds_text(job.step_s),
        _predicted_text(job),
        str(job.batch or ""),
        _noise(job),
        _plan(job),
        "" if job.loss is None else f"{job.loss:.6g}",
        str(job.moves),
        job.reason,
    )


def planned_point(job: JobRecord) -> CurvePoint | None:
    """Returns the planned point for the last number of devices of a job, if any."""
    curve = job.handed.curve
    found = [p for p in curve.points if p.devices == job.devices] if curve else []
    return max(found, key=lambda point: point.goodput, default=None)


def _predicted_text(job: JobRecord) -> str:
    point = planned_point(job)
    if point is None or point.goodput <= 0:
        return ""
    other = f" at batch {point.batch}" if job.batch not in (0, point.batch) else ""
    return seconds_text(point.step_s) + other


def _noise(job: JobRecord) -> str:
    return "" if job.noise_scale is None else f"{job.noise_scale:.4g}"


def _plan(job: JobRecord) -> str:
    """Describes the plan with which a job last ran."""
    parts = f"{job.microbatches} microbatches" if job.microbatches > 1 else ""
    return ", ".join(word for word in (job.scheme, parts, job.codecs) if word)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s"
