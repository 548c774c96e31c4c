"""Tests pipelines of equal stages, as people write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Cluster
from autopar.planner.options import PlanOptions
from autopar.planner.search import candidate_meshes
from autopar.planner.stages.hand_made import hand_made, pipeline_recipes
from autopar.runtime.timing import measure_plans
from autopar.steps.analysis import analyse

WIDTH = 16


def step(layers, batch):
    """A step of dense layers."""

    def loss(layers):
        x = batch["x"]
        for w in layers:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value


def weights(stage):
    """Path -> layout of the weights of a stage's layers."""
    return [(p, s) for p, s in stage.inputs.items() if p.startswith("layers")]


@pytest.fixture(scope="module")
def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    layers = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys]
    return layers, {"x": jax.random.normal(keys[0], (16, WIDTH))}


@pytest.fixture(scope="module")
def made(arguments):
    options = PlanOptions(seconds=2.0)
    return hand_made(analyse(step, arguments), Cluster.parse("4:cpu"), options)


def test_every_number_of_equal_stages_has_its_rules(made):
    assert {(m.stages, m.name) for m in made if m.plan is not None} == {
        (2, "pipeline x data"),
        (2, "pipeline x tensor"),
        (4, "pipeline"),
    }
    for found in made:
        assert len(found.plan.stages) == found.stages
        assert len({len(s.devices) for s in found.plan.stages}) == 1


def test_a_rule_says_what_the_devices_of_a_stage_split():
    """On layers that are worth splitting either way."""
    layers = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((32768, 8192), jnp.float32)}
    found = hand_made(
        analyse(step, (layers, batch)),
        Cluster.parse("4:a100"),
        PlanOptions(seconds=2.0, microbatches=4),
        most_stages=2,
    )
    by_name = {m.name: m.plan.stages for m in found}
    split = {
        name: [any(spec) for stage in stages for _, spec in weights(stage)]
        for name, stages in by_name.items()
    }
    assert split == {"pipeline x data": [False] * 4, "pipeline x tensor": [True] * 4}
    rows = {name: stages[0].inputs["batch/x"][0] for name, stages in by_name.items()}
    assert rows == {"pipeline x data": ("data",), "pipeline x tensor": ()}


def test_tensors_are_split_within_hosts_alone():
    cluster = Cluster.parse("2x4:cpu")
    for mesh in candidate_meshes(cluster):
        for recipe in pipeline_recipes(mesh, cluster):
            for axis in recipe.tensor:
                assert mesh.axes[axis].link == cluster.levels[-1].link
    names = {
        recipe.name
        for mesh in candidate_meshes(cluster)
        for recipe in pipeline_recipes(mesh, cluster)
    }
    assert names == {"pipeline x data", "pipeline x data x tensor"}


def test_a_pipeline_made_by_hand_runs(made, arguments):
    plan = next(m.plan for m in made if m.name == "pipeline x tensor")
    run = autopar.parallelize(step, plan=plan, donate=False)
    _, loss = run(*arguments)
    _, expected = step(*arguments)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_pipelines_are_timed_beside_other_plans(made, arguments):
    analysis = analyse(step, arguments)
    plans = {m.name: m.plan for m in made if m.name == "pipeline x data"}
    plans["one stage"] = autopar.plan(step, *arguments, cluster="4:cpu")
    took = measure_plans(analysis, plans, repeats=1, steps=2)
    assert sorted(took) == ["one stage", "pipeline x data"]
    assert min(took.values()) > 0


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_with_codecs_are_timed(stages):
    layers = [jnp.eye(64) for _ in range(2)]
    arguments = layers, {"x": np.ones((2048, 64), np.float32)}
    plan = autopar.plan(
        step, *arguments, cluster="4:cpu", compression="int8", axis_names=("data",),
        pins={"*/x": P("data")}, stages=stages, microbatches=2,
    )  # fmt: skip
    assert plan.gradients
    took = measure_plans(analyse(step, arguments), {"int8": plan}, repeats=1, steps=2)
    assert took["int8"] > 0


def test_a_step_that_cannot_be_split_says_why(arguments):
    def coupled(layers, batch):
        def loss(layers):
            x = batch["x"] @ layers[0]
            return -jax.nn.log_softmax(x @ x.T).trace()

        value, grads = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value

    analysis = analyse(coupled, arguments)
    found = hand_made(analysis, Cluster.parse("2:cpu"), PlanOptions(seconds=2.0))
    assert [m.plan for m in found] == [None]
    assert found[0].reason
