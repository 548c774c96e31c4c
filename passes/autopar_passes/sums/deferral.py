"""A deferral: partial results and the values where their sums are due.

An operator that contracts a factor which the plan splits leaves a *partial*
result on each device. Where that result only flows through linear operators and
is added up, in a loop or with others, the sum over devices may wait. It is taken
once, at the first reader that needs the whole value; a gradient is sent in the
form that the plan wants.

The program alone decides which deferrals exist (`autopar_passes.sums.find`);
whether a plan may use one depends on its layouts (`autopar.layouts.stacking`).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Deferral:
    """Partial results whose sum over devices may be taken later.

    The paths of several partial results belong to one deferral where they meet.

    Attributes:
      ends: the values whose sums are due, in program order.
      reach: the operators that make the partial results, each with the ends that
        its result flows into.
      members: every value on a path, the ends among them.
      hoisted: whether a sum would otherwise be taken more often, in a loop that
        accumulates it.
      gradients: those ends that the update reads of the backward pass, once in a
        step.
    """

    ends: tuple[int, ...]
    reach: tuple[tuple[int, tuple[int, ...]], ...]
    members: frozenset[int]
    hoisted: bool
    gradients: frozenset[int]

    @property
    def contributions(self) -> tuple[int, ...]:
        """The operators that make the partial results."""
        return tuple(op for op, _ in self.reach)

    def sharing(self, end: int) -> int:
        """Returns how many operators contribute to an end."""
        return sum(end in ends for _, ends in self.reach)
