"""``autopar-solve``: solves an instance of the contest, and prints what was proved.

The contest on intra-operator parallelism was part of ASPLOS and EuroSys 2025.
"""

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from autopar_errors import InputError
from autopar_solver.sharding.contest import (
    read_contest_instance,
    write_contest_solution,
)
from autopar_solver.sharding.problem import ShardingProblem, Solution
from autopar_solver.sharding.rounds import explain_infeasibility, solve
from autopar_solver.status import Status

app = typer.Typer(add_completion=False)

RESERVED_SECONDS = 0.1
"""Seconds kept back for printing and writing the solution."""


@app.command()
def run(
    instance: Annotated[Path, typer.Argument(help="JSON, plain or gzip.")],
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Time limit, reading included.")
    ] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the choices as JSON.")
    ] = None,
    gap: Annotated[
        float, typer.Option(min=0.0, help="Relative gap that counts as optimal.")
    ] = 1e-6,
    backend: Annotated[str, typer.Option(help='"highs" or "cbc".')] = "highs",
) -> None:
    """Chooses one strategy per node at the least cost that fits in memory."""
    begin = time.monotonic()
    try:
        problem = read_contest_instance(instance)
        left = seconds - RESERVED_SECONDS - (time.monotonic() - begin)
        if backend not in ("highs", "cbc"):
            raise InputError(f'--backend {backend!r}: choose "highs" or "cbc".')
        solution = solve(problem, seconds=max(left, 0.0), gap=gap, backend=backend)
        if out is not None and solution.choices:
            write_contest_solution(out, solution.choices)
    except (OSError, ValueError) as error:
        typer.echo(f"autopar-solve: {_one_line(error)}", err=True)
        raise typer.Exit(2) from None
    _print(problem, solution, time.monotonic() - begin)
    if not solution.choices:
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    app()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _print(problem: ShardingProblem, solution: Solution, seconds: float) -> None:
    typer.echo(f"instance  {problem.name}")
    edges = len(problem.edges)
    typer.echo(f"size      {len(problem.node_costs)} nodes, {edges} edges")
    for report in solution.reductions:
        if report.nodes or report.edges or report.strategies:
            typer.echo(
                f"reduced   {report.name}: {report.nodes} nodes, "
                f"{report.edges} edges, {report.strategies} strategies"
            )
    typer.echo(f"status    {solution.status.value}")
    if solution.status is Status.INFEASIBLE:
        why = explain_infeasibility(problem)
        typer.echo(
            f"memory    at time {why.time} at least {why.least_peak:.15g} "
            f"of {why.limit} is needed"
        )
    typer.echo(f"cost      {_number(solution.cost)}")
    typer.echo(f"bound     {_number(solution.bound)}")
    gap = solution.gap if solution.choices else math.nan
    typer.echo(f"gap       {gap:.3e}")
    typer.echo(f"time      {seconds:.2f} s")


def _number(value: float) -> str:
    whole = math.isfinite(value) and float(value).is_integer()
    return f"{int(value)}" if whole else f"{value:.10g}"
