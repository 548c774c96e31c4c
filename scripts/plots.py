"""Draws the plots of the site from docs/data, as SVG in docs/plots.

    python scripts/plots.py

A plot is drawn if its data file exists. Lines and letters follow the reader's choice of
light or dark mode.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
WIDTH = 440  # letters stay readable on a phone
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #222 }
.small { font-size: 13px } .end { text-anchor: end } .mid { text-anchor: middle }
.line { stroke: #888; stroke-width: 1; fill: none } .band { fill: #8884 }
.dash { stroke: #888; stroke-dasharray: 4 3 }
.c0 { fill: #1565c0 } .c1 { fill: #c25e00 } .c2 { fill: #2e7d32 } .c3 { fill: #8e24aa }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .c0 { fill: #64b5f6 } .c1 { fill: #ffb74d }
.c2 { fill: #81c784 } .c3 { fill: #ce93d8 } }
</style>"""

Found = dict[str, Any]


def svg(height: float, title: str, parts: Iterable[str]) -> str:
    """A whole drawing; its title is read to users of screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n{STYLE}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A text at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A filled rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" '
        f'height="{height:.1f}" class="{kind}"/>'
    )


def line(x: float, y: float, x2: float, y2: float, kind: str = "line") -> str:
    """A straight line."""
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
    )


def bars(
    title: str,
    groups: Sequence[tuple[str, Sequence[tuple[str, float, str]]]],
    kinds: Sequence[str],
    mark: float | None = None,
) -> str:
    """Horizontal bars in groups, from 0.

    Each bar is ``(kind, value, words)``; for an infinite value only the words are
    drawn. The dashed line is at *mark*.
    """
    high = max(v for _, rows in groups for _, v, _ in rows if math.isfinite(v))
    longest = max(len(name) for name, _ in groups)
    above = longest > 24  # a sentence is drawn above its bars, a name to their left
    left = 10.0 if above else 22 + 7.4 * longest
    scale = (WIDTH - 75 - left) / high
    parts: list[str] = []
    top = 12.0
    if len(kinds) > 1:
        for number, kind in enumerate(kinds):  # two entries in a row
            x, y = 10 + number % 2 * WIDTH / 2, 8 + number // 2 * 18
            parts.append(box(x, y, 11, 11, f"c{number}"))
            parts.append(text(x + 16, y + 10, kind, "small"))
            top = y + 28.0
    first = top
    for name, rows in groups:
        if above:
            parts.append(text(left, top + 11, name, "small"))
            top += 17
        else:
            parts.append(text(left - 10, top + 8 * len(rows) + 3, name, "small end"))
        for kind, value, words in rows:
            width = value * scale if math.isfinite(value) else 0.0
            if width:
                parts.append(box(left, top, width, 13, f"c{kinds.index(kind)}"))
            parts.append(text(left + width + 5, top + 11, words, "small"))
            top += 16
        top += 9
    if mark is not None:
        x = left + mark * scale
        parts.append(line(x, first - 6, x, top - 6, "dash"))
    return svg(top + 4, title, parts)


def when(found: Found) -> str:
    """For each case, the ratio of the best usual plan's time to ours."""
    groups = []
    for case in found["cases"]:
        ours, *others = case["plans"]
        key = "measured_s" if "measured_s" in ours else "step_s"
        times = [p[key] for p in others if p["fits"] and key in p]
        ratio = min(times) / ours[key] if times else math.inf
        words = f"{ratio:.2f} x" if times else "no usual plan fits"
        groups.append((case["what"], [("best", ratio, words)]))
    return bars(
        "Time of the best usual plan over that of the plan", groups, ("best",), 1.0
    )


