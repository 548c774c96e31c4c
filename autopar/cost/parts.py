"""What one stream of messages leaves exposed of a part of a step.

A part is a pass of the step, or the body of a loop that communicates: messages cross
no border of such a loop. One message is on its way at a time.

A message of gathers must be there where the first of its arrays is read. The compiler
waits for it there and starts the next one only then, so that of each

    exposed = max(message - share x work since the last one was waited for, 0)

A message of sums can leave when the last array that it holds is complete. The update
of what was summed goes on while later sums are sent. So a stretch in which sums are
sent may end within the update, at the first operator that needs a certain one:

    exposed = max over stretches (sums within - share x work within, 0)
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar_passes.graph.roles import Role

# A pass, and the last operator of the innermost loop that communicates.
Key = tuple[Role, int]


@dataclasses.dataclass(frozen=True, slots=True)
class PartCut:
    """A stretch of a part, as ranges of positions of operators, their ends excluded.

    Attributes:
      gathers: whether messages of gathers count; else those of sums, and positions are
        ranks (`Analysis.ranks`).
      moved: messages within these positions count.
      work: work within these positions covers them.
      needs: work of the update that needs sums of ranks below covers them, too; -1:
        none of it.
    """

    gathers: bool
    moved: tuple[int, int]
    work: tuple[int, int]
    needs: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Seconds of a part of a step by position of operators.

    Attributes:
      key: its pass, and the last operator of its loop.
      work: seconds of each operator of the part.
      late_work: the same by rank (`Analysis.ranks`): products of gradients come last.
      gathers: of each operator, seconds of the messages that must end before it.
      sums: of each rank, seconds of the messages that can start after its operator.
      update: seconds of each operator of the update, if it follows the part.
      needs: of each operator of the update, the last rank of a message that it
        needs, -1: none; the number of operators for operators elsewhere.
    """

    key: Key
    work: np.ndarray
    late_work: np.ndarray
    gathers: np.ndarray
    sums: np.ndarray
    update: np.ndarray
    needs: np.ndarray

    def exposed_s(self, share: float) -> float:
        """Seconds of the part in which only communication runs."""
        last = self.last_sums(share)
        cuts = [*self.waits(), *([last] if last else [])]
        return sum(max(0.0, self.excess_s(cut, share)) for cut in cuts)

    def excess_s(self, cut: PartCut, share: float) -> float:
        """Seconds of messages in a stretch beyond the work that covers them."""
        messages = self.gathers if cut.gathers else self.sums
        work = self.work if cut.gathers else self.late_work
        done = work[slice(*cut.work)].sum()
        if cut.needs >= 0:
            done += self.update[self.needs < cut.needs].sum()
        return float(messages[slice(*cut.moved)].sum() - share * done)

    def waits(self) -> list[PartCut]:
        """The stretch of each message of gathers."""
        found: list[PartCut] = []
        last = 0
        for reader in np.flatnonzero(self.gathers).tolist():
            found.append(PartCut(True, (reader, reader + 1), (last, reader)))
            last = reader
        return found

    def last_sums(self, share: float) -> PartCut | None:
        """The stretch whose sums expose most; None: the part has none.

        Args:
          share: part of the work that communication may run beside.
        """
        if not self.sums.any():
            return None
        done, summed = _running(self.late_work), _running(self.sums)
        # Up to the sum at each position: less the update that can run meanwhile.
        ends = summed[1:] - share * self._update_seconds_below()
        # Since the sum at each position: with the work behind it.
        starts = summed[:-1] + share * (done[-1] - done[1:])
        last = int(np.argmax(ends - np.minimum.accumulate(starts)))
        first = int(np.argmin(starts[: last + 1]))
        return PartCut(False, (first, last + 1), (first + 1, len(done) - 1), last)

    def _update_seconds_below(self) -> np.ndarray:
        """Of each position, seconds of the update that need sums below it alone."""
        count = len(self.work)
        by_need = np.bincount(self.needs + 1, self.update, minlength=count + 2)
        return np.cumsum(by_need)[:count]


def _running(values: np.ndarray) -> np.ndarray:
    """Sums up to each position, and 0 before the first."""
    return np.concatenate(([0.0], np.cumsum(values)))
