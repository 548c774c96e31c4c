"""How devices sum a gradient: over fast links first, then with a codec over slow links.

If links have several speeds, a gradient is first summed over the fast links without a
codec, by a reduce-scatter. Each device of a host then holds one part. Only this part is
encoded and crosses the slow links. If F devices share a slow link, each device encodes
and sends only 1/F of the elements that it would send if the codec summed over all
devices at once (the two hops of ZeRO++, arXiv 2306.10209, with an exact first hop). If
every device needs the whole sum, the parts are gathered over the fast links at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from autopar.cluster.mesh import MeshAxis
from autopar.compression.exchange import Message
from autopar.layouts.layout import Axes, Layout, axes_of

# Bytes of an element on the fast links, where gradients are summed and gathered in
# float32.
WITHIN_BYTES = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class Summation:
    """One way to sum a gradient over devices.

    Attributes:
      axes: mesh axes over which the codec sums. The devices along them are numbered as
        workers, the last axis fastest.
      workers: number of devices along ``axes``.
      local_shape: shape of the array that a device encodes.
      scatter_dim: each worker needs only its own part of the sum, along this dim; None
        if all workers need the whole sum.
      within: mesh axes over which the gradient is summed first, without a codec.
      dim: the dim that the axes of ``within`` split; -1 if there are none.
      keeps: whether the sum stays split over ``within``. If not, it is gathered at the
        end.
      interleaved: whether ``dim`` is split first among the workers and then over
        ``within``, so that each device of ``within`` holds a piece of every worker's
        part.
    """

    axes: Axes
    workers: int
    local_shape: tuple[int, ...]
    scatter_dim: int | None
    within: Axes = ()
    dim: int = -1
    keeps: bool = False
    interleaved: bool = False

    @property
    def scatter(self) -> bool:
        """Whether each worker needs only its own part of the sum."""
        return self.scatter_dim is not None

    @property
    def elements(self) -> int:
        """Number of elements that a device encodes."""
        return math.prod(self.local_shape)


def summations(
    shape: tuple[int, ...], home: Layout, axes: Axes, mesh: Sequence[MeshAxis]
) -> tuple[Summation, ...]:
    """Returns the ways to sum a gradient.

    The first summation of the result sums over all links at once.

    Args:
      shape: shape of the whole gradient; dims in front of the dims of ``home`` are not
        split.
      home: the layout in which the sum is needed.
      axes: the mesh axes over which the gradient is summed.
      mesh: the axes of the mesh.
    """
    outermost = min((mesh[a].level for a in axes), default=0)
    fast = tuple(a for a in axes if mesh[a].level > outermost)
    sizes = [axis.size for axis in mesh]
    flat = summation_of(shape, home, axes, (), sizes)
    assert flat is not None
    layered = summation_of(shape, home, axes, fast, sizes) if fast else None
    return (flat,) if layered is None else (flat, layered)


def summation_of(
    shape: tuple[int, ...], home: Layout, axes: Axes, within: Axes, sizes: Sequence[int]
) -> Summation | None:
    """Returns the way that sums over ``within`` first; None if the layout allows none.

    Args:
      shape: as for `summations`.
      home: as for `summations`.
      axes: as for `summations`.
      within: some of the axes; empty for one sum over all axes.
      sizes: size of each mesh axis.
    """
    home = ((),) * (len(shape) - len(home)) + home
    local = tuple(
        n // math.prod(sizes[a] for a in split if a not in axes)
        for n, split in zip(shape, home, strict=True)
    )
    if not within:
        dim = scattered_dim(home, axes)
        order = axes if dim is None else tuple(a for a in home[dim] if a in axes)
        return Summation(order, _count(order, sizes), local, dim)
    slow = tuple(a for a in axes if a not in within)
    used = set(axes_of(home)) & set(axes)
    if not used:
        return _gather_whole(local, slow, within, sizes)
    if used == set(within):
        return _keep_local(home, local, slow, within, sizes)
    return _scatter_all(home, local, axes, within, sizes)


def scattered_dim(home: Layout, axes: Axes) -> int | None:
    """The dim whose innermost axes are all axes of a sum; None if there is none."""
    if not set(axes) <= axes_of(home):
        return None
    for dim, split in enumerate(home):
        if set(split[-len(axes) :]) == set(axes):
            return dim
    return None


def _gather_whole(
    local: tuple[int, ...], slow: Axes, within: Axes, sizes: Sequence[int]
) -> Summation | None:
    """Returns the way to sum if every device needs the whole sum.

    The largest divisible dim is split until the final gather.
    """
    count = _count(within, sizes)
    fitting = [dim for dim, n in enumerate(local) if n and n % count == 0]
    if not fitting or not slow:
        return None
    dim = max(fitting, key=lambda d: (local[d], -d))
    return Summation(
        slow, _count(slow, sizes), _cut(local, dim, count), None, within, dim
    )  # fmt: skip


def _keep_local(
    home: Layout, local: tuple[int, ...], slow: Axes, within: Axes, sizes: Sequence[int]
) -> Summation | None:
    """Returns the way to sum if the result must be split over the fast links only."""
    dim = scattered_dim(home, within)
    if dim is None or not slow:
        return None
    order = home[dim][-len(within) :]
    part = _cut(local, dim, _count(within, sizes))
    return Summation(slow, _count(slow, sizes), part, None, order, dim, keeps=True)


def _scatter_all(
    home: Layout, local: tuple[int, ...], axes: Axes, within: Axes, sizes: Sequence[int]
) -> Summation | None:
    """The way to sum if the result must be split over all links, along one dim."""
    dim = scattered_dim(home, axes)
    if dim is None or set(within) >= set(axes):
        return None
    split = home[dim][-len(axes) :]
    count = len(within)
    part = _cut(local, dim, _count(within, sizes))
    if set(split[:count]) == set(within):
        fast, slow, interleaved = split[:count], split[count:], False
    elif set(split[-count:]) == set(within) and split == home[dim]:
        fast, slow, interleaved = split[-count:], split[:-count], True
    else:
        return None
    workers = _count(slow, sizes)
    return Summation(slow, workers, part, dim, fast, dim, True, interleaved)


def _count(axes: Axes, sizes: Sequence[int]) -> int:
    return math.prod(sizes[a] for a in axes)


def _cut(shape: tuple[int, ...], dim: int, count: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])


# A mesh axis, by number or by name.
A = TypeVar("A", int, str)

# The `BucketCollective.round` of sums and gathers over the fast links, which come
# before and after all rounds of the codecs.
WITHIN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket(Generic[A]):
    """A group of gradients that are sent together; they have equal buckets.

    Attributes:
      number: number of the plan's bucket.
      axes: mesh axes over which the codecs sum, given by number or by name.
      within: mesh axes over which the gradients are summed first.
    """

    number: int
    axes: tuple[A, ...]
    within: tuple[A, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BucketCollective(Generic[A]):
    """The collective that carries a bucket's messages of one round and kind.

    Attributes:
      bucket: the bucket.
      round: number of the codecs' round of messages, or `WITHIN`.
      kind: as in `autopar.compression.exchange.Message`.
    """

    bucket: Bucket[A]
    round: int
    kind: str

    @property
    def axes(self) -> tuple[A, ...]:
        """The mesh axes over which the collective runs."""
        return self.bucket.within if self.round == WITHIN else self.bucket.axes


def bucket_messages(
    bucket: Bucket[A], rounds: Sequence[Message], within: Sequence[Message]
) -> Iterator[tuple[BucketCollective[A], Message]]:
    """Yields each message of one gradient with the collective that carries it.

    Args:
      bucket: bucket of the gradient.
      rounds: the messages of its codec, one per round.
      within: the messages over the fast links.
    """
    for number, message in enumerate(rounds):
        yield BucketCollective(bucket, number, message.kind), message
    for message in within:
        yield BucketCollective(bucket, WITHIN, message.kind), message
