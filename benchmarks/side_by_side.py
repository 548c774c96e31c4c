"""Planning time, planning memory and step time of two checkouts, measured in turns.

    python benchmarks/side_by_side.py OLD [NEW] [--turns 5] [--only planning,steps]

Both checkouts run on the same machine at the same time: they take turns, and each turn
begins with the checkout that ended the turn before. Each planning runs in a new
process, and importing autopar is a row of its own. Seconds of work are CPU seconds of
the process, which other load of the machine affects less. Steps run on 8 simulated
devices, in one process per checkout; one process waits while the other works. Each
checkout runs its own plan. If both can load the same plan, they run this plan, too. NEW
is this checkout by default.

Prints a Markdown table: the medians, the ratio new / old of the medians, and the
smallest and the largest ratio of a single turn.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import workloads

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPT12 = {
    "layers": 12, "d_model": 768, "heads": 12, "seq": 1024, "batch": 512,
    "vocab": 50304,
}  # fmt: skip
# Name -> (example, options, cluster).
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt": ("gpt", GPT12, "8x8:h100"),
    "llama": ("llama", {"layers": 2}, "2x4x4:a100"),
    "moe": ("moe", {"layers": 2}, "2x4:cpu"),
}
# Unit -> factor from SI units.
UNITS = {"s": 1.0, "ms": 1e3, "MB": 1e-6}
ANSWER = "ANSWER"

# Code that runs in both checkouts: it uses only the public API and the examples.
PLANNING = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1] + "/benchmarks")
import workloads, jax
begin = time.process_time()
import autopar
autopar.plan, autopar.Cluster  # they are imported when they are named
imported = time.process_time() - begin
name, options, cluster, limit = json.loads(sys.argv[2])
step, args = workloads.arguments(name, **options)
begin, worked = time.perf_counter(), time.process_time()
given = {} if limit is None else {"seconds": limit}
plan = autopar.plan(step, *args, cluster=autopar.Cluster.parse(cluster), **given)
total = time.perf_counter() - begin
worked = time.process_time() - worked
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("ANSWER" + json.dumps({
    "trace s": plan.seconds.trace,
    "graph s": plan.seconds.graph,
    "solve s": plan.seconds.solve,
    "total s": total,
    "total work s": worked,
    "import work s": imported,
    "peak RSS MB": 1024 * kilobytes,
}))
"""
STEPPING = """
import itertools, json, sys, time
sys.path.insert(0, sys.argv[1] + "/benchmarks")
import jax, workloads, autopar
options, cluster, steps, given, kept = json.loads(sys.argv[2])
run = workloads.training("gpt", **options)
import example_training
if given is None:
    step, args = workloads.arguments("gpt", **options)
    plan = autopar.plan(step, *args, cluster=autopar.Cluster.parse(cluster))
    plan.save(kept)
else:
    plan = autopar.Plan.load(given)
step = autopar.parallelize(run.step, plan=plan)
state = step.init(run.create_state, jax.random.key(0), batch=run.batch)
batch = next(run.batches(seed=0))
def turn(count):
    global state
    for _ in range(count):
        state, loss = example_training.take_step(step, state, batch)
    jax.block_until_ready((state, loss))
turn(2)
print("ANSWER" + json.dumps(plan.predicted.step_s), flush=True)
for _ in sys.stdin:
    begin = time.perf_counter()
    turn(steps)
    print("ANSWER" + json.dumps((time.perf_counter() - begin) / steps), flush=True)
"""


class ChildError(Exception):
    """The process of a checkout failed; the message is its last line."""


def command(root: pathlib.Path, code: str, request: Sequence[Any]) -> list[str]:
    """The command that runs code in a checkout."""
    return [sys.executable, "-c", code, str(root), json.dumps(request)]


def environment(root: pathlib.Path) -> dict[str, str]:
    """Environment variables for a process of a checkout, on 8 simulated devices."""
    folders = [root, root / "solver", root / "passes"]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }


def answer(lines: Iterator[str]) -> Any:
    """The next answer of a child process.

    Raises:
      ChildError: the child process ended without an answer.
    """
    for line in lines:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise ChildError("the child ended")


