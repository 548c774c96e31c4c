"""Restores what a step carries when a gradient is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.compression.synchronise import restore_unless_finite
from autopar.layouts.assignment import Assignment
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.steps.analysis import Analysis


class Restorer:
    """Restores the carried state of one trace of a step.

    A value that is made after all sums is restored where it is made. What is computed
    of it (parameters of moments) then reads the restored value. If it were restored
    at the end, the parameters would read the old moments once more. A compiler that
    updates moments in place has to copy them first: on a CPU two passes over
    parameters and moments.
    """

    def __init__(
        self,
        synchroniser: CodecSynchroniser,
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
        """What later operators read of a value (`autopar_passes.replay.run.replay`)."""
        if value not in self._early or not self._synchroniser.complete:
            return array
        self._done.add(value)
        return self._restored(array, self._early[value])

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """The flat results, with those restored that were not where they were made."""
        out = list(results)
        for result, old in self._carried.items():
            if self._outputs[result] not in self._done:
                out[result] = self._restored(out[result], old)
        return out

    def _restored(self, new: Any, old: Any) -> Any:
        return restore_unless_finite(old, new, self._synchroniser.finite)
