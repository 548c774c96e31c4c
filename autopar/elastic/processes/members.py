"""What the supervisor knows of its workers, and what it can do to them."""

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

# Of the fields behind the name in ``/proc/PID/stat``: field 22 of proc(5).
_STARTED = 19


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine (Linux).

    Attributes:
      pid: its number.
      started: when it started, in ticks since the machine did.
      boot: names the start of the machine.
    """

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has a number now; None: there is none."""
        try:
            text = pathlib.Path(f"/proc/{pid}/stat").read_text()
            return cls(pid, int(text.rpartition(")")[2].split()[_STARTED]), _boot())
        except (OSError, ValueError, IndexError):
            return None

    @classmethod
    def from_data(cls, data: Any) -> ProcessId | None:
        """Reads `to_data`; None where it is nothing of the kind."""
        if not isinstance(data, Mapping):
            return None
        pid, started, boot = (data.get(k) for k in ("pid", "started", "boot"))
        if not (isinstance(pid, int) and isinstance(started, int) and pid > 0):
            return None
        return cls(pid, started, str(boot))

    def to_data(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    def open(self) -> int | None:
        """A descriptor of the process (pidfd_open(2)); None: it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            return None
        # The descriptor keeps its process, so what the number means is asked behind it.
        if ProcessId.of(self.pid) == self and not has_ended(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def kill(self) -> None:
        """Ends the process, and no other one that has its number."""
        if (descriptor := self.open()) is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def has_ended(descriptor: int, wait_s: float | None = 0) -> bool:
    """Whether a process has ended, also where nobody has waited for it yet.

    Args:
      descriptor: of the process.
      wait_s: longest to wait for its end; None: for ever.
    """
    return bool(select.select([descriptor], [], [], wait_s)[0])


@functools.cache
def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


Message = dict[str, Any]

# The exit status of a worker, and of a run, that has saved its state to go on later.
SUSPENDED = 75  # EX_TEMPFAIL of <sysexits.h>

# Longest line: what a worker holds is listed by array, not sent.
_LONGEST_BYTES = 64 << 20


class Connection:
    """One end of a connection; any thread may send, one receives.

    Attributes:
      is_open: whether the end of what comes has not been seen.
    """

    def __init__(self, end: End) -> None:
        """Takes a connected socket."""
        self._socket = end
        self._lines = end.makefile("rb")
        self._lock = threading.Lock()
        self.is_open = True

    @property
    def ports(self) -> frozenset[int]:
        """The ports of both ends; none once it is closed."""
        try:
            own, other = self._socket.getsockname(), self._socket.getpeername()
        except OSError:
            return frozenset()
        return frozenset((own[1], other[1]))

    def send(self, kind: str, **data: Any) -> bool:
        """Sends a message; returns whether the other end was still there."""
        line = json.dumps({"kind": kind, **data}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            return False
        return True

    def patience(self, seconds: float | None) -> None:
        """Waits no longer for a message than so many seconds; None: for ever."""
        self._socket.settimeout(seconds)

    def receive(self) -> Message | None:
        """The next message; None at the end, or after what is no message."""
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
        """Closes it; the other end is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()


def has_token(message: Message | None, token: str) -> bool:
    """Whether a first message has the token."""
    given = "" if message is None else str(message.get("token", ""))
    return hmac.compare_digest(given.encode(), token.encode())


# Seconds after which a run says that it waits for a script to join it.
_LATE_S = 15.0


class Actions(Protocol):
    """What a supervisor does to the world outside."""

    def spawn(self, worker: int) -> None:
        """Starts a worker."""
        ...

    def send(self, worker: int, kind: str, **data: Any) -> None:
        """Sends a worker an order."""
        ...

    def kill(self, worker: int) -> None:
        """Ends a worker at once; its end is reported as any other."""
        ...

    def open(self, generation: int, processes: Sequence[ProcessId | None]) -> str:
        """Starts the coordination service of a world; returns its address.

        Args:
          generation: number of the world.
          processes: of its workers.
        """
        ...

    def fill(self, generation: int, ranks: list[int]) -> None:
        """Lets a world connect whose processes of these ranks are gone."""
        ...

    def close(self, generation: int) -> None:
        """Ends the coordination service of a world that all have left."""
        ...

    def formed_world(self, message: Message) -> None:
        """Takes what a worker says of a world that all its workers have formed."""
        ...

    def heard(self, event: Any) -> None:
        """Takes an event, as plain data, that a worker's script has sent."""
        ...

    def on_sent(self, worker: int, message: Message) -> None:
        """Takes what a worker of the world has sent to other hosts."""
        ...

    def log(self, event: str, **data: Any) -> None:
        """Writes down what happens."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemberLimits:
    """Numbers of processes and times.

    Attributes:
      processes: how many a run begins with.
      least: fewest that it goes on with.
      most: most that may be asked for.
      restarts: how many workers that died are replaced, in all.
      start_s: longest from a worker's start until it is ready.
      silent_s: longest without a word of a worker that is connected.
      leave_s: longest from an order to leave until it is followed.
      stuck_s: longest without progress of a whole world.
      fence_s: how long a world that cannot be reached may go on to train.
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


@dataclasses.dataclass(slots=True)
class WorkerMember:
    """What the supervisor knows of a worker.

    Attributes:
      phase: ``starting``, ``ready`` for a world, or ``in`` one.
      since_s: when the phase began; infinite where it waits for a host.
      heard_s: when it was last heard of.
      connected: whether it has a connection.
      ready: its last message that it is ready.
      formed: whether it has the state of its world.
      started: the last step it started, as it answered to a pause.
      finished: whether it has done the last step.
      broken: what went wrong, as it said; '' otherwise.
      step: the last step it is known to have started.
      leave_by_s: when it must have left its world.
      dismissed: whether it was told to end.
      refused: whether it has asked to leave, and must stay.
      trained: whether it has had the state of any world.
      pid: number of its process; None: it has not connected yet.
      respawns: whether its process ends with its world, and is started again.
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
    """The workers whose scripts have not joined the run for a while."""
    return frozenset(
        worker
        for worker, member in members.items()
        if member.phase == "starting" and now - member.since_s > _LATE_S
    )


def find_unplaced(members: Mapping[int, WorkerMember], now: float) -> frozenset[int]:
    """The workers that have waited for a host for a while."""
    return frozenset(
        worker
        for worker, member in members.items()
        if member.since_s == math.inf and now - member.heard_s > _LATE_S
    )


def overdue(member: WorkerMember, limits: MemberLimits, now: float) -> str:
    """Why a worker is given up; '' otherwise.

    Args:
      member: the worker.
      limits: times.
      now: seconds on the supervisor's clock.
    """
    if member.connected and now - member.heard_s > limits.silent_s:
        return f"silent for {limits.silent_s:g} s"
    waited = now - member.since_s  # less than nothing where it waits for a host
    if member.phase == "starting" and waited > limits.start_s:
        return f"not ready {limits.start_s:g} s after its start"
    if member.phase == "in" and now > member.leave_by_s:
        return f"did not leave its world within {limits.leave_s:g} s"
    return ""


def excuse(members: Mapping[int, WorkerMember], away_s: float) -> None:
    """Lets no worker be overdue for what it did while nobody looked.

    Args:
      members: the workers.
      away_s: how long nobody looked.
    """
    for member in members.values():
        member.heard_s += away_s
        member.since_s += away_s
        member.leave_by_s += away_s


def all_formed(members: Mapping[int, WorkerMember], world: Sequence[int]) -> bool:
    """Whether all workers of a world are there, and have its state."""
    return all(w in members and members[w].formed for w in world)


def mark_trained(members: Mapping[int, WorkerMember], world: Sequence[int]) -> None:
    """Remembers of the workers of a world that they have had its state."""
    for worker in world:
        members[worker].trained = True


def last_error(members: Mapping[int, WorkerMember]) -> str:
    """The last error that a worker told of."""
    errors = [m.broken for m in members.values() if m.broken]
    return errors[-1] if errors else "none"


def never_starts(member: WorkerMember, code: int | None, restarts: int) -> bool:
    """Whether a worker ended before it joined, and another one would do so, too.

    Args:
      member: the worker.
      code: its exit status, negative for a signal; None: not known.
      restarts: how many workers that were killed are replaced.
    """
    killed = code is None or (code < 0 and restarts > 0)
    return member.phase == "starting" and not killed


def starts_again(
    member: WorkerMember, code: int | None, now: float, *, gathers: bool
) -> bool:
    """Whether a worker has ended as it left its world, to be started again.

    Args:
      member: the worker.
      code: its exit status, negative for a signal; None: not known.
      now: seconds on the supervisor's clock.
      gathers: whether its world is being left. What ends a process then, such as a
        broken collective, ends it as an order to leave does.
    """
    if code == RESPAWNED:
        return True
    if code == -signal.SIGKILL and now <= member.leave_by_s:
        return False  # it was no order: `restarts` says what becomes of the dead
    # One that an earlier supervisor had may have ended while there was none.
    unseen = member.trained and member.pid is None
    return member.respawns and member.phase == "in" and (gathers or unseen)


def respawned(member: WorkerMember, now: float) -> WorkerMember:
    """A worker whose process is started again.

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
    """How a worker's process ended.

    >>> end_text(1), end_text(-9), end_text(None)
    ('ended with code 1', 'died by signal 9', 'is gone')
    """
    if code is None:
        return "is gone"
    return f"ended with code {code}" if code >= 0 else f"died by signal {-code}"


def never_started(worker: int, code: int) -> str:
    """Why a run ends whose worker ended before it joined."""
    return (
        f"worker {worker} {end_text(code)} before it joined the run: its script must "
        "call autopar.elastic(...) and take its steps; see its output."
    )


def adopt(now: float, *, inside: bool, formed: bool = False) -> WorkerMember:
    """A worker of an earlier supervisor, which will connect again.

    Args:
      now: seconds on the supervisor's clock.
      inside: whether it is in the world.
      formed: whether the world had its state.
    """
    return WorkerMember(
        phase="in" if inside else "starting",
        since_s=now,
        heard_s=now,
        connected=inside,  # another one may still be starting
        formed=inside and formed,
        trained=inside,
    )


def ready_of(members: Mapping[int, WorkerMember]) -> list[int]:
    """The workers that wait for a world."""
    return [w for w, m in members.items() if m.phase == "ready" and not m.dismissed]


def rows_of(members: Mapping[int, WorkerMember]) -> float:
    """Rows of a batch for each device of a process; 0: it need not be divided."""
    told = [m.ready for m in members.values() if m.ready]
    return told[-1]["rows"] / told[-1]["devices"] if told else 0


def describe(members: Mapping[int, WorkerMember]) -> dict[str, Any]:
    """The workers in a few words, as plain data."""
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
    """The workers that were not asked to go."""
    return [w for w, m in members.items() if w not in leaving and not m.dismissed]


def is_new(member: WorkerMember, members: Mapping[int, WorkerMember]) -> bool:
    """Whether a worker has never trained, and others have."""
    return not member.trained and any(m.trained for m in members.values())


def newcomers_of(
    members: Mapping[int, WorkerMember], world: Sequence[int]
) -> list[int]:
    """The workers of a world that forms who have never trained."""
    current = [(w, members[w]) for w in world if w in members]
    if all(m.formed for _, m in current):
        return []
    return [w for w, m in current if is_new(m, members)]


# Who belongs to the next world, and with which state it goes on.

# Address of a worker's offers -> version -> what it holds, as `Offers.listed` says.
Held = Mapping[str, Mapping[str, Mapping[str, Any]]]


def latest_state(held: Held) -> dict[str, Any] | None:
    """The latest state of which all is held by someone, for the message to workers.

    Returns:
      Version, step, shapes, what goes with it, and holders; None: there is none.
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
      ready: what each worker said as it became ready.
      workers: of the world.
    """
    keys = ("address", "pid", "devices")
    return [{k: ready[w][k] for k in keys} | {"worker": w} for w in workers]


def processes_of(
    ready: Mapping[int, Message], workers: Sequence[int]
) -> list[ProcessId | None]:
    """The processes of workers, as they said."""
    return [ProcessId.from_data(ready[w].get("process")) for w in workers]


def _order(version: str) -> tuple[int, int]:
    step, generation = version.split(".")
    return int(step), int(generation)


def choose_workers(
    ready: Sequence[int], wanted: int, leaving: frozenset[int], rows: float
) -> list[int]:
    """The workers of the next world, by rank; the oldest first.

    As many as divide the batch; the others are spares, which take the place of those
    that die.

    Args:
      ready: numbers of the workers that wait for a world.
      wanted: how many a world should have.
      leaving: those that were asked to go.
      rows: of a batch, for each device of a process; 0: any number of processes can
        share it.

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
    """The workers by rank: those of a host together, so that axes do not mix links.

    Args:
      ready: what each worker said as it became ready.
      workers: of the world; the oldest ones first.
    """
    hosts = {w: ready[w]["address"].rpartition(":")[0] for w in workers}
    first = {host: w for w, host in reversed(hosts.items())}
    return tuple(sorted(workers, key=lambda w: (first[hosts[w]], w)))