def planned(root: pathlib.Path, request: Sequence[Any]) -> dict[str, float]:
    """Seconds and bytes of planning, in a new process."""
    done = subprocess.run(
        command(root, PLANNING, request),
        cwd=root,
        env=environment(root),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildError(last_line(done.stderr))
    return answer(iter(done.stdout.splitlines()))


def last_line(text: str) -> str:
    """The last line of an error."""
    return (text.strip().splitlines() or ["no output"])[-1]


class Stepper:
    """A process that runs steps of one checkout on request."""

    def __init__(self, root: pathlib.Path, request: Sequence[Any]) -> None:
        """Starts the process; `ready` waits until it has compiled."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._child = subprocess.Popen(
            command(root, STEPPING, request),
            cwd=root,
            env=environment(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ready(self) -> float:
        """Waits for the first steps; returns the predicted seconds of a step."""
        return self._answer()

    def step_s(self) -> float:
        """Runs a turn; returns the seconds of a step."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._child.communicate()
        self._errors.close()

    def _answer(self) -> float:
        assert self._child.stdout is not None
        try:
            return answer(iter(self._child.stdout.readline, ""))
        except ChildError as error:
            self._child.wait()
            self._errors.seek(0)
            raise ChildError(last_line(self._errors.read())) from error


def in_turns(turns: int) -> Iterator[int]:
    """Yields which of two checkouts to measure next: 0, 1, 1, 0, 0, 1, and so on.

    >>> list(in_turns(3))
    [0, 1, 1, 0, 0, 1]
    """
    for turn in range(turns):
        yield from ((0, 1), (1, 0))[turn % 2]


def row(case: str, quantity: str, old: Sequence[float], new: Sequence[float]) -> None:
    """Prints medians, their ratio, and the range of the ratio over turns."""
    scale = UNITS[quantity.split()[-1]]
    medians = [statistics.median(values) for values in (old, new)]
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    shown = [f"{scale * value:.4g}" for value in medians]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    workloads.row(case, quantity, *shown, f"{medians[1] / medians[0]:.3f}", spread)


def compare_planning(
    roots: Sequence[pathlib.Path], name: str, turns: int, limit: float | None
) -> None:
    """Plans one case with the checkouts in turns."""
    example, options, cluster = CASES[name]
    case, request = f"plan {name}, {cluster}", (example, options, cluster, limit)
    found: list[dict[str, list[float]]] = [collections.defaultdict(list) for _ in roots]
    for k in in_turns(turns):
        try:
            answers = planned(roots[k], request)
        except ChildError as error:
            print(f"{case}, {('old', 'new')[k]}: {error}", file=sys.stderr)
            return
        for quantity, value in answers.items():
            found[k][quantity].append(value)
    for quantity, old in found[0].items():
        row(case, quantity, old, found[1][quantity])


def compare_steps(
    case: str,
    roots: Sequence[pathlib.Path],
    requests: Sequence[Sequence[Any]],
    turns: int,
) -> None:
    """Runs steps in turns, with one process per checkout."""
    found: tuple[list[float], list[float]] = ([], [])
    with contextlib.ExitStack() as stack:
        steppers: list[Stepper] = []
        for root, request in zip(roots, requests, strict=True):
            steppers.append(Stepper(root, request))
            stack.callback(steppers[-1].close)
            steppers[-1].ready()
        for k in in_turns(turns):
            found[k].append(steppers[k].step_s())
    row(case, "step ms", *found)


def step_times(roots: Sequence[pathlib.Path], chosen: argparse.Namespace) -> None:
    """Compares steps under each checkout's own plan, and then under one common plan."""
    options = {"layers": chosen.layers}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(pathlib.Path(folder, f"{side}.json")) for side in ("old", "new")]
        common = (options, chosen.cluster, chosen.steps)
        own = [(*common, None, file) for file in files]
        compare_steps("gpt step, own plans", roots, own, chosen.turns)
        for side, file in zip(("old", "new"), files, strict=True):
            same = [(*common, file, None)] * 2
            try:
                compare_steps(f"gpt step, {side} plan", roots, same, chosen.turns)
                return
            except ChildError as error:
                print(f"not under the {side} plan: {error}", file=sys.stderr)


def main() -> None:
    """Compares, and prints a row for each quantity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path, nargs="?", default=ROOT)
    parser.add_argument("--turns", type=int, default=5, help="of each checkout")
    parser.add_argument("--only", default="planning,steps")
    parser.add_argument("--cases", default=",".join(CASES), help="to plan")
    parser.add_argument("--limit", type=float, help="seconds of the solver, a mesh")
    parser.add_argument("--steps", type=int, default=5, help="in a turn")
    parser.add_argument("--layers", type=int, default=4, help="of the gpt that runs")
    parser.add_argument("--cluster", default="8:cpu", help="that its plan is for")
    chosen = parser.parse_args()
    roots = [chosen.old.resolve(), chosen.new.resolve()]
    workloads.row("case", "quantity", "old", "new", "new / old", "in one turn")
    workloads.row(*["---"] * 6)
    if "planning" in chosen.only:
        for name in chosen.cases.split(","):
            compare_planning(roots, name, chosen.turns, chosen.limit)
    if "steps" in chosen.only:
        step_times(roots, chosen)


if __name__ == "__main__":
    main()
