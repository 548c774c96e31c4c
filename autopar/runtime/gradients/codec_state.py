"""The codecs' state between plans: carried over, saved, restored.

What must not be lost is the sum of the residuals over the workers: that much of
the gradients has not been applied yet. A new plan with another number of workers,
or other layouts, gives each worker an equal part of it, so the sum stays what it
was. What a codec keeps for itself (a basis, a mask, a threshold) only depends on
the codec and its place; where either changes it starts anew.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import PlanError
from autopar.runtime import placement
from autopar.runtime.gradients.adjusted_state import adjusted_state
from autopar.runtime.gradients.regrouping import parameter_of, regrouped
from autopar.runtime.gradients.staged_sums import AnySums
from autopar.runtime.gradients.sums import State

# Earlier versions did not save these parts of a state.
_SINCE = {"skipped", "codecs"}


def carry_over(state: State, new: AnySums) -> State:
    """The state for a plan, from the state under another plan of the same step.

    Args:
      state: of `GradientSums.init`, or after steps, arrays or numpy.
      new: how the new plan sums.
    """
    wanted, shardings = new.structs(), new.shardings()
    members = {m.decision.name: m for m in new.members.values()}
    gradients: dict[str, Any] = {}
    fresh: State | None = None
    before = {
        **state["gradients"],
        **regrouped(state["gradients"], wanted["gradients"]),
    }
    for name, struct in wanted["gradients"].items():
        old = before.get(name, {"residual": (), "codec": ()})
        where = shardings["gradients"][name]
        levels = _levels(struct["codec"], new)
        kept = [_kept(old["codec"], level, k) for k, level in enumerate(levels)]
        kept[0] = adjusted_state(old["codec"], kept[0], levels[0], members[name])
        if any(level is None for level in kept):
            fresh = fresh or new.init()
            made = _levels(_of(fresh, name), new)
            kept = [m if k is None else k for k, m in zip(kept, made, strict=True)]
        gradients[name] = {
            "residual": _residual(name, old["residual"], struct["residual"]),
            "codec": kept[0] if new.fallback is None else tuple(kept),
        }
        gradients[name] = jax.tree.map(placement.place, gradients[name], where)
    step = placement.place(state["step"], shardings["step"])
    # A state that was saved by an earlier version has counted none.
    skipped = jnp.asarray(state.get("skipped", 0), jnp.int32)
    # The telemetry of the next step is measured, whatever was measured before.
    counters = {"skipped": skipped, "due": jnp.int32(0)}
    placed = {
        name: placement.place(value, shardings[name])
        for name, value in counters.items()
        if name in wanted
    }
    return {"step": step, **placed, "gradients": gradients}


def restored(state: Any, new: AnySums) -> State:
    """A state that was saved, placed for a plan.

    Raises:
      PlanError: it has no step and gradients, or those of another model.
    """
    known = {"step", "gradients"}
    if not isinstance(state, dict) or not known <= set(state) <= known | _SINCE:
        raise PlanError(
            "compression_state: expected {'step': ..., 'gradients': {...}} as read "
            "from step.compression_state; got " + type(state).__name__ + "."
        )
    names = {parameter_of(m.decision.name) for m in new.members.values()}
    if unknown := sorted(n for n in state["gradients"] if parameter_of(n) not in names):
        raise PlanError(
            "compression_state: it holds gradients that this step does not compress: "
            f"{', '.join(unknown[:4])}. Restore it into the step it was saved from."
        )
    return carry_over(state, new)


def _of(fresh: State | None, name: str) -> Any:
    assert fresh is not None
    return fresh["gradients"][name]["codec"]


def _levels(codec: Any, how: AnySums) -> tuple[Any, ...]:
    """The codec's state of each level."""
    return (codec,) if how.fallback is None else codec


def _kept(old: Any, struct: Any, level: int) -> Any:
    """The old state of a level; None: there is none that fits.

    Without a fall-back the state is that of the first level.
    """
    found = [old] if level == 0 else []
    if isinstance(old, tuple) and len(old) > level:
        found.append(old[level])
    fitted = (_fitted(x, struct) for x in found)
    return next((x for x in fitted if x is not None), None)


