"""The codecs' state between plans: carried over, saved, restored.

What must not be lost is the sum of the residuals over the workers: that much of
the gradients has not been applied yet. A new plan with another number of workers,
or other layouts, gives each worker an equal part of it, so the sum stays what it
was. What a codec keeps for itself (a basis, a mask, a threshold) only depends on
the codec and its place; where either changes it starts anew.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import PlanError
from autopar.runtime import placement
from autopar.runtime.synchronisation import State, Synchronisation


def carry_over(state: State, new: Synchronisation) -> State:
    """The state for a plan, from the state under another plan of the same step.

    Args:
      state: of `Synchronisation.init`, or after steps, arrays or numpy.
      new: how the new plan sums.
    """
    wanted, shardings = new.structs(), new.shardings()
    gradients: dict[str, Any] = {}
    fresh: State | None = None
    for name, struct in wanted["gradients"].items():
        old = state["gradients"].get(name, {"residual": (), "codec": ()})
        where = shardings["gradients"][name]
        kept = _same(old["codec"], struct["codec"])
        if not kept and fresh is None:
            fresh = new.init()
        codec = old["codec"] if kept else _of(fresh, name)
        gradients[name] = {
            "residual": _residual(name, old["residual"], struct["residual"]),
            "codec": codec,
        }
        gradients[name] = jax.tree.map(placement.place, gradients[name], where)
    step = placement.place(state["step"], shardings["step"])
    return {"step": step, "gradients": gradients}


def restored(state: Any, new: Synchronisation) -> State:
    """A state that was saved, placed for a plan.

    Raises:
      PlanError: it has no step and gradients, or those of another model.
    """
    if not isinstance(state, dict) or set(state) != {"step", "gradients"}:
        raise PlanError(
            "compression_state: expected {'step': ..., 'gradients': {...}} as read "
            "from step.compression_state; got " + type(state).__name__ + "."
        )
    known = {m.decision.name for m in new.members.values()}
    if unknown := sorted(set(state["gradients"]) - known):
        raise PlanError(
            "compression_state: it holds gradients that this step does not compress: "
            f"{', '.join(unknown[:4])}. Restore it into the step it was saved from."
        )
    return carry_over(state, new)


def _of(fresh: State | None, name: str) -> Any:
    assert fresh is not None
    return fresh["gradients"][name]["codec"]


def _same(old: Any, struct: Any) -> bool:
    """Whether two trees have the same arrays."""
    if jax.tree.structure(old) != jax.tree.structure(struct):
        return False
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(struct), strict=True)
    return all(
        (tuple(a.shape), jnp.dtype(a.dtype)) == (b.shape, b.dtype) for a, b in pairs
    )


def _residual(name: str, old: Any, struct: Any) -> Any:
    """A residual for another number of workers; the sum over them stays."""
    if isinstance(struct, tuple):
        return ()
    if isinstance(old, tuple):
        return jnp.zeros(struct.shape, struct.dtype)
    if tuple(old.shape[1:]) != struct.shape[1:]:
        raise PlanError(
            f"compression_state: the residual of '{name}' is of shape "
            f"{tuple(old.shape[1:])}, its gradient of {struct.shape[1:]}."
        )
    if old.shape[0] == struct.shape[0]:
        return old if old.dtype == struct.dtype else old.astype(struct.dtype)
    total = jnp.sum(jnp.asarray(old, jnp.float32), axis=0)
    part = (total / struct.shape[0]).astype(struct.dtype)
    return jnp.broadcast_to(part, struct.shape)
