"""Options of XLA for communication in loops over layers, compiled without devices.

    python benchmarks/loop_options.py [--out loop_options.json] [--cases small ...]

Needs the extra ``gpu-compiler``. GPTs whose layers are a scan are planned by an
expert's rule and compiled for H100 with each set of options. A row has the time of the
compiled schedule (`autopar.compilers.compiled.timeline`), its exposed communication,
its memory, and the same of the cost model. The model describes the default options. The
rule that sums of gradients run in the next iteration was found with the cases `FOUND`;
the others were compiled after it was written. Rows that are in the file are not
computed again, unless ``--again`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import compiled
import workloads

from autopar.audits import audit_analysis
from autopar.cluster import Cluster
from autopar.cost.breakdown import exposed_s
from autopar.cost.estimate import estimate
from autopar.cost.live import live
from autopar.cost.pricer import Pricer
from autopar.planner.candidate import SearchResult
from autopar.planner.plan import make_plan
from autopar.planner.recipes import recipes, restriction_of
from autopar.planner.record import restore
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.plans import Plan
from autopar.reports.explain import bind_plan
from autopar.steps.analysis import Analysis, analyse

DATA = pathlib.Path(__file__).resolve().parents[1] / "docs/data/loop_options.json"
COMMAND = "python benchmarks/loop_options.py"
FSDP, TENSOR = "FSDP (ZeRO-3)", "FSDP x tensor"
BF16 = {"dtype": "bfloat16", "remat": True}
SMALL, WIDE = compiled.GPT, compiled.LARGE
# Name -> (example, its options, batch, cluster, the expert's rule).
CASES: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "float32": ("gpt-scan", SMALL, 64, "8:h100", FSDP),
    "small": ("gpt-scan", {**SMALL, **BF16}, 64, "8:h100", FSDP),
    "2048": (
        "gpt-scan", {**SMALL, **BF16, "layers": 12, "d_model": 2048}, 64, "2x4:h100",
        FSDP,
    ),
    "4096": ("gpt-scan", {**WIDE, **BF16}, 128, "8x8:h100", FSDP),
    "4096 tensor": ("gpt-scan", {**WIDE, **BF16}, 128, "8x8:h100", TENSOR),
    "24 layers": (
        "gpt-scan",
        {**SMALL, **BF16, "layers": 24, "d_model": 2048, "seq": 1024}, 128, "4x8:h100",
        FSDP,
    ),
    "float32, two hosts": (
        "gpt-scan", {**SMALL, "layers": 8}, 64, "2x4:h100", FSDP,
    ),
    "NNX": (
        "gpt-nnx", {**SMALL, **BF16, "layers": 8, "scan": True}, 128, "2x4:h100",
        "ZeRO-1",
    ),
}  # fmt: skip
FOUND = ("float32", "small", "2048", "4096", "4096 tensor")

_GATHERS = "--xla_gpu_enable_pipelined_all_gather=true"
_SUMS = (
    "--xla_gpu_enable_pipelined_reduce_scatter=true "
    "--xla_gpu_enable_pipelined_all_reduce=true"
)
ARMS = {
    "default": "",
    "gathers": _GATHERS,
    "sums": _SUMS,
    "gathers, sums": f"{_GATHERS} {_SUMS}",
    "two iterations": "--xla_gpu_enable_while_loop_double_buffering=true",
}


def planned(name: str, seconds: float) -> tuple[Analysis, Plan, Cluster]:
    """The best plan by the expert's rule of a case, on its first mesh that fits."""
    example, options, batch, machine, rule = CASES[name]
    step, args = workloads.arguments(example, **{**options, "batch": batch})
    analysis, cluster = analyse(step, args), Cluster.parse(machine)
    for mesh in candidate_meshes(cluster):
        recipe = next((r for r in recipes(len(mesh.axes)) if r.name == rule), None)
        if recipe is None or len(mesh.axes) != len(machine.split(":")[0].split("x")):
            continue
        pricer = Pricer(cluster, mesh)
        within = restriction_of(analysis, recipe, pricer)
        found = solve_mesh(analysis, pricer, within, seconds=seconds)
        result = SearchResult(found, ((mesh, found),), 0.0)
        return analysis, make_plan(analysis, result), cluster
    raise SystemExit(f"{machine} has no mesh for {rule}")


def predicted(analysis: Analysis, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """What the cost model says of a plan."""
    bound = bind_plan(analysis, plan, cluster)
    cost = estimate(bound.assignment, bound.pricer).cost
    held = live(restore(analysis, plan), cluster.device).peak_bytes()
    return {
        "work_s": cost.work_s, "exposed_s": exposed_s(cost), "memory_bytes": held,
    }  # fmt: skip


def compiled_with(
    flags: str, analysis: Analysis, plan: Plan, cluster: Cluster
) -> dict[str, float]:
    """What the compiler makes of a plan with these flags."""
    os.environ["XLA_FLAGS"] = flags
    audit = audit_analysis(analysis, plan, cluster, compiled=False, target="h100")
    assert audit.target is not None
    found = audit.target.to_json()
    return {
        "work_s": found["compute_s"],
        "exposed_s": found["schedule"]["exposed_s"],
        "memory_bytes": found["memory"]["peak_bytes"],
    }


def step_s(row: Mapping[str, float]) -> float:
    """Seconds of a step in which messages do not slow the work."""
    return row["work_s"] + row["exposed_s"]


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows as a table."""
    workloads.row(
        "case", "cluster", "options", "step ms", "of default", "exposed ms",
        "predicted", "step, predicted / compiled", "memory GB", "predicted",
    )  # fmt: skip
    workloads.row(*["---"] * 10)
    default = {r["case"]: r for r in rows if r["options"] == "default"}
    for row in rows:
        own, first = row["compiled"], default[row["case"]]["compiled"]
        said = row["predicted"] if row is default[row["case"]] else None
        workloads.row(
            row["case"], row["cluster"], row["options"], f"{1e3 * step_s(own):.1f}",
            f"{step_s(own) / step_s(first):.3f}", f"{1e3 * own['exposed_s']:.2f}",
            f"{1e3 * said['exposed_s']:.2f}" if said else "",
            f"{step_s(said) / step_s(own):.3f}" if said else "",
            f"{own['memory_bytes'] / 1e9:.2f}",
            f"{said['memory_bytes'] / 1e9:.2f}" if said else "",
        )  # fmt: skip


def main() -> None:
    """Computes the rows that are missing, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--again", action="store_true", help="computes all rows anew")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.out.exists() and not given.again:
        rows = json.loads(given.out.read_text(encoding="utf-8"))["rows"]
    there = {(row["case"], row["options"]) for row in rows}
    for name in given.cases:
        arms = [arm for arm in ARMS if (name, arm) not in there]
        if not arms:
            continue
        analysis, plan, cluster = planned(name, given.seconds)
        said = predicted(analysis, plan, cluster)
        for arm in arms:
            made = compiled_with(ARMS[arm], analysis, plan, cluster)
            rows.append({
                "case": name, "cluster": CASES[name][3], "rule": CASES[name][4],
                "held_out": name not in FOUND, "options": arm, "predicted": said,
                "compiled": made,
            })  # fmt: skip
            data = {"command": COMMAND, "at": workloads.commit(), "rows": rows}
            given.out.write_text(json.dumps(data), encoding="utf-8")
    report(rows)


if __name__ == "__main__":
    main()
