"""The readers of each value, and the layouts that they need: edges between nodes.

If one node reads a value, the value is resharded for that node. If several nodes read a
value, it is resharded once, into a *copy* that the nodes share. Forward readers share
one copy and backward readers share another. The backward copy may reuse the forward
copy, which takes memory, or may be gathered again, which takes communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.steps.nodes import MIN_ELEMENTS, Contraction, Home
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.rules.factor_rule import Dims

# Values are equivalent if equivalent operators, such as those of repeated layers,
# compute them, at the same position among their results. The pair is (class of the
# producer, position of the result).
ValueClass = tuple[int, int]


@dataclasses.dataclass(slots=True)
class Use:
    """The use of the values of one class by one node in one layout.

    Attributes:
      node: the node that reads.
      dims: for each dimension of the value, the factors of that node.
      weight: the number of reshardings per step for this use. It is the sum, over the
        values of the class that are read in this layout, of the largest number of times
        per step that one operator reads the value.
      backward: whether the readers belong to the backward pass or the update.
      readers: value of the class -> the first and the last operator that read it in
        this layout, and the largest number of times per step that one such operator
        reads it.
    """

    node: int
    dims: Dims
    weight: float
    backward: bool
    readers: dict[int, tuple[int, int, float]]

    @property
    def example(self) -> int:
        """One of the values that are read in this layout."""
        return next(iter(self.readers))


@dataclasses.dataclass(frozen=True, slots=True)
class HomeValue:
    """A class of equivalent values, with their home and their uses."""

    value_class: ValueClass
    example: int
    home: Home
    uses: tuple[Use, ...]

    @property
    def foreign(self) -> tuple[Use, ...]:
        """Uses that may need another layout than the home layout of the values."""
        return tuple(
            u for u in self.uses if (u.node, u.dims) != (self.home.node, self.home.dims)
        )


def times_made(uses: Iterable[Use]) -> float:
    """Returns how often per step the values are copied, for all values together.

    For each value this is the largest number of times that one operator reads it.
    """
    trips: dict[int, float] = {}
    for use in uses:
        for value, (_, _, count) in use.readers.items():
            trips[value] = max(trips.get(value, 0.0), count)
    return sum(trips.values())


def node_dims(contraction: Contraction, op: Operator, dims: Dims) -> Dims:
    """Translates the factors of an operator's rule to those of its node."""
    return contraction.node(op).dims(op, dims)


def required_values(
    graph: OperatorGraph, contraction: Contraction, value: int, dims: Dims
) -> list[tuple[int, Dims]]:
    """Finds the values with a home from which a reader computes ``value``.

    A value's home is the node that decides its layout. A value that each reader
    recomputes has no home, so the search goes on to the operands of its operator.

    Args:
      graph: the operator graph.
      contraction: the nodes of the graph.
      value: the value that a reader needs.
      dims: for each dimension of the value, the node factors or mesh axes that split
        it.

    Returns:
      Pairs of a value with a home and, for each of its dimensions, the factors or axes
      that split it, as in ``dims``.
    """
    if graph.values[value].size < MIN_ELEMENTS:
        return []
    if value not in contraction.floating:
        return [(value, dims)] if value in contraction.homes else []
    op = contraction.producer[value]
    given: dict[int, tuple[int, ...]] = {}
    for mine, theirs in zip(op.rule.results[0], dims, strict=True):
        if mine:
            given[mine[0]] = theirs
    out: list[tuple[int, Dims]] = []
    for operand, operand_dims in zip(op.inputs, op.rule.operands, strict=True):
        if operand is not None:
            inner = tuple(given.get(d[0], ()) if d else () for d in operand_dims)
            out.extend(required_values(graph, contraction, operand, inner))
    return out


def collect(
    graph: OperatorGraph, contraction: Contraction
) -> dict[ValueClass, HomeValue]:
    """Collects the uses of every class of values that has a home."""
    uses: dict[ValueClass, dict[tuple[int, Dims, bool], Use]] = {}
    example: dict[ValueClass, int] = {}
    for value, home in contraction.homes.items():
        key = value_class(contraction, value)
        uses.setdefault(key, {})
        example.setdefault(key, value)
        del home
    carried = {i.output: i.value for i in graph.inputs if i.output >= 0}
    own: dict[int, list[Dims]] = {}
    for op in graph.operators:
        if op.kind != "return" and op.class_index in contraction.node_of:
            node = contraction.node_of[op.class_index]
            if op.class_index not in own:
                operands = op.rule.operands
                own[op.class_index] = [node_dims(contraction, op, d) for d in operands]
            for slot, value in enumerate(op.inputs):
                if value is not None:
                    dims = own[op.class_index][slot]
                    trips = op.input_trips[slot]
                    _read(graph, contraction, uses, op, value, dims, node, trips)
    for output, value in enumerate(graph.outputs):
        home = contraction.homes.get(carried.get(output, -1))
        if value is not None and home is not None:
            last = graph.operators[-1]
            _read(graph, contraction, uses, last, value, home.dims, home.node, 1.0)
    return {
        key: HomeValue(
            key, example[key], contraction.homes[example[key]], tuple(u.values())
        )
        for key, u in uses.items()
    }


