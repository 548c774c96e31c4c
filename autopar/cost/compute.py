"""Time of one operator on one device: the roofline model.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance
model", CACM 52(4), 2009.
"""

import functools

import numpy as np
import numpy.typing as npt

from autopar.cluster.specs import DeviceSpec


@functools.lru_cache(maxsize=1024)
def attained_flops_per_s(dtype: str, device: DeviceSpec, is_matmul: bool) -> float:
    """FLOP/s of large operators: of the matrix units, or of the vector units."""
    if is_matmul:
        return device.peak(dtype) * device.matmul_efficiency
    return device.vector_peak


def op_s(
    flops: float, bytes_accessed: float, dtype: str, device: DeviceSpec, is_matmul: bool
) -> float:
    """Time of an operator on one device's shard, in seconds.

    ``kernel_latency_s + max(flops / attained FLOP/s, bytes / memory bandwidth)``:
    arithmetic and memory traffic overlap, the start of the kernel does not.

    Args:
      flops: floating point operations of the shard; a multiply-add counts two.
      bytes_accessed: bytes of all operands and results of the shard.
      dtype: NumPy or ml_dtypes name of the operands' dtype.
      device: the device.
      is_matmul: whether the matrix units do it (dot products, convolutions).
    """
    compute_s = flops / attained_flops_per_s(dtype, device, is_matmul)
    memory_s = bytes_accessed / device.memory_bandwidth_bytes_per_s
    return device.kernel_latency_s + max(compute_s, memory_s)


def op_s_array(
    flops: npt.NDArray[np.float64],
    bytes_accessed: npt.NDArray[np.float64],
    dtype: str,
    device: DeviceSpec,
    is_matmul: bool,
) -> npt.NDArray[np.float64]:
    """`op_s` of many shards at once; the arrays broadcast against each other."""
    compute_s = np.asarray(flops) / attained_flops_per_s(dtype, device, is_matmul)
    memory_s = np.asarray(bytes_accessed) / device.memory_bandwidth_bytes_per_s
    return device.kernel_latency_s + np.maximum(compute_s, memory_s)
