"""Buffers that lie in the memory of the chip itself, not in the device's.

A TPU's vector memory is under the compiler's control. XLA's memory space assignment
places a buffer there where there is room for it, and such a buffer takes no memory of
the device (openxla/xla, ``xla/service/memory_space_assignment``). What waits long is
moved out, and then the device's memory holds it.
"""

from __future__ import annotations

import numpy as np

# Of the chip's memory, what the compiler gives to one kernel to work in
# (``xla_tpu_scoped_vmem_limit_kib``, 16384).
_KERNEL_BYTES = 2**24
# Of the rest, what buffers take. A GPT and a Llama of two layers on 64 v5e, whose
# buffers would fill the chip once, leave 98 to 105 of 117 MB of them on it
# (libtpu 0.0.42).
_BUFFERS = (5, 6)


def room_bytes(chip_bytes: int) -> int:
    """What a chip's memory holds of buffers, in bytes.

    Kernels have a part to work in. A sixth of the rest holds what arrives for the next
    kernel while one runs, and what is lost between buffers.
    """
    part, whole = _BUFFERS
    return max(0, chip_bytes - _KERNEL_BYTES) * part // whole


def on_chip(
    starts: np.ndarray, ends: np.ndarray, sizes: np.ndarray, room: float
) -> np.ndarray:
    """Which buffers lie on the chip, for their whole life.

    Where more is live than the chip holds, the buffer that lives longest goes first,
    until the rest fits at every time: it takes the room that many others could use one
    after the other (Belady, IBM Systems Journal 5(2), 1966).

    Args:
      starts: the first time of each buffer.
      ends: the last.
      sizes: bytes.
      room: bytes that the chip holds.

    Returns:
      One truth value for each buffer.
    """
    held = np.full(len(sizes), room > 0)
    if not held.any():
        return held
    change = np.zeros(int(ends.max()) + 2)
    np.add.at(change, starts, sizes)
    np.add.at(change, ends + 1, -sizes)
    live = np.cumsum(change)
    for index in np.argsort(starts - ends, kind="stable"):
        span = live[starts[index] : ends[index] + 1]
        if span.max() > room:
            span -= sizes[index]
            held[index] = False
    return held
