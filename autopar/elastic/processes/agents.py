"""The agent of a host (`autopar worker`): it starts workers on a supervisor's orders.

If an agent dies, its workers die too, so no process is left behind on a host.

An agent may connect to a scheduler instead. The scheduler names jobs that have devices
of the host. For each such job, a further agent in a thread connects to the job's
supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import queue
import re
import secrets
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from autopar.elastic.processes import leash
from autopar.elastic.processes.hosts import versions
from autopar.elastic.processes.launching import (
    COLLECTIVE_FLAG,
    LocalLauncher,
    python_command,
    threads_needed,
)
from autopar.elastic.processes.link import (
    FOLDER_VARIABLE,
    VARIABLE,
    Address,
)
from autopar.elastic.processes.members import Connection, Message
from autopar.elastic.processes.network import (
    Network,
    join_address,
    open_listener,
    route_to,
    split_address,
)
from autopar.elastic.processes.recovery import RESPAWNED
from autopar.elastic.processes.standby import Record, tell_end
from autopar.errors import InputError, PlanError, RunError
from autopar.units import number_of

_FLAG = re.compile(rf"--{COLLECTIVE_FLAG}=\d+")
_BEAT_S = 1.0
_RETRY_S = 0.5
# Seconds in which a supervisor must accept a connection; they are shared by all
# addresses.
_CONNECT_S = 10.0
# Seconds that workers may take to leave a host that was asked to leave the run.
_LEAVE_S = 60.0
# Seconds between two requests of a leaving host to release its workers. The supervisor
# may have refused before, and other hosts may have joined since.
_ASK_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """The options of `autopar worker`.

    Attributes:
      supervisor: ``HOST:PORT`` of the supervisor, or of a scheduler; after commas, the
        addresses of standbys that may take its place, or those at which the scheduler
        may be started again.
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
        # Job and port of its supervisor -> the agent that serves the job's run.
        self._jobs: dict[tuple[str, int], Agent] = {}
        # Worker -> exit code, until the supervisor has handled the worker's end.
        self._ended: dict[int, int | None] = {}
        self._connection: Connection | None = None
        self._network = Network("", options.secret)
        # The addresses to call, the present one first; and the supervisor's last state.
        self._calls = options.supervisor.split(",")
        self._record: Record | None = None
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

    def _tell_standbys(self, *, done: bool) -> None:
        """Tells standbys that the run has ended."""
        for address in self._calls[1:]:
            with contextlib.suppress(OSError):
                tell_end(self._network, address, 0 if done else 1)

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
            except InputError as error:
                raise PlanError(f"--supervisor: {error}.") from error
            except OSError as error:
                strange = isinstance(error, ssl.SSLCertVerificationError)
                if strange and len(self._calls) == 1:
                    raise PlanError(
                        f"{self._calls[0]} has another secret: copy that of `autopar "
                        "run --listen` to this host."
                    ) from error
                if time.monotonic() > end and not self._jobs:
                    raise self._unreached_error(error) from error
                if not said:
                    self._say(
                        f"waits for a supervisor at {options.supervisor}: {error}"
                    )
                said = True
                self._calls = [*self._calls[1:], self._calls[0]]
            if self._leave_by_s < math.inf and not self._jobs:
                self._say("the supervisor is away: the workers of this host are ended")
                self._code = options.leave_status
                return
            self._look_after_jobs()
            time.sleep(_RETRY_S)
        takes = number_of(options.slots, "worker")
        self._say(f"joined the run at {self._calls[0]}; this host takes {takes}")
        for work in (self._listen, self._beat):
            threading.Thread(target=work, args=(self._connection,), daemon=True).start()

    def _greet(self) -> bool:
        """Tries once to connect.

        Returns False if workers of an old run had to end first.

        Raises:
          OSError: no supervisor answers.
          PlanError: the supervisor refuses this host.
        """
        options, limit_s = self._options, _CONNECT_S / len(self._calls)
        host = options.address or route_to(self._calls[0])
        self._host_name = options.name or f"{socket.gethostname()} ({host})"
        self._network = Network(host, options.secret)
        connection = Connection(self._network.connect(self._calls[0], limit_s))
        connection.send(
            "host",
            agent=self._name,
            run=self._run,
            name=self._host_name,
            slots=options.slots,
            device=options.kind,
            versions=versions(),
            workers=sorted(self._running),
            ended={str(w): code for w, code in self._ended.items()},
            standbys=len(self._calls) - 1,
            record=None if self._record is None else self._record.to_data(),
        )
        connection.patience(_CONNECT_S)
        answer = connection.receive()
        if answer is None or answer["kind"] == "standby":
            connection.close()
            raise ConnectionError("it hung up" if answer is None else "a standby")
        if answer["kind"] == "other run":
            connection.close()
            self._say("another run is there now: the workers of the last one end")
            self._end_workers()
            self._name, self._run, self._launcher = secrets.token_hex(8), "", None
            self._record = None
            self._ended.clear()
            return False
        if answer["kind"] == "refused":
            connection.close()
            raise PlanError(f"the supervisor refuses this host: {answer['reason']}")
        connection.patience(answer.get("silence"))
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
            case "forget":
                for worker in message["workers"]:
                    self._ended.pop(int(worker), None)
            case "record":
                self._keep_record(message)
            case "end":
                self._tell_standbys(done=message["done"])
                self._code = 0 if message["done"] else self._options.leave_status
            case _:
                pass

    def _serve_job(self, message: Message) -> None:
        """Serves the run of a job that a scheduler has placed on this host.

        If the scheduler is started again on another host, the supervisors of its jobs
        are there, too, at the same ports.
        """
        job, supervisor = str(message["job"]), str(message["supervisor"])
        own, port = split_address(supervisor)
        if (job, port) in self._jobs or self._leave_by_s < math.inf:
            return  # a scheduler repeats its orders
        places = [split_address(x)[0] for x in self._options.supervisor.split(",")]
        others = [join_address(host, port) for host in places if host != own]
        options = dataclasses.replace(
            self._options,
            supervisor=",".join([supervisor, *others]),
            secret=str(message["secret"]),
            folder=self._options.folder / job,
            address=self._network.host,
            name=self._host_name,
            job=job,
        )
        agent = self._jobs[job, port] = Agent(options)

        def serve() -> None:
            try:
                agent.run()
            except (PlanError, RunError) as error:
                agent._say(str(error))
            finally:
                del self._jobs[job, port]

        threading.Thread(target=serve, daemon=True).start()

    def _keep_record(self, message: Message) -> None:
        record = Record.from_data(message["record"])
        if record is None or not record.may_replace(self._record):
            return
        self._record = record
        if self._connection is not None:
            self._connection.send("recorded", number=record.number)

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
            Address.parse(given[VARIABLE]), supervisor=",".join(self._calls)
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

    def on_leave(self, worker: int, *, spare: bool) -> None:
        """See `Reports`; never called, because a local launcher has no other hosts."""

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
