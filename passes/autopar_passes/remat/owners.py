"""The layer of each forward equation that may be computed again."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Equation
from autopar_passes.stages.flow import Flow, reads

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
