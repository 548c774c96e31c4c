"""The programs that are timed to profile a machine.

Each program runs a loop over one computation (the body) on all devices at the same
time. The number of iterations (trips) is an argument. The seconds of a trip are the
difference between a long and a short run, divided by the difference in trips. So the
time to start a program cancels. All devices work at the same time because they may
share hardware: links, or, if they are simulated on a CPU, processor cores.

This module also times gradient codecs, without sending anything.

The program of a codec does all that one worker does for a gradient in a step: it
encodes, decodes received messages, applies error feedback and computes the report. The
messages that it decodes are its own. All devices work at the same time, because
simulated devices share processor cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from autopar.cluster.specs import CollectiveFit
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
from autopar_passes import jax_processes

Body = Callable[[Any], Any]

# The short run has one trip, which already touches every memory page. The long run has
# as many trips as take about this many seconds.
LONG_RUN_S = 0.02
MAX_TRIPS = 1 << 17
# If a trip takes at least this many seconds, the time to start the program is
# neglected.
SLOW_S = 0.25
# If a message takes this many seconds, larger messages of its series are not timed: on
# a slow link, time grows in proportion to the bytes. At 20 Mbit/s, a token bucket that
# lets 32 KiB pass at once then makes a fit of the rate wrong by at most 3 %.
LONG_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedLoop:
    """A compiled loop.

    Attributes:
      name: its name in reports.
      run: ``run(trips)`` starts the loop and waits for its end.
      series: the name of a series of loops, such as one collective with messages of
        different bytes; '': no series.
      nbytes: bytes of the message, by which a series is ordered.
    """

    name: str
    run: Callable[[int], None]
    series: str = ""
    nbytes: int = 0


def _mesh(devices: Sequence[Any], group_size: int) -> Mesh:
    """A mesh of groups of neighbouring devices; its axis "member" is within a group."""
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
    """Compiles a loop over ``body``, which starts from ``make()`` on every device.

    ``make`` returns the start value of one device, a NumPy array or a tree of arrays.
    ``body`` maps the value of a device to a new value of the same shape. If the devices
    belong to several processes, all these processes must call this function.
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
    """An array with ``count`` shards, each of which has the content ``part``."""
    return jax.make_array_from_callback(
        (count, *part.shape), sharding, lambda _: part[None]
    )


def _timed_s(program: TimedLoop, trips: int) -> float:
    wait_for_all()
    start = time.perf_counter()
    program.run(trips)
    return time.perf_counter() - start


def _extra_s(program: TimedLoop, trips: int) -> float:
    """Seconds of a run of ``trips`` + 1 trips, minus those of a run of one trip."""
    program.run(1)  # not timed; fills the caches again
    short_s = _timed_s(program, 1)
    return _timed_s(program, 1 + trips) - short_s


def _trip_s(program: TimedLoop, trips: int) -> float:
    """Seconds of one trip. For a slow program, for which ``trips`` is 0, it is the time
    of a whole run.
    """
    return _extra_s(program, trips) / trips if trips else _timed_s(program, 1)


def _least_extra_s(program: TimedLoop, trips: int) -> float:
    """The result of `_extra_s` from the shortest of three long runs and of three short
    runs.

    If the machine pauses, a run takes longer. A pause in a long run would make the
    difference too large, and a pause in a short run too small. The shortest runs are
    those without pauses.
    """
    program.run(1)
    short_s = min(_timed_s(program, 1) for _ in range(3))
    return min(_timed_s(program, 1 + trips) for _ in range(3)) - short_s


def _long_trips(program: TimedLoop) -> int:
    """Finds by trials the number of trips that take about LONG_RUN_S seconds; 0 if a
    single trip is very slow.
    """
    if agree_on(int(_extra_s(program, 1) > SLOW_S)):
        return 0
    trips, extra_s = 1, 0.0
    while agree_on(int(extra_s < LONG_RUN_S / 8 and trips < MAX_TRIPS)):
        trips *= 4
        extra_s = _least_extra_s(program, trips)
    if extra_s > 0:
        trips = max(2, min(MAX_TRIPS, round(trips * LONG_RUN_S / extra_s)))
    return agree_on(trips)


