"""``autopar audit``: what the compiler will really communicate, against the plan."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from autopar.cli import common
from autopar.planner.codec_traffic import codec_rows
from autopar.planner.explain import context_of
from autopar.plans import Plan
from autopar.plans.table import bytes_text, columns, mesh_text
from autopar.runtime.planned import abstract_mesh, device_mesh, planned_step
from autopar_passes.audit.collectives import AuditedCollective
from autopar_passes.audit.partitioned import shardy_collectives

# Bytes sent, by kind of collective.
Traffic = dict[str, float]


def audit(
    source: common.PlanOrTarget,
    words: common.PlanWords = None,
    cluster: common.ClusterSpec = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile for simulated devices too; slower."),
    ] = False,
    seconds: common.Seconds = None,
    max_axes: common.MaxAxes = None,
    compression: common.Compression = "none",
    error_budget: common.ErrorBudget = None,
    as_json: common.Json = False,
) -> None:
    """Partitions a planned step with the compiler, and compares the communication.

    No device is needed. With --compile the step is also compiled for simulated
    CPU devices, and the memory of the compiled step is read.
    """
    limits = common.Limits(seconds, max_axes, compression, error_budget)
    with common.progress() as say:
        if compiled:
            _start_devices(source, cluster)
        found = common.subject(source, words, cluster, limits, say)
        say("partitioning")
        result = audit_plan(found, compiled, say)
    if as_json:
        common.print_json(found.plan.to_json() | result)
    else:
        typer.echo("\n".join(audit_lines(found.plan, result)))


def _start_devices(source: str, cluster: str | None) -> None:
    """Simulates the devices of the plan before anything starts JAX."""
    if common.is_plan_file(source):
        count = math.prod(Plan.load(source).axis_sizes)
    else:
        count = common.read_cluster(cluster).num_devices
    common.simulate_devices(count)


def audit_plan(
    found: common.Subject, compiled: bool, say: common.Say
) -> dict[str, dict[str, Any]]:
    """What a plan predicts, what Shardy makes of it and what is compiled."""
    context = context_of(found.analysis, found.plan, found.cluster)
    predicted: Traffic = defaultdict(float)
    for collective in context.collectives:
        predicted[collective.step.kind] += collective.sent_bytes(context.pricer)
    for row in codec_rows(found.plan, context.pricer):
        if row.sent_bytes:
            predicted[row.kind] += row.sent_bytes
    abstract = planned_step(found.analysis, found.plan, abstract_mesh(found.plan))
    lowered = abstract.lower()
    out = {
        "predicted_by_kind": dict(predicted),
        "shardy": _summed(shardy_collectives(lowered)),
    }
    if compiled:
        say("compiling")
        out["xla"] = _compiled(found)
    return out


def _summed(collectives: Iterable[AuditedCollective]) -> dict[str, Any]:
    kinds: Traffic = defaultdict(float)
    for collective in collectives:
        kinds[collective.kind] += collective.sent_bytes
    return {"communication_bytes": sum(kinds.values()), "by_kind": dict(kinds)}


def _compiled(found: common.Subject) -> dict[str, Any]:
    from autopar_passes.audit.compiled import compiled_audit

    mesh = device_mesh(found.plan)
    step = planned_step(found.analysis, found.plan, mesh).lower().compile()
    axes = tuple(found.plan.mesh["axes"].items())
    result = compiled_audit(step, axes)
    return {
        **_summed(result.collectives),
        "communication_bytes": result.communication_bytes,
        "peak_memory_bytes": result.peak_memory_bytes,
        "exceptions": list(result.exceptions),
    }


def audit_lines(plan: Plan, result: dict[str, dict[str, Any]]) -> list[str]:
    """The comparison as a table, and a verdict."""
    predicted: Traffic = result["predicted_by_kind"]
    audits: dict[str, Traffic] = {
        name: result[name]["by_kind"] for name in ("shardy", "xla") if name in result
    }
    kinds = sorted({*predicted, *(k for found in audits.values() for k in found)})
    rows: list[tuple[str, ...]] = [
        ("bytes sent from each device", "predicted", *audits)
    ]
    for kind in kinds:
        values = (predicted, *audits.values())
        rows.append((kind, *(bytes_text(v.get(kind, 0.0)) for v in values)))
    totals = (sum(predicted.values()), *(sum(v.values()) for v in audits.values()))
    rows.append(("total", *map(bytes_text, totals)))
    lines = [f"plan     {plan.cluster}, mesh {mesh_text(plan)}", ""]
    lines += columns(rows, right=range(1, len(rows[0])))
    if "xla" in result:
        held = bytes_text(result["xla"]["peak_memory_bytes"])
        expected = bytes_text(plan.predicted.peak_memory_bytes)
        lines += ["", f"memory   predicted {expected}, compiled {held} on each device"]
        lines += [f"note     {name}" for name in result["xla"]["exceptions"]]
    return [
        *lines,
        "",
        *_verdicts(totals[0], dict(zip(audits, totals[1:], strict=True))),
    ]


def _verdicts(predicted: float, audited: dict[str, float]) -> list[str]:
    """Says of each audit whether it agrees with the prediction."""
    out: list[str] = []
    for name, total in audited.items():
        if math.isclose(predicted, total, rel_tol=1e-6, abs_tol=0.5):
            out.append(f"{name} communicates what the plan predicts")
        else:
            share = f" ({total / predicted - 1:+.2%})" if predicted else ""
            out.append(
                f"{name} communicates {bytes_text(total - predicted)} more{share}"
            )
    return out
