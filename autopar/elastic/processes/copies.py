"""Copies of what lies on this process alone, sent to others while it trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from autopar.elastic.processes.holding import Holding
from autopar.elastic.processes.offers import Peer


class Copier:
    """Sends the state after each step to other processes, one step behind at most."""

    def __init__(self, token: str) -> None:
        """Has nobody to send to yet."""
        self._token = token
        self._changed = threading.Condition()
        self._waiting: Holding | None = None
        self._busy = False
        self._ports: tuple[int, ...] = ()
        self._peers: dict[int, Peer] = {}
        threading.Thread(target=self._work, daemon=True, name="copies").start()

    def aim(self, ports: Sequence[int]) -> None:
        """Sends to the offers at these ports from now on."""
        with self._changed:
            self._ports, self._waiting = tuple(ports), None

    def send(self, held: Holding) -> None:
        """Sends copies in the background, once those of the step before have come."""
        self.wait()
        with self._changed:
            if self._ports:
                self._waiting, self._busy = held, True
                self._changed.notify_all()

    def wait(self) -> None:
        """Waits until all copies have come, or those who take them are gone."""
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
                ports = self._ports
            for port in ports:
                # Who is gone is noticed by the supervisor.
                with contextlib.suppress(OSError):
                    self._copy(port, held)

    def _copy(self, port: int, held: Holding) -> None:
        try:
            if port not in self._peers:
                self._peers[port] = Peer(port, self._token)
            self._peers[port].copy(held)
        except OSError:
            if (peer := self._peers.pop(port, None)) is not None:
                peer.close()
            raise
