"""Deals the rows of arrays out to microbatches, and puts them together again."""

from __future__ import annotations

import math
from typing import Any

import jax

from autopar_passes.microbatches.microbatched import Rows


def dealt(array: Any, rows: Rows, count: int) -> Any:
    """Deals an array out: ``(..., n, ...)`` becomes ``(count, ..., n / count, ...)``.

    Args:
      array: the array of the whole batch.
      rows: where its rows are.
      count: number of microbatches.
    """
    shape, dim = array.shape, rows.dim
    groups = shape[dim] // (rows.inner * count)
    apart = (*shape[:dim], groups, count, rows.inner, *shape[dim + 1 :])
    order = (dim + 1, *range(dim + 1), *range(dim + 2, len(apart)))
    split = jax.lax.transpose(jax.lax.reshape(array, apart), order)
    each = (*shape[:dim], groups * rows.inner, *shape[dim + 1 :])
    return jax.lax.reshape(split, (count, *each))


def together(array: Any, rows: Rows) -> Any:
    """Puts parts as of `dealt` together: ``(count, ..., n / count, ...)``.

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


def regrouped(
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
