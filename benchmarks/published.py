"""Compares published step times with the cost model, for each run's own strategy.

    python benchmarks/published.py --rows FILE [--only TEXT] [--ours] [--json FILE]

FILE is a JSON list of measured configurations. Each has ``id``, ``source``,
``software``, ``cluster`` with ``device_overrides``, ``model``, ``sequence``,
``global_batch``, ``remat``, ``dtype``, ``fused_attention``, ``strategy`` and ``mesh``
of the run, and ``step_s``. The layouts of a row are the best layouts within the run's
strategy on its mesh. The command prints one JSON line for each row (``fits``: whether a
plan is predicted to fit the device's memory, as the run did). With ``--ours``, it also
has the predicted step of the plan that the planner chooses for these devices. A plan
near the limit of memory is compiled, if the devices' compiler is installed. A row
without a plan of its strategy has ``refused``, the reason, and counts in no figure. The
last line has the fractions of rows within 15 % and 35 %, and the order of MFU.

One constant of each kind of GPU was chosen on such rows: the fraction of a product's
rate that remains within a training step (``DeviceSpec.sustained``). The last line also
has figures in which each source is left out in turn: its rows are predicted with
constants from the other sources.

A row with ``remat`` keeps the inputs of layers and recomputes what the backward pass
needs. A reentrant checkpoint, as in Megatron-LM (``mpu/random.py``), recomputes the
whole layer, including its last product and sum, which the backward pass does not need.
Rows of Megatron-LM, and rows with ``"reentrant": true``, are priced in this way. If a
source says that its cards were limited to a power (``500 W``), the row's devices have
this limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import decoder

import autopar
from autopar.cluster import DeviceSpec, MeshShape
from autopar.cluster.presets import preset
from autopar.cost.breakdown import interval_s
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError
from autopar.planner.candidate import Candidate
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.programs import Unfit
from autopar.planner.recipes import has_context, recipes, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import TimeOutError, solve_mesh
from autopar.runtime.compile_check import plan_that_fits
from autopar.steps.analysis import Analysis, analyse

ROOT = pathlib.Path(__file__).resolve().parent
DEFAULT = pathlib.Path(os.environ.get("AUTOPAR_SHARED", ROOT.parent.parent / "shared"))
# The implementation of fused attention for each kind of device.
FUSED = {"gpu": "cudnn", "tpu": "pallas"}


def reentrant(row: dict[str, Any]) -> bool:
    """Whether the run recomputed whole layers."""
    return row.get("reentrant", "megatron-lm" in row["source"].lower())


def device_of(row: dict[str, Any]) -> DeviceSpec:
    """A row's device: its preset, with the row's power limit and changed fields."""
    device = autopar.Cluster.parse(row["cluster"]).device
    changed = dict(row["device_overrides"])
    if "memory_bytes" in changed:
        changed["memory_bytes"] = round(changed["memory_bytes"])
    limit = re.search(r"\b(\d+) W\b", row["source"])
    if limit is not None:
        part = float(limit[1]) / preset(device.name).power_w
        changed = {"power_part": part, **changed}
    return dataclasses.replace(device, **changed)


def analysis_of(row: dict[str, Any], fused: bool) -> Analysis:
    """The analysis of a row's step."""
    kind = FUSED[device_of(row).kind] if fused and row["fused_attention"] else "plain"
    run = decoder.Run(
        sequence=row["sequence"],
        batch=row["global_batch"],
        dtype=row["dtype"],
        remat="whole" if row["remat"] == "full" and reentrant(row) else row["remat"],
        attention=kind,
    )
    return analyse(*decoder.train_step(decoder.Decoder(**row["model"]), run))


def ours(row: dict[str, Any], fused: bool, seconds: float) -> dict[str, Any]:
    """The predicted step under our own plan for a row's devices."""
    cluster = autopar.Cluster.parse(row["cluster"])
    cluster = dataclasses.replace(cluster, device=device_of(row))
    options, analysis = PlanOptions(seconds=seconds), analysis_of(row, fused)

    def find(on: autopar.Cluster, unfit: Unfit) -> autopar.Plan:
        return plan_analysis(analysis, on, options, unfit=unfit)

    try:
        plan = plan_that_fits(analysis, cluster, options, find)
    except InfeasibleError as error:
        return {"ours_refused": str(error).split("\n", 1)[0]}
    return {
        "ours_s": plan.predicted.step_s,
        "ours_memory_bytes": plan.predicted.peak_memory_bytes,
        "ours_compiled_memory_bytes": plan.compiled_memory_bytes,
    }