def links(found: Found) -> str:
    """Step times over real links, by codec."""
    kinds = ("dense", "int8", "auto", "plan:auto")
    groups = []
    for rate in dict.fromkeys(row["Mbit/s"] for row in found["rows"]):
        rows = [
            (kind, row["step ms"], f"{row['step ms']:g} ms")
            for kind in kinds
            for row in found["rows"]
            if row["Mbit/s"] == rate and row["gradients"] == kind
        ]
        groups.append((f"{rate:g} Mbit/s", rows))
    return bars("Milliseconds of a step over real links", groups, kinds)


def experts(found: Found) -> str:
    """For each model, the predicted ratio of the best expert plan's time to ours."""
    told = [row for row in found["rows"] if isinstance(row.get("ours / best"), float)]
    kinds = tuple(dict.fromkeys(row["cluster"] for row in told))[:4]
    groups = []
    for model in dict.fromkeys(row["model"] for row in told):
        rows = []
        for row in told:
            if row["model"] == model and row["cluster"] in kinds:
                ratio = 1 / row["ours / best"]
                rows.append((row["cluster"], ratio, f"{ratio:.2f} x"))
        groups.append((model, rows))
    title = "Predicted time of the best usual plan over that of the plan"
    return bars(title, groups, kinds, 1.0)


def published(found: Found) -> str:
    """Predicted and measured seconds of published runs."""
    rows = found["rows"]
    low, high, left, size = 0.04, 40.0, 46, 310

    def place(value: float) -> float:
        return math.log(value / low) / math.log(high / low) * size

    def point(measured: float, predicted: float) -> tuple[float, float]:
        return left + place(measured), 20 + size - place(predicted)

    edge = [(low, low * 1.15), (high, high * 1.15), (high, high / 1.15)]
    edge.append((low, low / 1.15))
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (point(*e) for e in edge))
    parts = [f'<polygon points="{corners}" class="band"/>']
    for tick in (0.1, 1.0, 10.0):
        x, y = point(tick, tick)
        parts += [
            line(x, 20, x, 20 + size, "dash"),
            line(left, y, left + size, y, "dash"),
            text(x, size + 36, f"{tick:g} s", "small mid"),
            text(left - 6, y + 4, f"{tick:g} s", "small end"),
        ]
    shown = ("A100", "H100", "V100", "TPU")
    for number, kind in enumerate(shown):
        parts.append(box(left + size + 20, 30 + 20 * number, 11, 11, f"c{number}"))
        parts.append(text(left + size + 37, 40 + 20 * number, kind, "small"))
    for row in rows:
        x, y = point(row["measured s"], row["predicted s"])
        kind = next((n for n, k in enumerate(shown) if row["run"].startswith(k)), 3)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="c{kind}"/>')
    parts += [
        text(left + size / 2, size + 54, "measured (band: 15 % either way)", "mid"),
        text(left + 4, 14, "predicted"),
    ]
    return svg(size + 64, "Predicted against measured seconds of a step", parts)


def guarantees(found: Found) -> str:
    """Mean completion time on traces with guaranteed jobs."""
    kinds = ("Rubick's policy", "goodput")
    groups = []
    for row in found["rows"]:
        both = (row["rubick_s"], row["ours_s"])
        rows = [(k, s, f"{s:.0f} s") for k, s in zip(kinds, both, strict=True)]
        groups.append((row["trace"], rows))
    return bars("Average seconds to completion, with guaranteed jobs", groups, kinds)


PLOTS: dict[str, Callable[[Found], str]] = {
    "experts": experts,
    "guarantees": guarantees,
    "links": links,
    "published": published,
    "when": when,
}


def drawn(name: str) -> str | None:
    """The plot of a data file; None if the file does not exist."""
    file = DOCS / "data" / f"{name}.json"
    return PLOTS[name](json.loads(file.read_text())) if file.exists() else None


def main() -> None:
    """Draws all plots whose data files exist."""
    (DOCS / "plots").mkdir(exist_ok=True)
    for name in PLOTS:
        if (picture := drawn(name)) is not None:
            (DOCS / "plots" / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
