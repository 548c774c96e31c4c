"""The interface of a plan for the replay of a program."""

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
      fresh: whether the route starts from a new copy, so that it shares no arrays with
        other routes, and the compiler merges none with them.
    """

    layouts: tuple[Layout, ...]
    fresh: bool = False


class LayoutPlan(Protocol):
    """The questions about layouts that the replay asks a plan."""

    def operand(self, op: Operator, slot: int) -> Layout | None:
        """Returns the layout that an operand must have; None for any layout."""
        ...

    def results(self, op: Operator, slot: int) -> tuple[Layout, ...]:
        """Returns the layouts to state for a result, in order; empty for none."""
        ...

    def floating(self, value: int) -> bool:
        """Returns whether each reader computes the value itself, in its own layout."""
        ...

    def route(self, value: int, layout: Layout, backward: bool) -> LayoutRoute:
        """Returns the layouts from a value's own layout to a reader's layout."""
        ...

    def is_backward(self, op: Operator) -> bool:
        """Returns whether an operator reads the copies for the backward pass."""
        ...

    def output(self, position: int) -> Layout | None:
        """Returns the layout of a flat output; None for any layout."""
        ...

    def partial_layout(self, value: int) -> tuple[tuple[int, ...], Layout] | None:
        """Returns a value's partial axes and its layout; None if the value is whole."""
        ...

    def due(self, value: int) -> tuple[Layout, ...] | None:
        """Returns the layouts to state after the sum of a partial value is computed.

        The result is None if the sum is not computed here.
        """
        ...

    def sums(self, value: int, *, handed: bool = False) -> tuple[Sum, ...]:
        """Returns the explicit collectives that complete the sum of a partial value.

        If every reader of the value uses only a slice of it, the last collective may be
        a reduce-scatter that leaves each device its slice. An empty result means that
        the compiler chooses the collectives from the stated layouts.

        Args:
          value: the value.
          handed: whether the value is also read outside, in its own layout.
        """
        ...


# Reads a value of the current scope: an array, or a value that is still partial.
Read = Callable[[int], Any]


class Watch(Protocol):
    """Observes the values of a step, in loops and at its end."""

    def inside(self, equation: int, read: Read, mesh: Any) -> Any:
        """Returns the values that an iteration adds to the loop's own results.

        Args:
          equation: the loop.
          read: reads a value of the iteration.
          mesh: the mesh on which the iteration runs. The axis of replicas is manual.
        """
        ...

    def after(self, equation: int, seen: Any) -> None:
        """Receives the added values of all iterations of a loop, stacked.

        If replicas run the iterations, arrays ``(devices, ...)`` of an iteration are
        zero for the devices of other replicas.
        """
        ...

    def end(self, read: Read) -> None:
        """Reads values of the step after all of them are computed."""
        ...


class Synchroniser(Protocol):
    """Computes sums over devices in its own way."""

    def takes(self, value: int) -> frozenset[int]:
        """Returns the values that are summed together with this one; empty for none."""
        ...

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Computes the sums of partial values, in the layouts of the plan."""
        ...
