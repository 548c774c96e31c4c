"""Tests that processes agree on a plan, on their arrays, and on failures."""

from __future__ import annotations

import dataclasses
import queue
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import memory_channel
import msgspec
import numpy as np
import pytest
import small_step

import autopar
from autopar import InfeasibleError, PlanError
from autopar.plans.schema import differences
from autopar.runtime import agreement
from autopar.runtime.world import World
from autopar.steps import program_text
from autopar.steps.analysis import analyse
from autopar_passes import jax_compat

# A failure is told at once, not at the end of a barrier; a machine may be busy.
AT_ONCE_S = 45.0


def everywhere(run: Callable[[World], Any], count: int = 2) -> list[Any]:
    return memory_channel.everywhere(run, range(count), count)


def slower(plan: autopar.Plan, *, seconds: float) -> autopar.Plan:
    """The plan, as if the search had taken longer."""
    solver = msgspec.structs.replace(plan.solver, seconds=seconds)
    return msgspec.structs.replace(plan, solver=solver)


class TestPlans:
    def test_the_first_process_plans(self) -> None:
        plan, asked = small_step.plan("4:cpu"), queue.Queue[int]()

        def run(world: World) -> autopar.Plan:
            def make() -> autopar.Plan:
                asked.put(world.process_index)
                return plan

            return agreement.agree(world, make)

        assert everywhere(run) == [plan, plan]
        assert list(asked.queue) == [0]

    def test_what_the_first_process_raises(self) -> None:
        def run(world: World) -> autopar.Plan:
            def make() -> autopar.Plan:
                raise PlanError("no plan fits")

            return agreement.agree(world, make)

        first, second = everywhere(run)
        assert str(first) == "no plan fits"
        assert str(second) == "process 0: no plan fits"

    def test_the_same_plan_but_for_its_times(self) -> None:
        plan = small_step.plan("4:cpu")
        other = slower(plan, seconds=9.0)

        def run(world: World) -> None:
            mine = (plan, other)[world.process_index]
            agreement.check_same(world, mine, "abc", list)

        assert everywhere(run) == [None, None]
        assert agreement.content_digest(plan) == agreement.content_digest(other)

    def test_different_plans(self) -> None:
        """The error names the process and the fields."""
        plans = small_step.plan("4:cpu"), small_step.plan("8:cpu")

        def run(world: World) -> None:
            plan = plans[world.process_index == 2]
            agreement.check_same(world, plan, "step", list)

        for error in everywhere(run, 3):
            assert isinstance(error, PlanError)
            text = "different plans: on process 0 and process 2 cluster/text is '4:cpu'"
            assert text in str(error)

    def test_different_steps(self) -> None:
        """The error names the process, and the first operator that differs."""

        def doubled(w: Any, batch: Any) -> Any:
            return small_step.step(w, 2.5 * batch)

        steps = [analyse(f, small_step.structs()) for f in (small_step.step, doubled)]

        def run(world: World) -> None:
            step = steps[world.process_index == 1]
            agreement.check_same(
                world,
                small_step.plan("4:cpu"),
                program_text.identity(step),
                lambda: program_text.lines(step),
            )

        for error in everywhere(run, 3):
            assert "different steps: process 1 differs" in str(error)
            assert "'dot_general' (small_step.py:19)" in str(error)
            assert "'mul' (test_agreement.py:" in str(error)
            assert "with 2.5 -> float32[24, 16] on process 1" in str(error)

    def test_numbers_of_the_first_process(self) -> None:
        given = np.array([[1 / 3, 2.0], [3.0, np.inf]])

        def run(world: World) -> Any:
            k = world.process_index
            array = agreement.shared_array(world, given + k)
            return array, agreement.shared_number(world, 0.1 + k)

        for array, number in everywhere(run):
            np.testing.assert_array_equal(array, given)
            assert number == 0.1

    @pytest.mark.parametrize("first", [True, False])
    def test_values_that_must_be_equal(self, first: bool) -> None:
        def run(differ: bool) -> Callable[[World], None]:
            def check(world: World) -> None:
                key = jax.random.key(world.process_index if differ else 0)
                leaves = {"rate": np.float32(0.5), "key": key, "plain": 1.0}
                agreement.check_equal(world, leaves, first=first)

            return check

        assert everywhere(run(differ=False)) == [None, None]
        for error in everywhere(run(differ=True)):
            assert str(error).startswith("'key': different values on the processes")

    @pytest.mark.parametrize(
        ("differ", "noticed", "told"),
        [
            (0, 0, "those of the last step"),
            (2, 2, "those of the last step"),
            (1, 2, "one step before the last"),
            (8, 14, "6 steps before the last"),
            (31, 46, "15 steps before the last"),
            (47, 50, "2 steps before the last"),
            (99, None, ""),
        ],
    )
    def test_values_of_steps_are_compared_together(
        self, differ: int, noticed: int | None, told: str
    ) -> None:
        """First after each step, then of 2, 4, 8 and 16 steps together."""

        def check(world: World) -> int | None:
            compared, k = agreement.StepComparison(), 0
            try:
                for k in range(50):
                    value = world.process_index * (k == differ)
                    compared.add(world, {"x": np.float32(value)})
                k = 50
                compared.finish(world)
                compared.finish(world)  # there is nothing left
            except PlanError as error:
                return k if told in str(error) and "'x':" in str(error) else -1
            return None

        assert everywhere(check) == [noticed, noticed]

    @pytest.mark.parametrize(
        ("create", "named"),
        [
            (lambda k, key: lambda given: given, "args[0]"),
            (lambda k, key: lambda given: key, "array 0 of create_state"),
            (lambda k, key: lambda given: 1.5 * k + 0 * given, "program of create"),
        ],
    )
    def test_states_that_processes_make_must_be_equal(
        self, create: Callable[..., Any], named: str
    ) -> None:
        def run(differ: bool) -> Callable[[World], None]:
            def check(world: World) -> None:
                k = world.process_index if differ else 0
                key = jax.random.key(k)
                given = key if named == "args[0]" else jnp.float32(0)
                agreement.check_same_creation(world, create(k, key), (given,))

            return check

        assert everywhere(run(differ=False)) == [None, None]
        for error in everywhere(run(differ=True)):
            assert str(error).startswith(f"'{named}")

    def test_processes_that_pass_the_whole_batch_are_warned(self) -> None:
        rows = np.arange(12.0).reshape(6, 2)

        def run(own: Callable[[int], Any]) -> Callable[[World], None]:
            return lambda world: agreement.warn_of_equal_rows(
                world, {"x": own(world.process_index)}
            )

        with pytest.warns(UserWarning, match="2 processes pass the same 6 rows of 'x'"):
            everywhere(run(lambda k: rows))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert everywhere(run(lambda k: rows + k)) == [None, None]
            assert everywhere(run(lambda k: np.zeros((6, 2)))) == [None, None]

    def test_shapes_that_must_be_equal(self) -> None:
        def run(world: World) -> None:
            rows = (12, 12, 10, 12)[world.process_index]
            shapes = {"state/w": (4, 4), "batch/x": (rows, 4), "batch/y": (rows,)}
            agreement.check_rows(world, shapes)

        for error in everywhere(run, 4):
            assert isinstance(error, PlanError)
            text = "'batch/x' is [12, 4] on processes 0, 1 and 3, [10, 4] on process 2"
            assert text in str(error)
            assert "state" not in str(error)

    def test_alone_nothing_is_sent(self) -> None:
        world = World([0])
        agreement.check_rows(world, {"x": (3,)})
        agreement.check_equal(world, {"x": object()}, first=False)
        agreement.check_same(world, small_step.plan("4:cpu"), "abc", list)
        assert agreement.run_together(world, "working", lambda: 3) == 3
        plan = small_step.plan("4:cpu")
        assert agreement.agree(world, lambda: plan) is plan
        agreement.check_plans(world, plan)
        agreement.check_same_creation(world, lambda: object(), ())
        agreement.warn_of_equal_rows(world, {"x": np.arange(3)})
        array = np.zeros(3)
        assert agreement.shared_array(world, array) is array
        with pytest.raises(ZeroDivisionError), agreement.tell_errors(world, "working"):
            raise ZeroDivisionError


