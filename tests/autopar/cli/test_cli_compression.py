"""Tests the command line with compressed gradients."""

import json
import pathlib

import pytest
from checkout import GOLDEN
from command_line import TARGET, Run, assert_fails, save_plan

from autopar.compression.codecs import registry
from autopar.compression.codecs.registry import codec_names
from autopar.plans import Plan

SMALL = ("width=128", "batch=4096", "layers=3")
# Its network is so slow that compressed gradients train faster.
SLOW = ("--cluster", "2x4:cpu,network=100Mb/s")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A plan with codecs that the command line has saved."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    words = ("--compression", "auto", "--error-budget", "0.5")
    return save_plan(path, *SMALL, *SLOW, *words)


def kernels(plan: Plan) -> dict[str, str]:
    return {g.name: g.codec for g in plan.gradients if "kernel" in g.name}


def test_auto_compresses_where_that_is_faster(run: Run, saved: pathlib.Path) -> None:
    plan = Plan.load(saved)
    assert plan.compression.mode == "auto"
    assert len(kernels(plan)) == 3
    assert all(codec not in ("", "dense") for codec in kernels(plan).values())
    plain = run("plan", TARGET, *SMALL, *SLOW, "--json").json
    assert plan.predicted.step_s < plain["predicted"]["step_s"]
    assert plain["stages"][0]["gradients"] == []


def test_the_table_and_the_page_say_how_gradients_are_sent(
    run: Run, tmp_path: pathlib.Path
) -> None:
    page = tmp_path / "plan.html"
    words = (*SLOW, "--compression", "auto", "--error-budget", "0.5", "--html", page)
    result = run("plan", TARGET, *SMALL, *words)
    assert result.code == 0
    assert "\ngradient " in result.out
    assert "params/{0..2}/kernel" in result.out
    assert "codecs   auto: codecs save" in result.out
    assert "error    " in result.out
    assert "\ngradient " not in run("plan", TARGET, *SMALL, *SLOW).out
    text = page.read_text(encoding="utf-8")
    assert "<h2>Gradients</h2>" in text
    assert "codecs: auto: codecs save" in text
    assert "encode" in text


def test_explain_shows_as_many_collectives_as_asked(
    run: Run, saved: pathlib.Path
) -> None:
    count = len(run("explain", saved, "--json").json["collectives"])
    texts = [run("explain", saved, *words).out for words in ((), ("--top", 1))]
    tables = [text.split("takes\n")[1].splitlines() for text in texts]
    assert len(tables[0]) == count > 1
    assert tables[1][0].split() == tables[0][0].split()
    assert tables[1][1].startswith(f"... and {count - 1} that take less")


def test_a_codec_of_its_own_for_all(run: Run) -> None:
    words = (*SLOW, "--compression", "int4:block=64", "--json")
    found = run("plan", TARGET, *SMALL, *words).json
    codecs = {g["codec"] for g in found["stages"][0]["gradients"]}
    assert codecs == {"int4:block=64", "dense"}
    assert found["compression"]["mode"] == "int4:block=64"


OWN = f"""
import dataclasses, runpy

from autopar.compression.codecs.registry import register_codec
from autopar.compression.codecs.quantise import Int8


@register_codec
@dataclasses.dataclass(frozen=True)
class Own(Int8):
    name = "own"


workload = runpy.run_path({str(GOLDEN / "two_layers.py")!r})["workload"]
"""


def test_a_codec_that_the_targets_file_registers(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec_names()
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))
    target = tmp_path / "own_codec_target.py"
    target.write_text(OWN)
    words = (*SLOW, "--compression", "own", "--json")
    found = run("plan", f"{target}:workload", *SMALL, *words).json
    assert {g["codec"] for g in found["stages"][0]["gradients"]} == {"own", "dense"}


def test_a_tight_budget_leaves_gradients_as_they_are(run: Run) -> None:
    words = ("--compression", "auto", "--error-budget", 1e-9)
    result = run("plan", TARGET, *SMALL, *SLOW, *words, "--json")
    assert result.code == 0
    assert {g["codec"] for g in result.json["stages"][0]["gradients"]} == {""}
    assert result.json["compression"]["error_budget"] == 1e-9
    assert result.json["compression"]["reason"].startswith("dense: ")


