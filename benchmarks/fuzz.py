"""Fuzzes the readers of each file format: they may raise only the package's errors.

    python benchmarks/fuzz.py --format all --minutes 20 [--jobs 2] [--seed 0] [--out F]

Valid files are mutated as bytes, as words and as trees of JSON. If a mutant runs a line
of the package that no earlier mutant ran, it is kept and mutated further. A case fails
if the reader raises an error other than `autopar.AutoparError`, needs more than 5 s of
CPU time, or ends its process. ``--minutes`` is the wall-clock time for each format;
``cpu_minutes`` in the figures is the CPU time used.

The figures of all formats are written to ``docs/data/fuzz.json``. The figures of a
single format, such as ``--format plans``, go only to standard output and to ``--out``.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

from fuzz_formats import FORMATS
from fuzz_mutations import Format, mutated

import autopar

ROOT = pathlib.Path(__file__).parents[1]
SLOW_S, MEMORY_BYTES, MOST_CORPUS, MOST_FAILURES = 5.0, 4 << 30, 400, 40
# The fraction of the cases whose lines are traced. Tracing is slow.
TRACED = 0.3
PACKAGE = str(ROOT / "autopar")


class Coverage:
    """The lines of the package that have run."""

    def __init__(self) -> None:
        """Starts without lines."""
        self.seen: set[tuple[int, int]] = set()
        self.new = False

    def calls(self, frame: Any, event: str, argument: Any) -> Any:
        """Follows calls of the package's functions (`sys.settrace`)."""
        del event, argument
        here = frame.f_code.co_filename.startswith(PACKAGE)
        return self._lines if here else None

    def _lines(self, frame: Any, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            key = id(frame.f_code), frame.f_lineno
            if key not in self.seen:
                self.seen.add(key)
                self.new = True
        return self._lines


class Result:
    """The results of the cases of one format."""

    def __init__(self) -> None:
        """Starts without cases."""
        self.cases = self.accepted = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self.failures: dict[str, dict[str, Any]] = {}
        self.slowest_s = self.cpu_s = 0.0

    def take(self, found: Format, data: bytes) -> None:
        """Runs a case."""
        begin = time.process_time()
        self.cases += 1
        try:
            found.read(data)
            self.accepted += 1
        except autopar.AutoparError as error:
            self.errors[_kind(error)] += 1
            if len(str(error)) > 20_000:
                self._fail(f"a message of {len(str(error)):,} letters", data)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{pathlib.Path(last.filename).name}:{last.lineno}"
            self._fail(f"{type(error).__name__} at {where}: {str(error)[:120]}", data)
        seconds = time.process_time() - begin
        self.slowest_s = max(self.slowest_s, seconds)
        if seconds > SLOW_S:
            self._fail(f"{seconds:.0f} s of CPU", data)

    def _fail(self, what: str, data: bytes) -> None:
        name = what.partition(":")[0] + what[what.find(" at ") :].partition(": ")[0]
        if name not in self.failures and len(self.failures) < MOST_FAILURES:
            self.failures[name] = {"what": what, "case": data[:4000].hex()}

    def to_data(self) -> dict[str, Any]:
        """The figures, as JSON can hold them."""
        return {
            "cases": self.cases,
            "cpu_minutes": round(self.cpu_s / 60, 2),
            "accepted": self.accepted,
            "distinct_errors": len(self.errors),
            "slowest_s": round(self.slowest_s, 3),
            "failures": list(self.failures.values()),
        }


def _kind(error: BaseException | None) -> str:
    """The text of an error, without the numbers and names in it."""
    words: list[str] = []
    while error is not None and len(words) < 4:
        tb = traceback.extract_tb(error.__traceback__)
        where = f"{pathlib.Path(tb[-1].filename).name}:{tb[-1].lineno}" if tb else ""
        words.append(f"{type(error).__name__} at {where}")
        error = error.__cause__
    return ", ".join(words)


def run(
    name: str,
    seed: int,
    *,
    cases: int | None = None,
    seconds: float,
    traced: bool = True,
    last: Any = None,
) -> Result:
    """Runs cases of a format, up to a number of cases or a time.

    Args:
      name: name of the format.
      seed: seed of the mutations.
      cases: largest number of cases; None: no limit.
      seconds: longest time.
      traced: whether mutants that run new lines are kept; tracing takes most of the
        time.
      last: file to which each case is written before it runs; None: no file.
    """
    draw = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as place,
        warnings.catch_warnings(),
        contextlib.ExitStack() as close,
    ):
        warnings.simplefilter("ignore")
        found = FORMATS[name](pathlib.Path(place))
        corpus = list(found.seeds)
        result, coverage = Result(), Coverage()
        close.callback(found.close)
        for data in corpus:
            found.read(data)  # they are valid
        end, begin_s = time.monotonic() + seconds, time.process_time()
        while time.monotonic() < end and (cases is None or result.cases < cases):
            data = mutated(draw, draw.choice(corpus), corpus, found)
            if last is not None:
                last.seek(0)
                last.write(len(data).to_bytes(8, "little") + data)
                last.flush()
            coverage.new = False
            before = sys.gettrace()
            if traced and draw.random() < TRACED:
                sys.settrace(coverage.calls)
            try:
                result.take(found, data)
            finally:
                sys.settrace(before)
            if coverage.new and len(corpus) < MOST_CORPUS and len(data) < 1 << 17:
                corpus.append(data)
        result.cpu_s = time.process_time() - begin_s
    return result


