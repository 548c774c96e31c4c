"""Runs the workers of `autopar run` as actors on a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autopar.backends.ray_worker import ScriptActor
from autopar.backends.slots import LiveNode, Placer, Places, live_nodes
from autopar.elastic.processes.launching import Reports
from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.network import Network
from autopar.elastic.sources.source import Watched
from autopar.errors import InputError, PlanError

_NAMESPACE = "autopar"
_POLL_S = 1.0
# How many calls an actor can run concurrently: one runs the script, others send signals
# or wait.
_CALLS = 4
# The resources of its node that a worker takes by default.
WORKER_RESOURCES: Mapping[str, float] = {"CPU": 1.0}
# Kinds of resources for which Ray's actors have an option of their own -> the option.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}


def read_resources(texts: Sequence[str]) -> Mapping[str, float]:
    """Reads the resources that a worker takes, from texts such as ``GPU=2``.

    Raises:
      InputError: a text is not a kind with a positive number, or a kind occurs twice.

    >>> read_resources(["GPU=2"])
    {'CPU': 1.0, 'GPU': 2.0}
    """
    found: dict[str, float] = {}
    for text in texts:
        kind, _, number = text.partition("=")
        try:
            much = float(number)
        except ValueError:
            much = 0.0
        if not kind or not 0 < much < 1e6 or (much > 1 and much % 1):
            raise InputError(
                f"{text!r}: expected a kind of resource and how much of it a worker "
                "takes, such as GPU=1 or TPU=4; of fractions, only those below 1."
            )
        if kind in found:
            raise InputError(f"{kind} is given twice; give it once.")
        found[kind] = much
    return {**WORKER_RESOURCES, **found}


class RayLauncher:
    """Starts workers as Ray actors, and watches nodes join and leave.

    The launcher starts a worker on each node that joins. The actors are detached: they
    go on after this process has ended, as workers must when their supervisor ends.
    """

    def __init__(
        self,
        words: Sequence[str],
        processes: int,
        address: str = "",
        places: Placer | None = None,
        network: Network | None = None,
        resources: Mapping[str, float] = WORKER_RESOURCES,
        wait_s: float = 0.0,
    ) -> None:
        """Connects to the Ray cluster.

        Args:
          words: path of the user's script, and its arguments.
          processes: the number of workers at the start of the run.
          address: address of the cluster; '' for ``RAY_ADDRESS``, or else for the
            cluster of this machine.
          places: chooses the node of each worker; None: always the node with the fewest
            workers.
          network: how processes of the run connect over hosts; None if all workers are
            on this machine.
          resources: kind of a resource -> how much of it a worker takes.
          wait_s: seconds to wait until the cluster has room for the workers, with nodes
            that Ray's autoscaler is asked to add; 0: the autoscaler is not asked.

        Raises:
          PlanError: Ray is not installed, there is no cluster, or it is too small.
        """
        self._words = tuple(words)
        self._network, self._resources = network or Network(), dict(resources)
        self._ray = connect(address)
        self._lock = threading.Lock()
        self._places: Placer = places or Places()
        self._wait_s, self._asked = wait_s, 0
        if places is None:
            self._begin_with(processes)
        self._actors: dict[int, Any] = {}
        self._watched: Watched | None = None
        self._run, self._reports = "", None

    def begin(self, run: str, reports: Reports) -> None:
        """See `Launcher`."""
        self._run, self._reports = run, reports
        self._watched = Watched("nodes", self._follow, _say)

    def start(self, worker: int, environment: Mapping[str, str]) -> ProcessId | None:
        """See `Launcher`."""
        with self._lock:
            node = self._places.place(worker)
        if node is None:
            print(f"autopar: no node has room for worker {worker}.", file=sys.stderr)
            self._ask_autoscaler(len(self._actors) + 1)
            self._report(worker, None, lost=False)
            return None
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node.name, soft=False
        )
        actor = (
            self._ray.remote(ScriptActor)
            .options(
                name=self._name(worker),
                namespace=_NAMESPACE,
                lifetime="detached",
                max_concurrency=_CALLS,
                max_restarts=0,
                **_options(self._resources),
                scheduling_strategy=strategy,
            )
            .remote()
        )
        variables = dataclasses.replace(self._network, host=node.address).variables()
        given = {**environment, **variables}
        ending = actor.run.remote(self._words, os.getcwd(), given)
        self._wait(worker, actor, ending)
        return None

    def watch(self, worker: int, process: ProcessId | None) -> bool:
        """See `Launcher`."""
        del process
        try:
            actor = self._ray.get_actor(self._name(worker), namespace=_NAMESPACE)
        except ValueError:
            return False
        self._wait(worker, actor, actor.wait.remote())
        return True

    def signal(self, worker: int, number: int) -> None:
        """See `Launcher`; for SIGKILL, ends the actor, with which the script ends."""
        if (actor := self._actors.get(worker)) is None:
            return
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            if number == signal.SIGKILL:
                self._ray.kill(actor)
            else:
                actor.signal.remote(int(number))

    def close(self) -> None:
        """See `Launcher`."""
        if self._watched is not None:
            self._watched.ending.set()  # the thread may be waiting for Ray
        if self._asked:
            with contextlib.suppress(Exception):
                self._request(0)
        self._ray.shutdown()

    def _name(self, worker: int) -> str:
        return f"autopar-{self._run}-{worker}"

    def _wait(self, worker: int, actor: Any, ending: Any) -> None:
        """Starts a thread that waits for the end of a script or of its actor, and
        reports it.
        """
        self._actors[worker] = actor

        def wait() -> None:
            code, lost = self._ending(actor, ending)
            with contextlib.suppress(Exception):
                self._ray.kill(actor)  # else it would keep its CPU
            self._actors.pop(worker, None)
            self._report(worker, code, lost=lost)

        threading.Thread(target=wait, daemon=True).start()

    def _ending(self, actor: Any, ending: Any) -> tuple[int | None, bool]:
        """Waits for a script's end; returns the exit status and whether its actor was
        lost.
        """
        errors = self._ray.exceptions
        while True:
            try:
                return int(self._ray.get(ending)), False
            except errors.ActorUnavailableError:
                ending = actor.wait.remote()  # the actor may have become reachable
            except errors.RayTaskError as error:
                print(f"autopar: {error.cause}", file=sys.stderr)
                return 1, False
            except errors.RayActorError as error:
                if not error.actor_init_failed:
                    return None, True
                print(f"autopar: no actor starts: {error}", file=sys.stderr)
                return 1, False
            except errors.RayError:
                return None, True

    def _report(self, worker: int, code: int | None, *, lost: bool) -> None:
        with self._lock:
            spare = self._places.on_end(worker, lost=lost)
        assert self._reports is not None
        self._reports.on_end(worker, code, spare=spare)

    def _follow(self, watched: Watched) -> None:
        """Reports nodes that join or are drained.

        A lost node shows by the loss of its actors.
        """
        assert self._reports is not None
        while not watched.ending.wait(_POLL_S):
            try:
                draining = draining_nodes(self._ray)
                nodes, _ = self._nodes(draining)
            except Exception:
                continue  # Ray's head may be away for a while
            with self._lock:
                new = self._places.update(nodes)
                leaving = self._places.drain(draining)
            if new:
                watched.call(functools.partial(self._reports.on_join, new))
            for worker, spare in leaving:
                leave = functools.partial(self._reports.on_leave, worker, spare=spare)
                watched.call(leave)

    def _nodes(self, draining: Collection[str]) -> tuple[list[LiveNode], int]:
        if self._network.is_local:
            return nodes_here(self._ray, self._resources, draining)
        return live_nodes(self._ray.nodes(), self._resources, None, draining)

    def _ask_autoscaler(self, workers: int) -> None:
        """Asks Ray's autoscaler for nodes with room for this many workers in all.

        Does nothing without ``wait_s``, or if as many have already been requested.
        """
        if self._wait_s and workers > self._asked:
            self._request(workers)
            self._asked = workers

    def _request(self, workers: int) -> None:
        # Ray is an optional dependency.
        sdk = importlib.import_module("ray.autoscaler.sdk")
        sdk.request_resources(bundles=[self._resources] * workers)

    def _wait_for_room(self, processes: int) -> tuple[list[LiveNode], int]:
        """The present nodes, and how many nodes are on other machines.

        Waits until the nodes have room for the workers, at most ``wait_s``.
        """
        end = time.monotonic() + self._wait_s
        while True:
            nodes, elsewhere = self._nodes(draining_nodes(self._ray))
            room = sum(x.room for x in nodes)
            if room >= processes or time.monotonic() >= end:
                return nodes, elsewhere
            if not self._asked:
                print(
                    f"autopar: the Ray cluster has room for {room} of {processes} "
                    f"workers; waiting {self._wait_s:g} s for more nodes.",
                    file=sys.stderr,
                )
            self._ask_autoscaler(processes)
            time.sleep(_POLL_S)

    def _begin_with(self, processes: int) -> None:
        """Reads the present nodes; raises an error if the workers do not fit on
        them.
        """
        nodes, elsewhere = self._wait_for_room(processes)
        self._places.update(nodes)
        room = sum(x.room for x in nodes)
        far = (
            f" {elsewhere} nodes are on other machines: add --listen HOST:PORT and "
            "--secret FILE, with an address of this machine that they reach."
        )
        where = " on this machine" if self._network.is_local else ""
        each = " and ".join(f"{much:g} {k}" for k, much in self._resources.items())
        if room < processes:
            raise PlanError(
                f"the Ray cluster has room for {room} workers of {each} each"
                f"{where}, and --processes asks for {processes}."
                f"{far if elsewhere else ''} Add nodes, let the run wait for them "
                "(--wait SECONDS), or ask for fewer."
            )


def _say(reason: str) -> None:
    print(f"autopar: nodes of the Ray cluster: {reason}", file=sys.stderr)


def connect(address: str) -> Any:
    """Imports Ray, connects it to a cluster, and returns the module.

    Args:
      address: address of the cluster; '' for ``RAY_ADDRESS``, or else for the cluster
        of this machine.

    Raises:
      PlanError: Ray is not installed, or there is no cluster.
    """
    ray = _ray()
    _connect(ray, address or os.environ.get("RAY_ADDRESS") or "auto")
    return ray


def nodes_here(
    ray: Any,
    resources: Mapping[str, float] = WORKER_RESOURCES,
    draining: Collection[str] = (),
) -> tuple[list[LiveNode], int]:
    """This machine's nodes that can run workers, and the number of such nodes on other
    machines.
    """
    here = ray.util.get_node_ip_address()
    return live_nodes(ray.nodes(), resources, here, draining)


def draining_nodes(ray: Any) -> frozenset[str]:
    """Ids of the nodes that Ray drains: their provider takes them away soon.

    Ray has no public function for this. If Ray changes its private function, drained
    nodes are first noticed when they die.
    """
    state = getattr(getattr(ray, "_private", None), "state", None)
    read = getattr(getattr(state, "state", None), "get_draining_nodes", None)
    return frozenset() if read is None else frozenset(read())


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that takes these resources."""
    named = {_OPTIONS[k]: x for k, x in resources.items() if k in _OPTIONS}
    return {
        **named,
        "resources": {k: x for k, x in resources.items() if k not in _OPTIONS},
    }


def _ray() -> Any:
    try:
        # Ray is imported only when it is needed, because it is an optional dependency.
        return importlib.import_module("ray")
    except ImportError as error:
        raise PlanError(
            "Ray is not installed: pip install 'autopar[ray]', here and on every node."
        ) from error


def _connect(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise PlanError(
            f"{address} is that of a Ray client: run this command on a node of the "
            "cluster, with --address auto or HOST:PORT of its head."
        )
    try:
        ray.init(address=address, namespace=_NAMESPACE, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlanError(
            f"no Ray cluster at {address}: {error} Start one with `ray start --head`, "
            "or give its --address."
        ) from error
