"""Traces a user's train step, in any of the three forms people write.

* Linen: ``step(state, batch) -> (state, metrics)`` with a ``TrainState``;
* plain: ``step(params, opt_state, batch) -> (params, opt_state, loss)``;
* NNX: ``step(model, optimizer, batch) -> loss``, which mutates its arguments.

Only shapes are needed: nothing of the size of the model is allocated.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from autopar_passes.program.equations import Program
from autopar_passes.program.flatten import flatten
from autopar_passes.program.nnx_scopes import module_scopes, name_modules


class TraceError(ValueError):
    """The step cannot be traced by JAX."""


@dataclasses.dataclass(frozen=True, slots=True)
class TracedStep:
    """A step as a pure, flat program, and how its pytrees map onto it.

    Attributes:
      program: the flat program.
      in_tree: structure of the pure arguments (a tuple of pytrees).
      out_tree: structure of the pure result.
      input_paths: a readable path for each flat argument.
      output_paths: the same for each flat result.
      carried: flat argument -> flat result that is its next value.
      mutated: positions of the arguments that the step mutates (NNX).
    """

    program: Program
    in_tree: Any
    out_tree: Any
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    carried: dict[int, int]
    mutated: tuple[int, ...]


def is_graph_node(arg: Any) -> bool:
    """Says whether an argument is an NNX object, or a collection of them."""
    leaves = jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return any(isinstance(x, (nnx.Module, nnx.Optimizer)) for x in leaves)


def pure_arguments(args: Sequence[Any]) -> tuple[Any, ...]:
    """Turns the arguments of a step into pytrees of arrays.

    NNX objects become one leading pytree, their joint state.
    """
    graph = tuple(a for a in args if is_graph_node(a))
    rest = tuple(a for a in args if not is_graph_node(a))
    return (nnx.state(graph), *rest) if graph else rest


def pure_function(
    step: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """Returns the step as a pure function, and the arguments that it mutates."""
    mutated = tuple(i for i, a in enumerate(args) if is_graph_node(a))
    if not mutated:
        return step, ()
    definition = nnx.graphdef(tuple(args[i] for i in mutated))

    def pure(state: Any, *rest: Any) -> tuple[Any, Any]:
        nodes = nnx.merge(definition, state)
        name_modules(nodes)
        given = iter(rest)
        merged = dict(zip(mutated, nodes, strict=True))
        full = [merged[i] if i in merged else next(given) for i in range(len(args))]
        with module_scopes(nodes):
            out = step(*full)
        return nnx.state(nodes), out

    return pure, mutated


def trace(step: Callable[..., Any], args: Sequence[Any]) -> TracedStep:
    """Traces a step on arrays or ``ShapeDtypeStruct``s.

    Raises:
      TraceError: JAX cannot trace the step.
    """
    function, mutated = pure_function(step, args)
    try:
        trees = jax.tree.map(_struct, pure_arguments(args))
        traced = jax.jit(function).trace(*trees)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, TypeError) as error:
        raise TraceError(_trace_failure(step, error)) from error
    out = traced.out_info
    names = argument_names(step, args)
    return TracedStep(
        program=flatten(traced.jaxpr),
        in_tree=jax.tree.structure(trees),
        out_tree=jax.tree.structure(out),
        input_paths=tuple(_input_paths(names, trees, mutated)),
        output_paths=tuple(_paths("result", out)),
        carried=carried_leaves(trees, out),
        mutated=mutated,
    )


def carried_leaves(args: Sequence[Any], out: Any) -> dict[int, int]:
    """Matches arguments with results of the same structure, shapes and dtypes.

    Returns flat argument -> flat result. An argument is matched as a whole,
    with the result itself or with an element of a result that is a tuple.
    """
    parts = list(out) if type(out) in (tuple, list) else [out]
    starts = _starts(parts)
    free = set(range(len(parts)))
    matched: dict[int, int] = {}
    for start, arg in zip(_starts(args), args, strict=True):
        kind = _kind(arg)
        for k in sorted(free):
            if kind[1] and _kind(parts[k]) == kind:
                free.discard(k)
                pairs = range(len(kind[1]))
                matched.update({start + j: starts[k] + j for j in pairs})
                break
    return matched


def _starts(trees: Sequence[Any]) -> list[int]:
    out, total = [], 0
    for tree in trees:
        out.append(total)
        total += len(jax.tree.leaves(tree))
    return out


def _kind(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(x.shape), str(x.dtype)) for x in leaves)


def _struct(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def argument_names(step: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Returns the step's own names of its arguments; ``args2`` for those without."""
    try:
        names = list(inspect.signature(step).parameters)[: len(args)]
    except (TypeError, ValueError):
        names = []
    return names + [f"args{i}" for i in range(len(names), len(args))]


def _input_paths(
    names: Sequence[str], trees: Sequence[Any], mutated: Sequence[int]
) -> list[str]:
    """Paths that start with the argument's name, also within the joint NNX state."""
    rest = [n for i, n in enumerate(names) if i not in mutated]
    if not mutated:
        return [p for n, t in zip(names, trees, strict=True) for p in _paths(n, t)]
    # The joint state is keyed by position among the mutated arguments.
    joint = [
        "/".join((names[mutated[int(first)]], *more))
        for first, *more in (p.split("/") for p in _paths("", trees[0]))
    ]
    return joint + [
        p for n, t in zip(rest, trees[1:], strict=True) for p in _paths(n, t)
    ]


def _paths(name: str, tree: Any) -> list[str]:
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = [jax.tree_util.keystr(k, simple=True, separator="/") for k, _ in keyed]
    return ["/".join(x for x in (name, k) if x) for k in keys]


def _trace_failure(step: Callable[..., Any], error: Exception) -> str:
    name = getattr(step, "__name__", str(step))
    first = str(error).strip().split("\n", 1)[0]
    return (
        f"the step '{name}' cannot be traced: {first}\n"
        "  A planned step must be a function that jax.jit accepts: pytrees of arrays "
        "in and out, no Python control flow on array values, no conversion of arrays "
        "to Python numbers.\n"
        f"  try: jax.jit({name}).trace(...) on the same arguments shows where."
    )
