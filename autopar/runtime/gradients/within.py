"""Sums over the fast links around the codecs, and gathers behind them.

Everything runs on one device's arrays inside a fully manual `jax.shard_map`. What
gradients of a bucket send over the fast links travels together, in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from autopar.layouts.summation import Summation


def sum_within(
    summations: Sequence[Summation],
    partials: Sequence[jax.Array],
    names: tuple[str, ...],
) -> list[jax.Array]:
    """Each device's part of the sums over the devices of fast links.

    Args:
      summations: how each gradient is summed; all over the same mesh axes.
      partials: what this device adds to each.
      names: the mesh axes of the fast links; () leaves the partials as they are.

    Returns:
      Arrays of `Summation.local_shape`; in float32 if anything was summed.
    """
    if not names:
        return list(partials)
    devices = jax.lax.axis_size(names)
    rows = [
        _rows(summation, partial.astype(jnp.float32), devices)
        for summation, partial in zip(summations, partials, strict=True)
    ]
    widths = [row.shape[1] for row in rows]
    whole = jax.lax.psum_scatter(
        jnp.concatenate(rows, axis=1), names, scatter_dimension=0, tiled=True
    )
    parts = _cut(whole.reshape(-1), widths)
    return [
        _back(summation, part)
        for summation, part in zip(summations, parts, strict=True)
    ]


def gather_within(
    summations: Sequence[Summation], totals: Sequence[jax.Array], names: tuple[str, ...]
) -> list[jax.Array]:
    """The sums whole again, but for those that stay split over the fast links.

    Args:
      summations: as of `sum_within`.
      totals: the sums, this device's part of them.
      names: as of `sum_within`.
    """
    out = list(totals)
    wanted = (
        [k for k, summation in enumerate(summations) if not summation.keeps]
        if names
        else []
    )
    if not wanted:
        return out
    parts = [
        jnp.moveaxis(totals[k], summations[k].dim, 0).astype(jnp.float32)
        for k in wanted
    ]
    flat = jnp.concatenate([part.reshape(-1) for part in parts])
    rows = jax.lax.all_gather(flat, names, axis=0, tiled=False)
    ends = list(itertools.accumulate(part.size for part in parts))[:-1]
    for k, part, row in zip(wanted, parts, jnp.split(rows, ends, axis=1), strict=True):
        front = row.reshape(-1, *part.shape[1:])
        out[k] = jnp.moveaxis(front, 0, summations[k].dim)
    return out


def _rows(summation: Summation, partial: jax.Array, devices: int) -> jax.Array:
    """A partial gradient as one row for each device."""
    front = jnp.moveaxis(partial, summation.dim, 0)
    if summation.interleaved:
        outer = (summation.workers, devices, -1, *front.shape[1:])
        front = jnp.swapaxes(front.reshape(outer), 0, 1)
    return front.reshape(devices, -1)


def _back(summation: Summation, flat: jax.Array) -> jax.Array:
    """A row as an array of `Summation.local_shape`."""
    shape = summation.local_shape
    front = (shape[summation.dim], *shape[: summation.dim], *shape[summation.dim + 1 :])
    return jnp.moveaxis(flat.reshape(front), 0, summation.dim)


def _cut(flat: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    ends = list(itertools.accumulate(widths))[:-1]
    return jnp.split(flat, ends)
