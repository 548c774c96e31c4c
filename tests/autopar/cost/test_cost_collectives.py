"""Tests bytes and times of collectives against formulas."""

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar.cost.collectives as collectives_module
from autopar.cluster import Cluster, CollectiveFit, LinkSpec, MeshAxis
from autopar.cluster.specs import KINDS
from autopar.cost.collectives import (
    collective_bytes,
    collective_s,
    collective_s_per_byte,
)

BANDWIDTH = 1e10
LATENCY_S = 1e-5

kinds = st.sampled_from(KINDS)
sizes = st.floats(1.0, 1e12)


def axis(
    size,
    *,
    level=0,
    latency_s=LATENCY_S,
    bandwidth=BANDWIDTH,
    topology="switch",
    fits=(),
):
    link = LinkSpec(
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth,
        topology=topology,
        measured=tuple(fits),
    )
    return MeshAxis(name=f"axis{level}", size=size, link=link, level=level)


links = st.builds(
    LinkSpec,
    latency_s=st.sampled_from([0.0, 1e-6, 1e-4]),
    bandwidth_bytes_per_s=st.sampled_from([1e9, 1e11]),
    topology=st.sampled_from(["switch", "ring", "line"]),
)


@st.composite
def some_axes(draw):
    """One to three axes over up to three levels, with one link for each level."""
    of_level = draw(st.tuples(links, links, links))
    levels = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    return tuple(
        MeshAxis(
            name=f"axis{i}",
            size=draw(st.integers(1, 16)),
            link=of_level[level],
            level=level,
        )
        for i, level in enumerate(sorted(levels))
    )


def test_examples_in_docstrings_run():
    result = doctest.testmod(collectives_module)
    assert result.attempted > 0
    assert result.failed == 0


class TestBytes:
    @given(st.floats(0, 1e15), st.integers(1, 10_000))
    def test_formulas(self, nbytes, k):
        part = (k - 1) / k
        expected = {
            "all_reduce": 2 * part * nbytes,
            "all_gather": part * nbytes,
            "reduce_scatter": part * nbytes,
            "all_to_all": part * nbytes,
            "collective_permute": nbytes if k > 1 else 0.0,
        }
        for kind in KINDS:
            assert collective_bytes(kind, nbytes, k) == pytest.approx(expected[kind])

    def test_all_reduce_is_reduce_scatter_and_all_gather(self):
        halves = [collective_bytes(kind, 1e6, 7) for kind in KINDS[1:3]]
        assert collective_bytes("all_reduce", 1e6, 7) == pytest.approx(sum(halves))

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="unknown collective 'broadcast'"):
            collective_bytes("broadcast", 1, 2)
        with pytest.raises(ValueError, match="group_size must be 1 or more"):
            collective_bytes("all_gather", 1, 0)
        with pytest.raises(ValueError, match="unknown collective 'psum'"):
            collective_s("psum", 1, [axis(2)])


