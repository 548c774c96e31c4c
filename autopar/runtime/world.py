"""The processes and devices that a step runs on.

This is the only module of the runtime that asks JAX for them. All else is given a
`World`, so that a step can run on some of a process's devices, and another beside it
on the rest.

Lanes: threads of a process that each exchange with the same thread of the others.

What processes exchange is matched by number: each must make the same calls in the same
order. Two threads of a process cannot keep an order between them, so what is done
beside the steps has a lane of its own, with its own numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from autopar.cluster.specs import show
from autopar.errors import PlanError, RunError
from autopar.runtime.key_values import KeyValueExchange
from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.jax_processes import was_forked

_LANE: contextvars.ContextVar[str] = contextvars.ContextVar("autopar_lane", default="")


@contextlib.contextmanager
def in_lane(name: str) -> Generator[None]:
    """Lets this thread exchange in a lane.

    Args:
      name: of the lane: the same in all processes, and of no other lane, as the numbers
        of one that was left go on.
    """
    token = _LANE.set(name)
    try:
        yield
    finally:
        _LANE.reset(token)


def current_lane() -> str:
    """The lane of this thread; '' is that of the steps."""
    return _LANE.get()


class Channel(Protocol):
    """Sends bytes between the processes of a world.

    Every process makes the same calls in the same order; each call but `tell` waits for
    all. What steps do again and again is broadcast and gathered; the rest, in which a
    process may fail, is exchanged.
    """

    def broadcast(self, data: bytes) -> bytes:
        """Returns what the first process passes, on every process."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Returns what each process passes, by process; all of one length."""
        ...

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """Returns what each process passes, of any lengths, by process.

        Where a process `tell`s a failure instead, only failures are returned.

        Args:
          data: what this process passes.
          what: is being done; for those who wait long.
        """
        ...

    def tell(self, data: bytes) -> None:
        """Passes a failure to the next exchange, and does not wait for the others."""
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
        """See `Channel`; there is nobody to tell."""


@dataclasses.dataclass(frozen=True, slots=True)
class JaxChannel:
    """The channel of all processes of ``jax.distributed``.

    Broadcasts and gathers go through the devices, exchanges through the coordination
    service: a process that fails there leaves nobody waiting in a collective. In a lane
    all go through the service, as devices run the collectives of steps.
    """

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`; only what the first process passes is sent."""
        if current_lane():
            return self._in_lane(data)[0]
        first = jax.process_index() == 0
        length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
        buffer = np.zeros(length, dtype=np.uint8)
        if first:
            buffer[:] = np.frombuffer(data, dtype=np.uint8)
        # A sum of small integers may come back wider than it was sent.
        received = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
        return received.astype(np.uint8).tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        if current_lane():
            return self._in_lane(data)
        row = np.frombuffer(data, dtype=np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(row))
        found = rows.reshape(-1, len(data)).astype(np.uint8)
        return [x.tobytes() for x in found]

    def _in_lane(self, data: bytes) -> list[bytes]:
        """What each process passes, by process.

        Raises:
          PlanError: a process has failed, and passes its failure in place of data.
        """
        found = self.exchange(data, "gathering")
        if len(found) < jax.process_count():
            raise PlanError(
                f"processes {sorted(found)} have failed beside the steps; their own "
                "messages say why."
            )
        return [x for _, x in sorted(found.items())]

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        service = self._service()
        return (
            self._by_devices(data) if service is None else service.exchange(data, what)
        )

    def tell(self, data: bytes) -> None:
        """See `Channel`; without a coordination service it has to wait."""
        service = self._service()
        if service is None:
            self._by_devices(data)
        else:
            service.tell(data)

    def _service(self) -> KeyValueExchange | None:
        found = jax_compat.coordination()
        if found is None:  # as on TPUs that were not started by jax.distributed
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
class World:
    """The processes and devices that a step may use.

    Attributes:
      devices: the devices of all processes, in the order in which plans use them.
      process_index: number of this process.
      process_count: number of processes.
      channel: between the processes.

    Raises:
      InputError: there is no device, one stands twice, the process is none of the
        world's, or several processes have no channel.
    """

    devices: tuple[Any, ...]
    process_index: int = 0
    process_count: int = 1
    channel: Channel = LoneChannel()

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
        """The world of this process's JAX backend, which this starts.

        Raises:
          RunError: the process was forked from one in which JAX ran.
        """
        if was_forked():
            raise RunError(
                "this process was forked from one in which JAX ran, and JAX's threads "
                "are not here: a step would wait forever. Start processes by "
                "multiprocessing.get_context('spawn'), or fork before JAX is used."
            )
        count = jax.process_count()
        channel = JaxChannel() if count > 1 else LoneChannel()
        return cls(tuple(jax.devices()), jax.process_index(), count, channel)

    @property
    def is_left(self) -> bool:
        """Whether the process was forked, and the devices stayed with its parent."""
        return was_forked()

    def take(self, chosen: Sequence[Any]) -> tuple[Any, ...]:
        """The devices of this world that are named.

        Args:
          chosen: devices, or the ids of devices.

        Raises:
          PlanError: one is not of this world, or stands twice.
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
        """The devices at these positions among the world's.

        Raises:
          PlanError: there is no such position, or one stands twice.
        """
        count = len(self.devices)
        if wrong := [k for k in positions if not 0 <= k < count]:
            raise PlanError(
                f"the cluster's devices {show(wrong)} are not among the {count} of "
                f"this world, {_ids(self.devices)}."
            )
        return self.take([self.devices[k] for k in positions])

    def check_mesh(self, devices: Sequence[Any]) -> None:
        """Checks that a mesh of these devices can be run by this world's processes.

        Each process of the world runs an equal part of the mesh, as batches are
        split evenly over processes.

        Raises:
          PlanError: processes have unequal parts, or one has none.
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


def grid(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Lays devices out as an array; the first ones where there are more."""
    return np.array(list(devices)[: math.prod(sizes)], dtype=object).reshape(sizes)


def _ids(devices: Sequence[Any]) -> str:
    """Ids of devices, as errors show them."""
    return "[" + ", ".join(str(getattr(d, "id", d)) for d in devices) + "]"
