"""Elastic runs of local steps: replicas leave and join with their devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import PlanError
from autopar.runtime.local import changing_replicas
from autopar.runtime.local.outer import MEAN
from autopar.runtime.local.rules import Overlap, StepAhead

KEY = jax.random.key(3)
BATCH = 24


def create(key: jax.Array) -> Any:
    params = {"w": 0.2 * jax.random.normal(key, (8, 12)), "scale": jnp.float32(1.0)}
    velocity = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "velocity": velocity, "key": key, "count": jnp.int32(0)}


def step(state: Any, batch: Any) -> Any:
    key, now = jax.random.split(state["key"])

    def loss_of(params: Any) -> jax.Array:
        noise = 0.01 * jax.random.normal(now, batch["x"].shape)
        out = params["scale"] * jnp.tanh((batch["x"] + noise) @ params["w"])
        return jnp.mean((out - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda x, v: x - 0.1 * v, state["params"], velocity)
    new = {"params": params, "velocity": velocity, "key": key}
    return {**new, "count": state["count"] + 1}, loss


def source(position: int, rows: int) -> Any:
    draws = [
        np.random.default_rng(position + k).standard_normal(8) for k in range(rows)
    ]
    x = np.stack(draws).astype(np.float32)
    return {"x": x, "y": np.sin(np.tile(x, 2)[:, :12])}


def training(cluster: Any = "4x2:cpu", **options: Any) -> autopar.LocalSteps:
    given = {"every": 4, "codec": "int4", "outer": MEAN, "seconds": 1, **options}
    return autopar.local_steps(step, cluster=cluster, **given)


def started(made: autopar.LocalSteps, steps: int, **options: Any) -> Any:
    options.setdefault("batch", BATCH)
    return autopar.elastic(made, create, source, steps=steps, args=(KEY,), **options)


def bits(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def parts(made: autopar.LocalSteps, state: Any) -> tuple[Any, list[Any]]:
    """The shared arrays, and those of each replica, as bits by path."""
    shared, replicas = changing_replicas.take_apart(made, state)
    named = {f"anchor/{k}": bits(x) for k, x in shared.anchors.items()}
    named |= {f"momentum/{k}": bits(x) for k, x in shared.momenta.items()}
    each = [
        {
            f"{kind}/{k}": bits(x)
            for kind in ("arrays", "residuals", "moves")
            for k, x in getattr(replica, kind).items()
        }
        for replica in replicas
    ]
    return (named, shared.step, shared.rounds), each


def test_a_run_without_changes_is_the_training_itself() -> None:
    run = started(training(), 6)
    losses = [float(done.result) for done in run]
    made = training()
    state = made.init(create, KEY, batch=source(0, BATCH))
    plain = []
    for number in range(6):
        state, loss = made(state, source(BATCH * number, BATCH))
        plain.append(float(loss))
    assert losses == plain
    assert run.position == 6 * BATCH


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 2, "overlap": Overlap(1)},
        {"codec": "topk:ratio=0.2", "feedback": StepAhead()},
        {"codec": "dense", "outer": None},
    ],
)
def test_a_lost_host_takes_its_replica_and_a_new_one_joins(options: Any) -> None:
    made = training(**options)
    run = started(made, 14)
    losses = [float(next(run).result) for _ in range(6)]
    # What the change will find: it begins with an outer step.
    twin = training(**options)
    state = twin.init(create, KEY, batch=source(0, BATCH))
    for number in range(6):
        state, _ = twin(state, source(BATCH * number, BATCH))
    state = twin.synchronise(state)
    before = parts(twin, state)

    run.change({"kind": "gone", "hosts": [1]})
    run._change()
    assert made.replicas == 3
    shared, each = parts(made, run.state)
    assert shared == before[0]
    assert each == [before[1][k] for k in (0, 2, 3)]
    line = [x for x in run.ledger.lines if x["kind"] == "replan"][-1]
    assert (line["replicas_before"], line["replicas"]) == ([0, 1, 2, 3], [0, 2, 3])
    assert (line["lost_steps"], line["chosen"]) == (0, "replicas")
    used = {d.id for own in made.steps for d in own.world.devices}
    assert used == {0, 1, 4, 5, 6, 7}
    losses += [float(next(run).result) for _ in range(3)]

    run.change({"kind": "added", "hosts": ["host1"]})
    losses += [float(done.result) for done in run]
    assert made.replicas == 4
    assert (run.step, run.position, int(run.state.step)) == (14, 14 * BATCH, 14)
    assert np.all(np.isfinite(losses))
    if not options:
        straight = [float(done.result) for done in started(training(), 14)]
        np.testing.assert_allclose(losses, straight, rtol=0.1)


def test_a_replica_joins_at_the_anchor() -> None:
    """With the optimizer of another one, without a residual, in the next outer step."""
    made = training("2x2:cpu", every=8, replicas=2)
    run = started(made, 12)
    for _ in range(3):
        next(run)
    run.change("4x2:cpu")
    run._change()
    assert [own.world.devices for own in made.steps] == [
        tuple(jax.devices()[2 * k : 2 * k + 2]) for k in range(4)
    ]
    shared, each = parts(made, run.state)
    first, second, third, fourth = each
    for name in ("arrays/state/params/w", "arrays/state/params/scale"):
        assert first[name] == second[name] == third[name] == fourth[name]
    for name in ("arrays/state/velocity/w", "arrays/state/key"):
        assert (third[name], fourth[name]) == (first[name], second[name])
    assert first["arrays/state/velocity/w"] != second["arrays/state/velocity/w"]
    assert third["arrays/state/params/w"] == shared[0]["anchor/state/params/w"]
    assert not any(third["residuals/state/params/w"])
    assert any(first["residuals/state/params/w"])
    assert len([float(done.result) for done in run]) == 9
    assert len({bits(x["params"]["w"]) for x in run.state.replicas}) == 4
    assert int(run.state.rounds[0]) == 2


def test_devices_that_leave_at_once_take_what_their_replica_learnt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no time for an outer step; the run says how many steps are lost."""
    made = training()
    run = started(made, 10)
    for _ in range(6):
        next(run)
    before = parts(made, run.state)
    run.change({"kind": "gone", "hosts": [3], "deadline_s": 1e-9})
    run._change()
    shared, each = parts(made, run.state)
    assert shared == before[0]
    assert each == before[1][:3]
    line = [x for x in run.ledger.lines if x["kind"] == "replan"][-1]
    assert line["lost_steps"] == 2
    assert "replicas [3] leave" in caplog.text
    assert "their last 2 steps is lost" in caplog.text
    assert len(list(run)) == 4


