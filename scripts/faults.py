"""Draws small faults in the code, and finds out which tests detect them.

    python scripts/faults.py draw --seed 1 --count 30
    python scripts/faults.py reach --seed 1 --count 30 --work F tests/solver ...
    python scripts/faults.py run --seed 1 --count 30 --work F

A fault changes one expression or statement in a copy of the commit `--at`; the checkout
is not changed. ``reach`` runs the tests once without a fault. For each test it records
which faults' statements it executes, its duration and whether it passes. Processes that
a test starts are included. ``run`` runs, for each fault, the passing tests that execute
its statement, the nearest and shortest first, until one fails. A test that takes
`TIMEOUT_S` has detected the fault, too. Each row is written to docs/data/faults.json as
soon as it is known. A run that was stopped continues with the faults that have no row,
or for which not all tests were run within `--limit-s`. For faults that no test detects,
a reader adds to the row: `verdict` (equivalent, or speed) with its `reason`, and
`test_added`, a new test that detects the fault.

The tools cosmic-ray and mutmut are not used. They do not draw by a seed and have no
faults that leave out statements or defaults. For each fault they run one command, or
their own coverage.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import dataclasses
import io
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "faults.json"
AREAS = {
    "planner": ("autopar/planner", "solver/autopar_solver"),
    "judge": ("autopar/cost",),
    "executor": (
        "autopar/runtime",
        "passes/autopar_passes/replay",
        "passes/autopar_passes/microbatches",
    ),
}
# Modules and functions that make texts of errors and reports, in which faults are not
# drawn.
_TEXTS = ("planner/option_texts.py", "planner/infeasible.py")
_TEXT_FUNCTIONS = re.compile(r"__repr__|__str__|text|message|lines?$|^_why|^_short$")
_SAYING = re.compile(r"warnings\.warn|\bsay$|progress\.|LOGGER|log\.")
TIMEOUT_S = 240
# Tests that read the signatures of functions without calling them.
_SIGNATURES = "tests/project/test_options_page.py"
# For this many seconds, the first tests of every file that executes a fault are run.
FIRST_S = 60.0

_TURNED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
# Sums and multiples of sequences are not arithmetic.
_SEQUENCES = ast.Tuple | ast.List | ast.JoinedStr
_OPPOSITE = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}

# This code is written into the copy: a plug-in of pytest, and a function that the copy
# calls.
_PROBE = """
import json, os
OUT = os.environ.get("FAULTS_OUT", os.devnull)
SEEN = set()

def write(*row):
    with open(OUT, "a") as file:
        file.write(json.dumps(row) + "\\n")

def reach(fault):
    test, _, when = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if when == "(setup)":  # a fixture may be made once, for all tests of the file
        test = test.partition("::")[0]
    if (fault, test) not in SEEN:
        SEEN.add((fault, test))
        write("reach", fault, test)

def pytest_runtest_logreport(report):
    write("test", report.nodeid, report.outcome, report.duration)

