"""Tests the codecs' state between steps: it is kept, saved, moved, and stays finite."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import compressed_cases as cases
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import orbax.checkpoint
import pytest
from compressed_cases import WORKERS, case_of, fresh, on_host, plan_of, spoilt
from jax.sharding import PartitionSpec

import autopar
from autopar import Cluster, PlanError
from autopar.compression.policies.policy import Observation
from autopar.runtime.gradients.codec_state import _alike, place_state

NAME = "data_parallel"


def assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def residual_sums(state: Any) -> dict[str, np.ndarray]:
    """The part of each gradient that has not been applied yet."""
    return {
        name: np.asarray(kept["residual"], np.float64).sum(0)
        for name, kept in state["gradients"].items()
        if not isinstance(kept["residual"], tuple)
    }


class Watching:
    """A policy that changes nothing."""

    every = 1

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        self.seen.append(seen)
        return None


class TestNotFinite:
    """A step whose gradients are not finite leaves no trace."""

    def test_the_step_is_skipped(self) -> None:
        case, step = case_of(NAME), fresh("int4")
        state, _ = case.train(step, case.state(), case.batches(2))
        before = on_host((state, step.compression_state["gradients"]))

        state, (loss,) = case.train(step, state, [spoilt(case.batch(2))])

        assert np.isnan(loss)
        with pytest.warns(UserWarning, match=r"step 3: .*params/0/up.* not finite"):
            after = step.compression_state
        assert_same_bits(before, on_host((state, after["gradients"])))
        # All that is counted is the step itself.
        assert (int(after["step"]), int(after["skipped"])) == (3, 1)

    def test_it_is_told_of_without_being_asked(self) -> None:
        """By a later call at the latest; what is said of it is not a number."""
        case, step = case_of(NAME), fresh("int8")
        state, _ = case.train(step, case.state(), [spoilt(case.batch(0))])
        jax.block_until_ready(state)
        with pytest.warns(UserWarning, match=r"step 1: .*params/0/up.* not finite"):
            state, _ = case.train(step, state, [case.batch(1)])
        assert {r.skipped for r in step.telemetry.values()} == {1}

        case.train(step, state, [spoilt(case.batch(2))])
        with pytest.warns(UserWarning, match=r"step 3: .*params/0/up.* not finite"):
            (report, *_) = step.telemetry.values()
        assert np.isnan([report.norm, report.relative_error, report.gain]).all()
        assert report.skipped == 2

    @pytest.mark.filterwarnings("ignore:step .* not finite:UserWarning")
    def test_training_goes_on(self) -> None:
        """With the losses of a run that has never seen that batch."""
        case = case_of(NAME)
        good = list(case.batches(4))
        losses = []
        for batches in (good, [*good[:2], spoilt(good[2]), *good[2:]]):
            step = fresh("int8")
            losses.append(case.train(step, case.state(), batches)[1])
        without, within = losses

        assert np.isnan(within[2])
        assert [*within[:2], *within[3:]] == without

    def test_a_policy_is_told_with_a_warning(self) -> None:
        case, policy = case_of(NAME), Watching()
        step = fresh("int4", policy=policy)
        state, _ = case.train(step, case.state(), [case.batch(0)])

        with pytest.warns(UserWarning, match=r"step 2: the gradients of .*params/0/"):
            state, _ = case.train(step, state, [spoilt(case.batch(1))])
        case.train(step, state, [case.batch(2)])

        assert [seen.finite for seen in policy.seen] == [True, False, True]
        assert [seen.step for seen in policy.seen] == [1, 2, 3]
        norms = [[r.norm for r in seen.gradients.values()] for seen in policy.seen]
        assert [bool(np.isfinite(n).all()) for n in norms] == [True, False, True]


class TestCheckpoint:
    """Saved with the train state, the codecs' state goes on where it was."""

    def test_a_restored_run_is_the_same_to_the_bit(
        self, tmp_path: pathlib.Path
    ) -> None:
        case, step = case_of(NAME), fresh("int4")
        state, _ = case.train(step, case.state(), case.batches(2))
        saved = on_host({"state": state, "codecs": step.compression_state})
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "run", saved)
        want = case.train(step, state, case.batches(2, start=2))[1]

        again = fresh("int4")
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            read = checkpointer.restore(tmp_path / "run", saved)
        again.compression_state = read["codecs"]
        state = tuple(jax.tree.map(jnp.asarray, read["state"]))
        got = case.train(again, state, case.batches(2, start=2))[1]

        assert got == want

    def test_what_was_read_stays_when_training_goes_on(self) -> None:
        """A step consumes its state, but not the copy that was handed out."""
        case, step = case_of(NAME), fresh("int4")
        state, _ = case.train(step, case.state(), case.batches(2))
        codecs, start = step.compression_state, on_host(state)
        want = case.train(step, state, case.batches(1, start=2))[1]

        step.compression_state = codecs
        state = jax.tree.map(jnp.asarray, start)
        assert case.train(step, state, case.batches(1, start=2))[1] == want

    def test_a_residual_without_a_place_is_named(self) -> None:
        case, step = case_of(NAME), fresh("int4")
        case.train(step, case.state(), case.batches(1))
        other = fresh("int8")
        other.compression_state = step.compression_state
        with pytest.warns(
            UserWarning, match=r"residual of 'params/.*', of L2 norm .* is dropped"
        ):
            case.train(other, case.state(), case.batches(1))

    def test_without_it_something_is_lost(self) -> None:
        """Otherwise the test above would show nothing."""
        case, step = case_of(NAME), fresh("int4")
        state, _ = case.train(step, case.state(), case.batches(2))
        start = on_host(state)
        want = case.train(step, state, case.batches(2, start=2))[1]

        state = jax.tree.map(jnp.asarray, start)
        got = case.train(fresh("int4"), state, case.batches(2, start=2))[1]

        assert got[0] == want[0]
        assert got[1] != want[1]

    def test_what_was_set_can_be_read_before_the_next_step(self) -> None:
        step = fresh("int4")
        assert step.compression_state is None
        case = case_of(NAME)
        case.train(step, case.state(), [case.batch(0)])
        saved = on_host(step.compression_state)

        other = fresh("int4")
        other.compression_state = saved

        assert_same_bits(saved, on_host(other.compression_state))


