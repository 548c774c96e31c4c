"""Moves arrays between processes that run stages of one step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.errors import StageError
from autopar.runtime import ending
from autopar.runtime.exchange import exchanged, told
from autopar.runtime.stages.watch import SILENCE_S, LostError, Watch, waited
from autopar.runtime.world import World
from autopar_passes import jax_compat, jax_processes

Tag = tuple[Any, ...]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """How one array goes from one process to another: in its parts, or whole.

    Each part is sent once, however many devices hold it.

    Attributes:
      shape: of the array.
      dtype: of the array.
      source: where it lies before.
      target: where it must lie.
      takes: devices whose parts are sent; empty: it is put together first.
      lands: for each part, the devices that hold it afterwards.
    """

    shape: tuple[int, ...]
    dtype: Any
    source: NamedSharding
    target: NamedSharding
    takes: tuple[Any, ...]
    lands: tuple[tuple[Any, ...], ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return 0 in self.shape


def route(
    shape: Sequence[int], dtype: Any, source: NamedSharding, target: NamedSharding
) -> Route:
    """The route of an array between two layouts, of one process each."""
    sent, _ = jax_compat.bits_struct(tuple(shape), dtype)
    have, want = _parts(source, sent), _parts(target, sent)
    if have.keys() == want.keys():
        takes = tuple(devices[0] for devices in have.values())
        lands = tuple(want[part] for part in have)
    else:
        takes, lands = (), ((next(iter(want.values()))[0],),)
    return Route(tuple(shape), dtype, source, target, takes, lands)


def _parts(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> dict[tuple[tuple[int, int], ...], tuple[Any, ...]]:
    """Part of an array -> the devices that hold it; the same order for all layouts."""
    out: dict[tuple[tuple[int, int], ...], tuple[Any, ...]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        part = tuple((begin, end) for begin, end in bounds)
        out[part] = (*out.get(part, ()), device)
    return dict(sorted(out.items()))


def on_device(device: Any) -> NamedSharding:
    """The layout of an array that lies whole on one device."""
    return NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())


@contextlib.contextmanager
def meeting(
    links: Links | None, release: Callable[[], None], what: str
) -> Generator[None]:
    """`Links.together`; without links as it is."""
    if links is None:
        yield
        return
    with links.together(release, what):
        yield


class Links:
    """What this process hands to the others that run stages, and takes from them.

    Arrays go through the transfer servers of JAX. Offers and fetches return at once:
    an offered array is kept until the other process takes it, a fetched one is there
    once it is.
    """

    def __init__(
        self, world: World, serve: Callable[[], Any] = jax_processes.transfer_server
    ) -> None:
        """Starts this process's server; all processes do so together.

        Args:
          world: the processes.
          serve: starts the server.

        Raises:
          PlanError: another process has failed.
        """
        with told(world, "connecting the stages"):
            self._server = serve()
        own = self._server.address().encode()
        addresses = exchanged(world, "connecting the stages", own)
        self.world = world
        self.index = world.process_index
        self.number = 0
        self._addresses = [address.decode() for address in addresses]
        self._connections: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._routes: dict[Any, Route] = {}
        self._joins: dict[NamedSharding, Any] = {}
        found = jax_compat.coordination()
        self._watch = (
            None if found is None else Watch(found.client, found.index, found.count)
        )
        # What a step has asked for and has not got: by tag the process and the arrays.
        self._asked: dict[Tag, tuple[int, list[Any]]] = {}
        self._lost: StageError | None = None

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """The first device of each process, which takes what all are told."""
        first: dict[int, Any] = {}
        for device in self.world.devices:
            first.setdefault(device.process_index, device)
        return tuple(first[k] for k in sorted(first))

    def offer(self, tag: Tag, arrays: Sequence[Any], routes: Sequence[Route]) -> None:
        """Hands arrays to the process that fetches them under the same tag.

        Args:
          tag: names this transfer within the step.
          arrays: on devices of this process.
          routes: of each array.
        """
        found: list[Any] = []
        for array, way in zip(arrays, routes, strict=True):
            found.extend(_pieces(array, way))
        if found:
            self._server.await_pull(self._id(tag), found)

    def fetch(self, process: int, tag: Tag, routes: Sequence[Route]) -> list[Any]:
        """The arrays that a process offers under a tag; they arrive later.

        Args:
          process: number of the other process.
          tag: as it was offered.
          routes: of each array.
        """
        wanted = [s for way in routes for s in _structs(way)]
        pulled: list[Any] = []
        if wanted:
            pulled = self._connection(process).pull(self._id(tag), wanted)
        self._ask(tag, process, pulled)
        rest = iter(pulled)
        return [_landed(way, rest) for way in routes]

    def _ask(self, tag: Tag, process: int, pulled: list[Any]) -> None:
        """Keeps what was asked for until it is there, and drops what has come."""
        with self._lock:
            for key in [k for k, (_, arrays) in self._asked.items() if _there(arrays)]:
                del self._asked[key]
            self._asked[tag] = process, pulled

    def give_up(self, tag: Tag, routes: Sequence[Route]) -> None:
        """Offers zeros in place of what this process failed to make.

        The process that waits for it goes on, and hears of the failure afterwards.
        """
        zeros = [jnp.zeros(s.shape, s.dtype) for w in routes for s in _structs(w)]
        if zeros:
            self._server.await_pull(self._id(tag), zeros)

    def spread(self, tag: Tag, owner: int, array: Any) -> Any:
        """An array of one process on a device of each.

        Args:
          tag: names this transfer.
          owner: the process that has all of it.
          array: the array; on other processes only shape and dtype are looked at.
        """
        own = on_device(self.devices[self.index])
        if owner != self.index:
            source = on_device(self.devices[owner])
            way = self.route(array.shape, array.dtype, source, own)
            return self.fetch(owner, (*tag, self.index), [way])[0]
        here = jax.device_put(array, own)
        for process, device in enumerate(self.devices):
            if process != owner:
                target = on_device(device)
                way = self.route(array.shape, array.dtype, own, target)
                self.offer((*tag, process), [here], [way])
        return here

    def joined(self, sharding: NamedSharding) -> Any:
        """A jitted function that puts rows below each other, in a layout."""
        if sharding not in self._joins:
            self._joins[sharding] = jax.jit(
                lambda *rows: jnp.concatenate(rows), out_shardings=sharding
            )
        return self._joins[sharding]

    def route(
        self,
        shape: Sequence[int],
        dtype: Any,
        source: NamedSharding,
        target: NamedSharding,
    ) -> Route:
        """See `route`; known from before."""
        key = tuple(shape), str(dtype), source, target
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = route(shape, dtype, source, target)
        return found

    def begin(self, digest: bytes, *, first: bool) -> bool:
        """Begins a step on all processes.

        Args:
          digest: 32 bytes that must be the same on all of them.
          first: whether a process may fail in place of this, as in a first step.

        Returns whether the digests are the same.

        Raises:
          PlanError: a process has failed.
          StageError: a process has ended.
        """
        own = self.number.to_bytes(8, "little") + digest
        what = "beginning a step"
        every = exchanged(self.world, what, own) if first else self._gather(own, what)
        self.number = 1 + max(int.from_bytes(x[:8], "little") for x in every)
        return len({x[8:] for x in every}) == 1

    @contextlib.contextmanager
    def together(
        self, release: Callable[[], None], what: str = "running a step"
    ) -> Generator[None]:
        """Does something on all processes; where it fails on one it fails on all.

        Args:
          release: called where it fails here, so that no other process waits for what
            this one will not make.
          what: is being done.

        Raises:
          PlanError: another process has failed.
          StageError: another process has ended.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
            with contextlib.suppress(Exception):
                release()
        try:
            every = self._gather(b"\0" if failed is None else b"\1", what)
        except StageError as lost:
            raise lost from failed or lost.__cause__
        if not any(map(any, every)):
            return
        with told(self.world, what):
            if failed is not None:
                raise failed
        exchanged(self.world, what)

    def _gather(self, data: bytes, what: str) -> list[bytes]:
        try:
            return self.waited(lambda: self.world.channel.gather(data), what)
        except jax.errors.JaxRuntimeError as error:
            ending.leave_at_end()
            raise StageError(
                f"process {self.index} has lost another process while {what}: it has "
                "ended or cannot be reached. The stages of a pipeline need all "
                f"processes: start all of them again from a checkpoint. ({error})"
            ) from error

    def waited(self, work: Callable[[], T], what: str = "running a step") -> T:
        """The result of what waits for other processes.

        Args:
          work: waits.
          what: is being done.

        Raises:
          StageError: a process does not answer.
        """
        if self._lost is not None:
            raise self._lost
        try:
            return waited(self._watch, work)
        except LostError as lost:
            ending.leave_at_end()
            numbers = ", ".join(map(str, lost.processes))
            self._lost = StageError(
                f"process {self.index} has waited {SILENCE_S:g} s for process "
                f"{numbers} while {what}{self._awaited()}: it does not answer, as if "
                "it hung. The stages of a pipeline need all processes: start all of "
                "them again from a checkpoint."
            )
            raise self._lost from lost

    def _awaited(self) -> str:
        """Which task's results have not come, of those that were asked for."""
        for tag, (process, arrays) in list(self._asked.items()):
            if not _there(arrays):
                return f", {task_text(tag)} of process {process}"
        return ""

    def _connection(self, process: int) -> Any:
        with self._lock:
            if process not in self._connections:
                address = self._addresses[process]
                self._connections[process] = self._server.connect(address)
            return self._connections[process]

    def _id(self, tag: Tag) -> int:
        """A number that no other transfer of these processes has."""
        text = repr((self.number, tag)).encode()
        found = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(found, "little") >> 1


