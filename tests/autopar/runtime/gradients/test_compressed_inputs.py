"""Tests that changes of parameters that are inputs of the program compile nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from compressed_cases import case_of

from autopar.compression.policies.policy import Observation
from autopar.errors import PlanError
from autopar.runtime.gradients import probing

NAME, UP, DOWN = "data_parallel", "params/0/up", "params/0/down"
Wishes = Sequence[Mapping[str, str] | None]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of the modules that XLA compiles, in order."""
    found: list[str] = []

    def heard(event: str, duration_secs: float, **what: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(what.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


class Wishing:
    """A policy that requests other codecs after every step."""

    every = 1

    def __init__(self, wishes: Wishes, *, often: bool = True) -> None:
        self.wishes = iter(wishes)
        self.often = often

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        return next(self.wishes, None)


def trained(codec: str, wishes: Wishes, often: bool = True, **options: Any) -> Any:
    """Runs one step more than there are requests; returns the step and the losses."""
    case = case_of(NAME)
    policy = Wishing(wishes, often=often)
    step = case.parallel(codec, policy=policy, **options)
    state, losses = case.train(step, case.state(), case.batches(len(wishes) + 1))
    return step, state, losses


def steps_in(names: list[str]) -> int:
    return sum("step" in name for name in names)


# The second change moves the largest amount to another gradient.
CHANGES: dict[str, tuple[Wishes, float]] = {
    "topk:ratio=0.2": (
        [{UP: "topk:ratio=0.1"}, {UP: "topk:ratio=0.2", DOWN: "topk:ratio=0.1"}, None],
        0.0,
    ),
    "powersgd:rank=4": (
        [{UP: "powersgd:rank=3"}, {UP: "powersgd", DOWN: "powersgd:rank=3"}, None],
        1e-5,
    ),
}


@pytest.mark.parametrize("codec", sorted(CHANGES))
def test_losses_are_those_of_constants(codec: str, compiled: list[str]) -> None:
    """One program for all that is changed, beside that of the plan."""
    wishes, tolerance = CHANGES[codec]
    _, _, expected = trained(codec, wishes, often=False)
    constants = steps_in(compiled)
    step, _, losses = trained(codec, wishes)

    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    assert constants == 3
    assert steps_in(compiled) - constants == 2
    sent = {g.name: g for g in step.plan.gradients}
    assert sent[UP].limit
    assert sent[UP].limit == sent[DOWN].limit
    assert step.telemetry[UP].wire_bytes == sent[UP].wire_bytes


def test_dct_compiles_the_steps_of_the_ladder(compiled: list[str]) -> None:
    """Six changes of ratio, by two fifths in all."""
    ratios = [0.02 * 1.4 ** (k / 6) for k in range(1, 7)]
    wishes = [
        {(UP, DOWN)[k % 2]: f"threshold:ratio={r:.5f}"} for k, r in enumerate(ratios)
    ]
    trained("threshold:ratio=0.02", wishes)
    # That of the plan; one limit, and at most three rooms in it.
    assert steps_in(compiled) <= 1 + 3


def test_a_restored_run_is_the_same() -> None:
    wishes: Wishes = [{UP: "topk:ratio=0.1"}, {DOWN: "topk:ratio=0.15"}]
    case, options = case_of(NAME), {"fallback": ("bf16",)}
    step, state, _ = trained("topk:ratio=0.2", wishes, **options)
    saved = jax.tree.map(np.array, step.compression_state)
    state = jax.tree.map(np.array, state)
    again = case.parallel("topk:ratio=0.2", policy=Wishing([]), **options)
    again.compression_state = saved

    _, got = case.train(again, state, case.batches(2, start=3))
    _, want = case.train(step, state, case.batches(2, start=3))
    assert got == want
    assert again.plan.gradients == step.plan.gradients


def test_room_that_does_not_suffice_is_an_error() -> None:
    """A plan that says what its program cannot send is not run."""
    step, _, _ = trained("topk:ratio=0.2", [{UP: "topk:ratio=0.1"}])
    gradients = tuple(
        msgspec.structs.replace(g, room=g.room / 4) if g.limit else g
        for g in step.plan.gradients
    )
    plan = step.plan.with_stage(gradients=gradients)
    planned = step.prepare(*case_of(NAME).state(), case_of(NAME).batch(0))
    with pytest.raises(PlanError, match=r"does not fit the limit .*topk.*Take limit"):
        step._store.program(step._current.analysed, plan, planned.mesh.devices.flat)


def test_programs_and_probes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many changes of codecs as many programs stay as there is room for."""
    monkeypatch.setattr(probing, "PROGRAMS", 2)
    texts = [f"int8:block={32 * k}" for k in range(1, 4)]
    probes = ("int8",)

    class Probing(Wishing):
        def __init__(self) -> None:
            super().__init__([{UP: text} for text in texts], often=False)
            self.asked = 0

        @property
        def probes(self) -> tuple[str, ...]:
            self.asked += 1
            return (*probes, texts[self.asked % len(texts)])

    case, policy = case_of(NAME), Probing()
    step = case.parallel("int8", policy=policy, programs=2)
    state, programs = case.state(), list[Any]()
    for k in range(len(texts)):
        state, _ = case.train(step, state, case.batches(1, start=k))
        planned = step.prepare(*state, case.batch(0))
        programs.append(weakref.ref(planned.function))
        del planned
    gc.collect()
    assert sum(program() is not None for program in programs) <= 2
    assert len(step._store) == 2
    assert len(step._codecs._probes._programs) <= 2
