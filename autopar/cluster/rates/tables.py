"""The tables of `xla.json`, and the names by which devices and links refer to them.

`scripts/fit_rates.py` writes `xla.json` from OpenXLA's performance tables (Apache-2.0,
xla/service/gpu/model: collective_interpolator_data, matmul_interpolator_data), except
for the rows that `benchmarks/xla_tables.py` holds out.
"""

from __future__ import annotations

import functools
import pathlib

import msgspec

# Links for which NCCL's latencies are used (`autopar.cost.collectives`).
NCCL_CLASSES = ("nvlink", "pcie", "network")
# Links with measured collectives, named after the device that they connect.
MEASURED_LINKS = ("h100", "b200", "gb200")
LINK_RATES = ("", *NCCL_CLASSES, *MEASURED_LINKS)
# Devices with rates of products; devices without measurements use the same curve as
# another device.
DEVICE_RATES = ("", "a100", "b200", "h100", "t4", "v100")


class CollectiveKnots(msgspec.Struct, frozen=True):
    """Times of one collective among devices behind one switch.

    Attributes:
      group_sizes: the measured group sizes, ascending.
      nbytes: sizes at the interpolation points, in the convention of
        `autopar.cluster.specs.Kind`.
      seconds: times, ``[group sizes, sizes]``.
    """

    group_sizes: tuple[int, ...]
    nbytes: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


class PartnerRates(msgspec.Struct, frozen=True):
    """Rates of messages between pairs of devices (`autopar.cost.collectives`).

    Attributes:
      channels: channels of a device for all messages together.
      most_channels: the most channels that one message uses.
      start_s: seconds of a collective with almost no data.
      partner_s: seconds for each partner after the first.
      small_bytes_per_s: rate of one channel in the protocol for small messages.
      large_bytes_per_s: rate of one channel in the protocol for large messages.
      bandwidth_bytes_per_s: bandwidth of the link in one direction.
      sharpness: sharpness of the transition between the limits of channels and of the
        link.
      group_sizes: the measured group sizes, ascending.
      octaves: log2 of the bytes per partner at the interpolation points.
      logs: logarithms of measured divided by modelled time, ``[group sizes, octaves]``.
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
    depth is ``s_per_depth * K`` (the time of one tile along K), work is the time of the
    FLOPs at ``rate_part`` of the device's reachable rate, and traffic is the time to
    move the operands and the result at ``traffic_part`` of the memory bandwidth (caches
    hold a part of them). A correction is added: the logarithm of measured divided by
    modelled time at interpolation points. The correction is interpolated in the
    logarithms of the sides.

    Attributes:
      start_s: seconds of a kernel with almost no work.
      s_per_depth: seconds of one element along K.
      rate_part: fraction of ``peak * matmul_efficiency``.
      traffic_part: fraction of the memory bandwidth; above 1 if caches help.
      sharpness: sharpness of the transition to the largest of the three terms.
      best_part: the best measured rate as a fraction like `rate_part`; an upper limit
        of all predictions.
      tile: elements of a tile side; a shorter side M or N takes the same time.
      areas: log2 of ``batch * M * N`` at the interpolation points.
      depths: log2 of K at the interpolation points.
      sides: log2 of M and of N at the interpolation points.
      by_area: corrections ``[areas, depths]`` of a single product.
      by_area_batched: corrections of two or more products at once, for which libraries
        use other kernels.
      by_rows: corrections by M, ``[sides, depths]``.
      by_columns: corrections by N, ``[sides, depths]``.
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


# The decoder is made at import, because msgspec crashes if two threads analyse one type
# at the same time.
_FILE = msgspec.json.Decoder(_RatesFile)


@functools.cache
def _file() -> _RatesFile:
    text = (pathlib.Path(__file__).parent / "xla.json").read_bytes()
    return _FILE.decode(text)


def collective_knots(rates: str, kind: str) -> CollectiveKnots | None:
    """The measured times of a collective, or None.

    Permutations and all-to-alls, which send to partners, have `partner_rates` instead.

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
# a kernel takes the same time, and a step along K takes longer in inverse proportion to
# the clock (H100 1.98 GHz, A100 1.41, V100 1.53, T4 1.59). The scaling with the clock
# is an assumption, not a measurement.
_H100_CLOCK_GHZ = 1.98
_CLOCKS_GHZ = {"a100": 1.41, "v100": 1.53, "t4": 1.59}


@functools.cache
def product_rates(rates: str, itemsize: int) -> ProductRates | None:
    """The rates of products of a dtype; None if the device has no table.

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
