"""Tests plans with rematerialisation, planned and run on simulated devices."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from remat_cases import (
    CASES,
    blocks,
    checkpointed,
    descent,
    drawn,
    in_loop,
    mlp,
    remembered,
    stacked,
)

import autopar
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.record import split_as
from autopar.planner.scheme import is_repeated
from autopar.plans import AS_WRITTEN
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import analyse

ROWS, WIDTH, DEPTH = 4096, 16, 4
STEP = descent(mlp)
# Between what the plan needs with all its activations, and with none of them.
MEMORY = 1_000_000


@functools.cache
def args(rows: int = ROWS) -> Any:
    return blocks(DEPTH), drawn(rows, WIDTH, seed=5)


# Nothing is decided but layouts.
AS_WRITTEN_OPTIONS: dict[str, Any] = {"remat": 0, "microbatches": 1, "stages": 1}


def cluster(memory: int | None = None) -> Cluster:
    found = Cluster.parse("8:cpu")
    if memory is None:
        return found
    device = dataclasses.replace(found.device, memory_bytes=memory)
    return dataclasses.replace(found, device=device)


def planned(memory: int | None = None, **options: Any) -> autopar.Plan:
    return autopar.plan(
        STEP,
        *args(),
        cluster=cluster(memory),
        axis_names=("data",),
        **{**AS_WRITTEN_OPTIONS, **options},
    )


@functools.cache
def plain() -> autopar.Plan:
    return planned()


@functools.cache
def chosen() -> autopar.Plan:
    return planned(MEMORY, remat="auto")


def losses(run: Any, step: Any = None, given: Any = None) -> list[float]:
    params, *batch = given or args()
    found: list[float] = []
    for _ in range(3):
        params, loss = run(params, *batch)
        found.append(float(loss))
    return found


@functools.cache
def expected() -> list[float]:
    return losses(jax.jit(STEP))


def compiled_bytes(plan: autopar.Plan, step: Any = STEP, given: Any = None) -> int:
    """The memory that XLA plans for one device."""
    analysis = analyse(step, given or args())
    made = planned_step(analysis, plan, device_mesh(plan, jax.devices()))
    found = made.lower().compile().memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def test_a_step_that_does_not_fit_runs_with_layers_computed_again() -> None:
    with pytest.raises(InfeasibleError, match="remat='auto'"):
        planned(MEMORY)

    plan = chosen()

    assert plan.remat.layers
    assert plan.predicted.peak_memory_bytes <= MEMORY
    assert compiled_bytes(plan) <= MEMORY < compiled_bytes(plain())
    np.testing.assert_allclose(
        losses(autopar.parallelize(STEP, plan=plan, donate=False)),
        expected(),
        rtol=1e-5,
    )


def test_nothing_is_computed_again_where_all_fits() -> None:
    found = planned(remat="auto")

    assert found.remat == AS_WRITTEN
    assert found.predicted == plain().predicted


@pytest.mark.parametrize(
    ("name", "remat"), [("dropout", "2:dots"), ("tied", "all"), ("batch norm", 2)]
)
def test_losses_are_those_of_one_device(name: str, remat: int | str) -> None:
    step, given = CASES[name]
    run = autopar.parallelize(
        step, cluster="8:cpu", donate=False, remat=remat, axis_names=("data",)
    )

    found = losses(run, given=given)

    assert run.plan.remat.layers
    np.testing.assert_allclose(found, losses(jax.jit(step), given=given), rtol=2e-5)


def test_more_layers_take_less_memory_and_more_time() -> None:
    found = [plain(), *(planned(remat=n) for n in (1, 2, 3))]
    memory = [p.predicted.peak_memory_bytes for p in found]
    seconds = [p.predicted.step_s for p in found]

    assert memory == sorted(set(memory), reverse=True)
    assert seconds == sorted(set(seconds))


def test_work_that_is_repeated_is_not_the_models() -> None:
    one, other = plain().worth, planned(remat=3).worth

    assert one is not None
    assert other is not None
    assert one.model_flops == other.model_flops


def test_a_saved_plan_runs_and_says_what_it_computes_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    chosen().save(path)

    run = autopar.parallelize(STEP, plan=path, donate=False)

    assert run.prepare(*args()).plan == chosen()
    assert f"remat    the activations of {len(chosen().remat.layers)} of " in str(
        chosen()
    )


def test_layouts_keep_the_layers() -> None:
    plan = planned(remat=2)
    kept = planned(layouts=plan, remat=None)

    assert kept.remat == plan.remat
    assert kept.fingerprint == plan.fingerprint
    with pytest.raises(PlanError, match="leave remat out"):
        planned(layouts=plan, remat=3)


def test_edits_are_refused() -> None:
    plan = planned(remat=2)
    remat = msgspec.structs.replace(plan.remat, layers=(0,))

    with pytest.raises(PlanError, match="remat was edited, and cannot be"):
        autopar.parallelize(
            STEP, plan=msgspec.structs.replace(plan, remat=remat)
        ).prepare(*args())


def test_microbatches_compute_their_own_again() -> None:
    run = autopar.parallelize(
        STEP, cluster="local", donate=False, remat=2, microbatches=4
    )

    np.testing.assert_allclose(losses(run), expected(), rtol=1e-5)
    assert run.plan.remat.layers == (0, 1)
    assert run.plan.microbatches == 4


def test_both_are_chosen_together() -> None:
    alone = planned(MEMORY, microbatches="auto").predicted.step_s
    both = planned(MEMORY, microbatches="auto", remat="auto").predicted.step_s

    assert both <= min(alone, chosen().predicted.step_s) * 1.005


def test_codecs_send_the_gradients() -> None:
    run = autopar.parallelize(
        STEP,
        cluster="local",
        donate=False,
        remat=3,
        compression="bf16",
        axis_names=("data",),
    )

    np.testing.assert_allclose(losses(run), expected(), rtol=1e-3)
    assert any(g.codec for g in run.plan.gradients)


def test_replan_goes_on_with_the_same_state() -> None:
    run = autopar.parallelize(STEP, cluster="local", remat=2)
    params, batch = jax.tree.map(jnp.copy, args()[0]), args()[1]
    params, _ = run(params, batch)
    params = run.replan("4:cpu", params)
    params, loss = run(params, batch)

    assert len(run.plan.remat.layers) == 2
    np.testing.assert_allclose(float(loss), expected()[1], rtol=1e-5)


def products_again(run: Any) -> int:
    """The matrix products that the backward pass repeats."""
    operators = analyse_as_planned(run).graph.operators
    return sum(op.kind == "dot_general" and is_repeated(op) for op in operators)


def analyse_as_planned(run: Any) -> Any:
    return split_as(analyse(descent(checkpointed), args()), run.plan)


def test_a_steps_own_checkpoint_can_be_dropped() -> None:
    step = descent(checkpointed)

    def made(**options: Any) -> Any:
        return autopar.parallelize(step, cluster="local", donate=False, **options)

    kept, dropped = made(), made(remat="none")

    np.testing.assert_allclose(losses(dropped), losses(kept), rtol=1e-5)
    assert not dropped.plan.remat.checkpoints
    now, before = dropped.plan.predicted, kept.plan.predicted
    assert now.compute_s < before.compute_s
    assert products_again(kept) == 2 * DEPTH
    assert products_again(dropped) == 0


def test_what_cannot_be_is_refused() -> None:
    loops = stacked(DEPTH), args()[1]

    with pytest.raises(PlanError, match="within a loop"):
        autopar.plan(descent(remembered), *loops, cluster="8:cpu", remat="none")
    with pytest.raises(PlanError, match="Give fewer, or 'all'"):
        planned(remat=99)
    for wrong in ("half", "2:", "dots:2", -1, 1.5, True, "full:dots", "2:names="):
        with pytest.raises(PlanError, match="expected how many layers"):
            planned(remat=wrong)
    with pytest.raises(PlanError, match=r"named 'norm' by .*; it names none"):
        planned(remat="2:names=norm")
    with pytest.raises(PlanError, match="remat= has no effect with plan="):
        autopar.parallelize(STEP, plan=plain(), remat=2)


def test_the_noise_of_gradients_is_measured() -> None:
    run = autopar.parallelize(
        STEP,
        cluster="8:cpu",
        donate=False,
        remat=2,
        noise_scale=True,
        microbatches=2,
        axis_names=("data",),
    )

    np.testing.assert_allclose(losses(run), expected(), rtol=1e-5)
    assert run.noise_scale.groups == 16


def loop_plan(memory: int | None = None, **options: Any) -> autopar.Plan:
    return autopar.plan(
        descent(in_loop),
        stacked(DEPTH),
        args()[1],
        cluster=cluster(memory),
        axis_names=("data",),
        **{**AS_WRITTEN_OPTIONS, **options},
    )


def test_layers_in_a_loop_are_computed_again_where_memory_is_short() -> None:
    step, given = descent(in_loop), (stacked(DEPTH), args()[1])
    with pytest.raises(InfeasibleError, match="remat='auto'"):
        loop_plan(MEMORY)

    plan = loop_plan(MEMORY, remat="auto")

    assert plan.remat.layers
    assert len(plan.remat.starts) == DEPTH
    assert compiled_bytes(plan, step, given) <= MEMORY
    assert compiled_bytes(loop_plan(), step, given) > MEMORY
    run = autopar.parallelize(step, plan=plan, donate=False)
    np.testing.assert_allclose(
        losses(run, given=given), losses(jax.jit(step), given=given), rtol=1e-5
    )


def test_the_memory_of_a_loop_is_that_of_a_checkpoint() -> None:
    """Where the step itself says so about the body, and where the plan does."""
    given = stacked(DEPTH), args()[1]
    written = autopar.plan(
        descent(remembered), *given, cluster="8:cpu", axis_names=("data",), remat=0
    )
    found = loop_plan(remat="all")

    assert found.predicted.peak_memory_bytes == pytest.approx(
        written.predicted.peak_memory_bytes, rel=0.01
    )
    assert compiled_bytes(found, descent(in_loop), given) == pytest.approx(
        compiled_bytes(written, descent(remembered), given), rel=0.02
    )


@pytest.mark.parametrize(
    ("name", "remat"),
    [("scan named", "2:names=up"), ("scan with results", "all:dots"), ("scans", 3)],
)
def test_losses_of_loops_are_those_of_one_device(name: str, remat: int | str) -> None:
    step, given = CASES[name]
    run = autopar.parallelize(step, cluster="8:cpu", donate=False, remat=remat)

    found = run(*given)

    assert run.plan.remat.layers
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*given)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_microbatches_of_loops_compute_their_own_again() -> None:
    step, given = descent(in_loop), (stacked(DEPTH), args()[1])
    run = autopar.parallelize(
        step, cluster="local", donate=False, remat=2, microbatches=4
    )

    np.testing.assert_allclose(
        losses(run, given=given), losses(jax.jit(step), given=given), rtol=1e-5
    )
    assert run.plan.remat.layers == (0, 1)


def test_what_is_in_use_is_not_advised() -> None:
    with pytest.raises(InfeasibleError) as told:
        planned(MEMORY // 8, remat="all", microbatches=2)
    assert "stages='auto', offload='auto' or a smaller batch" in str(told.value)
    assert "remat=" not in str(told.value)
    assert "microbatches=" not in str(told.value)
