"""Tests ``--pin``, ``--axis-names``, and plan files that were edited by hand."""

import json
import pathlib
from typing import Any

import pytest
from command_line import SMALL, TARGET, Result, Run, assert_fails
from jax.sharding import PartitionSpec as P
from stage_plans import make_plan

from autopar.errors import PlanError
from autopar.planner.hints import parse_entries, parse_pins
from autopar.planner.options import PlanOptions, read_options
from autopar.plans import Plan
from autopar.plans.specs import spec_of, spec_text

CLUSTER = ("--cluster", "2x4:cpu")
KERNEL = "params/0/kernel"


def inputs_of(result: Result) -> dict[str, Any]:
    """The layouts of the inputs of a plan's only stage."""
    (stage,) = result.json["stages"]
    return stage["inputs"]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("P(None, 'tensor')", (None, "tensor")),
        ("P(('data', 'tensor'))", (("data", "tensor"),)),
        ("P()", ()),
        ("PartitionSpec('data')", ("data",)),
        ("None,tensor", (None, "tensor")),
        (" data+fsdp , None ", (("data", "fsdp"), None)),
        ("data", ("data",)),
        ("None", (None,)),
        ("", ()),
    ],
)
def test_layouts_as_tables_print_them_and_in_short(text: str, entries: Any) -> None:
    assert parse_entries(text) == entries


@pytest.mark.parametrize(
    "spec",
    [(("data",), ()), ((), ("data", "tensor")), ((), ()), (("tensor",), ("data",))],
)
def test_what_a_table_prints_is_read_back(spec: Any) -> None:
    entries = parse_entries(spec_text(spec))
    assert spec_of(entries, (8, 8), {"data": 2, "tensor": 4}, "pin") == spec


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("params/*", r"'params/\*' is not PATH=SPEC. Write it like"),
        ("=None", "is not PATH=SPEC"),
        ("a=data;tensor", "'data;tensor' is no name of a mesh axis"),
        ("a=data,,tensor", "'' is no name of a mesh axis"),
        ("a=data+", "'' is no name"),
        ("a=P(data)", "data is no entry: None, a name in quotes, or a tuple"),
        ("a=P(('data', None))", "None is no name of a mesh axis"),
        ("a=P(())", r"\(\) is no entry"),
        ("a=P(1)", "1 is no entry"),
        ("a=P('data'", "is no layout"),
        ("a=P(x='data')", "is no layout"),
        ("a=P('data').index", "is no layout"),
        ("a=P(__import__('os'))", "is no entry"),
    ],
)
def test_wrong_pins_are_explained(word: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_pins([word])


def test_each_path_is_pinned_once() -> None:
    found = parse_pins(["a/*=data", "b=P(None, 'x')"])
    assert found == {"a/*": P("data"), "b": P(None, "x")}
    with pytest.raises(PlanError, match="'a' is pinned twice"):
        parse_pins(["a=data", "a=None"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axis_names": "data,data"}, "--axis-names data,data: expected different"),
        ({"axis_names": "a,,b"}, "--axis-names a,,b: expected different names"),
        ({"seconds": "soon"}, "--seconds soon: expected the time limit"),
        ({"seconds": "0"}, "--seconds 0: expected the time limit.* more than 0"),
        ({"stages": "0"}, "--stages 0: expected into how many pipeline stages"),
        ({"microbatches": "8+x"}, r"--microbatches 8\+x: expected into how many"),
        ({"remat": "most"}, "--remat most: expected how many layers"),
        ({"schedule": "2f2b"}, "--schedule 2f2b: expected gpipe"),
        ({"pins": ["w"]}, "--pin 'w' is not PATH=SPEC"),
    ],
)
def test_a_wrong_word_is_named_with_its_option(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        read_options(given)


def test_words_are_read_as_python_says_them() -> None:
    given = {
        "axis_names": "data, model",
        "seconds": "inf",
        "stages": "auto",
        "microbatches": "8",
        "pins": ["a/*=data"],
        "compression": None,
    }
    assert read_options(given) == PlanOptions(
        axis_names=("data", "model"),
        seconds=None,
        stages="auto",
        microbatches=8,
        pins={"a/*": P("data")},
    )


def test_pins_are_kept(run: Run) -> None:
    pins = ("--pin", "*/kernel=P(None, 'tensor')", "--pin", "batch/*=data,None")
    result = run("plan", TARGET, *SMALL, *CLUSTER, *pins, "--json")
    assert result.code == 0
    kernels = [s for path, s in inputs_of(result).items() if path.endswith("kernel")]
    assert kernels == [[[], ["tensor"]]] * 3
    assert inputs_of(result)["batch/x"] == [["data"], []]


def test_axes_have_the_names_that_were_given(run: Run) -> None:
    words = ("--axis-names", "hosts,cores", "--pin", f"{KERNEL}=cores")
    result = run("plan", TARGET, *SMALL, *CLUSTER, *words, "--json")
    assert inputs_of(result)[KERNEL] == [["cores"], []]
    (stage,) = result.json["stages"]
    assert stage["mesh"] == {"axes": {"hosts": 2, "cores": 4}}


def test_a_batch_that_no_axis_divides_may_stay_whole(run: Run) -> None:
    words = ("plan", TARGET, "width=64", "layers=1", "batch=3", "--cluster", "7:cpu")
    assert_fails(run(*words), "--no-split-batch")
    result = run(*words, "--no-split-batch", "--json")
    assert result.code == 0
    assert inputs_of(result)["batch/x"] == [[], []]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--pin", "kernel"), "is not PATH=SPEC"),
        (("--pin", "nothing=data"), "--pin nothing matches no input"),
        (("--pin", f"{KERNEL}=model"), "no mesh axis 'model'"),
        (("--axis-names", "a,b,c,d,e"), "cannot be cut into 5"),
        (("--axis-names", "a,a"), "expected different names"),
    ],
)
def test_bad_options_are_one_line(run: Run, words: tuple[str, ...], part: str) -> None:
    assert_fails(run("plan", TARGET, *SMALL, *CLUSTER, *words), part)