def trip_times_s(programs: Sequence[TimedLoop], rounds: int) -> list[float | None]:
    """Median seconds of a trip of each program, over several rounds through all
    programs.

    With several processes, all must call this function. The result has the times of the
    slowest process. It is None for a program that is not timed, because a smaller
    message of its series takes `LONG_S`.
    """
    trips = dict[int, int]()
    long = set[str]()
    for k in sorted(range(len(programs)), key=lambda k: programs[k].nbytes):
        program = programs[k]
        if program.series in long:
            continue
        is_long = program.series and _takes_long(program)
        if is_long:
            long.add(program.series)
        trips[k] = 0 if is_long else _long_trips(program)
    slopes: dict[int, list[float]] = {k: [] for k in sorted(trips)}
    for _ in range(rounds):
        for k, found in slopes.items():
            found.append(_trip_s(programs[k], trips[k]))
    times_s = slowest_s([_typical(found) for found in slopes.values()])
    known = dict(zip(slopes, times_s, strict=True))
    return [known.get(k) for k in range(len(programs))]


def _takes_long(program: TimedLoop) -> bool:
    """Whether one trip takes `LONG_S`, twice: the machine may pause once."""
    program.run(1)  # the first run connects
    return all(agree_on(int(_timed_s(program, 1) > LONG_S)) for _ in range(2))


def _typical(slopes: Sequence[float]) -> float:
    """The median of measured times, but at least 0, because noise can make a difference
    of times negative.
    """
    median = statistics.median(slopes)
    return median if median > 0 else max(*slopes, 1e-9)


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    """Random values of size 1 / sqrt(size), so that repeated matrix products stay
    bounded.

    Zeros would not do: accelerators need less power for zeros, and run them at a higher
    clock.
    """
    generator = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.integer):
        return generator.integers(-3, 4, size=shape).astype(dtype)
    values = generator.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(jnp.dtype(dtype))


def matmul(devices: Sequence[Any], dtype: str, size: int) -> TimedLoop:
    """Multiplies two square matrices in each trip: ``2 size^3`` FLOPs on each
    device.
    """
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
    """Reads two arrays and writes one in each trip, which moves STREAM_ARRAYS *
    ``nbytes`` bytes.
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
    """In each trip, does VECTOR_STEPS multiply-adds on each of VECTOR_SIZE elements."""

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
    """In each trip, does KERNELS tiny matrix products, which compilers do not fuse."""

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
    """How many float32 elements a device's operand has in a collective of
    ``nbytes``.
    """
    share = group_size if kind == "all_gather" else 1
    return max(1, nbytes // 4 // share // group_size) * group_size


def collective(
    devices: Sequence[Any], kind: str, group_size: int, nbytes: int
) -> TimedLoop:
    """In each trip, runs a collective of ``nbytes`` in every group of devices."""
    start = _collective(kind, group_size)

    def body(x: Any) -> Any:
        # One element of the result is an input of the next trip, so that each trip must
        # wait for the previous one.
        return x.at[0].set(start(x)[0] * 0.5)

    elements = local_elements(kind, group_size, nbytes)
    name = f"{kind} of {group_size}, {nbytes / 2**20:.3g} MiB"
    return loop(name, devices, group_size, body, lambda: np.ones(elements, np.float32))


def matmul_then_reduce(devices: Sequence[Any], size: int) -> TimedLoop:
    """In each trip, does a matrix product and an all-reduce of its result over all
    devices.
    """
    count = len(devices)

    def body(value: Any) -> Any:
        x, w = value
        return jax.lax.psum(x @ w, "member") / count, w

    def make() -> Any:
        return _random((size, size), "float32"), _random((size, size), "float32")

    return loop(f"matmul and all_reduce {size}", devices, count, body, make)


# The number of workers that the codecs assume when they divide a gradient.
WORKERS = 4
# A codec with other parameters is timed as well if its work (`Codec.cost`) differs by
# at least this factor from the work of the codecs that are already timed. The times of
# codecs that are not timed are scaled in proportion to their work
# (`autopar.cost.codecs.local_s`).
_UNLIKE = 1.25


def timed_codecs(elements: int) -> tuple[str, ...]:
    """The codecs to time: each registered codec with its default parameters, and some
    with other parameters.

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
    """Collectives (`exchange.WorkerLinks`) that answer as if every worker sent the same
    messages as this worker.
    """

    workers: int = WORKERS

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        """Returns each row to this worker."""
        return add_barrier(payload)

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """Returns the message once for each worker."""
        shape = (self.workers, *payload.shape)
        return add_barrier(jnp.broadcast_to(payload, shape))

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """Returns the sum over workers that all have these values."""
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
    """In each trip, runs a codec on one gradient, on every device."""
    parsed, given = parse_codec(text), _values(elements)
    kind = "residual" if parsed.feedback else "none"
    gradient = Gradient("g", given.shape, parsed, Feedback(kind=kind))

    def body(value: Any) -> Any:
        partial, state, _ = value
        # The condition is always false, as in most steps of a training, but the
        # compiler cannot know this.
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
    """In each trip, reads and writes a gradient once, as a sum without a codec does."""
    given = _values(elements)

    def body(value: Any) -> Any:
        partial, _ = value
        total = add_barrier(WORKERS * partial)
        return _touch(partial, total), total

    def make() -> Any:
        return given, np.zeros_like(given)

    return loop("no codec", devices, 1, body, make, compiler_options=WITH_BARRIERS)


