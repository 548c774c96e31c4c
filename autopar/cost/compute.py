"""Time of the work of operators on one device: one roofline model for all.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance
model", CACM 52(4), 2009.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from autopar.cluster.specs import DeviceSpec
from autopar.steps.work import MATRIX
from autopar_passes.graph import Operator, OperatorGraph
from autopar_passes.rules import FactorRule


@functools.lru_cache(maxsize=1024)
def attained_flops_per_s(dtype: str, device: DeviceSpec, is_matrix: bool) -> float:
    """FLOP/s of large operators: of the matrix units, or of the vector units."""
    if is_matrix:
        return device.peak(dtype) * device.matmul_efficiency
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
    slower = 1.0 if is_matrix else device.calibrated.vector_slowdown
    return slower * np.maximum(compute_s, memory_s)


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorWork:
    """What an operator does, whatever its layout.

    Attributes:
      op: the operator.
      dtype: of its first operand.
      itemsize: bytes of an element of it.
      nbytes: bytes of all its arrays that are in memory, whole.
      kernel: whether it writes a result, so that it starts a kernel of its own.
    """

    op: Operator
    dtype: str
    itemsize: float
    nbytes: float
    kernel: bool

    @property
    def is_matrix(self) -> bool:
        """Whether the matrix units do it."""
        return self.op.kind in MATRIX

    @property
    def unfolds(self) -> bool:
        """Whether it is a convolution, which may unfold its patches."""
        return self.op.kind == "conv_general_dilated"


def operator_work(
    graph: OperatorGraph, op: Operator, written: set[int]
) -> OperatorWork:
    """Returns what an operator does.

    Args:
      graph: the operator graph.
      op: the operator.
      written: the values that are in memory.
    """
    arrays = [v for v in (*op.inputs, *op.outputs) if v is not None and v in written]
    first = op.inputs[0] if op.inputs and op.inputs[0] is not None else None
    value = graph.values[first if first is not None else op.outputs[0]]
    return OperatorWork(
        op,
        str(value.dtype),
        value.nbytes / max(1, value.size),
        sum(graph.values[v].nbytes for v in arrays),
        any(v in written for v in op.outputs),
    )


def work_s(work: OperatorWork, parts: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Seconds of one operator under each strategy, without the start of its kernel.

    Args:
      work: what it does.
      parts: ``[strategies, factors]``, into how many parts each factor is split.
      device: the device.
    """
    shards = parts.prod(axis=1)
    flops, nbytes = work.op.flops / shards, work.nbytes / shards
    if not work.is_matrix:
        return roofline_s(flops, nbytes, work.dtype, device, is_matrix=False)
    sides = matrix_sides(work.op.rule, parts)
    efficiency = matrix_efficiency(sides, device.calibrated.half_rate_side)
    product_s = roofline_s(
        flops, nbytes, work.dtype, device, is_matrix=True, efficiency=efficiency
    )
    passes = device.calibrated.patch_passes
    if not (passes and work.unfolds):
        return product_s
    patches = 2.0 * sides[:, 0] * sides[:, 2] * work.itemsize
    return product_s + passes * patches / device.memory_bandwidth_bytes_per_s


def side_factors(rule: FactorRule) -> tuple[list[int], list[int], list[int]]:
    """The factors of the sides M, N and K of a product.

    M is only in the left operand and the result, N only in the right one and the
    result, K is reduced.
    """
    left, right = (rule.factors_of(dims) for dims in rule.operands[:2])
    result = rule.factors_of(rule.results[0])
    sides = ((left - right) & result, (right - left) & result, (left & right) - result)
    rows, columns, reduced = (sorted(side) for side in sides)
    return rows, columns, reduced


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
