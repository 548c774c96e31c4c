"""A state of local steps, saved and moved between plans with equal bits."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.runtime.local.rules import Overlap, StepAhead
from autopar.runtime.local.whole import WholeState, move_state

ROWS = 8
KEY = jax.random.key(3)


def create(key: jax.Array) -> Any:
    params = {"w": 0.2 * jax.random.normal(key, (8, 12)), "scale": jnp.float32(1.0)}
    velocity = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "velocity": velocity, "key": key, "count": jnp.int32(0)}


def step(state: Any, batch: Any) -> Any:
    key, now = jax.random.split(state["key"])

    def loss_of(params: Any) -> jax.Array:
        noise = 0.1 * jax.random.normal(now, batch["x"].shape)
        out = params["scale"] * jnp.tanh((batch["x"] + noise) @ params["w"])
        return jnp.mean((out - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda x, v: x - 0.1 * v, state["params"], velocity)
    new = {"params": params, "velocity": velocity, "key": key}
    return {**new, "count": state["count"] + 1}, loss


def batch(number: int) -> Any:
    x = np.random.default_rng(number).normal(size=(ROWS, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(np.tile(x, 2)[:, :12])}


def steps_of(
    split: bool = False, *, dim: int = 1, **options: Any
) -> autopar.LocalSteps:
    """A training by two replicas of two devices, whose plan may split the matrix."""
    where = PartitionSpec(*(None,) * dim, "x") if split else PartitionSpec()
    pins = {"state/params/w": where, "state/velocity/w": where}
    given = {"every": 3, "codec": "int4", "seconds": 1, **options}
    return autopar.local_steps(
        step, cluster="2x2:cpu", pins=pins, axis_names=("x",), max_axes=1, **given
    )


def run(made: Any, state: Any, first: int, last: int) -> tuple[Any, list[float]]:
    losses = []
    for number in range(first, last + 1):
        state, loss = made(state, batch(number))
        losses.append(float(loss))
    return state, losses


def bits(made: Any, state: Any) -> dict[str, bytes]:
    """All arrays of a state, without their layouts."""
    arrays = WholeState(made, state).arrays(state)
    return {path: np.asarray(x).tobytes() for path, x in arrays.items()}


@pytest.mark.parametrize("feedback", [None, StepAhead(part=0.5, average=2)])
def test_a_restored_state_trains_as_the_saved_one(
    feedback: StepAhead | None, tmp_path: pathlib.Path
) -> None:
    made = steps_of(feedback=feedback)
    state = made.init(create, KEY, batch=batch(1))
    state, _ = run(made, state, 1, 4)  # one outer step, and one local step after it
    saved = bits(made, state)
    paths = {path.partition("/")[0] for path in saved}
    assert paths == {"replica", "anchor", "momentum", "residual", "codec", "count"}
    assert np.any(np.frombuffer(saved["residual/state/params/w"], np.float32))
    assert np.any(np.frombuffer(saved["momentum/state/params/w"], np.float32))
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(made, state, step=4, position=32)
        checkpoints.wait()
        state, losses = run(made, state, 5, 7)

        again = steps_of(feedback=feedback)
        found = checkpoints.restore(again, create, KEY, batch=batch(1))
        assert (found.step, found.position) == (4, 32)
        assert bits(again, found.state) == saved
        restored, same = run(again, found.state, 5, 7)
        assert same == losses
        assert bits(again, restored) == bits(made, state)

        other = steps_of(split=True, feedback=feedback)
        moved = checkpoints.restore(other, create, KEY, batch=batch(1)).state
        spec = other.steps[0].plan.inputs["state/params/w"]
        assert any(spec), "the other plan should split the matrix"
        assert bits(other, moved) == saved
        _, near = run(other, moved, 5, 7)
        np.testing.assert_allclose(near, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("codec", "old", "new"),
    [("int4", 2, 4), ("int8", 4, 2), ("powersgd:rank=2", 2, 1), ("int4", 1, 2)],
)
def test_another_number_of_replicas_restores(
    codec: str, old: int, new: int, tmp_path: pathlib.Path
) -> None:
    """Replica k goes on as k modulo the number of saved replicas."""

    def steps(replicas: int) -> autopar.LocalSteps:
        return autopar.local_steps(
            step, every=3, codec=codec, cluster=f"{replicas}x2:cpu", seconds=1,
            fragments=2, overlap=Overlap(2), replicas=replicas,
        )  # fmt: skip

    made = steps(old)
    state, _ = run(made, made.init(create, KEY, batch=batch(1)), 1, 5)
    assert any(n >= 0 for n in state.merge_at), "an outer step should be under way"
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(made, state, step=5)
        checkpoints.wait()
        again = steps(new)
        found = checkpoints.restore(again, create, KEY, batch=batch(1)).state
        whole = steps_of(codec=codec, every=3, fragments=1)
        with pytest.raises(autopar.CheckpointError, match="another model"):
            checkpoints.restore(whole, create, KEY, batch=batch(1))
    assert len(found.replicas) == new
    for k, own in enumerate(found.replicas):
        jax.tree.map(assert_equal, own, state.replicas[k % old])
    for before, after in ((state.anchors, found.anchors), (state.rounds, found.rounds)):
        jax.tree.map(assert_equal, after, before)
    assert found.merge_at.tolist() == state.merge_at.tolist()
    assert int(found.step) == 5
    _, losses = run(again, found, 6, 12)
    _, straight = run(made, state, 6, 12)
    np.testing.assert_allclose(losses, straight, rtol=0.3)


def assert_equal(one: Any, other: Any) -> None:
    pair = [
        jax.random.key_data(x)
        if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
        else x
        for x in (one, other)
    ]
    np.testing.assert_array_equal(*pair)


def test_a_consumed_state_is_not_saved(tmp_path: pathlib.Path) -> None:
    made = steps_of(every=1)
    state = made.init(create, KEY, batch=batch(1))
    run(made, state, 1, 1)
    with (
        autopar.Checkpoints(tmp_path) as checkpoints,
        pytest.raises(autopar.PlanError, match="consumed by an earlier call"),
    ):
        checkpoints.save(made, state, step=1)


def test_the_state_of_a_codec_needs_equal_layouts(tmp_path: pathlib.Path) -> None:
    """Parts of 8x6 and of 4x12 elements have second residuals of equal shapes."""
    made, other = steps_of(every=1), steps_of(split=True, dim=0, every=1)
    state, _ = run(made, made.init(create, KEY, batch=batch(1)), 1, 1)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(made, state, step=1)
        checkpoints.wait()
        with pytest.raises(autopar.CheckpointError, match="equal layouts only"):
            checkpoints.restore(other, create, KEY, batch=batch(1))
    there = other.describe(create, KEY, batch=batch(1))
    with pytest.raises(autopar.PlanError, match="needs equal layouts"):
        move_state(state, made, other, there)


@pytest.mark.parametrize("mixing", [None, 0.5])
def test_an_outer_step_under_way_is_saved(
    mixing: float | None, tmp_path: pathlib.Path
) -> None:
    def steps(split: bool = False) -> autopar.LocalSteps:
        return steps_of(split, fragments=2, overlap=Overlap(2, mixing))

    made = steps()
    state = made.init(create, KEY, batch=batch(1))
    state, _ = run(made, state, 1, 5)  # one fragment's is under way since step 4
    assert sorted(state.merge_at.tolist()) == [-1, 6]
    saved = bits(made, state)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(made, state, step=5)
        checkpoints.wait()
        state, losses = run(made, state, 6, 9)
        again = steps()
        found = checkpoints.restore(again, create, KEY, batch=batch(1))
        assert bits(again, found.state) == saved
        restored, same = run(again, found.state, 6, 9)
        assert same == losses
        assert bits(again, restored) == bits(made, state)
        other = steps(split=True)
        moved = checkpoints.restore(other, create, KEY, batch=batch(1)).state
        assert bits(other, moved) == saved
        _, near = run(other, moved, 6, 9)
        np.testing.assert_allclose(near, losses, rtol=1e-5)


def test_a_state_moves_to_another_plan_and_back() -> None:
    old, new = (steps_of(split, codec="dense", every=1) for split in (False, True))
    state, _ = run(old, old.init(create, KEY, batch=batch(1)), 1, 1)
    saved = bits(old, state)
    here = old.describe(create, KEY, batch=batch(1))
    there = new.describe(create, KEY, batch=batch(1))
    moved = move_state(state, old, new, there)
    assert bits(new, moved) == saved
    assert not moved.state["params"]["w"].sharding.is_fully_replicated
    back = move_state(moved, new, old, here)
    assert bits(old, back) == saved
    assert int(back.step) == 1
    fewer = steps_of(codec="dense", every=2, fragments=2)
    with pytest.raises(autopar.PlanError, match="count/rounds"):
        move_state(back, old, fewer, fewer.describe(create, KEY, batch=batch(1)))
