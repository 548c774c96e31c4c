"""What `autopar run` prints about a run."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from autopar.elastic.processes.members import SUSPENDED, end_text
from autopar.elastic.processes.records import workers_command
from autopar.units import name_numbers, number_of, seconds_text


class Console:
    """Turns the events of a supervisor's log into lines for the terminal."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Starts before any processes train together.

        Args:
          folder: folder of the run.
        """
        self._folder = folder
        self._world: frozenset[int] | None = None
        self._awaited: frozenset[int] = frozenset()
        self._unplaced: frozenset[int] = frozenset()
        # Whether a printed line has already said why the processes change;
        # and the reason to print if not.
        self._explained, self._reason = False, ""
        self._ends = False

    def say(self, event: str, data: Mapping[str, Any]) -> None:
        """Prints an event of the log if it matters to a user."""
        for line in self.lines(event, data):
            say(line)

    def lines(self, event: str, data: Mapping[str, Any]) -> list[str]:
        """The lines that describe an event of the log; empty if it is not printed.

        >>> Console(pathlib.Path("run")).lines("gone", {"worker": 1, "code": -9})
        ['worker 1 died by signal 9']
        """
        if event in ("hang", "hang over"):
            return [data["text"]]
        found = self._lines(event, data)
        self._explained = (self._explained or bool(found)) and event != "formed"
        return found

    def _lines(self, event: str, data: Mapping[str, Any]) -> list[str]:
        match event:
            case "gone":
                if self._ends and data["code"] in (0, SUSPENDED):
                    return []
                return [f"worker {data['worker']} {_describe_leaving(data)}"]
            case "remove":
                return [f"worker {data['worker']} is asked to leave"]
            case "resize":
                named = [f"worker {w} is asked to leave" for w in data["leaving"]]
                return [*named, f"asked for {number_of(data['processes'], 'process')}"]
            case "formed":
                return self._world_lines(data)
            case "kill":
                return [f"worker {data['worker']} is killed: {data['reason']}"]
            case "broken":
                self._reason = f"{data['error']}".partition("\n")[0]
            case "abort":
                self._reason = self._reason or data["reason"]
            case "minority":
                return [
                    f"{data['hosts']} hosts of the last world answer, and another "
                    "supervisor may have taken over: no world forms. If this lasts for "
                    f"{data['seconds']:g} s, this supervisor ends"
                ]
            case "fence":
                return [
                    "the workers of the last world cannot be reached, and may train "
                    f"on: another world waits for {data['seconds']:g} s"
                ]
            case "host" if data["slots"]:
                room = number_of(data["slots"], "worker")
                return [f"host {data['name']} joined, with room for {room}"]
            case "host":
                return [f"host {data['name']} is gone"]
            case "speeds":
                return [_describe_speeds(data["speeds"])]
            case "prepare":
                return [
                    "the links or devices have changed: the run trains on while it "
                    "plans for them"
                ]
            case "refused" if "reason" in data:
                return [f"refused: {data['reason']}"]
            case "service gone":
                return ["the coordination service died; another one starts"]
            case "stop":
                self._ends = True
                return ["asked to stop: workers end after the step that they are in"]
            case "suspend" | "finished" | "end":
                self._ends = True
            case _:
                pass
        return []

    def _world_lines(self, data: Mapping[str, Any]) -> list[str]:
        """The lines that tell which workers joined and how many processes train now."""
        workers = data["workers"]
        before, self._world = self._world, frozenset(workers)
        new = sorted(self._world - before) if before is not None else []
        names = name_numbers("worker", workers)
        pause_s, scheme = data["pause_s"], data["scheme"]
        pause = "" if pause_s is None else f", after a pause of {seconds_text(pause_s)}"
        plan = f". Plan: {scheme}" if scheme else ""
        why = "" if self._explained or new else self._reason
        self._reason = ""
        return [
            *([f"the last world broke: {why}"] if why else []),
            *(f"worker {w} joined" for w in new),
            f"a world of {number_of(len(workers), 'process')} ({names}) "
            f"trains from step {data['step']} on{pause}{plan}",
        ]

    def say_awaited(self, late: frozenset[int]) -> None:
        """Prints, once for each late worker, that the run waits for the worker."""
        if new := sorted(late - self._awaited):
            say(
                f"waits for {name_numbers('worker', new)}, whose script has not called "
                "autopar.elastic or autopar.train yet; see its output, or end the run "
                f"with `{workers_command(self._folder)} --stop`."
            )
        self._awaited |= late

    def say_unplaced(self, unplaced: frozenset[int]) -> None:
        """Prints, once for each worker without a host, that no host has room."""
        if new := sorted(unplaced - self._unplaced):
            verb = "waits" if len(new) == 1 else "wait"
            say(
                f"{name_numbers('worker', new)} {verb} for a host with room: run "
                "`autopar worker` on one more, or ask for fewer processes with "
                f"`{workers_command(self._folder)} --processes N`."
            )
        self._unplaced = unplaced


def say(text: str) -> None:
    """Prints a line of the supervisor."""
    sys.stderr.write(f"autopar run: {text}\n")
    sys.stderr.flush()


def _describe_speeds(speeds: Mapping[str, float]) -> str:
    """Which workers compute more slowly than the others.

    >>> _describe_speeds({"0": 1.0, "1": 0.5})
    'worker 1 has a CPU quota with which it computes at 0.5 of the speed of the others'
    """
    slow = [f"worker {w}" for w, x in speeds.items() if x < 1]
    if not slow:
        return "all workers compute at the same speed again"
    values = [f"{x:g}" for x in speeds.values() if x < 1]
    verb = "has" if len(slow) == 1 else "have"
    it = "it computes" if len(slow) == 1 else "they compute"
    return (
        f"{' and '.join(slow)} {verb} a CPU quota with which {it} at "
        f"{' and '.join(values)} of the speed of the others"
    )


def _describe_leaving(data: Mapping[str, Any]) -> str:
    return "has left" if data["code"] == 0 else end_text(data["code"])
