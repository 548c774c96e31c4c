"""Tests that stages sum their gradients by codecs as one stage does."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from stage_cases import distance

import autopar
from autopar.errors import PlanError
from autopar.runtime.gradients.codec_state import carry_over, regroup_gradients

WIDTH, ROWS = 32, 512
# Of float32 in sums of another order.
CLOSE = 2e-5
# Stages of two hosts each, so that gradients cross the slow links.
HOSTS = "4x1:cpu,network=100Mb/s"
SPLIT = {"axis_names": ("data",), "pins": {"batch/*": P("data")}}
TOPK = "topk:ratio=0.1"


def weights(count=4):
    keys = jax.random.split(jax.random.key(0), count)
    return [0.2 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]


def batch(seed, bad=False):
    x, y = np.random.default_rng(seed).standard_normal((2, ROWS, WIDTH))
    return {"x": x.astype("f4") * (np.nan if bad else 1), "y": y.astype("f4")}


def descended(loss):
    """``step(state, batch)`` with momentum, which is state beside the parameters."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, state["speed"], grads)
        params = jax.tree.map(lambda p, v: p - 0.1 * v, state["params"], speed)
        count = state["count"] + 1
        return {"params": params, "speed": speed, "count": count}, value

    return step


def started(params):
    speed = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "speed": speed, "count": jnp.int32(0)}


def chain_loss(params, batch):
    x = batch["x"]
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def tied_loss(params, batch):
    x = batch["x"] @ params["table"]
    for w in params["ws"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x @ params["table"].T - batch["y"]) ** 2)


def loop_loss(params, batch):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, batch["x"], params["w"])
    return jnp.mean((x - batch["y"]) ** 2)


STATES = {
    chain_loss: weights,
    tied_loss: lambda: {"table": weights()[0], "ws": weights()[1:]},
    loop_loss: lambda: {"w": jnp.stack(weights())},
}


def staged(loss=chain_loss, codec=TOPK, **options):
    asked = {"stages": 2, "microbatches": 2, "cluster": HOSTS, **SPLIT, **options}
    step = autopar.parallelize(descended(loss), compression=codec, **asked)
    return step, started(STATES[loss]())


def whole(loss=chain_loss, codec=TOPK, **options):
    """One stage that splits the batch over as many devices as each stage has."""
    asked = {"cluster": "1x2:cpu", "microbatches": 2, "telemetry_every": 1, **SPLIT}
    asked |= options
    step = autopar.parallelize(descended(loss), compression=codec, **asked)
    return step, started(STATES[loss]())


def train(step, state, seeds):
    losses = []
    for seed in seeds:
        state, loss = step(state, batch(seed))
        losses.append(float(loss))
    return state, losses


def unsent(step):
    """The residual of each gradient, summed over the workers."""
    kept = step.compression_state["gradients"]
    return {k: np.asarray(x["residual"]).sum(0) for k, x in kept.items()}


@pytest.fixture(scope="module")
def one_stage():
    step, state = whole()
    return step, *train(step, state, range(3))


def test_stages_train_as_one_stage_with_the_codec(one_stage):
    step, state = staged()
    one, same, expected = one_stage
    state, losses = train(step, state, range(3))
    np.testing.assert_allclose(losses, expected, rtol=CLOSE)
    assert distance(same, state) < CLOSE
    assert {g.codec for g in step.plan.gradients} == {TOPK}
    found, wanted = step.telemetry, one.telemetry
    assert found.keys() == wanted.keys()
    for name, report in found.items():
        assert report.relative_error == pytest.approx(
            wanted[name].relative_error, rel=1e-3
        )
        assert report.residual_norm == pytest.approx(
            wanted[name].residual_norm, rel=1e-3, abs=1e-6
        )


@pytest.mark.parametrize(
    ("loss", "schedule"),
    [
        (chain_loss, "interleaved"),
        (chain_loss, "zero-bubble"),
        # The gradient of each chunk is that of one layer.
        (loop_loss, "interleaved"),
    ],
)
def test_every_schedule_sends_the_same(loss, schedule, one_stage):
    _, _, expected = one_stage
    _, losses = train(*staged(loss, schedule=schedule), range(3))
    np.testing.assert_allclose(losses, expected, rtol=CLOSE)


def test_the_parts_of_a_tied_parameter_are_sent_each_by_its_stage():
    step, state = staged(tied_loss, "int8")
    state, losses = train(step, state, range(3))
    _, plain = train(jax.jit(descended(tied_loss)), started(STATES[tied_loss]()), [0])
    assert losses[0] == pytest.approx(plain[0], rel=CLOSE)
    names = {g.name for g in step.plan.gradients if g.codec == "int8"}
    assert {n for n in names if "table" in n} == {
        "state/params/table (stage 0)",
        "state/params/table (stage 1)",
    }
    assert losses[2] < losses[0]


@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 2), ("interleaved", 1)])
def test_what_was_not_sent_is_kept_with_the_layers_of_a_loop(schedule, each):
    """From pieces of two stages to one array."""
    step, state = staged(loop_loss, schedule=schedule)
    state, _ = train(step, state, range(2))
    pieces = unsent(step)
    names = [f"state/params/w@{k}:{k + each}" for k in range(0, 4, each)]
    assert {*pieces} == {*names}
    before = np.concatenate([pieces[name] for name in names])
    one, _ = whole(loop_loss)
    plan = one.compile(state, batch(0))
    state = step.replan("1x2:cpu", state, plan=plan)
    kept = step.compression_state
    state, loss = step(state, batch(2))
    saved = unsent(step)
    assert [*saved] == ["state/params/w"]
    assert np.isfinite(float(loss))
    # A gradient of zero leaves what was kept as it is, but for what is sent of it.
    assert np.linalg.norm(saved["state/params/w"]) > 0
    assert kept["step"] == 2
    moved = carry_over(kept, step.running.planned.sums)
    total = np.asarray(moved["gradients"]["state/params/w"]["residual"]).sum(0)
    np.testing.assert_allclose(total, before, atol=1e-6)


