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


def devices_of(gain: float, move_s: float) -> int:
    """The devices of a job that runs on two of four, after a decision."""
    view = JobView(
        name="one", application="tiny", submitted_s=0.0, age_s=600.0,
        served_device_s=1200.0, progress=1200.0, restarts=0, asked=2, most=4, tried=4,
        curve=Gains(gain), measured=True, restart_s=RESTART_S,
        moves=lambda old, new: move_s,
    )  # fmt: skip
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
