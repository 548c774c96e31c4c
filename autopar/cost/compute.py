"""Time of the work of operators on one device: one roofline model for all.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance
model", CACM 52(4), 2009.
"""

from __future__ import annotations

import functools

import numpy as np

from autopar.cluster.specs import DeviceSpec
from autopar.cost.products import products_s, rates_of
from autopar.steps.fusion import side_factors
from autopar.steps.work import OperatorWork
from autopar_passes.rules.factor_rule import FactorRule, KernelWork


@functools.lru_cache(maxsize=1024)
def attained_flops_per_s(dtype: str, device: DeviceSpec, is_matrix: bool) -> float:
    """FLOP/s of large operators: of the matrix units, or of the vector units."""
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
    memory traffic overlap. Operators that are no matrix products take
    `Calibration.vector_slowdown` times as long. The arrays broadcast.

    Args:
      flops: floating point operations of the shard; a multiply-add counts two.
      nbytes: bytes of the shard's operands and results that are in memory.
      dtype: NumPy or ml_dtypes name of the operands' dtype.
      device: the device.
      is_matrix: whether the matrix units do it (dot products, convolutions).
      efficiency: part of the rate that a product of this shape reaches, 0 to 1.
    """
    compute_s = flops / (attained_flops_per_s(dtype, device, is_matrix) * efficiency)
    memory_s = nbytes / device.memory_bandwidth_bytes_per_s
    slower = 1.0 if is_matrix else device.corrections.vector_slowdown
    return slower * np.maximum(compute_s, memory_s)


def work_s(work: OperatorWork, parts: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Seconds of one operator under each strategy, without the start of its kernel.

    Args:
      work: what it does.
      parts: ``[strategies, factors]``, into how many parts each factor is split.
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
    """Seconds of operators of one kind on a device's shard, without starting a kernel.

    Args:
      work: what one of them does: its type, its kernel, whether it is a product.
      flops: ``[points]``, FLOPs of the shard.
      nbytes: ``[points]``, bytes of the shard's memory traffic.
      sides: ``[points, 3]``, M, N and K of a product's shard.
      device: the device.
    """
    if not work.is_matrix:
        return roofline_s(flops, nbytes, work.dtype, device, is_matrix=False)
    bandwidth = device.memory_bandwidth_bytes_per_s
    if work.op.kernel is not None:
        compute_s = flops / kernel_flops_per_s(work.op.kernel, device)
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
    """Seconds of products within a step, by the device's table of them.

    The vector units do what leaves most of a tile empty, such as a convolution of
    each channel alone, where that is faster.

    Args:
      dtype: NumPy or ml_dtypes name of the operands' dtype.
      itemsize: bytes of an element of it.
      batch: how many products, ``[points]``.
      sides: M, N and K of each, ``[points, 3]``.
      nbytes: bytes of the arrays that are in memory.
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

    Its efficiency is a part of the peak, whatever XLA's own products attain of it.
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
    """Part of the attained rate that a product with these sides reaches.

    The product over the sides of ``side / (side + half_rate_side)``.

    >>> float(matrix_efficiency(np.array([[8.0, 24.0, 8.0]]), 8.0)[0])
    0.1875
    """
    return (sides / (sides + half_rate_side)).prod(axis=1)
