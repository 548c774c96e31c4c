"""What the compiler of an accelerator makes of a plan, beside what is predicted."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.compilers.compiled import CompiledProgram, Memory
from autopar.compilers.targets import Target
from autopar.compilers.timeline import DeviceTimeline, timeline
from autopar.cost.messages import messages
from autopar.reports.explain import BoundPlan
from autopar.reports.gradients import codec_rows
from autopar.reports.table import bytes_text, seconds_text
from autopar.terminal import columns
from autopar_passes.audit.compiled import hlo_collectives
from autopar_passes.audit.events import Event, EventLoop, Start, events


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetAudit:
    """A planned step as the compiler of a target makes it.

    Attributes:
      target: the device.
      memory: of one device, by the compiler.
      predicted_memory_bytes: the plan's peak.
      bytes_by_kind: bytes that one device sends in a step, by kind of collective.
      messages: messages of a step, by kind of collective.
      predicted_messages: messages that the cost model counts on.
      timeline: the schedule, priced; on a TPU its cycles alone mean anything.
      predicted_compute_s: seconds of work on arrays that the plan counts on.
      predicted_exposed_s: seconds of communication that the plan leaves exposed.
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
        """Seconds of kernels: by the compiler's cycles where it gives any."""
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
        """Messages, memory and time, predicted and compiled, as tables."""
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


def target_audit(
    bound: BoundPlan, target: Target, compiled: CompiledProgram
) -> TargetAudit:
    """Reads a compiled program and puts the predictions of its plan beside it."""
    axes = tuple(bound.plan.mesh["axes"].items())
    found = events(compiled.text, axes)
    sent: dict[str, float] = defaultdict(float)
    for collective in hlo_collectives(compiled.text, axes, as_run=True):
        sent[collective.kind] += collective.sent_bytes
    predicted = bound.plan.predicted
    return TargetAudit(
        target=target,
        memory=compiled.memory,
        predicted_memory_bytes=predicted.peak_memory_bytes,
        bytes_by_kind=dict(sent),
        messages=_messages(found),
        predicted_messages=predicted_messages(bound),
        timeline=timeline(found, bound.pricer),
        predicted_compute_s=predicted.compute_s,
        predicted_exposed_s=max(0.0, predicted.step_s - predicted.compute_s),
    )


def predicted_messages(bound: BoundPlan) -> dict[str, float]:
    """Messages of a step that the cost model counts on, by kind of collective."""
    out = defaultdict(
        float, messages(bound.pricer, bound.collectives, bound.assignment)
    )
    for row in codec_rows(bound.plan.gradients, bound.pricer):
        if row.sent_bytes:
            out[row.kind] += row.trips
    return dict(out)


def _messages(found: Sequence[Event], trips: float = 1.0) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for kind, count in _count(found, trips):
        out[kind] += count
    return dict(out)


def _count(found: Iterable[Event], trips: float) -> Iterable[tuple[str, float]]:
    for event in found:
        if isinstance(event, EventLoop):
            yield from _count(event.body, trips * event.trips)
        elif isinstance(event, Start):
            yield event.collectives[0].kind, trips


def _ratio(expected: float, found: float) -> str:
    return f"{expected / found:.2f}" if found else ""
