"""Golden tables of prices: collectives, products and codecs on every preset.

A plan reads only few prices; these tables have all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from checkout import GOLDEN
from figures import digest, row
from golden import assert_golden

from autopar.cluster import Cluster
from autopar.cluster.presets import PRESETS
from autopar.cluster.specs import KINDS
from autopar.compression.codecs.registry import parse_codec
from autopar.cost.breakdown import certainty_of
from autopar.cost.codecs import (
    GradientRoute,
    codec_price,
    compiler_price,
    local_s,
    with_wire_bytes,
)
from autopar.cost.collectives import (
    collective_bytes,
    collective_curve,
    collective_s_at,
    collective_s_per_byte,
    least_s_per_byte,
)
from autopar.cost.compute import (
    attained_flops_per_s,
    product_s,
    rates_of,
    roofline_s,
)
from autopar.cost.live import habits_of, lost_bytes, on_chip, room_bytes
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import Layout, ReshardStep

SIZES = np.geomspace(100.0, 1e9, 8)
PRODUCTS = (
    (1.0, 64.0, 64.0, 64.0),
    (1.0, 4096.0, 4096.0, 4096.0),
    (32.0, 128.0, 128.0, 64.0),
    (1.5, 20.0, 8192.0, 1000.0),
    (1.0, 16.0, 16.0, 65536.0),
)
CODECS = ("bf16", "int8", "int4", "powersgd:rank=4", "topk", "threshold")


def shape_of(preset: str) -> str:
    return "4x4" if PRESETS[preset].is_torus else "2x2x4"


def collective_lines(pricer: Pricer) -> Iterator[str]:
    axes = pricer.mesh.axes
    groups = [
        group
        for count in (1, 2, len(axes))
        for group in itertools.combinations(axes, count)
    ]
    for kind in KINDS:
        for group in dict.fromkeys(groups):
            names = "+".join(axis.name for axis in group)
            yield row(kind, over=names, s=list(collective_s_at(kind, SIZES, group)))
            curve = collective_curve(kind, group)
            yield row(
                "  least",
                per_byte=collective_s_per_byte(kind, group),
                within=least_s_per_byte(kind, 1e5, 3e7, group),
                starts=digest(curve.starts),
                lines=digest(curve.lines),
                sent=collective_bytes(kind, 1e6, pricer.group((0,))),
                skew=pricer.skew(group),
            )


def reshard_lines(pricer: Pricer, draw: random.Random) -> Iterator[str]:
    """Reshardings between random layouts, at sizes around the limits of a message."""
    count = len(pricer.sizes)

    def layout() -> Layout:
        dims: list[list[int]] = [[], [], []]
        for axis in draw.sample(range(count), count):
            if draw.random() < 0.6:
                draw.choice(dims).append(axis)
        return tuple(map(tuple, dims))

    for joined in (False, True):
        seconds: list[float] = []
        for _ in range(12):
            start, target = layout(), layout()
            used = {axis for dim in start for axis in dim}
            partial = tuple(a for a in range(count) if a not in used)
            together = frozenset(KINDS if joined else ())
            for nbytes in (1e4, 3e7):
                given = (start, target, partial, "sum" if partial else "", nbytes)
                seconds.append(pricer.reshard_s(*given, together, 0.7))
        yield row("reshard", joined=joined, each=seconds)
    for kind in KINDS:
        step = ReshardStep(kind, (0,), 0.5, ())
        yield row(
            kind,
            least=pricer.least_s(step, 1e6),
            price=pricer.price_s(step, 1e6, frozenset(KINDS)),
            bytes=pricer.bytes_s(step, 1e6),
            move=pricer.move_s(step, 1e6),
            whole=pricer.whole(step, 1e6, 5e6),
            shared=pricer.collective_s(step, 1e6, 5e6),
            sent=pricer.sent_bytes(step, 1e6),
            runs_as=pricer.runs_as(kind),
            apart=pricer.apart(step),
        )


def product_lines(pricer: Pricer) -> Iterator[str]:
    device = pricer.cluster.device
    for dtype, itemsize in (("float32", 4.0), ("bfloat16", 2.0), ("int8", 1.0)):
        peak = attained_flops_per_s(dtype, device, True)
        each = []
        if rates_of(device, itemsize) is not None:
            each = [product_s(dtype, itemsize, device, *p) for p in PRODUCTS]
        lines = [
            float(
                roofline_s(flops, 1e6, dtype, device, is_matrix=matrix, efficiency=0.5)
            )
            for flops in (1e3, 1e12)
            for matrix in (False, True)
        ]
        yield row(dtype, attained=peak, products=each, roofline=lines)


def codec_lines(pricer: Pricer) -> Iterator[str]:
    axes = pricer.mesh.axes
    routes = {
        "all": (axes, (), (512, 768), False, False),
        "outer": (axes[:1], axes[1:], (64, 768), False, False),
        "kept": (axes[:1], axes[1:], (64, 768), False, True),
        "scatter": (axes, (), (1024,), True, False),
    }
    for name, (over, within, shape, scatter, keeps) in routes.items():
        workers = int(np.prod([axis.size for axis in over]))
        route = GradientRoute(over, within, workers, shape, scatter, keeps)
        plain = compiler_price(pricer, route, 4.0)
        yield row("route", name=name, plain=plain.wire_s)
        for text in CODECS:
            price = with_wire_bytes(codec_price(pricer, route, text), route)
            yield row(
                f"  {text}",
                wire=price.wire_s,
                local=price.local_s,
                error=price.error,
                counted=price.counted_error,
                bytes=price.wire_bytes,
                refused=bool(price.refused),
            )
    small = [local_s(parse_codec(t), (7,), pricer.cluster.device) for t in CODECS]
    yield row("small", local=small)


def device_lines(pricer: Pricer) -> Iterator[str]:
    device = pricer.cluster.device
    sure, habits = certainty_of(device), habits_of(device)
    yield row("certainty", {f: getattr(sure, f) for f in sure.__slots__})
    kept = {f: getattr(habits, f) for f in habits.__slots__}
    yield row("habits", {k: v for k, v in kept.items() if v})
    yield row(
        "combiner", most=pricer.combiner.most_bytes, kinds=len(pricer.combiner.kinds)
    )


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_prices(preset: str) -> None:
    cluster = Cluster.parse(f"{shape_of(preset)}:{preset}")
    lines: list[str] = []
    for mesh in cluster.mesh_shapes(3)[:2]:
        pricer = Pricer(cluster, mesh, joined_bytes=(2e7, 1e8))
        lines += ["", f"{cluster} {mesh.label}", *collective_lines(pricer)]
        lines += reshard_lines(pricer, random.Random(preset))
        lines += codec_lines(pricer)
    lines += [*product_lines(pricer), *device_lines(pricer)]

    assert_golden("\n".join(lines).strip(), f"prices/{preset}.txt")


def test_every_preset_has_its_file_and_no_others() -> None:
    kept = {path.stem for path in (GOLDEN / "prices").iterdir()}
    assert kept == set(PRESETS)


def test_holes_between_buffers() -> None:
    """Bytes lost between buffers, and buffers that stay on the chip."""
    lines: list[str] = []
    for seed in range(24):
        draw = np.random.default_rng(seed)
        count = int(draw.integers(1, 30))
        first = draw.integers(0, 20, count)
        last = first + draw.integers(0, 9, count)
        nbytes = draw.integers(1, 50, count).astype(float)
        held = on_chip(first, last, nbytes, float(draw.integers(0, 200)))
        lost = lost_bytes(first, last, nbytes)
        lines.append(row(f"{count} buffers", lost=lost, held=digest(held)))
    lines.append(row("room", room=[room_bytes(2**k) for k in (10, 24, 25, 27)]))

    assert_golden("\n".join(lines), "prices_of_buffers.txt")
