"""Tests the links of parts of a level."""

import dataclasses

import pytest

from autopar.cluster import Cluster, CollectiveFit, Level, LinkSpec
from autopar.cluster.presets import PRESETS
from autopar.cluster.slices import cut_all, cut_level, is_torus, wraps_around

CPU = PRESETS["cpu"].device


def fit(size):
    return CollectiveFit(
        kind="all_reduce", group_size=size, latency_s=1e-6, s_per_byte=1e-9
    )


def level(topology, size=8):
    link = LinkSpec(
        latency_s=1e-6,
        bandwidth_bytes_per_s=8e9,
        topology=topology,
        measured=(fit(2), fit(4), fit(8)),
    )
    return Level(name="x", size=size, link=link)


@pytest.mark.parametrize("topology", ["switch", "ring", "line"])
def test_a_whole_level_is_what_it_was(topology):
    assert cut_level(CPU, level(topology), 8) is not None
    assert cut_level(CPU, level(topology), 8) == level(topology)


def test_part_of_a_switch_has_its_links_and_fits():
    part = cut_level(CPU, level("switch"), 4)
    assert part == dataclasses.replace(level("switch"), size=4)
    assert part.link.measured == level("switch").link.measured


def test_part_of_a_ring_is_a_line():
    """The fit of the whole ring used its wrap-around."""
    link = cut_level(CPU, level("ring"), 4).link
    assert (link.topology, link.bandwidth_bytes_per_s) == ("line", 4e9)
    assert [f.group_size for f in link.measured] == [2, 4]


def test_a_line_is_halved_once():
    once = cut_level(CPU, cut_level(CPU, level("ring"), 4), 2).link
    assert once == cut_level(CPU, level("ring"), 2).link
    assert once.bandwidth_bytes_per_s == 4e9


def test_open_dimension_of_a_preset_is_not_halved_again():
    v5e = Cluster.parse("16x8:v5e")
    wrapped, open_ended = v5e.levels
    assert wraps_around(v5e.device, wrapped.link)
    assert not wraps_around(v5e.device, open_ended.link)
    halves = [cut_level(v5e.device, which, 4).link for which in (wrapped, open_ended)]
    assert halves[0] == halves[1]
    assert halves[0].bandwidth_bytes_per_s == 45e9  # one link, one direction


def test_of_custom_devices_every_ring_wraps_around():
    assert wraps_around(CPU, level("ring").link)
    assert not wraps_around(CPU, level("line").link)
    assert not wraps_around(CPU, level("switch").link)
    assert is_torus(level("ring"))
    assert is_torus(level("line"))
    assert not is_torus(level("switch"))


def test_cut_all():
    cluster = Cluster.parse("4x8:h100")
    sizes = [part.size for part in cut_all(cluster.device, cluster.levels, (2, 8))]
    assert sizes == [2, 8]
