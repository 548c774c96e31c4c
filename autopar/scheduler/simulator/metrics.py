"""What a simulation comes to: completion times, fairness, utilisation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from autopar.scheduler.simulator.engine import History


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of a simulation; seconds, and shares of 1.

    Attributes:
      policy: its name.
      submitted: how many jobs there were.
      jobs: how many of them were done.
      failed: why the others were not, by name.
      average_s: mean completion time of those done, from handing in to the end.
      guaranteed: how many of those done had a guarantee.
      guaranteed_s: the mean completion time of these; None where there are none.
      median_s: the median of them.
      p99_s: 99 of 100 jobs took no longer.
      makespan_s: the end of the last job.
      slowest_share: the most that a job waited, as completion time over service time.
      utilisation: device-seconds given out over those there were until the end.
      restarts: moves of all jobs.
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
        """As one JSON object."""
        return dataclasses.asdict(self)


def metrics(history: History) -> Metrics:
    """The figures of a history; nan where no job was done."""
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
