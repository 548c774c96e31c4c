"""Tests that changes which only save time wait until they pay for the compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import pytest
from compressed_cases import case_of

from autopar.compression.policies.policy import Observation, Saving
from autopar.runtime.gradients.recoding import Adoption, CodecChange, saved_s

NAME, UP, DOWN = "data_parallel", "params/0/up", "params/0/down"
# A link on which fewer bytes are worth their encoding.
SLOW = dataclasses.replace(case_of(NAME), cluster="4x1:cpu,network=10Mb/s")


class Asking:
    """A policy that requests these codecs, one request after each step."""

    every = 1

    def __init__(
        self, wishes: Sequence[Mapping[str, str] | None], horizon: int = 0
    ) -> None:
        self.wishes = iter(wishes)
        self.horizon = horizon
        self.put_off: list[str] = []

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        self.put_off.append(seen.gradients[UP].put_off)
        return next(self.wishes, None)


def ticking(seconds: float) -> Iterator[float]:
    """A clock that advances by a constant at each reading."""
    now = 0.0
    while True:
        now += seconds
        yield now


class Run:
    """Steps whose programs take a given time to compile."""

    def __init__(
        self,
        wishes: Sequence[Mapping[str, str] | None],
        compile_in_savings: float,
        horizon: int = 0,
    ) -> None:
        self.policy = Asking(wishes, horizon)
        self.step = SLOW.parallel("int8", policy=self.policy)
        planned = self.step.prepare(*SLOW.state(), SLOW.batch(0))
        recoded = self.step._codecs.recoding.change_codecs(planned.plan, {UP: "int4"})
        self.saved_s = saved_s(planned.plan, recoded)
        clock = ticking(compile_in_savings * self.saved_s)
        self.step._store._clock = lambda: next(clock)
        self.state = SLOW.state()
        self.used: list[str] = []

    def train(self, count: int) -> None:
        for k in range(count):
            self.state, _ = SLOW.train(self.step, self.state, SLOW.batches(1, start=k))
            self.used.append(self.step._codecs._planned.plan.gradients[0].codec)


def test_the_steps_before_pay_for_what_stays_wanted() -> None:
    """One step's saving counts for the step to come, and one for each that is past."""
    run = Run([Saving({UP: "int4"})] * 9, compile_in_savings=3.5)
    assert run.saved_s > 0
    run.train(3)

    (waiting,) = run.step.codec_changes
    assert run.step.telemetry[UP].put_off == "int4"
    assert run.step.telemetry[DOWN].put_off == ""
    assert (waiting.step, waiting.adopted) == (1, False)
    assert waiting.compile_s == pytest.approx(3.5 * run.saved_s)
    assert waiting.missed_s == pytest.approx(2 * run.saved_s)
    assert "put off: saves" in waiting.reason

    run.train(2)
    codecs = {g.name: g.codec for g in run.step.plan.gradients}
    assert run.used[:4] != run.used[4:]
    assert codecs[UP] == "int4"
    assert codecs[DOWN] == "int8"
    assert run.policy.put_off == ["", "int4", "int4", "int4", ""]
    adopted = run.step.codec_changes[-1]
    assert (adopted.step, adopted.adopted) == (4, True)
    assert run.step.telemetry[UP].put_off == ""


def test_what_the_policy_does_not_allow_is_changed_at_once() -> None:
    run = Run([{UP: "bf16"}], compile_in_savings=1e9)
    run.train(2)
    assert {g.name: g.codec for g in run.step.plan.gradients}[UP] == "bf16"
    assert [c.reason for c in run.step.codec_changes] == ["asked for"]


def test_a_program_that_is_compiled_costs_nothing() -> None:
    """There and back, though one of the two ways saves nothing."""
    there, back = Saving({UP: "bf16"}), Saving({UP: "int8"})
    run = Run([{UP: "bf16"}, back, there], compile_in_savings=1e6)
    run.train(4)
    reasons = [c.reason for c in run.step.codec_changes]
    assert reasons == ["asked for", "compiled before", "compiled before"]
    assert {g.name: g.codec for g in run.step.plan.gradients}[UP] == "bf16"


