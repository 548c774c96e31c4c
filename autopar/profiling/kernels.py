"""Programs that are timed to profile a machine.

Each program repeats one body in a loop whose trip count is an argument, on all devices
at the same time. The time of a trip is the slope between a short and a long run, so
that the time to start a program cancels. All devices work at the same time because
devices may share hardware: links, and, for devices simulated on a CPU, the cores.

This module also times gradient codecs on a device, without links.

Each codec does all the work of one worker for one gradient in a step: it encodes,
decodes received messages, applies error feedback and computes the report. The worker
receives its own messages. All devices work at the same time, because simulated devices
share the cores.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.compression.codecs.blocks import WITH_BARRIERS, add_barrier
from autopar.compression.codecs.registry import (
    codec_class,
    codec_names,
    format_codec,
    parse_codec,
)
from autopar.compression.gradient import Feedback, Gradient, init_state
from autopar.compression.synchronise import (
    NON_FINITE,
    restore_unless_finite,
    synchronise,
)
from autopar.profiling import transfers

Body = Callable[[Any], Any]

# The short run is one trip, which touches every memory page; the long run takes about
# this many seconds.
LONG_RUN_S = 0.02
MAX_TRIPS = 1 << 17
# From this time of a trip on, in seconds, the time to start a program is negligible.
SLOW_S = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedLoop:
    """A compiled loop; `run(trips)` starts the loop and waits for its end."""

    name: str
    run: Callable[[int], None]


def _mesh(devices: Sequence[Any], group_size: int) -> Mesh:
    """A mesh of groups of neighbours; the axis "member" is within a group."""
    grid = np.array(devices).reshape(-1, group_size)
    return Mesh(grid, ("group", "member"), axis_types=(AxisType.Auto,) * 2)


def loop(
    name: str,
    devices: Sequence[Any],
    group_size: int,
    body: Body,
    make: Callable[[], Any],
    compiler_options: Mapping[str, str] | None = None,
) -> TimedLoop:
    """Compiles a loop over `body` that starts from `make()` on every device.

    `make` returns the NumPy value, or tree of values, of one device; `body` maps the
    device's value to one of the same shape. The devices may belong to several
    processes. In this case all of these processes must call this function.
    """
    mesh = _mesh(devices, group_size)
    spec = PartitionSpec(("group", "member"))

    def repeat(value: Any, trips: jax.Array) -> Any:
        local = jax.tree.map(lambda x: x[0], value)
        last = jax.lax.fori_loop(0, trips, lambda _, v: body(v), local)
        return jax.tree.map(lambda x: x[None], last)

    mapped = jax.shard_map(
        repeat,
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    sharding = NamedSharding(mesh, spec)
    value = jax.tree.map(lambda x: _on_each(x, sharding, len(devices)), make())
    lowered = jax.jit(mapped).lower(value, jnp.int32(1))
    compiled = lowered.compile(compiler_options=dict(compiler_options or {}))

    def run(trips: int) -> None:
        jax.block_until_ready(compiled(value, jnp.int32(trips)))

    return TimedLoop(name=name, run=run)


def _on_each(part: np.ndarray, sharding: NamedSharding, count: int) -> jax.Array:
    """An array of `count` equal shards, each with this content."""
    return jax.make_array_from_callback(
        (count, *part.shape), sharding, lambda _: part[None]
    )


def _timed_s(program: TimedLoop, trips: int) -> float:
    transfers.wait_for_all()
    start = time.perf_counter()
    program.run(trips)
    return time.perf_counter() - start


def _extra_s(program: TimedLoop, trips: int) -> float:
    """The time of `trips` + 1 trips minus the time of one trip."""
    program.run(1)  # untimed: brings back to the caches what other programs evicted
    short_s = _timed_s(program, 1)
    return _timed_s(program, 1 + trips) - short_s


def _trip_s(program: TimedLoop, trips: int) -> float:
    """Seconds of one trip; for a slow program, which has 0 `trips`, the seconds of a
    whole run.
    """
    return _extra_s(program, trips) / trips if trips else _timed_s(program, 1)


def _least_extra_s(program: TimedLoop, trips: int) -> float:
    """As `_extra_s`, from the shortest of three runs of each kind.

    A pause of the machine can only lengthen a run. With the shortest runs, a pause
    neither lengthens the long run nor shortens the difference by lengthening the short
    run.
    """
    program.run(1)
    short_s = min(_timed_s(program, 1) for _ in range(3))
    return min(_timed_s(program, 1 + trips) for _ in range(3)) - short_s


def _long_trips(program: TimedLoop) -> int:
    """The number of trips that takes about LONG_RUN_S, found by trying; 0 if a single
    trip is very slow.
    """
    if transfers.agree_on(int(_extra_s(program, 1) > SLOW_S)):
        return 0
    trips, extra_s = 1, 0.0
    while transfers.agree_on(int(extra_s < LONG_RUN_S / 8 and trips < MAX_TRIPS)):
        trips *= 4
        extra_s = _least_extra_s(program, trips)
    if extra_s > 0:
        trips = max(2, min(MAX_TRIPS, round(trips * LONG_RUN_S / extra_s)))
    return transfers.agree_on(trips)


def trip_times_s(programs: Sequence[TimedLoop], rounds: int) -> list[float]:
    """Median time of one trip of each program, over `rounds` alternating rounds.

    If there are several processes, all must call this function, and the time of the
    slowest process is returned.
    """
    trips = [_long_trips(program) for program in programs]
    found: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for program, count, slopes in zip(programs, trips, found, strict=True):
            slopes.append(_trip_s(program, count))
    return transfers.slowest_s([_typical(slopes) for slopes in found])


def _typical(slopes: Sequence[float]) -> float:
    """The median, but at least 0, because noise may make a slope negative."""
    median = statistics.median(slopes)
    return median if median > 0 else max(*slopes, 1e-9)


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    """Random values around 1 / sqrt(size), so that repeated products stay bounded.

    The values are not zeros, because accelerators need less power for zeros and have a
    higher clock.
    """
    generator = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.integer):
        return generator.integers(-3, 4, size=shape).astype(dtype)
    values = generator.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(jnp.dtype(dtype))


def matmul(devices: Sequence[Any], dtype: str, size: int) -> TimedLoop:
    """A product of two square matrices per trip: ``2 size^3`` FLOPs per device."""
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else None

    def body(value: Any) -> Any:
        x, w = value
        product = jax.lax.dot(x, w, preferred_element_type=wide)
        return product.astype(x.dtype), w

    def make() -> Any:
        return _random((size, size), dtype), _random((size, size), dtype)

    return loop(f"matmul {dtype} {size}", devices, 1, body, make)


STREAM_ARRAYS = 3


def stream(devices: Sequence[Any], nbytes: int) -> TimedLoop:
    """Reads two arrays and writes one array per trip: traffic of STREAM_ARRAYS *
    `nbytes`.
    """

    def body(value: Any) -> Any:
        x, y = value
        return x, x * 0.5 + y * 0.5

    def make() -> Any:
        return np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)

    return loop("stream", devices, 1, body, make)


VECTOR_SIZE = 1 << 16
VECTOR_STEPS = 64


def vector(devices: Sequence[Any]) -> TimedLoop:
    """VECTOR_STEPS multiply-adds on each of VECTOR_SIZE elements per trip."""

    def body(x: Any) -> Any:
        y = x
        for _ in range(VECTOR_STEPS):
            y = y * x + 0.5
        return y * 1e-3

    return loop(
        "vector", devices, 1, body, lambda: np.full(VECTOR_SIZE, 0.1, np.float32)
    )


KERNELS = 16


def tiny_products(devices: Sequence[Any]) -> TimedLoop:
    """KERNELS tiny matrix products per trip, which compilers do not fuse."""

    def body(x: Any) -> Any:
        for _ in range(KERNELS):
            x = x @ x
        return x

    return loop("kernels", devices, 1, body, lambda: np.eye(8, dtype=np.float32))


def _collective(kind: str, group_size: int) -> Body:
    neighbours = [(i, (i + 1) % group_size) for i in range(group_size)]
    lax = jax.lax
    bodies: dict[str, Body] = {
        "all_reduce": lambda x: lax.psum(x, "member"),
        "all_gather": lambda x: lax.all_gather(x, "member", tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, "member", tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "member", 0, 0, tiled=True),
        "collective_permute": lambda x: lax.ppermute(x, "member", neighbours),
    }
    return bodies[kind]


def local_elements(kind: str, group_size: int, nbytes: int) -> int:
    """float32 elements of a device's operand for a collective of this size."""
    share = group_size if kind == "all_gather" else 1
    return max(1, nbytes // 4 // share // group_size) * group_size


def collective(
    devices: Sequence[Any], kind: str, group_size: int, nbytes: int
) -> TimedLoop:
    """One collective of `nbytes` per trip in every group of `group_size` devices."""
    start = _collective(kind, group_size)

    def body(x: Any) -> Any:
        # One element of the result is an input of the next trip, so that each trip
        # waits for the trip before.
        return x.at[0].set(start(x)[0] * 0.5)

    elements = local_elements(kind, group_size, nbytes)
    name = f"{kind} of {group_size}, {nbytes / 2**20:.3g} MiB"
    return loop(name, devices, group_size, body, lambda: np.ones(elements, np.float32))


def matmul_then_reduce(devices: Sequence[Any], size: int) -> TimedLoop:
    """A product and an all-reduce of its result over all devices, per trip."""
    count = len(devices)

    def body(value: Any) -> Any:
        x, w = value
        return jax.lax.psum(x @ w, "member") / count, w

    def make() -> Any:
        return _random((size, size), "float32"), _random((size, size), "float32")

    return loop(f"matmul and all_reduce {size}", devices, count, body, make)


# Number of workers among which a gradient is divided.
WORKERS = 4
# A codec with other parameters is timed, too, if its work differs by this factor from
# that of the timed codecs. Times of other codecs are scaled in proportion to their work
# (`autopar.cost.codecs.local_s`).
_UNLIKE = 1.25


def timed_codecs(elements: int) -> tuple[str, ...]:
    """The codecs to time: each registered codec, with its default parameters and with
    others.

    Args:
      elements: number of elements of the timed gradient.
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
    """An `exchange.WorkerLinks` on which every worker sends the same messages as this
    worker.
    """

    workers: int = WORKERS

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        """Returns each row to this worker."""
        return add_barrier(payload)

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """Every worker sends the same message."""
        shape = (self.workers, *payload.shape)
        return add_barrier(jnp.broadcast_to(payload, shape))

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """The sum over workers with equal values."""
        return add_barrier(self.workers * values)

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        """Returns this worker's row of the sum."""
        return add_barrier(self.workers * values[0])


def _values(elements: int) -> np.ndarray:
    """A square matrix of heavy-tailed values like those of gradients, float32."""
    side = math.isqrt(elements)
    random = np.random.default_rng(0)
    return random.standard_t(4.0, (side, side)).astype(np.float32)


def codec_loop(devices: Sequence[Any], text: str, elements: int) -> TimedLoop:
    """Sends one gradient through a codec per trip, on every device."""
    parsed, given = parse_codec(text), _values(elements)
    kind = "residual" if parsed.feedback else "none"
    gradient = Gradient("g", given.shape, parsed, Feedback(kind=kind))

    def body(value: Any) -> Any:
        partial, state, _ = value
        # The condition is false, as in most steps, but the compiler does not know this.
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

    return loop(f"codec {text}", devices, 1, body, make, compiler_options=WITH_BARRIERS)


def plain_loop(devices: Sequence[Any], elements: int) -> TimedLoop:
    """The pass of a sum without a codec: the gradient is read and written once."""
    given = _values(elements)

    def body(value: Any) -> Any:
        partial, _ = value
        total = add_barrier(WORKERS * partial)
        return _touch(partial, total), total

    def make() -> Any:
        return given, np.zeros_like(given)

    return loop("no codec", devices, 1, body, make, compiler_options=WITH_BARRIERS)


def _touch(partial: jax.Array, total: jax.Array) -> jax.Array:
    """Changes one element of the partial gradient, so that every trip has another
    input.
    """
    return partial.at[0, 0].set(0.5 * total[0, 0])


def timed_elements(elements: int) -> int:
    """Number of elements of the square gradient that is timed in place of
    `elements`.
    """
    return math.isqrt(elements) ** 2
