"""What ``autopar simulate`` does."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from autopar.cli.output import Result
from autopar.errors import ScheduleError
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.named import policy_of
from autopar.scheduler.simulator.engine import History, Options, simulate
from autopar.scheduler.simulator.metrics import Metrics, metrics
from autopar.scheduler.simulator.timeline import timeline_page
from autopar.scheduler.simulator.traces.detect import jobs_of
from autopar.scheduler.simulator.traces.spot import read_events


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the command."""

    trace: pathlib.Path
    cluster: str
    policy: str
    tables: pathlib.Path | None
    interval_s: float
    react_s: float | None
    restart_s: float | None
    interference: float
    away: pathlib.Path | None
    page: pathlib.Path | None
    explain: bool


def simulated(asked: Asked, *, as_json: bool) -> Result:
    """Simulates, writes the page that is asked for, and returns the figures."""
    nodes, policy = Nodes.parse(asked.cluster), policy_of(asked.policy)
    events = read_events(asked.away, nodes) if asked.away else ()
    options = Options(
        interval_s=asked.interval_s,
        react_s=asked.react_s,
        interference=asked.interference,
        events=events,
    )
    restart_s = asked.restart_s
    if restart_s is not None and not 0 <= restart_s < math.inf:
        raise ScheduleError(
            f"the restart takes {restart_s} s; give a finite time of at least 0."
        )
    jobs = jobs_of(asked.trace, asked.tables, nodes, policy, asked.restart_s)
    if not jobs:
        raise ScheduleError(f"{asked.trace}: it has no jobs; give one row at least.")
    history = simulate(jobs, nodes, policy, options)
    figures = metrics(history)
    if asked.page is not None:
        asked.page.write_text(timeline_page(history, figures))
    if as_json:
        return Result.of(
            figures.data | ({"decisions": _all(history)} if asked.explain else {})
        )
    lines = [_table(figures)]
    lines += [f"job {name} died: {why}" for name, why in figures.failed.items()]
    lines += _all(history) if asked.explain else []
    return Result("\n".join(lines))


def _all(history: History) -> list[str]:
    """Every decision, a line for each job that moves."""
    return [
        f"{item.at_s:g} s: {reason.text}"
        for item in history.rounds
        for reason in item.reasons
    ]


def _table(figures: Metrics) -> str:
    rows = (
        ("policy", figures.policy),
        ("jobs done", f"{figures.jobs}"),
        ("average completion", f"{figures.average_s:,.1f} s"),
        ("median completion", f"{figures.median_s:,.1f} s"),
        ("99th percentile", f"{figures.p99_s:,.1f} s"),
        ("makespan", f"{figures.makespan_s:,.1f} s"),
        ("slowest over its service", f"{figures.slowest_share:.2f}x"),
        ("devices in use", f"{figures.utilisation:.1%}"),
        ("moves", f"{figures.restarts}"),
    )
    return "\n".join(f"{name:<26}{value}" for name, value in rows)
