"""Tables with named columns, read from CSV files with errors that name the row."""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence

from autopar.errors import ScheduleError


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
      where: file and line, for errors.
      cells: the text of each column.
    """

    where: str
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """The text of a column."""
        return self.cells[column].strip()

    def number(self, column: str, least: float = -math.inf) -> float:
        """The number in a column.

        Raises:
          ScheduleError: it is no finite number, or less than ``least``.
        """
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least:
            bound = "" if math.isinf(least) else f" of at least {least:g}"
            raise ScheduleError(
                f"{self.where}: {column} is {self.cells[column]!r}; give a finite "
                f"number{bound}."
            )
        return value

    def whole(self, column: str, least: int = 0) -> int:
        """The whole number in a column.

        Raises:
          ScheduleError: it is none, or less than ``least``.
        """
        value = self.number(column, least)
        if value != int(value):
            raise ScheduleError(
                f"{self.where}: {column} is {value}; give a whole number."
            )
        return int(value)


def read_rows(
    path: pathlib.Path, columns: Sequence[str], *, delimiter: str = ","
) -> Iterator[Row]:
    """The rows of a CSV file with a head line.

    Raises:
      ScheduleError: the file cannot be read, lacks a column, or a row lacks a cell.
    """
    try:
        with path.open(newline="") as file:
            lines = list(csv.reader(file, delimiter=delimiter))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: it cannot be read: {error}.") from error
    head = [name.strip() for name in lines[0]] if lines else []
    missing = [name for name in columns if name not in head]
    if missing:
        raise ScheduleError(
            f"{path}: it has no column {missing[0]!r}; the columns are "
            f"{', '.join(head) or 'none'}."
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
