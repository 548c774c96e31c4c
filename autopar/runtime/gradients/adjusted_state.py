"""States of codecs whose parameters are inputs of the program, between plans.

What a codec has learned stays where it would if the parameters were constants, and
becomes as wide as the limit of the new plan. Legend: d devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.compression.adjusting import is_adjusted, set_amounts
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.gradient import init_state
from autopar.runtime.gradients.sums import Member


def adjusted_state(old: Any, kept: Any, struct: Any, member: Member) -> Any:
    """The state of a gradient's codec, where the old or the new one has inputs.

    Args:
      old: the state under the plan before; with a fall-back that of all levels.
      kept: what of it is kept where neither has inputs; None: nothing fits.
      struct: shapes of the new state.
      member: the gradient under the new plan.

    Returns:
      The state, its amounts those of the plan; None: nothing of the old one fits.
    """
    found = [old, old[0]] if isinstance(old, tuple) and old else [old]
    before = next((x for x in found if is_adjusted(x)), None)
    if member.amounts is not None:
        given = found if before is None else [before]
        made = (_with_inputs(x, struct, member) for x in given)
        return next((x for x in made if x is not None), None)
    return kept if before is None else _without_inputs(before, struct, member)


def _with_inputs(old: Any, struct: Any, member: Member) -> Any:
    """A state with inputs, from one with or without; None: it does not fit."""
    assert member.amounts is not None
    adjusted = is_adjusted(old)
    own = _resized(old["own"] if adjusted else old, struct["own"])
    if own is None:
        return None
    devices = next(iter(struct["now"].values())).shape[0]
    now = _arrays(member.amounts, devices)
    # No amount is zero, so that what restarts on a change does.
    last = _arrays(dict.fromkeys(now, 0), devices)
    if adjusted and set(old["last"]) == set(now):
        last = old["last"]
    elif not adjusted and _fits_constants(old, member, devices):
        last = _arrays(member.amounts, devices)
    return set_amounts({"own": own, "last": last}, now)


def _without_inputs(old: Any, struct: Any, member: Member) -> Any:
    """A state without inputs, from one that has some; None: it does not fit."""
    own = _resized(old["own"], struct)
    gradient = member.gradient
    amounts = gradient.codec.amounts(
        gradient.shape, member.summation.workers, scatter=gradient.scatter
    )
    names = gradient.codec.restarts
    if own is None or not set(names) <= set(old["last"]):
        return None
    for name in names:
        same = jnp.asarray(old["last"][name]) == amounts[name]
        own = jax.tree.map(lambda x, same=same: _where(same, x), own)
    return own


def _fits_constants(old: Any, member: Member, devices: int) -> bool:
    """Whether a state is one of the codec with its parameters as constants."""
    codec = parse_codec(member.decision.codec)
    gradient = dataclasses.replace(member.gradient, codec=codec)
    plain = jax.eval_shape(lambda: init_state(gradient, member.summation.workers))
    shapes = [x.shape for x in jax.tree.leaves(plain["codec"])]
    return [tuple(x.shape) for x in jax.tree.leaves(old)] == [
        (devices, *shape) for shape in shapes
    ]


def _arrays(amounts: Mapping[str, int], devices: int) -> dict[str, np.ndarray]:
    return {k: np.full((devices,), v, np.int32) for k, v in amounts.items()}


def _where(same: Any, values: Any) -> Any:
    """Values (d, ...) of the devices where something is the same, else zero."""
    return jnp.where(same.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _resized(old: Any, struct: Any) -> Any:
    """Arrays with zeros behind the last dim, or less of it; None: they do not fit."""
    if jax.tree.structure(old) != jax.tree.structure(struct):
        return None
    made = [
        _resized_array(a, b)
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(struct), strict=True)
    ]
    if any(x is None for x in made):
        return None
    return jax.tree.unflatten(jax.tree.structure(struct), made)


def _resized_array(old: Any, struct: Any) -> Any:
    shape, wanted = tuple(old.shape), tuple(struct.shape)
    if old.dtype != struct.dtype or len(shape) != len(wanted):
        return None
    if shape == wanted:
        return old
    # The first dim is that of the devices.
    if len(shape) < 2 or shape[:-1] != wanted[:-1]:
        return None
    more = wanted[-1] - shape[-1]
    if more < 0:
        return lax.slice_in_dim(jnp.asarray(old), 0, wanted[-1], axis=-1)
    return jnp.pad(old, [(0, 0)] * (len(shape) - 1) + [(0, more)])
