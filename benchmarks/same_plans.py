"""Whether two checkouts make the same plans of every example.

    python benchmarks/same_plans.py OLD [NEW] [--examples gpt,moe] [--clusters 8:cpu]

Every example is planned on six clusters in a process of its own, without a time limit:
then a plan is determined by its step and cluster. What is compared is everything
that a plan decides and predicts; left out are times, versions, schemas and
fingerprints. Prints one row for each example and cluster, and the difference where
there is one. NEW is this checkout by default. ``--limit`` gives the solver a time
limit in seconds, for problems that take minutes to prove; plans may then differ
within the gap.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTERS = ("8:cpu", "2x4:cpu", "8:h100", "4x8:h100", "2x4x4:a100", "4x4:v5e")
# Small enough to be proved optimal; the structure is that of the whole example.
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
# Runs in either checkout: only the public API and benchmarks/workloads.py are used.
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1] + "/benchmarks")
import workloads, autopar
name, options, cluster, limit = json.loads(sys.argv[2])
step, args = workloads.arguments(name, **options)
plan = autopar.plan(
    step, *args, cluster=autopar.Cluster.parse(cluster), seconds=limit
)
print("PLAN" + json.dumps(plan.to_json()))
"""
DECIDED = ("mesh", "inputs", "outputs", "nodes", "copies", "gradients")
KEPT = ("predicted", "roles", "unsupported_ops", "assumed", "shapes", "compression")


def planned(
    root: pathlib.Path, name: str, cluster: str, limit: float | None
) -> dict[str, Any]:
    """What a checkout plans for an example, or its error."""
    folders = [root, root / "solver", root / "passes"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_PLATFORMS": "cpu",
    }
    request = json.dumps([name, OPTIONS[name], cluster, limit])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(root), request],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("PLAN"):
            return normalised(json.loads(line.removeprefix("PLAN")))
    lines = done.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"exit {done.returncode}"}


def normalised(plan: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a plan: decisions and predictions, of either schema."""
    stage = plan["stages"][0] if "stages" in plan else plan
    out = {key: stage[key] for key in DECIDED} | {key: plan[key] for key in KEPT}
    solver = {key: plan["solver"][key] for key in ("status", "cost", "meshes")}
    return out | {"solver": solver}


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The places where two trees of JSON differ."""
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
    """Compares, and exits with 1 where plans differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path, nargs="?", default=ROOT)
    parser.add_argument("--examples", default=",".join(OPTIONS))
    parser.add_argument("--clusters", default=" ".join(CLUSTERS))
    parser.add_argument("--limit", type=float, default=None)
    parser.add_argument("--lines", type=int, default=6, help="of each difference")
    chosen = parser.parse_args()
    different = 0
    for name in chosen.examples.split(","):
        for cluster in chosen.clusters.split():
            old, new = (
                planned(root.resolve(), name, cluster, chosen.limit)
                for root in (chosen.old, chosen.new)
            )
            found = differences(old, new)
            different += bool(found)
            times = [p.get("predicted", {}).get("step_s", 0.0) for p in (old, new)]
            what = old.get("error", "the same") if not found else f"{len(found)} differ"
            print(
                f"{name:10} {cluster:12} {times[0] * 1e3:9.4g} ms "
                f"{times[1] * 1e3:9.4g} ms  {what}",
                flush=True,
            )
            for line in found[: chosen.lines]:
                print(f"    {line[:200]}", flush=True)
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
