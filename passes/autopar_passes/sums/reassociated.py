"""Finds additions of partial results whose two all-reduces XLA combines into one.

XLA turns the sum of two all-reduces into the all-reduce of a sum
(``xla/service/all_reduce_reassociate.cc``, ``reduce_scatter_reassociate.cc`` in
openxla/xla). For example, queries, keys and values give three gradients of the same
input, and only the sum of the three crosses the links between devices. The two
all-reduces must be over the same devices, and each must have only one reader. XLA moves
operations between an all-reduce and the addition if they only change a shape.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar_passes.graph.operators import OperatorGraph, producers, readers
from autopar_passes.sums.stacked import ADDITIONS, CONTRACTIONS

_SHAPING = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "copy"})


class Reassociation(NamedTuple):
    """An addition of two values whose all-reduces may be combined into one.

    Attributes:
      operator: the addition.
      summed: the two values that would be all-reduced: results of contractions, or of
        earlier additions of this kind.
      between: every value from ``summed`` (inclusive) to the operands of the addition.
    """

    operator: int
    summed: tuple[int, int]
    between: tuple[int, ...]


def reassociations(graph: OperatorGraph) -> tuple[Reassociation, ...]:
    """Returns the combinable additions of a program, in program order."""
    made_by, read_by = producers(graph.operators), readers(graph.operators)
    outputs = frozenset(graph.outputs)
    joined: set[int] = set()

    def way(value: int | None) -> tuple[int, ...]:
        """The values from an operand back to the value that is all-reduced.

        The result is () if none.
        """
        out: list[int] = []
        while value is not None and value not in outputs:
            if len(read_by.get(value, ())) != 1:
                break
            out.append(value)
            op = made_by[value]
            contracts = op.kind in CONTRACTIONS and op.rule.reduction == "sum"
            if value in joined or (contracts and len(op.outputs) == 1):
                return tuple(out)
            if op.kind not in _SHAPING:
                break
            value = op.inputs[0]
        return ()

    found: list[Reassociation] = []
    for op in graph.operators:
        if op.kind not in ADDITIONS or len(op.inputs) != 2:
            continue
        one, other = (way(v) for v in op.inputs)
        if one and other:
            joined.add(op.outputs[0])
            summed = one[-1], other[-1]
            found.append(Reassociation(op.index, summed, (*one, *other)))
    return tuple(found)
