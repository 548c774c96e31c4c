"""A collective as an audit lists it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# Name and size of each axis of the mesh that the devices stand in.
MeshAxes = Sequence[tuple[str, int]]


def sent_ratio(kind: str, group: int) -> float:
    """Bytes that one device sends, as a multiple of the collective's size.

    A ring of k devices sends ``(k - 1) / k`` of it, and twice that for an all-reduce. A
    permutation sends all of it.

    >>> sent_ratio("all_reduce", 4)
    1.5

    Args:
      kind: as in `autopar.cost.collectives`.
      group: number of devices in its group.
    """
    if kind == "collective_permute":
        return 1.0
    part = (group - 1) / group
    return 2 * part if kind == "all_reduce" else part


@dataclasses.dataclass(frozen=True, slots=True)
class AuditedCollective:
    """One collective that the compiler will run.

    Attributes:
      kind: as in `autopar.cost.collectives`.
      axes: names of the mesh axes of its group.
      group: number of devices in its group.
      nbytes: its charged size: what one device puts in (all-reduce,
        reduce-scatter, all-to-all, permute) or gets (all-gather).
      trips: how often it runs in a step.
      source: where in the program it comes from.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    nbytes: float
    trips: float
    source: str

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in one step."""
        return sent_ratio(self.kind, self.group) * self.nbytes * self.trips


def differing_axes(mesh: MeshAxes, group: np.ndarray) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ.

    >>> differing_axes((("data", 2), ("model", 4)), np.array([0, 4]))
    ('data',)
    """
    if not mesh:
        return ()
    places = np.unravel_index(group, [size for _, size in mesh])
    return tuple(
        name
        for (name, _), place in zip(mesh, places, strict=True)
        if (place != place[0]).any()
    )
