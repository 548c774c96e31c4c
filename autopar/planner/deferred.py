"""Which of the sums that may wait do wait under a plan, and how they are held.

A `autopar_passes.sums.deferral.Deferral` can be taken where all its contributions
are partial over the same mesh axes, and every value on the way has the layout
that the operators around it have, once those axes are taken out: then holding
the value stacked needs no communication at all.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from autopar.planner.layout import Axes, Layout, axes_of, reshard_steps
from autopar_passes.graph.operators import Operator
from autopar_passes.rules.factor_rule import Dims
from autopar_passes.sums.deferral import Deferral

if TYPE_CHECKING:
    from autopar.planner.assignment import Assignment

_SCATTER = "scatter-add"


@dataclasses.dataclass(frozen=True, slots=True)
class Stacking:
    """A way that a plan takes.

    Attributes:
      deferral: the way.
      axes: the mesh axes over which its values are partial.
    """

    deferral: Deferral
    axes: Axes

    def strip(self, layout: Layout) -> Layout:
        """A layout without the partial axes: how a value on the way is held."""
        return tuple(tuple(a for a in dim if a not in self.axes) for dim in layout)


def stacking(assignment: Assignment, deferral: Deferral) -> Stacking | None:
    """How a plan takes a way, or None if its layouts do not allow it."""
    graph = assignment.graph
    makers = [graph.operators[c] for c in deferral.contributions]
    if any(op.class_index not in assignment.contraction.node_of for op in makers):
        return None
    partials = {assignment.partial(op) for op in makers}
    axes = partials.pop()
    if partials or not axes:
        return None
    way = Stacking(deferral, axes)
    fits = (
        all(_starts(assignment, way, op) for op in makers)
        and all(
            _passes(assignment, way, op)
            for v in deferral.members
            if (op := assignment.contraction.producer[v]) not in makers
        )
        and all(_ends(assignment, way, v) for v in deferral.ends)
    )
    return way if fits else None


def _starts(assignment: Assignment, way: Stacking, op: Operator) -> bool:
    """Whether a partial result becomes the stacked value by slicing alone."""
    own = assignment.layout(op, op.rule.results[0])
    home = way.strip(assignment.home_layout(op.outputs[0]))
    steps = reshard_steps(own, home, (), "", assignment.sizes)
    if op.kind == _SCATTER and not _whole_rows(assignment, op):
        return False
    return all(s.kind == "slice" for s in steps)


def _whole_rows(assignment: Assignment, op: Operator) -> bool:
    """Whether a scatter's indices find every row on each device.

    The factors of the operand that its updates do not have are those indexed.
    """
    operand, _, updates = op.rule.operands
    layout = assignment.layout(op, operand)
    window = op.rule.factors_of(updates)
    return all(
        not axes or set(factors) <= window
        for factors, axes in zip(operand, layout, strict=True)
    )


def _passes(assignment: Assignment, way: Stacking, op: Operator) -> bool:
    """Whether a linear operator finds its operands where it works."""
    if assignment.partial_of(op) and op.kind != "carry":
        return False
    for value, dims in zip(op.inputs, op.rule.operands, strict=True):
        if value is None or value in assignment.contraction.floating:
            continue
        home = assignment.home_layout(value)
        if way.strip(home) != way.strip(_layout(assignment, op, dims)):
            return False
        member = value in way.deferral.members
        if not member and axes_of(home) & set(way.axes):
            return False
    return all(
        way.strip(assignment.home_layout(value))
        == way.strip(_layout(assignment, op, dims))
        for value, dims in zip(op.outputs, op.rule.results, strict=True)
        if value in way.deferral.members
    )


def _layout(assignment: Assignment, op: Operator, dims: Dims) -> Layout:
    if op.class_index not in assignment.contraction.node_of:
        return ((),) * len(dims)
    return assignment.layout(op, dims)


def _ends(assignment: Assignment, way: Stacking, value: int) -> bool:
    """Whether the sum, once taken, is where its readers expect the value."""
    home = assignment.home_layout(value)
    start = way.strip(home)
    steps = reshard_steps(start, home, way.axes, "sum", assignment.sizes)
    return all(s.kind in ("slice", "all_reduce", "reduce_scatter") for s in steps)
