"""Time of the work of operators on one device, by a roofline model.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance
model", CACM 52(4), 2009.

On devices with a table of rates, the time of matrix products follows the table
(`autopar.cluster.rates.ProductRates`). This time is the launch of a kernel plus a
smooth maximum of three times: of one tile's loop over K, of the arithmetic and of the
memory traffic. An interpolated factor then corrects it to XLA's measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.cluster.rates import ProductRates, product_rates
from autopar.cluster.specs import CALIBRATIONS, DeviceSpec
from autopar.cost.ragged import dense_product
from autopar.steps.fusion import side_factors
from autopar.steps.work import OperatorWork
from autopar_errors import InputError
from autopar_passes.rules.factor_rule import FactorRule, KernelWork

Array = npt.NDArray[np.float64]

# The least depth of a tile: matrix units process 16 to 32 elements along K at once.
_LEAST_DEPTH = 32.0


def rates_of(device: DeviceSpec, itemsize: float) -> ProductRates | None:
    """The table of rates of a device; None if the device has none.

    The result is also None if the device's ``half_rate_side`` differs from that of its
    kind: then a profile has measured the rate of products on this device.

    Args:
      device: the device.
      itemsize: bytes of an element of the operands.
    """
    usual = CALIBRATIONS[device.kind].half_rate_side
    if not device.rates or device.corrections.half_rate_side != usual:
        return None
    # Types narrower than one byte run as fast as types of one byte. Types wider than
    # four bytes run as fast as types of four bytes.
    return product_rates(device.rates, max(1, int(itemsize)))


def products_s(
    rates: ProductRates,
    dtype: str,
    itemsize: float,
    device: DeviceSpec,
    batch: Array,
    sides: Array,
) -> Array:
    """Seconds of batched matrix products, without the pause before the next kernel.

    Args:
      rates: the table.
      dtype: NumPy or ml_dtypes name of the operands' dtype.
      itemsize: bytes of an element of that dtype.
      device: the device.
      batch: number of products in each batch, ``[points]``.
      sides: M, N and K of each product, ``[points, 3]``.
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
    """Logarithm of measured time divided by modelled time, interpolated."""
    if not rates.areas:
        return np.zeros_like(batch)
    deep, area = _weights(k, rates.depths), _weights(batch * m * n, rates.areas)
    batched = np.clip(np.log2(batch), 0.0, 1.0)
    found = (1 - batched) * _interpolate(area, rates.by_area, deep)
    found += batched * _interpolate(area, rates.by_area_batched, deep)
    found += _interpolate(_weights(m, rates.sides), rates.by_rows, deep)
    return found + _interpolate(_weights(n, rates.sides), rates.by_columns, deep)


Weights = tuple[npt.NDArray[np.int64], Array]
"""The knot below each point, and the fraction of the distance to the next knot."""


def _weights(values: Array, knots: Sequence[float]) -> Weights:
    at = np.clip(np.log2(values), knots[0], knots[-1])
    given = np.array(knots)
    below = np.clip(np.searchsorted(given, at, side="right") - 1, 0, len(knots) - 2)
    return below, (at - given[below]) / (given[below + 1] - given[below])


def _interpolate(
    along: Weights, table: Sequence[Sequence[float]], deep: Weights
) -> Array:
    """Interpolates bilinearly; outside of the knots, takes the nearest knot's value."""
    (i, u), (j, v), of = along, deep, np.array(table)
    low = (1 - v) * of[i, j] + v * of[i, j + 1]
    high = (1 - v) * of[i + 1, j] + v * of[i + 1, j + 1]
    return (1 - u) * low + u * high


@functools.lru_cache(maxsize=1 << 14)  # products of some hundred plans, 300 B each
def product_s(
    dtype: str,
    itemsize: float,
    device: DeviceSpec,
    batch: float,
    m: float,
    n: float,
    k: float,
) -> float:
    """Seconds of a batch of products of one shape (`products_s`).

    Raises:
      InputError: the device has no table.
    """
    rates = rates_of(device, itemsize)
    if rates is None:
        raise InputError(f"product_s: {device.name} has no table of products.")
    point = (np.array([batch], float), np.array([[m, n, k]], float))
    return float(products_s(rates, dtype, itemsize, device, *point)[0])


@functools.lru_cache(maxsize=1024)
def attained_flops_per_s(dtype: str, device: DeviceSpec, is_matrix: bool) -> float:
    """FLOP/s that large operators attain on the matrix units or the vector units."""
    if is_matrix:
        return device.peak(dtype) * device.matmul_efficiency * device.kept_rate
    return device.vector_peak


def roofline_s(
    flops: float | np.ndarray,
    nbytes: float | np.ndarray,
    dtype: str,
    device: DeviceSpec,
    *,
    is_matrix: bool,
    efficiency: float | np.ndarray = 1.0,
) -> np.ndarray:
    """Seconds of an operator on one device's shard, without the start of its kernel.

    ``max(flops / (rate * efficiency), nbytes / memory bandwidth)``: arithmetic and
    memory traffic overlap. The time of operators other than matrix products is
    multiplied by `Calibration.vector_slowdown`. The arrays broadcast.

    Args:
      flops: floating point operations of the shard; a multiply-add counts as two.
      nbytes: bytes of the shard's operands and results that are in memory.
      dtype: NumPy or ml_dtypes name of the operands' dtype.
      device: the device.
      is_matrix: whether the operator runs on the matrix units (dot products,
        convolutions).
      efficiency: fraction of the rate that a product of this shape attains, 0 to 1.
    """
    compute_s = flops / (attained_flops_per_s(dtype, device, is_matrix) * efficiency)
    memory_s = nbytes / device.memory_bandwidth_bytes_per_s
    slower = 1.0 if is_matrix else device.corrections.vector_slowdown
    return slower * np.maximum(compute_s, memory_s)


