"""What the supervisor knows about its workers, and how it chooses among them.

A world is a set of processes that train together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import json
import math
import os
import pathlib
import select
import signal
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from autopar.elastic.processes import tiles
from autopar.elastic.processes.network import End, split_address
from autopar.elastic.processes.recovery import RESPAWNED

# Index of a process's start time in ``/proc/PID/stat``, among the fields after the
# name; proc(5) numbers it 22.
_STARTED = 19


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process of this machine, even after its number is reused (Linux).

    Attributes:
      pid: process number.
      started: start time, in clock ticks since the machine booted.
      boot: random identifier that the kernel makes at each boot.
    """

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that now has this number; None if there is no such process."""
        try:
            text = pathlib.Path(f"/proc/{pid}/stat").read_text()
            return cls(pid, int(text.rpartition(")")[2].split()[_STARTED]), _boot())
        except (OSError, ValueError, IndexError):
            return None

    @classmethod
    def from_data(cls, data: Any) -> ProcessId | None:
        """Reads the result of `to_data`; None if the data is not such a result."""
        if not isinstance(data, Mapping):
            return None
        pid, started, boot = (data.get(k) for k in ("pid", "started", "boot"))
        if not (isinstance(pid, int) and isinstance(started, int) and pid > 0):
            return None
        return cls(pid, started, str(boot))

    def to_data(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can hold."""
        return dataclasses.asdict(self)

    def open(self) -> int | None:
        """Opens a descriptor of the process (pidfd_open(2)); None if it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            return None
        # While the descriptor is open, the number cannot be reused. So the identity is
        # compared after opening.
        if ProcessId.of(self.pid) == self and not has_ended(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def kill(self) -> None:
        """Kills the process, but never another process that now has its number."""
        if (descriptor := self.open()) is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def has_ended(descriptor: int, wait_s: float | None = 0) -> bool:
    """Whether a process has ended; a zombie has ended, too.

    Args:
      descriptor: descriptor of the process.
      wait_s: longest time to wait for the end of the process; None: for ever.
    """
    return bool(select.select([descriptor], [], [], wait_s)[0])


@functools.cache
def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


Message = dict[str, Any]

# Exit status of a suspended worker or run: its state is saved, and it can be resumed.
SUSPENDED = 75  # EX_TEMPFAIL of <sysexits.h>
# Exit status of a supervisor that left the run to another one: it reached too few hosts
# of the last world.
GIVEN_UP = 69  # EX_UNAVAILABLE of <sysexits.h>

# Most bytes of a message, which is one line. A message may list the arrays that a
# worker holds, but not their contents.
_LONGEST_BYTES = 64 << 20


class Connection:
    """One end of a connection; any thread may send, but only one may receive.

    Attributes:
      is_open: False once the other end has closed the connection.
    """

    def __init__(self, end: End) -> None:
        """Wraps a connected socket."""
        self._socket = end
        self._lines = end.makefile("rb")
        self._lock = threading.Lock()
        self.is_open = True

    @property
    def ports(self) -> frozenset[int]:
        """The ports of this end and of the other end; empty once it is closed."""
        try:
            own, other = self._socket.getsockname(), self._socket.getpeername()
        except OSError:
            return frozenset()
        return frozenset((own[1], other[1]))

    def send(self, kind: str, **data: Any) -> bool:
        """Sends a message; returns whether the other end was still connected."""
        line = json.dumps({"kind": kind, **data}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            return False
        return True

    def patience(self, seconds: float | None) -> None:
        """Limits the wait for a message to this many seconds; None: no limit."""
        self._socket.settimeout(seconds)

    def receive(self) -> Message | None:
        """The next message; None if the connection ended, or got an invalid message."""
        try:
            line = self._lines.readline(_LONGEST_BYTES)
            found = json.loads(line) if line else None
        except (OSError, ValueError):
            found = None
        if isinstance(found, dict) and "kind" in found:
            return found
        self.is_open = False
        return None

    def close(self) -> None:
        """Closes the connection, so that the other end notices."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()


