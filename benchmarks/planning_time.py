"""Time from a train step to its plan, all in, each in a fresh process.

    python benchmarks/planning_time.py [case ...]

Prints seconds of tracing, graph and solving, the solver's gap, and the most
memory the process held.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

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
# Name -> (example, options, cluster, bar in seconds).
CASES = {
    "GPT 12 layers, 8x8": ("gpt", GPT12, "8x8:h100", 5),
    "Llama 8B, 32 layers, 8x8": ("llama", LLAMA8B, "8x8:h100", 10),
    "GPT-3 175B, 96 layers, 128x8": ("gpt", GPT3, "128x8:h100", 30),
    "GPT 12 layers, 2x4x4": ("gpt", GPT12, "2x4x4:h100", 20),
}


def measure(name: str) -> dict[str, object]:
    """Plans one case in this process."""
    example, options, spec, _ = CASES[name]
    start = time.perf_counter()
    from autopar.cluster import Cluster
    from autopar.planner.plan import plan_analysis
    from autopar.steps.analysis import analyse

    step, args = workloads.arguments(example, **options)
    imported = time.perf_counter() - start
    analysis = analyse(step, args)
    plan = plan_analysis(analysis, Cluster.parse(spec))
    total = time.perf_counter() - start
    return {
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


def main(names: list[str]) -> int:
    """Prints the table."""
    if names[:1] == ["--one"]:
        print(json.dumps(measure(names[1])))
        return 0
    workloads.row(
        "case", "bar s", "trace to plan s", "trace", "graph", "solve",
        "imports and shapes", "gap", "RSS GB",
    )  # fmt: skip
    workloads.row(*["---"] * 9)
    for name in names or CASES:
        run = subprocess.run(
            [sys.executable, __file__, "--one", name],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(run.stdout.strip().split("\n")[-1])
        workloads.row(
            name, CASES[name][3], f"{found['plan_s']:.1f}", f"{found['trace_s']:.1f}",
            f"{found['graph_s']:.1f}", f"{found['solve_s']:.1f}",
            f"{found['import_s']:.1f}",
            f"{found['gap']:.1e}", f"{found['rss_gb']:.2f}",
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
