"""Starts workers on other hosts: the agent of a host, and the supervisor's part.

An agent (`autopar worker`) connects to the supervisor, starts workers on the
supervisor's orders, and reports their ends. If an agent dies, its workers die too, so
no process is left behind on a host.

An agent may connect to a scheduler instead. The scheduler names jobs that have devices
of the host. For each of them, a further agent in a thread connects to its supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import platform
import queue
import re
import secrets
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from autopar.elastic.processes import leash
from autopar.elastic.processes.launching import (
    COLLECTIVE_FLAG,
    HostReports,
    LocalLauncher,
    Reports,
    python_command,
    threads_needed,
)
from autopar.elastic.processes.link import (
    CHECKPOINT_VARIABLE,
    EVERY_VARIABLE,
    FOLDER_VARIABLE,
    VARIABLE,
    Address,
)
from autopar.elastic.processes.members import Connection, Message, ProcessId
from autopar.elastic.processes.network import Network, open_listener, route_to
from autopar.elastic.processes.recovery import RECOVERY_VARIABLE, RESPAWNED
from autopar.errors import InputError, PlanError, RunError
from autopar.sealed_files import KEY_VARIABLE
from autopar.units import number_of
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
_FLAG = re.compile(rf"--{COLLECTIVE_FLAG}=\d+")
_BEAT_S = 1.0
# A host whose agent has sent no message for this many seconds counts as unreachable:
# the supervisor cannot kill its workers.
_SILENT_S = 5.0
# Seconds that an agent may be disconnected before the supervisor goes on without its
# workers.
_AWAY_S = 3.0
_RETRY_S = 0.5
# Seconds that workers may take to leave a host that was asked to leave the run.
_LEAVE_S = 60.0
# Seconds after which a leaving host again requests the release of its workers. The
# supervisor may have refused before, and other hosts may have joined since.
_ASK_S = 5.0


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
    """

    name: str
    slots: int
    connection: Connection | None
    workers: set[int]
    heard_s: float
    leaves: bool = False
    missed: int = 0

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
        return self.slots - len(self.workers) if takes else 0

    @property
    def may_respawn(self) -> bool:
        """Whether a worker may be restarted on this host, even a leaving one."""
        return self.is_reached and self.slots > len(self.workers)

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
            self._place()
            if worker in self._waiting:
                self._reports_there.on_wait(worker)
        return None

    def watch(self, worker: int, process: ProcessId | None) -> bool:
        """See `Launcher`; the worker's agent reports later whether it runs."""
        del process
        with self._lock:
            if not self._claimed:
                threading.Thread(target=self._await_claimed, daemon=True).start()
            self._claimed[worker] = time.monotonic()
        return True

    def _await_claimed(self) -> None:
        """Gives up workers that no agent has reported: they waited for a host."""
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
        if waits:
            self._reports_there.on_end(worker, None)
        elif gone:
            self._reports_there.on_unreached(worker, spare=self._has_room())

    def move(self, places: Mapping[str, int]) -> Sequence[int]:
        """See `Placing`; ends workers that wait for a host and have no place more."""
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

    @property
    def _reports_there(self) -> HostReports:
        assert self._reports is not None
        return self._reports

    def _has_room(self) -> bool:
        with self._lock:
            return any(h.room > 0 for h in self._hosts.values())

    def _place(self) -> None:
        """Starts waiting workers on hosts with free slots.

        The caller holds the lock.
        """
        for worker in sorted(self._waiting):
            home = self._homes.get(worker)
            free = [h for h in self._hosts.values() if h is home and h.may_respawn] or [
                h for h in self._hosts.values() if h.room > 0
            ]
            if not free:
                continue
            host = max(free, key=lambda h: len(h.workers))
            self._homes[worker] = host
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
        name = str(first["agent"])
        connection.patience(self._silent_s)
        connection.send("welcome", run=self._run)
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
            mine = running & self._claimed.keys()
            host.workers |= mine
            left = {w for w in self._claimed if str(w) in first["ended"]}
            for worker in mine | left:
                del self._claimed[worker]
                self._homes[worker] = host
            ended = (host.workers - running) | left
            # These workers were given up while their agent was disconnected. They may
            # return, because they may hold the only copy of the last state.
            back = {
                w for w in running - host.workers if self._reports_there.may_return(w)
            }
            stray = running - host.workers - back
            host.workers = (host.workers - ended) | back
            for worker in stray:
                connection.send("signal", worker=worker, number=signal.SIGKILL)
            if self._closed:
                connection.send("end", done=self._reports_there.is_done())
            self._place()
            # Workers of an earlier supervisor that have not been found yet may run on
            # this host.
            room = max(0, host.room - len(self._claimed) - len(left))
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
        if message["kind"] == "ended":
            self._take_end(host, message)
        elif message["kind"] == "leave":
            self._take_leave(host)

    def _take_end(self, host: Host, message: Message) -> None:
        """Handles a worker's end.

        If this host lacks the script, the worker is started elsewhere.
        """
        worker, wrong = int(message["worker"]), message.get("wrong")
        if wrong:
            said = f"autopar run: host {host.name}: {wrong}"
            print(said, file=sys.stderr, flush=True)
        with self._lock:
            host.workers.discard(worker)
            environment = self._given.pop(worker, None)
            waiting = environment if wrong else None
            if waiting is not None:
                host.leaves, self._waiting[worker] = True, waiting
                self._homes.pop(worker, None)
                self._reports_there.on_wait(worker)
            self._place()
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
    own = _versions()
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