class TestEditedFiles:
    """A layout changed in a plan's JSON holds in every command."""

    @pytest.fixture
    def edited(self, saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
        data = json.loads(saved.read_text())
        inputs = data["stages"][0]["inputs"]
        assert inputs[KERNEL] != [[], ["tensor"]]
        inputs[KERNEL] = [[], ["tensor"]]
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(data))
        return path

    def test_explain_prices_it(self, run: Run, edited: pathlib.Path) -> None:
        result = run("explain", edited)
        assert result.code == 0
        assert "edited: layouts of 1 input changed by hand" in result.out
        words = ("--tensor", KERNEL, "--alternatives", 1)
        assert "layout P(None, 'tensor')" in run("explain", edited, *words).out

    def test_audit_agrees(self, run: Run, edited: pathlib.Path) -> None:
        result = run("audit", edited, "--json")
        found = result.json
        assert inputs_of(result)[KERNEL] == [[], ["tensor"]]
        predicted = sum(found["predicted_by_kind"].values())
        assert found["shardy"]["communication_bytes"] == pytest.approx(predicted)

    def test_layouts_keep_it(
        self, run: Run, edited: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        out = tmp_path / "out.json"
        words = (*CLUSTER, "--layouts", edited, "--out", out)
        assert run("plan", TARGET, *SMALL, *words).code == 0
        plan = Plan.load(out)
        assert plan.inputs[KERNEL] == ((), ("tensor",))
        assert plan.changed_parts == ()

    def test_layouts_carry_to_another_batch(
        self, run: Run, edited: pathlib.Path
    ) -> None:
        words = (*CLUSTER, "--layouts", edited, "--json")
        result = run("plan", TARGET, *SMALL[:1], "batch=128", "layers=1", *words)
        assert result.code == 0
        assert inputs_of(result)[KERNEL] == [[], ["tensor"]]
        assert result.json["shapes"]["batch/x"] == [128, 64]

    def test_what_cannot_be_edited_is_one_line(
        self, run: Run, saved: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        data = json.loads(saved.read_text())
        data["stages"][0]["mesh"]["axes"] = {"data": 4, "tensor": 2}
        path = tmp_path / "mesh.json"
        path.write_text(json.dumps(data))
        for command in ("explain", "audit"):
            assert_fails(run(command, path), "mesh data=4 tensor=2 does not fit")


def test_plans_of_two_stages_are_not_taken_for_one(
    run: Run, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "stages.json"
    make_plan(target=TARGET, options={"width": "64", "layers": "1"}).save(path)
    layouts = ("plan", TARGET, *SMALL, *CLUSTER, "--layouts", path)
    for words in (("explain", path), ("audit", path), layouts):
        found = run(*words)
        assert_fails(found, "the plan has several stages, and does not say what they")
