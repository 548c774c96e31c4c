"""Seconds to sum gradients with codecs, also for every pair of layouts.

Wire time is the time of the collectives that a codec uses (`Codec.messages`), by the
model of `autopar.cost.collectives`. Local time is the time to encode and decode. It
comes from a profile of the device. Without a profile, local time is the time of the
codec's passes over memory (`Codec.cost`) at the device's memory bandwidth. Messages of
several gradients that travel together are one collective (`autopar.layouts.summation`),
which takes the time of their total bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from autopar.cluster import DeviceSpec
from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.codec import Codec, example_messages
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import Message
from autopar.compression.gradient import effective_error
from autopar.compression.synchronise import NON_FINITE
from autopar.cost.collectives import collective_bytes, collective_s
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import Axes, Layout, reshard_steps
from autopar.layouts.summation import (
    WITHIN_BYTES,
    A,
    Bucket,
    BucketCollective,
    Summation,
    bucket_messages,
    summations,
)
from autopar.plans import GradientDecision


@dataclasses.dataclass(frozen=True, slots=True)
class GradientRoute:
    """The mesh axes over which devices sum one gradient, and the shape that they send.

    Attributes:
      axes: the mesh axes over which a codec sums.
      within: the mesh axes over which the gradient is first summed, without a codec.
      workers: number of devices along ``axes``.
      local_shape: shape of the array that a device encodes.
      scatter: whether each worker needs only its own part of the sum.
      keeps: whether the sum stays split over ``within``; otherwise it is gathered.
    """

    axes: tuple[MeshAxis, ...]
    within: tuple[MeshAxis, ...]
    workers: int
    local_shape: tuple[int, ...]
    scatter: bool
    keeps: bool

    @property
    def elements(self) -> int:
        """Number of elements that a device encodes."""
        return math.prod(self.local_shape)

    @property
    def devices_within(self) -> int:
        """Number of devices along ``within``."""
        return math.prod(axis.size for axis in self.within)

    @property
    def kind(self) -> str:
        """The collective that sums over ``axes`` without a codec."""
        return "reduce_scatter" if self.scatter else "all_reduce"

    def rounds(self, codec: Codec) -> tuple[Message, ...]:
        """The messages of a codec over ``axes``, one message per round."""
        return codec.messages(self.local_shape, self.workers, scatter=self.scatter)

    @property
    def within_messages(self) -> tuple[Message, ...]:
        """The float32 sum over ``within`` before the codec, and the gather after it."""
        if not self.within:
            return ()
        devices = self.devices_within
        nbytes = WITHIN_BYTES * (self.elements * devices)
        kinds = ("reduce_scatter",) if self.keeps else ("reduce_scatter", "all_gather")
        return tuple(
            Message(kind, nbytes, collective_bytes(kind, nbytes, devices))
            for kind in kinds
        )


def route_of(summation: Summation, mesh: Sequence[MeshAxis]) -> GradientRoute:
    """The route of a gradient for one `Summation`.

    Args:
      summation: the mesh axes and the shape with which devices sum the gradient.
      mesh: the axes of the mesh.
    """
    return GradientRoute(
        axes=tuple(mesh[a] for a in summation.axes),
        within=tuple(mesh[a] for a in summation.within),
        workers=summation.workers,
        local_shape=summation.local_shape,
        scatter=summation.scatter,
        keeps=summation.keeps,
    )


def planned_route(
    gradient: GradientDecision, mesh: Sequence[MeshAxis]
) -> GradientRoute:
    """The route that a plan gives a gradient.

    Args:
      gradient: the plan's decision.
      mesh: the axes of the mesh.
    """
    return GradientRoute(
        axes=tuple(axis for axis in mesh if axis.name in gradient.axes),
        within=tuple(axis for axis in mesh if axis.name in gradient.within),
        workers=gradient.workers,
        local_shape=gradient.local_shape,
        scatter=gradient.scatter,
        keeps=gradient.keeps,
    )


# Gradients share messages. The wire seconds of a gradient are those that its bytes add
# to a message of this many bytes, so they include no latency.
BUCKET_BYTES = 4e6

# `Codec.cost` counts passes of CPUs. Accelerators fuse the element-wise work of a codec
# into few kernels. They are assumed to need this fraction of the passes; it was not
# measured.
ACCELERATOR_PASSES = 0.25


def local_s(codec: Codec, shape: tuple[int, ...], device: DeviceSpec) -> float:
    """Seconds to encode and decode a gradient on one device.

    Args:
      codec: the codec.
      shape: shape of the gradient on one device.
      device: the device.
    """
    elements = math.prod(shape)
    measured = _measured_s(codec, shape, device.codec_s_per_element)
    if measured is not None:
        return measured * elements
    passes = codec.cost(shape)
    if device.kind != "cpu":
        passes *= ACCELERATOR_PASSES
    return passes * 8.0 * elements / device.memory_bandwidth_bytes_per_s


@functools.lru_cache(maxsize=1 << 12)
def _measured_s(
    codec: Codec, shape: tuple[int, ...], measured: tuple[tuple[str, float], ...]
) -> float | None:
    """Measured seconds per element; None if the profile has no codec of this name.

    If the profile has this codec only with other parameters, the entry with the nearest
    number of passes is scaled in proportion to the passes.
    """
    own = codec.cost(shape)
    # Entries of other codecs are skipped before they are parsed: a profile may name
    # codecs that this process has not registered.
    found = [(text, s) for text, s in measured if text.partition(":")[0] == codec.name]
    alike = [(parse_codec(text), seconds) for text, seconds in found]
    if not alike:
        return None
    if codec in (c for c, _ in alike):
        return dict(alike)[codec]
    passes = [(c.cost(shape), seconds) for c, seconds in alike]
    near, seconds = min(passes, key=lambda pair: abs(math.log(pair[0] / own)))
    return seconds * own / near


def wire_s(
    codec: Codec,
    shape: tuple[int, ...],
    workers: int,
    axes: Sequence[MeshAxis],
    *,
    scatter: bool,
) -> float:
    """Approximate seconds that a gradient adds to the messages of its bucket.

    A planner needs this time for thousands of shapes. Therefore the messages of one
    example shape are computed, and the messages of all shapes are estimated from them.

    Args:
      codec: the codec.
      shape: shape of the gradient on one device.
      workers: number of devices over which the gradient is summed.
      axes: the mesh axes of these devices.
      scatter: whether each device needs only its own part of the sum.
    """
    return codec.extent(shape) * _rate_s(codec, workers, tuple(axes), scatter)


@functools.lru_cache(maxsize=1 << 14)
def _rate_s(
    codec: Codec, workers: int, axes: tuple[MeshAxis, ...], scatter: bool
) -> float:
    """Seconds that a gradient adds to its messages, per unit of `Codec.extent`."""
    found, extent = example_messages(codec, workers, scatter=scatter)
    return sum(added_s(m.kind, m.nbytes, axes) for m in found) / extent


@functools.lru_cache(maxsize=1 << 14)
def added_s(kind: str, nbytes: float, axes: tuple[MeshAxis, ...]) -> float:
    """Seconds that ``nbytes`` more bytes add to a collective of `BUCKET_BYTES`."""
    whole = collective_s(kind, BUCKET_BYTES + nbytes, axes)
    return whole - collective_s(kind, BUCKET_BYTES, axes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodecPrice:
    """The cost of one codec for one gradient.

    Attributes:
      codec: the codec as text; '' is the compiler's sum without a codec.
      wire_s: seconds that the gradient adds to the messages of the step.
      local_s: seconds to encode and decode in a step.
      error: relative error of the decoded gradient, in the L2 norm.
      counted_error: the part of ``error`` that counts against the error budget
        (`autopar.compression.gradient.effective_error`).
      wire_bytes: bytes that one device sends in a step; nan until `with_wire_bytes`
        computes them.
      refused: why the codec cannot be used for this gradient; '' if it can.
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
        """Wire and local seconds in a step; infinite if the codec is refused."""
        return math.inf if self.refused else self.wire_s + self.local_s


