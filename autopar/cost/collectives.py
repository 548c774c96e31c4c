"""Bytes and time of collectives over mesh axes.

The time of one collective over one group is a straight line in its size, ``latency +
slope * nbytes``, for each algorithm (R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005);
the fastest algorithm counts, so that the time is the least of a few lines. A
collective over several levels of links is a sequence of such phases, one per level.
Groups made of other devices run the same collective at the same time; bandwidths are
per device, so this costs nothing more.

Sizes follow one convention, stated at `autopar.cluster.specs.Kind`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.cluster.mesh import MeshAxis
from autopar.cluster.specs import KINDS, LinkSpec
from autopar_passes.audit.collectives import sent_ratio

Sizes = npt.NDArray[np.float64]
Line = tuple[float, float]
"""(latency_s, s_per_byte)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Time of one phase by size: the lowest line, but at least `floor_s_per_byte`.

    The floor is that of measured links whose larger buffers fit no cache.
    """

    lines: tuple[Line, ...]
    floor_s_per_byte: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """The time of the phase at this size."""
        fastest_s = min(latency + slope * nbytes for latency, slope in self.lines)
        return max(fastest_s, self.floor_s_per_byte * nbytes)

    @property
    def s_per_byte(self) -> float:
        """The time of a byte in the largest buffers, the least of all sizes."""
        return max(min(slope for _, slope in self.lines), self.floor_s_per_byte)

    def seconds_array(self, nbytes: Sizes) -> Sizes:
        """`seconds` of many sizes."""
        times = [latency + slope * nbytes for latency, slope in self.lines]
        return np.maximum(np.min(times, axis=0), self.floor_s_per_byte * nbytes)


Phases = tuple[tuple[float, Curve], ...]
"""One after the other: (the part of the bytes that the phase sees, its curve)."""

# Steps between far partners get about half the bandwidth of steps between
# neighbours (Thakur et al., section 4.1: "more than twice").
FAR_PARTNER_SLOWDOWN = 2.0


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}; one of {', '.join(KINDS)}.")


def bytes_ratio(kind: str, group_size: int) -> float:
    """Bytes that one device sends, as a multiple of the collective's size."""
    _check_kind(kind)
    if group_size < 1:
        raise ValueError(f"{kind}: group_size must be 1 or more, got {group_size}.")
    if group_size == 1:
        return 0.0
    return sent_ratio(kind, group_size)


def collective_bytes(kind: str, nbytes: float, group_size: int) -> float:
    """Bytes that one device sends in the best algorithms.

    With k devices: all_reduce ``2 (k-1)/k nbytes``; all_gather, reduce_scatter and
    all_to_all ``(k-1)/k nbytes``; collective_permute ``nbytes``.

    >>> collective_bytes("all_reduce", 1000, 4)
    1500.0
    """
    return bytes_ratio(kind, group_size) * nbytes


def _switch_lines(kind: str, k: int, link: LinkSpec) -> list[Line]:
    """One line for each algorithm among `k` devices behind a switch.

    Ring (pairwise exchange for all_to_all): k-1 steps, twice that for all_reduce,
    with the fewest bytes. Logarithmic, for small sizes: recursive doubling for
    all_reduce (everything in each step); recursive doubling and halving for
    all_gather and reduce_scatter, to far partners; Bruck's for all_to_all (half of
    everything in each step).
    """
    a, per_byte = link.latency_s, 1 / link.bandwidth_bytes_per_s
    log, ratio = math.ceil(math.log2(k)), bytes_ratio(kind, k)
    if kind == "collective_permute":
        return [(a, per_byte)]
    if kind == "all_reduce":
        return [(2 * (k - 1) * a, ratio * per_byte), (log * a, log * per_byte)]
    if kind == "all_to_all":
        few_steps = (log * a, max(log / 2, ratio) * per_byte)
    else:
        few_steps = (log * a, FAR_PARTNER_SLOWDOWN * ratio * per_byte)
    return [((k - 1) * a, ratio * per_byte), few_steps]