def priced(row: dict[str, Any], fused: bool, seconds: float) -> Candidate:
    """The best plan within a row's strategy, on its mesh.

    If no plan is predicted to fit the device's memory, the result is the fastest plan
    that does not fit.

    Raises:
      InfeasibleError: no plan was found within the row's strategy.
    """
    cluster = autopar.Cluster.parse(row["cluster"])
    device, analysis = device_of(row), analysis_of(row, fused)
    makes_room = dataclasses.replace(device.corrections, makes_room=True)
    roomy = (
        device,
        # The compiler of the run may have saved memory.
        dataclasses.replace(device, calibration=makes_room),
        dataclasses.replace(device, memory_bytes=10**15),
    )
    for one in roomy:
        with contextlib.suppress(InfeasibleError):
            held = dataclasses.replace(cluster, device=one)
            return within(analysis, held, row, seconds)
    raise InfeasibleError(f"no plan of {row['strategy']} on mesh {row['mesh']}")


def ordered_meshes(cluster: autopar.Cluster) -> Iterator[MeshShape]:
    """The meshes of a cluster; two axes of one level in both orders."""
    for mesh in candidate_meshes(cluster):
        yield mesh
        if len({axis.level for axis in mesh.axes}) == 1 and len(mesh.axes) > 1:
            yield MeshShape(axes=mesh.axes[::-1])


def within(
    analysis: Analysis, cluster: autopar.Cluster, row: dict[str, Any], seconds: float
) -> Candidate:
    """The best plan within a row's strategy on a cluster.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
    """
    found: list[Candidate] = []
    for mesh in ordered_meshes(cluster):
        if [size for size in mesh.sizes if size > 1] != row["mesh"]:
            continue
        pricer = Pricer(cluster, mesh)
        for recipe in recipes(len(mesh.axes), context=has_context(analysis)):
            if recipe.name == row["strategy"]:
                limit = restriction_of(analysis, recipe, pricer)
                found.append(solve_mesh(analysis, pricer, limit, seconds))
    if not found:
        raise SystemExit(f"{row['id']}: no mesh {row['mesh']} of {row['cluster']}")
    return min(found, key=lambda c: c.step_s)


def flops(row: dict[str, Any]) -> float:
    """Floating-point operations of a step, without recomputation and with half of
    attention.
    """
    m, tokens = row["model"], row["sequence"] * row["global_batch"]
    heads = m["head_dim"] * (2 * m["heads"] + 2 * m["kv_heads"])
    products = 3 if m["family"] == "llama" else 2
    layer = m["d_model"] * (heads + products * m["ffn"])
    weights = m["layers"] * layer + m["vocab"] * m["d_model"]
    mixing = m["layers"] * row["sequence"] * m["heads"] * m["head_dim"]
    return 6.0 * tokens * (weights + mixing)


def figures(
    row: dict[str, Any], fused: bool, seconds: float, *, plans: bool
) -> dict[str, Any]:
    """The printed figures of a row, or the reason why it has none."""
    try:
        found = result(row, priced(row, fused, seconds))
    except (InfeasibleError, TimeOutError) as error:
        return {"id": row["id"], "refused": str(error).split("\n", 1)[0]}
    return found | (ours(row, fused, seconds) if plans else {})


def result(row: dict[str, Any], found: Candidate) -> dict[str, Any]:
    """The printed figures of a row."""
    cost = found.cost
    return {
        "id": row["id"],
        "software": row["software"],
        "device": found.pricer.cluster.device.name,
        "devices": found.pricer.cluster.num_devices,
        "sustained": found.pricer.cluster.device.sustained,
        "source": row["source"],
        "measured_s": row["step_s"],
        "predicted_s": found.step_s,
        "interval_s": interval_s(cost, found.pricer.cluster.device),
        "ratio": found.step_s / row["step_s"],
        "matrix_s": cost.matrix_s,
        "vector_s": cost.vector_s + cost.kernel_s,
        "waiting_s": cost.waiting_s + cost.waiting_latency_s,
        "hideable_s": cost.hideable_total_s,
        "hidden_s": cost.cover_s,
        "contention_s": cost.contention_s,
        "peak_memory_bytes": float(found.peak_memory_bytes),
        "fits": found.pricer.cluster.memory_bytes < 10**15,
        "model_flops": flops(row),
    }


def with_sustained(done: dict[str, Any], part: float) -> float:
    """Seconds of a row with another fraction of the products' rate."""
    return done["predicted_s"] + done["matrix_s"] * (done["sustained"] / part - 1.0)


