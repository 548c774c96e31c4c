"""Splits a tree into leaves that are a program's arguments and leaves that are fixed.

A leaf is an element of a tree of arguments. A leaf that JAX can trace is an argument of
the program. All other leaves are part of the program: for example a function, a flag of
a module, or an argument that was declared static. A different fixed leaf gives a
different program.

The module also takes the arrays out of NNX objects and writes new arrays back.
``nnx.jit`` does the same with the same functions of Flax. If a step changes a module,
an optimizer, a metric, ``Rngs`` or a single variable, the caller's object changes too.
Objects that are shared stay shared, and a returned object of the caller is returned as
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from autopar_errors import InputTypeError
from autopar_passes.jax_meshes import explicit_sharding

T = TypeVar("T")

_TRACED = (jax.Array, Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
_NUMBERS = (bool, int, float, complex)
# Kinds of numpy arrays without a JAX type: objects, text, dates.
_NO_TYPE = frozenset("OUSMm")


class StaticError(InputTypeError):
    """A leaf of a call is neither an array nor a value that can stay fixed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """A whole argument that is static; it counts as one leaf, whatever it contains."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A tree without its arrays.

    Attributes:
      tree: the structure of the whole tree.
      leaves: position among all leaves -> the fixed leaf.
    """

    tree: Any
    leaves: tuple[tuple[int, Any], ...]

    def join(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with these arrays as leaves."""
        if not self.leaves:
            return jax.tree.unflatten(self.tree, arrays)
        fixed, given = dict(self.leaves), iter(arrays)
        count = self.tree.num_leaves
        leaves = [fixed[k] if k in fixed else next(given) for k in range(count)]
        return jax.tree.unflatten(self.tree, leaves)

    def read(self, arrays: Sequence[Any], what: Callable[[Any], T]) -> T:
        """Applies a function to the tree, where a tracer stands for each array.

        Classes that check their contents then see the same objects as under
        ``jax.jit``.
        """
        found: list[T] = []

        def inner(*tracers: Any) -> None:
            found.append(what(self.join(tracers)))

        jax.eval_shape(inner, *map(struct_of, arrays))
        return found[0]


def struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of an array, a number or a struct.

    The array may be deleted. The sharding is included only if it is part of the type,
    as a sharding over explicit mesh axes is.
    """
    # Except for keys, an array's own attributes are ten times faster than `jax.typeof`.
    own = isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array))
    given: Any = leaf if own and hasattr(leaf, "weak_type") else jax.typeof(leaf)
    weak = bool(given.weak_type)
    typed = explicit_sharding(leaf)
    return jax.ShapeDtypeStruct(
        given.shape, given.dtype, weak_type=weak, sharding=typed
    )


def part(names: Sequence[str], trees: Sequence[Any]) -> tuple[list[Any], Fixed]:
    """Returns the arrays of a tuple of trees, and the tuple without its arrays.

    As in ``jax.jit``, arrays and Python numbers are traced. Within an Equinox module
    only arrays are traced, as in ``equinox.filter_jit``.

    Args:
      names: the name of each tree, for messages.
      trees: the trees.

    Raises:
      StaticError: a leaf is neither an array nor a function.
    """
    whole = tuple(trees)
    leaves, structure = jax.tree.flatten(whole)
    arrays: list[Any] = []
    fixed: list[tuple[int, Any]] = []
    for k, (leaf, filtered) in enumerate(
        zip(leaves, _within_equinox(whole, leaves), strict=True)
    ):
        static = _is_static(leaf, filtered)
        if refusal := _refusal(leaf, filtered, static):
            raise StaticError(f"'{_path(names, whole, k)}' {refusal}")
        if static:
            fixed.append((k, leaf))
        else:
            arrays.append(leaf)
    return arrays, Fixed(structure, tuple(fixed))


def _within_equinox(tree: Any, leaves: Sequence[Any]) -> list[bool]:
    """Returns, for each leaf, whether it is inside an Equinox module."""
    if "equinox" not in sys.modules:
        return [False] * len(leaves)
    found: list[bool] = []
    for x in jax.tree.leaves(tree, is_leaf=_is_equinox):
        module = _is_equinox(x)
        found += [module] * (len(jax.tree.leaves(x)) if module else 1)
    return found


