"""Slices: the parts of a cluster on which a pipeline stage may run.

A slice is one of

- some devices of one host, whose number divides the number of the host's devices, and
  the first of which has an index that is a multiple of this number;
- some whole parts of a middle level within one part of the next outer level, by the
  same rule;
- any number of neighbouring whole parts of the outermost level;
- in a torus, a block whose sides divide the sides of the torus, and whose first
  coordinates are multiples of its sides.

The shapes of slices generalise the submesh shapes of Alpa (L. Zheng et al., "Alpa:
Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI
2022, section 5.2) to any number of levels. In each level, a slice has links of only one
class, and shares no link with other slices of the same shape.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.cluster.members import list_names
from autopar.cluster.presets import PRESETS
from autopar.cluster.rates import NCCL_CLASSES
from autopar.cluster.specs import (
    ClusterError,
    CollectiveFit,
    DeviceSpec,
    Level,
    LinkSpec,
)


def is_torus(level: Level) -> bool:
    """Whether a level is a torus dimension: each part is connected only to its
    neighbours.
    """
    return level.link.topology != "switch"


def wraps_around(device: DeviceSpec, link: LinkSpec) -> bool:
    """Whether a torus dimension has wrap-around links.

    A link with the topology "ring" has wrap-around links, with one exception: presets
    describe a dimension without wrap-around as a ring with half the bandwidth.
    """
    if link.topology != "ring":
        return False
    base = PRESETS.get(device.name)
    if base is None or not base.is_torus:
        return True
    return link != base.open_link


def cut_level(device: DeviceSpec, level: Level, size: int) -> Level:
    """A level with only ``size`` of its parts; in a torus dimension they are
    neighbours.

    A ring becomes a line: without the wrap-around, a device at an end sends in one
    direction only, at half the bandwidth. Measured times for groups as large as the
    ring are dropped, because they were measured with the wrap-around. Times for smaller
    groups were measured on lines, and stay.

    >>> from autopar.cluster.presets import PRESETS
    >>> level = PRESETS["v5e"].levels((16,))[0]
    >>> half = cut_level(PRESETS["v5e"].device, level, 8)
    >>> half.size, half.link.topology
    (8, 'line')
    >>> half.link.bandwidth_bytes_per_s / level.link.bandwidth_bytes_per_s
    0.5
    """
    if size == level.size:
        return level
    if not is_torus(level):
        return dataclasses.replace(level, size=size)
    share = 0.5 if wraps_around(device, level.link) else 1.0
    link = LinkSpec(
        latency_s=level.link.latency_s,
        bandwidth_bytes_per_s=level.link.bandwidth_bytes_per_s * share,
        topology="line",
        measured=tuple(fit for fit in level.link.measured if fit.group_size <= size),
    )
    return dataclasses.replace(level, size=size, link=link)


def cut_all(
    device: DeviceSpec, levels: Sequence[Level], sizes: Sequence[int]
) -> tuple[Level, ...]:
    """Cuts every level to its size in ``sizes``."""
    pairs = zip(levels, sizes, strict=True)
    return tuple(cut_level(device, level, size) for level, size in pairs)


def at_rate(link: LinkSpec, bandwidth: float, latency: float) -> LinkSpec:
    """A link after its bandwidth, latency and measured times are scaled.

    XLA's tables of measurements hold only for a link at full speed. So for a link at
    another speed, the cost model uses bandwidth and latency, and not the table.

    Args:
      link: the original link.
      bandwidth: new bandwidth divided by old bandwidth.
      latency: new latency divided by old latency.

    >>> from autopar.cluster.presets import PRESETS
    >>> slow = at_rate(PRESETS["h100"].outer, 0.5, 1.0)
    >>> slow.bandwidth_bytes_per_s / PRESETS["h100"].outer.bandwidth_bytes_per_s
    0.5
    """
    keeps = link.rates == "" or link.rates in NCCL_CLASSES
    return dataclasses.replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth,
        latency_s=link.latency_s * latency,
        rates=link.rates if keeps else "nvlink",
        measured=tuple(_at_rate(fit, bandwidth, latency) for fit in link.measured),
    )


def _at_rate(fit: CollectiveFit, bandwidth: float, latency: float) -> CollectiveFit:
    return dataclasses.replace(
        fit,
        latency_s=fit.latency_s * latency,
        s_per_byte=fit.s_per_byte / bandwidth,
        large_s_per_byte=fit.large_s_per_byte / bandwidth,
    )


Shape = tuple[int, ...]


def shape_text(shape: Sequence[int]) -> str:
    """The shape as text, as in the text of a cluster.

    >>> shape_text((2, 8))
    '2x8'
    """
    return "x".join(map(str, shape))


def _any_count(levels: Sequence[Level]) -> int:
    """Index of the outermost level, of which a slice may have any number of parts.

    The result is -1 if this level is the innermost one, or a dimension of a torus.
    """
    first = next((i for i, level in enumerate(levels) if level.size > 1), 0)
    cuttable = first < len(levels) - 1 and not is_torus(levels[first])
    return first if cuttable else -1


def _sizes(levels: Sequence[Level], free: int) -> list[list[int]]:
    """For each level the sizes that it may have in a slice."""
    return [
        [s for s in range(1, n + 1) if i == free or n % s == 0]
        for i, n in enumerate(level.size for level in levels)
    ]


def _nests(levels: Sequence[Level], shape: Sequence[int]) -> bool:
    """Whether a slice with several parts of a level has each of these parts whole.

    In a torus, a slice may have parts that are not whole.
    """
    for i, size in enumerate(shape):
        if size == 1:
            continue
        torus = True
        for j in range(i, len(shape)):
            torus = torus and is_torus(levels[j])
            if j > i and not torus and shape[j] < levels[j].size:
                return False
    return True


def shapes(levels: Sequence[Level]) -> tuple[Shape, ...]:
    """All shapes of slices; those with fewer devices first.

    >>> from autopar.cluster import Cluster
    >>> shapes(Cluster.parse("3x4:h100").levels)
    ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4))
    """
    every = itertools.product(*_sizes(levels, _any_count(levels)))
    found = [shape for shape in every if _nests(levels, shape)]
    return tuple(sorted(found, key=lambda shape: (math.prod(shape), shape)))


def count(levels: Sequence[Level], shape: Shape) -> int:
    """How many disjoint slices of a shape the levels contain."""
    return math.prod(
        level.size // size for level, size in zip(levels, shape, strict=True)
    )


def check_shape(levels: Sequence[Level], shape: Sequence[int]) -> Shape:
    """Returns the shape as a tuple; raises an error if no slice can have it."""
    allowed = _sizes(levels, _any_count(levels))
    good = len(shape) == len(levels) and all(
        size in sizes for size, sizes in zip(shape, allowed, strict=True)
    )
    if not (good and _nests(levels, shape)):
        whole = shape_text([level.size for level in levels])
        raise ClusterError(
            f"no slice has the shape {shape_text(shape)}: the links of {whole} allow "
            f"{list_names([shape_text(s) for s in shapes(levels)])}."
        )
    return tuple(shape)


def _strides(levels: Sequence[Level]) -> list[int]:
    return [
        math.prod(level.size for level in levels[i + 1 :]) for i in range(len(levels))
    ]


def offsets(levels: Sequence[Level], shape: Shape) -> Iterator[int]:
    """Yields the first device of every slice of a shape, in ascending order."""
    free = _any_count(levels)
    corners = [
        range(0, level.size - size + 1, 1 if i == free else size)
        for i, (level, size) in enumerate(zip(levels, shape, strict=True))
    ]
    strides = _strides(levels)
    for corner in itertools.product(*corners):
        yield sum(c * stride for c, stride in zip(corner, strides, strict=True))


def block(levels: Sequence[Level], shape: Shape, offset: int) -> tuple[int, ...]:
    """The devices of the slice that begins at ``offset``, in row-major order.

    >>> from autopar.cluster import Cluster
    >>> block(Cluster.parse("4x4:v5e").levels, (2, 2), 8)
    (8, 9, 12, 13)
    """
    cells = [offset]
    for size, stride in zip(shape, _strides(levels), strict=True):
        cells = [cell + i * stride for cell in cells for i in range(size)]
    return tuple(cells)


def check_offset(levels: Sequence[Level], shape: Shape, offset: int) -> int:
    """Returns the offset; raises an error if no slice of this shape can begin there."""
    known = list(offsets(levels, shape))
    if offset not in known:
        raise ClusterError(
            f"no slice of shape {shape_text(shape)} begins at device {offset}: they "
            f"begin at {list_names([str(o) for o in known])}."
        )
    return offset


def partition(levels: Sequence[Level], asked: Sequence[Sequence[int]]) -> list[int]:
    """Finds an offset for each shape, such that the slices contain each device once.

    The search visits the devices in order. At each device that no slice has yet, it
    tries the shapes one by one. If no shape fits, the search backtracks.
    """
    checked = {shape: check_shape(levels, shape) for shape in map(tuple, asked)}
    wanted = [checked[tuple(shape)] for shape in asked]
    whole = math.prod(level.size for level in levels)
    total = sum(map(math.prod, wanted))
    if total != whole:
        raise ClusterError(
            f"partition: {_texts(wanted)} are {total} devices, and the cluster has "
            f"{whole}: a partition holds each device once."
        )
    placed = _Filling(levels, wanted).fill()
    if placed is None:
        raise ClusterError(
            f"partition: {_texts(wanted)} do not fit side by side in "
            f"{shape_text([level.size for level in levels])}, aligned as slices are."
        )
    waiting = {shape: iter(sorted(found)) for shape, found in placed.items()}
    return [next(waiting[shape]) for shape in wanted]


def _texts(wanted: Sequence[Shape]) -> str:
    return list_names([shape_text(shape) for shape in wanted])


class _Filling:
    """Searches for a partition of the devices into slices, an exact cover problem.

    The search goes on at the first device that is not covered yet. This device must be
    the first of its slice, so only the shape of the slice has to be chosen. States that
    led to no solution are not tried again.
    """

    def __init__(self, levels: Sequence[Level], wanted: Sequence[Shape]) -> None:
        self._size = math.prod(level.size for level in levels)
        self._levels = levels
        self._left = Counter(wanted)  # ordered by their first occurrence
        self._starts = {shape: set(offsets(levels, shape)) for shape in self._left}
        self._taken = [False] * self._size
        self._dead: set[tuple[int, ...]] = set()

    def _first_free(self, start: int) -> int:
        while start < self._size and self._taken[start]:
            start += 1
        return start

    def _state(self) -> tuple[int, ...]:
        """The covered positions, as bits of one number, and how often each shape is
        still needed.
        """
        bits = int("".join("01"[taken] for taken in self._taken), 2)
        return (bits, *self._left.values())

    def _mark(self, shape: Shape, offset: int, taken: bool) -> None:
        for position in block(self._levels, shape, offset):
            self._taken[position] = taken
        self._left[shape] += -1 if taken else 1

    def _choices(self, free: int) -> Iterator[Shape]:
        """Yields the needed shapes of slices that can begin at the device ``free``."""
        for shape, left in list(self._left.items()):
            if left and free in self._starts[shape]:
                cells = block(self._levels, shape, free)
                if not any(self._taken[cell] for cell in cells):
                    yield shape

    def fill(self) -> dict[Shape, list[int]] | None:
        """Shape -> offsets of its slices; None if there is no partition.

        The search is a loop and not a recursion, because there may be more stages than
        Python allows stack frames.
        """
        path: list[tuple[int, Shape]] = []
        free = self._first_free(0)
        tries = [self._choices(free)]
        while free < self._size:
            shape = next(tries[-1], None)
            if shape is None:
                self._dead.add(self._state())
                tries.pop()
                if not path:
                    return None
                free, last = path.pop()
                self._mark(last, free, False)
                continue
            self._mark(shape, free, True)
            if self._state() in self._dead:
                self._mark(shape, free, False)
                continue
            path.append((free, shape))
            free = self._first_free(free)
            tries.append(self._choices(free))
        return {s: [o for o, other in path if other == s] for s in self._left}
