"""Takes the arrays out of NNX objects, and writes the new ones back.

This is what ``nnx.jit`` does, by the same functions of Flax: whatever a step changes
in a module, an optimizer, a metric, ``Rngs`` or a bare variable comes back to the
caller's object. Objects that are shared stay shared, and a returned object is the
caller's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

# Names every NNX module call by its path while a step is traced.
#
# Linen puts module paths into JAX's name stack; NNX does not.

_PATH = "_autopar_path"


@contextlib.contextmanager
def module_scopes(graph: Any) -> Generator[None]:
    """Opens a named scope at each call of a module of ``graph``."""
    modules = list(_named_modules(graph))
    classes = {type(m) for _, m in modules if "__call__" in type(m).__dict__}
    saved: dict[type, Callable[..., Any]] = {}
    for cls in classes:
        saved[cls] = cls.__dict__["__call__"]
        cls.__call__ = _add_scope(saved[cls])
    try:
        yield
    finally:
        for cls, call in saved.items():
            cls.__call__ = call


def name_modules(graph: Any) -> None:
    """Writes its path onto every module, for `module_scopes` to read."""
    for path, module in _named_modules(graph):
        object.__setattr__(module, _PATH, "/".join(str(p) for p in path))


def unname_modules(graph: Any) -> None:
    """Takes the paths off again: they are no part of the caller's objects."""
    for _, module in _named_modules(graph):
        if _PATH in vars(module):
            object.__delattr__(module, _PATH)


def _named_modules(graph: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for path, node in nnx.iter_graph(graph):
        if isinstance(node, nnx.Module):
            yield path[1:] if path and path[0] == 0 else path, node


def _add_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(self, _PATH, "")
        name = path.rsplit("/", 1)[-1] if path else type(self).__name__
        with jax.named_scope(name):
            return call(self, *args, **kwargs)

    return call_in_scope


# Names the exchange between the caller's objects and those inside a program.
_TAG = "autopar"


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectKey:
    """Stands in a path where an object becomes its state; has no name of its own."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, slots=True)
class ObjectState:
    """One object as a tree: what it is, and its arrays.

    Attributes:
      definition: its ``nnx.GraphDef``; static.
      state: its ``nnx.State``.
    """

    definition: Any
    state: Any

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The definition is part of the structure."""
        return ((ObjectKey(), self.state),), self.definition

    @classmethod
    def tree_unflatten(cls, definition: Any, children: Any) -> ObjectState:
        """The opposite of `tree_flatten_with_keys`."""
        return cls(definition, children[0])


# Most of what a call holds. To ask NNX of each takes a third of what a call takes.
_PLAIN = (dict, list, tuple, type(None))
_ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_object(x: Any) -> bool:
    """Whether something is an NNX object or a variable."""
    if type(x) in _PLAIN or isinstance(x, _ARRAYS):
        return False
    return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)


def is_object_state(x: Any) -> bool:
    """Whether something is what `taken_out` makes of an object."""
    return isinstance(x, ObjectState)


def holds_objects(tree: Any) -> bool:
    """Whether a tree holds any NNX object that a step could update.

    An ``nnx.State``, of ``nnx.split``, is a tree of arrays as it is for ``jax.jit``.
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_object_or_state)
    return any(is_object(x) for x in leaves)


def _is_object_or_state(x: Any) -> bool:
    return isinstance(x, nnx.State) or is_object(x)


@contextlib.contextmanager
def updating() -> Generator[None]:
    """Within it, `put_back` outside a program finds the objects of `taken_out`."""
    with nnx.update_context(_TAG):
        yield


def taken_out(tree: Any) -> Any:
    """The tree with an `ObjectState` in the place of each object.

    Within `updating`.
    """
    return _to_tree(tree, _TAG)


def put_back(tree: Any, *, inner: bool) -> Any:
    """The opposite of `taken_out`.

    Args:
      tree: what `taken_out` returned, with other arrays.
      inner: inside the program new objects are made; outside of it the caller's are
        updated.
    """
    return _from_tree(tree, _TAG, inner)


def split_objects(tree: Any) -> Any:
    """`taken_out`, for objects that nobody else holds: outside of `updating`."""
    return _to_tree(tree)


def merge_objects(tree: Any) -> Any:
    """Makes new objects of what `split_objects` returned."""
    return _from_tree(tree)


def _to_tree(tree: Any, tag: str | None = None) -> Any:
    """The tree with an `ObjectState` in the place of each object.

    With a tag, Flax keeps the objects for `_from_tree` with the same tag.
    """
    return nnx.to_tree(
        tree,
        split_fn=lambda ctx, path, prefix, leaf: ObjectState(*ctx.split(leaf)),
        ctxtag=tag,
    )


def _from_tree(tree: Any, tag: str | None = None, inner: bool | None = None) -> Any:
    """The opposite of `_to_tree`."""
    return nnx.from_tree(
        tree,
        merge_fn=lambda ctx, path, prefix, leaf: ctx.merge(leaf.definition, leaf.state),
        is_node_leaf=is_object_state,
        is_leaf=is_object_state,
        is_inner=inner,
        ctxtag=tag,
    )


def update_objects(tree: Any, new: Any) -> Any:
    """A tree with the arrays of another; NNX objects are updated in place.

    Args:
      tree: with objects.
      new: what `split_objects` returns for the tree, with other arrays.
    """
    given, structure = jax.tree.flatten(tree, is_leaf=is_object)
    states = jax.tree.leaves(new, is_leaf=is_object_state)
    for k, (old, state) in enumerate(zip(given, states, strict=True)):
        if is_object(old):
            nnx.update(old, state.state)
        else:
            given[k] = state
    return jax.tree.unflatten(structure, given)


def objects_alone(tree: Any) -> Any:
    """The tree with None in the place of everything that is no object."""
    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=is_object)
