"""Checks what the codec of any class asks for and returns, as it is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from autopar.compression.exchange import (
    AllGather,
    AllReduce,
    AllToAll,
    Reduced,
    ReduceScatter,
    Request,
    Rounds,
    State,
)
from autopar_errors import AutoparError, InputError, user_line

# Of each request: the name and type of what is sent, and its dims; n is the number of
# workers, and letters are free.
_REQUESTS: dict[type[Any], tuple[str, str, tuple[str, ...]]] = {
    AllReduce: ("values", "float32", ("k",)),
    ReduceScatter: ("values", "float32", ("n", "k")),
    AllToAll: ("payload", "uint8", ("n", "b")),
    AllGather: ("payload", "uint8", ("b",)),
}
_EXAMPLE = (
    "reduce yields what it sends and returns what came of it: `total = yield "
    "AllReduce(...)`, then `return Reduced(total, sent, state)`"
)


def checked_rounds(
    make: Callable[[], Rounds],
    chunks: jax.Array,
    state: State,
    *,
    scatter: bool,
    where: str,
) -> Rounds:
    """The rounds of a codec, each checked as it is asked for.

    Args:
      make: calls `Codec.reduce`.
      chunks: that it is given, (n, c).
      state: that it is given.
      scatter: whether a worker needs only its chunk of the sum.
      where: names the codec and the gradient in errors.

    Raises:
      InputError: what it asks for, or returns, does not fit.
    """
    made: Any = _call(make, where)
    if not inspect.isgenerator(made):
        raise InputError(
            f"{where}: reduce has no `yield`, and returns {_kind(made)}. {_EXAMPLE}."
        )
    rounds: Rounds = cast(Rounds, made)
    answer: jax.Array | None = None
    while True:
        asked, ended = _call(lambda given=answer: _next(rounds, given), where)
        if ended:
            return _checked_result(asked, chunks, state, scatter=scatter, where=where)
        _check_request(asked, len(chunks), where)
        answer = yield asked


def _next(rounds: Rounds, answer: jax.Array | None) -> tuple[Any, bool]:
    """The next request, or what is returned, and whether it is that."""
    try:
        return (next(rounds) if answer is None else rounds.send(answer)), False
    except StopIteration as stop:
        return stop.value, True


def _call(function: Callable[[], Any], where: str) -> Any:
    """What a function of the codec returns; its errors name the codec.

    Raises:
      InputError: it fails.
    """
    try:
        return function()
    except AutoparError:
        raise
    except Exception as error:
        line = user_line(error)
        text = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{where}: reduce fails{f' at {line}' if line else ''}: "
            f"{type(error).__name__}: {text}"
        ) from error


def _check_request(asked: Request, workers: int, where: str) -> None:
    known = _REQUESTS.get(type(asked))
    if known is None:
        raise InputError(f"{where}: reduce yields {_kind(asked)}. {_EXAMPLE}.")
    name, dtype, dims = known
    given: Any = getattr(asked, name)
    shape = _shape(given)
    fits = shape is not None and len(shape) == len(dims)
    if dims[0] == "n" and fits and shape is not None:
        fits = shape[0] == workers
    if not fits or jnp.result_type(given).name != dtype:
        wanted = ", ".join(str(workers) if d == "n" else d for d in dims)
        comma = "," if len(dims) == 1 else ""
        raise InputError(
            f"{where}: {type(asked).__name__}({name}) takes {dtype} of shape "
            f"({wanted}{comma}), got {_kind(given)}."
        )


def _checked_result(
    made: Reduced, chunks: jax.Array, state: State, *, scatter: bool, where: str
) -> Reduced:
    if type(made) is not Reduced:
        raise InputError(f"{where}: reduce returns {_kind(made)}. {_EXAMPLE}.")
    expected = {"total": chunks.shape[1:] if scatter else chunks.shape}
    if not callable(made.sent):
        expected["sent"] = chunks.shape
    for name, shape in expected.items():
        given = getattr(made, name)
        if _shape(given) != shape:
            when = " where the sum is scattered" if scatter and name == "total" else ""
            raise InputError(
                f"{where}: Reduced.{name} must have the shape {shape}{when}, got "
                f"{_kind(given)}."
            )
    before, after = _describe_state(state), _describe_state(made.state)
    if before != after:
        raise InputError(
            f"{where}: Reduced.state is {after}, and init or the step before gave "
            f"{before}; both must be alike."
        )
    return made


def _describe_state(state: State) -> str:
    return str(jax.tree.map(_kind, state))


def _shape(given: Any) -> tuple[int, ...] | None:
    """The shape of an array; None: it is none."""
    return tuple(given.shape) if hasattr(given, "shape") else None


def _kind(given: Any) -> str:
    """What something is, for an error."""
    shape = _shape(given)
    if shape is None:
        return "None" if given is None else f"a {type(given).__name__}"
    return f"{jnp.result_type(given).name} of shape {shape}"
