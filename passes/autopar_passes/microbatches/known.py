"""What is known of the values of a program while it is followed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from autopar_passes.microbatches import operators
from autopar_passes.microbatches.classes import SAME, WHOLE, Edits, Kind, Split
from autopar_passes.microbatches.facts import Facts
from autopar_passes.microbatches.microbatched import MicrobatchError
from autopar_passes.microbatches.pairs import Pair, place
from autopar_passes.program.equations import Atom, Equation, Scalar


class Again(Exception):  # no error: it starts a loop anew
    """A loop must be looked at again: what enters it has another class."""


class Known:
    """The classes of values, and what is changed for them.

    Attributes:
      classes: of the values that were met.
      edits: what is changed in the program of a microbatch.
      outer: inputs of regions -> the equation and operand that they come from.
      forced: operands that are of another class than the value which they read.
    """

    def __init__(self, pair: Pair, facts: Facts, unit: int) -> None:
        """Knows the classes of the inputs.

        Args:
          pair: the programs.
          facts: of the step.
          unit: how many rows of the batch are dealt out together.
        """
        self.pair = pair
        self.facts = facts
        arguments = pair.micro.body.inputs[: pair.micro.num_arguments]
        self.classes: dict[int, Split] = {
            v: Split(Kind.ROWS, unit) if pair.has_rows(v) else SAME for v in arguments
        }
        self.edits = Edits()
        self.outer: dict[int, tuple[Equation, int]] = {}
        self.forced: dict[tuple[int, int], Split] = {}
        for value in pair.micro.body.inputs[pair.micro.num_arguments :]:
            self.classes[value] = self.of_whole(value)
            if self.classes[value] != SAME:
                self.edits.replaced.add(value)

    def of(self, atom: Atom) -> Split:
        """The class of an atom."""
        return SAME if isinstance(atom, Scalar) else self.classes[atom]

    def operand(self, eqn: Equation, slot: int) -> Split:
        """The class of an operand, with what was found to be needed of it."""
        return self.forced.get((eqn.index, slot), self.of(eqn.inputs[slot]))

    def hoist(self, values: Sequence[int]) -> list[Split]:
        """Has values computed from the whole batch ahead; returns their classes."""
        self.edits.replaced.update(values)
        self.classes.update((v, self.of_whole(v)) for v in values)
        return [self.classes[v] for v in values]

    def of_whole(self, value: int) -> Split:
        """What a microbatch has of a value that is computed from the whole batch."""
        if self.pair.dims[value] < -1:
            return WHOLE
        if not self.pair.has_rows(value):
            return SAME
        return Split(Kind.ROWS, self.adjacent(value))

    def adjacent(self, value: int) -> int:
        """How many adjacent rows of a value are of one row of the batch, or of a group.

        A batch of B rows that is flattened with S others has B S rows, S of each.
        """
        body, rows = self.pair.whole.body, self.pair.rows_of(value)
        for given in body.inputs:
            if self.pair.has_rows(given):
                held = rows * self.classes[given].inner
                if held % self.pair.rows_of(given) == 0:
                    return held // self.pair.rows_of(given)
        return 1

    def as_part(self, eqn: Equation, slot: int) -> None:
        """Makes an operand that all microbatches have alike count once in their sum."""
        atom = eqn.inputs[slot]
        if operators.is_zero(self.pair.made_by, atom):
            return
        value = atom.aval if isinstance(atom, Scalar) else self.pair.micro.values[atom]
        if operators.is_float(value.dtype):
            self.edits.scaled[eqn.index, slot] = 1 / self.pair.count
        elif operators.is_integer(value.dtype):
            self.edits.first.add((eqn.index, slot))
        else:
            raise MicrobatchError(
                f"{place(eqn)} adds what no microbatch has a part of."
            )

    def numbers(self, eqn: Equation, slot: int) -> Split:
        """The numbers of a microbatch's rows, taken from those of the whole batch."""
        value = eqn.inputs[slot]
        assert isinstance(value, int)
        if value in self.facts.given:
            self.edits.ahead[eqn.index, slot] = value
            return self.of_whole(value)
        origin = self.outer.get(value)
        if origin is None or self.source(origin) not in self.facts.given:
            raise MicrobatchError(f"{place(eqn)} uses the numbers of the rows.")
        self.force(origin, self.of_whole(self.source(origin)))

    def force(self, origin: tuple[Equation, int], split: Split) -> NoReturn:
        """Has an operand of a loop computed ahead, and the loop looked at again."""
        loop, slot = origin
        self.forced[loop.index, slot] = split
        self.edits.ahead[loop.index, slot] = self.source(origin)
        raise Again(loop.index)

    def source(self, origin: tuple[Equation, int]) -> int:
        """The value that an input of a region comes from; -1: a scalar."""
        atom = origin[0].inputs[origin[1]]
        return atom if isinstance(atom, int) else -1
