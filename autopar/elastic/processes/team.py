"""One worker process of a run: it joins and leaves worlds, and keeps training states.

A world is a set of processes that train together. A world breaks if one of its
processes is lost. Each process then still has its part of the training states of the
last steps. The supervisor finds the latest step of which the remaining processes
together have the whole state. A holding is the set of array parts that a process keeps
of one step's state (`autopar.elastic.processes.holding`).
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
from autopar.elastic.processes.speeds import CpuMeter
from autopar.errors import PlanError, RunError
from autopar.runtime.key_values import KeyValueExchange
from autopar.runtime.threads import Threads
from autopar.runtime.world import (
    JaxChannel,
    LoneChannel,
    World,
    current_lane,
    gathered,
)
from autopar_passes import jax_processes

# Sends copies of arrays that no other process has to other processes.


class Copier:
    """Sends copies of this process's state to other processes in the background.

    The copies are at most one step older than the state.
    """

    def __init__(self, token: str, network: Network) -> None:
        """Starts without receivers; `aim` sets them."""
        self._token, self._network = token, network
        self._changed = threading.Condition()
        self._waiting: Holding | None = None
        self._busy = False
        self._takers: tuple[str, ...] = ()
        self._peers: dict[str, Peer] = {}
        threading.Thread(target=self._work, daemon=True, name="copies").start()

    def aim(self, takers: Sequence[str]) -> None:
        """Sets the addresses (`Offers`) of the processes that get later copies."""
        with self._changed:
            self._takers, self._waiting = tuple(takers), None

    def send(self, held: Holding) -> None:
        """Sends copies in the background, after the copies of the previous step."""
        self.wait()
        with self._changed:
            if self._takers:
                self._waiting, self._busy = held, True
                self._changed.notify_all()

    def wait(self) -> None:
        """Waits until each receiver has all copies, or is gone."""
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
                # The error is ignored: the supervisor notices that the receiver is
                # gone.
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


# How the processes of a world exchange bytes although the world may break at any time.


@dataclasses.dataclass(frozen=True, slots=True)
class WorldChannel:
    """Exchanges bytes like `JaxChannel`, but gives up when the world must be left.

    Attributes:
      client: client of the world's coordination service.
      index: rank of this process.
      count: number of processes.
      check: called repeatedly during an exchange; raises an error once the process must
        leave the world.
      lanes_end: set while exchanges in lanes must end, because their thread is waited
        for.
    """

    client: Any
    index: int
    count: int
    check: Callable[[], None]
    lanes_end: threading.Event = dataclasses.field(default_factory=threading.Event)

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`; raises an error if another process is lost."""
        if current_lane():
            return gathered(self, self.count, data)[0]
        return JaxChannel().broadcast(data)

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        if current_lane():
            return gathered(self, self.count, data)
        return JaxChannel().gather(data)

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        return self._store().exchange(data, what)

    def tell(self, data: bytes) -> None:
        """See `Channel`."""
        self._store().tell(data)

    def _store(self) -> KeyValueExchange:
        lane = current_lane()
        check = self._check_lane if lane else self.check
        return KeyValueExchange(self.client, self.index, self.count, check, lane)

    def _check_lane(self) -> None:
        if self.lanes_end.is_set():
            raise WorldBroken("the work beside the steps is given up")
        self.check()


# Seconds within which all processes of a world must connect. XLA ends a process that
# takes longer.
_CONNECT_S = 50
_WATCH_S = 0.2
# Seconds for which a step may continue after the process was told to leave its world.
# The connections are shut down at once, so a collective that notices this ends within
# milliseconds.
_PATIENCE_S = 0.5
# When the process exits, it waits this many seconds for a step that did not end. By
# default a collective gives up after 10 s.
_LEFT_BEHIND_S = 15.0

T = TypeVar("T")


