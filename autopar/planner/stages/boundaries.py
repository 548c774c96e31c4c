"""The values that cross the boundaries between layers, and their bytes.

The search of stages (`autopar.planner.stages.costs`) counts the bytes on the boundary
after each layer, because every boundary may become a stage cut. If values are encoded
at cuts, it counts the bytes of their codes, and the seconds of encoding and decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.cut_codes import EXACT, CutCode, by_size, keeps_some
from autopar.cost.codecs import local_s
from autopar.layouts.layout import shards
from autopar.planner.stages.cut_codecs import LEAST
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.submeshes import Submesh
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, eq=False)
class Crossings:
    """The values that are sent across the boundary after each layer except the last.

    Attributes:
      forward: activations, by boundary.
      backward: cotangents, by boundary.
      entering: by layer, the activations of earlier layers that the layer reads.
    """

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    entering: tuple[tuple[int, ...], ...]


def crossings(layers: LayerMap) -> Crossings:
    """Finds the values that cross the boundaries between layers.

    A value that several layers read crosses all boundaries up to the last reader.
    Stages between the first and the last reader pass the value on.
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
    """Returns bytes of some values on one device, float64 ``[boundaries, scales]``."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class SearchCodecs:
    """The codecs of cuts with which a search of stages counts.

    Attributes:
      activations: the codec of all activations, as text; ``dense``: they are sent
        exactly.
      cotangents: likewise of all cotangents.
      optional: whether values are sent exactly where this is faster.
    """

    activations: str = EXACT
    cotangents: str = EXACT
    optional: bool = False

    def of(self, *, backward: bool) -> str:
        """The codec of one direction."""
        return self.cotangents if backward else self.activations

    def masked(self, *, backward: bool) -> bool:
        """Whether one direction may be sent at the positions of the other."""
        same = self.activations == self.cotangents != EXACT
        return backward and same


# All values are sent exactly.
NO_CODECS = SearchCodecs()


def encoded(
    layers: LayerMap,
    values: Sequence[Sequence[int]],
    submesh: Submesh,
    scales: np.ndarray,
    codec: str,
    *,
    masked: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of values on one device, encoded where cuts encode them.

    Values that several stages read count as encoded, too, because the stages are not
    known yet.

    Args:
      layers: the layers.
      values: by boundary, the values.
      submesh: the devices and layouts.
      scales: rows of a microbatch divided by rows of the program.
      codec: the codecs, as text (`autopar.compression.cut_codes.array_codecs`).
      masked: whether codes of codecs that can have masks have them.

    Returns:
      The bytes, and the seconds of encoding and decoding, float64 ``[boundaries,
      scales]``. An activation is decoded twice, in the forward and in the backward
      pass.
    """
    assignment, labels = submesh.assignment, layers.analysis.dim_labels
    device = submesh.pricer.cluster.device
    nbytes, seconds = (np.zeros((len(values), len(scales))) for _ in range(2))
    for row, found in enumerate(values):
        known_of = {v: assignment.graph.values[v] for v in found}
        floats = {
            v: known.nbytes
            for v, known in known_of.items()
            if jnp.issubdtype(known.dtype, jnp.floating)
            and labels.degree(v)
            and known.size >= LEAST
        }
        codecs = by_size(codec, floats)
        for value, known in known_of.items():
            own = codecs.get(value, EXACT)
            size, degree = float(known.nbytes), labels.degree(value)
            coding_s, split = 0.0, 1
            if value in assignment.contraction.homes:
                split = shards(assignment.home_layout(value), assignment.sizes)
            if own != EXACT:
                shape, dtype = tuple(known.shape), jnp.dtype(known.dtype).name
                code = CutCode(own, shape, dtype, masked and keeps_some(own))
                if code.nbytes < code.dense_bytes:
                    size = float(code.nbytes)
                    coding_s = 1.5 * local_s(parse_codec(own), shape, device)
            nbytes[row] += size / split * scales**degree
            seconds[row] += coding_s / split * scales**degree
    return nbytes, seconds
