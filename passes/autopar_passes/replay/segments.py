"""Replays a part of a program: some of its equations, with input and output values.

A segment states the layouts of the plan of the whole program, so another segment reads
a value in the layout in which it left its segment. If the plan computes a sum over
devices later, the segment returns stacked partial values, and a later segment sums
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autopar_passes.graph.operators import Operator, OperatorGraph, producers
from autopar_passes.layouts import Layout
from autopar_passes.program.equations import Equation, Program
from autopar_passes.replay.run import Made, Replayer, as_it_is, operators_of
from autopar_passes.replay.values import LayoutPlan, LayoutRoute, Synchroniser, Values
from autopar_passes.sums import stacked
from autopar_passes.sums.finish import Sum
from autopar_passes.sums.stacked import Stacked


class PlainSums:
    """Computes the sums of partial values with plain reductions."""

    def __init__(self, plan: LayoutPlan, mesh: Any) -> None:
        """Stores the plan, which gives the layouts of the sums."""
        self._plan = plan
        self._mesh = mesh

    def takes(self, value: int) -> frozenset[int]:
        """Returns only the value itself: each sum is computed separately."""
        return frozenset({value})

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Computes the sums."""
        return {v: self._sum(v, partial) for v, partial in partials.items()}

    def _sum(self, value: int, partial: Stacked) -> Any:
        array = stacked.total(partial)
        for layout in self._plan.due(value) or ():
            array = stacked.constrain(array, self._mesh, layout)
        return array


class Later(PlainSums):
    """Leaves the sums of partial values to a later segment.

    If the segment itself reads a sum, the sum is computed for this reader. The segment
    still returns the partial value.
    """

    def __init__(self, plan: LayoutPlan, mesh: Any) -> None:
        """Stores the plan, which gives the layouts of the computed sums."""
        super().__init__(plan, mesh)
        self.held: dict[int, Stacked] = {}

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Computes the sums that the segment reads."""
        self.held |= partials
        return super().take(partials)


class _Within:
    """A plan for one segment, whose readers never recompute an input for themselves."""

    def __init__(
        self, plan: LayoutPlan, inputs: Collection[int], outputs: Collection[int]
    ) -> None:
        self._plan = plan
        self._inputs = frozenset(inputs)
        self._outputs = frozenset(outputs)

    def floating(self, value: int) -> bool:
        return value not in self._inputs and self._plan.floating(value)

    def operand(self, op: Operator, slot: int) -> Layout | None:
        return self._plan.operand(op, slot)

    def results(self, op: Operator, slot: int) -> tuple[Layout, ...]:
        return self._plan.results(op, slot)

    def route(self, value: int, layout: Layout, backward: bool) -> LayoutRoute:
        return self._plan.route(value, layout, backward)

    def is_backward(self, op: Operator) -> bool:
        return self._plan.is_backward(op)

    def output(self, position: int) -> Layout | None:
        return self._plan.output(position)

    def partial_layout(self, value: int) -> tuple[tuple[int, ...], Layout] | None:
        return self._plan.partial_layout(value)

    def due(self, value: int) -> tuple[Layout, ...] | None:
        return self._plan.due(value)

    def sums(self, value: int, *, handed: bool = False) -> tuple[Sum, ...]:
        return self._plan.sums(value, handed=handed or value in self._outputs)


def _constants(program: Program) -> dict[int, Any]:
    """The constants of a program, by value."""
    held = program.body.inputs[program.num_arguments :]
    return dict(zip(held, program.constants, strict=True))


def replay_segment(
    program: Program,
    graph: OperatorGraph,
    plan: LayoutPlan,
    mesh: Any,
    *,
    equations: Sequence[Equation],
    inputs: Sequence[int],
    outputs: Sequence[int],
    whole: Collection[int],
) -> Callable[..., list[Any]]:
    """Returns a function of a segment's inputs that returns its outputs.

    Args:
      program: the whole program.
      graph: the operator graph of the program.
      plan: the layouts of the program.
      mesh: see `autopar_passes.replay.run.replay`.
      equations: the equations of the segment, in their order in the program.
      inputs: the values that the function is called with. Constants of the program
        are available without being passed.
      outputs: the values that the function returns.
      whole: the outputs whose sums are computed before they are returned.

    Partial inputs and outputs are stacked arrays, with one partial sum per entry of
    their leading dimension. The function's keyword ``synchroniser`` computes sums;
    without it, values stay partial. For the keyword ``made`` see `replay`.
    """
    operators, made_by = operators_of(graph), producers(graph.operators)
    sources, within = program.by_index(), _Within(plan, inputs, outputs)
    constants = _constants(program)

    def run(
        *arguments: Any, synchroniser: Synchroniser | None = None, made: Made = as_it_is
    ) -> list[Any]:
        arrays = constants | _state_inputs(plan, mesh, inputs, arguments)
        later = Later(plan, mesh)
        values = Values(made_by, sources, within, mesh, synchroniser or later, arrays)
        Replayer(program, operators, values).run(equations, made)
        return [_as_array(values, v, v in whole, later.held) for v in outputs]

    return run


def _state_inputs(
    plan: LayoutPlan, mesh: Any, inputs: Sequence[int], arguments: Sequence[Any]
) -> dict[int, Any]:
    """The inputs of a segment, with stacked arrays for partial inputs."""
    out: dict[int, Any] = {}
    for value, array in zip(inputs, arguments, strict=True):
        partial = plan.partial_layout(value)
        if partial is not None:
            array = stacked.stack(array, *partial, mesh)
        out[value] = array
    return out


def _as_array(
    values: Values, value: int, whole: bool, held: Mapping[int, Stacked]
) -> Any:
    if whole:
        return values.whole(value)
    if value in held:
        return held[value].array
    if values.plan.floating(value):
        return values.make(value, None, False)
    array = values.scope.values[value]
    return array.array if isinstance(array, Stacked) else array
