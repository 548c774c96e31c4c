"""Lays requests of one round side by side, and takes the answers apart.

Where inputs of the program say how much of a request counts (`Part`), its place behind
the requests before it is computed while the step runs. The message has a fixed size:
the room of all such requests together, so that one may need more where another needs
less.

Legend: b elements of the last dim of a request, of which u count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compression.codecs.codec import Part

Parts = Sequence[Part | None]


def room_of(elements: int, room: float) -> int:
    """Elements for which there is room in a part of so many."""
    return min(elements, math.ceil(elements * room))


def packed(arrays: Sequence[jax.Array], parts: Parts) -> jax.Array:
    """Requests (..., b) side by side, those that count as a whole first.

    Args:
      arrays: the requests, those with a part last.
      parts: of each; None where all of it counts.
    """
    count = parts.count(None)
    out = list(arrays[:count])
    given = [part for part in parts if part is not None]
    if given:
        out.append(_behind_each_other(arrays[count:], given))
    return jnp.concatenate(out, axis=-1)


def taken_apart(
    whole: jax.Array, arrays: Sequence[jax.Array], parts: Parts
) -> list[jax.Array]:
    """The answers (..., b) to the requests of `packed`, zero behind what counts.

    Args:
      whole: the answer to all of them, of the same last dim.
      arrays: the requests.
      parts: of each.
    """
    count = parts.count(None)
    ends = list(itertools.accumulate(a.shape[-1] for a in arrays[:count]))
    *answers, rest = jnp.split(whole, ends, axis=-1)
    given = [part for part in parts if part is not None]
    if not given:
        return answers
    widths = [a.shape[-1] for a in arrays[count:]]
    padding = [(0, 0)] * (rest.ndim - 1) + [(0, max(widths))]
    rest = jnp.pad(rest, padding)
    for width, first, part in zip(widths, _firsts(given), given, strict=True):
        values = lax.dynamic_slice_in_dim(rest, first, width, axis=-1)
        counts = lax.iota(jnp.int32, width) < part.used
        answers.append(jnp.where(counts, values, jnp.zeros((), values.dtype)))
    return answers


def _behind_each_other(arrays: Sequence[jax.Array], parts: Sequence[Part]) -> jax.Array:
    """What counts of each behind that of the one before, in the room of all."""
    widths = [a.shape[-1] for a in arrays]
    room = sum(room_of(w, p.room) for w, p in zip(widths, parts, strict=True))
    # What does not count is overwritten by the next; that of the last is cut off.
    shape = (*arrays[0].shape[:-1], room + max(widths))
    out = jnp.zeros(shape, arrays[0].dtype)
    for array, first in zip(arrays, _firsts(parts), strict=True):
        out = lax.dynamic_update_slice_in_dim(out, array, first, axis=-1)
    return out[..., :room]


def _firsts(parts: Sequence[Part]) -> list[jax.Array]:
    """The place of each in what they share, int32 scalars."""
    used = [part.used for part in parts]
    return list(itertools.accumulate(used[:-1], initial=jnp.int32(0)))
