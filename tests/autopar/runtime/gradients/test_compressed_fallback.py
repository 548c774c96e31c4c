"""Tests steps that fall back to other codecs if the plan's codecs send too little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import compressed_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_cases import case_of, fresh, on_host

import autopar
from autopar import PlanError
from autopar.compression.policies.policy import Observation
from autopar.runtime.gradients.codec_state import carry_over, place_state

NAME = "data_parallel"
STEPS = 4


class Watching:
    """A policy that makes the changes that a test sets."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.seen: list[Observation] = []
        self.wishes: list[Mapping[str, str] | None] = []

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        self.seen.append(seen)
        return self.wishes.pop(0) if self.wishes else None


def losses_of(step: Any, name: str = NAME, steps: int = STEPS) -> list[float]:
    case = case_of(name)
    return case.train(step, case.state(), case.batches(steps))[1]


@pytest.mark.parametrize(
    ("name", "least_gain", "level", "codec"),
    [("tensor_parallel", 1.5, 1, "int4"), ("split_over_levels", 0.0, 0, "blocktopk")],
)
def test_a_forced_level_is_that_codec_alone(
    name: str, least_gain: float, level: int, codec: str
) -> None:
    """Enough is never, or always, sent: the losses are those of the one codec."""
    step = fresh("blocktopk", name, fallback="int4", least_gain=least_gain)
    losses = losses_of(step, name)

    alone = fresh(codec, name, telemetry_every=1)
    assert losses == pytest.approx(losses_of(alone, name), rel=1e-6)
    for path, report in step.telemetry.items():
        other = alone.telemetry[path]
        assert report.level == level
        assert report.taken == ((STEPS, 0), (0, STEPS))[level]
        assert report.wire_bytes == other.wire_bytes
        assert report.gain == pytest.approx(other.gain, rel=1e-5)


def test_replicas_stay_the_same_where_other_axes_split_gradients() -> None:
    """Devices with other parts of the gradients take the same level."""
    name = "tensor_parallel"
    case = case_of(name)
    step = fresh("topk:ratio=0.1", name, fallback="int4", least_gain=0.55)
    state, _ = case.train(step, case.state(), case.batches(6))

    (taken,) = {r.taken for r in step.telemetry.values()}
    assert sum(taken) == 6
    for leaf in jax.tree.leaves(state):
        parts: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            assert parts.setdefault(str(shard.index), data) == data


def gains(step: Any) -> float:
    """The gain of the last step over all gradients."""
    reports = step.telemetry.values()
    squares = [r.norm**2 for r in reports]
    sent = [s * r.gain for s, r in zip(squares, reports, strict=True)]
    return sum(sent) / sum(squares)


def test_the_level_follows_the_gain() -> None:
    """Each step takes the first level only where that would send enough."""
    codec, least_gain = "topk:ratio=0.1", 0.55
    case, policy = case_of(NAME), Watching()
    levels_below = ("topk:ratio=0.3", "dense")
    step = fresh(codec, fallback=levels_below, least_gain=least_gain, policy=policy)
    state: Any = case.state()
    levels: list[int] = []
    alone = [fresh(text) for text in (codec, levels_below[0])]
    for batch in case.batches(6):
        saved = on_host((state, step.compression_state))
        state, _ = case.train(step, state, [batch])
        (level,) = {r.level for r in step.telemetry.values()}
        levels.append(level)
        if level < 2:
            assert gains(step) >= least_gain
        for number, trial in enumerate(alone[:level]):
            # What the levels before would have sent.
            trial.compression_state = _of_level(saved[1], number)
            case.train(trial, jax.tree.map(jnp.asarray, saved[0]), [batch])
            assert gains(trial) < least_gain
    assert len(set(levels)) > 1
    for seen, level in zip(policy.seen, levels, strict=True):
        counts = {r.taken for r in seen.gradients.values()}
        assert counts == {tuple(int(k == level) for k in range(3))}


def _of_level(state: Any, level: int) -> Any:
    """The state that a step without fallback would have."""
    if state is None:
        return None
    gradients = {
        name: {"residual": kept["residual"], "codec": kept["codec"][level]}
        for name, kept in state["gradients"].items()
    }
    return {"step": state["step"], "gradients": gradients}


