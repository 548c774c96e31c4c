"""The work of ``autopar schedule`` and ``autopar simulate``."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Sequence

import msgspec

from autopar.cli.commands.clusters import ScheduleCommand, SimulateCommand
from autopar.cli.commands.plans import GoodputCommand
from autopar.cli.curving import curve_of
from autopar.cli.failures import COULD_NOT_RUN
from autopar.cli.options import ClusterName
from autopar.cli.output import Result
from autopar.cli.owning import STATE_FILE, job_lines
from autopar.cli.remote import listen
from autopar.cluster import Cluster
from autopar.dispatch.backend import (
    Backend,
    ClusterNode,
    HostCluster,
    LocalCluster,
    RayCluster,
)
from autopar.dispatch.endpoint import Endpoint
from autopar.dispatch.running import ProcessRuns
from autopar.dispatch.scheduler import Scheduler, SchedulerSettings
from autopar.dispatch.specs import Handed, read_jobs, read_users
from autopar.dispatch.store import FAILED, RUNNING, STOPPING, JobRecord, Store
from autopar.dispatch.views import MoveTimes
from autopar.elastic.processes.network import read_secret, split_address
from autopar.errors import AutoparError, ScheduleError
from autopar.planner.options import DEFAULTS
from autopar.scheduler.nodes import Nodes, sizes_of
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import History, Options, simulate
from autopar.scheduler.simulator.metrics import Metrics, metrics, timeline_page
from autopar.scheduler.simulator.traces.recorded import Trace, read_trace
from autopar.scheduler.simulator.traces.spot import read_events
from autopar.scheduler.users import UserLimits, Users, parse_users
from autopar.whole_files import FileLock, export_whole

# Policies that can schedule only the programs of published traces, not the jobs of
# users.
_OF_TRACES = ("rubick",)
# Other hosts cannot connect to these addresses.
_ALL_ADDRESSES = ("", "0.0.0.0", "[::]")


def schedule(asked: ScheduleCommand) -> Result:
    """Runs the jobs of a table until all have ended; returns a table of the results.

    Raises:
      ScheduleError: the table is wrong, or another scheduler uses the state.
    """
    if asked.address and asked.backend is not ClusterName.RAY:
        raise ScheduleError("--address is that of a Ray cluster: add --backend ray.")
    if asked.secret is not None and not asked.listen:
        raise ScheduleError("--secret is for other hosts: add --listen HOST:PORT.")
    is_hosts = asked.backend is ClusterName.HOSTS
    if is_hosts and asked.listen.rpartition(":")[0] in _ALL_ADDRESSES:
        raise ScheduleError(
            "--backend hosts: name the address that hosts reach: --listen HOST:PORT."
        )
    policy = _policy(asked.policy)
    jobs = () if asked.table is None else read_jobs(asked.table)
    table = {} if asked.table is None else read_users(asked.table)
    moves = MoveTimes(start_s=asked.start, change_s=asked.change)
    settings = SchedulerSettings(
        interval_s=asked.interval,
        react_s=asked.react or None,
        moves=moves,
        stays=asked.stay,
        users=_users(asked, table),
    )
    secret = read_secret(asked.secret) if asked.listen else ""
    asked.state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(asked.state / "lock")
    if not lock.take():
        raise ScheduleError(
            f"{asked.state}: another scheduler uses it; take another --state, or end "
            "that one."
        )
    store = Store(asked.state / STATE_FILE)
    # Options of this command replace values that an earlier scheduler stored.
    users = _users(asked, {**store.users(), **table})
    settings = dataclasses.replace(settings, users=users)
    cluster = _cluster(asked, store)
    hosts = cluster if isinstance(cluster, HostCluster) else None
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)
    endpoint: Endpoint | None = None
    try:
        if asked.listen:
            serve = hosts and hosts.serve
            endpoint = listen(asked.state, asked.listen, secret, serve)
            workers = "`autopar worker --supervisor` and " if hosts else ""
            _say(f"it listens at {endpoint.address} for {workers}`autopar jobs --at`")
        _add(store, jobs, cluster, policy, asked)
        store.set_users(users)
        introduce = hosts and hosts.introduce
        runs = ProcessRuns(asked.state / "jobs", cluster.words, introduce)
        scheduler = Scheduler(store, cluster, runs, policy, settings, say=_say)
        scheduler.run()
        if hosts is not None:
            hosts.end_agents()
        records = tuple(scheduler.jobs.values())
    except KeyboardInterrupt:
        _say(_left_behind(store.jobs().values(), asked.state))
        raise
    finally:
        signal.signal(signal.SIGTERM, terminated)
        if endpoint is not None:
            endpoint.close()
        cluster.close()
        store.close()
        lock.free()
    failed = any(job.state == FAILED for job in records)
    return Result("\n".join(job_lines(records)), int(failed))


def _left_behind(records: Iterable[JobRecord], state: pathlib.Path) -> str:
    """Describes the jobs that continue when the scheduler stops; how to end them."""
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
    """Returns a policy that can schedule real jobs.

    Raises:
      ScheduleError: no policy has the name, or the policy needs data that real jobs do
        not report.
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


