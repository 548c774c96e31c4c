"""The messages of gradients with codecs, in seconds.

What the codecs of all gradients ask for in one round, over the same devices, is one
collective (`autopar.compression.exchange`): it takes the time of all its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import messages
from autopar.compression.synchronise import NON_FINITE
from autopar.cost.collectives import collective_s
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import Axes
from autopar.layouts.summation import Summation, within_messages

# Of each gradient the devices add up so many float32 sums.
TELEMETRY_BYTES = 4 * (NON_FINITE + 1)

# What messages that travel together have in common: round, kind and mesh axes.
_Round = tuple[tuple[object, ...], str, Axes]


def messages_s(
    pricer: Pricer, taken: Sequence[Summation], codecs: Sequence[str]
) -> float:
    """Seconds of the messages of all gradients, the sums of telemetry among them.

    Args:
      pricer: the mesh and cluster.
      taken: how the devices share the work of each gradient.
      codecs: of each gradient, '' where it is left to the compiler.
    """
    sizes: dict[_Round, float] = {}
    for summation, text in zip(taken, codecs, strict=True):
        if text:
            for key, nbytes in _sent(pricer, summation, parse_codec(text)):
                sizes[key] = sizes.get(key, 0.0) + nbytes
    mesh = pricer.mesh.axes
    return pricer.skew * sum(
        collective_s(kind, nbytes, tuple(mesh[a] for a in axes))
        for (_, kind, axes), nbytes in sizes.items()
    )


def _sent(
    pricer: Pricer, summation: Summation, codec: Codec
) -> Iterator[tuple[_Round, float]]:
    """The messages of one gradient, and their bytes."""
    mesh = pricer.mesh.axes
    sent = messages(
        codec, summation.local_shape, summation.workers, scatter=summation.scatter
    )
    for number, message in enumerate(sent):
        yield (
            (("codec", number, summation.within), message.kind, summation.axes),
            message.nbytes,
        )
    for kind, nbytes in within_messages(summation, mesh):
        yield (("within", summation.axes), kind, summation.within), nbytes
    everywhere = tuple(range(len(mesh)))
    yield (("telemetry",), "all_reduce", everywhere), TELEMETRY_BYTES
