"""Metrics of a simulation: completion times, fairness and utilisation.

Finish-time fairness compares a job's completion time with a fair share of the cluster,
as in Themis (NSDI 2020) and Sia. A job's fair share is the number of the cluster's
devices divided by the mean number of jobs between the job's submission and its
completion. The finish-time ratio is the job's completion time divided by the time that
the job would take if it always had exactly its fair share. A ratio above 1 means that
the job ended later than it would on its fair share.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Allocation
from autopar.scheduler.nodes import Nodes, sizes_of, spread_nodes
from autopar.scheduler.simulator.engine import History, RunningJob, Span


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Metrics of a simulation.

    Attributes:
      policy: name of the policy.
      submitted: number of submitted jobs.
      jobs: number of completed jobs.
      failed: reasons of failure by name of the job.
      average_s: mean completion time of completed jobs, from submission to the end.
      guaranteed: number of completed jobs with a guarantee.
      guaranteed_s: mean completion time of these guaranteed jobs; None if there are
        none.
      median_s: median completion time of completed jobs.
      p99_s: 99th percentile of the completion times of completed jobs.
      makespan_s: seconds from the beginning until the last job completes.
      slowest_share: of all jobs, the largest completion time divided by the time during
        which the job had devices.
      utilisation: device-seconds that jobs had, divided by all device-seconds until the
        last completion.
      restarts: how often the devices of jobs changed after their starts, over all jobs.
    """

    policy: str
    submitted: int
    jobs: int
    failed: dict[str, str]
    average_s: float
    guaranteed: int
    guaranteed_s: float | None
    median_s: float
    p99_s: float
    makespan_s: float
    slowest_share: float
    utilisation: float
    restarts: int

    @property
    def data(self) -> dict[str, Any]:
        """The metrics as one JSON object."""
        return dataclasses.asdict(self)


def metrics(history: History) -> Metrics:
    """Computes the metrics of a simulation; means are nan if no job completed."""
    done = [job for job in history.jobs if job.completed_s is not None]
    ends = np.array([job.completed_s for job in done], float)
    begins = np.array([job.job.submitted_s for job in done], float)
    spent = ends - begins
    served: dict[str, float] = {}
    given = 0.0
    for span in history.spans:
        seconds = span.end_s - span.start_s
        served[span.job] = served.get(span.job, 0.0) + seconds
        given += seconds * len(span.allocation)
    ratios = [
        float(seconds) / served[job.job.name]
        for job, seconds in zip(done, spent, strict=True)
        if served.get(job.job.name, 0.0) > 0
    ]
    some = bool(len(done))
    promised = np.array([job.job.guaranteed for job in done], bool)
    makespan = float(ends.max()) if some else float("nan")
    return Metrics(
        policy=history.policy,
        submitted=len(history.jobs),
        jobs=len(done),
        failed={job.job.name: job.failed for job in history.jobs if job.failed},
        average_s=float(spent.mean()) if some else float("nan"),
        guaranteed=int(promised.sum()),
        guaranteed_s=float(spent[promised].mean()) if promised.any() else None,
        median_s=float(np.median(spent)) if some else float("nan"),
        p99_s=float(np.quantile(spent, 0.99)) if some else float("nan"),
        makespan_s=makespan,
        slowest_share=max(ratios, default=float("nan")),
        utilisation=given / (history.nodes.total * makespan) if some else float("nan"),
        restarts=sum(max(job.restarts, 0) for job in history.jobs),
    )


_WIDTH, _ROW = 1100, 10
_MOST_REASONS = 400


