"""How the learning rate follows the batch, and how progress is counted.

Rules multiply the step that an optimizer tuned for M0 rows takes with M = s M0 rows:

* ``adascale``: the gain of the step (Johnson et al., AdaScale SGD, ICML 2020), for
  optimizers whose step grows with the gradient.
* ``adascale-root``: its root, for Adam's family.
* ``sqrt``: the root of s (Krizhevsky, arXiv 1404.5997).
* ``linear``: s (Goyal et al., arXiv 1706.02677).
* ``legw``: the root of s, reached over s times the warm-up (You et al., arXiv
  1901.08256).
* ``none``: 1.

`scaled` wraps an `optax` optimizer. Its state holds the batch, the gain of a step and
the progress in rows of the base batch; `told` writes the first two before a step. Each
step adds gain * M0 rows. Schedules of the optimizer read progress / M0 as their count,
so one that was written for M0 keeps its meaning while the batch changes.
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
from autopar.goodput.efficiency import EXACT, CodecError, gain
from autopar.runtime import placement

Rule = Literal["adascale", "adascale-root", "sqrt", "linear", "legw", "none"]


class ScaledState(NamedTuple):
    """The state of `scaled`.

    Attributes:
      base_batch: rows of the base batch, M0, a float32 scalar.
      batch: rows of the batch, M, float32.
      gain: steps with the base batch that a step is worth, float32.
      rule: number of the rule among those of `Rule`, int32.
      progress: rows of the base batch so far, float32.
      rest: what float32 could not add to it.
      steps: number of steps, int32.
      inner: state of the optimizer.
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
        """What a step is multiplied by."""
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


def scaled(
    optimizer: optax.GradientTransformation,
    rule: Rule,
    *,
    base_batch: int,
    warmup_steps: float = 0,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its steps follow the batch.

    Args:
      optimizer: tuned for the base batch, with its schedules.
      rule: how steps grow with the batch.
      base_batch: rows of the batch that it was tuned for, M0.
      warmup_steps: for ``legw``, the steps of its warm-up with the base batch. The
        optimizer itself then needs no warm-up.

    Returns:
      An optimizer whose state is a `ScaledState`. Before `told` it takes the batch for
      the base batch.

    Raises:
      PlanError: there is no such rule, or a number is out of its range.
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
    """A float32 sum and what it lost (Kahan, 1965)."""
    found = total + more
    return found, more - (found - total)


@functools.cache
def _schedule_states() -> tuple[type, ...]:
    """The states of `optax` whose count is the argument of a schedule.

    That of a schedule in a chain, and that of one in `optax.inject_hyperparams`, whose
    class has no public name; making one makes an array, which importing must not.
    """
    wrapped = optax.schedules.WrappedSchedule(optax.constant_schedule(1.0))
    return optax.ScaleByScheduleState, type(wrapped.init())


def with_schedule_count(state: Any, count: jax.Array) -> Any:
    """An optimizer's state whose schedules read another count.

    Counts of other kinds, such as those that correct Adam's moments, stay.

    Args:
      state: of any `optax` optimizer.
      count: int32 scalar.
    """
    scheduled = _schedule_states()

    def take_count(node: Any) -> Any:
        return node._replace(count=count) if isinstance(node, scheduled) else node

    return jax.tree.map(take_count, state, is_leaf=lambda x: isinstance(x, scheduled))


def told(
    state: Any,
    *,
    batch: int,
    phi: float | None = None,
    error: CodecError = EXACT,
    most_gain: float = math.inf,
) -> Any:
    """The train state with the batch, and the gain, of the steps to come.

    Args:
      state: any tree that holds a `ScaledState`, such as Flax's ``TrainState``.
      batch: rows of the batch, M.
      phi: the noise scale (`ParallelStep.noise_scale`); None, or not a number: it is
        not known yet, and a step is worth one with the base batch.
      error: of the codecs.
      most_gain: no larger gain is told (`autopar.goodput.guard.LossGuard`).

    Raises:
      PlanError: the tree holds no `ScaledState`, or a number is out of its range.
    """
    found = scaled_states(state)
    if not found:
        raise PlanError(
            "told: the state holds no autopar.goodput.ScaledState. Wrap its optimizer "
            "in autopar.goodput.scaled(optimizer, rule, base_batch=...)."
        )
    base = float(found[0].base_batch)
    known = phi is not None and not math.isnan(phi)
    sure = 0.0 if phi is None or not known else phi
    worth = gain(sure, batch, base, error, most_gain)
    worth = worth if known else 1.0
    if any(_is_variable(x.batch) for x in found):  # NNX objects are updated in place
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


def gain_told(state: Any) -> float:
    """The gain that `told` has written into a train state.

    Args:
      state: any tree that holds a `ScaledState`; of several the first counts.

    Raises:
      PlanError: the tree holds none.
    """
    number = _first("gain_told", state).gain
    return float(number.get_value() if _is_variable(number) else number)


def progress(state: Any) -> float:
    """Rows of the base batch that a train state's steps were worth.

    Args:
      state: any tree that holds a `ScaledState`; of several the first counts.

    Raises:
      PlanError: the tree holds none.
    """
    return float(_first("progress", state).progress)


def _first(asker: str, state: Any) -> ScaledState:
    found = scaled_states(state)
    if not found:
        raise PlanError(f"{asker}: the state holds no autopar.goodput.ScaledState.")
    return found[0]


def rule_of(state: Any) -> tuple[Rule, int]:
    """The rule and the base batch of a train state's optimizer.

    Args:
      state: any tree that holds a `ScaledState`.

    Raises:
      PlanError: the tree holds none, or several that differ.
    """
    found = {(int(x.rule), round(float(x.base_batch))) for x in scaled_states(state)}
    if not found:
        raise PlanError(
            "the state holds no autopar.goodput.ScaledState, so its learning rate "
            "would not follow the batch. Wrap its optimizer in "
            "autopar.goodput.scaled(optimizer, rule, base_batch=...)."
        )
    if len(found) > 1:
        raise PlanError(
            "the state holds several autopar.goodput.ScaledState that differ in their "
            "rule or base batch. Wrap all optimizers alike."
        )
    ((number, base),) = found
    return get_args(Rule)[number], base


def scaled_states(state: Any) -> list[ScaledState]:
    """All `ScaledState` of a tree."""
    leaves = jax.tree.leaves(state, is_leaf=_is_scaled)
    return [x for x in leaves if isinstance(x, ScaledState)]


def _is_scaled(node: Any) -> bool:
    return isinstance(node, ScaledState)


def _is_variable(leaf: Any) -> bool:
    """Whether a leaf is a variable of an NNX object, which holds its array."""
    return hasattr(leaf, "set_value") and hasattr(leaf, "get_value")


def _like(old: Any, number: float) -> Any:
    """A number where an array lies."""
    where = getattr(old, "sharding", None)
    if isinstance(where, NamedSharding):
        return placement.place(np.float32(number), where)
    new = jnp.asarray(number, jnp.float32)
    return new if where is None else jax.device_put(new, where)


def _check(rule: Any, base_batch: Any, warmup: Any) -> None:
    if rule not in get_args(Rule):
        raise PlanError(
            f"scaled: rule={rule!r}: expected one of {', '.join(get_args(Rule))}."
        )
    if not isinstance(base_batch, int) or base_batch < 1:
        raise PlanError(
            f"scaled: base_batch={base_batch!r}: expected the rows of the batch that "
            "the optimizer was tuned for."
        )
    if not warmup >= 0:
        raise PlanError(f"scaled: warmup_steps={warmup!r}: expected at least 0.")
