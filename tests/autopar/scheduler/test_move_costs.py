"""Our policy moves a running job where the gain is worth the move, and sure enough."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autopar.scheduler.jobs import JobView
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.goodput import Goodput

RESTART_S = 45.0


@dataclasses.dataclass(frozen=True)
class Gains:
    """One unit of progress a second on each of two devices, and some gain on four."""

    gain: float

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second."""
        known = {1: 1.0, 2: 2.0, 4: 2.0 * (1.0 + self.gain)}
        return np.array([known[int(d)] for d in np.broadcast_to(devices, nodes.shape)])


def view_of(name: str, progress: float, gain: float, move_s: float) -> JobView:
    """A job that ran for ten minutes."""
    return JobView(
        name=name, application="tiny", submitted_s=0.0, age_s=600.0,
        served_device_s=1200.0, progress=progress, restarts=0, asked=2, most=4, tried=4,
        curve=Gains(gain), measured=True, restart_s=RESTART_S,
        moves=lambda old, new: move_s,
    )  # fmt: skip


def devices_of(
    gain: float, move_s: float, whole: float | None = None, *, held: int = 2
) -> int:
    """The devices of a job that runs on two of four, after a decision.

    Args:
      gain: of four devices.
      move_s: seconds of a move.
      whole: the work of a job of the same program that ended.
      held: devices that it runs on before; 0: it waits.
    """
    policy, nodes = Goodput(), Nodes.parse("1x4")
    if whole is not None:
        earlier = {"earlier": view_of("earlier", whole, gain, move_s)}
        policy.decide(0.0, earlier, nodes, {"earlier": (0, 0)})
    view = view_of("one", 1200.0, gain, move_s)
    current = {"one": (0,) * held} if held else {}
    decided = policy.decide(600.0, {"one": view}, nodes, current)
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


@pytest.mark.parametrize(("whole", "devices"), [(1260.0, 2), (2400.0, 4)])
def test_a_job_that_is_nearly_done_does_not_move(whole: float, devices: int) -> None:
    """30 s before its end on two devices, half as many more gain it ten seconds."""
    assert devices_of(0.50, RESTART_S, whole) == devices


def test_a_job_that_waits_starts_however_little_it_has_left() -> None:
    assert devices_of(0.50, RESTART_S, 1200.01, held=0) > 0
