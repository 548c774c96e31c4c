"""Tests that all callers get the same price of a codec for a gradient."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.cluster import Cluster
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import Message
from autopar.compression.gradient import effective_error
from autopar.cost.codecs import (
    SQUARES_BYTES,
    TELEMETRY_BYTES,
    GradientRoute,
    Prices,
    added_s,
    codec_price,
    coded_matrix,
    collectives_s,
    compiler_price,
    local_s,
    planned_route,
    route_of,
    with_wire_bytes,
)
from autopar.cost.collectives import collective_s
from autopar.cost.pricer import Pricer
from autopar.errors import InputError
from autopar.layouts.layout import Layout
from autopar.layouts.summation import Summation, summations
from autopar.planner.codecs.sites import Site, decision
from autopar.reports.gradients import codec_options

CLUSTER = Cluster.parse("2x4:h100,network=10Gb/s")
PRICER = Pricer(CLUSTER, next(m for m in CLUSTER.mesh_shapes(2) if m.sizes == (2, 4)))
MESH = PRICER.mesh.axes
TEXTS = ("dense", "bf16", "int8", "int4", "topk:ratio=0.01", "powersgd:rank=4")
HOMES = (((), ()), ((1,), ()), ((), (1, 0)), ((0, 1), ()))
SHAPE = (1024, 512)

# The first example of a codec runs its rounds on abstract values.
TRACED = settings(deadline=None, max_examples=examples(40))

texts = st.sampled_from(TEXTS)
# Every way to sum a gradient that one of the layouts allows.
ways = st.sampled_from([w for h in HOMES for w in summations(SHAPE, h, (0, 1), MESH)])
# Their routes, with the shape from which wire times are estimated.
routes = ways.map(
    lambda way: GradientRoute(
        axes=tuple(MESH[a] for a in way.axes),
        within=tuple(MESH[a] for a in way.within),
        workers=way.workers,
        local_shape=(64 * way.workers, 1024),
        scatter=way.scatter,
        keeps=way.keeps,
    )
)


@TRACED
@given(routes, texts)
def test_a_price_is_the_sum_of_its_messages(route: GradientRoute, text: str) -> None:
    price = codec_price(PRICER, route, text)
    if price.refused:
        return
    codec = parse_codec(text)
    rounds = [(m, route.axes) for m in route.rounds(codec)]
    rounds += [(m, route.within) for m in route.within_messages]
    sent = [PRICER.skew(axes) * added_s(m.kind, m.nbytes, axes) for m, axes in rounds]
    assert price.wire_s == pytest.approx(sum(sent), rel=1e-9)
    assert price.local_s == local_s(codec, route.local_shape, CLUSTER.device)
    assert price.seconds == price.wire_s + price.local_s
    counted = effective_error(price.error, feedback=codec.feedback)
    assert price.counted_error == counted
    found = with_wire_bytes(price, route)
    assert found.wire_bytes == sum(m.sent for m in route.rounds(codec))


@TRACED
@given(routes, texts)
def test_a_refused_codec_takes_forever_and_sends_nothing(
    route: GradientRoute, text: str
) -> None:
    price = codec_price(PRICER, route, text)
    why = parse_codec(text).check(route.local_shape, scatter=route.scatter)
    assert price.refused == why
    assert math.isinf(price.seconds) == bool(why)
    if why:
        assert with_wire_bytes(price, route).wire_bytes == 0.0


@TRACED
@given(routes, texts, st.floats(0.0, 0.9))
def test_a_measured_error_replaces_the_expected_one(
    route: GradientRoute, text: str, error: float
) -> None:
    expected = codec_price(PRICER, route, text)
    measured = codec_price(PRICER, route, text, error)
    assert measured.error == error
    assert measured.seconds == expected.seconds


@TRACED
@given(routes, st.sampled_from([2, 4]))
def test_the_compiler_sums_without_error(route: GradientRoute, itemsize: int) -> None:
    price = compiler_price(PRICER, route, itemsize)
    assert (price.codec, price.local_s, price.error) == ("", 0.0, 0.0)
    if not (route.within and route.keeps):
        nbytes = float(route.elements * route.devices_within * itemsize)
        kind, axes = PRICER.runs_as(route.kind), (*route.axes, *route.within)
        assert price.wire_s == PRICER.skew(axes) * added_s(kind, nbytes, axes)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("home", HOMES)
def test_the_reports_show_the_price_of_the_choice(
    monkeypatch: pytest.MonkeyPatch, home: Layout, text: str
) -> None:
    monkeypatch.setattr("autopar.reports.gradients.offered_codecs", lambda: ())
    way = summations(SHAPE, home, (0, 1), MESH)[-1]
    site = Site(0, "w", SHAPE, way.axes, (way,), 0, 4)
    expected = codec_price(PRICER, route_of(way, MESH), text)
    if expected.refused:
        with pytest.raises(InputError, match="where the sum is scattered"):
            decision(site, MESH, text, way)
        return
    made = decision(site, MESH, text, way)
    shown = {price.codec: price for price in codec_options(made, PRICER)}
    assert shown[text].seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert shown[text].refused == expected.refused
    plain = compiler_price(PRICER, planned_route(made, MESH), 4)
    assert shown[""].wire_s == plain.wire_s


@TRACED
@given(texts, st.floats(0.0, 1.0), st.floats(0.0, 1e-9))
def test_layouts_are_charged_the_best_way(
    text: str, wire_weight: float, seconds_per_error: float
) -> None:
    prices = Prices(wire_weight, seconds_per_error, (text,), {})
    start, target = (((), ()), (0, 1)), ((), ())
    found = coded_matrix(PRICER, prices, [start], [target], SHAPE)[0, 0]
    each = [
        codec_price(PRICER, route_of(way, MESH), text)
        for way in summations(SHAPE, target, (0, 1), MESH)
    ]
    expected = min(
        wire_weight * price.wire_s
        + price.local_s
        + seconds_per_error * math.prod(SHAPE) * price.counted_error**2
        for price in each
    )
    assert found == pytest.approx(expected, rel=1e-12)


def alone_s(way: Summation, text: str) -> float:
    """Seconds of the collectives of a single gradient, from its messages."""
    route = route_of(way, MESH)
    found = [(m, route.axes) for m in route.rounds(parse_codec(text))]
    found += [(m, route.within) for m in route.within_messages]
    if way.scatter or way.axes != (0, 1):
        found.append((Message("all_reduce", TELEMETRY_BYTES, 0.0), MESH))
    elif found[0][0].kind == "all_reduce":  # squares travel with the first message
        nbytes = found[0][0].nbytes + SQUARES_BYTES
        found[0] = (Message("all_reduce", nbytes, 0.0), route.axes)
    else:
        found.append((Message("all_reduce", SQUARES_BYTES, 0.0), MESH))
    return sum(
        PRICER.skew(axes) * collective_s(m.kind, m.nbytes, axes) for m, axes in found
    )


@TRACED
@given(st.lists(st.tuples(ways, st.sampled_from(["dense", "int8", ""])), max_size=5))
def test_gradients_together_take_no_longer_than_alone(
    gradients: list[tuple[Summation, str]],
) -> None:
    whole = collectives_s(PRICER, [w for w, _ in gradients], [t for _, t in gradients])
    each = [alone_s(way, text) for way, text in gradients if text]
    assert whole <= sum(each) * (1 + 1e-9)
    if len(each) == 1:
        assert whole == pytest.approx(each[0], rel=1e-12)
