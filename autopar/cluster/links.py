"""The links that are left of a level when only a part of it is used."""

import dataclasses
from collections.abc import Sequence

from autopar.cluster.presets import PRESETS
from autopar.cluster.rates import NCCL_CLASSES
from autopar.cluster.specs import CollectiveFit, DeviceSpec, Level, LinkSpec


def is_torus(level: Level) -> bool:
    """Whether the parts of a level are joined to their neighbours only."""
    return level.link.topology != "switch"


def wraps_around(device: DeviceSpec, link: LinkSpec) -> bool:
    """Whether the ends of a torus dimension are joined.

    A ring is, but for what the presets write for a dimension without wrap-around:
    a ring of half the bandwidth.
    """
    if link.topology != "ring":
        return False
    base = PRESETS.get(device.name)
    if base is None or not base.is_torus:
        return True
    return link != base.open_link


def cut(device: DeviceSpec, level: Level, size: int) -> Level:
    """`size` parts of a level, next to each other where it is a torus dimension.

    A ring becomes a line: without the wrap-around, a device at an end sends one way
    only, at half the bandwidth. Groups as large as the ring were measured with its
    wrap-around, so those fits go; smaller groups were lines already.

    >>> from autopar.cluster.presets import PRESETS
    >>> level = PRESETS["v5e"].levels((16,))[0]
    >>> half = cut(PRESETS["v5e"].device, level, 8)
    >>> half.size, half.link.topology
    (8, 'line')
    >>> half.link.bandwidth_bytes_per_s / level.link.bandwidth_bytes_per_s
    0.5
    """
    if size == level.size:
        return level
    if not is_torus(level):
        return dataclasses.replace(level, size=size)
    share = 0.5 if wraps_around(device, level.link) else 1.0
    link = LinkSpec(
        latency_s=level.link.latency_s,
        bandwidth_bytes_per_s=level.link.bandwidth_bytes_per_s * share,
        topology="line",
        measured=tuple(fit for fit in level.link.measured if fit.group_size <= size),
    )
    return dataclasses.replace(level, size=size, link=link)


def cut_all(
    device: DeviceSpec, levels: Sequence[Level], sizes: Sequence[int]
) -> tuple[Level, ...]:
    """Every level cut to its size."""
    pairs = zip(levels, sizes, strict=True)
    return tuple(cut(device, level, size) for level, size in pairs)


def at_rate(link: LinkSpec, bandwidth: float, latency: float) -> LinkSpec:
    """A link with its bandwidth and latency scaled, and what was measured on it too.

    A table of XLA's measurements holds for a link in order only; it gives way to the
    model of bandwidth and latency.

    Args:
      link: the link as it was described.
      bandwidth: new bandwidth as a part of the old one.
      latency: new latency as a part of the old one.

    >>> from autopar.cluster.presets import PRESETS
    >>> slow = at_rate(PRESETS["h100"].outer, 0.5, 1.0)
    >>> slow.bandwidth_bytes_per_s / PRESETS["h100"].outer.bandwidth_bytes_per_s
    0.5
    """
    keeps = link.rates == "" or link.rates in NCCL_CLASSES
    return dataclasses.replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth,
        latency_s=link.latency_s * latency,
        rates=link.rates if keeps else "nvlink",
        measured=tuple(_at_rate(fit, bandwidth, latency) for fit in link.measured),
    )


def _at_rate(fit: CollectiveFit, bandwidth: float, latency: float) -> CollectiveFit:
    return dataclasses.replace(
        fit,
        latency_s=fit.latency_s * latency,
        s_per_byte=fit.s_per_byte / bandwidth,
        large_s_per_byte=fit.large_s_per_byte / bandwidth,
    )
