"""Saves a run while it trains, and finds the last save of an earlier run.

If a save fails, for example on a full disk, the failure is written to the ledger and a
warning is given. Training goes on, and the next save tries again.

This module also splits the values that a step returns into the next state and the rest.
The trace of the step tells which results are the next state
(`autopar_passes.program.carried`), so the loop works with every form of step.
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
from autopar.runtime.parallel_step import ParallelStep
from autopar.steps.analysis import Analysis


class Saves:
    """The checkpoints of a run, and the choice of the steps after which it is saved."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        every: int | None,
        step: ParallelStep[..., Any],
        ledger: Ledger,
    ) -> None:
        """Reads and writes nothing yet.

        Args:
          checkpoints: where the checkpoints are kept; None: nothing is saved.
          every: number of steps between saves; None: only at the end of the run.
          step: the train step.
          ledger: record of saves that fail.
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
        *,
        patience_s: float = 0.0,
    ) -> Restored | None:
        """Restores the last checkpoint; returns None if there is no checkpoint.

        Args:
          create_state: makes the state.
          args: arguments of ``create_state``.
          others: the arguments of the step after the state.
          patience_s: how long to wait for the next sign of a save by another world of
            this run; 0: there is no other world.

        Raises:
          CheckpointError: there are checkpoints, but none of them can be used; or
            another run saves there.
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

    def after(self, state: Any, step: int, position: int) -> None:
        """Saves the state after a step, if the step number is a multiple of ``every``.

        Args:
          state: the state that the step returned.
          step: number of steps done.
          position: number of samples consumed.
        """
        if self._every is not None and step % self._every == 0:
            self._save(state, step, position)

    def end(self, state: Any, step: int, position: int) -> None:
        """Saves the last state, and waits until the save is complete."""
        if state is not None and step != self._last:
            self._save(state, step, position)
        if self.checkpoints is not None:
            self._trying(self.checkpoints.wait)
            self.checkpoints.release()

    def _save(self, state: Any, step: int, position: int) -> None:
        if (checkpoints := self.checkpoints) is None:
            return
        # An earlier save that failed is reported here; it does not stop this save.
        self._trying(checkpoints.wait)
        saved = self._trying(
            lambda: checkpoints.save(
                self._step, state, step=step, position=position, notes=self.notes()
            )
        )
        self._last = step if saved else self._last

    def _trying(self, work: Callable[[], None]) -> bool:
        """Runs ``work``; returns whether it raised no checkpoint error."""
        try:
            work()
        except CheckpointError as error:
            self._ledger.write("not saved", reason=str(error))
            warnings.warn(f"training goes on unsaved: {error}", stacklevel=2)
            return False
        return True


__all__ = ["carried_out", "splat"]


def carried_out(analysis: Analysis, state: Any, result: Any) -> tuple[Any, Any]:
    """Returns the next state, and the other values that the step returned.

    An array of the state that the step does not return is kept. The step updates NNX
    objects in place, so these objects are themselves the next state.

    Args:
      analysis: analysis of the step.
      state: the state that was passed to the step: one pytree, or a tuple of its
        leading arguments.
      result: the values that the step returned.
    """
    numbers = _numbers(analysis)
    leaves, structure = jax.tree.flatten(result)
    if len(leaves) != len(numbers):  # the step returned objects of the caller
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
    """Position among the flat results of each leaf that the step returns.

    -1 stands for a leaf that is not an array.
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
    """The result without the parts whose arrays are all marked as next state.

    Leaves that are not arrays, such as the sizes in a module, have no mark.
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
    """The marks of each child of a tree."""
    found: list[Sequence[bool | None]] = []
    begin = 0
    for child in structure.children():
        found.append(marks[begin : begin + child.num_leaves])
        begin += child.num_leaves
    return found
