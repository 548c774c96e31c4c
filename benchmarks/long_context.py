"""Plans for long sequences with Llama 8B: parts of a step and utilisation.

    python benchmarks/long_context.py [--only TEXT] [--seconds 10] [--json FILE]

Each row is a step: a sequence length, the rows of the batch, a cluster, and attention:
cuDNN's, or "plain", which the step writes out as products with a softmax. The planner
decides everything else. For each row there is also one with
sequences of 8,192 tokens and as many tokens on the same cluster, for comparison:
"ratio" is MFU, with causal attention at half, divided by that of this row. The table
also has the plans that people write for long sequences (`autopar
compare`). Two layers of the models with longer sequences are also planned and compiled
without devices, and the memory and the bytes of the compiled program are compared with
the prediction: once with the memory of the device as the compiler's limit, and once
with the predicted memory. Writes the figures to ``docs/data/long_context.json`` and
prints a table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import time
from typing import Any

import decoder
import large
import msgspec
import workloads

import autopar
from autopar.errors import PlanError
from autopar.planner.experts import expert_plans
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.plans import AS_WRITTEN, ClusterData
from autopar.steps.analysis import Analysis, analyse

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "long_context.json"
# Tokens of a row in the steps for comparison.
SHORT = 8_192
# Tokens of a row, rows, cluster, rematerialisation, and attention. Rows of equal steps
# follow each other, because a step is traced once for all of them.
ROWS = (
    (8_192, 16, "8x8:h100", "full", "cudnn"),
    (8_192, 16, "16x8:h100", "full", "cudnn"),
    (8_192, 16, "8:h100", "full", "cudnn"),
    (131_072, 1, "8x8:h100", "full", "cudnn"),
    (131_072, 1, "16x8:h100", "full", "cudnn"),
    (131_072, 1, "8:h100", "full", "cudnn"),
    (8_192, 64, "8x8:h100", "full", "cudnn"),
    (131_072, 4, "8x8:h100", "full", "cudnn"),
    (8_192, 512, "8x8:h100", "full", "cudnn"),
    (8_192, 512, "16x8:h100", "full", "cudnn"),
    (1_048_576, 4, "8x8:h100", "full", "cudnn"),
    (1_048_576, 4, "16x8:h100", "full", "cudnn"),
    (8_192, 16, "8x8:h100", "none", "cudnn"),
    (131_072, 1, "8x8:h100", "none", "cudnn"),
    (8_192, 16, "8x8:h100", "full", "plain"),
    (8_192, 16, "16x8:h100", "full", "plain"),
    (131_072, 1, "8x8:h100", "full", "plain"),
    (131_072, 1, "16x8:h100", "full", "plain"),
    (8_192, 512, "8x8:h100", "full", "plain"),
    (8_192, 512, "16x8:h100", "full", "plain"),
    (1_048_576, 4, "8x8:h100", "full", "plain"),
    (1_048_576, 4, "16x8:h100", "full", "plain"),
)


def step_of(
    sequence: int, batch: int, remat: str, attention: str, **changes: int
) -> tuple[Any, Any]:
    """A step of Llama 8B with changed fields, and its arguments."""
    run = decoder.Run(
        sequence=sequence,
        batch=batch,
        dtype="bfloat16",
        remat=remat,
        attention=attention,
    )
    model = dataclasses.replace(large.LANGUAGE["llama-8b"].model, **changes)
    return decoder.train_step(model, run)


@functools.lru_cache(maxsize=1)
def analysed(sequence: int, batch: int, remat: str, attention: str) -> Analysis:
    """A step with its analysis."""
    return analyse(*step_of(sequence, batch, remat, attention))


def compiled(*row: Any, cluster: str, seconds: float) -> dict[str, Any]:
    """Memory and bytes of two layers, predicted and compiled without devices."""
    step, args = step_of(*row, layers=2)
    plan = autopar.plan(
        step, *args, cluster=cluster, seconds=seconds, stages=1, compile_check=False
    )
    device = autopar.Cluster.parse(cluster).device.name
    stage = autopar.audit(step, *args, plan=plan, target=device).stages[0]
    if stage.target is None:
        return {"refused": f"the compiler for {device} is not installed"}
    # The compiler starts gathers early as long as the memory of the device lasts. So
    # the step is also compiled for devices that have only the predicted memory.
    megabytes = math.ceil(stage.target.predicted_memory_bytes / 1e6) + 1
    little = f"{cluster},memory={megabytes}MB"
    limited = msgspec.structs.replace(
        plan, cluster=ClusterData.of(autopar.Cluster.parse(little))
    )
    again = autopar.audit(step, *args, plan=limited, target=device).stages[0]
    assert again.target is not None
    return {
        "microbatches": plan.microbatches,
        "memory_bytes": stage.target.predicted_memory_bytes,
        "compiled_memory_bytes": stage.target.memory.peak_bytes,
        "limited_memory_bytes": again.target.memory.peak_bytes,
        "bytes": sum(stage.predicted.values()),
        "compiled_bytes": sum(stage.target.bytes_by_kind.values()),
    }


def figures(
    sequence: int, batch: int, cluster: str, remat: str, attention: str, seconds: float
) -> dict[str, Any]:
    """The figures of one row."""
    found: dict[str, Any] = {
        "sequence": sequence, "rows": batch, "cluster": cluster, "remat": remat,
        "attention": attention, "commit": workloads.commit(),
    }  # fmt: skip
    begin = time.process_time()
    analysis = analysed(sequence, batch, remat, attention)
    where = autopar.Cluster.parse(cluster)
    options = PlanOptions(seconds=seconds, compile_check=False)
    try:
        plan = plan_analysis(analysis, where, options)
    except PlanError as error:
        return found | {"refused": str(error).split("\n", 1)[0]}
    worth = plan.worth
    assert worth is not None
    found |= {
        "cpu_s": round(time.process_time() - begin, 1),
        "mesh": list(plan.axis_sizes),
        "microbatches": plan.microbatches,
        "step_s": plan.predicted.step_s,
        "mfu": worth.mfu,
        "causal_mfu": worth.causal_mfu,
        "tokens_per_s": worth.tokens_per_s,
        "most_repeated": max((axis.repeated for axis in worth.axes), default=0.0),
        "memory_bytes": plan.predicted.peak_memory_bytes,
        "scheme": worth.scheme,
        "attention_kernel": plan.attention_kernel,
        "decided": list(plan.decided),
        "kept": plan.remat.level if plan.remat != AS_WRITTEN else "",
    }
    if sequence > SHORT:
        row = sequence, batch, remat, attention
        found["two_layers"] = compiled(*row, cluster=cluster, seconds=seconds)
    by_hand = {
        f"{expert.name} on {expert.mesh}": expert.candidate.step_s
        for expert in expert_plans(analysis, where, seconds=3)
        if expert.candidate is not None
    }
    if by_hand:
        name = min(by_hand, key=lambda n: by_hand[n])
        found |= {"best_by_hand": name, "best_by_hand_s": by_hand[name]}
    return found


def _same_tokens(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row has in common with the row to compare it with."""
    names = ("cluster", "remat", "attention")
    return row["sequence"] * row["rows"], *(row[name] for name in names)


