"""Collectives over an axis that has one replica.

A step that was written for ``jax.pmap`` sums over the replicas by name, as in
``jax.lax.pmean(grads, "batch")``. A planned step sees the whole batch at once: there
is one replica, and each collective over it returns what it was given.
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

# Collectives of `jax.lax`; each result is its operand, but for dims of size one.
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
    """Runs something with an axis of one replica for each name that it lacks.

    Args:
      run: traces a step; it is called again for each name.

    Returns:
      Its result, and the names.
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
    """The axis that nothing binds; '' where the error is another one."""
    found = _UNBOUND.search(str(error))
    return found.group(1) if found else ""


def on_one_replica(
    function: Callable[..., Sequence[Any]], names: Sequence[str]
) -> Callable[..., list[Any]]:
    """A function of arrays to arrays with an axis of one replica for each name.

    For functions that JAX compiles as they are; what depends on the number of the
    replica is computed with a leading dim of one, which is taken off again.
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
    """Whether an equation asks for the number of a replica."""
    return eqn.primitive.name == "axis_index" and axis_names(eqn) <= axes


def axis_names(eqn: Any) -> frozenset[Any]:
    """The axes of a collective."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(found if isinstance(found, (tuple, list)) else (found,))


def reshape_equation(struct: Any, shape: tuple[int, ...]) -> Any:
    """An equation that gives an array another shape."""
    closed = jax.make_jaxpr(lambda x: jax.lax.reshape(x, shape))(struct)
    return closed.jaxpr.eqns[0]
