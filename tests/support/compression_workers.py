"""Runs codecs on simulated workers and checks their results."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.trial import as_chunks, initial_states, simulated_step

EPSILON = float(np.finfo(np.float32).eps)


def wire_cost(codec: Codec, shape, workers, *, scatter=False) -> tuple[float, int]:
    """The bytes that one worker sends for a gradient, and the number of messages."""
    found = codec.messages(shape, workers, scatter=scatter)
    return sum(message.sent for message in found), len(found)


class Result(NamedTuple):
    """Results of n workers after a step; the first dim of arrays counts the workers."""

    total: np.ndarray
    sent: np.ndarray
    chunks: np.ndarray
    states: Any


def simulate(
    codec: Codec, gradients, states=None, *, step=0, seed=7, scatter=False, chunks=None
) -> Result:
    """Runs one step of all workers, compiled as one program.

    Args:
      codec: the codec.
      gradients: float32 (n, *shape).
      states: from `initial_states` or from the step before. The default is the states
        of the first step.
      step: number of the step.
      seed: the gradient's.
      scatter: whether each worker receives only its own chunk of the sum.
      chunks: (n, n, c) arrays to send in place of the gradients', as with error
        feedback.
    """
    gradients = np.asarray(gradients, np.float32)
    n, *shape = gradients.shape
    if states is None:
        states = initial_states(codec, tuple(shape), n, scatter)
    if chunks is None:
        chunks = as_chunks(codec, gradients, scatter)
    run = simulated_step(codec, tuple(shape), n, seed, scatter)
    total, sent, states = run(
        jnp.asarray(chunks), states, jnp.arange(n, dtype=jnp.int32), jnp.int32(step)
    )
    return Result(np.asarray(total), np.asarray(sent), chunks, states)


def assert_same_everywhere(result: Result) -> None:
    """Checks that all workers have the same total, bit for bit."""
    first = result.total[0]
    for other in result.total[1:]:
        np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))


def assert_conserved(result: Result, *, exact: bool = True) -> None:
    """Checks that the sent part and the remaining error add up to the original.

    For codecs that pick elements the sum is exact, since x - bf16(x) is exact.
    Otherwise the rounding of the two operations is allowed.
    """
    error = result.chunks - result.sent
    again = result.sent + error
    if exact:
        np.testing.assert_array_equal(again, result.chunks)
    else:
        bound = np.abs(result.chunks) + np.abs(result.sent)
        assert (np.abs(again - result.chunks) <= 2 * EPSILON * bound).all()


def flat_total(result: Result, size: int, *, scatter=False) -> np.ndarray:
    """The sum as a vector of the gradient's elements, without padding."""
    whole = result.total if scatter else result.total[0]
    return whole.reshape(-1)[:size]


def relative_error(result: Result, gradients, *, scatter=False) -> float:
    """The relative L2 error of the sum."""
    exact = np.asarray(gradients, np.float64).sum(axis=0).reshape(-1)
    got = flat_total(result, exact.size, scatter=scatter)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
