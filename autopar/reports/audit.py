"""Audits: a plan's predicted communication compared with that of compiled programs.

Each pipeline stage has programs of its own, and stages send values to each other. A
plan of one stage is one program.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.compilers.compiled import CompiledProgram, DeviceTimeline, Memory, timeline
from autopar.compilers.targets import Target
from autopar.cost.estimate import all_collectives
from autopar.cost.traffic import messages
from autopar.plans import Plan
from autopar.reports.explain import BoundPlan
from autopar.reports.gradients import codec_rows
from autopar.reports.staged import StageLink
from autopar.reports.table import bytes_text, mesh_text, replica_lines, seconds_text
from autopar.terminal import columns
from autopar_passes.audit.compiled import (
    CompiledAudit,
    Event,
    EventLoop,
    Start,
    device_events,
    hlo_collectives,
)
from autopar_passes.audit.partitioned import AuditedCollective


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetAudit:
    """A planned step compiled for a target, compared with the plan's predictions.

    Attributes:
      target: the kind of device.
      memory: memory of one device, according to the compiler. If the stage has several
        programs, it is the memory of the program with the largest peak, and its
        arguments include the other arrays that the device holds while this program
        runs.
      predicted_memory_bytes: peak memory that the plan predicts.
      bytes_by_kind: bytes that one device sends in a step, by kind of collective.
      messages: number of messages in a step, by kind of collective.
      predicted_messages: number of messages that the cost model predicts, by kind.
      timeline: the compiled schedule with seconds; on a TPU only its cycles are valid.
      predicted_compute_s: seconds of computation that the plan predicts.
      predicted_exposed_s: seconds of exposed communication that the plan predicts.
    """

    target: Target
    memory: Memory
    predicted_memory_bytes: float
    bytes_by_kind: Mapping[str, float]
    messages: Mapping[str, float]
    predicted_messages: Mapping[str, float]
    timeline: DeviceTimeline
    predicted_compute_s: float
    predicted_exposed_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of kernels, from the compiler's cycle counts if it gives any."""
        if self.target.clock_hz:
            return self.timeline.cycles / self.target.clock_hz
        return self.timeline.kernel_s

    def to_json(self) -> dict[str, Any]:
        """Returns the audit as plain dictionaries."""
        memory = dataclasses.asdict(self.memory)
        out: dict[str, Any] = {
            "name": self.target.name,
            "communication_bytes": sum(self.bytes_by_kind.values()),
            "by_kind": dict(self.bytes_by_kind),
            "messages": dict(self.messages),
            "predicted_messages": dict(self.predicted_messages),
            "memory": {**memory, "peak_bytes": self.memory.peak_bytes},
            "predicted_memory_bytes": self.predicted_memory_bytes,
            "compute_s": self.compute_s,
            "predicted_compute_s": self.predicted_compute_s,
        }
        if self.target.kind == "gpu":
            out["schedule"] = {
                "communication_s": self.timeline.communication_s,
                "exposed_s": self.timeline.exposed_s,
                "predicted_exposed_s": self.predicted_exposed_s,
                "hidden_messages": self.timeline.hidden,
            }
        return out

    def lines(self) -> list[str]:
        """Tables that compare predicted and compiled messages, memory and time."""
        kinds = sorted({*self.messages, *self.predicted_messages})
        rows = [("messages of a step", "predicted", self.target.name)]
        rows += [
            (
                kind,
                f"{self.predicted_messages.get(kind, 0):.0f}",
                f"{self.messages.get(kind, 0):.0f}",
            )
            for kind in kinds
        ]
        return [
            *columns(rows, right=(1, 2)),
            "",
            *columns(self._amounts(), right=(1, 2, 3)),
        ]

    def _amounts(self) -> list[tuple[str, str, str, str]]:
        held, expected = self.memory.peak_bytes, self.predicted_memory_bytes
        rows = [
            ("on each device", "predicted", self.target.name, "predicted / compiled"),
            ("memory", bytes_text(expected), bytes_text(held), _ratio(expected, held)),
            (
                "compute" + (" (cycles)" if self.target.clock_hz else ""),
                seconds_text(self.predicted_compute_s),
                seconds_text(self.compute_s),
                _ratio(self.predicted_compute_s, self.compute_s),
            ),
        ]
        if self.target.kind == "gpu":
            exposed_s, line = self.predicted_exposed_s, self.timeline
            rows.append(
                (
                    "exposed communication",
                    seconds_text(exposed_s),
                    seconds_text(line.exposed_s),
                    _ratio(exposed_s, line.exposed_s),
                )
            )
            hidden = f"{line.hidden:.0f} of {line.messages:.0f}"
            rows.append(("messages with kernels beside", "", hidden, ""))
        return rows


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRuns:
    """A compiled program of a stage, and its runs in a step.

    Attributes:
      program: the program.
      times: number of runs in a step.
      held_bytes: bytes of all arrays that a device holds as the program begins; None:
        the device holds only the program's arguments.
    """

    program: CompiledProgram
    times: int = 1
    held_bytes: int | None = None

    @property
    def memory(self) -> Memory:
        """Memory of a device while the program runs, with the arrays that it holds."""
        own = self.program.memory
        if self.held_bytes is None:
            return own
        return dataclasses.replace(own, argument_bytes=self.held_bytes)


