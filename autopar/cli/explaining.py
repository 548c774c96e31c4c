"""The work of ``autopar explain``."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import Any

from autopar.cli import common
from autopar.cli.commands.plans import ExplainCommand
from autopar.cli.output import Result
from autopar.compression.codecs.registry import parse_codec
from autopar.cost.codecs import CodecPrice
from autopar.cost.live import Live, live
from autopar.errors import PlanError
from autopar.planner.candidate import WORTHWHILE
from autopar.plans import GradientDecision, Plan
from autopar.plans.specs import spec_text
from autopar.reports.alternatives import (
    Alternative,
    alternatives,
    stage_trials,
    trials_of,
)
from autopar.reports.attribution import WAYS, AttributedTime, attribute, part_lines
from autopar.reports.explain import (
    BoundPlan,
    LayoutDecision,
    bind_plan,
    communication_rows,
    input_decisions,
)
from autopar.reports.gradients import codec_options, codec_rows
from autopar.reports.staged import (
    BoundStages,
    bind_stages,
    link_lines,
    links,
    staged_parts,
)
from autopar.reports.table import (
    CollectiveRow,
    bytes_text,
    collapse,
    collective_lines,
    method_text,
    note_lines,
    over_text,
    ratio_text,
    seconds_text,
    shape_text,
    stage_text,
    summary_lines,
    template,
)
from autopar.steps.sums import worth_a_codec
from autopar.terminal import columns, cut_name, names_text
from autopar_passes.layer_loops.split import whole_path

# Functions for the part of ``autopar explain`` about the codecs of gradients.

_HEADING = ("codec", "sends", "ratio", "link", "device", "error", "counts as", "")


def gradients_of(
    bound: BoundPlan, paths: Sequence[str]
) -> list[list[GradientDecision]]:
    """Groups the gradients of some parameters by name pattern, codec, axes and shape.

    Args:
      bound: the plan.
      paths: the paths of the parameters.
    """
    groups: dict[tuple[object, ...], list[GradientDecision]] = {}
    for gradient in bound.plan.gradients:
        if gradient.name in paths:
            how = (template(gradient.name), method_text(gradient), over_text(gradient))
            key = (*how, gradient.local_shape, gradient.scatter)
            groups.setdefault(key, []).append(gradient)
    return list(groups.values())


def options_of(bound: BoundPlan, gradient: GradientDecision) -> list[CodecPrice]:
    """Returns the codecs with which a gradient can be sent, the fastest first."""
    return codec_options(gradient, bound.pricer)


def gradient_lines(bound: BoundPlan, paths: Sequence[str], limit: int) -> list[str]:
    """Lists the codecs of the gradients of parameters, and the costs of other codecs.

    Args:
      bound: the plan.
      paths: the paths of the parameters.
      limit: the number of other codecs to list; the fastest are listed.
    """
    lines: list[str] = []
    for alike in gradients_of(bound, paths):
        first = alike[0]
        names = names_text(collapse(g.name for g in alike))
        over = f"over {over_text(first)}, {first.workers} devices"
        lines += ["", f"  Gradient of {names}, {over}: {method_text(first)}"]
        if not worth_a_codec(first.shape):
            lines.append("    vectors and what is small have no codec")
            continue
        usable = [o for o in options_of(bound, first) if not o.refused]
        options = _options_to_show(usable, first.codec, limit)
        rows = [_HEADING, *(_cells(first, option) for option in options)]
        lines += [f"    {row}" for row in columns(rows, right=range(1, 7))]
        if left := len(usable) - len(options):
            every = f"--alternatives {len(usable)}"
            lines.append(f"    {left} more codecs are slower; {every} shows them")
    return lines


def _options_to_show(
    options: Sequence[CodecPrice], chosen: str, limit: int
) -> list[CodecPrice]:
    """Returns the chosen codec, the compiler's own sum, and the fastest other codecs.

    If the user's code has registered codecs, the result also has the fastest options of
    each of these codecs, even if they are slow.
    """
    others = [o.codec for o in options if o.codec not in (chosen, "")]
    best = {parse_codec(text).name: text for text in reversed(others)}
    own = [t for t in best.values() if not type(parse_codec(t)).is_of_package()]
    shown = {chosen, "", *others[:limit], *own}
    return [o for o in options if o.codec in shown]


def _cells(gradient: GradientDecision, option: CodecPrice) -> tuple[str, ...]:
    return (
        option.codec or "as it is",
        bytes_text(option.wire_bytes),
        ratio_text(gradient.dense_bytes, option.wire_bytes),
        seconds_text(option.wire_s),
        seconds_text(option.local_s),
        f"{option.error:.2g}",
        f"{option.counted_error:.2g}",
        "chosen" if option.codec == gradient.codec else "",
    )


def gradient_data(bound: BoundPlan, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the data of `gradient_lines`, with all codecs of each gradient."""
    return [
        {
            "name": gradient.name,
            "codec": gradient.codec,
            "feedback": gradient.feedback,
            "axes": list(gradient.axes),
            "within": list(gradient.within),
            "workers": gradient.workers,
            "dense_bytes": gradient.dense_bytes,
            "wire_bytes": gradient.wire_bytes,
            "options": [_option(o) for o in options_of(bound, gradient)],
        }
        for alike in gradients_of(bound, paths)
        for gradient in alike
    ]


