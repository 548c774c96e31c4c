"""Planning time of pipeline stages, and prices of Megatron's own plans.

    python benchmarks/stages.py planning
    python benchmarks/stages.py published [--rows FILE] [--only TEXT]
    python benchmarks/stages.py mixed

``planning`` plans GPTs on A100s and prints the CPU seconds of each part.

``published`` reads a JSON list of measured runs. Each has ``id``, ``cluster``,
``model``, ``sequence``, ``global_batch``, ``dtype``, ``remat``, ``tensor``,
``pipeline`` and ``data`` of the run, its ``schedule``, and ``step_s``. The run's own
plan is priced: tensor parallel layouts with or without sequence parallelism, replicas
over the data axis, equal stages, and full rematerialisation of all layers. The source
does not give the size of a microbatch and the number of chunks, so the fastest values
that fit are used. The table also has our own plan for the same cluster under the same
cost model.

``mixed`` plans a GPT on two groups of hosts, one of them half as fast, and prices the
best pipeline whose stages all have equally many layers and devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import decoder
import numpy as np

import autopar
from autopar.cluster import DeviceSpec, MeshShape
from autopar.cost.pricer import Pricer
from autopar.planner.candidate import assignment_of
from autopar.planner.problem import formulate
from autopar.planner.recipes import Recipe, restriction_of
from autopar.planner.stages.costs import Priced, price_layers, stage_problem
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.plan import (
    SCHEDULES,
    PipelineChoice,
    divisors,
    layers_of,
    plan_stages,
)
from autopar.planner.stages.submeshes import Submesh, submeshes
from autopar.planner.weights import partly
from autopar.steps.analysis import Analysis, analyse
from autopar_solver import (
    Pipeline,
    PipelineCost,
    Schedule,
    ScheduleKind,
    StageProblem,
    evaluate_pipeline,
    solve,
)

ROOT = pathlib.Path(__file__).resolve().parent
DEFAULT = pathlib.Path(os.environ.get("AUTOPAR_SHARED", ROOT.parent.parent / "shared"))
# Width, layers, batch, sequence and cluster.
CASES = (
    (2048, 16, 512, 1024, "8x8:a100"),
    (8192, 48, 1024, 2048, "64x8:a100"),
    (12288, 96, 1536, 2048, "128x8:a100"),
)
# The cluster is doubled by as many devices of half the speed.
MIXED = (4096, 32, 256, 1024, "2x8:a100")
HEAD, VOCAB = 128, 51200
CHUNKS = (1, 2, 3, 4, 5)


def gpt(width: int, layers: int, batch: int, sequence: int) -> Analysis:
    """The analysis of a GPT in bfloat16."""
    model = decoder.Decoder(
        family="gpt",
        layers=layers,
        d_model=width,
        heads=width // HEAD,
        kv_heads=width // HEAD,
        head_dim=HEAD,
        ffn=4 * width,
        vocab=VOCAB,
    )
    run = decoder.Run(
        sequence=sequence,
        batch=batch,
        dtype="bfloat16",
        remat="none",
        attention="plain",
    )
    return analyse(*decoder.train_step(model, run))


def described(found: PipelineChoice) -> dict[str, Any]:
    """A plan in a few fields."""
    return {
        "step_s": found.step_s,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "status": found.status,
        "one_stage_s": found.one_stage_s,
        "microbatches": found.microbatches,
        "schedule": found.schedule.name,
        "stages": [
            {
                "submesh": stage.submesh.name,
                "layers": [stage.layers[0], stage.layers[-1]],
                "recomputed": len(stage.recomputed),
                "memory_gb": stage.memory_bytes / 1e9,
            }
            for stage in found.stages
        ],
        "seconds": found.seconds,
    }


def planning(seconds: float, only: str) -> None:
    """Plans each case, and prints the CPU seconds."""
    for width, layers, batch, sequence, text in CASES:
        name = f"GPT {width} wide, {layers} layers, {text}"
        if only not in name:
            continue
        start = time.process_time()
        analysis = gpt(width, layers, batch, sequence)
        analysed = time.process_time() - start
        found = plan_stages(analysis, autopar.Cluster.parse(text), seconds=seconds)
        cpu = time.process_time() - start
        row = {"case": name, "cpu_s": cpu, "analysis_s": analysed, **described(found)}
        print(json.dumps(row), flush=True)


def published(rows: list[dict[str, Any]], seconds: float, *, ours: bool) -> None:
    """Prices the plan of each measured run, and makes our own plan for its cluster."""
    for row in rows:
        cluster = autopar.Cluster.parse(row["cluster"])
        analysis = analysed(row)
        own = priced_run(analysis, cluster, row)
        out: dict[str, Any] = {
            "id": row["id"],
            "measured_s": row["step_s"],
            "own_plan_s": own[1].step_s if own else None,
            "ratio": own[1].step_s / row["step_s"] if own else None,
        }
        if own:
            pipeline, cost, submesh = own
            out |= {
                "microbatches": pipeline.microbatches,
                "schedule": pipeline.schedule.name,
                "bubble": float(np.mean(cost.bubble)),
                "memory_gb": max(cost.memory_bytes) / 1e9,
                "layouts": submesh.name,
            }
        if ours:
            found = plan_stages(analysis, cluster, seconds=seconds)
            out |= {"ours_s": found.step_s, "ours": described(found)}
        print(json.dumps(out), flush=True)


def mixed(seconds: float) -> None:
    """Plans for devices of two speeds, and compares the best equal stages."""
    width, depth, batch, sequence, text = MIXED
    fast = autopar.Cluster.parse(text)
    slow = dataclasses.replace(fast, device=halved(fast.device))
    cluster = autopar.Cluster(groups=(fast, slow))
    analysis = gpt(width, depth, batch, sequence)
    found = plan_stages(analysis, cluster, seconds=seconds)
    layers = layers_of(analysis, cluster)
    counts = divisors(batch)
    scales = np.array([1 / count for count in counts])
    prices = price_layers(
        layers, submeshes(analysis, cluster, partly(16.0, 1.0)), scales
    )
    problem = stage_problem(layers, cluster, prices, counts, SCHEDULES)
    even_s = min(even_split_s(problem, prices, stages) for stages in (2, 4, 8))
    row = {
        "cluster": f"{text}, and as many half as fast",
        "even_s": even_s,
        "ratio": even_s / found.step_s,
    }
    print(json.dumps({**row, **described(found)}))


def halved(device: DeviceSpec) -> DeviceSpec:
    """A device of half the speed."""
    return dataclasses.replace(
        device,
        name=f"half {device.name}",
        peak_flops_per_s=tuple((k, v / 2) for k, v in device.peak_flops_per_s),
        vector_flops_per_s=device.vector_flops_per_s / 2,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / 2,
    )


def even_split_s(problem: StageProblem, prices: Sequence[Priced], stages: int) -> float:
    """Seconds of the best pipeline with equal stages; infinite if there is none."""
    best = math.inf
    layers, half = problem.num_layers, stages // 2
    cuts = tuple(round(k * layers / stages) for k in range(stages + 1))
    for a, first in enumerate(prices):
        for b, second in enumerate(prices):
            one, other = first.submesh, second.submesh
            alike = (one.shape, one.rule, one.pricer.sizes) == (
                other.shape,
                other.rule,
                other.pricer.sizes,
            )
            room = problem.groups[0].devices
            if not alike or one.group >= other.group or half * one.devices > room:
                continue
            for costs, schedule in itertools.product(problem.costs, problem.schedules):
                possible = first.possible & second.possible
                if schedule.chunks > 1 or not possible[problem.costs.index(costs)]:
                    continue
                pipeline = Pipeline(
                    microbatches=costs.microbatches,
                    schedule=schedule,
                    options=(a,) * half + (b,) * half,
                    cuts=cuts,
                )
                cost = evaluate_pipeline(problem, pipeline)
                if cost.fits:
                    best = min(best, cost.step_s)
    return best


def analysed(row: dict[str, Any]) -> Analysis:
    """The step of a row; the schedule decides what is rematerialised."""
    run = decoder.Run(
        sequence=row["sequence"],
        batch=row["global_batch"],
        dtype=row["dtype"],
        remat="none",
        attention="cudnn" if row["fused_attention"] else "plain",
    )
    return analyse(*decoder.train_step(decoder.Decoder(**row["model"]), run))


def priced_run(
    analysis: Analysis, cluster: autopar.Cluster, row: dict[str, Any]
) -> tuple[Pipeline, PipelineCost, Submesh] | None:
    """The fastest microbatch, number of chunks and layouts of a row's plan that fit;
    None if none fits.
    """
    # The model's layers, and one layer for the logits, as in the stages of the run. The
    # last layer is not rematerialised.
    layers = layers_of(analysis, cluster, row["model"]["layers"] + 1)
    counts = [
        count
        for count in divisors(row["global_batch"])
        if row["global_batch"] // count % row["data"] == 0
    ]
    scales = np.array([1 / count for count in counts])
    found: list[tuple[Pipeline, PipelineCost, Submesh]] = []
    for submesh in run_layouts(analysis, cluster, row):
        prices = price_layers(layers, [submesh], scales)
        found.extend(_pipelines(layers, cluster, row, prices, counts))
    return min(found, key=lambda f: f[1].step_s, default=None)


def run_layouts(
    analysis: Analysis, cluster: autopar.Cluster, row: dict[str, Any]
) -> list[Submesh]:
    """The layouts of one stage of a row: data x tensor, with or without sequence
    parallelism.
    """
    devices = row["tensor"] * row["data"]
    host = cluster.levels[-1].size
    shape = (devices // host, host)
    part = cluster.slice(shape)
    sizes = (devices // host, host // row["tensor"], row["tensor"])
    wanted = tuple(size for size in sizes if size > 1)
    meshes = [m for m in part.mesh_shapes(3) if m.sizes == wanted]
    out: list[Submesh] = []
    for mesh in meshes[:1]:
        pricer = Pricer(part, mesh)
        for recipe in _recipes(mesh, row["tensor"]):
            rule = restriction_of(analysis, recipe, pricer)
            problem = formulate(analysis, pricer, rule, weights=partly(64.0, 1.0))
            solution = solve(problem.problem, gap=5e-3)
            if solution.choices:
                made = assignment_of(analysis, problem, solution)
                out.append(Submesh(0, shape, pricer, made, recipe.name))
    return out


def _recipes(mesh: MeshShape, tensor: int) -> list[Recipe]:
    every = tuple(range(len(mesh.axes)))
    if tensor == 1:
        return [Recipe("data", every)]
    data, last = every[:-1], every[-1:]
    return [
        Recipe("data x tensor", data, last),
        Recipe("data x tensor + sequence", data, last, sequence=True),
    ]


def _pipelines(
    layers: LayerMap,
    cluster: autopar.Cluster,
    row: dict[str, Any],
    prices: list[Priced],
    counts: list[int],
) -> list[tuple[Pipeline, PipelineCost, Submesh]]:
    several = [Schedule(ScheduleKind.INTERLEAVED, k) for k in CHUNKS if k > 1]
    known = [Schedule(ScheduleKind.ONE_F_ONE_B), *several]
    problem = stage_problem(layers, cluster, prices, counts, known)
    out: list[tuple[Pipeline, PipelineCost, Submesh]] = []
    stages = row["pipeline"]
    for chunks in CHUNKS if row["schedule"] else (1,):
        parts = stages * chunks
        blocks = layers.count - 1
        if blocks % parts:
            continue
        cuts = (*range(0, blocks, blocks // parts), layers.count)
        kind = ScheduleKind.INTERLEAVED if chunks > 1 else ScheduleKind.ONE_F_ONE_B
        for count in counts:
            pipeline = Pipeline(
                microbatches=count,
                schedule=Schedule(kind, chunks),
                options=(0,) * stages,
                cuts=cuts,
                recomputed=tuple(range(blocks)),
            )
            if not prices[0].possible[counts.index(count)]:
                continue
            cost = evaluate_pipeline(problem, pipeline)
            if cost.fits:
                out.append((pipeline, cost, prices[0].submesh))
    return out


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("planning", "published", "mixed"))
    default = DEFAULT / "published" / "pipelines.json"
    parser.add_argument("--rows", type=pathlib.Path, default=default)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--limit", type=float, default=20.0, help="solver seconds")
    parser.add_argument("--not-ours", action="store_true", help="no plan of our own")
    chosen = parser.parse_args()
    if chosen.what == "planning":
        planning(chosen.limit, chosen.only)
        return
    if chosen.what == "mixed":
        mixed(chosen.limit)
        return
    if not chosen.rows.exists():
        print(f"skipped: {chosen.rows} is absent; give --rows FILE.")
        return
    rows = [r for r in json.loads(chosen.rows.read_text()) if chosen.only in r["id"]]
    published(rows, chosen.limit, ours=not chosen.not_ours)


if __name__ == "__main__":
    main()
