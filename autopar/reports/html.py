"""A plan as one web page that needs nothing else."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence

from autopar.plans import Plan
from autopar.reports.table import (
    COLLECTIVE_HEADING,
    GRADIENT_HEADING,
    GRADIENT_NUMBERS,
    INPUT_HEADING,
    CollectiveRow,
    bytes_text,
    collective_cells,
    communication_text,
    compressed,
    compression_notes,
    gradient_rows,
    input_rows,
    planning_times,
    seconds_text,
    shape_of_plan,
    stage_text,
)
from autopar.reports.worth import worth_facts

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2433; background: #fff;
  margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e3e7ee; }
th { color: #5a6578; font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.figure { border: 1px solid #e3e7ee; border-radius: 8px; padding: .6rem 1rem; }
.figure b { display: block; font-size: 1.3rem; }
.figure span { color: #5a6578; }
svg text { font: 13px system-ui, sans-serif; fill: #1d2433; }
"""
_COMPUTE, _SENT = "#4c78a8", "#e4893b"
_BAR_HEIGHT, _BAR_WIDTH, _LABEL_WIDTH, _VALUE_WIDTH = 26, 560, 150, 90


def render_html(plan: Plan, collectives: Sequence[CollectiveRow]) -> str:
    """Returns the page.

    Args:
      plan: the plan.
      collectives: its communication, the longest first.
    """
    title = f"Plan for {plan.cluster}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(_description(plan))}</p>",
        _figures(plan),
        *_worth(plan),
        "<h2>Where the time of a step goes</h2>",
        bars(_times(plan, collectives)),
        *_inputs(plan),
        "<h2>Communication</h2>",
        _table(COLLECTIVE_HEADING, list(map(collective_cells, collectives)), {4, 5, 6})
        if collectives
        else "<p>None.</p>",
        *_gradients(plan),
        *_meshes(plan),
        *_notes("Planned replicated, for want of a rule", plan.unsupported_ops),
        *_notes("Loops of unknown length, with the trips assumed", plan.assumed),
        f"<p>{_text(planning_times(plan))}; autopar {_text(plan.version)}.</p>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _text(value: str) -> str:
    return html.escape(value)


def _description(plan: Plan) -> str:
    words = [plan.target, *(f"{k}={v}" for k, v in plan.options.items())]
    step = f"{' '.join(words)}; " if plan.target else ""
    found = f"{plan.solver.status}, gap {plan.solver.gap:.2%}"
    return f"{step}{shape_of_plan(plan)}; {found}."


def _figures(plan: Plan) -> str:
    expected = plan.predicted
    figures = (
        ("step", seconds_text(expected.step_s)),
        ("compute", seconds_text(expected.compute_s)),
        ("communication", communication_text(expected)),
        ("sent by a device", bytes_text(expected.communication_bytes)),
        ("held by a device", bytes_text(expected.peak_memory_bytes)),
    )
    cells = [
        f'<div class="figure"><span>{_text(name)}</span><b>{_text(value)}</b></div>'
        for name, value in figures
    ]
    return f'<div class="figures">{"".join(cells)}</div>'


def _worth(plan: Plan) -> list[str]:
    """What the plan makes of its cluster."""
    facts = worth_facts(plan.worth)
    return [f"<p>{_text(name)}: {_text(text)}.</p>" for name, text in facts]


def _times(
    plan: Plan, collectives: Sequence[CollectiveRow]
) -> list[tuple[str, float, str]]:
    """Name, seconds and colour of each bar: compute, and every kind of collective."""
    kinds: dict[str, float] = defaultdict(float)
    for row in collectives:
        kinds[row.kind] += row.seconds
    sent = sorted(kinds.items(), key=lambda item: -item[1])
    return [
        ("compute", plan.predicted.compute_s, _COMPUTE),
        *((kind.replace("_", "-"), seconds, _SENT) for kind, seconds in sent),
    ]


def bars(values: Sequence[tuple[str, float, str]]) -> str:
    """A bar chart as SVG, of names, seconds and colours."""
    most = max((seconds for _, seconds, _ in values), default=0.0) or 1.0
    width = _LABEL_WIDTH + _BAR_WIDTH + _VALUE_WIDTH
    height = _BAR_HEIGHT * len(values)
    out = [
        f'<svg role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="max-width: 100%">'
    ]
    for k, (name, seconds, colour) in enumerate(values):
        top, length = k * _BAR_HEIGHT, _BAR_WIDTH * seconds / most
        middle, end = top + _BAR_HEIGHT * 0.65, _LABEL_WIDTH + length + 6
        out += [
            f'<text x="{_LABEL_WIDTH - 8}" y="{middle:.1f}" text-anchor="end">'
            f"{_text(name)}</text>",
            f'<rect x="{_LABEL_WIDTH}" y="{top + 4}" width="{max(length, 1):.1f}" '
            f'height="{_BAR_HEIGHT - 8}" rx="2" fill="{colour}"/>',
            f'<text x="{end:.1f}" y="{middle:.1f}">{seconds_text(seconds)}</text>',
        ]
    return "".join([*out, "</svg>"])


def _table(
    heading: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: frozenset[int] | set[int] = frozenset(),
) -> str:
    attribute = ' class="number"'

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{attribute if k in numbers else ''}>{_text(cell)}</{tag}>"
            for k, cell in enumerate(cells)
        )

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return (
        f"<table><thead><tr>{line('th', heading)}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table>"
    )


def _inputs(plan: Plan) -> list[str]:
    """The inputs of each stage."""
    if len(plan.stages) == 1:
        rows = input_rows(plan, plan.stage)
        return ["<h2>Inputs</h2>", _table(INPUT_HEADING, rows)]
    parts: list[str] = []
    for number, stage in enumerate(plan.stages):
        heading = f"<h2>{_text(stage_text(number, stage))}</h2>"
        parts += [heading, _table(INPUT_HEADING, input_rows(plan, stage))]
    return parts


def _gradients(plan: Plan) -> list[str]:
    """The gradients' codecs, and the reason for them."""
    if not compressed(plan):
        return []
    rows = gradient_rows(plan)
    table = [_table(GRADIENT_HEADING, rows, set(GRADIENT_NUMBERS))] if rows else []
    notes = [f"<p>{_text(f'{n}: {text}')}</p>" for n, text in compression_notes(plan)]
    return ["<h2>Gradients</h2>", *table, *notes]


def _meshes(plan: Plan) -> list[str]:
    """The meshes that were tried, the fastest first."""
    if len(plan.solver.meshes) < 2:
        return []
    tried = sorted(plan.solver.meshes.items(), key=lambda item: item[1])
    rows = [(name, seconds_text(seconds)) for name, seconds in tried]
    return ["<h2>Meshes</h2>", _table(("mesh", "step"), rows, {1})]


def _notes(title: str, names: Sequence[str]) -> list[str]:
    return (
        [f"<h2>{_text(title)}</h2>", f"<p>{_text(', '.join(names))}</p>"]
        if names
        else []
    )
