"""Reads the tables of measured rates in `xla.json`.

`scripts/fit_rates.py` writes `xla.json` from OpenXLA's performance tables (Apache-2.0,
xla/service/gpu/model: collective_interpolator_data, matmul_interpolator_data), without
the rows that `benchmarks/xla_tables.py` needs to test predictions.
"""

from __future__ import annotations

import functools
import pathlib

import msgspec

# Classes of links for which the cost model uses NCCL's latencies
# (`autopar.cost.collectives`).
NCCL_CLASSES = ("nvlink", "pcie", "network")
# Classes of links with measured times of collectives, named after the devices that they
# connect.
MEASURED_LINKS = ("h100", "b200", "gb200")
LINK_RATES = ("", *NCCL_CLASSES, *MEASURED_LINKS)
# Names of tables of matrix products, after devices. A device without measurements uses
# a scaled curve of another device.
DEVICE_RATES = ("", "a100", "b200", "h100", "t4", "v100")


class CollectiveKnots(msgspec.Struct, frozen=True):
    """Measured times of one collective among devices that one switch joins.

    Attributes:
      group_sizes: the measured group sizes, ascending.
      nbytes: sizes of the measured collectives, counted as in
        `autopar.cluster.specs.Kind`.
      seconds: measured seconds, ``[group sizes, sizes]``.
    """

    group_sizes: tuple[int, ...]
    nbytes: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


class PartnerRates(msgspec.Struct, frozen=True):
    """Fitted rates of messages between pairs of devices (`autopar.cost.collectives`).

    Attributes:
      channels: number of NCCL channels of a device for all messages together.
      most_channels: the most NCCL channels that one message uses.
      start_s: seconds of a collective with almost no data.
      partner_s: additional seconds for each partner after the first.
      small_bytes_per_s: rate of one channel with NCCL's protocol for small messages.
      large_bytes_per_s: rate of one channel with NCCL's protocol for large messages.
      bandwidth_bytes_per_s: bandwidth of the link in one direction.
      sharpness: exponent that makes the transition between the limit by channels and
        the limit by the link smooth; larger is sharper.
      group_sizes: the measured group sizes, ascending.
      octaves: log2 of the bytes per partner of each measurement.
      logs: logarithm of measured time divided by modelled time, ``[group sizes,
        octaves]``.
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
    """Model of the time of matrix products of one dtype on one device.

    The time of ``batch`` products of M x K by K x N matrices, without the pause before
    the next kernel, is ``start_s + (depth^e + work^e + traffic^e)^(1/e)`` with ``e =
    sharpness``. Here depth is ``s_per_depth * K``, the time to go along K for one tile
    of the result. Work is the time of the FLOPs at ``rate_part`` of the device's
    reachable rate. Traffic is the time to move operands and result at ``traffic_part``
    of the memory bandwidth (a part of them is in caches). The logarithm of this time
    gets a correction: the logarithm of measured time divided by modelled time,
    interpolated between measurements by the logarithms of the sides.

    Attributes:
      start_s: seconds of a kernel with almost no work.
      s_per_depth: seconds for each element along K.
      rate_part: reached rate as a fraction of ``peak * matmul_efficiency``.
      traffic_part: reached rate of transfers as a fraction of the memory bandwidth;
        above 1 if caches help.
      sharpness: the exponent e; the larger it is, the closer is the sum to the largest
        of the three terms.
      best_part: the best measured rate, as a fraction like ``rate_part``. No prediction
        exceeds this rate.
      tile: elements of a side of a tile. A shorter M or N takes as long as one tile.
      areas: log2 of ``batch * M * N`` of the measurements.
      depths: log2 of K of the measurements.
      sides: log2 of M and of N of the measurements.
      by_area: corrections ``[areas, depths]`` for a single product.
      by_area_batched: corrections ``[areas, depths]`` for two or more products at once,
        for which libraries use other kernels.
      by_rows: corrections for M, ``[sides, depths]``.
      by_columns: corrections for N, ``[sides, depths]``.
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


# The decoder is made when this module is imported, because msgspec crashes if two
# threads analyse a type at the same time.
_FILE = msgspec.json.Decoder(_RatesFile)


@functools.cache
def _file() -> _RatesFile:
    text = (pathlib.Path(__file__).parent / "xla.json").read_bytes()
    return _FILE.decode(text)


def collective_knots(rates: str, kind: str) -> CollectiveKnots | None:
    """The measured times of a collective, or None.

    For permutations and all-to-alls, in which pairs of devices exchange messages, use
    `partner_rates`.

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


# GPUs of other generations use the curve of bfloat16 products on an H100. The start of
# a kernel is assumed to last as long as on an H100. A step along K is assumed to last
# longer in inverse proportion to the clock (H100 1.98 GHz, A100 1.41, V100 1.53, T4
# 1.59). This is an assumption, not a measurement.
_H100_CLOCK_GHZ = 1.98
_CLOCKS_GHZ = {"a100": 1.41, "v100": 1.53, "t4": 1.59}


@functools.cache
def product_rates(rates: str, itemsize: int) -> ProductRates | None:
    """The model of products of a dtype; None if there is no table with this name.

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
