"""Tests the memory of spare copies of the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.planner.options import PlanOptions
from autopar.runtime.step_planner import StepPlanner
from autopar.steps.spares import Spares
from autopar_passes.program.trace import open_arguments

WIDTH, LAYERS = 256, 2
STATE_BYTES = 2 * LAYERS * WIDTH * WIDTH * 4
State = dict[str, list[jax.Array]]


def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(layers: list[jax.Array]) -> jax.Array:
        x = batch
        for w in layers:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(state["w"])
    m = [0.9 * x + g for x, g in zip(state["m"], grads, strict=True)]
    w = [x - 0.1 * y for x, y in zip(state["w"], m, strict=True)]
    return {"w": w, "m": m}, loss


def arguments() -> tuple[dict[str, list[jax.ShapeDtypeStruct]], jax.ShapeDtypeStruct]:
    layers = LAYERS * [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)]
    batch = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
    return {"w": layers, "m": layers}, batch


def test_copies_of_whole_and_split_arrays() -> None:
    found = Spares(always=1, split=3).copies(np.array([1.0, 2.0, 8.0]))
    np.testing.assert_array_equal(found, [2, 5, 5])


def planned(spares: Spares, cluster: str, **options: object) -> autopar.Plan:
    planner = StepPlanner(step, PlanOptions(**options))  # type: ignore[arg-type]
    planner.hold(spares)
    analysed = planner.analyse_structs(open_arguments(step, arguments()))
    return planner.plan(analysed, autopar.Cluster.parse(cluster))


@pytest.mark.parametrize(
    "options", [{}, {"microbatches": 2}, {"remat": 1}, {"remat": "none"}]
)
def test_a_plan_counts_them(options: dict[str, object]) -> None:
    plain = planned(Spares(), "1:h100", **options).predicted.peak_memory_bytes
    two = planned(Spares(always=2), "1:h100", **options).predicted.peak_memory_bytes
    assert two - plain == pytest.approx(2 * STATE_BYTES)


def test_stages_count_them() -> None:
    found = [
        planned(x, "2:h100", stages=2, microbatches=4).predicted.peak_memory_bytes
        for x in (Spares(), Spares(always=1))
    ]
    assert found[1] - found[0] == pytest.approx(STATE_BYTES / 2)


def test_a_step_that_keeps_its_state_counts_both() -> None:
    found = [
        autopar.parallelize(step, cluster="1:h100", donate=donate)
        .prepare(*arguments())
        .plan.predicted.peak_memory_bytes
        for donate in (True, False)
    ]
    assert found[1] - found[0] == pytest.approx(STATE_BYTES)


def test_what_fits_with_one_copy_only_is_refused_with_more() -> None:
    need = planned(Spares(), "1:h100").predicted.peak_memory_bytes
    memory = f"1:h100,memory={(need + STATE_BYTES / 2) / 1e9:.6f}GB"
    planned(Spares(), memory)
    with pytest.raises(autopar.InfeasibleError):
        planned(Spares(always=1), memory, microbatches=1, remat=0, offload="none")