def _option(option: CodecPrice) -> dict[str, Any]:
    return {
        "codec": option.codec,
        "wire_bytes": option.wire_bytes,
        "wire_s": option.wire_s,
        "local_s": option.local_s,
        "error": option.error,
        "counted_error": option.counted_error,
        "usable": math.isfinite(option.seconds),
        "refused": option.refused,
    }


# The largest number of layout decisions that are shown for one pattern of inputs.
_MOST_DECISIONS = 8


@dataclasses.dataclass(frozen=True)
class Explained:
    """A decision about a layout, and other layouts.

    Attributes:
      stage: number of the stage; None for a plan of one stage.
      bound: the stage as a plan.
      decision: the decision.
      others: other layouts.
    """

    stage: int | None
    bound: BoundPlan
    decision: LayoutDecision
    others: list[Alternative]


def explain(asked: ExplainCommand) -> Result:
    """Explains a plan, the parts of its step, or the inputs that match a pattern.

    Raises:
      PlanError: ``by`` is unknown, or ``by`` and ``tensor`` are both given.
    """
    by = asked.by
    _check_way(by, asked.tensor)
    with common.progress() as say:
        found = common.subject(
            asked.source, asked.words, asked.cluster, asked.limits, say
        )
        bound, staged = _bind(found)
        if asked.tensor is not None:
            matched = input_decisions(bound, asked.tensor)
            matched.sort(key=lambda pair: -pair[1].nbytes)
            seconds = asked.seconds
            trials = (
                stage_trials(staged, found.cluster, seconds)
                if staged is not None
                else [trials_of(bound[0], found.cluster)]
            )
            explained = [
                Explained(
                    number if staged is not None else None,
                    bound[number],
                    decision,
                    alternatives(
                        trials[number],
                        decision,
                        limit=asked.limit,
                        seconds=seconds,
                        say=say,
                    ),
                )
                for number, decision in matched[:_MOST_DECISIONS]
            ]
            left = len(matched) - len(explained)
            return _inputs(explained, trials[0].step_s, left, asked)
    parts = _parts(bound, staged, by)
    if asked.as_json:
        return Result.of(_data(found.plan, bound, staged, by, parts))
    lines = summary_lines(found.plan)
    for number, own in enumerate(bound):
        lines.append("")
        if staged is not None:
            lines.append(stage_text(number, found.plan.stages[number]))
        lines += (
            overview_lines(own, asked.top)
            if parts is None
            else part_lines(parts[number], asked.top)
        )
    if staged is not None:
        lines += ["", *link_lines(links(staged))]
    lines += note_lines(found.plan)
    return Result("\n".join(lines))


