"""Starts the processes of a run, and carries out what its supervisor decides.

This is the main part of `autopar run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from autopar.elastic.events import Resolved
from autopar.elastic.ledger import Ledger, event_data
from autopar.elastic.processes.console import Console, say
from autopar.elastic.processes.coordination import ServiceProcess
from autopar.elastic.processes.hosts import HostLauncher
from autopar.elastic.processes.launching import (
    COLLECTIVE_FLAG,
    Launcher,
    LocalLauncher,
    Placing,
    threads_needed,
)
from autopar.elastic.processes.link import (
    FOLDER_VARIABLE,
    VARIABLE,
    Address,
)
from autopar.elastic.processes.links import SentBytes
from autopar.elastic.processes.listening import Listening, WantedAction
from autopar.elastic.processes.members import (
    GIVEN_UP,
    Connection,
    MemberLimits,
    Message,
    ProcessId,
    find_unplaced,
    has_token,
    late,
    own_fields,
)
from autopar.elastic.processes.metrics import RunMetrics
from autopar.elastic.processes.network import End, Listener, Network, split_address
from autopar.elastic.processes.records import Records, read_state, workers_command
from autopar.elastic.processes.recovery import (
    RECOVERY_VARIABLE,
    Recovery,
    have_notes,
    remove_shared,
    shared_prefix,
)
from autopar.elastic.processes.speeds import CpuUse
from autopar.elastic.processes.stacks import StackRequests
from autopar.elastic.processes.standby import wait_for_run
from autopar.elastic.processes.supervisor import Supervisor
from autopar.errors import PlanError, RunError
from autopar.sealed_files import KEY_VARIABLE, key_to_share
from autopar.units import number_of

# Seconds between two checks by the supervisor. If `_AWAY_S` seconds pass between two
# checks, the supervisor's process was stopped meanwhile.
_TICK_S, _AWAY_S = 0.25, 3.0
# Commands of `autopar workers` that have no arguments.
_PLAIN = ("status", "stop", "suspend", "interrupt")
# Seconds within which a new connection must send its first message.
_FIRST_S = 10.0
# Seconds within which workers must end after they were told to end.
_END_S = 10.0
# Seconds within which hosts must accept a standby, at least: an agent may wait for the
# lost supervisor before it calls the standby again, and longer on a busy machine.
_TAKE_OVER_S = 60.0
_LATE = f"it has not ended within {_END_S:g} s"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The settings of a run.

    Attributes:
      command: the command that starts a worker.
      limits: limits on the number of processes and on times.
      folder: folder for the run's state, log and compiled programs.
      devices: number of devices of each process; None: all devices that JAX finds.
      grace_s: seconds for which workers go on without a supervisor.
      collective_s: longest time that a process waits in a collective for another
        process.
      network: address and secret with which workers reach the supervisor.
      port: port on which workers reach the supervisor; 0: any free port.
      recovery: what workers do after another worker was lost.
      standby: whether to wait until the hosts of a run that lost its supervisor call.
      standby_s: seconds for which to wait for them.
      anew: whether all hosts of an earlier supervisor in this folder count as lost, so
        that none of them is asked whether another supervisor has taken over.
    """

    command: tuple[str, ...]
    limits: MemberLimits
    folder: pathlib.Path
    devices: int | None = None
    grace_s: float = 60.0
    collective_s: int = 10
    network: Network = dataclasses.field(default_factory=Network)
    port: int = 0
    recovery: Recovery = dataclasses.field(default_factory=Recovery)
    standby: bool = False
    standby_s: float = math.inf
    anew: bool = False


class RunEnded(Exception):
    """The run for which a standby waited has ended.

    Attributes:
      code: exit code of the run.
    """

    def __init__(self, code: int) -> None:
        """Keeps the exit code."""
        super().__init__(f"the run has ended with exit code {code}")
        self.code = code


class RunNotFound(Exception):
    """Too few hosts of the run for which a standby waited have called it."""


