"""Finds the batch among the inputs of a step: its arrays, and the dimension of rows.

Rules of operators say which dimensions are the same. A set of them that stays apart
through the forward pass and meets no dimension of a parameter is a set of samples; the
rows of the batch are the set that most of the work carries. An array that meets rows
and has none is the same for all of them: it is frozen, as a teacher's weights are.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

from autopar_passes import jax_compat
from autopar_passes.graph.operators import BOUNDARIES, GraphInput, Operator, readers
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.calls import NOT_NAMED, NamedRoles
from autopar_passes.program.equations import Value
from autopar_passes.rules.factor_rule import FactorKind

# Shapes of raw random keys, which are no rows.
_RAW_KEYS = ((2,), (4,))
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# Operators whose first operand is read or written at the places that others name.
_INDEXED = ("gather", "dynamic_slice", "dynamic_update_slice")


def with_batch(
    inputs: Sequence[GraphInput],
    operators: Sequence[Operator],
    roles: Sequence[Role],
    values: Sequence[Value],
    named: NamedRoles = NOT_NAMED,
) -> tuple[GraphInput, ...]:
    """Returns the inputs of a step, those that do not come back with their roles.

    Args:
      inputs: in which whatever does not come back is of the batch.
      operators: of the step.
      roles: of the operators.
      values: of the program.
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
    dims = _Dimensions(forward, values)
    state = [i for i in inputs if i.output >= 0]
    trained = [i for i in state if i.role is InputRole.PARAMETER]
    parameters = [i.value for i in trained or state]
    rows = _rows(open_.values(), dims, parameters, named)
    backward = [k for k, role in enumerate(roles) if role is Role.BACKWARD]
    given = [i.value for i in open_.values()]
    meets = _Meetings(forward, backward, dims, rows, given)
    for k, given in enumerate(out):
        if k in open_:
            out[k] = _found(given, meets, named)
        elif given.output >= 0 and given.role is InputRole.OTHER:
            out[k] = dataclasses.replace(given, rows=meets.rows_of(given.value))
    return tuple(out)


def _found(given: GraphInput, meets: _Meetings, named: NamedRoles) -> GraphInput:
    """An input with its role and rows."""
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
    """The role of an input as its form or the user says; else the batch."""
    raw = str(value.dtype) == "uint32" and tuple(value.shape) in _RAW_KEYS
    if jax_compat.is_extended(value.dtype) or raw or not value.shape:
        return InputRole.OTHER
    return InputRole.FROZEN if frozen else InputRole.BATCH


def _rows(
    given: Iterable[GraphInput],
    dims: _Dimensions,
    parameters: Sequence[int],
    named: NamedRoles,
) -> int:
    """The set of dimensions that are the rows; -1: no input has any."""
    trained = {c for v in parameters for dim in dims.of(v) for c in dim}
    scores: dict[int, list[float]] = {}
    for i in given:
        known = named.dim_of(i.path)
        for k, dim in enumerate(dims.of(i.value)):
            for found in dim:
                score = scores.setdefault(found, [0.0] * 5)
                score[0] = max(score[0], float(known == k))
                score[1] = float(found not in trained)
                score[2] = dims.products.get(found, 0.0)
                score[3] = dims.other.get(found, 0.0)
                score[4] += dims.nbytes(i.value) / (1 + k)
    return max(scores, key=lambda c: (*scores[c], -c), default=-1)


