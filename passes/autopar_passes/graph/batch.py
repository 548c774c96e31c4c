"""Finds the batch among the inputs of a step: its arrays, and their row dimensions.

The sharding rules of operators tell which dimensions of arrays must be sharded alike.
Such dimensions form a set, such as all dimensions that count heads. Only a set that
occurs in no parameter can be the rows (the examples of the batch). The rows are the set
with the most FLOPs of matrix products in which the set occurs only once. A sequence
dimension, by contrast, occurs twice in attention, and a time dimension occurs in the
loop of a recurrent network. Among sets with equal FLOPs, the rows are the set with the
fewest FLOPs of operators that reduce it, or shift, compare or index it by constants. An
input that is combined with arrays of rows, but has no row dimension, is the same for
all rows: its role is frozen, as a teacher's weights are. There is one exception: an
input whose first dimension has as many entries as there are rows, and whose entries are
selected by row numbers, as in ``x[argsort(n)]``. This input belongs to the batch.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence, Set

import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.graph.operators import (
    BOUNDARIES,
    PRODUCTS,
    GraphInput,
    Operator,
    readers,
)
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.calls import NOT_NAMED, NamedRoles
from autopar_passes.program.equations import Value
from autopar_passes.rules.factor_rule import FactorKind

# Shapes of raw random keys, which have no rows.
_RAW_KEYS = ((2,), (4,))
# Operators whose other operands index the first operand.
_INDEXED = ("gather", "dynamic_slice", "dynamic_update_slice")


def with_batch(
    inputs: Sequence[GraphInput],
    operators: Sequence[Operator],
    roles: Sequence[Role],
    values: Sequence[Value],
    named: NamedRoles = NOT_NAMED,
) -> tuple[GraphInput, ...]:
    """Returns the inputs of a step, with roles for those that it does not return.

    Args:
      inputs: the inputs, in which each input that the step does not return counts as
        batch.
      operators: the operators of the step.
      roles: the roles of the operators.
      values: the values of the program.
      named: the roles that the user has given.
    """
    out = list(inputs)
    open_: dict[int, GraphInput] = {}
    for k, given in enumerate(inputs):
        if given.output >= 0:
            continue
        role = _by_itself(values[given.value], frozen=named.is_frozen(given.path))
        out[k] = dataclasses.replace(given, role=role)
        if role is InputRole.BATCH:
            open_[k] = out[k]
    if not open_:
        return tuple(out)
    forward = [
        op
        for op, role in zip(operators, roles, strict=True)
        if role is Role.FORWARD and op.kind not in ("input", "return")
    ]
    given = [i.value for i in open_.values()]
    data = _descendants(given, operators)
    constant = set(range(len(values))) - _descendants(
        (i.value for i in inputs), operators
    )
    backward = [k for k, role in enumerate(roles) if role is Role.BACKWARD]
    dims = _Dimensions(forward, values)
    apart = _Apart(forward, backward, dims, data, constant)
    state = [i for i in inputs if i.output >= 0]
    trained = [i for i in state if i.role is InputRole.PARAMETER]
    parameters = [i.value for i in trained or state]
    rows = _rows(open_.values(), apart, parameters, named)
    meets = _Meetings(forward, apart, rows, given)
    for k, given in enumerate(out):
        if k in open_:
            out[k] = _with_role(given, meets, named)
        elif given.output >= 0 and given.role is InputRole.OTHER:
            out[k] = dataclasses.replace(given, rows=meets.rows_of(given.value))
    return tuple(out)


def _with_role(given: GraphInput, meets: _Meetings, named: NamedRoles) -> GraphInput:
    """Returns an input with its role and its rows."""
    own, size = tuple(meets.dims.values[given.value].shape), meets.size
    dim = named.dim_of(given.path)
    if dim is None and size > 1:
        dim = meets.dims.position(given.value, meets.rows)
    if dim is None and not named.is_batch(given.path) and meets.frozen(given.value):
        return dataclasses.replace(given, role=InputRole.FROZEN)
    if dim is None:
        dim = own.index(size) if size in own else 0
    unit = own[dim] // size if own[dim] % size == 0 else 0
    turns = meets.turns(given.value, dim)
    return dataclasses.replace(given, rows=dim, unit=unit, turns=turns)


def _by_itself(value: Value, *, frozen: bool) -> InputRole:
    """The role that follows from an input's type or the user's names; else batch."""
    raw = str(value.dtype) == "uint32" and tuple(value.shape) in _RAW_KEYS
    if jax_compat.is_extended(value.dtype) or raw or not value.shape:
        return InputRole.OTHER
    return InputRole.FROZEN if frozen else InputRole.BATCH


def _descendants(values: Iterable[int], operators: Sequence[Operator]) -> set[int]:
    """The values that depend on given values, also through the carries of loops."""
    out, waiting, reads = set[int](), list(values), readers(operators)
    while waiting:
        value = waiting.pop()
        if value not in out:
            out.add(value)
            waiting += (v for op, _ in reads.get(value, ()) for v in op.outputs)
    return out


def _rows(
    given: Iterable[GraphInput],
    apart: _Apart,
    parameters: Sequence[int],
    named: NamedRoles,
) -> int:
    """Finds the set of dimensions that is the rows; -1 if no input has rows."""
    dims = apart.dims
    trained = {c for v in parameters for dim in dims.of(v) for c in dim}
    scores: dict[int, list[float]] = {}
    for i in given:
        known = named.dim_of(i.path)
        for k, dim in enumerate(dims.of(i.value)):
            for found in dim:
                score = scores.setdefault(found, [0.0] * 6)
                score[0] = max(score[0], float(known == k))
                score[1] = float(found not in trained)
                score[2] = apart.products.get(found, 0.0)
                score[3] = -float(found in apart.in_turns)
                if score[2]:  # only compared between sets that occur in products
                    score[4] = -apart.mixed.get(found, 0.0)
                score[5] += dims.nbytes(i.value) / (1 + k)
    return max(scores, key=lambda c: (*scores[c], -c), default=-1)


class _Dimensions:
    """The sets of dimensions that are equal by the rules of a forward pass.

    A dimension consists of one or several sets, major to minor. A reshape that merges
    two dimensions makes a dimension with the sets of the first and of the second.
    """

    def __init__(self, forward: Sequence[Operator], values: Sequence[Value]) -> None:
        self.values = values
        self.size: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}
        self._of: dict[int, list[tuple[int, ...]]] = {}
        self._factors = {op.index: self._join(op) for op in forward}
        loops: dict[int, tuple[int, ...]] = {}
        for op in forward:
            lead = self.lead(op)
            if lead is not None:
                self._unite(loops.setdefault(op.equation, lead), lead)

    def lead(self, op: Operator) -> tuple[int, ...] | None:
        """The sets of the dimension that a loop slices or stacks.

        The result is None for other operators.
        """
        ends = {"slice_step": op.inputs, "stack_step": op.outputs}.get(op.kind)
        return None if not ends or ends[0] is None else self._dims(ends[0])[0]

    def sets(self, op: Operator) -> list[tuple[int, tuple[int, ...]]]:
        """The factors of an operator's rule, each with its sets."""
        return [(f, self.leaves(d)) for f, d in self._factors[op.index].items()]

    def nbytes(self, value: int) -> float:
        return float(self.values[value].nbytes)

    def of(self, value: int) -> list[tuple[int, ...]]:
        """The sets of each dimension of a value."""
        return [self.leaves(dim) for dim in self._dims(value)]

    def position(self, value: int, rows: int) -> int | None:
        """The dimension of a value that contains a set; None if there is none."""
        found = (k for k, dim in enumerate(self.of(value)) if rows in dim)
        return next(found, None)

    def _dims(self, value: int) -> list[tuple[int, ...]]:
        if value not in self._of:
            self._of[value] = [
                (self._new(n),) if n > 1 else () for n in self.values[value].shape
            ]
        return self._of[value]

    def _new(self, size: int) -> int:
        self.size.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def _find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def leaves(self, dim: Sequence[int]) -> tuple[int, ...]:
        out: list[int] = []
        for node in dim:
            root = self._find(node)
            parts = self._parts.get(root)
            out += [root] if parts is None else self.leaves(parts)
        return tuple(out)

    def _join(self, op: Operator) -> dict[int, tuple[int, ...]]:
        """Unites the dimensions that an operator's rule makes one factor."""
        found: dict[int, tuple[int, ...]] = {}
        pairs = [*zip(op.inputs, op.rule.operands, strict=True)]
        pairs += zip(op.outputs, op.rule.results, strict=True)
        for value, rule in pairs:
            if value is None:
                continue
            for dim, factors in zip(self._dims(value), rule, strict=False):
                sizes = [op.rule.sizes[f] for f in factors]
                parts = self._cut(dim, sizes)
                for factor, part in zip(factors, parts, strict=False):
                    if factor in found:
                        self._unite(found[factor], part)
                    else:
                        found[factor] = part
        return found

    def _cut(self, dim: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """The sets of each factor of a dimension; fewer if the sizes do not match."""
        left, out = list(self.leaves(dim)), list[tuple[int, ...]]()
        if len(sizes) == 1:
            return [tuple(left)]
        for size in sizes:
            part: list[int] = []
            while size > 1 and left:
                node = left.pop(0)
                own = self.size[node]
                if own > size:
                    if own % size:
                        return out
                    parts = self._new(size), self._new(own // size)
                    self._parts[node] = parts
                    node, own = parts[0], size
                    left.insert(0, parts[1])
                if size % own:
                    return out
                part.append(node)
                size //= own
            out.append(tuple(part))
        return out

    def _unite(self, one: Sequence[int], other: Sequence[int]) -> None:
        a, b = list(one), list(other)
        while a and b:
            x, y = self._find(a.pop(0)), self._find(b.pop(0))
            if x in self._parts or y in self._parts:
                a, b = [*self.leaves((x,)), *a], [*self.leaves((y,)), *b]
            elif self.size[x] == self.size[y]:
                self._parent[max(x, y)] = min(x, y)
            else:
                large, small = (x, y) if self.size[x] > self.size[y] else (y, x)
                times, left = divmod(self.size[large], self.size[small])
                if left:
                    return
                self._parts[large] = self._new(self.size[small]), self._new(times)
                a, b = [x, *a], [y, *b]


class _Apart:
    """Measures which sets of dimensions keep the examples of a batch apart.

    Attributes:
      dims: the sets.
      products: for each set, FLOPs of the matrix products of batch data that have the
        set in an operand and do not reduce it. A product in which the set only occurs
        twice counts half. A loop without carries keeps the dimension that it slices.
      mixed: for each set, FLOPs of all other operators that reduce the set, or that
        index it by constants.
      sequential: equations of the loops that carry values from iteration to iteration.
      in_turns: sets that are sliced by a loop that contains backward passes, such as a
        loop over microbatches.
    """

    def __init__(
        self,
        forward: Sequence[Operator],
        backward: Sequence[int],
        dims: _Dimensions,
        data: Set[int],
        constant: Set[int],
    ) -> None:
        self.dims, self._backward = dims, backward
        self.products: dict[int, float] = {}
        self.mixed: dict[int, float] = {}
        self.in_turns: set[int] = set()
        self.sequential = {op.equation for op in forward if op.kind == "carry"}
        maps: dict[int, tuple[int, tuple[int, ...]]] = {}
        for op in forward:
            if op.kind == "slice_step" and op.equation not in self.sequential:
                sets = dims.leaves(dims.lead(op) or ())
                maps[op.equation] = op.until, sets
                self.in_turns.update(sets if self.trains(op) else ())
            if op.kind in BOUNDARIES:
                continue
            maps = {k: found for k, found in maps.items() if op.index <= found[0]}
            read = [v for v in op.inputs if v is not None]
            if any(v in data for v in read):
                self._count(op, [sets for _, sets in maps.values()])
            elif all(v in constant for v in read):
                _add(self.mixed, {n for _, part in dims.sets(op) for n in part}, op)

    def trains(self, loop: Operator) -> bool:
        """Whether a loop's body contains a backward pass."""
        first = bisect.bisect(self._backward, loop.index)
        return first < len(self._backward) and self._backward[first] <= loop.until

    def _count(self, op: Operator, maps: Iterable[tuple[int, ...]]) -> None:
        """Adds the FLOPs of an operator to ``products`` or ``mixed`` of its sets."""
        results = {f for dims in op.rule.results for dim in dims for f in dim}
        kept, twice, mixed = {n for sets in maps for n in sets}, set[int](), set[int]()
        for factor, part in self.dims.sets(op):
            if factor not in results or op.rule.kinds[factor] is not FactorKind.PASS:
                mixed.update(part)
            twice |= kept.intersection(part)
            kept.update(part)
        if op.kind in PRODUCTS or op.kernel:
            _add(self.products, kept - mixed - twice, op)
            _add(self.products, twice - mixed, op, 0.5)
        else:
            _add(self.mixed, mixed | twice, op)


def _add(
    total: dict[int, float], sets: Iterable[int], op: Operator, part: float = 1.0
) -> None:
    for found in sets:
        total[found] = total.get(found, 0.0) + part * max(op.flops, 1.0) * op.trips


class _Meetings:
    """Finds the values without rows that an operator combines with values with rows.

    Attributes:
      dims: the sets of dimensions.
      rows: the set that is the rows; -1 if there is none.
      size: the number of rows.
      single: the dimension that is taken as the rows if the batch has one row.
    """

    def __init__(
        self,
        forward: Sequence[Operator],
        apart: _Apart,
        rows: int,
        given: Iterable[int],
    ) -> None:
        self._apart, self.dims, self.rows = apart, apart.dims, rows
        self.readers = readers(forward)
        self.size, self.single = self._size([v for v in given if self._has_rows(v)])
        self._numbers = self._numbers_of_rows(forward)

    def _size(self, given: Sequence[int]) -> tuple[int, int]:
        """The number of rows, and the row dimension of a batch with only one row.

        The largest input tells both.

        No rule names a dimension of size one. If a batch has one row, the row dimension
        is the first dimension, or the dimension after the time dimension of a loop.
        """
        if not given:
            return 1, 0
        once = [v for v in given if sum(self.rows in d for d in self.dims.of(v)) == 1]
        largest = max(once or given, key=self.dims.nbytes)
        dim = self.dims.position(largest, self.rows)
        shape, loop = self.dims.values[largest].shape, self._loop(largest)
        assert dim is not None
        timed = loop is not None and loop.equation in self._apart.sequential
        if timed and dim == 0 and shape[1:2] == (1,):
            return 1, 1
        first = loop is None or not (timed or self._apart.trains(loop))
        return (1 if first and dim and shape[0] == 1 else shape[dim]), 0

    def rows_of(self, value: int) -> int:
        """The dimension of carried state with one entry per row; -1 if none."""
        shape, dim = self.dims.values[value].shape, self.dims.position(value, self.rows)
        return -1 if dim is None or shape[dim] != self.size else dim

    def frozen(self, value: int) -> bool:
        """Whether a value without rows is the same for all rows."""
        shape = self.dims.values[value].shape
        if self.size == 1:
            return shape[self.single : self.single + 1] != (1,)
        seen, waiting, data = {value}, [value], False
        while waiting:
            for op, slot in self.readers.get(waiting.pop(), ()):
                made = [v for v in op.outputs if self._has_rows(v)]
                indexed = op.kind in _INDEXED or op.kind.startswith("scatter")
                taken = indexed and slot == 0 and shape[0] == self.size
                if taken and self._numbers.intersection(op.inputs[1:]):
                    return False
                if made and (slot == 0 or not indexed) and op.kind not in BOUNDARIES:
                    return True
                data = data or bool(made)
                after = [v for v in op.outputs if v not in made and v not in seen]
                seen.update(after)
                waiting += after
        return not data and bool(shape[0] % self.size)

    def _numbers_of_rows(self, forward: Sequence[Operator]) -> set[int]:
        """The integers computed from row numbers, such as the order of a sort."""
        found = set[int]()
        for op in forward:
            for k, value in enumerate(op.outputs):
                # An operator such as a sort maps each operand to its own result.
                read = op.inputs[k : k + 1] if len(op.outputs) > 1 else op.inputs
                read = read[:1] if op.kind in _INDEXED else read
                counted = op.kind == "iota" or not found.isdisjoint(read)
                whole = jnp.issubdtype(self.dims.values[value].dtype, jnp.integer)
                if counted and whole and self._has_rows(value):
                    found.add(value)
        return found

    def _has_rows(self, value: int) -> bool:
        return self.dims.position(value, self.rows) is not None

    def turns(self, value: int, dim: int) -> int:
        """The number of batches or microbatches in the dimensions before the rows."""
        count = 1
        for _ in range(dim):
            loop = self._loop(value)
            if loop is None or not self._apart.trains(loop):
                break
            count *= self.dims.values[value].shape[0]
            value = loop.outputs[0]
        return count

    def _loop(self, value: int) -> Operator | None:
        """The loop that slices a value, if nothing else reads the value."""
        found = [op for op, _ in self.readers.get(value, ())]
        sliced = bool(found) and all(op.kind == "slice_step" for op in found)
        return found[0] if sliced else None
