"""Tests that ``autopar ledger`` prints ledgers, and refuses other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import elastic_runs
import pytest
import step_forms as forms

from autopar.elastic.ledger import Ledger, read_ledger
from autopar.errors import PlanError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "deep" / "ledger.jsonl"
    run = elastic_runs.started(forms.FORMS["plain"], 12, ledger=path)
    for done in run:
        if done.step == 3:
            run.change({"kind": "gone", "devices": [7, 6], "id": "a"})
            run.change({"kind": "gone", "devices": [7], "id": "a"})
    return path


def test_the_table(run: Any, written: Path) -> None:
    text = run("ledger", written).out
    assert "gone 7, 6" in text
    assert "=8" in text
    assert "=6" in text
    assert "its id has come before" in text


def test_json_has_every_line(run: Any, written: Path) -> None:
    lines = run("ledger", written, "--json").json["lines"]
    assert [x["kind"] for x in lines] == ["event", "replan", "measured"]
    (replan,) = [x for x in lines if x["kind"] == "replan"]
    parts = replan["measured"]
    spent = parts["plan_s"] + parts["compile_s"] + parts["move_s"]
    assert 0 < spent <= parts["pause_s"]
    assert replan["predicted"]["move_bytes"] > 0
    assert {x["name"] for x in replan["compared"]} == {"new"}
    (measured,) = [x for x in lines if x["kind"] == "measured"]
    assert measured["step_before_s"] > 0
    assert measured["step_after_s"] > 0


def test_files_that_are_no_ledger(run: Any, tmp_path: Path) -> None:
    assert run("ledger", tmp_path / "none.jsonl").code == 2
    path = tmp_path / "other.jsonl"
    path.write_text('{"kind": "stop"}\n[1]\n{"kind": "stop"}\n')
    assert "line 2 is none of a ledger" in run("ledger", path).err
    for line in (
        '{"kind": "replan", "events": 5}',
        '{"kind": "replan", "measured": {"pause_s": "long"}}',
        '{"kind": "batch", "old": []}',
        '{"kind": "batch", "phi": {"phi": 1%s}}' % ("0" * 400),
        '{"kind": "event"}',
        '{"kind": "refused", "events": [[]]}',
        '{"kind": []}',
        '{"kind": "stop", "events": ' + "[" * 99_999,
    ):
        path.write_text('{"kind": "stop"}\n' + line + '\n{"kind": "stop"}\n')
        assert "line 2 is none of a ledger" in run("ledger", path).err
    path.write_text('{"kind": "measured", "number": []}\n{"kind": "wrong", "source": 0')
    path.write_text(path.read_text() + ', "reason": "why"}\n')
    assert "why" in run("ledger", path).out
    path.write_text("")
    assert "yet" in run("ledger", path).out


def test_a_line_that_was_cut_short(tmp_path: Path) -> None:
    """A kill in the middle of a line leaves the lines before it."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write("wrong", source="x", reason="y")
    with path.open("a") as file:
        file.write('{"kind": "wro')
    assert [x["source"] for x in read_ledger(path)] == ["x"]


def test_a_ledger_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="ledger="):
        Ledger(tmp_path)
    ledger = Ledger(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").mkdir()
    ledger.write("wrong", source="x", reason="y")
    assert ledger.failure
    assert json.dumps(ledger.lines)


def test_changes_of_the_batch(run: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    one = {"rows": 32, "microbatches": 1, "codecs": "none", "meshes": [{"data": 4}]}
    other = {**one, "rows": 256, "microbatches": 2, "codecs": "int8"}
    ledger.write(
        "batch",
        number=1,
        step=40,
        old=one,
        new=other,
        phi={"phi": 512.5, "low": 400.0, "high": None},
        compared=[{}, {}, {}],
        predicted={"goodput_before": 1000.0, "goodput": 2345.0, "least": 1.87},
        measured={"pause_s": 0.25},
    )
    ledger.write(
        "batch measured",
        number=1,
        step_before_s=0.01,
        step_after_s=0.02,
        goodput_before=1000.0,
        goodput_after=2222.0,
    )
    ledger.write("batch refused", way=other, reason="no plan fits\nat all")
    nearest = {"least": 1.2, "cost_s": 12.0, "pays": 0.9}
    near = {"nearest_name": "512 rows, codecs int8", "nearest": nearest}
    ledger.write("batch kept", way=other, horizon_s=40.0, **near)
    ledger.write("gain capped", step=70, loss=None, limit=2.5, gain=12.0, most=6.0)
    text = run("ledger", ledger.path).out
    for part in ("32 none data=4", "256/2 int8 data=4", "512.5", "2345", "2222"):
        assert part in text
    for part in ("x1.87", "10.0 ms", "20.0 ms", "no plan fits"):
        assert part in text
    kept = "512 rows, codecs int8 does not pay, nearly surely at least x1.20 of the"
    assert f"{kept} goodput, 12.0 s to get there, 40.0 s until" in text
    assert "step 70: gain capped" in text
    assert "no finite number, usual is at most 2.5; a step counts at most 6 of" in text
    assert "at all" not in text
