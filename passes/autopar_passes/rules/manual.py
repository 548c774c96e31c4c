"""A step's own `jax.shard_map`: local code over mesh axes that the user named.

The body of the ``shard_map`` is written for shards. It keeps its meaning only if each
axis that it names is one axis of the planned mesh, with the same size, and if this axis
shards the arrays as the specs say. Each axis of the body is therefore a factor that
exactly one mesh axis must shard completely. Devices along all other mesh axes repeat
the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from autopar_passes import jax_compat
from autopar_passes.rules import flops
from autopar_passes.rules.factor_rule import (
    INNER,
    Dims,
    FactorKind,
    FactorRule,
    KernelWork,
)

PRIMITIVE = "shard_map"
# Assumed share of the peak FLOP rate for matrix products in the body, which XLA
# compiles as usual.
BODY_EFFICIENCY = 0.7
_COLLECTIVES = (
    "psum",
    "all_gather",
    "all_to_all",
    "ppermute",
    "reduce_scatter",
    "pmax",
)


def manual_axes(params: dict[str, Any]) -> dict[str, int]:
    """Returns the axes that the body names, with their sizes, in the order of the mesh.

    The compiler uses the other axes of the body's mesh, which stay automatic.
    """
    names = params.get("newly_manual_axes") or params.get("manual_axes") or ()
    return {n: s for n, s in params["mesh"].shape.items() if n in names and s > 1}


def manual_rule(
    operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]
) -> FactorRule | None:
    """Returns the rule of a ``shard_map``; None if a spec has uneven shards.

    Args:
      operands: the abstract operands, each with ``shape``.
      results: the abstract results.
      params: parameters of the primitive.
    """
    factors = _ShardMapFactors(manual_axes(params))
    given = tuple(
        factors.dims(a.shape, spec)
        for a, spec in zip(operands, params["in_specs"], strict=True)
    )
    made = tuple(
        factors.dims(a.shape, spec)
        for a, spec in zip(results, params["out_specs"], strict=True)
    )
    whole = tuple(range(len(factors.axes)))
    produced = {f for d in made for dim in d for f in dim}
    if not {f for d in (*given, *made) for dim in d for f in dim}.issuperset(whole):
        return None
    for f in whole:
        if f not in produced:
            factors.kinds[f] = FactorKind.REDUCE
    reduction = INNER if FactorKind.REDUCE in factors.kinds else ""
    sizes, kinds = tuple(factors.sizes), tuple(factors.kinds)
    return FactorRule(sizes, kinds, given, made, reduction, whole=whole)


class _ShardMapFactors:
    """Numbers the factors of a ``shard_map``: its axes, then unsharded factors."""

    def __init__(self, axes: dict[str, int]) -> None:
        self.axes = axes
        self.number = {name: k for k, name in enumerate(axes)}
        self.sizes = list(axes.values())
        self.kinds = [FactorKind.PASS] * len(axes)

    def dims(self, shape: Sequence[int], spec: Any) -> Dims:
        """The factors of each dimension of an array with this partition spec."""
        out: list[tuple[int, ...]] = []
        for d, size in enumerate(shape):
            names = _names(spec, d, self.axes)
            inner = size // math.prod(self.axes[n] for n in names)
            own = [self.number[n] for n in names]
            if inner > 1:
                own.append(len(self.sizes))
                self.sizes.append(inner)
                self.kinds.append(FactorKind.BLOCKED)
            out.append(tuple(own))
        return tuple(out)


def _names(spec: Any, dim: int, axes: dict[str, int]) -> list[str]:
    entry = spec[dim] if dim < len(spec) else None
    entries = entry if isinstance(entry, tuple) else (entry,)
    return [n for n in entries if n in axes]


def manual_kernel(
    operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]
) -> KernelWork:
    """Returns the work of a ``shard_map``, for all of its shards together."""
    axes = manual_axes(params)
    shards = math.prod(axes.values())
    jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    found = flops.count_body(jaxpr) * shards
    matrix = found.matrix > 0
    arrays = [*operands, *results]
    sent = sorted(set(_collectives(jaxpr)))
    assumed = ""
    if sent:
        assumed = (
            f"shard_map over {_over(axes)}: its own {', '.join(sent)} cost nothing"
        )
    return KernelWork(
        name=f"shard_map over {_over(axes)}",
        flops=found.matrix if matrix else found.vector,
        matrix=matrix,
        dtype=found.dtype or (str(arrays[0].dtype) if arrays else "float32"),
        efficiency=BODY_EFFICIENCY if matrix else 1.0,
        assumed=assumed,
    )


def _over(axes: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"


def _collectives(jaxpr: Any) -> Iterator[str]:
    """Yields the names of the collectives of a body."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(_COLLECTIVES):
            yield eqn.primitive.name.removesuffix("_invariant")
        for inner in jax_compat.subjaxprs(eqn):
            yield from _collectives(inner)
