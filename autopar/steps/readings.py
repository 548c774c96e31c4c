"""The operands of operators, in groups that need the same resharding.

A *reading* is one operand of one operator. Whatever shardings a plan chooses, all
readings of one group need the same resharding steps. In a program of equal layers,
these steps are therefore computed for one layer only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.steps.nodes import Contraction
from autopar.steps.uses import required_values, value_class
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.rules.factor_rule import Dims

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
      ways: for each part, its position in the list of all groups' parts. One resharding
        is computed for each position of this list.
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
