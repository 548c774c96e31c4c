"""The console script: what it prints, writes, and how it fails."""

import json

import pytest
from contest_files import EXAMPLE, changed, write_json
from typer.testing import CliRunner

from autopar_solver.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_solves(tmp_path):
    path = write_json(tmp_path / "example.json", EXAMPLE)
    out = tmp_path / "solution.json"
    result = run(path, "--seconds", 5, "--out", out)
    assert result.exit_code == 0, result.output
    for line in ("cost      445", "bound     445", "status    proved optimal"):
        assert line in result.output
    assert "reduced   " in result.output
    assert len(json.loads(out.read_text())) == 5


def test_infeasible(tmp_path):
    path = write_json(tmp_path / "tight.json", changed("usage_limit", to=20))
    result = run(path, "--seconds", 5)
    assert result.exit_code == 1
    assert "no choice of strategies is possible" in result.output
    assert "at least 50" in result.output


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("missing.json", ()),
        ("bad.json", ()),
        ("example.json", ("--backend", "glop")),
        ("example.json", ("--out", "/no/such/folder/solution.json")),
        ("example.json", ("--seconds", "0.5")),
    ],
)
def test_bad_input(name, arguments, tmp_path):
    write_json(tmp_path / "bad.json", changed("nodes", "costs", 0, to=[10**18]))
    write_json(tmp_path / "example.json", EXAMPLE)
    result = run(tmp_path / name, *arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_bad_input_is_one_line(tmp_path):
    path = write_json(tmp_path / "bad.json", changed("edges", "nodes", 0, to=[0, 9]))
    lines = run(path).output.strip().splitlines()
    assert len(lines) == 1
    assert "edge 0 [0, 9]: there are only 5 nodes" in lines[0]
