"""Collectives that need no other's result.

Two kinds of collectives never need each other:

* sums of gradients that only the update reads, and of what the step only reports,
  its loss;
* gathers of parameters: of the step's inputs, as they are or cast, and of the state
  that leaves it.

Compilers may join such collectives into one message (`autopar.cost.combining`).
Activations wait for each other from layer to layer, so theirs are taken to travel
alone. XLA does join a few of those, too; that is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.rules.factor_rule import FactorKind
from autopar_passes.sums.deferral import Deferral

# Boundaries of loops that hand over what they get, whole or a part at a time.
_HANDING = ("enter", "slice_step")


@dataclasses.dataclass(frozen=True, slots=True)
class Independent:
    """The operators whose collectives need no other's result.

    Attributes:
      summing: classes of operators whose partial results are such sums.
      gathered: classes of operators whose results are such parameters.
      computations: of each operator, the last operator of its computation.
    """

    summing: frozenset[int]
    gathered: frozenset[int]
    computations: tuple[int, ...]


def independent(graph: OperatorGraph, deferrals: Sequence[Deferral]) -> Independent:
    """Finds the collectives that compilers may join; all of a class or none."""
    final = {
        op
        for deferral in deferrals
        for op, ends in deferral.reach
        if deferral.gradients.issuperset(ends)
    }
    return Independent(
        _whole_classes(graph, final | _reported(graph)),
        _whole_classes(graph, _parameters(graph)),
        _computations(graph),
    )


def _reported(graph: OperatorGraph) -> set[int]:
    """Operators of the forward pass whose results go to the caller, in no other sum."""
    used: set[int] = set()
    out: set[int] = set()
    for op in reversed(graph.operators):
        if op.kind == "return":
            continue
        reported = op.role is Role.FORWARD and used.isdisjoint(op.outputs)
        if reported:
            out.add(op.index)
        if op.rule.reduced or not reported:
            used.update(v for v in op.inputs if v is not None)
    return out


def _parameters(graph: OperatorGraph) -> set[int]:
    """The operators that hand over inputs, cast or reshaped, or make new state."""
    carried = {graph.outputs[i.output] for i in graph.inputs if i.output >= 0}
    given: set[int] = set()
    out: set[int] = set()
    for op in graph.operators:
        arrays = [v for v in op.inputs if v is not None]
        passes = all(kind is FactorKind.PASS for kind in op.rule.kinds)
        hands_on = arrays and given.issuperset(arrays)
        if op.kind == "input" or (hands_on and (passes or op.kind in _HANDING)):
            given.update(op.outputs)
            out.add(op.index)
        elif op.outputs and carried.issuperset(op.outputs):
            out.add(op.index)
    return out


def _whole_classes(graph: OperatorGraph, operators: set[int]) -> frozenset[int]:
    """The classes of which every operator is among these."""
    rest = {op.class_index for op in graph.operators if op.index not in operators}
    return frozenset(graph.operators[i].class_index for i in operators) - rest


def _computations(graph: OperatorGraph) -> tuple[int, ...]:
    """The last operator of the innermost loop or branch that each operator is in."""
    open_until: list[int] = []
    out: list[int] = []
    for op in graph.operators:
        while open_until and op.index > open_until[-1]:
            open_until.pop()
        if op.until > op.index and (not open_until or op.until != open_until[-1]):
            open_until.append(op.until)
        out.append(open_until[-1] if open_until else len(graph.operators))
    return tuple(out)
