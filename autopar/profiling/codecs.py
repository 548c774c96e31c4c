"""Seconds that codecs of gradients take on a device, links aside.

Each codec does all that a worker does for one gradient in a step: it encodes, decodes
what the others sent, feeds its error back and reports. What it would send it receives
itself. All devices work at once, because simulated ones share what they compute with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.blocks import WITH_BARRIERS, add_barrier
from autopar.compression.codecs.registry import (
    codec_class,
    codec_names,
    format_codec,
    parse_codec,
)
from autopar.compression.feedback import Feedback
from autopar.compression.gradient import Gradient, init_state
from autopar.compression.synchronise import (
    NON_FINITE,
    restore_unless_finite,
    synchronise,
)
from autopar.profiling import kernels

# Workers that a gradient is divided among.
WORKERS = 4
# A codec with other parameters is timed where its work differs from that of those that
# are timed by this factor; others are taken in proportion
# (`autopar.cost.codecs.local_s`).
_UNLIKE = 1.25


def timed_codecs(elements: int) -> tuple[str, ...]:
    """The codecs to time: each registered one, by its default and other parameters.

    Args:
      elements: of the gradient that is timed.
    """
    shape = (math.isqrt(elements),) * 2
    out: list[str] = []
    for name in codec_names():
        cls = codec_class(name)
        known: list[float] = []
        for codec in (cls(), *cls.choices()):
            cost = codec.cost(shape)
            if all(max(cost, c) >= _UNLIKE * min(cost, c) for c in known):
                known.append(cost)
                out.append(format_codec(codec))
    return tuple(out)


@dataclasses.dataclass(frozen=True, slots=True)
class Loopback:
    """`exchange.WorkerLinks` on which every worker sends what this one sends."""

    workers: int = WORKERS

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        """Each row comes back."""
        return add_barrier(payload)

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """Everybody sends the same."""
        shape = (self.workers, *payload.shape)
        return add_barrier(jnp.broadcast_to(payload, shape))

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """The sum of equal parts."""
        return add_barrier(self.workers * values)

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        """This worker's row of the sum."""
        return add_barrier(self.workers * values[0])


def _values(elements: int) -> np.ndarray:
    """A square matrix of heavy-tailed values, as gradients have, float32."""
    side = math.isqrt(elements)
    random = np.random.default_rng(0)
    return random.standard_t(4.0, (side, side)).astype(np.float32)


def codec(devices: Sequence[Any], text: str, elements: int) -> kernels.TimedLoop:
    """A gradient of so many elements through a codec a trip, on every device."""
    parsed, given = parse_codec(text), _values(elements)
    kind = "residual" if parsed.feedback else "none"
    gradient = Gradient("g", given.shape, parsed, Feedback(kind=kind))

    def body(value: Any) -> Any:
        partial, state, _ = value
        # As in most steps: never, which the compiler does not know.
        measured = jnp.isnan(partial[0, 0])
        totals, after, sums = synchronise(
            [gradient],
            [partial],
            [state],
            Loopback(),
            jnp.int32(0),
            jnp.int32(1),
            measured=measured,
        )
        finite = jnp.all(sums[:, NON_FINITE] == 0)
        (kept,) = restore_unless_finite([state], after, finite)
        return _touch(partial, totals[0]), kept, totals[0]

    def make() -> Any:
        state = jax.tree.map(np.asarray, init_state(gradient, WORKERS))
        return given, state, np.zeros_like(given)

    return kernels.loop(
        f"codec {text}", devices, 1, body, make, compiler_options=WITH_BARRIERS
    )


def plain(devices: Sequence[Any], elements: int) -> kernels.TimedLoop:
    """The pass that a sum without a codec takes too: it is read and written once."""
    given = _values(elements)

    def body(value: Any) -> Any:
        partial, _ = value
        total = add_barrier(WORKERS * partial)
        return _touch(partial, total), total

    def make() -> Any:
        return given, np.zeros_like(given)

    return kernels.loop(
        "no codec", devices, 1, body, make, compiler_options=WITH_BARRIERS
    )


def _touch(partial: jax.Array, total: jax.Array) -> jax.Array:
    """The partial with one other element, so that no trip is like the one before."""
    return partial.at[0, 0].set(0.5 * total[0, 0])


def timed_elements(elements: int) -> int:
    """Elements of the square gradient that is timed for so many."""
    return math.isqrt(elements) ** 2
