"""Collects Python stacks of workers' threads, for `autopar workers --stacks`.

A worker answers from a separate thread, so it can answer while its main thread waits in
a collective. A process that a signal has stopped does not answer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.watching import process_state

# Seconds that workers may take to answer. The command waits twice as long.
_ANSWER_S = 5.0


@dataclasses.dataclass(slots=True)
class _Request:
    reply: Callable[..., object]
    due_s: float
    waits: dict[int, ProcessId | None]
    stacks: dict[int, str]


class StackRequests:
    """Open requests for stacks, which some workers have not answered yet."""

    def __init__(
        self,
        send: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
        state_of: Callable[[ProcessId | None], str] = process_state,
    ) -> None:
        """Has no requests yet.

        Args:
          send: called to send a worker an order.
          clock: returns the time in seconds.
          state_of: returns the state of a local process as a letter (`process_state`).
        """
        self._send, self._clock, self._state_of = send, clock, state_of
        self._requests: list[_Request] = []

    def ask(
        self,
        workers: Mapping[int, ProcessId | None],
        wanted: int | None,
        reply: Callable[..., object],
    ) -> str:
        """Asks workers for their stacks.

        Args:
          workers: number of a worker -> its process.
          wanted: number of the worker to ask; None: all workers.
          reply: called once, with ``stacks``, a mapping from worker to text, and
            ``missing``, a mapping from worker to why its stacks are missing and what to
            do.

        Returns:
          Why the workers cannot be asked, or ''.
        """
        if wanted is not None and wanted not in workers:
            return f"there is no worker {wanted}."
        asked = {w: p for w, p in workers.items() if wanted in (None, w)}
        due_s = self._clock() + _ANSWER_S
        self._requests.append(_Request(reply, due_s, asked, {}))
        for worker in asked:
            self._send(worker, "stacks")
        return ""

    def take(self, worker: int, text: str) -> None:
        """Records the answer of a worker."""
        for request in self._requests:
            if worker in request.waits:
                del request.waits[worker]
                request.stacks[worker] = text

    def settle(self) -> None:
        """Replies to requests that all workers have answered or whose time is over."""
        now = self._clock()
        for request in list(self._requests):
            if not request.waits or now > request.due_s:
                self._requests.remove(request)
                missing = {w: self._why(w, p) for w, p in request.waits.items()}
                request.reply(stacks=request.stacks, missing=missing)

    def _why(self, worker: int, process: ProcessId | None) -> str:
        """Why a worker has not answered, and what the user can do."""
        start = f"worker {worker} has not answered within {_ANSWER_S:g} s: "
        state = self._state_of(process)
        if process is not None and state in ("T", "t"):
            return (
                f"{start}its process {process.pid} is stopped by a signal. "
                f"`kill -CONT {process.pid}` lets it go on."
            )
        if process is not None and state:
            return (
                f"{start}its process {process.pid} is there, but its Python threads do "
                "not run, or have not started yet. "
                f"`py-spy dump --native --pid {process.pid}` shows them from outside."
            )
        return (
            f"{start}its process has not started, is stopped, or its host or the "
            "network is down. Look for it on its host: `ps -o pid,stat,wchan,cmd`; "
            "`kill -CONT PID` lets a process of state T go on."
        )


def stack_lines(answer: Mapping[str, Any]) -> Sequence[str]:
    """The lines that the command prints for a reply.

    Args:
      answer: the mappings ``stacks`` and ``missing`` (`StackRequests.ask`).
    """
    lines = [f"worker {w}\n\n{text}" for w, text in answer["stacks"].items()]
    return [*lines, *answer["missing"].values()]
