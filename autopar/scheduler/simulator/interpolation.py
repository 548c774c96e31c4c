"""Measured step times, and what lies between them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.interpolate import LinearNDInterpolator  # SciPy comes with JAX
from scipy.spatial import QhullError

from autopar.errors import ScheduleError
from autopar.scheduler.simulator.tables import Row, read_rows

Placement = tuple[int, ...]

_MOST_NODES = 16  # the published tables end there


def linear_between(points: np.ndarray, values: np.ndarray) -> Callable[..., Any]:
    """Interpolates linearly; nan outside, and everywhere if the points lie in a plane.

    Args:
      points: (points, coordinates).
      values: of each point.
    """
    try:
        return LinearNDInterpolator(points, values)
    except QhullError:  # too few points, or all in a plane: nothing lies between them
        return lambda _: np.full((1, *values.shape[1:]), np.nan)


class PlacementTimes:
    """Seconds of a step and of its synchronisation, by placement and local batch.

    A measured placement is interpolated between its local batches; any other between
    nodes, devices and local batch of all that was measured. Placements that are
    rotations of each other count as the same.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Reads ``placements.csv`` and ``scalability.csv`` of a folder."""
        self.name = folder.name
        self._measured = _placements(folder / "placements.csv")
        self._folder = folder
        self._between: Any = None
        self._found: dict[tuple[Placement, int], tuple[float, float]] = {}
        sizes = np.concatenate([table[:, 0] for table in self._measured.values()])
        self.least_local, self.most_local = int(sizes.min()), int(sizes.max())

    def rows(self) -> list[tuple[Placement, int, float, float]]:
        """All that was measured: placement, local batch, step and sync seconds."""
        return [
            (placement, int(local), step, sync)
            for placement, table in self._measured.items()
            for local, step, sync in table.tolist()
        ]

    def seconds(self, placement: Placement, local: int) -> tuple[float, float]:
        """Seconds of a step and of the part of it that synchronises.

        Raises:
          ScheduleError: nothing near was measured.
        """
        key = min(placement[i:] + placement[:i] for i in range(len(placement))), local
        if key not in self._found:
            self._found[key] = self._compute(*key)
        return self._found[key]

    def _compute(self, placement: Placement, local: int) -> tuple[float, float]:
        table = self._measured.get(placement)
        if table is None:
            if self._between is None:
                self._between = self._interpolator()
            point = [min(len(placement), _MOST_NODES), sum(placement), local]
            step, sync = self._between(point)[0]
        elif not table[0, 0] <= local <= table[-1, 0]:
            step = sync = np.nan
        else:
            step = np.interp(local, table[:, 0], table[:, 1])
            sync = np.interp(local, table[:, 0], table[:, 2])
        if not np.isfinite(step + sync):
            raise ScheduleError(
                f"{self.name}: no step time is known near placement {placement} with "
                f"{local} samples a device; its tables go from {self.least_local} to "
                f"{self.most_local}."
            )
        return float(step), float(sync)

    def _interpolator(self) -> Callable[..., Any]:
        grouped: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        for placement, local, step, sync in self.rows():
            key = len(placement), sum(placement), local
            grouped.setdefault(key, []).append((step, sync))
        points = [list(key) for key in sorted(grouped)]
        values = [np.mean(grouped[key], axis=0) for key in sorted(grouped)]
        columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        for row in read_rows(self._folder / "scalability.csv", columns):
            points.append([row.whole(name) for name in columns[:3]])
            values.append(np.array(_step_seconds(row)))
        return linear_between(np.array(points, float), np.array(values))


def _step_seconds(row: Row) -> tuple[float, float]:
    """Seconds of a step, and of the part of it that synchronises.

    Raises:
      ScheduleError: the part is larger than the whole.
    """
    step, sync = row.number("step_time", 1e-9), row.number("sync_time", 0.0)
    if sync > step:
        raise ScheduleError(
            f"{row.where}: sync_time is {sync:g}, and the whole step_time {step:g}."
        )
    return step, sync


def _placements(path: pathlib.Path) -> dict[Placement, np.ndarray]:
    """Per placement rows of (local batch, step s, sync s), by rising local batch."""
    found: dict[Placement, list[tuple[float, float, float]]] = {}
    columns = ("placement", "local_bsz", "step_time", "sync_time")
    for row in read_rows(path, columns):
        placement = row.placement("placement")
        local, seconds = row.whole("local_bsz", 1), _step_seconds(row)
        found.setdefault(placement, []).append((local, *seconds))
    if not found:
        raise ScheduleError(f"{path}: it has no rows; a step time is needed.")
    return {key: np.array(sorted(rows)) for key, rows in found.items()}
