"""Builds the operator graph of a program, and finds repeated layers.

A model that applies the same block L times has the same sequence of equations L times
in the forward pass, and again in the backward pass. The optimizer also repeats one
sequence L times, for the parameters of each block. The operators at the same position
in each repetition form one *class*. The planner makes one set of decisions for each
class, so all operators of a class get the same layouts. A model of 96 layers therefore
costs the solver about as much as one layer. Repeated layers are found without the names
of modules.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.emit import emit_operators
from autopar_passes.graph.operators import (
    BOUNDARIES,
    PRODUCTS,
    GraphInput,
    Operator,
    OperatorGraph,
    producers,
    read_operators,
    readers,
)
from autopar_passes.graph.ring_order import place_tokens
from autopar_passes.graph.roles import InputRole, Role, input_roles, operator_roles
from autopar_passes.graph.verify import verifies, verify
from autopar_passes.program.calls import NOT_NAMED, NamedRoles
from autopar_passes.program.equations import Program, Value, walk
from autopar_passes.program.trace import TracedStep
from autopar_passes.rules.book import rule_book, signature
from autopar_passes.rules.factor_rule import FactorKind

# Finds the batch among the inputs of a step: its arrays, and their row dimensions.
#
# The sharding rules of operators state which dimensions of arrays must be sharded
# alike. Such dimensions form a set, such as all dimensions that count heads. Only a set
# that occurs in no parameter can be the rows (the examples of the batch). The rows are
# the set with the most FLOPs of matrix products in which the set occurs only once. A
# sequence dimension, by contrast, occurs twice in attention, and a time dimension
# occurs in the loop of a recurrent network. Among sets with equal FLOPs, the rows are
# the set with the fewest FLOPs of operators that reduce it, or shift, compare or index
# it by constants. An input that is combined with arrays of rows, but has no row
# dimension, is the same for all rows: its role is frozen, as a teacher's weights are.
# There is one exception: an input whose first dimension has as many entries as there
# are rows, and whose entries are selected by row numbers, as in ``x[argsort(n)]``. This
# input belongs to the batch.


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
    return dataclasses.replace(
        given, rows=dim, unit=unit, turns=turns, at_hand=named.is_at_hand(given.path)
    )


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
                # The score is compared only between sets that occur in matrix products.
                if score[2]:
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
        """Returns the sets of the dimension that a loop slices or stacks.

        The result is None for an operator of another kind.
        """
        ends = {"slice_step": op.inputs, "stack_step": op.outputs}.get(op.kind)
        return None if not ends or ends[0] is None else self._dims(ends[0])[0]

    def sets(self, op: Operator) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the factors of an operator's rule, each with its sets."""
        return [(f, self.leaves(d)) for f, d in self._factors[op.index].items()]

    def nbytes(self, value: int) -> float:
        return float(self.values[value].nbytes)

    def of(self, value: int) -> list[tuple[int, ...]]:
        """Returns the sets of each dimension of a value."""
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
        """Returns the number of rows, and the row dimension of a batch of one row.

        The number and the dimension are found from the largest input.

        No sharding rule has a factor for a dimension of size one. If a batch has one
        row, the row dimension is the first dimension, or the dimension after the time
        dimension of a loop.
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
        """Returns the dimension of carried state with one entry per row; -1 if none."""
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
        """Returns the loop that slices a value, if nothing else reads the value."""
        found = [op for op, _ in self.readers.get(value, ())]
        sliced = bool(found) and all(op.kind == "slice_step" for op in found)
        return found[0] if sliced else None


# Number of periods that are tried per round. A period is a distance between two equal
# operators in the sequence. The periods that are tried are those that occur most often
# between neighbouring equal operators.
_CANDIDATES = 128
_ROUNDS = 64


def repeated_classes(
    signatures: Sequence[Hashable], *, min_length: int = 2
) -> np.ndarray:
    """Assigns each operator of a sequence to a class.

    Args:
      signatures: one key per operator; operators with equal keys may share decisions.
      min_length: shortest period that counts as a layer.

    Returns:
      int array ``[operators]``: the smallest operator index of its class.
    """
    codes = _codes(signatures)
    classes = np.arange(len(codes))
    free = np.ones(len(codes), dtype=bool)
    for _ in range(_ROUNDS):
        runs, period = _best_runs(codes, free, min_length)
        if not runs:
            break
        for start, stop in runs:
            offsets = np.arange(start, stop)
            shortest = _shortest_period(codes[start:stop], period, min_length)
            classes[offsets] = start + (offsets - start) % shortest
            free[offsets] = False
    return classes


def _codes(signatures: Sequence[Hashable]) -> np.ndarray:
    table: dict[Hashable, int] = {}
    return np.array(
        [table.setdefault(s, len(table)) for s in signatures], dtype=np.int64
    )


def _best_runs(
    codes: np.ndarray, free: np.ndarray, min_length: int
) -> tuple[list[tuple[int, int]], int]:
    """The runs (start, stop) with the period that makes most operators share."""
    best: tuple[list[tuple[int, int]], int] = ([], 0)
    best_saved = 0
    for period in _candidate_periods(codes, free, min_length):
        equal = (codes[:-period] == codes[period:]) & free[:-period] & free[period:]
        runs = _true_runs(equal, period, free)
        saved = sum(stop - start - period for start, stop in runs)
        if saved > best_saved:
            best, best_saved = (runs, period), saved
    return best


def _shortest_period(run: np.ndarray, period: int, min_length: int) -> int:
    """Returns the shortest period of a run: a period of 64 may be four of 16."""
    for divisor in range(min_length, period // 2 + 1):
        if period % divisor == 0 and np.array_equal(run[:-divisor], run[divisor:]):
            return divisor
    return period


def _candidate_periods(
    codes: np.ndarray, free: np.ndarray, min_length: int
) -> list[int]:
    """Returns distances between neighbouring occurrences of the same operator."""
    positions = np.flatnonzero(free)
    order = positions[np.argsort(codes[positions], kind="stable")]
    gaps = np.diff(order)[np.diff(codes[order]) == 0]
    gaps = gaps[gaps >= min_length]
    if gaps.size == 0:
        return []
    values, counts = np.unique(gaps, return_counts=True)
    rank = np.argsort(-np.sqrt(values) * counts, kind="stable")[:_CANDIDATES]
    return sorted(values[rank].tolist())


def _true_runs(
    equal: np.ndarray, period: int, free: np.ndarray
) -> list[tuple[int, int]]:
    """Returns the longest stretches that repeat with a period, as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.view(np.int8), [0]))))
    starts, stops = edges[::2], edges[1::2]
    long = stops - starts >= period
    out: list[tuple[int, int]] = []
    for start, stop in zip(starts[long].tolist(), stops[long].tolist(), strict=True):
        if out and start < out[-1][1]:
            continue  # This run overlaps the last period of the previous run.
        if free[start : stop + period].all():
            out.append((start, stop + period))
    return out


