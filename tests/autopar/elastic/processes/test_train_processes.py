"""Tests that all processes change the batch at one step, also after one is lost."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from checkout import ROOT
from elastic_processes import Run
from following_cases import BASE

pytestmark = pytest.mark.cluster

SCRIPT = ROOT / "tests" / "support" / "train_script.py"
STEPS = 90


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[Run]:
    folder = tmp_path / "run"
    made = Run(folder, folder / "losses", STEPS, 1, 0.05, script=SCRIPT, processes=2)
    yield made
    made.clean()


def by_process(run: Run) -> list[dict[int, list[float]]]:
    """For each process, step number -> the line that it wrote."""
    found: list[dict[int, list[float]]] = []
    for path in run.folder.glob("losses.*"):
        if path.is_file() and path.suffix != ".ledger":
            text = path.read_text().splitlines()
            lines = [json.loads(x) for x in text if x.endswith("]")]
            found.append({line[0]: line[1:] for line in lines})
    return found


def test_all_take_one_decision_at_one_step_and_go_on_without_the_first(
    run: Run,
) -> None:
    run.wait_for(lambda: any(x[-1][2] > BASE for x in _values(run) if x))
    run.wait_for_world([0, 1], steps=2)
    run.kill(0)
    run.wait_for_world([1])
    assert run.wait() == 0, run.output()
    one, other = by_process(run)
    both = one.keys() & other.keys()
    assert len(both) > 10
    assert all(one[k] == other[k] for k in both)
    whole = {**one, **other}
    assert set(whole) == set(range(STEPS))
    assert whole[0][2] == BASE
    assert whole[STEPS - 1][2] == 4 * BASE
    for k in range(STEPS - 1):
        assert whole[k + 1][1] - whole[k][1] in (BASE, 4 * BASE)
    # What a scheduler reads: the batch in use, its noise, and what steps were worth.
    text = (run.folder / "progress.jsonl").read_text()
    lines = [json.loads(x) for x in text.splitlines()]
    last = lines[-1]
    assert (lines[0]["batch"], last["batch"]) == (BASE, 4 * BASE)
    assert float(last["noise_scale"]) >= 0
    assert BASE * STEPS < last["progress"] < last["position"]
    lines = (run.folder / "losses.ledger").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("batch") == 1
    assert kinds.index("batch") < len(kinds) - 1 - kinds[::-1].index("world")


def test_processes_leave_and_end_without_waiting_for_a_compilation(
    tmp_path: pathlib.Path,
) -> None:
    """It would take ten minutes, more than the test has."""
    folder = tmp_path / "run"
    words = (folder / "losses", STEPS, 1, 0.05, 600)
    run = Run(folder, *words, script=SCRIPT, processes=2)
    try:
        run.wait_for((folder / "losses.compiles").exists)
        run.kill(1)
        run.wait_for_world([0], steps=1)
        assert run.wait() == 0, run.output()
    finally:
        run.clean()
    (losses,) = (x for x in by_process(run) if STEPS - 1 in x)
    assert losses[STEPS - 1][2] == BASE


def _values(run: Run) -> list[list[list[float]]]:
    return [list(x.values()) for x in by_process(run)]