def _bind(found: common.Subject) -> tuple[Sequence[BoundPlan], BoundStages | None]:
    """Returns the stages of a plan as plans, and the pipeline if there are several."""
    if len(found.plan.stages) == 1:
        return (bind_plan(found.analysis, found.plan, found.cluster),), None
    staged = bind_stages(found.analysis, found.plan, found.cluster)
    return staged.stages, staged


def _parts(
    bound: Sequence[BoundPlan], staged: BoundStages | None, by: str | None
) -> list[list[AttributedTime]] | None:
    """Returns the parts of a step, by stage; None if the user did not ask for parts."""
    if by is None:
        return None
    if staged is not None:
        return staged_parts(staged, by)
    return [attribute(own, by) for own in bound]


def _check_way(by: str | None, tensor: str | None) -> None:
    if by is not None and by not in WAYS:
        raise PlanError(f"--by {by}: there are {' and '.join(WAYS)}.")
    if by is not None and tensor is not None:
        raise PlanError("--by is about the whole step and --tensor is not: give one.")


def _inputs(
    explained: list[Explained], step_s: float, left: int, asked: ExplainCommand
) -> Result:
    if asked.as_json:
        inputs = [_input_data(e) for e in explained]
        return Result.of({"step_s": step_s, "inputs": inputs})
    texts = [
        [*_lines(e, step_s), *gradient_lines(e.bound, _paths(e.decision), asked.limit)]
        for e in explained
    ]
    if left:
        texts.append([f"{left} smaller ones match too: narrow --tensor to see them."])
    return Result("\n\n".join(map("\n".join, texts)))


def _paths(decision: LayoutDecision) -> list[str]:
    return [i.path for i in decision.inputs]


def _rows(bound: BoundPlan) -> list[CollectiveRow]:
    """Returns the communication of a step, sorted by decreasing time."""
    rows = [*communication_rows(bound)]
    rows += codec_rows(bound.plan.gradients, bound.pricer)
    return sorted(rows, key=lambda row: -row.seconds)


def overview_data(bound: BoundPlan) -> dict[str, Any]:
    """Returns memory and communication of a plan of one stage, as JSON values."""
    arrays = _arrays(bound)
    return {
        "state_bytes": arrays.held_bytes(),
        "peak_bytes": arrays.at_peak(),
        "collectives": list(map(_row_data, _rows(bound))),
    }


def overview_lines(bound: BoundPlan, top: int) -> list[str]:
    """Returns memory and communication of a plan of one stage, as lines of tables.

    Args:
      bound: the plan.
      top: the largest number of rows of collectives.
    """
    rows, arrays = _rows(bound), _arrays(bound)
    cells = [("held on each device", "bytes")]
    cells += [(k, bytes_text(v)) for k, v in arrays.held_bytes().items()]
    cells += [("besides, at the peak", "")]
    cells += [(k, bytes_text(v)) for k, v in arrays.at_peak().items()]
    lines = [*columns(cells, right=(1,)), ""]
    lines += collective_lines(rows[:top]) if rows else ["no communication"]
    if rest := rows[top:]:
        total = seconds_text(sum(r.seconds for r in rest))
        lines.append(f"... and {len(rest)} that take less, {total} together")
    return lines


def _arrays(bound: BoundPlan) -> Live:
    """Returns the arrays in the memory of a device."""
    return live(bound.assignment, bound.pricer.cluster.device)


def _row_data(row: CollectiveRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "axes": list(row.axes),
        "arrays": list(row.arrays),
        "phase": row.phase,
        "trips": row.trips,
        "sent_bytes": row.sent_bytes,
        "seconds": row.seconds,
    }


def _input_data(explained: Explained) -> dict[str, Any]:
    bound, decision = explained.bound, explained.decision
    stage = {} if explained.stage is None else {"stage": explained.stage}
    return {
        **stage,
        "paths": _paths(decision),
        "role": decision.inputs[0].role.value,
        "layout": decision.spec,
        "nbytes": decision.nbytes,
        "shard_bytes": decision.shard_bytes,
        "shared_by": decision.shared,
        "collectives": list(map(_row_data, decision.collectives)),
        "alternatives": [
            {
                "layout": a.spec,
                "step_s": a.step_s,
                "shard_bytes": a.shard_bytes,
                "peak_memory_bytes": a.peak_memory_bytes,
                "proved": a.proved,
            }
            for a in explained.others
        ],
        "gradients": gradient_data(bound, _paths(decision)),
    }


