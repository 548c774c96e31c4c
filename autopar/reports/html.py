"""A plan as one self-contained web page."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence

from autopar.plans import Plan
from autopar.reports.attribution import HEADING, AttributedTime, part_cells
from autopar.reports.notebook import largest_inputs, plan_picture
from autopar.reports.schedule import STAGE_HEADING, stage_rows, timeline_html
from autopar.reports.table import (
    COLLECTIVE_HEADING,
    GRADIENT_HEADING,
    GRADIENT_NUMBERS,
    INPUT_HEADING,
    CollectiveRow,
    bytes_text,
    collective_cells,
    communication_text,
    compiled_text,
    compression_notes,
    gradient_rows,
    input_rows,
    planning_times,
    range_text,
    seconds_text,
    shape_of_plan,
    stage_text,
)
from autopar.reports.worth import has_codecs, idle_texts, rates, speed_up_text

# Phones show the page at the width of their screen.
VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'

STYLE = """
:root { color-scheme: light dark; --text: #1d2433; --soft: #5a6578; --back: #fff;
  --line: #e3e7ee; --card: #f6f8fb; --compute: #4c78a8; --sent: #e4893b;
  --saved: #54a24b; --warn: #9a4b00; --warn-back: #fff4e5; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #a3adbd;
  --back: #14181f; --line: #323a47; --card: #1d232d; --compute: #6f9bd1;
  --sent: #f0a35e; --saved: #7cc274; --warn: #ffc98a; --warn-back: #3a2a16; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--back); margin: 1.5rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
td { font-family: ui-monospace, monospace; overflow-wrap: break-word; }
.figures { display: grid; gap: .7rem;
  grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
.figure { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem .8rem; }
.figure b { display: block; font-size: 1.15rem; }
.figure span { color: var(--soft); }
.verdict { font-size: 1.15rem; margin: .6rem 0 1rem; }
.idle { background: var(--warn-back); color: var(--warn); border-radius: 8px;
  padding: .5rem .8rem; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content;
  gap: .25rem .6rem; align-items: center; font-size: 13px; }
.bars i { display: block; height: 1rem; border-radius: 2px; min-width: 1px; }
.compute { background: var(--compute); } .sent { background: var(--sent); }
.saved { background: var(--saved); }
@media (max-width: 30rem) {
  body { margin: .8rem auto; padding: 0 .7rem; }
  table { font-size: 12px; } th, td { padding: .2rem .35rem; }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem; }
  .figure { padding: .4rem .5rem; overflow-wrap: anywhere; }
  .figure b { font-size: 1rem; }
  .bars { grid-template-columns: minmax(0, 1fr) max-content; }
  .bars i { grid-column: 1 / -1; grid-row: auto; } }
.picture { overflow-x: auto; }
summary { cursor: pointer; color: var(--soft); }
input[type=search] { font: inherit; width: 100%; max-width: 24rem; margin: .5rem 0;
  padding: .3rem .6rem; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; box-sizing: border-box; }
"""

# A search field hides all rows of its table that do not contain the typed text.
SEARCH = """
for (const field of document.querySelectorAll("input[type=search]"))
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of field.parentElement.querySelectorAll("tbody tr"))
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
"""


# The most inputs that are shown unfolded, and the most layers that are shown.
_MOST_SHOWN, _MOST_LAYERS = 12, 12
_PHASES = ("forward", "backward", "update")


def render_html(
    plan: Plan,
    collectives: Sequence[CollectiveRow],
    parts: Sequence[AttributedTime] = (),
) -> str:
    """Returns the page.

    Args:
      plan: the plan.
      collectives: the plan's communication, the longest first.
      parts: the whole step by layer, the longest first; empty if it is not known.
    """
    title = f"Plan for {plan.cluster}"
    sections = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(_description(plan))}</p>",
        *_verdict(plan),
        _figures(plan),
        *_schedule(plan),
        "<h2>Where the time of a step goes</h2>",
        bars(_times(plan, collectives)),
        *_layers(parts),
        *_pictures(plan),
        *_inputs(plan),
        *_communication(collectives),
        *_gradients(plan),
        *_meshes(plan),
        *_notes("Planned replicated, for want of a rule", plan.unsupported_ops),
        *_notes("Of each microbatch alone", plan.local),
        *_notes("Assumed of loops and of kernels", plan.assumed),
        f"<p>{_text(planning_times(plan))}; autopar {_text(plan.version)}.</p>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{VIEWPORT}"
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + f"\n<script>{SEARCH}</script></body></html>\n"
    )


def _text(value: str) -> str:
    return html.escape(value)


def _description(plan: Plan) -> str:
    words = [plan.target, *(f"{k}={v}" for k, v in plan.options.items())]
    step = f"{' '.join(words)}; " if plan.target else ""
    return f"{step}{shape_of_plan(plan)}; {plan.solver.text}."


def _verdict(plan: Plan) -> list[str]:
    """Sentences on the plan's speed-up and its unused mesh axes."""
    worth = plan.worth
    if worth is None:
        return []
    text = f"{speed_up_text(worth)}. The plan resembles: {worth.scheme}."
    idle = "".join(f"<p>{_text(told)}.</p>" for told in idle_texts(plan))
    return [
        f'<p class="verdict">{_text(text)}</p>',
        *([f'<div class="idle">{idle}</div><br/>'] if idle else []),
    ]