class TestOneAxis:
    @given(kinds, st.integers(2, 512))
    def test_large_sizes_are_bound_by_the_bytes_sent(self, kind, k):
        nbytes = 1e15
        expected = collective_bytes(kind, nbytes, k) / BANDWIDTH
        assert collective_s(kind, nbytes, [axis(k)]) == pytest.approx(
            expected, rel=1e-3
        )

    @pytest.mark.parametrize(
        ("kind", "steps"),
        [
            ("all_reduce", 6),
            ("all_gather", 6),
            ("reduce_scatter", 6),
            ("all_to_all", 6),
            ("collective_permute", 1),
        ],
    )
    def test_small_sizes_take_logarithmic_steps(self, kind, steps):
        """64 devices: log2(64) = 6 messages one after the other."""
        assert collective_s(kind, 1e-3, [axis(64)]) == pytest.approx(steps * LATENCY_S)

    def test_ring_all_reduce(self):
        """2 (k-1) steps of nbytes / k each, once that is the faster way."""
        k, nbytes = 8, 1e9
        step_s = LATENCY_S + nbytes / k / BANDWIDTH
        expected = 2 * (k - 1) * step_s
        assert collective_s("all_reduce", nbytes, [axis(k)]) == pytest.approx(expected)

    def test_two_devices_exchange_once(self):
        nbytes = 1e6
        expected = LATENCY_S + nbytes / BANDWIDTH
        assert collective_s("all_reduce", nbytes, [axis(2)]) == pytest.approx(expected)

    @given(kinds, st.integers(2, 64), sizes)
    def test_never_below_the_bandwidth_bound(self, kind, k, nbytes):
        for topology in ("switch", "ring", "line"):
            bound_s = collective_bytes(kind, nbytes, k) / BANDWIDTH
            time_s = collective_s(kind, nbytes, [axis(k, topology=topology)])
            assert time_s >= bound_s * (1 - 1e-9)

    def test_torus_all_to_all_waits_for_the_middle_links(self):
        """A ring of 16: every byte travels 4 hops on average, 64 / 16."""
        link = axis(16, topology="ring", latency_s=0.0)
        time_s = collective_s("all_to_all", 1e9, [link])
        hops = sum(min(d, 16 - d) for d in range(16)) / 16
        assert time_s == pytest.approx(hops * 1e9 / BANDWIDTH)

    def test_torus_latency_is_that_of_the_farthest_device(self):
        link = axis(16, topology="ring")
        assert collective_s("all_gather", 1e-6, [link]) == pytest.approx(8 * LATENCY_S)
        assert collective_s("all_reduce", 1e-6, [link]) == pytest.approx(16 * LATENCY_S)

    def test_torus_permutation_uses_one_direction(self):
        link = axis(4, topology="ring", latency_s=0.0)
        time_s = collective_s("collective_permute", 1e9, [link])
        assert time_s == pytest.approx(2 * 1e9 / BANDWIDTH)

    @given(st.integers(2, 20))
    def test_line_all_to_all_waits_for_its_busiest_link(self, k):
        """Every ordered pair sends a k-th; links are counted one by one."""
        load = [0] * (k - 1)
        for source in range(k):
            for target in range(source + 1, k):
                for link in range(source, target):
                    load[link] += 1
        time_s = collective_s(
            "all_to_all", 1e9, [axis(k, topology="line", latency_s=0.0)]
        )
        assert time_s == pytest.approx(max(load) / k * 1e9 / BANDWIDTH)

    @pytest.mark.parametrize(
        ("kind", "hops"),
        [
            ("all_gather", 7),
            ("reduce_scatter", 7),
            ("all_reduce", 14),
            ("all_to_all", 7),
            ("collective_permute", 7),
        ],
    )
    def test_line_latency_is_that_from_end_to_end(self, kind, hops):
        link = axis(8, topology="line")
        assert collective_s(kind, 1e-6, [link]) == pytest.approx(hops * LATENCY_S)

    @given(kinds, st.integers(2, 64), sizes)
    def test_half_a_ring_is_never_faster_than_the_ring(self, kind, k, nbytes):
        """Without the wrap-around a device sends half as much."""
        ring = axis(k, topology="ring", bandwidth=2 * BANDWIDTH)
        line = axis(k, topology="line")
        assert collective_s(kind, nbytes, [line]) >= collective_s(kind, nbytes, [ring])


