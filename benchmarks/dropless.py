"""Plans of mixtures of experts without a capacity, with rows sorted in blocks or not.

    python benchmarks/dropless.py [--only TEXT] [--seconds 10] [--ours] [--quick]
        [--audit]

Each row is a model and a cluster. The step is planned with slots for rows that may
move, with rows sorted in blocks, of which each device has its own, and with all rows
sorted together. Beside these plans stand the fastest plan of those that people write
(`autopar.planner.experts`) with rows in blocks, and plans with slots that people write
for experts. There, the layouts of the experts' matrices are pinned, and the solver
chooses the rest, including how tokens reach their experts. All are predicted by the
cost model. With ``--ours``, only the plan with slots is planned again. With
``--quick``, the plan with slots is the answer to one problem for each mesh, which a
whole search would improve; the row then says so. With
``--audit``, two layers of each model are also compiled for 8x8 H100 without devices,
and the bytes that the compiled program sends are compared with the prediction. Rows
that ``--only`` leaves out keep their figures. Writes the figures to
``docs/data/dropless.json`` (``--json``) and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import large
import workloads
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.planner.experts import expert_plans
from autopar.planner.hints import pin_restriction, pinned_layouts
from autopar.planner.problem import Restriction
from autopar.planner.scheme import worth_of
from autopar.planner.search import candidate_meshes, search
from autopar.planner.weights import HIDDEN
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.for_devices import alternatives, for_devices

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "dropless.json"
ROWS = [
    (name, cluster)
    for name in ("mixtral-dropless", "deepseek-v2", "deepseek-v2-scan")
    for cluster in ("8x8:h100", "4x8x8:v5p")
]


def expert_layouts(mesh: MeshShape, stacked: bool) -> dict[str, dict[str, P]]:
    """Layouts of the experts' matrices that people write, by rule, on a mesh.

    Stacked matrices have the layers as their first dimension.

    One axis splits experts, and each axis of the mesh in turn is this axis. Over the
    others, Megatron-LM (Shoeybi et al., 2019) has copies of the experts, or splits
    their inner widths, or splits parameters and optimizer state. The solver chooses all
    other layouts.
    """
    whole = mesh.names
    made = {"FSDP": _experts(P(None, whole), P(None, whole))}
    made["EP over all axes"] = _experts(P(whole), P(whole))
    for axis in mesh.names:
        rest = tuple(name for name in mesh.names if name != axis)
        on = f"{axis} ({mesh.sizes[mesh.names.index(axis)]})"
        made |= {
            f"EP x DP, experts over {on}": _experts(P(axis), P(axis)),
            f"EP x TP, experts over {on}": _experts(P(axis, None, rest), P(axis, rest)),
            f"EP x FSDP, experts over {on}": _experts(
                P(axis, rest), P(axis, None, rest)
            ),
        }
    if not stacked:
        return made
    return {
        rule: {pattern: P(None, *spec) for pattern, spec in pins.items()}
        for rule, pins in made.items()
    }


def _experts(up: P, down: P) -> dict[str, P]:
    return {"*/gate": up, "*/up": up, "*/down": down}


def by_hand(
    program: Analysis, cluster: Cluster, seconds: float, *, stacked: bool
) -> dict[str, Any]:
    """The figures of the fastest plan of each rule that people write for experts."""
    found: dict[str, Any] = {}
    for mesh in candidate_meshes(cluster):
        for rule, pins in expert_layouts(mesh, stacked).items():
            name = f"{rule}, {mesh.label}"
            found[name] = planned(program, cluster, seconds, [mesh], pins)
    return found


def planned(
    program: Analysis,
    cluster: Cluster,
    seconds: float,
    meshes: Sequence[MeshShape] | None = None,
    pins: dict[str, P] | None = None,
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """The figures of the fastest plan of a program, with the layouts of pins."""
    begin = time.process_time()

    def restriction(pricer: Pricer) -> Restriction:
        layouts = pinned_layouts(program, pins or {}, pricer.mesh)
        return pin_restriction(program, layouts)

    try:
        best = search(
            program,
            cluster,
            meshes=meshes,
            seconds=seconds,
            restriction=restriction if pins else None,
            untried=None,
            weights=(HIDDEN,) if quick else None,
        ).best
    except PlanError as error:
        return {"refused": str(error).split("\n", 1)[0]}
    worth = worth_of(best.estimate, best.step_s)
    return {
        "step_s": best.step_s,
        "mfu": worth.mfu,
        "most_repeated": max(axis.repeated for axis in worth.axes),
        "memory_bytes": best.peak_memory_bytes,
        "scheme": worth.scheme,
        "cpu_s": round(time.process_time() - begin, 1),
        **({"quick": True} if quick else {}),
    }


def figures(
    name: str,
    text: str,
    seconds: float,
    known: dict[str, Any] | None = None,
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """The figures of one row; figures of other plans than ours may be known."""
    cluster = Cluster.parse(text)
    step, args = large.CASES[name](cluster)
    analysis = analyse(step, args)
    begin = time.process_time()
    blocks = for_devices(analysis, cluster.num_devices)
    rewriting_s = round(time.process_time() - begin, 1)
    begin = time.process_time()
    programs = alternatives(blocks, cluster.num_devices, cluster.device)
    slots = programs[0] if programs[0].row_capacity else None
    found: dict[str, Any] = {
        "model": name,
        "cluster": text,
        "row_blocks": blocks.row_blocks,
        "rewriting_cpu_s": rewriting_s,
        "rewriting_slots_cpu_s": round(time.process_time() - begin, 1),
    }
    if slots is not None:
        found["row_capacity"] = slots.row_capacity
        found["slots"] = planned(slots, cluster, seconds, quick=quick)
    if known is not None:
        return known | found
    found["blocks"] = planned(blocks, cluster, seconds)
    found["together"] = planned(programs[-1], cluster, seconds)
    if slots is not None:
        found["experts_by_hand"] = by_hand(
            slots, cluster, seconds, stacked=large.LANGUAGE[name].scanned
        )
    in_blocks = {
        f"{expert.name} on {expert.mesh}": expert.candidate.step_s
        for expert in expert_plans(analysis, cluster, seconds=seconds)
        if expert.candidate is not None
    }
    if in_blocks:
        best = min(in_blocks, key=lambda n: in_blocks[n])
        found |= {"best_by_hand": best, "best_by_hand_s": in_blocks[best]}
    return found


def audited(name: str, seconds: float) -> dict[str, Any]:
    """Bytes of two layers of a model, predicted and compiled for 8x8 H100."""
    model, text, device = large.LANGUAGE[name], "8x8:h100", "h100"
    short = dataclasses.replace(model, model=dataclasses.replace(model.model, layers=2))
    step, args = short.build(Cluster.parse(text))
    plan = autopar.plan(
        *(step, *args), cluster=text, seconds=seconds, stages=1, microbatches=1
    )
    stage = autopar.audit(step, *args, plan=plan, target=device).stages[0]
    assert stage.target is not None
    return {
        "row_blocks": plan.row_blocks,
        "predicted_bytes": dict(stage.predicted),
        "compiled_bytes": dict(stage.target.bytes_by_kind),
    }


def table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    workloads.row(
        *("model", "cluster", "slots s", "MFU %", "in blocks s", "MFU %"),
        *("together s", "best by hand s", "by hand", "scheme"),
    )
    workloads.row(*["---"] * 10)
    for r in rows:
        cells: list[str] = []
        for kind, names in (
            ("slots", ("step_s", "mfu")),
            ("blocks", ("step_s", "mfu")),
            ("together", ("step_s",)),
        ):
            own = r.get(kind, {})
            scale = {"step_s": 1.0}
            cells += [
                f"{own[n] * scale.get(n, 100.0):.3g}" if n in own else "none fits"
                for n in names
            ]
        every = {n: p for n, p in r.get("experts_by_hand", {}).items() if "step_s" in p}
        times = {n: p["step_s"] for n, p in every.items()}
        if "best_by_hand" in r:
            times[r["best_by_hand"]] = r["best_by_hand_s"]
        best = min(times, key=lambda n: times[n], default="")
        hand = (f"{times[best]:.3g}", best) if best else ("none fits", "")
        scheme = r.get("slots", r.get("blocks", {})).get("scheme", "")
        workloads.row(r["model"], r["cluster"], *cells, *hand, scheme)


def main() -> None:
    """Runs the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="rows whose text has this")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the solver")
    parser.add_argument("--json", type=pathlib.Path, default=DATA, help="data file")
    parser.add_argument("--ours", action="store_true", help="keep all other plans")
    parser.add_argument("--quick", action="store_true", help="one problem a mesh")
    parser.add_argument("--audit", action="store_true", help="compile for H100, too")
    asked = parser.parse_args()
    data: dict[str, Any] = {"rows": [], "audits": {}}
    if asked.json.exists():
        data = json.loads(asked.json.read_text())
    known = {(r["model"], r["cluster"]): r for r in data["rows"]}
    for row in (row for row in ROWS if asked.only in " ".join(row)):
        before = known.get(row, {}) if asked.ours else None
        known[row] = figures(*row, asked.seconds, before, quick=asked.quick)
        if asked.audit and row[0] not in data["audits"]:
            data["audits"][row[0]] = audited(row[0], asked.seconds)
    rows = [known[row] for row in ROWS if row in known]
    table(rows)
    data = {"command": "python benchmarks/dropless.py --audit"} | data | {"rows": rows}
    asked.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
