"""Shared copies of values, in layouts of their own."""

from __future__ import annotations

import dataclasses
import enum

from autopar.layouts.strategies import Space
from autopar.steps.uses import Use, ValueClass
from autopar_passes.rules.factor_rule import Dims


class Mode(enum.Enum):
    """The way in which a copy is made."""

    FETCH = "resharded from the value"
    REUSE = "the forward copy, kept"
    SAME = "the value itself, in the layout it has"


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A shared copy of a value, in a layout of its own.

    Attributes:
      node: its node in the problem.
      value_class: the value it is a copy of.
      backward: whether backward readers share it, rather than forward ones.
      dims: the factors of each dimension of the value.
      space: its strategies.
      modes: how each strategy comes by the copy.
      uses: the readers that share it.
    """

    node: int
    value_class: ValueClass
    backward: bool
    dims: Dims
    space: Space
    modes: tuple[Mode, ...]
    uses: tuple[Use, ...]

    def mode_of(self, same: bool, reuse: bool) -> Mode:
        """The mode of a copy with or without the value's own layout."""
        if reuse:
            return Mode.REUSE
        return Mode.SAME if same and Mode.SAME in self.modes else Mode.FETCH
