"""Deferred sums: the sums that a plan takes later, and how values wait for them.

A plan takes a `autopar_passes.sums.stacked.Deferral` where all its contributions are
partial over the same mesh axes, and where every value along it has the layout that
the operators around it have, once those axes are taken out. Then the stacked value
needs no communication at all.
"""

from __future__ import annotations

import dataclasses
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
        """The nodes with a choice."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each mesh axis."""
        ...

    def home_layout(self, value: int) -> Layout:
        """The layout in which a value is kept."""
        ...

    def layout(self, op: Operator, dims: Dims) -> Layout:
        """The layout of an operand or result under the operator's strategy."""
        ...

    def partial(self, op: Operator) -> Axes:
        """The axes over which an operator's results are partial."""
        ...

    def partial_of(self, op: Operator) -> Axes:
        """`partial`, of any operator: () where it has no node."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Stacking:
    """A deferral that a plan takes.

    Attributes:
      deferral: the deferral.
      axes: the mesh axes over which its values are partial.
    """

    deferral: Deferral
    axes: Axes

    def strip(self, layout: Layout) -> Layout:
        """A layout without the partial axes: how a value along the deferral is held."""
        return without(layout, self.axes)


def without(layout: Layout, axes: Axes) -> Layout:
    """A layout, some of whose axes split nothing."""
    return tuple(tuple(a for a in dim if a not in axes) for dim in layout)


def partial_along(assignment: Layouts, deferral: Deferral) -> Axes:
    """The axes over which all contributions to a deferral are partial.

    () where they are so over different ones: then nothing waits.
    """
    makers = [assignment.graph.operators[c] for c in deferral.contributions]
    partials = {assignment.partial_of(op) for op in makers}
    return partials.pop() if len(partials) == 1 else ()


def stacking_of(assignment: Layouts, deferral: Deferral) -> Stacking | None:
    """The stacking of a deferral in a plan; None if its layouts do not allow it."""
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


def _starts(assignment: Layouts, stacking: Stacking, op: Operator) -> bool:
    """Whether a partial result becomes the stacked value by slicing alone."""
    own = assignment.layout(op, op.rule.results[0])
    home = stacking.strip(assignment.home_layout(op.outputs[0]))
    steps = reshard_steps(own, home, (), "", assignment.sizes)
    if op.kind == SCATTER and not whole_rows(assignment, op):
        return False
    return all(s.kind == "slice" for s in steps)


def whole_rows(assignment: Layouts, op: Operator) -> bool:
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


def _passes(assignment: Layouts, stacking: Stacking, op: Operator) -> bool:
    """Whether a linear operator finds its operands where it works."""
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
    """Whether the sum, once taken, is where its readers expect the value."""
    home = assignment.home_layout(value)
    start = stacking.strip(home)
    steps = reshard_steps(start, home, stacking.axes, "sum", assignment.sizes)
    return all(s.kind in ("slice", "all_reduce", "reduce_scatter") for s in steps)
