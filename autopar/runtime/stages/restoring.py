"""What a pipeline restores of its state where a gradient is not finite.

The rules are those of one stage (`autopar.runtime.gradients.restoring`). A task of the
update that has both the old state and the new one restores it; what is left is
restored at the end of the step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compression.synchronise import restore_unless_finite
from autopar.steps.analysis import Analysis
from autopar_passes.graph.roles import InputRole


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """State that is restored.

    Attributes:
      argument: its flat argument.
      result: the flat result that is its next value.
      old: the value of the argument.
      new: the value of the result.
      own: whether the step decides on it itself: it is restored only where it is not
        finite.
      alone: whether it is the next value of no other argument.
    """

    argument: int
    result: int
    old: int
    new: int
    own: bool
    alone: bool


def restored_state(analysis: Analysis) -> tuple[Carried, ...]:
    """The state that a step restores where a gradient is not finite.

    Args:
      analysis: of one microbatch's program.
    """
    graph, found = analysis.graph, analysis.poisoned
    outputs = analysis.program.body.outputs
    counts = Counter(outputs[k] for k in analysis.carried.values())
    out: list[Carried] = []
    for argument, result in analysis.carried.items():
        new, old = outputs[result], graph.inputs[argument].value
        if new == old or not isinstance(new, int):
            continue
        own = found.guarded and result not in found.results
        if own and not graph.values[new].floating:
            continue
        out.append(Carried(argument, result, old, new, own, counts[new] == 1))
    return tuple(out)


def is_finite(analysis: Analysis, flat: Sequence[Any]) -> bool:
    """Whether the results of a pipeline's step are finite, and its new parameters.

    Of a step that looks at its gradients itself only what it returns besides counts.

    Args:
      analysis: of the step.
      flat: its flat results.
    """
    graph, looks = analysis.graph, analysis.poisoned.guarded
    state = {given.output: given.role for given in graph.inputs if given.output >= 0}
    flags = [
        jnp.all(jnp.isfinite(x))
        for k, x in enumerate(flat)
        if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        and (k not in state or (state[k] is InputRole.PARAMETER and not looks))
    ]
    return all(bool(x) for x in jax.device_get(flags))


def with_old_state(
    analysis: Analysis, arguments: Sequence[Any], flat: Sequence[Any]
) -> list[Any]:
    """The flat results of a step with the state that it was given.

    Args:
      analysis: of the step.
      arguments: its flat arguments, in their places.
      flat: its flat results.
    """
    out = list(flat)
    for carried in restored_state(analysis):
        if not carried.own:
            out[carried.result] = arguments[carried.argument]
    return out


class TaskRestorer:
    """Restores state in one trace of a task."""

    def __init__(
        self, state: Collection[Carried], given: Mapping[int, Any], finite: Any
    ) -> None:
        """Starts with what the task is given.

        Args:
          state: what the task restores.
          given: value of an input -> its array.
          finite: whether all gradients of the step are finite, a bool scalar.
        """
        self._state = {c.new: c for c in state}
        self._given = given
        self._finite = finite
        self._done: set[int] = set()

    def made(self, value: int, array: Any) -> Any:
        """Returns what later operators read (`autopar_passes.replay.run.replay`)."""
        if value not in self._state:
            return array
        self._done.add(value)
        return self._restored(self._state[value], array)

    def finish(self, values: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
        """The results of the task, with those restored that were not where made."""
        return [
            self._restored(self._state[v], array)
            if v in self._state and v not in self._done
            else array
            for v, array in zip(values, arrays, strict=True)
        ]

    def _restored(self, state: Carried, new: Any) -> Any:
        return kept_or_restored(
            self._given[state.old], new, self._finite, own=state.own
        )


def kept_or_restored(old: Any, new: Any, finite: Any, *, own: bool) -> Any:
    """The next value of an array of the state.

    Args:
      old: before the step.
      new: after it.
      finite: whether all gradients of the step are finite, a bool scalar.
      own: whether the step decides on it itself.
    """
    sound = finite
    if own:
        sound = jax.lax.cond(
            finite, lambda _: jnp.bool_(True), lambda x: jnp.all(jnp.isfinite(x)), new
        )
    return restore_unless_finite(old, new, sound)
