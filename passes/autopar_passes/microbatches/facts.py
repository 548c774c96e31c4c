"""Facts of a step that decide how it may be split into microbatches.

This module compares the program of one microbatch with the program of the whole batch.
Both programs are traced from one step, so a value has the same number in both. The two
programs may differ only in the sizes of dimensions and in scalars that are made of such
sizes.

The module also describes a step over several microbatches as data. Such a step runs its
forward and backward pass for each microbatch, and its update once. A value that the
microbatches compute and the part that runs once reads is a *crossing*. A *row* is the
entry of one example of the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from types import FunctionType
from typing import Any

import jax
import numpy as np

from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.graph.operators import (
    GraphInput,
    Operator,
    OperatorGraph,
    producers,
)
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    walk,
)
from autopar_passes.program.trace import TracedStep
from autopar_passes.sums.stacked import ADDITIVE, UNARY


class MicrobatchError(InputError):
    """Splitting the step into microbatches would change its results."""


class Combine(enum.Enum):
    """How the values of all microbatches become the value of the whole batch."""

    SUM = "added up"
    MEAN = "averaged"
    ROWS = "put together row by row"
    SAME = "the same in each"


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of the batch are in an array.

    The elements of dimension ``dim`` are dealt out in groups of ``inner`` neighbours.
    With M microbatches, microbatch m gets the groups m, m + M, m + 2 M, ..., in this
    order. Because every microbatch takes groups from all along the dimension, the rows
    of a batch that is sharded over devices stay on their devices.
    """

    dim: int
    inner: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A value that each microbatch computes and that is used after all microbatches.

    Attributes:
      value: the number of the value in the microbatch's program.
      combine: how the values of all microbatches are put together.
      rows: where the rows of the batch are in the value, for `Combine.ROWS`.
    """

    value: int
    combine: Combine
    rows: Rows | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatched:
    """A step over several microbatches.

    The program of one microbatch is complete. Its constants are those of the whole
    batch, such as the divisor of a mean, so the microbatches' values of a mean add up
    to the mean of the batch. The equations that run once see arrays with the rows of
    the whole batch. The program's flat inputs are the step's own flat inputs, followed
    by the inputs of `number`, `given` and `gathered`.

    Attributes:
      microbatches: the number of microbatches.
      traced: the step on one microbatch.
      once: indices of the top-level equations that run once, after all microbatches.
      crossings: the values that microbatches compute for the equations of ``once``, or
        for the caller.
      batch: flat input -> where its rows are; other inputs are the same for all
        microbatches.
      number: the flat input that takes the number of the microbatch, int32; None if the
        step draws no random numbers for rows.
      ahead: the program that computes the values of `given` from the step's flat inputs
        with the whole batch; None if there are no such values.
      given: the flat inputs that take values which depend on the whole batch, such as
        the number of unmasked tokens in the batch.
      gathered: maps each of the last flat inputs to the crossings that it is put
        together from. Such an input has the rows of all microbatches, for the equations
        of ``once``.
      local: names, for messages, of values that each microbatch computes from its own
        rows instead of from the whole batch.
    """

    microbatches: int
    traced: TracedStep
    once: frozenset[int]
    crossings: tuple[Crossing, ...]
    batch: dict[int, Rows]
    number: int | None = None
    ahead: Program | None = None
    given: tuple[int, ...] = ()
    gathered: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    local: tuple[str, ...] = ()

    @property
    def own(self) -> int:
        """The number of the step's own flat inputs, which come first."""
        added = len(self.given) + len(self.gathered) + (self.number is not None)
        return self.traced.program.num_arguments - added

    @property
    def accumulated_values(self) -> frozenset[int]:
        """The values that are summed or averaged over the microbatches."""
        added = (Combine.SUM, Combine.MEAN)
        return frozenset(c.value for c in self.crossings if c.combine in added)


# Parameters of primitives that give sizes, or that follow from the operands' types.
_SIZES = frozenset(
    {
        "shape", "new_sizes", "sizes", "slice_sizes", "limit_indices", "start_indices",
        "sharding", "out_sharding", "jaxpr", "cond_jaxpr", "body_jaxpr", "branches",
        "operand_shape", "updates_shape", "padding_config", "length", "result_avals",
    }
)  # fmt: skip

