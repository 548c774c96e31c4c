"""Measured seconds of a step by plan and placement, as published with Rubick."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from typing import Any

import numpy as np

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job
from autopar.scheduler.simulator.tables import linear_between, read_rows

Placement = tuple[int, ...]
COLUMNS = ("exec_plan", "placement", "iter_time")
PLAIN = "ga"
"""The plan whose seconds are used for a plan that was not measured."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MeasuredPlanCurve:
    """Steps per second with the best measured plan, by nodes and devices.

    Attributes:
      best: (nodes, devices) -> name of the best plan and seconds of a step with it.
    """

    best: dict[tuple[int, int], tuple[str, float]]

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Steps per second; 0 where no plan was measured."""
        pairs = np.broadcast(nodes, devices)
        found = [
            1 / self.best[int(n), int(d)][1] if (int(n), int(d)) in self.best else 0.0
            for n, d in pairs
        ]
        return np.array(found).reshape(pairs.shape)

    def plan(self, nodes: int, devices: int) -> str:
        """The best plan of a configuration; '' where no plan was measured."""
        return self.best.get((nodes, devices), ("", 0.0))[0]


class PlanTimes:
    """Measured seconds of a step of one program, by plan and placement."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Reads ``placements.csv`` of a folder."""
        self.name = folder.name
        self._seconds: dict[tuple[str, Placement], float] = {}
        self._means: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
        for row in read_rows(folder / "placements.csv", COLUMNS):
            placement = row.placement("placement")
            seconds = row.number("iter_time", 1e-9)
            self._means[len(placement), sum(placement)].append(seconds)
            self._seconds.setdefault((row.text("exec_plan"), placement), seconds)
        if not self._seconds:
            raise ScheduleError(f"{folder}: its placements.csv has no rows.")
        self._between: Any = None
        self._best = self._best_by_placement()
        self.curve = MeasuredPlanCurve(self.configurations)
        self.most = max(devices for _, devices in self.curve.best)

    def seconds(self, plan: str, placement: Placement) -> float:
        """Seconds of a step.

        If the plan was not measured on the placement, the result is the seconds of the
        plan `PLAIN` on this placement. If `PLAIN` was not measured there either, the
        result is the mean over all plans on as many nodes and devices, or is
        interpolated between such means.

        Raises:
          ScheduleError: neither this placement nor a similar one was measured.
        """
        placement = min(placement[i:] + placement[:i] for i in range(len(placement)))
        for name in (plan, PLAIN):
            if (name, placement) in self._seconds:
                return self._seconds[name, placement]
        key = len(placement), sum(placement)
        if key in self._means:
            return float(np.mean(self._means[key]))
        if self._between is None:
            points = np.array(sorted(self._means), float)
            means = np.array([np.mean(self._means[key]) for key in sorted(self._means)])
            self._between = linear_between(points, means)
        found = float(self._between([key])[0])
        if not np.isfinite(found):
            raise ScheduleError(
                f"{self.name}: no step time is known near placement {placement}."
            )
        return found

    def asked_s(self, job: Job) -> float:
        """Seconds of a step with the requested plan on the fastest suitable placement.

        A placement is suitable if it has as many devices as the job asks for.

        Raises:
          ScheduleError: no suitable or similar placement was measured, and the job's
            run time is not known.
        """
        asked = [
            seconds
            for (plan, placement), seconds in self._seconds.items()
            if plan == job.plan and sum(placement) == job.devices
        ]
        if asked:
            return min(asked)
        try:
            return self.seconds(job.plan, (job.devices,))
        except ScheduleError:
            if job.duration_s <= 0:
                raise
            return job.duration_s / job.steps

    def _best_by_placement(self) -> dict[Placement, tuple[str, float]]:
        best: dict[Placement, tuple[str, float]] = {}
        for (plan, placement), seconds in self._seconds.items():
            if placement not in best or seconds < best[placement][1]:
                best[placement] = plan, seconds
        return best

    @property
    def configurations(self) -> dict[tuple[int, int], tuple[str, float]]:
        """(nodes, devices) -> the best plan with equally many devices on each node."""
        return {
            (len(placement), sum(placement)): best
            for placement, best in self._best.items()
            if len(set(placement)) == 1
        }
