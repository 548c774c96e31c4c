"""Tests that exactly the workers for which others wait are named."""

from __future__ import annotations

from typing import Any

import pytest
from supervised import Fake, running

from autopar.elastic.processes.watching import HangWatch

TICK_S = 0.5


class Clocks:
    """A run whose workers report their places as often as real workers."""

    def __init__(self, count: int = 3, **limits: Any) -> None:
        self.fake = running(count, **limits)
        self.state: dict[int, str] = {}
        self.fake.supervisor.watch = HangWatch(
            self.fake.supervisor.limits,
            lambda found: "" if found is None else self.state.get(found.pid, ""),
        )
        self.doing = {w: place("script", 9) for w in range(count)}
        self.since = dict.fromkeys(range(count), 0.0)
        self.quiet: set[int] = set()

    @property
    def printed(self) -> list[str]:
        return [x for x in self.fake.printed if not x.startswith("a world of")]

    def at(self, worker: int, name: str, step: int, **more: Any) -> None:
        """Sets a worker's place from now on."""
        self.doing[worker] = place(name, step, **more)
        self.since[worker] = self.fake.now
        self.beat(worker)

    def beat(self, worker: int) -> None:
        """Sends a worker's heartbeat."""
        doing = self.doing[worker]
        said = {**doing, "for_s": self.fake.now - self.since[worker]}
        known = {"step": doing["step"], "phase": "step", "doing": said}
        generation = self.fake.supervisor.generation
        self.fake.tell(worker, "beat", generation=generation, **known)

    def pass_(self, seconds: float) -> None:
        """Time passes."""
        fake, end = self.fake, self.fake.now + seconds
        while fake.now < end:
            fake.now += TICK_S
            for worker in self.doing.keys() - self.quiet:
                self.beat(worker)
            fake.supervisor.tick()

    def train(self, seconds: float, step_s: float = 1.0, step: int = 10) -> int:
        """All do steps."""
        end = self.fake.now + seconds
        while self.fake.now < end:
            for worker in self.doing:
                self.at(worker, "program", step)
            self.pass_(step_s)
            step += 1
        return step


def place(name: str, step: int, **more: Any) -> dict[str, Any]:
    known = {"step_s": 0.1, "longest_s": 0.3, "samples_s": 0.01, "script_s": 0.01}
    said = {"place": name, "step": step, "steps": 50, "program": "train", "for_s": 0.0}
    return {**said, **known, "measured": 20, **more}


def blocked(more: str = "samples", **said: Any) -> Clocks:
    """Worker 1 is in its own code, and the others are in the program of step 11."""
    run = Clocks()
    for worker in (0, 2):
        run.at(worker, "program", 11)
    run.at(1, more, 10 if more == "script" else 11, **said)
    return run


def test_one_in_the_source_of_samples() -> None:
    run = blocked(frame="train.py:41 in rows", busy=0.0)
    run.pass_(4.5)
    assert not run.printed
    run.pass_(1.0)
    assert run.printed == [
        "worker 1 (process 101, device 1) has been in the source of samples for step "
        "11 for 5 s (train.py:41 in rows; it sleeps, or waits for something); workers "
        "0 and 2 wait for it"
    ]
    run.pass_(6.0)
    run.at(1, "program", 11)
    run.pass_(0.5)
    assert run.printed[1:] == ["worker 1 made no progress for 12 s: it goes on"]


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        (1.0, "it computes"),
        (0.0, "sleeps, or waits"),
        (0.2, "step 11 for 5 s; workers"),
    ],
)
def test_a_loop_is_told_from_a_sleep(busy: float, words: str) -> None:
    run = blocked(busy=busy)
    run.pass_(5.0)
    assert words in run.printed[0]


def test_the_last_beats_after_a_stop_of_the_process() -> None:
    run = blocked("program")
    for worker in range(3):
        run.fake.supervisor.members[worker].ready["process"] = {  # type: ignore[index]
            "pid": 100 + worker, "started": 1, "boot": "b",
        }  # fmt: skip
    run.quiet, run.state = {1}, {101: "T"}
    run.pass_(1.5)
    assert not run.printed
    run.pass_(1.0)
    assert run.printed == [
        "worker 1 (process 101, device 1) is stopped by a signal in step 11: nothing "
        "was heard of it for 2 s; workers 0 and 2 wait for it"
    ]
    run.quiet = set()
    run.pass_(1.0)
    assert run.printed[1:] == ["worker 1 made no progress for 3 s: it answers"]


