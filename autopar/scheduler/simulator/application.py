"""A program that was measured at several batches: its step times and its progress.

The tables are those published with Pollux: for each batch, after each epoch, how many
steps of the base batch were made (progress), how many steps, the metric, and the
squared norm and the variance of the gradient.
"""

from __future__ import annotations

import functools
import math
import pathlib
import re

import numpy as np

from autopar.errors import ScheduleError
from autopar.scheduler.simulator.interpolation import PlacementTimes
from autopar.scheduler.simulator.tables import read_rows

# The columns, and the least that can stand there: what is divided by is above zero.
_COLUMNS = {
    "progress": 0.0,
    "iteration": 0.0,
    "metric": -math.inf,
    "grad_sqr": 0.0,
    "grad_var": 1e-30,
}


class Application:
    """A program with its tables.

    Attributes:
      name: of the program.
      base_batch: the smallest batch that was measured.
      largest_batch: the largest one.
      least_local: samples of a device in a microbatch, at least.
      most_local: at most; more need accumulation.
      epochs: how many there are.
      fixed_batch: the batch under policies that adapt batches too; None for any.
      single: whether it is no use on several devices.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        epochs: int | None = None,
        most_local: int | None = None,
        fixed_batch: int | None = None,
        single: bool = False,
    ) -> None:
        """Reads the tables of a folder."""
        self.name = folder.name
        self.times = PlacementTimes(folder)
        self._tables = _validations(folder)
        self._batches = sorted(self._tables)
        self.base_batch, self.largest_batch = self._batches[0], self._batches[-1]
        self.least_local = self.times.least_local
        self.most_local = most_local or self.times.most_local
        shortest = min(len(table) for table in self._tables.values())
        self.epochs = min(epochs or shortest, shortest)
        self.fixed_batch, self.single = fixed_batch, single
        for cached in ("grad_stats", "progress_after", "completion_epoch"):
            setattr(self, cached, functools.cache(getattr(self, cached)))

    @property
    def most_devices(self) -> int:
        """More devices would have less than the least local batch."""
        return 1 if self.single else self.largest_batch // self.least_local

    def progress_after(self, epochs: int) -> float:
        """Progress after so many epochs, the least over all batches."""
        if epochs == 0:
            return 0.0
        tables = self._tables.values()
        return float(min(table[epochs - 1, 0] for table in tables))

    def grad_stats(self, batch: int, epoch: int) -> tuple[float, float]:
        """Squared norm and variance of the gradient of the base batch in an epoch."""
        return self._between(batch, 3, epoch), self._between(batch, 4, epoch)

    def steps_after(self, batch: int, epoch: int) -> float:
        """Steps made at a batch when an epoch ends."""
        return self._between(batch, 1, epoch)

    def completion_epoch(self, batch: int) -> int:
        """The epoch behind which a job is done."""
        self._around(batch)
        return self.epochs - 1

    def split(self, batch: int, devices: int) -> tuple[int, int]:
        """Samples a device in a microbatch, and microbatches before the last."""
        local = math.ceil(batch / devices - 1e-8)
        more = max(math.ceil(local / self.most_local - 1e-8), 1) - 1
        if devices == 1 and batch > self.base_batch:
            more = max(1, more)
        return math.ceil(local / (more + 1) - 1e-8), more

    def _between(self, batch: int, column: int, epoch: int) -> float:
        low, high = self._around(batch)
        one = float(self._tables[low][epoch, column])
        if low == high:
            return one
        other = float(self._tables[high][epoch, column])
        return ((batch - low) * other + (high - batch) * one) / (high - low)

    def _around(self, batch: int) -> tuple[int, int]:
        if not self.base_batch <= batch <= self.largest_batch:
            raise ScheduleError(
                f"{self.name}: batch {batch} was not measured; its batches go from "
                f"{self.base_batch} to {self.largest_batch}."
            )
        low = max(size for size in self._batches if size <= batch)
        return low, min(size for size in self._batches if size >= batch)


def _validations(folder: pathlib.Path) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for path in sorted(folder.glob("validation-*.csv")):
        rows: list[list[float]] = []
        for row in read_rows(path, tuple(_COLUMNS)):
            values = [row.number(name, least) for name, least in _COLUMNS.items()]
            if rows and values[0] < rows[-1][0]:
                raise ScheduleError(f"{row.where}: progress falls; it adds up epochs.")
            rows.append(values)
        if not rows:
            raise ScheduleError(f"{path}: it has no rows; an epoch is needed.")
        batch = path.stem.rpartition("-")[2]
        if not re.fullmatch("[1-9][0-9]{0,8}", batch):
            raise ScheduleError(
                f"{path}: {batch!r} is no batch; name it as 'validation-64.csv'."
            )
        found[int(batch)] = np.array(rows)
    if not found:
        raise ScheduleError(f"{folder}: it has no validation-BATCH.csv.")
    return found