def timeline_page(history: History, figures: Metrics) -> str:
    """An HTML page with metrics, a timeline of each device and reasons of moves."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_show(value))}</td></tr>"
        for name, value in figures.data.items()
    )
    reasons = [
        f"<li>{item.at_s:g} s: {html.escape(reason.text)}</li>"
        for item in history.rounds
        for reason in item.reasons
    ]
    cut = len(reasons) - _MOST_REASONS
    more = f"<p>and {cut} more</p>" if cut > 0 else ""
    return (
        "<!doctype html><meta charset=utf-8>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(history.policy)}</title>"
        "<style>body{font:14px sans-serif;margin:1em;overflow-wrap:anywhere}"
        "th{text-align:left}</style>"
        f"<h1>{html.escape(history.policy)}</h1><table>{rows}</table>"
        f"<h2>Devices over time</h2>{_picture(history)}"
        f"<h2>Decisions</h2><ol>{''.join(reasons[:_MOST_REASONS])}</ol>{more}"
    )


def _show(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _picture(history: History) -> str:
    end = max((span.end_s for span in history.spans), default=1.0) or 1.0
    firsts: list[int] = []
    total = 0
    for devices in history.nodes.devices:
        firsts.append(total)
        total += devices
    used: list[list[tuple[float, float]]] = [[] for _ in range(total)]
    bars = [
        _bar(span, row, end)
        for span in sorted(history.spans, key=lambda span: span.start_s)
        for row in _rows(span.allocation, firsts, history.nodes.devices, used, span)
    ]
    head = f'<svg width="{_WIDTH}" height="{total * _ROW}" role="img">'
    return "".join([head, *bars, "</svg>"])


def _rows(
    allocation: Allocation,
    firsts: list[int],
    devices: tuple[int, ...],
    used: list[list[tuple[float, float]]],
    span: Span,
) -> list[int]:
    """For each of a job's devices, a free row of its node in the timeline."""
    rows: list[int] = []
    for node in allocation:
        for row in range(firsts[node], firsts[node] + devices[node]):
            busy = used[row] and used[row][-1][1] > span.start_s
            if row not in rows and not busy:
                rows.append(row)
                used[row].append((span.start_s, span.end_s))
                break
    return rows


def _bar(span: Span, row: int, end: float) -> str:
    left = span.start_s / end * _WIDTH
    width = max((span.end_s - span.start_s) / end * _WIDTH, 0.5)
    hue = sum(map(ord, span.job)) * 47 % 360
    plan = f", plan {span.plan}" if span.plan else ""
    words = (
        f"{span.job}: {len(span.allocation)} devices, {span.start_s:g} to "
        f"{span.end_s:g} s, batch {span.batch}{plan}"
    )
    return (
        f'<rect x="{left:.1f}" y="{row * _ROW}" width="{width:.1f}" '
        f'height="{_ROW - 1}" fill="hsl({hue},60%,60%)">'
        f"<title>{html.escape(words)}</title></rect>"
    )


_LONG_S = 1e9


def finish_time_ratios(
    history: History, fresh: Sequence[RunningJob]
) -> dict[str, float]:
    """The finish-time ratio of each completed job, by name.

    Args:
      history: the result of a simulation with only one kind of devices.
      fresh: the same jobs in their state before the simulation; this function runs
        them.
    """
    new = {job.job.name: job for job in fresh}
    found: dict[str, float] = {}
    for job in history.jobs:
        if job.completed_s is None:
            continue
        begin_s = job.job.submitted_s
        share = history.nodes.total / _mean_active(history, begin_s, job.completed_s)
        alone_s = share_s(new[job.job.name], share, history.nodes)
        found[job.job.name] = (job.completed_s - begin_s) / alone_s
    return found


def _mean_active(history: History, begin_s: float, end_s: float) -> float:
    """The mean number of waiting and running jobs over a period, at least 1.

    The number of jobs at each decision is weighted by the time until the next decision.
    If a job came and ended between two decisions, the result is 1.
    """
    at_s = np.array([item.at_s for item in history.rounds])
    active = np.array([item.active for item in history.rounds], float)
    there = (at_s >= begin_s) & (at_s < end_s)
    if not there.any():
        return 1.0
    seconds = np.diff(np.append(at_s[there], end_s))
    return max(float(np.average(active[there], weights=seconds)), 1.0)


def share_s(job: RunningJob, share: float, nodes: Nodes) -> float:
    """Seconds that a job takes if it always has exactly its fair share of devices.

    If the job cannot run on so few devices, it gets more devices, but only for a
    fraction of the time.

    Args:
      job: the job before it runs; this function runs it.
      share: number of devices of the fair share, which may be fractional.
      nodes: the cluster.

    Raises:
      ScheduleError: the job cannot run on any number of devices of this cluster.
    """
    view = job.view(job.job.submitted_s, oracle=False)
    counts = np.array(sizes_of(nodes.widest, nodes.total))
    speeds = view.curve.goodput(-(-counts // nodes.widest), counts)
    runs = [int(n) for n in counts[speeds > 0] if n <= view.most]
    if not runs:
        raise ScheduleError(
            f"job {job.job.name!r} runs on no number of devices of this cluster; take "
            "a larger one."
        )
    size = max((n for n in runs if n <= share), default=runs[0])
    plan = getattr(view.curve, "plan", None)
    name = plan(-(-size // nodes.widest), size) if plan else ""
    job.reallocate(spread_nodes(size, nodes.widest), name)
    job.advance(0.0, _LONG_S, 0.0)
    assert job.completed_s is not None
    return job.completed_s * max(size / share, 1.0)