class _Dimensions:
    """The sets of dimensions that the rules of a forward pass say are the same.

    A dimension is made of sets, major to minor: merging two dimensions keeps both.
    """

    def __init__(self, forward: Sequence[Operator], values: Sequence[Value]) -> None:
        self.values = values
        self.size: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}
        self._of: dict[int, list[tuple[int, ...]]] = {}
        factors = [self._join(op) for op in forward]
        # FLOPs of products, and of all else, that carry a set on.
        self.products: dict[int, float] = {}
        self.other: dict[int, float] = {}
        for op, found in zip(forward, factors, strict=True):
            self._count(op, found)

    def nbytes(self, value: int) -> float:
        return float(self.values[value].nbytes)

    def of(self, value: int) -> list[tuple[int, ...]]:
        """The sets of each dimension of a value."""
        return [self._leaves(dim) for dim in self._dims(value)]

    def position(self, value: int, rows: int) -> int | None:
        """The dimension of a value that is a set; None: it has none."""
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

    def _leaves(self, dim: Sequence[int]) -> tuple[int, ...]:
        out: list[int] = []
        for node in dim:
            root = self._find(node)
            parts = self._parts.get(root)
            out += [root] if parts is None else self._leaves(parts)
        return tuple(out)

    def _join(self, op: Operator) -> dict[int, tuple[int, ...]]:
        """Makes dimensions of an operator's values that are one factor the same."""
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
        """The sets of each factor of a dimension; fewer where they do not fit."""
        left, out = list(self._leaves(dim)), list[tuple[int, ...]]()
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
                a, b = [*self._leaves((x,)), *a], [*self._leaves((y,)), *b]
            elif self.size[x] == self.size[y]:
                self._parent[max(x, y)] = min(x, y)
            else:
                large, small = (x, y) if self.size[x] > self.size[y] else (y, x)
                times, left = divmod(self.size[large], self.size[small])
                if left:
                    return
                self._parts[large] = self._new(self.size[small]), self._new(times)
                a, b = [x, *a], [y, *b]

    def _count(self, op: Operator, found: dict[int, tuple[int, ...]]) -> None:
        """Adds the work of an operator to the sets that it carries on."""
        if op.kind in BOUNDARIES:
            return
        results = {f for dims in op.rule.results for dim in dims for f in dim}
        work = max(op.flops, 1.0) * op.trips
        total = self.products if op.kind in _PRODUCTS or op.kernel else self.other
        for factor, part in found.items():
            kept = factor in results and op.rule.kinds[factor] is FactorKind.PASS
            for node in self._leaves(part):
                total[node] = total.get(node, 0.0) + (work if kept else -work)


class _Meetings:
    """Where values without rows meet those with rows.

    Attributes:
      dims: the sets of dimensions.
      rows: the set that is the rows; -1: there is none.
      size: the number of rows.
    """

    def __init__(
        self,
        forward: Sequence[Operator],
        backward: Sequence[int],
        dims: _Dimensions,
        rows: int,
        given: Iterable[int],
    ) -> None:
        self.backward, self.dims, self.rows = backward, dims, rows
        self.readers = readers(forward)
        self.size = self._size([v for v in given if self._has_rows(v)])

    def _size(self, given: Sequence[int]) -> int:
        """The rows of the largest input that has them.

        A batch of one row has a first dimension of one, which no rule names.
        """
        if not given:
            return 1
        largest = max(given, key=self.dims.nbytes)
        dim = self.dims.position(largest, self.rows)
        shape = self.dims.values[largest].shape
        assert dim is not None
        single = dim and shape[0] == 1 and not self._loop(largest)
        return 1 if single else shape[dim]

    def rows_of(self, value: int) -> int:
        """The dimension of carried state that has a part for each row, or -1."""
        shape, dim = self.dims.values[value].shape, self.dims.position(value, self.rows)
        return -1 if dim is None or shape[dim] != self.size else dim

    def frozen(self, value: int) -> bool:
        """Whether a value without rows is the same for all of them."""
        first = self.dims.values[value].shape[0]
        if self.size == 1:
            return first != 1
        seen, waiting, data = {value}, [value], False
        while waiting:
            for op, slot in self.readers.get(waiting.pop(), ()):
                made = [v for v in op.outputs if self._has_rows(v)]
                indexed = op.kind in _INDEXED or op.kind.startswith("scatter")
                if made and (slot == 0 or not indexed) and op.kind not in BOUNDARIES:
                    return True
                data = data or bool(made)
                after = [v for v in op.outputs if v not in made and v not in seen]
                seen.update(after)
                waiting += after
        return not data and bool(first % self.size)

    def _has_rows(self, value: int) -> bool:
        return self.dims.position(value, self.rows) is not None

    def turns(self, value: int, dim: int) -> int:
        """How many batches, or parts of one, lie in the dimensions before the rows."""
        count = 1
        for _ in range(dim):
            loop = self._loop(value)
            if loop is None or not self._trains(loop):
                break
            count *= self.dims.values[value].shape[0]
            value = loop.outputs[0]
        return count

    def _trains(self, loop: Operator) -> bool:
        """Whether a loop has backward passes inside."""
        first = bisect.bisect(self.backward, loop.index)
        return first < len(self.backward) and self.backward[first] <= loop.until

    def _loop(self, value: int) -> Operator | None:
        """The loop that alone reads a value, a slice in each turn."""
        found = [op for op, _ in self.readers.get(value, ())]
        sliced = bool(found) and all(op.kind == "slice_step" for op in found)
        return found[0] if sliced else None
