"""Bytes and time of collectives over mesh axes.

Among GPUs the times are those of `autopar.cost.nccl`. Elsewhere the time of one
collective over one group is a straight line in its size, ``latency + slope * nbytes``,
for each algorithm (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005); the fastest algorithm counts,
so that the time is the least of a few lines. A collective over several levels of links
is a sequence of such phases, one per level. Groups made of other devices run the same
collective at the same time; bandwidths are per device, so this costs nothing more.

Sizes follow one convention, stated at `autopar.cluster.specs.Kind`.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.cluster.mesh import MeshAxis
from autopar.cluster.specs import KINDS, LinkSpec
from autopar.cost import nccl
from autopar.cost.curves import Curve, Line, highest, line, lowest, total
from autopar_errors import InputError
from autopar_passes.audit.collectives import sent_ratio

# Steps between far partners get about half the bandwidth of steps between
# neighbours (Thakur et al., section 4.1: "more than twice").
FAR_PARTNER_SLOWDOWN = 2.0


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InputError(f"unknown collective {kind!r}; one of {', '.join(KINDS)}.")


def bytes_ratio(kind: str, group_size: int) -> float:
    """Bytes that one device sends, as a multiple of the collective's size."""
    _check_kind(kind)
    if group_size < 1:
        raise InputError(f"{kind}: group_size must be 1 or more, got {group_size}.")
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
    large = at_k(fit.large_s_per_byte for fit in fits)
    return highest([line(latency_s, slope), line(0.0, large)])


def _one_level(kind: str, k: int, link: LinkSpec) -> Curve:
    measured = _measured_curve(kind, k, link)
    if measured is not None:
        return measured
    if link.rates:
        return nccl.across(kind, [(k, link)])
    return lowest([line(a, b) for a, b in _MODELS[link.topology](kind, k, link)])


def _route(kind: str, groups: tuple[tuple[int, LinkSpec], ...]) -> Curve:
    """The time of a collective over several levels, outermost first in `groups`.

    all_gather: outer levels first, while there is least to send, then the inner;
    reduce_scatter is its mirror image; all_reduce: scatter inside, reduce across,
    gather inside, or all of it at every level when that has fewer steps;
    all_to_all: one exchange per level; a permutation takes its slowest level.
    """
    if not groups:
        return line(0.0, 0.0)
    k, link = groups[-1]
    inner = _one_level(kind, k, link)
    if len(groups) == 1:
        return inner
    outer = _route(kind, groups[:-1])
    if kind == "collective_permute":
        return highest([inner, outer])
    if kind == "all_to_all":
        return total([inner, outer])
    inside = outer.seeing(1 / k)
    if kind != "all_reduce":
        return total([inner, inside])
    halves = [_one_level(half, k, link) for half in ("reduce_scatter", "all_gather")]
    return lowest([total([*halves, inside]), total([inner, outer])])


def _is_nccl(kind: str, groups: Sequence[tuple[int, LinkSpec]]) -> bool:
    """Whether NCCL's times hold on every level: nobody measured others."""
    return bool(groups) and all(
        link.rates and not any(fit.kind == kind for fit in link.measured)
        for _, link in groups
    )


def _groups(axes: Iterable[MeshAxis]) -> tuple[tuple[int, LinkSpec], ...]:
    """Sizes and links by level; axes of one level and link form one group."""
    merged: dict[tuple[int, LinkSpec], int] = {}
    for axis in sorted(axes, key=lambda axis: axis.level):
        if axis.size > 1:
            place = (axis.level, axis.link)
            merged[place] = merged.get(place, 1) * axis.size
    return tuple((k, link) for (_, link), k in merged.items())


# A cluster has about 30 kinds over groups of axes; an entry takes about 2 kB. This
# holds a hundred clusters in 6 MB.
@functools.lru_cache(maxsize=1 << 12)
def collective_curve(kind: str, axes: tuple[MeshAxis, ...]) -> Curve:
    """The time of a collective over these mesh axes, as a function of its size."""
    _check_kind(kind)
    groups = _groups(axes)
    return nccl.across(kind, groups) if _is_nccl(kind, groups) else _route(kind, groups)


def collective_s(kind: str, nbytes: float, axes: Sequence[MeshAxis]) -> float:
    """Time of a collective over the group that these mesh axes form, in seconds.

    Args:
      kind: one of `KINDS`.
      nbytes: size by the convention of `autopar.cluster.specs.Kind`.
      axes: the mesh axes of the group, in any order; none costs nothing.
    """
    curve = collective_curve(kind, tuple(axes))
    return curve.seconds(nbytes) if nbytes > 0 else 0.0


def collective_s_at(
    kind: str, nbytes: np.ndarray, axes: Sequence[MeshAxis]
) -> np.ndarray:
    """`collective_s` of some sizes, of their shape.

    >>> link = LinkSpec(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> collective_s_at("all_reduce", np.array([0.0, 4.0, 20.0]), (axis,)).tolist()
    [0.0, 10.0, 36.0]
    """
    found = collective_curve(kind, tuple(axes)).seconds_at(nbytes)
    return np.where(nbytes > 0, found, 0.0)


@functools.lru_cache(maxsize=1 << 12)  # as many as `collective_curve` has
def collective_s_per_byte(kind: str, axes: tuple[MeshAxis, ...]) -> float:
    """The time of a byte in a collective whose latency does not count.

    `collective_s` is at least this times the size.

    >>> link = LinkSpec(latency_s=1e-3, bandwidth_bytes_per_s=0.5)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> collective_s_per_byte("all_reduce", (axis,))
    3.0

    Args:
      kind: one of `KINDS`.
      axes: the mesh axes of the group, in any order; none costs nothing.
    """
    return collective_curve(kind, axes).s_per_byte


@functools.lru_cache(maxsize=1 << 14)
def least_s_per_byte(
    kind: str, low: float, high: float, axes: tuple[MeshAxis, ...]
) -> float:
    """The least time of a byte in collectives of ``low`` to ``high`` bytes.

    >>> link = LinkSpec(latency_s=1e-3, bandwidth_bytes_per_s=0.5)
    >>> axis = MeshAxis(name="data", size=4, link=link, level=0)
    >>> least_s_per_byte("all_reduce", 1.0, math.inf, (axis,))
    3.0

    Args:
      kind: one of `KINDS`.
      low: size of the smallest, above 0.
      high: size of the largest; it may be infinite.
      axes: the mesh axes of the group, in any order; none costs nothing.
    """
    return collective_curve(kind, axes).least_s_per_byte(low, high)
