"""Tests collectives among GPUs: knots, group sizes, algorithms and networks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.cluster import Cluster, CollectiveFit, LinkSpec, MeshAxis
from autopar.cluster.presets import PRESETS
from autopar.cluster.rates import LINK_RATES, NCCL_CLASSES, collective_knots
from autopar.cluster.specs import KINDS
from autopar.cost.collectives import (
    collective_bytes,
    collective_curve,
    collective_s,
    collective_s_per_byte,
)

GPUS = sorted(name for name, p in PRESETS.items() if p.device.kind == "gpu")
MEASURED = sorted(set(LINK_RATES) - {"", *NCCL_CLASSES})
# What goes to partners has steps down on the measured links (`test_partners`).
PARTNERS = ("all_to_all", "collective_permute")
SHARED = tuple(sorted(set(KINDS) - set(PARTNERS)))
kinds = st.sampled_from(KINDS)
bytes_ = st.floats(1.0, 1e11)
shapes = st.sampled_from(
    ["2", "3", "6", "8", "16", "64", "2x8", "16x8", "2x4x8", "4x1"]
)


def stepped(name: str, kind: str) -> bool:
    """Whether the time of a measured kind falls at some sizes."""
    return kind in PARTNERS and PRESETS[name].inner.rates in MEASURED


def seconds(text: str, kind: str, nbytes: float) -> float:
    axes = Cluster.parse(text).default_mesh().axes
    return collective_s(kind, nbytes, axes)


def axis(link: LinkSpec, size: int, level: int = 0) -> MeshAxis:
    return MeshAxis(name=f"a{level}", size=size, link=link, level=level)


@pytest.mark.parametrize("rates", MEASURED)
@pytest.mark.parametrize("kind", SHARED)
def test_measured_groups_take_what_their_knots_say(rates: str, kind: str) -> None:
    knots = collective_knots(rates, kind)
    assert knots is not None
    for size, row in zip(knots.group_sizes, knots.seconds, strict=True):
        of = axis(PRESETS[rates].inner, size)
        for nbytes, want in zip(knots.nbytes, row, strict=True):
            assert collective_s(kind, nbytes, [of]) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("rates", ["h100", "b200"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_group_between_two_takes_their_mean(rates: str, kind: str) -> None:
    """Six devices are between four and eight that send as many bytes each."""
    knots, link = collective_knots(rates, kind), PRESETS[rates].inner
    assert knots is not None
    for nbytes in knots.nbytes:
        sent = nbytes * 5 / 6
        four, eight = (
            collective_s(kind, sent * n / (n - 1), [axis(link, n)]) for n in (4, 8)
        )
        found = collective_s(kind, nbytes, [axis(link, 6)])
        assert found == pytest.approx((four + eight) / 2, rel=1e-9)


@given(st.sampled_from(GPUS), shapes, kinds, bytes_, st.floats(1.0, 100.0))
def test_more_bytes_take_no_less(
    name: str, shape: str, kind: str, nbytes: float, factor: float
) -> None:
    assume(not stepped(name, kind))
    few, many = (seconds(f"{shape}:{name}", kind, n) for n in (nbytes, factor * nbytes))
    assert 0 < few <= many * (1 + 1e-9)


@given(st.sampled_from(GPUS), shapes, kinds, bytes_)
def test_no_byte_takes_less_than_the_least(
    name: str, shape: str, kind: str, nbytes: float
) -> None:
    axes = Cluster.parse(f"{shape}:{name}").default_mesh().axes
    least = nbytes * collective_s_per_byte(kind, axes)
    assert collective_s(kind, nbytes, axes) >= least * (1 - 1e-9)


@given(st.sampled_from(GPUS), shapes, kinds)
def test_times_are_continuous(name: str, shape: str, kind: str) -> None:
    assume(not stepped(name, kind))
    axes = Cluster.parse(f"{shape}:{name}").default_mesh().axes
    curve = collective_curve(kind, axes)
    after = zip(curve.starts[1:], itertools.pairwise(curve.lines), strict=True)
    for start, ((a, b), (c, d)) in after:
        assert a + b * start == pytest.approx(c + d * start, rel=1e-6)


@given(
    st.sampled_from(MEASURED),
    st.sampled_from(["all_gather", "reduce_scatter"]),
    st.integers(2, 200),
    st.floats(1e6, 1e10),
)
def test_groups_take_between_half_and_twice_their_neighbours(
    rates: str, kind: str, size: int, nbytes: float
) -> None:
    """One device more changes neither the steps nor the bytes by much."""
    link = PRESETS[rates].inner
    one, more = (collective_s(kind, nbytes, [axis(link, k)]) for k in (size, size + 1))
    assert one / 2 < more < 2 * one


@pytest.mark.parametrize("name", ["a100", "v100", "t4"])
@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(2, 500), bytes_)
def test_more_devices_take_no_less(
    name: str, kind: str, size: int, nbytes: float
) -> None:
    """Where nothing is measured: a measured switch may reduce for the larger group."""
    link = PRESETS[name].inner
    few, many = (collective_s(kind, nbytes, [axis(link, k)]) for k in (size, size + 1))
    assert few <= many * (1 + 1e-9)


@given(st.sampled_from(GPUS), kinds, st.integers(1, 6), bytes_)
def test_more_hosts_take_no_less(
    name: str, kind: str, log_hosts: int, nbytes: float
) -> None:
    few, many = (f"{2**k}x8:{name}" for k in (log_hosts, log_hosts + 1))
    assert seconds(few, kind, nbytes) <= seconds(many, kind, nbytes) * (1 + 1e-9)


@given(st.sampled_from(GPUS), st.sampled_from(["all_reduce", "all_gather"]), bytes_)
def test_a_second_host_takes_no_less_than_one(
    name: str, kind: str, nbytes: float
) -> None:
    one, two = (seconds(f"{shape}:{name}", kind, nbytes) for shape in ("8", "2x8"))
    assert one <= two * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_large_messages_use_every_port_at_once(kind: str) -> None:
    """Eight devices of a host share what they send: the network is no slower."""
    sent = collective_bytes(kind, 1e11, 64)
    network = PRESETS["a100"].outer.bandwidth_bytes_per_s
    part = {"all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_reduce": 2 * 7 / 8}[kind]
    want = part * 1e11 / 8 / network
    found = seconds("8x8:a100", kind, 1e11)
    assert found == pytest.approx(max(want, sent / 235e9), rel=0.1)


@pytest.mark.parametrize(
    ("nbytes", "start_s", "step_s", "part"),
    [(1e3, 6.8e-6, 5.0e-6, 0.92 / 3.8), (1e8, 8.4e-6, 14.0e-6, 0.92)],
    ids=["LL", "Simple"],
)
def test_trees_of_hosts_take_what_nccls_table_says(
    nbytes: float, start_s: float, step_s: float, part: float
) -> None:
    """NCCL's src/graph/tuning.cc: ``baseLatencies`` and ``hwLatencies``, tree, net."""
    found = seconds(
        "64x1:h100,network=200Gb/s,network_latency=8us", "all_reduce", nbytes
    )
    sent_s = 2 * nbytes / 25e9 / part

    assert found == pytest.approx(start_s + 2 * 6 * step_s + sent_s, rel=1e-6)


def test_slower_networks_have_longer_steps() -> None:
    fast, slow = "16x8:h100", "16x8:h100,network_latency=80us"
    assert seconds(slow, "all_gather", 1e3) > 3 * seconds(fast, "all_gather", 1e3)


def test_a_measured_fit_replaces_the_table() -> None:
    fit = CollectiveFit(kind="all_gather", group_size=8, latency_s=1.0, s_per_byte=1e-9)
    link = LinkSpec(
        latency_s=1e-6, bandwidth_bytes_per_s=1e11, rates="h100", measured=(fit,)
    )
    plain = LinkSpec(latency_s=1e-6, bandwidth_bytes_per_s=1e11, rates="h100")

    found = collective_s("all_gather", 1e9, [axis(link, 8)])

    assert found == pytest.approx(2.0)
    for kind in set(KINDS) - {"all_gather"}:
        times = [collective_s(kind, 1e9, [axis(of, 8)]) for of in (link, plain)]
        assert times[0] == times[1]
