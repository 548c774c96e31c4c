"""Formats tables and sentences for the width of a terminal.

A command that writes to a terminal, or has ``COLUMNS`` in its environment, breaks lines
at that width. Output to a file or a pipe is not broken.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Generator, Sequence

_WIDTH: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "autopar_width", default=None
)
# Smallest width of a column of text.
_LEAST = 12
# Largest number of letters of an error in a table.
_LONGEST_REASON = 100
# Largest number of letters of one name, and of several names together, in a table. A
# wider terminal raises both to its width.
_LONGEST_NAME, _LONGEST_NAMES = 100, 60
# A sentence after a label in the first columns: "step     661 us: ...".
_LABELLED = re.compile(r"(\w+ +| {9})(\S+(?: \S+)*)")
_BREAKS = "/, "


@contextlib.contextmanager
def follow_width() -> Generator[None]:
    """Breaks tables at the terminal's width inside the ``with`` block."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    columns = shutil.get_terminal_size().columns if known else None
    token = _WIDTH.set(columns)
    try:
        yield
    finally:
        _WIDTH.reset(token)


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Aligns rows of text; the first row is the heading.

    If the terminal is narrower than the table, text cells continue in the next line. A
    table that is still too wide becomes several tables with the same first column.

    Args:
      rows: the rows, which all have the same number of cells.
      right: the columns that are aligned to the right.
    """
    last = len(rows[0]) - 1
    cells = [list(row) for row in rows]
    widths = [max(len(row[k]) for row in cells) for k in range(last + 1)]
    most = _WIDTH.get()
    if most is None or _total(widths) <= most:
        return _align_rows(cells, widths, right)
    text = [k for k in range(last + 1) if k not in right]
    least = [min(w, _LEAST) if k in text else w for k, w in enumerate(widths)]
    groups = _groups(least, most)
    out: list[str] = []
    for group in groups:
        own = _narrow_widths(
            [widths[k] for k in group], [least[k] for k in group], most
        )
        part = [[row[k] for k in group] for row in cells]
        out += [
            "",
            *_align_rows(part, own, [group.index(k) for k in right if k in group]),
        ]
    return out[1:]


def shorten(text: str) -> str:
    """Returns an error for a table, shortened if it is too long."""
    if len(text) <= _LONGEST_REASON:
        return text
    return text[: _LONGEST_REASON - 1].rstrip() + "…"


def cut_name(name: str) -> str:
    """Returns a name for a table; the middle of a long name is left out."""
    most = max(_LONGEST_NAME, _WIDTH.get() or 0)
    if len(name) <= most:
        return name
    return f"{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}"


def names_text(names: Sequence[str]) -> str:
    """Returns names for one cell of a table, with the number of names left out."""
    most = max(_LONGEST_NAMES, _WIDTH.get() or 0)
    lengths = itertools.accumulate(len(name) + 1 for name in names)
    count = max(1, sum(length <= most + 1 for length in lengths))
    shown = [cut_name(name) for name in names[:count]]
    left = [f"and {len(names) - count} more"] if count < len(names) else []
    return " ".join([*shown, *left])


def fold_text(text: str) -> str:
    """Returns text with labelled sentences folded at the terminal's width."""
    most = _WIDTH.get()
    if most is None:
        return text
    return "\n".join(_fold_line(line, most) for line in text.split("\n"))


def _fold_line(line: str, most: int) -> str:
    found = _LABELLED.fullmatch(line)
    if len(line) <= most or found is None:
        return line
    label = found[1] if found[1].endswith("  ") or len(found[1]) == 9 else ""
    return textwrap.fill(
        line[len(label) :],
        max(most, len(label) + _LEAST),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _groups(least: Sequence[int], most: int) -> list[list[int]]:
    """Splits a table that is wider than ``most`` letters into narrower tables.

    Returns the columns of each narrower table. All of these tables begin with the first
    column. ``least`` is the smallest width of each column, in letters.
    """
    groups: list[list[int]] = [[0]]
    for k in range(1, len(least)):
        if len(groups[-1]) > 1 and _total([least[j] for j in (*groups[-1], k)]) > most:
            groups.append([0])
        groups[-1].append(k)
    return groups


def _narrow_widths(widths: Sequence[int], least: Sequence[int], most: int) -> list[int]:
    """Returns widths that fit, made by narrowing the widest column first."""
    out = list(widths)
    while _total(out) > most:
        spare = [w - low for w, low in zip(out, least, strict=True)]
        if max(spare) <= 0:
            break
        widest = max(range(len(out)), key=lambda k: (spare[k] > 0, out[k]))
        out[widest] -= 1
    return out


def _align_rows(
    rows: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int]
) -> list[str]:
    lines: list[str] = []
    for row in rows:
        cells = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            parts = [cell[k] if k < len(cell) else "" for cell in cells]
            line = "  ".join(
                part.rjust(width) if c in right else part.ljust(width)
                for c, (part, width) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append(line.rstrip())
    return lines


def _broken(cell: str, width: int) -> list[str]:
    """Returns the lines of a cell, broken after a slash, a comma or a space."""
    lines: list[str] = []
    while len(cell) > width:
        at = max(cell.rfind(mark, 0, width) for mark in _BREAKS) + 1 or width
        lines.append(cell[:at].rstrip())
        cell = cell[at:].lstrip()
    return [*lines, cell]
