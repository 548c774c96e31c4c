"""Collectives that need no other's result.

Three kinds of collectives never need each other:

* sums of gradients that only the update reads, and of what the step only reports,
  its loss;
* gathers of parameters: of the step's inputs, as they are or cast, and of the state
  that leaves it;
* gathers of the update that come behind none of its sums and products of arrays, such
  as those of Adam's steps where its moments are split and the parameters are not;
* sums of the update that none of its other sums is made of, such as the norms of
  gradients. Over the axes of such a sum the gradient is split, so what it needs there
  is a reduce-scatter, in another message.

Compilers may join such collectives into one message (`autopar.cost.combining`). What a
checkpointed layer reads in the backward pass comes through a barrier, with the gradient
that comes down to the layer: its gathers need those of the layers above it, and each
such layer has messages of its own.

Activations wait for each other from layer to layer, so theirs are taken to travel
alone. XLA does join a few of those, too; that is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.rules.factor_rule import FactorKind
from autopar_passes.sums.stacked import Deferral

# Boundaries of loops that hand over what they get, whole or a part at a time.
_HANDING = ("enter", "slice_step")
# One equation, and an operator for each array that goes through it.
_BARRIER = "optimization_barrier"


@dataclasses.dataclass(frozen=True, slots=True)
class Independent:
    """The operators whose collectives need no other's result.

    Attributes:
      summing: classes of operators whose partial results are such sums.
      gathered: classes of operators whose results are such parameters, or such arrays
        of the update.
      norms: classes of operators whose partial results are such sums of the update.
      computations: of each operator, the last operator of its computation.
      outside: of each operator, that of the computation around its own.
      behind: parameters that come through a barrier together with something of the
        backward pass, each with the equation of the last such barrier.
    """

    summing: frozenset[int]
    gathered: frozenset[int]
    norms: frozenset[int]
    computations: tuple[int, ...]
    outside: tuple[int, ...]
    behind: Mapping[int, int]


def independent(graph: OperatorGraph, deferrals: Sequence[Deferral]) -> Independent:
    """Finds the collectives that compilers may join; all of a class or none."""
    final = {
        op
        for deferral in deferrals
        for op, ends in deferral.reach
        if deferral.gradients.issuperset(ends)
    }
    parameters, behind = _parameters(graph)
    parameters |= _elementwise_updates(graph)
    places = _computations(graph)
    return Independent(
        _whole_classes(graph, final | _report_operators(graph)),
        _whole_classes(graph, parameters),
        _whole_classes(graph, _norms(graph)),
        tuple(own for own, _ in places),
        tuple(around for _, around in places),
        behind,
    )


def _report_operators(graph: OperatorGraph) -> set[int]:
    """Operators of the forward pass whose results go to the caller, in no other sum."""
    used: set[int] = set()
    out: set[int] = set()
    for op in reversed(graph.operators):
        if op.kind == "return":
            continue
        reported = op.role is Role.FORWARD and used.isdisjoint(op.outputs)
        if reported:
            out.add(op.index)
        if op.rule.reduced_factors or not reported:
            used.update(v for v in op.inputs if v is not None)
    return out


def _norms(graph: OperatorGraph) -> set[int]:
    """Sums of the update that are made of none of its other sums."""
    made: set[int] = set()
    out: set[int] = set()
    for op in graph.operators:
        if op.role is not Role.UPDATE:
            continue
        follows = not made.isdisjoint(op.inputs)
        if op.rule.reduced_factors and not follows:
            out.add(op.index)
        if op.rule.reduced_factors or follows:
            made.update(op.outputs)
    return out


def _parameters(graph: OperatorGraph) -> tuple[set[int], dict[int, int]]:
    """What hands over inputs, cast or reshaped, or makes new state; and `behind`."""
    carried = {graph.outputs[i.output] for i in graph.inputs if i.output >= 0}
    given: set[int] = set()
    out: set[int] = set()
    behind: dict[int, int] = {}
    waiting = _waiting(graph)
    for op in graph.operators:
        arrays = [v for v in op.inputs if v is not None]
        hands_on = arrays and given.issuperset(arrays) and _hands_on(op)
        if op.kind == "input" or hands_on:
            given.update(op.outputs)
            out.add(op.index)
            last = max((behind.get(v, -1) for v in arrays), default=-1)
            if op.kind == _BARRIER and op.equation in waiting:
                last = op.equation
            if last >= 0:
                behind.update((v, last) for v in op.outputs)
        elif op.outputs and carried.issuperset(op.outputs):
            out.add(op.index)
    return out, behind


def _hands_on(op: Operator) -> bool:
    """Whether an operator hands arrays over, or brings them into another shape."""
    passes = all(kind is FactorKind.PASS for kind in op.rule.kinds)
    return passes or op.kind in _HANDING


def _elementwise_updates(graph: OperatorGraph) -> set[int]:
    """Operators of the update that read no array that it sums up or multiplies."""
    mixed: set[int] = set()
    out: set[int] = set()
    for op in graph.operators:
        if op.role is not Role.UPDATE or op.kind == "return":
            continue
        arrays = [v for v in op.outputs if graph.values[v].size > 1]
        if mixed.isdisjoint(op.inputs) and not op.rule.reduced_factors:
            out.add(op.index)
        else:
            mixed.update(arrays)
    return out


def _waiting(graph: OperatorGraph) -> set[int]:
    """The equations of barriers that something of the backward pass goes through."""
    made = {v for op in graph.operators if op.role is Role.BACKWARD for v in op.outputs}
    return {
        op.equation
        for op in graph.operators
        if op.kind == _BARRIER and not made.isdisjoint(op.inputs)
    }


def _whole_classes(graph: OperatorGraph, operators: set[int]) -> frozenset[int]:
    """The classes of which every operator is among these."""
    rest = {op.class_index for op in graph.operators if op.index not in operators}
    return frozenset(graph.operators[i].class_index for i in operators) - rest


def _computations(graph: OperatorGraph) -> list[tuple[int, int]]:
    """The ends of the innermost loop or branch of each operator and of that around it.

    An end is the last operator of a computation.
    """
    whole = len(graph.operators)
    open_until: list[int] = []
    out: list[tuple[int, int]] = []
    for op in graph.operators:
        while open_until and op.index > open_until[-1]:
            open_until.pop()
        if op.until > op.index and (not open_until or op.until != open_until[-1]):
            open_until.append(op.until)
        own, around = [whole, whole, *open_until][-1:-3:-1]
        out.append((own, around))
    return out
