"""Tests that loops over layers train in stages as on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from stage_cases import LAYERS, WIDTH, batch, copied, distance, train, weights

import autopar
from autopar import Checkpoints
from autopar.cluster import Cluster
from autopar.errors import PlanError, StageError
from autopar.planner.options import PlanOptions
from autopar.planner.stages.entry import plan_pipeline
from autopar.reports.attribution import step_of
from autopar.reports.audit import LAYERS as LAYERS_SENT
from autopar.reports.staged import SENT_LAYERS, bind_stages, staged_parts
from autopar.runtime.stages.planned import WithStacked
from autopar.steps.analysis import analyse
from autopar_passes.stages.cut import Phase
from autopar_solver import Schedule, ScheduleKind

CLOSE = 2e-5
CLUSTER = Cluster.parse("2:cpu")


def layer(x, own):
    return x + jnp.tanh(x @ own["w"] + own["b"]), None


def loop_loss(params, batch, layer=layer):
    """A loss with a loop over layers, and a head outside of the loop."""
    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def case(layers=LAYERS, loop_loss=loop_loss):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def step(state, batch):
        value, grads = jax.value_and_grad(loop_loss)(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, value

    params = {
        "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *weights(layers=layers)),
        "head": jnp.eye(WIDTH),
    }
    return step, {"params": params, "moments": optimizer.init(params)}


def staged(**options):
    step, state = case()
    asked = {"stages": 2, "microbatches": 4, "cluster": "4:cpu", **options}
    return autopar.parallelize(step, **asked), copied(state)


@functools.cache
def trained(layers=LAYERS):
    step, state = case(layers)
    return train(jax.jit(step), copied(state))


@pytest.fixture(scope="module")
def one_device():
    return trained()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "gpipe"},
        {"schedule": "interleaved"},
        {"stages": 4, "schedule": "zero-bubble"},
    ],
)
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


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved"}])
def test_a_smaller_batch_runs_in_the_same_pieces(options):
    step, state = staged(**options)
    plain, expected = jax.jit(case()[0]), copied(state)
    state, _ = train(step, state, count=1)
    shardings = [x.sharding for x in jax.tree.leaves(state)]
    expected, _ = train(plain, expected, count=1)
    few = {name: x[: len(x) // 2 + 1] for name, x in batch().items()}
    state, loss = step(state, few)
    expected, wanted = plain(expected, few)
    np.testing.assert_allclose(loss, wanted, rtol=CLOSE)
    assert distance(expected, state) < CLOSE
    assert [x.sharding for x in jax.tree.leaves(state)] == shardings


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (4, 2)])
def test_chunks_of_layers_train_as_on_one_device(stages, chunks):
    layers, schedule = stages * chunks, Schedule(ScheduleKind.INTERLEAVED, chunks)
    again = functools.partial(loop_loss, layer=jax.checkpoint(layer))
    for loss in (loop_loss, again):
        step, state = case(layers, loss)
        plan = plan_pipeline(
            analyse(step, (state, batch())),
            Cluster.parse("8:cpu"),
            PlanOptions(microbatches=4),
            stages,
            schedule=schedule,
        )
        found, losses = train(autopar.parallelize(step, plan=plan), copied(state))
        expected, expected_losses = trained(layers)
        np.testing.assert_allclose(losses, expected_losses, rtol=CLOSE)
        assert distance(expected, found) < CLOSE
        # Part k is on stage k % stages, and holds layer k.
        homes = plan.pipeline.homes
        for k in range(layers):
            path = f"state/params/layers/w@{k}:{k + 1}"
            assert homes[path] == k % stages


def test_layers_that_go_to_another_stage_are_counted(monkeypatch):
    """Of four layers in turn, the second and the third."""
    step, state = staged(schedule="interleaved", cluster=CLUSTER, donate=False)
    step(state, batch())
    sent, send = [0.0, 0.0], WithStacked._send

    def counted(self, arrays, *, back):
        before = list(arrays)
        send(self, arrays, back=back)
        for old, new in zip(before, arrays, strict=True):
            if old is not None and old.devices() != new.devices():
                sent[jax.devices().index(*old.devices())] += new.nbytes

    monkeypatch.setattr(WithStacked, "_send", counted)
    step(state, batch())
    layer_bytes = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # Adam has two moments
    assert sent == [2 * layer_bytes] * 2
    audit = autopar.audit(case()[0], state, batch(), plan=step.plan)
    found = {
        (t.source, t.target): (t.predicted_bytes, t.sent_bytes)
        for t in audit.transfers
        if t.what == LAYERS_SENT
    }
    assert found == {(0, 1): (sent[0],) * 2, (1, 0): (sent[1],) * 2}
    assert audit.agrees
    bound = bind_stages(analyse(case()[0], (state, batch())), step.plan, CLUSTER)
    pipeline = step.prepare(state, batch()).pipeline
    assert len(pipeline.shown) == 1, "processes get the loss, and no layers"
    for parts in staged_parts(bound, "layer"):
        (part,) = [part for part in parts if part.what == SENT_LAYERS]
        link = CLUSTER.levels[-1].link
        # Of each array a message there and a message back.
        sent_s = 2 * 6 * link.latency_s + sent[0] / link.bandwidth_bytes_per_s
        assert part.seconds == pytest.approx(sent_s)
        assert step_of(parts) == pytest.approx(step.plan.predicted.step_s)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_saved_plan_runs_and_creates_the_state_in_its_places(
    one_device, tmp_path, schedule
):
    first, _ = staged(schedule=schedule)
    _, state = case()
    first.prepare(state, batch())
    first.plan.save(tmp_path / "plan.json")
    step = autopar.parallelize(case()[0], plan=str(tmp_path / "plan.json"))
    state = step.init(lambda: case()[1])
    w = state["params"]["layers"]["w"]
    assert w.sharding.spec[0] == "stage"
    _, losses = train(step, state)
    np.testing.assert_allclose(losses, one_device[1], rtol=CLOSE)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_state_moves_to_a_plan_of_one_stage_and_back(one_device, schedule):
    step, state = staged(schedule=schedule)
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
    """Runs one step on the rows with this number."""
    state, loss = step(state, batch(seed=number))
    return state, float(loss)


SCHEDULES = {"one": None, "1f1b": "1f1b", "chunks": "interleaved"}


@pytest.mark.parametrize("other", ["one", "1f1b"])
def test_checkpoints_are_restored_under_other_plans(one_device, tmp_path, other):
    def made(name):
        schedule = SCHEDULES[name]
        if schedule is None:
            return staged(stages=1, microbatches=1)
        return staged(schedule=schedule)

    for way in (("chunks", other), (other, "chunks")):
        (first, state), (second, start) = map(made, way)
        state, loss = one(first, 0, state)
        saved = Checkpoints(tmp_path / way[0])
        saved.save(first, state, step=1)
        saved.wait()
        second.prepare(start, batch())
        restored = saved.restore(second, lambda: case()[1]).state
        assert distance(state, restored) == 0
        _, after = one(second, 1, restored)
        np.testing.assert_allclose([loss, after], one_device[1][:2], rtol=CLOSE)


def test_chunks_are_evaluated_and_survive_a_failure(one_device):
    step, state = staged(schedule="interleaved")
    state, _ = one(step, 0, state)
    evaluate = step.jit(lambda state, batch: loop_loss(state["params"], batch))
    expected = float(loop_loss(jax.device_get(state)["params"], batch(seed=1)))
    assert float(evaluate(state, batch(seed=1))) == pytest.approx(expected, rel=CLOSE)
    pipeline = step.prepare(state, batch()).pipeline
    key = next(k for k in pipeline.calls if k.phase is Phase.BACKWARD)
    call = pipeline.calls[key]

    def broken(*_):
        raise ValueError("the device is gone")

    code = dataclasses.replace(call.code, function=broken)
    pipeline.calls[key] = dataclasses.replace(call, code=code)
    with pytest.raises(StageError, match="device is gone"):
        step(state, batch(seed=1))
    pipeline.calls[key] = call
    _, loss = one(step, 1, state)
    assert loss == pytest.approx(one_device[1][1], rel=CLOSE)


def test_more_stages_than_layers_are_refused():
    step, state = staged(stages=8, cluster="8:cpu", microbatches=4)
    with pytest.raises(PlanError, match="loops have at most 4 layers"):
        step(state, batch())


def test_chunks_are_not_split_by_layers():
    """The layers of a stage lie in their own order, and not in that of its chunks."""
    step, state = case(8)
    asked = {"stages": 2, "microbatches": 4, "schedule": "interleaved"}
    asked |= {"cluster": "4:cpu", "axis_names": ("data",)}
    whole = {"*/layers/w": P(None, "data"), "*/layers/b": P()}
    plan = autopar.plan(step, state, batch(), pins=whole, **asked)
    assert plan.home_spec("state/params/layers/w") == (("stage",), ("data",), ())
    with pytest.raises(PlanError, match=r"layers/w'?: a pin splits its layers"):
        autopar.plan(step, state, batch(), pins={"*/layers/w": P("data")}, **asked)


def test_a_loop_over_some_layers_is_refused_if_a_part_would_have_none():
    def some_layers(params, batch):
        layers = jax.tree.map(lambda x: x[:-1], params["layers"])
        return loop_loss({**params, "layers": layers}, batch)

    step, state = case(loop_loss=some_layers)
    asked = {"stages": 2, "microbatches": 4, "schedule": "interleaved"}
    with pytest.raises(PlanError, match="some part would have none"):
        autopar.plan(step, state, batch(), cluster="4:cpu", **asked)


@pytest.mark.parametrize(
    ("stages", "reverse", "schedule"),
    [(3, False, "1f1b"), (2, True, "1f1b"), (2, True, "interleaved")],
)
def test_layers_that_stages_do_not_share_equally(stages, reverse, schedule):
    """Some of the layers, in 2, 1 and 1 or the last ones first."""

    def step(state, batch):
        def loss(params):
            some = reverse and schedule == "1f1b"
            layers = jax.tree.map(lambda x: x[:-1] if some else x, params)
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
    asked = {"stages": stages, "schedule": schedule, "microbatches": 4}
    run = autopar.parallelize(step, cluster=f"{stages}:cpu", **asked)
    found, own = train(run, copied(layers))
    np.testing.assert_allclose(own, losses, rtol=CLOSE)
    assert distance(wanted, found) < CLOSE
    places = {s.device: s.data.shape[0] for s in found["w"].addressable_shards}
    if reverse:
        assert [*places.values()] == [LAYERS // 2] * 2, "each stage holds as many"
    else:
        assert [*places] == [jax.devices()[0]], "the first layer's"
