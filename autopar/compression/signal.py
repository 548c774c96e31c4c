"""Measures how much of the true gradient compressed messages carry (their signal).

A worker's gradient is the true gradient plus noise, and the noises of two workers are
independent. So in the inner product of two workers' gradients, the noise has an
expected value of zero. Let ``g`` be the true gradient, ``g_i`` the gradient of worker
i, and ``c_i`` the values that it sends, including what comes from its residual. Let n
be the number of workers. Then::

    E sum_{i != j} <g_i, g_j> = n (n - 1) |g|^2
    E sum_{i != j} <c_j, g_i> = n <sum_j E c_j, g> (n - 1) / n

The second line divided by the first tells how much a step along the sent values helps,
compared with a step along the true gradient. Values that are sent late count only as
far as they agree with the present gradient. Let ``T`` be the sum of the values that all
workers send. Then the second line is ``sum_i <T - c_i, g_i>``, and each worker can
compute its own term.

For the first line a worker would need the sum of all gradients, which it does not have.
Therefore workers sum sketches of their gradients. For a sketch, the elements are
multiplied by random signs, which are the same on all workers, and added up in `WIDTH`
numbers (Charikar et al., ICALP 2002). The inner product of two sketches has the inner
product of the gradients as its expected value over random signs. The variance of the
inner product of two sketches is at most ``2 |g_i|^2 |g_j|^2 / WIDTH``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.exchange import WorkerLinks

WIDTH = 64
"""Numbers of a sketch. Each step sends 256 bytes of sketch for each gradient with a
codec.
"""

# Indices of columns in a row of telemetry, after the columns of
# `autopar.compression.synchronise`.
SENT_SIGNAL, SENT_SQUARE, DENSE_SIGNAL, DENSE_SQUARE = range(6, 10)
COLUMNS = 4


def sketch(values: jax.Array, seed: jax.Array) -> jax.Array:
    """Multiplies the elements of an array by random signs, and adds them up in `WIDTH`
    numbers.

    Args:
      values: an array of any shape.
      seed: uint32 scalar, the same on all workers.

    Returns:
      float32 (WIDTH,); an array with at most `WIDTH` elements is returned unchanged.
    """
    flat = values.astype(jnp.float32).reshape(-1)
    if flat.size <= WIDTH:
        return flat
    flat = jnp.where(_signs(flat.size, seed), flat, -flat)
    flat = jnp.pad(flat, (0, -flat.size % WIDTH))
    return jnp.sum(flat.reshape(-1, WIDTH), axis=0)


def signal_rows(
    partials: Sequence[jax.Array],
    sent: Sequence[jax.Array],
    totals: Sequence[jax.Array],
    seeds: Mapping[int, int],
    links: WorkerLinks,
    step: jax.Array,
) -> jax.Array:
    """The numbers of one worker for the signals; the caller adds them up over workers.

    Args:
      partials: this worker's gradients.
      sent: the sent values of each gradient, in the same shapes.
      totals: the sums of all workers' sent values, in the same shapes.
      seeds: number of a gradient to measure -> a seed that no other gradient has.
      links: the collectives over the workers.
      step: number of the step, int32 scalar.

    Returns:
      float32 (gradients, 4). The sums over workers are: the signal of the sent values,
      the squared norm of their sum, and the same two numbers for the dense gradients.
      Rows of gradients that ``seeds`` does not contain are NaN.
    """
    rows = jnp.full((len(partials), COLUMNS), jnp.nan, jnp.float32)
    if not seeds:
        return rows
    start = step.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
    own = [sketch(partials[k], start + jnp.uint32(n)) for k, n in seeds.items()]
    ends = np.cumsum([x.size for x in own])[:-1].tolist()
    sums = jnp.split(links.all_reduce(jnp.concatenate(own)), ends)
    made = [
        _row(partials[k], sent[k], totals[k], mine, whole, links.workers)
        for k, mine, whole in zip(seeds, own, sums, strict=True)
    ]
    return rows.at[np.array(list(seeds))].set(jnp.stack(made))


def _row(
    partial: jax.Array,
    sent: jax.Array,
    total: jax.Array,
    own: jax.Array,
    whole: jax.Array,
    workers: int,
) -> jax.Array:
    """The four numbers in the row of one gradient."""
    total = total.astype(jnp.float32)
    return jnp.stack(
        [
            jnp.sum((total - sent) * partial.astype(jnp.float32)),
            jnp.sum(jnp.square(total)) / workers,
            jnp.sum((whole - own) * own),
            jnp.sum(jnp.square(whole)) / workers,
        ]
    )


def _signs(count: int, seed: jax.Array) -> jax.Array:
    """Random bits, bool (count,), by a 32-bit hash (Wellons, "hash-prospector")."""
    bits = jax.lax.iota(jnp.uint32, count) * jnp.uint32(0x9E3779B1) ^ seed
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return (bits ^ (bits >> 16)) < jnp.uint32(1 << 31)
