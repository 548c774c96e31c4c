"""Recognises calls that differ from the last call only in the values of arrays.

A call that differs from the last call only in the values of arrays needs no new plan,
and only some of its arrays have to be placed again.

In training, most calls are alike: the state is the result of the last call, and the
batch has the shapes of the last batch. If trees, types, shapes and shardings are equal
to those of the last call, the checks of the last call need not be repeated. Each of
these properties is compared as one list, which takes 0.1 microseconds per array.
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
_Place = Callable[[Mapping[int, Any]], Mapping[int, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Loose:
    """An array, such as a NumPy array, that each call has to check and place."""

    position: int
    struct: jax.ShapeDtypeStruct
    sharding: Any

    def fits(self, leaf: Any) -> bool:
        """Whether an array has the expected shape and dtype, and is not deleted."""
        if type(leaf) is np.ndarray and not self.struct.weak_type:
            kind = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return kind == self.struct.dtype and leaf.shape == self.struct.shape
        if struct_of(leaf) != self.struct:
            return False
        return not (isinstance(leaf, jax.Array) and leaf.is_deleted())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall:
    """A call that has run, and the properties that later calls must share with it.

    Attributes:
      running: the step that ran the call.
      positional: the number of arguments that were given by position.
      keywords: names of the keyword arguments, in the order of their arrays.
      tree: the tree structure of the arguments.
      types: the type of each leaf of the arguments.
      static: position of a leaf -> the static leaf at this position.
      arrays: a function that selects the arrays among the leaves.
      kept: a function that selects the arrays that had the program's shardings in the
        last call, so that they need no placement.
      avals: shape and dtype of each array that ``kept`` selects.
      shardings: sharding of each array that ``kept`` selects.
      loose: the arrays that ``kept`` does not select.
      consumed: position of each donated argument -> position of the result that is its
        value for the next step.
      donated: a function that selects the donated arrays.
      moves_state: whether some donated array needs placement in each call, such as a
        random key.
      place: places arrays, by position, together with those of other processes; None in
        one process.
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
    place: _Place | None

    def place_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any]] | None:
        """Returns the arrays of a new call, as given and as placed for the program.

        Returns None if the new call differs from this call in more than array values.

        Args:
          args: positional arguments.
          kwargs: keyword arguments.
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
        # On several devices XLA crashes if it is given a deleted array (JAX 0.10.2).
        if any(map(ConcreteArray.is_deleted, kept)):
            return None
        return self._lay_arguments(given)

    def _lay_arguments(self, given: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """Returns the arrays as given, and with the loose arrays placed."""
        if not self.loose:
            return given, given
        placed = list(given)
        if self.place is not None:
            if not all(loose.fits(given[loose.position]) for loose in self.loose):
                return None
            those = {loose.position: given[loose.position] for loose in self.loose}
            for k, array in self.place(those).items():
                placed[k] = array
            return given, placed
        for loose in self.loose:
            leaf = given[loose.position]
            if not loose.fits(leaf):
                return None
            placed[loose.position] = placement.place(leaf, loose.sharding)
        return given, placed

    def consume(
        self, given: Sequence[Any], placed: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Deletes the donated arrays (`autopar.runtime.placement.consume`)."""
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
    place: _Place | None = None,
) -> RepeatedCall | None:
    """Returns the properties that later calls must share with a call that has run.

    Returns None if later calls cannot be compared with this call.

    Args:
      running: the step that ran the call.
      call: the call.
      args: positional arguments of the call.
      kwargs: keyword arguments of the call.
      placed: flat arguments of the call, as placed.
      flat: flat results of the call.
      consumed: position of each donated argument -> position of the result that is its
        value for the next step.
      place: as `RepeatedCall.place`.
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
        # In the next call, the state is the result of this call.
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
        place,
    )


def _own_positions(
    fixed: Any, leaves: Sequence[Any], arrays: Sequence[Any]
) -> list[int] | None:
    """Returns the position of each array of a call among the leaves.

    Returns None if the leaves of the arguments are not the arrays of the call, one to
    one. Examples are a static argument that is a tree, and a batch whose last rows were
    dropped.
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
    """Whether a leaf is equal to the static leaf of the program."""
    held = fixed.value if isinstance(fixed, Static) else fixed
    return leaf is held or bool(leaf == held)


def _taker(positions: Sequence[int], count: int) -> _Taken:
    """Returns a function that selects the given positions of ``count`` elements."""
    if list(positions) == list(range(count)):
        return lambda elements: elements
    if len(positions) < 2:
        return lambda elements: [elements[k] for k in positions]
    return operator.itemgetter(*positions)