def task_text(tag: Tag) -> str:
    """Says what a transfer is of.

    >>> task_text(("backward", 1, 1, 0, 3))
    'for backward of stage 1 and microbatch 3'
    """
    if len(tag) == 5 and isinstance(tag[1], int):
        phase, stage, _, _, number = tag
        which = "" if number < 0 else f" and microbatch {number}"
        return f"for {phase} of stage {stage}{which}"
    if tag[:1] == ("rows",):
        return "for its rows of the batch"
    return f"for {' '.join(map(str, tag))}"


def _there(arrays: Sequence[Any]) -> bool:
    """Whether arrays have come; what was taken over by a program has."""
    return all(array.is_deleted() or array.is_ready() for array in arrays)


def _wide(dtype: Any) -> Any:
    """The dtype in which numbers are sent: whole bytes."""
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    return jnp.dtype(jnp.int8) if narrow else dtype


def _pieces(array: Any, way: Route) -> list[Any]:
    if way.empty:
        return []
    bits = jax_compat.key_bits(array)
    if (wide := _wide(bits.dtype)) != bits.dtype:
        bits = bits.astype(wide)
    if not way.takes:
        bits = jax.device_put(bits, NamedSharding(way.source.mesh, PartitionSpec()))
        return [bits.addressable_shards[0].data]
    held = {shard.device: shard.data for shard in bits.addressable_shards}
    return [held[device] for device in way.takes]