def _is_equinox(x: Any) -> bool:
    """Whether an object is an Equinox module; False if Equinox is not imported."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def _is_static(leaf: Any, filtered: bool) -> bool:
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        return filtered
    return not (isinstance(leaf, _TRACED) or hasattr(leaf, "__jax_array__"))


def _refusal(leaf: Any, filtered: bool, static: bool) -> str | None:
    """The reason why a leaf can be neither traced nor static; None if it can."""
    if isinstance(leaf, (jax.Array, Tracer)):
        return None
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in _NO_TYPE:
        return (
            f"is an array of dtype {leaf.dtype}, which JAX has no type for. Convert it "
            "to numbers, or leave it out of the arguments."
        )
    if not static:
        return None
    held = leaf.value if isinstance(leaf, Static) else leaf
    if not (filtered or callable(leaf) or isinstance(leaf, Static)):
        return _no_type(leaf)
    try:
        hash(held)
    except TypeError as error:
        return (
            f"is static and cannot be hashed ({error}). A static value is part of the "
            f"program: make this {type(held).__name__} a tuple or a frozen dataclass."
        )
    return None


def _no_type(leaf: Any) -> str:
    kind = f"is of type {type(leaf).__name__}, which is no JAX type."
    if hasattr(leaf, "__array__"):
        return f"{kind} Pass numpy.asarray(...) of it."
    return (
        f"{kind} Leave it out; an argument may also be named as a whole in "
        "static_argnames=."
    )


def _path(names: Sequence[str], whole: Any, position: int) -> str:
    keyed, _ = jax.tree_util.tree_flatten_with_path(whole)
    path = keyed[position][0]
    rest = jax.tree_util.keystr(path[1:], simple=True, separator="/")
    return "/".join(x for x in (names[int(path[0].idx)], rest) if x)


# The functions below name each call of an NNX module by the module's path while a step
# is traced.
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
    """Stores each module's path in the module, for `module_scopes` to read."""
    for path, module in _named_modules(graph):
        object.__setattr__(module, _PATH, "/".join(str(p) for p in path))


def unname_modules(graph: Any) -> None:
    """Removes the paths that `name_modules` has stored in the caller's modules."""
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


# Flax finds the caller's objects under this tag when it updates them.
_TAG = "autopar"


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectKey:
    """A key without text: it stands in a path between an object and its state."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, slots=True)
class ObjectState:
    """One object as a tree: its definition and its arrays.

    Attributes:
      definition: the object's ``nnx.GraphDef``; static.
      state: the object's ``nnx.State``.
    """

    definition: Any
    state: Any

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the state as the only child; the definition is tree structure."""
        return ((ObjectKey(), self.state),), self.definition

    @classmethod
    def tree_unflatten(cls, definition: Any, children: Any) -> ObjectState:
        """Returns the inverse of `tree_flatten_with_keys`."""
        return cls(definition, children[0])


# The most frequent types. Asking NNX about every object takes a third of a call's time.
_PLAIN = (dict, list, tuple, type(None))
_ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_object(x: Any) -> bool:
    """Whether an object is an NNX object or a variable."""
    if type(x) in _PLAIN or isinstance(x, _ARRAYS):
        return False
    return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)


def is_object_state(x: Any) -> bool:
    """Whether an object is an `ObjectState`, the result of `taken_out`."""
    return isinstance(x, ObjectState)


def holds_objects(tree: Any) -> bool:
    """Whether a tree contains an NNX object that a step could update.

    An ``nnx.State`` from ``nnx.split`` counts as a tree of arrays, as for ``jax.jit``.
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_object_or_state)
    return any(is_object(x) for x in leaves)


def _is_object_or_state(x: Any) -> bool:
    return isinstance(x, nnx.State) or is_object(x)


@contextlib.contextmanager
def updating() -> Generator[None]:
    """Lets `put_back` find the caller's objects that `taken_out` has replaced."""
    with nnx.update_context(_TAG):
        yield


def taken_out(tree: Any) -> Any:
    """Replaces each object of a tree by an `ObjectState`. Call it within `updating`."""
    return _to_tree(tree, _TAG)


def put_back(tree: Any, *, inner: bool) -> Any:
    """Returns the inverse of `taken_out`.

    Args:
      tree: the result of `taken_out`, with other arrays.
      inner: True inside the program, where new objects are made. False outside, where
        the caller's objects are updated.
    """
    return _from_tree(tree, _TAG, inner)


def split_objects(tree: Any) -> Any:
    """Like `taken_out`, outside of `updating`, for objects with no other reference."""
    return _to_tree(tree)


def merge_objects(tree: Any) -> Any:
    """Makes new objects from the result of `split_objects`."""
    return _from_tree(tree)


def _to_tree(tree: Any, tag: str | None = None) -> Any:
    """Replaces each object of a tree by an `ObjectState`.

    With a tag, Flax stores the objects under it for `_from_tree` to find.
    """
    return nnx.to_tree(
        tree,
        split_fn=lambda ctx, path, prefix, leaf: ObjectState(*ctx.split(leaf)),
        ctxtag=tag,
    )


def _from_tree(tree: Any, tag: str | None = None, inner: bool | None = None) -> Any:
    """Returns the inverse of `_to_tree`."""
    return nnx.from_tree(
        tree,
        merge_fn=lambda ctx, path, prefix, leaf: ctx.merge(leaf.definition, leaf.state),
        is_node_leaf=is_object_state,
        is_leaf=is_object_state,
        is_inner=inner,
        ctxtag=tag,
    )


def update_objects(tree: Any, new: Any) -> Any:
    """Returns a tree with the arrays of another tree; updates NNX objects in place.

    Args:
      tree: a tree with objects.
      new: the result of `split_objects` for the tree, with other arrays.
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
    """Returns the tree with None in place of everything that is not an object."""
    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=is_object)
