"""Tables with named columns, read from CSV files with errors that name the row."""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from autopar.errors import ScheduleError

ENCODING = "utf-8-sig"
"""UTF-8, behind the mark that spreadsheets write or without it."""

_LONGEST = 1000
_LARGEST = 1e30  # of any unit: products of such numbers are finite
_LARGEST_WHOLE = 2**53  # larger ones are not all numbers of floating point


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
        """The text of a column.

        Raises:
          ScheduleError: it is too long for what is read from it.
        """
        found = self.cells[column].strip()
        if len(found) > _LONGEST:
            raise ScheduleError(
                f"{self.where}: {column} has {len(found)} letters; give at most "
                f"{_LONGEST}."
            )
        return found

    def number(self, column: str, least: float = -math.inf) -> float:
        """The number in a column.

        Raises:
          ScheduleError: it is no finite number, too large, or less than ``least``.
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
          ScheduleError: it is none, less than ``least``, or too large to be exact.
        """
        value = self.number(column, least)
        if value != int(value) or abs(value) > _LARGEST_WHOLE:
            raise ScheduleError(
                f"{self.where}: {column} is {value}; give a whole number, of at most "
                f"{_LARGEST_WHOLE}."
            )
        return int(value)

    def placement(self, column: str) -> tuple[int, ...]:
        """The devices on each node, from a row of digits such as ``422``.

        Raises:
          ScheduleError: it is none.
        """
        text = self.text(column)
        if not re.fullmatch("[1-9]+", text):
            raise ScheduleError(
                f"{self.where}: {column} {text!r} is no row of digits from 1 to 9."
            )
        return tuple(map(int, text))


def column_names(columns: Iterable[str]) -> str:
    """The names of columns, for an error: the first of them where they are long."""
    return f"{', '.join(columns) or 'none':.{_LONGEST}}"


def read_rows(
    path: pathlib.Path, columns: Sequence[str], *, delimiter: str = ","
) -> Iterator[Row]:
    """The rows of a CSV file with a head line; only commas stand beside quotes.

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
