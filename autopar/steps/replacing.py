"""Which readings an update must not overtake, since it writes where they read.

A step writes its new parameters in the place of the old ones. What still reads the old
ones then would read the new. Where the program itself does not order the two, XLA's CPU
compiler copies the old ones first (``CopyInsertion``). An update is behind a reading if
a gradient that it waits for is made of what is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar_passes.graph.operators import OperatorGraph, readers
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Replacing:
    """Sets of gradients, as bits.

    Attributes:
      bits: of each gradient that the update reads.
      made_of: by operator, the gradients that are made of its results.
      waits_for: by input that is replaced, the gradients that its update waits for.
    """

    bits: dict[int, int]
    made_of: tuple[int, ...]
    waits_for: dict[int, int]

    def together(self, gradients: Iterable[int]) -> int:
        """The bits of some gradients."""
        out = 0
        for value in gradients:
            out |= self.bits.get(value, 0)
        return out


NONE = Replacing({}, (), {})


def replacing(graph: OperatorGraph) -> Replacing:
    """Finds the gradients that updates wait for, and what these are made of."""
    read = readers(graph.operators)
    bits: dict[int, int] = {}
    for op in graph.operators:
        for value in op.outputs:
            roles = {r.role for r, _ in read.get(value, []) if r.kind != "return"}
            if op.role is Role.BACKWARD and Role.UPDATE in roles:
                bits[value] = 1 << len(bits)
    behind = [0] * len(graph.operators)
    for op in reversed(graph.operators):
        for value in op.outputs:
            behind[op.index] |= bits.get(value, 0)
            for reader, _ in read.get(value, []):
                if reader.role is not Role.UPDATE:
                    behind[op.index] |= behind[reader.index]
    return Replacing(bits, tuple(behind), _waits(graph, bits))


def _waits(graph: OperatorGraph, bits: dict[int, int]) -> dict[int, int]:
    """The gradients that the update of each replaced input waits for."""
    made = dict(bits)
    for op in graph.operators:
        if op.role is Role.UPDATE:
            needed = 0
            for value in op.inputs:
                needed |= made.get(value, 0) if value is not None else 0
            made.update((v, needed) for v in op.outputs)
    ends = [(i.value, graph.outputs[i.output]) for i in graph.inputs if i.output >= 0]
    return {
        old: made.get(new, 0) for old, new in ends if new is not None and new != old
    }
