"""Tries a codec on workers that one device simulates by `jax.vmap` with a named
axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.codec import (
    KEEP_ROUNDINGS,
    Codec,
    CodecContext,
    begin_rounds,
    check_codec,
    chunk_elements,
)
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import MeshLinks, exchange
from autopar_errors import InputError

_AXIS = "workers"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Errors and bytes of a codec, measured on samples.

    Attributes:
      error: L2 norm of the error of sending one worker's gradient plus residual,
        relative to their norm; root mean square over steps and workers.
      sum_error: relative error of the sum over all workers and steps. In it, elements
        count as sent if error feedback sends them in a later step.
      total_error: relative difference between a step's decoded total and the exact sum
        of the values that workers report as sent; 0 if the sum is not rounded again.
      wire_bytes: bytes that a worker sends in a step.
      dense_bytes: bytes that a worker sends in a step with the codec ``dense``.
    """

    error: float
    sum_error: float
    total_error: float
    wire_bytes: float
    dense_bytes: float


def try_codec(
    codec: Codec | str,
    shape: Sequence[int],
    *,
    workers: int = 4,
    steps: int = 8,
    scatter: bool = False,
) -> Trial:
    """Sums samples over simulated workers, with error feedback if the codec needs it.

    Args:
      codec: the codec or its text.
      shape: shape of the gradient on one device.
      workers: number of workers.
      steps: number of steps, each with new samples.
      scatter: whether each worker needs only its own part of the sum (some rows of the
        gradient), as if the parameter were sharded over the workers.

    Returns:
      The bytes and errors.

    Raises:
      InputError: the codec refuses the shape; or a request or the result of the codec
        has a wrong form; or the total is not bit-identical on all workers; or the total
        differs too much from the sum of the sent values.
    """
    codec, shape = parse_codec(codec) if isinstance(codec, str) else codec, (*shape,)
    where = f"codec {codec.name!r}, a sample of shape {shape}"
    rows = shape[0] if shape else 1
    if scatter and rows % workers:
        raise InputError(
            f"{where}: {rows} rows have no {workers} equal parts, of which each worker "
            "needs one; give a shape whose first number is a multiple of workers=."
        )
    if problem := codec.check(shape, scatter=scatter):
        raise InputError(f"{where}: {problem}")
    check_codec(codec, shape, workers, scatter=scatter, name="")
    if not scatter and rows % workers == 0 and not codec.check(shape, scatter=True):
        _check_scattered(codec, shape, workers)
    run = simulated_step(codec, shape, workers, 0, scatter)
    random = np.random.default_rng(0)
    state = initial_states(codec, shape, workers, scatter)
    left = np.zeros((workers, workers, 0), np.float32)
    errors: list[float] = []
    misses: list[float] = []
    exact, total = 0.0, 0.0
    for step in range(steps):
        sample = random.standard_t(4.0, (workers, *shape)).astype(np.float32)
        chunks = as_chunks(codec, sample, scatter)
        exact = exact + chunks.sum(axis=0, dtype=np.float64)
        wanted = chunks + (left if step and codec.feedback else 0)
        numbers = jnp.arange(workers, dtype=jnp.int32), jnp.int32(step)
        made, sent, state = run(jnp.asarray(wanted), state, *numbers)
        totals, sent = np.asarray(made), np.asarray(sent)
        if not scatter:
            _check_same(totals, where, step)
        left = wanted - sent
        # If the sum is scattered, worker i has the sum of the i-th chunks.
        made = (totals if scatter else totals[0]).astype(np.float64)
        total = total + made
        misses.append(_relative(made, sent.sum(axis=0, dtype=np.float64)))
        errors.append(float(np.linalg.norm(left) / np.linalg.norm(wanted)))
    error, total_error = (
        float(np.sqrt(np.mean(np.square(x)))) for x in (errors, misses)
    )
    if not total_error <= _ROUNDED_AGAIN * error + _LEAST:
        raise InputError(
            f"{where}: Reduced.total is not the sum of Reduced.sent over the workers: "
            f"it differs by {total_error:.3g} of it, and what is sent of a gradient by "
            f"{error:.3g}. Return the sum, not a mean, and as sent what is decoded."
        )
    return Trial(
        error=error,
        sum_error=_relative(total, exact),
        total_error=total_error,
        wire_bytes=codec.wire_bytes(shape, workers, scatter=scatter),
        dense_bytes=parse_codec("dense").wire_bytes(shape, workers, scatter=scatter),
    )


