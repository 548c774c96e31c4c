"""Keeps the running averages from which the noise scale of gradients is computed.

The *noise scale* says how much gradients of single rows vary, compared with the
gradient itself (`autopar.runtime.noise.averages`).

The averages are carried over from step to step, and from one plan of the step to the
next.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import PlanError
from autopar.runtime import placement
from autopar.runtime.codec_run import CodecRun
from autopar.runtime.noise.averages import (
    NoiseScale,
    NoiseSpec,
    State,
    fresh,
    noise_scale,
)
from autopar.runtime.planned import PlannedStep


class NoiseRun:
    """Measures the noise scale of gradients over the steps of a training run."""

    def __init__(self) -> None:
        """Creates a run without averages; the first step creates them."""
        self._state: State | None = None
        self._saved: Any = None
        self._owner: NoiseSpec | None = None

    def run(
        self, planned: PlannedStep, placed: Sequence[Any], codecs: CodecRun
    ) -> list[Any]:
        """Runs one prepared step; returns its flat results.

        Args:
          planned: the program.
          placed: the flat arguments of the program.
          codecs: runs the steps whose gradients have codecs.
        """
        states = self._states(planned)
        if planned.sums is not None:
            flat, *made = codecs.run(planned, placed, states)
        elif states:
            flat, *made = planned.function(*placed, *states)
        else:
            return planned.function(*placed)
        if made:
            (self._state,) = made
        return flat

    def _states(self, planned: PlannedStep) -> tuple[State, ...]:
        """The averages in a tuple if a program takes them, else an empty tuple."""
        spec = planned.noise
        if spec is None:
            return ()
        if self._owner is not spec:
            before = self._saved if self._state is None else self._state
            made = spec.init() if before is None else carried_over(before, spec)
            self._state, self._saved, self._owner = made, None, spec
        assert self._state is not None
        return (self._state,)

    @property
    def copy_averages(self) -> Any:
        """Returns a copy of the averages; None before the first step."""
        found = self._saved if self._state is None else self._state
        return None if found is None else jax.tree.map(jnp.copy, found)

    def restore(self, state: Any) -> None:
        """Restores saved averages, which the next step places.

        Raises:
          PlanError: the value does not hold averages.
        """
        if state is not None:
            check(state)
        self._saved, self._state, self._owner = state, None, None

    def start_anew(self) -> None:
        """Drops the averages of earlier steps, but not restored averages.

        The next step still uses averages that were restored.
        """
        if self._state is not None:
            self._state, self._owner = None, None

    def scale(self) -> NoiseScale:
        """Returns the noise scale after the last step.

        Raises:
          PlanError: no step has measured the noise scale yet.
        """
        if self._state is None or self._owner is None:
            raise PlanError(
                "noise_scale: no step has measured it yet. Give "
                "autopar.parallelize(..., noise_scale=True) and call the step first."
            )
        spec = self._owner
        return noise_scale(self._state, spec.groups, spec.sources.left_out)


@functools.cache
def _known_names() -> frozenset[str]:
    """Returns the keys of saved averages.

    This is a function and not a constant because it creates arrays, which would start
    JAX's backend during the import.
    """
    return frozenset({*fresh(1.0), "compared", "previous"})


def check(state: Any) -> None:
    """Checks that a state has the form of `ParallelStep.noise_state`.

    Raises:
      PlanError: the state has another form.
    """
    if not isinstance(state, dict) or frozenset(map(str, state)) != _known_names():
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise PlanError(
            f"noise_state: expected what was read from step.noise_state, got {found}."
        )


def carried_over(state: State, spec: NoiseSpec) -> State:
    """Converts averages to another plan of the same step.

    In general the averages do not depend on the plan, because all plans measure the
    same parameters and rows. There is one exception: with a single group of workers,
    the averages are biased in another way. If one plan has a single group and the other
    plan has several, the averages therefore start anew, as in Pollux.

    Args:
      state: the averages after some steps, as JAX or NumPy arrays.
      spec: how the new plan measures the noise.
    """
    known, wanted = spec.create(), spec.structs()
    before = dict(state["previous"])
    fits = {
        name: array
        for name, array in before.items()
        if name in wanted["previous"]
        and tuple(array.shape) == wanted["previous"][name].shape
    }
    made = {**known, **{k: x for k, x in state.items() if k != "previous"}}
    made["previous"] = {**known["previous"], **fits}
    if len(fits) < len(known["previous"]):
        made["compared"] = known["compared"]
    if bool(before) != bool(known["previous"]):
        made.update({k: known[k] for k in ("weight", "sqr", "var", "excess", "steps")})
    if spec.options.base_batch is not None:
        made["base_batch"] = known["base_batch"]
    # The averages are copied because a step donates them. Fresh averages may contain
    # one array several times, and an array can be donated only once.
    return jax.tree.map(
        lambda x, like, where: placement.place(jnp.array(x, like.dtype), where),
        jax.tree.map(_of_this_process, made),
        wanted,
        spec.shardings(),
    )


def _of_this_process(array: Any) -> Any:
    """Returns a replicated global array as a NumPy array; other arrays unchanged."""
    alike = placement.is_global(array) and array.is_fully_replicated
    return np.asarray(array) if alike else array


class HasNoise:
    """The properties of a step that measures the noise of its gradients."""

    _noise: NoiseRun

    @property
    def noise_scale(self) -> NoiseScale:
        """The noise scale of the gradients, averaged over steps (``noise_scale=``)."""
        return self._noise.scale()

    @property
    def noise_state(self) -> Any:
        """The averages behind `noise_scale`, to be saved with the train state."""
        return self._noise.copy_averages

    @noise_state.setter
    def noise_state(self, state: Any) -> None:
        self._noise.restore(state)
