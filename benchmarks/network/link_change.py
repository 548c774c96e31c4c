"""Changes the rate of links between hosts while a script trains.

    python benchmarks/network/link_change.py [--rates 1000 50] [--codec auto]

A run over four hosts, which are network namespaces, trains `link_script.py` at the
first rate, in Mbit/s. Then all links change to the second rate, and later back to the
first rate. The run is not told. A row has the seconds until the run noticed the change
and trained under another plan. It also has the ratio of its step time to that of a run
that began with links of this rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import netns
from bed import Bed

from autopar.elastic.processes.certificates import create_secret
from autopar.elastic.processes.records import command

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "network" / "link_script.py"
HOSTS, PORT = 4, 7000
LIMIT_S = 180.0


class Run:
    """A run on network namespaces; the supervisor runs on the last host."""

    def __init__(self, folder: pathlib.Path, bed: Bed, given: Any, rate: float) -> None:
        """Starts a run that plans for links of a given rate."""
        self.folder, self.bed = folder, bed
        folder.mkdir()
        secret = folder / "secret"
        create_secret(secret)
        bed.set_rate(rate)
        home = bed.hosts[-1]
        at = f"{home.address}:{PORT}"
        words = ["run", "--listen", at, "--secret", str(secret), "--processes"]
        words += [str(HOSTS), "--folder", str(folder / "run"), str(SCRIPT)]
        words += [str(folder / "times"), f"1x1:cpu,network={rate:g}Mb/s"]
        words += [given.codec, str(given.layers)]
        self.processes = [self._start(home, words)]
        for k, host in enumerate(bed.hosts[:-1]):
            words = ["worker", "--supervisor", at, "--secret", str(secret)]
            self.processes.append(
                self._start(host, [*words, "--folder", str(folder / f"host{k}")])
            )

    def _start(self, host: Any, words: list[str]) -> subprocess.Popen[Any]:
        inside = ["ip", "netns", "exec", host.namespace]
        with open(self.folder / "output", "a") as output:
            return subprocess.Popen(
                [*inside, sys.executable, "-m", "autopar", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def log(self) -> list[dict[str, Any]]:
        """The events of the run."""
        try:
            lines = (self.folder / "run" / "log.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def times(self) -> list[float]:
        """When the first process of the world finished each step."""
        lines = (self.folder / "times").read_text().split("\n")
        return [float(x) for x in lines[:-1]]

    def worlds(self) -> list[dict[str, Any]]:
        """The worlds that have formed."""
        return [x for x in self.log() if x["event"] == "formed"]

    def wait_for_world(self, count: int, limit_s: float = LIMIT_S) -> float | None:
        """When this many worlds had formed; None: not within the limit."""
        end = time.time() + limit_s
        while len(self.worlds()) < count:
            if time.time() > end or self.processes[0].poll() is not None:
                return None
            time.sleep(0.2)
        return float(self.worlds()[count - 1]["time_s"])

    def step_s(self, seconds: float) -> float:
        """The median seconds of a step from now on."""
        time.sleep(5.0)
        begin = time.time()
        while True:
            time.sleep(1.0)
            found = [x for x in self.times() if x > begin]
            if time.time() > begin + seconds and len(found) > 20:
                break
        return statistics.median(b - a for a, b in itertools.pairwise(found))

    def pause(self) -> dict[str, Any]:
        """The seconds of the last pause in training, and of its parts."""
        lines = (self.folder / "times.ledger").read_text().splitlines()
        found = [x for x in map(json.loads, lines) if x["kind"] == "world"][-1]
        names = ("pause_s", "plan_s", "compile_s", "place_s")
        parts = {n: round(found["measured"][n], 2) for n in names}
        return {**parts, "program": found["program"]}

    def scheme(self) -> str:
        """The parallelism scheme of the last world's plan."""
        return str(self.worlds()[-1]["scheme"])

    def close(self) -> None:
        """Ends the run."""
        netns.inside(
            self.bed.hosts[-1].namespace,
            lambda: command(self.folder / "run", command="stop"),
        )
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def cold(folder: pathlib.Path, bed: Bed, given: Any, rate: float) -> dict[str, Any]:
    """The step time of a run that begins with links of a given rate."""
    run = Run(folder, bed, given, rate)
    try:
        if run.wait_for_world(1) is None:
            raise SystemExit((folder / "output").read_text())
        return {"step_s": run.step_s(given.seconds), "plan": run.scheme()}
    finally:
        run.close()


def measure(given: Any) -> list[dict[str, Any]]:
    """A row for each change of the rate."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, Bed(HOSTS + 1) as bed:
        place = pathlib.Path(temporary)
        first, second = given.rates
        begun = {
            rate: cold(place / f"cold{rate:g}", bed, given, rate)
            for rate in (first, second)
        }
        run = Run(place / "run", bed, given, first)
        try:
            run.wait_for_world(1)
            run.step_s(given.seconds)
            for k, (old, new) in enumerate([(first, second), (second, first)]):
                bed.set_rate(new)
                at = time.time()
                formed = run.wait_for_world(k + 2)
                step_s = run.step_s(given.seconds)
                rows.append(
                    {
                        "from Mbit/s": old,
                        "to Mbit/s": new,
                        "seconds until replanned": formed and round(formed - at, 1),
                        "pause": run.pause(),
                        "step ms": round(1e3 * step_s, 1),
                        "cold start's step ms": round(1e3 * begun[new]["step_s"], 1),
                        "over cold start's": round(step_s / begun[new]["step_s"], 3),
                        "plan": run.scheme(),
                        "cold start's plan": begun[new]["plan"],
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
        finally:
            print((place / "run" / "output").read_text()[-3000:], file=sys.stderr)
            run.close()
    return rows


def main() -> None:
    """Measures, and writes the data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs=2, default=[1000.0, 50.0])
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each median")
    data = ROOT / "docs" / "data" / "link_change.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    given = parser.parse_args()
    rows = measure(given)
    words = ["python benchmarks/network/link_change.py", *sys.argv[1:]]
    made = {"command": " ".join(words), "rows": rows}
    given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