def _lines(explained: Explained, step_s: float) -> list[str]:
    bound, decision = explained.bound, explained.decision
    first = decision.inputs[0]
    shape = shape_text(bound.analysis.graph.values[first.value].shape)
    lines = _title(decision)
    where = "" if explained.stage is None else f", on stage {explained.stage}"
    lines.append(f"  {first.role.value} {shape}, {bytes_text(decision.nbytes)}{where}")
    if decision.node is None:
        return [*lines, "  a scalar: there is no layout to choose"]
    lines.append(
        f"  layout {spec_text(decision.spec)}: "
        f"{bytes_text(decision.shard_bytes)} on each device"
    )
    if decision.shared > len(decision.inputs):
        lines.append(f"  the decision is shared by {decision.shared} inputs")
    if whole_path(first.path):
        lines.append("  the pieces on other stages have the same layout")
    return [
        *lines,
        *_communication(bound, decision),
        *_comparison(bound, decision, explained.others, step_s),
    ]


def _title(decision: LayoutDecision) -> list[str]:
    return list(map(cut_name, collapse(given.path for given in decision.inputs)))


def _communication(bound: BoundPlan, decision: LayoutDecision) -> list[str]:
    if not decision.collectives:
        sent = gradients_of(bound, _paths(decision))
        itself = "The parameter itself is not communicated; its gradient is, see below."
        return ["", f"  {itself if sent else 'It takes part in no communication.'}"]
    rows = collective_lines(decision.collectives)
    return ["", "  Its communication in one step:", *(f"    {row}" for row in rows)]


def _comparison(
    bound: BoundPlan, decision: LayoutDecision, others: list[Alternative], step_s: float
) -> list[str]:
    if not others:
        return []
    rows = [
        ("layout", "step", "change", "on each device"),
        (
            spec_text(decision.spec),
            seconds_text(step_s),
            "chosen",
            bytes_text(decision.shard_bytes),
        ),
        *(_alternative_cells(a, step_s) for a in others),
    ]
    coded = any(g.codec for g in bound.plan.gradients)
    without = "without codecs and " if coded else ""
    heading = f"  The step {without}with other layouts, everything else planned again:"
    lines = ["", heading, *(f"    {row}" for row in columns(rows, right=(1, 2, 3)))]
    if not all(a.proved for a in others):
        lines.append("    (at most: the best found, not proved)")
    best = min(others, key=lambda a: a.step_s)
    if best.step_s < (1 - WORTHWHILE) * step_s:
        pin = shlex.quote(f"{decision.inputs[0].path}={spec_text(best.spec)}")
        lines.append(f"    The search has missed the fastest. Plan with --pin {pin}")
    return lines


def _alternative_cells(other: Alternative, step_s: float) -> tuple[str, str, str, str]:
    part = bytes_text(other.shard_bytes)
    if math.isinf(other.step_s):
        return (spec_text(other.spec), "nothing fits", "", part)
    mark = "" if other.proved else "<= "
    change = f"{other.step_s / step_s - 1:+.2%}" if step_s else ""
    return (spec_text(other.spec), f"{mark}{seconds_text(other.step_s)}", change, part)


def _data(
    plan: Plan,
    bound: Sequence[BoundPlan],
    staged: BoundStages | None,
    by: str | None,
    parts: list[list[AttributedTime]] | None,
) -> dict[str, Any]:
    """Returns the explanation of a plan as JSON values."""
    if parts is None:
        about: dict[str, Any] = {"predicted": plan.to_json()["predicted"]}
        stages = [overview_data(own) for own in bound]
    else:
        about = {"step_s": plan.predicted.step_s, "by": by}
        stages = [{"parts": list(map(dataclasses.asdict, own))} for own in parts]
    if staged is None:
        return {**about, **stages[0]}
    sent = [dataclasses.asdict(link) for link in links(staged)]
    return {**about, "stages": stages, "links": sent}
