"""Squared norms of arrays that lie split over a mesh.

Each element counts once, on however many devices it lies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.layouts.layout import Axes, Layout, axes_of
from autopar_passes.layouts import constrain, partition_spec

# As of `optax.adam`.
EPSILON = 1e-8
# Profiles show what is measured under this name.
SCOPE = "gradient_noise"


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """An array whose squared norm is wanted.

    Attributes:
      array: on the mesh, perhaps with a leading dim of partial sums.
      layout: of the array.
      summed: mesh axes whose partial sums are added up before they are squared.
      moment: the second moment that preconditions it, without the leading dim; None:
        it is taken as it is.
    """

    array: Any
    layout: Layout
    summed: Axes = ()
    moment: Any = None

    @property
    def inner(self) -> Layout:
        """The layout without the leading dim."""
        return self.layout[len(self.layout) - jnp.ndim(self.moment) :]


def device_norms(mesh: Any, wanted: Sequence[Norm]) -> jax.Array:
    """Returns each device's part of squared norms; over devices they add up.

    Args:
      mesh: the mesh.
      wanted: k arrays.

    Returns:
      float32 (devices, k), a row on each device.
    """
    moments = [
        None if n.moment is None else constrain(n.moment, mesh, n.inner) for n in wanted
    ]
    specs = [partition_spec(mesh, n.layout) for n in wanted]
    inner = [
        None if n.moment is None else partition_spec(mesh, n.inner) for n in wanted
    ]

    def rows(arrays: Sequence[Any], moments: Sequence[Any]) -> jax.Array:
        each = zip(wanted, arrays, moments, strict=True)
        return own_norms(
            mesh, [dataclasses.replace(n, array=x, moment=m) for n, x, m in each]
        )

    return jax.shard_map(
        rows,
        mesh=mesh,
        in_specs=(specs, inner),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )([n.array for n in wanted], moments)


def own_norms(mesh: Any, blocks: Sequence[Norm]) -> jax.Array:
    """What one device adds to squared norms, float32 (1, k).

    Args:
      mesh: the mesh, over all of whose axes the caller's `jax.shard_map` is manual.
      blocks: k arrays of which the device holds these blocks, and of their moments.
    """
    with jax.named_scope(SCOPE):
        return jnp.stack([_own_part(mesh, block) for block in blocks])[None]


def _own_part(mesh: Any, norm: Norm) -> jax.Array:
    """What one device adds to a squared norm, from its block of the array."""
    names, used = mesh.axis_names, axes_of(norm.layout)
    copies = math.prod(
        mesh.shape[name] for a, name in enumerate(names) if a not in used
    )
    block = norm.array.astype(jnp.float32)
    if norm.moment is not None:
        block = precondition(block, norm.moment)
    if norm.summed:
        block = _sum_of_parts(block, tuple(names[a] for a in norm.summed))
    return jnp.sum(jnp.square(block)) / copies


def _sum_of_parts(block: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """One device's elements of the sum over mesh axes; the others have the rest."""
    flat = block.reshape(-1)
    count = jax.lax.axis_size(names)
    padded = jnp.pad(flat, (0, -flat.size % count))
    return jax.lax.psum_scatter(padded, names, tiled=True)


def precondition(gradient: jax.Array, moment: jax.Array) -> jax.Array:
    """A gradient divided by the root of its second moment, as Adam's family does.

    An element whose moment is zero has had no gradient yet; it is left out.

    Args:
      gradient: float32.
      moment: the running mean of its squares, of the same shape.
    """
    moment = moment.astype(jnp.float32)
    root = jnp.sqrt(jnp.where(moment > 0, moment, 1.0)) + EPSILON
    return jnp.where(moment > 0, gradient / root, 0.0)
