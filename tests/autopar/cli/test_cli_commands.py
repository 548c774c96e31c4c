"""Tests commands about saved plans and this machine, and texts of errors and help."""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import socket
import sys
from collections.abc import Iterator

import jax
import pytest
from command_line import TARGET, Run, assert_fails, save_plan
from golden import assert_golden

import autopar
from autopar.cli import examining
from autopar.cli.failures import EXIT_CODES
from autopar.cli.options import COMMANDS, Command
from autopar.plans import Plan


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal is narrow."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def other(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """The plan, with another layout of one input."""
    plan = Plan.load(saved)
    axes = [a for a, n in plan.mesh["axes"].items() if n > 1]
    spec = jax.sharding.PartitionSpec(axes[-1], axes[0])
    path = tmp_path / "b.json"
    plan.edit({"params/0/kernel": spec}).save(path)
    return path


class TestDiff:
    def test_the_same(self, run: Run, saved: pathlib.Path) -> None:
        result = run("diff", saved, saved)
        assert (result.code, result.out) == (0, "the plans are the same\n")
        assert run("diff", saved, saved, "--json").json["same"]

    def test_how_long_planning_took_is_no_difference(
        self, run: Run, saved: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        data = json.loads(saved.read_text())
        data["seconds"]["total"] += 1.0
        path = tmp_path / "slower.json"
        path.write_text(json.dumps(data))
        assert run("diff", saved, path).code == 0

    def test_an_edited_layout(
        self, run: Run, saved: pathlib.Path, other: pathlib.Path
    ) -> None:
        result = run("diff", saved, other)
        assert (result.code, result.err) == (1, "")
        assert_golden(result.out.rstrip(), "diff_two_layers.txt")
        found = run("diff", saved, other, "--json")
        assert found.code == 1
        (field,) = found.json["differences"]
        assert field["field"] == "stages/step/inputs/params/0/kernel"

    def test_files_that_are_no_plans(self, run: Run, saved: pathlib.Path) -> None:
        assert run("diff", saved, "none.json").code == 2


class TestStages:
    def test_texts_of_a_plan_of_two_stages(
        self, run: Run, tmp_path: pathlib.Path
    ) -> None:
        words = ("width=64", "batch=64", "--cluster", "4:cpu")
        more = ("--stages", "2", "--microbatches", "2")
        staged = save_plan(tmp_path / "plan.json", *words, *more)
        run("plan", "none")  # what was printed until here is no part of a text
        for asked in (("explain",), ("explain", "--by", "layer"), ("audit",)):
            result = run(asked[0], staged, *asked[1:])
            assert result.code == 0
            name = "_".join(word.strip("-") for word in asked)
            assert_golden(result.out.rstrip(), f"staged_{name}.txt")
        words = ("--tensor", "params/1/kernel", "--alternatives", 1)
        assert "on stage 1" in run("explain", staged, *words).out
        data = run("explain", staged, *words, "--json").json
        assert [given["stage"] for given in data["inputs"]] == [1]


class TestCompareSaved:
    def test_saved_plans_stand_first(
        self, run: Run, saved: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        copy = tmp_path / "copy.json"
        copy.write_bytes(saved.read_bytes())
        words = ("--seconds", 2, "--json")
        found = run("compare", saved, copy, *words).json
        names = [row["name"] for row in found["plans"]]
        assert names[:2] == [str(saved), str(copy)]
        assert "data parallel" in names
        assert found["cluster"] == "2x4:cpu"

    def test_another_cluster(self, run: Run, saved: pathlib.Path) -> None:
        result = run("compare", saved, "--cluster", "8:cpu")
        assert_fails(result, "is for 2x4:cpu; the plans are compared on 8:cpu")


class TestDoctor:
    def test_findings_and_remedies(self, run: Run) -> None:
        result = run("doctor", "--json")
        found = {f["what"]: f for f in result.json["findings"]}
        assert found["jax"]["found"] == jax.__version__
        assert found["devices"]["found"].startswith(f"{jax.device_count()} x cpu")
        for finding in found.values():
            assert bool(finding["remedy"]) is (finding["state"] != "ok")
        assert result.json["ok"] is (result.code == 0)
        text = run("doctor")
        assert text.code == result.code
        assert text.out.splitlines()[0].split() == ["state", "found"]

    def test_what_is_wrong_sets_the_exit_code(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unknown(_: str) -> str:
            raise socket.gaierror("Name or service not known")

        monkeypatch.setattr(socket, "gethostbyname", unknown)
        result = run("doctor")
        assert result.code == 1
        assert "to /etc/hosts" in result.out

    def test_too_few_threads(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        count = jax.local_device_count()
        for threads, state in ((2 * count, "ok"), (count, "note")):
            monkeypatch.setenv("NPROC", str(threads))
            found = {f.what: f for look in examining._LOOKS for f in look()}
            assert found["threads"].state == state
        assert f"NPROC={2 * count}" in found["threads"].remedy

    def test_a_broken_profile(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        path = tmp_path / "profile.toml"
        path.write_text("nothing = 1\n", encoding="utf-8")
        monkeypatch.setenv("AUTOPAR_PROFILE", str(path))
        result = run("doctor")
        assert result.code == 1
        assert "profile: autopar profile" in result.out


BROKEN = """
def helper():
    return 1 / 0

