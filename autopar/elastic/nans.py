"""How all training loops react to a step whose loss or gradient is not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import numpy as np

from autopar.errors import NotFiniteError, PlanError
from autopar.runtime import changing_batches
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.parallel_step import ParallelStep

OnNan = Literal["stop", "skip", "continue"]
LOGGER = logging.getLogger("autopar")
_HOW = ("stop", "skip", "continue")
# A run ends after this number of successive steps that are not finite.
_MOST = 3


class Looks(Protocol):
    """A train step that looks whether its results are finite."""

    @property
    def finite(self) -> Any:
        """Whether the last step was finite; None: the step does not look."""
        ...


def guard(name: str, step: ParallelStep[..., Any] | LocalSteps, how: Any) -> None:
    """Makes a step return its old state if a result is not finite.

    If ``how`` is ``continue``, the step stays as it is. The replicas of local steps are
    not planned yet; the loop guards them later.

    Args:
      name: name of the calling function, for error messages.
      step: the train step.
      how: ``stop``, ``skip`` or ``continue`` (``on_nan=`` of `autopar.elastic`).

    Raises:
      PlanError: the reaction is unknown.
    """
    if how not in _HOW:
        raise PlanError(
            f"{name}: on_nan={how!r}: expected 'stop' to end behind the third step in "
            "a row that is not finite, 'skip' to leave the state as before such a "
            "step, or 'continue'."
        )
    if how != "continue" and not isinstance(step, LocalSteps):
        changing_batches.guard(step)


class Finiteness:
    """Counts and reports the steps of a run that are not finite, and ends the run.

    Attributes:
      finite: whether the last step was finite.
      count: number of steps that were not finite.
      first: number of the first step in the current series of successive steps that are
        not finite.
    """

    def __init__(self, step: Looks, how: OnNan, record: Callable[..., None]) -> None:
        """Starts with a count of 0.

        Args:
          step: the train step, after `guard`.
          how: ``stop``, ``skip`` or ``continue`` (``on_nan=`` of `autopar.elastic`).
          record: called with the kind and the fields of each line for the ledger.
        """
        self._step, self._how, self._record = step, how, record
        self.finite, self.count, self.first = True, 0, 0
        self._row = 0

    @property
    def restores(self) -> bool:
        """Whether a step that is not finite leaves the state unchanged."""
        return self._how != "continue"

    @property
    def hopeless(self) -> bool:
        """Whether the state is lost: the last step was not finite and changed it."""
        return not self.finite and not self.restores

    def look(self, number: int, result: Any, *, says: bool = True) -> bool:
        """Checks a step that has run; returns whether the step was finite.

        Args:
          number: number of the step.
          result: the values that the step returned besides the state.
          says: whether this process prints a warning about a step that is not finite.
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
          before: the state before the last step.
          after: the state after the last step.
        """
        # If stages of a pipeline run in several processes, the step does not restore
        # the old state. Since it does not donate the old state either, the old state is
        # taken here.
        lost = not self.finite and self.restores and self._step.finite is None
        return before if lost else after

    def error(self) -> NotFiniteError | None:
        """The error that ends the run; None: the run goes on."""
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
    """Whether all numbers that this process holds of a result are finite."""
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
