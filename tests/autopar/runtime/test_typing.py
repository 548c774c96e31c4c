"""Tests that a decorated step keeps its types, and that options are type-checked."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest
from checkout import ROOT

# A line that ends in `# error: RULE` must have that error, all others none.
PROGRAM = """\
from typing import assert_type

import autopar


class State: ...


class Batch: ...


@autopar.parallelize(cluster="4:cpu", compression="int8", seconds=None)
def step(state: State, batch: Batch) -> tuple[State, float]:
    return state, 0.0


def plain(state: State, batch: Batch, *, scale: float = 1.0) -> State:
    return state


assert_type(step(State(), Batch()), tuple[State, float])
assert_type(step(state=State(), batch=Batch()), tuple[State, float])
assert_type(autopar.parallelize(plain)(State(), Batch(), scale=2.0), State)
state, loss = step(State(), Batch())
loss.is_integer()
state = step.replan("2:cpu", state, devices=[0, 1])
print(step.plan.predicted.step_s, step.cluster.num_devices)

step(State(), State())  # error: reportArgumentType
step(State())  # error: reportCallIssue
step(State(), Batch())[0].loss  # error: reportAttributeAccessIssue
autopar.parallelize(plain, donate="no")  # error: reportArgumentType
autopar.parallelize(plain, clusters="4:cpu")  # error: reportCallIssue
autopar.parallelize(compresion="int8")(plain)  # error: reportCallIssue
autopar.plan(plain, State(), Batch(), cluster=4)  # error: reportArgumentType
"""


def test_pyright_on_a_users_program(tmp_path: pathlib.Path) -> None:
    """What is right passes, and of what is wrong nothing is missed."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    settings = {
        "include": ["program.py"],
        "extraPaths": [str(ROOT / part) for part in (".", "solver", "passes")],
        "reportMissingTypeStubs": False,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))

    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "--outputjson", "--project", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        pytest.skip(f"pyright does not run here: {(done.stderr or done.stdout)[-200:]}")

    found = {
        (d["range"]["start"]["line"], d.get("rule", d["message"]))
        for d in report["generalDiagnostics"]
        if d["severity"] == "error"
    }
    marked = [re.search(r"# error: (\w+)", x) for x in PROGRAM.splitlines()]
    assert found == {(k, mark[1]) for k, mark in enumerate(marked) if mark}
