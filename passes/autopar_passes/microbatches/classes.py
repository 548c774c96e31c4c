"""What the values of microbatches say about the value of the whole batch."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.Enum):
    """How a value of the whole batch follows from those of its microbatches."""

    SAME = "equal in all of them"
    LOCAL = "computed from each microbatch alone"
    ROWS = "their rows, put together"
    SUM = "their sum"
    POSITION = "the numbers of their rows"
    WHOLE = "none: it is computed from the whole batch"


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The class of a value.

    Attributes:
      kind: how the whole value follows.
      inner: of `Kind.ROWS`, the elements that stay together (`Rows.inner`); 0: any,
        because all rows are equal.
      columns: of `Kind.POSITION`, which elements of the last dimension are positions;
        empty: all.
    """

    kind: Kind
    inner: int = 0
    columns: frozenset[int] = frozenset()


SAME, LOCAL, SUM = Split(Kind.SAME), Split(Kind.LOCAL), Split(Kind.SUM)
ANY_ROWS, POSITION = Split(Kind.ROWS), Split(Kind.POSITION)
WHOLE = Split(Kind.WHOLE)


def join(a: Split, b: Split) -> Split | None:
    """The class of a value that is of one class or the other; None: there is none."""
    kinds = {a.kind, b.kind}
    if a == b:
        return a
    if kinds == {Kind.ROWS} and 0 in (a.inner, b.inner):
        return a if a.inner else b
    if kinds == {Kind.SAME, Kind.LOCAL}:
        return LOCAL
    if Kind.SUM in kinds and kinds <= {Kind.SUM, Kind.SAME, Kind.LOCAL}:
        return SUM
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Edits:
    """What is changed in the program of a microbatch, by equation and operand.

    Attributes:
      scaled: operands that are multiplied by a number.
      first: operands that count in the first microbatch only; they are zero in others.
      ahead: operands that are read from the whole batch.
      folded: random keys that are made different in each microbatch.
      drawn: equations that draw for the rows of a microbatch what they draw for these
        rows in the whole batch -> `Rows.inner` of those.
      kept: equations whose scalars stay those of a microbatch.
      counted: the numbers of rows, which what runs once reads of the whole batch.
      replaced: values that are computed from the whole batch wherever they are read;
        a microbatch reads its rows of them.
    """

    scaled: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    first: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    ahead: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    folded: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    drawn: dict[int, int] = dataclasses.field(default_factory=dict)
    kept: set[int] = dataclasses.field(default_factory=set)
    counted: set[int] = dataclasses.field(default_factory=set)
    replaced: set[int] = dataclasses.field(default_factory=set)

    def forget(self, equation: int) -> None:
        """Takes the edits of an equation back, before it is looked at again."""
        for table in (self.scaled, self.ahead):
            for key in [k for k in table if k[0] == equation]:
                del table[key]
        for found in (self.first, self.folded):
            found.difference_update({k for k in found if k[0] == equation})
        self.drawn.pop(equation, None)
        self.kept.discard(equation)
