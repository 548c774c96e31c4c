"""Starts elastic runs of several processes, disturbs them and reads their files."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from checkout import ROOT
from processes import FLAGS

from autopar.elastic.processes.records import command

SCRIPT = ROOT / "tests" / "support" / "elastic_script.py"
LIMIT_S = 120.0


class Run:
    """A run of `elastic_script.py` or of another script."""

    def __init__(self, folder: pathlib.Path, *words: Any, **options: Any) -> None:
        self.folder, self.words, self.options = folder, words, options
        self.results = folder
        self.process = self.started()

    def started(self) -> subprocess.Popen[str]:
        """Starts `autopar run`, or starts it again after its supervisor was killed."""
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "output", "a") as output:
            return subprocess.Popen(
                self.command_line(),
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def command_line(self) -> list[str]:
        """The command line of `autopar run`."""
        given = {"folder": self.folder, "no-ahead": None, **self.options}
        script = given.pop("script", SCRIPT)
        given.pop("flags", None)
        options = [f"--{k}" if v is None else f"--{k}={v}" for k, v in given.items()]
        words = [str(script), *map(str, self.words)]
        return [sys.executable, "-m", "autopar", "run", *options, *words]

    def environment(self) -> dict[str, str]:
        """The environment of the run's processes."""
        places = (ROOT, ROOT / "solver", ROOT / "passes", ROOT / "tests" / "support")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "XLA_FLAGS": self.options.get("flags", FLAGS),
            "JAX_PLATFORMS": "cpu",
            "NPROC": "4",
        }

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def log(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "log.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def worlds(self) -> list[list[int]]:
        """The worlds that formed and have the state, each as its list of workers."""
        found: list[list[int]] = []
        for line in self.log():
            if line["event"] == "form":
                forming = line["workers"]
            elif line["event"] == "formed":
                found.append(forming)
        return found

    def pid(self, worker: int) -> int:
        return {x["worker"]: x["pid"] for x in self.log() if x["event"] == "start"}[
            worker
        ]

    def supervisor(self) -> int:
        """The process id of the last supervisor, from the file run.json."""
        return int(self.state().get("pid", 0))

    def state(self) -> dict[str, Any]:
        """The state in run.json, which a supervisor writes for its successor."""
        return json.loads((self.folder / "run.json").read_text())

    def service(self) -> int:
        """The process id of the coordination service; 0 until run.json contains it."""
        return int((self.state().get("service") or {}).get("pid", 0))

    def kill_service(self) -> None:
        """Kills the coordination service."""
        os.kill(self.service(), signal.SIGKILL)

    def kill_supervisor(self) -> None:
        """Kills `autopar run`."""
        self.process.kill()
        self.process.wait()

    def kill(self, worker: int, how: int = signal.SIGKILL) -> None:
        os.kill(self.pid(worker), how)

    def kill_all(self, workers: list[int]) -> None:
        """Kills several workers at the same time."""
        for pid in [self.pid(worker) for worker in workers]:
            os.kill(pid, signal.SIGKILL)

    def ask(self, **words: Any) -> Any:
        return command(self.folder, **words)

    def wait_for(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < end, self.output()
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)

    def count(self, event: str) -> int:
        """The number of times that the log has an event."""
        return sum(x["event"] == event for x in self.log())

    def wait_for_words(self, words: str) -> None:
        """Waits until a process has printed words; the supervisor may have ended."""
        end = time.monotonic() + LIMIT_S
        while words not in self.output():
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)

    def wait_for_world(self, workers: list[int], steps: int = 3) -> None:
        """Waits until these workers form the last world and have done some steps."""
        self.wait_for(lambda: bool(self.worlds()) and self.worlds()[-1] == workers)
        there = self.last_step()
        self.wait_for(lambda: self.last_step() >= there + steps)

    def reached(self) -> int:
        """The last step that workers have reported to the supervisor; -1 if none."""
        try:
            return self.ask(command="status")["status"]["reached"]
        except OSError:
            return -1  # the supervisor has not started yet

    def steps(self) -> list[tuple[int, float]]:
        """The steps and losses in the files of all processes."""
        found: list[tuple[int, float]] = []
        for path in self.results.glob("losses.*"):
            if path.is_file() and path.suffix != ".ledger":
                for line in path.read_text().splitlines():
                    with contextlib.suppress(ValueError):
                        found.append(tuple(json.loads(line)[:2]))
        return found

    def last_step(self) -> int:
        return max((k for k, _ in self.steps()), default=-1)

    def wait(self) -> int:
        """Lets the run end, and waits for its exit code."""
        (self.results / "go").touch()
        return self.process.wait(LIMIT_S)

    def clean(self) -> None:
        """Kills all processes of the run that are still alive."""
        pids = [x["pid"] for x in self.log() if x["event"] == "start"]
        with contextlib.suppress(OSError, ValueError):
            pids.append(self.service())
        for pid in filter(None, [self.process.pid, *pids]):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
