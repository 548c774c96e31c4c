"""The largest regular cluster over the devices that are left.

Between switches any devices of any parts will do, as long as every part has the same
number of them. In a torus only blocks of neighbours are joined; a ring that lost a
part is a line around the gap.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from autopar.cluster.errors import ClusterError
from autopar.cluster.links import is_torus, wraps_around
from autopar.cluster.specs import DeviceSpec, Level

Prefer = Literal["devices", "hosts"]
"""Among regular clusters of the same size: more devices of a host, or more hosts."""

Cells = npt.NDArray[np.bool_]
Shape = tuple[int, ...]


def check_prefer(prefer: str) -> None:
    """Raises `ClusterError` where the preference is none."""
    if prefer not in get_args(Prefer):
        raise ClusterError(
            f"prefer={prefer!r} is unknown: it is one of {get_args(Prefer)}."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """Levels that are chosen together: one behind a switch, or those of a torus.

    `wraps` holds, for each dimension of a torus, whether its ends are joined.
    """

    axes: tuple[int, ...]
    wraps: tuple[bool, ...] | None

    def options(self, cells: Cells) -> Iterator[tuple[Shape, Cells]]:
        """Yields the sizes that some part can have, and the parts that can.

        `cells` says which parts inside are good; its last axes are this segment's.
        """
        if self.wraps is not None:
            yield from _blocks(cells, self.axes, self.wraps)
            return
        found = cells.sum(axis=-1)
        for size in range(1, int(found.max()) + 1):
            yield (size,), found >= size

    def good(self, cells: Cells, shape: Shape) -> Cells:
        """The parts that can have these sizes."""
        for sizes, good in self.options(cells):
            if sizes == shape:
                return good
        raise AssertionError((shape, self))  # the search found it before

    def place(self, cells: Cells, shape: Shape) -> list[tuple[int, ...]]:
        """The first parts of these sizes, by their coordinates."""
        if self.wraps is None:
            return [(int(i),) for i in np.flatnonzero(cells)[: shape[0]]]
        axes = tuple(range(cells.ndim))
        corners = dict(_corners(cells, axes, self.wraps))[shape]
        corner = np.argwhere(corners)[0]
        return [
            tuple(
                (int(c) + i) % n
                for c, i, n in zip(corner, at, cells.shape, strict=True)
            )
            for at in itertools.product(*map(range, shape))
        ]


def _segments(device: DeviceSpec, levels: Sequence[Level]) -> list[_Segment]:
    found: list[_Segment] = []
    for torus, run in itertools.groupby(
        range(len(levels)), key=lambda i: is_torus(levels[i])
    ):
        axes = tuple(run)
        if torus:
            wraps = tuple(wraps_around(device, levels[i].link) for i in axes)
            found.append(_Segment(axes, wraps))
        else:
            found += [_Segment((i,), None) for i in axes]
    return found


def _shift(cells: Cells, axis: int, by: int, wraps: bool) -> Cells:
    """The cells `by` further on; beyond an end that is not joined there are none."""
    moved = np.roll(cells, -by, axis)
    if not wraps:
        index: list[Any] = [slice(None)] * cells.ndim
        index[axis] = slice(cells.shape[axis] - by, None)
        moved[tuple(index)] = False
    return moved


def _corners(
    cells: Cells, axes: tuple[int, ...], wraps: tuple[bool, ...]
) -> Iterator[tuple[Shape, Cells]]:
    """Yields the shapes of the blocks of good cells, and where these begin."""
    if not axes:
        yield (), cells
        return
    axis, run = axes[0], cells
    for size in range(1, cells.shape[axis] + 1):
        if size > 1:
            run = run & _shift(cells, axis, size - 1, wraps[0])
        if size == cells.shape[axis]:  # the whole ring begins where it is counted from
            first = np.arange(size) == 0
            run = run & np.expand_dims(
                first, tuple(i for i in range(cells.ndim) if i != axis)
            )
        if not run.any():
            return
        for rest, corners in _corners(run, axes[1:], wraps[1:]):
            yield (size, *rest), corners


def _blocks(
    cells: Cells, axes: tuple[int, ...], wraps: tuple[bool, ...]
) -> Iterator[tuple[Shape, Cells]]:
    """Yields the shapes of blocks, and the parts that hold such a block."""
    for shape, corners in _corners(cells, axes, wraps):
        yield shape, np.asarray(corners.any(axis=axes))


def _shapes(cells: Cells, segments: Sequence[_Segment]) -> Iterator[Shape]:
    """Yields every shape that the good cells can have."""
    if not segments:
        yield ()
        return
    for inner, good in segments[-1].options(cells):
        for outer in _shapes(good, segments[:-1]):
            yield (*outer, *inner)


def _place(
    cells: Cells, segments: Sequence[_Segment], shape: Shape
) -> list[tuple[int, ...]]:
    """Coordinates of the devices, in the order of the new cluster."""
    if not segments:
        return [()]
    first, depth = segments[0], len(segments[0].axes)
    good = cells
    for segment in reversed(segments[1:]):
        shift = tuple(axis - first.axes[0] for axis in segment.axes)
        sizes = tuple(shape[axis] for axis in shift)
        good = dataclasses.replace(segment, axes=shift).good(good, sizes)
    return [
        (*at, *inside)
        for at in first.place(good, shape[:depth])
        for inside in _place(cells[at], segments[1:], shape[depth:])
    ]


def largest(
    device: DeviceSpec, levels: Sequence[Level], there: Sequence[int], prefer: Prefer
) -> tuple[Shape, tuple[int, ...]]:
    """The shape and the positions of the largest regular cluster.

    Of several the one with more devices of a host, or with more hosts, counts; of
    these the first positions do.

    Args:
      device: the device, which says whether a torus wraps around.
      levels: of the whole cluster.
      there: positions of the devices that are left, at least one.
      prefer: what counts among clusters of the same size.
    """
    check_prefer(prefer)
    sizes = tuple(level.size for level in levels)
    cells = np.zeros(math.prod(sizes), np.bool_)
    cells[list(there)] = True
    cells = cells.reshape(sizes)
    segments = _segments(device, levels)

    def rank(shape: Shape) -> tuple[int, ...]:
        if prefer == "hosts":
            return math.prod(shape), math.prod(shape[:-1]), *shape
        return math.prod(shape), *shape[::-1]

    shape = max(_shapes(cells, segments), key=rank)
    found = zip(*_place(cells, segments, shape), strict=True)
    positions = np.ravel_multi_index(tuple(map(np.array, found)), sizes)
    return shape, tuple(positions.tolist())
