"""Saves checkpoints of a run while it trains, and restores the last one.

If a save fails, for example because the disk is full, the run writes the failure to the
ledger and warns. Training goes on, and the next save tries again.

This module also splits the values that a step returns into the next state and the other
results. The trace of the step tells which results are the next state
(`autopar_passes.program.trace`). So the user's step may return them in any order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from autopar.checkpoint.checkpoints import Checkpoints, Restored
from autopar.elastic.ledger import Ledger
from autopar.errors import CheckpointError
from autopar.runtime.creation import flat_state, replace_leaves, splat
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.parallel_step import ParallelStep
from autopar.steps.analysis import Analysis


class Saves:
    """Saves and restores a run's checkpoints, after every so many steps."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        every: int | None,
        step: ParallelStep[..., Any] | LocalSteps,
        ledger: Ledger,
    ) -> None:
        """Reads and writes no file yet.

        Args:
          checkpoints: where the checkpoints are kept; None: nothing is saved.
          every: number of steps between saves; None: only at the end of the run.
          step: the train step.
          ledger: record of saves that fail.
        """
        self.checkpoints = checkpoints
        self._every, self._step, self._ledger = every, step, ledger
        self._last: int | None = None
        # A function that returns plain data to save with each state; None: no data.
        self.notes: Callable[[], Any] = lambda: None

    def restore(
        self,
        create_state: Callable[..., Any],
        args: Sequence[Any],
        others: Sequence[Any] | Mapping[str, Any],
        *,
        patience_s: float = 0.0,
    ) -> Restored | None:
        """Restores the last checkpoint; returns None if there is no checkpoint.

        Args:
          create_state: makes the state.
          args: arguments of ``create_state``.
          others: the arguments of the step after the state.
          patience_s: if other processes of this run may still be saving, seconds to
            wait for their next write to the checkpoint; 0: there are no such processes.

        Raises:
          CheckpointError: there are checkpoints, but none of them can be used; or
            another run is saving to this directory.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        checkpoints.claim(self._step)
        if patience_s:
            checkpoints.wait_for_other_world(self._step, patience_s)
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

    def is_early(self, step: int) -> bool:
        """Whether the first checkpoint may not have been complete after ``step`` steps.

        If the state is lost then, the run may begin at step 0. Later, a missing
        checkpoint is an error: a save takes less time than the steps between two saves.
        """
        has_saves = self.checkpoints is not None and self._every is not None
        return has_saves and step < 2 * (self._every or 0)

    def after(
        self,
        state: Any,
        step: int,
        position: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Saves the state after a step, if the step number is a multiple of ``every``.

        Args:
          state: the state that the step returned.
          step: number of steps done.
          position: number of samples consumed.
          check: called repeatedly during a wait for other processes, which may be lost;
            raises an error to end the wait.
        """
        if self._every is not None and step % self._every == 0:
            self._save(state, step, position, check)

    def end(
        self,
        state: Any,
        step: int,
        position: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Saves the last state, and waits until the save is complete.

        The arguments are those of `after`.
        """
        if state is not None and step != self._last:
            self._save(state, step, position, check)
        if (checkpoints := self.checkpoints) is not None:
            self._trying(lambda: checkpoints.wait(check))
            checkpoints.release()

    def _save(
        self,
        state: Any,
        step: int,
        position: int,
        check: Callable[[], None] | None,
    ) -> None:
        if (checkpoints := self.checkpoints) is None:
            return
        # This call reports the failure of an earlier save, if there was one. The new
        # save is made in any case.
        self._trying(lambda: checkpoints.wait(check))
        saved = self._trying(
            lambda: checkpoints.save(
                self._step, state, step=step, position=position, notes=self.notes()
            )
        )
        self._last = step if saved else self._last

    def _trying(self, work: Callable[[], None]) -> bool:
        """Runs ``work``; returns whether it succeeded, without a checkpoint error."""
        try:
            work()
        except CheckpointError as error:
            self._ledger.write("not saved", reason=str(error))
            warnings.warn(f"training goes on unsaved: {error}", stacklevel=2)
            return False
        return True


__all__ = ["carried_out", "splat"]


def carried_out(analysis: Analysis, state: Any, result: Any) -> tuple[Any, Any]:
    """Splits the values that a step returned into the next state and the other results.

    If the step does not return some array of the state, the next state keeps the old
    array. A step updates Flax NNX objects in place, so these objects are themselves the
    next state.

    Args:
      analysis: analysis of the step.
      state: the state that was passed to the step: one pytree, or a tuple with several
        leading arguments of the step.
      result: the values that the step returned.
    """
    numbers = _numbers(analysis)
    leaves, structure = jax.tree.flatten(result)
    if len(leaves) != len(numbers):  # the step returned the caller's own objects
        return state, result
    carried = analysis.pytrees.carried
    old, _ = flat_state(state)
    next_of = dict(zip(numbers, leaves, strict=True))
    new = [next_of.get(carried.get(k, -1), x) for k, x in enumerate(old)]
    taken = {carried[k] for k in range(len(old)) if k in carried}
    marks = [None if number < 0 else number in taken for number in numbers]
    rest = _rest(result, leaves, structure, marks)
    return (replace_leaves(state, new) if any(marks) else state), rest


def _numbers(analysis: Analysis) -> list[int]:
    """For each leaf of the step's result, its index among the step's flat outputs.

    The index is -1 for a leaf that is not an array.
    """
    fixed = analysis.pytrees.result.fixed
    static = {k for k, _ in fixed.leaves}
    objects, _ = cast("Sequence[Any]", fixed.tree.children())
    found: list[int] = []
    number = 0
    for k in range(fixed.tree.num_leaves):
        if k >= objects.num_leaves:
            found.append(-1 if k in static else number)
        number += k not in static
    return found


def _rest(
    result: Any, leaves: Sequence[Any], structure: Any, marks: Sequence[bool | None]
) -> Any:
    """The result without the subtrees whose arrays all belong to the next state.

    ``marks`` tells for each leaf whether it belongs to the next state. The mark is None
    for leaves that are not arrays, such as the sizes in a module.
    """
    if _whole(marks):
        return None
    parts = [_whole(m) for m in _by_child(structure, marks)]
    if type(result) in (tuple, list):
        kept = [x for x, taken in zip(result, parts, strict=True) if not taken]
        return kept[0] if len(kept) == 1 else tuple(kept)
    if isinstance(result, Mapping):
        given = cast("Mapping[Any, Any]", result)
        keys = sorted(given) if len(parts) == len(given) else []
        gone = {key for key, taken in zip(keys, parts, strict=False) if taken}
        return {key: x for key, x in given.items() if key not in gone}
    pairs = zip(leaves, marks, strict=True)
    return jax.tree.unflatten(structure, [None if m else x for x, m in pairs])


def _whole(marks: Sequence[bool | None]) -> bool:
    return any(marks) and all(mark is not False for mark in marks)


def _by_child(
    structure: Any, marks: Sequence[bool | None]
) -> list[Sequence[bool | None]]:
    """Splits the marks of a tree's leaves by the tree's children."""
    found: list[Sequence[bool | None]] = []
    begin = 0
    for child in structure.children():
        found.append(marks[begin : begin + child.num_leaves])
        begin += child.num_leaves
    return found
