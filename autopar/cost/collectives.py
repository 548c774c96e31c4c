"""Bytes and time of collectives over mesh axes.

Times among GPUs are those of NCCL: from its tuning model, or from XLA's measurements
where these cover the links. On other devices, each algorithm for a collective over one
group of devices takes a time that is linear in its size, ``latency + slope * nbytes``
(R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005). The model takes the fastest algorithm, so the
time is the minimum of a few such lines. A collective over several levels of links, such
as inside hosts and between hosts, is a sequence of phases, one per level. Disjoint
groups of devices run the same collective at the same time. Bandwidths are per device,
so the groups do not slow each other down.

`autopar.cluster.specs.Kind` defines the size of each kind of collective.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from autopar.cluster.mesh import MeshAxis
from autopar.cluster.rates import (
    CollectiveKnots,
    PartnerRates,
    collective_knots,
    partner_rates,
)
from autopar.cluster.specs import KINDS, LinkSpec
from autopar.cost.curves import Line, TimeCurve, highest, line, lowest, through, total
from autopar_errors import InputError
from autopar_passes.audit.partitioned import sent_ratio

# Seconds of NCCL's collectives among GPUs, by algorithm and protocol.
#
# NCCL chooses the fastest of rings and trees, each with three protocols. Two protocols
# have a low latency (LL, LL128) and one has a high bandwidth (Simple). The time of each
# combination is linear in the size. Latencies and the fractions of the bandwidth that
# are reached are those of NCCL's own tuning model (https://github.com/NVIDIA/nccl,
# src/graph/tuning.cc, version 2.29). Where XLA's measurements cover the links
# (`autopar.cluster.rates`), the measurements replace the lines.
#
# In a collective over several hosts, every device sends through its own share of the
# network while the links inside the host work. The collective takes the longer of the
# two times, not their sum.

# Seconds of messages between pairs of GPUs: permutations and all-to-alls.
#
# NCCL sends to each partner through channels. The number of channels per partner
# depends on the bytes and on the number of devices (https://github.com/NVIDIA/nccl,
# src/enqueue.cc, `addP2pToPlan` and `scheduleP2pTasksToPlan`, version 2.29). NCCL
# starts with the largest number such that all partners have separate channels. It
# raises this number, as long as there are channels, until no channel carries more than
# `LARGEST_PART` bytes. Therefore the time drops where a message gets more channels, and
# where NCCL changes from the protocol of small messages to that of large messages. The
# rates come from XLA's measurements (`autopar.cluster.rates.PartnerRates`).

Array = npt.NDArray[np.float64]

# The most bytes that one channel carries: 32 chunks of 512 KiB (`maxPartSize`).
LARGEST_PART = 2.0**24
# Up to this number of bytes to one partner, NCCL uses the protocol of small messages.
# The value follows from XLA's measurements, where 512 KiB take longer than 1 MiB. It is
# NCCL_P2P_LL_THRESHOLD, 16 KiB, in each of 32 channels.
SMALL_MESSAGE = 2.0**19
# Between these two message sizes, the curve has a straight piece for each half octave:
# a factor of `_STEP`.
_LEAST, _MOST, _STEP = 2.0**10, 2.0**36, math.sqrt(2.0)


def channels(nbytes: float, size: int, rates: PartnerRates) -> int:
    """Number of channels that carry the message to one partner.

    >>> rates = PartnerRates(channels=32, most_channels=32)
    >>> [channels(n * 2.0**20, 8, rates) for n in (1, 64, 65, 1024)]
    [4, 4, 8, 32]

    Args:
      nbytes: bytes sent to one partner.
      size: number of devices in the group.
      rates: rates of the link.
    """
    used = rates.most_channels
    while used > 1 and used * size > rates.channels:
        used //= 2
    while nbytes > used * LARGEST_PART and 2 * used <= rates.most_channels:
        used *= 2
    return used


def modelled_s(
    nbytes: Array, used: int, size: int, partners: int, rates: PartnerRates
) -> Array:
    """Seconds by the model, without the correction by measurements (`beside`).

    ``start + partner * (partners - 1) + (through^e + wire^e)^(1/e)``. Each channel
    sends its messages one after the other (``through``). The link carries the messages
    of all channels (``wire``).

    Args:
      nbytes: bytes sent to one partner; all entries use the same protocol and the same
        number of channels.
      used: number of channels per message.
      size: number of devices in the group.
      partners: number of other devices to which a device sends: 1 in a permutation, all
        others in an all-to-all.
      rates: rates of the link.
    """
    # In an all-to-all a device also copies a message to itself through a channel.
    messages = 1 if partners == 1 else size
    rounds = math.ceil(messages * used / rates.channels)
    small = nbytes <= SMALL_MESSAGE
    rate = np.where(small, rates.small_bytes_per_s, rates.large_bytes_per_s)
    through = rounds * nbytes / used / rate
    wire = partners * nbytes / rates.bandwidth_bytes_per_s
    e = rates.sharpness
    more = rates.partner_s * (partners - 1)
    return rates.start_s + more + (through**e + wire**e) ** (1 / e)


def beside(nbytes: Array, size: int, rates: PartnerRates) -> Array:
    """Logarithm of measured time divided by modelled time, interpolated.

    The interpolation between measured points is linear in the logarithms of the bytes
    and of the group size.

    Args:
      nbytes: bytes sent to one partner.
      size: number of devices in the group.
      rates: rates of the link.
    """
    rows = np.array(rates.logs)
    if not rows.size:
        return np.zeros_like(nbytes)
    at = np.log2(nbytes)
    each = np.array([np.interp(at, rates.octaves, row) for row in rows])
    groups = np.log2(np.array(rates.group_sizes, dtype=np.float64))
    place = np.interp(math.log2(size), groups, np.arange(len(groups)))
    below = int(place)
    above = min(below + 1, len(groups) - 1)
    return each[below] + (place - below) * (each[above] - each[below])


def partner_curve(kind: str, size: int, rates: PartnerRates) -> TimeCurve:
    """The time of a permutation or an all-to-all as a function of its size.

    Args:
      kind: ``collective_permute`` or ``all_to_all``.
      size: number of devices in the group, 2 or more.
      rates: rates of the link.
    """
    partners = 1 if kind == "collective_permute" else size - 1
    whole = 1 if kind == "collective_permute" else size
    starts: list[float] = []
    lines: list[Line] = []
    for low, high, used in _spans(size, rates):
        sizes = _points(low, high)
        inside = np.nextafter(sizes, np.inf)
        inside[-1] = high
        seconds = modelled_s(inside, used, size, partners, rates)
        seconds = seconds * np.exp(beside(inside, size, rates))
        for k in range(len(sizes) - 1):
            slope = (seconds[k + 1] - seconds[k]) / (sizes[k + 1] - sizes[k]) / whole
            starts.append(float(inside[k]) * whole)
            lines.append((float(seconds[k] - slope * whole * sizes[k]), float(slope)))
    first = lines[0][0] + lines[0][1] * starts[0]
    return TimeCurve((0.0, *starts), ((first, 0.0), *lines))


def _spans(size: int, rates: PartnerRates) -> Iterator[tuple[float, float, int]]:
    """Yields ranges of message sizes, as (low, high, number of channels).

    All messages of a range use the same protocol and the same number of channels.
    """
    used = channels(_LEAST, size, rates)
    bounds = [_LEAST, SMALL_MESSAGE]
    while 2 * used <= rates.most_channels:
        bounds.append(used * LARGEST_PART)
        used *= 2
    bounds.append(_MOST)
    for low, high in itertools.pairwise(bounds):
        yield low, high, channels(high, size, rates)


def _points(low: float, high: float) -> Array:
    """Message sizes from ``low`` to ``high``, each about 1.4 times the one before."""
    steps = max(1, round(math.log(high / low) / math.log(_STEP)))
    return np.geomspace(low, high, steps + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Protocol:
    """Constants of one NCCL protocol: seconds, and fractions of the link's bandwidth.

    Attributes:
      ring_start_s: seconds to start a ring of any size.
      tree_start_s: seconds to start a tree.
      ring_step_s: seconds of one step of a ring, by kind of link.
      tree_step_s: seconds of one step of a tree, by kind of link.
      ring_part: fraction of the bandwidth that a ring attains.
      tree_part: fraction of the bandwidth that a tree inside a host attains.
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
# The seconds of network steps above hold for this latency of the network. For a link
# with another latency, they are scaled in proportion.
_NETWORK_LATENCY_S = 8e-6
# Seconds that each partner adds to an all-to-all over links that were not measured: the
# seconds that each device adds to all-to-alls of 32 and of 64 GB200.
_PARTNER_S = 1.0e-6
# Seconds that each device adds beyond the largest measured group: one step of NCCL's
# rings (LL128). An all-reduce that the switch computes takes no longer with more
# devices.
_BEYOND_S = {
    "all_gather": _LL128.ring_step_s["nvlink"],
    "reduce_scatter": _LL128.ring_step_s["nvlink"],
}


