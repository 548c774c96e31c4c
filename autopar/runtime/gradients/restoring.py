"""Keeps what a step carries as it was where a gradient is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.layouts.assignment import Assignment
from autopar.runtime.gradients.sums import StepSynchroniser
from autopar.steps.analysis import Analysis


class Keeper:
    """Chooses between the old and the new of what one trace of a step carries.

    What is made after all sums is chosen where it is made, so that what is computed
    of it (parameters of moments) follows the choice. Chosen at the end, the old
    moments are read once more by what makes the parameters, and a compiler that
    updates them in place has to copy them first: on a CPU two passes over
    parameters and moments.
    """

    def __init__(
        self,
        synchroniser: StepSynchroniser,
        analysis: Analysis,
        assignment: Assignment,
        arguments: Sequence[Any],
    ) -> None:
        """Starts a step with these flat arguments."""
        graph = analysis.graph
        self._synchroniser = synchroniser
        self._outputs = analysis.program.body.outputs
        self._carried = {r: arguments[a] for a, r in analysis.carried.items()}
        values = [self._outputs[result] for result in self._carried]
        self._early: dict[int, Any] = {}
        for argument, result in analysis.carried.items():
            value, home = self._outputs[result], graph.inputs[argument].value
            if (
                isinstance(value, int)
                and values.count(value) == 1
                and assignment.home_layout(value) == assignment.home_layout(home)
            ):
                self._early[value] = arguments[argument]
        self._done: set[int] = set()

    def made(self, value: int, array: Any) -> Any:
        """What is used of a value made (`autopar_passes.replay.run.replay`)."""
        if value not in self._early or not self._synchroniser.complete:
            return array
        self._done.add(value)
        return self._chosen(array, self._early[value])

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """The flat results, those chosen too that were not where they were made."""
        out = list(results)
        for result, old in self._carried.items():
            if self._outputs[result] not in self._done:
                out[result] = self._chosen(out[result], old)
        return out

    def _chosen(self, new: Any, old: Any) -> Any:
        finite = jnp.broadcast_to(self._synchroniser.finite, jnp.shape(new))
        return jax.lax.select(finite, new, jnp.asarray(old))
