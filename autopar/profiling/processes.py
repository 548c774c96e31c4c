"""What the processes of a profile agree on, so that each runs the same programs.

A process of its own agrees with itself; several ask `jax.experimental.multihost_utils`.
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# Of one start of one kernel: namespaces and containers of a machine share it.
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def wait() -> None:
    """Returns when all processes have called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("autopar profile")


def agree_on(value: int) -> int:
    """The value of process 0; all processes must call it."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def slowest(seconds: Sequence[float]) -> list[float]:
    """Each time as the slowest process measured it; all processes must call it."""
    if jax.process_count() == 1:
        return list(seconds)
    # JAX would round 64 bits to 32 on the way: seven digits are more than times have.
    mine = np.asarray(seconds, np.float32)
    return [float(s) for s in multihost_utils.process_allgather(mine).max(axis=0)]


def texts(mine: bytes, length: int) -> list[bytes]:
    """What each process gives, in their order; all processes must call it.

    Args:
      mine: this process's, at most `length` bytes and without zero bytes.
      length: the same for all.
    """
    if jax.process_count() == 1:
        return [mine]
    padded = np.frombuffer(mine.ljust(length, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row.tobytes().rstrip(b"\0") for row in rows.reshape(-1, length)]


def on_this_machine(devices: Sequence[Any]) -> list[Any]:
    """Those of the devices whose process runs under this kernel, in their order.

    All processes must call it.
    """
    if jax.process_count() == 1:
        return list(devices)
    mine = np.uint32(zlib.crc32(_machine().encode()))
    machines = multihost_utils.process_allgather(mine).reshape(-1)
    return [d for d in devices if machines[d.process_index] == mine]


def _machine() -> str:
    """A text that the processes of one machine share, and no others."""
    try:
        return _BOOT.read_text()
    except OSError:  # no Linux: each process for itself
        return f"process {jax.process_index()}"
