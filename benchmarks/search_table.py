"""Plans about fifty cases with one checkout, or compares two checkouts.

    python benchmarks/search_table.py run [--checkout DIR] [--only TEXT] [--decide]
        [--save FOLDER] [--judge FOLDER] --out FILE
    python benchmarks/search_table.py compare OLD NEW [--judged FILE] [--json FILE]

Each case is planned in a separate process. The file gets the predicted time of a step,
the gap and the status, the scheme and the mesh, and CPU seconds from the step to the
plan. With ``--decide`` the planner also chooses stages, microbatches and
rematerialisation. ``--save`` stores the plans. ``--judge`` does not search, but prices
stored plans, which may be those of another checkout. So the plans of two checkouts can
be compared under one cost model. Cases named ``tight`` have about 1.05 times the least
memory for which a plan was found. ``compare`` prints one row per case. Its exit code is
1 if a new plan is slower by more than half a percent, or took more than half of the old
CPU seconds. ``--judged`` gives the file with the prices of old plans. A search that was
stopped counts with the seconds of its limit. ``--json`` writes the rows to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from typing import Any

from planning_time import GPT12, UNET

ROOT = pathlib.Path(__file__).resolve().parent.parent
LLAMA4 = {
    "layers": 4, "d_model": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336,
    "vocab": 32000, "seq": 4096, "batch": 32, "dtype": "bfloat16",
}  # fmt: skip
GPT13B = {
    "layers": 40, "d_model": 5120, "heads": 40, "seq": 2048, "batch": 256,
    "vocab": 50304, "remat": True, "dtype": "bfloat16",
}  # fmt: skip
# Name -> (example, options, cluster); names with `large:` are models of `large.py`.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        f"{name} {shape}": (name, {"batch": rows}, f"{shape}:h100")
        for shape, rows in (("2x4", 32), ("4x8", 32), ("8x8", 64))
        for name in (
            "gpt", "gpt-scan", "gpt-nnx", "llama", "vit", "resnet", "moe", "lstm",
            "recommendation",
        )
    },
    "unet 2x4": ("unet", UNET, "2x4:h100"),
    "gpt12 8x8": ("gpt", GPT12, "8x8:h100"),
    "gpt12 2x4x4": ("gpt", GPT12, "2x4x4:h100"),
    "gpt12 a100 50": ("gpt", GPT12, "8x8:a100,network=50Gb/s"),
    "gpt12 a100 10": ("gpt", GPT12, "8x8:a100,network=10Gb/s"),
    "gpt12 v5e": ("gpt", GPT12, "16x16:v5e"),
    "gpt12 v5p": ("gpt", GPT12, "4x4x4:v5p"),
    "gpt12 tight": ("gpt", GPT12, "8x8:h100,memory=22.7GB"),
    "llama4 v5p": ("llama", LLAMA4, "4x4x4:v5p"),
    "llama4 a100 10": ("llama", LLAMA4, "8x8:a100,network=10Gb/s"),
    "1.3b 8x8": ("large:gpt-1.3b", {}, "8x8:h100"),
    "1.3b tight": ("large:gpt-1.3b", {}, "8x8:h100,memory=9GB"),
    "1.3b a100 50": ("large:gpt-1.3b", {}, "8x8:a100,network=50Gb/s"),
    "1.3b v5e": ("large:gpt-1.3b", {}, "16x16:v5e"),
    "8b 8x8": ("large:llama-8b", {}, "8x8:h100"),
    "8b v5p": ("large:llama-8b", {}, "4x4x4:v5p"),
    "70b 32x8": ("large:llama-70b", {}, "32x8:h100"),
    "175b 32x8": ("large:gpt-175b", {}, "32x8:h100"),
    "mixtral 8x8": ("large:mixtral", {}, "8x8:h100"),
    "mixtral v5p": ("large:mixtral", {}, "4x4x4:v5p"),
    "moe tight": ("moe", {"batch": 32}, "4x8:h100,memory=60MB"),
    "vit-h 8x8": ("large:vit-h", {}, "8x8:h100"),
    "unet large": ("large:unet", {}, "8x8:h100"),
    "13b mixed": ("gpt", GPT13B, "4x8:h100+4x8:a100"),
}  # fmt: skip
DECIDED = {"stages": "auto", "microbatches": "auto", "remat": "auto"}
CHILD = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import workloads, large, unet, autopar
example, options, text, decided, save, judge = json.loads(sys.argv[2])
cluster = autopar.Cluster.parse(text)
if example.startswith("large:"):
    step, args = large.CASES[example[6:]](cluster)
elif example == "unet":
    step, args = unet.train_step(**{**options, "widths": tuple(options["widths"])})
else:
    step, args = workloads.arguments(example, **options)
begin, wall = time.process_time(), time.perf_counter()
if judge:
    decided = {"layouts": judge}
plan = autopar.plan(step, *args, cluster=cluster, **decided)
if save:
    plan.save(save)
found = {
    "step_s": plan.predicted.step_s,
    "peak_bytes": plan.predicted.peak_memory_bytes,
    "gap": plan.solver.gap, "status": plan.solver.status,
    "stages": len(plan.stages), "microbatches": plan.microbatches,
    "cpu_s": time.process_time() - begin, "wall_s": time.perf_counter() - wall,
    "scheme": plan.worth.scheme if plan.worth else "",
    "mesh": {
        k: dict(zip(s.axis_names, s.axis_sizes)) for k, s in enumerate(plan.stages)
    },
}
print("FOUND" + json.dumps(found), flush=True)
"""


