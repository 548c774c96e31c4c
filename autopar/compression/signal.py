"""Measures the signal that compressed messages carry, apart from their noise.

A worker's gradient is the true gradient plus noise, and the noises of two workers are
independent. So inner products between different workers are free of it: with ``g_i``
the gradient of worker i and ``c_i`` what it sends, residual included::

    E sum_{i != j} <g_i, g_j> = n (n - 1) |g|^2
    E sum_{i != j} <c_j, g_i> = n <sum_j E c_j, g> (n - 1) / n

The second is what a step along the messages is worth beside a step along the true
gradient: what is late counts as far as the gradient of now still asks for it. With
``T`` the sum of what is sent it is ``sum_i <T - c_i, g_i>``, a number of each worker.

The first needs the sum of the gradients, which nobody has. Its place takes that of
their sketches: elements are multiplied by random signs, the same on all workers, and
folded onto `WIDTH` numbers (Charikar et al., ICALP 2002). The inner product of two
sketches is that of the gradients in the mean over signs, with a variance of at most
``2 |g_i|^2 |g_j|^2 / WIDTH``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.exchange import WorkerLinks

WIDTH = 64
"""Numbers of a sketch: 256 bytes of each gradient with a codec, in a step."""

# The columns of the rows, behind those of `autopar.compression.synchronise`.
SENT_SIGNAL, SENT_SQUARE, DENSE_SIGNAL, DENSE_SQUARE = range(6, 10)
COLUMNS = 4


def sketch(values: jax.Array, seed: jax.Array) -> jax.Array:
    """Folds an array onto at most `WIDTH` numbers, with random signs.

    Args:
      values: of any shape.
      seed: uint32 scalar, the same on all workers.

    Returns:
      float32 (WIDTH,), or the elements as they are where they are no more.
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
    """The numbers of one worker, which add up over workers.

    Args:
      partials: this worker's gradients.
      sent: what it has sent of each, of the same shapes.
      totals: the sums of what all have sent, of the same shapes.
      seeds: of those to measure, by number: a number that no other gradient has.
      links: the collectives over the workers.
      step: number of the step, int32 scalar.

    Returns:
      float32 (gradients, 4). Over workers they add up to the signal of what is sent,
      the squared norm of its sum, and both of the gradients as they are; NaN of those
      that are not measured.
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
