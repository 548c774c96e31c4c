"""Adds gradients of several stages up once a step, not once a microbatch.

A parameter that layers of several stages use, such as a tied embedding, has a gradient
that is a sum over stages. The sum over microbatches may be taken first: then each stage
sends its part once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar_passes.graph.roles import Role
from autopar_passes.microbatches.microbatched import Combine, Crossing, Microbatched
from autopar_passes.program.equations import Equation
from autopar_passes.stages.parts import Parts
from autopar_passes.sums.linear import ADDITIONS, UNARY

_ADDED = (Combine.SUM, Combine.MEAN)


def hoist_sums(
    found: Microbatched, parts: Parts, stage_of: Sequence[int]
) -> Microbatched:
    """Returns the split in which sums over stages are taken once a step.

    Args:
      found: how the step is split into microbatches.
      parts: the part of each equation.
      stage_of: part -> stage.
    """
    hoister = _Hoister(parts, stage_of)
    crossings: dict[int, Crossing] = {}
    left = list(reversed(found.crossings))
    while left:
        crossing = left.pop()
        eqn = hoister.maker(crossing.value)
        if crossing.combine not in _ADDED or eqn is None or not hoister.spans(eqn):
            crossings.setdefault(crossing.value, crossing)
            continue
        hoister.once.add(eqn.index)
        for atom in eqn.inputs:
            if isinstance(atom, int):
                left.append(dataclasses.replace(crossing, value=atom))
    if not hoister.once:
        return found
    return dataclasses.replace(
        found,
        once=found.once | hoister.once,
        crossings=tuple(crossings.values()),
    )


class _Hoister:
    def __init__(self, parts: Parts, stage_of: Sequence[int]) -> None:
        self.parts = parts
        self.stage_of = stage_of
        self.once: set[int] = set()

    def maker(self, value: int) -> Equation | None:
        """The backward equation that makes a value, if only what runs once reads it."""
        flow = self.parts.flow
        index = flow.maker.get(value, -1)
        if index not in self.parts.part or flow.roles[index] is not Role.BACKWARD:
            return None
        readers = flow.readers.get(value, ())
        late = all(flow.roles[r] is Role.UPDATE or r in self.once for r in readers)
        return flow.equations[index] if late else None

    def spans(self, eqn: Equation) -> bool:
        """Whether an equation adds up values of several stages, or passes that on."""
        made = [self.behind(a) for a in eqn.inputs if isinstance(a, int)]
        if any(m is None for m in made):
            return False
        stages = {self.stage_of[self.parts.part[m.index]] for m in made if m}
        if eqn.primitive in ADDITIONS:
            return len(stages) > 1 or any(self.spans(m) for m in made if m)
        alone = eqn.primitive in UNARY and len(made) == 1
        return alone and all(self.spans(m) for m in made if m)

    def behind(self, value: int) -> Equation | None:
        """The backward equation that makes a value which nothing else reads."""
        flow = self.parts.flow
        index = flow.maker.get(value, -1)
        if index not in self.parts.part or flow.roles[index] is not Role.BACKWARD:
            return None
        alone = len(flow.readers.get(value, ())) == 1
        return flow.equations[index] if alone else None
