"""Times transfers from process to process, as stages of a pipeline use them.

No collective carries them: a stage hands arrays to the next through the transfer
servers of JAX, and these reach other rates than collectives over the same links.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.profiling import processes
from autopar_passes import jax_processes

# Long enough for an address with its port.
_ADDRESS_BYTES = 256


def name(nbytes: int) -> str:
    """What a transfer is called in reports.

    >>> name(1 << 18)
    'transfer to a neighbour, 0.25 MiB'
    """
    return f"transfer to a neighbour, {nbytes / 2**20:.3g} MiB"


def seconds(
    sizes: Sequence[int],
    rounds: int,
    serve: Callable[[], Any] = jax_processes.transfer_server,
) -> dict[int, float]:
    """Seconds in which every device gets an array of the process before its own.

    All processes send at once, each to the next and the last to the first: links that
    carry both ways at a time do so. All of them must call this.

    Args:
      sizes: of an array, in bytes.
      rounds: how often each size is timed; the medians count, of the slowest process.
      serve: starts the transfer server of this process.

    Returns size -> seconds; empty where a process has no transfer server.
    """
    server, address = None, b""
    with contextlib.suppress(Exception):  # whatever a backend says that has none
        server = serve()
        address = str(server.address()).encode()
    addresses = processes.texts(address, _ADDRESS_BYTES)
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
            processes.wait()
            begin = time.perf_counter()
            server.await_pull(number, given)
            jax.block_until_ready(connection.pull(number, wanted))
            times.append(time.perf_counter() - begin)
        found[nbytes] = statistics.median(times[1:])
    processes.wait()  # others may still take what this one offers
    return dict(zip(found, processes.slowest(list(found.values())), strict=True))


def _arrays(nbytes: int) -> tuple[list[Any], list[Any]]:
    """An array on each device of this process, and the structs of those that come."""
    devices, count = jax.local_devices(), max(1, nbytes // 4)
    given = [jax.device_put(np.ones(count, np.float32), d) for d in devices]
    wanted = [
        jax.ShapeDtypeStruct((count,), jnp.float32, sharding=SingleDeviceSharding(d))
        for d in devices
    ]
    return jax.block_until_ready(given), wanted
