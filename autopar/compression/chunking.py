"""Between a gradient on one device and the chunks in which it is sent.

Legend: n workers, c elements of a chunk; worker i adds up the i-th chunks. ``dim`` is
the dim of which worker i needs only the i-th part of the sum; None: all need all.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]

# Up to this number of chunks each is handled by a loop of its own.
_MOST_PIECES = 16


def to_chunks(whole: jax.Array, dim: int | None, workers: int, chunk: int) -> jax.Array:
    """A whole gradient as (n, c), with padding where its elements do not suffice."""
    if dim is not None:
        return jnp.moveaxis(whole, dim, 0).reshape(workers, -1)
    flat = whole.reshape(-1)
    padding = workers * chunk - whole.size
    if padding:
        # On a CPU a copy, where jnp.pad asks of each element where it lies.
        flat = jnp.concatenate((flat, jnp.zeros((padding,), flat.dtype)))
    return flat.reshape(workers, chunk)


def from_chunks(chunks: jax.Array, shape: Shape, dim: int | None) -> jax.Array:
    """(n, c), or all elements in one row, as a whole gradient."""
    if chunks.ndim == 1:
        return chunks.reshape(shape)
    if dim is None:
        return _without_padding(chunks, math.prod(shape)).reshape(shape)
    return _back(chunks, shape, dim)


def own_part(
    total: jax.Array, shape: Shape, dim: int | None, workers: int
) -> jax.Array:
    """What a worker gets of the sum, in its own shape.

    Args:
      total: chunks of the whole sum or, with ``dim``, the worker's own chunk.
      shape: of the whole gradient.
      dim: see the module.
      workers: number of workers.
    """
    if dim is None:
        return from_chunks(total, shape, None)
    return _back(total, own_shape(shape, dim, workers), dim)


def own_shape(shape: Shape, dim: int | None, workers: int) -> Shape:
    """Shape of what a worker gets of the sum."""
    return tuple(size // workers if k == dim else size for k, size in enumerate(shape))


def _without_padding(chunks: jax.Array, size: int) -> jax.Array:
    """The first ``size`` elements of (n, c).

    Row by row: XLA for CPUs merges a decoder with the one slice of all rows, and then
    divides for every element to find its row. That takes 2 to 3 times as long.
    """
    count, elements = chunks.shape
    if count > _MOST_PIECES:
        return chunks.reshape(-1)[:size]
    ends = [min(elements, size - k * elements) for k in range(count)]
    rows = [chunks[k, :end] for k, end in enumerate(ends) if end > 0]
    return jnp.concatenate(rows)


def _back(values: jax.Array, shape: Shape, dim: int) -> jax.Array:
    """Values in the order of a shape with ``dim`` in front, in its own order."""
    rest = shape[:dim] + shape[dim + 1 :]
    return jnp.moveaxis(values.reshape(shape[dim], *rest), 0, dim)
