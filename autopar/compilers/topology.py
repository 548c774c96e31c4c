"""The devices of a plan's cluster, as XLA's compilers want them described."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.compilers.targets import Target
from autopar.errors import PlanError

# Slices that Google sells, by number of chips
# (https://cloud.google.com/tpu/docs/v5e, .../v5p).
_V5E = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_V5P = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_SLICES = {"v5e": _V5E, "v5p": _V5P}


def topology(target: Target, cluster: Cluster) -> str:
    """The text by which the compiler of a target knows the devices of a cluster.

    A GPU cluster is hosts times devices of a host, as in ``1x8x8``. A TPU cluster is
    the slice with its shape or, if it is one level, the slice of that many chips.

    Raises:
      PlanError: the cluster is of another kind, or no slice has its shape.
    """
    if cluster.groups:
        raise PlanError(
            f"a cluster of unlike devices cannot be compiled for: {cluster}."
        )
    if cluster.device.kind != target.kind:
        raise PlanError(
            f"the plan is for {cluster}, whose devices are {cluster.device.kind}s, and "
            f"{target.name} is a {target.kind}; plan for --cluster 2x4:{target.name}."
        )
    if target.kind == "cpu":
        return target.name
    sizes = [level.size for level in cluster.levels]
    if target.kind == "gpu":
        return f"1x{math.prod(sizes[:-1])}x{sizes[-1]}"
    shape = _slice(target.name, sizes)
    if shape is None:
        raise PlanError(
            f"no slice of {target.name} has the shape {'x'.join(map(str, sizes))}; "
            f"the slices are {', '.join(_SLICES[target.name])}."
        )
    return f"{target.name}:{shape}"


def _slice(name: str, sizes: Sequence[int]) -> str | None:
    """The slice of a shape or, where that is one number, of so many chips."""
    shapes = {text: tuple(map(int, text.split("x"))) for text in _SLICES[name]}
    if len(sizes) == 1:
        counts = {math.prod(shape): text for text, shape in shapes.items()}
        return counts.get(sizes[0])
    known = any(sorted(shape) == sorted(sizes) for shape in shapes.values())
    return "x".join(map(str, sizes)) if known else None
