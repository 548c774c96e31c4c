"""Whether a step is finite: its gradients, and what it returns besides the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import producers
from autopar_passes.graph.roles import Role


class Soundness:
    """Looks at the numbers of one trace of a step.

    A `StateRestorer` reads `complete` and `finite`. Of a step that looks at its
    gradients itself, as one with a dynamic loss scale does, only what it returns tells
    that it failed.
    """

    def __init__(
        self, analysis: Analysis, codecs: CodecSynchroniser | None = None
    ) -> None:
        """Has seen nothing yet.

        Args:
          analysis: the step.
          codecs: those of its gradients, which look at them, too.
        """
        self._codecs = codecs
        self._gradients = gradients_read(analysis)
        self._results = results_of(analysis)
        self._guarded = analysis.poisoned.guarded
        self._open = self._gradients | self._results
        self._flags: list[jax.Array] = []
        self._told: list[jax.Array] = []

    def made(self, value: int, array: Any) -> Any:
        """Takes a value that was made."""
        if value in self._open:
            self._open = self._open - {value}
            flag = jnp.all(jnp.isfinite(array))
            self._flags.append(flag)
            if value in self._results or not self._guarded:
                self._told.append(flag)
        return array

    @property
    def complete(self) -> bool:
        """Whether all that is looked at was made."""
        codecs = self._codecs
        return not self._open and (codecs is None or codecs.complete)

    @property
    def finite(self) -> jax.Array:
        """Whether all that was made so far is finite."""
        flags = list(self._flags)
        if self._codecs is not None:
            flags.append(self._codecs.finite)
        return _all(flags)

    def told(self) -> jax.Array:
        """Whether the step did not fail, for its caller."""
        flags = list(self._told)
        if self._codecs is not None and not self._guarded:
            flags.append(self._codecs.finite)
        return _all(flags)


def gradients_read(analysis: Analysis) -> frozenset[int]:
    """The values of the backward pass, outside of loops, that the update reads."""
    graph = analysis.graph
    made_by = producers(graph.operators)
    found = set(graph.accumulated)
    if analysis.split is not None:
        found |= analysis.split.accumulated
    for deferral in analysis.deferrals:
        found |= deferral.gradients
    for op in graph.operators:
        if op.role is Role.UPDATE:
            for value in op.inputs:
                maker = None if value is None else made_by.get(value)
                if maker is not None and maker.role is Role.BACKWARD:
                    found.update(maker.outputs)
    outer = {v for e in analysis.program.body.equations for v in e.outputs}
    return frozenset(v for v in found & outer if graph.values[v].floating)


def results_of(analysis: Analysis) -> frozenset[int]:
    """The floating values that a step returns besides the state it carries."""
    graph, carried = analysis.graph, set(analysis.carried.values())
    inputs = {given.value for given in graph.inputs}
    return frozenset(
        v
        for k, v in enumerate(graph.outputs)
        if v is not None
        and k not in carried
        and v not in inputs
        and graph.values[v].floating
    )


def _all(flags: Iterable[jax.Array]) -> jax.Array:
    found: Sequence[jax.Array] = list(flags)
    return jnp.all(jnp.stack(found)) if found else jnp.bool_(True)
