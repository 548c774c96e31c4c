"""What tests ask of a codec on simulated workers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.trial import as_chunks, initial_states, simulated_step

EPSILON = float(np.finfo(np.float32).eps)


def wire_cost(codec: Codec, shape, workers, *, scatter=False) -> tuple[float, int]:
    """Bytes that one worker sends for a gradient, and in how many rounds."""
    found = codec.messages(shape, workers, scatter=scatter)
    return sum(message.sent for message in found), len(found)


class Result(NamedTuple):
    """What n workers know after a step, on the leading axis."""

    total: np.ndarray
    sent: np.ndarray
    chunks: np.ndarray
    states: Any


def simulate(
    codec: Codec, gradients, states=None, *, step=0, seed=7, scatter=False, chunks=None
) -> Result:
    """One step of all workers, compiled as a whole.

    Args:
      codec: the codec.
      gradients: float32 (n, *shape).
      states: of `initial_states` or of the step before; default: those of the
        first step.
      step: number of the step.
      seed: the gradient's.
      scatter: whether each worker gets its own chunk of the sum.
      chunks: (n, n, c), instead of the gradients' own, as error feedback makes.
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
    """All workers hold the same total, bit for bit."""
    first = result.total[0]
    for other in result.total[1:]:
        np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))


def assert_conserved(result: Result, *, exact: bool = True) -> None:
    """What is sent and what is left make what there was.

    Exactly where elements are picked, for x - bf16(x) is exact; otherwise to the
    rounding of the two operations.
    """
    error = result.chunks - result.sent
    again = result.sent + error
    if exact:
        np.testing.assert_array_equal(again, result.chunks)
    else:
        bound = np.abs(result.chunks) + np.abs(result.sent)
        assert (np.abs(again - result.chunks) <= 2 * EPSILON * bound).all()


def flat_total(result: Result, size: int, *, scatter=False) -> np.ndarray:
    """The sum as one vector of the gradient's elements."""
    whole = result.total if scatter else result.total[0]
    return whole.reshape(-1)[:size]


def relative_error(result: Result, gradients, *, scatter=False) -> float:
    """The sum's relative L2 error."""
    exact = np.asarray(gradients, np.float64).sum(axis=0).reshape(-1)
    got = flat_total(result, exact.size, scatter=scatter)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
