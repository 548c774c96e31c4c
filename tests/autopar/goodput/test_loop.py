"""Tests the loop with an adaptive batch, plan and codecs, with made-up seconds."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import following_cases as cases
import jax
import numpy as np
import optax
import pytest
import step_forms
from following_cases import BASE

import autopar
from autopar import PlanError
from autopar.goodput import (
    CriticalRegimes,
    Following,
    Loop,
    NoiseOptions,
    progress,
    scale_updates,
)
from autopar.goodput.following import codecs_of
from autopar.goodput.ways import Key, Ways
from autopar.runtime import planned
from autopar.runtime.background import Beside, abandonable
from autopar.runtime.parallel_step import ParallelStep

SLOW = "4x1:cpu,network=0.001Gb/s,network_latency=1us"
FAST = "4x1:cpu,network=1000Gb/s,network_latency=1us"


def following(**more: Any) -> Following:
    return Following(**{"base_batch": BASE, "max_batch": 128, "every": 5} | more)


def slow_sync(rows: int, codecs: str = "none") -> float:
    """A step that mostly communicates."""
    return 1e-5 * rows + (0.5e-3 if codecs == "int8" else 5e-3)


def slow_rows(rows: int, codecs: str = "none") -> float:
    """A step whose seconds are proportional to its rows."""
    del codecs
    return 1e-3 * rows


def quiet(position: int, rows: int) -> Any:
    """Samples without noise, for which a larger batch is of no use."""
    x = np.random.default_rng(position).standard_normal((rows, cases.WIDTH))
    return {"x": x.astype(np.float32), "y": x.astype(np.float32)}


class Run:
    """A training loop that a user writes."""

    def __init__(
        self,
        loop: Loop,
        seconds: Callable[..., float],
        source: Any = cases.source,
        tx: Any = None,
    ) -> None:
        self.loop, self.seconds, self.source = loop, seconds, source
        self.state = loop.begin(cases.create(tx))
        self.position = 0
        self.sizes: list[int] = []

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            rows = self.loop.batch_size
            batch = self.source(self.position, rows)
            self.state, loss = self.loop.step(self.state, batch)
            self.position += rows
            self.sizes.append(rows)
            codecs = self.loop.way.codecs
            seconds = self.seconds(rows, codecs)
            self.state = self.loop.observe(
                self.state, batch, seconds=seconds, loss=loss
            )
        return self


def lines() -> tuple[list[dict[str, Any]], Any]:
    found: list[dict[str, Any]] = []
    return found, lambda kind, **fields: found.append({"kind": kind, **fields})


def test_the_batch_grows_where_communication_is_slow() -> None:
    found, record = lines()
    run = Run(Loop(cases.parallel(), following(), record=record), slow_sync).go(40)
    assert run.sizes[0] == BASE
    assert run.sizes[-1] == 128
    (change,) = [x for x in found if x["kind"] == "batch"]
    assert change["old"]["rows"] == BASE
    assert change["new"]["rows"] == 128
    assert change["predicted"]["pays"] > 1
    assert {x["rows"] for x in change["compared"]} >= {BASE, 32, 64, 128}
    (after,) = [x for x in found if x["kind"] == "batch measured"]
    assert after["step_after_s"] == pytest.approx(slow_sync(128))
    assert after["goodput_after"] > after["goodput_before"]
    assert progress(run.state) > 1.5 * BASE * 40
    assert float(run.state["opt"].batch) == 128
    assert float(run.state["opt"].gain) > 1.5


def test_what_is_prepared_beside_the_steps_reads_nothing_that_they_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that runs has taken the arrays of the one before."""
    threads: list[threading.Thread] = []
    reads: list[str] = []

    def beside(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        threads[-1].join()

    for name in ("noise_scale", "telemetry"):
        read = getattr(ParallelStep, name).fget

        def watched(step: Any, name: str = name, read: Any = read) -> Any:
            if threading.current_thread() in threads:
                reads.append(name)
            return read(step)

        monkeypatch.setattr(ParallelStep, name, property(watched))
    layouts = cases.parallel(cluster=FAST).prepare(
        cases.create(), cases.source(0, 4096)
    )
    step = cases.parallel(
        cluster=SLOW,
        layouts=layouts.plan,
        compression="int8:rounding=stochastic",
        noise_scale=NoiseOptions(base_batch=BASE, decay=0.9, every=1),
    )
    rule = following(codecs=codecs_of((), "int8:rounding=stochastic"))
    run = Run(Loop(step, rule, background=beside), slow_sync).go(40)
    assert threads
    assert run.sizes[-1] > BASE
    assert not reads


def test_what_is_prepared_beside_the_steps_can_be_given_up() -> None:
    """As when the processes leave their world: nothing is refused by this."""
    found, record = lines()
    waiting: list[Callable[[], None]] = []
    loop = Loop(cases.parallel(), following(), record=record, background=waiting.append)
    run = Run(loop, slow_sync).go(20)
    assert loop.busy
    assert len(waiting) == 1
    loop.cancel()
    waiting.pop()()
    loop.resume()
    assert not loop.busy
    assert not found
    assert not loop._ways.refused
    for _ in range(5):
        run.go(10)
        while waiting:
            waiting.pop()()  # begun again, and not given up
    assert run.sizes[-1] == 128


def test_a_compilation_beside_the_steps_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes leave at once; the loop prepares anew, and refuses nothing."""
    found, record = lines()
    compiles, compiled = threading.Event(), threading.Event()

    def compile_slowly(lowered: Any) -> None:
        del lowered
        with abandonable():
            compiles.set()
            compiled.wait()

    beside = Beside()
    loop = Loop(cases.parallel(), following(), record=record, background=beside.do)
    run = Run(loop, slow_sync)
    run.go(4)
    monkeypatch.setattr(planned, "compile_lowered", compile_slowly)
    run.go(16)
    compiles.wait()
    loop.cancel()
    beside.leave()
    loop.resume()
    assert not loop.busy
    monkeypatch.undo()
    compiled.set()
    for _ in range(5):
        run.go(10)
        beside.wait()
    assert run.sizes[-1] == 128
    assert "batch refused" not in {x["kind"] for x in found}
    assert not loop._ways.refused


def test_every_batch_is_one_whose_microbatches_the_devices_can_split() -> None:
    def listed(base: int) -> list[Key]:
        tx = cases.optimizer(base=base)
        step = cases.parallel(tx, microbatches=2)
        limits = following(base_batch=base, max_batch=8 * base)
        run = Run(Loop(step, limits), slow_sync, tx=tx).go(1)
        ways = Ways(step, base_batch=base, max_batch=8 * base, codecs={"none": None})
        return list(ways.others(ways.running(base), jax.tree.leaves(run.state), None))

    for base, rows in (
        (24, [32, 48, 64, 96, 136, 192]),
        (16, [24, 32, 48, 64, 88, 128]),
    ):
        found = listed(base)
        assert all(key.rows % (4 * key.microbatches) == 0 for key in found)
        assert sorted({key.rows for key in found if key.rows > base}) == rows


def test_a_gain_that_makes_the_loss_rise_is_capped() -> None:
    found, record = lines()
    loop = Loop(cases.parallel(), following(), record=record)
    run = Run(loop, slow_sync).go(40)
    before = float(run.state["opt"].gain)
    assert before > 1.5
    for _ in range(2):
        batch = run.source(run.position, loop.batch_size)
        run.state, _ = loop.step(run.state, batch)
        seconds = slow_sync(loop.batch_size)
        run.state = loop.observe(run.state, batch, seconds=seconds, loss=1e3)
    assert float(run.state["opt"].gain) == pytest.approx(before / 2)
    (line,) = [x for x in found if x["kind"] == "gain capped"]
    assert (line["step"], line["loss"], line["most"]) == (42, 1e3, before / 2)
    again = Loop(cases.parallel(), following())
    again.go_on(json.loads(json.dumps(loop.to_data())))
    assert again.to_data()["guard"] == loop.to_data()["guard"]
    run.go(20)  # rows beyond what a step may count for are worth nothing
    assert run.sizes[-1] < 128


def test_it_ends_small_where_rows_take_the_time() -> None:
    """A plan that knew nothing of the time may try more rows; it does not keep them."""
    found, record = lines()
    loop = Loop(cases.parallel(), following(), record=record)
    run = Run(loop, slow_rows, quiet).go(90)
    assert set(run.sizes[-20:]) == {BASE}
    assert run.loop.changes <= 2
    kept = [x for x in found if x["kind"] == "batch kept"]
    assert 1 <= len(kept) <= 12  # not each of the decisions
    assert kept[-1]["way"]["rows"] == BASE
    assert kept[-1]["nearest"]["pays"] <= 1.0


def test_it_trains_as_one_device_that_is_told_the_same() -> None:
    """A change of the batch moves the state, and changes nothing of it."""
    run = Run(Loop(cases.parallel(), following()), slow_sync)
    tx, plain, position = cases.optimizer(), cases.create(), 0

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(cases.loss_of)(state["w"], batch)
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": state["w"] + updates, "opt": opt}

    for _ in range(25):
        rows, told = run.loop.batch_size, run.state["opt"]
        plain["opt"] = plain["opt"]._replace(
            batch=np.float32(told.batch), gain=np.float32(told.gain)
        )
        plain = jax.jit(step)(plain, cases.source(position, rows))
        position += rows
        run.go(1)
    assert run.loop.batch_size > BASE
    np.testing.assert_allclose(run.state["w"], plain["w"], rtol=1e-4, atol=1e-5)


def test_codecs_are_used_where_links_are_slow() -> None:
    """What a plan predicts of a codec is worth its program, where steps say so."""
    rows, tx = 512, cases.optimizer(base=512)
    slow = autopar.Cluster.parse("4x1:cpu,network=100Mb/s")
    step = cases.parallel(tx, cluster=slow)
    codecs = codecs_of(("int8",), "none")
    rule = following(base_batch=rows, max_batch=rows, codecs=codecs)

    def seconds(*_: Any) -> float:
        return 2.0 * step.plan.predicted.step_s

    run = Run(Loop(step, rule), seconds, tx=tx).go(30)
    assert run.loop.way.codecs == "int8"
    assert any(g.codec for g in step.plan.gradients)
    assert run.sizes[-1] == rows


def test_codecs_are_left_where_links_are_fast() -> None:
    """Links that cost nothing: encoding is all that a codec would add."""
    step = cases.parallel(cluster=step_forms.cheap("4:cpu"))
    rule = following(max_batch=BASE, codecs=codecs_of(("int8",), "none"))
    run = Run(Loop(step, rule), lambda rows, codecs: 1e-3).go(30)
    assert run.loop.way.codecs == "none"
    assert run.loop.changes == 0


@pytest.mark.parametrize(("rest_s", "codecs"), [(1e-3, "none"), (1e6, "int8")])
def test_codecs_are_not_compared_where_the_job_ends_soon(
    rest_s: float, codecs: str
) -> None:
    """To choose them and to compile their program takes longer than the job."""
    rows, tx = 512, cases.optimizer(base=512)
    step = cases.parallel(tx, cluster=autopar.Cluster.parse("4x1:cpu,network=100Mb/s"))
    rule = following(
        base_batch=rows, max_batch=rows, codecs=codecs_of(("int8",), "none")
    )

    def seconds(*_: Any) -> float:
        return 2.0 * step.plan.predicted.step_s

    loop = Loop(step, rule, rest_s=lambda: rest_s)
    run = Run(loop, seconds, tx=tx).go(30)
    assert run.loop.way.codecs == codecs
    studied = run.loop._ways.count_unstudied(run.loop._ways.running(rows)) == 0
    assert studied == (codecs == "int8")


def test_one_device_sees_its_gradients_in_two_microbatches() -> None:
    """Noise that one group compares with the step before is biased; two are not."""
    step = cases.parallel(cluster="1:cpu", split_batch=False)
    run = Run(Loop(step, following()), slow_sync).go(4)
    assert step.noise_scale.groups == 1
    run.go(30)
    assert run.loop.way.rows > BASE
    assert run.loop.way.microbatches == 2
    scale = step.noise_scale
    assert (scale.groups, scale.biased) == (2, False)


def test_a_world_that_forms_anew_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the same plan on other devices: programs of the old ones are void."""
    step = cases.parallel()
    run = Run(Loop(step, following()), slow_sync).go(30)
    assert run.loop.changes == 1
    key, held = run.loop.way, run.loop._ways
    small = dataclasses.replace(key, rows=BASE)
    assert held.find(small) is not None
    planned = copy.copy(step.running.planned)
    anew = dataclasses.replace(step.running, planned=planned)
    monkeypatch.setattr(step, "_current", anew)
    monkeypatch.setattr(step, "_world", dataclasses.replace(step.world))
    run.go(1)
    assert held.find(small) is None
    assert run.loop.way == key


def test_losses_that_are_not_numbers_teach_nothing() -> None:
    def source(position: int, rows: int) -> Any:
        found = cases.source(position, rows)
        return {k: x * np.nan for k, x in found.items()}

    run = Run(Loop(cases.parallel(), following()), slow_sync, source).go(15)
    assert run.loop.phi() is None
    assert set(run.sizes) == {BASE}


def test_accordion_takes_the_large_batch_outside_critical_regimes() -> None:
    rule = following(rule=CriticalRegimes(window=12, eta=1e9))
    run = Run(Loop(cases.parallel(), rule), slow_rows, quiet).go(40)
    assert run.sizes[0] == BASE
    assert run.sizes[-1] == 128


def test_it_goes_on_where_it_was_left() -> None:
    run = Run(Loop(cases.parallel(), following()), slow_sync).go(30)
    data = run.loop.to_data()
    again = Loop(cases.parallel(), following())
    again.go_on(data)
    assert again.batch_size == run.loop.batch_size == 128
    assert again.to_data()["times"] == data["times"]
    with pytest.raises(PlanError, match="base_batch=32, but the run"):
        Loop(cases.parallel(), following(base_batch=32)).go_on(data)


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ({"max_batch": 8}, "max_batch=8 is smaller than base_batch=16"),
            ({"base_batch": 0}, "base_batch=0 must be a whole number"),
            ({"every": True}, "every=True must be a whole number"),
            ({"codecs": {}}, "at least one codec"),
        ],
    )
    def test_numbers(self, wrong: dict[str, Any], text: str) -> None:
        with pytest.raises(PlanError, match=text):
            following(**wrong)

    def test_an_optimizer_that_does_not_follow(self) -> None:
        loop = Loop(cases.parallel(), following())
        with pytest.raises(PlanError, match="would not follow the batch"):
            loop.begin({"w": np.zeros(3)})

    def test_an_optimizer_for_another_batch(self) -> None:
        other = scale_updates(optax.sgd(0.1), "sqrt", base_batch=7)
        loop = Loop(cases.parallel(), following())
        with pytest.raises(PlanError, match=r"base_batch=16, but .* base_batch=7"):
            loop.begin({"opt": other.init(np.zeros(3))})

    def test_a_step_that_has_run_without_measuring(self) -> None:
        step = cases.parallel(noise_scale=False)
        step(cases.create(), cases.source(0, BASE))
        with pytest.raises(PlanError, match="noise_scale=True"):
            Loop(step, following())

    def test_a_batch_that_does_not_fit_is_noted(self) -> None:
        """The run goes on with what fits, and says what did not."""
        found, record = lines()
        step = cases.parallel()
        loop = Loop(step, following(max_batch=1 << 16), record=record)
        run = Run(loop, slow_sync).go(4)
        made = loop.step.preparation.planner

        def refuse(*args: Any, **more: Any) -> Any:
            raise autopar.InfeasibleError("no plan fits")

        made.plan = made.warm = refuse
        run.go(20)
        assert run.loop.changes == 0
        assert [x["reason"] for x in found if x["kind"] == "batch refused"]
