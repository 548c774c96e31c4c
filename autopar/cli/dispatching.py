"""The work of ``autopar schedule`` and ``autopar jobs``."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
from collections.abc import Sequence

import msgspec

from autopar.cli.curving import Asked as AskedCurve
from autopar.cli.curving import curve_of
from autopar.cli.output import Result
from autopar.cluster import Cluster
from autopar.dispatch.backend import Backend, Place
from autopar.dispatch.clusters import LocalCluster, RayCluster
from autopar.dispatch.running import ProcessRuns
from autopar.dispatch.scheduler import Scheduler, Settings
from autopar.dispatch.specs import Handed, check_sizes, read_jobs
from autopar.dispatch.store import DONE, ENDED, JobRecord, Store
from autopar.dispatch.supervising import FileLock
from autopar.dispatch.views import MoveTimes
from autopar.errors import AutoparError, ScheduleError
from autopar.planner.options import DEFAULTS
from autopar.reports.table import columns
from autopar.reports.units import seconds_text
from autopar.scheduler.packing import sizes_of
from autopar.scheduler.policies.base import Policy
from autopar.scheduler.policies.named import policy_of

_FILE = "state.sqlite"
# These know the programs of published traces alone.
_OF_TRACES = ("rubick",)
_HEADING = (
    "job", "state", "devices", "asked", "submitted", "started", "ended", "step",
    "step takes", "loss", "moves", "why",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of ``autopar schedule``."""

    jobs: pathlib.Path
    state: pathlib.Path
    policy: str
    backend: str
    address: str
    nodes: str
    interval_s: float
    react_s: float | None
    start_s: float
    change_s: float


def schedule(asked: Asked) -> Result:
    """Runs the jobs of a table to their ends; returns what became of them.

    Raises:
      ScheduleError: the table is wrong, or another scheduler uses the state.
    """
    policy, jobs = _policy(asked.policy), read_jobs(asked.jobs)
    moves = MoveTimes(start_s=asked.start_s, change_s=asked.change_s)
    settings = Settings(interval_s=asked.interval_s, react_s=asked.react_s, moves=moves)
    asked.state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(asked.state / "lock")
    if not lock.take():
        raise ScheduleError(
            f"{asked.state}: another scheduler uses it; take another --state, or end "
            "that one."
        )
    store = Store(asked.state / _FILE)
    cluster = _cluster(asked)
    try:
        _add(store, jobs, cluster, policy, asked)
        runs = ProcessRuns(asked.state / "jobs", cluster.words)
        scheduler = Scheduler(store, cluster, runs, policy, settings, say=_say)
        scheduler.run()
        records = tuple(scheduler.jobs.values())
    finally:
        cluster.close()
        store.close()
        lock.free()
    failed = any(job.state != DONE for job in records)
    return Result("\n".join(_lines(records)), int(failed))


def _say(text: str) -> None:
    print(f"autopar: {text}", file=sys.stderr, flush=True)


def _policy(name: str) -> Policy:
    """A policy that can decide for real jobs.

    Raises:
      ScheduleError: there is none of the name, or it sees what no real job tells.
    """
    policy = policy_of(name)
    if policy.oracle:
        raise ScheduleError(
            f"policy {name!r} is an oracle: it sees the work that is left, which no "
            "real job tells. Take another one; autopar simulate has it."
        )
    if name in _OF_TRACES:
        raise ScheduleError(
            f"policy {name!r} knows the programs of its published traces alone. Take "
            "another one; autopar simulate has it."
        )
    return policy


def _cluster(asked: Asked) -> Backend:
    if asked.backend == "ray":
        return RayCluster(asked.address)
    return LocalCluster(asked.nodes)