def _touch(partial: jax.Array, total: jax.Array) -> jax.Array:
    """Changes an element of the gradient, so that each trip has another input."""
    return partial.at[0, 0].set(0.5 * total[0, 0])


def timed_elements(elements: int) -> int:
    """Number of elements of the square gradient that is timed for a gradient of
    ``elements``.
    """
    return math.isqrt(elements) ** 2


# Times the transfers between processes that pipeline stages use.
#
# A pipeline stage sends arrays to the next stage by JAX's transfer servers, and not by
# collectives. Over the same links, transfer servers reach other rates than collectives.
#
# The module also makes the processes that measure agree on values, so that all run the
# same programs.
#
# For this, several processes use `jax.experimental.multihost_utils`. A single process
# just uses its own values.


# A random identifier that the Linux kernel makes at each boot. The identifier is the
# same in all containers of a machine.
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def wait_for_all() -> None:
    """Returns when all processes have called this function."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("autopar profile")


def agree_on(value: int) -> int:
    """The value of process 0; all processes must call this function."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def slowest_s(seconds: Sequence[float]) -> list[float]:
    """For each of these times, the longest time on any process; all processes must call
    this function.
    """
    if jax.process_count() == 1:
        return list(seconds)
    # JAX rounds 64-bit floats to 32 bits by default. Seven digits are enough for
    # measured times.
    mine = np.asarray(seconds, np.float32)
    return [float(s) for s in multihost_utils.process_allgather(mine).max(axis=0)]


