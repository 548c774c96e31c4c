"""Starts workers on other hosts, through the agents of these hosts (`agents.py`)."""

from __future__ import annotations

import dataclasses
import math
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.elastic.processes.launching import (
    HostReports,
    Reports,
)
from autopar.elastic.processes.link import (
    CHECKPOINT_VARIABLE,
    EVERY_VARIABLE,
    VARIABLE,
)
from autopar.elastic.processes.members import Connection, Message, ProcessId
from autopar.elastic.processes.recovery import RECOVERY_VARIABLE
from autopar.elastic.processes.standby import HostRecords, Record
from autopar.sealed_files import KEY_VARIABLE
from autopar.version import __version__

# The environment variables that a worker gets from the supervisor. The agent provides
# all other variables of the worker.
_OF_RUN = (
    VARIABLE,
    KEY_VARIABLE,
    RECOVERY_VARIABLE,
    CHECKPOINT_VARIABLE,
    EVERY_VARIABLE,
    "JAX_NUM_CPU_DEVICES",
    "XLA_FLAGS",
)
# A host whose agent has sent no message for this many seconds counts as unreachable:
# the supervisor cannot kill its workers.
_SILENT_S = 5.0
# Seconds that an agent may be disconnected before the supervisor goes on without its
# workers.
_AWAY_S = 3.0
_RETRY_S = 0.5


@dataclasses.dataclass(slots=True)
class Host:
    """What the supervisor knows about a host.

    Attributes:
      name: name of the host.
      slots: number of workers that may run on the host.
      connection: connection to the host's agent; None: the agent is not connected.
      workers: numbers of the workers that run on the host.
      heard_s: when the last message of the agent came (`time.monotonic`).
      leaves: whether the host is leaving and gets no more workers.
      missed: number of workers that the supervisor counted as gone because the host was
        unreachable.
      ended: numbers of workers that have ended on the host, until the supervisor has
        decided whether to start them again. They keep their slots until then, because
        the host's shared memory may hold their state.
    """

    name: str
    slots: int
    connection: Connection | None
    workers: set[int]
    heard_s: float
    leaves: bool = False
    missed: int = 0
    ended: set[int] = dataclasses.field(default_factory=set[int])

    def give_up(self, workers: Sequence[int]) -> None:
        """Counts workers as gone; they are killed when their agent connects again."""
        self.workers -= set(workers)
        self.missed += len(workers)
        if workers and self.connection is not None:
            self.connection.close()

    @property
    def room(self) -> int:
        """Number of further workers that may start on the host."""
        takes = self.is_reached and not self.leaves
        return self.slots - len(self.workers | self.ended) if takes else 0

    @property
    def may_respawn(self) -> bool:
        """Whether a worker may be restarted on this host, even a leaving one."""
        return self.is_reached and self.slots > len(self.workers | self.ended)

    @property
    def is_reached(self) -> bool:
        """Whether the agent has sent a message within the last `_SILENT_S` seconds."""
        heard = time.monotonic() - self.heard_s < _SILENT_S
        return self.connection is not None and heard


