"""The interface of a plan for the replay of a program.

A *reader* is an operator that has a value as operand. A value is *partial* if each
device holds a term of a sum (`autopar_passes.sums.stacked`). A reader in the backward
pass may use an array of its own, called the backward copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from autopar_passes.graph.operators import Operator
from autopar_passes.layouts import Layout
from autopar_passes.sums.finish import Sum
from autopar_passes.sums.stacked import Stacked


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutRoute:
    """The sequence of layouts from a value's own layout to a reader's layout.

    Attributes:
      layouts: the layouts to state one after another; the last layout is the reader's.
        Readers whose routes begin with the same layouts share these arrays.
      fresh: whether the route starts from a new copy of the array. The readers then
        share no arrays with readers of other routes, and the compiler does not merge
        them.
    """

    layouts: tuple[Layout, ...]
    fresh: bool = False


class LayoutPlan(Protocol):
    """The questions that the replay asks a plan about layouts."""

    def operand(self, op: Operator, slot: int) -> Layout | None:
        """Returns the layout that an operand must have; None for any layout."""
        ...

    def results(self, op: Operator, slot: int) -> tuple[Layout, ...]:
        """Returns the layouts to state for a result, in order; empty for none."""
        ...

    def floating(self, value: int) -> bool:
        """Returns whether each reader recomputes the value, in its own layout."""
        ...

    def route(self, value: int, layout: Layout, backward: bool) -> LayoutRoute:
        """Returns the layouts from a value's own layout to a reader's layout."""
        ...

    def is_backward(self, op: Operator) -> bool:
        """Returns whether an operator reads the backward copies of its operands."""
        ...

    def output(self, position: int) -> Layout | None:
        """Returns the layout of a flat output; None for any layout."""
        ...

    def partial_layout(self, value: int) -> tuple[tuple[int, ...], Layout] | None:
        """Returns a value's partial axes and its layout; None if the value is whole."""
        ...

    def due(self, value: int) -> tuple[Layout, ...] | None:
        """Returns the layouts to state, in order, after a partial value is summed.

        The result is None if the plan defers the sum to a later reader.
        """
        ...

    def sums(self, value: int, *, handed: bool = False) -> tuple[Sum, ...]:
        """Returns the explicit collectives that complete the sum of a partial value.

        If every reader of the value uses only a slice of it, the last collective may be
        a reduce-scatter that leaves each device its slice. An empty result means that
        the compiler chooses the collectives from the stated layouts.

        Args:
          value: the value.
          handed: whether the value also leaves its region or program, in its own
            layout.
        """
        ...


# Reads a value of the current scope: an array, or a value that is still partial.
Read = Callable[[int], Any]


class Watch(Protocol):
    """Observes values of a step: in iterations of loops, and at the step's end."""

    def inside(self, equation: int, read: Read, mesh: Any) -> Any:
        """Returns values of one iteration, which the loop stacks and gives to `after`.

        Args:
          equation: the loop.
          read: reads a value of the iteration.
          mesh: the mesh on which the iteration runs. The axis of replicas is manual.
        """
        ...

    def after(self, equation: int, seen: Any) -> None:
        """Receives what `inside` returned in each iteration of a loop, stacked.

        If replicas run the iterations, arrays ``(devices, ...)`` of an iteration are
        zero for the devices of other replicas.
        """
        ...

    def end(self, read: Read) -> None:
        """Reads values of the step after the step has computed all its values."""
        ...


class Synchroniser(Protocol):
    """Computes the sums of partial values over devices, for example with a codec."""

    def takes(self, value: int) -> frozenset[int]:
        """Returns the values that are summed together with this one; empty for none."""
        ...

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Computes the sums of partial values, in the layouts of the plan."""
        ...
