"""Tests that our policy moves a running job only if the gain exceeds the cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from autopar.scheduler.jobs import JobView
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.goodput import Goodput

RESTART_S = 45.0


@dataclasses.dataclass(frozen=True)
class Gains:
    """A curve with one unit of progress per second on each of two devices, and a gain
    on four.
    """

    gain: float

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second."""
        known = {1: 1.0, 2: 2.0, 4: 2.0 * (1.0 + self.gain)}
        return np.array([known[int(d)] for d in np.broadcast_to(devices, nodes.shape)])


def view_of(name: str, progress: float, gain: float, **more: Any) -> JobView:
    """A job that has run for ten minutes."""
    view = JobView(
        name=name, application="tiny", submitted_s=0.0, age_s=600.0,
        served_device_s=1200.0, progress=progress, restarts=0, asked=2, most=4, tried=4,
        curve=Gains(gain), measured=True, restart_s=RESTART_S,
    )  # fmt: skip
    return dataclasses.replace(view, **more)


def devices_of(gain: float, move_s: float) -> int:
    """The devices of a job after a decision, before which it ran on two of four
    devices.
    """
    view = view_of("one", 1200.0, gain, moves=lambda old, new: move_s)
    decided = Goodput().decide(
        600.0, {"one": view}, Nodes.parse("1x4"), {"one": (0, 0)}
    )
    return len(decided.allocations["one"])


@pytest.mark.parametrize(
    ("gain", "move_s", "devices"),
    [
        (0.10, 2.0, 2),  # the next decision may see it otherwise
        (0.40, 2.0, 4),
        (0.40, RESTART_S, 4),
        (0.40, 400.0, 2),  # a dear move counts in full
        (0.90, 400.0, 4),
    ],
)
def test_a_cheap_move_counts_as_a_restart(
    gain: float, move_s: float, devices: int
) -> None:
    assert devices_of(gain, move_s) == devices


@pytest.mark.parametrize("done", [0, 1])
def test_a_job_that_is_nearly_done_is_not_in_the_way(done: int) -> None:
    """One of two jobs has to make room for one on a whole node."""
    policy, nodes = Goodput(), Nodes.parse("2x2")
    for name in ("first", "earlier", "before"):
        policy.decide(0.0, {name: view_of(name, 1200.0, 0.0)}, nodes, {name: (0, 0)})
    jobs = {
        f"job {node}": view_of(f"job {node}", 1190.0 if node == done else 10.0, 0.0)
        for node in range(2)
    }
    jobs = {name: dataclasses.replace(view, most=1) for name, view in jobs.items()}
    jobs["wide"] = view_of("wide", 100.0, 0.0, most=2, guaranteed=True)
    held = {f"job {node}": (node,) for node in range(2)}

    decided = policy.decide(600.0, jobs, nodes, held)

    assert len(set(decided.allocations["wide"])) == 1
    assert decided.allocations[f"job {done}"] == held[f"job {done}"]


@pytest.mark.parametrize(
    ("ended", "devices"),
    [
        (2, 4),  # two say too little of how long it lasts
        (3, 2),  # it ends before the gain is worth the restart
    ],
)
def test_a_job_that_is_nearly_done_stays(ended: int, devices: int) -> None:
    policy, nodes, held = Goodput(), Nodes.parse("1x4"), {"one": (0, 0)}
    for k in range(ended):
        name = f"earlier {k}"
        policy.decide(0.0, {name: view_of(name, 1210.0, 0.4)}, nodes, {name: (0, 0)})
    view = {"one": view_of("one", 1200.0, 0.4)}

    decided = policy.decide(600.0, view, nodes, held)

    assert len(decided.allocations["one"]) == devices


def test_a_job_that_ended_before_it_was_seen_at_work_says_nothing() -> None:
    """One that starts and ends between two decisions has done nothing that is seen."""
    policy, nodes = Goodput(), Nodes.parse("1x4")
    policy.decide(0.0, {"short": view_of("short", 0.0, 0.4)}, nodes, {})

    decided = policy.decide(60.0, {"one": view_of("one", 0.0, 0.4)}, nodes, {})

    assert decided.allocations["one"]
