"""Finds equations that are equal but for the small arrays that they work on."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from autopar_passes.program.equations import Atom, Equation, Program, Scalar

# The fewest equations that are worth it: compilers take 5 ms for a kernel, so that
# fewer take seconds at most.
LEAST = 256
# The largest array that is stacked, in bytes: copying one takes less time than starting
# one kernel does.
MOST_BYTES = 1 << 16
# fmt: off
_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})
_SHAPED = frozenset({
    "argmax", "argmin", "broadcast_in_dim", "dot_general", "expand_dims", "reduce_and",
    "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reshape",
    "squeeze", "transpose",
})
# fmt: on
_SUMS = frozenset({"add", "add_any"})


class AdditionTree:
    """Additions whose terms are read by nothing else than their sum."""

    def __init__(self, root: int, links: list[int], terms: list[Atom]) -> None:
        """Has the positions of the last addition and of the others, and the terms."""
        self.root = root
        self.links = links
        self.terms = terms


class EqualEquations:
    """Equal equations: their positions, and what each operand of them is.

    A column is the atom that all of them read, or a tuple of the values that each does.
    """

    def __init__(
        self, members: list[int], columns: list[Atom | tuple[int, ...]]
    ) -> None:
        """Splits the rows into blocks."""
        self.members = members
        self.columns = columns
        self.blocks = _blocks(len(members))

    def block(self, row: int) -> int:
        """The number of the block that a row is in."""
        return row // len(self.blocks[0])


class EqualGroups:
    """Finds equal equations from the end of a program on.

    Two equations are alike where they do the same, and equations that are alike read
    their results. Then the longest way from each to the end is equally long, and none
    needs another's result.
    """

    def __init__(self, program: Program) -> None:
        """Finds the groups of a program without effects."""
        self.values = program.values
        self.equations = program.body.equations
        self.outputs = program.body.outputs
        self.inputs = frozenset(program.body.inputs)
        self.readers = self._readers()
        self.sums = self._sums()
        self.linked = {k: s for s in self.sums for k in (*s.links, s.root)}
        # A value that is equal to another one -> that one.
        self.same: dict[int, int] = {}
        # Positions of equations that only make such values.
        self.repeated: set[int] = set()
        # Value of a member -> its group, its row and its number among the results.
        self.row_of: dict[int, tuple[EqualEquations, int, int]] = {}
        self.groups: list[EqualEquations] = []
        for members in self._alike():
            self._take(members)

    def _readers(self) -> dict[int, list[tuple[int, int]]]:
        """Who reads a value: (position, slot), -1 for the results."""
        found: dict[int, list[tuple[int, int]]] = {}
        for k, eqn in enumerate(self.equations):
            for slot, atom in enumerate(eqn.inputs):
                if isinstance(atom, int):
                    found.setdefault(atom, []).append((k, slot))
        for atom in self.outputs:
            if isinstance(atom, int):
                found.setdefault(atom, []).append((-1, 0))
        return found

    def _sums(self) -> list[AdditionTree]:
        """The sums of at least `LEAST` terms."""
        found: list[AdditionTree] = []
        link: set[int] = set()
        for k in range(len(self.equations) - 1, -1, -1):
            if k in link or not self._adds(k):
                continue
            made, terms = list[int](), list[Atom]()
            open_ = list(self.equations[k].inputs)
            while open_:
                atom = open_.pop()
                at = self._link(atom, k)
                if at is None:
                    terms.append(atom)
                else:
                    made.append(at)
                    open_.extend(self.equations[at].inputs)
            link.update(made)
            if len(terms) >= LEAST:
                found.append(AdditionTree(k, made, terms))
        return found

    def _link(self, atom: Atom, root: int) -> int | None:
        """The addition that makes a term for a sum alone; None: no addition does."""
        if isinstance(atom, Scalar) or len(self.readers[atom]) > 1:
            return None
        at = self.maker.get(atom)
        return at if at is not None and self._adds(at, like=root) else None

    @functools.cached_property
    def maker(self) -> dict[int, int]:
        """The position of the equation that makes a value."""
        return {v: k for k, eqn in enumerate(self.equations) for v in eqn.outputs}

    def _adds(self, position: int, like: int | None = None) -> bool:
        eqn = self.equations[position]
        if eqn.primitive not in _SUMS:
            return False
        made = self.values[eqn.outputs[0]]
        if like is not None and made != self.values[self.equations[like].outputs[0]]:
            return False
        shape = made.shape
        return all(
            self.values[a].shape == shape if isinstance(a, int) else not shape
            for a in eqn.inputs
        )

    def _alike(self) -> Iterable[list[int]]:
        """The positions of equal equations, those that others read first."""
        kinds: dict[Any, int] = {}
        forms: dict[Any, int] = {}
        form = [forms.setdefault((v.shape, v.dtype), len(forms)) for v in self.values]
        colors: list[int] = [0] * len(self.equations)
        heights: list[int] = [0] * len(self.equations)
        found: dict[int, list[int]] = {}
        for k in range(len(self.equations) - 1, -1, -1):
            eqn = self.equations[k]
            root = self.linked[k].root if k in self.linked else k
            if root != k:
                colors[k], heights[k] = colors[root], heights[root]
                continue
            read = [
                [
                    (-1, form[v]) if at < 0 else (colors[at], self._slot(at, slot))
                    for at, slot in self.readers.get(v, ())
                ]
                for v in eqn.outputs
            ]
            ends = [at for v in eqn.outputs for at, _ in self.readers.get(v, ())]
            heights[k] = 1 + max((heights[at] for at in ends if at >= 0), default=0)
            key: Any = ("alone", k)
            if k not in self.linked and self._may_stack(eqn):
                operands = tuple(
                    (str(a.aval.dtype), str(a.value))
                    if isinstance(a, Scalar)
                    else form[a]
                    for a in eqn.inputs
                )
                uses = tuple(tuple(sorted(x)) for x in read)
                key = (eqn.primitive, _parameters(eqn), operands, uses)
            colors[k] = kinds.setdefault(key, len(kinds) + 1)
            found.setdefault(colors[k], []).append(k)
        many = [sorted(x) for x in found.values() if len(x) >= LEAST]
        return sorted(many, key=lambda x: (-heights[x[0]], x))

    def _slot(self, position: int, slot: int) -> int:
        """The slot of a reader; all terms of a sum are in one."""
        return 0 if position in self.linked else slot

    def _may_stack(self, eqn: Equation) -> bool:
        if eqn.primitive not in _ELEMENTWISE | _SHAPED or eqn.regions:
            return False
        made = [self.values[v] for v in eqn.outputs]
        return all(v.nbytes <= MOST_BYTES and not v.name for v in made)

    def _take(self, members: list[int]) -> None:
        """Makes equal equations a group, where their operands can be stacked."""
        equations = [self.equations[k] for k in members]
        columns = [
            tuple(self.same.get(a, a) if isinstance(a, int) else a for a in column)
            for column in zip(*(e.inputs for e in equations), strict=True)
        ]
        varied = [
            j
            for j, column in enumerate(columns)
            if isinstance(column[0], int) and len(set(column)) > 1
        ]
        if not varied:
            for eqn in equations[1:]:
                self.same.update(zip(eqn.outputs, equations[0].outputs, strict=True))
            self.repeated.update(members[1:])
            return
        elementwise = equations[0].primitive in _ELEMENTWISE
        homes = [self._home(columns[j]) for j in varied]
        small = all(self.values[columns[j][0]].nbytes <= MOST_BYTES for j in varied)
        if not small or not (elementwise or all(h is not None for h in homes)):
            return
        # Rows lie as in what a group reads, so that nothing is put in another order.
        rows = range(len(members))
        first = next((j for j, h in zip(varied, homes, strict=True) if h), varied[0])
        within = [self.row_of.get(v, (None, v, 0))[1] for v in columns[first]]
        order = sorted(rows, key=within.__getitem__)
        group = EqualEquations(
            [members[i] for i in order],
            [
                tuple(column[i] for i in order) if j in varied else column[0]
                for j, column in enumerate(columns)
            ],
        )
        self.groups.append(group)
        for row, k in enumerate(group.members):
            for number, value in enumerate(self.equations[k].outputs):
                self.row_of[value] = (group, row, number)

    def _home(self, column: Sequence[Any]) -> EqualEquations | bool | None:
        """The group that makes a column; False: arguments; None: neither."""
        if all(v in self.inputs for v in column):
            return False
        homes = {self.row_of.get(v, (None,))[0] for v in column}
        return homes.pop() if len(homes) == 1 else None


def _parameters(eqn: Equation) -> Any:
    items = tuple(sorted(eqn.params.items()))
    try:
        hash(items)
    except TypeError:
        return repr(items)
    return items


def _blocks(rows: int) -> list[range]:
    """Blocks of rows, all of one size if a divisor is near the best one.

    Compilers make one kernel of all equal blocks, but one of each row that they take
    out of a block: blocks about as large as they are many make the fewest kernels.
    """
    best = math.isqrt(rows)
    sizes = range(best * 3 // 4, best * 3 // 2 + 1)
    size = min(sizes, key=lambda size: (rows % size > 0, abs(size - best)))
    return [range(k, min(k + size, rows)) for k in range(0, rows, size)]
