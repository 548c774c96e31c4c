"""Tests changes of the cluster; a failed change must change nothing."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import compressed_cases as cases
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import small_step
import step_forms as forms

import autopar
from autopar import Cluster, PlanError
from autopar.runtime import placement
from autopar.runtime.planned import PlannedStep

STEPS = 3
# Two failures that no argument brings about: what must go wrong on the way.
COMPILING, MOVING = "compiling", "moving"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Arguments with which `replan` must fail, and the error that it must raise."""

    message: str
    cluster: Any = "4:cpu"
    state: Callable[[Any], Any] = lambda state: state
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    broken: str = ""
    error: type[Exception] = PlanError


def infeasible() -> Cluster:
    return forms.with_memory(Cluster.parse("4:cpu"), 100)


FAILURES = {
    "too few devices": Failure("16 devices .*, and to run it there are 8", "16:cpu"),
    "too few are named": Failure("4 devices .* are 2", options={"devices": [0, 1]}),
    "unknown device": Failure("not among", options={"devices": [0, 1, 2, 99]}),
    "no device": Failure("not among", options={"devices": [None] * 4}),
    "device twice": Failure("twice", options={"devices": [0, 1, 2, 2]}),
    "infeasible": Failure("no plan fits", infeasible, error=autopar.InfeasibleError),
    "no cluster": Failure("cluster=3", 3, error=autopar.ClusterError),
    "no such cluster": Failure("nonsense", "nonsense", error=autopar.ClusterError),
    "no plan": Failure("plan=3: expected", options={"plan": 3}),
    "no such plan": Failure("cannot be read", options={"plan": "missing.json"}),
    "no state": Failure("the state is not what", state=lambda _: None),
    "shape": Failure("the state is not what", state=lambda w: w[:8]),
    "dtype": Failure("the state is not what", state=lambda w: w.astype(jnp.int32)),
    "too much": Failure("the state is not what", state=lambda w: (w, w, w)),
    "compile": Failure("no memory", broken=COMPILING, error=RuntimeError),
    "move": Failure("link is down", broken=MOVING, error=RuntimeError),
}