def step(x, y):
    return helper(), y

def workload():
    return step, 1.0, 2.0
"""


class TestErrors:
    @pytest.fixture
    def broken(self, tmp_path: pathlib.Path) -> Iterator[str]:
        file = tmp_path / "raising_target.py"
        file.write_text(BROKEN, encoding="utf-8")
        yield f"{file}:workload"
        sys.modules.pop(file.stem, None)

    def test_the_users_own_line_is_named(self, run: Run, broken: str) -> None:
        """Also where the step raises something that JAX does not know."""
        result = run("plan", broken, "--cluster", "2:cpu")
        message = "ZeroDivisionError: division by zero"
        assert_fails(result, message, "raising_target.py:3)")

    def test_traceback(self, run: Run, broken: str) -> None:
        result = run("plan", broken, "--cluster", "2:cpu", "--traceback")
        assert result.code == 2
        assert "Traceback (most recent call last)" in result.err
        assert "in helper" in result.err

    @pytest.mark.parametrize(
        ("words", "kind", "code"),
        [
            (("plan", "none.py:f", "--cluster", "8:cpu"), "TargetError", 2),
            (("plan", TARGET, "--cluster", "eight"), "ClusterError", 2),
            (("plan", TARGET, "--sideways"), "NoSuchOption", 2),
            (("audit", "none.json"), "PlanError", 2),
            (
                ("plan", TARGET, "--cluster", "2:cpu", "--memory", "9kB"),
                "InfeasibleError",
                3,
            ),
        ],
    )
    def test_errors_as_json(
        self, run: Run, words: tuple[str, ...], kind: str, code: int
    ) -> None:
        result = run(*words, "--json")
        error = result.json["error"]
        assert (result.code, error["kind"], error["exit_code"]) == (code, kind, code)
        assert result.err == f"autopar: {error['message']}\n"


class TestHelp:
    def test_of_all(self, run: Run) -> None:
        result = run("-h")
        assert_golden(result.out.rstrip(), "help.txt")
        flat = " ".join(result.out.split())
        for code, meaning in EXIT_CODES:
            assert f"{code} {meaning}" in flat

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.words)
    def test_of_a_command(self, run: Run, command: Command) -> None:
        """Every command has an example, and fits a narrow terminal."""
        words = command.words.split()
        result = run(*words, "-h")
        assert result.code == 0
        assert f"Example: autopar {words[0]}" in " ".join(result.out.split())
        assert max(map(len, result.out.splitlines())) <= 60
        assert "\x1b" not in result.out
        assert result.out == run(*words, "--help").out

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.words)
    def test_every_option_has_a_text_and_every_command_its_work(
        self, command: Command
    ) -> None:
        module, function = command.work.split(".")
        work = getattr(importlib.import_module(f"autopar.cli.{module}"), function)
        (asked,) = inspect.signature(work).parameters.values()
        assert asked.name == "asked"
        for parameter in command.parameters():
            assert parameter.annotation.__metadata__[0].help, parameter

    def test_completion(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        # The shell that runs the tests is not asked for.
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
        result = run("--show-completion", "bash")
        assert (result.code, result.err) == (0, "")
        assert "_AUTOPAR_COMPLETE" in result.out
        monkeypatch.setenv("_AUTOPAR_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "autopar d")
        monkeypatch.setenv("COMP_CWORD", "1")
        assert run().out.split() == ["diff", "doctor", "demo"]

    def test_plans_are_printed_as_tables(self, saved: pathlib.Path) -> None:
        """Also where nothing but the plan was imported."""
        assert "params/0/kernel" in str(autopar.Plan.load(saved))