def _users(asked: ScheduleCommand, known: Users) -> dict[str, UserLimits]:
    return parse_users(asked.quota or (), asked.share or (), known)


def _cluster(asked: ScheduleCommand, store: Store) -> Backend:
    if asked.backend is ClusterName.RAY:
        return RayCluster(asked.address)
    if asked.backend is ClusterName.HOSTS:
        used = {name for job in store.jobs().values() for name in job.places}
        known = [ClusterNode(*node) for node in store.nodes() if node[0] in used]
        return HostCluster(split_address(asked.listen)[0], known, asked.grace)
    return LocalCluster(asked.nodes)


def _add(
    store: Store,
    jobs: Sequence[Handed],
    cluster: Backend,
    policy: SchedulingPolicy,
    asked: ScheduleCommand,
) -> None:
    """Adds new jobs to the state of the scheduler.

    Jobs that an earlier run of the scheduler has added do not change.
    """
    now = time.time()  # before the planning of curves
    at_s = now - store.begin_s(now)
    known = store.jobs()
    new: list[Handed] = []
    for job in jobs:
        before = known.get(job.spec.name)
        if before is None:
            new.append(job)
        elif before.handed.spec != job.spec:
            raise ScheduleError(
                f"{asked.table}: job {job.spec.name!r} is in {asked.state} already, "
                "and was another one; rename it, or take another --state."
            )
    # Curves are planned also for hosts that have not connected yet.
    expects = asked.backend is ClusterName.HOSTS
    places = (LocalCluster(asked.nodes) if expects else cluster).places()
    planned = tuple(_add_curve(job, places, asked) for job in new)
    store.set_facts({"policy": policy.name, "backend": asked.backend.value})
    store.add_jobs(planned, at_s)


def _add_curve(
    job: Handed, places: Sequence[ClusterNode], asked: ScheduleCommand
) -> Handed:
    """Returns a job with the planned goodput curve of its target, if any."""
    spec = job.spec
    if not spec.target:
        return job
    _say(f"planning the curve of job {spec.name}")
    file, colon, function = spec.target.rpartition(":")
    inside = pathlib.Path(job.folder, file)
    target = f"{inside}{colon}{function}" if inside.is_file() else spec.target
    wanted = GoodputCommand(
        target=target,
        words=list(spec.target_args),
        noise_scale=spec.noise_scale,
        max_batch=spec.max_batch,
        limits=DEFAULTS,
        cache=asked.state / "plans",
    )
    try:
        curve = curve_of(wanted, configurations(places, spec.max or math.inf))
    except AutoparError as error:
        raise ScheduleError(f"{asked.table}: job {spec.name!r}: {error}") from error
    return msgspec.structs.replace(job, curve=curve)


def configurations(places: Sequence[ClusterNode], most: float) -> list[Cluster]:
    """Returns the clusters that a job may get.

    A cluster has a power of two of the devices of one node, or whole nodes.
    """
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


