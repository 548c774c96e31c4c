"""Values of float32 that are in memory in bfloat16.

`autopar.steps.rounding` finds them.
"""

from __future__ import annotations

import dataclasses

# The part of its bytes that a rounded array of float32 takes.
ROUNDED = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """Values of float32 that are in bfloat16 for the products that read them.

    All values of a class (`autopar.steps.uses.ValueClass`) are, or none.

    Attributes:
      stored: those that are in memory in bfloat16 alone.
      brought: those that are in bfloat16 in all layouts but their own.
    """

    stored: frozenset[int] = frozenset()
    brought: frozenset[int] = frozenset()

    def part(self, value: int) -> float:
        """The part of its bytes that a value takes where it was made."""
        return ROUNDED if value in self.stored else 1.0

    def brought_part(self, value: int) -> float:
        """The part of its bytes that a value takes in another layout than its own."""
        return ROUNDED if value in self.brought else 1.0


NOT_ROUNDED = Rounded()
