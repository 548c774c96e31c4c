"""A worker's side of the connection to the supervisor.

A thread of the worker receives the supervisor's orders, so that the worker answers even
while its main thread runs a step. A world is a set of processes that train together.
When a world pauses, its processes must agree on the last step. The processes need no
collective for this, only a lock in each process. The main thread holds the lock to
start a step. When the supervisor asks for a pause, the other thread takes the lock and
answers with the last step that was started.
"""

from __future__ import annotations

import dataclasses
import math
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from autopar.elastic.processes.activity import Activity, stacks_text
from autopar.elastic.processes.members import (
    Connection,
    Message,
    ProcessId,
)
from autopar.elastic.processes.network import Network, split_address
from autopar.errors import PlanError, RunError

# The environment variable that tells a worker of `autopar run` how to reach the
# supervisor.
VARIABLE = "AUTOPAR_SUPERVISOR"
# The environment variable for the folder in which the run stores plans and programs.
FOLDER_VARIABLE = "AUTOPAR_RUN"
# Environment variables for the checkpoint directory and the number of steps between
# saves. A scheduler sets both. The variables apply to scripts that set neither
# themselves.
CHECKPOINT_VARIABLE, EVERY_VARIABLE = "AUTOPAR_CHECKPOINT", "AUTOPAR_EVERY"
# The environment variable for the file descriptor of the socket by which a process that
# compiles programs ahead gets orders.
AHEAD_VARIABLE = "AUTOPAR_AHEAD"

