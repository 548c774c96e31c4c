"""Tests the console script: its output, its files and its errors."""

import json

import pytest
from contest_files import EXAMPLE, changed, write_json
from typer.testing import CliRunner

from autopar_solver import (
    evaluate_choices,
    read_contest_instance,
    read_contest_solution,
)
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


def error_line(*arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    return line


def test_errors_say_what_failed(tmp_path):
    """One line each, with the file or the option and what to choose."""
    path = write_json(tmp_path / "example.json", EXAMPLE)
    missing = tmp_path / "missing.json"
    assert str(missing) in error_line(missing)
    assert '--backend \'glop\': choose "highs" or "cbc"' in error_line(
        path, "--backend", "glop"
    )
    assert "/no/such/folder" in error_line(path, "--out", "/no/such/folder/s.json")
    path.write_text("{}")
    assert "not a contest instance" in error_line(path)


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
def test_both_backends_print_the_same_cost(tmp_path):
    path = write_json(tmp_path / "example.json", EXAMPLE)
    outputs = [run(path, "--backend", name).output for name in ("highs", "cbc")]
    costs = [
        [line for line in output.splitlines() if line.startswith("cost")]
        for output in outputs
    ]
    assert costs[0] == costs[1] == ["cost      445"]


def test_without_a_solution_nothing_is_written(tmp_path):
    path = write_json(tmp_path / "tight.json", changed("usage_limit", to=20))
    out = tmp_path / "solution.json"
    assert run(path, "--out", out).exit_code == 1
    assert not out.exists()


def test_written_choices_are_those_of_the_printed_cost(tmp_path):
    path = write_json(tmp_path / "example.json", EXAMPLE)
    out = tmp_path / "solution.json"
    assert run(path, "--out", out, "--gap", 0.0).exit_code == 0
    choices = read_contest_solution(out)
    assert evaluate_choices(read_contest_instance(path), choices).cost == 445.0


def test_help_names_the_options():
    result = run("--help")
    assert result.exit_code == 0
    for name in ("--seconds", "--out", "--gap", "--backend"):
        assert name in result.output
