"""Prices of sending gradients by codecs, for every pair of layouts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cluster.mesh import MeshAxis
from autopar.compression.codec import Codec
from autopar.compression.exchange import messages
from autopar.compression.registry import parse_codec
from autopar.cost.compression import (
    added_s,
    effective_error,
    local_s,
    relative_error,
    wire_s,
)
from autopar.planner.layout import Axes, Layout, axes_of, reshard_steps
from autopar.planner.price import CPU_SKEW, Pricer


@dataclasses.dataclass(frozen=True, eq=False)
class Prices:
    """What a second on the link and a unit of squared error are worth.

    Attributes:
      wire_weight: seconds of a step for a second on the link, 0 to 1.
      seconds_per_error: for a unit of squared error, weighted by elements.
      codecs: those to choose from, as text.
      errors: measured relative errors, by parameter and codec; these layouts do
        not know whose gradient they carry, so their mean by codec is used.
    """

    wire_weight: float
    seconds_per_error: float
    codecs: tuple[str, ...]
    errors: Mapping[str, Mapping[str, float]]

    def error_of(self, text: str, shape: tuple[int, ...]) -> float:
        """Expected relative error of a codec."""
        known = [row[text] for row in self.errors.values() if text in row]
        if known:
            return float(np.sqrt(np.mean(np.square(known))))
        return relative_error(parse_codec(text), shape)


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
    known: dict[tuple[Axes, tuple[int, ...], bool], float] = {}
    out = np.full((len(starts), len(targets)), np.inf)
    for i, (start, partial) in enumerate(starts):
        if not partial:
            continue
        for j, target in enumerate(targets):
            if not _waits(start, target, partial, pricer.sizes):
                continue
            stripped = tuple(tuple(a for a in d if a not in partial) for d in target)
            local = _local(shape, stripped, pricer.sizes)
            scatter = any(set(partial) == set(d[-len(partial) :]) for d in target)
            key = (partial, local, scatter)
            if key not in known:
                known[key] = _best(pricer, prices, partial, local, shape, scatter)
            out[i, j] = known[key]
    return out


@functools.lru_cache(maxsize=1 << 18)
def _waits(
    start: Layout, target: Layout, partial: Axes, sizes: tuple[int, ...]
) -> bool:
    """Whether the sum may wait: slices before it, slices and the sum after."""
    stripped = tuple(tuple(a for a in d if a not in partial) for d in target)
    before = reshard_steps(start, stripped, (), "", sizes)
    after = reshard_steps(stripped, target, partial, "sum", sizes)
    free = all(s.kind == "slice" for s in before)
    whole = not axes_of(target) & set(partial)
    scattered = any(set(partial) == set(d[-len(partial) :]) for d in target)
    sums = ("slice", "all_reduce", "reduce_scatter")
    return free and (whole or scattered) and all(s.kind in sums for s in after)


def _local(
    shape: tuple[int, ...], layout: Layout, sizes: Sequence[int]
) -> tuple[int, ...]:
    front = len(shape) - len(layout)
    splits = [1] * front + [math.prod(sizes[a] for a in d) for d in layout]
    return tuple(n // k for n, k in zip(shape, splits, strict=True))


# Bytes of most codecs grow with the elements, whatever their shape: they are counted
# once, for this shape.
_EXAMPLE = (256, 256)


def _wire_s(
    codec: Codec,
    local: tuple[int, ...],
    workers: int,
    axes: tuple[MeshAxis, ...],
    scatter: bool,
) -> float:
    if codec.name == "powersgd" or math.prod(_EXAMPLE) % workers:
        return wire_s(codec, local, workers, axes, scatter=scatter)
    scale = math.prod(local) / math.prod(_EXAMPLE)
    found = messages(codec, _EXAMPLE, workers, scatter=scatter)
    return sum(added_s(m.kind, scale * m.nbytes, axes) for m in found)


def _best(
    pricer: Pricer,
    prices: Prices,
    partial: Axes,
    local: tuple[int, ...],
    shape: tuple[int, ...],
    scatter: bool,
) -> float:
    axes = tuple(pricer.mesh.axes[a] for a in partial)
    workers = pricer.group(partial)
    skew = CPU_SKEW if pricer.cluster.device.kind == "cpu" else 1.0
    best = np.inf
    for text in prices.codecs:
        codec = parse_codec(text)
        if codec.check(local, scatter=scatter):
            continue
        error = effective_error(prices.error_of(text, local), feedback=codec.feedback)
        seconds = (
            prices.wire_weight * skew * _wire_s(codec, local, workers, axes, scatter)
            + local_s(codec, math.prod(local), pricer.cluster.device)
            + prices.seconds_per_error * math.prod(shape) * error**2
        )
        best = min(best, seconds)
    return best
