"""What the replay of a program asks of a plan."""

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
    """The layouts that a value takes from its home to a reader.

    Attributes:
      layouts: the layouts to state one after the other, the last one stays.
        Readers whose routes begin alike share the arrays of that beginning.
      fresh: start anew, so that nothing is shared with routes that are not
        fresh (nor merged with them by the compiler).
    """

    layouts: tuple[Layout, ...]
    fresh: bool = False


class LayoutPlan(Protocol):
    """What the replay asks of a plan."""

    def operand(self, op: Operator, slot: int) -> Layout | None:
        """Returns the layout that an operand must have; None: as it comes."""
        ...

    def results(self, op: Operator, slot: int) -> tuple[Layout, ...]:
        """Returns the layouts to state for a result, in order; empty: none."""
        ...

    def floating(self, value: int) -> bool:
        """Returns whether each reader makes the value itself, in its own layout."""
        ...

    def route(self, value: int, layout: Layout, backward: bool) -> LayoutRoute:
        """Returns the layouts from a value's home to a reader."""
        ...

    def is_backward(self, op: Operator) -> bool:
        """Returns whether an operator reads the backward copies."""
        ...

    def output(self, position: int) -> Layout | None:
        """Returns the layout in which a flat output must leave; None: as it comes."""
        ...

    def partial_layout(self, value: int) -> tuple[tuple[int, ...], Layout] | None:
        """Returns a value's partial axes and its layout; None: it is whole."""
        ...

    def due(self, value: int) -> tuple[Layout, ...] | None:
        """Returns the layouts to state once the sum of a partial value is taken.

        None: it is not taken here.
        """
        ...

    def sums(self, value: int, *, handed: bool = False) -> tuple[Sum, ...]:
        """Returns the collectives that end a partial value, where they are written.

        Where the readers of the value keep slices of it, the last collective may leave
        each device its slice. Empty: the compiler finds the collectives from the
        layouts that are stated.

        Args:
          value: the value.
          handed: whether others read it, too, in the layout of its home.
        """
        ...


# Reads a value of the scope that runs: an array, or what is still partial.
Read = Callable[[int], Any]


class Watch(Protocol):
    """Looks at what a step makes, in loops and at its end."""

    def inside(self, equation: int, read: Read) -> Any:
        """Returns what an iteration hands out beside the loop's own results.

        Args:
          equation: the loop.
          read: reads a value that the iteration has made.
        """
        ...

    def after(self, equation: int, seen: Any) -> None:
        """Takes what all iterations of a loop handed out, stacked."""
        ...

    def end(self, read: Read) -> None:
        """Reads what the step has made, once all of it is."""
        ...


class Synchroniser(Protocol):
    """Takes sums over devices in a form of its own."""

    def takes(self, value: int) -> frozenset[int]:
        """Returns the values whose sums are taken with this one; empty: not here."""
        ...

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Takes the sums of partial values, in the layouts that the plan wants."""
        ...
