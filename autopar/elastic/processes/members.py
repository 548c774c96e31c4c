"""What the supervisor knows about its workers, and its actions on them.

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

# Index of the start time among the fields after the name in ``/proc/PID/stat``; it is
# field 22 of proc(5).
_STARTED = 19


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine (Linux).

    Attributes:
      pid: process number.
      started: start time, in clock ticks since the machine booted.
      boot: identifier of the machine's boot.
    """

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has a number now; None: no process has the number."""
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
        """Opens a descriptor of the process (pidfd_open(2)); None: it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            return None
        # The open descriptor holds its process, so the identity is compared after
        # opening.
        if ProcessId.of(self.pid) == self and not has_ended(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def kill(self) -> None:
        """Kills the process, but never another process that has got its number."""
        if (descriptor := self.open()) is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def has_ended(descriptor: int, wait_s: float | None = 0) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet.

    Args:
      descriptor: descriptor of the process.
      wait_s: longest time to wait for the end of the process; None: for ever.
    """
    return bool(select.select([descriptor], [], [], wait_s)[0])


@functools.cache
def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


Message = dict[str, Any]

# The exit status of a worker or a run that has saved its state to be resumed later.
SUSPENDED = 75  # EX_TEMPFAIL of <sysexits.h>

# Longest line. A message lists the arrays that a worker holds, but not their contents.
_LONGEST_BYTES = 64 << 20


class Connection:
    """One end of a connection; any thread may send, only one thread receives.

    Attributes:
      is_open: whether no end of the incoming messages has been seen.
    """

    def __init__(self, end: End) -> None:
        """Takes a connected socket."""
        self._socket = end
        self._lines = end.makefile("rb")
        self._lock = threading.Lock()
        self.is_open = True

    @property
    def ports(self) -> frozenset[int]:
        """The ports of both ends; empty once the connection is closed."""
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
        """The next message; None at the end, or after data that is not a message."""
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


# Seconds after which a run reports that it still waits for a script to join.
_LATE_S = 15.0


class Actions(Protocol):
    """What a supervisor does outside its own state."""

    def spawn(self, worker: int) -> None:
        """Starts a worker."""
        ...

    def send(self, worker: int, kind: str, **data: Any) -> None:
        """Sends a worker an order."""
        ...

    def kill(self, worker: int) -> None:
        """Kills a worker; its end is reported like any other end."""
        ...

    def open(self, generation: int, processes: Sequence[ProcessId | None]) -> str:
        """Starts the coordination service of a world; returns its address.

        Args:
          generation: number of the world.
          processes: processes of the world's workers.
        """
        ...

    def fill(self, generation: int, ranks: list[int]) -> None:
        """Lets a world finish connecting without the processes of these ranks."""
        ...

    def close(self, generation: int) -> None:
        """Ends the coordination service of a world that all processes have left."""
        ...

    def formed_world(self, message: Message) -> None:
        """Takes a worker's message about a world that all its workers have formed."""
        ...

    def heard(self, event: Any) -> None:
        """Takes an event, as plain data, that a worker's script has sent."""
        ...

    def on_sent(self, worker: int, message: Message) -> None:
        """Takes how much a worker of the world has sent to other hosts."""
        ...

    def log(self, event: str, **data: Any) -> None:
        """Writes an event to the log."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemberLimits:
    """Limits on the number of processes and on times.

    Attributes:
      processes: number of processes that a run begins with.
      least: smallest number of processes that a run goes on with.
      most: largest number of processes that may be asked for.
      restarts: how many dead workers are replaced in the whole run.
      start_s: longest time from a worker's start until it is ready.
      silent_s: longest time without a message from a connected worker.
      leave_s: longest time from an order to leave a world until the worker has left.
      stuck_s: longest time in which a whole world makes no progress.
      fence_s: how long an unreachable world may train on.
      prepares: whether plans and programs of next worlds are prepared while a world
        trains.
      prepare_s: longest time that a changed cluster waits for its plan and program.
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
    """Numbers of processes that the next world may have, the most likely one first.

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
      phase: ``starting``; ``ready`` for a world; or ``in`` a world.
      since_s: when the phase began; infinite while the worker waits for a host.
      heard_s: when the last message of the worker came.
      connected: whether the worker has a connection.
      ready: the worker's last ``ready`` message.
      formed: whether the worker has the state of its world.
      started: the last step that the worker started, as it answered to a pause.
      finished: whether the worker has done the last step.
      broken: the error that the worker reported; '' otherwise.
      step: the last step that the worker is known to have started.
      leave_by_s: when the worker must have left its world.
      dismissed: whether the worker was told to end.
      refused: whether the worker has asked to leave and was refused.
      trained: whether the worker has had the state of any world.
      pid: number of the worker's process; None: the worker has not connected yet.
      respawns: whether the worker's process ends with its world and is started again.
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
    """The workers that have waited for a host for more than `_LATE_S` seconds."""
    return frozenset(
        worker
        for worker, member in members.items()
        if member.since_s == math.inf and now - member.heard_s > _LATE_S
    )


def overdue(member: WorkerMember, limits: MemberLimits, now: float) -> str:
    """Why the supervisor gives a worker up; '' if it does not.

    Args:
      member: the worker.
      limits: limits on times.
      now: seconds on the supervisor's clock.
    """
    if member.connected and now - member.heard_s > limits.silent_s:
        return f"silent for {limits.silent_s:g} s"
    waited = now - member.since_s  # negative while the worker waits for a host
    if member.phase == "starting" and waited > limits.start_s:
        return f"not ready {limits.start_s:g} s after its start"
    if member.phase == "in" and now > member.leave_by_s:
        return f"did not leave its world within {limits.leave_s:g} s"
    return ""


def excuse(members: Mapping[int, WorkerMember], away_s: float) -> None:
    """Moves all deadlines by a time in which the supervisor did not look.

    Args:
      members: the workers.
      away_s: seconds in which the supervisor did not look.
    """
    for member in members.values():
        member.heard_s += away_s
        member.since_s += away_s
        member.leave_by_s += away_s


def all_formed(members: Mapping[int, WorkerMember], world: Sequence[int]) -> bool:
    """Whether all workers of a world are alive and have its state."""
    return all(w in members and members[w].formed for w in world)


def mark_trained(members: Mapping[int, WorkerMember], world: Sequence[int]) -> None:
    """Records that the workers of a world have had its state."""
    for worker in world:
        members[worker].trained = True


def last_error(members: Mapping[int, WorkerMember]) -> str:
    """The last error that a worker reported."""
    errors = [m.broken for m in members.values() if m.broken]
    return errors[-1] if errors else "none"


def never_starts(member: WorkerMember, code: int | None, restarts: int) -> bool:
    """Whether a worker ended before it joined, as a replacement would, too.

    Args:
      member: the worker.
      code: exit status of the worker, negative for a signal; None: unknown.
      restarts: how many killed workers are still replaced.
    """
    killed = code is None or (code < 0 and restarts > 0)
    return member.phase == "starting" and not killed


def starts_again(
    member: WorkerMember, code: int | None, now: float, *, gathers: bool
) -> bool:
    """Whether a worker ended because it left its world, and is to be started again.

    Args:
      member: the worker.
      code: exit status of the worker, negative for a signal; None: unknown.
      now: seconds on the supervisor's clock.
      gathers: whether the worker's world is being left. An error at that time, such as
        a broken collective, ends a process just as an order to leave does.
    """
    if code == RESPAWNED:
        return True
    if code == -signal.SIGKILL and now <= member.leave_by_s:
        return False  # a kill is no order; `restarts` decides whether it is replaced
    # A worker of an earlier supervisor may have ended while no supervisor ran.
    unseen = member.trained and member.pid is None
    return member.respawns and member.phase == "in" and (gathers or unseen)


def respawn_member(member: WorkerMember, now: float) -> WorkerMember:
    """A new record for a worker whose process is started again.

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


def never_started(worker: int, code: int) -> str:
    """Why a run ends when a worker ended before it joined the run."""
    return (
        f"worker {worker} {end_text(code)} before it joined the run: its script must "
        "call autopar.elastic(...) and take its steps; see its output."
    )


def adopt(now: float, *, inside: bool, formed: bool = False) -> WorkerMember:
    """A new record for a worker of an earlier supervisor, which will connect again.

    Args:
      now: seconds on the supervisor's clock.
      inside: whether the worker is in the world.
      formed: whether all workers of the world had its state.
    """
    return WorkerMember(
        phase="in" if inside else "starting",
        since_s=now,
        heard_s=now,
        connected=inside,  # a worker outside the world may still be starting
        formed=inside and formed,
        trained=inside,
    )


def ready_of(members: Mapping[int, WorkerMember]) -> list[int]:
    """The workers that wait for a world."""
    return [w for w, m in members.items() if m.phase == "ready" and not m.dismissed]


def rows_of(members: Mapping[int, WorkerMember]) -> float:
    """Rows of a batch divided by the devices of a process; 0: any number will do."""
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
    """The workers that were not asked to leave or told to end."""
    return [w for w, m in members.items() if w not in leaving and not m.dismissed]


def is_new(member: WorkerMember, members: Mapping[int, WorkerMember]) -> bool:
    """Whether a worker has never trained, while other workers have."""
    return not member.trained and any(m.trained for m in members.values())


def newcomers_of(
    members: Mapping[int, WorkerMember], world: Sequence[int]
) -> list[int]:
    """The workers of a forming world that have never trained."""
    current = [(w, members[w]) for w in world if w in members]
    if all(m.formed for _, m in current):
        return []
    return [w for w, m in current if is_new(m, members)]


# The choice of the next world's workers, and of the state that it starts from.

# Address of a worker's offers -> version -> the worker's part (see `Offers.describe`).
Held = Mapping[str, Mapping[str, Mapping[str, Any]]]


def latest_state(held: Held) -> dict[str, Any] | None:
    """The latest state of which the workers together hold all parts.

    The result is a part of the message that forms a world.

    Returns:
      Version, step, shapes, extra data and holders; None: no state is complete.
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
    """The workers of a world by rank, for the message to them.

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
    """The workers of the next world, by rank; the oldest workers come first.

    The result is the largest number of workers that divides the batch. The other
    workers are spares, which replace workers that die.

    Args:
      ready: numbers of the workers that wait for a world.
      wanted: wanted number of workers.
      leaving: workers that were asked to leave.
      rows: rows of a batch divided by the devices of a process; 0: any number of
        processes will do.

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
    """The workers by rank, with the workers of each host next to each other.

    A mesh axis then does not mix links inside a host with links between hosts.

    Args:
      ready: the ``ready`` message of each worker.
      workers: workers of the world; the oldest come first.
    """
    hosts = {w: ready[w]["address"].rpartition(":")[0] for w in workers}
    first = {host: w for w, host in reversed(hosts.items())}
    return tuple(sorted(workers, key=lambda w: (first[hosts[w]], w)))