class TestSeveralAxes:
    outer = axis(4, level=0, bandwidth=1e9)
    inner = axis(8, level=1, bandwidth=1e11)

    def test_all_gather_crosses_hosts_with_the_least(self):
        """A host holds one shard per device: R / 8 crosses, then R is gathered."""
        total = 1e11
        outer_s = collective_s("all_gather", total / 8, [self.outer])
        inner_s = collective_s("all_gather", total, [self.inner])
        both_s = collective_s("all_gather", total, [self.outer, self.inner])
        assert both_s == pytest.approx(outer_s + inner_s)

    def test_reduce_scatter_mirrors_all_gather(self):
        axes = [self.outer, self.inner]
        gather_s = collective_s("all_gather", 1e9, axes)
        assert collective_s("reduce_scatter", 1e9, axes) == pytest.approx(gather_s)

    def test_large_all_reduce_scatters_reduces_gathers(self):
        nbytes = 1e11
        expected = (
            collective_s("reduce_scatter", nbytes, [self.inner])
            + collective_s("all_reduce", nbytes / 8, [self.outer])
            + collective_s("all_gather", nbytes, [self.inner])
        )
        both_s = collective_s("all_reduce", nbytes, [self.outer, self.inner])
        assert both_s == pytest.approx(expected)

    def test_small_all_reduce_saves_steps(self):
        """log2(8) steps inside and log2(4) across, instead of 3 + 2 + 3."""
        both_s = collective_s("all_reduce", 1e-3, [self.outer, self.inner])
        assert both_s == pytest.approx(5 * LATENCY_S)

    def test_all_to_all_exchanges_on_each_level(self):
        parts = [collective_s("all_to_all", 1e9, [a]) for a in (self.outer, self.inner)]
        both_s = collective_s("all_to_all", 1e9, [self.outer, self.inner])
        assert both_s == pytest.approx(sum(parts))

    def test_permutation_is_as_slow_as_its_slowest_level(self):
        both_s = collective_s("collective_permute", 1e9, [self.outer, self.inner])
        assert both_s == collective_s("collective_permute", 1e9, [self.outer])

    @given(kinds, sizes)
    def test_axes_of_one_level_are_one_group(self, kind, nbytes):
        split = [axis(4), axis(2)]
        assert collective_s(kind, nbytes, split) == collective_s(
            kind, nbytes, [axis(8)]
        )

    @given(kinds, sizes, some_axes())
    def test_order_of_the_axes_does_not_matter(self, kind, nbytes, axes):
        times = {collective_s(kind, nbytes, p) for p in itertools.permutations(axes)}
        assert max(times) == pytest.approx(min(times))

    @given(sizes)
    def test_three_levels_never_below_any_phase(self, nbytes):
        axes = Cluster.parse("2x4x8:h100").default_mesh().axes
        times = {kind: collective_s(kind, nbytes, axes) for kind in KINDS}
        parts = {axes[2]: 1, axes[1]: 8, axes[0]: 32}
        for one, divisor in parts.items():
            bandwidth = one.link.bandwidth_bytes_per_s
            for kind in ("all_reduce", "all_gather", "reduce_scatter"):
                sent = collective_bytes(kind, nbytes / divisor, one.size)
                assert times[kind] >= sent / bandwidth * (1 - 1e-9)


class TestAllShapes:
    @given(kinds, some_axes(), sizes, st.floats(1.0, 100.0))
    def test_monotone_in_the_size(self, kind, axes, nbytes, factor):
        small_s = collective_s(kind, nbytes, axes)
        large_s = collective_s(kind, nbytes * factor, axes)
        assert large_s >= small_s * (1 - 1e-12)

    @given(kinds, some_axes())
    def test_nothing_costs_nothing(self, kind, axes):
        assert collective_s(kind, 0, axes) == 0.0
        assert collective_s(kind, 1e9, ()) == 0.0
        assert collective_s(kind, 1e9, [axis(1), axis(1, level=1)]) == 0.0


def fit(k, *, kind="all_reduce", latency_s=0.0, s_per_byte=0.0, large=0.0):
    return CollectiveFit(
        kind=kind,
        group_size=k,
        latency_s=latency_s,
        s_per_byte=s_per_byte,
        large_s_per_byte=large,
    )


