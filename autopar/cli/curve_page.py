"""A page with the goodput of a program by number of devices, as a picture and a table.

No script, and no file of others.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.reports.style import STYLE, VIEWPORT
from autopar.reports.units import bytes_text, count_text, seconds_text, share_text

_WIDTH, _HEIGHT, _MARGIN = 720, 320, 60
_COLOURS = ("#4c78a8", "#e4893b", "#54a24b", "#b279a2", "#9d755d", "#d1605e")
_HEADING = (
    "cluster", "batch", "in", "step", "efficiency", "goodput", "memory", "codecs",
    "scheme", "plan", "why not",
)  # fmt: skip


def curve_page(table: CurveTable) -> str:
    """The page: a picture of the curve on each kind of devices, and all points."""
    heads = "".join(f"<th>{name}</th>" for name in _HEADING)
    rows = "".join(_row(point) for point in table.points)
    dips = "".join(f"<p class=idle>{html.escape(text)}</p>" for text in table.dips)
    noise = "not known" if table.noise_scale is None else f"{table.noise_scale:g} rows"
    title = html.escape(table.target or table.program)
    return (
        f"<!doctype html><meta charset=utf-8>{VIEWPORT}"
        f"<title>goodput of {title}</title>"
        f"<style>{STYLE}</style><h1>Goodput of {title}</h1>"
        f"<p>Base batch {table.base_batch} rows, largest batch {table.max_batch} rows, "
        f"noise scale {noise}. Goodput is in rows of the base batch per second.</p>"
        f"<div class=picture>{_picture(table)}</div>{dips}"
        f"<div class=scroll><table><tr>{heads}</tr>{rows}</table></div>"
    )


def _row(point: CurvePoint) -> str:
    cells = ("", "", "", "", "-", "", "", "", "")
    if point.goodput > 0:
        cells = (
            str(point.batch),
            str(point.accumulation),
            seconds_text(point.step_s),
            share_text(point.efficiency),
            count_text(point.goodput),
            bytes_text(point.peak_memory_bytes),
            " ".join(point.codecs),
            point.scheme,
            point.plan,
        )
    texts = (point.cluster, *cells, point.reason)
    return f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in texts)}</tr>"


def _picture(table: CurveTable) -> str:
    """Goodput over devices, both on logarithmic axes; a line for each kind."""
    running = [p for p in table.points if p.goodput > 0]
    xs = [math.log2(p.devices) for p in running]
    ys = [math.log2(p.goodput) for p in running]
    box = (min(xs), max(xs), min(ys), max(ys))
    lines = "".join(
        _line([p for p in running if p.kind == kind], kind, k, box)
        for k, kind in enumerate(table.kinds)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-size="12" font-family="sans-serif" '
        f'fill="currentColor">{_frame()}{lines}</svg>'
    )


def _frame() -> str:
    bottom, right = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    return (
        f'<path d="M{_MARGIN} 10V{bottom}H{right}" fill="none" stroke="currentColor"/>'
        f'<text x="{right}" y="{_HEIGHT - 15}" text-anchor="end">devices</text>'
        '<text x="4" y="20">rows/s</text>'
    )


def _line(
    points: Sequence[CurvePoint],
    kind: str,
    number: int,
    box: tuple[float, float, float, float],
) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    ordered = sorted(points, key=lambda p: (p.devices, p.nodes))
    places = [(*_place(p, box), p) for p in ordered]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>'
        f"{html.escape(p.cluster)}: {count_text(p.goodput)} rows/s</title></circle>"
        f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">'
        f"{p.devices}</text>"
        for x, y, p in places
    )
    label = f'<text x="{_MARGIN + 10 + 120 * number}" y="20" fill="{colour}">'
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        f"{marks}{label}{html.escape(kind)}</text>"
    )


def _place(
    point: CurvePoint, box: tuple[float, float, float, float]
) -> tuple[float, float]:
    left, right, low, high = box
    along = (math.log2(point.devices) - left) / ((right - left) or 1.0)
    up = (math.log2(point.goodput) - low) / ((high - low) or 1.0)
    width, height = _WIDTH - 2 * _MARGIN - 20, _HEIGHT - _MARGIN - 50
    return _MARGIN + 10 + along * width, _HEIGHT - _MARGIN - 10 - up * height
