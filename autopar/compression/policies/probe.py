"""Measures the errors of codecs on samples of gradients, without sending anything.

The telemetry of a step contains only the error of the codec in use. For steps of
`autopar.parallelize`, `autopar.runtime.gradients.probing` measures the errors of other
codecs. This module is for other training loops. `Probe` simulates a single worker that
encodes samples of the gradients. This worker sends the same values as one of many
workers would.

>>> probe = Probe(workers=4)
>>> found = probe.measure({"w": np.ones((64, 64), np.float32)}, ("powersgd", "int8"))
>>> [choice.text for choice in found["w"].choices]
['powersgd', 'int8']
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.codec import Codec, sample_encoder
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.policies.policy import MIN_ELEMENTS, Choice, MeasuredErrors
from autopar_errors import InputError

WARM_UP = 5
"""Number of times that a codec with a state encodes a sample before its error is
measured: the number of power iterations in L-GreCo's published code for PowerSGD (arXiv
2210.17357).
"""

DIGITS = 6
"""Significant digits of an error, so few that processors which round differently agree.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Measures errors of codecs on samples of gradients.

    Attributes:
      workers: number of workers over which the gradients are summed.
      scattered: names of the gradients whose sum is scattered over the workers.
    """

    workers: int
    scattered: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Checks the number of workers."""
        if self.workers < 2:
            raise InputError(
                f"Probe: with {self.workers} workers nothing is sent; needs 2 or more."
            )

    def measure(
        self, samples: Mapping[str, np.ndarray], texts: Sequence[str]
    ) -> dict[str, MeasuredErrors]:
        """Measures errors, for `Observation.measured`.

        Args:
          samples: name of a gradient -> a sample of the partial gradient on one device
            plus its residual, from one step or as a mean over several steps. The sample
            must be the same on all processes. Vectors, and samples with fewer than
            `MIN_ELEMENTS` elements, are ignored.
          texts: the codecs, as in
            `autopar.compression.policies.policy.ProbingPolicy.probes`.

        Raises:
          InputError: a sample holds numbers that are not finite.
        """
        _check_samples(samples)
        return {
            name: MeasuredErrors(
                elements=sample.size,
                local_elements=sample.size,
                norm=float(np.linalg.norm(sample.astype(np.float64))),
                choices=self._choices(name, sample, texts),
            )
            for name, sample in sorted(samples.items())
            if sample.size >= MIN_ELEMENTS and sample.ndim >= 2
        }

    def _choices(
        self, name: str, sample: np.ndarray, texts: Sequence[str]
    ) -> tuple[Choice, ...]:
        """The codecs that can be used for a gradient, with their errors."""
        scatter = name in self.scattered
        found: list[Choice] = []
        for text in texts:
            codec = parse_codec(text)
            if codec.check(sample.shape, scatter=scatter):
                continue
            messages = codec.messages(sample.shape, self.workers, scatter=scatter)
            nbytes = sum(message.sent for message in messages)
            error = relative_error(codec, sample)
            found.append(Choice(text, error, nbytes, len(messages)))
        return tuple(found)


def relative_error(codec: Codec, sample: np.ndarray, seed: int = 0) -> float:
    """The relative L2 error of a codec on a sample, rounded; 0 for a sample of zeros.

    If the codec has a state, it first encodes the sample `WARM_UP` times.

    Raises:
      InputError: the sample is not finite.
    """
    norm = float(np.linalg.norm(sample.astype(np.float64)))
    if not math.isfinite(norm):
        raise InputError(
            f"relative_error: a sample of shape {sample.shape} holds numbers that are "
            "not finite; take it from a step whose gradients are."
        )
    if norm == 0.0:
        return 0.0
    begin, encode = sample_encoder(codec, sample.shape, seed)
    values, state = jnp.asarray(sample, jnp.float32), begin()
    warm_up = WARM_UP if jax.tree.leaves(state) else 0
    error = None
    for step in range(warm_up + 1):
        error, _, state = encode(values, state, jnp.int32(step))
    return round_error(float(np.asarray(error)) / norm)


def round_error(error: float) -> float:
    """Rounds an error to `DIGITS` digits."""
    return float(f"{error:.{DIGITS}g}")


def powersgd_family(
    rank: int = 4, beta: float = 2.0, gamma: float = 0.5
) -> tuple[str, ...]:
    """PowerSGD with all ranks from ``floor(gamma rank)`` to ``ceil(beta rank)``, as in
    L-GreCo.

    >>> powersgd_family(2)
    ('powersgd:rank=1', 'powersgd:rank=2', 'powersgd:rank=3', 'powersgd')
    """
    ranks = range(max(1, math.floor(gamma * rank)), math.ceil(beta * rank) + 1)
    return tuple("powersgd" if r == 4 else f"powersgd:rank={r}" for r in ranks)


def topk_family(
    ratios: Iterable[float] = (0.001, 0.003, 0.01, 0.03, 0.1),
) -> tuple[str, ...]:
    """Top-k codecs that send these fractions of the elements."""
    return tuple("topk" if r == 0.01 else f"topk:ratio={r!r}" for r in ratios)


QUANTISERS = ("sign", "int4", "int8")
"""The family of 1, 4 and 8 bits."""


def _check_samples(samples: Mapping[str, np.ndarray]) -> None:
    for name, sample in samples.items():
        if not np.isfinite(sample).all():
            raise InputError(
                f"Probe: the sample of gradient {name!r} holds numbers that are not "
                "finite; take it from a step whose gradients are."
            )