def test_the_number_of_replicas_divides_the_batch() -> None:
    """A part of a host is no replica, and 20 rows have no 3 equal parts."""
    made = training("4:cpu", replicas=4)
    run = started(made, 4, batch=20)
    next(run)
    run.change({"kind": "gone", "devices": [2]})
    next(run)
    assert [d.id for own in made.steps for d in own.world.devices] == [0, 1]
    run.change({"kind": "gone", "devices": [0]})
    next(run)
    assert [d.id for own in made.steps for d in own.world.devices] == [1, 3]
    made = training("2x4:cpu", replicas=2)
    run = started(made, 4)
    next(run)
    run.change({"kind": "gone", "devices": [0]})
    next(run)
    assert [d.id for own in made.steps for d in own.world.devices] == [4, 5, 6, 7]
    run.change({"kind": "gone", "devices": [4]})
    next(run)
    assert "no replica of 4 devices" in run.ledger.lines[-1]["reason"]
    assert made.replicas == 1


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Any) -> None:
    straight = [float(done.result) for done in started(training(), 9)]
    run = started(training(), 6, checkpoint=tmp_path)
    losses = [float(done.result) for done in run]
    run = started(training(), 9, checkpoint=tmp_path)
    losses += [float(done.result) for done in run]
    assert losses == straight
    run = started(training("2x2:cpu"), 12, checkpoint=tmp_path)
    assert run.step == 9
    assert len(list(run)) == 3


def test_a_replica_that_is_not_finite_keeps_its_state() -> None:
    def bad(position: int, rows: int) -> Any:
        found = source(position, rows)
        if position == 2 * BATCH:
            found["x"][:6] = np.nan  # those of the first replica
        return found

    made = training()
    run = autopar.elastic(
        made, create, bad, batch=BATCH, steps=5, args=(KEY,), on_nan="skip"
    )
    finite = [next(run).finite for _ in range(3)]
    assert finite == [True, True, False]
    assert [int(x["count"]) for x in run.state.replicas] == [2, 3, 3, 3]
    run.change("2x2:cpu")
    assert [done.finite for done in run] == [True, True]
    assert [int(x["count"]) for x in run.state.replicas] == [4, 5]


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match=r"without compression= and noise_scale="):
        started(training(noise_scale=True), 3)
    with pytest.raises(PlanError, match="begin with the whole cluster"):
        started(training(autopar.Cluster.parse("4x2:cpu").without("host0")), 3)
    with pytest.raises(PlanError, match=r"use autopar\.elastic"):
        autopar.train(
            training(), create, source, base_batch=BATCH, max_batch=48, steps=3
        )  # type: ignore[call-overload]
