"""Plans and compiles for possible next worlds, in a process beside the training.

A world is a set of processes that train together. XLA cannot compile for processes that
do not exist. So the *preparing process* imitates a world of any size: it registers with
a coordination service as every process of this world, plans, and compiles the program
of the first process. The preparing process stores the plan and the program in the run's
folder, on the host of the first process. The other processes of the next world get the
plan and the program from there.

The supervisor sends orders to prepare to the first process of the training world. This
process starts the preparing process and passes the orders on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import msgspec

from autopar.cluster import Cluster
from autopar.elastic.processes.beside import rest_structs
from autopar.elastic.processes.launching import start_helper
from autopar.elastic.processes.link import AHEAD_VARIABLE, VARIABLE
from autopar.elastic.processes.members import Message
from autopar.elastic.processes.programs import StoredPrograms
from autopar.elastic.processes.recovery import SHARED_VARIABLE
from autopar.elastic.processes.sizing import cluster_of
from autopar.elastic.processes.team import local_devices, run_folder
from autopar.elastic.samples import Samples
from autopar.errors import AutoparError
from autopar.planner.cache import PlanCache
from autopar.plans import Plan
from autopar.runtime import changing_batches
from autopar.runtime.creation import StateShapes
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import LoneChannel, World
from autopar_passes import jax_processes


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """The channel of an imitated world: every process seems to send the same data.

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
        """See `Channel`; there is no receiver."""


def imitated_world(processes: int, local_devices: int) -> World:
    """A world whose processes do not exist, for which programs can be compiled."""
    address, service = jax_processes.open_service(processes)
    backend = jax_processes.imitated_backend(address, processes, local_devices)
    service.shutdown()
    channel = Echo(processes) if processes > 1 else LoneChannel()
    return World(tuple(backend.devices()), 0, processes, channel)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextWorlds:
    """Plans and compiles a train step for worlds of any size, in this process.

    Attributes:
      step: the train step; this process only plans and compiles it.
      shapes: shapes of the state.
      samples: the training samples.
      donate: whether steps consume (donate) the training state.
    """

    step: ParallelStep[..., Any]
    shapes: StateShapes
    samples: Samples
    donate: bool

    def serve(self) -> NoReturn:
        """Carries out orders to prepare until the ordering process has ended."""
        base = self.step.setting.cluster
        with socket.socket(fileno=int(os.environ[AHEAD_VARIABLE])) as orders:
            for line in orders.makefile("rb"):
                order = json.loads(line)
                cluster = order["cluster"]
                given = base if cluster is None else Cluster.from_data(cluster)
                found: dict[str, Any] = {"number": order["number"]}
                try:
                    changing_batches.assume_errors(self.step, order["errors"])
                    wanted = order["processes"], given, order["rows"], base
                    found |= self._prepare(*wanted)
                    if order["errors"]:  # such a plan is not stored
                        found["plan"] = msgspec.json.encode(self.step.plan).decode()
                        on = self.step.setting.cluster
                        found["on"] = None if on is None else on.to_data()
                except AutoparError as error:  # for example, the batch cannot be split
                    found |= {"error": str(error), "refused": True}
                orders.sendall(json.dumps(found).encode() + b"\n")
        sys.exit(0)

    def _prepare(
        self, processes: int, base: Cluster | None, rows: int, own: Cluster | None
    ) -> dict[str, Any]:
        """Plans and compiles for a world, and returns how long this took.

        Args:
          processes: number of processes.
          base: cluster to plan for; None: the script names no cluster, and the
            processes' own devices form it.
          rows: rows of a batch.
          own: cluster that the script names (`cluster_of`).

        Raises:
          AutoparError: the step cannot be planned for the world.
        """
        begin = time.perf_counter()
        devices = local_devices()
        world = imitated_world(processes, devices)
        cluster = cluster_of(base, processes, devices, world.devices, own)
        cache = PlanCache(run_folder() / "plans")
        changing_batches.enter_world(
            self.step, world, cluster, donate=self.donate, cache=cache
        )
        samples = self.samples
        if rows != samples.batch:
            samples = samples.resize(0, rows)
        changing_batches.read_rows(self.step, len(self.shapes.arguments()))
        rest = rest_structs(self.step, samples, self.shapes, 0)
        self.step.prepare(*self.shapes.arguments(), *rest)
        planned_s = time.perf_counter() - begin
        programs = StoredPrograms(run_folder() / "programs")
        made = programs.prepare(self.step.running.planned, donate=self.donate)
        return {
            "plan_s": round(planned_s, 3),
            "compile_s": round(time.perf_counter() - begin - planned_s, 3),
            "compiled": made,
        }


