"""Combines equal operations on hundreds of small arrays into operations on stacks.

A compiler needs time for each operation, and its programs cannot express "the same
update of 5,000 arrays". This pass finds equations that are equal except for the arrays
that they read, and that do not depend on each other. The pass replaces blocks of such
equations by one equation with an additional leading dimension, as ``jax.vmap`` would.
Arguments are stacked before their first use, and results of the program are unstacked.
A sum of many terms first sums the terms of each block, and then adds the blocks' sums.
"""

from __future__ import annotations

import collections
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    Value,
    reads,
)
from autopar_passes.program.flatten import (
    Builder,
    flatten,
    renumber_equation,
    renumber_region,
)

# The smallest number of equations to combine. Compilers need about 5 ms per kernel, so
# fewer equations cost only a few seconds.
LEAST = 256
# The largest array that is stacked, in bytes. Copying such an array takes less time
# than starting a kernel.
MOST_BYTES = 1 << 16
# fmt: off
ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})
SHAPED = frozenset({
    "argmax", "argmin", "broadcast_in_dim", "dot_general", "expand_dims", "reduce_and",
    "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reshape",
    "squeeze", "transpose",
})
# fmt: on
_SUMS = frozenset({"add", "add_any"})


class AdditionTree:
    """A tree of additions whose intermediate sums have no other readers."""

    def __init__(self, root: int, links: list[int], terms: list[Atom]) -> None:
        """Stores the positions of the last and the other additions, and the terms."""
        self.root = root
        self.links = links
        self.terms = terms


class EqualEquations:
    """Equal equations as a table: one row per equation, one column per operand.

    A column is either a single atom, if all equations read the same, or a tuple with
    the value that each equation reads.
    """

    def __init__(
        self, members: list[int], columns: list[Atom | tuple[int, ...]]
    ) -> None:
        """Splits the rows into blocks."""
        self.members = members
        self.columns = columns
        self.blocks = _blocks(len(members))

    def block(self, row: int) -> int:
        """Returns the number of the block that contains a row."""
        return row // len(self.blocks[0])


