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
class KernelWork:
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
      own_model_flops: FLOPs of the model's own products, where they are other than what
        it runs: attention without its mask, and without what it computes again.
      causal_flops: the part of these that is attention with a causal mask.
    """

    name: str
    flops: float
    matrix: bool
    dtype: str
    efficiency: float
    platforms: tuple[str, ...] = ()
    assumed: str = ""
    own_model_flops: float | None = None
    causal_flops: float = 0.0

    @property
    def model_flops(self) -> float:
        """FLOPs of the model's own products."""
        if self.own_model_flops is not None:
            return self.own_model_flops
        return self.flops if self.matrix else 0.0
