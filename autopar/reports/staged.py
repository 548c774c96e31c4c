"""The time of a plan of several stages, by stage, and the messages between stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.planner.record import assignment_of
from autopar.planner.stages.entry import cut_as
from autopar.planner.stages.stage_costs import (
    link_bytes,
    sent_layers_s,
    wire_collectives,
)
from autopar.planner.stages.submeshes import one_stage, stage_pricers
from autopar.plans import Plan
from autopar.reports.attribution import AttributedTime, attribute, step_of
from autopar.reports.explain import BoundPlan, bind_part
from autopar.reports.schedule import play_plan
from autopar.reports.table import bytes_text, seconds_text
from autopar.steps.analysis import Analysis
from autopar.steps.stages import CutStep
from autopar.terminal import columns

WAITS = "waits for other stages"
SENT_LAYERS = "sends stacked layers"
_HEADING = (
    "from", "to", "activations", "cotangents", "of each microbatch", "in the step",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BoundStages:
    """A plan of several stages with its step.

    Attributes:
      plan: the plan.
      cut: the step, cut into stages.
      stages: each stage as a plan of its own. The predicted step of a stage contains
        the work and communication of all microbatches, but not the waits for other
        stages.
    """

    plan: Plan
    cut: CutStep
    stages: tuple[BoundPlan, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StageLink:
    """The messages between successive parts of a pipeline on different stages.

    Without interleaving a stage has one part of the layers; with interleaving, several.

    Attributes:
      source: the stage of the earlier part.
      target: the stage of the later part.
      activation_bytes: bytes of activations that one device sends per microbatch.
      cotangent_bytes: bytes of cotangents that one device of ``target`` sends back per
        microbatch.
      activation_s: seconds of one microbatch's activations, with latency.
      cotangent_s: seconds of one microbatch's cotangents, with latency.
      microbatches: number of microbatches in a step.
    """

    source: int
    target: int
    activation_bytes: float
    cotangent_bytes: float
    activation_s: float
    cotangent_s: float
    microbatches: int

    @property
    def step_s(self) -> float:
        """Seconds for which the link is used in a step."""
        return self.microbatches * (self.activation_s + self.cotangent_s)


def bind_stages(analysis: Analysis, plan: Plan, cluster: Cluster) -> BoundStages:
    """Combines a plan of several stages with its step.

    Args:
      analysis: the step on the whole batch.
      plan: the plan.
      cluster: all devices.

    Raises:
      PlanError: the plan is for another step or cluster.
    """
    cut = cut_as(analysis, plan)
    assert plan.pipeline is not None
    alone = [one_stage(plan, number) for number in range(len(plan.stages))]
    layouts = [assignment_of(cut.stages[k], own) for k, own in enumerate(alone)]
    pricers = stage_pricers(plan, cluster)
    stages = tuple(
        bind_part(
            alone[number],
            layouts[number],
            pricers[number],
            seconds,
            plan.pipeline.memory_bytes[number],
            [c for _, c in wire_collectives(cut, number, layouts)],
        )
        for number, seconds in enumerate(busy_s(plan))
    )
    return BoundStages(plan, cut, stages)


def busy_s(plan: Plan) -> list[float]:
    """For each stage, the seconds of a step during which the stage runs tasks."""
    table, seconds, _ = play_plan(plan)
    tasks_s = seconds.task_s.sum(axis=1) * plan.microbatches
    return [
        float(tasks_s[stage :: table.stages].sum() + seconds.step_s[stage])
        for stage in range(table.stages)
    ]


def staged_parts(bound: BoundStages, by: str) -> list[list[AttributedTime]]:
    """For each stage, its predicted seconds of a step, divided among causes.

    Args:
      bound: the plan.
      by: ``operator`` or ``layer``.
    """
    out: list[list[AttributedTime]] = []
    sending_s = sent_layers_s(
        bound.cut,
        bound.plan.cluster.read(),
        [stage.devices for stage in bound.plan.stages],
        [stage.assignment for stage in bound.stages],
    )
    for stage, own_s in zip(bound.stages, sending_s, strict=True):
        parts = attribute(stage, by)
        if own_s:
            parts.append(AttributedTime(SENT_LAYERS, (), "", own_s))
        waits_s = bound.plan.predicted.step_s - step_of(parts)
        out.append([*parts, AttributedTime(WAITS, (), "", waits_s)])
    return out


def links(bound: BoundStages) -> list[StageLink]:
    """The links between successive parts on different stages, in order."""
    data, stages = bound.plan.pipeline, bound.cut.cut.stage_of
    assert data is not None
    layouts = [stage.assignment for stage in bound.stages]
    out: list[StageLink] = []
    for part in range(len(data.parts) - 1):
        if stages[part] == stages[part + 1]:
            continue
        ahead, back = link_bytes(bound.cut, layouts, part)
        once = data.latency_s[part]
        out.append(
            StageLink(
                stages[part],
                stages[part + 1],
                ahead,
                back,
                data.forward_link_s[part] + once,
                data.backward_link_s[part] + once,
                bound.plan.microbatches,
            )
        )
    return out


def link_lines(found: Sequence[StageLink]) -> list[str]:
    """The links between stages as a table."""
    rows = [
        (
            f"stage {link.source}",
            f"stage {link.target}",
            bytes_text(link.activation_bytes),
            bytes_text(link.cotangent_bytes),
            seconds_text(link.activation_s + link.cotangent_s),
            seconds_text(link.step_s),
        )
        for link in found
    ]
    return columns([_HEADING, *rows], right=(2, 3, 4, 5))
