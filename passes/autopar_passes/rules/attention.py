"""The model FLOPs of attention kernels written in Pallas, told by their structure.

A kernel of attention takes queries, keys and values first, and computes an exponential
between products. What it runs depends on its blocks, on what it leaves out by its mask
and on what it computes again; the model's own products do not. For each query ``s``
and key ``t`` that may meet, of ``d`` elements, and values of ``e``::

    forward                 scores 2 d, output 2 e
    gradient of queries     2 d
    gradients of the rest   keys 2 d, probabilities 2 e, values 2 e

so the backward pass has twice the FLOPs of the forward pass, as automatic
differentiation of the written-out products has (Chowdhery et al., "PaLM", 2022,
appendix B, whose model FLOPs utilisation leaves out what is computed again).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from autopar_passes import jax_compat

# Primitives of a softmax, and of a mask.
EXPONENTIALS = frozenset({"exp", "exp2"})
ORDERINGS = frozenset({"ge", "gt", "le", "lt"})
_DOTS = frozenset({"dot_general", "dot"})
# What a mask that leaves out the later keys takes off, at the least, of what runs.
_LEAST_MASKED = 0.95


def attention_flops(
    params: dict[str, Any],
    operands: Sequence[Any],
    results: Sequence[Any],
    executed: float,
) -> tuple[float, bool] | None:
    """The model FLOPs of a Pallas kernel of attention, and whether it is causal.

    Args:
      params: parameters of the ``pallas_call``.
      operands: the abstract operands.
      results: the abstract results.
      executed: FLOPs of the products that it runs.

    Returns:
      None for a kernel that is none of attention.
    """
    mapping = params["grid_mapping"]
    body = list(_equations(params["jaxpr"]))
    kinds = {eqn.primitive.name for eqn in body}
    first = mapping.num_index_operands
    arrays = operands[first:]
    if not (kinds & EXPONENTIALS and kinds & _DOTS) or len(arrays) < 3:
        return None
    query, key, value = arrays[:3]
    rank = len(query.shape)
    same = len(key.shape) == len(value.shape) == rank >= 2
    if not same or query.shape[-1] != key.shape[-1] or _integer(query):
        return None
    keys = _sequence(mapping.block_mappings[1])
    if keys is None:
        return None
    pairs = math.prod(query.shape[:-1]) * float(keys)
    d, e = query.shape[-1], value.shape[-1]
    given = [a for a in arrays if len(a.shape) == rank and a.shape[-1] in (d, e)]
    gradients = sum(_is_like(r, (query, key, value)) for r in results)
    if len(given) == 3:
        products, runs = d + e, d + e
    elif gradients == 1:
        products, runs = d, 2 * d + e
    else:
        products, runs = (d if gradients == 2 else 2 * d) + 2 * e, 2 * (d + e)
    causal = executed < _LEAST_MASKED * 2.0 * runs * pairs or any(map(_orders, body))
    return 2.0 * products * pairs, causal


def _integer(array: Any) -> bool:
    return array.dtype.kind in "biu"


def _is_like(result: Any, of: Sequence[Any]) -> bool:
    """Whether a result is a gradient of one of some arrays, perhaps in parts."""
    return any(
        len(result.shape) >= len(array.shape)
        and tuple(result.shape[-len(array.shape) :]) == tuple(array.shape)
        for array in of
    )


def _sequence(mapping: Any) -> int | None:
    """The length of the dimension of an array that blocks of it have rows of."""
    shape = tuple(mapping.array_aval.shape)[:-1]
    sizes = [getattr(dim, "block_size", 1) for dim in mapping.block_shape[:-1]]
    tiled = [n for n, size in zip(shape, sizes, strict=True) if size > 1]
    return tiled[0] if len(tiled) == 1 else None


def _orders(eqn: Any) -> bool:
    """Whether an equation compares whole numbers of two dimensions of a block."""
    return eqn.primitive.name in ORDERINGS and all(
        len(getattr(atom.aval, "shape", ())) >= 2 and _integer(atom.aval)
        for atom in eqn.invars
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax_compat.subjaxprs(eqn):
            yield from _equations(inner)
