"""Gathers of sharded parameters as codes.

A device encodes its shard, the codes are gathered, and each device decodes them all.
So the gathered copy is coarse, and the shards themselves stay exact. The program has
its backward pass already, so nothing is differentiated through the code
(straight-through gradients). All devices decode the same bytes, so copies of an array
are equal bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compression.codecs.blocks import add_barrier
from autopar.compression.cut_codes import CutCode
from autopar.layouts.layout import Axes, Layout, ReshardStep, shards
from autopar_passes.layouts import on_shards, partition_spec


@dataclasses.dataclass(frozen=True, slots=True)
class GatherRequest:
    """The user's request about gathers.

    Attributes:
      codec: the codec as text.
      chooses: whether only those gathers are encoded that are faster so. If not, all
        gathers between hosts are encoded, or all gathers if devices have one kind of
        links.
    """

    codec: str
    chooses: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class GatherCodec:
    """The codec with which a value is gathered.

    Attributes:
      codec: the codec as text.
      axes: the mesh axes with slow links. A gather over any of them is encoded; other
        gathers are exact.
    """

    codec: str
    axes: frozenset[int]

    def encodes(self, kind: str, axes: Axes) -> bool:
        """Whether a collective of this kind over these mesh axes is encoded."""
        return kind == "all_gather" and not self.axes.isdisjoint(axes)


@dataclasses.dataclass(frozen=True, slots=True)
class CodedGather:
    """A gather of codes.

    Attributes:
      codec: the codec as text.
      shape: shape of a shard before the gather.
      dtype: name of the array's dtype.
      before: the layout before the gather.
      after: the layout after it.
      dim: the dimension that is gathered.
      axes: the mesh axes that are gathered, major to minor.
      devices: the number of devices along these axes.
    """

    codec: str
    shape: tuple[int, ...]
    dtype: str
    before: Layout
    after: Layout
    dim: int
    axes: Axes
    devices: int

    @property
    def elements(self) -> int:
        """Elements of a shard before the gather."""
        return math.prod(self.shape)

    @property
    def code_bytes(self) -> int:
        """Bytes of the code of a shard."""
        return self._code(1).nbytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of a shard."""
        return self._code(1).dense_bytes

    def _code(self, rows: int) -> CutCode:
        return CutCode(self.codec, (rows, self.elements), self.dtype)

    def __call__(self, array: jax.Array, mesh: Any) -> jax.Array:
        """Gathers an array in the layout ``before``."""
        names = tuple(mesh.axis_names[a] for a in self.axes)

        def gather(shard: jax.Array) -> jax.Array:
            code = add_barrier(self._code(1).encode(shard.reshape(1, -1)))
            codes = jax.lax.all_gather(code, names, tiled=True)
            return self._join(self._code(self.devices).decode(codes), shard.shape)

        after = partition_spec(mesh, self.after)
        return on_shards(gather, [array], [self.before], after, mesh)

    def _join(self, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Joins shards, each a row of ``[devices, elements]``, along the dimension."""
        parts = jnp.moveaxis(rows.reshape(-1, *shape), 0, self.dim)
        whole = list(shape)
        whole[self.dim] *= self.devices
        return parts.reshape(whole)


def coded_gather(
    chosen: GatherCodec,
    shape: tuple[int, ...],
    dtype: str,
    before: Layout,
    step: ReshardStep,
    sizes: tuple[int, ...],
) -> CodedGather | None:
    """The gather of codes for a resharding step; None if the step is exact.

    Args:
      chosen: the codec of the value.
      shape: shape of the whole array.
      dtype: name of its dtype.
      before: the layout before the step.
      step: the step.
      sizes: size of each mesh axis.
    """
    if not chosen.encodes(step.kind, step.axes):
        return None
    (dim,) = (d for d, axes in enumerate(before) if axes != step.layout[d])
    local = tuple(
        size // shards((axes,), sizes) for size, axes in zip(shape, before, strict=True)
    )
    devices = shards((step.axes,), sizes)
    found = CodedGather(
        chosen.codec, local, dtype, before, step.layout, dim, step.axes, devices
    )
    return found if found.code_bytes < found.dense_bytes else None
