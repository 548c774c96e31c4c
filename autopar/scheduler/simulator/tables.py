"""Reads CSV tables, and the tables of programs that were published with Pollux.

`read_rows` reads any CSV file; its error messages name the file and the row.

`Application` is a program that was measured at several batches. Its tables hold step
times and, for each batch and epoch: the progress (in steps of the base batch), the
number of steps, the metric, and the squared norm and the variance of the gradient.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy.interpolate import LinearNDInterpolator  # SciPy comes with JAX
from scipy.spatial import QhullError

from autopar.errors import ScheduleError

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that spreadsheets write."""

_LONGEST = 1000
_LARGEST = 1e30  # products of several such numbers are still finite
_LARGEST_WHOLE = 2**53  # above, some integers are not exact as floating-point numbers


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
      where: file and line, for error messages.
      cells: the text of each column.
    """

    where: str
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """The text of a column.

        Raises:
          ScheduleError: the text is too long.
        """
        found = self.cells[column].strip()
        if len(found) > _LONGEST:
            raise ScheduleError(
                f"{self.where}: {column} has {len(found)} letters; give at most "
                f"{_LONGEST}."
            )
        return found

    def owner(self) -> dict[str, Any]:
        """User and priority of a job, for the columns that the table has.

        Raises:
          ScheduleError: the priority is not a number.
        """
        found: dict[str, Any] = {}
        if "user" in self.cells:
            found["user"] = self.text("user")
        if "priority" in self.cells:
            found["priority"] = self.number("priority")
        return found

    def number(self, column: str, least: float = -math.inf) -> float:
        """The number in a column.

        Raises:
          ScheduleError: the cell is not a finite number, or is too large, or is less
            than ``least``.
        """
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= _LARGEST or value < least:
            bound = "" if math.isinf(least) else f" of at least {least:g}"
            bound += f", of at most {_LARGEST:g}" if _LARGEST < value < math.inf else ""
            raise ScheduleError(
                f"{self.where}: {column} is {text!r}; give a finite number{bound}."
            )
        return value

    def whole(self, column: str, least: int = 0) -> int:
        """The whole number in a column.

        Raises:
          ScheduleError: the cell is not a whole number, or is less than ``least``, or
            is too large to be exact.
        """
        value = self.number(column, least)
        if value != int(value) or abs(value) > _LARGEST_WHOLE:
            raise ScheduleError(
                f"{self.where}: {column} is {value}; give a whole number, of at most "
                f"{_LARGEST_WHOLE}."
            )
        return int(value)

    def placement(self, column: str) -> tuple[int, ...]:
        """The number of devices on each node, from a text of digits such as ``422``.

        Raises:
          ScheduleError: the cell is not a text of digits from 1 to 9.
        """
        text = self.text(column)
        if not re.fullmatch("[1-9]+", text):
            raise ScheduleError(
                f"{self.where}: {column} {text!r} is no row of digits from 1 to 9."
            )
        return tuple(map(int, text))


def column_names(columns: Iterable[str]) -> str:
    """The names of columns for an error message, shortened if they are long."""
    return f"{', '.join(columns) or 'none':.{_LONGEST}}"


def read_rows(
    path: pathlib.Path, columns: Sequence[str], *, delimiter: str = ","
) -> Iterator[Row]:
    """The rows of a CSV file with a head line.

    Quotes around cells are understood only if the delimiter is a comma.

    Raises:
      ScheduleError: the file cannot be read, lacks a column, or a row lacks a cell.
    """
    quoting = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    try:
        with path.open(newline="", encoding=ENCODING) as file:
            lines = list(csv.reader(file, delimiter=delimiter, quoting=quoting))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: it cannot be read: {error}.") from error
    head = [name.strip() for name in lines[0]] if lines else []
    missing = [name for name in columns if name not in head]
    if missing:
        raise ScheduleError(
            f"{path}: it has no column {missing[0]!r}; the columns are "
            f"{column_names(head)}."
        )
    for number, line in enumerate(lines[1:], start=2):
        if not line:
            continue
        where = f"{path}:{number}"
        if len(line) != len(head):
            raise ScheduleError(
                f"{where}: it has {len(line)} cells, the head has {len(head)}."
            )
        yield Row(where, dict(zip(head, line, strict=True)))


Placement = tuple[int, ...]

_MOST_NODES = 16  # the largest number of nodes in the published tables


def linear_between(points: np.ndarray, values: np.ndarray) -> Callable[..., Any]:
    """An interpolator that is linear between points, and nan outside their hull.

    If all points lie in a plane or a line, the interpolator returns nan everywhere.

    Args:
      points: array of shape (points, coordinates).
      values: the values at the points.
    """
    try:
        return LinearNDInterpolator(points, values)
    except QhullError:  # too few points, or they lie in a plane
        return lambda _: np.full((1, *values.shape[1:]), np.nan)


class PlacementTimes:
    """Seconds of a step and of its synchronisation, by placement and batch per device.

    The local batch is the number of samples per device in a microbatch. For a measured
    placement, seconds are interpolated between the local batches that were measured on
    it. For any other placement, they are interpolated between all measurements, by
    numbers of nodes, devices and local batch. A placement and its rotations, such as
    (4, 2) and (2, 4), count as the same.
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
        """All measurements as (placement, local batch, step s, synchronisation s)."""
        return [
            (placement, int(local), step, sync)
            for placement, table in self._measured.items()
            for local, step, sync in table.tolist()
        ]

    def seconds(self, placement: Placement, local: int) -> tuple[float, float]:
        """Seconds of a step, and of its synchronisation.

        Raises:
          ScheduleError: the configuration lies outside of all measured ones.
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
    """Seconds of a step, and of its synchronisation.

    Raises:
      ScheduleError: the synchronisation takes longer than the step.
    """
    step, sync = row.number("step_time", 1e-9), row.number("sync_time", 0.0)
    if sync > step:
        raise ScheduleError(
            f"{row.where}: sync_time is {sync:g}, and the whole step_time {step:g}."
        )
    return step, sync


def _placements(path: pathlib.Path) -> dict[Placement, np.ndarray]:
    """For each placement, rows of (local batch, step s, synchronisation s), sorted."""
    found: dict[Placement, list[tuple[float, float, float]]] = {}
    columns = ("placement", "local_bsz", "step_time", "sync_time")
    for row in read_rows(path, columns):
        placement = row.placement("placement")
        local, seconds = row.whole("local_bsz", 1), _step_seconds(row)
        found.setdefault(placement, []).append((local, *seconds))
    if not found:
        raise ScheduleError(f"{path}: it has no rows; a step time is needed.")
    return {key: np.array(sorted(rows)) for key, rows in found.items()}


# The columns and their least allowed values. The variance must be above zero, because
# the code divides by it.
_COLUMNS = {
    "progress": 0.0,
    "iteration": 0.0,
    "metric": -math.inf,
    "grad_sqr": 0.0,
    "grad_var": 1e-30,
}


class Application:
    """A program with its measured tables.

    Attributes:
      name: the program's name.
      base_batch: the smallest measured batch.
      largest_batch: the largest measured batch.
      least_local: the fewest samples per device in a microbatch.
      most_local: the most samples per device in a microbatch; larger batches need
        gradient accumulation.
      epochs: number of epochs.
      fixed_batch: the only batch size under policies that change batch sizes; None: any
        batch size.
      single: whether the program can use only one device.
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
        """The most devices of which each gets at least ``least_local`` samples."""
        return 1 if self.single else self.largest_batch // self.least_local

    def progress_after(self, epochs: int) -> float:
        """Progress after a number of epochs: the minimum over all batch sizes."""
        if epochs == 0:
            return 0.0
        tables = self._tables.values()
        return float(min(table[epochs - 1, 0] for table in tables))

    def grad_stats(self, batch: int, epoch: int) -> tuple[float, float]:
        """Squared norm and variance of the base batch's gradient in an epoch."""
        return self._between(batch, 3, epoch), self._between(batch, 4, epoch)

    def steps_after(self, batch: int, epoch: int) -> float:
        """The number of steps at a batch until the end of an epoch."""
        return self._between(batch, 1, epoch)

    def completion_epoch(self, batch: int) -> int:
        """The epoch at whose end a job with this batch size is complete."""
        self._around(batch)
        return self.epochs - 1

    def split(self, batch: int, devices: int) -> tuple[int, int]:
        """Splits a batch into microbatches.

        Returns the samples per device in a microbatch, and the number of microbatches
        before the last one.
        """
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
