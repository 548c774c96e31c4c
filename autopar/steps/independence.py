"""Collectives that do not depend on each other.

The collectives of each of the following kinds are independent of each other:

* sums of gradients that only the update reads, and sums of values that the step only
  reports, such as the loss;
* gathers of parameters: inputs of the step, with or without a cast, and the state that
  the step returns;
* gathers of arrays that the update computes by element-wise operations only, from
  gradients, state and numbers such as a norm. For example, if Adam's moments are
  sharded and the parameters are not, Adam's steps are gathered;
* sums of the update that depend on no other sum of the update, such as the norms of
  gradients. Such a sum runs over the mesh axes that shard the gradient. The gradient
  itself therefore needs a reduce-scatter over these axes, which is a separate message.

Compilers may join independent collectives into one message (`autopar.cost.combining`).
In the backward pass, the parameters of a layer under ``jax.checkpoint`` go through an
optimization barrier, together with the gradient of the layer's output. The gathers of
this layer therefore wait for the gathers of the layers after it, and each such layer
has its own messages.

Activations depend on each other from layer to layer, so the cost model gives each
collective of activations its own message. XLA also joins a few of these collectives,
but the cost model ignores this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.rules.factor_rule import FactorKind
from autopar_passes.sums.stacked import Deferral

# Operators at the boundary of a loop that pass on an operand, or its part for one
# iteration.
_HANDING = ("enter", "slice_step")
# A barrier is one equation. The graph has an operator for each array that passes it.
_BARRIER = "optimization_barrier"


@dataclasses.dataclass(frozen=True, slots=True)
class Independent:
    """The operators whose collectives do not depend on each other.

    Attributes:
      summing: classes of operators whose partial results are sums of gradients or of
        reported values.
      gathered: classes of operators whose results are gathered parameters, or gathered
        arrays of the update.
      norms: classes of operators whose partial results are independent sums of the
        update.
      computations: for each operator, the last operator of its computation, which is
        the innermost loop or branch, or the program.
      outside: for each operator, the last operator of the computation that contains its
        own computation.
      behind: parameter that goes through a barrier together with a value of the
        backward pass -> the equation of the last such barrier.
      parameters: classes of operators whose results are parameters, or are computed
        from parameters alone.
    """

    summing: frozenset[int]
    gathered: frozenset[int]
    norms: frozenset[int]
    computations: tuple[int, ...]
    outside: tuple[int, ...]
    behind: Mapping[int, int]
    parameters: frozenset[int]


def independent(graph: OperatorGraph, deferrals: Sequence[Deferral]) -> Independent:
    """Finds the collectives that compilers may join into one message.

    Either all operators of a class count, or none.
    """
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
        _whole_classes(graph, _of_parameters(graph)),
    )


def _of_parameters(graph: OperatorGraph) -> set[int]:
    """Returns operators that pass on parameters, perhaps cast, and no other values."""
    roles = InputRole.PARAMETER, InputRole.FROZEN
    given = {i.value for i in graph.inputs if i.role in roles}
    out: set[int] = set()
    for op in graph.operators:
        arrays = [v for v in op.inputs if v is not None]
        is_input = op.kind == "input" and given.issuperset(op.outputs)
        if is_input or (arrays and given.issuperset(arrays) and _hands_on(op)):
            given.update(op.outputs)
            out.add(op.index)
    return out


def _report_operators(graph: OperatorGraph) -> set[int]:
    """Returns forward operators whose results reach the caller without another sum."""
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
    """Sums of the update that depend on no other sum of the update."""
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
    """Returns operators that pass on inputs or make new state, and their barriers.

    An operator passes on an input if it only casts or reshapes it.
    """
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
    """Whether an operator passes arrays on, perhaps in another shape."""
    passes = all(kind is FactorKind.PASS for kind in op.rule.kinds)
    return passes or op.kind in _HANDING


def _elementwise_updates(graph: OperatorGraph) -> set[int]:
    """Returns operators of the update that only follow its element-wise operators."""
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
    """Returns the equations of barriers through which a backward value goes."""
    made = {v for op in graph.operators if op.role is Role.BACKWARD for v in op.outputs}
    return {
        op.equation
        for op in graph.operators
        if op.kind == _BARRIER and not made.isdisjoint(op.inputs)
    }


def _whole_classes(graph: OperatorGraph, operators: set[int]) -> frozenset[int]:
    """Returns the classes that have only operators from ``operators``."""
    rest = {op.class_index for op in graph.operators if op.index not in operators}
    return frozenset(graph.operators[i].class_index for i in operators) - rest


def _computations(graph: OperatorGraph) -> list[tuple[int, int]]:
    """Returns the ends of two computations for each operator.

    The first computation is the innermost loop or branch that contains the operator, or
    the program. The second is the computation that contains the first.

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