def target_audit(
    bound: BoundPlan, target: Target, runs: Sequence[ProgramRuns]
) -> TargetAudit:
    """Compares the compiled programs of a stage with the predictions for the stage.

    Args:
      bound: the stage as a plan.
      target: the device.
      runs: the programs of the stage.
    """
    axes = tuple(bound.plan.mesh["axes"].items())
    sent: dict[str, float] = defaultdict(float)
    found: dict[str, float] = defaultdict(float)
    line = DeviceTimeline()
    for run in runs:
        events = device_events(run.program.text, axes)
        for collective in hlo_collectives(run.program.text, axes, as_run=True):
            sent[collective.kind] += run.times * collective.sent_bytes
        for kind, count in _count(events, run.times):
            found[kind] += count
        line += timeline(events, bound.pricer) * run.times
    predicted = bound.plan.predicted
    return TargetAudit(
        target=target,
        memory=max((run.memory for run in runs), key=lambda m: m.peak_bytes),
        predicted_memory_bytes=predicted.peak_memory_bytes,
        bytes_by_kind=dict(sent),
        messages=dict(found),
        predicted_messages=predicted_messages(bound),
        timeline=line,
        predicted_compute_s=predicted.compute_s,
        predicted_exposed_s=max(0.0, predicted.step_s - predicted.compute_s),
    )


def predicted_messages(bound: BoundPlan) -> dict[str, float]:
    """Number of messages in a step that the cost model predicts, by collective."""
    out = defaultdict(
        float, messages(bound.pricer, bound.collectives, bound.assignment)
    )
    for row in codec_rows(bound.plan.gradients, bound.pricer):
        if row.sent_bytes:
            out[row.kind] += row.trips
    return dict(out)


def _count(found: Iterable[Event], trips: float) -> Iterable[tuple[str, float]]:
    for event in found:
        if isinstance(event, EventLoop):
            yield from _count(event.body, trips * event.trips)
        elif isinstance(event, Start):
            yield event.collectives[0].kind, trips


def _ratio(expected: float, found: float) -> str:
    return f"{expected / found:.2f}" if found else ""


# Kind of collective -> bytes that one device sends in a step.
BytesByKind = Mapping[str, float]

ACTIVATIONS, COTANGENTS = "activations", "cotangents"
BATCH, ONCE, LAYERS = "batch", "once a step", "stacked layers"
# The traffic between stages that a plan predicts.
PREDICTED = (ACTIVATIONS, COTANGENTS, LAYERS)

# (source stage, target stage, kind of values) -> bytes that one device sends in a step.
BytesBetween = Mapping[tuple[int, int, str], float]


