"""Parts a tree into the leaves that a program takes and those that stay fixed.

A leaf that JAX can trace is an argument of the program. What else a tree holds is
part of the program: a function, a flag of a module, an argument that was declared
static. Another value there makes another program.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from autopar_errors import InputTypeError
from autopar_passes.jax_meshes import explicit_sharding

T = TypeVar("T")

_TRACED = (jax.Array, Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
_NUMBERS = (bool, int, float, complex)
# Kinds of numpy arrays that JAX has no type for: objects, text, dates.
_NO_TYPE = frozenset("OUSMm")


class StaticError(InputTypeError):
    """A leaf is neither an array nor something that can stay fixed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """A whole argument that is static; one leaf, whatever it holds."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A tree without its arrays.

    Attributes:
      tree: structure of the whole tree.
      leaves: position among all leaves -> the leaf that stays fixed.
    """

    tree: Any
    leaves: tuple[tuple[int, Any], ...]

    def join(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays."""
        if not self.leaves:
            return jax.tree.unflatten(self.tree, arrays)
        fixed, given = dict(self.leaves), iter(arrays)
        count = self.tree.num_leaves
        leaves = [fixed[k] if k in fixed else next(given) for k in range(count)]
        return jax.tree.unflatten(self.tree, leaves)

    def read(self, arrays: Sequence[Any], what: Callable[[Any], T]) -> T:
        """What a function reads of the tree, in which each array is a tracer.

        Classes that check what they hold then see what ``jax.jit`` shows them.
        """
        found: list[T] = []

        def inner(*tracers: Any) -> None:
            found.append(what(self.join(tracers)))

        jax.eval_shape(inner, *map(struct_of, arrays))
        return found[0]


def struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type of an array, a number or a struct.

    The array may be deleted. A sharding is left out, unless it is a part of the type,
    as one over explicit axes of a mesh is.
    """
    # An array says it of itself, ten times faster than by its type; not so keys.
    own = isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array))
    given: Any = leaf if own and hasattr(leaf, "weak_type") else jax.typeof(leaf)
    weak = bool(given.weak_type)
    typed = explicit_sharding(leaf)
    return jax.ShapeDtypeStruct(
        given.shape, given.dtype, weak_type=weak, sharding=typed
    )


def part(names: Sequence[str], trees: Sequence[Any]) -> tuple[list[Any], Fixed]:
    """Returns the arrays of a tuple of trees, and the tuple without them.

    Arrays and Python numbers are traced, as by ``jax.jit``; within an Equinox module
    arrays alone are, as by ``equinox.filter_jit``.

    Args:
      names: of each tree, for messages.
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
    """Of each leaf, whether it lies within an Equinox module."""
    if "equinox" not in sys.modules:
        return [False] * len(leaves)
    found: list[bool] = []
    for x in jax.tree.leaves(tree, is_leaf=_is_equinox):
        module = _is_equinox(x)
        found += [module] * (len(jax.tree.leaves(x)) if module else 1)
    return found


def _is_equinox(x: Any) -> bool:
    """Whether something is an Equinox module; without Equinox nothing is."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def _is_static(leaf: Any, filtered: bool) -> bool:
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        return filtered
    return not (isinstance(leaf, _TRACED) or hasattr(leaf, "__jax_array__"))


def _refusal(leaf: Any, filtered: bool, static: bool) -> str | None:
    """Why a leaf can be neither traced nor fixed; None if it can."""
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