def _structs(way: Route) -> list[jax.ShapeDtypeStruct]:
    """The parts of an array as they arrive."""
    if way.empty:
        return []
    shape, dtype = jax_compat.bits_struct(way.shape, way.dtype)
    part = way.target.shard_shape(shape) if way.takes else shape
    return [
        jax.ShapeDtypeStruct(
            part, _wide(dtype), sharding=SingleDeviceSharding(devices[0])
        )
        for devices in way.lands
    ]


def _landed(way: Route, pulled: Any) -> Any:
    """Puts an array together of the parts that arrive."""
    if way.empty:
        return jnp.zeros(way.shape, way.dtype, device=way.target)
    shape, dtype = jax_compat.bits_struct(way.shape, way.dtype)
    held: dict[Any, Any] = {}
    for devices in way.lands:
        piece = next(pulled)
        if piece.dtype != dtype:
            piece = piece.astype(dtype)
        held.update((d, jax.device_put(piece, d)) for d in devices)
    if way.takes:
        own = [held[d] for d in way.target.addressable_devices_indices_map(shape)]
        made = jax.make_array_from_single_device_arrays(shape, way.target, own)
    else:
        made = jax.device_put(next(iter(held.values())), way.target)
    return jax_compat.with_dtype(made, way.dtype)
