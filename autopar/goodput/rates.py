"""Scales the learning rate with the batch size, and counts training progress.

An optimizer was tuned for a base batch of M0 rows. For a batch of M = s M0 rows, one of
these rules multiplies the optimizer's update by a factor:

* ``adascale``: the gain of the step, which is the number of steps with the base batch
  that make as much progress (Johnson et al., AdaScale SGD, ICML 2020), for optimizers
  whose update is proportional to the gradient.
* ``adascale-root``: the square root of the gain, for Adam and similar optimizers.
* ``sqrt``: the square root of s (Krizhevsky, arXiv 1404.5997).
* ``linear``: s itself (Goyal et al., arXiv 1706.02677).
* ``legw``: the square root of s, with a linear warm-up over s times the base batch's
  warm-up steps (You et al., arXiv 1901.08256).
* ``none``: the factor 1.

`scale_updates` wraps an `optax` optimizer. The state of the wrapper holds the batch,
the gain of a step, and the progress in rows of the base batch. `set_batch` writes the
batch size and the gain before a step. Each step adds gain * M0 rows to the progress.
Learning-rate schedules in the optimizer get progress / M0 as their step count.
Therefore a schedule that was written for batches of M0 rows stays correct while the
batch size changes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from autopar.errors import PlanError
from autopar.goodput.choice import EXACT, CodecError, gain
from autopar.runtime import placement

Rule = Literal["adascale", "adascale-root", "sqrt", "linear", "legw", "none"]


class ScaledState(NamedTuple):
    """The state of `scale_updates`.

    Attributes:
      base_batch: rows of the base batch, M0, a float32 scalar.
      batch: rows of the batch, M, float32.
      gain: number of steps with the base batch that make as much progress as one step,
        float32.
      rule: index of the rule in `Rule`, int32.
      progress: progress so far, in rows of the base batch, float32.
      rest: accumulated rounding error of ``progress`` (Kahan summation), float32.
      steps: number of steps, int32.
      inner: state of the wrapped optimizer.
    """

    base_batch: Any
    batch: Any
    gain: Any
    rule: Any
    progress: Any
    rest: Any
    steps: Any
    inner: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Scaling:
    rule: Rule
    base_batch: int
    warmup: float

    def factor(self, state: ScaledState) -> Any:
        """The factor by which the optimizer's update is multiplied."""
        scale = state.batch / self.base_batch
        match self.rule:
            case "adascale":
                return state.gain
            case "adascale-root":
                return jnp.sqrt(state.gain)
            case "linear":
                return scale
            case "sqrt":
                return jnp.sqrt(scale)
            case "legw":
                steps = jnp.maximum(self.warmup * scale, 1.0)
                return jnp.sqrt(scale) * jnp.minimum(1.0, (state.steps + 1) / steps)
            case "none":
                return jnp.ones_like(scale)


