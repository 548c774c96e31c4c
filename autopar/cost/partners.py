"""Time of messages between pairs of GPUs: permutations and all-to-alls.

NCCL sends to each partner through channels. How many it takes goes by the bytes and by
the number of devices (https://github.com/NVIDIA/nccl, src/enqueue.cc, `addP2pToPlan`
and `scheduleP2pTasksToPlan`, version 2.29): as many as let all partners have their own
at once, but never more than `LARGEST_PART` bytes in one, as long as there are channels.
So the time has steps down where a message gets more channels, and where NCCL changes
from the protocol of small messages to that of large ones. The rates are those of XLA's
measurements (`autopar.cluster.rates.PartnerRates`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from autopar.cluster.rates import PartnerRates
from autopar.cost.curves import Curve, Line

Array = npt.NDArray[np.float64]

# Bytes that one channel takes at most: 32 chunks of 512 KiB (`maxPartSize`).
LARGEST_PART = 2.0**24
# Up to this, a partner is sent to by the protocol of small messages. Read from XLA's
# measurements, where 512 KiB take longer than 1 MiB: NCCL_P2P_LL_THRESHOLD, 16 KiB, in
# each of 32 channels.
SMALL_MESSAGE = 2.0**19
# Between these sizes of a message the time is straight, in steps of half an octave.
_LEAST, _MOST, _STEP = 2.0**10, 2.0**36, math.sqrt(2.0)


def channels(nbytes: float, size: int, rates: PartnerRates) -> int:
    """Channels of the message to one partner.

    >>> rates = PartnerRates(channels=32, most_channels=32)
    >>> [channels(n * 2.0**20, 8, rates) for n in (1, 64, 65, 1024)]
    [4, 4, 8, 32]

    Args:
      nbytes: to one partner.
      size: devices of the group.
      rates: of the link.
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
    """Seconds without what was measured beside the model.

    ``start + partner * (partners - 1) + (through^e + wire^e)^(1/e)``: a channel takes
    its messages one after the other, and the link takes all of them.

    Args:
      nbytes: to one partner, all of one protocol and of as many channels.
      used: channels of a message.
      size: devices of the group.
      partners: to which a device sends: 1 in a permutation, all in an all-to-all.
      rates: of the link.
    """
    # A device is its own partner in an all-to-all, by a copy that holds a channel.
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
    """Logarithm of measured over modelled time, between the knots.

    Straight in the logarithms of the bytes and of the size of the group.

    Args:
      nbytes: to one partner.
      size: devices of the group.
      rates: of the link.
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


def partner_curve(kind: str, size: int, rates: PartnerRates) -> Curve:
    """The time of a permutation or an all-to-all, by its size.

    Args:
      kind: ``collective_permute`` or ``all_to_all``.
      size: devices of the group, 2 or more.
      rates: of the link.
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
    return Curve((0.0, *starts), ((first, 0.0), *lines))


def _spans(size: int, rates: PartnerRates) -> Iterator[tuple[float, float, int]]:
    """Sizes of a message, from and up to, of one protocol and as many channels."""
    used = channels(_LEAST, size, rates)
    bounds = [_LEAST, SMALL_MESSAGE]
    while 2 * used <= rates.most_channels:
        bounds.append(used * LARGEST_PART)
        used *= 2
    bounds.append(_MOST)
    for low, high in itertools.pairwise(bounds):
        yield low, high, channels(high, size, rates)


def _points(low: float, high: float) -> Array:
    """Sizes from the first to the last, in steps of about half an octave."""
    steps = max(1, round(math.log(high / low) / math.log(_STEP)))
    return np.geomspace(low, high, steps + 1)