class TestMeasured:
    def test_replaces_the_model_of_its_kind_only(self):
        link = axis(4, fits=[fit(4, latency_s=1.0, s_per_byte=2e-9)])
        assert collective_s("all_reduce", 1e9, [link]) == pytest.approx(3.0)
        plain_s = collective_s("all_gather", 1e9, [axis(4)])
        assert collective_s("all_gather", 1e9, [link]) == plain_s

    def test_large_buffers_have_a_floor(self):
        found = fit(4, latency_s=1.0, s_per_byte=1e-9, large=5e-9)
        link = axis(4, fits=[found])
        for nbytes, expected in [(1e8, 1.1), (1e9, 5.0), (1e10, 50.0)]:
            assert found.seconds(nbytes) == pytest.approx(expected)
            assert collective_s("all_reduce", nbytes, [link]) == pytest.approx(expected)

    def test_interpolates_between_group_sizes(self):
        """Linear in the group size: latency, and time of a byte sent.

        All-reduce sends 1 byte per byte in groups of 2, 1.5 in groups of 4, and 4/3
        in groups of 3.
        """
        fits = [
            fit(2, latency_s=1.0, s_per_byte=1e-9),
            fit(4, latency_s=3.0, s_per_byte=1.5 * 3e-9),
        ]
        expected = 2.0 + 4 / 3 * 2e-9 * 1e9
        time_s = collective_s("all_reduce", 1e9, [axis(3, fits=fits)])
        assert time_s == pytest.approx(expected)

    def test_beyond_the_measured_sizes_takes_the_nearest(self):
        link = axis(8, fits=[fit(4, latency_s=1.0, s_per_byte=1.5e-9)])
        expected = 1.0 + 2 * 7 / 8 * 1e-9 * 1e9
        assert collective_s("all_reduce", 1e9, [link]) == pytest.approx(expected)

    def test_inside_a_hierarchy(self):
        """A slow measured level inside hosts shows in the phases that use it."""
        fits = [
            fit(4, kind="reduce_scatter", latency_s=1.0),
            fit(4, kind="all_gather", latency_s=2.0),
            fit(4, latency_s=100.0),
        ]
        inner = axis(4, level=1, fits=fits)
        outer = axis(2)
        outer_s = collective_s("all_reduce", 1e6 / 4, [outer])
        both_s = collective_s("all_reduce", 1e6, [outer, inner])
        assert both_s == pytest.approx(3.0 + outer_s)

    def test_permutation_across_measured_levels(self):
        slow = fit(2, kind="collective_permute", latency_s=1.0, large=9e-9)
        axes = [axis(2, fits=[slow]), axis(4, level=1)]
        assert collective_s("collective_permute", 1e9, axes) == pytest.approx(9.0)


def test_eight_a100_attain_the_reported_bus_bandwidth():
    """nccl-tests report 230-250 GB/s: 2 (k-1)/k nbytes / time, at 8 GB."""
    axes = Cluster.parse("8:a100").default_mesh().axes
    nbytes = 8e9
    time_s = collective_s("all_reduce", nbytes, axes)
    bus_bandwidth = collective_bytes("all_reduce", nbytes, 8) / time_s
    assert 230e9 < bus_bandwidth < 250e9


class TestLargestMessages:
    @given(kinds, some_axes(), sizes)
    def test_no_byte_takes_less(self, kind, axes, nbytes):
        least = nbytes * collective_s_per_byte(kind, axes)
        assert collective_s(kind, nbytes, axes) >= least * (1 - 1e-9)

    @given(kinds, some_axes())
    def test_nothing_else_counts_in_the_end(self, kind, axes):
        found = collective_s(kind, 1e21, axes) / 1e21
        assert found == pytest.approx(collective_s_per_byte(kind, axes), rel=1e-6)

    def test_buffers_that_fit_no_cache(self):
        fit = CollectiveFit(
            kind="all_reduce",
            group_size=4,
            latency_s=1e-3,
            s_per_byte=1e-9,
            large_s_per_byte=3e-9,
            relative_error=0.0,
        )
        found = collective_s_per_byte("all_reduce", (axis(4, fits=[fit]),))
        assert found == pytest.approx(3e-9)
