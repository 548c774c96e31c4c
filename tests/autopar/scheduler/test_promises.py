"""Tests guaranteed jobs and reserved devices under our policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Allocation, Curve, JobView
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.goodput import Goodput, Settings


class Table:
    """A curve from a table of progress per second by number of devices."""

    def __init__(self, *speeds: float) -> None:
        self.speeds = np.array([0.0, *speeds])

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        del nodes
        return self.speeds[np.minimum(devices, len(self.speeds) - 1)]


LINEAR = Table(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)


def view(name: str, curve: Curve = LINEAR, **fields: Any) -> JobView:
    given: dict[str, Any] = {
        "name": name, "application": name, "submitted_s": 0.0, "age_s": 600.0,
        "served_device_s": 0.0, "progress": 500.0, "restarts": 0, "asked": 4,
        "most": 8, "tried": 8, "curve": curve, "measured": True, "restart_s": 30.0,
    }  # fmt: skip
    return JobView(**{**given, **fields})


def decided(
    *views: JobView,
    cluster: str = "2x4",
    current: dict[str, Allocation] | None = None,
    **settings: Any,
) -> dict[str, int]:
    """Devices of each job."""
    policy = Goodput(Settings(**settings))
    jobs = {v.name: v for v in views}
    found = policy.decide(600.0, jobs, Nodes.parse(cluster), current or {})
    return {name: len(found.allocations.get(name, ())) for name in jobs}


def test_a_guaranteed_job_is_as_fast_as_on_what_it_asks_for() -> None:
    """Fifteen short jobs are worth more than its devices; the promise counts first."""
    short = [view(f"s{k}", progress=1.0) for k in range(15)]
    assert decided(*short, view("long", progress=900.0))["long"] < 4
    kept = decided(*short, view("long", progress=900.0, guaranteed=True))
    assert kept["long"] == 4
    assert sum(kept.values()) <= 8


def test_a_job_ahead_of_its_promise_is_like_any_other() -> None:
    """Its floor counts from its submission: it did more since than was promised."""
    short = [view(f"s{k}", progress=1.0) for k in range(15)]
    ahead = {"progress": 1e6, "age_s": 600.0}
    free = decided(*short, view("long", **ahead))
    assert decided(*short, view("long", **ahead, guaranteed=True)) == free


def test_fewer_devices_keep_a_promise_where_they_are_as_fast() -> None:
    """Its curve is flat: what it asks for is worth no more than one device."""
    flat = Table(1.0, 1.0, 1.0, 1.0)
    held = view("flat", flat, guaranteed=True)
    found = decided(held, *[view(f"s{k}", progress=1.0) for k in range(7)])
    assert found == dict.fromkeys(found, 1)


def test_promises_that_do_not_all_fit_are_shared() -> None:
    """Nobody waits for another to be done, and nobody is dropped."""
    found = decided(*[view(f"g{k}", guaranteed=True) for k in range(3)])
    assert sum(found.values()) == 8
    assert min(found.values()) > 0


def test_a_promise_survives_a_node_that_leaves() -> None:
    """It asks for eight of eight devices, and four are left."""
    policy, nodes = Goodput(), Nodes.parse("2x4").without([0])
    held = view("g", asked=8, guaranteed=True)
    found = policy.decide(0.0, {"g": held}, nodes, {})
    assert len(found.allocations["g"]) == 4
    assert set(found.allocations["g"]) == {1}


def test_a_guaranteed_job_that_can_run_nowhere_holds_up_nobody() -> None:
    nowhere = view("nowhere", Table(*[0.0] * 8), guaranteed=True)
    found = decided(nowhere, view("other"))
    assert found["nowhere"] == 0
    assert found["other"] > 0


def test_reserved_devices_stay_free() -> None:
    jobs = [view(f"j{k}") for k in range(8)]
    assert sum(decided(*jobs).values()) == 8
    assert sum(decided(*jobs, reserved={"": 3}).values()) == 5
    assert sum(decided(*jobs, reserved={"": 99}).values()) == 0


def test_a_reservation_is_of_one_kind() -> None:
    jobs = [view(f"j{k}") for k in range(12)]
    policy = Goodput(Settings(reserved={"fast": 4}))
    nodes = Nodes.parse("1x4:slow+2x4:fast")
    found = policy.decide(0.0, {j.name: j for j in jobs}, nodes, {})
    used = [nodes.kinds[node] for a in found.allocations.values() for node in a]
    assert used.count("fast") == 4
    assert used.count("slow") == 4


def test_reserved_devices_are_taken_from_jobs_that_have_them() -> None:
    held = {"a": (0,) * 4, "b": (1,) * 4}
    found = decided(view("a"), view("b"), current=held, reserved={"": 4})
    assert sum(found.values()) == 4


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_a_curve_with_a_goodput_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(ScheduleError, match="job 'bad': its curve has a goodput"):
        decided(view("bad", Table(1.0, wrong, 3.0, 4.0)), view("other"))


def test_a_curve_that_falls_is_not_followed_down() -> None:
    """Two devices are the best of it, so no more are given."""
    assert decided(view("falls", Table(1.0, 1.9, 1.2, 0.8)))["falls"] == 2


def test_the_names_of_kinds_decide_nothing() -> None:
    """The work of a job counts in average devices, whichever name comes first."""
    shapes: list[dict[str, list[int]]] = []
    for slow, fast in (("a", "b"), ("b", "a")):
        jobs: dict[str, JobView] = {}
        for k in range(6):
            progress = 300.0 * 4**k
            kinds = {slow: LINEAR, fast: Table(*(9.0 * LINEAR.speeds[1:]))}
            jobs[f"j{k}"] = view(f"j{k}", progress=progress, by_kind=kinds)
        nodes = Nodes.parse(f"3x4:{slow}+1x4:{fast}")
        found = Goodput().decide(600.0, jobs, nodes, {}).allocations
        shapes.append({name: sorted(places) for name, places in found.items()})
    assert shapes[0] == shapes[1]