class WorldBroken(Exception):
    """This process must leave its world, because another was lost or joins."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A world that this process has joined.

    Attributes:
      world: processes and devices of the world.
      generation: number of the world; each new world has a higher number.
      step: number of steps done; 0 in a run that begins.
      extra: plain data that was kept together with the arrays of the state.
      fetch: reads the state from the processes that hold it; None if no process holds a
        state.
      lost_step: number of steps done when the state was lost, so that the run must go
        back to a checkpoint; None if no state was lost.
      cluster: cluster to plan for, as data, if an event has set one; None: the cluster
        that the script names.
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
    """Connects this process to the other processes of a run, and keeps states.

    Attributes:
      rows: rows of a batch, which the number of devices of each world must divide; 0:
        any number of devices will do.
      lanes_end: set while a thread beside the steps must not wait for other processes.
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
          survive: how many processes may die at once without loss of training state;
            each process sends copies to this many others.
          rows: rows of a batch, which the number of devices of each world must divide;
            0: any number of devices will do.
          events: texts that name the event sources to which the supervisor listens.
          saves: whether the run has checkpoints. If the supervisor is gone for good,
            only a run with checkpoints may end.

        Raises:
          PlanError: there is no supervisor.
        """
        self._saves = saves
        self._form: Message | None = None
        # Number of the world that ends because there is no supervisor.
        self._last_generation: int | None = None
        self._client: Any = None  # None until it has connected
        self._relay: Relay | None = None
        # Held by the thread that ends waits for other processes of a world. `leave`
        # also takes it, so that the thread cannot end waits in the next world.
        self._breaking = threading.Lock()
        self._recent: list[tuple[int, dict[str, Any], Mapping[str, Any]]] = []
        self._survive, self.rows, self._events = survive, rows, tuple(events)
        self._trains, self.lanes_end = False, threading.Event()
        # The listening ports and the sockets that this process already had when it
        # joined its world.
        self._listening: frozenset[str] = frozenset()
        self._older: frozenset[int] = frozenset()
        self.respawning = Respawning(address.worker)
        self._network = Network.of_environment()
        self._offers = Offers(address.token, self._network, self._obey)
        self._copier = Copier(address.token, self._network)
        self._caller: Threads | None = None
        try:
            # If processes on several hosts lose the supervisor, it may have formed
            # another world without them. Two worlds must not train at once, so steps
            # then wait.
            holds = not (self._network.is_local or saves)
            handlers = self._break, self._drop_older, self._lose_service
            self._link = Link(address, self._network, *handlers, holds=holds)
        except OSError as error:
            raise PlanError(
                f"no supervisor at {address.supervisor} ({error}). Start the script "
                "with `autopar run --processes N script.py`."
            ) from error
        threading.Thread(target=self._watch, daemon=True, name="watch").start()
        if not self._network.is_local:
            threading.Thread(target=self._measure, daemon=True, name="measure").start()

    @property
    def is_orphaned(self) -> bool:
        """Whether the run must end at this step, as the supervisor is gone for good.

        The process of rank 0 decides for all processes, because they notice at
        different times that the supervisor is gone.
        """
        form = self._form
        return form is not None and form["generation"] == self._last_generation

    @property
    def is_over_hosts(self) -> bool:
        """Whether the run may have processes on other hosts."""
        return not self._network.is_local

    @property
    def is_suspended(self) -> bool:
        """Whether the run is suspended at this step: it saves its state and ends."""
        return self._link.is_suspended

    @property
    def is_stopped(self) -> bool:
        """Whether the training loop must end at this step."""
        return self._link.is_stopped

    @property
    def activity(self) -> Activity:
        """Records what the training loop is doing; it is sent to the supervisor."""
        return self._link.activity

    def say(self, kind: str, **data: Any) -> None:
        """Sends the supervisor a message of this worker."""
        self._link.say(kind, **data)

    def on_prepare(self, take: Callable[[Message], None]) -> None:
        """Sets the function that gets the supervisor's orders to prepare worlds."""
        self._link.prepare = take

    def say_saving(self) -> None:
        """Tells the supervisor that this process is saving the state before it ends."""
        self._link.say("saving")

    def gives_up(self) -> bool:
        """Whether there is still no supervisor; this process must then end."""
        return self._link.gives_up()

    def lost_error(self, saved: str) -> RunError:
        """The error of a run without supervisor; ``saved`` tells what was saved."""
        return self._link.lost_error(saved)

    def _measure(self) -> None:
        """Reports regularly the bytes sent to other hosts, and the CPU time."""
        traffic, meter = Traffic(self._network.host), CpuMeter()
        while True:
            time.sleep(TELL_S)
            sent, use = traffic.take(), meter.take()
            self._link.say(
                "measured", nbytes=sent.nbytes, busy_s=sent.busy_s, **use.to_data()
            )

    def _watch(self) -> None:
        """Makes all processes stop at the same step if the supervisor is gone for good.

        In a run without checkpoints the processes do not stop, because the state would
        be lost.
        """
        while self._saves:
            time.sleep(_WATCH_S)
            form = self._form
            if form is None or form["rank"] or self.is_orphaned:
                continue
            if self._link.is_lost:
                with contextlib.suppress(OSError):
                    self._stop_together(form)

    def _stop_together(self, form: Message) -> None:
        """Pauses the world as the supervisor would; only rank 0 calls this."""
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
        """Follows an order that rank 0 sends while there is no supervisor."""
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
        """The team of this process; None if `autopar run` did not start it."""
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
            except Exception as error:  # a process died meanwhile
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
        self.check_alive()
        devices = tuple(jax.devices())
        self.respawning.decide(devices[0].platform)
        self.check_alive()
        channel = WorldChannel(
            self._client, index, count, self.check_alive, self.lanes_end
        )
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
        """Completes an address with the host on which the supervisor runs."""
        if self._network.is_local or not address:
            return address
        host, _ = split_address(self._link.supervisor)
        return join_address(host, split_address(address)[1])

    def check_alive(self) -> None:
        """Raises `WorldBroken` if this process must leave its world."""
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
        """Tells the supervisor that this process has the state in its new world.

        Args:
          step: number of steps done.
          arrays: path -> global array.
          extra: plain data that belongs to the arrays.
          cluster: cluster for which the plan was made, as data.
          scheme: the plan's parallelism scheme, in words.
          broke_s: time at which this process last trained (`time.perf_counter`); None
            if it has not trained yet.

        Returns:
          The seconds since ``broke_s``, or None.
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
        # Another process may be one step ahead, and the copies may be two steps behind.
        # So the states of three steps are kept if only this process has some of the
        # arrays.
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
        """Calls a function, but does not wait for it longer than the world exists.

        The function may wait for a process that is gone: gloo, JAX's communication
        library on CPUs, can miss that a send has failed, and then waits until a
        timeout. So the function runs in a thread of its own. If the world must be left,
        this method returns, and the thread ends by itself later.

        Raises:
          WorldBroken: the process must leave the world, and the function has not
            returned.
        """
        assert self._form is not None
        if len(self._form["members"]) == 1:
            return function()
        if self._caller is None:
            self._caller = Threads(1, "step")
        call = self._caller.submit(function)
        if not self._link.ends(call, _PATIENCE_S):
            self._caller = None  # its thread still waits
            # At exit, wait for the thread, because XLA's threads must not return to an
            # interpreter that has ended.
            if not self.respawning.is_on:
                atexit.register(futures.wait, [call], _LEFT_BEHIND_S)
            raise WorldBroken("a step waits for a process that is gone")
        return call.result()

    def may_start(self, step: int) -> bool:
        """Whether a step may start; if not, the process must leave the world first."""
        if self.respawning.is_due(step + 1):
            self.respawning.wait()
        return self._link.may_start(step)

    def finish(self, step: int) -> bool:
        """Waits until all processes have done the last step; False: leave the world."""
        finished = self._link.finish(step)
        if finished and self._link.is_lost:  # nothing is left for a later supervisor
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
        """Asks the supervisor to leave the run, because this process will be killed."""
        self._link.say("leave")

    def say_lost(self, reason: str) -> None:
        """Tells the supervisor that the run must end, because its state is lost."""
        self._link.say("lost", reason=reason)

    def broken(self, error: BaseException) -> bool:
        """Whether the loss of a process, or leaving the world, explains an error."""
        return isinstance(error, Exception) and self._link.verdict(error)

    def offer_programs(self, content: Callable[[str], bytes | None]) -> None:
        """Sets the function by which other hosts' processes read compiled programs."""
        self._offers.program = content

    def first_program(self, name: str) -> bytes | None:
        """Reads a program from rank 0 of the world; None if that is on this host.

        Raises:
          OSError: the first process is gone.
        """
        assert self._form is not None
        first = self._form["members"][0]["address"]
        if split_address(first)[0] == self._network.host:
            return None  # both use the same folder
        peer = Peer(first, self._link.address.token, self._network)
        try:
            return peer.program(name)
        finally:
            peer.close()

    def leave(self) -> None:
        """Leaves the world, and keeps the states of the last steps in host memory.

        With respawning, this method does not return: the process ends and is started
        again.
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
        with self._breaking:  # the next world may have the same processes
            self._link.leave()
        relay, self._relay = self._relay, None
        threading.Thread(
            target=_leave_client, args=(client, relay), daemon=True
        ).start()
        # The connections of the old world close when its last array is freed. Other
        # processes wait for this.
        gc.collect()

    def _last_states(self) -> list[Holding]:
        """All states of which this process has parts when it leaves its world."""
        self._hold_recent()
        return self._offers.holdings()

    def _hold_recent(self) -> None:
        """Serves the states of the last steps to other processes."""
        assert self._form is not None
        generation = self._form["generation"]
        for step, arrays, extra in self._recent:
            if any(x.is_deleted() for x in arrays.values() if hasattr(x, "is_deleted")):
                continue  # the broken step has donated the arrays
            self._offers.put(
                holding.hold(arrays, step=step, generation=generation, extra=extra)
            )

    def _drop_older(self, generation: int) -> None:
        """Frees states of older worlds, because a newer world has formed."""
        self._offers.keep(lambda h: int(h.version.split(".")[1]) >= generation)
        self.respawning.drop(generation)

    def _break(self) -> None:
        """Ends waits for other processes of the world; called from another thread."""
        with self._breaking:
            if self._form is not None and self._link.must_leave:
                self._end_waits(self._form)

    def _lose_service(self) -> None:
        """Ends calls to the coordination service on the last supervisor's lost host.

        A save that waits for an answer would keep this process in its world.
        """
        with self._breaking:
            relay = self._relay
        if relay is not None:
            threading.Thread(target=relay.lose, daemon=True).start()

    def _end_waits(self, form: Message) -> None:
        """Shuts connections down, so that nothing waits for a lost process."""
        members = [(*split_address(m["address"]), m["pid"]) for m in form["members"]]
        ports = {port for _, port, _ in members} | self._link.ports
        ports.add(int(form["address"].rpartition(":")[2] or 0))
        own, host = os.getpid(), self._network.host
        pids = [pid for there, _, pid in members if there == host and pid != own]
        hosts = {there for there, _, _ in members} - {host}
        break_connections(pids, hosts, ports, self._older)
        self._cancel_calls()
        if not self._trains:  # gloo connects in a world's first step
            knock(listening() - self._listening)

    def _cancel_calls(self) -> None:
        """Ends calls that wait for an answer of the coordination service."""
        shut_down(self._client)

    def _dismiss(self, order: Message) -> None:
        """Ends this process, because the run is over or does not need it."""
        reason = order.get("reason", "")
        if reason:
            print(f"autopar: {reason}", file=sys.stderr)
        sys.exit(order.get("code", 0))


def takers(addresses: Sequence[str], index: int, count: int) -> list[str]:
    """Chooses the processes that receive copies of a process's state.

    The ranks after this process's come first. Processes on other hosts are preferred,
    at first only one on each. If there are too few other hosts, it takes further
    processes on these hosts. Processes on this process's own host come last.

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
    """Whether a holding comes from this world (``generation``) and an earlier step."""
    return held.step < step and int(held.version.split(".")[1]) == generation


def run_folder() -> pathlib.Path:
    """The folder of the run that started this process."""
    return pathlib.Path(os.environ.get(FOLDER_VARIABLE, "autopar-run"))


def local_devices() -> int:
    """The number of this process's devices; works before JAX has been initialised."""
    return jax_processes.local_device_count()


def _leave_client(client: Any, relay: Relay | None) -> None:
    shut_down(client)
    if relay is not None:
        relay.close()
