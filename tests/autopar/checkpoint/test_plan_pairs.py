"""Tests that a state is the same under every plan, however it was moved there."""

from __future__ import annotations

import itertools
from typing import Any

import checkpoint_plans as plans
import jax
import numpy as np
import pytest

import autopar
from autopar import Checkpoints
from autopar.runtime.gradients.codec_state import carry_over
from autopar.runtime.planned import PlannedStep

ALL = (*plans.NAMES, "compressed-2")


def sums(codecs: Any) -> dict[str, np.ndarray]:
    """The residual of each gradient, summed over its workers."""
    return {
        name: np.asarray(held["residual"], np.float64).sum(0)
        for name, held in codecs["gradients"].items()
        if not isinstance(held["residual"], tuple)
    }


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return {name: plans.parallel(name) for name in ALL}


def test_plans_are_what_they_are_called() -> None:
    def split(name: str, path: str) -> set[str]:
        stage = plans.plan(name).stages[plans.plan(name).home(path)]
        return {a for axes in stage.inputs[path] for a in axes}

    up = "params/0/up"
    assert [split(name, up) for name in ("data", "compressed", "pipeline")] == [
        set()
    ] * 3
    assert split("fsdp", up) == split("fsdp", "batch/x") == {"data"}
    assert split("tensor", up) == {"t"}
    assert split("2-D", up) == {"t"}
    assert split("2-D", "batch/x") == {"data"}
    assert len(plans.plan("pipeline").stages) == 2
    assert len(plans.plan("pipeline+tensor").stages) == 2
    assert split("pipeline+tensor", up)
    assert plans.plan("remat").pipeline.recomputed
    assert "int4" in {g.codec for g in plans.plan("compressed").gradients}


def round_trip() -> list[str]:
    """An order of plans in which each plan follows each other plan."""
    way: list[str] = []
    for k, name in enumerate(ALL):
        for other in ALL[k + 1 :]:
            way += [name, other]
        way.append(name)
    return way


def test_every_plan_follows_every_plan_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits of the state, and that what is consumed is freed."""
    # Programs are not what is tested: the steps do not run.
    monkeypatch.setattr(PlannedStep, "compile", lambda _: None)
    step = plans.parallel("data")
    state = step.init(plans.create, others=(plans.batch(),))
    bits, count = plans.numbers(state), 0
    for name in round_trip()[1:]:
        plan = plans.plan(name)
        old, state = (
            state,
            step.replan(plan.cluster.read(), state, plan=plan, consume=True),
        )
        assert plans.numbers(state) == bits, name
        count += sum(x.is_deleted() for x in jax.tree.leaves(old))
        wanted = jax.tree.leaves(step.shardings(state))
        assert [x.sharding for x in jax.tree.leaves(state)] == wanted
    pairs = set(itertools.pairwise(round_trip()))
    assert pairs >= set(itertools.permutations(ALL, 2))
    assert count > len(pairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any, steps: Any) -> dict[str, tuple[Checkpoints, Any]]:
    """A checkpoint under each plan, with different states."""
    out: dict[str, tuple[Checkpoints, Any]] = {}
    for k, name in enumerate(plans.NAMES):
        step = steps[name]
        state = step.init(lambda k=k: plans.create(k))
        state = jax.tree.map(jax.device_put, state, step.shardings(state))
        made = Checkpoints(tmp_path_factory.mktemp(name))
        made.save(step, state, step=k, position=10 * k)
        out[name] = made, plans.numbers(state)
    return out


@pytest.mark.parametrize("name", ALL)
def test_every_plan_restores_what_every_plan_saved(
    name: str, steps: Any, saved: Any
) -> None:
    for k, (checkpoints, bits) in enumerate(saved.values()):
        checkpoints.wait()
        found = checkpoints.restore(steps[name], plans.create)
        assert (found.step, found.position) == (k, 10 * k)
        assert plans.numbers(found.state) == bits
        wanted = jax.tree.leaves(steps[name].shardings(found.state))
        assert [x.sharding for x in jax.tree.leaves(found.state)] == wanted


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: Any) -> tuple[Checkpoints, Any, Any]:
    """A checkpoint after two steps with codecs, and the residuals."""
    step = autopar.parallelize(plans.step, plan=plans.plan("compressed"))
    state = step.init(plans.create, others=(plans.batch(),))
    for k in range(2):
        *state, _ = step(*state, plans.batch(k))
    codecs = step.compression_state
    made = Checkpoints(tmp_path_factory.mktemp("residuals"))
    made.save(step, tuple(state), step=2)
    made.wait()
    *_, loss = step(*state, plans.batch(2))
    return made, codecs, float(loss)


def test_residuals_are_restored_bit_by_bit(compressed: Any) -> None:
    made, codecs, loss = compressed
    step = plans.parallel("compressed")
    found = made.restore(step, plans.create)
    same = jax.tree.map(np.array_equal, step.compression_state, codecs)
    assert all(jax.tree.leaves(same))
    *_, again = step(*found.state, plans.batch(2))
    assert float(again) == loss


@pytest.mark.parametrize("way", [("compressed-2",), ("2-D", "compressed-2")])
def test_residuals_keep_their_sum(compressed: Any, way: tuple[str, ...]) -> None:
    """Also where a plan without codecs comes between."""
    made, codecs, _ = compressed
    step = plans.parallel(way[0])
    state = made.restore(step, plans.create).state
    for name in way[1:]:
        plan = plans.plan(name)
        state = step.replan(plan.cluster.read(), state, plan=plan)
    before = sums(codecs)
    assert max(np.abs(x).max() for x in before.values()) > 1e-6
    held = carried(step)
    found = sums(held)
    assert found.keys() == before.keys()
    assert {len(held["gradients"][name]["residual"]) for name in found} == {2}
    for name in found:
        np.testing.assert_allclose(found[name], before[name], rtol=0, atol=1e-6)
    *_, loss = step(*state, plans.batch(2))
    assert np.isfinite(float(loss))


def carried(step: Any) -> Any:
    """The codecs' state with which the next step starts."""
    return carry_over(step.compression_state, step.running.planned.sums)