def _fitted(old: Any, struct: Any) -> Any:
    """The old tree in the structure of the new; None: it has other arrays.

    A checkpoint knows no named tuples: there they are tuples.
    """
    structure = jax.tree.structure
    if structure(_untyped(old)) != structure(_untyped(struct)):
        return None
    leaves, structs = jax.tree.leaves(old), jax.tree.leaves(struct)
    for a, b in zip(leaves, structs, strict=True):
        if (tuple(a.shape), jnp.dtype(a.dtype)) != (b.shape, b.dtype):
            return None
    return jax.tree.unflatten(structure(struct), leaves)


def _untyped(tree: Any) -> Any:
    """A tree whose named tuples are tuples."""
    if isinstance(tree, tuple):
        return tuple(_untyped(x) for x in tree)
    if isinstance(tree, list):
        return [_untyped(x) for x in tree]
    if isinstance(tree, dict):
        return {k: _untyped(x) for k, x in tree.items()}
    return tree


def _residual(name: str, old: Any, struct: Any) -> Any:
    """A residual for another number of workers; the sum over them stays."""
    if isinstance(struct, tuple):
        if not isinstance(old, tuple) and (norm := _norm(old)):
            warnings.warn(
                f"the residual of '{name}', of L2 norm {norm:.3g}, is dropped: under "
                "this plan its codec has no feedback; give it one that has, like int4.",
                stacklevel=2,
            )
        return ()
    if isinstance(old, tuple):
        return jnp.zeros(struct.shape, struct.dtype)
    _check_residual(name, old, struct)
    if tuple(old.shape[1:]) != struct.shape[1:]:
        old = jnp.reshape(old, (old.shape[0], *struct.shape[1:]))
    if old.shape[0] == struct.shape[0]:
        return old if old.dtype == struct.dtype else old.astype(struct.dtype)
    total = jnp.sum(jnp.asarray(old, jnp.float32), axis=0)
    part = (total / struct.shape[0]).astype(struct.dtype)
    return jnp.broadcast_to(part, struct.shape)


def check_fits(state: State, new: AnySums) -> None:
    """Checks that `carry_over` can take a state; nothing is moved.

    Raises:
      PlanError: a residual is of another shape than its gradient, or lies in another
        process.
    """
    where = new.shardings()["gradients"]
    for name, struct in new.structs()["gradients"].items():
        old = state["gradients"].get(name, {"residual": ()})["residual"]
        _check_reached(name, old, where[name]["residual"])
        if not isinstance(old, tuple) and not isinstance(struct["residual"], tuple):
            _check_residual(name, old, struct["residual"])


def _check_reached(name: str, old: Any, where: Any) -> None:
    """Checks that a residual does not have to move between processes."""
    if not isinstance(old, jax.Array) or old.sharding == where:
        return
    here = (lies.addressable_devices for lies in (old.sharding, where))
    if not isinstance(where, tuple) and not all(here):
        raise PlanError(
            f"compression_state: the residual of '{name}' lies on a stage of one "
            "process and would have to go to another. Residuals of stages stay in "
            "their process: keep the stages where they are, or assign None to "
            "compression_state first."
        )


def _check_residual(name: str, old: Any, struct: Any) -> None:
    if not _alike(tuple(old.shape[1:]), struct.shape[1:]):
        raise PlanError(
            f"compression_state: the residual of '{name}' is of shape "
            f"{tuple(old.shape[1:])}, its gradient of {struct.shape[1:]}."
        )


def _alike(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether shapes are the same but for a dim that one of them cuts in two."""
    if math.prod(old) != math.prod(new):
        return False
    # The places in memory where a dim begins.
    begins = [set(itertools.accumulate(s, operator.mul)) for s in (old, new)]
    return begins[0] <= begins[1] or begins[1] <= begins[0]


def _norm(array: Any) -> float:
    return float(jnp.sqrt(jnp.sum(jnp.square(jnp.asarray(array, jnp.float32)))))
