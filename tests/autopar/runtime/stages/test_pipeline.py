"""Tests that steps in stages train as on one device, under every schedule."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from stage_cases import (
    LAYERS,
    LOSSES,
    WIDTH,
    adam,
    batch,
    copied,
    distance,
    mean_loss,
    mixed_distance,
    mixed_step,
    train,
    weights,
)

import autopar
from autopar.errors import PlanError, StageError
from autopar_passes.stages.cut import Phase

# Of float32 in sums of another order.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def one_device():
    known = {}

    def trained(name):
        if name not in known:
            step, state, _ = adam(LOSSES[name])
            known[name] = train(jax.jit(step), state)
        return known[name]

    return trained


def staged(name="mean", **options):
    step, state, _ = adam(LOSSES[name])
    asked = {"stages": 2, "microbatches": 4, "cluster": "4:cpu", **options}
    return autopar.parallelize(step, **asked), copied(state)


@pytest.fixture(scope="module")
def mean_step():
    """Two stages that donate their state, planned and compiled once, and the first
    state.
    """
    step, state = staged()
    step.prepare(state, batch())
    return step, state


@pytest.fixture(scope="module")
def kept_step():
    """The same without donation."""
    step, state = staged(donate=False)
    step.prepare(state, batch())
    return step, state


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_state_are_those_of_one_device(one_device, mean_step, name):
    step, state = mean_step if name == "mean" else staged(name)
    state, losses = train(step, copied(state))
    expected, expected_losses = one_device(name)
    np.testing.assert_allclose(losses, expected_losses, rtol=CLOSE)
    assert distance(expected, state) < CLOSE
    if name == "mean":
        places = [p["w"].sharding.device_set for p in state["params"]]
        assert places[0] == set(jax.devices()[:2])
        assert places[3] == set(jax.devices()[2:4])


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"),
    [("gpipe", 2, 2), ("interleaved", 2, 4), ("zero-bubble", 4, 4)],
)
def test_every_schedule_trains_alike(one_device, schedule, stages, microbatches):
    step, state = staged(schedule=schedule, stages=stages, microbatches=microbatches)
    state, losses = train(step, state)
    np.testing.assert_allclose(losses, one_device("mean")[1], rtol=CLOSE)
    assert distance(one_device("mean")[0], state) < CLOSE
    assert step.plan.schedule == schedule
    assert len(step.plan.stages) == stages


def test_a_saved_plan_runs_without_planning(tmp_path, one_device, mean_step):
    step, _ = mean_step
    step.plan.save(tmp_path / "plan.json")
    made, state, _ = adam(mean_loss)
    again = autopar.parallelize(made, plan=str(tmp_path / "plan.json"))
    _, losses = train(again, copied(state))
    assert again.plan == step.plan
    np.testing.assert_allclose(losses, one_device("mean")[1], rtol=CLOSE)


def test_results_of_every_kind_are_those_of_one_device():
    asked = {"stages": 2, "microbatches": 4, "cluster": "4:cpu"}
    step = autopar.parallelize(mixed_step, **asked)
    assert mixed_distance(step) < CLOSE


def test_the_state_is_made_on_the_devices_of_its_stage(one_device, mean_step):
    step, _ = mean_step
    _, state, example = adam(mean_loss)
    made = step.init(lambda: state, batch=example)
    assert made["params"][3]["w"].sharding.device_set == set(jax.devices()[2:4])
    _, losses = train(step, made)
    np.testing.assert_allclose(losses, one_device("mean")[1], rtol=CLOSE)


def test_state_moves_between_one_stage_and_several(one_device):
    made, state, _ = adam(mean_loss)
    step = autopar.parallelize(made, cluster="4:cpu")
    state, _ = step(copied(state), batch(seed=0))
    plan = autopar.plan(made, state, batch(), cluster="4:cpu", stages=2, microbatches=4)
    state = step.replan("4:cpu", state, plan=plan)
    state, loss = step(state, batch(seed=1))
    assert len(step.plan.stages) == 2
    assert float(loss) == pytest.approx(one_device("mean")[1][1], rel=CLOSE)
    state = step.replan(
        "4:cpu", state, plan=autopar.plan(made, state, batch(), cluster="4:cpu")
    )
    state, loss = step(state, batch(seed=2))
    assert float(loss) == pytest.approx(one_device("mean")[1][2], rel=CLOSE)
    assert distance(one_device("mean")[0], state) < CLOSE


def test_consumed_state_is_refused_as_always(mean_step):
    step, state = mean_step
    state = copied(state)
    step(state, batch())
    with pytest.raises(PlanError, match="donate=False"):
        step(state, batch())


def test_without_donation_the_state_stays_valid(kept_step):
    step, state = kept_step
    one, first = step(state, batch())
    two, second = step(state, batch())
    assert float(first) == float(second)
    assert distance(one, two) == 0


class Issued:
    """Records the issued tasks, in order."""

    def __init__(self):
        self.keys = []

    def now(self):
        return 0.0

    def issued(self, key, *about):
        self.keys.append(key)


def test_first_stages_hold_more_activations_under_1f1b():
    step, state = staged(stages=4, microbatches=8)
    state, _ = step(state, batch())
    pipeline = step.prepare(state, batch()).pipeline
    pipeline.recorder = Issued()
    step(state, batch())
    for stage in range(4):
        own = [key for key in pipeline.recorder.keys if key.stage == stage]
        order = [key.phase for key in own if key.phase is not Phase.UPDATE]
        alive = np.cumsum([1 if p is Phase.FORWARD else -1 for p in order])
        assert max(alive) == 4 - stage


def test_a_stage_that_fails_names_itself_and_changes_nothing(kept_step):
    step, state = kept_step
    after, _ = step(state, batch())
    pipeline = step.prepare(after, batch()).pipeline
    key = next(k for k in pipeline.calls if k.stage == 1 and k.phase is Phase.BACKWARD)
    call = pipeline.calls[key]

    def broken(*_):
        raise ValueError("the device is gone")

    code = dataclasses.replace(call.code, function=broken)
    pipeline.calls[key] = dataclasses.replace(call, code=code)
    with pytest.raises(StageError, match=r"stage 1.*microbatch 0.*device is gone"):
        step(after, batch())
    pipeline.calls[key] = call
    _, loss = step(after, batch())
    assert math.isfinite(float(loss))


def test_a_task_without_results_is_not_run():
    step, state = staged(schedule="zero-bubble", donate=False)
    step(state, batch())
    pipeline = step.prepare(state, batch()).pipeline
    (key,) = [key for key, call in pipeline.calls.items() if call.idle]
    assert (key.stage, key.phase) == (0, Phase.BACKWARD_INPUT)

    def refuse(*_):
        raise AssertionError("it was run")

    call = pipeline.calls[key]
    code = dataclasses.replace(call.code, function=refuse)
    pipeline.calls[key] = dataclasses.replace(call, code=code)
    _, loss = step(state, batch())
    assert math.isfinite(float(loss))


def test_a_number_that_is_not_one_names_its_operator():
    def logarithm(params, batch):
        x = batch["x"]
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.mean(jnp.log(x - batch["y"] + 9.0))

    made, state, example = adam(logarithm)
    step = autopar.parallelize(
        made, cluster="2:cpu", stages=2, microbatches=2, donate=False
    )
    step(state, example)
    bad = {**example, "y": example["y"].copy()}
    bad["y"][-1] = 99.0
    message = r"stage 1, forward of microbatch 1.*log \(test_pipeline.py:\d+\)"
    with jax.debug_nans(True), pytest.raises(StageError, match=message):
        step(state, bad)


def test_options_of_the_calling_thread_hold_in_every_stage():
    with jax.enable_x64(True):
        made, state, example = adam(LOSSES["mean"])
        state, example = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64) if x.dtype == np.float32 else x,
            (state, example),
        )
        step = autopar.parallelize(
            made, cluster="2:cpu", stages=2, microbatches=2, donate=False
        )
        _, loss = step(state, example)
        _, expected = jax.jit(made)(state, example)
        assert float(loss) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe", "remat": "all"}])
def test_one_row_runs_in_stages(options):
    """As a batch of its own, and after batches that are in several microbatches."""
    made, state, _ = adam(LOSSES["mean"])
    alone = jax.tree.map(lambda x: x[:1], batch())
    expected, expected_losses = copied(state), []
    step, state = staged(microbatches=None, **options)
    losses = []
    for given in (alone, batch(), alone):
        state, loss = step(state, given)
        expected, expected_loss = jax.jit(made)(expected, given)
        losses.append(float(loss))
        expected_losses.append(float(expected_loss))
        assert len(step.plan.stages) == 2
    np.testing.assert_allclose(losses, expected_losses, rtol=CLOSE)
    assert distance(expected, state) < CLOSE


def test_more_microbatches_than_rows_are_refused():
    step, state = staged()
    alone = jax.tree.map(lambda x: x[:1], batch())
    with pytest.raises(PlanError, match=r"has 1 rows, which 4 does not divide.*'pad'"):
        step(state, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 3}, "equal slices"),
        ({"stages": 0}, "stages=0"),
        ({"stages": True}, "stages=True"),
        ({"stages": 2, "schedule": "dualpipe"}, "expected .gpipe"),
        ({"stages": 2, "microbatches": 3}, "3 does not divide"),
        ({"stages": 4, "schedule": "interleaved"}, "8 parts"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(options, message):
    def asked():
        step, state = staged(**options)
        return step(state, batch())

    with pytest.raises(PlanError, match=message):
        asked()


def test_a_loss_that_couples_the_batch_is_refused():
    def coupled(params, batch):
        x = batch["x"] @ params[0]["w"]
        logits = x @ x.T
        return -jax.nn.log_softmax(logits).trace()

    step, state, example = adam(coupled)
    with pytest.raises(PlanError, match="compares each row"):
        autopar.plan(step, state, example, cluster="4:cpu", stages=2, microbatches=2)


def test_what_couples_rows_is_of_each_microbatch_where_that_is_asked_for():
    """As with one stage and as many microbatches."""

    def centred(params, batch):
        x = batch["x"]
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
            x = x - jnp.mean(x, axis=0)
        return jnp.mean((x - batch["y"]) ** 2)

    made, state, example = adam(centred)
    losses: list[list[float]] = []
    for stages in (1, 2):
        step = autopar.parallelize(
            made,
            cluster="2:cpu",
            stages=stages,
            microbatches=2,
            coupled="microbatch",
            donate=False,
        )
        after, first = step(state, example)
        losses.append([float(first), float(step(after, example)[1])])
    assert losses[1] == pytest.approx(losses[0], rel=CLOSE)
    assert step.plan.local


def test_activations_that_are_computed_again_are_the_same(one_device):
    made, state, example = adam(mean_loss)
    asked = {"cluster": "4:cpu", "stages": 2, "microbatches": 4}
    asked |= {"schedule": "zero-bubble"}
    plan = autopar.plan(made, state, example, **asked)
    every = tuple(range(len(plan.pipeline.layers)))
    again = msgspec.structs.replace(plan.pipeline, recomputed=every)
    plan = msgspec.structs.replace(plan, pipeline=again).with_checks()
    step = autopar.parallelize(made, plan=plan)
    state, losses = train(step, copied(state))
    np.testing.assert_allclose(losses, one_device("mean")[1], rtol=CLOSE)
    assert distance(one_device("mean")[0], state) < CLOSE


def test_state_on_several_stages_is_evaluated(kept_step):
    step, state = kept_step
    state, _ = step(state, batch())

    def evaluate(state, batch):
        return mean_loss(state["params"], batch), state["params"][-1]["b"]

    evaluated = step.jit(evaluate)
    loss, bias = evaluated(state, batch(seed=1))
    again, _ = step(state, batch(seed=1))  # nothing was consumed or moved
    expected = mean_loss(jax.device_get(state["params"]), batch(seed=1))
    np.testing.assert_allclose(loss, expected, rtol=CLOSE)
    np.testing.assert_array_equal(bias, state["params"][-1]["b"])
    np.testing.assert_allclose(
        evaluated(again, batch(seed=1))[0],
        mean_loss(jax.device_get(again["params"]), batch(seed=1)),
        rtol=CLOSE,
    )


def test_a_transformed_step_of_stages_runs_as_it_is_written(one_device, kept_step):
    step, state = kept_step

    def twice(state):
        return jax.lax.scan(lambda s, _: step(s, batch(seed=0)), state, None, 2)

    _, losses = jax.jit(twice)(state)
    np.testing.assert_allclose(losses[0], one_device("mean")[1][0], rtol=CLOSE)


def dropout_step(state, batch):
    """A step with dropout masks that are drawn for rows."""
    key, now = jax.random.split(state["key"])

    def loss_of(params):
        x = batch["x"]
        for k, p in enumerate(params):
            x = x + jax.numpy.tanh(x @ p["w"] + p["b"])
            kept = jax.random.bernoulli(jax.random.fold_in(now, k), 0.7, x.shape)
            x = jax.numpy.where(kept, x, 0)
        return jax.numpy.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "key": key}, loss


def statistics_step(state, batch):
    """A step with batch normalisation whose averages are carried."""

    def loss_of(params):
        x, means = batch["x"], []
        for p, old in zip(params, state["means"], strict=True):
            x = jax.numpy.tanh(x @ p["w"])
            mean, var = x.mean(0), x.var(0)
            means.append(0.9 * old + 0.1 * jax.numpy.stack([mean, var]))
            x = (x - mean) * jax.lax.rsqrt(var + 1e-3) + p["b"]
        return jax.numpy.mean((x - batch["y"]) ** 2), means

    (loss, means), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "means": means}, loss


def test_dropout_is_that_of_one_device():
    made = autopar.parallelize(dropout_step, cluster="4:cpu", stages=2, microbatches=4)
    found = []
    for step in (jax.jit(dropout_step), made):
        found.append(train(step, {"params": weights(), "key": jax.random.key(5)}))
    (one, expected), (two, losses) = found
    np.testing.assert_allclose(losses, expected, rtol=CLOSE)
    assert distance(one["params"], two["params"]) < CLOSE


def test_what_is_of_each_microbatch_is_that_of_one_stage():
    means = [jax.numpy.zeros((2, WIDTH)) for _ in range(LAYERS)]
    found = []
    for stages in (1, 2):
        made = autopar.parallelize(
            statistics_step, cluster="4:cpu", stages=stages, microbatches=4
        )
        found.append(train(made, copied({"params": weights(), "means": means})))
    (one, expected), (two, losses) = found
    np.testing.assert_allclose(losses, expected, rtol=CLOSE)
    assert distance(one, two) < CLOSE