# A total that is rounded again after the sum differs from the sum of the sent values.
# Relative to this sum, the difference may be at most `_ROUNDED_AGAIN` times the
# relative error of a worker's gradient, plus `_LEAST`.
_ROUNDED_AGAIN, _LEAST = 2.0, 0.01


def _relative(found: Any, wanted: Any) -> float:
    norm = float(np.linalg.norm(wanted))
    lost = float(np.linalg.norm(found - wanted))
    return lost / norm if norm else lost


def _check_scattered(codec: Codec, shape: tuple[int, ...], workers: int) -> None:
    """Also checks the codec with a scattered sum, as a run may use it."""
    try:
        check_codec(codec, shape, workers, scatter=True, name="")
    except InputError as error:
        text = str(error).rstrip(".")
        raise InputError(
            f"{text}. This is the form with context.scatter set, which a run uses "
            "where a parameter is split; to refuse it, return why from check."
        ) from error


def _check_same(totals: np.ndarray, where: str, step: int) -> None:
    """Raises `InputError` if workers hold different totals."""
    for worker, other in enumerate(totals):
        if other.tobytes() != totals[0].tobytes():
            most = np.abs(other.astype(np.float64) - totals[0]).max()
            raise InputError(
                f"{where}: Reduced.total of worker {worker} differs from that of "
                f"worker 0 in step {step}, by up to {most:.3g}: copies of a parameter "
                "would drift apart. Make it of the answers alone."
            )


@functools.lru_cache(maxsize=64)
def simulated_step(
    codec: Codec, shape: tuple[int, ...], workers: int, seed: int, scatter: bool
) -> Callable[..., Any]:
    """Compiles a step in which all simulated workers sum a gradient.

    Returns:
      A function of chunks (workers, n, c), states, worker numbers, and the step. The
      function returns totals, sent values and new states, each for all workers.
    """
    size, links = math.prod(shape), MeshLinks((_AXIS,), workers)

    def run(chunks: jax.Array, state: Any, worker: jax.Array, step: jax.Array) -> Any:
        context = CodecContext(workers, worker, step, seed, shape, size, scatter)
        (end,) = exchange([begin_rounds(codec, chunks, state, context)], links)
        return end.total, end.sent_array, end.state

    every = jax.vmap(run, in_axes=(0, 0, 0, None), axis_name=_AXIS)
    return jax.jit(every, compiler_options=KEEP_ROUNDINGS)


def initial_states(
    codec: Codec, shape: tuple[int, ...], workers: int, scatter: bool = False
) -> Any:
    """The states of all workers before the first step."""
    chunk = chunk_elements(codec, math.prod(shape), workers, scatter=scatter)
    state = codec.init(shape, workers * chunk, workers)
    return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * workers), state)


def as_chunks(codec: Codec, gradients: Any, scatter: bool = False) -> np.ndarray:
    """Arranges gradients of n workers, (n, *shape), as n chunks of each, (n, n, c)."""
    gradients = np.asarray(gradients, np.float32)
    workers = gradients.shape[0]
    flat = gradients.reshape(workers, -1)
    chunk = chunk_elements(codec, flat.shape[1], workers, scatter=scatter)
    padding = workers * chunk - flat.shape[1]
    return np.pad(flat, ((0, 0), (0, padding))).reshape(workers, workers, chunk)
