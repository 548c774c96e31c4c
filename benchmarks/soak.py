"""Causes random failures while a script trains in 2 to 4 processes.

Usage: python benchmarks/soak.py --seed 31 32 33 --events 200

Events kill workers, the coordination service or the supervisor, one or two at once,
while steps run, or while a world forms, compiles or saves. They stop processes, fill
the disk, flip bytes of stored programs, and add and remove workers. They also kill all
workers that hold the state. After each event, the run must train again; if the state is
lost for good, it must end with the error for this case. A run that is asked to stop
must end without an error. The losses must be those of a run in one process without
events. The figures are written to a file. The exit code is 1 if an event went wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from soak_figures import SCRIPT, report

from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.records import command
from autopar.elastic.processes.stacks import stack_lines

HERE = pathlib.Path(__file__).parent
LEAST, MOST = 2, 4
# The longest recovery from an event, on a busy machine.
LIMIT_S = 180.0
SILENCE_S = 6.0
DISK_BYTES = 48 << 20
LOST = "was lost with the processes that held it"


class Soak:
    """A run to which events happen; when it has ended, the next run begins."""

    def __init__(self, folder: pathlib.Path, seed: int) -> None:
        """Starts a run.

        Args:
          folder: folder for all files.
          seed: seed of the events.
        """
        self.folder, self.draw = folder, random.Random(seed)
        self.events: list[dict[str, Any]] = []
        # The worker -> the process that the last event killed.
        self.killed: dict[int, int] = {}
        # To check at the end: the folder of each run, and the times at which steps may
        # go back.
        self.runs: list[pathlib.Path] = []
        # Whether each run that was asked to stop has stopped.
        self.stops: list[bool] = []
        self.disk = Disk(folder / "disk")
        self.begin()

    # The run.

    def begin(self) -> None:
        """Starts a run in a new folder."""
        self.run_folder = self.disk.folder / f"run{len(self.runs)}"
        self.results = self.folder / f"results{len(self.runs)}"
        self.run_folder.mkdir()
        self.results.mkdir()
        self.runs.append(self.results)
        self.supervise()
        self.wait(lambda: self.trains(-1))

    def supervise(self) -> None:
        """Starts `autopar run`, also after it was killed."""
        sizes = ["--processes", "3", "--min", "1", "--max", str(MOST)]
        rest = ["--silence", str(SILENCE_S), "--restarts", "1000000", "--no-ahead"]
        rest += ["--recovery", os.environ.get("SOAK_RECOVERY", "auto")]
        where = ["--folder", str(self.run_folder)]
        given = [str(SCRIPT), str(self.results / "losses"), str(10**7)]
        checkpoint = str(self.results / "checkpoint")
        with open(self.results / "output", "a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autopar", "run", *sizes, *rest, *where, *given],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SOAK_CHECKPOINT": checkpoint},
            )

    def status(self) -> dict[str, Any]:
        """The supervisor's status; empty if it does not answer."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return self.ask(command="status")["status"]
        return {}

    def notes(self) -> dict[str, Any]:
        """The supervisor's state file."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run_folder / "run.json").read_text())
        return {}

    def worker(self, number: int) -> ProcessId | None:
        """The process of a worker."""
        return ProcessId.from_data(self.notes().get("workers", {}).get(str(number)))

    def pid_of(self, worker: int) -> int | None:
        """The number of a worker's process."""
        process = self.worker(worker)
        return None if process is None else process.pid

    def service(self) -> ProcessId | None:
        """The process of the coordination service."""
        return ProcessId.from_data(self.notes().get("service"))

    def step(self) -> int:
        """The last step that any process has done in the newest world."""
        return max((x[0] for x in self.latest()), default=-1)

    def latest(self) -> list[tuple[int, float, float]]:
        """The last line of each process's losses."""
        found: list[tuple[int, float, float]] = []
        for path in self.results.glob("losses.*"):
            if path.suffix != ".ledger":
                with open(path, "rb") as file, contextlib.suppress(ValueError):
                    file.seek(max(0, path.stat().st_size - 300))
                    lines = file.read().splitlines()
                    found += [tuple(json.loads(x)) for x in lines[-2:-1]]
        return found

    def trains(
        self,
        generation: int,
        dead: frozenset[int] = frozenset(),
        size: Callable[[int], bool] = bool,
    ) -> bool:
        """Whether a later world trains without the processes of the dead workers.

        If the world broke at the same time, an agent may have started a killed process
        again under its number, as it does with processes that end to be respawned.
        """
        now = self.status()
        good = now.get("state") == "run" and now["formed"]
        good = good and now["generation"] > generation
        if not good or not size(len(now["world"])):
            return False
        for worker in dead & set(now["world"]):
            pid = self.pid_of(worker)
            if pid is None or pid == self.killed.get(worker, pid):
                return False
        begin = time.time()
        end = begin + 5
        while time.time() < end and self.process.poll() is None:
            if sum(x[2] > begin for x in self.latest()) >= len(now["world"]):
                return True
            time.sleep(0.02)
        return False

    def wait(self, done: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Waits until a function returns true; False if the run ends before."""
        end = time.time() + (LIMIT_S if limit_s is None else limit_s)
        while time.time() < end and self.process.poll() is None:
            if done():
                return True
            time.sleep(0.02)
        return False

    def forming(self, generation: int) -> bool:
        """Waits until a later world forms."""
        return self.wait(lambda: self.notes().get("generation", 0) > generation)

    # Events. Each method returns the workers that it killed.

    def event(self) -> bool:
        """Causes one event, and waits until the run has recovered."""
        now = self.status()
        world, generation = now["world"], now["generation"]
        kinds = [k for k, (least, most) in KINDS.items() if least <= len(world) <= most]
        if not kinds:
            raise RuntimeError(f"no world trains: {now}")
        few = "join" in kinds and len(world) < MOST - 1 and self.draw.random() < 0.4
        kind = "join" if few else self.draw.choice(kinds)
        self.killed.clear()
        before, step = time.time(), self.step()
        found: dict[str, Any] = {"kind": kind, "step": step, "time_s": before}
        self.events.append(found)
        expects = getattr(self, f"_{kind}")(found, world, generation)
        good = self.wait(lambda: self.trains(**expects)) if expects else False
        found["seconds"] = round(time.time() - before, 3)
        if good:
            found["outcome"] = "recovered"
        elif self.process.poll() is not None:
            words = (self.results / "output").read_text().strip().splitlines()
            # Agents on other hosts may print more after the supervisor has ended.
            last = [x for x in words if x.startswith("autopar run: ")] or words
            found["says"] = last[-1][:300] if last else ""
            right = found.get("gone") and LOST in found["says"]
            found["outcome"] = "ended as promised" if right else "ended"
        else:
            found["outcome"] = "hangs"
        self.disk.free()
        if found["outcome"] in ("hangs", "ended"):
            return False
        if found["outcome"] != "recovered":
            self.finish()
            self.begin()
        return True

    def _some(self, world: list[int], count: int = 1) -> frozenset[int]:
        """Kills a number of workers at once."""
        chosen = self.draw.sample(world, count)
        for worker in chosen:
            process = self.worker(worker)
            if process is not None:
                self.killed[worker] = process.pid
                process.kill()
        return frozenset(chosen)

    def _supervisor_again(self, away_s: float) -> None:
        """Kills the supervisor, and starts it again after some seconds."""
        self.process.kill()
        self.process.wait()
        time.sleep(away_s)
        self.supervise()

    def _kill(self, found: Any, world: Any, generation: int) -> Any:
        return {"generation": generation, "dead": self._some(world)}

    def _leave(self, found: Any, world: Any, generation: int) -> Any:
        gone = self.draw.choice(world)
        self.ask(command="remove", worker=gone)
        return {"generation": generation, "dead": frozenset([gone])}

    def _join(self, found: Any, world: Any, generation: int) -> Any:
        self.ask(command="resize", processes=len(world) + 1)
        return {"generation": generation, "size": lambda n: n > len(world)}

    def _service(self, found: Any, world: Any, generation: int) -> Any:
        if (process := self.service()) is not None:
            process.kill()
        return {"generation": generation}

    def _supervisor(self, found: Any, world: Any, generation: int) -> Any:
        self._supervisor_again(self.draw.uniform(0, 1.5))
        return {"generation": generation}

    def _two(self, found: Any, world: Any, generation: int) -> Any:
        found["which"] = which = self.draw.choice(
            ["workers", "worker, service", "worker, supervisor", "service, supervisor"]
        )
        service = self.service()
        dead = frozenset[int]()
        if "worker" in which:
            dead = self._some(world, 2 if which == "workers" else 1)
        if "service" in which and service is not None:
            service.kill()
        if "supervisor" in which:
            self._supervisor_again(self.draw.uniform(0, 1.5))
        return {"generation": generation, "dead": dead}

    def _change(self, found: Any, world: Any, generation: int) -> frozenset[int]:
        """Makes another world form, and kills something meanwhile."""
        first = self._some(world)
        if not self.forming(generation):
            return first
        time.sleep(self.draw.uniform(0, 0.4))
        there = [w for w in self.notes().get("world", ()) if w not in first]
        found["which"] = which = self.draw.choice(["worker", "service", "supervisor"])
        if which == "worker" and len(there) > 1:
            return first | self._some(there)
        if which == "supervisor":
            self._supervisor_again(0.0)
        elif (process := self.service()) is not None:
            process.kill()
        return first

    def _forming(self, found: Any, world: Any, generation: int) -> Any:
        dead = self._change(found, world, generation)
        return {"generation": generation, "dead": dead}

    def _compiling(self, found: Any, world: Any, generation: int) -> Any:
        for name in ("programs", "plans"):
            shutil.rmtree(self.run_folder / name, ignore_errors=True)
        return self._forming(found, world, generation)

    def _saving(self, found: Any, world: Any, generation: int) -> Any:
        folder = self.results / "checkpoint"
        before = set(os.listdir(folder)) if folder.exists() else set()
        self.wait(lambda: folder.exists() and set(os.listdir(folder)) != before, 30.0)
        return self._kill(found, world, generation)

    def _stop(self, found: Any, world: Any, generation: int) -> Any:
        found["which"] = which = self.draw.choice(
            ["worker", "worker for good", "service", "service for good", "supervisor"]
        )
        worker = self.draw.choice(world)
        stopped = {
            "worker": lambda: self.worker(worker),
            "service": self.service,
            "supervisor": lambda: ProcessId.of(self.process.pid),
        }[which.split()[0]]()
        if stopped is None:
            return {"generation": generation - 1}
        os.kill(stopped.pid, signal.SIGSTOP)
        if "for good" in which:
            dead = frozenset([worker] if which.startswith("worker") else [])
            return {"generation": generation, "dead": dead}
        time.sleep(self.draw.uniform(0.2, 3.0))
        os.kill(stopped.pid, signal.SIGCONT)
        return {"generation": generation - 1}

    def _disk(self, found: Any, world: Any, generation: int) -> Any:
        """Fills the disk, kills a worker and perhaps the supervisor, and frees the
        disk.
        """
        self.disk.fill(self.notes())
        dead = self._some(world)
        found["which"] = which = self.draw.choice(["worker", "worker, supervisor"])
        if which != "worker":
            self._supervisor_again(0.0)
        expects = {"generation": generation, "dead": dead}
        if not self.wait(lambda: self.trains(**expects)):
            return None
        self.disk.free()
        return expects

    def _flip(self, found: Any, world: Any, generation: int) -> Any:
        """Flips a byte of each stored program, and makes a world form that loads it."""
        for path in (self.run_folder / "programs").glob("*"):
            data = bytearray(path.read_bytes())
            if data:
                place = self.draw.randrange(len(data))
                data[place] ^= 1 << self.draw.randrange(8)
                path.write_bytes(bytes(data))
        return self._service(found, world, generation)

    def _lose(self, found: Any, world: Any, generation: int) -> Any:
        """Kills all workers; the run continues from its checkpoint, if it has one."""
        saved = (self.results / "checkpoint").glob
        found["gone"] = not self.wait(lambda: any(saved("*/manifest.json")), 60.0)
        self._all(found)
        return {"generation": generation, "dead": frozenset(world)}

    def _lose_all(self, found: Any, world: Any, generation: int) -> Any:
        """Kills all workers of a run whose checkpoint is gone, and its supervisor."""
        found["gone"] = True
        if self.draw.random() < 0.5:
            self.process.kill()
            self.process.wait()
        self._all(found)
        shutil.rmtree(self.results / "checkpoint", ignore_errors=True)
        if self.process.poll() is not None:
            self.supervise()
        return {"generation": generation, "dead": frozenset(world)}

    def _all(self, found: dict[str, Any]) -> None:
        found["back"] = True
        known = self.notes().get("workers", {}).values()
        for process in [ProcessId.from_data(x) for x in known]:
            if process is not None:
                process.kill()

    # The end.

    def run(self, count: int, seconds: float = math.inf) -> None:
        """Causes a number of events; begins no event after so many seconds."""
        end = time.monotonic() + seconds
        for k in range(count):
            if time.monotonic() > end:
                break
            time.sleep(self.draw.uniform(0.0, 0.5))
            good = self.event()
            last = {k: v for k, v in self.events[-1].items() if k != "time_s"}
            print(k, json.dumps(last), flush=True)
            if not good:
                self.print_stacks()
                for path in (self.run_folder / "log.jsonl", self.results / "output"):
                    text = path.read_text().splitlines()
                    print(f"the end of {path}:", *text[-40:], sep="\n", flush=True)
                self.finish()
                self.begin()

    def ask(self, **words: Any) -> Any:
        """Sends the supervisor a command."""
        return command(self.run_folder, **words)

    def print_stacks(self) -> None:
        """Prints where each worker's threads are."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            print(*stack_lines(self.ask(command="stacks")), sep="\n", flush=True)

    def finish(self) -> None:
        """Ends the run, and all of its remaining processes."""
        asked, code = self.process.poll() is None, None
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self.ask(command="stop")
            code = self.process.wait(60)
        if asked:
            self.stops.append(code == 0)
        known = self.notes()
        left = [*known.get("workers", {}).values(), known.get("service")]
        for process in map(ProcessId.from_data, left):
            if process is not None:
                process.kill()
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends everything."""
        self.finish()
        self.disk.close()


# Smallest and largest number of processes of the world to which an event may happen.
KINDS = {
    "kill": (2, MOST),
    "leave": (3, MOST),
    "join": (1, MOST - 1),
    "service": (2, MOST),
    "supervisor": (1, MOST),
    "two": (3, MOST),
    "forming": (3, MOST),
    "compiling": (3, MOST),
    "saving": (2, MOST),
    "stop": (2, MOST),
    "disk": (2, MOST),
    "flip": (2, MOST),
    "lose": (1, MOST),
    "lose_all": (1, MOST),
}


class Disk:
    """A small file system for a run's folder; without permission, a limit of file
    sizes.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Mounts the file system, if this is allowed."""
        self.folder = folder
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
        self.mounted = os.getuid() == 0 and not subprocess.run(words).returncode
        self._limited: list[ProcessId] = []

    def fill(self, notes: Any) -> None:
        """Makes all writes of a run fail."""
        if self.mounted:
            with contextlib.suppress(OSError), open(self.folder / "full", "wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            return
        known = [notes.get("process"), *notes.get("workers", {}).values()]
        for process in map(ProcessId.from_data, known):
            if process is not None:
                hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 10, hard))
                self._limited.append(process)

    def free(self) -> None:
        """Allows writes again."""
        (self.folder / "full").unlink(missing_ok=True)
        for process in self._limited:
            with contextlib.suppress(OSError):
                hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        self._limited = []

    def close(self) -> None:
        """Unmounts it."""
        if self.mounted:
            subprocess.run(["umount", "-l", self.folder], check=False)


def data_of(given: Any, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of the data file, for all seeds so far."""
    seeds = " ".join(str(x["seed"]) for x in found)
    names = ("events", "right", "recovered", "ended_as_promised", "began_again")
    names += ("asked_to_stop", "stopped")
    return {
        "command": " ".join(
            ["python benchmarks/soak.py --seed", seeds, "--events", str(given.events)]
            + (["--kinds", *given.kinds] if given.kinds else [])
            + (["--recovery", given.recovery] if given.recovery != "auto" else [])
        ),
        "summary": {name: sum(x[name] for x in found) for name in names},
        "seeds": found,
    }


def keep_kinds(names: list[str]) -> None:
    """Allows only events of these kinds."""
    for kind in set(KINDS) - set(names):
        del KINDS[kind]


def run_seed(
    seed: int, events: int, kinds: list[str], keep: pathlib.Path | None
) -> dict[str, Any]:
    """The figures of the events that a seed draws."""
    keep_kinds(kinds)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep or pathlib.Path(temporary)) / str(seed)
        folder.mkdir(parents=True)
        begin = time.time()
        soak = Soak(folder, seed)
        try:
            soak.run(events)
        finally:
            soak.close()
        return {
            **report(soak, seed, KINDS),
            "seconds": round(time.time() - begin),
        }


def main() -> None:
    """Runs the events of all seeds, and reports the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="these kinds alone")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for all files")
    data = HERE.parent / "docs" / "data" / "soak.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    parser.add_argument("--recovery", default="auto", help="inplace or respawn")
    given = parser.parse_args()
    os.environ["SOAK_RECOVERY"] = given.recovery
    kinds, found = given.kinds or list(KINDS), dict[int, dict[str, Any]]()
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        waiting = [
            pool.submit(run_seed, seed, given.events, kinds, given.keep)
            for seed in given.seed
        ]
        for done in concurrent.futures.as_completed(waiting):
            figures = done.result()
            print(json.dumps(figures, indent=1), flush=True)
            found[figures["seed"]] = figures
            given.out.parent.mkdir(parents=True, exist_ok=True)
            rows = [found[seed] for seed in given.seed if seed in found]
            given.out.write_text(json.dumps(data_of(given, rows), indent=1) + "\n")
    good = all(
        figures["worst_relative_difference_of_losses"] < 1e-5
        and figures["right"] == figures["events"]
        and figures["stopped"] == figures["asked_to_stop"]
        and not figures["began_again"]
        and not figures["missing_steps"]
        for figures in found.values()
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