def fitted(done: Sequence[dict[str, Any]]) -> float:
    """The fraction with the smallest errors of rows; each source has the same weight.

    The error is the absolute logarithm. Fractions from 0.4 to 1 are tried in steps of
    0.005.
    """
    sources = [r["source"] for r in done]

    def error(part: float) -> float:
        return sum(
            abs(math.log(with_sustained(r, part) / r["measured_s"]))
            / sources.count(r["source"])
            for r in done
        )

    return min((0.4 + 0.005 * k for k in range(121)), key=error)


def left_out(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures if each row is predicted without the rows of its own source."""
    judged: list[dict[str, Any]] = []
    constants: dict[str, float] = {}
    for row in done:
        kind = row["device"]
        others = [
            r for r in done if r["device"] == kind and r["source"] != row["source"]
        ]
        part = row["sustained"]
        if part < 1.0 and others:
            part = constants.setdefault(
                f"{kind} without {row['source']}", fitted(others)
            )
        seconds = with_sustained(row, part)
        times = seconds / row["predicted_s"]
        judged.append(
            row
            | {
                "predicted_s": seconds,
                "ratio": seconds / row["measured_s"],
                "interval_s": [times * x for x in row["interval_s"]],
            }
        )
    kinds = sorted({r["device"] for r in done if r["sustained"] < 1.0})
    whole = {kind: fitted([r for r in done if r["device"] == kind]) for kind in kinds}
    return {"fitted": whole, "left_out": constants, **summary(judged)}


def summary(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fractions of rows within bounds, and the order of pairs on one kind of
    device.
    """
    ratios = [r["ratio"] for r in done]
    kinds = [r["device"] for r in done]
    devices = [r["devices"] for r in done]
    right = total = 0
    for i, j in itertools.combinations(range(len(done)), 2):
        if kinds[i] != kinds[j]:
            continue
        speed = [done[k]["model_flops"] / devices[k] for k in (i, j)]
        real = [s / done[k]["measured_s"] for s, k in zip(speed, (i, j), strict=True)]
        said = [s / done[k]["predicted_s"] for s, k in zip(speed, (i, j), strict=True)]
        if max(real) > 1.1 * min(real):
            total += 1
            right += (real[0] > real[1]) == (said[0] > said[1])

    def within(part: float) -> float:
        return sum(1 - part <= r <= 1 + part for r in ratios) / len(ratios)

    inside = [r["interval_s"][0] <= r["measured_s"] <= r["interval_s"][1] for r in done]
    widths = [
        (r["interval_s"][1] - r["interval_s"][0]) / r["predicted_s"] for r in done
    ]
    return {
        "rows": len(done),
        "in_interval": sum(inside) / len(done),
        "median_width": statistics.median(widths),
        "median": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "within_15": within(0.15),
        "within_30": within(0.30),
        "within_35": within(0.35),
        "pairs": total,
        "pairs_in_order": right / total if total else 1.0,
    }


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows that an earlier run has printed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "id" in line]


def main() -> None:
    """Prices every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = DEFAULT / "published" / "steps.json"
    parser.add_argument("--rows", type=pathlib.Path, default=default)
    parser.add_argument("--only", default="", help="rows whose id holds this text")
    parser.add_argument("--plain", action="store_true", help="no fused attention")
    parser.add_argument("--ours", action="store_true", help="plan each row, too")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.add_argument("--done", type=pathlib.Path, help="lines printed before")
    parser.add_argument("--limit", type=float, default=20.0, help="solver seconds")
    chosen = parser.parse_args()
    if not chosen.rows.exists():
        print(f"skipped: {chosen.rows} is absent; give --rows FILE.")
        return
    rows = [r for r in json.loads(chosen.rows.read_text()) if chosen.only in r["id"]]
    done = read(chosen.done) if chosen.done else []
    known = {r["id"] for r in done}
    for row in rows:
        if row["id"] in known:
            continue
        found = figures(row, not chosen.plain, chosen.limit, plans=chosen.ours)
        done.append(found)
        print(json.dumps(done[-1]), flush=True)
    if chosen.json is not None:
        command = f"python benchmarks/published.py --rows {chosen.rows}"
        data = {"command": command + (" --ours" if chosen.ours else ""), "rows": done}
        chosen.json.write_text(json.dumps(data, indent=1) + "\n")
    done = [r for r in done if "refused" not in r]
    if done:
        print(json.dumps(summary(done)))
        print(json.dumps(left_out(done)))


if __name__ == "__main__":
    main()
