"""Restores what a gradient that is not finite would spoil of what a step carries.

A step that does not look at its gradients is skipped as a whole. One that looks, as one
with a dynamic loss scale does, has to carry on what it finds: then only what is made of
the gradients' numbers is restored (`autopar_passes.sums.poisoned`), and what the
forward pass has spoilt.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autopar.compression.synchronise import restore_unless_finite
from autopar.layouts.assignment import Assignment
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import producers
from autopar_passes.graph.roles import InputRole, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """State that is restored.

    Attributes:
      argument: its flat argument.
      result: the flat result that is its next value.
      old: the value of the argument.
      new: the value of the result; None: a constant.
      own: whether the step decides on it itself: it is restored only where it is not
        finite.
      alone: whether it is the next value of no other argument.
    """

    argument: int
    result: int
    old: int
    new: int | None
    own: bool
    alone: bool


def restored_state(analysis: Analysis) -> tuple[Carried, ...]:
    """The state that a step restores where a gradient is not finite.

    Args:
      analysis: of the step, or of one microbatch's program.
    """
    graph, found = analysis.graph, analysis.poisoned_results
    outputs = analysis.program.body.outputs
    counts = Counter(outputs[k] for k in analysis.carried_arguments.values())
    out: list[Carried] = []
    for argument, result in analysis.carried_arguments.items():
        made, old = outputs[result], graph.inputs[argument].value
        if made == old:
            continue
        new = made if isinstance(made, int) else None
        own = found.guarded and result not in found.results
        if own and (new is None or not graph.values[new].floating):
            continue
        alone = new is not None and counts[made] == 1
        out.append(Carried(argument, result, old, new, own, alone))
    return tuple(out)


def early_state(
    analysis: Analysis, assignment: Assignment, state: Sequence[Carried]
) -> frozenset[int]:
    """The values of a whole step that are restored where they are made.

    What is computed of such a value, as parameters are of moments, then reads the
    restored value. If it were restored at the end, the parameters would read the old
    moments once more. A compiler that updates moments in place has to copy them first:
    on a CPU two passes over parameters and moments.

    Args:
      analysis: the step.
      assignment: its layouts.
      state: of `restored_state`.
    """
    if analysis.poisoned_results.guarded:
        return frozenset()
    home = assignment.home_layout
    return frozenset(
        c.new
        for c in state
        if c.alone and c.new is not None and home(c.new) == home(c.old)
    )


class Looked(Protocol):
    """What has looked at the gradients of a step."""

    @property
    def complete(self) -> bool:
        """Whether it has seen all."""
        ...

    @property
    def finite(self) -> Any:
        """Whether what it has seen is finite, a bool scalar."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What was found before: whether all gradients of a step are finite."""

    finite: Any
    complete: bool = True


class StateRestorer:
    """Restores state in one trace of a step, or of a task of one."""

    def __init__(
        self,
        looked: Looked,
        places: Mapping[int, Carried],
        given: Mapping[int, Any],
        early: frozenset[int],
    ) -> None:
        """Starts a trace.

        Args:
          looked: says whether the step's numbers are finite.
          places: position of a result -> the state that it is.
          given: value of an argument -> its array.
          early: values that are restored where they are made, if `looked` is complete
            then.
        """
        self._looked, self._places, self._given = looked, places, given
        self._early = {c.new: c for c in places.values() if c.new in early}
        self._done: set[int] = set()

    def replace_made(self, value: int, array: Any) -> Any:
        """Returns what later operators read (`autopar_passes.replay.run.replay`)."""
        if value not in self._early or not self._looked.complete:
            return array
        self._done.add(value)
        return self._restore_carried(self._early[value], array)

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """The results, with those restored that were not where they were made."""
        out = list(results)
        for place, carried in self._places.items():
            if carried.new is None or carried.new not in self._done:
                out[place] = self._restore_carried(carried, out[place])
        return out

    def _restore_carried(self, carried: Carried, new: Any) -> Any:
        old = self._given[carried.old]
        return kept_or_restored(old, new, self._looked.finite, own=carried.own)


def kept_or_restored(old: Any, new: Any, finite: Any, *, own: bool) -> Any:
    """The next value of an array of the state.

    Args:
      old: before the step.
      new: after it.
      finite: whether all gradients of the step are finite, a bool scalar.
      own: whether the step decides on it itself. Then it is looked at, only in a step
        that is skipped.
    """
    sound = finite
    if own:
        sound = jax.lax.cond(
            finite, lambda _: jnp.bool_(True), lambda x: jnp.all(jnp.isfinite(x)), new
        )
    return restore_unless_finite(old, new, sound)


def is_finite(analysis: Analysis, flat: Sequence[Any]) -> bool:
    """Whether the results of a step that has ended are finite, parameters among them.

    Of a step that looks at its gradients itself only what it returns besides counts.

    Args:
      analysis: of the step.
      flat: its flat results; those that lie in other processes are not looked at.
    """
    graph, looks = analysis.graph, analysis.poisoned_results.guarded
    state = {given.output: given.role for given in graph.inputs if given.output >= 0}
    flags = [
        jnp.all(jnp.isfinite(x))
        for k, x in enumerate(flat)
        if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        and x.sharding.addressable_devices
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
        self._guarded = analysis.poisoned_results.guarded
        self._open = self._gradients | self._results
        self._flags: list[jax.Array] = []
        self._told: list[jax.Array] = []

    def see_made(self, value: int, array: Any) -> Any:
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

    def is_sound(self) -> jax.Array:
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
        found |= analysis.split.accumulated_values
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
    graph, carried = analysis.graph, set(analysis.carried_arguments.values())
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
