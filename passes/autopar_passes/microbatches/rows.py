"""Deals the rows of arrays out to microbatches, and puts them together again."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from autopar_passes.microbatches.microbatched import Rows


def part(array: Any, rows: Rows, count: int, number: Any) -> Any:
    """Takes the rows of one microbatch out of an array: ``(..., n / count, ...)``.

    Args:
      array: the array of the whole batch.
      rows: where its rows are.
      count: number of microbatches.
      number: of the microbatch, int32.
    """
    shape, dim = array.shape, rows.dim
    groups = shape[dim] // (rows.inner * count)
    apart = (*shape[:dim], groups, count, rows.inner, *shape[dim + 1 :])
    sizes = (*apart[: dim + 1], 1, *apart[dim + 2 :])
    zero = np.int32(0)
    starts = [number if d == dim + 1 else zero for d in range(len(apart))]
    taken = jax.lax.dynamic_slice(
        jax.lax.reshape(array, apart), starts, sizes, allow_negative_indices=False
    )
    each = (*shape[:dim], groups * rows.inner, *shape[dim + 1 :])
    return jax.lax.reshape(taken, each)


def together(array: Any, rows: Rows) -> Any:
    """Puts parts as of `part` together: ``(count, ..., n / count, ...)``.

    Args:
      array: the arrays of all microbatches, one behind the other.
      rows: where the rows are in one of them.
    """
    count, *shape = array.shape
    dim = rows.dim
    groups = shape[dim] // rows.inner
    apart = (count, *shape[:dim], groups, rows.inner, *shape[dim + 1 :])
    order = (*range(1, dim + 2), 0, *range(dim + 2, len(apart)))
    joined = jax.lax.transpose(jax.lax.reshape(array, apart), order)
    whole = (*shape[:dim], count * shape[dim], *shape[dim + 1 :])
    return jax.lax.reshape(joined, whole)


def regroup(
    before: tuple[int, ...], rows: Rows, after: tuple[int, ...], dim: int
) -> int | None:
    """The `Rows.inner` of a reshaped array; None: its groups do not stay together.

    Args:
      before: the shape.
      rows: where the rows are in it.
      after: the shape that it gets.
      dim: the dimension of that shape with the rows.
    """
    together = rows.inner * math.prod(before[rows.dim + 1 :])
    behind = math.prod(after[dim + 1 :])
    if together % behind or after[dim] % (together // behind):
        return None
    return together // behind
