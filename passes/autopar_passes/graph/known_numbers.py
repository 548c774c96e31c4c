"""The integers of a program that depend on none of its inputs, and facts of others.

Only integers of indices are meant, such as the numbers of rows or their quotients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar_passes.program.equal_leaves import ELEMENTWISE
from autopar_passes.program.equations import Atom, Equation, Program, Scalar

# Operators that return their operands.
SAME = frozenset({"copy", "copy_p", "optimization_barrier"})
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
# The most operators between a value and those that show how it was made.
_DEPTH = 64
# The most elements of a known array that the module computes.
_MOST_KNOWN = 1 << 24

_UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "sign": np.sign, "not": np.logical_not,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum,
    "min": np.minimum, "rem": np.fmod, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip


class KnownNumbers:
    """The values of a program that are known, equal to others, or not negative.

    Equations have to be classified in the order of the program.

    Attributes:
      program: the program.
      maker: value -> the equation that makes it.
      constants: value that is known -> its elements. A dimension along which they are
        equal may have size 1.
    """

    def __init__(self, program: Program) -> None:
        """Starts without known values."""
        self.program = program
        self.maker = {v: e for e in program.by_index().values() for v in e.outputs}
        self.constants: dict[int, np.ndarray | None] = {}
        # Equal layers compute equal numbers. So each result is computed once, for the
        # same arrays as operands, which the table keeps alive.
        self.results: dict[Any, tuple[list[np.ndarray], np.ndarray | None]] = {}
        # Input of a loop's body -> the value outside that it equals in all iterations.
        self.outside: dict[int, Atom] = {}
        # Values that depend on no input.
        self.fixed: set[int] = set()
        # Value -> the first value with the same elements.
        self.same: dict[int, int] = {}
        self.forms: dict[Any, int] = {}

    def set_known(self, value: int, elements: np.ndarray) -> None:
        """Records the elements of a value that depends on no input."""
        self.constants[value] = elements
        self.fixed.add(value)

    def enter(self, atom: Atom, value: int) -> None:
        """Records that an input of a body equals a value outside of the loop."""
        self.outside[value] = atom
        if isinstance(atom, Scalar) or atom in self.fixed:
            self.fixed.add(value)
        if isinstance(atom, int):
            self.same[value] = self.same.get(atom, atom)

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """The shape of a value or a scalar."""
        return () if isinstance(atom, Scalar) else self.program.values[atom].shape

    def maker_of(self, atom: Atom) -> Equation | None:
        """The equation that makes a value; None for inputs and scalars."""
        return self.maker.get(atom) if isinstance(atom, int) else None

    def classify(self, eqn: Equation) -> None:
        """Records whether results depend on inputs, and which values equal them."""
        if eqn.regions or eqn.source.effects:
            return
        if all(isinstance(a, Scalar) or a in self.fixed for a in eqn.inputs):
            self.fixed.update(eqn.outputs)
        if eqn.primitive in SAME:
            for atom, value in zip(eqn.inputs, eqn.outputs, strict=True):
                if isinstance(atom, int):
                    self.same[value] = self.same.get(atom, atom)
            return
        read = tuple(
            str(a.value) if isinstance(a, Scalar) else self.same.get(a, a)
            for a in eqn.inputs
        )
        params = repr(sorted(eqn.params.items(), key=lambda item: item[0]))
        for slot, value in enumerate(eqn.outputs):
            form = (eqn.primitive, params, read, slot)
            self.same[value] = self.forms.setdefault(form, value)

    def numbers_of(self, atom: Atom) -> np.ndarray | None:
        """The elements of a value that depends on no input; dims of size 1 if equal."""
        if isinstance(atom, Scalar):
            return np.asarray(atom.value)
        if atom not in self.fixed:
            return None
        if atom not in self.constants:
            eqn = self.maker.get(atom)
            if atom in self.outside:
                self.constants[atom] = self.numbers_of(self.outside[atom])
            else:
                self.constants[atom] = None if eqn is None else self.compute(eqn, {})
        return self.constants[atom]

    def compute(
        self, eqn: Equation, table: Mapping[int, np.ndarray | None]
    ) -> np.ndarray | None:
        """Computes a result from known numbers; None if they are not all known.

        Args:
          eqn: the equation.
          table: values that count as known, with their elements.
        """
        of = self.program.values[eqn.outputs[0]]
        if eqn.primitive == "iota":
            at, size = eqn.params["dimension"], of.shape[eqn.params["dimension"]]
            shape = [1] * len(of.shape)
            shape[at] = size
            if size > _MOST_KNOWN:
                return None
            key = ("iota", tuple(shape))
            if key not in self.results:
                self.results[key] = [], np.arange(size).reshape(shape)
            return self.results[key][1]
        given: list[np.ndarray] = []
        for atom in eqn.inputs:
            if isinstance(atom, int) and atom in table:
                found = table[atom]
            else:
                found = self.numbers_of(atom)
            if found is None:
                return None
            given.append(found)
        if not given:
            return None
        shapes = [self.shape(a) for a in eqn.inputs]
        read = tuple(
            str(a.value) if isinstance(a, Scalar) else id(g)
            for a, g in zip(eqn.inputs, given, strict=True)
        )
        key = (eqn.primitive, repr(eqn.params), read, tuple(shapes), of.shape)
        if key not in self.results:
            self.results[key] = given, _evaluate(eqn, given, shapes, of.shape)
        return self.results[key][1]

    def is_uniform(self, atom: Atom, dim: int, depth: int = _DEPTH) -> bool:
        """Whether all entries of a value along a dimension are equal."""
        shape = self.shape(atom)
        if not shape or shape[dim] == 1:
            return True
        known = self.numbers_of(atom)
        if known is not None:
            return is_uniform(known, dim)
        if isinstance(atom, int) and atom in self.outside and depth:
            return self.is_uniform(self.outside[atom], dim, depth - 1)
        eqn = self.maker_of(atom)
        if eqn is None or not depth:
            return False
        if eqn.primitive == "broadcast_in_dim":
            dims = eqn.params["broadcast_dimensions"]
            if dim not in dims:
                return True
            return self.is_uniform(eqn.inputs[0], dims.index(dim), depth - 1)
        if eqn.primitive == "optimization_barrier":
            atom = eqn.inputs[eqn.outputs.index(atom)]
            return self.is_uniform(atom, dim, depth - 1)
        return eqn.primitive in ELEMENTWISE and all(
            self.is_uniform(a, dim, depth - 1)
            for a in eqn.inputs
            if self.shape(a) == shape
        )

    def number_of(
        self, atom: Atom, *, spread: bool = False, natural: bool = False
    ) -> int:
        """A number that is equal for values with the same elements in the same order.

        Two computations of a value have the same number, such as one in the forward
        pass and one in a layer that is computed again.

        Args:
          atom: the value.
          spread: whether a broadcast counts as the value that it repeats, and sorted
            keys as the keys.
          natural: whether an operator counts as its operand that leaves natural numbers
            as they are.
        """
        while isinstance(atom, int):
            eqn = self.maker.get(atom)
            if eqn is None:
                break
            plain = eqn.primitive in _RESHAPES or eqn.primitive in ("copy", "copy_p")
            if eqn.primitive == "convert_element_type":
                plain = np.dtype(eqn.params["new_dtype"]).kind in "iu"
            if spread and eqn.primitive in ("broadcast_in_dim", "sort"):
                plain = eqn.outputs[0] == atom
            if plain:
                atom = eqn.inputs[0]
            elif eqn.primitive == "optimization_barrier":
                atom = eqn.inputs[eqn.outputs.index(atom)]
            elif natural and (kept := self.kept_natural(eqn)) is not None:
                atom = kept
            else:
                break
        return -1 if isinstance(atom, Scalar) else self.same.get(atom, atom)

    def kept_natural(self, eqn: Equation) -> Atom | None:
        """The operand whose natural numbers an operator returns; None if there is none.

        Such operators wrap or clip indices that are negative.
        """
        if eqn.primitive == "max":
            for a, b in (eqn.inputs, eqn.inputs[::-1]):
                known = self.numbers_of(b)
                if known is not None and not np.any(known):
                    return a
        if eqn.primitive == "select_n" and len(eqn.inputs) == 3:
            test = self.maker_of(eqn.inputs[0])
            if test is not None and test.primitive == "lt":
                known = self.numbers_of(test.inputs[1])
                same = test.inputs[0] == eqn.inputs[1]
                if same and known is not None and not np.any(known):
                    return eqn.inputs[1]
        return None

    def is_natural(self, atom: Atom, depth: int = _DEPTH) -> bool:
        """Whether all elements of a value are known to be integers of at least 0."""
        if isinstance(atom, Scalar):
            return bool(atom.value >= 0)
        if np.dtype(self.program.values[atom].dtype).kind == "u":
            return True
        if atom in self.outside and depth:
            return self.is_natural(self.outside[atom], depth - 1)
        eqn = self.maker.get(atom)
        if eqn is None or not depth:
            return False

        def natural(a: Atom) -> bool:
            return self.is_natural(a, depth - 1)

        match eqn.primitive:
            case "argmax" | "argmin" | "iota":
                return True
            case "top_k":
                return eqn.outputs.index(atom) == 1
            case "max":
                return any(map(natural, eqn.inputs))
            case "optimization_barrier":
                return natural(eqn.inputs[eqn.outputs.index(atom)])
            case "rem" | "clamp" | "gather" | "dynamic_slice":
                return natural(eqn.inputs[0])
            case "convert_element_type" if self.shape(atom) and not _wraps(eqn):
                return natural(eqn.inputs[0])
            case "select_n" | "add" | "mul" | "min" | "concatenate":
                return all(map(natural, eqn.inputs[eqn.primitive == "select_n" :]))
            case kind if kind in _RESHAPES | {
                "copy", "broadcast_in_dim", "slice", "transpose", "reduce_max",
            }:  # fmt: skip
                return natural(eqn.inputs[0])
            case _:
                known = self.numbers_of(atom)
                return known is not None and bool(np.all(known >= 0))

    def is_below(self, atom: Atom, limit: int, depth: int = _DEPTH) -> bool:
        """Whether all elements are known to be less than a limit.

        Args:
          atom: integers that are at least 0 (`is_natural`).
          limit: the limit.
          depth: the most operators to follow.
        """
        known = self.numbers_of(atom)
        if known is not None:
            return bool(np.all(known < limit))
        if isinstance(atom, int) and atom in self.outside and depth:
            return self.is_below(self.outside[atom], limit, depth - 1)
        eqn = self.maker_of(atom)
        if eqn is None or not depth:
            return False

        def below(a: Atom) -> bool:
            return self.is_below(a, limit, depth - 1)

        shape = self.shape(eqn.inputs[0]) if eqn.inputs else ()
        match eqn.primitive:
            case "argmax" | "argmin":
                return math.prod(shape[int(d)] for d in eqn.params["axes"]) <= limit
            case "top_k":
                axis = int(eqn.params.get("axis", -1))
                return eqn.outputs.index(atom) == 1 and shape[axis] <= limit
            case "optimization_barrier":
                return below(eqn.inputs[eqn.outputs.index(atom)])
            case "convert_element_type" if not _wraps(eqn):
                return below(eqn.inputs[0])
            case kind if kind in _RESHAPES | {
                "copy", "broadcast_in_dim", "slice", "transpose",
            }:  # fmt: skip
                return below(eqn.inputs[0])
            case _:
                return False


def _wraps(eqn: Equation) -> bool:
    """Whether a conversion may make a negative integer of a natural number."""
    (given,) = eqn.source.invars[:1]
    before, after = np.dtype(given.aval.dtype), np.dtype(eqn.params["new_dtype"])
    return before.kind not in "iub" or before.itemsize > after.itemsize


def is_uniform(known: np.ndarray, dim: int) -> bool:
    """Whether all elements along a dimension are equal."""
    return known.ndim == 0 or bool(np.all(known == known.take([0], dim)))


def _evaluate(
    eqn: Equation,
    given: Sequence[np.ndarray],
    shapes: Sequence[tuple[int, ...]],
    made: tuple[int, ...],
) -> np.ndarray | None:
    """Computes an equation on known integers, in which equal dims have size 1."""
    kind, first = eqn.primitive, given[0]
    size = math.prod(
        max(sizes, default=1)
        for sizes in zip(*(g.shape for g in given if g.ndim), strict=True)
    )
    if size > _MOST_KNOWN:
        return None
    if kind in _UNARY:
        return _UNARY[kind](first)
    if kind in _BINARY:
        return _BINARY[kind](*given)
    match kind:
        case "copy" | "copy_p":
            return first
        case "convert_element_type":
            return first.astype(np.dtype(eqn.params["new_dtype"]))
        case "div" if all(g.dtype.kind in "iu" for g in given) and np.all(
            given[1] != 0
        ):
            return (
                (np.abs(first) // np.abs(given[1])) * np.sign(first) * np.sign(given[1])
            )
        case "select_n" if len(given) == 3:
            return np.where(given[0], given[2], given[1])
        case "clamp":
            return np.clip(given[1], given[0], given[2])
        case "broadcast_in_dim":
            shape = [1] * len(made)
            for d, at in enumerate(eqn.params["broadcast_dimensions"]):
                shape[at] = first.shape[d]
            return first.reshape(shape)
        case "squeeze":
            return np.squeeze(first, tuple(eqn.params["dimensions"]))
        case "expand_dims":
            return np.expand_dims(first, tuple(eqn.params["dimensions"]))
        case "reshape":
            if math.prod(made) > _MOST_KNOWN:
                return None
            if [n for n in shapes[0] if n > 1] == [n for n in made if n > 1]:
                left = iter([first.shape[d] for d, n in enumerate(shapes[0]) if n > 1])
                return first.reshape([next(left) if n > 1 else 1 for n in made])
            return np.broadcast_to(first, shapes[0]).reshape(made)
        case "concatenate":
            at = eqn.params["dimension"]
            whole = [max(s) for s in zip(*(g.shape for g in given), strict=True)]
            parts: list[np.ndarray] = []
            for g, own in zip(given, shapes, strict=True):
                shape = [own[d] if d == at else n for d, n in enumerate(whole)]
                parts.append(np.broadcast_to(g, shape))
            return np.concatenate(parts, at)
        case _:
            return None
