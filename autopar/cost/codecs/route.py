"""The links over which one gradient is sent, and the part that a device sends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.codec import Codec
from autopar.compression.exchange import Message, codec_messages
from autopar.cost.collectives import collective_bytes
from autopar.layouts.summation import WITHIN_BYTES, Summation
from autopar.plans import GradientDecision


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """The mesh axes over which one gradient is sent.

    Attributes:
      axes: those over which a codec sums.
      within: those over which the gradient is summed before, as it is.
      workers: number of devices along ``axes``.
      local_shape: of what a device encodes.
      scatter: whether each worker needs only its own part of the sum.
      keeps: whether the sum stays split over ``within``; it is gathered otherwise.
    """

    axes: tuple[MeshAxis, ...]
    within: tuple[MeshAxis, ...]
    workers: int
    local_shape: tuple[int, ...]
    scatter: bool
    keeps: bool

    @property
    def elements(self) -> int:
        """Number of elements that a device encodes."""
        return math.prod(self.local_shape)

    @property
    def devices_within(self) -> int:
        """Number of devices along ``within``."""
        return math.prod(axis.size for axis in self.within)

    @property
    def kind(self) -> str:
        """The collective that sums over ``axes`` without a codec."""
        return "reduce_scatter" if self.scatter else "all_reduce"

    def rounds(self, codec: Codec) -> tuple[Message, ...]:
        """The messages of a codec over ``axes``, one a round."""
        return codec_messages(
            codec, self.local_shape, self.workers, scatter=self.scatter
        )

    @property
    def within_messages(self) -> tuple[Message, ...]:
        """The float32 sum over ``within`` before the codec, and the gather after it."""
        if not self.within:
            return ()
        devices = self.devices_within
        nbytes = WITHIN_BYTES * (self.elements * devices)
        kinds = ("reduce_scatter",) if self.keeps else ("reduce_scatter", "all_gather")
        return tuple(
            Message(kind, nbytes, collective_bytes(kind, nbytes, devices))
            for kind in kinds
        )


def route_of(summation: Summation, mesh: Sequence[MeshAxis]) -> Route:
    """The route of one way to sum a gradient.

    Args:
      summation: how the devices share the work.
      mesh: the axes of the mesh.
    """
    return Route(
        axes=tuple(mesh[a] for a in summation.axes),
        within=tuple(mesh[a] for a in summation.within),
        workers=summation.workers,
        local_shape=summation.local_shape,
        scatter=summation.scatter,
        keeps=summation.keeps,
    )


def planned_route(gradient: GradientDecision, mesh: Sequence[MeshAxis]) -> Route:
    """The route that a plan gives a gradient.

    Args:
      gradient: the plan's decision.
      mesh: the axes of the mesh.
    """
    return Route(
        axes=tuple(axis for axis in mesh if axis.name in gradient.axes),
        within=tuple(axis for axis in mesh if axis.name in gradient.within),
        workers=gradient.workers,
        local_shape=gradient.local_shape,
        scatter=gradient.scatter,
        keeps=gradient.keeps,
    )
