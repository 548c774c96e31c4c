"""Logical meshes: how mesh axes are mapped to the levels of a cluster."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from autopar.cluster.specs import ClusterError, Level, LinkSpec

_NAMES = {1: ("data",), 2: ("data", "tensor"), 3: ("data", "fsdp", "tensor")}
DEFAULT_NAMES = _NAMES[3]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a logical mesh.

    Attributes:
      name: name of the axis.
      size: number of devices along the axis.
      link: link between neighbours along the axis.
      level: index of the cluster's level within which the axis lies; 0 is the
        outermost.
      named: whether the user gave the name. If False, it is a default name, and the
        planner later renames the axis after the kind of dimension that it splits, such
        as ``data``.
    """

    name: str
    size: int
    link: LinkSpec
    level: int
    named: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """A logical mesh, outermost axis first."""

    axes: tuple[MeshAxis, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def label(self) -> str:
        """Names and sizes as text; only sizes, such as ``8x4``, if the user named no
        axis.
        """
        named = any(axis.named for axis in self.axes)
        return str(self) if named else "x".join(map(str, self.sizes))

    @property
    def num_devices(self) -> int:
        """The product of the sizes."""
        return math.prod(self.sizes)

    def axis(self, name: str) -> MeshAxis:
        """The axis with this name."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ClusterError(f"MeshShape: no axis {name!r}; the axes are {self.names}.")

    def __str__(self) -> str:
        """Names and sizes as text, such as ``data=8 tensor=4``."""
        return " ".join(f"{axis.name}={axis.size}" for axis in self.axes)


# The arguments are sizes of levels and their divisors. So the cache has a few tens of
# entries of about 450 bytes.
@functools.lru_cache(maxsize=1 << 10)
def ordered_factorisations(
    number: int, max_factors: int
) -> tuple[tuple[int, ...], ...]:
    """All ways to write ``number`` as an ordered product of factors above 1.

    >>> ordered_factorisations(8, 2)
    ((8,), (2, 4), (4, 2))
    """
    if number == 1:
        return ((),)
    if max_factors <= 0:
        return ()
    found = [(number,)]
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            rests = ordered_factorisations(number // first, max_factors - 1)
            found += [(first, *rest) for rest in rests if rest]
    return tuple(found)


def axis_names(num_axes: int) -> tuple[str, ...]:
    """The default names, outermost first."""
    extra = tuple(f"axis{i}" for i in range(3, num_axes))
    return _NAMES.get(num_axes, _NAMES[3] + extra)


def _sizes_per_level(
    levels: Sequence[Level], max_axes: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields every choice of axes: for each level, the sizes of the axes within it."""
    options = [ordered_factorisations(level.size, max_axes) for level in levels]
    for sizes in itertools.product(*options):
        if sum(map(len, sizes)) <= max_axes:
            yield sizes


def _build(
    levels: Sequence[Level],
    sizes: tuple[tuple[int, ...], ...],
    names: Sequence[str] | None,
) -> MeshShape:
    placed = [(i, size) for i, inside in enumerate(sizes) for size in inside]
    placed = placed or [(len(levels) - 1, 1)]  # a mesh has at least one axis
    axes = [
        MeshAxis(
            name=name, size=size, link=levels[i].link, level=i, named=names is not None
        )
        for name, (i, size) in zip(_names_for(len(placed), names), placed, strict=True)
    ]
    return MeshShape(axes=tuple(axes))


def _names_for(num_axes: int, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return axis_names(num_axes)
    if len(names) < num_axes or len(set(names)) < len(names):
        raise ClusterError(
            f"mesh_shapes: names={tuple(names)} must be different, and at least "
            f"{num_axes} of them, one for each axis."
        )
    return tuple(names[:num_axes])


def mesh_shapes(
    levels: Sequence[Level], max_axes: int, names: Sequence[str] | None
) -> tuple[MeshShape, ...]:
    """All meshes in which each axis lies within one level; those with fewer axes
    first.
    """
    needed = max(1, sum(level.size > 1 for level in levels))
    if max_axes < needed:
        raise ClusterError(
            f"mesh_shapes: max_axes={max_axes} is too few: an axis lies within one "
            f"level and this cluster has {needed}. Try max_axes={needed}."
        )
    found = list(_sizes_per_level(levels, max_axes))
    found.sort(
        key=lambda sizes: (sum(map(len, sizes)), [[-s for s in x] for x in sizes])
    )
    return tuple(_build(levels, sizes, names) for sizes in found)