class HostLauncher:
    """Starts workers through the agents of hosts, while hosts join and leave.

    If no host has a free slot, a worker waits. The launcher fills one host after
    another, so that processes that train together run on few hosts.
    """

    def __init__(
        self,
        words: Sequence[str],
        silent_s: float,
        *,
        places: Mapping[str, int] | None = None,
        folder: str | None = None,
    ) -> None:
        """Starts without hosts.

        Args:
          words: path of the user's script, and its arguments.
          silent_s: if an agent sends no message for this long, its workers count as
            gone.
          places: name of a host -> number of workers on it, as a scheduler decided;
            None: as many workers as the host has slots.
          folder: the folder in which workers run; None: that of their agent.
        """
        self._words, self._silent_s, self._run = tuple(words), silent_s, ""
        self._places = None if places is None else dict(places)
        self._folder = folder
        self._lock = threading.RLock()
        self._hosts: dict[str, Host] = {}
        self._waiting: dict[int, Mapping[str, str]] = {}
        # Environment variables of each started worker, to start it again on another
        # host.
        self._given: dict[int, Mapping[str, str]] = {}
        # Worker -> the host whose shared memory holds the worker's state.
        self._homes: dict[int, Host] = {}
        # Workers that an earlier supervisor started and whose agents have not connected
        # to this supervisor yet -> the time since when they are missing.
        self._claimed: dict[int, float] = {}
        self._reports: HostReports | None = None
        self._closed = False
        # What agents record for a standby; only if some agents know several addresses.
        self.records, self._has_standby = HostRecords(), False
        # Workers of the world to record that no host has, and since when there are any.
        self.unplaced, self._unplaced_s = frozenset[int](), math.inf

    def begin(self, run: str, reports: Reports) -> None:
        """See `Launcher`."""
        assert isinstance(reports, HostReports)
        self._run, self._reports = run, reports

    def start(self, worker: int, environment: Mapping[str, str]) -> ProcessId | None:
        """See `Launcher`."""
        # The agent's own environment has all other variables.
        own = {k: environment[k] for k in _OF_RUN if k in environment}
        with self._lock:
            self._waiting[worker] = own
            for host in self._hosts.values():
                host.ended.discard(worker)
            self._place()
            if worker in self._waiting:
                self._reports_there.on_wait(worker)
        return None

    def watch(self, worker: int, process: ProcessId | None) -> bool:
        """See `Launcher`; the worker's agent reports later whether it runs."""
        del process
        with self._lock:
            if worker in self._known_workers():
                return True
            if not self._claimed:
                threading.Thread(target=self._await_claimed, daemon=True).start()
            self._claimed[worker] = time.monotonic()
        return True

    def settle(self, worker: int) -> None:
        """Gives the slot of a worker that has ended to others.

        Must be called after each report of an end, once the supervisor has decided
        whether to start the worker again.
        """
        with self._lock:
            for host in self._hosts.values():
                if worker in host.ended:
                    host.ended.discard(worker)
                    self._forget(host, [worker])
            self._place()

    def _known_workers(self) -> set[int]:
        """The workers that hosts have or that wait for a host.

        The caller holds the lock.
        """
        known = [h.workers | h.ended for h in self._hosts.values()]
        return set(self._waiting).union(*known)

    @staticmethod
    def _forget(host: Host, workers: Iterable[int]) -> None:
        """Tells an agent that the supervisor knows the ends of these workers.

        If the agent reported them to a later supervisor, this one would start workers
        that run on other hosts by then a second time.
        """
        if host.connection is not None and (known := sorted(workers)):
            host.connection.send("forget", workers=known)

    def _await_claimed(self) -> None:
        """Gives up workers that no agent has reported: they wait for a host."""
        while True:
            time.sleep(_RETRY_S)
            late_s = time.monotonic() - self._silent_s
            with self._lock:
                gone = [
                    w
                    for w, since_s in self._claimed.items()
                    if since_s < late_s and not self._reports_there.has_link(w)
                ]
                for worker in gone:
                    del self._claimed[worker]
                left = bool(self._claimed) and not self._closed
            for worker in sorted(gone):
                self._reports_there.on_unreached(worker, spare=self._has_room())
            if not left:
                return

    def signal(self, worker: int, number: int) -> None:
        """See `Launcher`; an unreachable worker that is to be killed counts as gone."""
        gone = waits = False
        with self._lock:
            host = next((h for h in self._hosts.values() if worker in h.workers), None)
            if self._waiting.pop(worker, None) is not None:
                waits = True
            elif host is not None and host.is_reached:
                assert host.connection is not None
                host.connection.send("signal", worker=worker, number=int(number))
            elif number == signal.SIGKILL:
                gone = self._claimed.pop(worker, None) is not None or host is not None
                if host is not None:
                    host.give_up([worker])
                else:
                    gone = self._kill_unplaced(worker) or gone
        if waits:
            self._reports_there.on_end(worker, None)
        elif gone:
            self._reports_there.on_unreached(worker, spare=self._has_room())

    def _kill_unplaced(self, worker: int) -> bool:
        """Kills a worker of an unknown host; returns whether it counts as gone."""
        for host in self._hosts.values():
            if host.connection is not None:
                host.connection.send("signal", worker=worker, number=signal.SIGKILL)
        return worker in self.unplaced

    def move(self, places: Mapping[str, int]) -> Sequence[int]:
        """See `Placing`; ends waiting workers that have lost their place."""
        with self._lock:
            self._places = dict(places)
            leaving: list[int] = []
            for host in self._hosts.values():
                host.slots = places.get(host.name, 0)
                leaving += sorted(host.workers)[host.slots :]
            placed = sum(len(h.workers) for h in self._hosts.values()) - len(leaving)
            room = max(sum(places.values()) - placed, 0)
            unplaced = sorted(self._waiting)[room:]
            for worker in unplaced:
                del self._waiting[worker]
                self._reports_there.on_end(worker, None)
            self._place()
            return [*leaving, *unplaced]

    def close(self) -> None:
        """See `Launcher`; also ends the agents."""
        with self._lock:
            self._closed = True
            for host in self._hosts.values():
                if host.connection is not None:
                    host.connection.send("end", done=self._reports_there.is_done())

    def make_record(self, state: Mapping[str, Any]) -> Record | None:
        """The next record of the supervisor's state; None if it cannot be made yet.

        Args:
          state: contents of ``run.json``.
        """
        records, world = self.records, set(state["world"])
        with self._lock:
            if state["generation"] == records.last.agreed:
                return records.make(state, records.last.voters)
            found = {n: h.workers & world for n, h in self._hosts.items()}
            self.unplaced = frozenset(world.difference(*found.values()))
            if self.unplaced:
                return None  # an agent has not called yet
            return records.make(state, [n for n, workers in found.items() if workers])

    def record(
        self, record: Record | None, *, waits: bool, takes_over: bool = False
    ) -> bool:
        """Has agents record a state, so that a standby can continue the run.

        Args:
          record: the state, or None if `make_record` could not make it.
          waits: whether to wait until enough hosts have recorded the state.
          takes_over: whether this record is the first one of a standby.

        Returns:
          False if ``waits`` is true and too few hosts have recorded the state.
        """
        with self._lock:
            if not (self._has_standby or takes_over):
                return True
            if record is None:
                if waits and not takes_over:
                    self._give_up_unplaced()
                return not waits
            self._unplaced_s = math.inf
            for host in self._hosts.values():
                if host.connection is not None:
                    host.connection.send("record", record=record.to_data())
        return not waits or self.records.wait(record, takes_over=takes_over)

    def _give_up_unplaced(self) -> None:
        """Kills workers that are ready but that no agent reports for too long.

        A world with them cannot be recorded. The caller holds the lock.
        """
        self._unplaced_s = min(self._unplaced_s, time.monotonic())
        if time.monotonic() - self._unplaced_s > self._silent_s:
            self._unplaced_s = math.inf
            for worker in self.unplaced:
                self.signal(worker, signal.SIGKILL)

    @property
    def _reports_there(self) -> HostReports:
        assert self._reports is not None
        return self._reports

    def _has_room(self) -> bool:
        with self._lock:
            return any(h.room > 0 for h in self._hosts.values())

    def _place(self) -> None:
        """Starts waiting workers on hosts with free slots.

        Workers whose state is in the shared memory of a host get its slots first. The
        caller holds the lock.
        """
        for worker in sorted(self._waiting, key=lambda w: (not self._at_home(w), w)):
            home = self._homes.get(worker)
            free = [h for h in self._hosts.values() if h is home and h.may_respawn] or [
                h for h in self._hosts.values() if h.room > 0
            ]
            if not free:
                continue
            host = max(free, key=lambda h: len(h.workers))
            self._homes[worker] = host
            if home is not None and home is not host:
                self._forget(home, [worker])
            assert host.connection is not None
            environment = self._given[worker] = self._waiting.pop(worker)
            host.workers.add(worker)
            host.connection.send(
                "start",
                worker=worker,
                words=self._words,
                environment=environment,
                folder=self._folder,
            )
            self._reports_there.on_start(worker)

    def _at_home(self, worker: int) -> bool:
        """Whether a worker may start on the host whose memory holds its state."""
        home = self._homes.get(worker)
        return any(h is home and h.may_respawn for h in self._hosts.values())

    def serve(self, first: Message, connection: Connection) -> None:
        """Serves an agent until its connection ends.

        Args:
          first: the agent's first message, which describes its host.
          connection: connection to the agent.
        """
        if wrong := mismatch(first):
            connection.send("refused", reason=wrong)
            connection.close()
            return
        if first.get("run") not in ("", self._run):
            connection.send("other run")  # the agent serves another run
            connection.close()
            return
        record = Record.from_data(first.get("record"))
        if record is not None and record.epoch > self.records.last.epoch:
            connection.send("standby")  # the agent has another supervisor
            connection.close()
            return
        name = str(first["agent"])
        connection.patience(self._silent_s)
        connection.send("welcome", run=self._run, silence=self._silent_s)
        self._welcome(name, first, connection)
        while (message := connection.receive()) is not None:
            self._take(name, message)
        connection.close()
        self._miss(name, connection)

    def _welcome(self, name: str, first: Message, connection: Connection) -> None:
        running = {int(w) for w in first["workers"]}
        with self._lock:
            host = self._hosts.get(name)
            new = host is None
            if host is None:
                slots = first["slots"]
                if (places := self._places) is not None:
                    slots = places.get(first["name"], 0)
                host = Host(first["name"], slots, connection, set(), 0.0)
                self._hosts[name] = host
            host.connection, host.heard_s = connection, time.monotonic()
            if first.get("standbys"):
                self._has_standby = True
                connection.send("record", record=self.records.last.to_data())
            mine = running & self._claimed.keys()
            host.workers |= mine
            left = {w for w in self._claimed if str(w) in first["ended"]}
            for worker in mine | left:
                del self._claimed[worker]
                self._homes[worker] = host
            ended = (host.workers - running) | left
            # These workers were given up while their agent was disconnected. They may
            # return, because they may hold the only copy of the last state; unless they
            # were started again elsewhere.
            lost = running - host.workers
            known = self._known_workers()
            back = {w for w in lost - known if self._reports_there.may_return(w)}
            stray = lost - back
            host.workers = (host.workers - ended) | back
            host.ended |= ended
            reported = {int(w) for w in first["ended"]}
            self._forget(host, reported - host.ended - self._waiting.keys())
            for worker in stray:
                connection.send("signal", worker=worker, number=signal.SIGKILL)
            if self._closed:
                connection.send("end", done=self._reports_there.is_done())
            self._place()
            # Workers of an earlier supervisor that have not been found yet may run on
            # this host.
            room = max(0, host.room - len(self._claimed))
            room = room if new else min(room, host.missed)
            host.missed = 0
            if self._places is not None:
                room = 0  # the scheduler decides how many processes there are
        for worker in ended:
            self._reports_there.on_end(worker, first["ended"].get(str(worker)))
        if new:
            self._reports_there.on_host(host.name, host.slots)
        if room:
            self._reports_there.on_join(room)

    def _take(self, name: str, message: Message) -> None:
        with self._lock:
            host = self._hosts[name]
            host.heard_s = time.monotonic()
        if message["kind"] == "beat" and host.connection is not None:
            host.connection.send("beat")
        elif message["kind"] == "recorded":
            self.records.on_recorded(name, message["number"])
        elif message["kind"] == "ended":
            self._take_end(host, message)
        elif message["kind"] == "leave":
            self._take_leave(host)

    def _take_end(self, host: Host, message: Message) -> None:
        """Handles a worker's end.

        If this host lacks the script, the worker is started elsewhere. But if a
        scheduler has chosen the host, the worker has failed.
        """
        worker, wrong = int(message["worker"]), message.get("wrong")
        placed = self._places is not None
        if wrong:
            # A scheduler takes the last output line that does not begin with "autopar
            # run: " as the reason of a failure.
            begin = "" if placed else "autopar run: "
            said = f"{begin}host {host.name}: {wrong}"
            print(said, file=sys.stderr, flush=True)
        with self._lock:
            if worker not in host.workers:
                # It was given up or runs on another host, too, and counts no more.
                self._forget(host, [worker])
                return
            host.workers.discard(worker)
            environment = self._given.pop(worker, None)
            waiting = environment if wrong and not placed else None
            if waiting is not None:
                host.leaves, self._waiting[worker] = True, waiting
                self._homes.pop(worker, None)
                self._reports_there.on_wait(worker)
                self._place()
            else:
                host.ended.add(worker)
        if waiting is None:
            self._reports_there.on_end(worker, message["code"])

    def _take_leave(self, host: Host) -> None:
        """Asks the workers of a leaving host to leave the run."""
        with self._lock:
            host.leaves = True
            leaving = sorted(host.workers)
            room = sum(h.room for h in self._hosts.values()) - len(self._waiting)
        # Workers whose request to leave was refused before come last.
        for left, worker in zip(range(len(leaving), 0, -1), leaving, strict=True):
            self._reports_there.on_leave(worker, spare=left <= room)

    def _miss(self, name: str, connection: Connection) -> None:
        """Gives up the workers of an agent that stays disconnected."""
        with self._lock:
            host = self._hosts[name]
            if host.connection is not connection:
                return  # the agent has connected again
            host.connection = None
        end = time.monotonic() + _AWAY_S
        while time.monotonic() < end or host.workers:
            time.sleep(_RETRY_S)
            with self._lock:
                if host.connection is not None or self._closed:
                    return
                late = time.monotonic() > end
                gone = [w for w in host.workers if not self._reports_there.has_link(w)]
                gone = sorted(gone) if late else []
                host.give_up(gone)
            for worker in gone:
                self._reports_there.on_unreached(worker, spare=self._has_room())
        with self._lock:
            if host.connection is None:
                del self._hosts[name]
                self._reports_there.on_host(host.name, 0)


def mismatch(first: Message) -> str:
    """Why a host's agent cannot take part, from its first message; '' if it can."""
    own = versions()
    theirs = first.get("versions")
    if not isinstance(theirs, dict) or theirs != own:
        known = theirs if isinstance(theirs, dict) else {}
        return (
            f"the supervisor has {_list_versions(own)}, and this host "
            f"{_list_versions(known)}: install the same."
        )
    if not isinstance(first.get("slots"), int) or first["slots"] < 1:
        return f"--slots {first.get('slots')!r} must be a number from 1 on."
    return ""


def versions() -> dict[str, str]:
    """The versions that must be the same on all hosts."""
    # Versions of JAX are not compared: an agent does not load JAX, and a script may use
    # its own version.
    return {
        "autopar": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _list_versions(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{k} {v}" for k, v in versions.items()) or "no version"