class TestFailures:
    """What one process raises is told to all, at once."""

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_others_that_wait_are_told(self, failing: int) -> None:
        def run(world: World) -> None:
            with agreement.tell_errors(world, "tracing the step"):
                if world.process_index == failing:
                    raise ZeroDivisionError("by nothing")
            agreement.exchange_data(world, "planning")

        took, found = memory_channel.seconds_of(lambda: everywhere(run, 3))
        assert took < AT_ONCE_S
        for process, error in enumerate(found):
            if process == failing:
                assert isinstance(error, ZeroDivisionError)
            else:
                assert isinstance(error, PlanError)
                assert f"process {failing} has failed while tracing the step: " in str(
                    error
                )
                assert "ZeroDivisionError: by nothing (" in str(error)
                assert "test_agreement.py:" in str(error)

    def test_a_process_that_is_slow_does_not_keep_the_others(self) -> None:
        slow = threading.Event()

        def run(world: World) -> None:
            with agreement.tell_errors(world, "tracing the step"):
                if world.process_index == 2:
                    raise ZeroDivisionError("by nothing")
                if world.process_index == 1:
                    assert slow.wait(AT_ONCE_S)
            try:
                agreement.exchange_data(world, "planning")
            finally:
                slow.set()  # by process 0, which has been told already

        for error in everywhere(run, 3)[:2]:
            assert "process 2 has failed" in str(error)

    def test_an_error_of_autopar_keeps_its_class(self) -> None:
        def run(world: World) -> None:
            with agreement.tell_errors(world, "planning"):
                if world.process_index == 0:
                    raise InfeasibleError("nothing fits")
            agreement.exchange_data(world, "planning")

        found = everywhere(run)
        assert [type(error) for error in found] == [InfeasibleError, InfeasibleError]
        assert str(found[1]) == "process 0: nothing fits"

    def test_several_that_fail_and_the_calls_after(self) -> None:
        """Processes stay in step: the next exchange works."""

        def run(world: World) -> Any:
            seen = []
            for k in range(3):
                try:
                    with agreement.tell_errors(world, "tracing the step"):
                        if world.process_index in ((), (0, 2), (0, 1, 2))[k]:
                            raise ZeroDivisionError(k)
                    seen.append(agreement.exchange_data(world, "planning", b"%d" % k))
                except (PlanError, ZeroDivisionError) as error:
                    seen.append(type(error).__name__)
            return seen, agreement.exchange_data(world, "planning", b"last")

        ends = (b"last",) * 3
        told, failed = "PlanError", "ZeroDivisionError"
        start = [b"0"] * 3
        assert everywhere(run, 3) == [
            ([start, failed, failed], list(ends)),
            ([start, told, failed], list(ends)),
            ([start, failed, failed], list(ends)),
        ]

    def test_together_on_all_or_on_none(self) -> None:
        def run(world: World) -> Any:
            return agreement.run_together(
                world, "compiling", lambda: 1 // (1 - world.process_index)
            )

        first, second = everywhere(run)
        assert isinstance(second, ZeroDivisionError)
        assert "process 1 has failed while compiling" in str(first)

    def test_a_process_that_ends(self) -> None:
        def run(world: World) -> Any:
            if world.process_index == 1:
                return world.channel.tell(
                    agreement.message_of_end("it has ended", "", "")
                )
            return agreement.exchange_data(world, "planning")

        error, _ = everywhere(run)
        assert "process 1: it has ended, and this one goes on" in str(error)

    def test_different_things(self) -> None:
        def run(world: World) -> None:
            agreement.exchange_data(
                world, ("planning", "compiling")[world.process_index]
            )

        for error in everywhere(run):
            assert (
                "different things: planning on process 0, compiling on process 1"
                in str(error)
            )

    def test_different_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found out by the first exchange, whatever it is about."""
        mine = agreement.package_versions()
        local = threading.local()
        monkeypatch.setattr(agreement, "package_versions", lambda: local.versions)

        def run(world: World) -> None:
            local.versions = mine
            if world.process_index == 1:
                local.versions = {**mine, "jax": "0.9.9", "flax": "0.1"}
            agreement.exchange_data(world, "comparing shapes of arguments")

        for error in everywhere(run, 3):
            text = f"jax {jax.__version__} on processes 0 and 2, 0.9.9 on process 1"
            assert text in str(error)
            assert "flax" in str(error)
            assert "autopar 0" not in str(error)

    def test_the_store_does_not_grow(self) -> None:
        memory = memory_channel.Memory(2)

        def run(world: World) -> int:
            world = dataclasses.replace(
                world, channel=memory_channel.MemoryChannel(memory, world.process_index)
            )
            for _ in range(20):
                agreement.exchange_data(world, "planning", b"x" * 1000)
            return len(memory.store.values)

        everywhere(run)
        assert len(memory.store.values) <= 4


class TestDifferences:
    def test_fields_of_two_plans(self) -> None:
        plan = small_step.plan("4:cpu")
        (axis,) = plan.axis_names
        other = plan.edit({"w": jax.sharding.PartitionSpec(None, axis)})
        assert differences(plan.to_json(), slower(plan, seconds=9.0).to_json()) == []
        (found,) = differences(plan.to_json(), other.to_json())
        assert found[0] == "stages/step/inputs/w"
        assert found[2] == ((), (axis,)) or found[2] == [[], [axis]]


class TestProgramText:
    """Two steps are the same where their operators and constants are."""

    def test_constants_count(self) -> None:
        def scaled(by: Any) -> Any:
            return lambda w, batch: small_step.step(w, batch * by)

        array = np.arange(16, dtype=np.float32)
        cases = [2.0, 3.0, array, array + 1.0]
        found = [
            program_text.identity(analyse(scaled(by), small_step.structs()))
            for by in (*cases, *cases)
        ]
        assert len(set(found)) == len(cases)
        assert found[: len(cases)] == found[len(cases) :]

    def test_one_text_may_end_first(self) -> None:
        assert program_text.first_difference(["a", "b"], ["a"]) == ("b", "nothing")
        assert program_text.first_difference(["a"], ["a"]) is None


class Service:
    """The store of a coordination service, and what a process does when it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int, count: int) -> None:
        self.values: dict[str, str] = {}
        self.now, self.slept, self.left = 0.0, list[float](), 0
        self.told: list[agreement._Message] = []
        found = jax_compat.Coordination(self, index, count)
        monkeypatch.setattr(jax_compat, "coordination", lambda: found)
        monkeypatch.setattr(jax_compat, "leave_coordination", self.leave)
        monkeypatch.setattr(agreement, "KeyValueExchange", self.exchange)
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(agreement, "time", clock)
        monkeypatch.delattr(sys, "last_value", raising=False)

    def leave(self) -> None:
        self.left += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)

    def exchange(self, client: Any, index: int, count: int) -> Any:
        return types.SimpleNamespace(
            tell=lambda data: self.told.append(agreement._MESSAGE.decode(data))
        )

    def key_value_set(self, key: str, value: str) -> None:
        if key in self.values:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        return self.values[key]

    def key_value_dir_get(self, key: str) -> list[str]:
        return [k for k in self.values if k.startswith(f"{key}/")]


