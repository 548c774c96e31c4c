"""One worker process of a run: it joins and leaves worlds, and keeps its state.

A world is a set of processes that train together. When a world breaks, each process
keeps the states of its last steps. The supervisor then finds the latest step whose
whole state the processes hold together.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import gc
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import jax

from autopar.elastic.processes import holding
from autopar.elastic.processes.activity import Activity
from autopar.elastic.processes.holding import Holding
from autopar.elastic.processes.link import (
    FOLDER_VARIABLE,
    VARIABLE,
    Address,
    Link,
)
from autopar.elastic.processes.links import TELL_S, Traffic
from autopar.elastic.processes.members import Message, ProcessId
from autopar.elastic.processes.network import (
    Network,
    inodes,
    join_address,
    split_address,
)
from autopar.elastic.processes.offers import Fetcher, Offers, Peer, StateSource
from autopar.elastic.processes.relay import (
    Relay,
    break_connections,
    knock,
    listening,
    shut_down,
)
from autopar.elastic.processes.respawning import Respawning
from autopar.errors import PlanError, RunError
from autopar.runtime.key_values import KeyValueExchange
from autopar.runtime.threads import Threads
from autopar.runtime.world import JaxChannel, LoneChannel, World
from autopar_passes import jax_processes

# Copies, for other processes, of the arrays that only this process holds.


class Copier:
    """Sends this process's state to other processes after each step, in the background.

    The copies are at most one step late.
    """

    def __init__(self, token: str, network: Network) -> None:
        """Has no receivers yet; `aim` sets them."""
        self._token, self._network = token, network
        self._changed = threading.Condition()
        self._waiting: Holding | None = None
        self._busy = False
        self._takers: tuple[str, ...] = ()
        self._peers: dict[str, Peer] = {}
        threading.Thread(target=self._work, daemon=True, name="copies").start()

    def aim(self, takers: Sequence[str]) -> None:
        """Sets the addresses of the processes (`Offers`) that receive later copies."""
        with self._changed:
            self._takers, self._waiting = tuple(takers), None

    def send(self, held: Holding) -> None:
        """Sends copies in the background, after the copies of the step before."""
        self.wait()
        with self._changed:
            if self._takers:
                self._waiting, self._busy = held, True
                self._changed.notify_all()

    def wait(self) -> None:
        """Waits until each receiver has all copies or is gone."""
        with self._changed:
            while self._busy:
                self._changed.wait()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    self._busy = False
                    self._changed.notify_all()
                    self._changed.wait()
                held, self._waiting = self._waiting, None
                takers = self._takers
            for address in takers:
                # The supervisor notices a receiver that is gone.
                with contextlib.suppress(OSError):
                    self._copy(address, held)

    def _copy(self, address: str, held: Holding) -> None:
        try:
            if address not in self._peers:
                self._peers[address] = Peer(address, self._token, self._network)
            self._peers[address].copy(held)
        except OSError:
            if (peer := self._peers.pop(address, None)) is not None:
                peer.close()
            raise


# The channel between the processes of a world that may break at any time.


@dataclasses.dataclass(frozen=True, slots=True)
class WorldChannel:
    """Exchanges bytes like `JaxChannel`, but stops an exchange when the world is left.

    Attributes:
      client: client of the world's coordination service.
      index: number of this process.
      count: number of processes.
      check: raises an error once the process must leave the world.
    """

    client: Any
    index: int
    count: int
    check: Callable[[], None]

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`; a lost process ends the collective with an error."""
        return JaxChannel().broadcast(data)

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        return JaxChannel().gather(data)

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        return self._store().exchange(data, what)

    def tell(self, data: bytes) -> None:
        """See `Channel`."""
        self._store().tell(data)

    def _store(self) -> KeyValueExchange:
        return KeyValueExchange(self.client, self.index, self.count, self.check)


# How long other processes may take to connect. XLA ends a process that takes longer.
_CONNECT_S = 50
_WATCH_S = 0.2
# How long a step may run on after its world must be left. The connections are shut down
# at once, so a collective that notices the loss ends within milliseconds.
_PATIENCE_S = 0.5
# How long a process that exits waits for such a step: a collective ends after 10 s by
# default.
_LEFT_BEHIND_S = 15.0

T = TypeVar("T")


