"""Draws a microbatch's random numbers, equal to those of the whole batch's step.

JAX draws with Threefry: the bits of an element depend only on the key and on the
element's number in the array (``jax_threefry_partitionable``; Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011). The rows of a microbatch can therefore be
drawn without the other rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from autopar_passes.microbatches.facts import Rows
from autopar_passes.program.equations import Equation

_PRIMITIVES = frozenset({"random_bits", "random_split"})
_WORD = 2**32


@functools.cache
def _threefry() -> Any:
    """Returns the dtype of Threefry's keys."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def can_draw(eqn: Equation, key_dtype: Any) -> bool:
    """Whether `draw_rows` supports an equation whose key has this dtype."""
    # The type stubs of the configuration lack this option.
    whole = bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009
    return whole and eqn.primitive in _PRIMITIVES and key_dtype == _threefry()


def draw_rows(
    eqn: Equation, key: Any, number: Any, *, shape: tuple[int, ...], rows: Rows
) -> Any:
    """Draws the numbers that the whole batch's step draws for a microbatch's rows.

    Args:
      eqn: the equation of a microbatch, ``random_bits`` or ``random_split``.
      key: the key, or an array of keys.
      number: the number of the microbatch, int32.
      shape: the shape that each key draws for the whole batch.
      rows: the dimension of this shape that has the rows, and their grouping.

    Returns:
      An array. Its shape is ``key.shape`` followed by the shape that ``eqn`` draws per
      key.
    """
    count = shape[rows.dim] // eqn.params["shape"][rows.dim]

    def draw(key: Any) -> Any:
        first, second = jax.random.key_data(key)
        high, low = _numbers(shape, rows, count, number)
        words = threefry2x32_p.bind(first, second, high, low)
        if eqn.primitive == "random_split":
            data = jnp.stack(words, axis=-1)
            return jax.random.wrap_key_data(data, impl="threefry2x32")
        return _bits(words[0], words[1], eqn.params["bit_width"])

    for _ in range(key.ndim):
        draw = jax.vmap(draw)
    return draw(key)


def _bits(first: Any, second: Any, width: int) -> Any:
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return (first.astype(dtype) << np.uint64(32)) | second.astype(dtype)
    return (first ^ second).astype(dtype)


def _numbers(
    shape: tuple[int, ...], rows: Rows, count: int, number: Any
) -> tuple[Any, Any]:
    """The positions that a microbatch's elements have in the whole batch's array.

    Returns:
      The high and low words, uint32, each in the shape of the microbatch's part.
    """
    part = tuple(n // count if d == rows.dim else n for d, n in enumerate(shape))
    high = low = jnp.zeros(part, np.uint32)
    stride, small = 1, math.prod(shape) <= _WORD
    for dim in reversed(range(len(shape))):
        index = jax.lax.broadcasted_iota(np.uint32, part, dim)
        if dim == rows.dim:
            index = _place_in_batch(index, rows.inner, count, number.astype(np.uint32))
        more_high, more_low = _times(index, stride)
        low = low + more_low
        if not small:
            high = high + more_high + (low < more_low).astype(np.uint32)
        stride *= shape[dim]
    return high, low


def _place_in_batch(index: Any, inner: int, count: int, number: Any) -> Any:
    """Returns the row in the whole batch of a row of a microbatch (`Rows`)."""
    if inner == 1:
        return index * np.uint32(count) + number
    group, rest = index // np.uint32(inner), index % np.uint32(inner)
    return (group * np.uint32(count) + number) * np.uint32(inner) + rest


def _times(index: Any, stride: int) -> tuple[Any, Any]:
    """The high and low word of a product below 2**64, computed from 16-bit halves."""
    top, bottom = np.uint32(stride // _WORD), np.uint32(stride % _WORD)
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a, b = index >> half, index & mask
    c, d = bottom >> half, bottom & mask
    middle = a * d + ((b * d) >> half)
    other = b * c + (middle & mask)
    high = a * c + (middle >> half) + (other >> half) + index * top
    return high, index * bottom