def table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    workloads.row(
        *("tokens", "rows", "cluster", "again", "attention", "mesh", "step s", "MFU %"),
        *("causal half %", "ratio", "repeats %", "GB", "best by hand s", "scheme"),
    )
    workloads.row(*["---"] * 14)
    short = {
        _same_tokens(r): r["causal_mfu"]
        for r in rows
        if r["sequence"] == SHORT and "causal_mfu" in r
    }
    for r in rows:
        first = (
            f"{r['sequence']:,}",
            r["rows"],
            r["cluster"],
            r["remat"],
            r["attention"],
        )
        if "refused" in r:
            workloads.row(*first, *[""] * 8, r["refused"])
            continue
        base = short.get(_same_tokens(r))
        workloads.row(
            *first,
            "x".join(map(str, r["mesh"])),
            f"{r['step_s']:.3f}",
            f"{100 * r['mfu']:.1f}",
            f"{100 * r['causal_mfu']:.1f}",
            "" if base is None else f"{r['causal_mfu'] / base:.2f}",
            f"{100 * r['most_repeated']:.1f}",
            f"{r['memory_bytes'] / 1e9:.1f}",
            f"{r['best_by_hand_s']:.3f}" if "best_by_hand_s" in r else "none fits",
            r["scheme"],
        )


if __name__ == "__main__":
    workloads.measure_rows(__doc__, ROWS, figures, table, DATA)
