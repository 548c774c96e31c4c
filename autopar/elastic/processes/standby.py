"""Lets another supervisor continue a run whose supervisor's host is lost.

The agents of all hosts record the supervisor's state (`HostRecords`). A standby
(`autopar run --standby`) waits until agents call it, and takes the latest state
(`wait_for_run`).

Two supervisors must never both form worlds. So the hosts of the last world vote: a
supervisor forms a world only after at least half of them have recorded it, and a
standby takes over only with more than half. Each pair of such sets has a host in
common. An agent records a standby's state only if the state that the standby takes
over is the agent's last one. A state counts as agreed once enough hosts have recorded
it. As long as it is not, both the hosts of the world before and those of the new world
vote on a takeover.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from autopar.elastic.processes.members import Connection, Message
from autopar.elastic.processes.network import End, Network

# Seconds that hosts may take to record a state.
_RECORD_S = 3.0
# A standby takes over if more than half of the hosts have called within `_CALLS_S`
# seconds, the first of them at least `_PATIENCE_S` seconds ago: the supervisor may have
# been restarted.
_CALLS_S, _PATIENCE_S = 15.0, 3.0
_FIRST_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A supervisor's state, as agents record it.

    Attributes:
      by: random name of the supervisor. A supervisor that is restarted in the same
        folder keeps its name.
      epoch: how many supervisors the run had before this one.
      number: number of the record; a later supervisor of the run continues to count.
      base: epoch and number of the record that this supervisor took over.
      agreed: number of the last world on whose record enough hosts agreed.
      voters: names of the agents of that world, which vote.
      hosts: names of the agents of this record's world.
      state: contents of ``run.json``, without the secret.
    """

    by: str
    epoch: int
    number: int
    base: tuple[int, int]
    agreed: int
    voters: tuple[str, ...]
    hosts: tuple[str, ...]
    state: Mapping[str, Any]

    @classmethod
    def from_data(cls, data: Any) -> Record | None:
        """Reads the result of `to_data`; None if there is no record."""
        return msgspec.convert(data, cls) if data else None

    def to_data(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can hold."""
        return dataclasses.asdict(self)

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and number; a later record has larger ones."""
        return self.epoch, self.number

    def may_replace(self, own: Record | None) -> bool:
        """Whether an agent with the record ``own`` may record this one."""
        if own is None or own.by == self.by:
            return True
        return own.order <= self.base

    def is_agreed(self, hosts: Collection[str], *, takes_over: bool) -> bool:
        """Whether these hosts suffice to agree on this record.

        Args:
          hosts: names of the agents that have recorded it.
          takes_over: whether it is the first record of a standby.

        >>> world = dict(agreed=1, voters=("a", "b"), hosts=("b",), state={})
        >>> made = Record(by="x", epoch=0, number=2, base=(0, 0), **world)
        >>> made.is_agreed(["b"], takes_over=False)
        True
        >>> made.is_agreed(["b"], takes_over=True)
        False
        """
        if not takes_over:
            return 2 * len(set(self.voters) & set(hosts)) >= len(self.voters)
        sets = map(set, (self.voters, self.hosts))
        return all(2 * len(one & set(hosts)) > len(one) for one in sets)


class HostRecords:
    """Has agents record the supervisor's state, if they know further addresses.

    Attributes:
      last: the last record.
    """

    def __init__(self) -> None:
        """Starts without a record."""
        self.last = Record(
            by=secrets.token_hex(8),
            epoch=0,
            number=0,
            base=(0, 0),
            agreed=-1,
            voters=(),
            hosts=(),
            state={},
        )
        self._changed = threading.Condition()
        self._done: set[str] = set()

    def restore(self, data: Any, *, anew: bool = False) -> None:
        """Goes on after the record in ``run.json``; does nothing if there is none.

        Args:
          data: the record.
          anew: whether all hosts that voted are lost, so that no host votes on the next
            world.
        """
        if (found := Record.from_data(data)) is None:
            return
        if anew:
            self.take_over(dataclasses.replace(found, agreed=-1, voters=()))
        else:
            self.last = found

    def take_over(self, found: Record) -> None:
        """Goes on after the record of another supervisor."""
        self.last = dataclasses.replace(
            found,
            by=self.last.by,
            epoch=found.epoch + 1,
            base=found.order,
        )

    def make(self, state: Mapping[str, Any], hosts: Collection[str]) -> Record:
        """Makes the next record, of a world on these hosts."""
        last = self.last
        with self._changed:
            self._done.clear()
            self.last = dataclasses.replace(
                last, number=last.number + 1, hosts=tuple(sorted(hosts)), state=state
            )
            return self.last

    def on_recorded(self, agent: str, number: int) -> None:
        """Takes the answer of an agent that has recorded a state."""
        with self._changed:
            if number == self.last.number:
                self._done.add(agent)
                self._changed.notify_all()

    def wait(
        self, record: Record, *, takes_over: bool = False, limit_s: float = _RECORD_S
    ) -> bool:
        """Waits for the agents' answers; returns whether the record is agreed."""
        with self._changed:
            agreed = self._changed.wait_for(
                lambda: record.is_agreed(self._done, takes_over=takes_over), limit_s
            )
            if agreed:
                self.last = dataclasses.replace(
                    record, agreed=record.state["generation"], voters=record.hosts
                )
        return agreed

    def count(self) -> str:
        """How many hosts answer, as text."""
        done = len(self._done & set(self.last.voters))
        return f"{done} of {len(self.last.voters)}"


class _Calls:
    """The calls of agents at a standby."""

    def __init__(self, network: Network, port: int) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, tuple[float, float, Record]] = {}
        self.ended: int | None = None
        self.listener = network.listen(self._receive, port)

    def _receive(self, end: End) -> None:
        connection = Connection(end)
        connection.patience(_FIRST_S)
        first = connection.receive()
        kind = None if first is None else first["kind"]
        if first is not None and kind == "over":
            self.ended = int(first["code"])
        elif first is not None and kind == "host":
            self._take(first)
            connection.send("standby")
        connection.close()

    def _take(self, first: Message) -> None:
        record, now = Record.from_data(first.get("record")), time.monotonic()
        if record is None:
            return
        with self._lock:
            name = str(first["agent"])
            since_s, last_s, _ = self._records.get(name, (now, now, record))
            since_s = since_s if now - last_s < _CALLS_S else now
            self._records[name] = since_s, now, record

    def find(self) -> tuple[Record, int] | None:
        """The latest record, and how many hosts called, if they suffice."""
        now = time.monotonic()
        with self._lock:
            calls = {
                name: found
                for name, found in self._records.items()
                if now - found[1] < _CALLS_S
            }
        if not calls:
            return None
        latest = max((r for _, _, r in calls.values()), key=lambda r: r.order)
        early = {n for n, (s, _, _) in calls.items() if now - s >= _PATIENCE_S}
        if early and latest.is_agreed(calls, takes_over=True):
            return latest, len(calls)
        return None


def wait_for_run(
    network: Network, port: int, limit_s: float = math.inf
) -> tuple[Record, int] | int | None:
    """Waits until enough hosts of a run that lost its supervisor have called.

    Args:
      network: address on which to listen, and secret of the run.
      port: port on which to listen.
      limit_s: longest time to wait.

    Returns:
      The latest record and the number of hosts that called; or the exit code of the
      run if it has ended; or None if too few hosts have called within ``limit_s``.

    Raises:
      OSError: the port is in use, or the address does not belong to this host.
    """
    calls, end = _Calls(network, port), time.monotonic() + limit_s
    try:
        while time.monotonic() < end:
            if calls.ended is not None:
                return calls.ended
            if (found := calls.find()) is not None:
                return found
            time.sleep(0.1)
        return None
    finally:
        calls.listener.close()


def tell_end(network: Network, address: str, code: int) -> None:
    """Tells a standby that the run has ended.

    Raises:
      OSError: no standby listens there.
    """
    connection = Connection(network.connect(address, 2.0))
    connection.send("over", code=code)
    connection.close()
