"""Prices of sending gradients by codecs, for every pair of layouts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.compression.codecs.registry import parse_codec
from autopar.cost.codecs.price import codec_price
from autopar.cost.codecs.route import route_of
from autopar.cost.codecs.terms import expected_error
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import Axes, Layout, reshard_steps
from autopar.layouts.summation import Summation, summations


@dataclasses.dataclass(frozen=True, eq=False)
class Prices:
    """The prices of a second on the link and of a unit of squared error.

    Attributes:
      wire_weight: seconds of a step for a second on the link, 0 to 1.
      seconds_per_error: for a unit of squared error, weighted by elements.
      codecs: those to choose from, as text.
      errors: measured relative errors, by parameter and codec; these layouts do
        not know whose gradient they carry, so their mean by codec is used.
      most_error: none of a gradient's may count for more.
      forced: whether gradients are sent by codecs wherever they can be.
    """

    wire_weight: float
    seconds_per_error: float
    codecs: tuple[str, ...]
    errors: Mapping[str, Mapping[str, float]]
    most_error: float = np.inf
    forced: bool = False

    def chosen(self, plain: np.ndarray, coded: np.ndarray) -> np.ndarray:
        """Seconds of what is taken, without codecs or with."""
        if self.forced:
            return np.where(np.isfinite(coded), coded, plain)
        return np.minimum(plain, coded)

    def error_of(self, text: str, shape: tuple[int, ...]) -> float:
        """Expected relative error of a codec."""
        known = [row[text] for row in self.errors.values() if text in row]
        if known:
            return float(np.sqrt(np.mean(np.square(known))))
        return expected_error(parse_codec(text), shape)


def coded_matrix(
    pricer: Pricer,
    prices: Prices,
    starts: Sequence[tuple[Layout, Axes]],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
) -> np.ndarray:
    """Seconds of the best codec for every pair of layouts; inf where none can be used.

    Args:
      pricer: the mesh and cluster.
      prices: what to weigh seconds and errors with.
      starts: layouts of the partial gradient, with the axes it is partial over.
      targets: layouts of the sum.
      shape: of the whole gradient; dims in front of those of the layouts are whole.
    """
    known: dict[tuple[Summation, ...], float] = {}
    mesh = pricer.mesh.axes
    out = np.full((len(starts), len(targets)), np.inf)
    for i, (start, partial) in enumerate(starts):
        if not partial:
            continue
        for j, target in enumerate(targets):
            if not _waits(start, target, partial, pricer.sizes):
                continue
            key = _summations(shape, target, partial, mesh)
            if key not in known:
                known[key] = min(
                    _best(pricer, prices, summation, shape) for summation in key
                )
            out[i, j] = known[key]
    return out


# A GPT of 2 layers on 2x4x4 has 1,193 different ones; an entry takes about 350 bytes:
# 3 MB in all.
_summations = functools.lru_cache(maxsize=1 << 13)(summations)


# The same GPT has 4,834 different ones, of 400 bytes: 7 MB in all.
@functools.lru_cache(maxsize=1 << 14)
def _waits(
    start: Layout, target: Layout, partial: Axes, sizes: tuple[int, ...]
) -> bool:
    """Whether the sum may wait: slices before it, slices and the sum after."""
    stripped = tuple(tuple(a for a in d if a not in partial) for d in target)
    before = reshard_steps(start, stripped, (), "", sizes)
    after = reshard_steps(stripped, target, partial, "sum", sizes)
    free = all(s.kind == "slice" for s in before)
    sums = ("slice", "all_reduce", "reduce_scatter")
    return free and all(s.kind in sums for s in after)


def _best(
    pricer: Pricer, prices: Prices, summation: Summation, shape: tuple[int, ...]
) -> float:
    """Seconds of the best codec for one way to share the work."""
    route = route_of(summation, pricer.mesh.axes)
    best = np.inf
    for text in prices.codecs:
        error = prices.error_of(text, summation.local_shape)
        price = codec_price(pricer, route, text, error)
        if price.refused or price.counted_error > prices.most_error:
            continue
        seconds = (
            prices.wire_weight * price.wire_s
            + price.local_s
            + prices.seconds_per_error * math.prod(shape) * price.counted_error**2
        )
        best = min(best, seconds)
    return best
