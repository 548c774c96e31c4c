"""``autopar compare``: the plan beside those that people write by hand."""

import importlib
from typing import Annotated, Any

import typer

from autopar.cli import common
from autopar.cli.target import load, parse_words
from autopar.errors import PlanError
from autopar.plans.table import bytes_text, columns, seconds_text

OURS = "autopar"


def compare(
    target: Annotated[str, typer.Argument(help="file.py:function or module:function.")],
    words: common.Words = None,
    cluster: common.ClusterSpec = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the plans on this process's devices.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Steps to time of each plan.")
    ] = 10,
    devices: common.Devices = None,
    seconds: common.Seconds = None,
    max_axes: common.MaxAxes = None,
    memory: common.Memory = None,
    as_json: common.Json = False,
) -> None:
    """Compares the plan with the usual ones: data parallel, ZeRO, tensor parallel ...

    With --measure all plans that fit are really run, on this process's devices or
    on as many simulated ones as --devices says.
    """
    if devices is not None:
        common.simulate_devices(devices)
    made_for = common.read_cluster(cluster, memory)
    limits = common.Limits(seconds, max_axes)
    with common.progress() as say:
        workload = load(target, parse_words(words or []))
        analysis, ours = common.make_plan(workload, made_for, limits, say)
        say("planning as experts do")
        experts = _module("autopar.planner.experts").expert_plans(
            analysis, made_for, seconds=seconds
        )
        rows = [_our_row(ours), *map(_expert_row, experts)]
        if measure:
            say("running the plans")
            plans = {OURS: ours} | _plans(analysis, experts)
            measured = _module("autopar.runtime.measure").measure_plans(
                analysis, plans, repeats
            )
            rows = [row | {"measured_s": measured.get(row["name"])} for row in rows]
    if as_json:
        common.print_json({"cluster": str(made_for), "plans": rows})
    else:
        typer.echo("\n".join(_lines(rows, measure)))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise PlanError(f"this version of autopar has no {name}.") from error


def _our_row(plan: common.Plan) -> dict[str, Any]:
    return {"name": OURS, **plan.to_json()["predicted"], "reason": ""}


def _expert_row(expert: Any) -> dict[str, Any]:
    best = expert.candidate
    if best is None:
        return {"name": expert.name, "step_s": None, "reason": expert.reason}
    return {
        "name": expert.name,
        "step_s": best.step_s,
        "compute_s": best.compute_s,
        "communication_s": best.communication_s,
        "communication_bytes": best.communication_bytes,
        "peak_memory_bytes": float(best.peak_memory_bytes),
        "reason": expert.reason,
    }


def _plans(analysis: common.Analysis, experts: list[Any]) -> dict[str, common.Plan]:
    """The experts' candidates as plans."""
    from autopar.planner.convert import make_plan
    from autopar.planner.search import SearchResult

    return {
        e.name: make_plan(analysis, SearchResult(e.candidate, (), 0.0))
        for e in experts
        if e.candidate is not None
    }


def _lines(rows: list[dict[str, Any]], measured: bool) -> list[str]:
    heading = ["plan", "step", "compute", "communication", "sends", "memory"]
    cells = [[*heading, "measured" if measured else "", "against autopar"]]
    ours = rows[0]["step_s"]
    for row in rows:
        if row["step_s"] is None:
            cells.append([row["name"], *[""] * 6, f"cannot run: {row['reason']}"])
            continue
        times = [seconds_text(row[k]) for k in ("step_s", "compute_s", "communication_s")]
        sizes = [bytes_text(row[k]) for k in ("communication_bytes", "peak_memory_bytes")]
        took = row.get("measured_s")
        text = seconds_text(took) if took is not None else ""
        ratio = f"{row['step_s'] / ours:.2f} x" if ours and row["name"] != OURS else ""
        cells.append([row["name"], *times, *sizes, text, ratio])
    if not measured:
        cells = [[*row[:6], row[7]] for row in cells]
    return columns(cells, right=range(1, 7 if measured else 6))