def test_a_horizon_that_is_stated_counts() -> None:
    run = Run([Saving({UP: "int4"})], compile_in_savings=3.5, horizon=4)
    run.train(2)
    (change,) = run.step.codec_changes
    assert (change.adopted, change.steps) == (True, 4)
    run = Run([Saving({UP: "int4"})], compile_in_savings=3.5, horizon=3)
    run.train(2)
    (change,) = run.step.codec_changes
    assert (change.adopted, change.steps) == (False, 3)


def test_codecs_that_are_slower_wait_for_ever() -> None:
    run = Run([Saving({UP: "dense"})] * 3, compile_in_savings=0.0, horizon=10**9)
    run.train(3)
    (change,) = run.step.codec_changes
    assert change.reason == "put off: no step is predicted to be faster"
    assert {g.name: g.codec for g in run.step.plan.gradients}[UP] == "int8"


class TestAdoption:
    """What steps miss is counted from one observation to the next."""

    def asked(self, adoption: Adoption, step: int, saved: float = 1.0) -> bool:
        adoption.count_missed(step)
        return adoption.judge({UP: "int4"}, saved, 10, 100.0)

    def test_steps_between(self) -> None:
        adoption = Adoption()
        assert not self.asked(adoption, 10)
        assert not self.asked(adoption, 99)
        assert adoption.changes[-1].missed_s == 89.0
        assert self.asked(adoption, 100)

    def test_nothing_is_missed_while_nothing_is_wanted(self) -> None:
        adoption = Adoption()
        assert not self.asked(adoption, 10)
        adoption.count_missed(20)
        adoption.withdrawn()
        assert adoption.waiting == {}
        assert not self.asked(adoption, 1000)
        assert adoption.changes[-1].missed_s == 10.0

    def test_other_codecs_inherit_what_was_missed(self) -> None:
        """A policy that picks others each time compiles in the end, too."""
        adoption = Adoption()
        found = [
            (
                adoption.count_missed(10 * k),
                adoption.judge({UP: f"int{k}"}, 1.0, 10, 100.0),
            )[1]
            for k in range(1, 14)
        ]
        assert found.index(True) == 9
        # What was missed has paid for a program, and counts no more.
        assert found.count(True) == 1
        assert [c.codecs[UP] for c in adoption.changes[:2]] == ["int1", "int2"]

    def test_a_compilation_that_was_asked_for_takes_what_was_missed(self) -> None:
        adoption = Adoption()
        self.asked(adoption, 10)
        adoption.count_missed(60)
        adoption.follow({UP: "bf16"}, compiled=False)
        assert adoption.waiting == {}
        self.asked(adoption, 70)
        assert adoption.changes[-1].missed_s == 0.0

    def test_codecs_of_a_program_that_is_there_leave_it(self) -> None:
        adoption = Adoption()
        self.asked(adoption, 10)
        adoption.count_missed(60)
        adoption.follow({UP: "bf16"}, compiled=True)
        self.asked(adoption, 70)
        assert adoption.changes[-1].missed_s == 50.0

    def test_the_ledger_is_bounded(self) -> None:
        adoption = Adoption()
        for k in range(1000):
            adoption.follow({UP: f"int{k}"}, compiled=True)
        assert len(adoption.changes) == 64


def test_a_change_pays_if_it_saves_as_much_as_it_costs() -> None:
    change = CodecChange(1, {}, False, "", saved_s=0.5, steps=4, missed_s=1.0)
    assert dataclasses.replace(change, compile_s=3.0).pays
    assert not dataclasses.replace(change, compile_s=3.1).pays
    assert not dataclasses.replace(change, saved_s=0.0, compile_s=0.0).pays
