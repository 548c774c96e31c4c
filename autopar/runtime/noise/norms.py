"""Squared norms of arrays that are sharded over a mesh.

Each element counts once, also if several devices hold a copy of it. A gradient that a
codec sends has three norms: the norm of the replicas' partial gradients, the norm of
their exact sum, and the norm of the codec's sum. The exact sum needs a second
communication without the codec. So these norms are measured only in some steps, in the
program that sums the gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.layouts.layout import Axes, Layout, axes_of
from autopar.runtime.gradients.synchroniser import Arrays, CodecSynchroniser, Measure
from autopar_passes.layouts import automatic_axes, constrain, partition_spec
from autopar_passes.sums.stacked import Stacked

# Epsilon, the default of `optax.adam`.
EPSILON = 1e-8
# Profiles show the measurement under this name.
SCOPE = "gradient_noise"


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """An array whose squared norm is to be computed.

    Attributes:
      array: the array on the mesh; it may have a leading dim of partial sums.
      layout: the layout of the array.
      summed: mesh axes over which partial sums are added up before the square.
      moment: the second moment that preconditions the array, without the leading dim.
        If it is None, the array is not preconditioned.
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
    """Returns each device's part of squared norms.

    The sum of the parts over all devices is the squared norm.

    Args:
      mesh: the mesh. Within a loop over the microbatches of a replica, the devices are
        those of the replica.
      wanted: k arrays.

    Returns:
      float32 (devices, k), one row on each device.
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

    free = automatic_axes(mesh)
    return jax.shard_map(
        rows,
        mesh=mesh,
        in_specs=(specs, inner),
        out_specs=PartitionSpec(tuple(n for n in mesh.axis_names if n in free)),
        axis_names=free,
        check_vma=False,
    )([n.array for n in wanted], moments)


def own_norms(mesh: Any, blocks: Sequence[Norm]) -> jax.Array:
    """One device's part of the squared norms of k arrays, float32 (1, k).

    Args:
      mesh: the mesh. The caller's `jax.shard_map` is manual over its automatic axes.
      blocks: for each of the k arrays the shard on this device, with the shard of the
        second moment.
    """
    with jax.named_scope(SCOPE):
        return jnp.stack([_own_part(mesh, block) for block in blocks])[None]


def _own_part(mesh: Any, norm: Norm) -> jax.Array:
    """One device's part of a squared norm, computed from its shard of the array."""
    names, used = mesh.axis_names, axes_of(norm.layout)
    free = automatic_axes(mesh)
    copies = math.prod(
        mesh.shape[name]
        for a, name in enumerate(names)
        if a not in used and name in free
    )
    block = norm.array.astype(jnp.float32)
    if norm.moment is not None:
        block = precondition(block, norm.moment)
    if norm.summed:
        block = _sum_of_parts(block, tuple(names[a] for a in norm.summed))
    return jnp.sum(jnp.square(block)) / copies