def test_layers_without_a_residual_count_as_zeros():
    """Of pieces of which some were sent whole, and to pieces that are sent whole."""
    struct = jax.ShapeDtypeStruct
    rows = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    old = {"w@0:2": (), "w@2:4": 1.0 * rows[None, 2:]}
    given = {name: {"residual": x, "codec": ()} for name, x in old.items()}
    cases = {
        "w": struct((2, 4, 2), np.float32),
        "w@1:3": struct((1, 2, 2), np.float32),
        "w@3:4": (),
    }
    wanted = [{"w": cases["w"]}, {name: cases[name] for name in ("w@1:3", "w@3:4")}]
    found = {
        name: x["residual"]
        for own in wanted
        for name, x in regroup_gradients(
            given, {name: {"residual": s, "codec": ()} for name, s in own.items()}
        ).items()
    }
    total = np.concatenate([np.zeros((2, 2)), rows[2:]])
    np.testing.assert_array_equal(found["w"][0], total)
    np.testing.assert_array_equal(found["w@1:3"][0], total[1:3])
    np.testing.assert_array_equal(found["w@3:4"][0], total[3:])


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_stages():
    step, state = staged()
    state, _ = train(step, state, range(2))
    before, kept = jax.device_get(state), unsent(step)
    state, value = step(state, batch(2, bad=True))
    with pytest.warns(UserWarning, match="step 3: the gradients of .* not finite"):
        reports = step.telemetry
    assert {report.skipped for report in reports.values()} == {1}
    assert np.isnan(float(value))
    assert distance(before, state) == 0
    for name, residual in unsent(step).items():
        np.testing.assert_array_equal(residual, kept[name])
    _, losses = train(step, state, [3])
    assert np.isfinite(losses[0])


def test_a_saved_state_of_codecs_goes_on_as_if_nothing_had_happened():
    step, state = staged()
    state, _ = train(step, state, range(2))
    saved, copy = jax.device_get(step.compression_state), jax.device_get(state)
    _, expected = train(step, state, range(2, 4))
    again = autopar.parallelize(descended(chain_loss), plan=step.plan)
    again.compression_state = saved
    _, losses = train(again, jax.tree.map(jnp.asarray, copy), range(2, 4))
    assert losses == expected


def test_codecs_are_changed_while_training():
    step, state = staged()
    state, _ = train(step, state, [0])
    name, other = "state/params/3", "state/params/0"
    step.recode({name: "int8"})
    step.recode({other: "topk:ratio=0.2"}, often=True)
    state, _ = train(step, state, [1])
    found = {g.name: g for g in step.plan.gradients}
    assert step.telemetry[name].codec == found[name].codec == "int8"
    assert (found[other].codec, found[name].limit) == ("topk:ratio=0.2", "")
    assert found[other].limit
    programs = len(step._store)
    step.recode({other: "topk:ratio=0.21"}, often=True)
    assert len(step._store) == programs
    step.recode("auto")
    assert len(step.plan.stages) == 2
    assert step.plan.compression.mode == "auto"
    with pytest.raises(PlanError, match="no compressed gradient named nobody"):
        step.recode({"nobody": "int8"})


def test_a_fallback_is_taken_by_each_stage():
    step, state = staged(fallback=("int8",))
    train(step, state, range(2))
    assert {report.taken for report in step.telemetry.values()} == {(0, 2)}


class Asking:
    """A policy that requests errors and signals, and changes nothing."""

    signals, probes, every = True, ("int8", TOPK), 2

    def __init__(self):
        self.seen = []

    def observe(self, seen):
        self.seen.append(seen)


@pytest.mark.parametrize("loss", [chain_loss, loop_loss])
def test_a_policy_tries_codecs_and_reads_signals_as_in_one_stage(loss):
    """What a codec in use would lose is what the step then reports."""
    step, state = staged(loss, policy=Asking())
    train(step, state, range(2))
    (seen,) = step._codecs.policy.seen
    assert set(seen.measured) == set(seen.gradients)
    for name, found in seen.measured.items():
        int8, used = found.choices
        assert int8.error < used.error
        assert used.error == pytest.approx(
            seen.gradients[name].relative_error, rel=1e-3
        )
        assert seen.gradients[name].signal is not None
    if loss is chain_loss:
        policy = Asking()
        train(*whole(loss, policy=policy), range(2))
        (one,) = policy.seen
        for name, found in one.measured.items():
            errors = [choice.error for choice in seen.measured[name].choices]
            assert errors == pytest.approx([c.error for c in found.choices], rel=1e-2)
            mine, theirs = (x.gradients[name].signal for x in (seen, one))
            assert mine.sent == pytest.approx(theirs.sent, rel=1e-2)
            assert mine.sent_square == pytest.approx(theirs.sent_square, rel=1e-2)


def test_codecs_save_what_the_plan_says_and_no_warning_is_given():
    asked = {"cluster": HOSTS, "stages": 2, "microbatches": 2, **SPLIT}
    step, state = descended(chain_loss), started(weights())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = autopar.plan(step, state, batch(0), **asked)
        coded = autopar.plan(step, state, batch(0), compression="int8", **asked)
        chosen = autopar.plan(step, state, batch(0), compression="auto", **asked)
    assert not plain.gradients
    assert coded.predicted.step_s < plain.predicted.step_s
    assert chosen.predicted.step_s <= coded.predicted.step_s
    assert chosen.compression.error <= chosen.compression.error_budget
    assert "codecs save" in chosen.compression.reason
