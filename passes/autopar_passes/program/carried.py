"""Finds the state that a step carries: arguments that come back in the result.

A whole argument is matched with a part of the result that has the same structure,
shapes and dtypes. The part may be the result itself, an element of a tuple, a value of
a dict or a field of a dataclass. NNX objects are matched array by array, because a step
may add or remove variables. A scalar argument, such as a learning rate, is matched only
if the result depends on it; otherwise a loss could be taken for its next value. An
argument that is named as the batch is never state.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar_passes.program.calls import CallForm, ResultForm
from autopar_passes.program.static_leaves import Fixed, is_object_state


@dataclasses.dataclass(frozen=True, slots=True)
class CarriedPairs:
    """The arguments that a step carries.

    Attributes:
      pairs: flat argument -> flat result that is its next value.
      changed: paths of the arrays of carried arguments that come back with another
        shape or dtype.
    """

    pairs: dict[int, int]
    changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """An array of a tree: its number, and the type that a carried array must keep."""

    index: int
    kind: tuple[Any, ...]


# The carried pairs, and paths of arguments that come back with another shape or dtype.
_Found = tuple[dict[int, int], set[int]]
# Path and array of every leaf of NNX objects.
_ObjectArrays = Iterator[tuple[Any, _Leaf]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tree.

    Attributes:
      name: the key of the part in its tree, or the name of an argument; empty for an
        element of a sequence.
      depth: the number of trees around the part.
      tree: the part.
      numbers: ``id`` of a leaf that represents an array -> the array.
      structure: the structure of the part's tree.
      leaves: the leaves of the part, with arrays as `_Leaf`.
    """

    name: str
    depth: int
    tree: Any
    numbers: Mapping[int, _Leaf]
    structure: Any
    leaves: tuple[Any, ...]

    @property
    def arrays(self) -> list[_Leaf]:
        """The arrays of the part."""
        return [x for x in self.leaves if isinstance(x, _Leaf)]

    @property
    def is_array(self) -> bool:
        """Whether the part is a single array."""
        return len(self.leaves) == 1 and jax.tree_util.treedef_is_leaf(self.structure)


def find_carried(
    form: CallForm,
    inputs: Sequence[Any],
    result: ResultForm,
    outputs: Sequence[Any],
    depends: Callable[[int, int], bool],
) -> CarriedPairs:
    """Matches the arguments of a call with its result.

    Args:
      form: the form of the call.
      inputs: shapes and dtypes of the flat arguments.
      result: the form of the result.
      outputs: shapes and dtypes of the flat results.
      depends: tells whether a flat result depends on a flat argument.
    """

    def both(given: Any) -> _Found:
        return result.fixed.read(outputs, lambda after: search_pairs(given, after))

    def search_pairs(given: Any, after: Any) -> _Found:
        before = _leaves_by_id(form.fixed, given, inputs)
        numbers = _leaves_by_id(result.fixed, after, outputs)
        objects, returned = after
        search = _PairSearch(_part("", 0, returned, numbers), depends)
        for k, (name, tree) in enumerate(zip(form.names, given, strict=True)):
            if form.roles.is_batch_argument(name):
                continue
            if form.objects:
                search.objects(
                    _object_arrays(tree, before), _object_arrays(objects[k], numbers)
                )
            search.match(_part(name, 0, tree, before))
        return search.pairs, search.changed

    pairs, changed = form.fixed.read(inputs, both)
    paths = form.paths(inputs)
    return CarriedPairs(
        dict(sorted(pairs.items())), tuple(paths[i] for i in sorted(changed))
    )


