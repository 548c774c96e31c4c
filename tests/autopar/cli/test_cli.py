import dataclasses
import json
import pathlib
import shlex
import subprocess
import sys
from typing import Any

import pytest
from checkout import GOLDEN, ROOT
from command_line import SMALL, TARGET, Run, assert_fails

import autopar
from autopar.cli import explaining
from autopar.plans import SCHEMA, Plan
from autopar.reports.alternatives import Alternative, alternatives
from autopar.reports.table import render


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.code, result.out) == (0, f"autopar {autopar.__version__}\n")


def test_module_is_a_command_too() -> None:
    words = [sys.executable, "-m", "autopar", "--version"]
    root = ROOT
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == f"autopar {autopar.__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_the_commands(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.code == 0
    for name in ("plan", "explain", "audit", "compare", "profile", "demo"):
        assert f"  {name} " in result.out
        assert run(name, "--help").code == 0


def test_plan_prints_the_plan_and_where_the_time_went(run: Run) -> None:
    result = run("plan", TARGET, "--cluster", "2x4:cpu")
    assert result.code == 0
    expected = (GOLDEN / "two_layers_2x4_cpu.txt").read_text(encoding="utf-8")
    assert result.out.startswith(expected)
    assert result.out.splitlines()[-1].startswith("planned in ")


def test_plan_as_json_is_one_object(run: Run) -> None:
    words = ("--cluster", "2x4:cpu", "--json", "--seconds", 5, "--max-axes", 2)
    result = run("plan", TARGET, *SMALL, *words)
    assert result.code == 0
    found = result.json
    assert found["schema"] == SCHEMA
    (stage,) = found["stages"]
    assert list(stage["mesh"]["axes"].values()) == [2, 4]
    parts = {"step_s", "compute_s", "communication_s", "communication_bytes"}
    parts |= {"peak_memory_bytes", "hidden_s", "low_s", "high_s"}
    assert set(found["predicted"]) == parts
    low_s, high_s = (found["predicted"][name] for name in ("low_s", "high_s"))
    assert 0.0 < low_s < found["predicted"]["step_s"] < high_s
    assert {"status", "gap", "seconds"} <= set(found["solver"])
    assert set(found["seconds"]) == {*("trace", "graph", "solve", "compile", "total")}
    assert len(stage["inputs"]["params/0/kernel"]) == 2
    assert found["shapes"]["params/0/kernel"] == [64, 64]
    assert found["unsupported_ops"] == []
    assert found["target"] == TARGET
    assert found["options"] == {"width": "64", "batch": "64", "layers": "1"}


def test_options_may_come_after_flags(run: Run) -> None:
    result = run("plan", TARGET, "--cluster", "8:cpu", *SMALL, "--json")
    assert result.json["options"]["layers"] == "1"


def test_plan_is_saved(run: Run, saved: pathlib.Path) -> None:
    plan = Plan.load(saved)
    assert plan.target == TARGET
    assert "params/0/kernel" in render(plan)


def test_plan_explains_its_search(run: Run) -> None:
    words = ("--cluster", "2x4:h100", "--microbatches", "auto", "--explain-search")
    result = run("plan", TARGET, *SMALL, *words)
    rows = [line.split("  ") for line in result.out.splitlines() if "2x4 " in line]
    starred = [row for row in rows if row[0] == "*"]
    assert len(starred) == 1
    (step,) = (x for x in result.out.splitlines() if x.startswith("step "))
    assert any(cell and cell in step for cell in starred[0])
    assert "solver: all hidden" in {cell.strip() for row in rows for cell in row}


def test_plan_writes_a_page(run: Run, tmp_path: pathlib.Path) -> None:
    page = tmp_path / "report.html"
    assert run("plan", TARGET, "--cluster", "2x4:cpu", "--html", page).code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "params/{0,1}/kernel" in text


def test_memory_changes_the_cluster(run: Run) -> None:
    words = ("--cluster", "8:cpu", "--memory", "1GB", "--json")
    cluster = run("plan", TARGET, *SMALL, *words).json["cluster"]
    assert cluster["text"] == "8:cpu,memory=1GB"
    assert cluster["data"]["device"]["memory_bytes"] == 1_000_000_000


def test_no_plan_fits(run: Run) -> None:
    words = ("--cluster", "2:cpu", "--memory", "10kB", "--seconds", 3)
    assert_fails(run("plan", TARGET, *SMALL, *words), "no plan fits", code=3)


def test_local_devices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(GOLDEN))  # where no profile is
    result = run("plan", TARGET, *SMALL, "--cluster", "local", "--json")
    assert result.code == 0
    sizes = result.json["stages"][0]["mesh"]["axes"].values()
    assert list(sizes) in ([8], [2, 4], [4, 2])