@pytest.mark.parametrize(
    ("state", "words"), [("R", "Python threads do not run"), ("", "network is down")]
)
def test_one_that_says_nothing(state: str, words: str) -> None:
    """It is named before it is killed, and not at once."""
    run = blocked("program")
    ready = run.fake.supervisor.members[1].ready
    assert ready is not None
    ready["process"] = {"pid": 101, "started": 1, "boot": "b"}
    run.quiet, run.state = {1}, {101: state}
    run.pass_(7.0)
    assert not run.printed
    run.pass_(1.0)
    assert words in run.printed[0]
    assert not run.fake.killed
    run.pass_(8.0)
    assert run.fake.killed == [1]


def test_another_host_is_named() -> None:
    run = blocked()
    ready = run.fake.supervisor.members[1].ready
    assert ready is not None
    ready |= {"address": "n3:7001", "devices": 2}
    run.pass_(5.0)
    assert "worker 1 (process 101, host n3, devices 2 to 3)" in run.printed[0]


def test_a_task_that_is_called() -> None:
    """The others have issued what they have, and wait for the end of the step."""
    run = Clocks()
    task = {"task": "stage 1 forward 3", "number": 7, "of": 24, "left": 0}
    for worker in range(3):
        run.at(worker, "program", 11, task={**task, "inside": worker == 1})
    run.pass_(5.0)
    assert run.printed == [
        "worker 1 (process 101, device 1) has been in step 11, task 7 of 24 'stage 1 "
        "forward 3', for 5 s; workers 0 and 2 wait for it"
    ]
    again = {**task, "task": "stage 1 update", "number": 25, "inside": True}
    run.at(1, "program", 11, task=again)
    run.pass_(5.0)
    assert "11, 'stage 1 update', behind the 24 tasks of the sch" in run.printed[2]


@pytest.mark.parametrize(
    "other",
    [
        {"inside": True},
        {"inside": False, "number": 6, "left": 1},  # it has to issue what comes first
    ],
)
def test_tasks_that_tell_nothing(other: dict[str, Any]) -> None:
    run = Clocks()
    task = {"task": "stage 1 forward 3", "number": 7, "of": 24, "left": 0}
    run.at(0, "program", 11, task={**task, "inside": True})
    run.at(1, "program", 11, task={**task, **other})
    run.at(2, "program", 11, task={**task, "inside": False})
    run.pass_(59.0)
    assert not run.printed


def test_one_is_inside_a_program_that_the_others_have_left() -> None:
    run = Clocks()
    run.at(1, "program", 10)
    for worker in (0, 2):
        run.at(worker, "program", 11)
    run.pass_(5.0)
    assert "1) has been inside the program 'train' of step 10 for 5 s" in run.printed[0]


def test_none_is_named_where_all_are_inside_one_program() -> None:
    run = Clocks()
    for worker in range(3):
        run.at(worker, "program", 11)
    run.pass_(59.5)
    assert not run.printed
    run.pass_(0.5)
    assert run.printed == [
        "all 3 workers have been inside the program 'train' of step 11 for 60 s; "
        "`autopar workers --stacks` shows where"
    ]
    run.at(2, "script", 11)
    run.pass_(0.5)
    assert run.printed[1:] == ["all workers made no progress for 60 s: they go on"]


