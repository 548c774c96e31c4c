"""Keeps the averages of the noise scale from step to step and from plan to plan."""

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
    """The noise scale of the steps of one training."""

    def __init__(self) -> None:
        """Has measured nothing yet."""
        self._state: State | None = None
        self._saved: Any = None
        self._owner: NoiseSpec | None = None

    def run(
        self, planned: PlannedStep, placed: Sequence[Any], codecs: CodecRun
    ) -> list[Any]:
        """Runs one step that was prepared; returns its flat results.

        Args:
          planned: the program.
          placed: its flat arguments.
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
        """What a program takes behind its other arguments: the averages, if any."""
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
        """A copy of the averages; None before the first step."""
        found = self._saved if self._state is None else self._state
        return None if found is None else jax.tree.map(jnp.copy, found)

    def restore(self, state: Any) -> None:
        """Takes saved averages; the next step places them.

        Raises:
          PlanError: they are no averages.
        """
        if state is not None:
            check(state)
        self._saved, self._state, self._owner = state, None, None

    def start_anew(self) -> None:
        """Forgets what steps have left; what was assigned and not yet used stays."""
        if self._state is not None:
            self._state, self._owner = None, None

    def scale(self) -> NoiseScale:
        """The noise scale after the last step.

        Raises:
          PlanError: no step has run that measured it.
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
    """What a saved state has; it makes arrays, which importing must not."""
    return frozenset({*fresh(1.0), "compared", "previous"})


def check(state: Any) -> None:
    """Checks that a state is one that was read from `ParallelStep.noise_state`.

    Raises:
      PlanError: it is not.
    """
    if not isinstance(state, dict) or frozenset(map(str, state)) != _known_names():
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise PlanError(
            f"noise_state: expected what was read from step.noise_state, got {found}."
        )


def carried_over(state: State, spec: NoiseSpec) -> State:
    """The averages for a plan, from those under another plan of the same step.

    They are independent of the plan: the same parameters and rows are measured. Where
    a plan has one group alone and the other has several, their bias differs, so the
    averages start anew, as Pollux's do.

    Args:
      state: after steps, arrays or numpy.
      spec: what the new plan measures.
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
    # Copies, as a step consumes them: fresh averages are one array in several places.
    return jax.tree.map(
        lambda x, like, where: placement.place(jnp.array(x, like.dtype), where),
        jax.tree.map(_of_this_process, made),
        wanted,
        spec.shardings(),
    )


def _of_this_process(array: Any) -> Any:
    """An array that all processes have, without the devices of the others."""
    alike = placement.is_global(array) and array.is_fully_replicated
    return np.asarray(array) if alike else array


class HasNoise:
    """A step that measures the noise of its gradients, if it is asked to."""

    _noise: NoiseRun

    @property
    def noise_scale(self) -> NoiseScale:
        """How noisy gradients are, averaged over steps with ``noise_scale=``."""
        return self._noise.scale()

    @property
    def noise_state(self) -> Any:
        """The averages behind `noise_scale`, to be saved with the train state."""
        return self._noise.copy_averages

    @noise_state.setter
    def noise_state(self, state: Any) -> None:
        self._noise.restore(state)
