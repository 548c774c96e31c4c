"""Times the transfers between processes that pipeline stages use.

A pipeline stage sends arrays to the next stage by JAX's transfer servers, and not by
collectives. Over the same links, transfer servers reach other rates than collectives.

The module also makes the processes that measure agree on values, so that all run the
same programs.

For this, several processes use `jax.experimental.multihost_utils`. A single process
just uses its own values.
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
    """Each time on the process for which it is longest; all processes must call this
    function.
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
    """Those of the given devices whose process runs on the same machine as this
    process.

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

    Returns size -> seconds; empty if some process has no transfer server.
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
