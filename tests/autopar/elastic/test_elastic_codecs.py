"""Tests that the codecs' state survives changes of the devices."""

from __future__ import annotations

from typing import Any

import compressed_cases as cases
import jax
import numpy as np
import pytest

import autopar
from autopar import Cluster

NAME = "data_parallel"
FOUR = f"4x1:cpu,{cases.NETWORK}"
EIGHT = Cluster.parse(f"8x1:cpu,{cases.NETWORK}")


def started(codec: str, steps: int = 4) -> Any:
    case = cases.case_of(NAME)

    def source(position: int, rows: int) -> Any:
        return case.batch(position // rows)

    return autopar.elastic(
        case.parallel(codec, seconds=1.0),
        case.state,
        source,
        batch=cases.ROWS,
        steps=steps,
        ahead=False,
    )


def losses(run: Any, changes: dict[int, Any]) -> list[float]:
    found: list[float] = []
    for done in run:
        found.append(float(np.asarray(done.result)))
        if done.step + 1 in changes:
            run.change(changes[done.step + 1])
    return found


def residuals(run: Any) -> dict[str, np.ndarray]:
    """Name of a gradient -> its residual, for gradients with residuals."""
    state = run.compression_state["gradients"]
    found = {name: np.asarray(x["residual"]) for name, x in state.items()}
    return {name: x for name, x in found.items() if x.size}


class TestNothingChanges:
    """Residuals keep every bit where the plan is the same."""

    def test_other_devices(self) -> None:
        plain = losses(started("int4"), {})
        run = started("int4")
        assert losses(run, {2: EIGHT.without(devices=(0, 1, 2, 3))}) == plain
        used = {d.id for x in jax.tree.leaves(run.state) for d in x.sharding.device_set}
        assert used == {4, 5, 6, 7}

    def test_a_link_that_is_hardly_slower(self) -> None:
        run = started("int4")
        next(run)
        before = residuals(run)
        level = Cluster.parse(FOUR).levels[0]
        rate = 0.999 * level.link.bandwidth_bytes_per_s
        run.change({"kind": "link", "level": level.name, "bandwidth_bytes_per_s": rate})
        assert run._change() is None
        assert run.ledger.lines[-1]["chosen"] == "stay"
        for name, residual in residuals(run).items():
            np.testing.assert_array_equal(residual, before[name])
        assert losses(run, {}) == losses(started("int4"), {})[1:]


@pytest.mark.parametrize("devices", [2, 8])
def test_the_sum_of_residuals_stays(devices: int) -> None:
    """With another number of workers each has an equal part of what is not sent."""
    run = started("int4")
    for _ in range(2):
        next(run)
    before = {name: x.sum(axis=0) for name, x in residuals(run).items()}
    assert before
    assert all(np.abs(x).max() > 0 for x in before.values())
    step = run._train_step._step
    # Whether a change pays is timed: the step itself is asked to move.
    run.state = step.replan(f"{devices}x1:cpu,{cases.NETWORK}", run.state)
    planned = step.running.planned
    state = step._codecs._state_for(planned.sums)
    for name, total in before.items():
        after = np.asarray(state["gradients"][name]["residual"])
        assert after.shape[0] == devices
        atol = 1e-6 * np.abs(total).max()
        np.testing.assert_allclose(after.sum(axis=0), total, rtol=1e-6, atol=atol)
    next(run)


def test_dense_codecs_lose_nothing() -> None:
    plain = losses(started("dense"), {})
    changes = {1: f"2x1:cpu,{cases.NETWORK}", 2: f"8x1:cpu,{cases.NETWORK}", 3: FOUR}
    run = started("dense")
    np.testing.assert_allclose(losses(run, changes), plain, rtol=1e-5)
    assert len([x for x in run.ledger.lines if x["kind"] == "replan"]) == 3