def _add(
    store: Store,
    jobs: Sequence[Handed],
    cluster: Backend,
    policy: Policy,
    asked: Asked,
) -> None:
    """Adds the jobs that are new; those of an earlier start stay as they are."""
    known = store.jobs()
    new: list[Handed] = []
    for job in jobs:
        before = known.get(job.spec.name)
        if before is None:
            new.append(job)
        elif before.handed.spec != job.spec:
            raise ScheduleError(
                f"{asked.jobs}: job {job.spec.name!r} is in {asked.state} already, "
                "and was another one; rename it, or take another --state."
            )
    places = cluster.places()
    planned = tuple(_planned(job, places, asked) for job in new)
    adapts = policy.adapts != "nothing"
    kinds = tuple(dict.fromkeys(place.kind for place in places))
    check_sizes(planned, sum(p.devices for p in places), kinds, adapts)
    store.set_facts({"policy": policy.name, "backend": asked.backend})
    store.add_jobs(planned)


def _planned(job: Handed, places: Sequence[Place], asked: Asked) -> Handed:
    """A job with the curve of its target, if it names one."""
    spec = job.spec
    if not spec.target:
        return job
    _say(f"planning the curve of job {spec.name}")
    file, colon, function = spec.target.rpartition(":")
    inside = pathlib.Path(job.folder, file)
    target = f"{inside}{colon}{function}" if inside.is_file() else spec.target
    wanted = AskedCurve(
        target=target,
        words=spec.target_args,
        noise_scale=spec.noise_scale,
        max_batch=spec.max_batch,
        options=DEFAULTS,
        cache=asked.state / "plans",
    )
    try:
        curve = curve_of(wanted, configurations(places, spec.max or math.inf))
    except AutoparError as error:
        raise ScheduleError(f"{asked.jobs}: job {spec.name!r}: {error}") from error
    return msgspec.structs.replace(job, curve=curve)


def configurations(places: Sequence[Place], most: float) -> list[Cluster]:
    """The clusters that a job may get: powers of two of a node, and whole nodes."""
    found: list[Cluster] = []
    for kind in dict.fromkeys(place.kind for place in places):
        per_node = max(p.devices for p in places if p.kind == kind)
        total = sum(
            p.devices for p in places if p.kind == kind and p.devices == per_node
        )
        for count in sizes_of(per_node, total):
            nodes = -(-count // per_node)
            if count <= most:
                found.append(Cluster.parse(f"{nodes}x{count // nodes}:{kind}"))
    return found


def jobs(folder: pathlib.Path, *, decisions: bool, as_json: bool) -> Result:
    """The jobs of a scheduler's state, and why they got what they got.

    Raises:
      ScheduleError: there is no such state.
    """
    store = Store(folder / _FILE, reads=True)
    try:
        records, decided = tuple(store.jobs().values()), store.decisions()
        facts = {key: store.fact(key) for key in ("policy", "backend", "begin_s")}
        spans = store.spans()
    finally:
        store.close()
    if as_json:
        return Result.of(
            {
                **facts,
                "jobs": [job.data for job in records],
                "decisions": decided,
                "spans": spans,
            }
        )
    lines = _lines(records)
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


def _lines(records: Sequence[JobRecord]) -> list[str]:
    if not records:
        return ["no job was handed in yet"]
    rows = [_HEADING, *(_row(job) for job in records)]
    done = [j for j in records if j.state == DONE and j.ended_s is not None]
    lines = columns(rows, right=range(2, 11))
    open_ = sum(job.state not in ENDED for job in records)
    text = f"{len(done)} of {len(records)} jobs are done, {open_} are open"
    if done:
        spent = [(j.ended_s or 0.0) - j.handed.spec.submitted_s for j in done]
        text += f"; average completion {sum(spent) / len(spent):,.1f} s"
    return [*lines, "", text]


def _row(job: JobRecord) -> tuple[str, ...]:
    spec = job.handed.spec
    return (
        job.name,
        job.state,
        str(job.given),
        str(spec.devices),
        f"{spec.submitted_s:g} s",
        _time(job.started_s),
        _time(job.ended_s),
        str(job.step),
        "" if job.step_s is None else seconds_text(job.step_s),
        "" if job.loss is None else f"{job.loss:.6g}",
        str(job.moves),
        job.reason,
    )


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s"