def codec_price(
    pricer: Pricer, route: GradientRoute, text: str, error: float | None = None
) -> CodecPrice:
    """Prices a codec for a gradient.

    Args:
      pricer: the mesh and cluster.
      route: the mesh axes over which the gradient is sent.
      text: the codec as text.
      error: the codec's measured relative error; None for the error that the codec
        itself expects.
    """
    codec, shape = parse_codec(text), route.local_shape
    if error is None:
        error = codec.error(shape)
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
        local_s=local_s(codec, shape, pricer.cluster.device),
        error=error,
        counted_error=counted,
    )


def compiler_price(pricer: Pricer, route: GradientRoute, itemsize: float) -> CodecPrice:
    """Prices the compiler's sum of a gradient, without a codec.

    Args:
      pricer: the mesh and cluster.
      route: the mesh axes over which a codec would send the gradient.
      itemsize: bytes per summed element.
    """
    nbytes = float(route.elements * route.devices_within * itemsize)
    return CodecPrice(codec="", wire_s=_plain_s(pricer, route, nbytes))


def with_wire_bytes(price: CodecPrice, route: GradientRoute) -> CodecPrice:
    """The price with the bytes that the codec sends, computed for all its rounds."""
    if price.refused:
        return dataclasses.replace(price, wire_bytes=0.0)
    codec, shape = parse_codec(price.codec), route.local_shape
    nbytes = codec.wire_bytes(shape, route.workers, scatter=route.scatter)
    return dataclasses.replace(price, wire_bytes=nbytes)


