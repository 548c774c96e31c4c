"""A step over several microbatches, as data.

The step runs its forward and backward pass for each microbatch, and its update once.
What goes from the first part to the second is a *crossing*.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from autopar_errors import InputError
from autopar_passes.program.equations import Program
from autopar_passes.program.trace import TracedStep


class MicrobatchError(InputError):
    """The step cannot be split into microbatches with its meaning kept."""


class Combine(enum.Enum):
    """How the values of all microbatches become the value of the whole batch."""

    SUM = "added up"
    MEAN = "averaged"
    ROWS = "put together row by row"
    SAME = "the same in each"


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of the batch are in an array.

    Dimension ``dim`` is dealt out in groups of ``inner`` elements: with M microbatches,
    microbatch m has the groups m, m + M, m + 2 M ... of them, in this order
    (`autopar_passes.microbatches.rows`). So a batch that is split over devices stays
    where it is.
    """

    dim: int
    inner: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A value that each microbatch makes, and that is used after all of them.

    Attributes:
      value: of the microbatch's program.
      combine: how the microbatches' values are put together.
      rows: where its rows are, for `Combine.ROWS`.
    """

    value: int
    combine: Combine
    rows: Rows | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatched:
    """A step over several microbatches.

    The program of one microbatch is complete: its constants are those of the whole
    batch, so that what is a mean over the batch is a sum over the microbatches. What
    runs once has the rows of the whole batch. Behind the step's own flat inputs it has
    those of `number`, `given` and `gathered`.

    Attributes:
      microbatches: how many there are.
      traced: the step on one microbatch.
      once: indices of the top-level equations that run once, after all microbatches.
      crossings: the values that the others hand to them, or to the caller.
      batch: flat input -> where its rows are; other inputs are the same for all.
      number: the flat input that takes the number of the microbatch, int32; None: it
        draws no random numbers for rows.
      ahead: from the step's flat inputs, with the whole batch, to the values of
        `given`; None: there are none.
      given: the flat inputs that take what depends on the whole batch, such as the
        number of its tokens that count.
      gathered: the flat inputs, last, that take rows of all microbatches together for
        what runs once -> the crossings that they are put together of.
      local: what is computed from each microbatch alone, for people.
    """

    microbatches: int
    traced: TracedStep
    once: frozenset[int]
    crossings: tuple[Crossing, ...]
    batch: dict[int, Rows]
    number: int | None = None
    ahead: Program | None = None
    given: tuple[int, ...] = ()
    gathered: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    local: tuple[str, ...] = ()

    @property
    def own(self) -> int:
        """The number of the step's own flat inputs, which come first."""
        added = len(self.given) + len(self.gathered) + (self.number is not None)
        return self.traced.program.num_arguments - added

    @property
    def accumulated_values(self) -> frozenset[int]:
        """The values that are added up over the microbatches, or averaged."""
        added = (Combine.SUM, Combine.MEAN)
        return frozenset(c.value for c in self.crossings if c.combine in added)
