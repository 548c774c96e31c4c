"""Sums over the fast links around the codecs, and gathers behind them.

Everything runs on one device's arrays inside a fully manual `jax.shard_map`. What
gradients of a bucket send over the fast links travels together, in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from autopar.planner.hierarchy import Way


def sum_within(
    ways: Sequence[Way], partials: Sequence[jax.Array], names: tuple[str, ...]
) -> list[jax.Array]:
    """Each device's part of the sums over the devices of fast links.

    Args:
      ways: how each gradient is summed; all over the same mesh axes.
      partials: what this device adds to each.
      names: the mesh axes of the fast links; () leaves the partials as they are.

    Returns:
      Arrays of `Way.local_shape`; in float32 if anything was summed.
    """
    if not names:
        return list(partials)
    devices = jax.lax.axis_size(names)
    rows = [
        _rows(way, partial.astype(jnp.float32), devices)
        for way, partial in zip(ways, partials, strict=True)
    ]
    widths = [row.shape[1] for row in rows]
    whole = jax.lax.psum_scatter(
        jnp.concatenate(rows, axis=1), names, scatter_dimension=0, tiled=True
    )
    parts = _cut(whole.reshape(-1), widths)
    return [_back(way, part) for way, part in zip(ways, parts, strict=True)]


def gather_within(
    ways: Sequence[Way], totals: Sequence[jax.Array], names: tuple[str, ...]
) -> list[jax.Array]:
    """The sums whole again, but for those that stay split over the fast links.

    Args:
      ways: as of `sum_within`.
      totals: the sums, this device's part of them.
      names: as of `sum_within`.
    """
    out = list(totals)
    wanted = [k for k, way in enumerate(ways) if not way.keeps] if names else []
    if not wanted:
        return out
    parts = [
        jnp.moveaxis(totals[k], ways[k].dim, 0).astype(jnp.float32) for k in wanted
    ]
    flat = jnp.concatenate([part.reshape(-1) for part in parts])
    rows = jax.lax.all_gather(flat, names, axis=0, tiled=False)
    ends = list(itertools.accumulate(part.size for part in parts))[:-1]
    for k, part, row in zip(wanted, parts, jnp.split(rows, ends, axis=1), strict=True):
        front = row.reshape(-1, *part.shape[1:])
        out[k] = jnp.moveaxis(front, 0, ways[k].dim)
    return out


def _rows(way: Way, partial: jax.Array, devices: int) -> jax.Array:
    """A partial gradient as one row for each device."""
    front = jnp.moveaxis(partial, way.dim, 0)
    if way.interleaved:
        outer = (way.workers, devices, -1, *front.shape[1:])
        front = jnp.swapaxes(front.reshape(outer), 0, 1)
    return front.reshape(devices, -1)


def _back(way: Way, flat: jax.Array) -> jax.Array:
    """A row as an array of `Way.local_shape`."""
    shape = way.local_shape
    front = (shape[way.dim], *shape[: way.dim], *shape[way.dim + 1 :])
    return jnp.moveaxis(flat.reshape(front), 0, way.dim)


def _cut(flat: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    ends = list(itertools.accumulate(widths))[:-1]
    return jnp.split(flat, ends)
