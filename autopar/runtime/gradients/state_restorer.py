"""Restores the carried state of a step if a gradient is not finite.

Carried state is state that a step reads and returns, such as parameters and moments. If
a step does not check its gradients itself, all its carried state is restored. A step
with a dynamic loss scale checks its gradients itself, and must keep the result of this
check. For such a step, only two kinds of arrays are restored: state that is computed
from the gradients (`autopar_passes.sums.poisoned`), and state that is itself not
finite.
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
from autopar_passes import jax_compat
from autopar_passes.graph.operators import TO_HOST, producers
from autopar_passes.graph.roles import InputRole, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """An array of carried state that may be restored.

    Attributes:
      argument: position of the array among the flat arguments.
      result: position of its next value among the flat results.
      old: number of the argument's value in the program.
      new: number of the result's value in the program; None: the result is a constant.
        Of a result in host memory, the value on devices before its copy.
      own: whether the step itself decides on the next value, as for its loss scale.
        Such an array is restored only if its next value is not finite.
      alone: whether ``new`` is the next value of no other argument.
    """

    argument: int
    result: int
    old: int
    new: int | None
    own: bool
    alone: bool


def restored_state(analysis: Analysis) -> tuple[Carried, ...]:
    """Returns the state that a step restores if a gradient is not finite.

    Args:
      analysis: the analysis of the step, or of the program of one microbatch.
    """
    graph, found = analysis.graph, analysis.poisoned_results
    copied = {
        op.outputs[0]: op.inputs[0] for op in graph.operators if op.kind == TO_HOST
    }
    ends = analysis.program.body.outputs
    outputs = [copied.get(a, a) if isinstance(a, int) else a for a in ends]
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
    """The values of a whole step that are restored as soon as they are computed.

    Later operators then read the restored value: for example, parameters are computed
    from restored moments. If moments were restored at the end of the step, their old
    values would be needed until then, and a compiler that updates moments in place
    would have to copy them first. On a CPU, this adds two passes over parameters and
    moments.

    Args:
      analysis: the analysis of the step.
      assignment: the layouts of the step.
      state: the state from `restored_state`.
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
    """Tells in one trace of a step whether the step's gradients are finite."""

    @property
    def complete(self) -> bool:
        """Whether all gradients have been checked."""
        ...

    @property
    def finite(self) -> Any:
        """Whether all gradients checked so far are finite, a bool scalar."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A `Looked` whose result is known before the trace, such as in a later task."""

    finite: Any
    complete: bool = True