def _versions() -> dict[str, str]:
    # Versions of JAX are not compared: an agent does not load JAX, and a script may use
    # its own version.
    return {
        "autopar": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _list_versions(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{k} {v}" for k, v in versions.items()) or "no version"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """The options of `autopar worker`.

    Attributes:
      supervisor: ``HOST:PORT`` of the supervisor.
      secret: secret of the run, as PEM text.
      slots: number of workers that may run on this host.
      folder: where workers store plans and compiled programs.
      address: address at which other hosts reach this host; '': the address of the
        network interface that leads to the supervisor.
      grace_s: seconds for which the agent waits for a supervisor that cannot be
        reached.
      leave_status: exit status of the agent if the host leaves before the run is
        finished: it was asked to leave, or the run was suspended or failed.
      kind: kind of the host's devices, for a scheduler.
      name: name of the host; '': its host name and address.
      job: the job of a scheduler whose run the agent serves; '': none.
    """

    supervisor: str
    secret: str
    slots: int
    folder: pathlib.Path
    address: str = ""
    grace_s: float = 60.0
    leave_status: int = 0
    kind: str = "cpu"
    name: str = ""
    job: str = ""


class Agent:
    """Starts workers of a run, or of the jobs of a scheduler, on this host."""

    def __init__(self, options: AgentOptions) -> None:
        """Makes an agent that is not connected yet."""
        self._options = options
        self._name, self._run = secrets.token_hex(8), ""
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._launcher: LocalLauncher | None = None
        self._running: set[int] = set()
        # Job and address of its supervisor -> the agent that serves the job's run.
        self._jobs: dict[tuple[str, str], Agent] = {}
        self._ended: dict[int, int | None] = {}
        self._connection: Connection | None = None
        self._network = Network("", options.secret)
        self._code: int | None = None
        self._leave_by_s = math.inf
        self._asked_s = -math.inf
        if options.address:
            try:
                open_listener(options.address, 0).close()
            except OSError as error:
                raise PlanError(
                    f"--address {options.address} is none of this host's: "
                    f"{error.strerror}."
                ) from error

    def run(self) -> int:
        """Runs workers until the run ends or this host is asked to leave.

        Returns:
          The exit status.

        Raises:
          PlanError: the supervisor refuses this host, or cannot be reached.
          RunError: the supervisor disappeared and did not return within ``grace_s``.
        """
        self._call()
        with self._signals():
            while self._code is None:
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=0.1)()
                self._look_after()
        self._end_workers()
        if self._connection is not None:
            self._connection.close()
        return self._code

    def _say(self, text: str) -> None:
        job = f"job {self._options.job}: " if self._options.job else ""
        print(f"autopar worker: {job}{text}", file=sys.stderr, flush=True)

    def _call(self) -> None:
        """Connects to the supervisor; waits if it has not started yet."""
        options, said = self._options, False
        end = time.monotonic() + options.grace_s
        while True:
            try:
                if self._greet():
                    break
            except ssl.SSLCertVerificationError as error:
                raise PlanError(
                    f"{options.supervisor} has another secret: copy that of `autopar "
                    "run --listen` to this host."
                ) from error
            except InputError as error:
                raise PlanError(f"--supervisor: {error}.") from error
            except OSError as error:
                if time.monotonic() > end and not self._jobs:
                    raise self._unreached_error(error) from error
                if not said:
                    self._say(
                        f"waits for a supervisor at {options.supervisor}: {error}"
                    )
                said = True
            if self._leave_by_s < math.inf and not self._jobs:
                self._say("the supervisor is away: the workers of this host are ended")
                self._code = options.leave_status
                return
            self._look_after_jobs()
            time.sleep(_RETRY_S)
        takes = number_of(options.slots, "worker")
        self._say(f"joined the run at {options.supervisor}; this host takes {takes}")
        for work in (self._listen, self._beat):
            threading.Thread(target=work, args=(self._connection,), daemon=True).start()

    def _greet(self) -> bool:
        """Tries once to connect.

        Returns False if workers of an old run had to end first.

        Raises:
          OSError: no supervisor answers.
          PlanError: the supervisor refuses this host.
        """
        options = self._options
        host = options.address or route_to(options.supervisor)
        self._host_name = options.name or f"{socket.gethostname()} ({host})"
        self._network = Network(host, options.secret)
        connection = Connection(self._network.connect(options.supervisor, 10.0))
        connection.send(
            "host",
            agent=self._name,
            run=self._run,
            name=self._host_name,
            slots=options.slots,
            device=options.kind,
            versions=_versions(),
            workers=sorted(self._running),
            ended={str(w): code for w, code in self._ended.items()},
        )
        connection.patience(10.0)
        answer = connection.receive()
        if answer is None:
            connection.close()
            raise ConnectionError("it hung up")
        if answer["kind"] == "other run":
            connection.close()
            self._say("another run is there now: the workers of the last one end")
            self._end_workers()
            self._name, self._run, self._launcher = secrets.token_hex(8), "", None
            self._ended.clear()
            return False
        if answer["kind"] == "refused":
            connection.close()
            raise PlanError(f"the supervisor refuses this host: {answer['reason']}")
        connection.patience(None)
        self._connection, self._run = connection, str(answer["run"])
        return True

    def _unreached_error(self, error: OSError) -> PlanError | RunError:
        options = self._options
        where = f"no supervisor at {options.supervisor} within {options.grace_s:g} s"
        if self._running or self._ended:
            return RunError(f"{where}: {error}. The workers of this host are ended.")
        return PlanError(
            f"{where}: {error}. Start `autopar run --listen` there, and give this host "
            "the same secret."
        )

    def _listen(self, connection: Connection) -> None:
        while (message := connection.receive()) is not None:
            self._events.put(lambda message=message: self._obey(message))
        self._events.put(lambda: self._lose(connection))

    def _beat(self, connection: Connection) -> None:
        while connection.is_open and connection.send("beat"):
            time.sleep(_BEAT_S)

    def _lose(self, connection: Connection) -> None:
        """Handles a lost connection: tries to connect to a restarted supervisor."""
        if connection is not self._connection or self._code is not None:
            return
        connection.close()
        self._connection = None
        try:
            self._call()
        except (PlanError, RunError):
            self._end_workers()
            raise

    def _obey(self, message: Message) -> None:
        match message["kind"]:
            case "start":
                self._start(message)
            case "signal" if self._launcher is not None:
                self._launcher.signal(int(message["worker"]), int(message["number"]))
            case "serve":
                self._serve_job(message)
            case "end":
                self._code = 0 if message["done"] else self._options.leave_status
            case _:
                pass

    def _serve_job(self, message: Message) -> None:
        """Serves the run of a job that a scheduler has placed on this host."""
        job, supervisor = str(message["job"]), str(message["supervisor"])
        if (job, supervisor) in self._jobs or self._leave_by_s < math.inf:
            return  # a scheduler repeats its orders
        options = dataclasses.replace(
            self._options,
            supervisor=supervisor,
            secret=str(message["secret"]),
            folder=self._options.folder / job,
            address=self._network.host,
            name=self._host_name,
            job=job,
        )
        agent = self._jobs[job, supervisor] = Agent(options)

        def serve() -> None:
            try:
                agent.run()
            except (PlanError, RunError) as error:
                agent._say(str(error))
            finally:
                del self._jobs[job, supervisor]

        threading.Thread(target=serve, daemon=True).start()

    def _start(self, message: Message) -> None:
        worker, words = int(message["worker"]), list(map(str, message["words"]))
        folder = message.get("folder") or os.getcwd()
        script = pathlib.Path(folder, words[0])
        if not (script.is_file() and os.path.isdir(folder)):
            wrong = f"there is no script {words[0]} in {folder}"
            self._report(worker, 2, wrong)
            self._end_workers()
            raise PlanError(f"{wrong}: start `autopar worker` in the script's folder.")
        if self._launcher is None:
            # Workers must die with this process: no other process could end them.
            command = [sys.executable, leash.__file__, str(os.getpid())]
            command += python_command(words)
            own = {"label": self._options.job, "folder": folder}
            self._launcher = LocalLauncher(command, names=True, **own)
            # All agents of the run on this host use the same name. So a later agent
            # finds the shared memory of this agent's workers.
            self._launcher.begin(f"{self._run}@{self._network.host}", self)
        self._running.add(worker)
        self._ended.pop(worker, None)
        self._launcher.start(worker, self._environment(message["environment"]))

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        told = dataclasses.replace(
            Address.parse(given[VARIABLE]), supervisor=self._options.supervisor
        )
        devices = int(given.get("JAX_NUM_CPU_DEVICES", 1))
        own = {"NPROC": threads_needed(devices)}
        flags = os.environ.get("XLA_FLAGS", "")
        wanted = _FLAG.search(given.get("XLA_FLAGS", ""))
        if wanted is not None and not _FLAG.search(flags):
            flags = f"{flags} {wanted[0]}"
        return {
            **own,
            **os.environ,
            **given,
            "XLA_FLAGS": flags,
            **self._network.variables(),
            VARIABLE: str(told),
            FOLDER_VARIABLE: str(self._options.folder.absolute()),
        }

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        """See `Reports`."""
        del spare
        self._events.put(lambda: self._report(worker, code))

    def on_join(self, machines: int) -> None:
        """See `Reports`; does nothing, because an agent has only one host."""

    def _report(self, worker: int, code: int | None, wrong: str = "") -> None:
        self._running.discard(worker)
        self._ended[worker] = code
        if self._connection is not None:
            self._connection.send("ended", worker=worker, code=code, wrong=wrong)

    def _look_after(self) -> None:
        """Ends the agent of a leaving host after all its workers have left."""
        self._look_after_jobs()
        left = not self._running and RESPAWNED not in self._ended.values()
        left = left and not self._jobs
        if self._leave_by_s < math.inf and (
            left or time.monotonic() > self._leave_by_s
        ):
            self._code = self._options.leave_status
        elif self._leave_by_s < math.inf and time.monotonic() > self._asked_s + _ASK_S:
            self._ask_to_leave()

    def _look_after_jobs(self) -> None:
        """Makes the agents of jobs leave if this host leaves."""
        for agent in list(self._jobs.values()):
            agent._leave_by_s = min(agent._leave_by_s, self._leave_by_s)

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """Asks the workers to leave on SIGTERM or SIGINT; a second signal ends them."""

        def leave(number: int, frame: Any) -> None:
            del number, frame
            if self._leave_by_s < math.inf:
                self._leave_by_s = 0.0
                return
            self._leave_by_s = time.monotonic() + _LEAVE_S

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        both = (signal.SIGTERM, signal.SIGINT)
        before = {s: signal.signal(s, leave) for s in both}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask_to_leave(self) -> None:
        if self._asked_s == -math.inf:
            self._say("leaves the run; its workers end after the step that they are in")
        self._asked_s = time.monotonic()
        if self._connection is not None:
            self._connection.send("leave")

    def _end_workers(self) -> None:
        launcher, end = self._launcher, time.monotonic() + _RETRY_S
        while launcher is not None and self._running:
            for worker in self._running if time.monotonic() > end else ():
                launcher.signal(worker, signal.SIGKILL)
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=0.1)()
        if launcher is not None:
            launcher.close()
