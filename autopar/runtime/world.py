"""The processes and devices that a step runs on.

Only this module of the runtime asks JAX for processes and devices. All other modules
get a `World`, which may have only a part of a process's devices. So two steps can run
side by side in one process.

A *lane* is a sequence of numbered exchanges between processes. Exchanges with equal
numbers belong together, so each process must make the exchanges of a lane in the same
order. Two threads of a process run in no fixed order. So a thread that communicates
while training steps run has a lane of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from autopar.cluster.specs import show
from autopar.errors import PlanError, RunError
from autopar.runtime.key_values import KeyValueExchange
from autopar_errors import InputError, warn_user
from autopar_passes import jax_compat
from autopar_passes.jax_processes import was_forked

_LANE: contextvars.ContextVar[str] = contextvars.ContextVar("autopar_lane", default="")


@contextlib.contextmanager
def in_lane(name: str) -> Generator[None]:
    """Gives this thread a lane of its own inside the ``with`` block.

    Args:
      name: the name of the lane, equal in all processes. It must be new: a lane with an
        earlier name would continue with its numbers.
    """
    token = _LANE.set(name)
    try:
        yield
    finally:
        _LANE.reset(token)


def current_lane() -> str:
    """Returns the name of this thread's lane; '' is the lane of training steps."""
    return _LANE.get()


class Channel(Protocol):
    """Sends bytes between the processes of a world.

    Every process makes the same calls in the same order. Each call except `tell` waits
    for all processes. Training steps use `broadcast` and `gather`. Code in which a
    process may fail, such as planning, uses `exchange`.
    """

    def broadcast(self, data: bytes) -> bytes:
        """Returns the data of process 0, on every process."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data of each process, in the order of processes.

        The data of all processes must have the same length.
        """
        ...

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """Returns process number -> data; the lengths of the data may differ.

        If a process calls `tell` with a failure instead, only failures are returned.

        Args:
          data: the data of this process.
          what: the current work, for the warning after a long wait.
        """
        ...

    def tell(self, data: bytes) -> None:
        """Sends a failure in place of data for the next exchange.

        Does not wait for the other processes.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LoneChannel:
    """The channel of a world of one process."""

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        return [data]

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        del what
        return {0: data}

    def tell(self, data: bytes) -> None:
        """See `Channel`; does nothing, as there are no other processes."""


@dataclasses.dataclass(frozen=True, slots=True)
class JaxChannel:
    """The channel of all processes of ``jax.distributed``.

    `broadcast` and `gather` use the devices. `exchange` uses the coordination service,
    so that a failed process does not leave others waiting in a collective. In a lane
    other than that of training steps, all calls use the service, because the devices
    run collectives of training steps at the same time.
    """

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`; only the data of process 0 is sent."""
        if current_lane():
            return gathered(self, jax.process_count(), data)[0]
        first = jax.process_index() == 0
        length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
        buffer = np.zeros(length, dtype=np.uint8)
        if first:
            buffer[:] = np.frombuffer(data, dtype=np.uint8)
        # The broadcast is computed as a sum, which may return small integers in a wider
        # dtype.
        received = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
        return received.astype(np.uint8).tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        if current_lane():
            return gathered(self, jax.process_count(), data)
        row = np.frombuffer(data, dtype=np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(row))
        found = rows.reshape(-1, len(data)).astype(np.uint8)
        return [x.tobytes() for x in found]

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        service = self._service()
        return (
            self._by_devices(data) if service is None else service.exchange(data, what)
        )

    def tell(self, data: bytes) -> None:
        """See `Channel`.

        If there is no coordination service, this waits for the other processes.
        """
        service = self._service()
        if service is None:
            self._by_devices(data)
        else:
            service.tell(data)

    def _service(self) -> KeyValueExchange | None:
        found = jax_compat.coordination()
        # `found` is None, for example, on TPUs that `jax.distributed` did not start.
        if found is None:
            return None
        return KeyValueExchange(
            found.client, found.index, found.count, lane=current_lane()
        )

    def _by_devices(self, data: bytes) -> dict[int, bytes]:
        lengths = self.gather(len(data).to_bytes(8, "little"))
        sizes = [int.from_bytes(x, "little") for x in lengths]
        padded = self.gather(data.ljust(max(sizes), b"\0"))
        return {k: x[:n] for k, (x, n) in enumerate(zip(padded, sizes, strict=True))}


