"""Compares predicted memory with XLA's compilers, for steps of many kinds.

    python benchmarks/memory.py --plans FILE [--cases '*@8:h100' ...] [--again]

Plans each step for devices without needing them, compiles the plan for these devices,
and writes one row per case to ``docs/data/memory.json``: bytes of one device, predicted
and compiled. The plans are written to a separate file. Rows that are already in the
data file are skipped; ``--again`` only renews the predictions for the saved plans.
Prints a table. Cases with a GPU or a TPU need the extra ``gpu-compiler`` or
``tpu-compiler``.

Rules and constants of the cost model were not chosen on the cases in `KEPT_OUT`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import memory_steps as steps
import workloads

import autopar
from autopar.api import audit_analysis
from autopar.cost.live import live
from autopar.errors import AutoparError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.record import restore
from autopar.plans import Plan
from autopar.steps.analysis import Analysis, analyse

DATA = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data" / "memory.json"
LEAST, MOST = 0.97, 1.10
Make = Callable[[], steps.Made]
REMAT = {"remat": "full"}


def _of(make: Callable[..., steps.Made], **given: Any) -> Make:
    return functools.partial(make, **given)


# Rules of the cost model were derived from these steps.
READ: Mapping[str, Make] = {
    "gpt-24": _of(steps.plain),
    "gpt-24-remat": _of(steps.plain, **REMAT),
    "gpt-24-dots": _of(steps.plain, remat="dots"),
    "gpt-24-scan": _of(steps.scanned),
    "gpt-24-scan-remat": _of(steps.scanned, **REMAT),
    "lora-12": _of(steps.lora, scan=False),
    "state-space": _of(steps.state_space),
    "graph": _of(steps.graph_network),
    "unet": _of(steps.diffusion, batch=64),
    "vit": _of(
        steps.example, name="vit", d_model=1024, heads=16, size=224, patch=16, batch=256
    ),
    "moe": _of(
        steps.example, name="moe", d_model=1024, heads=16, ffn=4096, seq=512, batch=64
    ),
    "muon": _of(steps.muon),
    "mixer": _of(steps.mixer),
}
# These steps were not examined when rules were derived.
KEPT_OUT: Mapping[str, Make] = {
    "llama-32-remat": _of(steps.plain, family="llama", layers=32, d_model=512, **REMAT),
    "llama-16": _of(steps.plain, family="llama", layers=16),
    "llama-24-scan-remat": _of(steps.scanned, family="llama", **REMAT),
    "lora-scan": _of(steps.lora, scan=True),
    "state-space-wide": _of(steps.state_space, layers=2, d_model=1024, states=16),
    "graph-deep": _of(steps.graph_network, layers=8, width=128),
    "unet-b16-remat": _of(steps.diffusion, batch=128, dtype="bfloat16", remat=True),
    "translation": _of(steps.translation),
    "lstm": _of(
        steps.example, name="lstm", d_model=1024, seq=256, vocab=32000, batch=256
    ),
    "resnet": _of(steps.example, name="resnet", width=64, size=128, batch=256),
}
STEPS: Mapping[str, Make] = {**READ, **KEPT_OUT}
CLUSTERS = ("8:h100", "4x4:v5e", "2x2x4:v5p", "8:cpu,memory=200GB")
MOST_CPUS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A step on a cluster."""

    step: str
    cluster: str

    @property
    def name(self) -> str:
        """Such as ``gpt-24@8:h100``."""
        return f"{self.step}@{self.cluster.split(',')[0]}"

    @property
    def target(self) -> str | None:
        """The accelerator; None on CPUs."""
        name = self.cluster.split(":")[1].split(",")[0]
        return None if name == "cpu" else name


def row_of(case: Case, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """One row of the data; for a known row, only the predictions are renewed."""
    analysis = analyse(*STEPS[case.step]())
    cluster = autopar.Cluster.parse(case.cluster)
    if known is None:
        plan = plan_analysis(analysis, cluster, PlanOptions(seconds=2, stages=1))
        start = time.perf_counter()
        compiled = compiled_bytes(case, analysis, plan, cluster)
        known = {
            "case": case.name,
            "kept_out": case.step in KEPT_OUT,
            "mesh": list(plan.mesh["axes"].values()),
            "compiled_bytes": compiled,
            "compile_s": round(time.perf_counter() - start, 1),
            "plan": plan.to_json(),
        }
    plan = Plan.from_json(json.dumps(known["plan"]))
    predicted = live(restore(analysis, plan), cluster.device).peak_bytes()
    ratio = predicted / known["compiled_bytes"]
    known = {**known, "kept_out": case.step in KEPT_OUT}
    return {**known, "predicted_bytes": round(predicted), "ratio": round(ratio, 4)}


def compiled_bytes(
    case: Case, analysis: Analysis, plan: Plan, cluster: autopar.Cluster
) -> int:
    """Bytes that one device needs, according to the compiler."""
    found = audit_analysis(
        analysis, plan, cluster, compiled=case.target is None, target=case.target
    )
    if found.target is not None:
        return found.target.memory.peak_bytes
    assert found.first_compiled is not None
    return found.first_compiled.peak_memory_bytes


def table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows, and the number of rows within the bar."""
    workloads.row("case", "mesh", "compiled GB", "predicted / compiled", "kept out")
    workloads.row(*["---"] * 5)
    for row in rows:
        mesh = "x".join(map(str, row["mesh"]))
        held, ratio = row["compiled_bytes"] / 1e9, row["ratio"]
        text = f"{ratio:.2f}" if LEAST <= ratio <= MOST else f"**{ratio:.2f}**"
        kept = "yes" if row["kept_out"] else ""
        workloads.row(row["case"], mesh, f"{held:.2f}", text, kept)
    for kept in (False, True):
        own = [r for r in rows if r["kept_out"] is kept]
        inside = sum(LEAST <= r["ratio"] <= MOST for r in own)
        print(
            f"{'kept out' if kept else 'read'}: {inside} of {len(own)} within the bar"
        )


def main() -> None:
    """Adds the rows that are not in the file, and prints all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    parser.add_argument("--plans", type=pathlib.Path, required=True)
    parser.add_argument("--cases", nargs="*", default=["*"])
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MOST_CPUS)
    rows: dict[str, dict[str, Any]] = {}
    if options.plans.is_file():
        found = json.loads(options.plans.read_text(encoding="utf-8"))
        rows = {row["case"]: row for row in found}
    for cluster in CLUSTERS:
        for step in STEPS:
            case = Case(step, cluster)
            known = rows.get(case.name)
            wanted = any(fnmatch.fnmatchcase(case.name, p) for p in options.cases)
            if not wanted or (known is None) is options.again:
                continue
            try:
                rows[case.name] = row_of(case, known)
            except AutoparError as error:
                print(f"{case.name}: {error}", flush=True)
                continue
            options.plans.write_text(json.dumps(list(rows.values())), "utf-8")
            short = [{k: v for k, v in r.items() if k != "plan"} for r in rows.values()]
            text = json.dumps(short, indent=1) + "\n"
            options.data.write_text(text, encoding="utf-8")
            one = rows[case.name]
            print(case.name, one["ratio"], one["compile_s"], flush=True)
    table(list(rows.values()))


if __name__ == "__main__":
    main()
