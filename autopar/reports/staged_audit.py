"""Audits of plans of several stages: each stage's programs, and what goes between."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.plans import Plan
from autopar.reports.audit import Audit, equal_bytes, kind_rows, verdicts
from autopar.reports.staged import Link
from autopar.reports.table import bytes_text, mesh_text
from autopar.terminal import columns

ACTIVATIONS, COTANGENTS = "activations", "cotangents"
BATCH, ONCE = "batch", "once a step"
# What a plan predicts of the traffic between stages.
PREDICTED = (ACTIVATIONS, COTANGENTS)

# Stage, other stage and what goes there -> bytes that one device sends in a step.
BytesBetween = Mapping[tuple[int, int, str], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """What one device of a stage sends to another stage in a step.

    Attributes:
      source: the stage.
      target: the other stage.
      what: ``activations`` and ``cotangents`` of all microbatches; ``batch``: the rows
        of all microbatches that a later stage reads; ``once a step``: shared
        parameters, their gradients, and numbers of several stages.
      predicted_bytes: as the plan predicts, which counts the first two.
      sent_bytes: as the runtime copies them.
    """

    source: int
    target: int
    what: str
    predicted_bytes: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class StagedAudit:
    """The communication of a plan of several stages, predicted and as it runs.

    Attributes:
      plan: the plan.
      stages: of each stage, what its tasks communicate in a step. What is compiled is
        told of all tasks together, its memory of the task that needs most.
      transfers: what goes between stages.
    """

    plan: Plan
    stages: tuple[Audit, ...]
    transfers: tuple[Transfer, ...]

    @property
    def agrees(self) -> bool:
        """Whether all audits find the bytes that the plan predicts."""
        own = all(stage.agrees for stage in self.stages)
        return own and all(
            equal_bytes(t.predicted_bytes, t.sent_bytes)
            for t in self.transfers
            if t.what in PREDICTED
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the audit as plain dictionaries."""
        return {
            "stage_audits": [stage.to_json() for stage in self.stages],
            "transfers": [dataclasses.asdict(t) for t in self.transfers],
        }

    def __str__(self) -> str:
        """The comparison as tables, and a verdict on each."""
        lines = [f"plan     {self.plan.cluster}, {len(self.stages)} stages"]
        for number, stage in enumerate(self.stages):
            lines += ["", f"stage {number}: mesh {mesh_text(stage.plan)}"]
            lines += [*kind_rows(stage), *verdicts(stage)]
            if stage.compiled is not None:
                held = bytes_text(stage.compiled.peak_memory_bytes)
                lines.append(f"memory   compiled {held} for the task that needs most")
        return "\n".join([*lines, "", *transfer_lines(self.transfers)])


def transfers_of(
    links: Iterable[Link], sent: BytesBetween, microbatches: int
) -> tuple[Transfer, ...]:
    """What is predicted and sent between stages, by stage.

    Args:
      links: what the plan predicts.
      sent: what the runtime sends.
      microbatches: of a step.
    """
    predicted: dict[tuple[int, int, str], float] = defaultdict(float)
    for link in links:
        ahead, back = (link.source, link.target), (link.target, link.source)
        predicted[(*ahead, ACTIVATIONS)] += microbatches * link.activation_bytes
        predicted[(*back, COTANGENTS)] += microbatches * link.cotangent_bytes
    keys = sorted({*predicted, *sent})
    every = [Transfer(*k, predicted.get(k, 0.0), sent.get(k, 0.0)) for k in keys]
    return tuple(t for t in every if t.predicted_bytes or t.sent_bytes)


def transfer_lines(transfers: Sequence[Transfer]) -> list[str]:
    """What goes between stages as a table, and a verdict."""
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
