"""Runs benchmarks of runs and jobs again, and compares the recorded figures.

    python benchmarks/regressions.py --outputs FOLDER [--only losses-gpt move]
    python benchmarks/regressions.py --outputs FOLDER --only

`regressions.toml` lists the benchmarks and their figures. The output of a benchmark is
stored in the folder of ``--outputs``. A benchmark whose output exists does not run
again. The figures of all outputs are written to docs/data/regressions.json, and as a
table to docs/record/jobs.md.

A figure is judged by a bar, or by its difference from the recorded figure. Wall-clock
and CPU seconds depend on other load of the machine, so they are not judged. A ratio of
two times is judged if the benchmark measures them in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from typing import Any

import workloads

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent / "docs" / "data" / "regressions.json"
PAGE = HERE.parent / "docs" / "record" / "jobs.md"
HEADER = "| what | recorded | now | bar | load | command |\n|---|---|---|---|---|---|\n"
BENCHMARKS: dict[str, Any] = tomllib.loads((HERE / "regressions.toml").read_text())
LIMIT_S = 3600.0


def pattern(figure: dict[str, Any]) -> str:
    """The regular expression of a figure; its only group is the number."""
    if "cell" in figure:
        *first, column = figure["cell"]
        names = "".join(re.escape(x) + r" \| " for x in first)
        return rf"^\| {names}" + r"[^|]* \| " * (column - len(first)) + r"([^ |,%]+)"
    if "key" in figure:
        return rf'"{figure["key"]}": ([-\d.e+]+)'
    return figure["line"]


def value(figure: dict[str, Any], output: str) -> float | None:
    """The figure in an output: the worst one if there are several; None if there is
    none.
    """
    found = [float(x) for x in re.findall(pattern(figure), output, re.MULTILINE)]
    if not found:
        return None
    if "most" in figure or "least" in figure:
        return max(found) if "most" in figure else min(found)
    return statistics.median(found)


def is_within(figure: dict[str, Any], now: float | None) -> bool | None:
    """Whether a figure keeps its bar; None if it has none."""
    if now is None:
        return False
    if "most" in figure:
        return abs(now) <= figure["most"]
    if "least" in figure:
        return now >= figure["least"]
    if "near" not in figure:
        return None
    recorded = figure["recorded"]
    return abs(now - recorded) <= figure["near"] * abs(recorded)


def bar(figure: dict[str, Any]) -> str:
    """The bar of a figure as text."""
    for name, word in (("most", "at most"), ("least", "at least")):
        if name in figure:
            return f"{word} {figure[name]:g}"
    return f"within {figure['near']:.0%}" if "near" in figure else "none"


def run(name: str, folder: pathlib.Path) -> None:
    """Stores the output of a benchmark, with the commit and the load before the run."""
    script, *words = shlex.split(BENCHMARKS[name]["words"])
    note = {
        "commit": workloads.commit(),
        "load": round(os.getloadavg()[0], 1),
    }
    command = [sys.executable, str(HERE / script), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    (folder / name).write_text(f"{json.dumps(note)}\n{done.stdout}")


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The figures of all outputs in a folder."""
    found: list[dict[str, Any]] = []
    for name, benchmark in BENCHMARKS.items():
        if (folder / name).exists():
            note, _, output = (folder / name).read_text().partition("\n")
            command = f"python benchmarks/{benchmark['words']}"
            for figure in benchmark["figures"]:
                now = value(figure, output)
                texts = {"what": figure["what"], "command": command}
                numbers = {"recorded": figure["recorded"], "now": now}
                judged = {"bar": bar(figure), "within": is_within(figure, now)}
                found.append(texts | numbers | judged | json.loads(note))
    return found


def table(found: list[dict[str, Any]]) -> str:
    """The figures as a table in Markdown."""
    text, previous = HEADER, ""
    for x in found:
        now = "no figure" if x["now"] is None else f"{x['now']:g}"
        now = f"**{now}**" if x["within"] is False else now
        command = "the same" if x["command"] == previous else f"`{x['command']}`"
        cells = x["what"], f"{x['recorded']:g}", now, x["bar"], str(x["load"]), command
        text += f"| {' | '.join(cells)} |\n"
        previous = x["command"]
    return text


def main() -> int:
    """Runs missing benchmarks, and writes the figures; returns 1 if a figure misses its
    bar.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="*", choices=BENCHMARKS, default=[*BENCHMARKS])
    given = parser.parse_args()
    given.outputs.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        if not (given.outputs / name).exists():
            begin = time.perf_counter()
            run(name, given.outputs)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    found = rows(given.outputs)
    OUT.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(HEADER)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    PAGE.write_text(f"{before}{table(found)}{after}")
    print(table(found))
    return int(any(x["within"] is False for x in found))


if __name__ == "__main__":
    sys.exit(main())
