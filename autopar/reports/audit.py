"""Audits: the communication that a plan predicts beside what the compiler does."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.cost.reassociation import compiled_traffic
from autopar.plans import Plan
from autopar.reports.explain import BoundPlan
from autopar.reports.gradients import codec_rows
from autopar.reports.table import bytes_text, mesh_text
from autopar.reports.target_audit import TargetAudit
from autopar.terminal import columns
from autopar_passes.audit.collectives import AuditedCollective
from autopar_passes.audit.compiled import CompiledAudit, compiled_audit
from autopar_passes.audit.partitioned import shardy_collectives

# Kind of collective -> bytes that one device sends in a step.
BytesByKind = Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Audit:
    """Communication as a plan predicts it, as Shardy partitions it, as XLA compiles it.

    Attributes:
      plan: the plan.
      predicted: bytes that one device sends in a step, by kind of collective.
      shardy: the same, of the program as the compiler's partitioner rewrites it.
      compiled: communication and memory of the compiled step; None if it was not
        compiled.
      target: the step as the compiler of an accelerator makes it; None if that was
        not asked for.
    """

    plan: Plan
    predicted: BytesByKind
    shardy: BytesByKind
    compiled: CompiledAudit | None = None
    target: TargetAudit | None = None

    @property
    def agrees(self) -> bool:
        """Whether every audit finds the bytes that the plan predicts."""
        predicted = sum(self.predicted.values())
        return all(equal_bytes(predicted, sum(f.values())) for f in self.found.values())

    @property
    def found(self) -> dict[str, BytesByKind]:
        """Name of an audit -> bytes by kind."""
        out: dict[str, BytesByKind] = {"shardy": self.shardy}
        if self.compiled is not None:
            out["xla"] = bytes_by_kind(self.compiled.collectives)
        if self.target is not None:
            out[self.target.target.name] = self.target.bytes_by_kind
        return out

    def to_json(self) -> dict[str, Any]:
        """Returns the audit as plain dictionaries."""
        out: dict[str, Any] = {
            "predicted_by_kind": dict(self.predicted),
            "shardy": _totals(self.shardy),
        }
        if self.compiled is not None:
            out["xla"] = {
                **_totals(bytes_by_kind(self.compiled.collectives)),
                "communication_bytes": self.compiled.communication_bytes,
                "peak_memory_bytes": self.compiled.peak_memory_bytes,
                "exceptions": list(self.compiled.exceptions),
            }
        if self.target is not None:
            out["target"] = self.target.to_json()
        return out

    def __str__(self) -> str:
        """The comparison as a table, and a verdict."""
        return "\n".join(audit_lines(self))


def audit_lowered(
    bound: BoundPlan,
    lowered: Any,
    compiled: Any = None,
    target: TargetAudit | None = None,
) -> Audit:
    """Compares a plan with its lowered, and perhaps compiled, program.

    Args:
      bound: the plan with its step and cluster.
      lowered: JAX's ``Lowered`` of the planned step.
      compiled: JAX's ``Compiled`` of it.
      target: what the compiler of an accelerator makes of it.
    """
    axes = tuple(bound.plan.mesh["axes"].items())
    return Audit(
        bound.plan,
        predicted_by_kind(bound if target is not None else unrounded(bound)),
        bytes_by_kind(shardy_collectives(lowered)),
        None if compiled is None else compiled_audit(compiled, axes),
        target,
    )


def unrounded(bound: BoundPlan) -> BoundPlan:
    """A plan for devices that send values in the types that the program gives them.

    Partitioning keeps these types; a TPU's compiler rounds operands of products later.
    """
    if not bound.pricer.cluster.device.rounds_operands:
        return bound
    found = compiled_traffic(bound.assignment, bound.pricer, rounds=False)
    return dataclasses.replace(bound, collectives=tuple(found))


def predicted_by_kind(bound: BoundPlan) -> BytesByKind:
    """The bytes that the cost model expects, by kind of collective."""
    out: dict[str, float] = defaultdict(float)
    for collective in bound.collectives:
        out[collective.step.kind] += collective.sent_bytes(bound.pricer)
    for row in codec_rows(bound.plan.gradients, bound.pricer):
        if row.sent_bytes:
            out[row.kind] += row.sent_bytes
    return dict(out)


def bytes_by_kind(collectives: Iterable[AuditedCollective]) -> BytesByKind:
    """Sums what one device sends, by kind of collective."""
    out: dict[str, float] = defaultdict(float)
    for collective in collectives:
        out[collective.kind] += collective.sent_bytes
    return dict(out)


def _totals(found: BytesByKind) -> dict[str, Any]:
    return {"communication_bytes": sum(found.values()), "by_kind": dict(found)}


def audit_lines(audit: Audit) -> list[str]:
    """The comparison as a table, and a verdict."""
    lines = [f"plan     {audit.plan.cluster}, mesh {mesh_text(audit.plan)}", ""]
    lines += kind_rows(audit)
    if audit.compiled is not None:
        held = bytes_text(audit.compiled.peak_memory_bytes)
        expected = bytes_text(audit.plan.predicted.peak_memory_bytes)
        lines += ["", f"memory   predicted {expected}, compiled {held} on each device"]
        lines += [f"note     {name}" for name in audit.compiled.exceptions]
    if audit.target is not None:
        lines += ["", *audit.target.lines()]
    return [*lines, "", *verdicts(audit)]


def kind_rows(audit: Audit) -> list[str]:
    """The bytes of each kind of collective as a table."""
    audits = audit.found
    kinds = sorted({*audit.predicted, *(k for found in audits.values() for k in found)})
    rows: list[tuple[str, ...]] = [
        ("bytes sent from each device", "predicted", *audits)
    ]
    for kind in kinds:
        values = (audit.predicted, *audits.values())
        rows.append((kind, *(bytes_text(v.get(kind, 0.0)) for v in values)))
    totals = (sum(v.values()) for v in (audit.predicted, *audits.values()))
    rows.append(("total", *map(bytes_text, totals)))
    return columns(rows, right=range(1, len(rows[0])))


def equal_bytes(predicted: float, total: float) -> bool:
    """Whether bytes are as predicted, up to rounding."""
    return math.isclose(predicted, total, rel_tol=1e-6, abs_tol=0.5)


def verdicts(audit: Audit) -> list[str]:
    """Says of each way to look whether it agrees with the prediction."""
    predicted, out = sum(audit.predicted.values()), list[str]()
    for name, found in audit.found.items():
        total = sum(found.values())
        if equal_bytes(predicted, total):
            out.append(f"{name} communicates what the plan predicts")
        else:
            share = f" ({total / predicted - 1:+.2%})" if predicted else ""
            out.append(
                f"{name} communicates {bytes_text(total - predicted)} more{share}"
            )
    return out
