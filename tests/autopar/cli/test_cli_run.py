import dataclasses
import pathlib
from typing import Any

import jax
import pytest
from command_line import SMALL, TARGET, Run, assert_fails

from autopar.cli import comparing, demonstration
from autopar.cli.common import progress, simulate_devices
from autopar.cluster import Cluster
from autopar.errors import PlanError, TargetError
from autopar.planner.experts import Expert
from autopar.planner.options import PlanOptions
from autopar.planner.search import Candidate, search
from autopar.profiling import kernels, profile
from autopar.steps.analysis import Analysis, analyse


def silent(_: str) -> None:
    """Says nothing."""


# Compare.


@pytest.fixture(scope="module")
def candidate() -> Candidate:
    from autopar.cli.target import load

    workload = load(TARGET, {"width": "64", "batch": "64", "layers": "1"})
    analysis: Analysis = analyse(workload.step, workload.args)
    return search(analysis, Cluster.parse("8:cpu"), seconds=3.0).best


def test_compare_puts_the_plan_beside_those_of_experts(run: Run) -> None:
    result = run("compare", TARGET, *SMALL, "--cluster", "2x4:cpu", "--json")
    assert result.code == 0
    found = result.json
    names = [row["name"] for row in found["plans"]]
    assert names[0] == "autopar"
    assert "data parallel" in names
    assert len(set(names)) == len(names)
    ours = found["plans"][0]["step_s"]
    for row in found["plans"][1:]:
        assert row["step_s"] is None or ours <= row["step_s"] * 1.001


def test_compare_prints_a_table(run: Run) -> None:
    result = run("compare", TARGET, *SMALL, "--cluster", "8:cpu")
    assert result.code == 0
    assert "data parallel" in result.out
    assert "measured" not in result.out


def test_data_parallel_plans_split_the_rows_on_any_link(run: Run) -> None:
    """Though on a slow one it is faster that every device does everything."""
    words = ("--cluster", "8x1:cpu,network=1Mb/s", "--json")
    rows = {r["name"]: r for r in run("compare", TARGET, *SMALL, *words).json["plans"]}
    assert rows["autopar"]["step_s"] < rows["data parallel"]["step_s"]
    assert rows["data parallel"]["communication_bytes"] > 0
    assert "tensor + sequence parallel" not in rows  # rows have no sequence


def test_compare_measures_what_fits(
    run: Run, monkeypatch: pytest.MonkeyPatch, candidate: Candidate
) -> None:
    """Two plans are really run; the third has no candidate."""
    experts = [Expert("a", "data=8", candidate), Expert("b", "data=8", None, "too big")]
    monkeypatch.setattr(comparing, "expert_plans", lambda *_, **__: experts)
    words = ("--cluster", "8:cpu", "--measure", "--devices", 8, "--repeats", 1)
    result = run("compare", TARGET, *SMALL, *words, "--json")
    assert result.code == 0
    ours, first, second = result.json["plans"]
    assert ours["measured_s"] > 0
    assert first["measured_s"] > 0
    assert second["measured_s"] is None
    assert (second["step_s"], second["reason"]) == (None, "too big")


def test_compare_has_pipelines_where_stages_are_asked_for(run: Run) -> None:
    words = ("width=64", "batch=64", "layers=2", "--cluster", "2:cpu", "--json")
    plain = run("compare", TARGET, *words).json["plans"]
    staged = ("--stages", "2", "--microbatches", "2")
    measured = ("--measure", "--repeats", 1)
    found = run("compare", TARGET, *words, *staged, *measured).json["plans"]
    more = {row["name"]: row for row in found}
    more = {k: v for k, v in more.items() if k not in {row["name"] for row in plain}}
    assert more
    for name, row in more.items():
        assert "pipeline" in name
        assert (row["measured_s"] is None) == (row["step_s"] is None)


@pytest.mark.parametrize("spec", ["2x8:cpu", "2x8:h100"])
def test_compare_cannot_measure_on_devices_it_lacks(run: Run, spec: str) -> None:
    result = run("compare", TARGET, *SMALL, "--cluster", spec, "--measure")
    assert_fails(result, "16")


def test_the_best_mesh_counts_for_each_expert(candidate: Candidate) -> None:
    again, work = dataclasses.replace, candidate.estimate.work
    doubled = again(work, table=again(work.table, trips=2.0 * work.table.trips))
    slower = again(candidate, estimate=again(candidate.estimate, work=doubled))
    experts = [
        Expert("a", "data=8", None, "too big"),
        Expert("a", "data=2 tensor=4", slower),
        Expert("a", "data=4 tensor=2", candidate),
        Expert("b", "data=8", None, "too big"),
    ]
    best = comparing.best_experts(experts)
    assert [(e.name, e.mesh) for e in best] == [
        ("a", "data=4 tensor=2"),
        ("b", "data=8"),
    ]


