"""What a run does where a step is not finite; one site for all loops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from autopar.errors import NotFiniteError, PlanError
from autopar.runtime import changing_batches
from autopar.runtime.parallel_step import ParallelStep

OnNan = Literal["stop", "skip", "continue"]
LOGGER = logging.getLogger("autopar")
_HOW = ("stop", "skip", "continue")
# So many steps in a row that are not finite end a run.
_MOST = 3


def guard(name: str, step: ParallelStep[..., Any], how: Any) -> None:
    """Lets a step keep its state where it is not finite, if that is asked for.

    Args:
      name: of the function that was called, for errors.
      step: the step.
      how: what is done.

    Raises:
      PlanError: there is no such way.
    """
    if how not in _HOW:
        raise PlanError(
            f"{name}: on_nan={how!r}: expected 'stop' to end behind the third step in "
            "a row that is not finite, 'skip' to leave the state as before such a "
            "step, or 'continue'."
        )
    if how != "continue":
        changing_batches.guard(step)


class Finiteness:
    """Counts the steps of a run that are not finite, says so, and ends the run.

    Attributes:
      finite: whether the last step was.
      count: how many were not.
      first: number of the first of those in a row that were not.
    """

    def __init__(
        self, step: ParallelStep[..., Any], how: OnNan, record: Callable[..., None]
    ) -> None:
        """Has seen no step yet.

        Args:
          step: the step, of `guarded`.
          how: what is done.
          record: takes the kind and the fields of a line of the ledger.
        """
        self._step, self._how, self._record = step, how, record
        self.finite, self.count, self.first = True, 0, 0
        self._row = 0

    @property
    def restores(self) -> bool:
        """Whether the state stays as before a step that is not finite."""
        return self._how != "continue"

    @property
    def hopeless(self) -> bool:
        """Whether what has run last is of no use, and nothing mends it."""
        return not self.finite and not self.restores

    def look(self, number: int, result: Any, *, says: bool = True) -> bool:
        """Takes a step that has run; returns whether it was finite.

        Args:
          number: of the step.
          result: what it returned besides the state.
          says: whether this process writes it down.
        """
        flag = self._step.finite if self.restores else None
        self.finite = _finite(result) if flag is None else bool(np.asarray(flag))
        if self.finite:
            self._row = 0
            return True
        self.count, self._row = self.count + 1, self._row + 1
        self.first = number if self._row == 1 else self.first
        if says:
            then = "the state stays as before it" if self.restores else "going on"
            LOGGER.warning(
                "step %d is not finite (%d in a row, %d in all): %s.",
                number, self._row, self.count, then,
            )  # fmt: skip
            self._record(
                "not finite",
                number=number,
                in_a_row=self._row,
                count=self.count,
                on_nan=self._how,
            )
        return False

    def state_after(self, before: Any, after: Any) -> Any:
        """The state for the next step.

        Args:
          before: the state that the last step was given.
          after: the state that it left.
        """
        # Stages in several processes do not restore it, and do not consume it either.
        lost = not self.finite and self.restores and self._step.finite is None
        return before if lost else after

    def error(self) -> NotFiniteError | None:
        """The error that ends the run; None: it goes on."""
        if self._how != "stop" or self._row < _MOST:
            return None
        return NotFiniteError(
            f"steps {self.first} to {self.first + self._row - 1} are not finite: their "
            f"losses or gradients are NaN or infinite. The state is that after "
            f"{self.first} steps, the last good one. Lower the learning rate or clip "
            "gradients, look at the batch with jax.debug_nans, or give on_nan='skip'.",
            step=self.first,
        )


def _finite(result: Any) -> bool:
    """Whether all real numbers of a result are finite that this process has."""
    for leaf in jax.tree.leaves(result):
        away = isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        )
        if away or (not hasattr(leaf, "dtype") and not isinstance(leaf, float)):
            continue
        found = np.asarray(leaf)
        if jax.numpy.issubdtype(found.dtype, jax.numpy.inexact) and not bool(
            np.isfinite(found.astype(np.complex128)).all()
        ):
            return False
    return True
