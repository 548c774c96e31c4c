"""The work of ``autopar goodput``."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import html
import itertools
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence

import msgspec

from autopar.cli import common
from autopar.cli.commands.plans import GoodputCommand
from autopar.cli.failures import spell_options
from autopar.cli.output import Result
from autopar.cli.target import load, parse_words
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.goodput.configurations import Batches, ProgramAtBatches, WantedCurve, chain
from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.planner.cache import PlanCache
from autopar.reports.html import STYLE, VIEWPORT
from autopar.terminal import columns
from autopar.units import bytes_text, count_text, seconds_text, share_text
from autopar.whole_files import export_whole

# Functions for a page that shows goodput over the number of devices, as a picture and a
# table.
# The page has no scripts and needs no other files.

_WIDTH, _HEIGHT, _MARGIN = 720, 320, 60
_COLOURS = ("#4c78a8", "#e4893b", "#54a24b", "#b279a2", "#9d755d", "#d1605e")
_PAGE_HEADING = (
    "cluster", "batch", "in", "step", "efficiency", "goodput", "memory", "codecs",
    "scheme", "plan", "why not",
)  # fmt: skip


def curve_page(table: CurveTable) -> str:
    """Returns the page: a curve for each kind of devices, and a table of points."""
    heads = "".join(f"<th>{name}</th>" for name in _PAGE_HEADING)
    rows = "".join(_page_row(point) for point in table.points)
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


def _page_row(point: CurvePoint) -> str:
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
    """Draws goodput over devices on logarithmic axes; one line for each kind."""
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


# The least number of configurations for which it is worth starting another process.
# Each process has to trace the step again.
_WORTH_A_PROCESS = 8
_HEADING = (
    "cluster", "nodes", "devices", "batch", "in", "step", "rows/s", "efficiency",
    "goodput", "memory", "codecs", "scheme",
)  # fmt: skip


def told_apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the arguments of a target from the clusters among them.

    >>> told_apart(["2:h100", "layers=2", "8:h100,memory=40GB"])
    (['layers=2'], ['2:h100', '8:h100,memory=40GB'])
    """
    pairs = [w for w in words if "=" in w and w.partition("=")[0].isidentifier()]
    return pairs, [word for word in words if word not in pairs]


def goodput(asked: GoodputCommand) -> Result:
    """Makes the curve, writes the requested files, and returns the text to print.

    Raises:
      PlanError: the step runs on none of the clusters, with the reasons.
    """
    for path in (asked.out, asked.html):
        common.check_folder(path)
    pairs, more = told_apart(asked.words or [])
    asked = dataclasses.replace(asked, words=pairs)
    if (asked.noise_scale is None) != (asked.max_batch is None):
        raise PlanError(
            "--noise-scale and --max-batch go together: larger batches are worth less "
            "for each row, and the noise scale says how much."
        )
    texts = common.cluster_texts([*(asked.clusters or []), *more])
    table = curve_of(asked, [common.read_cluster(c, asked.memory) for c in texts])
    if not any(point.goodput for point in table.points):
        reasons = dict.fromkeys(f"{p.cluster}: {p.reason}" for p in table.points)
        raise PlanError(f"nothing runs on any of the clusters: {'; '.join(reasons)}")
    if asked.out is not None:
        table.save(asked.out)
    if asked.html is not None:
        export_whole(asked.html, curve_page(table).encode(errors="backslashreplace"))
    if asked.as_json:
        return Result.of(msgspec.to_builtins(table))
    return Result("\n".join(lines_of(table)))


def curve_of(asked: GoodputCommand, clusters: Sequence[Cluster]) -> CurveTable:
    """Plans a target on clusters, in several processes if that is faster.

    Args:
      asked: the target and its options. If it names no number of processes, each
        process plans several configurations.
      clusters: the configurations.

    Raises:
      PlanError: there is no cluster, or the step has no batch.
    """
    if not clusters:
        raise PlanError("say for which devices: --clusters 1:h100 2:h100 8x8:h100.")
    _check_shapes(clusters)
    with common.progress() as say:
        say(f"tracing {asked.target}")
        wanted, options = _read_wanted(asked)
        chains = _chains(clusters, asked.processes)
        if len(chains) == 1:
            points = _points(wanted, clusters, say)
        else:
            say(f"planning in {len(chains)} processes")
            points = _in_processes(asked, chains)
    by_cluster = {point.cluster: point for point in points}
    batches = wanted.batches
    return CurveTable(
        points=tuple(by_cluster[str(c)] for c in clusters),
        program=wanted.program.fingerprint,
        target=asked.target,
        options=options,
        base_batch=batches.base,
        max_batch=batches.most,
        noise_scale=batches.noise_scale,
    )


