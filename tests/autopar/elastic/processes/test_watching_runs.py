"""Tests that real processes that hang, and only these, are named within seconds."""

from __future__ import annotations

import pathlib
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import checkout
import pytest
from command_line import exit_code
from elastic_processes import Run
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from autopar.elastic.processes.metrics import METRICS

pytestmark = pytest.mark.cluster

SCRIPT = checkout.ROOT / "tests" / "support" / "hanging_script.py"
FIRST_S = 7.0

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts runs, and ends their remaining processes."""
    runs: list[Run] = []

    def started(*words: Any, **options: Any) -> Run:
        folder = tmp_path / "run"
        options = {"script": SCRIPT, "collective-timeout": 90, **options}
        runs.append(Run(folder, folder, *words, **options))
        return runs[-1]

    yield started
    for run in runs:
        run.clean()


def hangs(run: Run) -> list[tuple[int, str]]:
    """The named workers, with the kind of finding."""
    return [(x["worker"], x["hang"]) for x in run.log() if x["event"] == "hang"]


def samples(run: Run) -> dict[str, float]:
    """(name, worker) -> value, from one request for metrics."""
    found = re.search(r"serves metrics at (\S+)", run.output())
    assert found is not None
    asked = urllib.request.Request(
        found[1], headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
    return {
        " ".join([s.name, s.labels["worker"]] if "worker" in s.labels else [s.name]): (
            s.value
        )
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_hanging_workers_are_named_and_others_are_not(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source that sleeps and a stopped process are; a long first step is not."""
    run = start(2000, 0.02, FIRST_S, processes=2, silence=60, metrics=0)
    run.wait_for(lambda: run.count("formed") == 1)
    run.wait_for(lambda: samples(run).get("autopar_steps_total", 0) > 10)
    assert not hangs(run)
    (run.folder / "hang.1").touch()
    run.wait_for(lambda: hangs(run) == [(1, "own")])
    asked = "workers", "--folder", run.folder
    assert exit_code(*asked) == 0
    assert "worker 0 waits for it" in capsys.readouterr().out
    assert exit_code(*asked, "--stacks", "1") == 0
    assert "hanging_script.py" in capsys.readouterr().out
    named = samples(run)
    assert named["autopar_worker_hanging 1"] == 1
    (run.folder / "hang.1").unlink()
    run.wait_for(lambda: run.count("hang over") == 1)
    run.kill(0, signal.SIGSTOP)
    run.wait_for(lambda: hangs(run)[1:] == [(0, "stopped")])
    assert exit_code(*asked, "--stacks", "0") == 2
    assert f"`kill -CONT {run.pid(0)}`" in capsys.readouterr().err
    run.kill(0, signal.SIGCONT)
    run.wait_for(lambda: run.count("hang over") == 2)
    last = samples(run)
    (run.folder / "go").touch()
    assert run.ask(command="stop")["wrong"] == ""
    assert run.wait() == 0, run.output()
    assert len(hangs(run)) == 2
    first = next(x for x in run.log() if x["event"] == "hang")
    assert (first["place"], first["seconds"]) == ("samples", pytest.approx(5, abs=3))
    assert re.match(r"hanging_script.py:\d+ in source$", first["frame"])
    assert first["busy"] < 0.5
    assert "made no progress for" in run.output()
    assert last["autopar_worker_hang_seconds_total 1"] > 0
    assert last["autopar_samples_total"] > named["autopar_samples_total"] / 2
    assert last["autopar_step_sent_bytes"] > 0
    assert 0 < last["autopar_loss"] < 10
    names = {x.partition(" ")[0] for x in last}
    assert names == {spec.sample(name) for name, spec in METRICS.items()}


def test_a_task_of_a_schedule_hangs(start: Start) -> None:
    """Both processes answer; the stage whose task calls the host is named."""
    run = start(2000, 0.02, 0, 2, processes=2)
    run.wait_for(lambda: run.reached() > 10)
    (run.folder / "task").touch()
    run.wait_for(lambda: bool(hangs(run)))
    (run.folder / "task").unlink()
    run.wait_for(lambda: run.count("hang over") == 1)
    run.ask(command="stop")
    assert run.wait() == 0, run.output()
    (first,) = [x for x in run.log() if x["event"] == "hang"]
    assert (first["worker"], first["hang"]) == (1, "task"), run.output()
    assert "'stage 1 update', behind the 8 tasks" in first["text"]