class TestNoFalseAlarm:
    def test_long_steps_and_what_was_seen_before(self) -> None:
        run = blocked(step_s=30.0)
        run.pass_(299.0)
        assert not run.printed
        run = blocked(longest_s=40.0)
        run.pass_(79.0)
        assert not run.printed
        run.pass_(2.0)
        assert len(run.printed) == 1

    def test_first_steps_of_a_world(self) -> None:
        run = blocked(steps=2)
        run.pass_(59.0)
        assert not run.printed
        run.pass_(1.0)
        assert len(run.printed) == 1

    def test_one_that_compiles(self) -> None:
        run = blocked("after", compiles=True)
        run.pass_(599.0)
        assert not run.printed

    def test_a_step_for_which_nobody_waits(self) -> None:
        """All evaluate in their scripts, one after another."""
        run = Clocks()
        run.at(0, "script", 10)
        run.pass_(3.0)
        for worker in (1, 2):
            run.at(worker, "script", 11)
        run.pass_(1000.0)
        assert not run.printed

    def test_others_that_have_just_begun_to_wait(self) -> None:
        run = Clocks()
        run.at(1, "script", 10)
        run.pass_(100.0)
        for worker in (0, 2):
            run.at(worker, "program", 11)
        run.pass_(7.5)
        assert not run.printed
        run.pass_(0.5)
        assert "1) has been in its script before step 11" in run.printed[0]

    def test_workers_that_were_all_away(self) -> None:
        """As a machine that slept: their own clocks say that they made no progress."""
        run = blocked()
        run.since = dict.fromkeys(run.since, -100.0)
        run.pass_(4.0)
        assert not run.printed

    def test_a_supervisor_that_was_away(self) -> None:
        run = blocked()
        run.pass_(2.0)
        run.fake.now += 100.0
        run.fake.supervisor.excuse(100.0)
        run.pass_(2.5)
        assert not run.printed

    def test_steps_that_are_done(self) -> None:
        run = Clocks()
        run.train(100.0)
        assert not run.printed


class TestSlow:
    def test_its_source_takes_longer(self) -> None:
        run = Clocks()
        for worker in range(3):
            run.doing[worker] |= {"step_s": 0.25}
        run.doing[1] |= {"samples_s": 0.2}
        run.pass_(9.0)
        assert not run.printed
        run.pass_(2.0)
        assert run.printed == [
            "worker 1 (process 101, device 1) is slow: its source of samples takes "
            "210 ms of each step, and 20.0 ms in other workers; workers 0 and 2 wait "
            "for it"
        ]
        run.doing[1] |= {"samples_s": 0.01}
        run.pass_(9.0)
        assert len(run.printed) == 1
        run.pass_(2.0)
        assert "1 was slow for" in run.printed[1]
        assert not run.fake.supervisor.watch.hang_s

    def test_a_little_is_not_named(self) -> None:
        run = Clocks()
        run.doing[1] |= {"samples_s": 0.05}
        run.pass_(50.0)
        assert not run.printed

    def test_all_have_a_slow_source(self) -> None:
        run = Clocks()
        for worker in range(3):
            run.doing[worker] |= {"samples_s": 2.0, "step_s": 2.1}
        run.pass_(50.0)
        assert not run.printed


def test_one_that_does_not_leave_its_world() -> None:
    """The others have left it, as a collective of theirs was given up."""
    run = blocked()
    run.pass_(1.0)
    run.fake.tell(0, "broken", generation=1, error="JaxRuntimeError: gloo")
    for worker in (0, 2):
        del run.doing[worker]
        run.fake.ready(worker)
    run.pass_(6.0)
    assert "1) has been in the source of samples" in run.printed[0]
    assert "workers 0 and 2 wait" in run.printed[0]


def test_one_that_is_killed_is_not_named_any_more() -> None:
    run = blocked()
    run.pass_(5.0)
    run.fake.supervisor.on_end(1, -9)
    del run.doing[1]
    run.pass_(0.5)
    assert "worker 1 made no progress for 6 s: it is gone" in run.printed


def test_what_the_status_says() -> None:
    run = blocked()
    run.pass_(7.0)
    status = run.fake.supervisor.status()
    assert status["workers"]["1"]["doing"].endswith("samples for step 11 for 7 s")
    (text,) = status["hangs"]
    assert " for 7 s; workers 0 and 2 wait for it" in text
    assert run.fake.supervisor.watch.hang_s == {1: 2.0}


def test_a_worker_of_an_earlier_release_says_nothing() -> None:
    fake: Fake = running(2)
    fake.tell(0, "beat", generation=1, step=1, phase="step")
    fake.now = 2.0
    fake.supervisor.tick()
    assert fake.supervisor.status()["workers"]["0"]["doing"] == ""