BAD_PLANS: list[tuple[list[str], list[str]]] = [
    (["plan"], ["Missing argument"]),
    (["plan", TARGET], ["--cluster"]),
    (["plan", TARGET, "--cluster", "8:abacus"], ["unknown device 'abacus'"]),
    (["plan", TARGET, "--cluster", "eight"], ["'eight' is not a shape"]),
    (["plan", TARGET, "--cluster", "none.toml"], ["none.toml"]),
    (["plan", TARGET, "--cluster", "8:cpu", "--memory", "3"], ["number of bytes"]),
    (["plan", TARGET, "--cluster", "8:cpu", "--seconds", "x"], ["--seconds"]),
    (["plan", TARGET, "--cluster", "8:cpu", "--seconds", "-1"], ["--seconds"]),
    (["plan", TARGET, "--cluster", "8:cpu", "--max-axes", "0"], ["--max-axes"]),
    (["plan", TARGET, "--cluster", "8:cpu", "--quick"], ["--quick"]),
    (["plan", TARGET, "--cluster", "8:cpu", "--out", "/none/p"], ["/none"]),
    (["plan", TARGET, "--cluster", "8:cpu", "--out", "/"], ["/"]),
    (["plan", "none.py:f", "--cluster", "8:cpu"], ["none.py", "no such file"]),
    (["plan", f"{TARGET}s", "--cluster", "8:cpu"], ["no function 'workloads'"]),
    (["plan", TARGET, "layer=2", "--cluster", "8:cpu"], ["no option", "layers=2"]),
    (["plan", TARGET, "layers=x", "--cluster", "8:cpu"], ["not a whole number"]),
    (["plan", TARGET, "layers", "--cluster", "8:cpu"], ["is not key=value"]),
    (["plan", TARGET, "layers=0", "--cluster", "8:cpu"], ["must be positive"]),
    (["plan", TARGET, "batch=3", "--cluster", "8:cpu"], ["batch cannot be split"]),
    (["plan", TARGET, "dtype=no", "--cluster", "8:cpu"], ["raised TypeError"]),
    (["audit", "none.json"], ["none.json: cannot be read"]),
    (["explain", "none.json"], ["none.json: cannot be read"]),
    (["audit", TARGET], ["--cluster"]),
    (["nothing"], ["No such command 'nothing'"]),
    (["--nothing"], ["--nothing"]),
    (["demo", "--steps", "0"], ["--steps"]),
    (["compare", TARGET, "--cluster", "8:abacus"], ["unknown device"]),
    (["compare", TARGET, "--cluster", "9:cpu", "--devices", "9"], ["9", "with 8"]),
    (["profile", "--out", "/none/p.toml"], ["/none"]),
    (["plan", TARGET, "--cluster", "2x4:cpu", "--max-axes", "1"], ["2 levels"]),
    (["audit", TARGET, "--cluster", "2x4:cpu", "--max-axes", "1"], ["2 levels"]),
]


@pytest.mark.parametrize(("words", "parts"), BAD_PLANS, ids=lambda x: " ".join(x)[:60])
def test_bad_input_is_one_line(run: Run, words: list[str], parts: list[str]) -> None:
    assert_fails(run(*words), *parts)


