"""What a call of a step hands over: structure, shapes, and whose part it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.runtime import agreement, exchange, placement
from autopar.runtime.recent import Recent
from autopar.runtime.world import World
from autopar_passes.program.trace import (
    argument_names,
    carried_leaves,
    is_graph_node,
    pure_arguments,
)
from autopar_passes.program.trace import pure_function as pure_step


def positional(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Puts arguments given by name in their places.

    Raises:
      TypeError: one of them is keyword-only.
    """
    if not kwargs:
        return args
    bound = inspect.signature(step).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"a planned step takes positional arguments only, not "
            f"{', '.join(bound.kwargs)}=: bind them with functools.partial."
        )
    return bound.args


def signature(structs: Sequence[Any]) -> Any:
    """What a plan depends on: structure, shapes, dtypes, and NNX's static parts."""
    leaves, tree = jax.tree.flatten(pure_arguments(structs))
    nodes = tuple(a for a in structs if is_graph_node(a))
    static = nnx.graphdef(nodes) if nodes else None
    return tree, static, tuple((tuple(x.shape), str(x.dtype)) for x in leaves)


class BatchArguments:
    """Finds the global shapes of a call's arguments.

    In a program of several processes, state is the same on every process or
    already global; of a batch each process holds its own rows, as many as any
    other. An argument that comes back from the step is state, any other is batch.
    """

    def __init__(self, step: Callable[..., Any], capacity: int) -> None:
        """Knows no arguments yet; remembers so many structures of them."""
        self._step = step
        self._state: Recent[Any, frozenset[int]] = Recent(capacity)

    def structs(self, args: Sequence[Any], world: World) -> list[Any]:
        """Abstract arguments with global shapes; NNX objects stay as they are.

        Raises:
          PlanError: processes pass batches of different shapes.
        """
        with exchange.told(world, "reading the arguments"):
            local = [_structs(a) for a in args]
        if world.process_count == 1:
            return local
        key = signature(local)
        state = self._state.get(key)
        if state is None:
            agreement.check_rows(world, named_shapes(self._step, local))
            with exchange.told(world, "tracing the step"):
                found = state_arguments(self._step, local)
            state = self._state.put(key, found)
        return [
            x if i in state or is_graph_node(x) else _global(a, world.process_count)
            for i, (a, x) in enumerate(zip(args, local, strict=True))
        ]


def named_shapes(
    step: Callable[..., Any], structs: Sequence[Any]
) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each array among the arguments."""
    found: dict[str, tuple[int, ...]] = {}
    for name, arg in zip(argument_names(step, structs), structs, strict=True):
        tree = nnx.state(arg) if is_graph_node(arg) else arg
        for path, leaf in jax.tree.leaves_with_path(tree):
            keys = jax.tree_util.keystr(path, simple=True, separator="/")
            found[f"{name}/{keys}" if keys else name] = tuple(leaf.shape)
    return found


def state_arguments(step: Callable[..., Any], structs: Sequence[Any]) -> frozenset[int]:
    """Positions of the arguments that come back from the step."""
    function, mutated = pure_step(step, structs)
    trees = pure_arguments(structs)
    carried = carried_leaves(trees, jax.eval_shape(function, *trees))
    rest = [i for i in range(len(structs)) if i not in mutated]
    start = len(jax.tree.leaves(trees[0])) if mutated else 0
    found = set(mutated)
    for i in rest:
        if start in carried:
            found.add(i)
        start += len(jax.tree.leaves(structs[i]))
    return frozenset(found)


def _structs(arg: Any) -> Any:
    return arg if is_graph_node(arg) else jax.tree.map(_struct, arg)


def _struct(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _global(arg: Any, process_count: int) -> Any:
    """Structs of the whole batch, of which each process was given its rows."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        struct = _struct(leaf)
        return jax.ShapeDtypeStruct(
            placement.global_shape(leaf, process_count), struct.dtype
        )

    return jax.tree.map(whole, arg)


def check_shapes(name: str, plan: Plan, leaves: Sequence[Any]) -> None:
    """Checks that a state has the shapes of a plan's first inputs.

    Raises:
      PlanError: it does not.
    """
    planned = list(plan.shapes.items())[: len(leaves)]
    for (path, shape), leaf in zip(planned, leaves, strict=False):
        if tuple(shape) != tuple(leaf.shape):
            raise PlanError(
                f"{name}: the plan belongs to another step: its '{path}' has shape "
                f"{tuple(shape)}, the created state's leaf has {tuple(leaf.shape)}. "
                "Make a new plan with autopar.plan."
            )
