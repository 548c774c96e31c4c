"""Moves arrays between processes that run stages of one step, and finds lost processes.

If a process hangs, the other processes must not wait for it forever. So each process
has a counter (a heartbeat) in the key-value store of JAX's coordination service, and
increments it regularly. A process counts as lost if its counter does not change for
`SILENCE_S` seconds, or for the seconds of the environment variable
``AUTOPAR_STAGES_SILENCE``. If the service itself does not answer for this time, all
other processes count as lost. A process checks the counters of the others while it
waits in a step.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.errors import PlanError, StageError
from autopar.layouts.pieces import Block, Blocks, Landing, Piece, landings
from autopar.runtime import agreement
from autopar.runtime.agreement import exchange_data, tell_errors
from autopar.runtime.world import World
from autopar_passes import jax_compat, jax_processes

# Reshards an array between devices of several processes.
#
# A *block* is the part of the array on one device. A *piece* is the overlap of a
# block of the target with a block of the source (`autopar.layouts.pieces`). Each
# process receives the pieces of its target blocks and assembles the blocks.


@dataclasses.dataclass(frozen=True)
class Route:
    """The transfers that reshard one array.

    Attributes:
      shape: shape of the array.
      dtype: dtype of the array.
      source: the sharding before.
      target: the sharding after.
      landings: the blocks of the target, in the same order on all processes.
    """

    shape: tuple[int, ...]
    dtype: Any
    source: Any
    target: NamedSharding
    landings: tuple[Landing, ...]

    @functools.cached_property
    def bits(self) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of the array that is sent.

        Arrays of random keys are sent as their uint32 data, other arrays unchanged.
        """
        return jax_compat.bits_struct(self.shape, self.dtype)

    def pieces_between(
        self, origin: int, process: int
    ) -> Iterator[tuple[Landing, Piece]]:
        """Yields the pieces that one process sends to another process, or keeps."""
        for landing in self.landings:
            if landing.process == process:
                for piece in landing.pieces:
                    if piece.process == origin:
                        yield landing, piece

    @functools.cached_property
    def origins(self) -> frozenset[int]:
        """The processes that send or keep pieces."""
        return frozenset(p.process for x in self.landings for p in x.pieces)

    @functools.cached_property
    def processes(self) -> frozenset[int]:
        """The processes that have blocks of the target."""
        return frozenset(x.process for x in self.landings)

    def pieces_sent(self, origin: int, process: int, array: Any) -> list[Any]:
        """Returns the pieces that process ``origin`` sends to ``process``.

        The pieces are on devices of ``origin``.
        """
        pieces = [piece for _, piece in self.pieces_between(origin, process)]
        held = _own_blocks(array) if pieces else {}
        return [_cut(held[p.device], p, _wide(self.bits[1])) for p in pieces]

    def structs(self, origin: int, process: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and devices of the pieces of `pieces_sent` on arrival."""
        dtype = _wide(self.bits[1])
        return [
            jax.ShapeDtypeStruct(
                piece.shape, dtype, sharding=SingleDeviceSharding(landing.devices[0])
            )
            for landing, piece in self.pieces_between(origin, process)
        ]

    def blocks_landed(
        self, process: int, arrived: dict[int, Iterator[Any]], array: Any
    ) -> dict[Any, Any]:
        """Device -> its block of the target, for the devices of a process.

        Args:
          process: number of the process.
          arrived: other process -> its pieces, as in `structs`.
          array: the array in its source sharding; only pieces that stay in the process
            are read from it.
        """
        shape, dtype = self.bits
        block, out = self.target.shard_shape(shape), dict[Any, Any]()
        held = _own_blocks(array) if process in self.origins else {}
        for landing in self.landings:
            if landing.process != process:
                continue
            lead, parts = landing.devices[0], list[Any]()
            for piece in landing.pieces:
                if piece.process == process:
                    part = _cut(held[piece.device], piece, dtype)
                    parts.append(jax.device_put(part, lead))
                else:
                    parts.append(next(arrived[piece.process]).astype(dtype))
            places = tuple(piece.place for piece in landing.pieces)
            made = _together(block, dtype, places, parts, lead)
            out.update((d, jax.device_put(made, d)) for d in landing.devices)
        return out

    def array(self, blocks: Mapping[Any, Any]) -> Any:
        """Makes the array from the blocks on devices of this process."""
        shape, dtype = self.bits
        devices = [d for d in self.target.mesh.devices.flat if d in blocks]  # type: ignore[union-attr]
        made = jax.make_array_from_single_device_arrays(
            shape, self.target, [blocks[d] for d in devices], dtype=dtype
        )
        return jax_compat.with_dtype(made, self.dtype)


def route(
    shape: Sequence[int],
    dtype: Any,
    source: Any,
    target: NamedSharding,
    process_of: Callable[[Any], int] = lambda device: device.process_index,
) -> Route:
    """Returns the route of an array between two shardings.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.
      source: the sharding before.
      target: the sharding after.
      process_of: function that returns the number of a device's process.
    """
    sent, _ = jax_compat.bits_struct(tuple(shape), dtype)
    found = landings(_blocks(source, sent), _blocks(target, sent), process_of)
    return Route(tuple(shape), dtype, source, target, found)


def _blocks(sharding: Any, shape: tuple[int, ...]) -> Blocks:
    """Block of an array -> the devices that hold it."""
    out: dict[Block, tuple[Any, ...]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        block = tuple((begin, end) for begin, end in bounds)
        out[block] = (*out.get(block, ()), device)
    return dict(sorted(out.items()))


def on_device(device: Any) -> NamedSharding:
    """Returns the sharding of an array that is whole on one device."""
    return NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())


def _wide(dtype: Any) -> Any:
    """The dtype in which an array is sent; integers below 8 bits are sent as int8."""
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    return jnp.dtype(jnp.int8) if narrow else dtype


def _own_blocks(array: Any) -> dict[Any, Any]:
    """Device of this process -> its block of an array."""
    bits = jax_compat.key_bits(array)
    return {shard.device: shard.data for shard in bits.addressable_shards}


def _cut(block: Any, piece: Piece, dtype: Any) -> Any:
    """Cuts a piece out of the block on its device, and converts its dtype."""
    if tuple(block.shape) != piece.shape:
        ends = [a + n for a, n in zip(piece.begin, piece.shape, strict=True)]
        block = jax.lax.slice(block, piece.begin, ends)
    return block if block.dtype == dtype else block.astype(dtype)


def _together(
    shape: tuple[int, ...],
    dtype: Any,
    places: tuple[tuple[int, ...], ...],
    parts: Sequence[Any],
    device: Any,
) -> Any:
    """Assembles a block from its pieces, on the device of the pieces."""
    if not parts:
        return jnp.zeros(shape, dtype, device=device)
    if len(parts) == 1:
        return parts[0]
    return _joining(shape, places)(*parts)


@functools.lru_cache(maxsize=256)
def _joining(shape: tuple[int, ...], places: tuple[tuple[int, ...], ...]) -> Any:
    """Returns a jitted function that assembles a block from pieces."""

    def join_pieces(*parts: Any) -> Any:
        block = jnp.zeros(shape, parts[0].dtype)
        for place, part in zip(places, parts, strict=True):
            block = jax.lax.dynamic_update_slice(block, part, place)
        return block

    return jax.jit(join_pieces)


Watched = TypeVar("Watched")

# A process counts as lost if its counter has not changed for this many seconds, by
# default.
SILENCE_S = 7.0
SILENCE_VARIABLE = "AUTOPAR_STAGES_SILENCE"
_BEAT_S, _POLL_S = 0.5, 0.1
# Longest time, in seconds, that the end of the program waits for threads to return to
# Python.
_END_S = 5.0
_ROOT = "autopar/beats"


def silence_s() -> float:
    """The seconds of silence after which a process counts as lost.

    Raises:
      PlanError: the environment variable is not a time.
    """
    text = os.environ.get(SILENCE_VARIABLE)
    if text is None:
        return SILENCE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 2 * _BEAT_S < seconds < math.inf:
        raise PlanError(
            f"{SILENCE_VARIABLE}={text!r} must be a number of seconds above "
            f"{2 * _BEAT_S:g}, such as 60."
        )
    return seconds


class ProgressWatch:
    """Increments this process's counter, and checks the counters of the others."""

    def __init__(
        self, client: Any, index: int, count: int, silence_s: float = SILENCE_S
    ) -> None:
        """Starts to count, in a thread that ends with the program.

        Args:
          client: the client of the coordination service.
          index: number of this process.
          count: number of processes.
          silence_s: a process counts as lost if its counter does not change for this
            number of seconds.
        """
        self._client = client
        self._index = index
        self._others = [k for k in range(count) if k != index]
        self._silence_s = silence_s
        self._counts: dict[int, str] = {}
        # Process -> time at which this process last saw its counter change.
        self._seen = dict.fromkeys(self._others, time.monotonic())
        self._looked = time.monotonic()
        # Process that cannot go on -> its error text.
        self.said: dict[int, str] = {}
        self._ended = threading.Event()
        beat = threading.Thread(target=self._beat, name="watch", daemon=True)
        self._threads = [beat]
        beat.start()
        # A thread that returned to Python after the interpreter has shut down would
        # abort the process.
        atexit.register(self.close)

    def close(self) -> None:
        """Stops counting, and waits for the threads that `leave` was called with."""
        atexit.unregister(self.close)
        self._ended.set()
        end = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def leave(self, thread: threading.Thread) -> None:
        """Stops waiting for a thread that waits for a lost process.

        `close` joins the thread.
        """
        self._threads.append(thread)

    def fail(self, text: str) -> None:
        """Tells the other processes that this process cannot go on."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_ROOT}/{self._index}/failed", text)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            found = jax_compat.coordination()
            if found is None or found.client is not self._client:
                return  # this process has left the coordination service
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_increment(f"{_ROOT}/{self._index}", 1)
                self.look()
                self._looked = time.monotonic()

    def look(self) -> None:
        """Reads the counters and error texts of all other processes.

        Raises:
          jax.errors.JaxRuntimeError: the coordination service does not answer.
        """
        # One request whatever the number of processes: the service answers them all.
        found = dict(self._client.key_value_dir_get(_ROOT))
        for process in self._others:
            key = f"{_ROOT}/{process}"
            count = found.get(key)
            if count is not None and count != self._counts.get(process):
                self._counts[process] = count
                self._seen[process] = time.monotonic()
            if (text := found.get(f"{key}/failed")) is not None:
                self.said[process] = str(text)

    def lost_processes(self, since: float) -> tuple[int, ...]:
        """Returns the lost processes.

        If the coordination service does not answer, all other processes are returned.

        Args:
          since: time at which this process began to wait. Earlier silence of another
            process does not count, because this process may have been suspended.
        """
        if self.said:
            return tuple(self.said)
        now = time.monotonic()
        if now - max(self._looked, since) > self._silence_s:
            return tuple(self._others)
        return tuple(
            process
            for process, seen in self._seen.items()
            if now - max(seen, since) > self._silence_s
        )


class LostError(Exception):
    """Other processes are lost, and this process waits for them.

    Attributes:
      processes: numbers of the lost processes.
      said: the error texts of the lost processes; '' if none was sent.
    """

    def __init__(self, processes: tuple[int, ...], said: str = "") -> None:
        """Creates the error; the attributes describe the arguments."""
        super().__init__(f"processes {', '.join(map(str, processes))} are silent")
        self.processes, self.said = processes, said


def wait_watched(watch: ProgressWatch | None, work: Callable[[], Watched]) -> Watched:
    """Runs ``work`` in a thread and returns its result, unless a process is lost.

    Args:
      watch: checks the other processes; None: ``work`` runs without checks.
      work: a function that waits for other processes. If a process is lost, its thread
        is abandoned.

    Raises:
      LostError: a process is silent, or has reported that it cannot go on.
      Exception: the error that ``work`` raises.
    """
    if watch is None:
        return work()
    done, found = threading.Event(), list[Any]()

    def run() -> None:
        try:
            found.append((True, work()))
        except BaseException as error:
            found.append((False, error))
        done.set()

    begin = time.monotonic()
    thread = threading.Thread(target=run, name="waits for others", daemon=True)
    thread.start()
    while not done.wait(_POLL_S):
        if lost := watch.lost_processes(begin):
            watch.leave(thread)
            raise LostError(lost, "; ".join(watch.said.values()))
    good, value = found[0]
    if good:
        return value
    # A process may report its error and end before this process has read the report.
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service has ended, too
        watch.look()
    if watch.said:
        raise LostError(tuple(watch.said), "; ".join(watch.said.values())) from value
    raise value


Tag = tuple[Any, ...]
# Maps a process to the arrays that were requested from it, in order.
Fetched = dict[int, list[Any]]
T = TypeVar("T")


@contextlib.contextmanager
def meeting(
    links: Links | None, release: Callable[[], None] | None, what: str
) -> Generator[None]:
    """Returns `Links.together`; without links, a context that does nothing."""
    if links is None:
        yield
        return
    with links.together(release, what):
        yield


class Links:
    """The connections of this process to other processes that run stages.

    Arrays are sent through the transfer servers of JAX. A process *offers* an array,
    and another process *fetches* it. Both calls return at once. An offered array is
    kept until the other process has received it. A fetched array is a JAX array that
    becomes ready when its data has arrived.
    """

    def __init__(
        self,
        world: World,
        serve: Callable[[], Any] = jax_processes.transfer_server,
        process_of: Callable[[Any], int] = lambda device: device.process_index,
    ) -> None:
        """Starts the transfer server of this process; all processes must call this.

        Args:
          world: the processes.
          serve: function that starts the server.
          process_of: function that returns the number of a device's process.

        Raises:
          PlanError: another process has failed.
        """
        with tell_errors(world, "connecting the stages"):
            self._silence_s = silence_s()
            self._server = serve()
        own = self._server.address().encode()
        addresses = exchange_data(world, "connecting the stages", own)
        self.world = world
        self.index = world.process_index
        self.number = 0
        self._addresses = [address.decode() for address in addresses]
        self._connections: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._routes: dict[Any, Route] = {}
        self._process_of = process_of
        found = jax_compat.coordination()
        self._watch = (
            None
            if found is None
            else ProgressWatch(found.client, found.index, found.count, self._silence_s)
        )
        # Tag and process of a transfer -> requested arrays that have not arrived.
        self._asked: dict[tuple[Tag, int], list[Any]] = {}
        self._lost: StageError | None = None

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """The first device of each process; it holds values that all processes get."""
        first: dict[int, Any] = {}
        for device in self.world.devices:
            first.setdefault(self._process_of(device), device)
        return tuple(first[k] for k in sorted(first))

    def offer(
        self, tag: Tag, arrays: Sequence[Any] | None, routes: Sequence[Route]
    ) -> None:
        """Offers arrays to the processes that fetch them under the same tag.

        Args:
          tag: names this transfer within the step.
          arrays: arrays with shards on devices of this process. None if this process
            failed to compute them: it then offers zeros, so that the receivers go on
            until they learn of the failure.
          routes: the route of each array.
        """
        for process in sorted(frozenset[int]().union(*(w.processes for w in routes))):
            if process == self.index:
                continue
            if arrays is None:
                structs = [s for w in routes for s in w.structs(self.index, process)]
                found = [jnp.zeros(s.shape, s.dtype) for s in structs]
            else:
                pairs = zip(routes, arrays, strict=True)
                found = [
                    p for w, x in pairs for p in w.pieces_sent(self.index, process, x)
                ]
            if found:
                self._server.await_pull(self._id(tag, self.index, process), found)

    def fetch(self, tag: Tag, routes: Sequence[Route]) -> Fetched:
        """Requests the arrays that other processes offer; the data arrives later.

        Args:
          tag: the tag of the offer.
          routes: the route of each array.
        """
        found: Fetched = {}
        for process in sorted(frozenset[int]().union(*(w.origins for w in routes))):
            if process == self.index:
                continue
            wanted = [s for w in routes for s in w.structs(process, self.index)]
            if wanted:
                number = self._id(tag, process, self.index)
                found[process] = self._connection(process).pull(number, wanted)
                self._ask(tag, process, found[process])
        return found

    def land_pieces(
        self,
        routes: Sequence[Route],
        fetched: Fetched,
        arrays: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Builds arrays in their target shardings from the pieces of all processes.

        Args:
          routes: the route of each array.
          fetched: the result of `fetch`.
          arrays: the arrays in their source shardings; None: this process has no
            shards of them.
        """
        arrived = {process: iter(pieces) for process, pieces in fetched.items()}
        out: list[Any] = []
        for k, way in enumerate(routes):
            given = None if arrays is None else arrays[k]
            mine = way.origins | way.processes == frozenset({self.index})
            if mine and given is not None and given.is_fully_addressable:
                out.append(jax.device_put(given, way.target))
                continue
            blocks = way.blocks_landed(self.index, arrived, given)
            out.append(way.array(blocks))
        return out

    def move_arrays(
        self, tag: Tag, arrays: Sequence[Any] | None, routes: Sequence[Route]
    ) -> list[Any]:
        """Moves arrays to their target shardings.

        All processes that have shards of the arrays, before or after, must call this. A
        process that has no shards afterwards gets arrays without shards.

        Args:
          tag: names this transfer within the step.
          arrays: the arrays in their source shardings; None: this process has no
            shards of them.
          routes: the route of each array.
        """
        if arrays is not None:
            self.offer(tag, arrays, routes)
        return self.land_pieces(routes, self.fetch(tag, routes), arrays)

    def _ask(self, tag: Tag, process: int, pulled: list[Any]) -> None:
        """Records requested arrays, and forgets those that have arrived."""
        with self._lock:
            for key in [k for k, arrays in self._asked.items() if _there(arrays)]:
                del self._asked[key]
            self._asked[tag, process] = pulled

    def everywhere(self, tag: Tag, struct: Any, source: Any, array: Any) -> Any:
        """Copies an array to a device of each process; all processes must call this.

        Args:
          tag: names this transfer.
          struct: shape and dtype of the array.
          source: sharding of the array.
          array: the array; None if this process has no shards of it, or failed to
            compute it.
        """
        found: list[Any] = []
        for process, device in enumerate(self.devices):
            way = self.route(struct.shape, struct.dtype, source, on_device(device))
            arrays = None if array is None else [array]
            if self.index in way.origins and process != self.index:
                self.offer((*tag, process), arrays, [way])
            elif process == self.index:
                failed = arrays is None and self.index in way.origins
                fetched = self.fetch((*tag, process), [way])
                if not failed:
                    found = self.land_pieces([way], fetched, arrays)
        return found[0] if found else None

    def route(
        self,
        shape: Sequence[int],
        dtype: Any,
        source: Any,
        target: NamedSharding,
    ) -> Route:
        """Like `autopar.runtime.stages.transport.route`, with a cache."""
        key = tuple(shape), str(dtype), source, target
        found = self._routes.get(key)
        if found is None:
            found = route(shape, dtype, source, target, self._process_of)
            self._routes[key] = found
        return found

    def begin(self, digest: bytes, *, first: bool) -> bool:
        """Begins a step on all processes.

        Args:
          digest: 32 bytes that should be equal on all processes.
          first: whether another process may report a failure in this exchange, as in
            the first step.

        Returns whether the digests are equal on all processes.

        Raises:
          PlanError: a process has failed.
          StageError: a process has ended.
        """
        own = self.number.to_bytes(8, "little") + digest
        what = "beginning a step"
        every = (
            exchange_data(self.world, what, own) if first else self._gather(own, what)
        )
        self.number = 1 + max(int.from_bytes(x[:8], "little") for x in every)
        return len({x[8:] for x in every}) == 1

    @contextlib.contextmanager
    def together(
        self, release: Callable[[], None] | None, what: str = "running a step"
    ) -> Generator[None]:
        """A context that all processes enter; an error in one fails it in all.

        Args:
          release: function to call after an error in this process, so that no other
            process waits for its arrays. None: the other processes wait in collectives,
            which nothing can end, so no process can go on.
          what: description of the work, for error messages.

        Raises:
          PlanError: another process has failed.
          StageError: another process has ended.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            if release is None:
                self._end(error, what)
                raise
            failed = error
            with contextlib.suppress(Exception):
                release()
        try:
            every = self._gather(b"\0" if failed is None else b"\1", what)
        except StageError as lost:
            raise lost from failed or lost.__cause__
        if not any(map(any, every)):
            return
        with tell_errors(self.world, what):
            if failed is not None:
                raise failed
        exchange_data(self.world, what)

    def agree(self, holds: bool, what: str) -> bool:
        """Whether ``holds`` is true on all processes; all must call this.

        Raises:
          StageError: a process has ended.
        """
        return all(map(any, self._gather(bytes([holds]), what)))

    def _end(self, error: Exception, what: str) -> None:
        """Tells the other processes that this process cannot go on."""
        agreement.leave_at_end()
        if self._watch is not None and self._lost is None:
            self._watch.fail(f"{type(error).__name__}: {error}")
        self._lost = self._lost or StageError(
            f"process {self.index} failed before while {what}, and the others with it: "
            "start all of them again from a checkpoint."
        )

    def _gather(self, data: bytes, what: str) -> list[bytes]:
        try:
            return self.wait_for(lambda: self.world.channel.gather(data), what)
        except jax.errors.JaxRuntimeError as error:
            agreement.leave_at_end()
            self._lost = StageError(
                f"process {self.index} has lost another process while {what}: it has "
                "ended or cannot be reached. The stages of a pipeline need all "
                f"processes: start all of them again from a checkpoint. ({error})"
            )
            raise self._lost from error

    def wait_for(self, work: Callable[[], T], what: str = "running a step") -> T:
        """Runs a function that waits for other processes, and returns its result.

        Args:
          work: the function.
          what: description of the work, for error messages.

        Raises:
          StageError: a process does not answer.
        """
        if self._lost is not None:
            raise self._lost
        try:
            return wait_watched(self._watch, work)
        except LostError as lost:
            agreement.leave_at_end()
            numbers = ", ".join(map(str, lost.processes))
            if lost.said:
                self._lost = StageError(
                    f"process {numbers} has failed while {what}: {lost.said}. It runs "
                    "a stage together with others: start all of them again from a "
                    "checkpoint."
                )
                raise self._lost from lost
            self._lost = StageError(
                f"process {self.index} has waited {self._silence_s:g} s for "
                f"process {numbers} while {what}{self._awaited_tasks()}: it does not "
                "answer, as if it hung. The stages of a pipeline need all processes: "
                "start all of them again from a checkpoint. If the machine is so busy "
                f"that a process gets no processor for so long, set {SILENCE_VARIABLE} "
                "to more seconds."
            )
            raise self._lost from lost

    def _awaited_tasks(self) -> str:
        """Names a requested transfer that has not arrived; '' if there is none."""
        for (tag, process), arrays in list(self._asked.items()):
            if not _there(arrays):
                return f", {task_text(tag)} of process {process}"
        return ""

    def _connection(self, process: int) -> Any:
        with self._lock:
            if process not in self._connections:
                address = self._addresses[process]
                self._connections[process] = self._server.connect(address)
            return self._connections[process]

    def _id(self, tag: Tag, origin: int, process: int) -> int:
        """Returns a number that identifies this transfer between these processes."""
        text = repr((self.number, tag, origin, process)).encode()
        found = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(found, "little") >> 1


def task_text(tag: Tag) -> str:
    """Describes a transfer in words, for error messages.

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
    """Whether arrays have arrived.

    An array that a program has donated also counts as arrived.
    """
    return all(array.is_deleted() or array.is_ready() for array in arrays)