def scale_updates(
    optimizer: optax.GradientTransformation,
    rule: Rule,
    *,
    base_batch: int,
    warmup_steps: float = 0,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its updates are scaled with the batch.

    Args:
      optimizer: the optimizer and its schedules, tuned for the base batch.
      rule: the rule by which updates are scaled.
      base_batch: rows of the base batch, M0.
      warmup_steps: for ``legw``, the number of warm-up steps with the base batch. The
        wrapped optimizer then needs no warm-up of its own.

    Returns:
      An optimizer whose state is a `ScaledState`. Until `set_batch` is called, it
      assumes the base batch.

    Raises:
      PlanError: the rule does not exist, or a number is out of its range.
    """
    _check(rule, base_batch, warmup_steps)
    scaling = _Scaling(rule, base_batch, warmup_steps)
    wrapped = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> ScaledState:
        zero = jnp.zeros((), jnp.float32)
        return ScaledState(
            base_batch=jnp.asarray(base_batch, jnp.float32),
            batch=jnp.asarray(base_batch, jnp.float32),
            gain=jnp.ones((), jnp.float32),
            rule=jnp.asarray(get_args(Rule).index(rule), jnp.int32),
            progress=zero,
            rest=zero,
            steps=jnp.zeros((), jnp.int32),
            inner=wrapped.init(params),
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        count = jnp.floor(state.progress / base_batch).astype(jnp.int32)
        inner = with_schedule_count(state.inner, count)
        made, after = wrapped.update(updates, inner, params, **extra)
        factor = scaling.factor(state)
        made = jax.tree.map(lambda x: (x * factor).astype(x.dtype), made)
        rows = base_batch * state.gain
        progress, rest = _add(state.progress, rows + state.rest)
        return made, state._replace(
            progress=progress, rest=rest, steps=state.steps + 1, inner=after
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _add(total: Any, more: Any) -> tuple[Any, Any]:
    """Adds a number to a float32 sum; also returns the rounding error (Kahan, 1965)."""
    found = total + more
    return found, more - (found - total)


@functools.cache
def _schedule_states() -> tuple[type, ...]:
    """The state classes of `optax` that hold the step count of a schedule.

    One class is the state of a schedule in a chain. The other is the state of a
    schedule in `optax.inject_hyperparams`; it has no public name, so this function
    makes an instance and takes its class. An instance holds a JAX array, and importing
    this module must not create arrays. Therefore the classes are found in a function.
    """
    wrapped = optax.schedules.WrappedSchedule(optax.constant_schedule(1.0))
    return optax.ScaleByScheduleState, type(wrapped.init())


def with_schedule_count(state: Any, count: jax.Array) -> Any:
    """Replaces the step count of all schedules in an optimizer's state.

    Other step counts, such as the count for Adam's bias correction, do not change.

    Args:
      state: the state of any `optax` optimizer.
      count: the new step count, an int32 scalar.
    """
    scheduled = _schedule_states()

    def take_count(node: Any) -> Any:
        return node._replace(count=count) if isinstance(node, scheduled) else node

    return jax.tree.map(take_count, state, is_leaf=lambda x: isinstance(x, scheduled))


def set_batch(
    state: Any,
    *,
    batch: int,
    phi: float | None = None,
    error: CodecError = EXACT,
    most_gain: float = math.inf,
) -> Any:
    """Writes the batch size and the gain of the next steps into a train state.

    Args:
      state: any tree that holds a `ScaledState`, such as Flax's ``TrainState``.
      batch: rows of the batch, M.
      phi: the noise scale (`ParallelStep.noise_scale`); if it is None or nan (not known
        yet), the gain is 1.
      error: the squared error that the gradient codecs add.
      most_gain: upper limit of the gain (`autopar.goodput.following.LossGuard`).

    Raises:
      PlanError: the tree holds no `ScaledState`, or a number is out of its range.
    """
    found = scaled_states(state)
    if not found:
        raise PlanError(
            "set_batch: the state holds no autopar.goodput.ScaledState. Wrap its "
            "optimizer in autopar.goodput.scale_updates(optimizer, rule, "
            "base_batch=...)."
        )
    base = float(found[0].base_batch)
    known = phi is not None and not math.isnan(phi)
    sure = 0.0 if phi is None or not known else phi
    worth = gain(sure, batch, base, error, most_gain)
    worth = worth if known else 1.0
    if any(_is_variable(x.batch) for x in found):  # Flax NNX: update in place
        for node in found:
            node.batch.set_value(_like(node.batch.get_value(), batch))
            node.gain.set_value(_like(node.gain.get_value(), worth))
        return state

    def write(node: Any) -> Any:
        if not isinstance(node, ScaledState):
            return node
        return node._replace(
            batch=_like(node.batch, batch), gain=_like(node.gain, worth)
        )

    return jax.tree.map(write, state, is_leaf=_is_scaled)


def gain_of(state: Any) -> float:
    """The gain that `set_batch` has written into a train state.

    Args:
      state: any tree that holds a `ScaledState`; the first one is read.

    Raises:
      PlanError: the tree holds no `ScaledState`.
    """
    number = _first("gain_of", state).gain
    return float(number.get_value() if _is_variable(number) else number)


def progress(state: Any) -> float:
    """The progress of a train state's steps, in rows of the base batch.

    Args:
      state: any tree that holds a `ScaledState`; the first one is read.

    Raises:
      PlanError: the tree holds no `ScaledState`.
    """
    return float(_first("progress", state).progress)


def _first(asker: str, state: Any) -> ScaledState:
    found = scaled_states(state)
    if not found:
        raise PlanError(f"{asker}: the state holds no autopar.goodput.ScaledState.")
    return found[0]


def rule_of(state: Any) -> tuple[Rule, int]:
    """The scaling rule and the base batch of a train state's optimizer.

    Args:
      state: any tree that holds a `ScaledState`.

    Raises:
      PlanError: the tree holds no `ScaledState`, or several that differ.
    """
    found = {(int(x.rule), round(float(x.base_batch))) for x in scaled_states(state)}
    if not found:
        raise PlanError(
            "the state holds no autopar.goodput.ScaledState, so its learning rate "
            "would not follow the batch. Wrap its optimizer in "
            "autopar.goodput.scale_updates(optimizer, rule, base_batch=...)."
        )
    if len(found) > 1:
        raise PlanError(
            "the state holds several autopar.goodput.ScaledState that differ in their "
            "rule or base batch. Wrap all optimizers alike."
        )
    ((number, base),) = found
    return get_args(Rule)[number], base


def scaled_states(state: Any) -> list[ScaledState]:
    """All `ScaledState` instances in a tree."""
    leaves = jax.tree.leaves(state, is_leaf=_is_scaled)
    return [x for x in leaves if isinstance(x, ScaledState)]


def _is_scaled(node: Any) -> bool:
    return isinstance(node, ScaledState)


def _is_variable(leaf: Any) -> bool:
    """Whether a leaf is a Flax NNX variable, a wrapper around an array."""
    return hasattr(leaf, "set_value") and hasattr(leaf, "get_value")


def _like(old: Any, number: float) -> Any:
    """A float32 scalar with the sharding of another array."""
    where = getattr(old, "sharding", None)
    if isinstance(where, NamedSharding):
        return placement.place(np.float32(number), where)
    new = jnp.asarray(number, jnp.float32)
    return new if where is None else jax.device_put(new, where)


def _check(rule: Any, base_batch: Any, warmup: Any) -> None:
    if rule not in get_args(Rule):
        raise PlanError(
            f"scale_updates: rule={rule!r}: expected one of "
            f"{', '.join(get_args(Rule))}."
        )
    if not isinstance(base_batch, int) or base_batch < 1:
        raise PlanError(
            f"scale_updates: base_batch={base_batch!r}: expected the rows of the batch "
            "that the optimizer was tuned for."
        )
    if not warmup >= 0:
        raise PlanError(f"scale_updates: warmup_steps={warmup!r}: expected at least 0.")
