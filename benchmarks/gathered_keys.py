"""Seconds for which attention kernels wait: keys around a ring, and gathered keys.

One layer of causal attention in bfloat16, in both passes, for one sequence that one
mesh axis splits: 32 query heads and 8 key heads of 128 elements. The cost model
predicts all seconds; nothing runs.

    python benchmarks/gathered_keys.py
"""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.cost.compute import kernel_flops_per_s
from autopar.cost.pricer import Pricer
from autopar.cost.work import beside_ring_s
from autopar.layouts.layout import ReshardStep
from autopar_passes.rules.factor_rule import CUDNN_EFFICIENCY, KernelWork

HEADS, KEY_HEADS, ELEMENTS = 32, 8, 128
# Text of a cluster, and the mesh axis that splits the sequence.
CLUSTERS = (
    ("8:h100", 0),
    ("8:a100", 0),
    ("32:gb200", 0),
    ("8x8:h100", 0),
    ("8:v5e", 0),
)
TOKENS = (1024, 4096, 8192, 16384, 32768, 131072)
# FLOPs of the backward pass, which computes scores again, and of the forward pass.
_BACKWARD = 2.5


def waits(text: str, axis: int, tokens: int) -> tuple[float, float, float]:
    """Seconds of work, and seconds of waiting with a ring and with gathers.

    >>> work_s, ring_s, gather_s = waits("8:h100", 0, 16384)
    >>> gather_s < ring_s
    True

    Args:
      text: the cluster. Each of its levels is one axis of the mesh.
      axis: the axis that splits the sequence.
      tokens: length of the sequence.
    """
    cluster = Cluster.parse(text)
    sizes = tuple(level.size for level in cluster.levels)
    mesh = next(m for m in cluster.mesh_shapes() if m.sizes == sizes)
    pricer, devices = Pricer(cluster, mesh), sizes[axis]
    kernel = KernelWork(
        name="attention",
        flops=1.0,
        matrix=True,
        dtype="bfloat16",
        efficiency=CUDNN_EFFICIENCY,
    )
    flops = 2.0 * ELEMENTS * HEADS * tokens**2 / devices
    forward_s = flops / kernel_flops_per_s(kernel, cluster.device)
    nbytes = 2.0 * tokens * KEY_HEADS * ELEMENTS

    def seconds(kind: str, part: float, times: float) -> float:
        step = ReshardStep(kind, (axis,), part, ())
        return pricer.collective_s(step, times * nbytes)

    around_s = [
        (devices - 1) * 2 * seconds("collective_permute", 1 / devices, times)
        for times in (1, 2)  # keys and values, and their gradients in float32
    ]
    ring_s = sum(
        max(0.0, sent_s - beside_ring_s(work_s, pricer, (axis,)))
        for sent_s, work_s in (
            (around_s[0], forward_s),
            (sum(around_s), _BACKWARD * forward_s),
        )
    )
    gather_s = 4 * seconds("all_gather", 1, 1) + 2 * seconds("reduce_scatter", 1, 2)
    return (1 + _BACKWARD) * forward_s, ring_s, gather_s


def main() -> None:
    """Prints a table, in microseconds."""
    print("| cluster | tokens | work | ring | gather |\n|---|---|---|---|---|")
    for text, axis in CLUSTERS:
        for tokens in TOKENS:
            found = " | ".join(f"{1e6 * s:,.0f}" for s in waits(text, axis, tokens))
            print(f"| {text} | {tokens:,} | {found} |")


if __name__ == "__main__":
    main()
