"""Collectives over an axis of `jax.vmap`, which reduce a dimension.

Inside of a ``jax.vmap`` with a name for its axis ``jax.lax.psum`` sums over it, as the
batch normalisation of Equinox does. The trace holds a ``psum`` over a dimension. It is
written as the reduction that it is: what is known of reductions holds for it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

_REDUCTIONS = {
    "psum": jax.lax.reduce_sum,
    "pmax": jax.lax.reduce_max,
    "pmin": jax.lax.reduce_min,
}


def is_reduction(eqn: Any) -> bool:
    """Whether an equation is a collective over dimensions alone."""
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    axes, groups = eqn.params["axes"], eqn.params.get("axis_index_groups")
    return bool(axes) and groups is None and all(isinstance(a, int) for a in axes)


def reductions(eqn: Any) -> Iterator[Any]:
    """An equation for each operand of a collective over dimensions."""
    reduce = _REDUCTIONS[eqn.primitive.name]
    axes = tuple(eqn.params["axes"])
    for given, made in zip(eqn.invars, eqn.outvars, strict=True):
        struct = jax.ShapeDtypeStruct(given.aval.shape, given.aval.dtype)
        (one,) = jax.make_jaxpr(lambda x: reduce(x, axes))(struct).jaxpr.eqns
        yield eqn.replace(
            primitive=one.primitive,
            params=one.params,
            invars=[given],
            outvars=[made],
        )