def within_s(route: GradientRoute) -> float:
    """Seconds that a gradient adds to messages over the axes ``within``."""
    return sum(added_s(m.kind, m.nbytes, route.within) for m in route.within_messages)


def _plain_s(pricer: Pricer, route: GradientRoute, nbytes: float) -> float:
    """Seconds that a gradient of ``nbytes`` adds to the compiler's sums."""
    slow, within = route.axes, route.within
    if within and route.keeps and not route.scatter:
        inside = added_s(pricer.runs_as("reduce_scatter"), nbytes, within)
        across = added_s("all_reduce", nbytes / route.devices_within, slow)
        return pricer.skew(within) * inside + pricer.skew(slow) * across
    both = (*slow, *within)
    return pricer.skew(both) * added_s(pricer.runs_as(route.kind), nbytes, both)


# Bytes of statistics that devices sum for each gradient: several float32 numbers in a
# step that measures its gradients, one squared norm in any other step.
TELEMETRY_BYTES, SQUARES_BYTES = 4 * (NON_FINITE + 1), 4


def collectives_s(
    pricer: Pricer, taken: Sequence[Summation], codecs: Sequence[str]
) -> float:
    """Seconds of all gradients' collectives in a step that measures no gradients.

    The collectives also carry statistics of the gradients (`squares_of`): squared norms
    only, or all statistics.

    Args:
      pricer: the mesh and cluster.
      taken: the summation of each gradient.
      codecs: the codec of each gradient; '' where the compiler sums the gradient.
    """
    mesh = pricer.mesh.axes
    telemetry = _telemetry(len(mesh))
    coded = [(s, text) for s, text in zip(taken, codecs, strict=True) if text]
    sizes: dict[BucketCollective[int], float] = {}
    for summation, text in coded:
        for key, message in _messages_of(summation, text, mesh):
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
    """Finds the buckets whose first messages also carry their gradients' squared norms.

    These buckets are those that are all-reduced over all axes of the mesh. The
    statistics of the gradients in all other buckets are summed over all devices in
    every step, in a separate collective (`autopar.compression.synchronise.synchronise`,
    ``summed``).

    Args:
      gradients: for each gradient, its bucket and whether its sum is scattered.
      axes: all axes of the mesh.

    Returns:
      The collective that carries the norms, for each of these buckets.
    """
    given, whole = list(gradients), set(axes)
    parts = {bucket for bucket, scatter in given if scatter}
    return {
        bucket: BucketCollective(bucket, 0, "all_reduce")
        for bucket, _ in given
        if bucket not in parts and set(bucket.axes) == whole
    }


def _bucket(summation: Summation) -> Bucket[int]:
    """The bucket of a gradient as the planner forms it.

    The planner forms one bucket for each set of mesh axes, so the number of the bucket
    is 0.
    """
    return Bucket(0, summation.axes, summation.within)


