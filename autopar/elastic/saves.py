"""Saves a run while it trains, and finds where an earlier one was left.

A save that fails, as on a full disk, is written down and warned of; training goes on,
and the next save tries again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.checkpoint.checkpoints import Checkpoints, Restored
from autopar.elastic.ledger import Ledger
from autopar.errors import CheckpointError
from autopar.runtime.parallel_step import ParallelStep


class Saves:
    """The checkpoints of a run, and which of its steps they are made of."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        every: int | None,
        step: ParallelStep[..., Any],
        ledger: Ledger,
    ) -> None:
        """Reads and writes nothing yet.

        Args:
          checkpoints: where they are kept; None: nothing is saved.
          every: after how many steps; None: at the end of the run alone.
          step: the step.
          ledger: what saves that fail are written to.
        """
        self.checkpoints = checkpoints
        self._every, self._step, self._ledger = every, step, ledger
        self._last: int | None = None
        # Plain data that is saved with each state.
        self.notes: Callable[[], Any] = lambda: None

    def restore(
        self,
        create_state: Callable[..., Any],
        args: Sequence[Any],
        others: Sequence[Any] | Mapping[str, Any],
    ) -> Restored | None:
        """What the last run has left; None: there is no checkpoint.

        Args:
          create_state: makes the state.
          args: its arguments.
          others: the arguments of the step after the state.

        Raises:
          CheckpointError: there are checkpoints, and none can be used; or another run
            saves there.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        checkpoints.claim(self._step)
        if checkpoints.latest() is None:
            return None
        found = checkpoints.restore(self._step, create_state, *args, others=others)
        self._last = found.step
        self._ledger.write(
            "restored",
            step=found.step,
            position=found.position,
            folder=str(found.folder),
            damaged=list(found.damaged),
        )
        return found

    def after(self, state: Any, step: int, position: int) -> None:
        """Saves after a step, if it is one of those that are saved.

        Args:
          state: that the step returned.
          step: number of steps done.
          position: number of samples consumed.
        """
        if self._every is not None and step % self._every == 0:
            self._save(state, step, position)

    def end(self, state: Any, step: int, position: int) -> None:
        """Saves the last state, and waits until it is complete."""
        if state is not None and step != self._last:
            self._save(state, step, position)
        if self.checkpoints is not None:
            self._trying(self.checkpoints.wait)
            self.checkpoints.release()

    def _save(self, state: Any, step: int, position: int) -> None:
        if (checkpoints := self.checkpoints) is None:
            return
        # A save that failed before is told of here; it does not stop this one.
        self._trying(checkpoints.wait)
        saved = self._trying(
            lambda: checkpoints.save(
                self._step, state, step=step, position=position, notes=self.notes()
            )
        )
        self._last = step if saved else self._last

    def _trying(self, work: Callable[[], None]) -> bool:
        """Whether something was done without an error of the checkpoints."""
        try:
            work()
        except CheckpointError as error:
            self._ledger.write("not saved", reason=str(error))
            warnings.warn(f"training goes on unsaved: {error}", stacklevel=2)
            return False
        return True