class TestState:
    """The state of every level is kept, saved, and carried over."""

    options: Mapping[str, Any] = {
        "fallback": ("powersgd:rank=8", "bf16"),
        "least_gain": 0.9,
    }

    def test_a_restored_run_has_the_same_losses(self) -> None:
        case, step = case_of(NAME), fresh("powersgd:rank=2", **self.options)
        state, _ = case.train(step, case.state(), case.batches(2))
        saved = on_host((state, step.compression_state))
        _, want = case.train(step, state, case.batches(3, start=2))

        again = fresh("powersgd:rank=2", **self.options)
        again.compression_state = saved[1]
        placed = jax.tree.map(jnp.asarray, saved[0])
        _, found = case.train(again, placed, case.batches(3, start=2))

        assert found == want
        kept = saved[1]["gradients"]["params/0/up"]["codec"]
        bases = [jax.tree.leaves(level) for level in kept]
        assert [len(found) > 0 for found in bases] == [True, True, False]

    def test_other_codecs_leave_the_other_levels_state(self) -> None:
        case, step = case_of(NAME), fresh("powersgd:rank=2", **self.options)
        state, _ = case.train(step, case.state(), case.batches(2))
        before = on_host(step.compression_state["gradients"]["params/0/up"])
        step.recode({"params/0/up": "sign"})
        planned = step.prepare(*state, case.batch(2))
        after = carry_over(step.compression_state, planned.sums)
        after = on_host(after["gradients"]["params/0/up"])

        jax.tree.map(
            np.testing.assert_array_equal, after["residual"], before["residual"]
        )
        jax.tree.map(
            np.testing.assert_array_equal, after["codec"][1:], before["codec"][1:]
        )

    @pytest.mark.parametrize("to_levels", [True, False])
    def test_the_state_outlives_the_fall_back(self, to_levels: bool) -> None:
        """A basis that was learnt with one, or without, is that of the first level."""
        case = case_of(NAME)
        forms = [{}, self.options]
        first, second = forms if to_levels else forms[::-1]
        step = fresh("powersgd:rank=2", **first)
        state, _ = case.train(step, case.state(), case.batches(2))
        saved = on_host(step.compression_state)

        other = fresh("powersgd:rank=2", **second)
        other.compression_state = saved
        planned = other.prepare(*state, case.batch(2))
        found = on_host(place_state(saved, planned.sums))
        old = saved["gradients"]["params/0/up"]["codec"]
        new = found["gradients"]["params/0/up"]["codec"]
        one, other_one = (old, new[0]) if to_levels else (old[0], new)
        jax.tree.map(np.testing.assert_array_equal, one, other_one)


def test_a_policy_and_probes_go_with_it() -> None:
    """Counts begin anew at each observation, and with other codecs."""
    case, policy = case_of(NAME), Watching(every=2)
    policy.wishes = [None, {"params/0/up": "sign", "params/0/down": "sign"}]
    step = fresh("topk", fallback="dense", least_gain=0.9, policy=policy)
    case.train(step, case.state(), case.batches(7))

    found = [{r.taken for r in seen.gradients.values()} for seen in policy.seen]
    assert found == [{(0, 2)}] * 3
    assert {r.taken for r in step.telemetry.values()} == {(0, 1)}
    report = step.telemetry["params/0/up"]
    assert report.codec == "sign"
    assert report.wire_bytes == report.dense_bytes
    assert report.relative_error == pytest.approx(0.0, abs=1e-6)


def test_gradients_that_are_not_finite_leave_no_trace() -> None:
    case = case_of(NAME)
    step = fresh("topk", fallback="powersgd", least_gain=0.5)
    state, _ = case.train(step, case.state(), case.batches(2))
    before = on_host((state, step.compression_state["gradients"]))
    batch = case.batch(2)
    batch["x"][3, 5] = np.nan

    state, _ = case.train(step, state, [batch])

    with pytest.warns(UserWarning, match="step 3: .* not finite"):
        after = on_host((state, step.compression_state["gradients"]))
    jax.tree.map(np.testing.assert_array_equal, after, before)


class TestBadInput:
    """Each mistake is named before anything is compiled."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"fallback": "bf17"}, r"fallback='bf17'.*unknown codec"),
            ({"fallback": "bf16", "least_gain": -0.1}, r"least_gain=-0\.1.*at least 0"),
            ({"fallback": "bf16", "least_gain": float("nan")}, r"least_gain.*nan"),
            ({"fallback": "bf16", "compression": "none"}, r"without codecs"),
        ],
    )
    def test_bad_options(self, options: Any, message: str) -> None:
        options = {"compression": "int8", **options}
        with pytest.raises(PlanError, match=message):
            autopar.parallelize(case_of(NAME).step, **options)

    def test_a_codec_that_cannot_be_used(self) -> None:
        case = case_of("sharded_state")
        step = fresh("int8", "sharded_state", fallback="powersgd")
        with pytest.raises(PlanError, match=r"params/0/.*powersgd"):
            step.prepare(*case.state(), case.batch(0))


def test_codecs_after_other_devices() -> None:
    """A step that was compiled for other devices is not taken up again."""
    case = case_of(NAME)
    step = case.parallel("int8")
    state, _ = case.train(step, case.state(), case.batches(1))
    step.recode({"params/0/up": "int4"})
    state, _ = case.train(step, state, case.batches(1))
    state = step.replan(autopar.Cluster.parse(f"2x1:cpu,{cases.NETWORK}"), state)
    before = {g.name: g.codec for g in step.plan.gradients}
    assert before["params/0/up"] == "int8"

    step.recode({"params/0/up": "int4"})

    assert step.plan.axis_sizes == (2,)
    _, (loss,) = case.train(step, state, case.batches(1))
    assert np.isfinite(loss)
