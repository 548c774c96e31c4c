"""Seconds of the collectives that carry the gradients with codecs.

A message is what the codec of one gradient sends in one round. Messages that travel
together are one collective (`autopar.layouts.buckets`): it takes the time of all
their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import Message
from autopar.compression.synchronise import NON_FINITE
from autopar.cost.codecs.route import route_of
from autopar.cost.collectives import collective_s
from autopar.cost.pricer import Pricer
from autopar.layouts.buckets import A, Bucket, BucketCollective, bucket_messages
from autopar.layouts.summation import Summation

# Of each gradient the devices add up so many float32 sums, and in a step that is not
# measured one.
TELEMETRY_BYTES, SQUARES_BYTES = 4 * (NON_FINITE + 1), 4


def collectives_s(
    pricer: Pricer, taken: Sequence[Summation], codecs: Sequence[str]
) -> float:
    """Seconds of the collectives of all gradients in a step that is not measured.

    Telemetry is among them: squared norms, or whole rows (`squares_of`).

    Args:
      pricer: the mesh and cluster.
      taken: how the devices share the work of each gradient.
      codecs: of each gradient, '' where it is left to the compiler.
    """
    mesh = pricer.mesh.axes
    telemetry = _telemetry(len(mesh))
    coded = [(s, text) for s, text in zip(taken, codecs, strict=True) if text]
    sizes: dict[BucketCollective[int], float] = {}
    for summation, text in coded:
        for key, message in _sent(summation, text, mesh):
            sizes[key] = sizes.get(key, 0.0) + message.nbytes
    buckets = [(_bucket(s), s.scatter) for s, _ in coded]
    squares = squares_of(buckets, range(len(mesh)))
    for bucket, _ in buckets:
        key = squares.get(bucket, telemetry)
        more = SQUARES_BYTES if bucket in squares else TELEMETRY_BYTES
        sizes[key] = sizes.get(key, 0.0) + more
    return sum(
        _collective_s(pricer, key, nbytes, tuple(mesh[a] for a in key.axes))
        for key, nbytes in sizes.items()
    )


def squares_of(
    gradients: Iterable[tuple[Bucket[A], bool]], axes: Iterable[A]
) -> dict[Bucket[A], BucketCollective[A]]:
    """The buckets whose squared norms are summed with their first messages.

    Those that all devices of the mesh sum whole. The rows of others are summed over all
    devices in each step (`autopar.compression.synchronise.synchronise`, ``summed``).

    Args:
      gradients: of each its bucket, and whether it is scattered.
      axes: of the mesh.

    Returns:
      For each such bucket the collective that holds the norms.
    """
    given, whole = list(gradients), set(axes)
    parts = {bucket for bucket, scatter in given if scatter}
    return {
        bucket: BucketCollective(bucket, 0, "all_reduce")
        for bucket, _ in given
        if bucket not in parts and set(bucket.axes) == whole
    }


def _bucket(summation: Summation) -> Bucket[int]:
    """Of a gradient in a plan that is being made, which has one bucket number."""
    return Bucket(0, summation.axes, summation.within)


def _collective_s(
    pricer: Pricer, key: BucketCollective[int], nbytes: float, axes: Sequence[MeshAxis]
) -> float:
    return pricer.skew(axes) * collective_s(key.kind, nbytes, axes)


def _sent(
    summation: Summation, text: str, mesh: Sequence[MeshAxis]
) -> Iterator[tuple[BucketCollective[int], Message]]:
    """The messages of one gradient."""
    route = route_of(summation, mesh)
    return bucket_messages(
        _bucket(summation), route.rounds(parse_codec(text)), route.within_messages
    )


def _telemetry(num_axes: int) -> BucketCollective[int]:
    """The sums over all devices, which belong to no bucket of the plan."""
    return BucketCollective(Bucket(-1, tuple(range(num_axes)), ()), 0, "all_reduce")
