"""What crosses the boundaries between layers, and for how long it occupies links."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.cluster.specs import LinkSpec
from autopar.layouts.layout import shards
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.submeshes import Submesh
from autopar_passes.graph.roles import InputRole, Role


@dataclasses.dataclass(frozen=True, eq=False)
class Crossings:
    """The values that cross the boundary behind each layer but the last.

    Attributes:
      forward: activations, by boundary.
      backward: cotangents, on their way back.
      entering: by layer, the activations of earlier layers that it reads.
    """

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    entering: tuple[tuple[int, ...], ...]


def crossings(layers: LayerMap) -> Crossings:
    """Finds what crosses the boundaries between layers.

    A value that several layers read crosses all boundaries up to the last of them;
    the stages between hand it on.
    """
    flow, count = layers.parts.flow, layers.count
    forward: list[list[int]] = [[] for _ in range(count - 1)]
    backward: list[list[int]] = [[] for _ in range(count - 1)]
    entering: list[list[int]] = [[] for _ in range(count)]
    for value, maker in flow.maker.items():
        made = layers.parts.part.get(maker)
        if made is None or flow.roles[maker] is Role.UPDATE:
            continue
        read = [
            (layers.parts.part[r], flow.roles[r])
            for r in flow.readers.get(value, ())
            if r in layers.parts.part and flow.roles[r] is not Role.UPDATE
        ]
        later = [part for part, _ in read if part > made]
        for boundary in range(made, max(later, default=made)):
            forward[boundary].append(value)
        for part in sorted(
            {p for p, role in read if p > made and role is Role.FORWARD}
        ):
            entering[part].append(value)
        earlier = [part for part, _ in read if part < made]
        for boundary in range(min(earlier, default=made), made):
            backward[boundary].append(value)
    return Crossings(
        *(tuple(map(tuple, found)) for found in (forward, backward, entering))
    )


def device_bytes(
    layers: LayerMap,
    values: Sequence[Sequence[int]],
    submesh: Submesh,
    scales: np.ndarray,
) -> np.ndarray:
    """Bytes of some values on one device, float64 ``[boundaries, scales]``."""
    assignment = submesh.assignment
    labels = layers.analysis.dim_labels
    out = np.zeros((len(values), len(scales)))
    for row, found in enumerate(values):
        for value in found:
            nbytes = assignment.graph.values[value].nbytes
            if value in assignment.contraction.homes:
                nbytes /= shards(assignment.home_layout(value), assignment.sizes)
            out[row] += nbytes * scales ** labels.degree(value)
    return out


def between(cluster: Cluster, first: Submesh, second: Submesh) -> LinkSpec:
    """The link from a stage to the next: that of the outermost level that has several.

    Where stages will lie is not known yet; some of them may be closer.
    """
    if first.group != second.group:
        assert cluster.between is not None
        return cluster.between
    levels = (cluster.groups[first.group] if cluster.groups else cluster).levels
    several = [level for level in levels if level.size > 1]
    return (several or list(levels))[0].link


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """A parameter that several layers read in their forward pass.

    Attributes:
      value: the input.
      source: the first layer, which holds it.
      target: another layer that reads it.
    """

    value: int
    source: int
    target: int


def shared_parameters(layers: LayerMap) -> Iterator[Shared]:
    """The parameters that forward passes of several layers read, cast or not.

    Small ones are sent to whoever reads them without a thought.
    """
    flow, part = layers.parts.flow, layers.parts.part
    read: dict[int, set[int]] = {}
    for index in flow.equations:
        if flow.roles[index] is not Role.FORWARD or index not in part:
            continue
        for value in flow.equations[index].inputs:
            for given in flow.of_state.get(value, ()) if isinstance(value, int) else ():
                read.setdefault(given, set()).add(part[index])
    for given in layers.analysis.graph.inputs:
        found = sorted(read.get(given.value, ()))
        if given.role is InputRole.PARAMETER and len(found) > 1:
            for target in found[1:]:
                yield Shared(given.value, found[0], target)
