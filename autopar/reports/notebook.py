"""A plan in a notebook: one line as text, and a short table with a picture as HTML."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from autopar.plans import Plan, StagePlan
from autopar.plans.schema import set_renderer
from autopar.plans.specs import spec_text
from autopar.reports.picture import picture
from autopar.reports.table import (
    bytes_text,
    communication_text,
    input_rows,
    mesh_text,
    seconds_text,
    shape_of_plan,
    stage_text,
    template,
)
from autopar.reports.worth import unused_text, worth_facts

# Role of an input -> most rows of the table; most arrays in the picture.
_SHOWN = {"parameter": 8, "batch": 2}
MOST_DRAWN = 4


@set_renderer("line")
def line(plan: Plan) -> str:
    """Returns the plan in one line: where, on which mesh, and what a step should cost.

    Such as ``<Plan 8:cpu, mesh data=8, step 3.46 ms, 1.2 MB on each device, proved
    optimal, no codecs>``.
    """
    expected = plan.predicted
    unused = unused_text(plan.worth)
    return (
        f"<Plan {plan.cluster}, {shape_of_plan(plan)}, "
        f"step {seconds_text(expected.step_s)}, "
        f"{bytes_text(expected.peak_memory_bytes)} on each device, "
        f"{plan.solver.text}, {codecs_text(plan)}{f', {unused}' if unused else ''}>"
    )


def codecs_text(plan: Plan) -> str:
    """The codecs, the most used first, such as ``codecs int4 x12, dense x3``."""
    counts = Counter(
        gradient.codec.partition(":")[0]
        for stage in plan.stages
        for gradient in stage.gradients
        if gradient.codec
    )
    if not counts:
        return "no codecs"
    named = [f"{name} x{count}" for name, count in counts.most_common()]
    return f"codecs {', '.join(named)}"


@set_renderer("cell")
def cell(plan: Plan) -> str:
    """Returns the plan as HTML for a notebook; it needs no other file."""
    parts = [_table(facts(plan))]
    for number, stage in enumerate(plan.stages):
        if len(plan.stages) > 1:
            parts.append(f"<p>{html.escape(stage_text(number, stage))}</p>")
        largest = largest_inputs(plan, stage)
        rows = input_rows(plan, largest)
        parts += [
            _table([("largest inputs", "role", "shape", "layout"), *rows], head=True),
            f'<div style="overflow-x:auto">{plan_picture(plan, largest)}</div>',
        ]
    return f"<div>{''.join(parts)}</div>"


def facts(plan: Plan) -> list[tuple[str, str]]:
    """The rows of the first table: a name, and what the plan says."""
    expected = plan.predicted
    meshes = ", ".join(mesh_text(stage) for stage in plan.stages)
    return [
        ("cluster", str(plan.cluster)),
        ("mesh", meshes),
        (
            "predicted step",
            f"{seconds_text(expected.step_s)} (compute "
            f"{seconds_text(expected.compute_s)}, communication "
            f"{communication_text(expected)})",
        ),
        ("memory", f"{bytes_text(expected.peak_memory_bytes)} on each device"),
        ("sends", f"{bytes_text(expected.communication_bytes)} from each device"),
        *worth_facts(plan.worth),
        ("solver", plan.solver.text),
        ("gradients", codecs_text(plan)),
    ]


def largest_inputs(plan: Plan, stage: StagePlan) -> StagePlan:
    """The stage with its largest parameters and arrays of the batch alone.

    Layers that repeat count once. The optimizer's state usually lies as its
    parameters do, and is left out.
    """
    kept: set[str] = set()
    for role, most in _SHOWN.items():
        sizes: dict[str, int] = {}
        for path in stage.inputs:
            if plan.roles.get(path) == role:
                size = math.prod(plan.shapes.get(path, ()))
                sizes[template(path)] = max(size, sizes.get(template(path), 0))
        kept.update(sorted(sizes, key=lambda path: -sizes[path])[:most])
    inputs = {
        path: spec
        for path, spec in stage.inputs.items()
        if template(path) in kept and plan.roles.get(path) in _SHOWN
    }
    return msgspec.structs.replace(stage, inputs=inputs)


def plan_picture(plan: Plan, stage: StagePlan) -> str:
    """The mesh, and the largest array of each layout, the largest first."""
    sizes = {path: math.prod(plan.shapes.get(path, ())) for path in stage.inputs}
    drawn: dict[str, str] = {}
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        drawn.setdefault(spec_text(stage.inputs[path]), path)
    arrays = [(path, stage.inputs[path]) for path in drawn.values()]
    return picture(stage.mesh["axes"], arrays[:MOST_DRAWN])


def _table(rows: Sequence[Sequence[str]], *, head: bool = False) -> str:
    """Rows as a table; ``head`` makes the first one its heading."""
    lines = [
        "".join(
            f'<{tag} style="text-align:left">{html.escape(text)}</{tag}>'
            for text in row
        )
        for k, row in enumerate(rows)
        for tag in ["th" if head and k == 0 else "td"]
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