# A collective among 2 devices takes as long as a collective with this fraction of its
# bytes among 4 devices. Measured on B200, with 2 GiB in both groups.
_PAIR_PART = {"all_gather": 0.855, "reduce_scatter": 0.858, "all_reduce": 0.791}


def _protocols(link: LinkSpec) -> tuple[_Protocol, ...]:
    """NCCL's protocols on a link; PCIe lacks the 128-byte stores that LL128 needs."""
    return (_LL, _SIMPLE) if link.rates == "pcie" else (_LL, _LL128, _SIMPLE)


def _class_of(link: LinkSpec) -> str:
    return link.rates if link.rates in ("pcie", "network") else "nvlink"


def inside(kind: str, size: int, link: LinkSpec) -> TimeCurve:
    """The time of a collective among `size` devices of one host or NVLink domain."""
    knots = collective_knots(link.rates, kind)
    if knots is not None:
        return _curve_as_measured(kind, size, knots)
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
    ways: list[TimeCurve] = []
    steps = (2 if kind == "all_reduce" else 1) * (size - 1)
    for p in _protocols(link):
        ways.append(
            line(p.ring_start_s + steps * p.ring_step_s[of], sent / p.ring_part)
        )
        if kind == "all_reduce":
            latency = p.tree_start_s + steps * p.tree_step_s[of]
            ways.append(line(latency, 2 * per_byte / p.tree_part))
    return lowest(ways)