_BEAT_S = 0.5
# Seconds after which a worker with an error asks the supervisor again whether the loss
# of another worker caused the error.
_ASK_S = 5.0
_RETRY_S = 0.2
# In a run over several hosts, the supervisor answers each heartbeat. If no answer comes
# for `_SILENT_S` seconds, the supervisor's host counts as lost.
_SILENT_S = 5.0
# Seconds in which a supervisor must accept a connection; they are shared by all
# addresses.
_CONNECT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """How a worker reaches its supervisor.

    Attributes:
      supervisor: ``HOST:PORT`` of the supervisor; after commas, the addresses of
        standbys that may take its place.
      token: secret text that proves that the process is a worker of the supervisor.
      worker: number of this worker; a run never gives a number to two workers.
      grace_s: seconds for which the worker goes on without a supervisor.
    """

    supervisor: str
    token: str
    worker: int
    grace_s: float

    def __str__(self) -> str:
        """The address as text for the environment variable `VARIABLE`."""
        return f"{self.supervisor}:{self.token}:{self.worker}:{self.grace_s:g}"

    @property
    def supervisors(self) -> tuple[str, ...]:
        """The addresses of the supervisor and its standbys."""
        return tuple(self.supervisor.split(","))

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads the text of an address.

        Raises:
          PlanError: the text is not an address.
        """
        try:
            supervisor, token, worker, grace = text.rsplit(":", 3)
            for one in supervisor.split(","):
                split_address(one)
            return cls(supervisor, token, int(worker), float(grace))
        except ValueError as error:
            raise PlanError(
                f"{VARIABLE}={text!r} was not set by `autopar run`: unset it, or start "
                "the script with `autopar run --processes N script.py`."
            ) from error


class Link:
    """Receives the supervisor's orders, and reports on this worker to the supervisor.

    Attributes:
      supervisor: ``HOST:PORT`` of the supervisor that this worker has called last.
      activity: what the training loop is doing now; sent to the supervisor regularly.
      prepare: called with each order to plan and compile for a possible next world.
    """

    def __init__(
        self,
        address: Address,
        network: Network,
        broke: Callable[[], None],
        settled: Callable[[int], None],
        moved: Callable[[], None],
        *,
        holds: bool = False,
    ) -> None:
        """Connects to the supervisor.

        Args:
          address: address of the supervisor.
          network: network on which the supervisor is reached.
          broke: called when this process must leave its world, to end waits of the main
            thread for other processes. A thread calls it repeatedly until the main
            thread has left the world.
          settled: called with the number of a world once all its processes have the
            state. The states of older worlds are then no longer needed.
          moved: called when a supervisor at another address has taken over. The thread
            that receives orders calls it, so it must return soon.
          holds: if True, no step starts while there is no supervisor.

        Raises:
          OSError: there is no supervisor.
        """
        self.address, self._network = address, network
        self._broke, self._settled, self._holds = broke, settled, holds
        self._moved, self._welcomed_by = moved, ""
        self.activity = Activity()
        self.prepare: Callable[[Message], None] = lambda _: None
        self._changed = threading.Condition()
        self._orders: list[Message] = []
        self._generation = self._aborted = self._own = -1
        self._started = -1
        self._limit: int | None = None
        self._paused = False
        # What happens after the last step that may start: "suspend" or "stop" ends the
        # run; with '' the run goes on.
        self._ending = ""
        self._phase = "starting"
        self._lost_s: float | None = None
        self._says, self._gives_up = True, False
        self._last_ready: Message | None = None
        self.supervisor = address.supervisors[0]
        self._connection = self._connect_first()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    @property
    def ports(self) -> frozenset[int]:
        """The local and the remote port of the connection to the supervisor."""
        return self._connection.ports

    @property
    def must_leave(self) -> bool:
        """Whether this process must leave its world at once."""
        with self._changed:
            return 0 <= self._generation <= self._aborted

    @property
    def is_suspended(self) -> bool:
        """Whether the run is suspended after the last step that may start."""
        with self._changed:
            return self._ending == "suspend"

    @property
    def is_stopped(self) -> bool:
        """Whether the training loop is stopped after the last step that may start."""
        with self._changed:
            return self._ending == "stop" and not self.must_leave

    def leave(self) -> None:
        """Records that the main thread has left its world."""
        with self._changed:
            self._generation = -1
            self._phase = "out"

    def say(self, kind: str, **data: Any) -> None:
        """Sends the supervisor a message; does nothing if the connection is lost."""
        with self._changed:
            generation = self._generation
        message = {"worker": self.address.worker, "generation": generation, **data}
        if kind == "ready":
            self._last_ready = message
        self._connection.send(kind, **message)

    def order(self) -> Message:
        """Waits for the next order: to form a world, or to end."""
        with self._changed:
            while not self._orders:
                self._wait()
            self._last_ready = None
            return self._orders.pop(0)

    def may_start(self, step: int) -> bool:
        """Whether a step may start; if not, the process must leave the world first."""
        self.activity.enter("order", step)
        with self._changed:
            while self._must_wait and not self.must_leave:
                self._wait()
            if self.must_leave or (self._limit is not None and step > self._limit):
                return False
            first = self._started < 0
            self._started, self._phase = step, "step"
        if first:  # the supervisor then knows of the state
            self.say("beat", step=step, phase="step")
        return True

    @property
    def _must_wait(self) -> bool:
        return self._paused or (self._holds and self.is_lost)

    def finish(self, step: int) -> bool:
        """Waits until all processes have done the last step.

        Returns:
          True if all have done the last step, or if the supervisor is gone and cannot
          answer. If False, the process must leave the world.
        """
        self.activity.enter("finish", step)
        self.say("finished", step=step)
        with self._changed:
            self._phase = "finished"
            while not self._orders and not self.must_leave:
                if self._limit is not None and self._ending != "stop":
                    break
                if self.is_lost:
                    return True
                self._wait()
            ended = bool(self._orders) and self._orders[0]["kind"] == "end"
            return ended and not self.must_leave

    def ends(self, call: Future[Any], patience_s: float) -> bool:
        """Waits for a call that runs in another thread.

        Args:
          call: a call that may wait for processes that are gone.
          patience_s: seconds for which the call may go on once the world must be left.

        Returns:
          Whether the call has ended. If False, the process must leave the world without
          waiting for the call.
        """
        call.add_done_callback(lambda _: self._notify())
        aborted_s = math.inf
        with self._changed:
            while not call.done():
                now = time.monotonic()
                if self.must_leave:
                    aborted_s = min(aborted_s, now)
                    if now - aborted_s > patience_s:
                        return False
                self._changed.wait(min(_BEAT_S, patience_s))
        return True

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def verdict(self, error: BaseException) -> bool:
        """Whether the loss of another process explains an error in this process.

        The method waits for the supervisor's answer. If the supervisor is gone, it
        waits for a new one, because this process holds a part of the state.

        Args:
          error: the error that was raised.
        """
        with self._changed:
            self._own = -1
        asked_s = -math.inf
        while True:
            now = time.monotonic()
            if now - asked_s > _ASK_S:  # the supervisor may have restarted
                self.say("broken", error=f"{type(error).__name__}: {error}"[:2000])
                asked_s = now
            with self._changed:
                if self.must_leave or self._own == self._generation:
                    return self.must_leave
                self._wait()

    @property
    def is_lost(self) -> bool:
        """Whether the supervisor has been gone longer than ``grace_s``."""
        lost = self._lost_s
        return lost is not None and time.monotonic() - lost > self.address.grace_s

    def gives_up(self) -> bool:
        """Stops looking for a supervisor; False if there is one again."""
        with self._changed:
            self._gives_up = self._lost_s is not None
            return self._gives_up

    def pause(self, generation: int) -> int | None:
        """Lets no more steps start for now; returns the last step that was started.

        Returns None if this process is not in world ``generation``.
        """
        with self._changed:
            if generation != self._generation:
                return None
            self._paused = True
            return self._started

    def limit(self, generation: int, step: int) -> None:
        """Ends a pause; steps up to number ``step`` may start."""
        with self._changed:
            if generation == self._generation:
                self._paused, self._limit = False, step
                self._changed.notify_all()

    def _wait(self) -> None:
        if self.is_lost and self._says:
            self._says = False
            print(
                f"autopar: worker {self.address.worker} waits for a supervisor, and "
                "keeps its state: start `autopar run` again with the same folder.",
                file=sys.stderr,
                flush=True,
            )
        self._changed.wait(_BEAT_S)

    def lost_error(self, saved: str) -> RunError:
        """The error to raise in a run that lost its supervisor.

        Args:
          saved: a sentence about the training state, such as where it was saved.
        """
        return RunError(
            "the supervisor (`autopar run`) is gone, and none came back within "
            f"{self.address.grace_s:g} s. {saved} Start `autopar run` again."
        )

    def _connect_first(self) -> Connection:
        """Connects to the first supervisor that answers.

        A worker may start while its supervisor does, or while another one takes over.
        So each address is called until the worker would give up the run.
        """
        end = time.monotonic() + self.address.grace_s
        while True:
            try:
                return self._connect()
            except ssl.SSLError:  # it is not the supervisor of this run
                raise
            except OSError:
                if time.monotonic() > end:
                    raise
                self._turn()
                time.sleep(_RETRY_S)

    def _turn(self) -> None:
        """Chooses the next address to call."""
        given = self.address.supervisors
        self.supervisor = given[(given.index(self.supervisor) + 1) % len(given)]

    def _connect(self) -> Connection:
        limit_s = _CONNECT_S / len(self.address.supervisors)
        end = self._network.connect(self.supervisor, limit_s)
        made = Connection(end)
        own = ProcessId.of(os.getpid())
        if self._gives_up:  # its end would count as an error
            made.close()
            raise ConnectionError("this process ends")
        made.send(
            "hello",
            token=self.address.token,
            worker=self.address.worker,
            process=None if own is None else own.to_data(),
            generation=self._generation,
            phase=self._phase,
        )
        if not self._network.is_local:
            made.patience(_SILENT_S)
        return made

    def _listen(self) -> None:
        """Receives orders as long as the process lives."""
        answers = True
        while True:
            message = self._connection.receive()
            if message is None:
                self._reconnect(answers)
                answers = False
            else:
                answers = True
                self._obey(message)

    def _reconnect(self, answers: bool) -> None:
        """Tries to connect to a restarted supervisor, or to the next address.

        Args:
          answers: whether the last supervisor that was called has sent anything.
        """
        with self._changed:
            self._lost_s = self._lost_s or time.monotonic()
            self._changed.notify_all()
        self._connection.close()
        time.sleep(_RETRY_S)
        if not answers:
            self._turn()
        try:
            self._connection = self._connect()
        except OSError:
            return
        if self._last_ready is not None:
            self._connection.send("ready", **self._last_ready)

    def _obey(self, message: Message) -> None:
        kind, generation = message["kind"], message.get("generation", -1)
        if kind == "beat":
            return
        answer: int | None = None
        with self._changed:
            self._lost_s = None
            if kind in ("form", "end"):
                self._orders.append(message)
                self._enter(generation if kind == "form" else self._generation)
            elif kind == "abort":
                self._aborted = max(self._aborted, generation)
            elif kind == "own":
                self._own = generation
            elif kind == "pause":
                answer = self.pause(generation)
            elif kind == "limit":
                self._ending = message.get("ending", "")
                self.limit(generation, message["step"])
            self._changed.notify_all()
        if answer is not None:
            self.say("started", step=answer)
        if kind == "welcome":
            before, self._welcomed_by = self._welcomed_by, self.supervisor
            if before not in ("", self.supervisor):
                self._moved()
        if kind == "settled":
            self._settled(generation)
        if kind == "stacks":
            self.say("stacks", text=stacks_text())
        if kind == "prepare":
            self.prepare(message)
        if kind == "abort":
            threading.Thread(
                target=self._break, args=(generation,), daemon=True
            ).start()

    def _enter(self, generation: int) -> None:
        """Enters a world; from now on orders may end this world."""
        if generation != self._generation:
            self._generation, self._started = generation, -1
            self._limit, self._paused = None, False
            self._phase = "forming"
            self.activity.begin()

    def _break(self, generation: int) -> None:
        """Ends waits for other processes until the main thread has left the world."""
        while True:
            with self._changed:
                if not 0 <= self._generation <= generation:
                    return
            self._broke()
            time.sleep(0.05)

    def _beat(self) -> None:
        """Tells the supervisor regularly what this process is doing."""
        while True:
            with self._changed:
                step, phase = self._started, self._phase
            self.say("beat", step=step, phase=phase, doing=self.activity.data())
            time.sleep(_BEAT_S)
