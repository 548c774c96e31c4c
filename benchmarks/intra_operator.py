"""Solves contest instances at given time limits and prints a markdown table.

    python benchmarks/intra_operator.py --seconds 10 --seconds 60 INSTANCE.json.gz ...

Without paths, the command solves every instance in the folder ``AUTOPAR_IOPDDL_DIR``.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from autopar_solver import check_solution, read_contest_instance, solve


def run(
    instances: Annotated[list[Path] | None, typer.Argument()] = None,
    seconds: Annotated[list[float] | None, typer.Option()] = None,
    gap: Annotated[float, typer.Option()] = 1e-6,
) -> None:
    """Prints a row for each instance and limit; the time to read a file counts."""
    print("| instance | nodes | edges | limit s | cost | bound | gap | status | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for path in instances or _default_instances():
        for limit in seconds or [60.0]:
            print(_row(path, limit, gap), flush=True)


def _default_instances() -> list[Path]:
    folder = os.environ.get("AUTOPAR_IOPDDL_DIR")
    if folder is None:
        raise typer.BadParameter("name instances or set AUTOPAR_IOPDDL_DIR")
    return sorted(Path(folder).glob("*.json*"))


def _row(path: Path, limit: float, gap: float) -> str:
    begin = time.monotonic()
    problem = read_contest_instance(path)
    left = limit - (time.monotonic() - begin)
    solution = solve(problem, seconds=left, gap=gap)
    spent = time.monotonic() - begin
    check_solution(problem, solution)
    return (
        f"| {problem.name} | {len(problem.node_costs):,} | {len(problem.edges):,} "
        f"| {limit:g} | {solution.cost:,.15g} | {solution.bound:,.15g} "
        f"| {solution.gap:.2e} | {solution.status.name} | {spent:.1f} |"
    )


if __name__ == "__main__":
    typer.run(run)