@dataclasses.dataclass(frozen=True, slots=True)
class PartChannel:
    """The channel of some of the processes of ``jax.distributed``.

    All calls use the coordination service, and take milliseconds.

    Attributes:
      members: the numbers of the processes, ascending.
      name: a name that is equal in these processes, and differs from those of other
        channels of the same members.
    """

    members: tuple[int, ...]
    name: str

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`."""
        return gathered(self, len(self.members), data)[0]

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        return gathered(self, len(self.members), data)

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        return self._service().exchange(data, what)

    def tell(self, data: bytes) -> None:
        """See `Channel`."""
        self._service().tell(data)

    def _service(self) -> KeyValueExchange:
        found = jax_compat.coordination()
        if found is None:
            raise RunError(
                f"{self.name}: its processes need the coordination service of "
                "jax.distributed.initialize, which does not run here."
            )
        own = self.members.index(found.index)
        # Other members with this name count other exchanges.
        members = "-".join(map(str, self.members))
        lane = f"{self.name}/{members}/{current_lane()}"
        return KeyValueExchange(found.client, own, len(self.members), lane=lane)


def gathered(channel: Channel, count: int, data: bytes) -> list[bytes]:
    """Gathers data in a lane, without the devices; returns it by process.

    Args:
      channel: between the processes.
      count: number of processes.
      data: the data of this process.

    Raises:
      PlanError: a process has failed, and sent its failure instead of data.
    """
    found = channel.exchange(data, "gathering")
    if len(found) < count:
        raise PlanError(
            f"processes {sorted(found)} have failed beside the steps; their own "
            "messages say why."
        )
    return [x for _, x in sorted(found.items())]


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """The processes and devices that a step may use.

    Attributes:
      devices: the devices of all processes, in the order in which plans use them.
      process_index: number of this process.
      process_count: number of processes.
      channel: sends data between the processes.
      whole: the world of which this one is a part, where several parts run the same
        step on equal clusters, such as replicas; None: this world is no part.

    Raises:
      InputError: there is no device, a device occurs twice, the process number is out
        of range, or several processes have no channel.
    """

    devices: tuple[Any, ...]
    process_index: int = 0
    process_count: int = 1
    channel: Channel = LoneChannel()
    whole: World | None = None

    def __post_init__(self) -> None:
        """Checks devices and processes."""
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise InputError(
                "World: devices must be different, and at least one; got "
                f"{_ids(self.devices)}."
            )
        if not 0 <= self.process_index < self.process_count:
            raise InputError(
                f"World: process_index {self.process_index} is not among "
                f"{self.process_count} processes."
            )
        if self.process_count > 1 and isinstance(self.channel, LoneChannel):
            raise InputError(
                f"World: {self.process_count} processes need a channel= between them."
            )

    @classmethod
    def current(cls) -> World:
        """Returns the world of this process's JAX backend; starts the backend.

        Raises:
          RunError: the process was forked from a process in which JAX ran.
        """
        if was_forked():
            raise RunError(
                "this process was forked from one in which JAX ran, and JAX's threads "
                "are not here: a step would wait forever. Start processes by "
                "multiprocessing.get_context('spawn'), or fork before JAX is used."
            )
        count = jax.process_count()
        channel = JaxChannel() if count > 1 else LoneChannel()
        if count > 1:
            warn_of_few_threads(jax.local_devices())
        return cls(tuple(jax.devices()), jax.process_index(), count, channel)

    @property
    def planning(self) -> World:
        """The world whose processes use one plan: that of which this is a part."""
        return self.whole or self

    def part(self, devices: Sequence[Any], name: str) -> World:
        """Returns the world of some devices and their processes.

        All processes of this world must plan the same steps in all parts, as often.

        Args:
          devices: the devices of the part.
          name: the name of the part, equal in its processes and of no other part.

        Raises:
          PlanError: this process has none of the devices.
        """
        if self.process_count == 1:
            return World(tuple(devices))
        members = tuple(sorted({d.process_index for d in devices}))
        if self.process_index not in members:
            raise PlanError(
                f"{name}: process {self.process_index} has none of its devices."
            )
        if len(members) == 1:
            return World(tuple(devices), whole=self)
        own = members.index(self.process_index)
        channel = PartChannel(members, name)
        return World(tuple(devices), own, len(members), channel, whole=self)

    @property
    def is_left(self) -> bool:
        """Whether this process was forked; its devices then belong to its parent."""
        return was_forked()

    def take(self, chosen: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the chosen devices of this world.

        Args:
          chosen: devices, or the ids of devices.

        Raises:
          PlanError: a device is not in this world, or occurs twice.
        """
        by_id = {d.id: d for d in self.devices}
        found = [by_id.get(d) if isinstance(d, int) else d for d in chosen]
        known = set(self.devices)
        if missing := [c for c, d in zip(chosen, found, strict=True) if d not in known]:
            raise PlanError(
                f"devices={_ids(missing)}: not among the devices of this world, "
                f"{_ids(self.devices)}."
            )
        if len(set(found)) < len(found):
            raise PlanError(f"devices={_ids(found)}: a device stands twice.")
        return tuple(found)

    def at(self, positions: Sequence[int]) -> tuple[Any, ...]:
        """Returns the devices at these positions of the world's devices.

        Raises:
          PlanError: a position does not exist, or occurs twice.
        """
        count = len(self.devices)
        if wrong := [k for k in positions if not 0 <= k < count]:
            raise PlanError(
                f"the cluster's devices {show(wrong)} are not among the {count} of "
                f"this world, {_ids(self.devices)}."
            )
        return self.take([self.devices[k] for k in positions])

    def check_mesh(self, devices: Sequence[Any]) -> None:
        """Checks that this world's processes can run a mesh of these devices.

        Each process must have the same number of the mesh's devices, because batches
        are split evenly over processes.

        Raises:
          PlanError: processes have unequal numbers of devices, or a process has none.
        """
        parts = Counter(d.process_index for d in devices)
        if self.process_count == 1 and len(parts) == 1:
            return
        if len(parts) != self.process_count or len(set(parts.values())) > 1:
            text = ", ".join(f"process {p}: {n}" for p, n in sorted(parts.items()))
            raise PlanError(
                f"the plan's {len(devices)} devices lie unevenly on the "
                f"{self.process_count} processes of this world ({text}); a batch is "
                "split evenly over processes. Choose devices= with as many of each."
            )


def threads_of_collectives(devices: int) -> int:
    """Returns the threads that XLA needs for collectives of this many CPU devices.

    Collectives between processes block two threads for each device: one for the device,
    and one for the device of another process that it exchanges data with.
    """
    return 2 * devices


def number_of_threads() -> int:
    """Returns the number of threads that XLA's CPU backend starts in this process."""
    text = os.environ.get("NPROC", "")
    return int(text) if text.isdigit() else os.cpu_count() or 1


def warn_of_few_threads(devices: Sequence[Any]) -> None:
    """Warns if collectives of several processes may wait for threads without end.

    Args:
      devices: the devices of this process.
    """
    count, threads = len(devices), number_of_threads()
    needed = threads_of_collectives(count)
    if devices[0].platform != "cpu" or count == 1 or threads >= needed:
        return
    warn_user(
        f"this process has {count} CPU devices and {threads} threads for their "
        f"collectives with other processes, which need {needed}: a step may wait "
        f"forever. Set the environment variable NPROC={needed} before JAX starts."
    )


def grid(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Returns an array of the first devices, with the given shape."""
    return np.array(list(devices)[: math.prod(sizes)], dtype=object).reshape(sizes)


def _ids(devices: Sequence[Any]) -> str:
    """Returns the ids of devices as text for errors."""
    return "[" + ", ".join(str(getattr(d, "id", d)) for d in devices) + "]"
