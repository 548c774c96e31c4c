"""Compares predictions with XLA's compilers for CPU, GPU and TPU, without devices.

    python benchmarks/compiled.py --out results.jsonl [--cases 'gpt*h100*' ...]
    python benchmarks/compiled.py --out results.jsonl --table
    python benchmarks/compiled.py --out results.jsonl --again
    python benchmarks/compiled.py --out results.jsonl --limit 0.8 [--cases ...]

Needs the extras ``gpu-compiler`` and ``tpu-compiler`` for the cases that name a GPU or
a TPU. Each case is one line of JSON. It has memory, bytes, messages and compute time,
predicted and compiled, and the ratio of the two. Cases that are already in the file are
skipped, so that a run can be stopped and continued. ``--again`` only renews the
predictions for the plans in the file. ``--table`` prints the file as a table.
``--limit`` plans again with a fraction of the memory that the file predicts, and
reports whether the compiled program stays within this limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import decoder
import jax
import workloads

from autopar.audits import audit_analysis
from autopar.cluster import Cluster
from autopar.cost.breakdown import exposed_s, step_s
from autopar.cost.estimate import estimate
from autopar.cost.live import live
from autopar.errors import AutoparError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.record import restore
from autopar.plans import Plan
from autopar.reports.audit import bytes_by_kind, predicted_messages
from autopar.reports.explain import bind_plan
from autopar.steps.analysis import Analysis, analyse

MOST_CPUS = 32
GPT = {"layers": 6, "d_model": 1024, "heads": 16, "seq": 512, "vocab": 32000}
LLAMA = {**GPT, "kv_heads": 8, "ffn": 2816}
LARGE = {"layers": 8, "d_model": 4096, "heads": 32, "seq": 2048, "vocab": 32000}
# Name -> (example, options): the examples with their own sizes, and models of realistic
# size.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in workloads.EXAMPLES},
    "vit-1024": ("vit", {"d_model": 1024, "heads": 16, "size": 224, "patch": 16}),
    "moe-1024": ("moe", {"d_model": 1024, "heads": 16, "ffn": 4096, "seq": 512}),
    "lstm-1024": ("lstm", {"d_model": 1024, "seq": 256, "vocab": 32000}),
    "resnet-64": ("resnet", {"width": 64, "size": 128}),
    "gpt-scan-1024": ("gpt-scan", GPT),
}
BATCHES = {"vit-1024": 256, "moe-1024": 64, "lstm-1024": 256, "resnet-64": 256}
for _name, _options in (("gpt", GPT), ("llama", LLAMA)):
    for _dtype in ("float32", "bfloat16"):
        for _remat in (False, True):
            _full = f"{_name}-1024-{_dtype[0]}{'32' if _dtype[0] == 'f' else '16'}"
            MODELS[_full + "-remat" * _remat] = (
                _name,
                {**_options, "dtype": _dtype, "remat": _remat},
            )
# Models with few layers, for compilers that take minutes.
SMALL = {**GPT, "layers": 2, "vocab": 8192, "dtype": "bfloat16"}
MODELS["gpt-small-b16"] = ("gpt", SMALL)
MODELS["gpt-small-b16-remat"] = ("gpt", {**SMALL, "layers": 3, "remat": True})
MODELS["llama-small-b16"] = ("llama", {**SMALL, "kv_heads": 8, "ffn": 2816})
MODELS["vit-small"] = MODELS["vit-1024"]
# Models with many layers, which show errors that grow with the number of layers.
MODELS["gpt-deep-b16-remat"] = (
    "gpt",
    {**GPT, "layers": 16, "d_model": 512, "dtype": "bfloat16", "remat": True},
)
_LLAMA_LARGE = {**LARGE, "kv_heads": 8, "ffn": 14336, "dtype": "bfloat16"}
MODELS["gpt-4096-b16-remat"] = ("gpt", {**LARGE, "dtype": "bfloat16", "remat": True})
MODELS["llama-4096-b16-remat"] = ("llama", {**_LLAMA_LARGE, "remat": True})
MODELS["llama-4096-b16"] = ("llama", _LLAMA_LARGE)
# Models with fused attention, by the kind of device that has the kernel. Pallas's
# kernel does not support grouped heads.
for _family, _kv in (("gpt", 16), ("llama", 8)):
    for _kernel in ("cudnn", "pallas"):
        MODELS[f"{_family}-{_kernel}-b16"] = (
            "decoder",
            {"family": _family, "kv_heads": _kv, "attention": _kernel},
        )
KERNELS = {"cudnn": ("h100",), "pallas": ("v5e", "v5p")}
CLUSTERS = (
    "8:cpu,memory=64GB", "2x4:cpu,memory=64GB", "4x8:cpu,memory=64GB",
    "2x4x4:cpu,memory=64GB", "8:h100", "2x4:h100", "8x8:h100",
    "4x4:v5e", "8x8:v5e", "2x2x4:v5p",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    model: str
    cluster: str
    memory_bytes: int = 0

    @property
    def name(self) -> str:
        """Such as ``gpt@8:h100``; ``|limit`` is added if the case has its own memory
        limit.
        """
        limit = "|limit" * bool(self.memory_bytes)
        return f"{self.model}@{self.cluster.split(',')[0]}{limit}"

    @property
    def machine(self) -> Cluster:
        """The cluster, with the memory limit of the case."""
        own = f",memory={self.memory_bytes}B" * bool(self.memory_bytes)
        return Cluster.parse(self.cluster + own)

    @property
    def target(self) -> str | None:
        """The accelerator; None on CPUs."""
        name = self.cluster.split(":")[1].split(",")[0]
        return None if name == "cpu" else name

    def analysis(self) -> Analysis:
        """Traces the step."""
        example, options = MODELS[self.model]
        devices = Cluster.parse(self.cluster).num_devices
        if example == "decoder":
            return analyse(*fused(**options))
        batch = BATCHES.get(self.model, 64)
        if "4096" in self.model:
            batch = 128
        elif not options or self.model in workloads.EXAMPLES:
            batch = workloads.batch_for(devices)
        step, args = workloads.arguments(example, **{**options, "batch": batch})
        return analyse(step, args)


def fused(family: str, kv_heads: int, attention: str) -> tuple[Any, tuple[Any, ...]]:
    """A decoder of 6 layers of 1024 with fused attention, and its arguments."""
    model = decoder.Decoder(
        family=family,
        layers=6,
        d_model=1024,
        heads=16,
        kv_heads=kv_heads,
        head_dim=64,
        ffn=4096 if family == "gpt" else 2816,
        vocab=32000,
    )
    run = decoder.Run(
        sequence=1024, batch=64, dtype="bfloat16", remat="none", attention=attention
    )
    return decoder.train_step(model, run)


def cases(patterns: list[str]) -> Iterator[Case]:
    """The cases whose names match a pattern."""
    for cluster in CLUSTERS:
        for model in MODELS:
            case = Case(model, cluster)
            kernel = MODELS[model][1].get("attention")
            if case.target is None and "4096" in model:
                continue
            if kernel is not None and case.target not in KERNELS[kernel]:
                continue
            if any(fnmatch.fnmatchcase(case.name, p) for p in patterns):
                yield case


def limited(
    chosen: Iterable[Case], known: dict[str, dict[str, Any]], part: float
) -> Iterator[Case]:
    """The cases, limited to a fraction of the memory of the plan in the file."""
    for case in chosen:
        row = known.get(case.name)
        if row is not None and "predicted" in row:
            limit = int(part * row["predicted"]["memory"])
            yield dataclasses.replace(case, memory_bytes=limit)


def measured(case: Case, seconds: float) -> dict[str, Any]:
    """Plans and compiles a case."""
    analysis = case.analysis()
    plan = plan_analysis(analysis, case.machine, PlanOptions(seconds=seconds))
    return compiled(case, analysis, plan)


def compiled(case: Case, analysis: Analysis, plan: Plan) -> dict[str, Any]:
    """Compiles the plan of a case, and adds the predictions for it."""
    start = time.perf_counter()
    found = audit_analysis(
        analysis, plan, case.machine, compiled=case.target is None, target=case.target
    )
    out: dict[str, Any] = {
        "case": case.name,
        "compile_s": round(time.perf_counter() - start, 1),
        "mesh": plan.mesh["axes"],
        "plan": plan.to_json(),
    }
    if found.target is not None:
        data = found.target.to_json()
        out["compiled"] = {
            "memory": data["memory"],
            "bytes": data["by_kind"],
            "messages": data["messages"],
            "compute_s": data["compute_s"],
            "exposed_s": data.get("schedule", {}).get("exposed_s"),
        }
    elif found.first_compiled is not None:
        seen = found.first_compiled
        out["compiled"] = {
            "memory": {
                "peak_bytes": seen.peak_memory_bytes,
                "argument_bytes": seen.argument_bytes,
                "output_bytes": seen.output_bytes,
                "alias_bytes": seen.alias_bytes,
                "temp_bytes": seen.temp_bytes,
            },
            "bytes": dict(bytes_by_kind(seen.collectives)),
        }
    if case.memory_bytes:
        peak = out["compiled"]["memory"]["peak_bytes"]
        out["limit"] = {"bytes": case.memory_bytes, "part": peak / case.memory_bytes}
    return out | {"predicted": predicted(case, analysis, plan, out["compiled"])}


def predicted(
    case: Case, analysis: Analysis, plan: Plan, compiled: dict[str, Any]
) -> dict[str, Any]:
    """The predictions for a plan, and their ratios to the compiled figures."""
    cluster = case.machine
    bound = bind_plan(analysis, plan, cluster)
    memory = live(restore(analysis, plan), cluster.device).peak_bytes()
    sent = sum(c.sent_bytes(bound.pricer) for c in bound.collectives)
    messages = predicted_messages(bound)
    out: dict[str, Any] = {"memory": memory, "bytes": sent, "messages": messages}
    # The cost is computed anew, because the plan's own seconds may come from an older
    # cost model.
    cost = estimate(bound.assignment, bound.pricer).cost
    out["compute_s"] = cost.work_s
    # A compiled schedule does not show how much hidden messages slow the work, so this
    # slowdown is left out here.
    out["exposed_s"] = exposed_s(cost)
    out["ratio"] = {
        "memory": memory / compiled["memory"]["peak_bytes"],
        "bytes": _ratio(sent, sum(compiled["bytes"].values())),
    }
    if "messages" in compiled:
        total = sum(compiled["messages"].values())
        out["ratio"]["messages"] = _ratio(sum(messages.values()), total)
        out["ratio"]["compute"] = _ratio(out["compute_s"], compiled["compute_s"])
        if compiled.get("exposed_s") is not None:
            # The difference is relative to the whole step, because a ratio of exposed
            # seconds means nothing if nearly all communication is hidden.
            exposed = out["exposed_s"] - compiled["exposed_s"]
            out["exposed_apart"] = exposed / step_s(cost)
            out["ratio"]["exposed"] = _ratio(out["exposed_s"], compiled["exposed_s"])
    return out


def _ratio(expected: float, found: float) -> float:
    return expected / found if found else (1.0 if not expected else float("inf"))


def held(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Case -> its last line in a file."""
    if not path.is_file():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["case"]: row for row in rows}


