"""Measures the signal that compressed messages carry, apart from their noise.

A worker's gradient is the true gradient plus noise, and the noises of two workers are
independent. So the noise cancels in the expectation of inner products between different
workers. With ``g_i`` the gradient of worker i and ``c_i`` its sent values, including
the residual::

    E sum_{i != j} <g_i, g_j> = n (n - 1) |g|^2
    E sum_{i != j} <c_j, g_i> = n <sum_j E c_j, g> (n - 1) / n

The second line measures the worth of a step along the messages, relative to a step
along the true gradient. In this measure, delayed values count as far as they agree with
the current gradient. With ``T`` the sum of all sent values, the second line is ``sum_i
<T - c_i, g_i>``, to which each worker contributes one number.

The first line needs the sum of the gradients, which no worker has. The sum of sketches
of the gradients is used instead. For a sketch, elements are multiplied by random signs,
which are the same on all workers, and folded onto `WIDTH` numbers (Charikar et al.,
ICALP 2002). The expected inner product of two sketches over the signs is the inner
product of the gradients. The variance of the inner product of two sketches is at most
``2 |g_i|^2 |g_j|^2 / WIDTH``.
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

# The columns of the rows, after the columns of `autopar.compression.synchronise`.
SENT_SIGNAL, SENT_SQUARE, DENSE_SIGNAL, DENSE_SQUARE = range(6, 10)
COLUMNS = 4


def sketch(values: jax.Array, seed: jax.Array) -> jax.Array:
    """Folds an array onto at most `WIDTH` numbers, with random signs.

    Args:
      values: an array of any shape.
      seed: uint32 scalar, the same on all workers.

    Returns:
      float32 (WIDTH,); arrays with at most `WIDTH` elements are returned unchanged.
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
    """The contributions of one worker to the signals, which are summed over workers.

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
      Rows of gradients that are not measured are NaN.
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
    """The four numbers of a gradient, of its message, and of their sketches."""
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
    """Random bits, bool (count,): a mixer of 32 bits (Wellons, "hash-prospector")."""
    bits = jax.lax.iota(jnp.uint32, count) * jnp.uint32(0x9E3779B1) ^ seed
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return (bits ^ (bits >> 16)) < jnp.uint32(1 << 31)
