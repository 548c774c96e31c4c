"""Time from a train step to its plan, each measured in a new process.

    python benchmarks/planning_time.py [--profile FILE] [case ...]

Prints seconds of tracing, of the graph and of solving, the solver's gap, and the peak
memory of the process. CPU seconds are those of the process, so other load of the
machine hardly matters. ``--profile`` writes a profile for `pstats`.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import resource
import subprocess
import sys
import time
from typing import Any

import unet
import workloads

GPT12 = {
    "layers": 12, "d_model": 768, "heads": 12, "seq": 1024, "batch": 512,
    "vocab": 50304,
}  # fmt: skip
LLAMA8B = {
    "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336,
    "vocab": 128256, "seq": 4096, "batch": 64, "remat": True, "dtype": "bfloat16",
}  # fmt: skip
GPT3 = {
    "layers": 96, "d_model": 12288, "heads": 96, "seq": 2048, "batch": 1024,
    "vocab": 51200, "remat": True, "dtype": "bfloat16",
}  # fmt: skip
UNET = {"batch": 64, "size": 32, "widths": (128, 256, 512)}
# Name -> (example, options, cluster, limit in seconds).
CASES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "GPT 12 layers, 8x8": ("gpt", GPT12, "8x8:h100", 3),
    "Llama 8B, 32 layers, 8x8": ("llama", LLAMA8B, "8x8:h100", 8),
    "GPT-3 175B, 96 layers, 128x8": ("gpt", GPT3, "128x8:h100", 25),
    "GPT 12 layers, 2x4x4": ("gpt", GPT12, "2x4x4:h100", 10),
    "U-Net, 3 levels, 2x4": ("unet", UNET, "2x4:h100", 20),
}


def measure(name: str, profile: cProfile.Profile | None) -> dict[str, object]:
    """Plans one case in this process."""
    example, options, spec, _ = CASES[name]
    start = time.perf_counter()
    from autopar.cluster import Cluster
    from autopar.planner.plan import plan_analysis
    from autopar.steps.analysis import analyse

    if example == "unet":
        step, args = unet.train_step(**options)
    else:
        step, args = workloads.arguments(example, **options)
    imported, spent = time.perf_counter() - start, time.process_time()
    with profile or contextlib.nullcontext():
        analysis = analyse(step, args)
        plan = plan_analysis(analysis, Cluster.parse(spec))
    total = time.perf_counter() - start
    return {
        "cpu_s": time.process_time() - spent,
        "import_s": imported,
        "trace_s": plan.seconds.trace,
        "graph_s": plan.seconds.graph,
        "solve_s": plan.seconds.solve,
        "total_s": total,
        "plan_s": total - imported,
        "gap": plan.solver.gap,
        "status": plan.solver.status,
        "step_ms": plan.predicted.step_s * 1e3,
        "rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case")
    parser.add_argument("--profile", help="where the CPU time went, of one case")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    names = [n for n in CASES if not chosen.cases or n in chosen.cases]
    if chosen.one or chosen.profile:
        profile = cProfile.Profile() if chosen.profile else None
        print(json.dumps(measure(names[0], profile)))
        if profile is not None:
            profile.dump_stats(chosen.profile)
        return
    workloads.row(
        "case", "bar s", "trace to plan s", "CPU s", "trace", "graph", "solve",
        "imports and shapes", "gap", "status", "step ms", "RSS GB",
    )  # fmt: skip
    workloads.row(*["---"] * 12)
    for name in names:
        run = subprocess.run(
            [sys.executable, __file__, "--one", name],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(run.stdout.strip().split("\n")[-1])
        workloads.row(
            name, CASES[name][3], f"{found['plan_s']:.1f}", f"{found['cpu_s']:.1f}",
            f"{found['trace_s']:.1f}", f"{found['graph_s']:.1f}",
            f"{found['solve_s']:.1f}", f"{found['import_s']:.1f}",
            f"{found['gap']:.1e}", found["status"], f"{found['step_ms']:.5g}",
            f"{found['rss_gb']:.2f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