def table(rows: dict[str, dict[str, Any]]) -> None:
    """Prints the ratios of a file."""
    names = ("memory", "bytes", "messages", "compute", "exposed")
    ratios = (f"{n} ratio" for n in names)
    workloads.row("case", "mesh", "memory GB", "of the limit", *ratios)
    workloads.row(*["---"] * (4 + len(names)))
    for name, found in rows.items():
        if "error" in found:
            workloads.row(name, found["error"][:90], *[""] * (2 + len(names)))
            continue
        ratios = found["predicted"]["ratio"]
        cells = (f"{ratios[n]:.2f}" if n in ratios else "" for n in names)
        mesh = "x".join(str(n) for n in found["mesh"].values())
        memory = found["compiled"]["memory"]["peak_bytes"]
        part = f"{found['limit']['part']:.2f}" if "limit" in found else ""
        workloads.row(name, mesh, f"{memory / 1e9:.3f}", part, *cells)


def main() -> int:
    """Runs the cases that are not in the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cases", nargs="*", default=["*"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--limit", type=float, default=0.0)
    options = parser.parse_args()
    known = held(options.out)
    chosen = list(cases(options.cases))
    if options.table:
        names = [n for c in chosen for n in (c.name, c.name + "|limit")]
        table({n: known[n] for n in names if n in known})
        return 0
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MOST_CPUS)
    if options.limit:
        chosen = list(limited(chosen, known, options.limit))
    for case in chosen:
        row = known.get(case.name)
        if options.again and row is not None and "plan" in row:
            analysis = case.analysis()
            plan = Plan.from_json(json.dumps(row["plan"]))
            made = predicted(case, analysis, plan, row["compiled"])
            row = {**row, "predicted": made}
        elif row is None and not options.again:
            try:
                row = measured(case, options.seconds)
            except AutoparError as error:
                row = {"case": case.name, "error": str(error)}
        else:
            continue
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        table({case.name: row})
    return 0


if __name__ == "__main__":
    sys.exit(main())
