"""Seconds of the collectives that carry the gradients with codecs.

A message is what the codec of one gradient sends in one round. Messages that travel
together are one collective (`autopar.layouts.buckets`): it takes the time of all
their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import Message
from autopar.compression.synchronise import NON_FINITE
from autopar.cost.codecs.route import route_of
from autopar.cost.collectives import collective_s
from autopar.cost.pricer import Pricer
from autopar.layouts.buckets import Bucket, BucketCollective, bucket_messages
from autopar.layouts.summation import Summation

# Of each gradient the devices add up so many float32 sums.
TELEMETRY_BYTES = 4 * (NON_FINITE + 1)


def collectives_s(
    pricer: Pricer, taken: Sequence[Summation], codecs: Sequence[str]
) -> float:
    """Seconds of the collectives of all gradients, the sums of telemetry among them.

    Args:
      pricer: the mesh and cluster.
      taken: how the devices share the work of each gradient.
      codecs: of each gradient, '' where it is left to the compiler.
    """
    mesh = pricer.mesh.axes
    telemetry = _telemetry(len(mesh))
    sizes: dict[BucketCollective[int], float] = {}
    for summation, text in zip(taken, codecs, strict=True):
        if text:
            for key, message in _sent(summation, text, mesh):
                sizes[key] = sizes.get(key, 0.0) + message.nbytes
            sizes[telemetry] = sizes.get(telemetry, 0.0) + TELEMETRY_BYTES
    return sum(
        _collective_s(pricer, key, nbytes, tuple(mesh[a] for a in key.axes))
        for key, nbytes in sizes.items()
    )


def _collective_s(
    pricer: Pricer, key: BucketCollective[int], nbytes: float, axes: Sequence[MeshAxis]
) -> float:
    return pricer.skew(axes) * collective_s(key.kind, nbytes, axes)


def _sent(
    summation: Summation, text: str, mesh: Sequence[MeshAxis]
) -> Iterator[tuple[BucketCollective[int], Message]]:
    """The messages of one gradient; a plan that is being made has one bucket number."""
    route = route_of(summation, mesh)
    bucket = Bucket(0, summation.axes, summation.within)
    return bucket_messages(
        bucket, route.rounds(parse_codec(text)), route.within_messages
    )


def _telemetry(num_axes: int) -> BucketCollective[int]:
    """The sums over all devices, which belong to no bucket of the plan."""
    return BucketCollective(Bucket(-1, tuple(range(num_axes)), ()), 0, "all_reduce")
