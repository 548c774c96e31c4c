"""Time of NCCL's collectives among GPUs, by algorithm and protocol.

NCCL chooses the fastest of rings and trees, each with three protocols: two that send
few bytes soon (LL, LL128) and one that sends many (Simple). Each is a straight line in
the size. Latencies and the parts of the bandwidth are those of NCCL's own tuning model
(https://github.com/NVIDIA/nccl, src/graph/tuning.cc, version 2.29). Where XLA's
measurements cover the links (`autopar.cluster.rates`), they replace the lines.

Over hosts, every device sends through its own share of the network while the links
inside the host work: the slower of the two counts, not their sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cluster.rates import CollectiveKnots, collective_knots, partner_rates
from autopar.cluster.specs import LinkSpec
from autopar.cost.curves import Curve, highest, line, lowest, through
from autopar.cost.partners import partner_curve
from autopar_passes.audit.collectives import sent_ratio


@dataclasses.dataclass(frozen=True, slots=True)
class _Protocol:
    """One way to send; seconds, and parts of the link's bandwidth.

    Attributes:
      ring_start_s: of a ring, whatever its size.
      tree_start_s: of a tree.
      ring_step_s: one step of a ring, by class of links.
      tree_step_s: one step of a tree.
      ring_part: part of the bandwidth that a ring attains.
      tree_part: the same of a tree inside a host.
    """

    ring_start_s: float
    tree_start_s: float
    ring_step_s: dict[str, float]
    tree_step_s: dict[str, float]
    ring_part: float
    tree_part: float


_LL = _Protocol(
    6.6e-6,
    6.8e-6,
    {"nvlink": 0.6e-6, "pcie": 1.0e-6, "network": 2.7e-6},
    {"nvlink": 0.6e-6, "pcie": 1.0e-6, "network": 5.0e-6},
    0.5,
    0.92 / 3.8,
)
_LL128 = _Protocol(
    14.0e-6,
    14.0e-6,
    {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4.0e-6},
    {"nvlink": 1.25e-6, "pcie": 1.9e-6, "network": 8.5e-6},
    0.92,
    0.92 * 7 / 9,
)
_SIMPLE = _Protocol(
    8.4e-6,
    8.4e-6,
    {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14.0e-6},
    {"nvlink": 4.0e-6, "pcie": 4.0e-6, "network": 14.0e-6},
    1.0,
    0.92,
)
# The latency that the network's steps above are for; a link with another has them
# longer or shorter by the same factor.
_NETWORK_LATENCY_S = 8e-6
# A message to each of many partners, in an all-to-all over links that were not
# measured: what the all-to-alls of 32 and 64 GB200 add for each device.
_PARTNER_S = 1.0e-6
# What each device beyond the largest measured group adds: a step of NCCL's rings
# (LL128), nothing in an all-reduce inside the switch.
_BEYOND_S = {
    "all_gather": _LL128.ring_step_s["nvlink"],
    "reduce_scatter": _LL128.ring_step_s["nvlink"],
}


# Bytes sent in a group of 2 that take as long as those in a group of 4, as a part of
# what would keep the size: on B200, where both were measured, 2 GiB.
_PAIR_PART = {
    "all_gather": 0.855,
    "reduce_scatter": 0.858,
    "all_reduce": 0.791,
}


def _protocols(link: LinkSpec) -> tuple[_Protocol, ...]:
    """LL128 needs links that store 128 bytes at once: not PCIe."""
    return (_LL, _SIMPLE) if link.rates == "pcie" else (_LL, _LL128, _SIMPLE)


def _class_of(link: LinkSpec) -> str:
    return link.rates if link.rates in ("pcie", "network") else "nvlink"


def inside(kind: str, size: int, link: LinkSpec) -> Curve:
    """The time among `size` devices of one host, or of one domain of NVLink."""
    knots = collective_knots(link.rates, kind)
    if knots is not None:
        return _measured(kind, size, knots)
    rates = partner_rates(link.rates, kind)
    if rates is not None:
        return partner_curve(kind, size, rates)
    per_byte, of = 1 / link.bandwidth_bytes_per_s, _class_of(link)
    sent = sent_ratio(kind, size) * per_byte
    if kind == "collective_permute":
        return line(_LL.ring_start_s + _SIMPLE.ring_step_s[of], sent)
    if kind == "all_to_all":
        start = _LL.ring_start_s + _SIMPLE.ring_step_s[of]
        return line(start + (size - 1) * _PARTNER_S, sent)
    ways: list[Curve] = []
    steps = (2 if kind == "all_reduce" else 1) * (size - 1)
    for p in _protocols(link):
        ways.append(
            line(p.ring_start_s + steps * p.ring_step_s[of], sent / p.ring_part)
        )
        if kind == "all_reduce":
            latency = p.tree_start_s + steps * p.tree_step_s[of]
            ways.append(line(latency, 2 * per_byte / p.tree_part))
    return lowest(ways)


def _measured(kind: str, size: int, knots: CollectiveKnots) -> Curve:
    """The measured times of this group, or those of its neighbours.

    Groups are compared where a device sends as many bytes. Between two measured
    groups their times are interpolated linearly in the number of devices; beyond the
    largest, each device adds a constant; below the smallest, the size is scaled.
    """
    sizes = knots.group_sizes
    above = next((i for i, s in enumerate(sizes) if s >= size), len(sizes) - 1)
    below = max(0, above - 1) if sizes[above] > size else above
    low, high = sizes[below], sizes[above]
    part = min(1.0, max(0.0, (size - low) / (high - low))) if high > low else 1.0
    seconds = [
        (1 - part) * a + part * b
        for a, b in zip(
            _at(kind, size, knots, below), _at(kind, size, knots, above), strict=True
        )
    ]
    extra = max(0, size - sizes[-1]) * _BEYOND_S.get(kind, 0.0)
    return through(knots.nbytes, [s + extra for s in seconds])


def _at(kind: str, size: int, knots: CollectiveKnots, group: int) -> list[float]:
    """Times of a measured group, for what `size` devices send at each knot."""
    of, measured = through(knots.nbytes, knots.seconds[group]), knots.group_sizes[group]
    more = sent_ratio(kind, size) / sent_ratio(kind, measured)
    if size < measured == knots.group_sizes[0]:
        # Fewer links are in use between two devices than among four.
        pair = _PAIR_PART.get(kind, 1.0)
        more = pair + (1 - pair) * (size - 2) / (measured - 2)
    return [of.seconds(nbytes * more) for nbytes in knots.nbytes]


def across(kind: str, groups: Sequence[tuple[int, LinkSpec]]) -> Curve:
    """The time over several levels, outermost first; the innermost may be a host's.

    Args:
      kind: one of `autopar.cluster.specs.KINDS`.
      groups: sizes and links; all of these links have rates.
    """
    size, link = groups[-1]
    if link.rates == "network":
        return _over_network(kind, math.prod(k for k, _ in groups), 1, groups, "")
    if len(groups) == 1:
        return inside(kind, size, link)
    hosts = math.prod(k for k, _ in groups[:-1])
    network = _over_network(kind, hosts, size, groups[:-1], _class_of(link))
    own = inside(kind, size, link)
    if kind == "all_to_all":
        own = own.seeing(1 / hosts)
    return highest([own, network])


def _over_network(
    kind: str,
    hosts: int,
    size: int,
    groups: Sequence[tuple[int, LinkSpec]],
    of: str,
) -> Curve:
    """What the network takes, with `size` devices in each host, joined by `of`."""
    links = [link for _, link in groups]
    per_byte = 1 / min(link.bandwidth_bytes_per_s for link in links)
    slower = max(link.latency_s for link in links) / _NETWORK_LATENCY_S
    share = sent_ratio(kind, hosts) * per_byte
    if kind == "collective_permute":
        return line(_SIMPLE.ring_start_s + slower * _step("network"), share)
    if kind == "all_to_all":
        start = _SIMPLE.ring_start_s + slower * _step("network")
        return line(start + (hosts * size - 1) * _PARTNER_S, share)
    rounds = 2 if kind == "all_reduce" else 1
    ways: list[Curve] = []
    for p in (_LL, _LL128, _SIMPLE):
        near = hosts * (size - 1) * p.ring_step_s[of] if of else 0.0
        far = (hosts - 1) * slower * p.ring_step_s["network"]
        latency = p.ring_start_s + rounds * (near + far)
        ways.append(line(latency, share / size / p.ring_part))
        if kind == "all_reduce":
            near = (size - 1) * p.tree_step_s[of] if of else 0.0
            far = math.ceil(math.log2(hosts)) * slower * p.tree_step_s["network"]
            latency = p.tree_start_s + 2 * (near + far)
            ways.append(line(latency, 2 * per_byte / size / p.tree_part))
    return lowest(ways)


def _step(of: str) -> float:
    return _SIMPLE.ring_step_s[of]
