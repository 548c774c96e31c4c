"""Calls that repeat the last one with other numbers: nothing is planned or placed anew.

Most calls of a training are alike: the state is what the last call returned, and the
batch has the shapes of the last batch. What was checked then holds again if the trees,
types, shapes and places are the same. They are compared as whole lists, which takes a
tenth of a microsecond an array.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.runtime import placement
from autopar.runtime.preparation import Running
from autopar_passes.jax_compat import ConcreteArray, aval_of, sharding_of
from autopar_passes.jax_meshes import user_mesh
from autopar_passes.program.calls import StepCall
from autopar_passes.program.static_leaves import Static, struct_of

_Taken = Callable[[Sequence[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Loose:
    """An array that is looked at and placed in each call, such as NumPy's."""

    position: int
    struct: jax.ShapeDtypeStruct
    sharding: Any

    def fits(self, leaf: Any) -> bool:
        """Whether another array has the same shape and dtype, and is alive."""
        if type(leaf) is np.ndarray and not self.struct.weak_type:
            kind = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return kind == self.struct.dtype and leaf.shape == self.struct.shape
        if struct_of(leaf) != self.struct:
            return False
        return not (isinstance(leaf, jax.Array) and leaf.is_deleted())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall:
    """A call that has run, and what the next ones must share with it.

    Attributes:
      running: the step that it ran by.
      positional: the number of arguments that were given by position.
      keywords: names of the others, in the order of their arrays.
      tree: structure of the arguments.
      types: of each leaf.
      static: position among the leaves -> the leaf that is part of the program.
      arrays: takes the other leaves.
      kept: takes the arrays that lie where the program wants them.
      avals: shape and dtype of each of them.
      shardings: where each of them lies.
      loose: the other arrays.
      consumed: positions of the arrays that the call consumes.
      donated: takes these.
      moves_state: whether one of these, such as a key, has to be placed in each call.
    """

    running: Running
    positional: int
    keywords: tuple[str, ...]
    tree: Any
    types: list[type]
    static: tuple[tuple[int, Any], ...]
    arrays: _Taken
    kept: _Taken
    avals: list[Any]
    shardings: list[Any]
    loose: tuple[_Loose, ...]
    consumed: dict[int, int]
    donated: _Taken
    moves_state: bool

    def place_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any]] | None:
        """The flat arguments as given and in their places; None: another call.

        Args:
          args: positional arguments.
          kwargs: those that are given by name.
        """
        if len(args) != self.positional or len(kwargs) != len(self.keywords):
            return None
        if kwargs:
            if any(name not in kwargs for name in self.keywords):
                return None
            args = (*args, *(kwargs[name] for name in self.keywords))
        leaves, tree = jax.tree.flatten(tuple(args))
        if list(map(type, leaves)) != self.types or tree != self.tree:
            return None
        if any(not _same(leaves[k], fixed) for k, fixed in self.static):
            return None
        given = list(self.arrays(leaves))
        kept = self.kept(given)
        if list(map(aval_of, kept)) != self.avals:
            return None
        if list(map(sharding_of, kept)) != self.shardings or user_mesh() is not None:
            return None
        if len(set(map(id, self.donated(given)))) < len(self.consumed):
            return None
        # On several devices XLA crashes where it is given a deleted array (0.10.2).
        if any(map(ConcreteArray.is_deleted, kept)):
            return None
        return self._lay_arguments(given)

    def _lay_arguments(self, given: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """The arguments, with those placed that are not in their places yet."""
        if not self.loose:
            return given, given
        placed = list(given)
        for loose in self.loose:
            leaf = given[loose.position]
            if not loose.fits(leaf):
                return None
            placed[loose.position] = placement.place(leaf, loose.sharding)
        return given, placed

    def consume(
        self, given: Sequence[Any], placed: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Deletes what the call consumed (`autopar.runtime.placement.consume`)."""
        gone = ConcreteArray.is_deleted
        if self.moves_state or not all(map(gone, self.donated(placed))):
            placement.consume(given, placed, self.consumed, results)


def repeated_call(
    running: Running,
    call: StepCall,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    placed: Sequence[Any],
    flat: Sequence[Any],
    consumed: dict[int, int],
) -> RepeatedCall | None:
    """What calls must share with one that has run; None: each is looked at anew.

    Args:
      running: the step that it ran by.
      call: the call.
      args: its positional arguments.
      kwargs: those that were given by name.
      placed: its flat arguments in their places.
      flat: its flat results.
      consumed: positions of the arguments that were consumed, with their results.
    """
    form = call.form
    keywords = tuple(k for k in form.names[len(args) :] if k in kwargs)
    if form.objects or form.mesh is not None or len(keywords) != len(kwargs):
        return None
    whole = (*args, *(kwargs[name] for name in keywords))
    leaves, tree = jax.tree.flatten(whole)
    own = _own_positions(form.fixed, leaves, call.arrays)
    if own is None:
        return None
    types = list(map(type, leaves))
    kept: list[int] = []
    avals: list[Any] = []
    shardings: list[Any] = []
    loose: list[_Loose] = []
    carried = running.planned.analysis.carried_arguments
    wanted = running.planned.in_shardings
    for k, leaf in enumerate(call.arrays):
        # The state of the next call is what this one returns.
        array = flat[carried[k]] if k in carried else leaf
        types[own[k]] = type(array)
        lies = k in carried or placed[k] is leaf
        if lies and type(array) is ConcreteArray:
            if array.sharding != wanted[k] or array.aval != placed[k].aval:
                return None
            kept.append(k)
            avals.append(array.aval)
            shardings.append(array.sharding)
        else:
            loose.append(_Loose(k, struct_of(array), wanted[k]))
    return RepeatedCall(
        running,
        len(args),
        keywords,
        tree,
        types,
        form.fixed.leaves,
        _taker(own, len(leaves)),
        _taker(kept, len(own)),
        avals,
        shardings,
        tuple(loose),
        consumed,
        _taker(list(consumed), len(own)),
        any(found.position in consumed for found in loose),
    )


def _own_positions(
    fixed: Any, leaves: Sequence[Any], arrays: Sequence[Any]
) -> list[int] | None:
    """Of each array of a call, its position among the leaves.

    None: arguments are not what the program takes, such as a static one that is a tree,
    or a batch whose last rows were dropped.
    """
    static, given = dict(fixed.leaves), iter(arrays)
    if len(leaves) != fixed.tree.num_leaves:
        return None
    own: list[int] = []
    for k, leaf in enumerate(leaves):
        if k in static:
            if not _same(leaf, static[k]):
                return None
        elif leaf is next(given):
            own.append(k)
        else:
            return None
    return own


def _same(leaf: Any, fixed: Any) -> bool:
    """Whether a leaf is the one that is part of the program."""
    held = fixed.value if isinstance(fixed, Static) else fixed
    return leaf is held or bool(leaf == held)


def _taker(positions: Sequence[int], count: int) -> _Taken:
    """A function that takes some of so many elements."""
    if list(positions) == list(range(count)):
        return lambda elements: elements
    if len(positions) < 2:
        return lambda elements: [elements[k] for k in positions]
    return operator.itemgetter(*positions)