def gather_texts(mine: bytes, length: int) -> list[bytes]:
    """The texts of all processes, in the order of the processes; all must call this
    function.

    Args:
      mine: the text of this process, at most ``length`` bytes and without zero bytes.
      length: the maximum length, which must be the same in all processes.
    """
    if jax.process_count() == 1:
        return [mine]
    padded = np.frombuffer(mine.ljust(length, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row.tobytes().rstrip(b"\0") for row in rows.reshape(-1, length)]


def on_this_machine(devices: Sequence[Any]) -> list[Any]:
    """The given devices whose process runs on the same machine as this process.

    All processes must call this function.
    """
    if jax.process_count() == 1:
        return list(devices)
    mine = np.uint32(zlib.crc32(_machine().encode()))
    machines = multihost_utils.process_allgather(mine).reshape(-1)
    return [d for d in devices if machines[d.process_index] == mine]


def _machine() -> str:
    """A text that is the same in all processes of a machine, and different on other
    machines.
    """
    try:
        return _BOOT.read_text()
    except OSError:  # not Linux: a text for this process only
        return f"process {jax.process_index()}"


# The most bytes of an address with its port, as text.
_ADDRESS_BYTES = 256


def transfer_name(nbytes: int) -> str:
    """The name of a transfer in reports.

    >>> transfer_name(1 << 18)
    'transfer to a neighbour, 0.25 MiB'
    """
    return f"transfer to a neighbour, {nbytes / 2**20:.3g} MiB"


def seconds(
    sizes: Sequence[int],
    rounds: int,
    serve: Callable[[], Any] = jax_processes.transfer_server,
) -> dict[int, float]:
    """Times how long it takes until every device has received an array from the
    previous process.

    All processes send at the same time: each to the next one, and the last to the
    first. So full-duplex links are used in both directions. All processes must call
    this function.

    Args:
      sizes: the sizes of arrays to time, in bytes.
      rounds: number of measurements of each size. The result is the median, on the
        process for which it is longest.
      serve: starts the transfer server of this process.

    Returns size -> seconds; empty if some process has no transfer server. If an array
    takes `LONG_S`, no larger one is timed.
    """
    server, address = None, b""
    with contextlib.suppress(Exception):  # the error depends on the backend
        server = serve()
        address = str(server.address()).encode()
    addresses = gather_texts(address, _ADDRESS_BYTES)
    if server is None or not all(addresses):
        return {}
    before = (jax.process_index() - 1) % jax.process_count()
    connection = server.connect(addresses[before].decode())
    number, found = 0, dict[int, float]()
    for nbytes in sorted(sizes):
        given, wanted = _arrays(nbytes)
        times: list[float] = []
        for _ in range(1 + rounds):  # the first of all connects
            number += 1
            wait_for_all()
            begin = time.perf_counter()
            server.await_pull(number, given)
            jax.block_until_ready(connection.pull(number, wanted))
            times.append(time.perf_counter() - begin)
        found[nbytes] = statistics.median(times[1:])
        if agree_on(int(found[nbytes] > LONG_S)):
            break
    wait_for_all()  # other processes may still fetch from this one
    return dict(zip(found, slowest_s(list(found.values())), strict=True))


def _arrays(nbytes: int) -> tuple[list[Any], list[Any]]:
    """An array on each device of this process to send, and the shapes of the arrays to
    receive.
    """
    devices, count = jax.local_devices(), max(1, nbytes // 4)
    given = [jax.device_put(np.ones(count, np.float32), d) for d in devices]
    wanted = [
        jax.ShapeDtypeStruct((count,), jnp.float32, sharding=SingleDeviceSharding(d))
        for d in devices
    ]
    return jax.block_until_ready(given), wanted


def relative_rms(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Root mean square of ``predicted / measured - 1``."""
    pairs = zip(predicted, measured, strict=True)
    return math.sqrt(sum((p / m - 1) ** 2 for p, m in pairs) / len(measured))


def fit_slope(sizes: Sequence[float], times_s: Sequence[float]) -> float:
    """The b that minimises ``sum((b n / t - 1)^2)``."""
    ratios = [n / t for n, t in zip(sizes, times_s, strict=True)]
    return sum(ratios) / sum(r * r for r in ratios)


def fit_line(sizes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """The non-negative (a, b) that minimise ``sum(((a + b n) / t - 1)^2)``.

    >>> fit_line([10, 20, 40], [3.0, 5.0, 9.0])
    (1.0, 0.2)
    """
    inverse = [1 / t for t in times_s]
    ratios = [n / t for n, t in zip(sizes, times_s, strict=True)]
    # The normal equations for the two columns 1/t and n/t with the right-hand side 1.
    s11, s1 = sum(x * x for x in inverse), sum(inverse)
    s22, s2 = sum(x * x for x in ratios), sum(ratios)
    s12 = sum(x * y for x, y in zip(inverse, ratios, strict=True))
    determinant = s11 * s22 - s12 * s12
    if determinant > 1e-12 * s11 * s22:
        a = (s1 * s22 - s2 * s12) / determinant
        b = (s2 * s11 - s1 * s12) / determinant
        if a >= 0 and b >= 0:
            return round_off(a), round_off(b)
    # Neither constant nor slope may be negative: take the better of a constant alone
    # and a slope alone.
    constant, slope = s1 / s11, s2 / s22
    if s1 * constant > s2 * slope:
        return round_off(constant), 0.0
    return 0.0, round_off(slope)


def round_off(value: float) -> float:
    """Rounds to six significant digits, more than a measured time has."""
    return float(f"{value:.6g}")


def _candidate(
    kind: str, group_size: int, points: Sequence[tuple[float, float]], split: int
) -> CollectiveFit:
    """A fit: a line through the first ``split`` points, and a line through the origin
    for the other points.
    """
    sizes, times_s = zip(*points, strict=True)
    latency_s, slope = fit_line(sizes[:split], times_s[:split])
    rest = points[split:]
    floor = round_off(fit_slope(*zip(*rest, strict=True))) if rest else 0.0
    bare = CollectiveFit(
        kind=kind,
        group_size=group_size,
        latency_s=latency_s,
        s_per_byte=slope,
        large_s_per_byte=floor,
    )
    error = relative_rms([bare.seconds(n) for n in sizes], times_s)
    return CollectiveFit(
        kind=kind,
        group_size=group_size,
        latency_s=latency_s,
        s_per_byte=slope,
        large_s_per_byte=floor,
        relative_error=round_off(error),
    )


def fit_collective(
    kind: str, group_size: int, points: Sequence[tuple[float, float]]
) -> CollectiveFit:
    """The better of two fits to times of a collective: a line; or the maximum of a line
    and, for large sizes, a line through the origin.

    Args:
      kind: the collective.
      group_size: number of devices of a group.
      points: (nbytes, seconds), at least two.
    """
    ordered = sorted(points)
    splits = range(min(3, len(ordered)), len(ordered) + 1)
    fits = [_candidate(kind, group_size, ordered, split) for split in splits]
    return min(reversed(fits), key=lambda fit: fit.relative_error)