class TestReplan:
    """Other devices, the same sum of what is not applied yet."""

    @pytest.mark.parametrize("devices", [2, 8])
    def test_the_sum_of_residuals_stays(self, devices: int) -> None:
        case = case_of(NAME)
        step = case.parallel("int4")
        state, losses = case.train(step, case.state(), case.batches(2))
        before = residual_sums(step.compression_state)
        assert all(np.abs(r).max() > 0 for r in before.values())
        saved = on_host(step.compression_state)

        state = step.replan(Cluster.parse(f"{devices}x1:cpu,{cases.NETWORK}"), state)

        planned = step.prepare(*state, case.batch(2))
        assert planned.sums is not None
        after = residual_sums(place_state(saved, planned.sums))
        assert {g.workers for g in step.plan.gradients} == {devices}
        assert set(after) == set(before)
        for name, residual in before.items():
            np.testing.assert_allclose(
                after[name], residual, rtol=1e-6, atol=1e-6 * np.abs(residual).max()
            )
        if devices < WORKERS:
            _, more = case.train(step, state, case.batches(2, start=2))
            assert more[-1] < losses[-1]

    def test_dense_trains_on_as_the_plain_step(self) -> None:
        case = case_of(NAME)
        step = case.parallel("dense")
        state, losses = case.train(step, case.state(), case.batches(1))
        for devices in (2, 4):
            state = step.replan(
                Cluster.parse(f"{devices}x1:cpu,{cases.NETWORK}"), state
            )
            state, more = case.train(step, state, case.batches(1, start=len(losses)))
            losses += more

        np.testing.assert_allclose(losses, cases.plain_losses(NAME, 3), rtol=1e-5)


def test_a_new_state_starts_codecs_anew() -> None:
    """What the last steps of another run have not sent is not sent to it."""
    case, step = case_of(NAME), fresh("int4")
    runs = [case.train(step, step.init(case.state), case.batches(3)) for _ in range(2)]

    (_, first), (_, second) = runs
    assert first == second


