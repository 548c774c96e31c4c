"""Clusters for property tests: presets, custom clusters, their parts, and groups."""

import itertools
import math

from hypothesis import strategies as st

from autopar.cluster import Cluster, CollectiveFit, DeviceSpec, Level, LinkSpec
from autopar.cluster.presets import PRESETS
from autopar.cluster.specs import KINDS

NAMES = ("pod", "host", "device")


def link(topology="switch", fits=()):
    return LinkSpec(
        latency_s=1e-6,
        bandwidth_bytes_per_s=1e9,
        topology=topology,
        measured=tuple(fits),
    )


def built(*levels):
    """A cluster of CPU devices with levels of (size, topology)."""
    names = NAMES[-len(levels) :]
    made = (
        Level(name=name, size=size, link=link(topology))
        for name, (size, topology) in zip(names, levels, strict=True)
    )
    return Cluster(device=PRESETS["cpu"].device, levels=tuple(made))


def small_clusters(most_devices=9):
    """Clusters of one to three levels, each joined by a switch, a ring or a line."""
    topologies = st.sampled_from(["switch", "ring", "line"])
    level = st.tuples(st.integers(1, 5), topologies)
    return (
        st.lists(level, min_size=1, max_size=3)
        .filter(lambda levels: math.prod(size for size, _ in levels) <= most_devices)
        .map(lambda levels: built(*levels))
    )


numbers = st.floats(1e-9, 1e15)
texts = st.text(min_size=1, max_size=8)


@st.composite
def devices(draw):
    return DeviceSpec(
        name=draw(texts),
        kind=draw(st.sampled_from(["gpu", "tpu", "cpu"])),
        peak_flops_per_s=(("float32", draw(numbers)), ("bfloat16", draw(numbers))),
        memory_bytes=draw(st.integers(1, 10**15)),
        memory_bandwidth_bytes_per_s=draw(numbers),
        matmul_efficiency=draw(st.floats(0.01, 1.0)),
        kernel_latency_s=draw(st.floats(0.0, 1.0)),
        vector_flops_per_s=draw(st.floats(0.0, 1e15)),
        power_part=draw(st.floats(0.01, 1.0)),
        workspace_bytes=draw(st.none() | st.integers(0, 2**30)),
        on_chip_bytes=draw(st.integers(0, 2**30)),
    )


fits = st.builds(
    CollectiveFit,
    kind=st.sampled_from(KINDS),
    group_size=st.integers(2, 8),
    latency_s=st.floats(0.0, 1.0),
    s_per_byte=st.floats(0.0, 1.0),
    large_s_per_byte=st.floats(0.0, 1.0),
    relative_error=st.floats(0.0, 1.0),
)


@st.composite
def links(draw):
    some = draw(
        st.lists(fits, max_size=2, unique_by=lambda fit: (fit.kind, fit.group_size))
    )
    return LinkSpec(
        latency_s=draw(st.floats(0.0, 1.0)),
        bandwidth_bytes_per_s=draw(numbers),
        topology=draw(st.sampled_from(["switch", "ring", "line"])),
        measured=tuple(some),
    )


@st.composite
def custom_clusters(draw):
    names = draw(st.lists(texts, min_size=1, max_size=3, unique=True))
    levels = tuple(
        Level(name=name, size=draw(st.integers(1, 4)), link=draw(links()))
        for name in names
    )
    return Cluster(device=draw(devices()), levels=levels)


preset_clusters = st.builds(
    lambda sizes, name: Cluster.parse(f"{'x'.join(map(str, sizes))}:{name}"),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from(sorted(PRESETS)),
)


@st.composite
def parts(draw, wholes):
    """A cluster, a slice of a cluster, or a cluster after devices were lost."""
    whole = draw(wholes)
    how = draw(st.sampled_from(["whole", "slice", "without"]))
    if how == "slice":
        return draw(st.sampled_from([part for part, _ in whole.slices()]))
    if how == "without":
        kept = draw(st.sampled_from(whole.ids))
        lost = draw(st.sets(st.sampled_from(whole.ids))) - {kept}
        return whole.without(devices=sorted(lost))
    return whole


equal_clusters = parts(st.one_of(preset_clusters, custom_clusters()))
GROUPABLE = tuple(
    Cluster.parse(f"{shape}:{name}")
    for shape, name in itertools.product(["4", "2x2", "2x3"], ["h100", "a100", "cpu"])
)
grouped_clusters = parts(
    st.lists(st.sampled_from(GROUPABLE), min_size=2, max_size=3).map(
        lambda groups: Cluster(groups=tuple(groups))
    )
)
any_clusters = st.one_of(equal_clusters, grouped_clusters)
