"""Finish-time fairness: how much later jobs end than on a fair share of the cluster.

As in Themis (NSDI 2020) and Sia: a job's completion time over the time that it would
take alone on its share, the devices over the mean number of jobs while it was there.
More than 1 means that sharing made it later than the share would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.errors import ScheduleError
from autopar.scheduler.nodes import Nodes, spread_nodes
from autopar.scheduler.packing import sizes_of
from autopar.scheduler.simulator.engine import History
from autopar.scheduler.simulator.running import RunningJob

_LONG_S = 1e9


def finish_time_ratios(
    history: History, fresh: Sequence[RunningJob]
) -> dict[str, float]:
    """The ratio of each job that was done, by name.

    Args:
      history: what happened; the devices are of one kind.
      fresh: the same jobs, before they run; they are run here.
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
    """The mean number of jobs over some time; 1 at least.

    Decisions are not equally far apart: each counts for the time until the next. A job
    that came and went between two decisions shared with nobody.
    """
    at_s = np.array([item.at_s for item in history.rounds])
    active = np.array([item.active for item in history.rounds], float)
    there = (at_s >= begin_s) & (at_s < end_s)
    if not there.any():
        return 1.0
    seconds = np.diff(np.append(at_s[there], end_s))
    return max(float(np.average(active[there], weights=seconds)), 1.0)


def share_s(job: RunningJob, share: float, nodes: Nodes) -> float:
    """Seconds of a job, alone on a share of the devices.

    Where the share is smaller than anything that it runs on, it has more devices for a
    part of the time.

    Args:
      job: before it runs; it is run here.
      share: devices, not necessarily a whole number.
      nodes: the cluster.

    Raises:
      ScheduleError: it runs on no size of this cluster.
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
