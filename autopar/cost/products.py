"""Time of matrix products on devices with a table of rates.

`autopar.cluster.rates.ProductRates` states the model: the start of a kernel, then the
largest of the depth of one tile, the arithmetic and the memory traffic, and knots of
what is left between that and XLA's measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.cluster.rates import ProductRates, product_rates
from autopar.cluster.specs import CALIBRATIONS, DeviceSpec
from autopar_errors import InputError

Array = npt.NDArray[np.float64]

# A tile's least depth: matrix units take 16 to 32 elements along K at once.
_LEAST_DEPTH = 32.0


def rates_of(device: DeviceSpec, itemsize: float) -> ProductRates | None:
    """The table of a device, or None: it has none, or its own calibration counts.

    Args:
      device: the device.
      itemsize: bytes of an element of the operands.
    """
    usual = CALIBRATIONS[device.kind].half_rate_side
    if not device.rates or device.corrections.half_rate_side != usual:
        return None
    # Elements of less than a byte run as those of one, longer ones as those of four.
    return product_rates(device.rates, max(1, int(itemsize)))


def products_s(
    rates: ProductRates,
    dtype: str,
    itemsize: float,
    device: DeviceSpec,
    batch: Array,
    sides: Array,
) -> Array:
    """Seconds of products, without the gap to the next kernel.

    Args:
      rates: the table.
      dtype: NumPy or ml_dtypes name of the operands' dtype.
      itemsize: bytes of an element of it.
      device: the device.
      batch: how many products, ``[points]``.
      sides: M, N and K of each, ``[points, 3]``.
    """
    tile = (rates.tile, rates.tile, _LEAST_DEPTH)
    m, n, k = np.maximum(sides, tile).T
    rows, columns, depth = sides.T
    area = batch * m * n
    attained = device.peak(dtype) * device.matmul_efficiency
    bandwidth = device.memory_bandwidth_bytes_per_s * rates.traffic_part
    read = itemsize * batch * (rows + columns) * depth
    written = max(itemsize, 2.0) * batch * rows * columns
    work = 2.0 * area * k / attained
    parts = np.stack(
        [rates.s_per_depth * k, work / rates.rate_part, (read + written) / bandwidth]
    )
    largest = parts.max(axis=0)
    powers = ((parts / largest) ** rates.sharpness).sum(axis=0)
    modelled = rates.start_s + largest * powers ** (1 / rates.sharpness)
    found = modelled * np.exp(_log_residual(rates, batch, m, n, k))
    return np.maximum(found, work / rates.best_part)


def _log_residual(
    rates: ProductRates, batch: Array, m: Array, n: Array, k: Array
) -> Array:
    """Logarithm of measured over modelled time, interpolated."""
    if not rates.areas:
        return np.zeros_like(batch)
    deep, area = _weights(k, rates.depths), _weights(batch * m * n, rates.areas)
    batched = np.clip(np.log2(batch), 0.0, 1.0)
    found = (1 - batched) * _interpolate(area, rates.by_area, deep)
    found += batched * _interpolate(area, rates.by_area_batched, deep)
    found += _interpolate(_weights(m, rates.sides), rates.by_rows, deep)
    return found + _interpolate(_weights(n, rates.sides), rates.by_columns, deep)


Weights = tuple[npt.NDArray[np.int64], Array]
"""The knot below each point, and the part of the way to the next."""


def _weights(values: Array, knots: Sequence[float]) -> Weights:
    at = np.clip(np.log2(values), knots[0], knots[-1])
    given = np.array(knots)
    below = np.clip(np.searchsorted(given, at, side="right") - 1, 0, len(knots) - 2)
    return below, (at - given[below]) / (given[below + 1] - given[below])


def _interpolate(
    along: Weights, table: Sequence[Sequence[float]], deep: Weights
) -> Array:
    """Bilinear interpolation; the ends hold beyond the knots."""
    (i, u), (j, v), of = along, deep, np.array(table)
    low = (1 - v) * of[i, j] + v * of[i, j + 1]
    high = (1 - v) * of[i + 1, j] + v * of[i + 1, j + 1]
    return (1 - u) * low + u * high


@functools.lru_cache(maxsize=1 << 14)  # products of some hundred plans; 300 B each
def product_s(
    dtype: str,
    itemsize: float,
    device: DeviceSpec,
    batch: float,
    m: float,
    n: float,
    k: float,
) -> float:
    """`products_s` of one shape.

    Raises:
      InputError: the device has no table.
    """
    rates = rates_of(device, itemsize)
    if rates is None:
        raise InputError(f"product_s: {device.name} has no table of products.")
    point = (np.array([batch], float), np.array([[m, n, k]], float))
    return float(products_s(rates, dtype, itemsize, device, *point)[0])
