"""Tests that the layouts of a plan of one stage are kept in several stages."""

from __future__ import annotations

import functools
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Plan, PlanError

WIDTH, ROWS, DEPTH = 32, 64, 4


def step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        x = batch
        for up, down in params:
            x = x + jax.numpy.tanh(x @ up) @ down
        return jax.numpy.mean(x**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(rows: int = ROWS) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    params = [
        tuple(0.1 * random.standard_normal(s).astype(np.float32) for s in shapes)
        for _ in range(DEPTH)
    ]
    return params, random.standard_normal((rows, WIDTH)).astype(np.float32)


PINS = {"batch": P("data"), "params/*/0": P(None, "tensor"), "params/*/1": P("tensor")}


@functools.cache
def one_stage(**options: Any) -> Plan:
    return autopar.plan(
        step, *arguments(), cluster="2x4:cpu", stages=1, seconds=5,
        axis_names=("data", "tensor"), pins=PINS, **options,
    )  # fmt: skip


def in_stages(kept: Plan, rows: int = ROWS, **options: Any) -> Plan:
    asked = {"stages": 2, "cluster": "2x4:cpu", "seconds": 5, **options}
    return autopar.plan(step, *arguments(rows), layouts=kept, **asked)


def specs(plan: Plan) -> dict[str, Any]:
    return {path: spec for s in plan.stages for path, spec in s.inputs.items()}


def test_inputs_keep_their_layouts_by_the_names_of_axes() -> None:
    kept = one_stage(microbatches=4, remat=2)
    plan = in_stages(kept)
    assert (len(plan.stages), plan.microbatches) == (2, 4)
    assert plan.pipeline is not None
    assert len(plan.pipeline.recomputed) == 2
    axes = plan.stages[0].axis_names
    assert set(axes) <= {"data", "tensor"}
    found = specs(plan)
    for path, spec in kept.inputs.items():
        expected = tuple(tuple(n for n in names if n in axes) for names in spec)
        assert found[path] == expected
    if axes != kept.axis_names:
        assert "have no devices for axis" in plan.decided[-1]
    state, batch = arguments()
    run = autopar.parallelize(step, plan=plan, donate=False)
    (new, loss), (other, value) = run(state, batch), jax.jit(step)(state, batch)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), new, other
    )


def test_at_another_batch_size_and_after_an_edit() -> None:
    kept = one_stage(microbatches=1, remat=0).edit({"params/0/0": P("data")})
    plan = in_stages(kept, rows=2 * ROWS, microbatches=2)
    assert plan.solver.status.startswith("edited: layouts of ")
    split = {"data"} & {*plan.stages[0].axis_names}
    assert specs(plan)["params/0/0"] == (tuple(split), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pins": {"batch": P("data")}}, "pins= were given"),
        ({"axis_names": ("a", "b")}, "has the mesh axes data, tensor"),
        ({"stages": 5}, "the step has 4 layers"),
        ({"remat": "2:dots"}, "stages keep nothing"),
    ],
)
def test_what_contradicts_the_layouts(options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        in_stages(one_stage(microbatches=1, remat=0), **options)


def test_a_dropped_checkpoint_is_not_kept() -> None:
    kept = one_stage(microbatches=1, remat=0)
    remat = msgspec.structs.replace(kept.remat, checkpoints=False)
    dropped = msgspec.structs.replace(kept, remat=remat).with_checks()
    with pytest.raises(PlanError, match=r"checkpoint, which cannot be kept|another"):
        in_stages(dropped)