def fail(
    failure: Failure, step: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that `replan` raises the expected error."""
    cluster = failure.cluster() if callable(failure.cluster) else failure.cluster

    def broken(text: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            raise RuntimeError(text)

        return call

    with monkeypatch.context() as patch:
        if failure.broken == COMPILING:
            patch.setattr(PlannedStep, "compile", broken("no memory"))
        if failure.broken == MOVING:
            patch.setattr(placement, "place", broken("the link is down"))
        with pytest.raises(failure.error, match=failure.message):
            step.replan(cluster, failure.state(state), **failure.options)


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_a_failure_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = shared()
    state = step.init(small_step.state, batch=small_step.structs()[1])
    state, losses = small_step.trained(step, state, 1)
    before = step.plan, step.cluster

    fail(FAILURES[name], step, state, monkeypatch)

    assert (step.plan, step.cluster) == before
    _, more = small_step.trained(step, state, STEPS - 1)
    np.testing.assert_allclose(losses + more, small_step.plain_losses(STEPS), rtol=1e-5)


@functools.cache
def shared() -> Any:
    """One step for all failures, because none of them changes it."""
    return small()


def small(**options: Any) -> Any:
    return autopar.parallelize(small_step.step, **{"cluster": "2:cpu", **options})


def test_a_plan_of_another_step_changes_nothing() -> None:
    step = small()
    state, losses = small_step.trained(step, small_step.state(), 1)
    other = small_step.plan("4:cpu", rows=48)
    with pytest.raises(PlanError, match="belongs to another step"):
        step.replan("4:cpu", state, plan=other)
    assert step.cluster.num_devices == 2
    _, more = small_step.trained(step, state, 1)
    np.testing.assert_allclose(losses + more, small_step.plain_losses(2), rtol=1e-5)


def test_a_state_that_was_consumed_changes_nothing() -> None:
    step = small()
    old = step.init(small_step.state, batch=small_step.structs()[1])
    state, losses = small_step.trained(step, old, 1)
    assert old.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        step.replan("4:cpu", old)
    _, more = small_step.trained(step, state, 1)
    np.testing.assert_allclose(losses + more, small_step.plain_losses(2), rtol=1e-5)


NAMES = ("too few devices", "infeasible", "no such plan", "compile", "move", "shape")


def test_failures_leave_codecs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals too: losses equal those of a run without failures, to the bit."""
    case = cases.case_of("data_parallel")
    step = case.parallel("int4")
    want = case.train(step, step.init(case.state), case.batches(4))[1]
    state, losses = case.train(step, step.init(case.state), case.batches(1))
    batches = case.batches(3, start=1)
    for pair in (NAMES[:2], NAMES[2:4], NAMES[4:]):
        for name in pair:
            failure = FAILURES[name]
            if name == "too few devices":
                failure = dataclasses.replace(failure, cluster="16x1:cpu")
            if name == "shape":
                failure = dataclasses.replace(failure, state=lambda s: s[1])
            if name in ("move", "compile"):
                text = f"2x1:cpu,{cases.NETWORK}"
                failure = dataclasses.replace(failure, cluster=text)
            fail(failure, step, state, monkeypatch)
        state, more = case.train(step, state, [next(batches)])
        losses += more
    assert losses == want


class TestDevices:
    """A cluster may lie on any devices; the first may be the one that is gone."""

    @pytest.mark.parametrize("by", ["device", "id", "cluster"])
    def test_without_the_first(self, by: str) -> None:
        devices = jax.devices()
        step = small(cluster="8:cpu")
        state, losses = small_step.trained(step, small_step.state(), 1)
        if by == "cluster":
            state = step.replan(named_cluster("4:cpu", (1, 3, 5, 7)), state)
        else:
            chosen = [devices[k] if by == "device" else k for k in (1, 3, 5, 7)]
            state = step.replan("4:cpu", state, devices=chosen)
        assert state.sharding.device_set == set(devices[1::2])

        state, more = small_step.trained(step, state, 2)
        np.testing.assert_allclose(losses + more, small_step.plain_losses(3), rtol=1e-5)
        assert state.sharding.device_set == set(devices[1::2])
        state = step.replan("2:cpu", state)
        assert state.sharding.device_set == set(devices[:2])

    def test_from_the_start(self) -> None:
        devices = jax.devices()
        for options in (
            {"devices": [4, 5]},
            {"cluster": named_cluster("2:cpu", (4, 5))},
        ):
            step = small(**options)
            state = step.init(small_step.state)
            assert state.sharding.device_set == set(devices[4:6])
            state, losses = small_step.trained(step, state, 1)
            assert state.sharding.device_set == set(devices[4:6])
            np.testing.assert_allclose(losses, small_step.plain_losses(1), rtol=1e-5)


def named_cluster(text: str, ids: tuple[int, ...]) -> Cluster:
    """The cluster of some of eight devices, after the others have left."""
    gone = [k for k in range(8) if k not in ids]
    left = Cluster.parse("8:cpu").without(devices=gone)
    assert left.ids == ids
    assert left.num_devices == Cluster.parse(text).num_devices
    return left


def test_the_old_state_stays_unless_it_is_given_up() -> None:
    step = autopar.parallelize(small_step.step, cluster="2:cpu", devices=[0, 1])
    first, _ = small_step.trained(step, small_step.state(), 1)
    second = step.replan("2:cpu", first, devices=[2, 3])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))

    step.replan("2:cpu", second, devices=[4, 5], consume=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(second))


