"""Tests that programs are found by their content, and removed if there are too many."""

from __future__ import annotations

import gc
import itertools
import pathlib
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import small_step
from jax.sharding import Mesh

import autopar
from autopar import PlanError
from autopar.planner.options import PlanOptions
from autopar.runtime import state_mover
from autopar.runtime.planned import PlannedStep
from autopar.runtime.program_store import ProgramStore
from autopar.runtime.step_planner import Analysed, StepPlanner
from autopar_passes.program.trace import open_arguments

CHANGES, SIZES = 30, (8, 4, 6, 2, 3)


@pytest.fixture(scope="module")
def analysed() -> Analysed:
    return StepPlanner(small_step.step, PlanOptions()).analyse_structs(
        open_arguments(small_step.step, small_step.structs())
    )


def made_store(**options: Any) -> ProgramStore:
    return ProgramStore(donate=True, signals=False, every=1, **options)


def run(program: PlannedStep) -> None:
    args = (small_step.state(), small_step.batch())
    placed = [
        jax.device_put(x, s) for x, s in zip(args, program.in_shardings, strict=True)
    ]
    program.function(*placed)


class TestFinding:
    def test_by_content(self, analysed: Analysed) -> None:
        """A plan that is read again is the same; how long it took is not looked at."""
        store, devices = made_store(), jax.devices()
        plan = small_step.plan("4:cpu")
        found = store.program(analysed, plan, devices)
        again = autopar.Plan.from_json(msgspec.json.encode(plan))
        slow = msgspec.structs.replace(again.seconds, total=99.0)
        again = msgspec.structs.replace(again, seconds=slow)
        assert store.program(analysed, again, devices) is found
        assert store.program(analysed, plan, devices[:4]) is found
        assert len(store) == 1

    def test_other_devices_are_another_program(self, analysed: Analysed) -> None:
        store, devices = made_store(), jax.devices()
        plan = small_step.plan("4:cpu")
        first = store.program(analysed, plan, devices)
        second = store.program(analysed, plan, devices[1:])
        assert second is not first
        assert set(second.mesh.devices.flat) == set(devices[1:5])

    def test_too_few_devices(self, analysed: Analysed) -> None:
        store = made_store()
        with pytest.raises(PlanError, match=r"4 devices .*, and to run it there are 3"):
            store.program(analysed, small_step.plan("4:cpu"), jax.devices()[:3])
        assert len(store) == 0


class TestGoing:
    def test_the_one_used_longest_ago(self, analysed: Analysed) -> None:
        store, devices = made_store(capacity=2), jax.devices()
        plans = [small_step.plan(f"{n}:cpu") for n in (2, 4, 8)]
        first = store.program(analysed, plans[0], devices)
        run(first)
        assert first.function._cache_size() == 1
        for plan in plans[1:]:
            store.program(analysed, plan, devices)
        assert len(store) == 2
        assert first.function._cache_size() == 0
        assert store.program(analysed, plans[0], devices) is not first

    def test_of_devices_that_are_gone(self, analysed: Analysed) -> None:
        store, devices = made_store(), jax.devices()
        low = store.program(analysed, small_step.plan("4:cpu"), devices[:4])
        high = store.program(analysed, small_step.plan("4:cpu"), devices[4:])
        run(low)
        run(high)
        store.release(devices[:1])
        assert len(store) == 1
        assert low.function._cache_size() == 0
        assert high.function._cache_size() == 1
        assert store.program(analysed, small_step.plan("4:cpu"), devices[4:]) is high

    def test_at_least_one(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            autopar.parallelize(small_step.step, programs=0)


def counted() -> dict[str, int]:
    """Counts that must not grow when clusters change."""
    gc.collect()
    found = [type(x) for x in gc.get_objects()]
    return {
        "arrays": len(jax.live_arrays()),
        "meshes": found.count(Mesh),
        "programs": found.count(PlannedStep),
        "bytes": state_mover.resident_bytes(),
    }


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/statm").exists(), reason="reads memory from /proc"
)
def test_memory_stays_flat() -> None:
    """Over many changes among five sizes, of which two have room."""
    step = autopar.parallelize(small_step.step, cluster="8:cpu", programs=2)
    state: Any = step.init(small_step.state, batch=small_step.structs()[1])
    sizes = itertools.cycle(SIZES)
    seen: list[dict[str, int]] = []
    losses: list[float] = []
    for k in range(CHANGES):
        state = step.replan(f"{next(sizes)}:cpu", state)
        state, (loss,) = small_step.trained(step, state, 1)
        losses.append(loss)
        if k % 10 == 9:
            seen.append(counted())

    np.testing.assert_allclose(losses, small_step.plain_losses(CHANGES), rtol=1e-4)
    first, last = seen[1], seen[-1]
    for what in ("arrays", "meshes", "programs"):
        assert last[what] <= first[what], (what, seen)
    # Of ten changes; each compiles a program of some 100 kB.
    assert last["bytes"] - first["bytes"] < 16e6, seen