def _ring_lines(kind: str, k: int, link: LinkSpec) -> list[Line]:
    """The one line of a collective along a torus dimension of `k` devices.

    Data goes both ways round, half each, so that floor(k/2) steps reach everyone.
    In an all_to_all the sum of all distances is floor(k^2/4) per device, each taking
    a k-th of the data. A permutation to the neighbour uses one of the two ways.
    (https://jax-ml.github.io/scaling-book/sharding/)
    """
    a, per_byte = link.latency_s, 1 / link.bandwidth_bytes_per_s
    steps, ratio = k // 2, bytes_ratio(kind, k)
    if kind == "collective_permute":
        return [(a, 2 * per_byte)]
    if kind == "all_to_all":
        return [(steps * a, (k * k // 4) / k * per_byte)]
    rounds = 2 if kind == "all_reduce" else 1
    return [(rounds * steps * a, ratio * per_byte)]


def _line_lines(kind: str, k: int, link: LinkSpec) -> list[Line]:
    """The one line of a collective along `k` devices whose ends are not joined.

    An end has one neighbour, which bounds everyone: the bandwidth is that of one
    direction, half of a ring's, and k-1 steps reach everyone. In an all_to_all
    floor(k^2/4) pairs of devices cross the middle, each with a k-th of the data. A
    permutation sends one message back over all links, against the others.
    (https://jax-ml.github.io/scaling-book/sharding/ for the bandwidth without
    wrap-around; the hops are counted.)
    """
    a, per_byte = link.latency_s, 1 / link.bandwidth_bytes_per_s
    steps = k - 1
    if kind == "collective_permute":
        return [(steps * a, per_byte)]
    if kind == "all_to_all":
        return [(steps * a, (k * k // 4) / k * per_byte)]
    rounds = 2 if kind == "all_reduce" else 1
    return [(rounds * steps * a, bytes_ratio(kind, k) * per_byte)]


_MODELS = {"switch": _switch_lines, "ring": _ring_lines, "line": _line_lines}


def _measured_curve(kind: str, k: int, link: LinkSpec) -> Curve | None:
    """The measured curve for `k` devices, or None.

    Between measured group sizes, the latency and the time of a byte sent are linear
    in the group size; beyond them, they are those of the nearest.
    """
    fits = [fit for fit in link.measured if fit.kind == kind]
    if not fits:
        return None
    fits.sort(key=lambda fit: fit.group_size)
    sizes = [fit.group_size for fit in fits]
    ratios = [bytes_ratio(kind, size) for size in sizes]

    def at_k(values: Iterable[float]) -> float:
        """The time of a byte of the collective's size, from those of bytes sent."""
        sent = [value / ratio for value, ratio in zip(values, ratios, strict=True)]
        return float(np.interp(k, sizes, sent)) * bytes_ratio(kind, k)

    latency_s = float(np.interp(k, sizes, [fit.latency_s for fit in fits]))
    slope = at_k(fit.s_per_byte for fit in fits)
    return Curve(((latency_s, slope),), at_k(fit.large_s_per_byte for fit in fits))


def _one_level(kind: str, k: int, link: LinkSpec) -> Curve:
    measured = _measured_curve(kind, k, link)
    if measured is not None:
        return measured
    return Curve(tuple(_MODELS[link.topology](kind, k, link)))


def _shrunk(phases: Phases, factor: int) -> Phases:
    """The phases, seeing a `factor`-th of the bytes."""
    return tuple((part / factor, curve) for part, curve in phases)


def _slower(routes: Iterable[Phases]) -> tuple[Phases, ...]:
    """A permutation over several levels: as slow as the slowest of them."""
    curves = [curve for phases in routes for _, curve in phases]
    latency = max(curve.lines[0][0] for curve in curves)
    slope = max(curve.lines[0][1] for curve in curves)
    floor = max(curve.floor_s_per_byte for curve in curves)
    return (((1.0, Curve(((latency, slope),), floor)),),)


def _routes(kind: str, groups: tuple[tuple[int, LinkSpec], ...]) -> tuple[Phases, ...]:
    """The ways to do a collective over several levels, outermost first in `groups`.

    all_gather: outer levels first, while there is least to send, then the inner;
    reduce_scatter is its mirror image; all_reduce: scatter inside, reduce across,
    gather inside, or all of it at every level when that has fewer steps;
    all_to_all: one exchange per level; a permutation takes its slowest level.
    """
    if not groups:
        return ((),)
    k, link = groups[-1]
    inner: Phases = ((1.0, _one_level(kind, k, link)),)
    if len(groups) == 1:
        return (inner,)
    outer = _routes(kind, groups[:-1])
    if kind == "collective_permute":
        return _slower((inner, *outer))
    if kind == "all_to_all":
        return tuple(inner + phases for phases in outer)
    if kind != "all_reduce":
        return tuple(inner + _shrunk(phases, k) for phases in outer)
    halves = ("reduce_scatter", "all_gather")
    inside: Phases = tuple((1.0, _one_level(half, k, link)) for half in halves)
    by_parts = [inside + _shrunk(phases, k) for phases in outer]
    return (*by_parts, *(inner + phases for phases in outer))


def _groups(axes: Iterable[MeshAxis]) -> tuple[tuple[int, LinkSpec], ...]:
    """Sizes and links by level; axes of one level and link form one group."""
    merged: dict[tuple[int, LinkSpec], int] = {}
    for axis in sorted(axes, key=lambda axis: axis.level):
        if axis.size > 1:
            place = (axis.level, axis.link)
            merged[place] = merged.get(place, 1) * axis.size
    return tuple((k, link) for (_, link), k in merged.items())


# A cluster has about 30 kinds over groups of axes; an entry takes about 380 bytes.
# This holds a hundred clusters in 2 MB.
@functools.lru_cache(maxsize=1 << 12)
def _plan(kind: str, axes: tuple[MeshAxis, ...]) -> tuple[Phases, ...]:
    _check_kind(kind)
    return _routes(kind, _groups(axes))


def collective_s(kind: str, nbytes: float, axes: Sequence[MeshAxis]) -> float:
    """Time of a collective over the group that these mesh axes form, in seconds.

    Args:
      kind: one of `KINDS`.
      nbytes: size by the convention of `autopar.cluster.specs.Kind`.
      axes: the mesh axes of the group, in any order; none costs nothing.
    """
    routes = _plan(kind, tuple(axes))
    if nbytes <= 0:
        return 0.0
    return min(
        sum(curve.seconds(part * nbytes) for part, curve in phases) for phases in routes
    )


@functools.lru_cache(maxsize=1 << 12)  # as many as `_plan` has
def collective_s_per_byte(kind: str, axes: tuple[MeshAxis, ...]) -> float:
    """The time of a byte in a collective whose latency does not count.

    The least slope of `collective_s`, which is at least this times the size.

    >>> link = LinkSpec(latency_s=1e-3, bandwidth_bytes_per_s=0.5)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> collective_s_per_byte("all_reduce", (axis,))
    3.0

    Args:
      kind: one of `KINDS`.
      axes: the mesh axes of the group, in any order; none costs nothing.
    """
    return min(
        sum(part * curve.s_per_byte for part, curve in phases)
        for phases in _plan(kind, axes)
    )


def collective_s_array(kind: str, nbytes: Sizes, axes: Sequence[MeshAxis]) -> Sizes:
    """`collective_s` of many sizes at once, in the shape of `nbytes`."""
    sizes = np.maximum(np.asarray(nbytes, dtype=np.float64), 0.0)
    best = np.full(sizes.shape, np.inf)
    for phases in _plan(kind, tuple(axes)):
        total = np.zeros(sizes.shape)
        for part, curve in phases:
            total += curve.seconds_array(part * sizes)
        best = np.minimum(best, total)
    return np.where(sizes > 0, best, 0.0)


@functools.lru_cache(maxsize=1 << 12)  # as many as `_plan` has
def collective_pieces(
    kind: str, axes: tuple[MeshAxis, ...]
) -> tuple[tuple[float, float, float], ...]:
    """`collective_s` as straight pieces: (from size, latency_s, s_per_byte), in order.

    The first piece starts at size 0; each holds until the next begins.

    >>> link = LinkSpec(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> collective_pieces("all_reduce", (axis,))
    ((0.0, 2.0, 2.0), (8.0, 6.0, 1.5))

    Args:
      kind: one of `KINDS`.
      axes: the mesh axes of the group, in any order.
    """
    routes = _plan(kind, axes)
    bends = {0.0}
    for phases in routes:
        for part, curve in phases:
            bends |= {size / part for size in _bends(curve)}
    pieces: list[tuple[float, float, float]] = []
    ordered = sorted(bends)
    for start, end in zip(ordered, [*ordered[1:], math.inf], strict=True):
        lines = [_line_after(phases, start, end) for phases in routes]
        pieces.extend(_lowest(lines, start, end))
    out = pieces[:1]
    for piece in pieces[1:]:
        if not np.allclose(piece[1:], out[-1][1:], rtol=1e-12, atol=0.0):
            out.append(piece)
    return tuple(out)


def _bends(curve: Curve) -> set[float]:
    """The sizes at which another line of a curve, or its floor, takes over."""
    lines = [*curve.lines, (0.0, curve.floor_s_per_byte)]
    out: set[float] = set()
    for (a, slope), (b, other) in itertools.combinations(lines, 2):
        if slope != other and (size := (b - a) / (slope - other)) > 0:
            out.add(size)
    return out


def _line_after(phases: Phases, start: float, end: float) -> Line:
    """The straight line that a route is between two sizes without a bend between."""
    middle = 2 * start + 1.0 if math.isinf(end) else (start + end) / 2
    latency, slope = 0.0, 0.0
    for part, curve in phases:
        size = part * middle
        a, b = min(curve.lines, key=lambda line: line[0] + line[1] * size)
        if curve.floor_s_per_byte * size > a + b * size:
            a, b = 0.0, curve.floor_s_per_byte
        latency, slope = latency + a, slope + part * b
    return latency, slope


def _lowest(
    lines: Sequence[Line], start: float, end: float
) -> list[tuple[float, float, float]]:
    """The least of straight lines between two sizes."""
    out: list[tuple[float, float, float]] = []
    at = start
    while True:
        best = min(lines, key=lambda line: (line[0] + line[1] * at, line[1]))
        out.append((at, *best))
        crossings = [
            (best[0] - other[0]) / (other[1] - best[1])
            for other in lines
            if other[1] < best[1]
        ]
        ahead = [size for size in crossings if at < size < end]
        if not ahead:
            return out
        at = min(ahead)