class Runner:
    """Starts and ends worker processes, and passes their messages to the supervisor."""

    def __init__(
        self,
        job: RunJob,
        launcher: Launcher | None = None,
        metrics: RunMetrics | None = None,
    ) -> None:
        """Starts to listen; takes over a run whose supervisor died.

        Args:
          job: settings of the run.
          launcher: starts the workers; by default on this machine.
          metrics: serves metrics of the run; None: no metrics are served.

        Raises:
          PlanError: the folder cannot be used, or another supervisor runs there.
          RunEnded: the run for which a standby waited has ended.
          RunNotFound: too few of its hosts have called a standby.
        """
        self._job, self._metrics = job, metrics
        self._stacks = StackRequests(self.send)
        self._records = Records(job.folder)
        try:
            self._set_up(job, launcher)
        except BaseException:
            self._records.close()
            raise

    def _set_up(self, job: RunJob, launcher: Launcher | None) -> None:
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._console = Console(job.folder)
        # A scheduler reads this file.
        self._progress = Ledger(job.folder / "progress.jsonl")
        several = job.limits.processes > 1
        self._launcher = launcher or LocalLauncher(job.command, names=several)
        self._key = key_to_share()
        # Since when too few hosts record a new world.
        self._minority_s = math.inf
        before = self._wait_for_hosts() if job.standby else read_state(job.folder) or {}
        known = self._taken_up(before)
        reached = before.get("reached", -1)
        if not known:
            self._say_anew(reached)
        self._token = known.get("token") or secrets.token_hex(16)
        self._connections: dict[int, Connection] = {}
        # Whether this supervisor has started a worker, or got a message from one.
        self._heard = not known
        self._turned_s = time.monotonic()
        # Hosts are served once there are workers for them. A host that joined before
        # would add processes to those with which the run begins.
        self._begun = threading.Event()
        self._service = ServiceProcess(job.limits.silent_s, job.network)
        # Whether the workers of the world (those that train together) must connect to a
        # new coordination service of this supervisor, because theirs belongs to an
        # earlier one.
        self._renews = bool(known.get("world"))
        # The process that hosts the coordination services of an earlier supervisor.
        # Workers need it until they have left the worlds of that time.
        self._service_before = ProcessId.from_data(known.get("service"))
        self.supervisor = Supervisor(job.limits, self)
        if reached >= 0:
            numbers = before.get("generation", 0), before.get("numbers", 0)
            self.supervisor.continue_from(*numbers, reached)
        self._listening = Listening(job.limits, self, self._follow, job.folder)
        if known:
            self._adopt(known)
        before_at = known.get("address")
        port = split_address(before_at)[1] if before_at else job.port
        if job.anew and job.port:
            port = job.port  # the workers that call the last port are lost
        if job.port not in (0, port):
            raise PlanError(
                f"the run in {job.folder} listens at {before_at}, where its workers "
                f"look for it: use --listen {before_at}, or remove "
                f"{job.folder}/run.json once they have ended."
            )
        self._server = self._listening_on(port)
        self._address = job.network.address(self._server.port)

    def _wait_for_hosts(self) -> Message:
        """The state of a run whose supervisor is lost, from the agents of its hosts.

        Raises:
          RunEnded: the run has ended.
          RunNotFound: too few hosts have called.
        """
        assert isinstance(self._launcher, HostLauncher)
        at = self._job.network.address(self._job.port)
        say(f"waits at {at} for the hosts of a run that has lost its supervisor")
        try:
            found = wait_for_run(self._job.network, self._job.port, self._job.standby_s)
        except OSError as error:
            raise self._listening_error(self._job.port, error) from error
        if found is None:
            raise RunNotFound
        if isinstance(found, int):
            raise RunEnded(found)
        record, calls = found
        say(f"takes the run over: {number_of(calls, 'host')} of it have called")
        self._launcher.records.take_over(record)
        state = dict(record.state)
        self._key = state.pop("key")
        return state

    def _take_over(self) -> bool:
        """Has the hosts of the last world record that this is the supervisor now."""
        end = time.monotonic() + max(self._job.grace_s, _TAKE_OVER_S)
        while not self._write(waits=True, takes_over=True):
            if time.monotonic() > end:
                return False
            time.sleep(_TICK_S)
        return True

    def _listening_on(self, port: int) -> Listener:
        """Listens on the port of an earlier supervisor, so that workers reconnect."""
        try:
            return self._job.network.listen(self._receive, port)
        except OSError as error:
            raise self._listening_error(port, error) from error

    def _listening_error(self, port: int, error: OSError) -> PlanError:
        if not self._job.network.is_local:
            return PlanError(
                f"--listen: port {port} of {self._job.network.host} cannot be had: "
                f"{error.strerror}. Name an address of this host and a port that is "
                "free."
            )
        return PlanError(
            f"port {port}, at which the processes of {self._job.folder} look for "
            f"their supervisor, cannot be had: {error.strerror}. Another `autopar "
            f"run` may serve that folder: see `{workers_command(self._job.folder)}`."
        )

    def run(self) -> int:
        """Runs until the script has ended in all processes; returns the exit code."""
        self._service.start()
        if not self._job.network.is_local:
            say(
                f"listens at {self._address}. Run `autopar worker --supervisor "
                "HOST:PORT --secret FILE` on each host, with an address of this one."
            )
        if self._metrics is not None:
            say(f"serves metrics at {self._metrics.url}")
        if self.supervisor.members or self._job.standby:
            self._begun.set()
        if self._job.standby and not self._take_over():
            return self._give_up("too few hosts of the last world call here")
        if self._job.standby:
            self.log("take over")
        if not self.supervisor.members:
            self.supervisor.begin()
        self._begun.set()
        self._write()
        with self._signals():
            while (code := self.supervisor.result) is None:
                try:
                    self._turn()
                    if time.monotonic() - self._minority_s > self._job.limits.fence_s:
                        return self._give_up("another supervisor may have taken over")
                except RunError as error:
                    self.supervisor.stop(str(error), 1)
                if self.supervisor.lost and not self._heard:
                    self._begin_anew()
            self._end()
        return code

    def _give_up(self, reason: str) -> int:
        """Leaves the run to another supervisor, as if this one had been killed."""
        self.log("give up", reason=reason)
        self.supervisor.result, self.supervisor.reason = (
            GIVEN_UP,
            (
                f"this supervisor gives the run up: {reason}. If no other one has it, "
                "start it with --anew: it goes on from the last checkpoint."
            ),
        )
        self._listening.stop()
        self._server.close()
        self._records.close()
        for connection in list(self._connections.values()):
            connection.close()
        if self._metrics is not None:
            self._metrics.close()
        return GIVEN_UP

    def _begin_anew(self) -> None:
        """Starts new workers if all workers of the earlier supervisor were ending."""
        gone = self.supervisor
        self._say_anew(gone.reached)
        self.log("begin anew")
        self._heard = True
        self.supervisor = Supervisor(self._job.limits, self)
        self.supervisor.continue_from(gone.generation, gone.numbers, gone.reached)
        self.supervisor.begin()
        self._write()

    def _say_anew(self, reached: int) -> None:
        """Prints at which step the run begins, if its folder holds an earlier run."""
        log = self._job.folder / "log.jsonl"
        if not log.exists() or not log.stat().st_size:
            return
        if reached >= 0:
            what = f"its processes are gone, after {reached} steps or more; this run"
        else:
            what = "it has ended; this run"
        print(
            f"autopar run: {self._job.folder} is that of an earlier run: {what} starts "
            "from the last checkpoint or, where the script has none, "
            f"{'ends with an error' if reached >= 0 else 'at step 0'}.",
            file=sys.stderr,
            flush=True,
        )

    def summary(self) -> str:
        """How the run ended, in one line."""
        reason = self.supervisor.reason or "the script has ended in all processes."
        return f"autopar run: {reason}"

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """Makes SIGINT and SIGTERM end the run, and SIGUSR1 suspend it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            del number, frame
            self._events.put(self._interrupt)

        def suspend(number: int, frame: Any) -> None:
            del number, frame
            self._events.put(lambda: self.supervisor.suspend())

        wakeup = signal.set_wakeup_fd(-1)  # another listener would end this process
        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, suspend)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)

    def _interrupt(self) -> None:
        self.supervisor.stop("interrupted.", 130)

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=_TICK_S)()
            while True:
                self._events.get_nowait()()
        self._records.flush()
        workers, now = self.supervisor.members, time.monotonic()
        self._console.say_awaited(late(workers, now))
        self._console.say_unplaced(find_unplaced(workers, now))
        away, self._turned_s = time.monotonic() - self._turned_s, time.monotonic()
        if away > _AWAY_S:
            self.supervisor.excuse(away)
        self.supervisor.tick()
        self._stacks.settle()
        if self._metrics is not None:
            self._metrics.update(self.supervisor, self._turned_s)
        if self._service.has_died():
            self.log("service gone")
            self._service.start()
            self._renews = len(self.supervisor.world) > 1
        # While workers train, they need no new service.
        known = self.supervisor.world, self.supervisor.members
        there = all(w in self._connections for w in known[0] if w in known[1])
        if self._renews and there and (self._service.up or self.supervisor.forms):
            self._renews = False
            self.supervisor.renew()

    # The methods of `Actions`, which the supervisor calls.

    def spawn(self, worker: int) -> None:
        """See `Actions`."""
        address = Address(self._address, self._token, worker, self._job.grace_s)
        env = {**self._environment(), VARIABLE: str(address)}
        self._processes[worker] = None
        self._processes[worker] = process = self._launcher.start(worker, env)
        self.log("start", worker=worker, pid=None if process is None else process.pid)

    def _environment(self) -> dict[str, str]:
        env = {
            **os.environ,
            FOLDER_VARIABLE: str(self._job.folder.absolute()),
            KEY_VARIABLE: self._key,
            RECOVERY_VARIABLE: str(self._job.recovery),
        }
        if self._job.devices is not None:
            env["JAX_NUM_CPU_DEVICES"] = str(self._job.devices)
        env.setdefault("NPROC", threads_needed(self._job.devices or 1))
        flags = env.get("XLA_FLAGS", "")
        if COLLECTIVE_FLAG not in flags:
            env["XLA_FLAGS"] = f"{flags} --{COLLECTIVE_FLAG}={self._job.collective_s}"
        return env

    def send(self, worker: int, kind: str, **data: Any) -> None:
        """See `Actions`."""
        if (connection := self._connections.get(worker)) is not None:
            connection.send(kind, **data)

    def kill(self, worker: int) -> None:
        """See `Actions`."""
        self._launcher.signal(worker, signal.SIGKILL)

    def open(self, generation: int, processes: Sequence[ProcessId | None]) -> str:
        """See `Actions`."""
        return self._service.open(generation, processes)

    def fill(self, generation: int, ranks: list[int]) -> None:
        """See `Actions`."""
        self._service.fill(generation, ranks)

    def close(self, generation: int) -> None:
        """See `Actions`."""
        self._service.close(generation)

    def record(self, notes: Mapping[str, Any]) -> bool:
        """See `Actions`."""
        agreed = self._write(notes, waits=True)
        if agreed:
            self._minority_s = math.inf
            return True
        # A world with workers that no host has is no sign of another supervisor.
        assert isinstance(self._launcher, HostLauncher)
        if self._minority_s == math.inf and not self._launcher.unplaced:
            hosts, fence_s = self._launcher.records.count(), self._job.limits.fence_s
            self.log("minority", hosts=hosts, seconds=round(fence_s, 1))
            self._minority_s = time.monotonic()
        return False

    def formed_world(self, message: Message) -> None:
        """See `Actions`."""
        workers = self.supervisor.members
        hosts = {
            w: split_address(ready["address"])[0]
            for w in self.supervisor.world
            if (ready := workers[w].ready)
        }
        self._listening.on_world(message, hosts)
        if self._service_before is not None:
            self._service_before.kill()
            self._service_before = None
        self._write()

    def heard(self, event: Any) -> None:
        """See `Actions`."""
        self._listening.heard(event)

    def on_measured(self, worker: int, message: Message) -> None:
        """See `Actions`."""
        found = SentBytes(int(message["nbytes"]), float(message["busy_s"]))
        self._listening.on_sent(worker, found)
        speeds = self._listening.on_computed(worker, CpuUse.from_data(message))
        if speeds:
            self.log("speeds", speeds={str(w): x for w, x in speeds.items()})

    def dropped_cluster(self, reason: str) -> None:
        """See `Actions`."""
        self.log("refused", reason=reason)
        self._listening.on_dropped()

    def _follow(self, wanted: WantedAction) -> None:
        cluster = None if wanted.cluster is None else wanted.cluster.to_data()
        if wanted.expected:
            self._events.put(lambda: self._expect(wanted.processes, cluster))
            return
        self._events.put(
            lambda: self.supervisor.follow(wanted.processes, wanted.gone, cluster)
        )

    def _expect(self, processes: int, cluster: Any) -> None:
        """Has the first worker plan for a change that is not certain to last."""
        known = self.supervisor
        if self._job.limits.prepares and processes == len(known.world):
            order = {"number": 0, "processes": processes, "cluster": cluster}
            where = {"generation": known.generation, "expected": True}
            self.send(known.world[0], "prepare", **where, **order)
            self.log("expect", processes=processes)

    def note(self, found: Resolved) -> None:
        """Logs an event that does not change the cluster (`Notes`)."""
        self._events.put(lambda: self.log("event", **event_data(found)))

    def wrong(self, source: str, reason: str) -> None:
        """Logs a message that is not an event (`Notes`)."""
        self._events.put(lambda: self.log("wrong", source=source, reason=reason))

    def log(self, event: str, **data: Any) -> None:
        """See `Actions`."""
        self._records.log({"time_s": round(time.time(), 4), "event": event, **data})
        self._console.say(event, data)
        if self._metrics is not None:
            self._metrics.note(event, data)
        if event in ("form", "start"):
            self._write()

    # Processes.

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        """See `Reports`."""
        self._events.put(lambda: self._on_gone(worker, code, spare))

    def on_join(self, machines: int) -> None:
        """See `Reports`."""
        self._events.put(lambda: self._grow(machines))

    def on_wait(self, worker: int) -> None:
        """See `HostReports`."""
        self._events.put(lambda: self.supervisor.on_wait(worker))

    def on_start(self, worker: int) -> None:
        """See `HostReports`."""
        self._events.put(lambda: self.supervisor.on_start(worker))

    def on_leave(self, worker: int, *, spare: bool) -> None:
        """See `HostReports`."""
        left = {"kind": "leave", "worker": worker, "spare": spare}
        self._events.put(lambda: self.supervisor.take(worker, left))

    def on_unreached(self, worker: int, *, spare: bool) -> None:
        """See `HostReports`."""
        self._events.put(lambda: self._on_gone(worker, None, spare, reached=False))

    def on_host(self, name: str, slots: int) -> None:
        """See `HostReports`."""
        self._events.put(lambda: self.log("host", name=name, slots=slots))

    def may_return(self, worker: int) -> bool:
        """See `HostReports`."""
        return self.supervisor.may_return(worker)

    def has_link(self, worker: int) -> bool:
        """See `HostReports`."""
        connection = self._connections.get(worker)
        return connection is not None and connection.is_open

    def is_done(self) -> bool:
        """See `HostReports`."""
        return self.supervisor.result == 0

    def _grow(self, machines: int) -> None:
        """Adds a worker for each machine that joined, up to the most processes."""
        wanted = self.supervisor.wanted
        processes = min(wanted + machines, self._job.limits.most)
        if processes > wanted:
            self.supervisor.resize(processes)

    def _on_gone(
        self, worker: int, code: int | None, spare: bool, *, reached: bool = True
    ) -> None:
        self._processes.pop(worker, None)
        if (connection := self._connections.pop(worker, None)) is not None:
            connection.close()
        if reached:
            self.supervisor.on_end(worker, code, spare=spare)
        else:
            self.supervisor.on_unreached(worker, spare=spare)
        if isinstance(self._launcher, HostLauncher):
            self._launcher.settle(worker)

    def _end(self) -> None:
        """Ends all remaining processes."""
        self._listening.stop()
        end = time.monotonic() + _END_S
        code = self.supervisor.result
        if not code:  # workers that never connected get no order
            for worker in self._processes.keys() - self._connections.keys():
                self._launcher.signal(worker, signal.SIGTERM)
        for how in (signal.SIGTERM if code else None, signal.SIGKILL):
            if how is not None:
                for worker in list(self._processes):
                    if how == signal.SIGKILL:
                        self.log("kill", worker=worker, reason=_LATE)
                    self._launcher.signal(worker, how)
            while self._processes and (time.monotonic() < end or how == signal.SIGKILL):
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=_TICK_S)()
        self._service.stop()
        if self._service_before is not None:
            self._service_before.kill()
        self._launcher.close()
        self._records.end()
        self._server.close()
        if self._metrics is not None:
            self._metrics.close()

    # Messages.

    def _receive(self, end: End) -> None:
        connection = Connection(end)
        connection.patience(_FIRST_S)
        first = connection.receive()
        if first is not None and first["kind"] == "host":
            self._receive_host(first, connection)
            return
        if first is None or not has_token(first, self._token):
            connection.send("refused", reason="wrong token")
            connection.close()
            return
        connection.patience(None)
        if first["kind"] == "command":
            self._events.put(lambda: self._obey(first, connection))
            return
        worker = int(first["worker"])
        self._events.put(lambda: self._greet(worker, first, connection))
        while (message := connection.receive()) is not None:
            if message["kind"] == "beat" and not self._job.network.is_local:
                connection.send("beat")
            self._events.put(
                lambda message=message: self._take(worker, message, connection)
            )

    def _take(self, worker: int, message: Message, connection: Connection) -> None:
        """Passes on a worker's message, unless the worker has ended meanwhile."""
        if self._connections.get(worker) is not connection:
            return
        if message["kind"] == "stacks":
            self._stacks.take(worker, message["text"])
        elif message["kind"] == "progress":
            self._progress.write("progress", **own_fields(message))
        else:
            self.supervisor.take(worker, message)

    def _receive_host(self, first: Message, connection: Connection) -> None:
        """Serves the agent of a host, which proves itself by the run's secret."""
        if isinstance(self._launcher, HostLauncher):
            self._begun.wait()
            self._launcher.serve(first, connection)
            return
        reason = "the run is on one machine: start it with `autopar run --listen`."
        connection.send("refused", reason=reason)
        connection.close()

    def _greet(self, worker: int, first: Message, connection: Connection) -> None:
        if not self.supervisor.meet(worker):
            self._send_home(worker, first, connection)
            return
        self._connections[worker], self._heard = connection, True
        process = ProcessId.from_data(first.get("process"))
        known = worker in self._processes or self._launcher.watch(worker, process)
        self._processes[worker] = process
        if not known:
            self.on_end(worker, None)
        self.supervisor.take(worker, first)

    @staticmethod
    def _send_home(worker: int, first: Message, connection: Connection) -> None:
        """Ends a worker that counted as gone because it was unreachable."""
        reason = f"worker {worker} was out of reach, and the run goes on without it"
        connection.send("abort", generation=first.get("generation", -1))
        connection.send("end", code=1, reason=reason)

    def _obey(self, message: Message, connection: Connection) -> None:
        """Carries out a command of `autopar workers`."""

        def answer(wrong: str = "", **more: Any) -> None:
            status = dict(self.supervisor.status())
            connection.send("answer", wrong=wrong, status=status, **more)
            connection.close()

        try:
            if message.get("command") == "stacks":
                wanted = message["worker"]
                wrong = self._stacks.ask(self._processes, wanted, answer)
                if not wrong:
                    return  # the reply follows when workers have answered
            else:
                wrong = self._run_command(message.get("command"), message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong = f"the command {message.get('command')!r} lacks or misuses {error}."
        answer(wrong)

    def _run_command(self, command: Any, message: Message) -> str:
        """Carries out a command of `autopar workers`; returns why it failed, or ''."""
        if command == "resize":
            return self.supervisor.resize(int(message["processes"]))
        if command == "remove":
            return self.supervisor.remove(int(message["worker"]))
        if command == "place":
            return self._place(message["places"])
        if command == "suspend":
            self.supervisor.suspend()
        elif command == "stop":
            self.supervisor.end_training()
        elif command == "interrupt":
            self._interrupt()
        return "" if command in _PLAIN else f"no such command: {command}"

    def _place(self, places: Mapping[str, int]) -> str:
        """Sets how many workers run on each host, as a scheduler decided (`Placing`).

        Returns why this failed, or ''.
        """
        if not isinstance(self._launcher, Placing):
            return "this run has no places: a scheduler did not start it."
        leaving = self._launcher.move(places)
        return self.supervisor.place(sum(places.values()), frozenset(leaving))

    # The state file.

    def _write(
        self,
        notes: Mapping[str, Any] | None = None,
        *,
        waits: bool = False,
        takes_over: bool = False,
    ) -> bool:
        """Writes the state to the folder, and has hosts record it (`HostLauncher`)."""
        known = {
            "run": self._run,
            "token": self._token,
            "workers": {str(w): _data(x) for w, x in self._processes.items()},
            **(notes or self.supervisor.notes()),
        }
        data = {
            **known,
            "address": self._address,
            "secret": self._job.network.secret,
            "pid": os.getpid(),
            "service": _data(self._service.process),
            "events": self._listening.addresses(),
        }
        if not isinstance(self._launcher, HostLauncher):
            self._records.state(data)
            return True
        record = self._launcher.make_record({**known, "key": self._key})
        last = dataclasses.replace(self._launcher.records.last, state={})
        self._records.state({**data, "record": last.to_data()})
        return self._launcher.record(record, waits=waits, takes_over=takes_over)

    def _taken_up(self, known: Message) -> Message:
        """The state of an earlier supervisor; empty if none of its workers runs."""
        self._run = known.get("run") or secrets.token_hex(8)
        self._launcher.begin(self._run, self)
        if isinstance(self._launcher, HostLauncher) and not self._job.standby:
            self._launcher.records.restore(known.get("record"), anew=self._job.anew)
        workers = known.get("workers", {}).items()
        found = {int(w): ProcessId.from_data(x) for w, x in workers}
        self._processes: dict[int, ProcessId | None] = {
            w: x for w, x in found.items() if self._launcher.watch(w, x)
        }
        prefix = shared_prefix(self._run)
        if self._processes or (found and have_notes(prefix, known["world"])):
            return known
        remove_shared(prefix)  # a new run must not find the old state
        return {}

    def _adopt(self, known: Message) -> None:
        """Takes over the workers of an earlier supervisor, from its saved state."""
        self.supervisor.adopt(known)
        for worker in map(int, known["workers"]):
            if worker not in self._processes:
                self.on_end(worker, None)


def _data(process: ProcessId | None) -> Message | None:
    return None if process is None else process.to_data()
