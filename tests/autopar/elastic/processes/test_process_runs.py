"""Tests runs whose processes die, hang, join and leave; checks the losses."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import checkout
import pytest
import step_forms as forms
from command_line import exit_code
from elastic_processes import LIMIT_S, Run
from process_losses import check_losses

from autopar.elastic.processes.link import CHECKPOINT_VARIABLE, EVERY_VARIABLE

pytestmark = pytest.mark.cluster

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts runs, and ends their remaining processes."""
    runs: list[Run] = []

    def started(*words: Any, **options: Any) -> Run:
        folder = tmp_path / "run"
        runs.append(Run(folder, folder / "losses", *words, **options))
        return runs[-1]

    yield started
    for run in runs:
        run.clean()


def test_processes_join_and_leave(start: Start) -> None:
    """State that is split over processes moves with them; nobody dies."""
    run = start(150, 0, 0.03, processes=2)
    run.wait_for_world([0, 1])
    assert run.ask(command="resize", processes=3)["wrong"] == ""
    run.wait_for_world([0, 1, 2])
    assert run.ask(command="remove", worker=0)["wrong"] == ""
    run.wait_for_world([1, 2])
    assert "--min" in run.ask(command="resize", processes=0)["wrong"]
    assert run.wait() == 0, run.output()
    check_losses(run, 150)


def test_a_changed_link_is_planned_for_while_steps_go_on(start: Start) -> None:
    """The next world finds its plan and its program, whose link it knows."""
    run = start(400, 0, 0.03, processes=2, ahead=None)
    run.wait_for_world([0, 1])
    level = forms.cheap("2:cpu").levels[0].name
    event = {"kind": "link", "level": level, "bandwidth_bytes_per_s": 1e6}
    written = run.folder / "event"
    written.write_text(json.dumps(event))
    written.rename(run.folder / "events")
    run.wait_for(lambda: run.count("formed") == 2)
    times = {x["event"]: x["time_s"] for x in run.log() if not x.get("error")}
    assert times["prepare"] < times["prepared"] < times["formed"]
    prepared = [x for x in run.log() if x["event"] == "prepared"]
    assert [x["compiled"] for x in prepared if x["number"] > 0] == [True]
    lines = (run.folder / "losses.ledger").read_text().splitlines()
    worlds = [x for x in map(json.loads, lines) if x["kind"] == "world"]
    assert [x["program"] for x in worlds] == ["compiled", "loaded"]
    assert run.wait() == 0, run.output()
    check_losses(run, 400)


def test_a_slow_process_gets_fewer_rows(start: Start) -> None:
    """An event names its speed; the plan of replicas ends with the next change."""
    run = start(200, 1, 0.03, processes=2)
    run.wait_for_world([0, 1])
    (run.folder / "events").write_text("1x1:cpu+1x1:cpu,efficiency=0.1\n")
    run.wait_for(lambda: len(run.worlds()) == 2)
    run.wait_for_world([0, 1])
    assert run.ask(command="resize", processes=3)["wrong"] == ""
    run.wait_for_world([0, 1, 2])
    assert run.wait() == 0, run.output()
    check_losses(run, 200)


def test_processes_are_killed_and_stopped(start: Start) -> None:
    """The first one too; the third hangs and is given up. Others have its shards."""
    run = start(120, 1, 0.03, processes=3, silence=8)
    run.wait_for_world([0, 1, 2])
    run.kill(0)
    run.wait_for_world([1, 2])
    run.kill(2, signal.SIGSTOP)
    run.wait_for_world([1])
    assert run.wait() == 0, run.output()
    assert "finished 120 steps" in run.output()
    check_losses(run, 120)


