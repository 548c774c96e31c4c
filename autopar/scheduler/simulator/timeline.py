"""A page with jobs x devices x plans over time; no script and no file of others."""

from __future__ import annotations

import html

from autopar.scheduler.jobs import Allocation
from autopar.scheduler.simulator.engine import History, Span
from autopar.scheduler.simulator.metrics import Metrics

_WIDTH, _ROW = 1100, 10
_MOST_REASONS = 400


def timeline_page(history: History, figures: Metrics) -> str:
    """The page: figures, a row for each device, and the reasons of moves."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_show(value))}</td></tr>"
        for name, value in figures.data.items()
    )
    reasons = [
        f"<li>{item.at_s:g} s: {html.escape(reason.text)}</li>"
        for item in history.rounds
        for reason in item.reasons
    ]
    cut = len(reasons) - _MOST_REASONS
    more = f"<p>and {cut} more</p>" if cut > 0 else ""
    return (
        "<!doctype html><meta charset=utf-8>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(history.policy)}</title>"
        "<style>body{font:14px sans-serif;margin:1em;overflow-wrap:anywhere}"
        "th{text-align:left}</style>"
        f"<h1>{html.escape(history.policy)}</h1><table>{rows}</table>"
        f"<h2>Devices over time</h2>{_picture(history)}"
        f"<h2>Decisions</h2><ol>{''.join(reasons[:_MOST_REASONS])}</ol>{more}"
    )


def _show(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _picture(history: History) -> str:
    end = max((span.end_s for span in history.spans), default=1.0) or 1.0
    firsts: list[int] = []
    total = 0
    for devices in history.nodes.devices:
        firsts.append(total)
        total += devices
    used: list[list[tuple[float, float]]] = [[] for _ in range(total)]
    bars = [
        _bar(span, row, end)
        for span in sorted(history.spans, key=lambda span: span.start_s)
        for row in _rows(span.allocation, firsts, history.nodes.devices, used, span)
    ]
    head = f'<svg width="{_WIDTH}" height="{total * _ROW}" role="img">'
    return "".join([head, *bars, "</svg>"])


def _rows(
    allocation: Allocation,
    firsts: list[int],
    devices: tuple[int, ...],
    used: list[list[tuple[float, float]]],
    span: Span,
) -> list[int]:
    """A row of its node for each device, one that nobody had at the time."""
    rows: list[int] = []
    for node in allocation:
        for row in range(firsts[node], firsts[node] + devices[node]):
            busy = used[row] and used[row][-1][1] > span.start_s
            if row not in rows and not busy:
                rows.append(row)
                used[row].append((span.start_s, span.end_s))
                break
    return rows


def _bar(span: Span, row: int, end: float) -> str:
    left = span.start_s / end * _WIDTH
    width = max((span.end_s - span.start_s) / end * _WIDTH, 0.5)
    hue = sum(map(ord, span.job)) * 47 % 360
    plan = f", plan {span.plan}" if span.plan else ""
    words = (
        f"{span.job}: {len(span.allocation)} devices, {span.start_s:g} to "
        f"{span.end_s:g} s, batch {span.batch}{plan}"
    )
    return (
        f'<rect x="{left:.1f}" y="{row * _ROW}" width="{width:.1f}" '
        f'height="{_ROW - 1}" fill="hsl({hue},60%,60%)">'
        f"<title>{html.escape(words)}</title></rect>"
    )
