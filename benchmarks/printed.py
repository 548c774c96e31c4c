"""Converts tables that benchmarks have printed to data files, which the plots read.

    python benchmarks/printed.py         # writes what `TABLES` names under docs/data/

A table is found on its page of docs/record by the first cells of its heading. The file
has the command above the table, and one object for each row. Cells with a number become
numbers.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
# Data file -> (page of the record, begin of the table's heading).
TABLES = {
    "links": ("compression", "| Mbit/s | gradients |"),
    "published": ("cost-model", "| run | measured s |"),
    "experts": ("experts", "| model | cluster | ours s |"),
    "planning": ("planning", "| case | bar s |"),
}


def kept(page: str, header: str) -> dict[str, Any]:
    """The table on a page of the record, and the command above the table."""
    text = (DOCS / "record" / f"{page}.md").read_text()
    start = text.index(header)
    names, _, *rows = text[start:].split("\n\n", 1)[0].strip().splitlines()
    commands = re.findall(r"`(python benchmarks/[^`]+)`", text[:start])
    return {
        "page": f"docs/record/{page}.md",
        "command": " ".join(commands[-1].split()),
        "rows": [dict(zip(_cells(names), _values(row), strict=False)) for row in rows],
    }


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*").strip() for cell in line.strip("| ").split("|")]


def _values(line: str) -> list[str | float]:
    values: list[str | float] = []
    for cell in _cells(line):
        values.append(cell)
        with contextlib.suppress(ValueError):
            values[-1] = float(cell)
    return values


def text_of(name: str) -> str:
    """The data file of a table, as text."""
    return json.dumps(kept(*TABLES[name]), indent=1) + "\n"


def main() -> None:
    """Writes the data file of each table."""
    for name in TABLES:
        (DOCS / "data" / f"{name}.json").write_text(text_of(name))


if __name__ == "__main__":
    main()
