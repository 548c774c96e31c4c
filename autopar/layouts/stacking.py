"""Sums over devices that a plan postpones, and the layouts of partial values.

A plan uses a `autopar_passes.sums.stacked.Deferral` under two conditions. First, all
operators that contribute to the deferral must have results that are partial over the
same mesh axes. Second, apart from these axes, every value of the deferral must have the
layout that the operators around it use. The stacked value then needs no communication
until the sum.

If replicas share the microbatches of a step, each replica has its own part of the sums
over microbatches. A gradient is then also partial over the mesh axis of the replicas,
from the end of the loop over microbatches on (`stack_between`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Protocol

from autopar.layouts.layout import Axes, Layout, axes_of, reshard_steps
from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.rules.factor_rule import Dims
from autopar_passes.sums.stacked import Deferral

SCATTER = "scatter-add"


class Layouts(Protocol):
    """The layouts of each operator and value in a plan; `Assignment` is one."""

    @property
    def graph(self) -> OperatorGraph:
        """The operator graph."""
        ...

    @property
    def contraction(self) -> Contraction:
        """The nodes, each of which chooses a sharding."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each mesh axis."""
        ...

    def home_layout(self, value: int) -> Layout:
        """Returns the layout in which a value is kept."""
        ...

    def layout(self, op: Operator, dims: Dims) -> Layout:
        """Returns the layout of an operand or result under the operator's strategy."""
        ...

    def partial(self, op: Operator) -> Axes:
        """Returns the axes over which an operator's results are partial."""
        ...

    def partial_of(self, op: Operator) -> Axes:
        """Like `partial`, but () for an operator without a node."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Stacking:
    """A deferral that a plan uses.

    Attributes:
      deferral: the deferral.
      axes: the mesh axes over which its values are partial.
    """

    deferral: Deferral
    axes: Axes

    @property
    def whole(self) -> dict[int, Stacking]:
        """Maps each value of the deferral to this stacking."""
        return dict.fromkeys(self.deferral.members, self)

    def strip(self, layout: Layout) -> Layout:
        """Returns a layout without the partial axes, as a value has until the sum."""
        return without(layout, self.axes)


def without(layout: Layout, axes: Axes) -> Layout:
    """Returns a layout with some axes removed."""
    return tuple(tuple(a for a in dim if a not in axes) for dim in layout)


def partial_along(assignment: Layouts, deferral: Deferral) -> Axes:
    """The axes over which all results that contribute to a deferral are partial.

    If the contributing results are partial over different axes, the function returns
    (), and no sum is postponed.
    """
    makers = [assignment.graph.operators[c] for c in deferral.contributions]
    partials = {assignment.partial_of(op) for op in makers}
    return partials.pop() if len(partials) == 1 else ()


def stacking_of(assignment: Layouts, deferral: Deferral) -> Stacking | None:
    """The stacking of a deferral; None if the plan's layouts do not allow one."""
    graph = assignment.graph
    makers = [graph.operators[c] for c in deferral.contributions]
    axes = partial_along(assignment, deferral)
    if not axes:
        return None
    stacking = Stacking(deferral, axes)
    fits = (
        all(_starts(assignment, stacking, op) for op in makers)
        and all(
            _passes(assignment, stacking, op)
            for v in deferral.members
            if (op := assignment.contraction.producer[v]) not in makers
        )
        and all(_ends(assignment, stacking, v) for v in deferral.ends)
    )
    return stacking if fits else None


def stack_between(
    assignment: Layouts,
    deferral: Deferral,
    within: Stacking | None,
    replicas: Axes,
    results: Collection[int],
    repeated: frozenset[int],
) -> dict[int, Stacking]:
    """The values of a deferral that are partial over replicas, with their stackings.

    The values are the results of the loop over microbatches, and those that are
    computed from them until the sum is due. The result is empty if an operator outside
    of the loop contributes, or if the layouts do not allow the sum to wait.

    Args:
      assignment: the layouts.
      deferral: the deferral.
      within: its stacking over the devices of each replica; None: its values are whole
        in a replica.
      replicas: the mesh axes of the replicas.
      results: the results of the loop over microbatches.
      repeated: the equations of the loop's body.
    """
    operators, producer = assignment.graph.operators, assignment.contraction.producer
    made = {c: operators[c].equation for c in deferral.contributions}
    ends = [v for v in deferral.ends if producer[v].equation not in repeated]
    if not ends or not repeated.issuperset(made.values()):
        return {}
    first = deferral.members.intersection(results)
    outside = {producer[v].equation for v in first} | repeated
    later = {v for v in deferral.members if producer[v].equation not in outside}
    stacking = Stacking(deferral, (*replicas, *(within.axes if within else ())))
    fits = within is not None or (
        all(_passes(assignment, stacking, producer[v]) for v in later)
        and all(_ends(assignment, stacking, v) for v in ends)
    )
    return dict.fromkeys(first | later, stacking) if fits else {}


def _starts(assignment: Layouts, stacking: Stacking, op: Operator) -> bool:
    """Whether slicing alone turns a partial result into the stacked value."""
    own = assignment.layout(op, op.rule.results[0])
    home = stacking.strip(assignment.home_layout(op.outputs[0]))
    steps = reshard_steps(own, home, (), "", assignment.sizes)
    if op.kind == SCATTER and not whole_rows(assignment, op):
        return False
    return all(s.kind == "slice" for s in steps)


def whole_rows(assignment: Layouts, op: Operator) -> bool:
    """Whether each device has all rows that a scatter's indices may select.

    The indexed factors are the factors of the operand that the updates do not have.
    """
    operand, _, updates = op.rule.operands
    layout = assignment.layout(op, operand)
    window = op.rule.factors_of(updates)
    return all(
        not axes or set(factors) <= window
        for factors, axes in zip(operand, layout, strict=True)
    )


def _passes(assignment: Layouts, stacking: Stacking, op: Operator) -> bool:
    """Whether the operands of a linear operator have the layouts that the operator
    needs.
    """
    if assignment.partial_of(op) and op.kind != "carry":
        return False
    for value, dims in zip(op.inputs, op.rule.operands, strict=True):
        if value is None or value in assignment.contraction.floating:
            continue
        home = assignment.home_layout(value)
        if stacking.strip(home) != stacking.strip(_layout(assignment, op, dims)):
            return False
        member = value in stacking.deferral.members
        if not member and axes_of(home) & set(stacking.axes):
            return False
    return all(
        stacking.strip(assignment.home_layout(value))
        == stacking.strip(_layout(assignment, op, dims))
        for value, dims in zip(op.outputs, op.rule.results, strict=True)
        if value in stacking.deferral.members
    )


def _layout(assignment: Layouts, op: Operator, dims: Dims) -> Layout:
    if op.class_index not in assignment.contraction.node_of:
        return ((),) * len(dims)
    return assignment.layout(op, dims)


def _ends(assignment: Layouts, stacking: Stacking, value: int) -> bool:
    """Whether the sum has the layout that its readers expect."""
    home = assignment.home_layout(value)
    start = stacking.strip(home)
    steps = reshard_steps(start, home, stacking.axes, "sum", assignment.sizes)
    return all(s.kind in ("slice", "all_reduce", "reduce_scatter") for s in steps)
