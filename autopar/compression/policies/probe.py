"""What codecs would lose of a gradient, found by encoding a sample of it.

The telemetry of a step tells the error of the codec in use. That of other codecs is
measured on samples of the gradients, each with a single simulated worker: its
``sent`` is what any worker of many would have contributed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codec import Codec, Context, Reduced, Rounds
from autopar.compression.exchange import chunk_elements, exchange, wire_cost
from autopar.compression.fallback import Alone
from autopar.compression.registry import parse_codec

WARM_UP = 5
"""Encodings of a sample by a codec with a state before its error counts: the power
iterations that L-GreCo's published code (arXiv 2210.17357) measures PowerSGD with."""

DIGITS = 6
"""Significant digits of an error: processors that round differently still agree."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One codec for one gradient.

    Attributes:
      text: the codec.
      error: relative L2 error of the sample.
      wire_bytes: that a worker sends in a step.
      rounds: of communication in a step.
    """

    text: str
    error: float
    wire_bytes: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Under which layout gradients are summed.

    Attributes:
      workers: over which they are.
      scattered: names of those of which a worker gets only its part.
    """

    workers: int
    scattered: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Checks the number of workers."""
        if self.workers < 2:
            raise ValueError(
                f"Probe: with {self.workers} workers nothing is sent; needs 2 or more."
            )

    def choices(
        self, name: str, sample: np.ndarray, texts: Sequence[str]
    ) -> tuple[Choice, ...]:
        """The codecs that can be used for a gradient, with their errors.

        Args:
          name: of the gradient.
          sample: of the partial gradient on one device.
          texts: codecs.
        """
        scatter = name in self.scattered
        found: list[Choice] = []
        for text in texts:
            codec = parse_codec(text)
            if codec.check(sample.shape, scatter=scatter):
                continue
            nbytes, rounds = wire_cost(
                codec, sample.shape, self.workers, scatter=scatter
            )
            error = relative_error(codec, sample)
            found.append(Choice(text, error, nbytes, rounds))
        return tuple(found)


def relative_error(codec: Codec, sample: np.ndarray, seed: int = 0) -> float:
    """What is lost of a sample, in the L2 norm, to `DIGITS` digits; 0 of zeros.

    A codec with a state encodes the sample `WARM_UP` times before.

    Raises:
      ValueError: the sample is not finite.
    """
    norm = float(np.linalg.norm(sample.astype(np.float64)))
    if not math.isfinite(norm):
        raise ValueError(
            f"relative_error: a sample of shape {sample.shape} holds numbers that are "
            "not finite; take it from a step whose gradients are."
        )
    if norm == 0.0:
        return 0.0
    begin, encode = _encoder(codec, sample.shape, seed)
    values, state = jnp.asarray(sample, jnp.float32), begin()
    warm_up = WARM_UP if jax.tree.leaves(state) else 0
    error = None
    for step in range(warm_up + 1):
        error, state = encode(values, state, jnp.int32(step))
    return float(f"{float(np.asarray(error)) / norm:.{DIGITS}g}")


def powersgd_family(
    rank: int = 4, beta: float = 2.0, gamma: float = 0.5
) -> tuple[str, ...]:
    """All ranks from ``floor(gamma rank)`` to ``ceil(beta rank)``, as in L-GreCo.

    >>> powersgd_family(2)
    ('powersgd:rank=1', 'powersgd:rank=2', 'powersgd:rank=3', 'powersgd')
    """
    ranks = range(max(1, math.floor(gamma * rank)), math.ceil(beta * rank) + 1)
    return tuple("powersgd" if r == 4 else f"powersgd:rank={r}" for r in ranks)


def topk_family(
    ratios: Iterable[float] = (0.001, 0.003, 0.01, 0.03, 0.1),
) -> tuple[str, ...]:
    """Top-k at some shares of the elements."""
    return tuple("topk" if r == 0.01 else f"topk:ratio={r!r}" for r in ratios)


QUANTISERS = ("sign", "int4", "int8")
"""The family of 1, 4 and 8 bits."""


@functools.lru_cache(maxsize=1024)
def _encoder(codec: Codec, shape: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    """The state before the first step, and a compiled step: L2 error and state."""
    size = math.prod(shape)
    chunk = chunk_elements(codec, size, 1, scatter=False)

    def encode(values: jax.Array, state: Any, step: jax.Array) -> Any:
        chunks = jnp.pad(values.reshape(-1), (0, chunk - size)).reshape(1, chunk)
        context = Context(1, jnp.int32(0), step, seed, shape, size, False)
        rounds: Rounds = codec.reduce(chunks, state, context)
        reduced: Reduced = exchange([rounds], Alone(1))[0]
        return jnp.linalg.norm(chunks - reduced.sent), reduced.state

    return lambda: codec.init(shape, chunk, 1), jax.jit(encode)


def check_samples(samples: Mapping[str, np.ndarray], where: str) -> None:
    """Raises ValueError unless all samples hold finite numbers."""
    for name, sample in samples.items():
        if not np.isfinite(sample).all():
            raise ValueError(
                f"{where}: the sample of gradient {name!r} holds numbers that are not "
                "finite; take it from a step whose gradients are."
            )
