"""Measures gradients that codecs send, on the device's arrays where they are summed.

There are three norms of a gradient: of the replicas' parts, of their sum as it would be
without the codec, and of the sum that the codec makes. The second one sends the
gradient as it is, so these are measured in one step of some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.layouts.layout import Axes, Layout
from autopar.runtime.gradients.measuring import Arrays, Measure
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.runtime.noise.norms import SCOPE, Norm, own_norms
from autopar_passes.layouts import constrain, partition_spec
from autopar_passes.sums.stacked import Stacked

# Norms of each gradient.
NORMS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SentGradient:
    """A gradient of a bucket.

    Attributes:
      place: its number in the bucket.
      axes: mesh axes over which it is summed.
      layout: of its parts, without the leading dim.
      inner: those of the axes whose devices hold parts of the same rows: they are
        added up before a replica's part is squared.
      result: the layout in which the codec's sum comes out.
      moment: the second moment that preconditions it, whole; None: none does.
    """

    place: int
    axes: Axes
    layout: Layout
    inner: Axes
    result: Layout
    moment: Any = None

    def moments(self, mesh: Any) -> tuple[Any, Any]:
        """The second moment beside the parts, and beside the codec's sum."""
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
        """The three norms, from the device's arrays."""
        parts = Norm(part, (self.axes, *self.layout), self.inner, moments[0])
        return [
            parts,
            dataclasses.replace(parts, summed=self.axes),
            Norm(made, self.result, (), moments[1]),
        ]


def measure_of(
    mesh: Any, gradients: Sequence[SentGradient], when: jax.Array | None
) -> Measure:
    """The measurement of a bucket: rows of three norms of each of its gradients.

    Args:
      mesh: the mesh.
      gradients: those to measure.
      when: whether they are, a bool scalar, else the rows are zero; None: always.
    """

    def look(given: Any, parts: Arrays, totals: Callable[[], Arrays]) -> jax.Array:
        now, moments = given

        def measured() -> jax.Array:
            made = totals()
            blocks: list[Norm] = []
            for g, moment in zip(gradients, moments, strict=True):
                blocks += g.norms(parts[g.place], made[g.place], moment)
            return own_norms(mesh, blocks)

        if now is None:
            return measured()
        nothing = jnp.zeros((1, NORMS * len(gradients)), jnp.float32)
        with jax.named_scope(SCOPE):
            return jax.lax.cond(now, measured, lambda: nothing)

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
    """Sums a bucket by codecs, and measures its gradients before and after.

    Args:
      codecs: of the step.
      partials: the bucket.
      replicas: gradient that is measured -> the mesh axes whose devices hold parts of
        their own rows.
      when: as of `measure_of`.
      moments: gradient -> the second moment that preconditions it, if one does.

    Returns:
      The sums, and of each gradient the three norms, (devices, 3).
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