@dataclasses.dataclass(frozen=True, slots=True)
class StageAudit:
    """Communication of a stage: predicted, in the partitioned and in compiled programs.

    Attributes:
      plan: the stage as a plan.
      predicted: predicted bytes that one device sends in a step, by kind of collective.
      shardy: bytes that one device sends in the program as partitioned by Shardy, by
        kind of collective.
      compiled: communication of all compiled programs of a step, and the memory of a
        device; None if the programs were not compiled.
      target: the programs compiled for an accelerator; None if they were not compiled
        for one.
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
        return all(
            equal_bytes(predicted, sum(f.values()))
            for f in self.bytes_by_audit.values()
        )

    @property
    def bytes_by_audit(self) -> dict[str, BytesByKind]:
        """For each audit, by name, the bytes by kind of collective."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """The bytes that one device of a stage sends to another stage in a step.

    Attributes:
      source: the sending stage.
      target: the receiving stage.
      what: the kind of values. ``activations`` and ``cotangents`` are those of all
        microbatches. ``batch``: the rows of all microbatches that a later stage reads.
        ``once a step``: shared parameters, their gradients, and scalars of several
        stages. ``stacked layers``: layers that another stage holds between steps, with
        their optimizer state.
      predicted_bytes: bytes by the plan, which predicts only activations, cotangents
        and stacked layers.
      sent_bytes: bytes that the runtime copies.
    """

    source: int
    target: int
    what: str
    predicted_bytes: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Audit:
    """The predicted and the actual communication of a plan.

    Attributes:
      plan: the plan.
      stages: for each stage, the communication of its programs in a step.
      transfers: the communication between stages.
      replica: number of the replica that is described; None for a plan without
        replicas.
    """

    plan: Plan
    stages: tuple[StageAudit, ...]
    transfers: tuple[Transfer, ...] = ()
    replica: int | None = None

    @property
    def agrees(self) -> bool:
        """Whether all stages and transfers have the bytes that the plan predicts."""
        own = all(stage.agrees for stage in self.stages)
        return own and all(
            equal_bytes(t.predicted_bytes, t.sent_bytes)
            for t in self.transfers
            if t.what in PREDICTED
        )

    @property
    def first_predicted(self) -> BytesByKind:
        """`StageAudit.predicted` of the first stage."""
        return self.stages[0].predicted

    @property
    def shardy(self) -> BytesByKind:
        """`StageAudit.shardy` of the first stage."""
        return self.stages[0].shardy

    @property
    def first_compiled(self) -> CompiledAudit | None:
        """`StageAudit.compiled` of the first stage."""
        return self.stages[0].compiled

    @property
    def target(self) -> TargetAudit | None:
        """`StageAudit.target` of the first stage."""
        return self.stages[0].target

    # Deprecated names, kept for one release.
    predicted = first_predicted
    compiled = first_compiled

    def to_json(self) -> dict[str, Any]:
        """Returns the audit as plain dictionaries."""
        if len(self.stages) == 1:
            return self.stages[0].to_json()
        return {
            "stage_audits": [stage.to_json() for stage in self.stages],
            "transfers": [dataclasses.asdict(t) for t in self.transfers],
        }

    def __str__(self) -> str:
        """The comparison as tables, each with a verdict."""
        first = self.stages[0]
        if len(self.stages) == 1:
            lines = [f"plan     {self.plan.cluster}, mesh {mesh_text(first.plan)}"]
            if self.replica is not None:
                lines.append(replica_lines(self.plan)[self.replica])
            return "\n".join([*lines, "", *stage_lines(first)])
        lines = [f"plan     {self.plan.cluster}, {len(self.stages)} stages"]
        for number, stage in enumerate(self.stages):
            lines += ["", f"stage {number}: mesh {mesh_text(stage.plan)}"]
            lines += stage_lines(stage)
        return "\n".join([*lines, "", *transfer_lines(self.transfers)])


def without_rounding(bound: BoundPlan) -> BoundPlan:
    """The plan with messages in the program's own dtypes, without rounding.

    The partitioned program keeps these dtypes. A TPU's compiler rounds the operands of
    products only later.
    """
    if not bound.pricer.cluster.device.rounds_operands:
        return bound
    found = all_collectives(bound.assignment, bound.pricer, rounds=False)
    return dataclasses.replace(bound, collectives=(*found, *bound.crossing))


def predicted_by_kind(bound: BoundPlan) -> BytesByKind:
    """The bytes that one device sends in a step by the cost model, by collective."""
    out: dict[str, float] = defaultdict(float)
    for collective in bound.collectives:
        out[collective.step.kind] += collective.sent_bytes(bound.pricer)
    for row in codec_rows(bound.plan.gradients, bound.pricer):
        if row.sent_bytes:
            out[row.kind] += row.sent_bytes
    return dict(out)


def bytes_by_kind(collectives: Iterable[AuditedCollective]) -> BytesByKind:
    """Total bytes that one device sends in a step, by kind of collective."""
    out: dict[str, float] = defaultdict(float)
    for collective in collectives:
        out[collective.kind] += collective.sent_bytes
    return dict(out)


def _totals(found: BytesByKind) -> dict[str, Any]:
    return {"communication_bytes": sum(found.values()), "by_kind": dict(found)}


def stage_lines(audit: StageAudit) -> list[str]:
    """The comparison of a stage as tables, and a verdict of each audit."""
    lines = kind_rows(audit)
    if audit.compiled is not None:
        held = bytes_text(audit.compiled.peak_memory_bytes)
        expected = bytes_text(audit.plan.predicted.peak_memory_bytes)
        lines += ["", f"memory   predicted {expected}, compiled {held} on each device"]
        lines += [f"note     {name}" for name in audit.compiled.exceptions]
    if audit.target is not None:
        lines += ["", *audit.target.lines()]
    return [*lines, "", *verdicts(audit)]


def kind_rows(audit: StageAudit) -> list[str]:
    """The bytes of each kind of collective as a table."""
    audits = audit.bytes_by_audit
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


def verdicts(audit: StageAudit) -> list[str]:
    """For each audit, a sentence whether it agrees with the prediction."""
    predicted, out = sum(audit.predicted.values()), list[str]()
    for name, found in audit.bytes_by_audit.items():
        total = sum(found.values())
        if equal_bytes(predicted, total):
            out.append(f"{name} communicates what the plan predicts")
        else:
            share = f" ({total / predicted - 1:+.2%})" if predicted else ""
            out.append(
                f"{name} communicates {bytes_text(abs(total - predicted))} "
                f"{'more' if total > predicted else 'less'}{share}"
            )
    return out


def transfers_of(
    links: Iterable[StageLink],
    layers: Iterable[tuple[int, int, float]],
    sent: BytesBetween,
    microbatches: int,
) -> tuple[Transfer, ...]:
    """The transfers between stages, with predicted and sent bytes.

    Args:
      links: the plan's predictions for a microbatch.
      layers: the plan's predictions of stacked layers: sender, receiver and bytes.
      sent: bytes that the runtime sends.
      microbatches: number of microbatches in a step.
    """
    predicted: dict[tuple[int, int, str], float] = defaultdict(float)
    for link in links:
        ahead, back = (link.source, link.target), (link.target, link.source)
        predicted[(*ahead, ACTIVATIONS)] += microbatches * link.activation_bytes
        predicted[(*back, COTANGENTS)] += microbatches * link.cotangent_bytes
    for source, target, nbytes in layers:
        predicted[source, target, LAYERS] += nbytes
    keys = sorted({*predicted, *sent})
    every = [Transfer(*k, predicted.get(k, 0.0), sent.get(k, 0.0)) for k in keys]
    return tuple(t for t in every if t.predicted_bytes or t.sent_bytes)


def transfer_lines(transfers: Sequence[Transfer]) -> list[str]:
    """The transfers between stages as a table with a verdict."""
    rows = [
        (
            f"stage {t.source}",
            f"stage {t.target}",
            t.what,
            bytes_text(t.predicted_bytes) if t.what in PREDICTED else "",
            bytes_text(t.sent_bytes),
        )
        for t in transfers
    ]
    lines = columns([("from", "to", "what", "predicted", "sent"), *rows], right=(3, 4))
    counted = [t for t in transfers if t.what in PREDICTED]
    if all(equal_bytes(t.predicted_bytes, t.sent_bytes) for t in counted):
        lines.append("stages send each other what the plan predicts")
    else:
        more = sum(t.sent_bytes - t.predicted_bytes for t in counted)
        lines.append(f"stages send {bytes_text(more)} more than the plan predicts")
    if rest := sum(t.sent_bytes for t in transfers if t.what not in PREDICTED):
        lines.append(f"and {bytes_text(rest)} that no prediction counts")
    return lines
