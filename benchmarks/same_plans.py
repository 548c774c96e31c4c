"""Checks whether two checkouts make the same plans of every example.

    python benchmarks/same_plans.py OLD [NEW] [--examples gpt,moe] [--clusters 8:cpu]

Every example is planned on six clusters, in a separate process for each checkout,
without a time limit. A plan then depends only on its step and cluster. All decisions
and predictions of the plans are compared; times, versions, schemas and fingerprints are
not. The command prints one row for each example and cluster, with any differences. NEW
is this checkout by default. OLD and NEW may also be files that ``--save FILE`` has
written. ``--limit`` gives the solver a time limit in seconds; plans may then differ
within the gap.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTERS = ("8:cpu", "2x4:cpu", "8:h100", "4x8:h100", "2x4x4:a100", "4x4:v5e")
# Options that make the examples small enough for the solver to prove optimality, with
# the structure of the whole example.
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2},
    "gpt-scan": {"layers": 2},
    "gpt-nnx": {"layers": 2},
    "llama": {"layers": 2},
    "vit": {"layers": 2},
    "resnet": {},
    "moe": {"layers": 2},
    "lstm": {},
}
# Code that runs in both checkouts: it uses only the public API and
# benchmarks/workloads.py.
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1] + "/benchmarks")
import workloads, autopar
name, options, clusters, limit = json.loads(sys.argv[2])
step, args = workloads.arguments(name, **options)
for text in clusters:
    try:
        cluster = autopar.Cluster.parse(text)
        plan = autopar.plan(step, *args, cluster=cluster, seconds=limit)
        found = plan.to_json()
    except ValueError as error:
        found = {"error": str(error)}
    print("PLAN" + json.dumps([text, found]), flush=True)
"""
# Example and cluster -> plan.
Plans = dict[str, dict[str, Any]]
DECIDED = ("mesh", "inputs", "outputs", "nodes", "copies", "gradients")
KEPT = ("predicted", "roles", "unsupported_ops", "assumed", "shapes", "compression")


def planned(
    root: pathlib.Path, name: str, clusters: Sequence[str], limit: float | None
) -> Plans:
    """The plans, or errors, of a checkout for an example on each cluster."""
    folders = [root, root / "solver", root / "passes"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_PLATFORMS": "cpu",
    }
    request = json.dumps([name, OPTIONS[name], list(clusters), limit])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(root), request],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    out: Plans = {}
    for line in done.stdout.splitlines():
        if line.startswith("PLAN"):
            text, plan = json.loads(line.removeprefix("PLAN"))
            out[f"{name} {text}"] = plan if "error" in plan else normalised(plan)
    lines = done.stderr.strip().splitlines()
    why = lines[-1] if lines else f"exit {done.returncode}"
    for text in clusters:
        out.setdefault(f"{name} {text}", {"error": why})
    return out


def plans_of(
    source: pathlib.Path, name: str, clusters: Sequence[str], limit: float | None
) -> Plans:
    """The plans of a checkout, or the plans in a file."""
    if source.is_file():
        return json.loads(source.read_text())
    return planned(source.resolve(), name, clusters, limit)


def normalised(plan: dict[str, Any]) -> dict[str, Any]:
    """The compared parts of a plan (decisions and predictions), for either schema."""
    stage = plan["stages"][0] if "stages" in plan else plan
    out = {key: stage[key] for key in DECIDED} | {key: plan[key] for key in KEPT}
    for given in (out["nodes"], out["gradients"]):
        for decision in given:
            decision.pop("index", None)
    solver = {key: plan["solver"][key] for key in ("status", "cost", "meshes")}
    return out | {"solver": solver}


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The paths at which two trees of JSON differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{path}/{key}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for k, (a, b) in enumerate(zip(old, new, strict=True))
            for line in differences(a, b, f"{path}[{k}]")
        ]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


def main() -> None:
    """Compares the plans; exits with 1 if any differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path, nargs="?", default=ROOT)
    parser.add_argument("--examples", default=",".join(OPTIONS))
    parser.add_argument("--clusters", default=" ".join(CLUSTERS))
    parser.add_argument("--limit", type=float, default=None)
    parser.add_argument("--lines", type=int, default=6, help="of each difference")
    parser.add_argument("--save", type=pathlib.Path, help="writes the plans of NEW")
    chosen = parser.parse_args()
    clusters = chosen.clusters.split()
    different, kept = 0, Plans()
    for name in chosen.examples.split(","):
        old, new = (
            plans_of(source, name, clusters, chosen.limit)
            for source in (chosen.old, chosen.new)
        )
        for text in clusters:
            key = f"{name} {text}"
            kept[key] = new[key]
            different += compared(key, old[key], new[key], chosen.lines)
        if chosen.save:
            chosen.save.write_text(json.dumps(kept))
    sys.exit(bool(different))


def compared(key: str, old: Any, new: Any, lines: int) -> bool:
    """Prints one row; returns whether two plans differ."""
    found = differences(old, new)
    times = [p.get("predicted", {}).get("step_s", 0.0) for p in (old, new)]
    what = old.get("error", "the same") if not found else f"{len(found)} differ"
    print(
        f"{key:24} {times[0] * 1e3:9.4g} ms {times[1] * 1e3:9.4g} ms  {what}",
        flush=True,
    )
    for line in found[:lines]:
        print(f"    {line[:200]}", flush=True)
    return bool(found)


if __name__ == "__main__":
    main()