def run_simulation(asked: SimulateCommand) -> Result:
    """Simulates a trace, writes the page if requested, and returns the figures."""
    nodes, policy = Nodes.parse(asked.cluster), policy_of(asked.policy)
    events = read_events(asked.away, nodes) if asked.away else ()
    options = Options(
        interval_s=asked.interval,
        react_s=asked.react or None,
        interference=asked.interference,
        events=events,
        users=parse_users(asked.quota or (), asked.share or ()),
    )
    restart_s = asked.restart
    if restart_s is not None and not 0 <= restart_s < math.inf:
        raise ScheduleError(
            f"the restart takes {restart_s} s; give a finite time of at least 0."
        )
    trace = read_trace(
        asked.trace, _tables(asked.tables or ()), nodes, policy, restart_s
    )
    if not trace.jobs:
        raise ScheduleError(f"{asked.trace}: it has no jobs; give one row at least.")
    history = simulate(trace.jobs, nodes, policy, options)
    figures = metrics(history)
    if asked.page is not None:
        page = timeline_page(history, figures)
        export_whole(asked.page, page.encode(errors="backslashreplace"))
    code = COULD_NOT_RUN if figures.failed else 0
    if asked.as_json:
        data = {
            **figures.data,
            "left_out": dict(trace.left_out),
            "kinds_alike": list(trace.alike),
        }
        more = {"decisions": _all(history)} if asked.explain else {}
        return Result.of(data | more, code)
    lines = [*_headline(figures, trace), _table(figures)]
    lines += [
        f"job {name} could not run: {why}" for name, why in figures.failed.items()
    ]
    lines += _all(history) if asked.explain else []
    return Result("\n".join(lines), code)


def _tables(words: Sequence[str]) -> dict[str, pathlib.Path]:
    """Reads DIR or KIND=DIR as a map from kinds of devices to folders.

    Raises:
      ScheduleError: a kind is given twice, or one of several folders has no kind.
    """
    found: dict[str, pathlib.Path] = {}
    for word in words:
        kind, equals, folder = word.partition("=")
        kind, folder = (kind, folder) if equals else ("", word)
        if kind in found or (found and "" in (kind, *found)):
            raise ScheduleError(
                f"--tables {word}: give one folder, or one for each kind of devices, "
                "as --tables t4=DIR --tables a100=DIR."
            )
        found[kind] = pathlib.Path(folder)
    return found


def _headline(figures: Metrics, trace: Trace) -> list[str]:
    """Returns notes to read before the figures."""
    lines: list[str] = []
    if lost := figures.submitted - figures.jobs:
        lines.append(
            f"{lost} of {figures.submitted} jobs could not run: the figures are of the "
            f"{figures.jobs} others"
        )
    for why, count in trace.left_out.items():
        lines.append(f"{count} jobs of the trace {why} and are left out")
    if trace.alike:
        kinds = ", ".join(kind or "others" for kind in trace.alike)
        lines.append(
            f"no table distinguishes {kinds}: these kinds of devices count as equally "
            "fast"
        )
    return lines


def _all(history: History) -> list[str]:
    """Returns every decision of the policy, one line for each job that gets or loses
    devices.
    """
    return [
        f"{item.at_s:g} s: {reason.text}"
        for item in history.rounds
        for reason in item.reasons
    ]


def _table(figures: Metrics) -> str:
    rows = (
        ("policy", figures.policy),
        ("jobs done", f"{figures.jobs}{_beside(figures)}"),
        ("average completion", f"{figures.average_s:,.1f} s"),
        *_guarantee_rows(figures),
        ("median completion", f"{figures.median_s:,.1f} s"),
        ("99th percentile", f"{figures.p99_s:,.1f} s"),
        ("makespan", f"{figures.makespan_s:,.1f} s"),
        ("slowest over its service", f"{figures.slowest_share:.2f}x"),
        ("devices in use", f"{figures.utilisation:.1%}"),
        ("moves", f"{figures.restarts}"),
    )
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


def _beside(figures: Metrics) -> str:
    """Returns the number of submitted jobs as text if some did not run; else ''."""
    return "" if figures.jobs == figures.submitted else f" of {figures.submitted}"


def _guarantee_rows(figures: Metrics) -> list[tuple[str, str]]:
    if figures.guaranteed_s is None:
        return []
    seconds = f"{figures.guaranteed_s:,.1f} s, {figures.guaranteed} jobs"
    return [("of guaranteed jobs", seconds)]
