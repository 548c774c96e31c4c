"""The tables of `xla.json`, and the names by which devices and links refer to them.

`scripts/fit_rates.py` writes `xla.json` from OpenXLA's performance tables (Apache-2.0,
xla/service/gpu/model: collective_interpolator_data, matmul_interpolator_data), from
the rows that `benchmarks/xla_tables.py` does not keep out.
"""

from __future__ import annotations

import functools
import pathlib

import msgspec

# Links on which NCCL's own latencies hold (`autopar.cost.collectives`).
NCCL_CLASSES = ("nvlink", "pcie", "network")
# Links with measured collectives: the device that they join.
MEASURED_LINKS = ("h100", "b200", "gb200")
LINK_RATES = ("", *NCCL_CLASSES, *MEASURED_LINKS)
# Devices with rates of products; those without a measurement share a shape.
DEVICE_RATES = ("", "a100", "b200", "h100", "t4", "v100")


class CollectiveKnots(msgspec.Struct, frozen=True):
    """Times of one collective among devices behind one switch.

    Attributes:
      group_sizes: the measured sizes of groups, rising.
      nbytes: sizes of the knots by the convention of `autopar.cluster.specs.Kind`.
      seconds: ``[group sizes, knots]``.
    """

    group_sizes: tuple[int, ...]
    nbytes: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


class PartnerRates(msgspec.Struct, frozen=True):
    """Rates of messages between pairs of devices (`autopar.cost.collectives`).

    Attributes:
      channels: that a device has for all messages at once.
      most_channels: that one message takes.
      start_s: seconds of a collective with next to nothing to send.
      partner_s: seconds of each partner after the first.
      small_bytes_per_s: of one channel, in the protocol of small messages.
      large_bytes_per_s: of one channel, in that of large ones.
      bandwidth_bytes_per_s: of the link, one direction.
      sharpness: how suddenly channels or the link take over.
      group_sizes: the measured sizes of groups, rising.
      octaves: log2 of the bytes to one partner at the knots.
      logs: logarithms of measured over modelled time, ``[group sizes, octaves]``.
    """

    channels: int
    most_channels: int
    start_s: float = 1e-5
    partner_s: float = 0.0
    small_bytes_per_s: float = 5e9
    large_bytes_per_s: float = 2e10
    bandwidth_bytes_per_s: float = 4e11
    sharpness: float = 3.0
    group_sizes: tuple[int, ...] = ()
    octaves: tuple[float, ...] = ()
    logs: tuple[tuple[float, ...], ...] = ()


class ProductRates(msgspec.Struct, frozen=True):
    """Time of the matrix products of one dtype on one device.

    The time of ``batch`` products M x K by K x N, without the gap to the next kernel:
    ``start_s + (depth^e + work^e + traffic^e)^(1/e)`` with ``e = sharpness``, where
    depth is ``s_per_depth * K`` (one tile runs through K), work the FLOPs at
    ``rate_part`` of what the device attains, and traffic the operands and the result
    at ``traffic_part`` of the memory bandwidth (caches hold a part of them). Knots of
    the logarithm of measured over modelled time are added, between which it is
    interpolated in the logarithm of the sides.

    Attributes:
      start_s: seconds of a kernel with next to nothing to do.
      s_per_depth: seconds of one element along K.
      rate_part: part of ``peak * matmul_efficiency``.
      traffic_part: part of the memory bandwidth; above 1 where caches help.
      sharpness: how suddenly the largest of the three takes over.
      best_part: the best rate measured, as `rate_part`; nothing is taken to be faster.
      tile: elements; a shorter side M or N takes as long.
      areas: log2 of ``batch * M * N`` at the knots.
      depths: log2 of K at the knots.
      sides: log2 of M and of N at the knots.
      by_area: logarithms ``[areas, depths]`` of one product.
      by_area_batched: the same of two and more at once, which libraries do by other
        kernels.
      by_rows: the same of M, ``[sides, depths]``.
      by_columns: the same of N.
    """

    start_s: float
    s_per_depth: float
    rate_part: float
    traffic_part: float
    sharpness: float
    best_part: float
    tile: float = 64.0
    areas: tuple[float, ...] = ()
    depths: tuple[float, ...] = ()
    sides: tuple[float, ...] = ()
    by_area: tuple[tuple[float, ...], ...] = ()
    by_area_batched: tuple[tuple[float, ...], ...] = ()
    by_rows: tuple[tuple[float, ...], ...] = ()
    by_columns: tuple[tuple[float, ...], ...] = ()


class _RatesFile(msgspec.Struct, frozen=True):
    """The whole of `xla.json`."""

    source: str
    collectives: dict[str, dict[str, CollectiveKnots]]
    partners: dict[str, dict[str, PartnerRates]]
    products: dict[str, dict[str, ProductRates]]


# Made at import: msgspec crashes where two threads find out about one type at once.
_FILE = msgspec.json.Decoder(_RatesFile)


@functools.cache
def _file() -> _RatesFile:
    text = (pathlib.Path(__file__).parent / "xla.json").read_bytes()
    return _FILE.decode(text)


def collective_knots(rates: str, kind: str) -> CollectiveKnots | None:
    """The measured times of a collective, or None.

    Those that send to partners, permutations and all-to-alls, have `partner_rates`.

    Args:
      rates: one of `LINK_RATES`.
      kind: one of `autopar.cluster.specs.KINDS`.
    """
    return _file().collectives.get(rates, {}).get(kind)


def partner_rates(rates: str, kind: str) -> PartnerRates | None:
    """The measured rates of permutations or all-to-alls, or None.

    Args:
      rates: one of `LINK_RATES`.
      kind: one of `autopar.cluster.specs.KINDS`.
    """
    return _file().partners.get(rates, {}).get(kind)


# The shape of bfloat16 products on an H100, for GPUs of other generations: the start
# of a kernel is the same, and a step along K takes as long as their clocks are slower
# (H100 1.98 GHz, A100 1.41, V100 1.53, T4 1.59). Not measured.
_H100_CLOCK_GHZ = 1.98
_CLOCKS_GHZ = {"a100": 1.41, "v100": 1.53, "t4": 1.59}


@functools.cache
def product_rates(rates: str, itemsize: int) -> ProductRates | None:
    """The rates of products of a dtype, or None where the device has no table.

    Args:
      rates: one of `DEVICE_RATES`.
      itemsize: bytes of an element of the operands: 1, 2, 4 or more.
    """
    tables = _file().products
    if rates in tables:
        return tables[rates][{1: "1", 2: "2"}.get(itemsize, "4")]
    if rates not in _CLOCKS_GHZ:
        return None
    of = tables["h100"]["2"]
    slower = _H100_CLOCK_GHZ / _CLOCKS_GHZ[rates]
    return ProductRates(
        start_s=of.start_s,
        s_per_depth=of.s_per_depth * slower,
        rate_part=1.0,
        traffic_part=of.traffic_part,
        sharpness=of.sharpness,
        best_part=of.best_part,
    )