class _PairSearch:
    """Matches parts of arguments with parts of one result."""

    def __init__(self, result: _Part, depends: Callable[[int, int], bool]) -> None:
        """Starts without matches."""
        self._depends = depends
        self.pairs: dict[int, int] = {}
        self.changed: set[int] = set()
        self._taken: set[int] = set()
        # The parts of the result by their structure, each part before the parts inside
        # it.
        self._parts: dict[Any, list[_Part]] = collections.defaultdict(list)
        for part in _parts(result):
            self._parts[part.structure].append(part)

    def objects(self, before: _ObjectArrays, after: _ObjectArrays) -> None:
        """Matches the NNX arrays of an argument with the result's, by their paths."""
        new = dict(after)
        for path, leaf in before:
            other = new.get(path)
            if isinstance(other, _Leaf) and other.kind == leaf.kind:
                self.pairs[leaf.index] = other.index

    def match(self, part: _Part) -> bool:
        """Matches a part of an argument, or else the parts inside it."""
        if not part.arrays or is_object_state(part.tree):
            return False
        found = self._equal(part) or self._alike(part)
        if found is not None:
            self._take(part, found)
            return True
        if part.is_array:
            return False
        children = _children(part)
        inner = [x for x in children if not x.is_array]
        matched = [self.match(x) for x in inner]
        if any(matched):
            # An array in the same container as matched state may be state too, if an
            # array of the result has the same name.
            for x in children:
                if x.is_array:
                    self.match(x)
        return any(matched)

    def _equal(self, part: _Part) -> _Part | None:
        """A part of the result with the argument's structure and array types."""
        found = [x for x in self._free(part) if _kinds(x) == _kinds(part)]
        if part.is_array:
            found = [x for x in found if self._may_be(part, x)]
        named = [x for x in found if x.name and x.name == part.name]
        return next(iter(named + found), None)

    def _may_be(self, part: _Part, other: _Part) -> bool:
        """Whether a single array of the result may be the argument's next value.

        Many arrays have the same shape. The names must therefore be equal, with one
        exception: an argument that is itself an array may match the result itself, or
        an element of a tuple.
        """
        if part.depth == 0 and other.depth <= 1 and not other.name:
            (own,), (new,) = part.arrays, other.arrays
            return own.kind[0] != () or self._depends(own.index, new.index)
        return bool(part.name) and other.name == part.name

    def _alike(self, part: _Part) -> _Part | None:
        """A part of the result, most of whose arrays have the argument's types."""
        for other in self._free(part):
            equal = sum(
                a == b for a, b in zip(_kinds(part), _kinds(other), strict=True)
            )
            if not part.is_array and 2 * equal >= len(part.leaves) and equal > 0:
                return other
        return None

    def _free(self, part: _Part) -> Iterator[_Part]:
        for other in self._parts.get(part.structure, ()):
            if self._taken.isdisjoint(x.index for x in other.arrays):
                yield other

    def _take(self, part: _Part, other: _Part) -> None:
        self._taken.update(x.index for x in other.arrays)
        for a, b in zip(part.leaves, other.leaves, strict=True):
            if isinstance(a, _Leaf) and isinstance(b, _Leaf) and a.kind == b.kind:
                self.pairs[a.index] = b.index
            elif isinstance(a, _Leaf):
                self.changed.add(a.index)


def _kinds(part: _Part) -> list[Any]:
    return [x.kind if isinstance(x, _Leaf) else ("static", x) for x in part.leaves]


def _leaves_by_id(fixed: Fixed, tree: Any, arrays: Sequence[Any]) -> dict[int, _Leaf]:
    """``id`` of each leaf that represents an array -> the array."""
    static = {k for k, _ in fixed.leaves}
    held = [x for k, x in enumerate(jax.tree.leaves(tree)) if k not in static]
    return {
        id(x): _Leaf(k, (tuple(struct.shape), str(struct.dtype)))
        for k, (x, struct) in enumerate(zip(held, arrays, strict=True))
    }


def _part(name: str, depth: int, tree: Any, numbers: Mapping[int, _Leaf]) -> _Part:
    held, structure = jax.tree.flatten(tree)
    leaves = tuple(numbers.get(id(x), x) for x in held)
    return _Part(name, depth, tree, numbers, structure, leaves)


def _children(part: _Part) -> list[_Part]:
    tree = part.tree
    keyed, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    return [
        _part(_name(path), part.depth + 1, child, part.numbers) for path, child in keyed
    ]


def _name(path: Any) -> str:
    if isinstance(path[-1], jax.tree_util.SequenceKey):
        return ""
    return jax.tree_util.keystr(path, simple=True)


def _parts(part: _Part) -> Iterator[_Part]:
    """A tree and its parts, each part before the parts inside it."""
    queue = collections.deque([part])
    while queue:
        part = queue.popleft()
        yield part
        if not part.is_array and part.leaves:
            queue.extend(_children(part))


def _object_arrays(tree: Any, numbers: Mapping[int, _Leaf]) -> _ObjectArrays:
    """Yields the path and the array of every leaf of NNX objects in a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_object_state)
    for path, held in keyed:
        if is_object_state(held):
            inner, _ = jax.tree_util.tree_flatten_with_path(held)
            known = ((path + more, numbers.get(id(x))) for more, x in inner)
            yield from ((at, leaf) for at, leaf in known if leaf is not None)