def _check_shapes(clusters: Sequence[Cluster]) -> None:
    """Checks, before anything is planned, that no two clusters are the same."""
    known: dict[tuple[str, int, int], Cluster] = {}
    for cluster in clusters:
        kind = str(cluster) if cluster.groups else cluster.device.name
        shape = kind, len(cluster.hosts), cluster.num_devices
        if shape in known:
            raise PlanError(
                f"{known[shape]} and {cluster} have the same nodes and devices; give "
                "one of them."
            )
        known[shape] = cluster


def _read_wanted(asked: GoodputCommand) -> tuple[WantedCurve, dict[str, str]]:
    workload = load(asked.target, parse_words(asked.words or []))
    program = ProgramAtBatches(workload.analyse_step())
    base = asked.base_batch or program.rows
    wanted = WantedCurve(
        program=program,
        batches=Batches(
            base=base, most=asked.max_batch or base, noise_scale=asked.noise_scale
        ),
        options=asked.limits,
        cache=None if asked.cache is None else PlanCache(asked.cache),
        anew=asked.anew,
    )
    return wanted, workload.options


def _points(
    wanted: WantedCurve, clusters: Sequence[Cluster], say: common.Say
) -> list[CurvePoint]:
    found: list[CurvePoint] = []
    for item in chain(wanted, _sort_clusters(clusters)):
        found.append(item.point)
        say(f"{len(found)} of {len(clusters)}: {item.point.cluster}")
    return found


def _sort_clusters(clusters: Sequence[Cluster]) -> list[Cluster]:
    """Sorts clusters by kind, then by number of devices."""

    def place(cluster: Cluster) -> tuple[str, int, int]:
        kind = "" if cluster.groups else cluster.device.name
        return kind, cluster.num_devices, len(cluster.hosts)

    return sorted(clusters, key=place)


def _chains(clusters: Sequence[Cluster], processes: int | None) -> list[list[Cluster]]:
    """Divides the sorted clusters among processes, each process a run of neighbours.

    The plan of one cluster is the start of the search for its neighbour.
    """
    ordered = _sort_clusters(clusters)
    if processes is None:
        cores = len(os.sched_getaffinity(0))
        processes = max(1, min(cores, len(ordered) // _WORTH_A_PROCESS))
    count = min(processes, len(ordered))
    cuts = [len(ordered) * k // count for k in range(count + 1)]
    return [ordered[a:b] for a, b in itertools.pairwise(cuts)]


def _in_processes(
    asked: GoodputCommand, chains: Sequence[Sequence[Cluster]]
) -> list[CurvePoint]:
    # A process that has started JAX cannot be forked.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(chains), context) as pool:
        data = [[cluster.to_data() for cluster in part] for part in chains]
        found = pool.map(_chain_of, [asked] * len(chains), data)
        return [point for part in found for point in part]


def _chain_of(
    asked: GoodputCommand, clusters: Sequence[dict[str, object]]
) -> list[CurvePoint]:
    """Plans some clusters in another process."""
    wanted, _ = _read_wanted(asked)
    found = chain(wanted, [Cluster.from_data(data) for data in clusters])
    return [item.point for item in found]


def lines_of(table: CurveTable) -> list[str]:
    """Returns the table as text, with notes below."""
    rows = [_HEADING, *(_row(point) for point in table.points)]
    lines = columns(rows, right=range(1, 10))
    noise = table.noise_scale
    lines.append("")
    lines.append(
        f"goodput in rows of the base batch ({table.base_batch}) per second; "
        + (
            "no noise scale is known, so the batch is kept"
            if noise is None
            else f"batches up to {table.max_batch}, noise scale {noise:g} rows"
        )
    )
    return [*lines, *_reasons(table), *table.dips]


def _reasons(table: CurveTable) -> Iterator[str]:
    for point in table.points:
        if point.reason:
            yield f"{point.cluster} cannot run: {spell_options(point.reason)}"


def _row(point: CurvePoint) -> tuple[str, ...]:
    head = (point.cluster, str(point.nodes), str(point.devices))
    if point.goodput <= 0:
        return (*head, *[""] * 5, "-", "", "", "")
    return (
        *head,
        str(point.batch),
        str(point.accumulation),
        seconds_text(point.step_s),
        count_text(point.batch / point.step_s),
        share_text(point.efficiency),
        count_text(point.goodput),
        bytes_text(point.peak_memory_bytes),
        " ".join(point.codecs),
        point.scheme,
    )
