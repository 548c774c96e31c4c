"""Tests tracing: the three forms of steps, their carried state, and errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

from autopar_errors import TraceError
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.trace import TracedStep, trace


def roles(graph: OperatorGraph) -> dict[str, InputRole]:
    return {i.path: i.role for i in graph.inputs}


def kinds(graph: OperatorGraph, role: InputRole) -> set[str]:
    return {path for path, r in roles(graph).items() if r is role}


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))
        return linen.Dense(4)(x)


class State(train_state.TrainState):
    batch_stats: Any


def linen_step() -> TracedStep:
    model, optimizer = Net(), optax.adam(1e-2)

    def init() -> State:
        variables = model.init(jax.random.key(0), jnp.zeros((2, 4)))
        return State.create(apply_fn=model.apply, tx=optimizer, **variables)

    def step(state: State, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["x"],
                mutable=["batch_stats"],
            )
            return jnp.mean((out - batch["y"]) ** 2), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return state, {"loss": value}

    batch = {"x": jnp.zeros((8, 4)), "y": jnp.zeros((8, 4))}
    return trace(step, (jax.eval_shape(init), batch))


def test_linen_train_state() -> None:
    traced = linen_step()
    graph = step_graph(traced)

    parameters = {
        f"state/params/{layer}/{name}"
        for layer, names in (
            ("BatchNorm_0", ("bias", "scale")),
            ("Dense_0", ("bias", "kernel")),
            ("Dense_1", ("bias", "kernel")),
        )
        for name in names
    }
    assert kinds(graph, InputRole.PARAMETER) == parameters
    assert kinds(graph, InputRole.BATCH) == {"batch/x", "batch/y"}
    moments = kinds(graph, InputRole.OPTIMIZER_STATE)
    assert len([p for p in moments if "/mu/" in p]) == len(parameters)
    assert len([p for p in moments if "/nu/" in p]) == len(parameters)
    statistics = {
        p
        for p, r in roles(graph).items()
        if "batch_stats" in p and r is InputRole.OTHER
    }
    assert len(statistics) == 2
    state = [i for i in graph.inputs if i.path.startswith("state/")]
    assert all(i.output >= 0 for i in state)
    assert all(i.output < 0 for i in graph.inputs if i.path.startswith("batch/"))


def test_linen_module_paths_reach_operators() -> None:
    modules = {op.module for op in step_graph(linen_step()).operators}

    assert "Net/Dense_0" in modules
    assert "Net/BatchNorm_0" in modules


def test_plain_tuple() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((batch @ params["w"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    params = {"w": jnp.zeros((4, 4))}
    graph = step_graph(trace(step, (params, optimizer.init(params), jnp.zeros((8, 4)))))

    assert kinds(graph, InputRole.PARAMETER) == {"params/w"}
    assert kinds(graph, InputRole.BATCH) == {"batch"}
    (trace_path,) = kinds(graph, InputRole.OPTIMIZER_STATE)
    assert trace_path.endswith("trace/w")


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(self.first(x)))


def test_nnx_model_and_optimizer() -> None:
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model: NnxNet, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        def loss(model: NnxNet) -> jax.Array:
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    before = jax.tree.map(jnp.copy, nnx.state(model))
    traced = trace(
        step, (model, optimizer, {"x": jnp.zeros((8, 4)), "y": jnp.zeros((8, 4))})
    )
    graph = step_graph(traced)

    assert traced.form.objects
    assert len(kinds(graph, InputRole.PARAMETER)) == 6
    assert len(kinds(graph, InputRole.OPTIMIZER_STATE)) >= 12
    assert kinds(graph, InputRole.BATCH) == {"batch/x", "batch/y"}
    assert any(op.module.endswith("first") for op in graph.operators)
    after = nnx.state(model)
    assert all(map(jnp.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))


def test_only_shapes_are_needed() -> None:
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)

    graph = step_graph(trace(lambda w: w * 2.0, (huge,)))

    assert graph.values[graph.inputs[0].value].nbytes == 4 << 40


def test_an_argument_that_changes_shape_is_not_carried() -> None:
    traced = trace(lambda x: x[:2], (jnp.zeros(4),))

    assert traced.carried == {}


def test_control_flow_on_values_is_explained() -> None:
    def branchy(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(
        TraceError, match="the step 'branchy' cannot be traced"
    ) as found:
        trace(branchy, (jnp.zeros(3),))

    assert "try: jax.jit(branchy).trace" in str(found.value)


class Text:
    """An object that is neither an array nor a function."""


def test_an_argument_that_is_no_array_is_explained() -> None:
    def labelled(x: jax.Array, label: Any) -> jax.Array:
        del label
        return x

    with pytest.raises(TraceError, match=r"'labelled'.*'label/a' is of type Text"):
        trace(labelled, (jnp.zeros(3), {"a": Text()}))


def test_the_users_own_error_is_not_hidden() -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        trace(broken, (jnp.zeros(3),))