def value_class(contraction: Contraction, value: int) -> ValueClass:
    """Returns the class of a value: the class of its producer, and its output slot."""
    op = contraction.producer[value]
    return op.class_index, op.outputs.index(value)


def _read(
    graph: OperatorGraph,
    contraction: Contraction,
    uses: dict[ValueClass, dict[tuple[int, Dims, bool], Use]],
    op: Operator,
    value: int,
    dims: Dims,
    node: int,
    trips: float,
) -> None:
    backward = op.role is not Role.FORWARD or op.kind == "return"
    for source, source_dims in required_values(graph, contraction, value, dims):
        table = uses[value_class(contraction, source)]
        key = (node, source_dims, backward)
        use = table.get(key)
        if use is None:
            use = table[key] = Use(node, source_dims, 0.0, backward, {})
        before = use.readers.get(source)
        if before is None:
            use.readers[source] = (op.index, op.index, trips)
            use.weight += trips
        else:
            most = max(before[2], trips)
            use.readers[source] = (
                min(before[0], op.index),
                max(before[1], op.index),
                most,
            )
            use.weight += most - before[2]


# The operands of operators, in groups that need the same resharding.
#
# A *reading* is one operand of one operator. Whatever shardings a plan chooses, all
# readings of one group need the same resharding steps. In a program of equal layers,
# these steps are therefore computed for one layer only.


# A value whose layout a node decides, and from which an operand is computed. For each
# of its dimensions: the number of the operand's dimension with the same sharding.
_Part = tuple[int, Dims]


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A reading: one operand of one operator.

    Attributes:
      group: the number of the group of this reading.
      slot: the operand's position.
      value: the operand.
      sources: the values with a home from which the operand is computed
        (`autopar.steps.uses.required_values`).
    """

    group: int
    slot: int
    value: int
    sources: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingGroup:
    """Readings that need the same resharding steps, whatever shardings a plan chooses.

    Attributes:
      operator: one of the operators of the readings.
      slot: the operand's position.
      parts: the values with a home (a node that decides their layout) from which the
        operand of that operator is computed. For each dimension of such a value, the
        part has the dimension of the operand with the same sharding, or ().
    """

    operator: Operator
    slot: int
    parts: tuple[_Part, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReadingRows:
    """The parts of all readings as arrays, in the order of the operators.

    Attributes:
      operators: for each part, the operator that reads it.
      sources: for each part, the value with a home.
      ways: for each part, its index among the parts of all groups. Each such index
        needs one resharding.
    """

    operators: np.ndarray
    sources: np.ndarray
    ways: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Readings:
    """The readings of all operators that have a choice of a sharding.

    Attributes:
      groups: the groups, by number.
      of: for each operator, its readings; () if the operator has no choice.
      rows: the parts of all readings.
    """

    groups: tuple[ReadingGroup, ...]
    of: tuple[tuple[Reading, ...], ...]
    rows: ReadingRows


def readings(graph: OperatorGraph, contraction: Contraction) -> Readings:
    """Groups the readings of a graph by the resharding steps that they need.

    Args:
      graph: the operator graph.
      contraction: the nodes of the graph.
    """
    numbers: dict[tuple[object, ...], int] = {}
    known: dict[int, tuple[tuple[_Part, ...], tuple[object, ...]]] = {}
    groups: list[ReadingGroup] = []
    of: list[tuple[Reading, ...]] = []
    for op in graph.operators:
        own: list[Reading] = []
        if op.kind != "return" and op.class_index in contraction.node_of:
            for slot, value in enumerate(op.inputs):
                if value is None:
                    continue
                if value not in known:
                    parts = _parts(graph, contraction, value)
                    known[value] = parts, tuple(_key(contraction, p) for p in parts)
                parts, keys = known[value]
                key = (op.class_index, slot, *keys)
                number = numbers.setdefault(key, len(groups))
                if number == len(groups):
                    groups.append(ReadingGroup(op, slot, parts))
                sources = tuple(source for source, _ in parts)
                own.append(Reading(number, slot, value, sources))
        of.append(tuple(own))
    return Readings(tuple(groups), tuple(of), _rows(groups, of))


def _rows(
    groups: Sequence[ReadingGroup], of: Sequence[Sequence[Reading]]
) -> ReadingRows:
    first = np.cumsum([0, *(len(group.parts) for group in groups)]).tolist()
    found = [
        (index, source, first[reading.group] + place)
        for index, own in enumerate(of)
        for reading in own
        for place, source in enumerate(reading.sources)
    ]
    operators, sources, ways = np.array(found, dtype=int).reshape(-1, 3).T
    return ReadingRows(operators, sources, ways)


def _parts(
    graph: OperatorGraph, contraction: Contraction, value: int
) -> tuple[_Part, ...]:
    rank = len(graph.values[value].shape)
    return tuple(
        required_values(graph, contraction, value, tuple((dim,) for dim in range(rank)))
    )


def _key(contraction: Contraction, part: _Part) -> tuple[object, ...]:
    source, dims = part
    home = contraction.homes[source]
    return (*value_class(contraction, source), home.node, home.dims, dims)