# Parameters of kernels that may differ, because kernels are traced anew for a
# microbatch (`autopar_passes.microbatches.kernels`).
_KERNEL_SIZES = {
    "pallas_call": frozenset({"out_avals", "grid_mapping", "cost_estimate", "jaxpr"}),
    "custom_partitioning": frozenset({"call"}),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """The program of a whole batch and the program of one microbatch.

    Attributes:
      whole: the program of the whole batch.
      micro: the program of one microbatch.
      count: number of microbatches: the rows of the whole batch divided by those of
        ``micro``.
      dims: for each value, the dimension with the rows of the batch; -1 if the value
        has no such dimension; less than -1 if the microbatch's array is not a part of
        the whole batch's array.
      sources: all equations of the whole batch, by index, including those in regions.
      made_by: value -> the equation of the microbatch's program that computes the
        value.
    """

    whole: Program
    micro: Program
    count: int | Fraction
    dims: tuple[int, ...]
    sources: dict[int, Equation]
    made_by: dict[int, Equation]

    def has_rows(self, value: int) -> bool:
        """Whether a value has a dimension with the rows of the batch."""
        return self.dims[value] >= 0

    def rows_of(self, value: int) -> int:
        """How many rows a value has in the whole batch."""
        return self.whole.values[value].shape[self.dims[value]]


def pair_programs(whole: Program, micro: Program, count: int | Fraction) -> Pair:
    """Compares the program of a whole batch with that of one microbatch.

    Raises:
      MicrobatchError: the programs differ in more than the number of rows.
    """
    try:
        _compare(whole.body, micro.body)
        if len(whole.values) != len(micro.values):
            raise _depends("it has other arrays for as few as a microbatch has")
    except MicrobatchError as error:
        if not _has_one_row(whole, micro):
            raise
        raise MicrobatchError(
            f"{error} A microbatch would have one row, for which JAX writes some "
            "operators in another way: take fewer microbatches."
        ) from error
    dims = tuple(
        _dim(a.shape, b.shape, count)
        for a, b in zip(whole.values, micro.values, strict=True)
    )
    made_by = {v: e for e in walk(micro.body) for v in e.outputs}
    return Pair(whole, micro, count, dims, whole.by_index(), made_by)


def _has_one_row(whole: Program, micro: Program) -> bool:
    """Whether some input has one row in a microbatch and more rows in the batch."""
    inputs = zip(whole.body.inputs, micro.body.inputs, strict=False)
    shapes = ((whole.values[a].shape, micro.values[b].shape) for a, b in inputs)
    return any(y == 1 and x > 1 for a, b in shapes for x, y in zip(a, b, strict=False))


# Codes that `_dim` returns if two shapes differ in more than one dimension.
_SEVERAL, _OTHER = -2, -3


def _dim(whole: tuple[int, ...], micro: tuple[int, ...], count: int | Fraction) -> int:
    if len(whole) != len(micro):
        return _OTHER
    differ = [d for d, (a, b) in enumerate(zip(whole, micro, strict=True)) if a != b]
    if any(whole[d] != count * micro[d] for d in differ):
        return _OTHER
    return _SEVERAL if len(differ) > 1 else differ[0] if differ else -1


def check_dims(pair: Pair, eqn: Equation) -> None:
    """Checks that a microbatch computes a part of each result of an equation.

    Raises:
      MicrobatchError: a result of the microbatch is no part of the whole result.
    """
    for value in eqn.outputs:
        if pair.dims[value] < -1:
            raise MicrobatchError(_wrong_dims(pair, eqn, value))


def _wrong_dims(pair: Pair, eqn: Equation, value: int) -> str:
    shape = "x".join(map(str, pair.whole.values[value].shape))
    if pair.dims[value] == _SEVERAL:
        why = (
            f"makes an array of {shape} with two dimensions of the batch: it compares "
            "each row with the others, as a contrastive loss does"
        )
    else:
        small = "x".join(map(str, pair.micro.values[value].shape))
        why = (
            f"makes an array of {shape} for the whole batch and of {small} for a "
            "microbatch, which is no part of it"
        )
    return f"{place_of(eqn)} {why}."


def place_of(eqn: Equation) -> str:
    """Returns the place of an equation, for people: ``'reduce_max' (train.py:12)``."""
    source = jax_compat.source_line(eqn.source)
    return f"'{eqn.primitive}'" + (f" ({source})" if source else "")


def _depends(why: str) -> MicrobatchError:
    return MicrobatchError(f"the program depends on the number of rows: {why}.")


def _compare(whole: Region, micro: Region) -> None:
    if whole.inputs != micro.inputs:
        raise _depends("it has other arrays for as few as a microbatch has")
    for a, b in zip(whole.equations, micro.equations, strict=False):
        same = a.primitive == b.primitive and _alike(a.inputs, b.inputs)
        if not same or a.outputs != b.outputs:
            raise _depends(_difference(a, b))
        sizes = _KERNEL_SIZES.get(a.primitive, _SIZES)
        for key, value in a.params.items():
            if key not in sizes and not _equal(value, b.params.get(key)):
                raise _depends(f"{place_of(a)} has another '{key}'")
        for inner in zip(a.regions, b.regions, strict=True):
            _compare(*inner)
    more = len(whole.equations) != len(micro.equations)
    if more or not _alike(whole.outputs, micro.outputs):
        raise _depends("it has other operators for as few as a microbatch has")


def _alike(a: tuple[Atom, ...], b: tuple[Atom, ...]) -> bool:
    """Whether both tuples hold the same values, where any scalar matches any other."""
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(
        x == y if isinstance(x, int) else isinstance(y, Scalar) for x, y in pairs
    )


def _difference(whole: Equation, micro: Equation) -> str:
    """Describes the first difference between two programs, for an error message."""
    of = " of jax.random" if jax_compat.is_of_random(whole.source) else ""
    if whole.primitive == micro.primitive:
        return f"{place_of(whole)}{of} has other operands in a microbatch"
    return f"it runs {place_of(whole)}{of}, and {place_of(micro)} in a microbatch"


_Functions = tuple[FunctionType, FunctionType]


def _equal(a: Any, b: Any, within: tuple[_Functions, ...] = ()) -> bool:
    if a is b:
        return True
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return (a, b) in within or _same_function(a, b, (*within, (a, b)))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        held = ((getattr(x, f.name) for f in dataclasses.fields(a)) for x in (a, b))
        return all(_equal(x, y, within) for x, y in zip(*held, strict=True))
    if isinstance(a, jax_compat.Jaxpr) and isinstance(b, jax_compat.Jaxpr):
        # How a scatter adds up is a jaxpr, and jaxprs are equal only to themselves.
        # After `jax.clear_caches`, JAX makes another one. The text has all of it.
        return str(a) == str(b)
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        # The comparison below would broadcast arrays of different shapes, and could
        # then find them equal.
        return False
    try:
        return bool(np.all(a == b))
    except (TypeError, ValueError):
        return False


def _same_function(
    a: FunctionType, b: FunctionType, within: tuple[_Functions, ...]
) -> bool:
    """Whether two functions have the same code and hold equal values.

    Each trace creates the functions of `jax.debug.callback` anew. A function may refer
    to itself; the pairs in ``within`` are being compared already, and count as equal.
    """
    if a.__code__ is not b.__code__:
        return False
    one, other = _held_objects(a), _held_objects(b)
    return one.keys() == other.keys() and all(
        _equal(value, other[name], within) for name, value in one.items()
    )


def _held_objects(function: FunctionType) -> dict[str | int, Any]:
    """The objects that a function refers to: its defaults and its closure, by name."""
    out: dict[str | int, Any] = dict(enumerate(function.__defaults__ or ()))
    out.update(function.__kwdefaults__ or {})
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # The cell of a closure may be empty.
            out[name] = cell.cell_contents
    return out


# Primitives that draw random numbers, or make keys for drawing them.
RANDOM = frozenset(
    {"random_bits", "random_gamma", "random_split", "rng_bit_generator", "rng_uniform"}
)
# Primitives that map one statistic of a batch to another, such as adding epsilon to a
# variance.
_HANDING = UNARY | ADDITIVE | {"broadcast_in_dim", "mul"}


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a step.

    Attributes:
      operators: the operator of each equation without regions.
      roles: the role of each top-level equation.
      back: the top-level equations whose results the backward pass needs.
      given: values that need no forward pass, and are computed before the first
        microbatch: they depend only on the batch, on random keys and on counters.
      statistics: statistics of the batch that normalise its rows and that the carried
        state stores.
      updated: values that are computed from results of the backward pass.
    """

    operators: dict[int, Operator]
    roles: dict[int, Role]
    back: frozenset[int]
    given: frozenset[int]
    statistics: frozenset[int]
    updated: frozenset[int]


def facts(pair: Pair, graph: OperatorGraph) -> Facts:
    """Finds the facts of a step.

    Args:
      pair: the programs of the step.
      graph: the operator graph of the whole batch.
    """
    operators: dict[int, Operator] = {}
    roles: dict[int, set[Role]] = {}
    outermost = _outermost(pair.whole.body.equations)
    for op in graph.operators:
        if op.equation >= 0:
            operators[op.equation] = op
            roles.setdefault(outermost[op.equation], set()).add(op.role)
    found = _roles(pair.whole.body.equations, roles)
    updated = _gradient_values(graph)
    return Facts(
        operators,
        found,
        _needed_back(pair.whole.body.equations, found),
        _stateless_values(pair, graph),
        _statistics(pair, graph) - updated,
        updated,
    )


def loop_of_updates(pair: Pair, operators: Mapping[int, Operator]) -> Equation | None:
    """Finds a loop whose later iterations use gradients in their forward pass.

    Loops of updates on minibatches and line searches are such loops. A loop that only
    sums gradients, or returns them row by row, is not one.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      operators: the operator of each equation without regions.
    """
    for eqn in walk(pair.whole.body):
        for region in eqn.regions[-1:] if eqn.primitive in ("scan", "while") else ():
            back, ahead = set[int](), set[int]()
            first = len(region.inputs) - len(region.outputs)
            if eqn.primitive == "scan":
                first = eqn.params["num_consts"]
            carried = list(zip(region.inputs[first:], region.outputs, strict=False))
            carried = [(a, b) for a, b in carried if not pair.has_rows(a)]
            for inner in region.equations:
                roles = _roles_in(inner, operators)
                read = inner.arrays
                if Role.BACKWARD in roles or not back.isdisjoint(read):
                    back.update(inner.outputs)
            ahead.update(a for a, b in carried if b in back)
            for inner in region.equations:
                if ahead.isdisjoint(inner.arrays):
                    continue
                ahead.update(inner.outputs)
                made = (inner, *inner.inner)
                rows = any(pair.has_rows(v) for e in made for v in e.outputs)
                if rows and Role.FORWARD in _roles_in(inner, operators):
                    return eqn
    return None


def _roles_in(eqn: Equation, operators: Mapping[int, Operator]) -> set[Role]:
    """Returns the roles of an equation's operators, with those in its regions."""
    made = (eqn, *eqn.inner)
    return {operators[e.index].role for e in made if e.index in operators}


def _outermost(equations: Iterable[Equation]) -> dict[int, int]:
    """Equation -> the top-level equation that contains it."""
    return {e.index: eqn.index for eqn in equations for e in (eqn, *eqn.inner)}


def _roles(
    equations: Sequence[Equation], roles: Mapping[int, set[Role]]
) -> dict[int, Role]:
    """The role of each top-level equation, from the operators in it and in its regions.

    An equation of the update whose result the backward pass reads becomes an equation
    of the forward pass. An example is the zeros that a loop adds gradients to.
    """
    found = {index: _role(of) for index, of in roles.items()}
    read: set[int] = set()
    for eqn in reversed(equations):
        if found[eqn.index] is Role.UPDATE and not read.isdisjoint(eqn.outputs):
            found[eqn.index] = Role.FORWARD
        if found[eqn.index] is not Role.UPDATE:
            read.update(eqn.arrays)
    return found


def _role(roles: set[Role]) -> Role:
    if Role.BACKWARD in roles:
        return Role.BACKWARD
    # A loop of the update also has operators that depend on no gradient, such as its
    # counter.
    return Role.UPDATE if Role.UPDATE in roles else Role.FORWARD


def _needed_back(
    equations: tuple[Equation, ...], roles: dict[int, Role]
) -> frozenset[int]:
    """The equations of the backward pass, and all equations that it depends on."""
    read: set[int] = set()
    found: set[int] = set()
    for eqn in reversed(equations):
        backward = roles.get(eqn.index) is Role.BACKWARD
        if backward or not read.isdisjoint(eqn.outputs):
            found.add(eqn.index)
            read.update(eqn.arrays)
    return frozenset(found)


def _stateless_values(pair: Pair, graph: OperatorGraph) -> frozenset[int]:
    """Returns the values outside of loops that depend on no array of the state."""
    body = pair.whole.body
    found = {i.value for i in graph.inputs if i.output < 0 or not _is_array(graph, i)}
    found.update(pair.whole.constant_arrays)
    for eqn in body.equations:
        told = eqn.source.effects
        if not told and all(a in found for a in eqn.arrays):
            found.update(eqn.outputs)
    return frozenset(found)


def _is_array(graph: OperatorGraph, given: GraphInput) -> bool:
    """Whether an input is a floating-point array that the step learns or carries."""
    value = graph.values[given.value]
    return value.floating and (given.role is not InputRole.OTHER or value.size > 1)


def _gradient_values(graph: OperatorGraph) -> frozenset[int]:
    """Returns the values that are computed from gradients, such as new parameters."""
    found: set[int] = set()
    # An iteration of a loop may read values that the previous iteration computes.
    for _ in range(2):
        for op in graph.operators:
            arrays = (v for v in op.inputs if v is not None)
            if op.role is Role.BACKWARD or not found.isdisjoint(arrays):
                found.update(op.outputs)
    return frozenset(found)


def _statistics(pair: Pair, graph: OperatorGraph) -> frozenset[int]:
    kept = _forward_values(pair, graph)
    found = kept & _normalising(pair, graph)
    for op in graph.operators:
        if op.role is not Role.FORWARD or op.kind not in _HANDING:
            continue
        if not found.isdisjoint(op.inputs):
            found.update(v for v in op.outputs if not pair.has_rows(v))
    return frozenset(found)


def _forward_values(pair: Pair, graph: OperatorGraph) -> set[int]:
    """The values without rows from which the forward pass computes new carried arrays.

    The search goes backwards from the new arrays. The search passes through any value
    without rows, and through a value with rows if an elementwise operator made that
    value.
    """
    made_by = producers(graph.operators)
    left = [
        graph.outputs[i.output]
        for i in graph.inputs
        if i.output >= 0
        and i.role is InputRole.OTHER
        and graph.values[i.value].floating
        and graph.values[i.value].shape
    ]
    seen: set[int] = set()
    while left:
        value = left.pop()
        op = None if value is None else made_by.get(value)
        if value is None or op is None or value in seen:
            continue
        seen.add(value)
        if op.role is not Role.FORWARD or op.kind == "input":
            continue
        if pair.has_rows(value) and op.rule.reduced_factors:
            continue
        left.extend(op.inputs)
    return {v for v in seen if not pair.has_rows(v)}


def _normalising(pair: Pair, graph: OperatorGraph) -> set[int]:
    """The values without rows from which the forward pass computes values with rows."""
    found: set[int] = set()
    # Loop until nothing changes: an iteration may read what the previous one computes.
    for _ in range(2):
        for op in reversed(graph.operators):
            if op.role is not Role.FORWARD:
                continue
            if any(pair.has_rows(v) or v in found for v in op.outputs):
                arrays = (v for v in op.inputs if v is not None)
                found.update(v for v in arrays if not pair.has_rows(v))
    return found


def take_scalars(whole: Sequence[Atom], micro: Sequence[Atom]) -> list[Atom]:
    """The operands of the microbatch, with the scalars of the whole batch."""
    return [
        a if isinstance(a, Scalar) else b for a, b in zip(whole, micro, strict=True)
    ]


def take_microbatch(array: Any, rows: Rows, count: int, number: Any) -> Any:
    """Takes the rows of one microbatch out of an array: ``(..., n / count, ...)``.

    Args:
      array: the array of the whole batch.
      rows: where the rows of the batch are in ``array``.
      count: number of microbatches.
      number: the number of the microbatch, int32.
    """
    shape, dim = array.shape, rows.dim
    groups = shape[dim] // (rows.inner * count)
    apart = (*shape[:dim], groups, count, rows.inner, *shape[dim + 1 :])
    sizes = (*apart[: dim + 1], 1, *apart[dim + 2 :])
    zero = np.int32(0)
    starts = [number if d == dim + 1 else zero for d in range(len(apart))]
    taken = jax.lax.dynamic_slice(
        jax.lax.reshape(array, apart), starts, sizes, allow_negative_indices=False
    )
    each = (*shape[:dim], groups * rows.inner, *shape[dim + 1 :])
    return jax.lax.reshape(taken, each)


def join_microbatches(array: Any, rows: Rows) -> Any:
    """Joins the parts that `take_microbatch` takes: ``(count, ..., n / count, ...)``.

    Args:
      array: the arrays of all microbatches, stacked along a new first dimension.
      rows: where the rows are in the array of one microbatch.
    """
    count, *shape = array.shape
    dim = rows.dim
    groups = shape[dim] // rows.inner
    apart = (count, *shape[:dim], groups, rows.inner, *shape[dim + 1 :])
    order = (*range(1, dim + 2), 0, *range(dim + 2, len(apart)))
    joined = jax.lax.transpose(jax.lax.reshape(array, apart), order)
    whole = (*shape[:dim], count * shape[dim], *shape[dim + 1 :])
    return jax.lax.reshape(joined, whole)


def regroup_rows(
    before: tuple[int, ...], rows: Rows, after: tuple[int, ...], dim: int
) -> int | None:
    """The `Rows.inner` of a reshaped array; None if the reshape splits groups of rows.

    Args:
      before: the shape before the reshape.
      rows: where the rows are in ``before``.
      after: the shape after the reshape.
      dim: the dimension of ``after`` that has the rows.
    """
    together = rows.inner * math.prod(before[rows.dim + 1 :])
    behind = math.prod(after[dim + 1 :])
    if together % behind or after[dim] % (together // behind):
        return None
    return together // behind


class Kind(enum.Enum):
    """How a value of the whole batch follows from the values of the microbatches."""

    SAME = "equal in all of them"
    LOCAL = "computed from each microbatch alone"
    ROWS = "their rows, put together"
    SUM = "their sum"
    POSITION = "the numbers of their rows"
    WHOLE = "none: it is computed from the whole batch"


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """How a value of the whole batch follows from the microbatches' values: its class.

    Attributes:
      kind: how the value of the whole batch is obtained from those of the microbatches.
      inner: for `Kind.ROWS`, the number of elements that stay together (`Rows.inner`);
        0 stands for any number, because all rows are equal.
      columns: for `Kind.POSITION`, the entries of the last dimension that are row
        numbers; empty if all are.
    """

    kind: Kind
    inner: int = 0
    columns: frozenset[int] = frozenset()


SAME, LOCAL, SUM = Split(Kind.SAME), Split(Kind.LOCAL), Split(Kind.SUM)
ANY_ROWS, POSITION = Split(Kind.ROWS), Split(Kind.POSITION)
WHOLE = Split(Kind.WHOLE)


def join_splits(a: Split, b: Split) -> Split | None:
    """Returns the class that fits values of either class; None if there is none."""
    kinds = {a.kind, b.kind}
    if a == b:
        return a
    if kinds == {Kind.ROWS} and 0 in (a.inner, b.inner):
        return a if a.inner else b
    if kinds == {Kind.SAME, Kind.LOCAL}:
        return LOCAL
    if Kind.SUM in kinds and kinds <= {Kind.SUM, Kind.SAME, Kind.LOCAL}:
        return SUM
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Edits:
    """The changes to the program of a microbatch, by equation and operand.

    Attributes:
      scaled: operands that are multiplied by a number, such as 1 / M for M
        microbatches.
      first: operands that are replaced by zeros in all microbatches but the first.
      ahead: operands that are computed from the whole batch before the first
        microbatch.
      folded: random keys that are made different in each microbatch.
      drawn: equations that draw random numbers for rows -> `Rows.inner` of the rows. In
        a microbatch each row gets the numbers that it gets in the whole batch.
      kept: equations whose scalar constants are those of a microbatch, not of the
        batch.
      counted: values that hold row numbers of a microbatch; equations that run once
        read those of the whole batch.
      replaced: values that are computed from the whole batch wherever they are read; a
        microbatch reads its own rows of such a value.
    """

    scaled: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    first: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    ahead: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    folded: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    drawn: dict[int, int] = dataclasses.field(default_factory=dict)
    kept: set[int] = dataclasses.field(default_factory=set)
    counted: set[int] = dataclasses.field(default_factory=set)
    replaced: set[int] = dataclasses.field(default_factory=set)

    def forget(self, equation: int) -> None:
        """Removes the edits of an equation before the equation is examined again."""
        for table in (self.scaled, self.ahead):
            for key in [k for k in table if k[0] == equation]:
                del table[key]
        for found in (self.first, self.folded):
            found.difference_update({k for k in found if k[0] == equation})
        self.drawn.pop(equation, None)
        self.kept.discard(equation)
