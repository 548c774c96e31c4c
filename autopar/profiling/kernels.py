"""Programs that are timed to profile a machine.

Each program repeats one body in a loop whose trip count is an argument, on all
devices at once; the time of a trip is the slope between a short and a long run, so
that the cost of starting a program cancels. All devices work because devices may
share what they run on: links, and, simulated on a CPU, the cores themselves.

Seconds that codecs of gradients take on a device, links aside.

Each codec does all that a worker does for one gradient in a step: it encodes, decodes
what the others sent, feeds its error back and reports. What it would send it receives
itself. All devices work at once, because simulated ones share what they compute with.
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

# The short run is one trip, which touches every page; the long run takes about this.
LONG_RUN_S = 0.02
MAX_TRIPS = 1 << 17
# Starting a program takes no part worth mentioning of one that takes as long as this.
SLOW_S = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedLoop:
    """A compiled loop; `run(trips)` starts it and waits for its end."""

    name: str
    run: Callable[[int], None]


def _mesh(devices: Sequence[Any], group_size: int) -> Mesh:
    """Groups of neighbours: axis "member" lies within a group."""
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

    `make` returns the NumPy value, or tree of values, of one device; `body` maps
    the device's value to one of the same shape. The devices may be those of several
    processes, which must then all call this.
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
    """The array of which each of `count` devices has this part."""
    return jax.make_array_from_callback(
        (count, *part.shape), sharding, lambda _: part[None]
    )


def _timed_s(program: TimedLoop, trips: int) -> float:
    transfers.wait_for_all()
    start = time.perf_counter()
    program.run(trips)
    return time.perf_counter() - start


def _extra_s(program: TimedLoop, trips: int) -> float:
    """The extra time of `trips` + 1 trips over one trip."""
    program.run(1)  # untimed: brings back to the caches what other programs evicted
    short_s = _timed_s(program, 1)
    return _timed_s(program, 1 + trips) - short_s


def _trip_s(program: TimedLoop, trips: int) -> float:
    """Seconds of one trip; of a slow program, whose `trips` are 0, of a whole run."""
    return _extra_s(program, trips) / trips if trips else _timed_s(program, 1)


def _least_extra_s(program: TimedLoop, trips: int) -> float:
    """As `_extra_s`, of the shortest of three runs of each kind.

    A pause of the machine only makes a run longer: it must pass neither for a long
    run nor, in the short one, for trips that take no time.
    """
    program.run(1)
    short_s = min(_timed_s(program, 1) for _ in range(3))
    return min(_timed_s(program, 1 + trips) for _ in range(3)) - short_s


def _long_trips(program: TimedLoop) -> int:
    """Trips that take about LONG_RUN_S, found by trying; 0 where one is very slow."""
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

    Of several processes, which must all call it, the slowest counts.
    """
    trips = [_long_trips(program) for program in programs]
    found: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for program, count, slopes in zip(programs, trips, found, strict=True):
            slopes.append(_trip_s(program, count))
    return transfers.slowest_s([_typical(slopes) for slopes in found])


def _typical(slopes: Sequence[float]) -> float:
    """The median; noise may turn a slope negative, which no time is."""
    median = statistics.median(slopes)
    return median if median > 0 else max(*slopes, 1e-9)


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    """Values around 1 / sqrt(size), so that repeated products stay bounded.

    Not zeros: accelerators draw less power on them and clock higher.
    """
    generator = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.integer):
        return generator.integers(-3, 4, size=shape).astype(dtype)
    values = generator.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(jnp.dtype(dtype))


def matmul(devices: Sequence[Any], dtype: str, size: int) -> TimedLoop:
    """A product of two square matrices per trip: ``2 size^3`` FLOPs a device."""
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
    """Reads two arrays and writes one a trip: traffic of STREAM_ARRAYS * `nbytes`."""

    def body(value: Any) -> Any:
        x, y = value
        return x, x * 0.5 + y * 0.5

    def make() -> Any:
        return np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)

    return loop("stream", devices, 1, body, make)


VECTOR_SIZE = 1 << 16
VECTOR_STEPS = 64


def vector(devices: Sequence[Any]) -> TimedLoop:
    """VECTOR_STEPS multiply-adds on each of VECTOR_SIZE elements a trip."""

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
    """KERNELS tiny matrix products a trip, which no compiler fuses."""

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
    """One collective of `nbytes` a trip in every group of `group_size` devices."""
    start = _collective(kind, group_size)

    def body(x: Any) -> Any:
        # One element makes each trip wait for the one before.
        return x.at[0].set(start(x)[0] * 0.5)

    elements = local_elements(kind, group_size, nbytes)
    name = f"{kind} of {group_size}, {nbytes / 2**20:.3g} MiB"
    return loop(name, devices, group_size, body, lambda: np.ones(elements, np.float32))


def matmul_then_reduce(devices: Sequence[Any], size: int) -> TimedLoop:
    """A product and an all-reduce of its result a trip, over all devices."""
    count = len(devices)

    def body(value: Any) -> Any:
        x, w = value
        return jax.lax.psum(x @ w, "member") / count, w

    def make() -> Any:
        return _random((size, size), "float32"), _random((size, size), "float32")

    return loop(f"matmul and all_reduce {size}", devices, count, body, make)


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


def codec_loop(devices: Sequence[Any], text: str, elements: int) -> TimedLoop:
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

    return loop(f"codec {text}", devices, 1, body, make, compiler_options=WITH_BARRIERS)


def plain_loop(devices: Sequence[Any], elements: int) -> TimedLoop:
    """The pass that a sum without a codec takes too: it is read and written once."""
    given = _values(elements)

    def body(value: Any) -> Any:
        partial, _ = value
        total = add_barrier(WORKERS * partial)
        return _touch(partial, total), total

    def make() -> Any:
        return given, np.zeros_like(given)

    return loop("no codec", devices, 1, body, make, compiler_options=WITH_BARRIERS)


def _touch(partial: jax.Array, total: jax.Array) -> jax.Array:
    """The partial with one other element, so that no trip is like the one before."""
    return partial.at[0, 0].set(0.5 * total[0, 0])


def timed_elements(elements: int) -> int:
    """Elements of the square gradient that is timed for so many."""
    return math.isqrt(elements) ** 2
