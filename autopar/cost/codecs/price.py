"""The price of sending one gradient by one codec, and of the compiler's plain sum.

The choice of codecs, the choice of layouts and the reports all read this price.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import wire_bytes
from autopar.cost.codecs.route import Route
from autopar.cost.codecs.terms import (
    added_s,
    effective_error,
    expected_error,
    local_s,
    wire_s,
)
from autopar.cost.pricer import Pricer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodecPrice:
    """The cost of one way to send a gradient, by itself.

    Attributes:
      codec: as text; '' is the compiler's sum.
      wire_s: seconds that it adds to the messages of the step.
      local_s: seconds of encoding and decoding in a step.
      error: relative error of what is sent, in the L2 norm.
      counted_error: what of it counts against the budget.
      wire_bytes: bytes that one device sends in a step; nan until `with_wire_bytes`.
      refused: why the codec cannot be used, or ''; nothing is sent then.
    """

    codec: str
    wire_s: float = 0.0
    local_s: float = 0.0
    error: float = 0.0
    counted_error: float = 0.0
    wire_bytes: float = math.nan
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Seconds in a step; infinite where the codec is refused."""
        return math.inf if self.refused else self.wire_s + self.local_s


def codec_price(
    pricer: Pricer, route: Route, text: str, error: float | None = None
) -> CodecPrice:
    """Prices a codec for a gradient.

    Args:
      pricer: the mesh and cluster.
      route: the links over which the gradient is sent.
      text: the codec.
      error: its measured relative error; None: `expected_error`.
    """
    codec, shape = parse_codec(text), route.local_shape
    if error is None:
        error = expected_error(codec, shape)
    counted = effective_error(error, feedback=codec.feedback)
    if refused := codec.check(shape, scatter=route.scatter):
        return CodecPrice(
            codec=text, error=error, counted_error=counted, refused=refused
        )
    wire = wire_s(codec, shape, route.workers, route.axes, scatter=route.scatter)
    return CodecPrice(
        codec=text,
        wire_s=pricer.skew(route.axes) * wire
        + pricer.skew(route.within) * within_s(route),
        local_s=local_s(codec, route.elements, pricer.cluster.device),
        error=error,
        counted_error=counted,
    )


def compiler_price(pricer: Pricer, route: Route, itemsize: int) -> CodecPrice:
    """Prices the compiler's sum of a gradient, without a codec.

    Args:
      pricer: the mesh and cluster.
      route: the links over which a codec would send it.
      itemsize: bytes of an element in the program.
    """
    nbytes = float(route.elements * route.devices_within * itemsize)
    return CodecPrice(codec="", wire_s=_plain_s(pricer, route, nbytes))


def with_wire_bytes(price: CodecPrice, route: Route) -> CodecPrice:
    """The price with the bytes that the codec sends; its rounds are run for it."""
    if price.refused:
        return dataclasses.replace(price, wire_bytes=0.0)
    codec, shape = parse_codec(price.codec), route.local_shape
    nbytes = wire_bytes(codec, shape, route.workers, scatter=route.scatter)
    return dataclasses.replace(price, wire_bytes=nbytes)


def within_s(route: Route) -> float:
    """Seconds that a gradient adds to the messages over the fast links."""
    return sum(added_s(m.kind, m.nbytes, route.within) for m in route.within_messages)


def _plain_s(pricer: Pricer, route: Route, nbytes: float) -> float:
    """Seconds that a gradient of so many bytes adds to the compiler's sums."""
    slow, within = route.axes, route.within
    if within and route.keeps and not route.scatter:
        inside = added_s(pricer.runs_as("reduce_scatter"), nbytes, within)
        across = added_s("all_reduce", nbytes / route.devices_within, slow)
        return pricer.skew(within) * inside + pricer.skew(slow) * across
    both = (*slow, *within)
    return pricer.skew(both) * added_s(pricer.runs_as(route.kind), nbytes, both)
