"""Predicted steps under Muon and under AdamW.

    python benchmarks/matrix_optimizers.py [--only TEXT] [--seconds 10] [--json FILE]

Each row is a Llama on a cluster. It is planned with one stage in three ways: under
AdamW, under Muon for the matrices of its layers, and under Muon with a separate update
of each matrix, as the step is written. The bytes of the second plan are compared with
those of the program that Shardy partitions. Writes the figures to
``docs/data/matrix_optimizers.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

import decoder
import workloads

import autopar
from autopar.planner.search import search
from autopar.steps.analysis import analyse

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "matrix_optimizers.json"
NARROW = decoder.Decoder(
    family="llama", layers=32, d_model=2048, heads=16, kv_heads=16, head_dim=128,
    ffn=8192, vocab=32000,
)  # fmt: skip
GROUPED = dataclasses.replace(NARROW, d_model=4096, heads=32, kv_heads=8, ffn=14336)
SHORT = dataclasses.replace(
    NARROW, layers=12, d_model=1024, heads=8, kv_heads=8, ffn=4096
)
# Name -> model, number of rows of 2,048 tokens, and cluster.
ROWS = {
    "32 x 2048, 8x8:h100": (NARROW, 128, "8x8:h100"),
    "32 x 2048, 4x8:a100": (NARROW, 128, "4x8:a100"),
    "32 x 2048, 4x4x4:v5p": (NARROW, 128, "4x4x4:v5p"),
    "32 x 4096, 8x8:h100": (GROUPED, 128, "8x8:h100"),
    "32 x 4096, 16x8:h100": (GROUPED, 256, "16x8:h100"),
    "12 x 1024, 8:h100": (SHORT, 64, "8:h100"),
}


def figures(name: str, seconds: float) -> dict[str, Any]:
    """The figures of one row."""
    model, rows, text = ROWS[name]
    cluster = autopar.Cluster.parse(text)
    run = decoder.Run(
        sequence=2048, batch=rows, dtype="bfloat16", remat="full",
        attention="pallas" if "v5p" in text else "cudnn",
    )  # fmt: skip
    found: dict[str, Any] = {"case": name}
    for optimizer in decoder.OPTIMIZERS:
        own = dataclasses.replace(run, optimizer=optimizer)
        step, args = decoder.train_step(model, own)
        begin = time.process_time()
        plan = autopar.plan(
            step, *args, cluster=cluster, stages=1, microbatches=1, seconds=seconds
        )
        found[optimizer] = {
            "step_s": plan.predicted.step_s,
            "peak_bytes": plan.predicted.peak_memory_bytes,
            "cpu_s": round(time.process_time() - begin, 1),
        }
    audit = autopar.audit(step, *args, plan=plan)
    found["bytes"] = plan.predicted.communication_bytes
    found["shardy_bytes"] = sum(audit.shardy.values())
    alone = search(analyse(step, args), cluster, seconds=seconds).best
    found["alone"] = {"step_s": alone.step_s, "peak_bytes": alone.peak_memory_bytes}
    return found


def table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    workloads.row(
        "case", "AdamW ms", "Muon ms", "Muon / AdamW", "each matrix alone ms",
        "its / AdamW", "GB", "alone GB", "bytes / Shardy",
    )  # fmt: skip
    workloads.row(*["---"] * 9)
    for row in rows:
        least, muon, alone = (row[k]["step_s"] for k in ("adamw", "muon", "alone"))
        workloads.row(
            row["case"],
            f"{1e3 * least:.1f}",
            f"{1e3 * muon:.1f}",
            f"{muon / least:.3f}",
            f"{1e3 * alone:.1f}",
            f"{alone / least:.2f}",
            f"{row['muon']['peak_bytes'] / 1e9:.1f}",
            f"{row['alone']['peak_bytes'] / 1e9:.1f}",
            f"{row['bytes'] / row['shardy_bytes']:.3f}",
        )


def main() -> None:
    """Plans the rows, and writes and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the rows' names")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=pathlib.Path, default=DATA)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ROWS:
        if options.only in name:
            rows.append(figures(name, options.seconds))
            print(json.dumps(rows[-1]), flush=True)
    if not options.only:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table(rows)


if __name__ == "__main__":
    main()