def test_what_a_run_prints_and_how_it_is_stopped(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """A death, a join, and a stop: each is said, and all loops end at one step."""
    run = start(1000, 1, 0.03, processes=2)
    run.wait_for_world([0, 1])
    run.kill(1)
    run.wait_for_world([0])
    assert run.ask(command="resize", processes=2)["wrong"] == ""
    run.wait_for_world([0, 2])
    assert exit_code("workers", "--folder", run.folder, "--stop") == 0
    assert run.wait() == 0, run.output()
    done, lines = run.last_step() + 1, run.output().splitlines()
    assert f"autopar run: stopped after {done} steps." in lines
    assert {f"[{k}] finished {done} steps" for k in (0, 2)} < set(lines)
    said = [x.removeprefix("autopar run: ") for x in lines if x.startswith("autopar r")]
    said = [x for x in said if not x.startswith("waits for ")]  # a slow start
    assert [x.partition(" step ")[0] for x in said[:6]] == [
        "a world of 2 processes (workers 0 and 1) trains from",
        "worker 1 died by signal 9",
        "a world of 1 process (worker 0) trains from",
        "asked for 2 processes",
        "worker 2 joined",
        "a world of 2 processes (workers 0 and 2) trains from",
    ]
    assert all("after a pause of" in said[k] for k in (2, 5))
    assert [". Plan: " in said[k] for k in (0, 2, 5)] == [True, False, True]
    assert "[Gloo]" not in run.output()
    assert "signal" not in "".join(said[6:])
    capsys.readouterr()
    assert exit_code("workers", "--folder", run.folder) == 0
    assert f"the run has ended after {done} steps" in capsys.readouterr().out
    assert exit_code("workers", "--folder", run.folder, "--stop") == 2
    assert exit_code("ledger", run.folder / "losses.ledger") == 0
    rows = capsys.readouterr().out.splitlines()
    assert ["the run begins" in rows[1], "died by signal 9" in rows[2]] == [True, True]
    assert re.search(r"worker 2 joined +1 +2 +\S+ m?s", rows[3])
    assert exit_code("ledger", run.folder / "log.jsonl") == 2
    assert "the log of `autopar run`" in capsys.readouterr().err


def test_a_process_is_killed_as_its_world_forms(start: Start) -> None:
    """The first one, which would have told the others of all their devices."""
    script = checkout.ROOT / "tests" / "support" / "dying_script.py"
    run = start(120, 2, 0.03, processes=3, script=script)
    run.wait_for_world([0, 1, 2])
    (run.folder / "die").touch()
    run.kill(2)
    run.wait_for_world([1])
    assert run.wait() == 0, run.output()
    check_losses(run, 120)


def test_stages_move_between_worlds(start: Start) -> None:
    """Each process has a stage; the one that is left has both, then gives one away."""
    flags = "--xla_force_host_platform_device_count=2"
    run = start(150, 1, 0.03, "", "none", 2, processes=2, flags=flags)
    run.wait_for_world([0, 1])
    run.kill(0)
    run.wait_for_world([1])
    assert run.ask(command="resize", processes=2)["wrong"] == ""
    run.wait_for_world([1, 2])
    assert run.wait() == 0, run.output()
    check_losses(run, 150)


def test_a_supervisor_is_killed_and_started_again(start: Start) -> None:
    run = start(200, 1, 0.05, processes=2, grace=60)
    run.wait_for_world([0, 1])
    run.kill_supervisor()
    run.process = run.started()
    run.wait_for(lambda: run.supervisor() == run.process.pid)
    run.wait_for(lambda: run.ask(command="status")["status"]["world"] == [0, 1])
    run.kill(0)
    run.wait_for_world([1])
    assert run.wait() == 0, run.output()
    check_losses(run, 200)


def test_workers_save_and_stop_where_no_supervisor_comes_back(start: Start) -> None:
    """The next run goes on from there, with another number of processes."""
    run = start(150, 0, 0.03, "checkpoints", processes=2, grace=0.5)
    run.wait_for_world([0, 1])
    pids = [run.pid(0), run.pid(1)]
    run.kill_supervisor()
    for _ in range(1200):
        if not any(_alive(pid) for pid in pids):
            break
        signal.sigtimedwait([], 0.05)
    assert not any(_alive(pid) for pid in pids)
    assert run.output().count("steps was saved") == 2, run.output()
    saved = run.last_step()
    assert saved < 120
    run.options = {"processes": 1}
    run.process = run.started()
    assert run.wait() == 0, run.output()
    check_losses(run, 150)


def test_the_coordination_service_is_killed(start: Start) -> None:
    """As all train, as they form another world, and with the supervisor.

    Nobody else dies: every process is one of the first three.
    """
    run = start(300, 0, 0.03, processes=3, grace=30)
    run.wait_for_world([0, 1, 2])
    run.kill_service()
    run.wait_for(lambda: len(run.worlds()) == 2)
    run.wait_for_world([0, 1, 2])
    forms = run.count("form")
    assert run.ask(command="remove", worker=0)["wrong"] == ""
    run.wait_for(lambda: run.count("form") > forms)
    run.kill_service()
    run.wait_for_world([1, 2])
    services = [run.service()]
    run.kill_service()
    run.kill_supervisor()
    there = run.last_step()
    run.process = run.started()
    run.wait_for(lambda: run.supervisor() == run.process.pid)
    run.wait_for_world([1, 2])
    services.append(run.service())
    assert run.last_step() > there
    assert run.wait() == 0, run.output()
    check_losses(run, 300)
    assert not any(_alive(pid) for pid in services)


def test_no_supervisor_for_any_length(start: Start) -> None:
    """Without a checkpoint, nobody ends: what is left waits with the state."""
    run = start(150, 1, 0.03, processes=2, grace=0.5)
    run.wait_for_world([0, 1])
    service = run.service()
    run.kill_supervisor()
    run.kill(0)
    run.wait_for_words("waits for a supervisor")
    assert _alive(run.pid(1))
    assert _alive(service)
    run.process = run.started()
    run.wait_for_world([1])
    assert not _alive(service)
    assert run.wait() == 0, run.output()
    check_losses(run, 150)


def test_all_that_held_the_state_die(start: Start) -> None:
    """The run ends with an error, also that of another supervisor, and then anew."""
    run = start(120, 1, 0.03, processes=2, restarts=4)
    run.wait_for_world([0, 1])
    run.kill_all([0, 1])
    assert run.process.wait(LIMIT_S) == 1
    assert "more steps was lost" in run.output().splitlines()[-1]
    formed = run.count("formed")
    run.process = run.started()
    run.wait_for_words("this run starts from the last checkpoint or")
    run.wait_for(lambda: run.count("formed") > formed)
    run.wait_for_world(run.worlds()[-1])
    run.kill_supervisor()
    run.kill_all(run.worlds()[-1])
    run.process = run.started()
    assert run.process.wait(LIMIT_S) == 1
    assert "more steps was lost" in run.output().splitlines()[-1]


def test_all_die_before_the_first_checkpoint(
    start: Start, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run begins again at step 0, as it has lost less than a save would keep."""
    monkeypatch.setenv(CHECKPOINT_VARIABLE, str(tmp_path / "saves"))
    monkeypatch.setenv(EVERY_VARIABLE, "1000")
    run = start(120, 1, 0.03, processes=2, restarts=4)
    run.wait_for_world([0, 1])
    formed = run.count("formed")
    run.kill_all([0, 1])
    run.wait_for(lambda: run.count("formed") > formed)
    assert run.wait() == 0, run.output()
    # The process that is compared with would go on from the run's last checkpoint.
    monkeypatch.delenv(CHECKPOINT_VARIABLE)
    monkeypatch.delenv(EVERY_VARIABLE)
    check_losses(run, 120)


@pytest.mark.parametrize("why", ["ends", "is another one"])
def test_workers_that_end_as_they_are_taken_up(
    start: Start, tmp_path: pathlib.Path, why: str
) -> None:
    """A supervisor that starts then begins anew; it found nobody who trains.

    A process that only has the number of a worker lives on.
    """
    (tmp_path / "run").mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as ending:
        stat = pathlib.Path(f"/proc/{ending.pid}/stat").read_text()
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        started = int(stat.rpartition(")")[2].split()[19]) - (why != "ends")
        worker = {"pid": ending.pid, "started": started, "boot": boot}
        known = {"workers": {"0": worker}, "world": [0], "generation": 1}
        known |= {"run": "1", "token": "t", "numbers": 1, "wanted": 1}
        (tmp_path / "run" / "run.json").write_text(json.dumps(known))
        run = start(12, 0, 0.0, processes=1)
        run.wait_for(lambda: run.supervisor() == run.process.pid)
        if why == "ends":
            assert not run.worlds()
            ending.kill()
        assert run.wait() == 0, run.output()
        assert why == "ends" or ending.poll() is None
        ending.kill()
    check_losses(run, 12)


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.path,)


def test_only_programs_of_this_user_are_run(
    start: Start, tmp_path: pathlib.Path
) -> None:
    """A foreign file in the folder of a run is named, never unpickled, and replaced."""
    run = start(6, 0, 0.0, processes=1)
    assert run.wait() == 0, run.output()
    (path,) = (run.folder / "programs").iterdir()
    good, touched = path.read_bytes(), tmp_path / "touched"
    path.write_bytes(pickle.dumps(_Touch(touched)))
    run.process = run.started()
    assert run.wait() == 0, run.output()
    assert f"the kept program {path} cannot be read" in run.output()
    assert not touched.exists()
    replaced = path.read_bytes()
    assert replaced[:16] == good[:16]
    check_losses(run, 6)


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("raise SystemExit(3)", 3, "ended with code 3 before it joined the run"),
        ("import nonsense_module", 1, "No module named 'nonsense_module'"),
        ("print('no training')", 1, "must call autopar.elastic(...)"),
        (
            "import autopar, numpy as np\n"
            "step = autopar.parallelize(lambda w, x: (w - x.mean(), x.mean()))\n"
            "def create(): raise SystemExit(3)\n"
            "rows = lambda position, count: np.ones((count, 3))\n"
            "autopar.elastic(step, create, rows, batch=8, steps=2)",
            3,
            "before it joined the run, in its call of autopar.elastic(...)",
        ),
    ],
)
def test_scripts_that_do_not_train(
    start: Start, tmp_path: pathlib.Path, text: str, code: int, says: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    run = start(script=script, processes=2)
    assert run.wait() == code
    assert says in run.output()
    assert not any(os.path.exists(f"/proc/{run.pid(k)}") for k in (0, 1))