def step_graph(
    traced: TracedStep,
    *,
    like: OperatorGraph | None = None,
    share_repeated: bool = True,
) -> OperatorGraph:
    """Builds the operator graph of a traced step.

    Args:
      traced: the step.
      like: a graph of a step with the same first arguments. Its roles and rows are used
        for these arguments. None to find the roles and rows.
      share_repeated: whether repeated layers share one set of decisions.
    """
    return build_graph(
        traced.program,
        input_paths=traced.input_paths,
        carried=traced.carried,
        named=traced.form.roles,
        like=None if like is None else like.inputs,
        share_repeated=share_repeated,
    )


def build_graph(
    program: Program,
    *,
    input_paths: Sequence[str],
    carried: dict[int, int],
    named: NamedRoles = NOT_NAMED,
    like: Sequence[GraphInput] | None = None,
    share_repeated: bool = True,
) -> OperatorGraph:
    """Builds the operator graph of a flat program.

    Args:
      program: the flat step.
      input_paths: a readable path for each flat argument.
      carried: flat argument -> flat output that is its next value.
      named: the roles that the user has given.
      like: known inputs for the first arguments. An argument that the step does not
        return gets the role and rows of its known input; without a known input, it
        belongs to no batch. None to find all roles.
      share_repeated: whether repeated layers share one set of decisions.
    """
    equations = walk(program.body)
    signatures = [signature(e, program.values) for e in equations]
    found = rule_book(program, equations, signatures)
    emitted = emit_operators(program, found.rules, found.kernels)
    roles = operator_roles(emitted.stacks, read_operators(emitted.operators))
    inputs = _inputs(program, emitted.operators, roles, input_paths, carried)
    if like is None:
        inputs = with_batch(inputs, emitted.operators, roles, program.values, named)
    else:
        inputs = tuple(
            _like(given, like[k] if k < len(like) else None)
            for k, given in enumerate(inputs)
        )
    classes = _classes(program, emitted.operators, roles, inputs, share=share_repeated)
    operators = [
        op.with_role(role, class_index)
        for op, role, class_index in zip(emitted.operators, roles, classes, strict=True)
    ]
    outputs = tuple(a if isinstance(a, int) else None for a in program.body.outputs)
    graph = OperatorGraph(
        program.values,
        place_tokens(program, operators),
        inputs,
        outputs,
        found.unsupported,
        emitted.assumed_trips,
    )
    if verifies():
        verify(graph)
    return graph