def main() -> int:
    """Plans the cases, or compares two files of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--checkout", type=pathlib.Path, default=ROOT)
    run.add_argument("--only", default="")
    run.add_argument("--decide", action="store_true", help="stages and all else")
    run.add_argument("--limit", type=float, default=500.0, help="seconds of a case")
    run.add_argument("--save", type=pathlib.Path, help="folder for the plans")
    run.add_argument("--judge", type=pathlib.Path, help="folder of plans to price")
    run.add_argument("--out", type=pathlib.Path, required=True)
    beside = commands.add_parser("compare")
    beside.add_argument("old", type=pathlib.Path)
    beside.add_argument("new", type=pathlib.Path)
    beside.add_argument("--judged", type=pathlib.Path, help="old plans, priced anew")
    beside.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "compare":
        old, new = (json.loads(p.read_text()) for p in (options.old, options.new))
        judged = json.loads(options.judged.read_text()) if options.judged else {}
        return compared(
            {k: _judged(old[k], judged.get(k)) for k in old}, new, options.json
        )
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in CASES:
        if options.only in name:
            known[name] = planned(name, options)
            print(name, json.dumps(known[name]), flush=True)
            options.out.write_text(json.dumps(known, indent=1) + "\n")
    return 0


def planned(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Plans a case in a separate process."""
    checkout, limit_s = asked.checkout.resolve(), asked.limit
    file = f"{name.replace(' ', '-')}.json"
    save, judge = (f and str(f.resolve() / file) for f in (asked.save, asked.judge))
    if judge and not pathlib.Path(judge).exists():
        return {"error": "no plan was kept"}
    decided = DECIDED if asked.decide else {}
    case = json.dumps((*CASES[name], decided, save, judge))
    places = (checkout, checkout / "passes", checkout / "solver")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    here = str(pathlib.Path(__file__).parent)
    begin = time.perf_counter()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", CHILD, here, case],
            cwd=checkout, env=env, capture_output=True, text=True, timeout=limit_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not within {limit_s:g} s"}
    for line in ran.stdout.splitlines():
        if line.startswith("FOUND"):
            return json.loads(line[5:])
    why = (ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"])[-1][:300]
    return {"error": why, "wall_s": time.perf_counter() - begin}


def _judged(old: dict[str, Any], judged: dict[str, Any] | None) -> dict[str, Any]:
    """An old case, with the predicted step of its plan under the other cost model.

    A search that was stopped has the seconds of its limit.
    """
    found = dict(old)
    if stopped := re.match(r"not within (\d+) s", old.get("error", "")):
        found |= {"cpu_s": float(stopped[1]), "stopped": True}
    if judged is not None:
        found.pop("step_s", None)
        found |= {k: judged[k] for k in ("step_s", "scheme", "mesh") if k in judged}
    return found


def compared(
    old: dict[str, Any], new: dict[str, Any], file: pathlib.Path | None
) -> int:
    """Prints the rows of both files; returns 1 if a bar is missed."""
    rows: list[dict[str, Any]] = []
    print("| case | old ms | new ms | new / old | old CPU s | new CPU s | new gap |")
    print("| --- " * 7 + "|")
    ratios: list[float] = []
    missed = 0
    for name in CASES:
        a, b = old.get(name, {}), new.get(name, {})
        kept = ("step_s", "cpu_s", "gap", "status", "scheme", "mesh", "stopped")
        sides = (("old", a), ("new", b))
        row = {f"{s}_{k}": found[k] for s, found in sides for k in kept if k in found}
        rows.append({"case": name, **row})
        ratio = b["step_s"] / a["step_s"] if "step_s" in a and "step_s" in b else None
        cpu = b["cpu_s"] / a["cpu_s"] if "cpu_s" in a and "cpu_s" in b else None
        if cpu is not None:
            ratios.append(cpu)
        bad = (ratio or 0.0) > 1.005 or (cpu or 0.0) > 0.5
        missed += bad
        cells = (
            name + " *" * bad,
            _short(a),
            _short(b),
            "" if ratio is None else f"{ratio:.4f}",
            _seconds(a),
            _seconds(b),
            f"{b['gap']:.3f}" if "gap" in b else "",
        )
        print(f"| {' | '.join(cells)} |")
    if file is not None:
        file.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    if ratios:
        print(f"\nmedian of CPU seconds, new / old: {statistics.median(ratios):.2f}")
    return int(missed > 0)


def _seconds(found: dict[str, Any]) -> str:
    if "cpu_s" not in found:
        return ""
    return f"{'over ' * bool(found.get('stopped'))}{found['cpu_s']:.1f}"


def _short(found: dict[str, Any]) -> str:
    seconds = found.get("step_s")
    return f"{seconds * 1e3:.4g}" if seconds else ""


if __name__ == "__main__":
    sys.exit(main())
