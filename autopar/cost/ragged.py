"""The products that XLA computes for ragged products (`jax.lax.ragged_dot`).

A ragged product multiplies each row with the matrix of its group. XLA's compilers for
GPUs and CPUs have no kernel for it. They compute products of dense arrays instead (read
from compiled programs for H100 and CPUs, jax 0.10.2):

* If the result has the rows, each row is written once for each group, with zeros
  outside of its own group. The product ``[rows, groups x K] @ [groups x K, N]`` then
  multiplies each row with the matrices of all groups.
* If the rows are summed (the gradient of the matrices), both operands are written in
  this way, and a batch of ``groups`` products sums over all rows.

XLA's compiler for TPUs has a kernel for the first form, which multiplies each row only
with its own matrix. It computes the second form like the other compilers, but masks the
rows within the product, so that no masked rows are in memory (read from compiled
programs for v5e and v5p, libtpu 0.0.42).
"""

from __future__ import annotations

import numpy as np

from autopar.steps.ragged import sums_groups
from autopar.steps.work import OperatorWork

# Kinds of devices whose compiler writes the masked rows of each group to memory.
_MASKS_ROWS = frozenset({"cpu", "gpu"})


def masks_rows(kind: str) -> bool:
    """Whether the compiler for a kind of device writes rows once for each group."""
    return kind in _MASKS_ROWS


def dense_product(
    work: OperatorWork, kind: str, flops: np.ndarray, sides: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The dense product that computes a ragged product.

    Args:
      work: the work of a ragged product.
      kind: the kind of device, "gpu", "tpu" or "cpu".
      flops: ``[points]``, FLOPs of the shard if each row counts once.
      sides: ``[points, 3]``, M, N and K of the shard if each row counts once.

    Returns:
      The FLOPs and the sides of the dense product, and the bytes that are read and
      written to mask rows before the product.
    """
    groups, summed = float(work.groups), sums_groups(work.op.rule)
    if not (summed or masks_rows(kind)):
        return flops, sides, np.zeros_like(flops)
    m, n, k = sides.T
    rows = (m + n) * k if summed else m * k
    masked = (groups + 1) * work.itemsize * rows
    deep = sides if summed else sides * np.array([1.0, 1.0, groups])
    return groups * flops, deep, masked if masks_rows(kind) else np.zeros_like(masked)