def test_a_plan_that_does_not_fit_is_named(candidate: Candidate) -> None:
    cluster = Cluster.parse("8:cpu,memory=1MB")
    large = dataclasses.replace(candidate, peak_memory_bytes=2e6)
    row = comparing.expert_row(Expert("a", "data=8", large), cluster)
    assert not row["fits"]
    assert row["reason"] == "does not fit: a device has 1.00 MB"
    missing = comparing.expert_row(Expert("a", "data=8", None), cluster)
    assert missing["reason"] == "none found within the time limit"


def test_ratios_are_against_the_plan() -> None:
    sizes = {"communication_bytes": 1.0, "peak_memory_bytes": 1.0, "reason": ""}
    times = {"compute_s": 1e-3, "communication_s": 0.0}
    row = {"mesh": "data=8", "fits": True, **sizes, **times}
    rows = [
        row | {"name": "autopar", "step_s": 1e-3, "measured_s": 2e-3},
        row | {"name": "data parallel", "step_s": 2e-3, "measured_s": 3e-3},
    ]
    heading, ours, other = comparing.table_lines(rows)
    assert "measured" in heading
    assert ours.endswith("2.00 ms")
    assert other.endswith("2 x, measured 1.5 x")


# Profile.

TINY = dataclasses.replace(
    demonstration.QUICK,
    matmul_sizes=(16, 32, 64),
    stream_bytes=1 << 22,
    collective_bytes=(1 << 10, 1 << 12, 1 << 14),
    check_matmul_size=48,
    check_bytes=(1 << 13,),
    rounds=1,
)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LONG_RUN_S", 0.002)


@pytest.mark.usefixtures("short_runs")
def test_profile_is_saved(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "CPU_SETTINGS", TINY)
    path = tmp_path / "profile.toml"
    result = run("profile", "--devices", 2, "--out", path)
    assert result.code == 0
    assert f"saved to {path}" in result.out
    assert "matrix products" in result.out
    assert Cluster.parse(str(path)).num_devices == 2


# Devices and progress.


def test_devices_are_simulated_once() -> None:
    simulate_devices(8)
    simulate_devices(2)
    count = jax.device_count() + 1
    with pytest.raises(PlanError, match=f"device_count={count}"):
        simulate_devices(count)


def test_progress_takes_any_text(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as say:
        say("planning [bold]")
    assert capsys.readouterr().out == ""


# Demo.

SMALL_GPT: dict[str, Any] = {"layers": 1, "d_model": 32, "seq": 16, "batch": 8}


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "OPTIONS", SMALL_GPT)
    monkeypatch.setattr(
        demonstration,
        "measured_cluster",
        lambda devices, show, say: Cluster.parse("8:cpu"),
    )


@pytest.mark.usefixtures("small_demo")
def test_demo_trains_and_compares() -> None:
    shown: list[str] = []
    found = demonstration.run(
        devices=8,
        steps=12,
        options=PlanOptions(seconds=3.0, stages=1, microbatches=1, remat=0),
        show=shown.append,
        say=silent,
    )
    assert len(found.losses) == 12
    assert found.losses[-1] < found.losses[0] - 0.1
    audit = found.audit
    predicted = audit.plan.predicted.communication_bytes
    assert sum(audit.shardy.values()) == pytest.approx(predicted)
    assert audit.first_compiled is not None
    assert audit.first_compiled.communication_bytes == pytest.approx(predicted)
    assert found.step_s > 0
    text = "\n".join(shown)
    for part in ("P(", "step    0  loss", "predicted / actual", "partitioned step"):
        assert part in text


def test_demo_passes_its_options_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(demonstration, "run", lambda **options: given.update(options))
    assert run("demo", "--steps", 12, "--devices", 4, "--seconds", 3).code == 0
    assert (given["devices"], given["steps"]) == (4, 12)
    assert given["options"] == PlanOptions(seconds=3.0)


def test_demo_uses_a_saved_profile(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(Cluster.parse("8:cpu").to_toml(), encoding="utf-8")
    monkeypatch.setenv("AUTOPAR_PROFILE", str(path))
    shown: list[str] = []
    cluster = demonstration.measured_cluster(8, shown.append, silent)
    assert cluster.num_devices == 8
    assert str(path) in shown[0]


@pytest.mark.usefixtures("short_runs")
def test_demo_measures_where_no_profile_is_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_PROFILE", str(tmp_path / "none.toml"))
    monkeypatch.setattr(demonstration, "QUICK", TINY)
    shown: list[str] = []
    assert demonstration.measured_cluster(2, shown.append, silent).num_devices == 2
    assert "no profile" in shown[0]
    assert not (tmp_path / "none.toml").exists()


def test_demo_needs_a_checkout(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(
        demonstration,
        "__file__",
        str(tmp_path / "autopar" / "cli" / "demonstration.py"),
    )
    with (
        pytest.raises(TargetError, match="run it in a checkout"),
        demonstration.example("gpt"),
    ):
        pass
    assert_fails(run("demo"))


def test_a_ratio_needs_something_to_divide_by() -> None:
    plan = demonstration._ratio  # pyright: ignore[reportPrivateUsage]
    assert plan(1.0, 2.0) == "0.500"
    assert plan(0.0, 0.0) == "1.000"
    assert plan(1.0, 0.0) == "-"
