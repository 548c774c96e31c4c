"""Tests methods as steps, evaluation under the training plan, and compiling ahead."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_forms as forms
from flax import nnx
from jax.sharding import PartitionSpec as P

import autopar
from autopar import PlanError

CLUSTER = forms.cheap("8:cpu")
PINS = {"batch/*": P("data"), "params/up": P(None, "data")}


class Trainer:
    """An object that holds what the step reads, as trainers do."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    @autopar.parallelize(cluster=CLUSTER)
    def step(self, w: Any, batch: Any) -> Any:
        """Moves towards the batch."""
        grad = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)
        return w - self.rate * grad, grad.sum()


class TestMethods:
    def test_each_object_has_a_step(self) -> None:
        batch, w = next(forms.batches(1)), jnp.eye(forms.WIDTH)
        slow, fast = Trainer(0.0), Trainer(1.0)
        assert slow.step is slow.step
        assert slow.step is not fast.step
        np.testing.assert_array_equal(slow.step(np.asarray(w), batch)[0], w)
        assert not np.array_equal(fast.step(np.asarray(w), batch)[0], w)
        assert slow.step.plan.structure == fast.step.plan.structure
        assert Trainer.step.__doc__ == "Moves towards the batch."

    def test_a_module_is_the_state(self) -> None:
        class Model(nnx.Module):
            def __init__(self) -> None:
                self.w = nnx.Param(jnp.eye(forms.WIDTH))
                self.optimizer = nnx.Optimizer(self, optax.sgd(0.1), wrt=nnx.Param)

            @autopar.parallelize(cluster=CLUSTER)
            def train(self, batch: Any) -> Any:
                self.w[...] = self.w[...] * 0.5
                return (batch["x"] @ self.w[...]).sum()

        model = Model()
        for k in (1, 2):
            model.train(next(forms.batches(1)))
            assert model.w[0, 0] == 0.5**k

    def test_static_arguments_of_a_jitted_method(self) -> None:
        class Repeated:
            @autopar.parallelize(cluster=CLUSTER, donate=False)
            @functools.partial(jax.jit, static_argnames=("self", "times"))
            def step(self, w: Any, x: Any, times: int) -> Any:
                for _ in range(times):
                    w = w * 2
                return w, x.sum()

        step, w, x = Repeated().step, jnp.ones((8, 8)), jnp.ones((16, 8))
        assert [float(step(w, x, k)[0][0, 0]) for k in (1, 3)] == [2, 8]

    def test_no_place_for_it(self) -> None:
        class Tight:
            __slots__ = ()

            @autopar.parallelize(cluster=CLUSTER)
            def step(self, w: Any) -> Any:
                return w

        with pytest.raises(PlanError, match=r"a Tight, has no __dict__.*functools"):
            Tight().step(jnp.ones(8))


def evaluate(params: Any, batch: Any, *, scale: float = 1.0) -> Any:
    hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
    each = ((hidden @ params["down"] - batch["y"]) ** 2).mean(axis=1)
    return {"loss": scale * each.mean(), "each": each}


