"""Order of experts' plans by exposed communication, predicted and in XLA's schedules.

    python benchmarks/exposed_order.py --out exposed.jsonl [--cases 'gpt*8:h100' ...]

Needs the extra ``gpu-compiler``. The cases are those of `benchmarks/compiled.py` on
GPUs. Every expert plan that fits is compiled without devices. Two plans of a case are a
pair if their exposed seconds by the compiler's schedule differ by a tenth of the slower
step, or more. The pair is in order if the predicted exposed seconds have the same
order. Each plan is a line of JSON in the file; plans that are already in the file are
skipped, so that a run can be stopped and continued. The table shows the whole file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import compiled
import jax
import workloads

from autopar.errors import AutoparError
from autopar.planner.candidate import SearchResult
from autopar.planner.experts import expert_plans
from autopar.planner.plan import make_plan
from autopar.plans import Plan
from autopar.steps.analysis import Analysis

CASES = ("gpt-1024-b16@8:h100", "llama-1024-b16@8:h100", "moe-1024@2x4:h100")
# Least difference of a pair, as a fraction of the slower step.
APART = 0.1


def plans(
    case: compiled.Case, analysis: Analysis, seconds: float
) -> Iterator[tuple[str, Plan]]:
    """Expert plans that fit, each once; several rules may have the same best plan."""
    seen: set[str] = set()
    for expert in expert_plans(analysis, case.machine, seconds=seconds):
        if expert.candidate is None:
            continue
        mesh = expert.candidate.pricer.mesh
        result = SearchResult(expert.candidate, ((mesh, expert.candidate),), 0.0)
        plan = make_plan(analysis, result)
        layouts = json.dumps([plan.mesh, plan.to_json()["stages"]], sort_keys=True)
        if layouts not in seen:
            seen.add(layouts)
            yield f"{expert.name}, {expert.mesh}", plan


def pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """Yields pairs of plans of a case, and whether the predicted order is right."""
    for one, other in itertools.combinations(rows, 2):
        seen = [row["compiled"]["exposed_s"] for row in (one, other)]
        said = [row["predicted"]["exposed_s"] for row in (one, other)]
        steps = [
            row["compiled"]["exposed_s"] + row["compiled"]["compute_s"]
            for row in (one, other)
        ]
        if abs(seen[0] - seen[1]) >= APART * max(steps):
            right = (seen[0] < seen[1]) == (said[0] < said[1])
            yield one["case"], other["case"], right


def report(rows: list[dict[str, Any]]) -> None:
    """Prints all plans, the pairs in wrong order, and their number."""
    workloads.row("case", "plan", "predicted ms", "compiled ms", "ratio")
    workloads.row(*["---"] * 5)
    for row in rows:
        name, expert = row["case"].split(" ", 1)
        said, seen = (row[k]["exposed_s"] * 1e3 for k in ("predicted", "compiled"))
        ratio = f"{said / seen:.2f}" if seen else ""
        workloads.row(name, expert, f"{said:.3f}", f"{seen:.3f}", ratio)
    by_case = itertools.groupby(rows, key=lambda row: row["case"].split(" ", 1)[0])
    found = [pair for _, group in by_case for pair in pairs(list(group))]
    wrong = [pair for pair in found if not pair[2]]
    for one, other, _ in wrong:
        print(f"wrong: {one} and {other}")
    print(f"{len(wrong)} of {len(found)} pairs are in the wrong order.")


def main() -> int:
    """Compiles the plans that are not in the file, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", compiled.MOST_CPUS)
    known = compiled.held(options.out)
    for case in compiled.cases(list(options.cases)):
        analysis = case.analysis()
        for name, plan in plans(case, analysis, options.seconds):
            key = f"{case.name} {name}"
            if key in known:
                continue
            try:
                row = {**compiled.compiled(case, analysis, plan), "case": key}
            except AutoparError as error:
                row = {"case": key, "error": str(error)}
            known[key] = row
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    report([row for row in known.values() if "error" not in row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
