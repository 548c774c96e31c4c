"""Creates the state of a step in its shards, and puts it back into its objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.plans import Plan
from autopar.runtime import placement
from autopar_passes.program.trace import is_graph_node, pure_arguments


def splat(state: Any) -> tuple[Any, ...]:
    """A state that is a plain tuple holds the step's leading arguments."""
    return state if type(state) is tuple else (state,)


def abstract(create_state: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The shapes of the state; NNX objects stay objects, with abstract arrays."""
    return nnx.eval_shape(create_state, *args)


def pure_state(state: Any) -> Any:
    """A state as a pytree of arrays; that of NNX objects taken out of them."""
    return pure_arguments(splat(state)) if is_graph_node(state) else state


def leaves_of(create_state: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Creates the arrays of a state alone.

    What a state holds besides (such as ``apply_fn``, bound to a module that is
    made anew each time) may not compare equal from one call to the next.
    """
    return lambda *args: jax.tree.leaves(pure_state(create_state(*args)))


def rebuilt(structs: Any, pure: Any) -> Any:
    """Puts arrays into the state they were planned for: objects, static parts."""
    if not is_graph_node(structs):
        return pure
    nodes = nnx.merge(nnx.graphdef(splat(structs)), pure[0])
    return nodes if type(structs) is tuple else nodes[0]


def replaced(state: Any, leaves: Sequence[Any]) -> Any:
    """The state with other arrays; NNX objects are updated in place."""
    args = splat(state)
    new = list(jax.tree.unflatten(jax.tree.structure(pure_arguments(args)), leaves))
    if nodes := tuple(a for a in args if is_graph_node(a)):
        nnx.update(nodes, new.pop(0))
    out = tuple(a if is_graph_node(a) else new.pop(0) for a in args)
    return out if type(state) is tuple else out[0]


def plan_shardings(plan: Plan, mesh: Mesh, count: int) -> list[NamedSharding]:
    """The shardings that a plan gives its first inputs."""
    specs = list(plan.inputs.values())[:count]
    return [
        NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
        for spec in specs
    ]


def even_shardings(
    leaves: Sequence[Any], devices: Sequence[Any]
) -> list[NamedSharding]:
    """Splits each leaf evenly over the devices where one of its dims allows it."""
    mesh = Mesh(np.array(list(devices), dtype=object), ("all",))
    return [placement.even_sharding(x.shape, mesh) for x in leaves]
