"""Host callbacks that run in the order of the program.

JAX orders callbacks by tokens, but only in programs for one device. Here a data
dependency orders the callbacks on several devices: each callback takes a number that
the callback before has returned. JAX's functions that bind and lower callbacks are
private (0.10.2).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax._src import debugging as _debugging
from jax._src import effects as _effects
from jax.experimental import io_callback as _io_callback

from autopar_errors import InputError
from autopar_passes import jax_compat

# The number that is passed to the first callback.
FIRST = np.int32(0)
_TURN = jax.ShapeDtypeStruct((), np.int32)


def is_ordered(eqn: Any) -> bool:
    """Whether a JAX equation, or an equation inside it, calls the host in order."""
    return any(_effects.ordered_effects.contains(x) for x in eqn.effects)


def bind_unordered(eqn: Any, *args: Any) -> list[Any]:
    """Like `jax_compat.bind`, but without the order of callbacks."""
    if not is_ordered(eqn):
        return jax_compat.bind(eqn, *args)
    made, _ = bind_in_turn(eqn, args, FIRST)
    return made


def bind_in_turn(eqn: Any, args: Any, turn: Any) -> tuple[list[Any], Any]:
    """Runs a callback after the callback that returned the number ``turn``.

    Args:
      eqn: the callback.
      args: the operands of the callback.
      turn: the number that the callback before has returned, or `FIRST`.

    Returns:
      The results, and the number for the next callback.

    Raises:
      InputError: the equation has an ordered effect that is not a callback.
    """
    call = _function(eqn)

    def in_turn(number: Any, *given: Any) -> Any:
        return number, tuple(call(*given) or ())

    structs = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)  # pyright: ignore[reportUnknownMemberType]
        for v in eqn.outvars
    ]
    turn, made = _io_callback(in_turn, (_TURN, tuple(structs)), turn, *args)
    return list(made), turn


def _function(eqn: Any) -> Any:
    """The host function that a callback calls with its flat operands."""
    params = eqn.params
    if eqn.primitive.name != "debug_print":
        if "callback" not in params:
            raise InputError(
                f"'{eqn.primitive.name}' has an effect with an order that no planned "
                "step keeps. Call the host by jax.experimental.io_callback."
            )
        return params["callback"]
    # The same function as in JAX's own lowering of the primitive.
    shown = functools.partial(
        _debugging._format_print_callback,
        params["fmt"],
        dict(params["np_printoptions"]),
        params["has_placeholders"],
        params["logging_record"],
    )
    return _debugging._make_flat_callback(
        params["in_tree"], shown, params["static_args"]
    )