class EqualGroups:
    """Finds groups of equal equations, from the end of a program to its beginning.

    Two equations are equal if they compute the same function and their results are read
    by equal equations. The longest paths from both equations to the end of the program
    then have equal lengths, so neither equation depends on the other.
    """

    def __init__(self, program: Program) -> None:
        """Finds the groups of a program without side effects."""
        self.values = program.values
        self.equations = program.body.equations
        self.outputs = program.body.outputs
        self.inputs = frozenset(program.body.inputs)
        self.readers = self._readers()
        self.sums = self._sums()
        self.linked = {k: s for s in self.sums for k in (*s.links, s.root)}
        # Maps a value that duplicates an earlier value to the earlier value.
        self.same: dict[int, int] = {}
        # Positions of equations all of whose results duplicate earlier values.
        self.repeated: set[int] = set()
        # Result of an equation in a group -> the group, the equation's row, and the
        # result's position among the equation's results.
        self.row_of: dict[int, tuple[EqualEquations, int, int]] = {}
        self.groups: list[EqualEquations] = []
        for members in self._alike():
            self._take(members)

    def _readers(self) -> dict[int, list[tuple[int, int]]]:
        """Value -> its readers, as (position, slot); the caller's position is -1."""
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
        """Returns the sums of at least `LEAST` terms."""
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
        """The addition that computes a sum's term, if nothing else reads the term."""
        if isinstance(atom, Scalar) or len(self.readers[atom]) > 1:
            return None
        at = self.maker.get(atom)
        return at if at is not None and self._adds(at, like=root) else None

    @functools.cached_property
    def maker(self) -> dict[int, int]:
        """The position of the equation that computes a value."""
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
        """Groups of positions of equal equations; a group comes before its readers."""
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
        """Returns the slot of a reader's operand; terms of a sum share one slot."""
        return 0 if position in self.linked else slot

    def _may_stack(self, eqn: Equation) -> bool:
        if eqn.primitive not in ELEMENTWISE | SHAPED or eqn.regions:
            return False
        made = [self.values[v] for v in eqn.outputs]
        return all(v.nbytes <= MOST_BYTES and not v.name for v in made)

    def _take(self, members: list[int]) -> None:
        """Makes equal equations a group if their operands can be stacked."""
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
        elementwise = equations[0].primitive in ELEMENTWISE
        homes = [self._home(columns[j]) for j in varied]
        small = all(self.values[columns[j][0]].nbytes <= MOST_BYTES for j in varied)
        if not small or not (elementwise or all(h is not None for h in homes)):
            return
        # The rows have the order of a group whose results they read, so that no rows
        # are permuted.
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
        """The group whose rows compute a column; False if all its values are arguments.

        The result is None for any other column.
        """
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
    """Divides rows into blocks, all of one size if a divisor is near the best size.

    Compilers generate one kernel for all equal blocks, and one kernel for each row that
    is taken out of a block. The number of kernels is smallest if the size of a block is
    about the number of blocks.
    """
    best = math.isqrt(rows)
    sizes = range(best * 3 // 4, best * 3 // 2 + 1)
    size = min(sizes, key=lambda size: (rows % size > 0, abs(size - best)))
    return [range(k, min(k + size, rows)) for k in range(0, rows, size)]


def stacked_leaves(program: Program) -> Program:
    """Returns the program in which equal equations on small arguments run in blocks.

    Args:
      program: a flat program.

    Returns:
      The program, unchanged if fewer than `LEAST` small arguments have equal types.
    """
    arguments = program.body.inputs[: program.num_arguments]
    alike = collections.Counter(
        (v.shape, v.dtype)
        for v in map(program.values.__getitem__, arguments)
        if v.nbytes <= MOST_BYTES and not jax_compat.is_extended(v.dtype)
    )
    if max(alike.values(), default=0) < LEAST:
        return program
    if any(eqn.source.effects for eqn in program.body.equations):
        return program
    found = EqualGroups(program)
    if not found.groups:
        return program
    return _BlockRewriter(program, found).program()


class _BlockRewriter:
    """Writes a new program in which each group of equal equations runs in blocks."""

    def __init__(self, program: Program, found: EqualGroups) -> None:
        self.old = program
        self.found = found
        self.builder = Builder(program.values, 0)
        # Value of the old program -> the value of the new program.
        self.held: dict[int, Atom] = {v: v for v in program.body.inputs}
        # Pair of a group and a block's number -> the stacked results of the block.
        self.stacks: dict[tuple[int, int], list[Atom]] = {}
        self.stacked: dict[tuple[int, ...], int] = {}
        self.templates: dict[Any, Program] = {}
        # Last addition of a sum -> the groups whose rows are all terms of this sum.
        self.whole = {s.root: self._groups_of(s) for s in found.sums}

    def program(self) -> Program:
        """Returns the program in blocks, with new numbers of values and equations."""
        for node in self._ordered_writes():
            node()
        outputs = [self._now(a) for a in self.old.body.outputs]
        body = Region(
            self.old.body.inputs, tuple(self.builder.equations), tuple(outputs)
        )
        return _compact(Program(tuple(self.builder.values), body, self.old.constants))

    def _ordered_writes(self) -> list[Callable[[], None]]:
        """Functions that each write equations, in the old order as far as possible."""
        nodes: list[tuple[int, Callable[[], None], Sequence[Any], Iterable[int]]] = []
        equations, found = self.old.body.equations, self.found
        grouped = {k for group in found.groups for k in group.members}
        rewritten = {s.root: s for s in found.sums if self.whole[s.root]}
        inside = {k for s in rewritten.values() for k in (*s.links, s.root)}
        for k, eqn in enumerate(equations):
            if k in grouped or k in found.repeated:
                continue
            if k in rewritten:
                write = functools.partial(self._sum, rewritten[k])
                nodes.append((k, write, rewritten[k].terms, eqn.outputs))
            elif k not in inside:
                write = functools.partial(self._alone, eqn)
                nodes.append((k, write, reads(eqn), eqn.outputs))
        for group in found.groups:
            for number, rows in enumerate(group.blocks):
                members = [group.members[i] for i in rows]
                read = [
                    a
                    for c in group.columns
                    for a in (
                        c[rows.start : rows.stop] if isinstance(c, tuple) else [c]
                    )
                ]
                made = [v for k in members for v in equations[k].outputs]
                write = functools.partial(self._block, group, number)
                nodes.append((min(members), write, read, made))
        return _topological(nodes, found.same)

    def _groups_of(self, found: AdditionTree) -> set[int]:
        """Returns the ids of the groups with exactly one term of a sum in every row."""
        counts = collections.Counter[int](a for a in found.terms if isinstance(a, int))
        homes = [self.found.row_of[v] for v in counts if v in self.found.row_of]
        rows = collections.Counter((id(group), number) for group, _, number in homes)
        if any(n > 1 for n in counts.values()):
            return set()
        return {
            id(group)
            for group, _, number in homes
            if rows[id(group), number] == len(group.members)
        }

    def _now(self, atom: Atom) -> Atom:
        """Returns the new program's value of an atom.

        If the value is a row of a stack, it is first taken out of the stack.
        """
        if isinstance(atom, Scalar):
            return atom
        atom = self.found.same.get(atom, atom)
        if atom not in self.held:
            group, row, number = self.found.row_of[atom]
            block = group.block(row)
            self._take_apart(group, block, number)
        return self.held[atom]

    def _take_apart(self, group: EqualEquations, block: int, number: int) -> None:
        rows = group.blocks[block]
        stack = self.stacks[id(group), block][number]
        members = [self.old.body.equations[group.members[i]] for i in rows]
        assert isinstance(stack, int)
        made = self._call(("apart",), _apart, [stack], members[0].name_stack)
        for eqn, value in zip(members, made, strict=True):
            self.held[eqn.outputs[number]] = value

    def _stack(self, values: tuple[int, ...], name_stack: str) -> int:
        """Returns the stack of several values of the old program."""
        found = self.found.row_of.get(values[0])
        if found is not None:
            group, row, number = found
            block = group.block(row)
            equations = self.old.body.equations
            held = [
                equations[group.members[i]].outputs[number] for i in group.blocks[block]
            ]
            if tuple(held) == values:
                stack = self.stacks[id(group), block][number]
                assert isinstance(stack, int)
                return stack
        if values not in self.stacked:
            now = [self._now(v) for v in values]
            arrays = [v for v in now if isinstance(v, int)]
            assert len(arrays) == len(now)
            made = self._call(("stack",), _together, arrays, name_stack)
            self.stacked[values] = made[0]
        return self.stacked[values]

    def _block(self, group: EqualEquations, number: int) -> None:
        """Writes the equations of a block as one equation."""
        rows = group.blocks[number]
        eqn = self.old.body.equations[group.members[rows.start]]
        mapped: list[int | None] = []
        atoms: list[int] = []
        fixed: dict[int, Any] = {}
        for slot, column in enumerate(group.columns):
            if isinstance(column, tuple):
                part = column[rows.start : rows.stop]
                atoms.append(self._stack(part, eqn.name_stack))
                mapped.append(0)
                continue
            now = self._now(column)
            if isinstance(now, Scalar):
                fixed[slot] = now.value
            else:
                atoms.append(now)
                mapped.append(None)

        def one(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            slots = range(len(eqn.inputs))
            operands = [fixed[k] if k in fixed else next(given) for k in slots]
            return jax_compat.bind(eqn.source, *operands)

        def run(*arrays: Any) -> list[Any]:
            with jax_compat.source_of(eqn.source):
                return jax.vmap(one, tuple(mapped))(*arrays)

        key = ("block", id(group), tuple(mapped))
        self.stacks[id(group), number] = self._call(key, run, atoms, eqn.name_stack)

    def _sum(self, found: AdditionTree) -> None:
        """Writes a sum: first over each block, then over the blocks."""
        eqn = self.old.body.equations[found.root]
        whole = self.whole[found.root]
        total: Atom | None = None
        done: set[tuple[int, int]] = set()
        for term in reversed(found.terms):
            home = self.found.row_of.get(term) if isinstance(term, int) else None
            if home is None or id(home[0]) not in whole:
                part = self._now(term)
            else:
                group, row, number = home
                block = group.block(row)
                if (id(group), block) in done:
                    continue
                done.add((id(group), block))
                stack = self.stacks[id(group), block][number]
                assert isinstance(stack, int)
                (part,) = self._call(("sum",), _sum_rows, [stack], eqn.name_stack)
            total = part if total is None else self._add(eqn, total, part)
        assert total is not None
        self.held[eqn.outputs[0]] = total

    def _add(self, eqn: Equation, left: Atom, right: Atom) -> Atom:
        made = self.builder.like(self.builder.values[eqn.outputs[0]])
        number = self.builder.index()
        added = Equation(number, eqn.source, (left, right), (made,), eqn.name_stack)
        self.builder.equations.append(added)
        return made

    def _alone(self, eqn: Equation) -> None:
        """Writes an equation as it is, outside of blocks."""
        for atom in reads(eqn):
            self._now(atom)

        def value(number: int) -> int:
            now = self._now(number) if number in self.outer_values else number
            assert isinstance(now, int)
            return now

        for made in eqn.outputs:
            self.held[made] = made
        self.builder.equations.append(
            renumber_equation(eqn, value, lambda _: self.builder.index())
        )

    @functools.cached_property
    def outer_values(self) -> frozenset[int]:
        """The values of the program outside of its loops."""
        made = (v for eqn in self.old.body.equations for v in eqn.outputs)
        return frozenset((*self.old.body.inputs, *made))

    def _call(
        self,
        key: Any,
        function: Callable[..., Any],
        atoms: Sequence[int],
        name_stack: str,
    ) -> list[Any]:
        """Adds the equations of a function, traced once per type of operands."""
        forms = [self.builder.values[a] for a in atoms]
        key = (*key, tuple((v.shape, v.dtype) for v in forms))
        if key not in self.templates:
            structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in forms]
            self.templates[key] = flatten(jax.make_jaxpr(function)(*structs))
        return self.builder.add(self.templates[key], atoms, name_stack)


def _together(*arrays: Any) -> list[Any]:
    """Stacks arrays along a new first dimension."""
    shape = (len(arrays), *arrays[0].shape)
    long = [x if x.shape else jax.lax.reshape(x, (1,)) for x in arrays]
    return [jax.lax.reshape(jax.lax.concatenate(long, 0), shape)]


def _apart(stack: Any) -> list[Any]:
    """Returns the rows of a stack."""
    rows, shape = stack.shape[0], stack.shape[1:]
    if not shape:
        parts = jax.lax.split(stack, (1,) * rows, 0)
        return [jax.lax.reshape(x, ()) for x in parts]
    long = jax.lax.reshape(stack, (rows * shape[0], *shape[1:]))
    return list(jax.lax.split(long, (shape[0],) * rows, 0))


def _sum_rows(stack: Any) -> list[Any]:
    """Returns the sum of the rows of a stack."""
    return [jnp.sum(stack, axis=0, dtype=stack.dtype)]


def _topological(
    nodes: Sequence[tuple[int, Callable[[], None], Sequence[Any], Iterable[int]]],
    same: dict[int, int],
) -> list[Callable[[], None]]:
    """Orders functions that write equations: values come before their readers."""
    maker = {v: n for n, (_, _, _, made) in enumerate(nodes) for v in made}
    waiting: list[int] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for n, (_, _, atoms, _) in enumerate(nodes):
        read = {same.get(a, a) for a in atoms if isinstance(a, int)}
        needs = {maker[v] for v in read if v in maker}
        waiting.append(len(needs))
        for other in needs:
            readers[other].append(n)
    ready = [(nodes[n][0], n) for n, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[Callable[[], None]] = []
    while ready:
        _, n = heapq.heappop(ready)
        order.append(nodes[n][1])
        for other in readers[n]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (nodes[other][0], other))
    assert len(order) == len(nodes)
    return order


def _compact(program: Program) -> Program:
    """Renumbers the values of a program; drops values that no equation computes."""
    numbers: dict[int, int] = {}
    values: list[Value] = []

    def value(old: int) -> int:
        if old not in numbers:
            numbers[old] = len(values)
            values.append(program.values[old])
        return numbers[old]

    body = renumber_region(program.body, value)
    return Program(tuple(values), body, program.constants)
