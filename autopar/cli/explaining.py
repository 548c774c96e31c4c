"""The work of ``autopar explain``."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import Any

from autopar.cli import common
from autopar.cli.output import Result
from autopar.compression.codecs.registry import parse_codec
from autopar.cost.codecs import CodecPrice
from autopar.cost.live import Live, live
from autopar.errors import PlanError
from autopar.planner.candidate import WORTHWHILE
from autopar.planner.options import PlanOptions
from autopar.planner.search import search_of_one as layouts_alone
from autopar.plans import GradientDecision
from autopar.plans.specs import spec_text
from autopar.reports.attribution import (
    WAYS,
    AttributedTime,
    attribute,
    part_lines,
    step_of,
)
from autopar.reports.explain import (
    Alternative,
    BoundPlan,
    LayoutDecision,
    alternatives,
    bind_plan,
    group_collectives,
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

Explained = tuple[LayoutDecision, list[Alternative]]


def explain(
    source: str,
    words: list[str] | None,
    *,
    tensor: str | None,
    by: str | None,
    top: int,
    limit: int,
    seconds: float,
    cluster: str | None,
    limits: PlanOptions,
    as_json: bool,
) -> Result:
    """Explains a plan, the parts of its step, or the inputs that match a pattern.

    Raises:
      PlanError: the value of ``by`` is unknown, or ``by`` and ``tensor`` are both
        given.
    """
    _check_way(by, tensor)
    with common.progress() as say:
        found = common.subject(source, words, cluster, limits, say)
        if len(found.plan.stages) > 1:
            return explain_stages(found, tensor=tensor, by=by, top=top, as_json=as_json)
        bound = bind_plan(found.analysis, found.plan, found.cluster)
        if tensor is not None and bound.plan.replicas:
            raise PlanError(
                f"--tensor {tensor}: other layouts are not tried in plans with "
                "replicas. Leave --tensor out, or give --by layer."
            )
        matched = [] if tensor is None else input_decisions(bound, tensor)
        matched.sort(key=lambda d: -d.nbytes)
        explained = [
            (d, alternatives(bound, d, limit=limit, seconds=seconds, say=say))
            for d in matched[:_MOST_DECISIONS]
        ]
    if by is not None:
        return _attribution(bound, by, top, as_json)
    if tensor is None:
        return _overview(bound, top, as_json)
    return _inputs(bound, explained, len(matched) - len(explained), limit, as_json)


def _check_way(by: str | None, tensor: str | None) -> None:
    if by is not None and by not in WAYS:
        raise PlanError(f"--by {by}: there are {' and '.join(WAYS)}.")
    if by is not None and tensor is not None:
        raise PlanError("--by is about the whole step and --tensor is not: give one.")


def _attribution(bound: BoundPlan, by: str, top: int, as_json: bool) -> Result:
    parts = attribute(bound, by)
    if not as_json:
        lines = [*summary_lines(bound.plan), "", *part_lines(parts, top)]
        return Result("\n".join(lines))
    found = [dataclasses.asdict(part) for part in parts]
    return Result.of({"step_s": step_of(parts), "by": by, "parts": found})


def _inputs(
    bound: BoundPlan, explained: list[Explained], left: int, limit: int, as_json: bool
) -> Result:
    step_s = _plain_step_s(bound)
    if as_json:
        inputs = [_data(bound, e) for e in explained]
        return Result.of({"step_s": step_s, "inputs": inputs})
    texts = [
        [*_lines(bound, e, step_s), *gradient_lines(bound, _paths(e[0]), limit)]
        for e in explained
    ]
    if left:
        texts.append([f"{left} smaller ones match too: narrow --tensor to see them."])
    return Result("\n\n".join(map("\n".join, texts)))


def _plain_step_s(bound: BoundPlan) -> float:
    """Returns the seconds of a step if no gradient had a codec.

    The times of other layouts leave out codecs, so they are compared with this time.
    """
    plan = bound.plan
    if not any(g.codec for g in plan.gradients):
        return plan.predicted.step_s
    names = plan.axis_names
    cluster = bound.pricer.cluster
    found = layouts_alone(bound.analysis, cluster, bound.assignment, names)
    return found.best.step_s


def _paths(decision: LayoutDecision) -> list[str]:
    return [i.path for i in decision.inputs]


def _overview(bound: BoundPlan, top: int, as_json: bool) -> Result:
    if as_json:
        return Result.of(
            {"predicted": bound.plan.to_json()["predicted"], **overview_data(bound)}
        )
    lines = [*summary_lines(bound.plan), "", *overview_lines(bound, top)]
    return Result("\n".join(lines))


def _rows(bound: BoundPlan) -> list[CollectiveRow]:
    """Returns the communication of a step, sorted by decreasing time."""
    rows = [*group_collectives(bound, bound.collectives)]
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


def _data(bound: BoundPlan, explained: Explained) -> dict[str, Any]:
    decision, others = explained
    return {
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
            for a in others
        ],
        "gradients": gradient_data(bound, _paths(decision)),
    }


def _lines(bound: BoundPlan, explained: Explained, step_s: float) -> list[str]:
    decision, others = explained
    first = decision.inputs[0]
    shape = shape_text(bound.analysis.graph.values[first.value].shape)
    lines = _title(decision)
    lines.append(f"  {first.role.value} {shape}, {bytes_text(decision.nbytes)}")
    if decision.node is None:
        return [*lines, "  a scalar: there is no layout to choose"]
    lines.append(
        f"  layout {spec_text(decision.spec)}: "
        f"{bytes_text(decision.shard_bytes)} on each device"
    )
    if decision.shared > len(decision.inputs):
        lines.append(f"  the decision is shared by {decision.shared} inputs")
    return [
        *lines,
        *_communication(bound, decision),
        *_comparison(bound, decision, others, step_s),
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


def explain_stages(
    found: common.Subject,
    *,
    tensor: str | None,
    by: str | None,
    top: int,
    as_json: bool,
) -> Result:
    """Explains a plan of several stages, stage by stage.

    Raises:
      PlanError: ``--tensor`` is given.
    """
    plan = found.plan
    if tensor is not None:
        raise PlanError(
            f"--tensor {tensor}: other layouts are tried in plans of one stage, and "
            f"this plan has {len(plan.stages)}. Leave --tensor out, or give --by layer."
        )
    bound = bind_stages(found.analysis, plan, found.cluster)
    parts = None if by is None else staged_parts(bound, by)
    if as_json:
        return Result.of(_staged_data(bound, by, parts))
    lines = summary_lines(plan)
    for number, stage in enumerate(plan.stages):
        own = overview_lines(bound.stages[number], top)
        lines += ["", stage_text(number, stage)]
        lines += own if parts is None else part_lines(parts[number], top)
    return Result("\n".join([*lines, "", *link_lines(links(bound))]))


def _staged_data(
    bound: BoundStages, by: str | None, parts: list[list[AttributedTime]] | None
) -> dict[str, Any]:
    """Returns a plan of several stages as JSON values."""
    sent = [dataclasses.asdict(link) for link in links(bound)]
    if parts is None:
        predicted = bound.plan.to_json()["predicted"]
        stages = [overview_data(stage) for stage in bound.stages]
        return {"predicted": predicted, "stages": stages, "links": sent}
    step_s = bound.plan.predicted.step_s
    every = [[dataclasses.asdict(part) for part in own] for own in parts]
    stages = [{"parts": own} for own in every]
    return {"step_s": step_s, "by": by, "stages": stages, "links": sent}