class WorldBroken(Exception):
    """This process must leave its world, because a process was lost or joins."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A world that this process has joined.

    Attributes:
      world: processes and devices of the world.
      generation: number of the world; each new world has a higher number.
      step: number of steps done; 0 in a run that begins.
      extra: plain data that was kept with the arrays of the state.
      fetch: reads the state; None: no process holds a state.
      lost_step: number of steps done when the state was lost; None: the state was not
        lost.
      cluster: cluster to plan for, as data, if an event has set a cluster; None: the
        cluster that the script names.
      why: why the world was formed, such as which worker joined; '' for the first
        world.
    """

    world: World
    generation: int
    step: int
    extra: Mapping[str, Any]
    fetch: Fetcher | None
    lost_step: int | None
    cluster: Mapping[str, Any] | None
    why: str = ""


class Team:
    """This process's part in a run of several.

    Attributes:
      rows: rows of a batch, a multiple of the number of devices of each world; 0: any
        number of devices will do.
    """

    def __init__(
        self,
        address: Address,
        survive: int,
        rows: int,
        events: Sequence[str] = (),
        *,
        saves: bool = False,
    ) -> None:
        """Connects to the supervisor.

        Args:
          address: address of the supervisor.
          survive: how many processes may die at once without losing state that only
            they hold.
          rows: rows of a batch, a multiple of the number of devices of each world; 0:
            any number of devices will do.
          events: sources of events that the supervisor listens to.
          saves: whether the run has checkpoints. Only such a run may end without a
            supervisor.

        Raises:
          PlanError: there is no supervisor.
        """
        self._saves = saves
        self._form: Message | None = None
        # Generation of the world that ends without a supervisor.
        self._last_generation: int | None = None
        self._client: Any = None  # set once the client has connected
        self._relay: Relay | None = None
        # Held while a thread ends the waits of a world, so that it cannot hit the next
        # world.
        self._breaking = threading.Lock()
        self._recent: list[tuple[int, dict[str, Any], Mapping[str, Any]]] = []
        self._survive, self.rows, self._events = survive, rows, tuple(events)
        self._trains = False
        # The listening ports and the sockets that this process had before it joined its
        # world.
        self._listening: frozenset[str] = frozenset()
        self._older: frozenset[int] = frozenset()
        self.respawning = Respawning(address.worker)
        self._network = Network.of_environment()
        self._offers = Offers(address.token, self._network, self._obey)
        self._copier = Copier(address.token, self._network)
        self._caller: Threads | None = None
        try:
            # Without a supervisor, a world must not train while another supervisor runs
            # a world.
            holds = not (self._network.is_local or saves)
            handlers = self._break, self._drop_older
            self._link = Link(address, self._network, *handlers, holds=holds)
        except OSError as error:
            raise PlanError(
                f"no supervisor at {address.supervisor} ({error}). Start the script "
                "with `autopar run --processes N script.py`."
            ) from error
        threading.Thread(target=self._watch, daemon=True, name="watch").start()
        if not self._network.is_local:
            threading.Thread(target=self._tell_sent, daemon=True, name="sent").start()

    @property
    def is_orphaned(self) -> bool:
        """Whether the supervisor is gone for good, so that the run ends at this step.

        The first process decides for all processes, because they notice the loss at
        different times.
        """
        form = self._form
        return form is not None and form["generation"] == self._last_generation

    @property
    def is_over_hosts(self) -> bool:
        """Whether processes of other hosts may take part."""
        return not self._network.is_local

    @property
    def is_suspended(self) -> bool:
        """Whether the run saves its state at this step and ends, to resume later."""
        return self._link.is_suspended

    @property
    def is_stopped(self) -> bool:
        """Whether the loop of the script is to end at this step."""
        return self._link.is_stopped

    @property
    def activity(self) -> Activity:
        """What the training loop is doing now; the supervisor reads it."""
        return self._link.activity

    def say(self, kind: str, **data: Any) -> None:
        """Sends the supervisor a message of this worker."""
        self._link.say(kind, **data)

    def on_prepare(self, take: Callable[[Message], None]) -> None:
        """Sets what takes the supervisor's orders to prepare next worlds."""
        self._link.prepare = take

    def say_saving(self) -> None:
        """Tells the supervisor that this process saves the state and then ends."""
        self._link.say("saving")

    def lost_error(self, saved: str) -> RunError:
        """The error of a run that lost its supervisor; `saved` says what was saved."""
        return self._link.lost_error(saved)

    def _tell_sent(self) -> None:
        """Tells the supervisor how many bytes this process sends to other hosts."""
        traffic = Traffic(self._network.host)
        while True:
            time.sleep(TELL_S)
            sent = traffic.take()
            self._link.say("sent", nbytes=sent.nbytes, busy_s=sent.busy_s)

    def _watch(self) -> None:
        """Stops all processes at the same step when the supervisor is gone.

        Without checkpoints no process stops, because the state would be lost.
        """
        while self._saves:
            time.sleep(_WATCH_S)
            form = self._form
            if self._link.is_lost and form is not None and form["rank"] == 0:
                with contextlib.suppress(OSError):
                    self._stop_together(form)
                return

    def _stop_together(self, form: Message) -> None:
        """Pauses the world in place of the supervisor; the first process calls this."""
        generation, token = form["generation"], self._link.address.token
        self._last_generation = generation
        others = form["members"][1:]
        peers = [Peer(m["address"], token, self._network) for m in others]
        started = [self._link.pause(generation)]
        started += [p.order("pause", generation=generation) for p in peers]
        last = max(k for k in started if k is not None)
        for peer in peers:
            peer.order("limit", generation=generation, step=last)
        self._link.limit(generation, last)

    def _obey(self, request: Mapping[str, Any]) -> int | None:
        """Follows an order of the first process while there is no supervisor."""
        if request["order"] == "pause":
            return self._link.pause(request["generation"])
        self._last_generation = request["generation"]
        self._link.limit(request["generation"], request["step"])
        return None

    @classmethod
    def of_environment(
        cls,
        survive: int,
        rows: int,
        events: Sequence[str] = (),
        *,
        saves: bool = False,
    ) -> Team | None:
        """The team that `autopar run` started this process for, or None."""
        if not (text := os.environ.get(VARIABLE)):
            return None
        return Team(Address.parse(text), survive, rows, events, saves=saves)

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the run."""
        return run_folder()

    def join(self) -> Joined:
        """Waits for a world and joins it; tries again if the world fails to form."""
        own = ProcessId.of(os.getpid())
        while True:
            self.respawning.load(self._offers)
            self._link.say(
                "ready",
                holds=self._offers.describe(),
                address=self._offers.address,
                pid=os.getpid(),
                process=None if own is None else own.to_data(),
                devices=local_devices(),
                rows=self.rows,
            )
            order = self._link.order()
            if order["kind"] == "end":
                self._dismiss(order)
            try:
                return self._join(order)
            except Exception as error:  # a process died while the world formed
                if not self._link.verdict(error):
                    raise
                self.leave()

    def _join(self, form: Message) -> Joined:
        self._form = form
        index, count = form["rank"], len(form["members"])
        address = self._beside_supervisor(form["address"])
        jax_processes.leave_world()
        network, relay = self._network, None
        if count > 1:
            relay = Relay(address, network, index, count, _CONNECT_S)
        self._relay, self._listening = relay, listening()
        self._older = frozenset(inodes(os.getpid()))
        if relay is not None:
            client = jax_processes.coordination_client(relay.address, index, _CONNECT_S)
            client.connect()
            self._client = client  # XLA ends a process that uses an unconnected client
            relay.on_client(client)
            if relay.alone:
                raise WorldBroken("the coordination service died as the world formed")
            jax_processes.enter_world(client, network.host, index, count)
        self._check_alive()
        devices = tuple(jax.devices())
        self.respawning.decide(devices[0].platform)
        self._check_alive()
        channel = WorldChannel(self._client, index, count, self._check_alive)
        world = World(devices, index, count, channel if count > 1 else LoneChannel())
        source = form.get("state")
        fetch = None
        if source is not None:
            token = self._link.address.token
            wanted = StateSource.from_data(source)
            fetch = Fetcher(wanted, self._offers, token, network)
        members = form["members"]
        self._copier.aim(takers([m["address"] for m in members], index, self._survive))
        return Joined(
            world=world,
            generation=form["generation"],
            step=0 if source is None else source["step"],
            extra={} if source is None else source["extra"],
            fetch=fetch,
            lost_step=form.get("lost"),
            cluster=form.get("cluster"),
            why=form.get("why", ""),
        )

    def _beside_supervisor(self, address: str) -> str:
        """The address, with the host by which this process reaches the supervisor."""
        if self._network.is_local or not address:
            return address
        host, _ = split_address(self._link.address.supervisor)
        return join_address(host, split_address(address)[1])

    def _check_alive(self) -> None:
        if self._link.must_leave:
            raise WorldBroken("the world is left")

    def say_placed(
        self,
        step: int,
        arrays: dict[str, Any],
        extra: Any,
        cluster: Any,
        scheme: str,
        broke_s: float | None,
    ) -> float | None:
        """Says that this process has the state of its new world.

        Args:
          step: number of steps done.
          arrays: path -> global array.
          extra: plain data that belongs to the arrays.
          cluster: cluster that is planned for, as data.
          scheme: the plan's scheme, in words.
          broke_s: when this process last trained (`time.perf_counter`); None: it has
            not trained yet.

        Returns:
          The seconds since ``broke_s``; None: the process has not trained yet.
        """
        self._recent = []
        self.keep_state(step, arrays, extra)
        self._trains = False
        self._copier.wait()
        if self.respawning.is_on and self._survive:
            if not self.respawning.is_due(step):
                self._write(step, arrays, extra)
            self.respawning.wait()
        pause_s = None if broke_s is None else time.perf_counter() - broke_s
        self._link.say(
            "formed",
            step=step,
            cluster=cluster,
            scheme=scheme,
            devices=local_devices(),
            events=self._events,
            pause_s=pause_s,
            respawns=self.respawning.is_on,
        )
        return pause_s

    def keep_state(self, step: int, arrays: dict[str, Any], extra: Any) -> None:
        """Keeps the state after a step until a later state is safe.

        Args:
          step: number of steps done.
          arrays: path -> global array; a later step must not consume (donate) them.
          extra: plain data that belongs to the arrays.
        """
        assert self._form is not None
        jax.block_until_ready(arrays)
        self._trains = True
        own = holding.only_here(arrays) if len(self._form["members"]) > 1 else {}
        # Another process may be one step ahead, and copies may be two steps behind.
        window = 3 if own else 1
        self._recent = [*self._recent, (step, arrays, extra)][-window:]
        if self._survive and self.respawning.is_due(step):
            self._write(step, arrays, extra)
        if own and self._survive:
            shapes = holding.shapes_of(arrays)
            self._copier.send(
                holding.Holding(
                    version=holding.version(step, self._form["generation"]),
                    step=step,
                    shapes=shapes,
                    tiles=own,
                    extra=extra,
                )
            )
            generation = self._form["generation"]
            self._offers.keep(lambda h: not _older(h, generation, step - window))

    def _write(self, step: int, arrays: dict[str, Any], extra: Any) -> None:
        """Writes a state to shared memory in the background."""
        assert self._form is not None
        generation = self._form["generation"]
        self.respawning.write(
            lambda: holding.hold(arrays, step=step, generation=generation, extra=extra),
            spare=3 if holding.only_here(arrays) else 1,
        )

    def run(self, function: Callable[[], T]) -> T:
        """Calls a function that may wait for processes that are gone.

        When the other end closes while gloo sends, gloo can miss that the send failed.
        It then waits until the timeout of collectives. So this method gives the call
        up, and the call ends by itself in its thread.

        Raises:
          WorldBroken: the process must leave the world, and the call still waits.
        """
        assert self._form is not None
        if len(self._form["members"]) == 1:
            return function()
        if self._caller is None:
            self._caller = Threads(1, "step")
        call = self._caller.submit(function)
        if not self._link.ends(call, _PATIENCE_S):
            self._caller = None  # its thread still waits
            # XLA's threads must not return to an interpreter that has exited.
            if not self.respawning.is_on:
                atexit.register(futures.wait, [call], _LEFT_BEHIND_S)
            raise WorldBroken("a step waits for a process that is gone")
        return call.result()

    def may_start(self, step: int) -> bool:
        """Whether a step may start; if not, the process leaves the world before it."""
        if self.respawning.is_due(step + 1):
            self.respawning.wait()
        return self._link.may_start(step)

    def finish(self, step: int) -> bool:
        """Waits until all processes have done the last step; False: leave the world."""
        finished = self._link.finish(step)
        if finished and self._link.is_lost:  # a supervisor has nothing left to adopt
            (self.folder / "run.json").unlink(missing_ok=True)
            self.respawning.remove()
        return finished

    def resize(self, processes: int) -> None:
        """Asks the supervisor to change the number of processes."""
        self._link.say("resize", processes=processes)

    def tell(self, event: Any) -> None:
        """Sends the supervisor an event, as data."""
        self._link.say("event", event=event)

    def resign(self) -> None:
        """Asks to leave the run, because this process is about to be killed."""
        self._link.say("leave")

    def say_lost(self, reason: str) -> None:
        """Tells the supervisor that the run ends, because its state is lost."""
        self._link.say("lost", reason=reason)

    def broken(self, error: BaseException) -> bool:
        """Whether the loss of a process, or leaving the world, caused an error."""
        return isinstance(error, Exception) and self._link.verdict(error)

    def offer_programs(self, content: Callable[[str], bytes | None]) -> None:
        """Lets processes of other hosts read compiled programs by name."""
        self._offers.program = content

    def first_program(self, name: str) -> bytes | None:
        """A program of the world's first process; None if that process is on this host.

        Raises:
          OSError: the first process is gone.
        """
        assert self._form is not None
        first = self._form["members"][0]["address"]
        if split_address(first)[0] == self._network.host:
            return None  # both processes use the same folder
        peer = Peer(first, self._link.address.token, self._network)
        try:
            return peer.program(name)
        finally:
            peer.close()

    def leave(self) -> None:
        """Leaves the world, and keeps the states of the last steps in host memory.

        A process that cannot go on without its world ends here and is started again.
        """
        assert self._form is not None
        if self.respawning.is_on:
            self.respawning.end(self._last_states)
        self._hold_recent()
        self._recent = []
        self._copier.aim([])
        with self._breaking:
            client, self._client = self._client, None
        jax_processes.leave_world()
        with self._breaking:  # the next world may connect to the same processes
            self._link.leave()
        relay, self._relay = self._relay, None
        threading.Thread(
            target=_leave_client, args=(client, relay), daemon=True
        ).start()
        # The old world's connections close with its last array, and other processes
        # wait for that.
        gc.collect()

    def _last_states(self) -> list[Holding]:
        """All holdings that this process offers when it leaves its world."""
        self._hold_recent()
        return self._offers.holdings()

    def _hold_recent(self) -> None:
        """Offers the states of the last steps."""
        assert self._form is not None
        generation = self._form["generation"]
        for step, arrays, extra in self._recent:
            if any(x.is_deleted() for x in arrays.values() if hasattr(x, "is_deleted")):
                continue  # a step that broke has consumed (donated) the arrays
            self._offers.put(
                holding.hold(arrays, step=step, generation=generation, extra=extra)
            )

    def _drop_older(self, generation: int) -> None:
        """Drops the states of older worlds; a newer world has formed."""
        self._offers.keep(lambda h: int(h.version.split(".")[1]) >= generation)
        self.respawning.drop(generation)

    def _break(self) -> None:
        """Ends the waits of the world; a thread calls this."""
        with self._breaking:
            if self._form is not None and self._link.must_leave:
                self._end_waits(self._form)

    def _end_waits(self, form: Message) -> None:
        """Shuts connections down, so that no wait for a lost process goes on."""
        members = [(*split_address(m["address"]), m["pid"]) for m in form["members"]]
        ports = {port for _, port, _ in members} | self._link.ports
        ports.add(int(form["address"].rpartition(":")[2] or 0))
        own, host = os.getpid(), self._network.host
        pids = [pid for there, _, pid in members if there == host and pid != own]
        hosts = {there for there, _, _ in members} - {host}
        break_connections(pids, hosts, ports, self._older)
        self._cancel_calls()
        if not self._trains:  # gloo connects in the first step of a world
            knock(listening() - self._listening)

    def _cancel_calls(self) -> None:
        """Ends the calls that wait for the coordination service."""
        shut_down(self._client)

    def _dismiss(self, order: Message) -> None:
        """Ends this process, because the run is over or goes on without it."""
        reason = order.get("reason", "")
        if reason:
            print(f"autopar: {reason}", file=sys.stderr)
        sys.exit(order.get("code", 0))


def takers(addresses: Sequence[str], index: int, count: int) -> list[str]:
    """The processes that receive copies of a process's state, by address.

    The next processes by rank come first, each on a different other host. If there are
    too few hosts, hosts that already have a copy follow. Processes of the same host
    come last.

    Args:
      addresses: addresses of the processes, by rank.
      index: rank of the process.
      count: number of copies.

    >>> takers(["a:1", "a:2", "b:1", "c:1"], 0, 2)
    ['b:1', 'c:1']
    >>> takers(["a:1", "a:2", "a:3"], 2, 1)
    ['a:1']
    """
    size = len(addresses)
    ring = [addresses[(index + k) % size] for k in range(1, size)]
    used = collections.Counter({split_address(addresses[index])[0]: size})
    found: list[str] = []
    while ring and len(found) < count:
        best = min(ring, key=lambda x: used[split_address(x)[0]])
        used[split_address(best)[0]] += 1
        ring.remove(best)
        found.append(best)
    return found


def _older(held: holding.Holding, generation: int, step: int) -> bool:
    """Whether a holding is of this generation and of an earlier step."""
    return held.step < step and int(held.version.split(".")[1]) == generation


def run_folder() -> pathlib.Path:
    """The folder that `autopar run` gave its workers."""
    return pathlib.Path(os.environ.get(FOLDER_VARIABLE, "autopar-run"))


def local_devices() -> int:
    """The number of this process's devices; works before JAX is started."""
    return jax_processes.local_device_count()


def _leave_client(client: Any, relay: Relay | None) -> None:
    shut_down(client)
    if relay is not None:
        relay.close()