def _schedule(plan: Plan) -> list[str]:
    """The stages of a pipeline, and the timeline of their tasks."""
    if plan.pipeline is None:
        return []
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in stage_rows(plan)
    )
    heading = "".join(f"<th>{_text(cell)}</th>" for cell in STAGE_HEADING)
    return [
        "<h2>Stages</h2>",
        f"<table><tr>{heading}</tr>{rows}</table>",
        timeline_html(plan),
    ]


def _figures(plan: Plan) -> str:
    expected, worth = plan.predicted, plan.worth
    figures = [
        ("step", seconds_text(expected.step_s)),
        *([("nine times in ten", range_text(expected))] if expected.high_s else []),
        ("compute", seconds_text(expected.compute_s)),
        ("communication", communication_text(expected)),
        ("sent by a device", bytes_text(expected.communication_bytes)),
        (
            "held by a device",
            f"{bytes_text(expected.peak_memory_bytes)}{compiled_text(plan)}",
        ),
    ]
    if worth is not None:
        names = {True: "use of the peak", False: "rate"}
        figures += [(names[rate.startswith("MFU")], rate) for rate in rates(worth)]
    cells = [
        f'<div class="figure"><span>{_text(name)}</span><b>{_text(value)}</b></div>'
        for name, value in figures
    ]
    return f'<div class="figures">{"".join(cells)}</div>'


def _times(
    plan: Plan, collectives: Sequence[CollectiveRow]
) -> list[tuple[str, float, str]]:
    """Name, seconds and class of each bar: compute, and every kind of collective."""
    kinds: dict[str, float] = defaultdict(float)
    for row in collectives:
        kinds[row.kind] += row.seconds
    sent = sorted(kinds.items(), key=lambda item: -item[1])
    times = [("compute", plan.predicted.compute_s, "compute")]
    times += [(kind.replace("_", "-"), s, "sent") for kind, s in sent]
    hidden = plan.predicted.hidden_s
    return times + ([("hidden of these", hidden, "saved")] if hidden else [])


def bars(values: Sequence[tuple[str, float, str]]) -> str:
    """A bar chart of names, seconds and classes of the style."""
    most = max((seconds for _, seconds, _ in values), default=0.0) or 1.0
    rows = [
        f"<span>{_text(name)}</span>"
        f'<i class="{kind}" style="width: {100 * seconds / most:.2f}%"></i>'
        f"<span>{seconds_text(seconds)}</span>"
        for name, seconds, kind in values
    ]
    return f'<div class="bars">{"".join(rows)}</div>'


def _layers(parts: Sequence[AttributedTime]) -> list[str]:
    """Work and communication of each layer, in the forward and the backward pass."""
    if not parts:
        return []
    cells = part_cells(parts, _MOST_LAYERS)
    return ["<h2>Layers</h2>", _table(HEADING, cells, {3, 4})]


def _pictures(plan: Plan) -> list[str]:
    """The mesh, and the largest arrays split over it."""
    found = [plan_picture(plan, largest_inputs(plan, stage)) for stage in plan.stages]
    # SVG inside an HTML page needs no namespace.
    drawn = [svg.replace(' xmlns="http://www.w3.org/2000/svg"', "") for svg in found]
    return ["<h2>Mesh</h2>", *(f'<div class="picture">{svg}</div>' for svg in drawn)]


def _communication(collectives: Sequence[CollectiveRow]) -> list[str]:
    """Communication by mesh axis and pass, and then each collective."""
    if not collectives:
        return ["<h2>Communication</h2>", "<p>None.</p>"]
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in collectives:
        seconds[",".join(row.axes)][row.phase] += row.seconds
    by_axis = [
        (axes, *(seconds_text(found[phase]) for phase in _PHASES))
        for axes, found in sorted(seconds.items(), key=lambda i: -sum(i[1].values()))
    ]
    return [
        "<h2>Communication</h2>",
        _table(("over", *_PHASES), by_axis, {1, 2, 3}),
        "<br/>",
        _table(COLLECTIVE_HEADING, list(map(collective_cells, collectives)), {4, 5, 6}),
    ]


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
        f'<div class="scroll"><table><thead><tr>{line("th", heading)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _inputs(plan: Plan) -> list[str]:
    """The inputs of each stage."""
    parts: list[str] = []
    for number, stage in enumerate(plan.stages):
        several = len(plan.stages) > 1
        title = stage_text(number, stage) if several else "Inputs"
        rows = input_rows(plan, stage)
        parts += [f"<h2>{_text(title)}</h2>", _fold(rows)]
    return parts


def _fold(rows: Sequence[Sequence[str]]) -> str:
    """A searchable table of inputs; a long table is folded at first."""
    state = " open" if len(rows) <= _MOST_SHOWN else ""
    field = '<input type="search" placeholder="search" aria-label="search inputs"/>'
    table = _table(INPUT_HEADING, rows)
    return (
        f"<details{state}><summary>{len(rows)} rows</summary>{field}{table}</details>"
    )


def _gradients(plan: Plan) -> list[str]:
    """The gradients' codecs, and the reason for their choice."""
    if not has_codecs(plan):
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