class StateRestorer:
    """Restores state in one trace of a step, or of a task of a step."""

    def __init__(
        self,
        looked: Looked,
        places: Mapping[int, Carried],
        given: Mapping[int, Any],
        early: frozenset[int],
    ) -> None:
        """Starts a trace.

        Args:
          looked: the check of the step's gradients.
          places: position of a flat result -> the state that it holds.
          given: number of an argument's value in the program -> its array.
          early: numbers of values that are restored as soon as they are computed, if
            all gradients have been checked by then.
        """
        self._looked, self._places, self._given = looked, places, given
        self._early = {c.new: c for c in places.values() if c.new in early}
        self._done: set[int] = set()

    def replace_made(self, value: int, array: Any) -> Any:
        """Returns the array that later operators read for a value that was computed.

        For an early value this is the restored array.
        `autopar_passes.replay.run.replay` calls this for each new value.
        """
        if value not in self._early or not self._looked.complete:
            return array
        self._done.add(value)
        return self._restore_carried(self._early[value], array)

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results, with all state restored that was not restored early."""
        out = list(results)
        for place, carried in self._places.items():
            if carried.new is None or carried.new not in self._done:
                out[place] = self._restore_carried(carried, out[place])
        return out

    def _restore_carried(self, carried: Carried, new: Any) -> Any:
        old = self._given[carried.old]
        return kept_or_restored(old, new, self._looked.finite, own=carried.own)


def kept_or_restored(old: Any, new: Any, finite: Any, *, own: bool) -> Any:
    """The next value of an array of the state: ``new``, or ``old`` if it is restored.

    Args:
      old: the array before the step.
      new: the array after the step.
      finite: whether all gradients of the step are finite, a bool scalar.
      own: whether the step itself decides on the next value. Then ``new`` is replaced
        only if a gradient is not finite and ``new`` itself is not finite.
    """
    if jax_compat.is_on_host(jax.typeof(new)):
        new = jax.device_put(new, jax.memory.Space.Device)
        kept = kept_or_restored(old, new, finite, own=own)
        return jax.device_put(kept, jax.memory.Space.Host)
    if jax_compat.is_on_host(jax.typeof(old)):
        old = jax.device_put(old, jax.memory.Space.Device)
    sound = finite
    if own:
        sound = jax.lax.cond(
            finite, lambda _: jnp.bool_(True), lambda x: jnp.all(jnp.isfinite(x)), new
        )
    return restore_unless_finite(old, new, sound)


def is_finite(analysis: Analysis, flat: Sequence[Any]) -> bool:
    """Whether the results of a finished step are finite.

    Checks parameters, and results that are not state. If the step checks its gradients
    itself, parameters are not checked.

    Args:
      analysis: the analysis of the step.
      flat: the flat results of the step; results in other processes are not checked.
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
    """Returns the flat results of a step, with the state as it was before the step.

    State on which the step itself decides, such as a loss scale, keeps its new value.

    Args:
      analysis: the analysis of the step.
      arguments: the flat arguments of the step, in their shardings.
      flat: the flat results of the step.
    """
    out = list(flat)
    for carried in restored_state(analysis):
        if not carried.own:
            out[carried.result] = arguments[carried.argument]
    return out


class Soundness:
    """Checks in one trace of a step whether gradients and results are finite.

    A `StateRestorer` reads `complete` and `finite`. `is_sound` is reported to the
    caller of the step. If the step checks its gradients itself, as with a dynamic loss
    scale, `is_sound` depends only on results that are not state.
    """

    def __init__(
        self, analysis: Analysis, codecs: CodecSynchroniser | None = None
    ) -> None:
        """Starts a trace.

        Args:
          analysis: the analysis of the step.
          codecs: the codecs of the gradients, which also check that they are finite.
        """
        self._codecs = codecs
        self._gradients = gradients_read(analysis)
        self._results = results_of(analysis)
        self._guarded = analysis.poisoned_results.guarded
        self._open = self._gradients | self._results
        self._flags: list[jax.Array] = []
        self._told: list[jax.Array] = []

    def see_made(self, value: int, array: Any) -> Any:
        """Checks whether a computed value is finite, if it is a gradient or result."""
        if value in self._open:
            self._open = self._open - {value}
            flag = jnp.all(jnp.isfinite(array))
            self._flags.append(flag)
            if value in self._results or not self._guarded:
                self._told.append(flag)
        return array

    @property
    def complete(self) -> bool:
        """Whether all values to be checked have been computed."""
        codecs = self._codecs
        return not self._open and (codecs is None or codecs.complete)

    @property
    def finite(self) -> jax.Array:
        """Whether all values checked so far are finite."""
        flags = list(self._flags)
        if self._codecs is not None:
            flags.append(self._codecs.finite)
        return _all(flags)

    def is_sound(self) -> jax.Array:
        """Whether the step succeeded, as reported to its caller."""
        flags = list(self._told)
        if self._codecs is not None and not self._guarded:
            flags.append(self._codecs.finite)
        return _all(flags)


def gradients_read(analysis: Analysis) -> frozenset[int]:
    """The floating-point values of the backward pass that the optimizer update reads.

    Values inside of loops are left out.
    """
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
    """Returns the floating-point results of a step, except carried state and inputs."""
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
