"""Loops over layers train in stages as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stage_cases import LAYERS, WIDTH, batch, copied, distance, train, weights

import autopar
from autopar.errors import PlanError

CLOSE = 2e-5


def loop_loss(params, batch):
    """Layers one after the other, in a loop, and a head that is none of them."""

    def layer(x, own):
        return x + jnp.tanh(x @ own["w"] + own["b"]), None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def case():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def step(state, batch):
        value, grads = jax.value_and_grad(loop_loss)(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, value

    params = {
        "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *weights()),
        "head": jnp.eye(WIDTH),
    }
    return step, {"params": params, "moments": optimizer.init(params)}


def staged(**options):
    step, state = case()
    asked = {"stages": 2, "microbatches": 4, "cluster": "4:cpu", **options}
    return autopar.parallelize(step, **asked), copied(state)


@pytest.fixture(scope="module")
def one_device():
    step, state = case()
    return train(jax.jit(step), copied(state))


@pytest.mark.parametrize("options", [{}, {"stages": 4, "schedule": "zero-bubble"}])
def test_losses_and_state_are_those_of_one_device(one_device, options):
    step, state = staged(**options)
    state, losses = train(step, state)
    expected, expected_losses = one_device
    np.testing.assert_allclose(losses, expected_losses, rtol=CLOSE)
    assert distance(expected, state) < CLOSE
    w = state["params"]["layers"]["w"]
    assert w.shape == (LAYERS, WIDTH, WIDTH)
    assert len(w.sharding.device_set) == 4
    own = {shard.data.shape[0] for shard in w.addressable_shards}
    assert own == {LAYERS // step.plan.home_axes[-1][0][1]}, "each stage has its layers"


def test_a_saved_plan_runs_and_creates_the_state_in_its_places(one_device, tmp_path):
    first, _ = staged()
    _, state = case()
    first.prepare(state, batch())
    first.plan.save(tmp_path / "plan.json")
    step = autopar.parallelize(case()[0], plan=str(tmp_path / "plan.json"))
    state = step.init(lambda: case()[1])
    w = state["params"]["layers"]["w"]
    assert w.sharding.spec[0] == "stage"
    _, losses = train(step, state)
    np.testing.assert_allclose(losses, one_device[1], rtol=CLOSE)


def test_the_state_moves_to_a_plan_of_one_stage_and_back(one_device):
    step, state = staged()
    state, loss = one(step, 0, state)
    pipeline = step.plan
    single = autopar.plan(case()[0], state, batch(), cluster="4:cpu")
    state = step.replan("4:cpu", state, plan=single)
    assert len(step.plan.stages) == 1
    state, second = one(step, 1, state)
    state = step.replan("4:cpu", state, plan=pipeline)
    assert state["params"]["layers"]["w"].sharding.spec[0] == "stage"
    _, third = one(step, 2, state)
    np.testing.assert_allclose([loss, second, third], one_device[1], rtol=CLOSE)


def one(step, number, state):
    """One step on the rows of that number."""
    state, loss = step(state, batch(seed=number))
    return state, float(loss)


def test_layers_in_turn_are_refused():
    step, state = staged(schedule="interleaved")
    with pytest.raises(PlanError, match=r"stacked layers.*schedule='1f1b'"):
        step(state, batch())


def test_more_stages_than_layers_are_refused():
    step, state = staged(stages=8, cluster="8:cpu", microbatches=4)
    with pytest.raises(PlanError, match="loops have at most 4 layers"):
        step(state, batch())


@pytest.mark.parametrize(("stages", "reverse"), [(3, False), (2, True)])
def test_layers_that_stages_do_not_share_equally(stages, reverse):
    """Some of the layers, in 2, 1 and 1 or the last ones first."""

    def step(state, batch):
        def loss(params):
            layers = jax.tree.map(lambda x: x[:-1] if reverse else x, params)
            x, _ = jax.lax.scan(
                lambda x, own: (x + jnp.tanh(x @ own["w"] + own["b"]), None),
                batch["x"],
                layers,
                reverse=reverse,
            )
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *weights())
    wanted, losses = train(jax.jit(step), copied(layers))
    run = autopar.parallelize(
        step, stages=stages, cluster=f"{stages}:cpu", microbatches=4
    )
    found, own = train(run, copied(layers))
    np.testing.assert_allclose(own, losses, rtol=CLOSE)
    assert distance(wanted, found) < CLOSE
    (home,) = found["w"].sharding.device_set
    assert home == jax.devices()[stages - 1 if reverse else 0], "the first layer's"
