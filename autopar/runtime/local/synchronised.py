"""Which arrays of a replica's state outer steps synchronise.

These are the parameters, and other floating-point state of the model such as running
averages. Arrays that the step returns as they are, such as the weights of a frozen
model, are equal on all replicas and stay so. The state of the inner optimizer stays
with its replica, with one exception: a step may keep wide *masters* of its parameters,
update these, and compute the parameters from them. Whatever an outer step wrote to such
parameters would be lost in the next step, so the masters are synchronised in their
place, and cast again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from autopar.errors import PlanError
from autopar.runtime.local.outer import Cast, Leaf, leaf_of
from autopar_passes.graph.operators import (
    BOUNDARIES,
    GraphInput,
    Operator,
    OperatorGraph,
    producers,
)
from autopar_passes.graph.roles import InputRole, Role

_OPTIMIZER = InputRole.OPTIMIZER_STATE


def synchronised_leaves(
    name: str, graph: OperatorGraph, arrays: Mapping[str, Any]
) -> tuple[list[Leaf], list[Cast]]:
    """Describes the arrays that replicas synchronise, and those that are casts of them.

    Args:
      name: the name of the step, for errors.
      graph: the step of a replica.
      arrays: the arrays of a replica's state by path, or their structs.

    Raises:
      PlanError: the state has no parameters; or an outer step cannot write to one, as
        it is complex or computed from other state.
    """
    given = {i.path: i for i in graph.inputs if i.path in arrays}
    casts = list(_casts(name, graph, given))
    masters, made = {x.master for x in casts}, {x.path for x in casts}
    leaves = []
    for path, x in arrays.items():
        own, role = given[path], given[path].role
        if path in made or (role is _OPTIMIZER and path not in masters):
            continue
        if graph.outputs[own.output] == own.value:  # the step does not change it
            continue
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise PlanError(
                f"{name}: '{path}' is complex, and outer steps synchronise real arrays "
                "only. Keep its real and its imaginary part as two arrays, and join "
                "them in the step by jax.lax.complex."
            )
        if jnp.issubdtype(x.dtype, jnp.floating):
            trained = role is InputRole.PARAMETER and _is_trained(graph, own)
            outer = trained or path in masters
            leaves.append(leaf_of(path, x, outer=outer))
    if not any(leaf.outer for leaf in leaves):
        raise PlanError(
            f"{name}: local steps found no parameters in the state: no gradient of the "
            "step belongs to an array of it."
        )
    return leaves, casts


def _is_trained(graph: OperatorGraph, own: GraphInput) -> bool:
    """Whether gradients change an array, and not only the question if all are finite.

    A loss scale is a scalar that the loss reads, and that changes by this question. An
    outer optimizer with momentum would move it on and on, below zero.
    """
    if graph.values[own.value].shape:
        return True
    made_by, seen = producers(graph.operators), set[int]()
    waiting = [graph.outputs[own.output]]
    while waiting:
        now = waiting.pop()
        op = None if now is None or now in seen else made_by.get(now)
        if now is None or op is None:
            continue
        seen.add(now)
        if op.role is Role.BACKWARD:
            return True
        waiting += [
            x
            for x in op.inputs
            if x is not None and jnp.issubdtype(graph.values[x].dtype, jnp.floating)
        ]
    return False


def _casts(
    name: str, graph: OperatorGraph, given: Mapping[str, GraphInput]
) -> Iterator[Cast]:
    """The parameters that are casts of optimizer state.

    Raises:
      PlanError: a parameter is computed from optimizer state in another way, and not
        from its own value, so an outer step that writes to it would be lost.
    """
    made_by = producers(graph.operators)
    held = [i for i in given.values() if i.role is _OPTIMIZER]
    by_next = {graph.outputs[i.output]: i.path for i in held}
    for parameter in given.values():
        if parameter.role is not InputRole.PARAMETER:
            continue
        value, dtypes = graph.outputs[parameter.output], list[Any]()
        while value is not None and value not in by_next:
            op = made_by.get(value)
            if op is None or op.kind != "convert_element_type":
                break
            dtypes.insert(0, graph.values[value].dtype)
            value = op.inputs[0]
        if value in by_next:
            yield Cast(parameter.path, by_next[value], tuple(dtypes))
            continue
        reached = set(_values_before(value, made_by))
        shape = graph.values[parameter.value].shape
        sources = [
            i.path
            for i in held
            if i.value in reached and graph.values[i.value].shape == shape
        ]
        if parameter.value not in reached and sources:
            raise PlanError(
                f"{name}: the step computes '{parameter.path}' from '{sources[0]}' and "
                "not from its own last value, so what an outer step writes to it would "
                "be lost. Let the step add its update to the parameter, or return the "
                "parameter as a cast of a wider copy in the state."
            )


def _values_before(value: int | None, made_by: Mapping[int, Operator]) -> Iterator[int]:
    """The values from which the update computes a value, itself included."""
    seen, waiting = set[int](), [value]
    while waiting:
        now = waiting.pop()
        if now is None or now in seen:
            continue
        seen.add(now)
        yield now
        op = made_by.get(now)
        if op is not None and (op.role is Role.UPDATE or op.kind in BOUNDARIES):
            waiting.extend(op.inputs)