def _curve_as_measured(kind: str, size: int, knots: CollectiveKnots) -> TimeCurve:
    """The times measured for this group size, or estimated from other group sizes.

    Groups of different sizes are compared at equal bytes sent per device. Between two
    measured groups, the time is interpolated linearly in the number of devices. Above
    the largest group, each further device adds a constant. Below the smallest measured
    group, the number of bytes is scaled (`_PAIR_PART`).
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
    """Times measured in a group of another size, converted to `size` devices.

    There is one time per knot. The knot's number of bytes is scaled so that each device
    sends as many bytes in both groups.
    """
    of, measured = through(knots.nbytes, knots.seconds[group]), knots.group_sizes[group]
    more = sent_ratio(kind, size) / sent_ratio(kind, measured)
    if size < measured == knots.group_sizes[0]:
        # A group of two devices uses fewer links than a group of four.
        pair = _PAIR_PART.get(kind, 1.0)
        more = pair + (1 - pair) * (size - 2) / (measured - 2)
    return [of.seconds(nbytes * more) for nbytes in knots.nbytes]


def across(kind: str, groups: Sequence[tuple[int, LinkSpec]]) -> TimeCurve:
    """The time of a collective over several levels of links among GPUs.

    Args:
      kind: one of `autopar.cluster.specs.KINDS`.
      groups: size and link of each level, outermost first; the innermost may lie inside
        a host. All links have rates (`LinkSpec.rates`).
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
    kind: str, hosts: int, size: int, groups: Sequence[tuple[int, LinkSpec]], of: str
) -> TimeCurve:
    """The time on the network, with `size` devices per host on links of class `of`."""
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
    ways: list[TimeCurve] = []
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


# Steps between distant partners attain about half the bandwidth of steps between
# neighbours (Thakur et al., section 4.1: "more than twice").
FAR_PARTNER_SLOWDOWN = 2.0


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InputError(f"unknown collective {kind!r}; one of {', '.join(KINDS)}.")


def bytes_ratio(kind: str, group_size: int) -> float:
    """Bytes that one device sends in a collective, divided by the collective's size."""
    _check_kind(kind)
    if group_size < 1:
        raise InputError(f"{kind}: group_size must be 1 or more, got {group_size}.")
    if group_size == 1:
        return 0.0
    return sent_ratio(kind, group_size)


def collective_bytes(kind: str, nbytes: float, group_size: int) -> float:
    """Bytes that one device sends in a collective with the best algorithm.

    With k devices: all_reduce ``2 (k-1)/k nbytes``; all_gather, reduce_scatter and
    all_to_all ``(k-1)/k nbytes``; collective_permute ``nbytes``.

    >>> collective_bytes("all_reduce", 1000, 4)
    1500.0
    """
    return bytes_ratio(kind, group_size) * nbytes