class TestReading:
    """Clusters as text, plans as files."""

    def test_everywhere(self, tmp_path: pathlib.Path) -> None:
        path = tmp_path / "plan.json"
        args = small_step.structs()
        plan = autopar.plan(small_step.step, *args, cluster="4:cpu")
        plan.save(path)
        assert autopar.audit(small_step.step, *args, plan=str(path)).plan == plan
        autopar.audit(small_step.step, *args, plan=path, cluster="4:cpu")
        with pytest.warns(UserWarning, match=r"for no gradient:\n.*over devices.*: w"):
            again = autopar.plan(
                small_step.step,
                *args,
                cluster="4:cpu",
                layouts=path,
                compression="int8",
            )
        assert again.nodes == plan.nodes
        step = autopar.parallelize(small_step.step, plan=path)
        assert step.plan == plan
        state, losses = small_step.trained(step, small_step.state(), 1)
        two = small_step.plan("2:cpu")
        two.save(path)
        state = step.replan("2:cpu", state, plan=str(path))
        assert step.plan == two
        _, more = small_step.trained(step, state, 1)
        np.testing.assert_allclose(losses + more, small_step.plain_losses(2), rtol=1e-5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cluster": "nonsense"}, "nonsense"),
            ({"cluster": 8}, "cluster=8: expected an autopar.Cluster or its text"),
            ({"plan": "missing.json"}, "missing.json: cannot be read"),
            ({"plan": 8}, "plan=8: expected an autopar.Plan"),
            ({"layouts": 8}, "layouts=8: expected an autopar.Plan"),
            ({"layouts": "missing.json"}, "missing.json: cannot be read"),
        ],
    )
    def test_errors_come_at_once(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises((PlanError, autopar.ClusterError), match=message):
            autopar.parallelize(small_step.step, **options)


class TestCodecs:
    """What was asked for of gradients holds on the next cluster."""

    @staticmethod
    @functools.cache
    def plan_of(compression: str) -> autopar.Plan:
        step = cases.case_of("data_parallel").parallel(compression)
        step.prepare(*TestCodecs.arguments())
        return step.plan

    @staticmethod
    def arguments() -> tuple[Any, ...]:
        case = cases.case_of("data_parallel")
        return (*case.state(), case.batch(0))

    def given(self, plan: autopar.Plan) -> Any:
        """A step that runs a given plan, with hints for later plans."""
        case = cases.case_of("data_parallel")
        step = autopar.parallelize(
            case.step,
            plan=plan,
            axis_names=case.axes,
            max_axes=1,
            pins=case.pins,
            split_batch=False,
        )
        step.prepare(*self.arguments())
        return step

    def smaller(self, step: Any, **options: Any) -> Any:
        """Replans for two devices, without running the programs."""
        state = self.arguments()[:-1]
        return step.replan(f"2x1:cpu,{cases.NETWORK}", state, **options)

    @pytest.fixture(autouse=True)
    def no_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PlannedStep, "compile", lambda _: None)

    def test_those_of_a_plan_are_kept(self) -> None:
        step = self.given(self.plan_of("int8"))
        self.smaller(step)
        assert {g.codec for g in step.plan.gradients} == {"int8", "dense"}
        assert {g.workers for g in step.plan.gradients} == {2}
        assert step.plan.compression.mode == "int8"

    def test_a_plan_that_does_not_say_why(self) -> None:
        """One codec is asked for again, of several each gradient keeps its own."""
        plan = self.plan_of("int8")
        empty = type(plan.compression)()
        silent = msgspec.structs.replace(plan, compression=empty).with_checks()
        step = self.given(silent)
        self.smaller(step)
        assert {g.codec for g in step.plan.gradients} == {"int8", "dense"}

        step = self.given(silent)
        step.recode({"params/0/up": "int4"})
        step = self.given(step.plan)
        self.smaller(step)
        self.check_by_hand(step.plan)

    @staticmethod
    def check_by_hand(plan: autopar.Plan) -> None:
        codecs = {g.name: (g.codec, g.workers) for g in plan.gradients}
        assert codecs == {
            "params/0/up": ("int4", 2),
            "params/0/down": ("int8", 2),
            "params/0/bias": ("dense", 2),
        }
        assert plan.compression.mode == "edited"
        assert plan.changed_parts == ()

    def test_codecs_that_were_given_by_hand_are_kept(self) -> None:
        """Also those of a plan that holds what was edited in another."""
        plan = self.plan_of("int8")
        by_hand = plan.with_stage(
            gradients=tuple(
                msgspec.structs.replace(g, codec="int4", feedback=True)
                if g.name.endswith("up")
                else g
                for g in plan.gradients
            )
        )
        step = self.given(by_hand)
        self.smaller(step)
        self.check_by_hand(step.plan)

        step = self.given(self.given(by_hand).plan)
        self.smaller(step)
        self.check_by_hand(step.plan)

    def test_a_codec_that_was_asked_for_is_kept(self) -> None:
        step = cases.case_of("data_parallel").parallel("int8")
        step.prepare(*self.arguments())
        self.smaller(step)
        assert {g.codec for g in step.plan.gradients} == {"int8", "dense"}

    def test_layouts_that_do_not_fit_give_way_with_a_warning(self) -> None:
        """They are kept where they can be; codecs always are."""
        case = cases.case_of("data_parallel")
        step = case.parallel("int8", layouts=self.plan_of("none"))
        step.prepare(*self.arguments())
        before = step.plan
        with pytest.warns(UserWarning, match="mesh data=4 does not fit the cluster"):
            self.smaller(step)
        assert {g.codec for g in step.plan.gradients} == {"int8", "dense"}
        assert {g.workers for g in step.plan.gradients} == {2}

        state = self.arguments()[:-1]
        step.replan(f"4x1:cpu,{cases.NETWORK}", state)
        assert step.plan.nodes == before.nodes