class TestEnd:
    """Another process must not wait minutes for one that has ended."""

    def test_without_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = Service(monkeypatch, 1, 3)
        agreement._end()
        assert service.values == {"autopar/ended/1": ""}
        (told,) = service.told
        assert told.failed == "its program has come to the end"
        assert (told.what, told.kind, told.where) == ("", "", "")
        assert (service.left, service.slept) == (0, [])

    def test_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = Service(monkeypatch, 0, 1)
        agreement._end()
        assert not service.values
        assert not service.told

    @pytest.mark.parametrize("index", [0, 1])
    def test_with_an_error(
        self,
        index: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The process that hosts the store waits for others to read it, for 3 s."""
        service = Service(monkeypatch, index, 2)
        error = ValueError("no \n more")
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        agreement._end()
        (told,) = service.told
        assert (told.what, told.kind, told.failed) == (
            "running",
            "ValueError",
            "no more",
        )
        failed = service.values["autopar/failed"]
        assert failed == f"process {index}: ValueError: no more"
        assert service.left == 1
        assert sum(service.slept) == pytest.approx(0.0 if index else 3.0, abs=0.06)
        assert not capsys.readouterr().err

    def test_it_stays_until_all_have_ended(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        service = Service(monkeypatch, 0, 2)
        service.values = {"autopar/ended/1": "", "autopar/failed": "process 1: first"}
        monkeypatch.setattr(sys, "last_value", ValueError("no"), raising=False)
        agreement._end()
        assert service.slept == [agreement._LEAVE_S]
        assert "first failure was that of process 1: first" in capsys.readouterr().err

    def test_it_is_announced_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hooks: list[Any] = []
        exits = types.SimpleNamespace(
            register=hooks.append,
            unregister=lambda f: [hooks.remove(h) for h in list(hooks) if h == f],
        )
        service = Service(monkeypatch, 0, 2)
        monkeypatch.setattr(agreement, "atexit", exits)
        for _ in range(2):
            agreement.announce_end()
            agreement.leave_at_end()
        assert hooks == [agreement._end, service.leave]
        hooks.clear()
        monkeypatch.setattr(jax_compat, "coordination", lambda: None)
        agreement.announce_end()
        agreement._end()
        assert not hooks
