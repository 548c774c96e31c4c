"""Tests that repeated calls are checked fast, and that changes are noticed."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from autopar import PlanError


def step(state: Any, batch: Any, double: bool = False) -> Any:
    """A step that adds the mean of the batch to all arrays of the state."""
    by = jnp.mean(batch) * (2 if double else 1)
    return jax.tree.map(lambda x: x + by.astype(x.dtype), state), by


def made(count: int) -> tuple[Any, Any]:
    """A planned step that has run three times, with a state of ``count`` arrays."""
    planned = autopar.parallelize(step, cluster="2:cpu")
    state = {f"w{k}": np.full((4, 2), float(k), np.float32) for k in range(count)}
    for _ in range(3):
        state, _ = planned(state, np.ones((4, 2), np.float32))
    return planned, state


def python_calls(planned: Any, state: Any, batch: Any) -> int:
    """The number of Python functions that a call of a step enters."""
    batch = jax.device_put(batch, planned.running.planned.in_shardings[-1])
    for _ in range(2):
        state, _ = planned(state, batch)
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        planned(state, batch)
    finally:
        sys.setprofile(before)
    return found


def test_no_python_for_each_array() -> None:
    """A repeated call enters as many functions with 40 arrays as with two."""
    few, many = (
        python_calls(planned, state, np.ones((4, 2), np.float32))
        for planned, state in (made(2), made(40))
    )
    assert few == many < 40


@pytest.fixture(scope="module", name="ready")
def ready_step() -> Any:
    """A step of two arrays that has run."""
    return made(2)[0]


class TestNoticed:
    """What differs from the last call is met as on a first call."""

    def state(self) -> Any:
        return {f"w{k}": np.full((4, 2), float(k), np.float32) for k in range(2)}

    def batch(self) -> Any:
        return np.ones((4, 2), np.float32)

    def test_consumed(self, ready: Any) -> None:
        state, _ = ready(self.state(), self.batch())
        after, _ = ready(state, self.batch())
        with pytest.raises(PlanError, match=r"'state/w0' \(and 1 more\) was consumed"):
            ready(state, self.batch())
        after, _ = ready(after, self.batch())
        np.testing.assert_array_equal(after["w1"], 4.0)

    def test_one_array_twice(self, ready: Any) -> None:
        state, _ = ready(self.state(), self.batch())
        after, _ = ready({"w0": state["w0"], "w1": state["w0"]}, self.batch())
        np.testing.assert_array_equal(after["w0"], 2.0)
        np.testing.assert_array_equal(after["w1"], 2.0)

    def test_other_rows_types_and_static(self, ready: Any) -> None:
        state, _ = ready(self.state(), self.batch())
        state, by = ready(state, 3 * np.ones((2, 2), np.float32))
        assert by == 3
        state, by = ready(state, self.batch().astype(np.int32))
        assert by == 1
        state, by = ready(state, self.batch(), True)
        assert by == 2
        state, by = ready(batch=self.batch(), state=state, double=False)
        state, by = ready(double=False, state=state, batch=2 * self.batch())
        assert by == 2
        np.testing.assert_array_equal(state["w1"], 1 + 1 + 3 + 1 + 2 + 1 + 2)

    def test_other_places(self, ready: Any) -> None:
        state, _ = ready(self.state(), self.batch())
        state, _ = ready(state, self.batch())
        state["w0"] = jax.device_put(np.asarray(state["w0"]), jax.devices()[1])
        moved = state["w0"]
        state, _ = ready(state, self.batch())
        state, _ = ready(state, jnp.ones((4, 2)))
        np.testing.assert_array_equal(state["w0"], 4.0)
        np.testing.assert_array_equal(moved, 2.0)

    def test_tracers(self, ready: Any) -> None:
        """Under a transform the step is the function that it was made of."""
        state, _ = ready(self.state(), self.batch())
        state, _ = ready(state, self.batch())

        def total(batch: Any) -> Any:
            return sum(map(jnp.sum, ready(state, batch)[0].values()))

        slope = jax.grad(total)(jnp.ones((4, 2)))
        np.testing.assert_allclose(slope, 16 / 8)
        ready(state, self.batch())

    def test_viewed(self, ready: Any) -> None:
        """State that is looked at is consumed, and the view keeps its numbers."""
        state, _ = ready(self.state(), self.batch())
        state, _ = ready(state, self.batch())
        view = np.asarray(state["w1"])
        ready(state, self.batch())
        np.testing.assert_array_equal(view, 3.0)
        assert state["w1"].is_deleted()


def test_nnx_state_is_a_tree() -> None:
    """Split from its module it is carried, consumed and repeated as any other state."""
    graph, state = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))

    def descend(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean(nnx.merge(graph, state)(batch) ** 2)

        return jax.tree.map(lambda x, g: x - 0.1 * g, state, jax.grad(loss)(state))

    planned, batch = (
        autopar.parallelize(descend, cluster="2:cpu"),
        np.ones((4, 4), "f4"),
    )
    wanted = state = jax.tree.map(np.asarray, state)
    for _ in range(3):
        before, state = state, planned(state, batch)
        wanted = descend(wanted, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    for ours, theirs in zip(
        jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