def alone(name: str, seed: int, minutes: float) -> dict[str, Any]:
    """Runs a format in separate processes, which may die; returns the figures."""
    end, total, died = time.monotonic() + 60 * minutes, Result(), []
    with tempfile.NamedTemporaryFile() as last:
        while (left := end - time.monotonic()) > 1:
            words = [sys.executable, __file__, "--format", name, "--inner", last.name]
            words += ["--minutes", str(left / 60), "--seed", str(seed + len(died))]
            child = subprocess.run(words, stdout=subprocess.PIPE, check=False)
            if not child.returncode:
                return _joined(json.loads(child.stdout), died)
            data = pathlib.Path(last.name).read_bytes()
            case = data[8 : 8 + int.from_bytes(data[:8], "little")]
            died.append({"what": f"exit {child.returncode}", "case": case[:4000].hex()})
            if len(died) > MOST_FAILURES:
                break
    return _joined(total.to_data(), died)


def _joined(found: dict[str, Any], died: list[Any]) -> dict[str, Any]:
    return {**found, "failures": [*found["failures"], *died]}


def main() -> int:
    """Prints the figures, writes them, and returns 1 if a case has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=["all", *sorted(FORMATS)], required=True)
    parser.add_argument("--minutes", type=float, default=20.0, help="of each format")
    parser.add_argument("--jobs", type=int, default=1, help="formats at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inner:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        with open(given.inner, "r+b") as last:
            found = run(given.format, given.seed, seconds=60 * given.minutes, last=last)
        print(json.dumps(found.to_data()))
        return 0
    whole = given.format == "all"
    names = sorted(FORMATS) if whole else [given.format]

    def one(name: str) -> dict[str, Any]:
        found = {"format": name, **alone(name, given.seed, given.minutes)}
        print(
            f"{name}: {found['cases']} cases, {found['accepted']} valid, "
            f"{found['distinct_errors']} errors, {len(found['failures'])} failures",
            flush=True,
        )
        return found

    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        formats = list(pool.map(one, names))
    failures = sum(len(x["failures"]) for x in formats)
    figures = {
        "command": f"python benchmarks/fuzz.py --format {given.format} "
        f"--minutes {given.minutes:g} --seed {given.seed}",
        "summary": {
            "formats": len(formats),
            "minutes": given.minutes,
            "cpu_minutes": round(sum(x["cpu_minutes"] for x in formats), 1),
            "cases": sum(x["cases"] for x in formats),
            "accepted": sum(x["accepted"] for x in formats),
            "failures": failures,
        },
        "formats": formats,
    }
    out = given.out or (ROOT / "docs" / "data" / "fuzz.json" if whole else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
