"""The work of ``autopar schedule``."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Sequence

import msgspec

from autopar.cli.curving import CurveRequest as AskedCurve
from autopar.cli.curving import curve_of
from autopar.cli.output import Result
from autopar.cli.owning import STATE_FILE, job_lines
from autopar.cluster import Cluster
from autopar.dispatch.backend import Backend, ClusterNode, LocalCluster, RayCluster
from autopar.dispatch.running import ProcessRuns
from autopar.dispatch.scheduler import Scheduler, SchedulerSettings
from autopar.dispatch.specs import Handed, read_jobs
from autopar.dispatch.store import FAILED, RUNNING, STOPPING, JobRecord, Store
from autopar.dispatch.supervising import FileLock
from autopar.dispatch.views import MoveTimes
from autopar.errors import AutoparError, ScheduleError
from autopar.planner.options import DEFAULTS
from autopar.scheduler.nodes import sizes_of
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.policies.named import policy_of

# These know the programs of published traces alone.
_OF_TRACES = ("rubick",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRequest:
    """The options of ``autopar schedule``."""

    jobs: pathlib.Path | None
    stays: bool
    state: pathlib.Path
    policy: str
    backend: str
    address: str
    nodes: str
    interval_s: float
    react_s: float | None
    start_s: float
    change_s: float


def schedule(asked: DispatchRequest) -> Result:
    """Runs the jobs of a table to their ends; returns what became of them.

    Raises:
      ScheduleError: the table is wrong, or another scheduler uses the state.
    """
    policy = _policy(asked.policy)
    jobs = () if asked.jobs is None else read_jobs(asked.jobs)
    moves = MoveTimes(start_s=asked.start_s, change_s=asked.change_s)
    settings = SchedulerSettings(
        interval_s=asked.interval_s,
        react_s=asked.react_s,
        moves=moves,
        stays=asked.stays,
    )
    asked.state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(asked.state / "lock")
    if not lock.take():
        raise ScheduleError(
            f"{asked.state}: another scheduler uses it; take another --state, or end "
            "that one."
        )
    store = Store(asked.state / STATE_FILE)
    cluster = _cluster(asked)
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _add(store, jobs, cluster, policy, asked)
        runs = ProcessRuns(asked.state / "jobs", cluster.words)
        scheduler = Scheduler(store, cluster, runs, policy, settings, say=_say)
        scheduler.run()
        records = tuple(scheduler.jobs.values())
    except KeyboardInterrupt:
        _say(_left_behind(store.jobs().values(), asked.state))
        raise
    finally:
        signal.signal(signal.SIGTERM, terminated)
        cluster.close()
        store.close()
        lock.free()
    failed = any(job.state == FAILED for job in records)
    return Result("\n".join(job_lines(records)), int(failed))


def _left_behind(records: Iterable[JobRecord], state: pathlib.Path) -> str:
    """What a scheduler that is stopped leaves, and what can be done with it."""
    running = [job.name for job in records if job.state in (RUNNING, STOPPING)]
    again = "The same command goes on where this one was"
    if not running:
        return f"the scheduler stops; no job runs. {again}."
    one = len(running) == 1
    count = "1 job runs" if one else f"{len(running)} jobs run"
    return (
        f"the scheduler stops; {count} on: {', '.join(running)}. {again}; `autopar "
        f"jobs cancel {' '.join(running)} --state {state}` ends "
        f"{'it' if one else 'them'}."
    )


def _say(text: str) -> None:
    print(f"autopar: {text}", file=sys.stderr, flush=True)


def _policy(name: str) -> SchedulingPolicy:
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


def _cluster(asked: DispatchRequest) -> Backend:
    if asked.backend == "ray":
        return RayCluster(asked.address)
    return LocalCluster(asked.nodes)


def _add(
    store: Store,
    jobs: Sequence[Handed],
    cluster: Backend,
    policy: SchedulingPolicy,
    asked: DispatchRequest,
) -> None:
    """Adds the jobs that are new; those of an earlier start stay as they are."""
    now = time.time()  # their clocks do not wait for curves to be planned
    at_s = now - store.begin_s(now)
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
    planned = tuple(_add_curve(job, places, asked) for job in new)
    store.set_facts({"policy": policy.name, "backend": asked.backend})
    store.add_jobs(planned, at_s)


def _add_curve(
    job: Handed, places: Sequence[ClusterNode], asked: DispatchRequest
) -> Handed:
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


def configurations(places: Sequence[ClusterNode], most: float) -> list[Cluster]:
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