def _collective_s(
    pricer: Pricer, key: BucketCollective[int], nbytes: float, axes: Sequence[MeshAxis]
) -> float:
    return pricer.skew(axes) * collective_s(key.kind, nbytes, axes)


def _messages_of(
    summation: Summation, text: str, mesh: Sequence[MeshAxis]
) -> Iterator[tuple[BucketCollective[int], Message]]:
    """Yields the messages of one gradient, each with the collective it belongs to."""
    route = route_of(summation, mesh)
    return bucket_messages(
        _bucket(summation), route.rounds(parse_codec(text)), route.within_messages
    )


def _telemetry(num_axes: int) -> BucketCollective[int]:
    """The collective that sums statistics over all devices, outside of all buckets."""
    return BucketCollective(Bucket(-1, tuple(range(num_axes)), ()), 0, "all_reduce")


@dataclasses.dataclass(frozen=True, eq=False)
class Prices:
    """The prices of a second on the wire and of a unit of squared error, in seconds.

    Attributes:
      wire_weight: seconds by which a second on the wire lengthens the step, 0 to 1.
      seconds_per_error: seconds charged per unit of squared error and per element.
      codecs: the codecs to choose from, as text.
      errors: measured relative errors, by parameter and codec. When layouts are chosen,
        the parameter of a gradient is not known. Then the root mean square over all
        parameters is used for each codec.
      most_error: the largest error of a gradient that counts against the budget.
      forced: whether gradients are sent with codecs wherever a codec can be used.
    """

    wire_weight: float
    seconds_per_error: float
    codecs: tuple[str, ...]
    errors: Mapping[str, Mapping[str, float]]
    most_error: float = np.inf
    forced: bool = False

    def choose_seconds(self, plain: np.ndarray, coded: np.ndarray) -> np.ndarray:
        """Seconds of the alternative in use: without codecs (plain) or with (coded)."""
        if self.forced:
            return np.where(np.isfinite(coded), coded, plain)
        return np.minimum(plain, coded)

    def error_of(self, text: str, shape: tuple[int, ...]) -> float:
        """Expected relative error of a codec."""
        known = [row[text] for row in self.errors.values() if text in row]
        if known:
            return float(np.sqrt(np.mean(np.square(known))))
        return parse_codec(text).error(shape)


def coded_matrix(
    pricer: Pricer,
    prices: Prices,
    starts: Sequence[tuple[Layout, Axes]],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
) -> np.ndarray:
    """Seconds of the best codec for each pair of layouts; inf if none can be used.

    Args:
      pricer: the mesh and cluster.
      prices: the prices of seconds and of errors.
      starts: layouts of the partial gradient, with the mesh axes over which it is
        partial.
      targets: layouts of the sum.
      shape: shape of the unsharded gradient. Leading dims that the layouts do not have
        are unsharded.
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


# For a GPT of 2 layers on a mesh of 2x4x4, this cache gets 1,193 different entries. An
# entry takes about 350 bytes, so a full cache takes 3 MB.
_summations = functools.lru_cache(maxsize=1 << 13)(summations)


# A GPT of 2 layers on a mesh of 2x4x4 has 4,834 different entries. An entry takes about
# 400 bytes, so a full cache takes 7 MB.
@functools.lru_cache(maxsize=1 << 14)
def _waits(
    start: Layout, target: Layout, partial: Axes, sizes: tuple[int, ...]
) -> bool:
    """Whether a codec can replace the sum: all other resharding steps are slices."""
    stripped = tuple(tuple(a for a in d if a not in partial) for d in target)
    before = reshard_steps(start, stripped, (), "", sizes)
    after = reshard_steps(stripped, target, partial, "sum", sizes)
    free = all(s.kind == "slice" for s in before)
    sums = ("slice", "all_reduce", "reduce_scatter")
    return free and all(s.kind in sums for s in after)


def _best(
    pricer: Pricer, prices: Prices, summation: Summation, shape: tuple[int, ...]
) -> float:
    """Seconds of the best codec for one `Summation`, with the price of its error."""
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
