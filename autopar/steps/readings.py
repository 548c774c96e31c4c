"""What operators read, grouped by what decides how it is brought to them.

Readings of one group are brought by the same steps under every assignment, so a
program of equal layers asks for the steps of one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.steps.nodes import Contraction
from autopar.steps.uses import required_values, value_class
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.rules.factor_rule import Dims

# A part of an operand: the dimensions of the operand, by number, that split each of its
# own.
_Part = tuple[int, Dims]


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One operand of one operator.

    Attributes:
      group: number of its group.
      slot: the operand's position.
      value: the operand.
      sources: the values with a home that make it
        (`autopar.steps.uses.required_values`).
    """

    group: int
    slot: int
    value: int
    sources: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingGroup:
    """Readings that are alike.

    Attributes:
      operator: one of the operators that read so.
      slot: the operand's position.
      parts: of the operand of that operator: each value with a home, and for each of
        its dimensions the dimension of the operand that it is split with, or ().
    """

    operator: Operator
    slot: int
    parts: tuple[_Part, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReadingRows:
    """The parts of all readings, in the order of the operators, as arrays.

    Attributes:
      operators: of each part, the operator that reads.
      sources: the value with a home.
      ways: its place among the parts of all groups, one group behind the other.
    """

    operators: np.ndarray
    sources: np.ndarray
    ways: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Readings:
    """All that the operators of a graph read that have a choice.

    Attributes:
      groups: by number.
      of: by operator, what it reads; () where it has no choice.
      rows: all of it, part by part.
    """

    groups: tuple[ReadingGroup, ...]
    of: tuple[tuple[Reading, ...], ...]
    rows: ReadingRows


def readings(graph: OperatorGraph, contraction: Contraction) -> Readings:
    """Groups the readings of a graph.

    Args:
      graph: the operator graph.
      contraction: its nodes.
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