def _sum_of_parts(block: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """One device's share of the elements of the sum over mesh axes (reduce-scatter)."""
    flat = block.reshape(-1)
    count = jax.lax.axis_size(names)
    padded = jnp.pad(flat, (0, -flat.size % count))
    return jax.lax.psum_scatter(padded, names, tiled=True)


def precondition(gradient: jax.Array, moment: jax.Array) -> jax.Array:
    """Returns a gradient divided by the square root of its second moment, as in Adam.

    An element with a zero second moment has had no gradient yet. The result is zero
    there.

    Args:
      gradient: the gradient, float32.
      moment: the running mean of the squares of the gradient, of the same shape.
    """
    moment = moment.astype(jnp.float32)
    root = jnp.sqrt(jnp.where(moment > 0, moment, 1.0)) + EPSILON
    return jnp.where(moment > 0, gradient / root, 0.0)


# Number of norms of each gradient.
NORMS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SentGradient:
    """A gradient of a bucket.

    Attributes:
      place: position of the gradient in the bucket.
      axes: mesh axes over which the gradient is summed.
      layout: layout of the partial gradients, without the leading dim.
      inner: the mesh axes of ``axes`` that do not separate replicas: their devices work
        on the same rows. The partial gradients are summed over these axes before the
        square.
      result: layout of the codec's sum.
      moment: the whole second moment that preconditions the gradient; None: the
        gradient is not preconditioned.
    """

    place: int
    axes: Axes
    layout: Layout
    inner: Axes
    result: Layout
    moment: Any = None

    def moments(self, mesh: Any) -> tuple[Any, Any]:
        """The second moment in the layouts of the partial gradients and of the sum."""
        if self.moment is None:
            return None, None
        beside = (self.layout, self.result)
        parts, made = (constrain(self.moment, mesh, layout) for layout in beside)
        return parts, made

    def specs(self, mesh: Any) -> tuple[Any, Any]:
        """Partition specs of `moments`."""
        if self.moment is None:
            return None, None
        return partition_spec(mesh, self.layout), partition_spec(mesh, self.result)

    def norms(self, part: Any, made: Any, moments: tuple[Any, Any]) -> list[Norm]:
        """Returns the three norms, from the arrays on one device."""
        parts = Norm(part, (self.axes, *self.layout), self.inner, moments[0])
        return [
            parts,
            dataclasses.replace(parts, summed=self.axes),
            Norm(made, self.result, (), moments[1]),
        ]


def measure_of(
    mesh: Any, gradients: Sequence[SentGradient], when: jax.Array | None
) -> Measure:
    """Returns the measurement of a bucket: three norms of each gradient.

    Args:
      mesh: the mesh.
      gradients: the gradients to measure.
      when: bool scalar: whether this step is measured; otherwise the norms are zero.
        If it is None, every step is measured.
    """

    def look(given: Any, parts: Arrays, totals: Callable[[], Arrays]) -> jax.Array:
        now, moments = given

        def measure_norms() -> jax.Array:
            made = totals()
            blocks: list[Norm] = []
            for g, moment in zip(gradients, moments, strict=True):
                blocks += g.norms(parts[g.place], made[g.place], moment)
            return own_norms(mesh, blocks)

        if now is None:
            return measure_norms()
        nothing = jnp.zeros((1, NORMS * len(gradients)), jnp.float32)
        with jax.named_scope(SCOPE):
            return jax.lax.cond(now, measure_norms, lambda: nothing)

    return Measure(
        look,
        (when, [g.moments(mesh) for g in gradients]),
        (None if when is None else PartitionSpec(), [g.specs(mesh) for g in gradients]),
        seldom=when is not None,
    )


def take_with_norms(
    codecs: CodecSynchroniser,
    partials: dict[int, Stacked],
    replicas: Mapping[int, Axes],
    when: jax.Array | None,
    moments: Mapping[int, Any],
) -> tuple[dict[int, Any], dict[int, jax.Array]]:
    """Sums a bucket by codecs, and measures its gradients before and after the codecs.

    Args:
      codecs: the codecs of the step.
      partials: gradient of the bucket -> its stacked partial gradients.
      replicas: gradient to measure -> the mesh axes that separate data replicas, whose
        devices work on different rows.
      when: as for `measure_of`.
      moments: gradient -> the second moment that preconditions the gradient, or None.

    Returns:
      The sums, and for each measured gradient its three norms, (devices, 3).
    """
    known: dict[int, SentGradient] = {}
    for place, value in enumerate(partials):
        if value in replicas:
            member = codecs.sums.members[value]
            axes, *layout = member.stacked
            known[value] = SentGradient(
                place=place,
                axes=axes,
                layout=tuple(layout),
                inner=tuple(a for a in axes if a not in replicas[value]),
                result=member.result,
                moment=moments.get(value),
            )
    found = list(known.values())
    measure = measure_of(codecs.sums.mesh, found, when) if found else None
    made, rows = codecs.take_measured(partials, measure)
    columns = {v: rows[:, NORMS * k : NORMS * (k + 1)] for k, v in enumerate(known)}
    return made, columns
