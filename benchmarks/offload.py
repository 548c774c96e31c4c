"""Models whose optimizer state does not fit into the memory of their devices.

    python benchmarks/offload.py [--only TEXT] [--seconds 10] [--json FILE]

Each row is a model with AdamW in float32 and one loop over its layers, on a cluster of
small GPUs. Everything is decided by the planner. Beside the predicted step stands that
of the fastest plan for the same devices with unlimited memory. XLA compiles the plan
for the GPUs, which need not be there (``pip install 'autopar[gpu-compiler]'``), and the
row holds the memory of the compiled program. Writes docs/data/offload.json and prints a
table.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

import decoder
import large
import memory
import memory_steps
import workloads

import autopar
from autopar.errors import PlanError
from autopar.steps.analysis import analyse

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "offload.json"
MODELS = {
    "Llama 8B": large.LANGUAGE["llama-8b"].model,
    "Llama 13B": decoder.Decoder(
        family="llama",
        layers=40,
        d_model=5120,
        heads=40,
        kv_heads=40,
        head_dim=128,
        ffn=13824,
        vocab=32000,
    ),
}
# Model, cluster, tokens of a row, and rows of a step.
ROWS = (
    ("Llama 8B", "4:l4", 2048, 16),
    ("Llama 13B", "8:l4", 2048, 64),
    ("Llama 8B", "4:rtx4090", 2048, 16),
    ("Llama 13B", "8:rtx4090", 2048, 64),
    ("Llama 8B", "4:a100,memory=24GB", 2048, 16),
    ("Llama 13B", "8:a100,memory=24GB", 2048, 64),
)
_NO_LIMIT = "memory=100TB"


def figures(
    model: str, cluster: str, sequence: int, batch: int, seconds: float
) -> dict[str, Any]:
    """The figures of one row."""
    run = decoder.Run(
        sequence=sequence,
        batch=batch,
        dtype="bfloat16",
        remat="full",
        attention="cudnn",
    )
    step, args = memory_steps.scanned_decoder(MODELS[model], run)
    found: dict[str, Any] = {
        "model": model, "cluster": cluster, "sequence": sequence, "rows": batch,
    }  # fmt: skip
    name = cluster.partition(",")[0]
    free = autopar.plan(
        step,
        *args,
        cluster=f"{name},{_NO_LIMIT}",
        seconds=seconds,
        offload="none",
        compile_check=False,
    )
    found["free_step_s"] = free.predicted.step_s
    begin = time.process_time()
    try:
        plan = autopar.plan(step, *args, cluster=cluster, seconds=seconds)
    except PlanError as error:
        return found | {"refused": str(error).split("\n", 1)[0]}
    limit = autopar.Cluster.parse(cluster)
    compiled = plan.compiled_memory_bytes or memory.compiled_bytes(
        memory.Case(model, cluster), analyse(step, args), plan, limit
    )
    return found | {
        "cpu_s": round(time.process_time() - begin, 1),
        "mesh": list(plan.axis_sizes),
        "microbatches": plan.microbatches,
        "offloaded": len(plan.offload),
        "step_s": plan.predicted.step_s,
        "ratio": plan.predicted.step_s / free.predicted.step_s,
        "limit_bytes": limit.memory_bytes,
        "memory_bytes": plan.predicted.peak_memory_bytes,
        "compiled_bytes": compiled,
    }


def table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    workloads.row(
        *("model", "cluster", "rows", "mesh", "microbatches", "arrays on hosts"),
        *("step s", "of that without a limit", "GB", "compiled GB", "limit GB"),
    )
    workloads.row(*["---"] * 11)
    for r in rows:
        first = (r["model"], r["cluster"], r["rows"])
        if "refused" in r:
            workloads.row(*first, *[""] * 7, r["refused"])
            continue
        workloads.row(
            *first,
            "x".join(map(str, r["mesh"])),
            r["microbatches"],
            r["offloaded"],
            f"{r['step_s']:.2f}",
            f"{r['ratio']:.2f}",
            f"{r['memory_bytes'] / 1e9:.1f}",
            f"{r['compiled_bytes'] / 1e9:.1f}",
            f"{r['limit_bytes'] / 1e9:.1f}",
        )


if __name__ == "__main__":
    workloads.measure_rows(__doc__, ROWS, figures, table, DATA)
