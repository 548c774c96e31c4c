"""CPU seconds of planning with all strategies, and with shardings of arrays only.

    python benchmarks/strategies_time.py [--only TEXT] [--turns 3]

"With" is `autopar.plan` as it is. "Without" plans the same step without the rewrites
and rules that a sharding of arrays cannot express: attention whose sequence is split,
written-out attention in blocks, kept results of attention kernels, slots and blocks for
sorted rows, batches of an update's matrices, and state in the memory of the hosts. Each
planning is a new process, and both kinds take turns. The ratio is that of the medians.
Some steps have no plan without strategies; a search that ends with an error counts with
its seconds. Writes ``docs/data/strategies_time.json`` after each case.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Any
from unittest import mock

import decoder
import large
import matrix_optimizers
import planning_time
import workloads

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph import build
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "strategies_time.json"
BAR = 1.3
KINDS = ("with", "without")
# Modules that rewrite a step for a number of devices.
_REWRITING = ("plan", "programs", "experts", "warm", "record")


def _long(cluster: Cluster) -> Any:
    del cluster
    run = decoder.Run(
        sequence=131_072, batch=1, dtype="bfloat16", remat="full", attention="cudnn"
    )
    return decoder.train_step(large.LANGUAGE["llama-8b"].model, run)


def _muon(cluster: Cluster) -> Any:
    del cluster
    model, rows, _ = matrix_optimizers.ROWS["32 x 2048, 8x8:h100"]
    run = decoder.Run(
        sequence=2048, batch=rows, dtype="bfloat16", remat="full", attention="cudnn",
        optimizer="muon",
    )  # fmt: skip
    return decoder.train_step(model, run)


def _example(name: str) -> Any:
    example, options, _, _ = planning_time.CASES[name]
    return lambda cluster: workloads.arguments(example, **options)


# Name -> the step on a cluster, and the cluster.
CASES: dict[str, tuple[Any, str]] = {
    "GPT 12 layers": (_example("GPT 12 layers, 8x8"), "8x8:h100"),
    "Llama 8B": (_example("Llama 8B, 32 layers, 8x8"), "8x8:h100"),
    "Llama 8B, 131,072 tokens": (_long, "8x8:h100"),
    "Mixtral without a capacity": (large.CASES["mixtral-dropless"], "8x8:h100"),
    "DeepSeek-V2, scanned": (large.CASES["deepseek-v2-scan"], "8x8:h100"),
    "Llama with Muon": (_muon, "8x8:h100"),
}


def _whole(rule: FactorRule) -> FactorRule:
    """A rule whose exchanged factors must not be sharded."""
    kinds = tuple(
        FactorKind.BLOCKED if kind is FactorKind.EXCHANGED else kind
        for kind in rule.kinds
    )
    return dataclasses.replace(rule, kinds=kinds, exchanges=())


@contextlib.contextmanager
def without_strategies() -> Generator[None]:
    """A context in which plans only shard the arrays of the step as it is written."""
    book = build.rule_book

    def plain_book(*args: Any) -> Any:
        found = book(*args)
        rules = {index: _whole(rule) for index, rule in found.rules.items()}
        return dataclasses.replace(found, rules=rules)

    def as_written(analysis: Analysis, *args: Any, **options: Any) -> Analysis:
        del args, options
        return analysis.alone or analysis

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "rule_book", plain_book))
        for name in _REWRITING:
            stack.enter_context(
                mock.patch(f"autopar.planner.{name}.for_devices", as_written)
            )
        stack.enter_context(
            mock.patch(
                "autopar.planner.idle_devices.alternatives", lambda a, *_, **__: [a]
            )
        )
        stack.enter_context(
            mock.patch("autopar.steps.remat.keep_kernels", lambda program: program)
        )
        yield


def measure(name: str, kind: str, seconds: float) -> dict[str, Any]:
    """Plans one case in this process."""
    make, text = CASES[name]
    cluster = Cluster.parse(text)
    step, args = make(cluster)
    offload = "auto" if kind == "with" else "none"
    options = PlanOptions(seconds=seconds, compile_check=False, offload=offload)
    context = contextlib.nullcontext() if kind == "with" else without_strategies()
    begin = time.process_time()
    with context:
        analysis = analyse(step, args)
        try:
            found = {
                "step_s": plan_analysis(analysis, cluster, options).predicted.step_s
            }
        except PlanError as error:
            found = {"refused": str(error).split("\n", 1)[0]}
    return {"cpu_s": time.process_time() - begin} | found


def figures(name: str, turns: int, seconds: float) -> dict[str, Any]:
    """The row of a case."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(turns):
        for kind in KINDS:
            words = ["--one", name, "--kind", kind, "--seconds", str(seconds)]
            run = subprocess.run(
                [sys.executable, __file__, *words],
                capture_output=True,
                text=True,
                check=True,
            )
            runs[kind].append(json.loads(run.stdout.strip().split("\n")[-1]))
    cpu_s = {k: statistics.median(r["cpu_s"] for r in runs[k]) for k in KINDS}
    return {
        "case": name,
        "cluster": CASES[name][1],
        "cpu_s": cpu_s,
        "ratio": cpu_s["with"] / cpu_s["without"],
        **{k: runs[k][0].get("step_s", runs[k][0].get("refused")) for k in KINDS},
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the solver")
    parser.add_argument("--json", type=pathlib.Path, default=DATA)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one, asked.kind, asked.seconds)))
        return
    rows: dict[str, dict[str, Any]] = {}
    if asked.json.exists():
        rows = {r["case"]: r for r in json.loads(asked.json.read_text())["rows"]}
    workloads.row("case", "with, CPU s", "without, CPU s", "ratio")
    workloads.row(*["---"] * 4)
    for name in (name for name in CASES if asked.only in name):
        rows[name] = row = figures(name, asked.turns, asked.seconds)
        spent = row["cpu_s"]
        workloads.row(
            name,
            f"{spent['with']:.1f}",
            f"{spent['without']:.1f}",
            f"{row['ratio']:.2f}",
        )
        command = f"python benchmarks/strategies_time.py --turns {asked.turns}"
        done = [rows[n] for n in CASES if n in rows]
        data = {"command": command, "at": workloads.commit(), "bar": BAR, "rows": done}
        asked.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
