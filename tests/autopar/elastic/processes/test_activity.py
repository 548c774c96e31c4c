"""Tests the content of a worker's heartbeat, and the stacks of its threads."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import Run, assert_fails

from autopar.cli import workers
from autopar.elastic.processes.activity import Activity, stacks_text
from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.stacks import StackRequests, stack_lines


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(activity: Activity, clock: Clock, steps: int, script_s: float = 0.5) -> None:
    """Runs steps with 0.25 s in the source, 1 s in the program, and then the script."""
    for step in range(steps):
        for name, seconds in {
            "order": 0.0, "samples": 0.25, "program": 1.0, "script": script_s,
        }.items():  # fmt: skip
            activity.enter(name, step)
            clock.now += seconds
    activity.enter("order", steps)


def test_the_times_of_steps(clock: Clock) -> None:
    activity = Activity(clock)
    train(activity, clock, 30)
    data = activity.data()
    assert data["steps"] == 30
    assert (data["step_s"], data["samples_s"], data["script_s"]) == (1.75, 0.25, 0.5)
    assert (data["measured"], data["longest_s"]) == (20, 1.75)
    activity.enter("samples", 30)
    clock.now += 1.5
    assert (activity.data()["place"], activity.data()["for_s"]) == ("samples", 1.5)


def test_first_steps_of_a_world_count_for_no_time(clock: Clock) -> None:
    activity = Activity(clock)
    train(activity, clock, 3, script_s=90.0)
    assert "step_s" not in activity.data()
    train(activity, clock, 1)
    assert activity.data()["longest_s"] == 1.75
    activity.begin()
    assert "step_s" not in activity.data()


def test_what_the_loop_has_brought_to_the_host(clock: Clock) -> None:
    activity = Activity(clock)
    activity.note_done(step=5, position=120, batch=24, loss=0.5)
    assert activity.data().items() >= {"position": 120, "loss": 0.5}.items()


def test_who_looks_at_tasks_does_not_end_the_beats(clock: Clock) -> None:
    activity = Activity(clock)
    activity.enter("program", 1)
    activity.tasks = lambda: {"task": "stage 0 forward 1"}
    assert activity.data()["task"] == {"task": "stage 0 forward 1"}
    activity.tasks = lambda: {}["gone"]
    assert "task" not in activity.data()


@pytest.fixture
def blocked() -> Iterator[Any]:
    """A loop that waits in a function of this file, in a separate thread."""
    activity, go, there = Activity(lambda: 0.0), threading.Event(), threading.Event()

    def rows() -> None:
        activity.enter("samples", 7)
        there.set()
        go.wait()

    thread = threading.Thread(target=rows, name="a loop")
    thread.start()
    there.wait()
    yield activity
    go.set()
    thread.join()


def test_the_line_of_the_user_is_named(blocked: Activity) -> None:
    blocked._clock = lambda: 3.0  # pyright: ignore[reportPrivateUsage]
    assert "frame" not in blocked.data()  # it may have begun just now
    data = blocked.data()
    assert data["frame"].startswith("test_activity.py:")
    assert data["frame"].endswith(" in rows")
    assert not data["compiles"]
    assert "busy" in data


def test_the_stacks_of_all_threads(blocked: Activity) -> None:
    del blocked
    text = stacks_text()
    assert "thread a loop, the innermost call last:" in text
    assert "in rows" in text
    assert "test_the_stacks_of_all_threads" not in text  # the one that asks


class Asked:
    """Requests for stacks, and their replies."""

    def __init__(self, state: str = "") -> None:
        self.now = 0.0
        self.sent: list[tuple[int, str]] = []
        self.replies: list[dict[str, Any]] = []
        self.requests = StackRequests(
            lambda worker, kind: self.sent.append((worker, kind)),
            lambda: self.now,
            lambda process: state,
        )

    def reply(self, **data: Any) -> None:
        self.replies.append(data)


class TestRequests:
    def test_all_answer(self) -> None:
        asked = Asked()
        assert asked.requests.ask({0: None, 1: None}, None, asked.reply) == ""
        assert asked.sent == [(0, "stacks"), (1, "stacks")]
        asked.requests.take(0, "a")
        asked.requests.settle()
        assert not asked.replies
        asked.requests.take(1, "b")
        asked.requests.settle()
        assert asked.replies == [{"stacks": {0: "a", 1: "b"}, "missing": {}}]
        asked.requests.settle()
        assert len(asked.replies) == 1

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ("T", "`kill -CONT 70` lets it go on"),
            ("S", "`py-spy dump --native --pid 70`"),
            ("", "host or the network is down"),
        ],
    )
    def test_one_does_not(self, state: str, words: str) -> None:
        asked = Asked(state)
        asked.requests.ask({4: ProcessId(70, 1, "b")}, 4, asked.reply)
        asked.now = 5.5
        asked.requests.settle()
        (reply,) = asked.replies
        (line,) = stack_lines(reply)
        assert line.startswith("worker 4 has not answered within 5 s")
        assert words in line

    def test_there_is_no_such_worker(self) -> None:
        asked = Asked()
        assert "no worker 3" in asked.requests.ask({0: None}, 3, asked.reply)
        assert not asked.sent


def test_what_the_command_refuses(run: Run, tmp_path: pathlib.Path) -> None:
    words = ("workers", "--folder", tmp_path, "--stacks")
    assert_fails(run(*words, "--stop"), "give one of --processes, --remove, --stop")
    assert_fails(run(*words, "1"), "there is no run.json")
    assert_fails(run(*words, "one"), "give the folder once")


def test_the_command_prints_what_is_there(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fails where a worker has not answered."""
    asked: list[Any] = []

    def answer(folder: pathlib.Path, **words: Any) -> dict[str, Any]:
        asked.append(words)
        missing = {"1": "worker 1 has not answered"}
        found = {"stacks": {"0": "thread MainThread"}, "missing": missing}
        return {"wrong": "", "status": {}, **found}

    monkeypatch.setattr(workers, "command", answer)
    all_ = run("workers", "--folder", tmp_path, "--stacks")
    assert (all_.code, all_.out.count("MainThread")) == (1, 1)
    assert "worker 1 has not answered" in all_.out
    assert_fails(run("workers", "--folder", tmp_path, "--stacks", "1"), "not answered")
    assert [x["worker"] for x in asked] == [None, 1]
