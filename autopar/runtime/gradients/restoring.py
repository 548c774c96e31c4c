"""Restores what a gradient that is not finite would spoil of what a step carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autopar.compression.synchronise import restore_unless_finite
from autopar.layouts.assignment import Assignment
from autopar.steps.analysis import Analysis


class Looked(Protocol):
    """What has looked at the gradients of a step."""

    @property
    def complete(self) -> bool:
        """Whether it has seen all."""
        ...

    @property
    def finite(self) -> jax.Array:
        """Whether what it has seen is finite."""
        ...


class Restorer:
    """Restores the carried state of one trace of a step.

    A step that does not look at its gradients is skipped as a whole. One that looks,
    as one with a dynamic loss scale does, has to carry on what it finds: then only
    what is made of the gradients' numbers is restored
    (`autopar_passes.sums.poisoned`), and what the forward pass has spoilt.

    In a step that does not look, a value that is made after all sums is restored where
    it is made. What is computed of it (parameters of moments) then reads the restored
    value. If it were restored
    at the end, the parameters would read the old moments once more. A compiler that
    updates moments in place has to copy them first: on a CPU two passes over
    parameters and moments.
    """

    def __init__(
        self,
        looked: Looked,
        analysis: Analysis,
        assignment: Assignment,
        arguments: Sequence[Any],
    ) -> None:
        """Starts a step.

        Args:
          looked: says whether the step's numbers are finite.
          analysis: the step.
          assignment: its layouts.
          arguments: its flat arguments.
        """
        graph, found = analysis.graph, analysis.poisoned
        self._looked = looked
        self._outputs = analysis.program.body.outputs
        self._carried: dict[int, Any] = {}
        # The step itself decides on these values, unless they are spoilt anyway.
        self._own: dict[int, Any] = {}
        for argument, result in analysis.carried.items():
            if self._outputs[result] == graph.inputs[argument].value:
                continue
            spoilt = not found.guarded or result in found.results
            known = self._carried if spoilt else self._own
            known[result] = arguments[argument]
        values = [self._outputs[result] for result in self._carried]
        self._early: dict[int, Any] = {}
        for argument, result in analysis.carried.items():
            value, home = self._outputs[result], graph.inputs[argument].value
            if (
                not found.guarded
                and isinstance(value, int)
                and values.count(value) == 1
                and result in self._carried
                and assignment.home_layout(value) == assignment.home_layout(home)
            ):
                self._early[value] = arguments[argument]
        self._done: set[int] = set()

    def made(self, value: int, array: Any) -> Any:
        """Returns what later operators read (`autopar_passes.replay.run.replay`)."""
        if value not in self._early or not self._looked.complete:
            return array
        self._done.add(value)
        return self._restored(array, self._early[value])

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """The flat results, with those restored that were not where they were made."""
        out = list(results)
        for result, old in self._carried.items():
            if self._outputs[result] not in self._done:
                out[result] = self._restored(out[result], old)
        floating = [k for k in self._own if _is_floating(out[k])]
        sound = self._sound([out[k] for k in floating])
        for result, good in zip(floating, sound, strict=True):
            out[result] = restore_unless_finite(self._own[result], out[result], good)
        return out

    def _restored(self, new: Any, old: Any) -> Any:
        return restore_unless_finite(old, new, self._looked.finite)

    def _sound(self, arrays: list[Any]) -> list[jax.Array]:
        """Whether each may stay; they are looked at only in a step that is skipped."""
        if not arrays:
            return []
        return jax.lax.cond(
            self._looked.finite,
            lambda xs: [jnp.bool_(True) for _ in xs],
            lambda xs: [jnp.all(jnp.isfinite(x)) for x in xs],
            arrays,
        )


def _is_floating(array: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.floating)
