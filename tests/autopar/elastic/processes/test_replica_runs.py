"""Runs of local steps whose processes, a replica each, die, join and leave."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import checkout
import pytest
from elastic_processes import Run

pytestmark = pytest.mark.cluster

SCRIPT = checkout.ROOT / "tests" / "support" / "local_script.py"
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts runs, and ends their remaining processes."""
    runs: list[Run] = []

    def started(*words: Any, **options: Any) -> Run:
        folder = tmp_path / "run"
        runs.append(Run(folder, folder / "losses", *words, script=SCRIPT, **options))
        return runs[-1]

    yield started
    for run in runs:
        run.clean()


def lines_of(run: Run, worker: int) -> dict[int, list[Any]]:
    """By step: loss, outer steps, and numbers of the anchors and the parameters."""
    text = (run.results / f"losses.{run.pid(worker)}").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    steps = [step for step, *_ in found]
    assert steps == list(range(steps[0], steps[0] + len(steps)))  # each step once
    return {step: rest for step, *rest in found}


def lost(run: Run) -> list[dict[str, Any]]:
    lines = (run.results / "losses.ledger").read_text().splitlines()
    return [x for x in map(json.loads, lines) if x["kind"] == "lost"]


def test_a_killed_process_costs_what_its_replica_learnt_alone(start: Start) -> None:
    """The others go on where they are; a process that joins begins at the anchors."""
    run = start(120, 1, 0.05, processes=2)
    run.wait_for_world([0, 1])
    run.wait_for(lambda: run.last_step() > 11)
    run.kill(1)
    run.wait_for_world([0])
    assert run.ask(command="resize", processes=2)["wrong"] == ""
    run.wait_for_world([0, 2])
    assert run.wait() == 0, run.output()
    own, other, third = (lines_of(run, k) for k in (0, 1, 2))
    assert list(own) == list(range(120))
    assert all(own[k][2] == other[k][2] for k in other)  # the anchors
    assert own[3][3] != other[3][3]
    assert own[4][3] == other[4][3]  # the parameters, after an outer step
    # Anchors change with outer steps only, also as processes die and join.
    for k in range(1, 120):
        assert (own[k][2] == own[k - 1][2]) == (own[k][1] == own[k - 1][1])
    (line,) = lost(run)
    assert line["workers"] == [1]
    assert line["since_step"] % 5 == 0
    assert line["steps"] == line["step"] - line["since_step"] > 0
    assert "lost the replica of worker 1" in run.output()
    for k in third:
        assert third[k][1:3] == own[k][1:3]
        assert (third[k][3] == own[k][3]) == ((k + 1) % 5 == 0)
    assert own[119][0] < own[0][0] / 2
    assert re.search(r"Plan: local steps of 2 replicas", run.output())


def test_a_process_leaves_after_an_outer_step(start: Start) -> None:
    """Nothing is lost, also where steps consume the state."""
    run = start(80, 0, 0.05, processes=3)
    run.wait_for_world([0, 1, 2])
    assert run.ask(command="remove", worker=0)["wrong"] == ""
    run.wait_for_world([1, 2])
    assert run.wait() == 0, run.output()
    own, other = lines_of(run, 1), lines_of(run, 2)
    assert list(own) == list(other) == list(range(80))
    assert all(own[k][1:3] == other[k][1:3] for k in own)
    assert own[79][1] == 80 // 5 + 1  # and one as the process left
    assert not lost(run)
    assert "lost the replica" not in run.output()


def test_a_run_goes_on_from_its_checkpoint_with_another_number(start: Start) -> None:
    run = start(60, 0, 0.03, "checkpoints", processes=2)
    assert run.wait() == 0, run.output()
    run.words = (run.words[0], 70, *run.words[2:])
    run.options = {**run.options, "processes": 3}
    run.process = run.started()
    assert run.wait() == 0, run.output()
    lines = lines_of(run, 0)
    assert list(lines) == list(range(60, 70))
    assert lines[69][1] == 70 // 5
