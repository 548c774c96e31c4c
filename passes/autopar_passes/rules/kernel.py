"""What a hand-written kernel is to the planner: one opaque operator."""

from __future__ import annotations

import dataclasses

# Part of the matrix peak that kernels of fused attention reach. FlashAttention-3 and
# cuDNN 9 reach 0.6 to 0.75 of an H100's bfloat16 peak at sequences of 2,048 and more
# (arXiv 2407.08608, figures 5 and 6; their backward passes 0.5 to 0.6).
CUDNN_EFFICIENCY = 0.6
# FlashAttention-2, whose algorithm the Pallas kernels follow, reaches 0.5 to 0.73 of
# an A100's peak (arXiv 2307.08691, section 4.1).
PALLAS_EFFICIENCY = 0.5

# Devices that can run a kernel, in the words of `jax.Device.platform`.
GPU, TPU = "gpu", "tpu"


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """The work of one kernel on whole arrays.

    A kernel reads its operands and writes its results once; what it holds in between
    stays on the chip.

    Attributes:
      name: what people call it.
      flops: floating-point operations, each time it runs.
      matrix: whether the matrix units do them.
      dtype: NumPy or ml_dtypes name of what they work on.
      efficiency: part of the peak rate that it reaches, 0 to 1.
      platforms: kinds of devices that can run it; empty: any.
      assumed: what the FLOPs assume; empty: nothing.
    """

    name: str
    flops: float
    matrix: bool
    dtype: str
    efficiency: float
    platforms: tuple[str, ...] = ()
    assumed: str = ""
