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

`scaled` wraps an `optax` optimizer. Its state holds the batch, the noise scale and the
progress in rows of the base batch; `told` writes the first two before a step. Each step
adds gain * M0 rows. Schedules of the optimizer read progress / M0 as their count, so
one that was written for M0 keeps its meaning while the batch changes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from autopar.errors import PlanError

# The states of `optax` whose count is the argument of a schedule: that of a schedule in
# a chain, and that of one in `optax.inject_hyperparams`.
_SCHEDULED = (
    optax.ScaleByScheduleState,
    type(optax.schedules.WrappedSchedule(optax.constant_schedule(1.0)).init()),
)

Rule = Literal["adascale", "adascale-root", "sqrt", "linear", "legw", "none"]


# In place of a noise scale that was not measured yet.
UNKNOWN = -1.0


class ScaledState(NamedTuple):
    """The state of `scaled`.

    Attributes:
      batch: rows of the batch, M, a float32 scalar.
      phi: the noise scale in rows, float32; -1 until it is known.
      progress: rows of the base batch so far, float32.
      rest: what float32 could not add to it.
      steps: number of steps, int32.
      inner: state of the optimizer.
    """

    batch: Any
    phi: Any
    progress: Any
    rest: Any
    steps: Any
    inner: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Scaling:
    rule: Rule
    base_batch: int
    warmup: float

    def gain(self, batch: Any, phi: Any) -> Any:
        """Steps with the base batch that a step is worth.

        One while the noise scale is not known; s where noise hides the mean gradient.
        """
        scale = batch / self.base_batch
        known = jnp.where(jnp.isfinite(phi), jnp.maximum(phi, 0.0), 0.0)
        found = scale * (known + self.base_batch) / (known + batch)
        found = jnp.where(jnp.isfinite(phi), found, scale)
        return jnp.where(phi < 0, 1.0, found)

    def factor(self, state: ScaledState) -> Any:
        """What a step is multiplied by."""
        scale = state.batch / self.base_batch
        match self.rule:
            case "adascale":
                return self.gain(state.batch, state.phi)
            case "adascale-root":
                return jnp.sqrt(self.gain(state.batch, state.phi))
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
            batch=jnp.asarray(base_batch, jnp.float32),
            phi=jnp.asarray(UNKNOWN, jnp.float32),
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
        rows = base_batch * scaling.gain(state.batch, state.phi)
        progress, rest = _added(state.progress, rows + state.rest)
        return made, state._replace(
            progress=progress, rest=rest, steps=state.steps + 1, inner=after
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _added(total: Any, more: Any) -> tuple[Any, Any]:
    """A float32 sum and what it lost (Kahan, 1965)."""
    found = total + more
    return found, more - (found - total)


def with_schedule_count(state: Any, count: jax.Array) -> Any:
    """An optimizer's state whose schedules read another count.

    Counts of other kinds, such as those that correct Adam's moments, stay.

    Args:
      state: of any `optax` optimizer.
      count: int32 scalar.
    """

    def counted(node: Any) -> Any:
        return node._replace(count=count) if isinstance(node, _SCHEDULED) else node

    return jax.tree.map(counted, state, is_leaf=lambda x: isinstance(x, _SCHEDULED))


def told(state: Any, *, batch: int, phi: float | None = None) -> Any:
    """The train state with the batch, and the noise scale, of the steps to come.

    Args:
      state: any tree that holds a `ScaledState`, such as Flax's ``TrainState``.
      batch: rows of the batch, M.
      phi: the noise scale (`ParallelStep.noise_scale`), not a number where it is not
        known yet; None: it stays as it is.

    Raises:
      PlanError: the tree holds no `ScaledState`, or a number is out of its range.
    """
    if not batch > 0 or (phi is not None and phi < 0):
        raise PlanError(
            "told: expected a batch of more than 0 rows and a noise scale of at least "
            f"0, got batch={batch}, phi={phi}."
        )
    if not scaled_states(state):
        raise PlanError(
            "told: the state holds no autopar.goodput.ScaledState. Wrap its optimizer "
            "in autopar.goodput.scaled(optimizer, rule, base_batch=...)."
        )

    def written(node: Any) -> Any:
        if not isinstance(node, ScaledState):
            return node
        changed = {"batch": _like(node.batch, batch)}
        if phi is not None:
            changed["phi"] = _like(node.phi, UNKNOWN if math.isnan(phi) else phi)
        return node._replace(**changed)

    return jax.tree.map(written, state, is_leaf=_is_scaled)


def progress(state: Any) -> float:
    """Rows of the base batch that a train state's steps were worth.

    Args:
      state: any tree that holds a `ScaledState`; of several the first counts.

    Raises:
      PlanError: the tree holds none.
    """
    found = scaled_states(state)
    if not found:
        raise PlanError("progress: the state holds no autopar.goodput.ScaledState.")
    return float(found[0].progress)


def scaled_states(state: Any) -> list[ScaledState]:
    """All `ScaledState` of a tree."""
    leaves = jax.tree.leaves(state, is_leaf=_is_scaled)
    return [x for x in leaves if isinstance(x, ScaledState)]


def _is_scaled(node: Any) -> bool:
    return isinstance(node, ScaledState)


def _like(old: Any, number: float) -> Any:
    """A number where an array lies."""
    new = jnp.asarray(number, jnp.float32)
    where = getattr(old, "sharding", None)
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