def _inputs(
    program: Program,
    operators: Sequence[Operator],
    role_of: Sequence[Role],
    paths: Sequence[str],
    carried: dict[int, int],
) -> tuple[GraphInput, ...]:
    values = program.body.inputs[: program.num_arguments]
    readers: dict[int, list[Role]] = {v: [] for v in values}
    inner_of: dict[int, int] = {v: v for v in values}
    producer = producers(operators)
    for op in operators:
        for v in op.inputs:
            if v in inner_of and op.kind not in ("input", "return"):
                readers[inner_of[v]].append(role_of[op.index])
                if op.kind in ("enter", "slice_step"):
                    inner_of.update((out, inner_of[v]) for out in op.outputs)
    after = (Role.BACKWARD, Role.UPDATE)
    outputs = program.body.outputs
    makers = [outputs[carried[i]] if i in carried else None for i in range(len(values))]
    roles = input_roles(
        num_inputs=len(values),
        carried=frozenset(carried),
        floating=[program.values[v].floating for v in values],
        read_by=[readers[v] for v in values],
        from_backward=[
            isinstance(m, int) and role_of[producer[m].index] in after for m in makers
        ],
    )
    return tuple(
        GraphInput(v, paths[i], roles[i], carried.get(i, -1))
        for i, v in enumerate(values)
    )


def _like(given: GraphInput, other: GraphInput | None) -> GraphInput:
    """Gives an input the role and rows of a known input, unless the step returns it."""
    if other is None:
        return dataclasses.replace(given, role=InputRole.OTHER)
    role = given.role
    # The state belongs to another stage, so it has no role in this stage.
    if given.output < 0:
        role = InputRole.OTHER if other.output >= 0 else other.role
    return dataclasses.replace(
        given, role=role, rows=other.rows, unit=other.unit, turns=other.turns
    )


def _classes(
    program: Program,
    operators: Sequence[Operator],
    roles: Sequence[Role],
    inputs: Sequence[GraphInput],
    *,
    share: bool,
) -> list[int]:
    """For each operator, the index of the first operator that shares its decisions."""
    if not share:
        return [op.index for op in operators]
    given = {i.value: i.role if i.output >= 0 else None for i in inputs}
    keys = [
        (
            _class_key(program, op, role),
            given.get(op.outputs[0]) if op.kind == "input" else None,
        )
        for op, role in zip(operators, roles, strict=True)
    ]
    return [int(c) for c in repeated_classes(keys)]


def _class_key(program: Program, op: Operator, role: Role) -> tuple[Any, ...]:
    shapes = tuple(
        None if v is None else (program.values[v].shape, program.values[v].dtype)
        for v in (*op.inputs, *op.outputs)
    )
    return (op.kind, role, op.rule, shapes, op.trips, op.kernel)
