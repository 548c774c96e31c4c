"""Plans and compiles for likely next worlds, in a process of its own at low priority.

XLA cannot compile for processes that are not there. This process imitates a world of
any size: it registers as each of its processes, compiles what the first of them would,
and keeps the plan and the program in the folder of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from autopar.cluster import Cluster
from autopar.elastic.processes.programs import Programs
from autopar.elastic.processes.sizing import cluster_of
from autopar.errors import AutoparError
from autopar.planner.cache import PlanCache
from autopar.runtime import changing_worlds
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import Alone, World
from autopar.whole_files import append_lines
from autopar_passes import jax_processes

_POLL_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """The channel of an imitated world: the others say what the first one says.

    Attributes:
      count: number of processes.
    """

    count: int

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        return [data] * self.count

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        del what
        return dict.fromkeys(range(self.count), data)

    def tell(self, data: bytes) -> None:
        """See `Channel`; there is nobody to tell."""


def imitated_world(processes: int, local_devices: int) -> World:
    """A world that nothing runs in; programs can be compiled for it."""
    address, service = jax_processes.open_service(processes)
    backend = jax_processes.imitated_backend(address, processes, local_devices)
    service.shutdown()
    channel = Echo(processes) if processes > 1 else Alone()
    return World(tuple(backend.devices()), 0, processes, channel)


def likely(processes: int, least: int, most: int) -> list[int]:
    """Sizes of the worlds that may come next, the likeliest first.

    >>> likely(4, 1, 6)
    [3, 5, 2]
    """
    sizes = [processes - 1, processes + 1, processes // 2, 2 * processes]
    return [n for n in dict.fromkeys(sizes) if least <= n <= most and n != processes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is prepared.

    Attributes:
      step: a step that this process does not run.
      base: the cluster that it was given; None: none.
      structs: of its arguments, over all processes.
      local_devices: of each process.
      donate: whether steps consume the carried state.
      folder: of the run.
    """

    step: ParallelStep[..., Any]
    base: Cluster | None
    structs: Sequence[Any]
    local_devices: int
    donate: bool
    folder: pathlib.Path

    def prepare(self, processes: int) -> dict[str, Any]:
        """Plans and compiles for a world of so many processes; returns the seconds."""
        begin = time.perf_counter()
        world = imitated_world(processes, self.local_devices)
        cluster = cluster_of(self.base, processes, self.local_devices)
        cache = PlanCache(self.folder / "plans")
        changing_worlds.enter(
            self.step, world, cluster, donate=self.donate, cache=cache
        )
        self.step.prepare(*self.structs)
        planned_s = time.perf_counter() - begin
        programs = Programs(self.folder / "programs")
        made = programs.prepare(self.step.running.planned, donate=self.donate)
        return {
            "processes": processes,
            "plan_s": round(planned_s, 3),
            "compile_s": round(time.perf_counter() - begin - planned_s, 3),
            "compiled": made,
        }

    def follow(self, least: int, most: int) -> None:
        """Prepares for what may come next, until the run has ended."""
        done: set[int] = set()
        while (size := _running(self.folder)) is not None:
            done.add(size)  # its own processes compile for it
            todo = [n for n in likely(size, least, most) if n not in done]
            if not todo or not size:
                time.sleep(_POLL_S)
                continue
            done.add(todo[0])
            _write(self.folder, self._tried(todo[0]))

    def _tried(self, processes: int) -> dict[str, Any]:
        try:
            return self.prepare(processes)
        except AutoparError as error:  # this many cannot share the batch, perhaps
            return {"processes": processes, "error": str(error)}


def _running(folder: pathlib.Path) -> int | None:
    """The size of the run's world; None: the run has ended."""
    try:
        return len(json.loads((folder / "run.json").read_text())["world"])
    except (OSError, ValueError):
        return None


def _write(folder: pathlib.Path, line: dict[str, Any]) -> None:
    text = json.dumps({"time_s": time.time(), **line})
    with contextlib.suppress(OSError):  # a full disk: the supervisor says it
        append_lines(folder / "ahead.jsonl", text.encode() + b"\n")


def prepare_and_exit(ahead: Ahead, text: str) -> NoReturn:
    """What the process does that prepares programs, in the place of training."""
    least, most = map(int, text.split(":"))
    ahead.follow(least, most)
    sys.exit(0)
