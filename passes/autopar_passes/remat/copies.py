"""Copies of equations that compute a forward pass again."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Sequence

from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Equation, Program, Value, walk
from autopar_passes.program.flatten import renumber_equation
from autopar_passes.stages.flow import Flow, reads

# JAX's name for the part of a backward pass that repeats a forward pass.
_STACK = "transpose(rematted_computation)"


def needed_equations(
    equations: Sequence[Equation],
    values: Collection[int],
    kept: Callable[[int], bool],
) -> tuple[tuple[Equation, ...], tuple[int, ...]]:
    """The equations that make values, and the kept values that they start from.

    Args:
      equations: in program order.
      values: to be made.
      kept: whether a value is there already.
    """
    wanted, given = set(values), dict[int, None]()
    found: list[Equation] = []
    for eqn in reversed(equations):
        if wanted.isdisjoint(eqn.outputs):
            continue
        found.append(eqn)
        for value in reads(eqn):
            if kept(value):
                given[value] = None
            else:
                wanted.add(value)
    return tuple(reversed(found)), tuple(sorted(given))


class Numbers:
    """Gives numbers to new values and equations of a program.

    Attributes:
      values: all values.
    """

    def __init__(self, program: Program, next_index: int) -> None:
        """Has given none yet.

        Args:
          program: whose numbers are taken.
          next_index: the first index that no equation has.
        """
        self.values = list(program.values)
        self.next_index = next_index

    def new(self, like: Value) -> int:
        """A value of the shape, dtype and name of another one."""
        self.values.append(like)
        return len(self.values) - 1

    def index(self) -> int:
        """An index of an equation."""
        self.next_index += 1
        return self.next_index - 1

    def copies(
        self, equations: Sequence[Equation], known: dict[int, int]
    ) -> tuple[list[Equation], Callable[[int], int]]:
        """Equations that compute the same from other values, named as repeated.

        Args:
          equations: what is copied, in order.
          known: value -> what the copies read instead.

        Returns:
          The copies, and a function from a value to its copy.
        """
        numbers = dict(known)
        for eqn in equations:
            for value in _made_values(eqn):
                numbers[value] = self.new(self.values[value])

        def copy(value: int) -> int:
            return numbers.get(value, value)

        made = [
            _copy_named(renumber_equation(eqn, copy, lambda _: self.index()))
            for eqn in equations
        ]
        return made, copy


def _made_values(eqn: Equation) -> list[int]:
    """The values that an equation makes, also within its regions."""
    found = list(eqn.outputs)
    for region in eqn.regions:
        found.extend(region.inputs)
        found.extend(v for inner in walk(region) for v in inner.outputs)
        found.extend(
            v for inner in walk(region) for deep in inner.regions for v in deep.inputs
        )
    return found


def _copy_named(eqn: Equation) -> Equation:
    """A copy under the name that JAX gives to what a backward pass computes again."""
    stack = f"{eqn.name_stack}/{_STACK}" if eqn.name_stack else _STACK
    regions = tuple(
        dataclasses.replace(r, equations=tuple(_copy_named(e) for e in r.equations))
        for r in eqn.regions
    )
    return dataclasses.replace(eqn, name_stack=stack, regions=regions)


# Draws other numbers each time it runs; what has keys draws the same ones.
NEVER = frozenset({"rng_uniform"})


def owners(flow: Flow, starts: Sequence[int]) -> dict[int, int]:
    """The layer of each forward equation that may be computed again.

    An equation that depends on the state and on the batch belongs to the layer in which
    it stands. Another one, such as the cast of a weight, belongs to the layer that
    alone reads it; what several layers read, such as a mask, belongs to none. What has
    an effect belongs to none.

    Args:
      flow: what equations depend on.
      starts: the forward equation at which each layer begins, ascending.

    Returns:
      Index of the equation -> number of the layer.
    """
    order = {index: place for place, index in enumerate(flow.equations)}
    begins = [order[start] for start in starts]
    found: dict[int, int] = {}
    for index, eqn in flow.equations.items():
        if _can_repeat(flow, eqn) and index not in flow.free:
            found[index] = max(0, bisect.bisect_right(begins, order[index]) - 1)
    for index in reversed(tuple(flow.equations)):
        eqn = flow.equations[index]
        if not _can_repeat(flow, eqn) or index not in flow.free:
            continue
        among = {found.get(r, -1) for r in _forward_readers(flow, eqn)}
        if len(among) == 1 and min(among) >= 0:
            found[index] = among.pop()
    return found


def _can_repeat(flow: Flow, eqn: Equation) -> bool:
    forward = flow.roles[eqn.index] is Role.FORWARD
    return forward and not eqn.source.effects and eqn.primitive not in NEVER


def _forward_readers(flow: Flow, eqn: Equation) -> list[int]:
    """The forward equations that read what an equation makes."""
    found = (r for v in eqn.outputs for r in flow.readers.get(v, ()))
    return [r for r in found if flow.roles[r] is Role.FORWARD]


def crossing(flow: Flow, owner: dict[int, int]) -> frozenset[int]:
    """The values that one layer makes and another one reads in the forward pass."""
    out: set[int] = set()
    for index, eqn in flow.equations.items():
        layer = owner.get(index)
        if layer is None:
            continue
        out.update(
            v for v in reads(eqn) if owner.get(flow.maker.get(v, -1), layer) != layer
        )
    return frozenset(out)