def _switch_lines(kind: str, k: int, link: LinkSpec) -> list[Line]:
    """One line for each algorithm among `k` devices behind a switch.

    The ring (pairwise exchange for all_to_all) takes k-1 steps, or 2(k-1) steps for an
    all_reduce, and sends the fewest bytes. Algorithms with log2(k) steps are faster for
    small sizes. They are recursive doubling for all_reduce (all bytes in each step),
    recursive doubling or halving between distant partners for all_gather and
    reduce_scatter, and Bruck's algorithm for all_to_all (half of the bytes in each
    step).
    """
    a, per_byte = link.latency_s, 1 / link.bandwidth_bytes_per_s
    log, ratio = math.ceil(math.log2(k)), bytes_ratio(kind, k)
    if kind == "collective_permute":
        return [(a, per_byte)]
    if kind == "all_reduce":
        return [(2 * (k - 1) * a, ratio * per_byte), (log * a, log * per_byte)]
    if kind == "all_to_all":
        few_steps = (log * a, max(log / 2, ratio) * per_byte)
    else:
        few_steps = (log * a, FAR_PARTNER_SLOWDOWN * ratio * per_byte)
    return [((k - 1) * a, ratio * per_byte), few_steps]


def _ring_lines(kind: str, k: int, link: LinkSpec) -> list[Line]:
    """The time of a collective along a torus dimension of `k` devices, as one line.

    Half of the data goes around the ring in each direction, so that floor(k/2) steps
    reach all devices. In an all_to_all each device sends 1/k of its data to each
    device, over distances that add up to floor(k^2/4). A permutation to the neighbour
    uses only one of the two directions.
    (https://jax-ml.github.io/scaling-book/sharding/)
    """
    a, per_byte = link.latency_s, 1 / link.bandwidth_bytes_per_s
    steps, ratio = k // 2, bytes_ratio(kind, k)
    if kind == "collective_permute":
        return [(a, 2 * per_byte)]
    if kind == "all_to_all":
        return [(steps * a, (k * k // 4) / k * per_byte)]
    rounds = 2 if kind == "all_reduce" else 1
    return [(rounds * steps * a, ratio * per_byte)]


def _line_lines(kind: str, k: int, link: LinkSpec) -> list[Line]:
    """The time of a collective along `k` devices without wrap-around, as one line.

    A device at an end has only one neighbour, which limits all devices. Only the
    bandwidth of one direction counts, which is half of a ring's bandwidth, and k-1
    steps reach all devices. In an all_to_all, floor(k^2/4) messages cross the middle,
    each with 1/k of a device's data. A cyclic permutation sends the message of the last
    device back over all links, in the opposite direction to the other messages. The
    source of the bandwidth without wrap-around is
    https://jax-ml.github.io/scaling-book/sharding/; the number of hops is our own
    count.
    """
    a, per_byte = link.latency_s, 1 / link.bandwidth_bytes_per_s
    steps = k - 1
    if kind == "collective_permute":
        return [(steps * a, per_byte)]
    if kind == "all_to_all":
        return [(steps * a, (k * k // 4) / k * per_byte)]
    rounds = 2 if kind == "all_reduce" else 1
    return [(rounds * steps * a, bytes_ratio(kind, k) * per_byte)]


_MODELS = {"switch": _switch_lines, "ring": _ring_lines, "line": _line_lines}


def _measured_curve(kind: str, k: int, link: LinkSpec) -> TimeCurve | None:
    """The measured curve for `k` devices, or None if the link was not measured.

    Between measured group sizes, the latency and the time per byte sent are linear in
    the group size. For smaller and larger groups, the values of the nearest measured
    size are used.
    """
    fits = [fit for fit in link.measured if fit.kind == kind]
    if not fits:
        return None
    fits.sort(key=lambda fit: fit.group_size)
    sizes = [fit.group_size for fit in fits]
    ratios = [bytes_ratio(kind, size) for size in sizes]

    def at_k(values: Iterable[float]) -> float:
        """Seconds per byte of a collective among `k` devices, from measured groups."""
        sent = [value / ratio for value, ratio in zip(values, ratios, strict=True)]
        return float(np.interp(k, sizes, sent)) * bytes_ratio(kind, k)

    latency_s = float(np.interp(k, sizes, [fit.latency_s for fit in fits]))
    slope = at_k(fit.s_per_byte for fit in fits)
    large = at_k(fit.large_s_per_byte for fit in fits)
    return highest([line(latency_s, slope), line(0.0, large)])


def _one_level(kind: str, k: int, link: LinkSpec) -> TimeCurve:
    measured = _measured_curve(kind, k, link)
    if measured is not None:
        return measured
    if link.rates:
        return across(kind, [(k, link)])
    return lowest([line(a, b) for a, b in _MODELS[link.topology](kind, k, link)])


def _route(kind: str, groups: tuple[tuple[int, LinkSpec], ...]) -> TimeCurve:
    """The time of a collective over several levels, outermost first in `groups`.

    An all_gather runs over the outer levels first, while the data is smallest, then
    over the inner level. A reduce_scatter runs in the reverse order. An all_reduce is a
    reduce_scatter on the inner level, an all_reduce across the outer levels and an
    all_gather on the inner level. If it is faster, it is instead an all_reduce of all
    data at every level. An all_to_all makes one exchange per level. A permutation takes
    the time of its slowest level.
    """
    if not groups:
        return line(0.0, 0.0)
    k, link = groups[-1]
    inner = _one_level(kind, k, link)
    if len(groups) == 1:
        return inner
    outer = _route(kind, groups[:-1])
    if kind == "collective_permute":
        return highest([inner, outer])
    if kind == "all_to_all":
        return total([inner, outer])
    inside = outer.seeing(1 / k)
    if kind != "all_reduce":
        return total([inner, inside])
    halves = [_one_level(half, k, link) for half in ("reduce_scatter", "all_gather")]
    return lowest([total([*halves, inside]), total([inner, outer])])


def _is_nccl(kind: str, groups: Sequence[tuple[int, LinkSpec]]) -> bool:
    """Whether NCCL's times apply to all levels: the user's profile measured no link."""
    return bool(groups) and all(
        link.rates and not any(fit.kind == kind for fit in link.measured)
        for _, link in groups
    )


def _groups(axes: Iterable[MeshAxis]) -> tuple[tuple[int, LinkSpec], ...]:
    """Size and link of each group; axes with the same level and link form one group."""
    merged: dict[tuple[int, LinkSpec], int] = {}
    for axis in sorted(axes, key=lambda axis: axis.level):
        if axis.size > 1:
            place = (axis.level, axis.link)
            merged[place] = merged.get(place, 1) * axis.size
    return tuple((k, link) for (_, link), k in merged.items())


# A cluster has about 30 combinations of a kind and a group of axes. An entry takes
# about 2 kB, so entries of a hundred clusters take 6 MB.
@functools.lru_cache(maxsize=1 << 12)
def collective_curve(kind: str, axes: tuple[MeshAxis, ...]) -> TimeCurve:
    """The time of a collective over these mesh axes, as a function of its size."""
    _check_kind(kind)
    groups = _groups(axes)
    return across(kind, groups) if _is_nccl(kind, groups) else _route(kind, groups)


def collective_s(kind: str, nbytes: float, axes: Sequence[MeshAxis]) -> float:
    """Time of a collective over the group that these mesh axes form, in seconds.

    Args:
      kind: one of `KINDS`.
      nbytes: size by the convention of `autopar.cluster.specs.Kind`.
      axes: the mesh axes of the group, in any order; without axes the time is 0.
    """
    curve = collective_curve(kind, tuple(axes))
    return curve.seconds(nbytes) if nbytes > 0 else 0.0


def collective_s_at(
    kind: str, nbytes: np.ndarray, axes: Sequence[MeshAxis]
) -> np.ndarray:
    """`collective_s` of each size in an array.

    >>> link = LinkSpec(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> collective_s_at("all_reduce", np.array([0.0, 4.0, 20.0]), (axis,)).tolist()
    [0.0, 10.0, 36.0]
    """
    found = collective_curve(kind, tuple(axes)).seconds_at(nbytes)
    return np.where(nbytes > 0, found, 0.0)


@functools.lru_cache(maxsize=1 << 12)  # as large as the cache of `collective_curve`
def collective_s_per_byte(kind: str, axes: tuple[MeshAxis, ...]) -> float:
    """The least seconds per byte of a collective, over all sizes.

    `collective_s` is at least this value times the size.

    >>> link = LinkSpec(latency_s=1e-3, bandwidth_bytes_per_s=0.5)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> collective_s_per_byte("all_reduce", (axis,))
    3.0

    Args:
      kind: one of `KINDS`.
      axes: the mesh axes of the group, in any order; without axes the time is 0.
    """
    return collective_curve(kind, axes).s_per_byte


@functools.lru_cache(maxsize=1 << 14)
def least_s_per_byte(
    kind: str, low: float, high: float, axes: tuple[MeshAxis, ...]
) -> float:
    """The least seconds per byte of a collective of ``low`` to ``high`` bytes.

    >>> link = LinkSpec(latency_s=1e-3, bandwidth_bytes_per_s=0.5)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> least_s_per_byte("all_reduce", 1.0, math.inf, (axis,))
    3.0

    Args:
      kind: one of `KINDS`.
      low: size of the smallest collective, above 0.
      high: size of the largest collective; it may be infinite.
      axes: the mesh axes of the group, in any order; without axes the time is 0.
    """
    return collective_curve(kind, axes).least_s_per_byte(low, high)