class TestEvaluation:
    @pytest.fixture
    def step(self) -> Any:
        return autopar.parallelize(forms.plain_step, cluster=CLUSTER, pins=PINS)

    @pytest.mark.parametrize("rows", [24, 16, 5])
    def test_in_the_layouts_of_training(self, step: Any, rows: int) -> None:
        params, opt_state = step.init(
            forms.create_plain, jax.random.key(0), batch=next(forms.batches(1))
        )
        before = [x.sharding for x in jax.tree.leaves(params)]
        batch = next(forms.batches(1, rows=rows))
        found = step.jit(evaluate)(params, batch)
        want = evaluate(forms.create_plain(jax.random.key(0))[0], batch)
        np.testing.assert_allclose(found["each"], want["each"], rtol=1e-5)
        assert [x.sharding for x in jax.tree.leaves(params)] == before
        assert found["each"].sharding.spec == (P("data") if rows % 8 == 0 else P())
        *_, loss = step(params, opt_state, next(forms.batches(1)))
        assert np.isfinite(loss)

    def test_compiles_once(self, step: Any) -> None:
        params, _ = step.init(
            forms.create_plain, jax.random.key(0), batch=next(forms.batches(1))
        )
        run = step.jit(evaluate, static_argnames="scale")
        losses = [run(params, b, scale=2.0)["loss"] for b in forms.batches(3)]
        assert len(set(map(float, losses))) == 3
        assert len(run._compiled) == 1
        assert run.__name__ == "evaluate"

    def test_metrics_are_updated(self) -> None:
        step = autopar.parallelize(forms.nnx_step, cluster=CLUSTER)
        batch = next(forms.batches(1))
        state = step.init(forms.create_nnx, jax.random.key(0), batch=batch)
        metrics = nnx.metrics.Average("loss")

        def score(model: Any, metrics: Any, batch: Any) -> None:
            metrics.update(loss=((model(batch["x"]) - batch["y"]) ** 2).mean())

        run = step.jit(score)
        for b in forms.batches(2):
            run(state[0], metrics, b)
        alone, want = (
            forms.create_nnx(jax.random.key(0))[0],
            nnx.metrics.Average("loss"),
        )
        for b in forms.batches(2):
            score(alone, want, b)
        np.testing.assert_allclose(metrics.compute(), want.compute(), rtol=1e-5)

    def test_written_for_pmap(self, step: Any) -> None:
        params, _ = step.init(
            forms.create_plain, jax.random.key(0), batch=next(forms.batches(1))
        )

        def averaged(params: Any, batch: Any) -> Any:
            found = jax.lax.pmean(evaluate(params, batch), "batch")
            rows = jax.lax.psum(batch["x"].shape[0], "hosts")
            first = jax.lax.axis_index("batch") == 0
            every = jax.lax.all_gather(found["each"], "batch")
            return found, rows, first, every

        batches = list(forms.batches(2))
        run = step.jit(averaged)
        for batch in batches:
            found, rows, first, every = run(params, batch)
            want = step.jit(evaluate)(params, batch)
            np.testing.assert_array_equal(found["loss"], want["loss"])
            np.testing.assert_array_equal(every, want["each"][None])
            assert found["each"].sharding == want["each"].sharding
            assert (int(rows), bool(first)) == (len(batch["x"]), True)
        assert len(run._compiled) == 1
        assert run._compiled.peek(next(iter(run._compiled)))[0]._cache_size() == 1
        assert run.__name__ == "averaged"

    def test_names_that_are_wrong_otherwise(self, step: Any) -> None:
        def wrong(params: Any, batch: Any) -> Any:
            raise NameError("name 'nothing' is not defined")

        step.prepare(*forms.create_plain(jax.random.key(0)), forms.batch_structs())
        with pytest.raises(NameError, match="name 'nothing' is not defined"):
            step.jit(wrong)({}, {})

    def test_a_pmap(self, step: Any) -> None:
        with pytest.raises(
            PlanError, match=r"is a jax\.pmap: pass the function itself"
        ):
            step.jit(jax.pmap(evaluate, axis_name="batch"))

    def test_before_there_is_a_plan(self, step: Any) -> None:
        with pytest.raises(PlanError, match="no plan yet: call the step first"):
            step.jit(evaluate)({}, {})


class TestShardings:
    def test_of_state(self) -> None:
        step = autopar.parallelize(forms.plain_step, cluster=CLUSTER, pins=PINS)
        shapes = jax.eval_shape(forms.create_plain, jax.random.key(0))
        step.prepare(*shapes, forms.batch_structs())
        params, opt_state = step.shardings(shapes)
        assert params["up"].spec == P(None, "data")
        assert jax.tree.structure(opt_state) == jax.tree.structure(shapes[1])
        made = jax.jit(forms.create_plain, out_shardings=(params, opt_state))(
            jax.random.key(0)
        )
        *state, _ = step(*made, next(forms.batches(1)))
        assert [x.sharding for x in jax.tree.leaves(state)] == jax.tree.leaves(
            (params, opt_state)
        )

    def test_of_objects(self) -> None:
        step = autopar.parallelize(forms.nnx_step, cluster=CLUSTER)
        state = step.init(
            forms.create_nnx, jax.random.key(0), batch=next(forms.batches(1))
        )
        model, _ = step.shardings(state)
        assert model["up"]["kernel"].get_value() == state[0].up.kernel[...].sharding

    def test_of_another_state(self) -> None:
        step = autopar.parallelize(forms.plain_step, cluster=CLUSTER)
        with pytest.raises(PlanError, match="no plan yet"):
            step.shardings({})
        step(*forms.create_plain(jax.random.key(0)), next(forms.batches(1)))
        with pytest.raises(PlanError, match="is not what the step's first"):
            step.shardings({"w": jnp.ones(3)})


def test_compiled_ahead() -> None:
    step = autopar.parallelize(forms.plain_step, cluster=CLUSTER)
    shapes = jax.eval_shape(forms.create_plain, jax.random.key(0))
    plan = step.compile(*shapes, forms.batch_structs())
    assert plan is step.plan
    with jax.log_compiles(False):
        *_, loss = step(*forms.create_plain(jax.random.key(0)), next(forms.batches(1)))
    assert step.plan is plan
    assert np.isfinite(loss)


def test_state_is_evaluated_where_batch_arrays_have_their_rows_in_other_dims() -> None:
    """State with as many dims as two batch arrays, whose rows are in different ones."""

    def loss_of(w: Any, batch: Any) -> Any:
        y = jnp.einsum("tb,bf,fg->bg", batch["x"], batch["z"], w)
        return jnp.mean(y**2)

    def step(w: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_of)(w, batch)
        return w - 1e-3 * grad, loss

    batch = {"x": np.ones((3, 8), np.float32), "z": np.ones((8, 5), np.float32)}
    rows = {"batch/x": 1, "batch/z": 0}
    run = autopar.parallelize(step, cluster="4:cpu", batch_argnames=rows)
    w = run.init(lambda: 0.1 * jnp.ones((5, 2)), batch=batch)
    found = run.jit(lambda w, other: loss_of(w, other))(w, batch)
    np.testing.assert_allclose(found, loss_of(0.1 * jnp.ones((5, 2)), batch), rtol=1e-6)
