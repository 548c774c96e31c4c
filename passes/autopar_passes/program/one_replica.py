"""Collectives over an axis that has one replica.

A step that was written for ``jax.pmap`` sums over its replicas by name, as in
``jax.lax.pmean(grads, "batch")``. A planned step sees the whole batch at once. It
therefore has one replica, and each collective over the replicas returns its operands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from autopar_passes import jax_compat

R = TypeVar("R")

# Collectives of `jax.lax` whose result over one replica is the operand, up to dims of
# size one.
_COLLECTIVES = frozenset(
    {
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
        "ppermute",
        "pbroadcast",
        "pvary",
        "pcast",
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_to_all",
        "reduce_scatter",
    }
)
_UNBOUND = re.compile(r"unbound axis name: (\S+?)\.?(?:\s|$)")


def with_one_replica(run: Callable[[], R]) -> tuple[R, frozenset[str]]:
    """Runs a function with a one-replica axis for each unbound axis name.

    Args:
      run: a function that traces a step; it is called again for each missing name.

    Returns:
      The function's result, and the names.
    """
    names: tuple[str, ...] = ()
    while True:
        try:
            with jax_compat.axis_env(dict.fromkeys(names, 1)):
                return run(), frozenset(names)
        except NameError as error:
            found = unbound_axis(error)
            if not found or found in names:
                raise
            names = (*names, found)


def unbound_axis(error: NameError) -> str:
    """The unbound axis of an error; '' if the error has another cause."""
    found = _UNBOUND.search(str(error))
    return found.group(1) if found else ""


def on_one_replica(
    function: Callable[..., Sequence[Any]], names: Sequence[str]
) -> Callable[..., list[Any]]:
    """Returns a function of arrays with a one-replica axis for each name.

    The planner does not rewrite such a function: JAX compiles it as it is. Inside,
    values that depend on the replica's index have a leading dim of size one. It is
    removed at the end.
    """

    def run(*arrays: Any) -> list[Any]:
        def once(_: Any) -> list[Any]:
            return list(function(*arrays))

        mapped = functools.reduce(_map_over_axis, names, once)
        return mapped(jnp.zeros(()))

    return run


def _map_over_axis(function: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    replicated = jax.vmap(function, axis_name=name)
    return lambda x: [made[0] for made in replicated(x[None])]


def is_collective(eqn: Any, axes: frozenset[str]) -> bool:
    """Whether an equation is a collective over these axes."""
    if not axes or eqn.primitive.name not in _COLLECTIVES:
        return False
    return axis_names(eqn) <= axes


def is_index(eqn: Any, axes: frozenset[str]) -> bool:
    """Whether an equation reads the number of a replica."""
    return eqn.primitive.name == "axis_index" and axis_names(eqn) <= axes


def axis_names(eqn: Any) -> frozenset[Any]:
    """The axes of a collective."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(found if isinstance(found, (tuple, list)) else (found,))


def reshape_equation(struct: Any, shape: tuple[int, ...]) -> Any:
    """An equation that changes the shape of an array."""
    closed = jax.make_jaxpr(lambda x: jax.lax.reshape(x, shape))(struct)
    return closed.jaxpr.eqns[0]
