"""Tests the Ray launcher with an imitation of Ray; `test_ray_run.py` uses a real
cluster.
"""

from __future__ import annotations

import queue
import signal
import sys
import types
from typing import Any

import pytest

from autopar.backends import ray as backend
from autopar.elastic.processes.network import (
    HOST_VARIABLE,
    SECRET_VARIABLE,
    Network,
)
from autopar.errors import PlanError


class RayError(Exception): ...


class RayTaskError(RayError):
    cause: BaseException = FileNotFoundError("there is no script")


class RayActorError(RayError):
    actor_init_failed = False


class ActorUnavailableError(RayActorError): ...


class Actor:
    """An actor whose script ends when the test says so."""

    def __init__(self) -> None:
        self.ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.signals: list[int] = []
        self.options: dict[str, Any] = {}
        self.given: tuple[Any, ...] = ()
        self.run = types.SimpleNamespace(remote=self._take)
        self.wait = types.SimpleNamespace(remote=lambda: self)
        self.signal = types.SimpleNamespace(remote=self.signals.append)

    def _take(self, *given: Any) -> Actor:
        self.given = given
        return self


class Ray(types.ModuleType):
    """A cluster of nodes of one CPU."""

    def __init__(self, count: int) -> None:
        super().__init__("ray")
        self.count, self.killed = count, list[Actor]()
        self.actors: dict[str, Actor] = {}
        errors = (RayError, RayTaskError, RayActorError, ActorUnavailableError)
        self.exceptions = types.SimpleNamespace(**{x.__name__: x for x in errors})
        strategies = types.SimpleNamespace(
            NodeAffinitySchedulingStrategy=lambda name, soft: name
        )
        self.resources = {"CPU": 1.0}
        self.draining: dict[str, int] = {}
        state = types.SimpleNamespace(get_draining_nodes=lambda: dict(self.draining))
        self._private = types.SimpleNamespace(state=types.SimpleNamespace(state=state))
        # The numbers of workers that the autoscaler was asked for.
        self.asked: list[int] = []
        self.machine, self.addresses = "10.0.0.1", ["10.0.0.1"]
        self.util = types.SimpleNamespace(
            scheduling_strategies=strategies, get_node_ip_address=lambda: self.machine
        )

    def init(self, address: str, **options: Any) -> None:
        if address == "nowhere:1":
            raise ConnectionError("nobody answers.")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": f"node {k}",
                "Alive": True,
                "NodeManagerAddress": self.addresses[k % len(self.addresses)],
                "Resources": self.resources,
            }
            for k in range(self.count)
        ]

    def remote(self, kind: type) -> Any:
        def made(**options: Any) -> Any:
            actor = self.actors[options["name"]] = Actor()
            actor.options = options
            return types.SimpleNamespace(remote=lambda: actor)

        return types.SimpleNamespace(options=made)

    def get_actor(self, name: str, namespace: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def get(self, actor: Actor) -> int:
        end = actor.ends.get(timeout=60)
        if isinstance(end, Exception):
            raise end
        return end

    def kill(self, actor: Actor) -> None:
        if actor not in self.killed:
            self.killed.append(actor)
            actor.ends.put(RayActorError("killed"))

    def shutdown(self) -> None:
        """Ends all that is asked, as Ray does."""
        for actor in self.actors.values():
            actor.ends.put(RayActorError("shut down"))


class Reports:
    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        self.told.put((worker, code, spare))

    def on_join(self, machines: int) -> None:
        self.told.put(machines)

    def on_leave(self, worker: int, *, spare: bool) -> None:
        self.told.put((worker, "leaves", spare))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray(2)
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(backend, "_POLL_S", 0.01)
    return made


def launcher(processes: int = 1) -> tuple[backend.RayLauncher, Reports]:
    made, reports = backend.RayLauncher(["train.py"], processes), Reports()
    made.begin("run", reports)
    return made, reports


@pytest.mark.parametrize(
    ("end", "report"),
    [
        (0, (0, 0, False)),
        (-9, (0, -9, False)),
        (RayTaskError("no script"), (0, 1, False)),
        (RayActorError("the node died"), (0, None, True)),
    ],
)
def test_ends_are_reported(ray: Ray, end: Any, report: Any) -> None:
    """A worker whose actor died may be replaced by the node that has none."""
    made, reports = launcher()
    made.start(0, {})
    actor = ray.actors["autopar-run-0"]
    assert actor.options["lifetime"] == "detached"
    actor.ends.put(end)
    assert reports.told.get(timeout=60) == report
    assert ray.killed == [actor]  # it holds a CPU
    made.close()


def test_an_actor_that_is_away_for_a_while_has_not_ended(ray: Ray) -> None:
    made, reports = launcher()
    made.start(0, {})
    actor = ray.actors["autopar-run-0"]
    actor.ends.put(ActorUnavailableError("no answer"))
    actor.ends.put(3)
    assert reports.told.get(timeout=60) == (0, 3, False)
    made.close()


def test_workers_have_nodes_of_their_own(ray: Ray) -> None:
    made, reports = launcher(2)
    for worker in range(3):
        made.start(worker, {})
    nodes = [x.options["scheduling_strategy"] for x in ray.actors.values()]
    assert sorted(nodes) == ["node 0", "node 1"]
    assert reports.told.get(timeout=60) == (2, None, False)
    made.close()


def test_nodes_that_join_are_told(ray: Ray) -> None:
    made, reports = launcher()
    ray.count = 4
    assert reports.told.get(timeout=60) == 2
    made.close()


@pytest.mark.parametrize("nodes", [2, 3])
def test_workers_leave_a_node_that_is_drained(ray: Ray, nodes: int) -> None:
    """Each is replaced if a node that stays has room."""
    ray.count = nodes
    made, reports = launcher(2)
    for worker in range(2):
        made.start(worker, {})
    ray.draining = {ray.actors["autopar-run-1"].options["scheduling_strategy"]: 0}
    assert reports.told.get(timeout=60) == (1, "leaves", nodes == 3)
    made.start(2, {})
    if nodes == 2:
        assert reports.told.get(timeout=60) == (2, None, False)
    else:
        last = ray.actors["autopar-run-2"].options["scheduling_strategy"]
        assert last not in ray.draining
    made.close()
    assert reports.told.get(timeout=60)[1] != "leaves"


def test_a_run_waits_for_nodes_of_the_autoscaler(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(bundles: list[dict[str, float]]) -> None:
        assert all(x == {"CPU": 1.0} for x in bundles)
        ray.asked.append(len(bundles))
        ray.count = max(ray.count, min(len(bundles), 4))

    sdk = types.SimpleNamespace(request_resources=request)
    monkeypatch.setitem(sys.modules, "ray.autoscaler.sdk", sdk)
    made = backend.RayLauncher(["train.py"], 4, wait_s=60)
    reports = Reports()
    made.begin("run", reports)
    assert ray.asked == [4]
    for worker in range(5):
        made.start(worker, {})
    assert len(ray.actors) == 4
    assert reports.told.get(timeout=60) == (4, None, False)
    made.close()
    assert ray.asked == [4, 5, 0]
    with pytest.raises(PlanError, match="room for 4 workers"):
        backend.RayLauncher(["train.py"], 6, wait_s=0.05)


def test_kills_end_the_actor_and_other_signals_reach_the_script(ray: Ray) -> None:
    made, reports = launcher()
    made.start(0, {})
    actor = ray.actors["autopar-run-0"]
    made.signal(0, signal.SIGTERM)
    assert (actor.signals, ray.killed) == ([signal.SIGTERM], [])
    made.signal(0, signal.SIGKILL)
    assert reports.told.get(timeout=60) == (0, None, True)
    made.signal(0, signal.SIGKILL)  # it is gone
    made.close()


def test_workers_of_an_earlier_supervisor_are_found(ray: Ray) -> None:
    ray.actors["autopar-run-3"] = Actor()
    made, reports = launcher()
    assert made.watch(3, None)
    assert not made.watch(4, None)
    ray.actors["autopar-run-3"].ends.put(0)
    assert reports.told.get(timeout=60) == (3, 0, False)
    made.close()


@pytest.mark.parametrize(
    ("processes", "address", "says"),
    [
        (3, "", "room for 2 workers .* on this machine, and --processes asks for 3"),
        (1, "ray://head:10001", "that of a Ray client"),
        (1, "nowhere:1", "no Ray cluster at nowhere:1: nobody answers"),
    ],
)
def test_clusters_that_cannot_run_it(
    ray: Ray, processes: int, address: str, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        backend.RayLauncher(["train.py"], processes, address)


def test_workers_take_what_they_are_said_to(ray: Ray) -> None:
    resources = backend.read_resources(["GPU=2", "TPU=4"])
    with pytest.raises(PlanError, match="room for 0 workers of 1 CPU and 2 GPU and"):
        backend.RayLauncher(["train.py"], 1, resources=resources)
    ray.resources = {"CPU": 1.0, "GPU": 2.0, "TPU": 8.0}
    made = backend.RayLauncher(["train.py"], 2, resources=resources)
    made.begin("run", Reports())
    made.start(0, {})
    options = ray.actors["autopar-run-0"].options
    assert (options["num_cpus"], options["num_gpus"]) == (1, 2)
    assert options["resources"] == {"TPU": 4}
    made.close()


@pytest.mark.parametrize("text", ["GPU", "GPU=0", "GPU=-1", "GPU=1.5", "=1", "GPU=x"])
def test_what_is_no_resource(text: str) -> None:
    with pytest.raises(ValueError, match="expected a kind of resource"):
        backend.read_resources([text])
    with pytest.raises(ValueError, match="twice"):
        backend.read_resources(["GPU=1", "GPU=2"])


def test_a_cluster_of_other_machines(ray: Ray) -> None:
    ray.machine = "10.0.0.2"
    with pytest.raises(PlanError, match="2 nodes are on other machines"):
        backend.RayLauncher(["train.py"], 1)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlanError, match=r"pip install 'autopar\[ray\]'"):
        backend.RayLauncher(["train.py"], 1)


def test_nodes_of_other_machines_are_told_their_address(ray: Ray) -> None:
    """Where the run has a secret; without one they take no worker."""
    ray.addresses = ["10.0.0.1", "10.0.0.2"]
    with pytest.raises(PlanError, match="--listen"):
        backend.RayLauncher(["train.py"], 2)
    network = Network("10.0.0.1", "secret")
    made = backend.RayLauncher(["train.py"], 2, network=network)
    made.begin("run", Reports())
    for worker in range(2):
        made.start(worker, {"SEED": "1"})
    given = [actor.given[2] for actor in ray.actors.values()]
    assert {x[HOST_VARIABLE] for x in given} == {"10.0.0.1", "10.0.0.2"}
    assert all(x[SECRET_VARIABLE] == "secret" and x["SEED"] == "1" for x in given)
    made.close()