def work_s(work: OperatorWork, parts: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Seconds of one operator under each strategy, without the start of its kernel.

    Args:
      work: the operator's work.
      parts: ``[strategies, factors]``, number of parts into which each factor is split.
      device: the device.
    """
    in_memory = np.delete(parts, list(work.looked_up), axis=1).prod(axis=1)
    sides = matrix_sides(work.op.rule, parts) if work.sides else np.ones((1, 3))
    return shard_s(
        work, work.op.flops / parts.prod(axis=1), work.nbytes / in_memory, sides, device
    )


def shard_s(
    work: OperatorWork,
    flops: np.ndarray,
    nbytes: np.ndarray,
    sides: np.ndarray,
    device: DeviceSpec,
) -> np.ndarray:
    """Seconds of similar operators on a device's shard, without kernel launches.

    Args:
      work: the work of one of these operators: dtype, kernel, whether it is a product.
      flops: ``[points]``, FLOPs of the shard.
      nbytes: ``[points]``, bytes of the shard's memory traffic.
      sides: ``[points, 3]``, M, N and K of a product's shard.
      device: the device.
    """
    if work.copies_memory:
        # No overlap is assumed. XLA for GPUs copies arrays to the host while other
        # kernels run, but a kernel that needs an array in the host's memory reads it
        # while it runs.
        return nbytes / device.host_bytes_per_s
    if not work.is_matrix:
        return roofline_s(flops, nbytes, work.dtype, device, is_matrix=False)
    bandwidth = device.memory_bandwidth_bytes_per_s
    if work.groups > 1:
        flops, sides, masked = dense_product(work, device.kind, flops, sides)
        slower = device.corrections.vector_slowdown
        masking_s = slower * masked / bandwidth
        return masking_s + _product_s(work, flops, nbytes, sides, device)
    return _product_s(work, flops, nbytes, sides, device)


def _product_s(
    work: OperatorWork,
    flops: np.ndarray,
    nbytes: np.ndarray,
    sides: np.ndarray,
    device: DeviceSpec,
) -> np.ndarray:
    """`shard_s` for operators of the matrix units."""
    bandwidth = device.memory_bandwidth_bytes_per_s
    if work.op.kernel is not None:
        kernel = work.op.kernel
        compute_s = flops / kernel_flops_per_s(kernel, device)
        if kernel.inner_bytes:
            # Shards share intermediate values as they share the work.
            nbytes = nbytes + kernel.inner_bytes / kernel.flops * flops
        return np.maximum(compute_s, nbytes / bandwidth)
    if rates_of(device, work.itemsize) is not None:
        batch = flops / (2.0 * sides.prod(axis=1))
        return in_table_s(work.dtype, work.itemsize, batch, sides, nbytes, device)
    efficiency = matrix_efficiency(sides, device.corrections.half_rate_side)
    product_s = roofline_s(
        flops, nbytes, work.dtype, device, is_matrix=True, efficiency=efficiency
    )
    passes = device.corrections.patch_passes
    if not (passes and work.unfolds):
        return product_s
    patches = 2.0 * sides[:, 0] * sides[:, 2] * work.itemsize
    return product_s + passes * patches / bandwidth


def in_table_s(
    dtype: str,
    itemsize: float,
    batch: np.ndarray,
    sides: np.ndarray,
    nbytes: np.ndarray | float,
    device: DeviceSpec,
) -> np.ndarray:
    """Seconds of matrix products in a step, by the device's table of rates.

    A product that leaves most of a tile empty, such as a depthwise convolution, runs on
    the vector units if these are faster.

    Args:
      dtype: NumPy or ml_dtypes name of the operands' dtype.
      itemsize: bytes of an element of that dtype.
      batch: number of products in each batch, ``[points]``.
      sides: M, N and K of each product, ``[points, 3]``.
      nbytes: bytes of operands and results that are in memory.
      device: the device; `rates_of` finds its table.
    """
    rates = rates_of(device, itemsize)
    assert rates is not None
    product_s = products_s(rates, dtype, itemsize, device, batch, sides)
    slower = device.corrections.vector_slowdown / device.matmul_efficiency
    flops = 2.0 * batch * sides.prod(axis=1)
    vector_s = slower * flops / device.vector_peak
    memory_s = nbytes / device.memory_bandwidth_bytes_per_s
    product_s = np.minimum(product_s / device.kept_rate, vector_s)
    return np.maximum(product_s, memory_s)


def kernel_flops_per_s(kernel: KernelWork, device: DeviceSpec) -> float:
    """FLOP/s of a hand-written kernel that works on the matrix units.

    The kernel's efficiency is a fraction of the device's peak. It does not depend on
    the fraction of the peak that XLA's own products attain.
    """
    return device.peak(kernel.dtype) * kernel.efficiency * device.kept_rate


def matrix_sides(rule: FactorRule, parts: np.ndarray) -> np.ndarray:
    """Returns the sides M, N, K of a product on one shard, ``[strategies, 3]``."""
    columns: list[np.ndarray] = []
    for factors in side_factors(rule):
        whole = float(np.prod([rule.sizes[f] for f in factors]))
        columns.append(whole / parts[:, factors].prod(axis=1))
    return np.stack(columns, axis=1)


def matrix_efficiency(sides: np.ndarray, half_rate_side: float) -> np.ndarray:
    """The rate of products with these sides, divided by the rate of large products.

    The result is the product of ``side / (side + half_rate_side)`` over M, N and K.

    >>> float(matrix_efficiency(np.array([[8.0, 24.0, 8.0]]), 8.0)[0])
    0.1875
    """
    return (sides / (sides + half_rate_side)).prod(axis=1)