def pytest_collectreport(report):
    if report.failed:
        write("test", report.nodeid, "failed", 0.0)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A fault: a part of a file that is replaced by another text.

    Attributes:
      path: path of the file.
      line: line of the expression or the statement, from 1.
      kind: kind of the change.
      start: first byte that is replaced, and `end` the first after it.
      new: the new text.
      probe: the line before which the execution of the statement is recorded, and its
        indentation;
        None: the statement runs when the module is imported or compiled.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    new: str
    probe: tuple[int, int] | None

    def applied(self, source: bytes) -> bytes:
        """The file with the fault."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class Places:
    """All faults that a file can have."""

    def __init__(self, path: str, source: bytes) -> None:
        """Reads the file."""
        self.path = path
        self.faults: list[Fault] = []
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._walk(ast.parse(source), None)

    def _walk(self, node: ast.AST, probe: tuple[int, int] | None) -> None:
        if _is_passed_over(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and not _TEXT_FUNCTIONS.search(node.name):
                inner = body[0].lineno, body[0].col_offset
                keywords = [d for d in node.args.kw_defaults if d is not None]
                for default in (*node.args.defaults, *keywords):
                    for changed in _constants(default):
                        self._add("default changed", default, changed, inner)
                for statement in body:
                    self._walk(statement, inner)
            return
        if isinstance(node, ast.stmt) and probe is not None:
            line = self._lines[node.lineno - 1]
            if not line.lstrip().startswith(b"elif"):
                probe = node.lineno, node.col_offset
        for kind, old, new in _faults(node):
            self._add(kind, old, new, probe)
        for name, field in ast.iter_fields(node):
            if name not in ("annotation", "decorator_list", "type_params"):
                for child in field if isinstance(field, list) else [field]:
                    if isinstance(child, ast.AST):
                        self._walk(child, probe)

    def _add(
        self,
        kind: str,
        node: ast.expr | ast.stmt,
        new: ast.AST | str,
        probe: tuple[int, int] | None,
    ) -> None:
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
            text = f"({text})"
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        self.faults.append(Fault(self.path, node.lineno, kind, start, end, text, probe))


def _is_passed_over(node: ast.AST) -> bool:
    """Whether a node is a text for people, or a check of a case that never happens."""
    if isinstance(node, ast.Call):
        return bool(_SAYING.search(ast.unparse(node.func)))
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def _constants(node: ast.AST) -> Iterator[ast.expr]:
    """Yields other values of a number or a truth value."""
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield ast.Constant(not value)
        elif isinstance(value, int):
            yield ast.Constant(value + 1)
        elif isinstance(value, float):
            yield ast.Constant(value * 2 if value else 1.0)


def _faults(
    node: ast.AST,
) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST | str]]:
    """Yields the faults at a node: kind, replaced node, and replacement."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Constant):
        for changed in _constants(node):
            yield "constant changed", node, changed
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for turned in _TURNED[type(node.ops[0])]:
            new.ops = [turned()]
            yield "comparison", node, copy.deepcopy(new)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        new.op = _ARITHMETIC[type(node.op)]()
        if not any(isinstance(n, _SEQUENCES) for n in (node.left, node.right)):
            yield "arithmetic", node, new
    elif isinstance(node, ast.BoolOp):
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and or swapped", node, new
    elif isinstance(node, ast.Name | ast.Attribute):
        field = "id" if isinstance(node, ast.Name) else "attr"
        if getattr(node, field) in _OPPOSITE:
            setattr(new, field, _OPPOSITE[getattr(node, field)])
            yield "min max swapped", node, new
    elif isinstance(node, ast.Subscript):
        for shifted in _shifted(node):
            yield "index shifted", node, shifted
    elif isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            yield "statement left out", node, "pass"
    elif isinstance(node, ast.Assign | ast.AugAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(node, ast.AugAssign) or not isinstance(
            target, ast.Name | ast.Tuple
        ):
            yield "statement left out", node, "pass"
    elif isinstance(node, ast.For) and len(node.body) > 1:
        yield "early exit", node.body[-1], "continue"
    if isinstance(node, ast.If) and not node.orelse:
        leaves = isinstance(node.body[0], ast.Return | ast.Continue | ast.Break)
        if leaves:
            yield "early exit", node, "pass"
    tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
    for test in node.ifs if isinstance(node, ast.comprehension) else tests:
        yield "condition negated", test, ast.UnaryOp(ast.Not(), test)


def _shifted(node: ast.Subscript) -> Iterator[ast.AST]:
    """Yields the subscript with an index or a slice bound increased by one."""
    is_slice = isinstance(node.slice, ast.Slice)
    for name in ("lower", "upper") if is_slice else ("slice",):
        new: Any = copy.deepcopy(node)
        holder = new.slice if is_slice else new
        text = ast.unparse(getattr(holder, name) or ast.Constant(None))
        if re.fullmatch(r"-?\d+", text):
            setattr(holder, name, ast.Constant(int(text) + 1))
            yield new


def tree_at(commit: str) -> dict[str, bytes]:
    """All files of a commit."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
    ).stdout
    tree: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                tree[member.name] = file.read()
    return tree


def draw(tree: dict[str, bytes], area: str, seed: int, count: int) -> list[Fault]:
    """Draws faults of an area: the kinds in turn, each at a random place.

    With the same seed, ten faults are the first ten of thirty. A line has at most one
    fault.
    """
    rng = random.Random(f"{seed}/{area}")
    places: dict[str, list[Fault]] = collections.defaultdict(list)
    for path, source in sorted(tree.items()):
        inside = path.startswith(tuple(f"{folder}/" for folder in AREAS[area]))
        if inside and path.endswith(".py") and not path.endswith(_TEXTS):
            for fault in Places(path, source).faults:
                places[fault.kind].append(fault)
    kinds = sorted(places)
    rng.shuffle(kinds)
    drawn: list[Fault] = []
    while len(drawn) < count:
        fault = rng.choice(places[kinds[len(drawn) % len(kinds)]])
        taken = any((f.path, f.line) == (fault.path, fault.line) for f in drawn)
        if not taken and _compiles(fault.applied(tree[fault.path])):
            drawn.append(fault)
    return drawn


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "fault", "exec")
    except SyntaxError:
        return False
    return True


class Copy:
    """A copy of the source tree, in which files can be changed and tests run."""

    def __init__(self, work: pathlib.Path, sources: dict[str, bytes]) -> None:
        """Writes all files."""
        self.work = work.resolve()
        self.sources = sources
        self.tree = self.work / "tree"
        shutil.rmtree(self.tree, ignore_errors=True)
        for path, source in {**sources, "fault_probe.py": _PROBE.encode()}.items():
            (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / path).write_bytes(source)

    def write(self, path: str, source: bytes) -> None:
        """Changes a file, and removes its compiled version."""
        file = self.tree / path
        file.write_bytes(source)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def test(
        self, tests: Sequence[str], out: pathlib.Path, *options: str, limit_s: float
    ) -> int | None:
        """Runs tests; returns pytest's status, or None if they took too long."""
        listed = self.work / "tests.txt"
        listed.write_text("\n".join(tests))
        folders = (self.tree, self.tree / "passes", self.tree / "solver")
        more = {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "JAX_COMPILATION_CACHE_DIR": str(self.work / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "FAULTS_OUT": str(out),
        }
        words = ["-m", "pytest", "-p", "fault_probe"]
        # Doctests would treat two files `conftest.py` in different folders as one
        # module.
        words += ["--ignore-glob=*/conftest.py", f"--timeout={TIMEOUT_S}", *options]
        with (self.work / "pytest.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *words, f"@{listed}"],
                cwd=self.tree,
                env={**os.environ, **more},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def note_reach(
    work: Copy, faults: Sequence[Fault], tests: Sequence[str], marks: str
) -> None:
    """Runs tests without a fault, and records the faults that each test executes."""
    probes: dict[str, dict[tuple[int, int], list[str]]] = {}
    for fault in faults:
        if fault.probe is not None:
            at = probes.setdefault(fault.path, {}).setdefault(fault.probe, [])
            at.append(key_of(fault))
    for path, lines in probes.items():
        source = work.sources[path].decode().splitlines(keepends=True)
        for (line, column), keys in sorted(lines.items(), reverse=True):
            calls = "; ".join(f"__import__('fault_probe').reach({k!r})" for k in keys)
            source.insert(line - 1, f"{' ' * column}{calls}\n")
        work.write(path, "".join(source).encode())
    work.test(tests, work.work / "reach.jsonl", "-m", marks, limit_s=7200)


def key_of(fault: Fault) -> str:
    """The name of a fault in the records."""
    return f"{fault.path}:{fault.line}"


class Reach:
    """The tests that execute each fault, from the records of `note_reach`."""

    def __init__(self, file: pathlib.Path) -> None:
        """Reads the records."""
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._failed: set[str] = set()
        self._tests: dict[str, set[str]] = collections.defaultdict(set)
        for line in file.read_text().splitlines():
            what, first, second, *rest = json.loads(line)
            if what == "reach":
                self._tests[first].add(second)
            else:
                self.seconds[first] += rest[0]
                if second != "passed":
                    self._failed.add(first)

    def tests(self, fault: Fault) -> list[str]:
        """The passing tests that execute a fault, the nearest and shortest first."""
        rooms = set(pathlib.PurePath(fault.path).parts)
        good = self.seconds.keys() - self._failed
        files = {_SIGNATURES} if fault.kind == "default changed" else set[str]()
        found = self._tests[key_of(fault)] | files
        reached = {t for t in good if t in found or t.partition("::")[0] in found}

        def distance(test: str) -> int:
            return -len(rooms.intersection(pathlib.PurePath(test).parts))

        def by_file(tests: Iterable[str]) -> list[str]:
            # The fixtures of a module are made only once if its tests run one after
            # another.
            return sorted(tests, key=lambda t: (distance(t), t))

        # Tests of one file are alike, so the shortest test of each file comes first,
        # then the second test of each.
        turns: dict[str, int] = collections.defaultdict(int)
        ranked: list[tuple[int, int, str]] = []
        for test in sorted(reached, key=lambda t: (self.seconds[t], t)):
            file = test.partition("::")[0]
            ranked.append((turns[file], distance(test), test))
            turns[file] += 1
        spent, first = 0.0, list[str]()
        for _, _, test in sorted(ranked):
            spent += self.seconds[test]
            if spent <= FIRST_S:
                first.append(test)
        # Statements that run when a module is imported, or between tests, may affect
        # any test.
        is_everywhere = fault.probe is None or "" in self._tests[key_of(fault)]
        others = good - reached if is_everywhere else ()
        return [*first, *by_file(reached.difference(first)), *by_file(others)]

    def within(self, tests: Iterable[str], limit_s: float) -> Iterator[str]:
        """Yields the first tests that together take no longer than a limit."""
        for test in tests:
            limit_s -= self.seconds[test]
            if limit_s < 0:
                return
            yield test


def try_fault(
    work: Copy, fault: Fault, tests: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Runs tests with a fault; returns those that detect it and those that do not."""
    out = work.work / "fault.jsonl"
    out.write_text("")
    shutil.rmtree(work.tree / ".hypothesis", ignore_errors=True)
    source = work.sources[fault.path]
    work.write(fault.path, fault.applied(source))
    try:
        code = work.test(tests, out, "-x", limit_s=limit_s)
    finally:
        work.write(fault.path, source)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    failed = [r[1] for r in rows if r[0] == "test" and r[2] == "failed"]
    by = failed[0] if failed else "no answer in time" if code is None else None
    if by is None and code:
        by = f"pytest ended with {code}"
    return {"by": by, "passed": [r[1] for r in rows if r[0] == "test"]}


def row_of(area: str, number: int, fault: Fault, source: bytes) -> dict[str, Any]:
    """The row of a fault before it is tried."""
    texts = (source[fault.start : fault.end].decode(), fault.new)
    before, after = (" ".join(text.split())[:160] for text in texts)
    place = {"area": area, "number": number, "file": fault.path, "line": fault.line}
    return {**place, "kind": fault.kind, "before": before, "after": after}


class Table:
    """The rows of the data file, which is written again for each new row."""

    def __init__(self, path: pathlib.Path, command: str) -> None:
        """Reads the existing rows."""
        self.path = path
        self.data: dict[str, Any] = {"command": command, "rows": []}
        if path.exists():
            self.data = json.loads(path.read_text())
        self.rows = {(r["area"], r["number"]): r for r in self.data["rows"]}

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, or replaces the row of the same fault."""
        self.rows[row["area"], row["number"]] = row
        areas = list(AREAS)
        order = sorted(self.rows, key=lambda key: (areas.index(key[0]), key[1]))
        lines = ",\n".join(json.dumps(self.rows[key]) for key in order)
        head = json.dumps({k: v for k, v in self.data.items() if k != "rows"})
        self.path.write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')


def go_on(
    work: Copy,
    reach: Reach,
    fault: Fault,
    row: dict[str, Any],
    among: tuple[str, ...],
    most_s: float,
) -> None:
    """Tries a fault with the tests that were not run yet; completes its row."""
    known = work.work / "passed" / f"{row['area']}{row['number']}.json"
    passed = set(json.loads(known.read_text())) if known.exists() else set[str]()
    tests = [t for t in reach.tests(fault) if t not in passed]
    chosen = [t for t in tests if t.startswith(among)]
    some = list(reach.within(chosen, most_s))
    start = time.monotonic()
    limit_s = 5 * sum(reach.seconds[t] for t in some) + 300
    tried = try_fault(work, fault, some, limit_s) if some else {}
    passed.update(tried.get("passed", ()))
    known.parent.mkdir(exist_ok=True)
    known.write_text(json.dumps(sorted(passed)))
    row["by"] = tried.get("by")
    row["found"] = row["by"] is not None
    row["seconds"] += round(time.monotonic() - start)
    row["tests"] = len(passed)
    row["tests_left"] = 0 if row["found"] else len(tests) - len(some)


def main() -> None:
    """Prints faults, records which tests reach them, or tries them."""
    parser = argparse.ArgumentParser(description="Tries the tests with faults.")
    parser.add_argument("what", choices=("draw", "reach", "run"))
    parser.add_argument("tests", nargs="*", help="files and folders")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30, help="faults of each area")
    parser.add_argument("--only", nargs="+", help="faults to run, such as judge19")
    parser.add_argument("--at", default="HEAD", help="a commit")
    parser.add_argument("--work", type=pathlib.Path, help="folder for the copy")
    parser.add_argument("--marks", default="", help="of tests for reach")
    parser.add_argument("--limit-s", type=float, default=1e9, help="tests of a fault")
    parser.add_argument("--json", type=pathlib.Path, default=DATA)
    given = parser.parse_intermixed_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", given.at],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    tree = tree_at(commit)
    drawn = {area: draw(tree, area, given.seed, given.count) for area in AREAS}
    # The first fault of each area, then the second of each.
    order = [(a, k + 1, drawn[a][k]) for k in range(given.count) for a in AREAS]
    if given.what == "draw":
        for area, number, fault in order:
            print(json.dumps(row_of(area, number, fault, tree[fault.path])))
        return
    work = Copy(given.work, tree)
    if given.what == "reach":
        note_reach(work, [fault for _, _, fault in order], given.tests, given.marks)
        return
    reach = Reach(work.work / "reach.jsonl")
    among = tuple(given.tests) or ("",)
    table = Table(
        given.json, f"python scripts/faults.py run --at {commit} --seed {given.seed}"
    )
    # Faults that were tried already, but not with all tests, come last.
    order.sort(key=lambda fault: fault[:2] in table.rows)
    for area, number, fault in order:
        row = row_of(area, number, fault, tree[fault.path])
        row |= {"found": False, "by": None, "seconds": 0}
        row |= table.rows.get((area, number), {})
        if given.only and f"{area}{number}" not in given.only:
            continue
        # A fault that a reader has judged to change no result is not tried again.
        if not row["found"] and "verdict" not in row:
            go_on(work, reach, fault, row, among, given.limit_s)
            print(json.dumps(row), flush=True)
            table.add(row)


if __name__ == "__main__":
    sys.exit(main())
