"""Times transfers from process to process, as stages of a pipeline use them.

A stage sends arrays to the next through JAX's transfer servers, not by collectives.
Transfer servers reach other rates than collectives over the same links.

The module also makes the processes of a profile agree on values, so that all run the
same programs.

Several processes use `jax.experimental.multihost_utils` for this. A single process uses
its own values.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from autopar.cluster.specs import CollectiveFit
from autopar_passes import jax_processes

# The identifier of one boot of a kernel, which all namespaces and containers of a
# machine share.
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
    """Each time as measured by the slowest process; all processes must call this
    function.
    """
    if jax.process_count() == 1:
        return list(seconds)
    # JAX would round 64-bit floats to 32 bits anyway. Seven digits are enough for
    # measured times.
    mine = np.asarray(seconds, np.float32)
    return [float(s) for s in multihost_utils.process_allgather(mine).max(axis=0)]


def gather_texts(mine: bytes, length: int) -> list[bytes]:
    """The texts of all processes, in their order; all processes must call this
    function.

    Args:
      mine: the text of this process, at most `length` bytes and without zero bytes.
      length: maximum length, the same for all processes.
    """
    if jax.process_count() == 1:
        return [mine]
    padded = np.frombuffer(mine.ljust(length, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row.tobytes().rstrip(b"\0") for row in rows.reshape(-1, length)]


def on_this_machine(devices: Sequence[Any]) -> list[Any]:
    """The given devices whose process runs under the same kernel as this process, in
    their order.

    All processes must call this function.
    """
    if jax.process_count() == 1:
        return list(devices)
    mine = np.uint32(zlib.crc32(_machine().encode()))
    machines = multihost_utils.process_allgather(mine).reshape(-1)
    return [d for d in devices if machines[d.process_index] == mine]


def _machine() -> str:
    """A text that is equal for all processes of one machine and different for other
    machines.
    """
    try:
        return _BOOT.read_text()
    except OSError:  # no Linux: each process for itself
        return f"process {jax.process_index()}"


# The length in bytes of a text that holds an address with its port.
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
    """Seconds in which every device receives an array from the process before its own.

    All processes send at the same time, each to the next process, and the last to the
    first. So full-duplex links are used in both directions. All processes must call
    this function.

    Args:
      sizes: sizes of an array, in bytes.
      rounds: number of measurements of each size; the result is the median of the
        slowest process.
      serve: starts the transfer server of this process.

    Returns size -> seconds; empty if a process has no transfer server.
    """
    server, address = None, b""
    with contextlib.suppress(Exception):  # whatever a backend says that has none
        server = serve()
        address = str(server.address()).encode()
    addresses = gather_texts(address, _ADDRESS_BYTES)
    if server is None or not all(addresses):
        return {}
    before = (jax.process_index() - 1) % jax.process_count()
    connection = server.connect(addresses[before].decode())
    number, found = 0, dict[int, float]()
    for nbytes in sizes:
        given, wanted = _arrays(nbytes)
        times: list[float] = []
        for _ in range(1 + rounds):  # the first one connects
            number += 1
            wait_for_all()
            begin = time.perf_counter()
            server.await_pull(number, given)
            jax.block_until_ready(connection.pull(number, wanted))
            times.append(time.perf_counter() - begin)
        found[nbytes] = statistics.median(times[1:])
    wait_for_all()  # others may still take what this one offers
    return dict(zip(found, slowest_s(list(found.values())), strict=True))


def _arrays(nbytes: int) -> tuple[list[Any], list[Any]]:
    """An array on each device of this process, and the structs of the arrays to
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
    # The better of the two edges of the feasible quadrant.
    constant, slope = s1 / s11, s2 / s22
    if s1 * constant > s2 * slope:
        return round_off(constant), 0.0
    return 0.0, round_off(slope)


def round_off(value: float) -> float:
    """Rounds to six significant digits, which is more than a timing has."""
    return float(f"{value:.6g}")


def _candidate(
    kind: str, group_size: int, points: Sequence[tuple[float, float]], split: int
) -> CollectiveFit:
    """A line fitted to the first `split` points, and a slope through 0 fitted to the
    other points.
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
    """The best fit of a line, or of the maximum of a line and a slope through 0 for
    large sizes.

    Args:
      kind: the collective.
      group_size: devices of a group.
      points: (nbytes, seconds), at least two.
    """
    ordered = sorted(points)
    splits = range(min(3, len(ordered)), len(ordered) + 1)
    fits = [_candidate(kind, group_size, ordered, split) for split in splits]
    return min(reversed(fits), key=lambda fit: fit.relative_error)