def test_a_step_that_cannot_be_traced(run: Run, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "untraceable.py"
    file.write_text(
        "def step(x, y):\n    return (x if x > 0 else y), y\n"
        "def workload():\n    return step, 1.0, 2.0\n",
        encoding="utf-8",
    )
    result = run("plan", f"{file}:workload", "--cluster", "8:cpu")
    assert_fails(result, "the step 'step' cannot be traced")


def test_a_bug_shows_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.target.Workload.analyse_step", lambda *_: None)
    words = ("plan", TARGET, "--cluster", "8:cpu")
    result = run(*words)
    assert (result.code, result.out) == (70, "")
    assert "Traceback" in result.err
    assert "a bug in autopar: AttributeError" in result.err.splitlines()[-1]
    error = run(*words, "--json").json["error"]
    assert (error["kind"], error["exit_code"]) == ("AttributeError", 70)


def test_audit_agrees_with_the_plan(run: Run, saved: pathlib.Path) -> None:
    result = run("audit", saved, "--json")
    assert result.code == 0
    found = result.json
    assert found["stages"] == json.loads(saved.read_text())["stages"]
    predicted = found["predicted"]["communication_bytes"]
    assert found["shardy"]["communication_bytes"] == pytest.approx(predicted)
    assert found["shardy"]["by_kind"] == pytest.approx(found["predicted_by_kind"])
    assert "xla" not in found


def test_audit_compiles(run: Run) -> None:
    words = ("width=256", "batch=256", "--cluster", "8:cpu", "--max-axes", "1")
    found = run("audit", TARGET, *words, "--compile", "--json").json
    predicted = found["predicted"]["communication_bytes"]
    assert predicted > 0
    assert found["xla"]["communication_bytes"] == pytest.approx(predicted)
    assert found["xla"]["peak_memory_bytes"] > 0


def test_audit_prints_a_table(run: Run) -> None:
    result = run("audit", TARGET, "width=256", "batch=256", "--cluster", "2x4:cpu")
    assert result.code == 0
    assert "shardy communicates what the plan predicts" in result.out
    assert "total" in result.out


def test_explain_gives_an_overview(run: Run, saved: pathlib.Path) -> None:
    result = run("explain", saved)
    assert result.code == 0
    assert "held on each device" in result.out
    found = run("explain", saved, "--json").json
    seconds = sum(row["seconds"] for row in found["collectives"])
    assert seconds == pytest.approx(found["predicted"]["communication_s"])
    assert set(found["state_bytes"]) == {"parameter", "optimizer state", "batch"}


def test_explain_attributes_the_whole_step(run: Run, saved: pathlib.Path) -> None:
    predicted = Plan.load(saved).predicted
    for by in ("operator", "layer"):
        found = run("explain", saved, "--by", by, "--json").json
        assert found["step_s"] == pytest.approx(predicted.step_s)
        assert sum(p["seconds"] for p in found["parts"]) == pytest.approx(
            predicted.step_s
        )
    text = run("explain", saved, "--by", "operator", "--top", 2).out
    *parts, step = text.rstrip().splitlines()
    assert any(line.startswith("the rest") for line in parts)
    assert step.startswith("step ")
    assert_fails(run("explain", saved, "--by", "axis"), "operator and layer")
    assert_fails(run("explain", saved, "--by", "layer", "--tensor", "*"), "give one")


def test_explain_names_the_pin_of_a_faster_layout(
    run: Run, saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--tensor", "params/0/kernel", "--alternatives", 1)
    assert "has missed" not in run("explain", saved, *words).out

    def faster(*args: Any, **options: Any) -> list[Alternative]:
        found = alternatives(*args, **options)
        return [dataclasses.replace(a, step_s=1e-9) for a in found]

    monkeypatch.setattr(explaining, "alternatives", faster)
    line = run("explain", saved, *words).out.split("has missed the fastest.")[1]
    pin = shlex.split(line.splitlines()[0])[-1]
    assert run("plan", TARGET, "--cluster", "2x4:cpu", "--pin", pin).code == 0


def test_explain_compares_layouts(run: Run, saved: pathlib.Path) -> None:
    words = ("--tensor", "params/*/kernel", "--alternatives", 2)
    result = run("explain", saved, *words)
    assert result.code == 0
    assert "params/0/kernel" in result.out
    assert "chosen" in result.out
    (found,) = run("explain", saved, *words, "--json").json["inputs"]
    assert len(found["alternatives"]) == 2
    assert found["layout"] not in [a["layout"] for a in found["alternatives"]]


def test_explain_takes_the_target_of_a_plan_made_elsewhere(
    run: Run, saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = json.loads(saved.read_text()) | {"target": "", "options": {}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert_fails(run("explain", path), "does not say which step", "train.py:workload")
    assert run("explain", path, TARGET, *SMALL).code == 0


def test_a_plan_of_another_model(run: Run, saved: pathlib.Path) -> None:
    for command in ("explain", "audit"):
        assert_fails(run(command, saved, "width=32"), "belongs to another step")


def test_a_plan_of_another_cluster(run: Run, saved: pathlib.Path) -> None:
    result = run("explain", saved, "--cluster", "8:cpu")
    assert_fails(result, "the plan is for 2x4:cpu", "says 8:cpu")


def test_a_plan_holds_a_cluster_without_short_form(
    run: Run, saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    cluster = autopar.Cluster.parse("2x4:cpu")
    device = dataclasses.replace(cluster.device, name="mine")
    custom = dataclasses.replace(cluster, device=device)
    toml, path = tmp_path / "mine.toml", tmp_path / "plan.json"
    toml.write_text(custom.to_toml(), encoding="utf-8")
    words = ("plan", TARGET, *SMALL, "--cluster", toml, "--out", path)
    assert run(*words).code == 0
    assert Plan.load(path).cluster.read() == custom
    assert run("audit", path).code == 0
    assert run("audit", path, "--cluster", toml).code == 0
    assert_fails(run("audit", path, "--cluster", "2x4:cpu"), "plan is for 2x4:mine")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not a plan"),
        ("[]", "not a plan"),
        ('{"schema": 999}', "has schema 999"),
        ('{"schema": 1}', "not a plan"),
    ],
)
def test_files_that_are_no_plans(
    run: Run, tmp_path: pathlib.Path, text: str, part: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    for command in ("explain", "audit"):
        assert_fails(run(command, path), part)