class PreparingProcess:
    """Starts a preparing process, and a thread that passes on orders and answers.

    Attributes:
      is_open: whether the process takes orders; False once it has ended.
    """

    def __init__(self, answer: Callable[..., Any], *, nice: int) -> None:
        """Starts the process.

        Args:
          answer: called with each answer, to send it to the supervisor.
          nice: the process's nice value, 0 to 19 (the lowest priority).
        """
        self._answer, self._nice = answer, nice
        self._waiting: dict[int, Message] = {}
        self.is_open = True
        self._child: subprocess.Popen[bytes] | None = None
        self._here, there = socket.socketpair()
        # The preparing process dies with the thread that starts it. So this thread
        # lives as long as the process.
        threading.Thread(
            target=self._work, args=(there,), daemon=True, name="preparing"
        ).start()

    def send(self, order: Message) -> None:
        """Sends an order to the process."""
        self._waiting[order["number"]] = order
        with contextlib.suppress(OSError):  # if it has died, the thread answers
            self._here.sendall(json.dumps(order).encode() + b"\n")

    def clusters(self) -> list[Any]:
        """The clusters of the orders that have no answer yet."""
        return [order["cluster"] for order in list(self._waiting.values())]

    def close(self) -> None:
        """Ends the process; open orders get no answer."""
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self._here.shutdown(socket.SHUT_RDWR)
        if self._child is not None:
            self._child.kill()

    def _work(self, there: socket.socket) -> None:
        gone = (VARIABLE, SHARED_VARIABLE)
        env = {k: v for k, v in os.environ.items() if k not in gone}
        env[AHEAD_VARIABLE] = str(there.fileno())
        command = [sys.executable, *sys.orig_argv[1:]]
        with there:
            own = there.fileno()
            child = start_helper(command, env, nice=self._nice, descriptors=[own])
        self._child = child
        with self._here, contextlib.suppress(OSError, ValueError):
            for line in self._here.makefile("rb"):
                answer = json.loads(line)
                order = self._waiting.pop(answer["number"], None)
                if order is not None:
                    self._answer(order, answer)
        child.kill()
        child.wait()
        self.is_open = False
        error = "the process that prepares plans and programs has ended"
        for order in list(self._waiting.values()):
            self._answer(order, {"error": error})


class Preparer:
    """Carries out the supervisor's orders to prepare plans and programs.

    For a next world that is only likely, it prepares at the lowest CPU priority. For a
    cluster that the supervisor waits for, or will soon wait for, it prepares in a
    second process, at the priority of the training.
    """

    def __init__(
        self,
        say: Callable[..., Any],
        rows: Callable[[], int],
        errors: Callable[[], Mapping[str, Mapping[str, float]]],
        remember: Callable[[Cluster, Plan], None],
    ) -> None:
        """Starts no process yet.

        Args:
          say: sends a message to the supervisor.
          rows: returns the present batch size in rows.
          errors: returns the errors of codecs that the step has measured.
          remember: keeps a plan that was made with these errors, for the next world.
        """
        self._say, self._rows = say, rows
        self._errors, self._remember = errors, remember
        self._guesses = 0
        self._process: PreparingProcess | None = None
        self._is_urgent = False
        self._done: set[str] = set()

    def take(self, order: Message) -> None:
        """Carries out an order; its number is 0 if the supervisor does not wait."""
        made = {k: order[k] for k in ("number", "processes", "cluster")}
        made["rows"], made["expected"] = self._rows(), order.get("expected", False)
        if jax.default_backend() != "cpu":
            error = "programs can be prepared for CPUs only, because XLA needs devices"
            self._reply(made, {"error": error})
            return
        urgent = order["number"] > 0 or made["expected"]
        # Guesses are for other numbers of processes, where gradients have other errors.
        made["errors"] = self._errors() if urgent else {}
        busy = [] if self._process is None else self._process.clusters()
        gone = self._process is not None and not self._process.is_open
        if gone or (not urgent and self._is_urgent and not busy):
            self._end()  # an expected change did not last
        if urgent:
            others = [x for x in busy if x != made["cluster"]]
            if others or not self._is_urgent:
                self._end()  # nothing waits for these any more
        else:
            text = json.dumps(made, sort_keys=True)
            if self._is_urgent or text in self._done:
                return
            self._done.add(text)
        if not order["number"]:
            self._guesses -= 1
            made["number"] = self._guesses
        if self._process is None:
            self._process = PreparingProcess(self._reply, nice=0 if urgent else 19)
            self._is_urgent = urgent
        self._process.send(made)

    def _reply(self, order: Message, answer: Message) -> None:
        plan, on = answer.pop("plan", None), answer.pop("on", None)
        if plan is not None and on is not None:
            self._remember(Cluster.from_data(on), Plan.from_json(plan))
        own = {k: order[k] for k in ("number", "processes", "expected")}
        self._say("prepared", **{**answer, **own})
        if order["number"] > 0:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process, self._is_urgent = None, False