def has_token(message: Message | None, token: str) -> bool:
    """Whether the first message of a connection contains the token."""
    given = "" if message is None else str(message.get("token", ""))
    return hmac.compare_digest(given.encode(), token.encode())


def own_fields(message: Message) -> dict[str, Any]:
    """The fields of a worker's message that not all its messages have."""
    common = ("kind", "worker", "generation")
    return {k: v for k, v in message.items() if k not in common}


# After this many seconds, a run reports that it still waits for a worker's script to
# join.
_LATE_S = 15.0


class Actions(Protocol):
    """Actions on processes and files that a supervisor asks its runner for."""

    def spawn(self, worker: int) -> None:
        """Starts a worker."""
        ...

    def send(self, worker: int, kind: str, **data: Any) -> None:
        """Sends a worker an order."""
        ...

    def kill(self, worker: int) -> None:
        """Kills a worker; its end is reported as if it had ended by itself."""
        ...

    def open(self, generation: int, processes: Sequence[ProcessId | None]) -> str:
        """Starts the coordination service of a world; returns its address.

        Args:
          generation: number of the world; each new world gets a higher number.
          processes: processes of the world's workers.
        """
        ...

    def fill(self, generation: int, ranks: list[int]) -> None:
        """Connects to a world's service in place of the dead processes ``ranks``."""
        ...

    def close(self, generation: int) -> None:
        """Ends the coordination service of a world that all processes have left."""
        ...

    def record(self, notes: Mapping[str, Any]) -> bool:
        """Records a world before it is formed (`Supervisor.notes`).

        Returns:
          False if another supervisor may have taken over the run, so that the world
          must not be formed.
        """
        ...

    def formed_world(self, message: Message) -> None:
        """Called with a worker's message once all workers of a world have its state."""
        ...

    def heard(self, event: Any) -> None:
        """Called with an event, as plain data, that a worker's script has sent."""
        ...

    def on_measured(self, worker: int, message: Message) -> None:
        """Called with a worker's report about its CPU time, and the bytes that it sent.

        The report has the fields of `SentBytes` and of `CpuUse`.
        """
        ...

    def dropped_cluster(self, reason: str) -> None:
        """Called if the world trains on because a changed cluster has no plan."""
        ...

    def log(self, event: str, **data: Any) -> None:
        """Writes an event to the log."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemberLimits:
    """Limits on the number of processes and on times.

    Attributes:
      processes: number of processes that a run begins with.
      least: smallest number of processes with which a run continues.
      most: largest number of processes that a run may have.
      restarts: how many dead workers a run replaces, in total.
      start_s: longest time from the start of a worker's process until the worker is
        ready to train.
      silent_s: longest time without a message from a connected worker.
      leave_s: longest time from an order to leave a world until the worker has left.
      stuck_s: longest time without progress of a whole world before the world is left.
      fence_s: how long a world that the supervisor cannot reach may train on, before a
        new world starts.
      prepares: whether plans and programs for possible next worlds are made while a
        world trains.
      prepare_s: longest time to wait for a plan and program for a changed cluster
        before the change is made without them.
    """

    processes: int
    least: int = 1
    most: int = 64
    restarts: int = 0
    start_s: float = 300.0
    silent_s: float = 15.0
    leave_s: float = 60.0
    stuck_s: float = 1800.0
    fence_s: float = 0.0
    prepares: bool = True
    prepare_s: float = 120.0


def likely_sizes(processes: int, limits: MemberLimits) -> list[int]:
    """Likely numbers of processes of the next world, the most likely one first.

    Args:
      processes: number of processes of the current world.
      limits: smallest and largest number of processes.

    >>> likely_sizes(4, MemberLimits(processes=4, least=1, most=6))
    [3, 5, 2]
    """
    sizes = dict.fromkeys([processes - 1, processes + 1, processes // 2, 2 * processes])
    return [n for n in sizes if limits.least <= n <= limits.most and n != processes]


@dataclasses.dataclass(slots=True)
class WorkerMember:
    """What the supervisor knows about a worker.

    Attributes:
      phase: ``starting``, ``ready`` (waits to be in a world), or ``joined`` (is in a
        world).
      since_s: when the phase began; infinite while no host has room for the worker.
      heard_s: when the last message of the worker came.
      connected: whether the worker has a connection.
      ready: the worker's last ``ready`` message.
      formed: whether the worker has received the training state in its world.
      started: the last step that the worker has started, as it reported when it was
        asked to pause.
      finished: whether the worker has done the last step of the run.
      broken: the error that the worker reported; '' otherwise.
      step: the last step that the worker is known to have started.
      leave_by_s: time by which the worker must have left its world.
      dismissed: whether the worker was told to end.
      refused: whether the worker asked to leave the run, and the supervisor refused.
      trained: whether the worker has ever had the training state.
      pid: number of the worker's process; None: the worker has not connected yet.
      respawns: whether the worker's process ends when it leaves a world and is then
        started again.
    """

    phase: str = "starting"
    since_s: float = 0.0
    heard_s: float = 0.0
    connected: bool = False
    ready: Message | None = None
    formed: bool = False
    started: int | None = None
    finished: bool = False
    broken: str = ""
    step: int = -1
    leave_by_s: float = math.inf
    dismissed: bool = False
    refused: bool = False
    trained: bool = False
    pid: int | None = None
    respawns: bool = False


def late(members: Mapping[int, WorkerMember], now: float) -> frozenset[int]:
    """The workers whose scripts have not joined the run after `_LATE_S` seconds."""
    return frozenset(
        worker
        for worker, member in members.items()
        if member.phase == "starting" and now - member.since_s > _LATE_S
    )


def find_unplaced(members: Mapping[int, WorkerMember], now: float) -> frozenset[int]:
    """The workers for which no host had room for more than `_LATE_S` seconds."""
    return frozenset(
        worker
        for worker, member in members.items()
        if member.since_s == math.inf and now - member.heard_s > _LATE_S
    )


def overdue(member: WorkerMember, limits: MemberLimits, now: float) -> str:
    """Why the supervisor no longer waits for a worker; '' if it still waits.

    Args:
      member: the worker.
      limits: the allowed times.
      now: seconds on the supervisor's clock.
    """
    # A Python process that ends sends nothing more; on a busy machine this takes long.
    silent_s = limits.silent_s + (limits.leave_s if member.finished else 0.0)
    if member.connected and now - member.heard_s > silent_s:
        return f"silent for {silent_s:g} s"
    waited = now - member.since_s  # negative while no host has room for the worker
    if member.phase == "starting" and waited > limits.start_s:
        return f"not ready {limits.start_s:g} s after its start"
    if member.phase == "joined" and now > member.leave_by_s:
        return f"did not leave its world within {limits.leave_s:g} s"
    return ""


def excuse(members: Mapping[int, WorkerMember], away_s: float) -> None:
    """Extends all deadlines by a time during which the supervisor did not run.

    Args:
      members: the workers.
      away_s: seconds during which the supervisor's process did not run.
    """
    for member in members.values():
        member.heard_s += away_s
        member.since_s += away_s
        member.leave_by_s += away_s


def all_formed(members: Mapping[int, WorkerMember], world: Sequence[int]) -> bool:
    """Whether all workers of a world are alive and have the training state."""
    return all(w in members and members[w].formed for w in world)


def mark_trained(members: Mapping[int, WorkerMember], world: Sequence[int]) -> None:
    """Records that the workers of a world have had the training state."""
    for worker in world:
        members[worker].trained = True


def last_error(members: Mapping[int, WorkerMember]) -> str:
    """The latest error that any worker reported."""
    errors = [m.broken for m in members.values() if m.broken]
    return errors[-1] if errors else "none"


def never_starts(member: WorkerMember, code: int | None, restarts: int) -> bool:
    """Whether a worker ended before it joined, so that replacing it is useless.

    Args:
      member: the worker.
      code: exit status of the worker, negative for a signal; None: unknown.
      restarts: how many more killed workers may be replaced.
    """
    killed = code is None or (code < 0 and restarts > 0)
    return member.phase == "starting" and not killed


def starts_again(
    member: WorkerMember, code: int | None, now: float, *, gathers: bool
) -> bool:
    """Whether a worker ended only to leave a world, and must be started again.

    Args:
      member: the worker.
      code: exit status of the worker, negative for a signal; None: unknown.
      now: seconds on the supervisor's clock.
      gathers: whether the worker's world is being left. At that time, an error such as
        a broken collective counts as leaving the world.
    """
    if code == RESPAWNED:
        return True
    if code == -signal.SIGKILL and now <= member.leave_by_s:
        return False  # the worker was killed; `restarts` decides on a replacement
    # If an earlier supervisor started the worker, it may have ended while no supervisor
    # ran, so that its exit code is unknown.
    unseen = member.trained and member.pid is None
    return member.respawns and member.phase == "joined" and (gathers or unseen)


def respawn_member(member: WorkerMember, now: float) -> WorkerMember:
    """The record of a worker whose process is started again.

    Args:
      member: the worker.
      now: seconds on the supervisor's clock.
    """
    return WorkerMember(
        since_s=now,
        heard_s=now,
        respawns=True,
        trained=member.trained,
        dismissed=member.dismissed,
    )


def end_text(code: int | None) -> str:
    """How a worker's process ended, in words.

    >>> end_text(1), end_text(-9), end_text(None)
    ('ended with code 1', 'died by signal 9', 'is gone')
    """
    if code is None:
        return "is gone"
    return f"ended with code {code}" if code >= 0 else f"died by signal {-code}"


def never_started(worker: int, code: int, member: WorkerMember) -> str:
    """The text that a run ends with if a worker ended before it joined."""
    ended = f"worker {worker} {end_text(code)} before it joined the run"
    if member.connected or member.pid is not None:
        return f"{ended}, in its call of autopar.elastic(...); see its output."
    return (
        f"{ended}: its script must call autopar.elastic(...) and take its steps; see "
        "its output."
    )


def adopt(now: float, *, inside: bool, formed: bool = False) -> WorkerMember:
    """The record of a worker that an earlier supervisor started; it will reconnect.

    Args:
      now: seconds on the supervisor's clock.
      inside: whether the worker is in the current world.
      formed: whether all workers of the world had the training state.
    """
    return WorkerMember(
        phase="joined" if inside else "starting",
        since_s=now,
        heard_s=now,
        connected=inside,  # a worker outside the world may not have connected
        formed=inside and formed,
        trained=inside,
    )


def ready_of(members: Mapping[int, WorkerMember]) -> list[int]:
    """The workers that are ready and wait to be in a world."""
    return [w for w, m in members.items() if m.phase == "ready" and not m.dismissed]


def rows_of(members: Mapping[int, WorkerMember]) -> float:
    """Rows of a batch divided by the devices of a process.

    The number of processes must divide this number. 0: any number of processes is
    allowed.
    """
    told = [m.ready for m in members.values() if m.ready]
    return told[-1]["rows"] / told[-1]["devices"] if told else 0


def describe(members: Mapping[int, WorkerMember]) -> dict[str, Any]:
    """A short description of the workers, as plain data."""
    return {
        str(w): {
            "phase": m.phase if m.since_s < math.inf else "waiting for a host",
            "step": m.step,
            "pid": m.pid,
            "host": None if m.ready is None else split_address(m.ready["address"])[0],
        }
        for w, m in sorted(members.items())
    }


def staying_of(
    members: Mapping[int, WorkerMember], leaving: Collection[int]
) -> list[int]:
    """The workers that were neither asked to leave nor told to end."""
    return [w for w, m in members.items() if w not in leaving and not m.dismissed]


def is_new(member: WorkerMember, members: Mapping[int, WorkerMember]) -> bool:
    """Whether a worker has never trained although other workers have."""
    return not member.trained and any(m.trained for m in members.values())


def newcomers_of(
    members: Mapping[int, WorkerMember], world: Sequence[int]
) -> list[int]:
    """The workers of a forming world that have never trained."""
    current = [(w, members[w]) for w in world if w in members]
    if all(m.formed for _, m in current):
        return []
    return [w for w, m in current if is_new(m, members)]


# Functions that choose the workers of the next world, and the state from which it
# continues.

# Maps the address at which a worker serves its parts of states to a mapping: name of a
# state -> the worker's tiles of it (see `Offers.describe`).
Held = Mapping[str, Mapping[str, Mapping[str, Any]]]


def latest_state(held: Held) -> dict[str, Any] | None:
    """The latest training state of which the workers together hold all parts.

    The result is sent to the workers in the message that forms a world.

    Returns:
      Name, step, shapes, extra data, and which worker holds which part; None if no
      state is complete.
    """
    versions = {name for mine in held.values() for name in mine}
    for name in sorted(versions, key=_order, reverse=True):
        mine = {address: x[name] for address, x in held.items() if name in x}
        shapes = {p: s for x in mine.values() for p, s in x["shapes"].items()}
        plain = {path: shape for path, (shape, _) in shapes.items()}
        if tiles.complete(plain, [x["tiles"] for x in mine.values()]):
            some = next(iter(mine.values()))
            return {
                "version": name,
                "step": some["step"],
                "shapes": shapes,
                "extra": some["extra"],
                "holders": {address: x["tiles"] for address, x in mine.items()},
            }
    return None


def describe_world(
    ready: Mapping[int, Message], workers: Sequence[int]
) -> list[dict[str, Any]]:
    """Describes the workers of a world by rank, for the message that forms it.

    Args:
      ready: the ``ready`` message of each worker.
      workers: workers of the world.
    """
    keys = ("address", "pid", "devices")
    return [{k: ready[w][k] for k in keys} | {"worker": w} for w in workers]


def processes_of(
    ready: Mapping[int, Message], workers: Sequence[int]
) -> list[ProcessId | None]:
    """The processes of workers, from their ``ready`` messages."""
    return [ProcessId.from_data(ready[w].get("process")) for w in workers]


def _order(version: str) -> tuple[int, int]:
    step, generation = version.split(".")
    return int(step), int(generation)


def choose_workers(
    ready: Sequence[int], wanted: int, leaving: frozenset[int], rows: float
) -> list[int]:
    """The workers of the next world, by rank; workers that joined earlier come first.

    The result has as many workers as possible, at most ``wanted``, such that their
    devices can split the rows of a batch evenly. Workers that are not chosen wait as
    spares, and replace workers that die.

    Args:
      ready: numbers of the workers that wait for a world.
      wanted: largest number of workers to choose.
      leaving: workers that were asked to leave.
      rows: rows of a batch divided by the devices of a process; the number of workers
        must divide it. 0: any number of workers is allowed.

    >>> choose_workers([0, 1, 2, 3, 4], 5, frozenset({1}), 24)
    [0, 2, 3, 4]
    >>> choose_workers([0, 1, 2, 3, 4], 5, frozenset(), 24)
    [0, 1, 2, 3]
    """
    left = sorted(set(ready) - leaving)[:wanted]
    sizes = [n for n in range(len(left), 0, -1) if rows % n == 0]
    return left[: sizes[0]] if sizes else left


def side_by_side(
    ready: Mapping[int, Message], workers: Sequence[int]
) -> tuple[int, ...]:
    """Orders workers such that those on the same host have successive ranks.

    With this order, devices along one mesh axis communicate either within hosts or
    between hosts.

    Args:
      ready: the ``ready`` message of each worker.
      workers: workers of the world, ordered by age.
    """
    hosts = {w: ready[w]["address"].rpartition(":")[0] for w in workers}
    first = {host: w for w, host in reversed(hosts.items())}
    return tuple(sorted(workers, key=lambda w: (first[hosts[w]], w)))