def test_layouts_of_a_plan_are_kept(run: Run, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    assert run("plan", TARGET, *SMALL, *SLOW, "--out", path).code == 0
    words = (
        *SLOW,
        "--compression",
        "auto",
        "--error-budget",
        "0.5",
        "--layouts",
        path,
        "--json",
    )
    found = run("plan", TARGET, *SMALL, *words).json
    (before,), (after,) = json.loads(path.read_text())["stages"], found["stages"]
    assert after["inputs"] == before["inputs"]
    assert after["nodes"] == before["nodes"]
    assert found["compression"]["mode"] == "auto"


BAD: list[tuple[list[str], list[str]]] = [
    (["--compression", "gzip"], ["'gzip'", *codec_names()]),
    (["--compression", "int4:rank=2"], ["int4 has no field 'rank'", "block=256"]),
    (["--compression", "topk:ratio=2"], ["ratio", "got 2"]),
    (["--compression", "auto", "--error-budget", "-1"], ["--error-budget"]),
    (["--error-budget", "0.1"], ["--error-budget 0.1", "--compression none."]),
    (
        ["--compression", "int8", "--error-budget", "0.1"],
        ["--compression int8."],
    ),
]


@pytest.mark.parametrize("command", ["plan", "audit", "explain", "compare"])
@pytest.mark.parametrize(("words", "parts"), BAD, ids=lambda x: " ".join(x)[:40])
def test_bad_options_are_one_line(
    run: Run, command: str, words: list[str], parts: list[str]
) -> None:
    result = run(command, TARGET, *SMALL, *SLOW, *words)
    assert_fails(result, *parts)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--layouts", "none.json"), "none.json: cannot be read"),
        (("--layouts", str(GOLDEN / "two_layers.py")), "not a plan"),
    ],
)
def test_layouts_must_be_a_plan(run: Run, words: tuple[str, ...], part: str) -> None:
    result = run("plan", TARGET, *SMALL, *SLOW, *words)
    assert_fails(result, part)


def test_layouts_of_another_step(run: Run, saved: pathlib.Path) -> None:
    words = ("width=32", *SLOW, "--layouts", saved)
    result = run("plan", TARGET, *words)
    assert_fails(result, "belongs to another step")


@pytest.mark.parametrize("command", ["audit", "explain"])
def test_a_saved_plan_keeps_its_codecs(
    run: Run, saved: pathlib.Path, command: str
) -> None:
    result = run(command, saved, "--compression", "int8")
    assert_fails(result, "is a plan already")


def test_audit_counts_the_messages_of_codecs(run: Run, saved: pathlib.Path) -> None:
    found = run("audit", saved, "--json").json
    assert found["shardy"]["by_kind"] == pytest.approx(found["predicted_by_kind"])
    predicted = found["predicted"]["communication_bytes"]
    assert found["shardy"]["communication_bytes"] == pytest.approx(predicted, rel=0.05)
    assert "shardy communicates what the plan predicts" in run("audit", saved).out


def test_audit_plans_with_codecs(run: Run) -> None:
    words = (*SLOW, "--compression", "int8", "--compile", "--json")
    found = run("audit", TARGET, *SMALL, *words).json
    total = sum(found["predicted_by_kind"].values())
    assert {"all_to_all", "all_gather"} <= set(found["predicted_by_kind"])
    for audit in ("shardy", "xla"):
        assert found[audit]["communication_bytes"] == pytest.approx(total, rel=0.01)


def test_explain_lists_the_messages(run: Run, saved: pathlib.Path) -> None:
    rows = run("explain", saved, "--json").json["collectives"]
    arrays = {array for row in rows for array in row["arrays"]}
    assert {"params/0/kernel", "telemetry"} <= arrays
    assert {"encode", "all_reduce"} <= {row["kind"] for row in rows}
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds, reverse=True)


def test_explain_compares_codecs(run: Run, saved: pathlib.Path) -> None:
    words = ("--tensor", "params/*", "--alternatives", 2)
    result = run("explain", saved, *words)
    assert result.code == 0
    codec = kernels(Plan.load(saved))["params/0/kernel"]
    assert f": {codec}" in result.out
    assert "as it is" in result.out
    assert "without codecs" in result.out
    assert "vectors and what is small have no codec" in result.out
    assert "more codecs are slower; --alternatives " in result.out
    assert "its gradient is, see below" in result.out
    found = run("explain", saved, *words, "--json").json
    by_name = {g["name"]: g for i in found["inputs"] for g in i["gradients"]}
    gradient = by_name["params/0/kernel"]
    assert gradient["codec"] == codec
    (chosen,) = [o for o in gradient["options"] if o["codec"] == codec]
    assert chosen["wire_bytes"] == gradient["wire_bytes"]
    (plain,) = [o for o in gradient["options"] if not o["codec"]]
    assert plain["wire_bytes"] == gradient["dense_bytes"]


def test_the_step_without_codecs_is_what_layouts_are_compared_with(
    run: Run, saved: pathlib.Path
) -> None:
    words = ("--tensor", "params/0/kernel", "--alternatives", 1, "--json")
    found = run("explain", saved, *words).json
    plan = Plan.load(saved)
    assert found["step_s"] > plan.predicted.step_s
    layouts = ("--layouts", saved, "--json")
    plain = run("plan", TARGET, *SMALL, *SLOW, *layouts).json
    assert found["step_s"] == pytest.approx(plain["predicted"]["step_s"])


def test_compare_gives_only_the_plan_codecs(run: Run) -> None:
    words = (*SLOW, "--json")
    coded = run(
        "compare",
        TARGET,
        *SMALL,
        *words,
        "--compression",
        "auto",
        "--error-budget",
        "0.5",
    ).json
    plain = run("compare", TARGET, *SMALL, *words).json
    assert coded["plans"][0]["step_s"] < plain["plans"][0]["step_s"]
    assert coded["plans"][1]["name"] == plain["plans"][1]["name"]
    experts = [row["step_s"] for row in coded["plans"][1:]]
    assert experts == pytest.approx([row["step_s"] for row in plain["plans"][1:]])