class TestBadInput:
    """Each mistake is named before anything is compiled."""

    def prepare(self, step: Any, case: cases.Case | None = None) -> None:
        case = case or case_of(NAME)
        step.prepare(*case.state(), case.batch(0))

    @pytest.mark.parametrize(
        ("codec", "message"),
        [
            ("int9", r"compression='int9': unknown codec 'int9'; known: .*int8"),
            ("int8:blocks=4", r"int8 has no field 'blocks'; its fields"),
            ("topk:ratio=2", r"compression='topk:ratio=2'.*ratio"),
            ("", r"unknown codec"),
        ],
    )
    def test_unknown_codecs(self, codec: str, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            self.prepare(case_of(NAME).parallel(codec))

    def test_a_codec_that_cannot_scatter(self) -> None:
        """PowerSGD needs whole matrices; ZeRO, which gives each device a part, goes."""
        case = case_of("sharded_state")
        step = case.parallel("powersgd:rank=2")
        self.prepare(step, case)
        assert any(g.codec == "powersgd:rank=2" for g in step.plan.gradients)

    def test_a_changed_plan_whose_codec_cannot_scatter(self) -> None:
        case = case_of("sharded_state")
        step = case.parallel("int8")
        self.prepare(step, case)
        gradients = tuple(
            msgspec.structs.replace(g, codec="powersgd:rank=2")
            for g in step.plan.gradients
        )
        plan = step.plan.with_stage(gradients=gradients)
        with pytest.raises(PlanError, match=r"params/0/.*powersgd"):
            self.prepare(autopar.parallelize(case.step, plan=plan), case)

    def test_a_given_plan_has_its_own_codecs(self) -> None:
        with pytest.raises(PlanError, match=r"compression=.*plan="):
            fresh("int8", compression="int4")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"policy": Watching()}, "policy= has no effect without codecs"),
            ({"fallback": "dense"}, "fallback= has no effect without codecs"),
            ({"compression": "int8", "least_gain": 0.5}, "least_gain=0.5.*fallback="),
        ],
    )
    @pytest.mark.parametrize("planned", [False, True])
    def test_options_without_effect(
        self, options: dict[str, Any], message: str, planned: bool
    ) -> None:
        if planned:
            options = {**options, "plan": plan_of("none")}
            options.pop("compression", None)
        with pytest.raises(PlanError, match=message):
            autopar.parallelize(case_of(NAME).step, **options)

    def test_states_of_another_step(self) -> None:
        case, step = case_of(NAME), fresh("int4")
        case.train(step, case.state(), [case.batch(0)])
        good = on_host(step.compression_state)
        gradients = good["gradients"]
        cut = {**gradients["params/0/up"]}
        cut["residual"] = cut["residual"][:, :-1]
        wrong = [
            ([1, 2], r"expected \{'step'.*got list"),
            ({"step": 1}, r"expected \{'step'"),
            ({**good, "gradients": {"other/w": cut}}, r"other/w.*saved from"),
            (
                {**good, "gradients": {**gradients, "params/0/up": cut}},
                r"params/0/up.*\(31, 64\).*\(32, 64\)",
            ),
        ]
        for state, message in wrong:
            other = fresh("int4")
            other.compression_state = state
            with pytest.raises(PlanError, match=message):
                case.train(other, case.state(), [case.batch(0)])

    def test_telemetry_before_a_step(self) -> None:
        with pytest.raises(PlanError, match="no step has run"):
            _ = fresh("int4").telemetry

    def test_telemetry_without_a_codec(self) -> None:
        case, step = case_of(NAME), fresh("none")
        case.train(step, case.state(), [case.batch(0)])
        assert step.telemetry == {}
        assert "compression=" in step.telemetry.reason


class TestOddParameters:
    """They are left as they are, and trained all the same."""

    def test_integers_empty_and_single_elements(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            out = batch["x"] @ params["w"] * params["scale"] + params["empty"].sum()
            return jnp.mean((out - batch["y"]) ** 2)

        def step(params: Any, counts: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return params, {"n": counts["n"] + 1}, value

        def state() -> Any:
            params = {
                "w": jnp.eye(cases.WIDTH),
                "scale": jnp.ones((1, 1)),
                "empty": jnp.zeros((0, 4)),
            }
            return params, {"n": jnp.zeros((3,), jnp.int32)}

        case = cases.Case(
            step,
            state,
            lambda seed: cases.rows(seed, cases.ROWS),
            {"batch/*": PartitionSpec("data"), "params/*": PartitionSpec()},
        )
        run = case.parallel("int8")
        got, losses = case.train(run, case.state(), case.batches(3))
        _, want = case.train(jax.jit(step), case.state(), case.batches(3))

        np.testing.assert_allclose(losses, want, rtol=1e-2)
        assert got[1]["n"].tolist() == [3, 3, 3]
        codecs = {g.name: g.codec for g in run.plan.gradients}
        assert codecs["params/w"] == "int8"
        assert set(codecs.values()) <= {"int8", "dense"}

    @pytest.mark.filterwarnings("ignore:.*used for no gradient:UserWarning")
    def test_nothing_to_compress(self) -> None:
        """Only vectors: all are sent as they are."""

        def step(params: Any, batch: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                return jnp.mean((batch["x"] * params["s"] - batch["y"]) ** 2)

            value, grads = jax.value_and_grad(loss)(params)
            return {"s": params["s"] - grads["s"]}, value

        case = cases.Case(
            step,
            lambda: ({"s": jnp.ones(cases.WIDTH)},),
            lambda seed: cases.rows(seed, cases.ROWS),
            {"batch/*": PartitionSpec("data"), "params/*": PartitionSpec()},
        )
        run = case.parallel("int8")
        _, losses = case.train(run, case.state(), case.batches(2))
        _, want = case.train(jax.jit(step), case.state(), case.batches(2))

        np.testing.assert_allclose(losses, want, rtol=1e-5)
        assert {g.codec for g in run.plan.gradients} == {"dense"}


def test_shapes_that_differ_in_one_divided_dim_are_alike() -> None:
    assert _alike((12,), (3, 4))
    assert _alike((3, 4), (12,))
    assert _alike((2, 6), (2, 3, 2))
    assert _alike((2, 6), (2, 6))
    assert not _alike((2, 6), (3, 4))
    assert not _alike((2, 6), (2, 5))
