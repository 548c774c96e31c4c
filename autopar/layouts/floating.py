"""The layouts in which values without a home pass from one program to the next."""

from __future__ import annotations

import math

from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout


def kept_layout(assignment: Assignment, value: int) -> Layout:
    """The layout in which a value is kept where a program ends.

    A value with a home keeps its home layout. A value without a home normally takes the
    layout of its reader. At the end of a program such a value keeps the layout of the
    values that it is computed from, so that nothing is gathered.

    Args:
      assignment: the layouts of the program that makes the value.
      value: the value.
    """
    return _kept_layout(assignment, value, {})


def _kept_layout(
    assignment: Assignment, value: int, known: dict[int, Layout]
) -> Layout:
    contraction = assignment.contraction
    if value in contraction.homes or value not in contraction.floating:
        return assignment.home_layout(value)
    if value not in known:
        known[value] = _result_layout(assignment, value, known)
    return known[value]


def _result_layout(
    assignment: Assignment, value: int, known: dict[int, Layout]
) -> Layout:
    """The layout that an element-wise operator gives its result."""
    op = assignment.contraction.producer[value]
    axes_of: dict[int, tuple[int, ...]] = {}
    used: set[int] = set()
    for operand, dims in zip(op.inputs, op.rule.operands, strict=True):
        if operand is None:
            continue
        for factors, axes in zip(
            dims, _kept_layout(assignment, operand, known), strict=True
        ):
            if len(factors) != 1 or used.intersection(axes) or factors[0] in axes_of:
                continue
            parts = math.prod(assignment.sizes[a] for a in axes)
            if axes and op.rule.sizes[factors[0]] % parts == 0:
                axes_of[factors[0]] = axes
                used.update(axes)
    slot = op.outputs.index(value)
    return tuple(
        axes_of.get(factors[0], ()) if len(factors) == 1 else ()
        for factors in op.rule.results[slot]
    )
