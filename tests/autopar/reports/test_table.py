import dataclasses
import html.parser
import re
from typing import Any

import msgspec
import pytest
import stage_plans
from checkout import GOLDEN
from golden import assert_golden
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.plans import ClusterData, Compression, GradientDecision, Plan, Seconds
from autopar.plans.specs import spec_text
from autopar.reports.html import bars, render_html
from autopar.reports.table import (
    CollectiveRow,
    bytes_text,
    collapse,
    collective_lines,
    gradient_rows,
    input_rows,
    method_text,
    planning_times,
    ratio_text,
    render,
    seconds_text,
    shape_text,
)
from autopar.terminal import columns

SPLIT = (("data",), ())
WHOLE = ((), ())


INPUTS = {
    "state/params/block_0/up/kernel": SPLIT,
    "state/params/block_1/up/kernel": SPLIT,
    "state/params/block_2/up/kernel": WHOLE,
    "state/mu/block_0/up/kernel": SPLIT,
    "state/nu/block_0/up/kernel": SPLIT,
    "batch/x": SPLIT,
    "batch/n": (),
}


def role_of(path: str) -> str:
    if "params" in path:
        return "parameter"
    return "batch" if "batch" in path else "optimizer state"


def make_plan(
    inputs: Any = INPUTS, gradients: tuple[GradientDecision, ...] = (), **changes: Any
) -> Plan:
    """A plan of one stage, made by hand."""
    stage = stage_plans.make_stage(
        "step", (0, 1), inputs=inputs, outputs={}, gradients=gradients
    )
    base = {
        "cluster": ClusterData.of(Cluster.parse("2:cpu")),
        "microbatches": 1,
        "roles": {path: role_of(path) for path in inputs},
        "shapes": {path: (8, 16) if spec else () for path, spec in inputs.items()},
    }
    return stage_plans.make_plan(stage, **{**base, **changes})


ROW = CollectiveRow(
    kind="all_gather",
    axes=("data",),
    arrays=("block_0/<up>", "block_1/<up>"),
    phase="forward",
    trips=2.0,
    sent_bytes=4096.0,
    seconds=0.001,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.0, "2.00 s"),
        (123.4, "123 s"),
        (0.0141, "14.1 ms"),
        (0.9999, "1.00 s"),
        (5.6e-4, "560 us"),
        (9.996e-4, "1.00 ms"),
        (2e-9, "2.00 ns"),
        (float("inf"), "inf s"),
    ],
)
def test_times_have_a_unit_that_suits_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (4, "4 B"),
        (999, "999 B"),
        (0.5, "0.5 B"),
        (1000, "1.00 kB"),
        (999_600, "1.00 MB"),
        (4_968_455, "4.97 MB"),
        (80e9, "80.0 GB"),
        (3e18, "3000 PB"),
    ],
)
def test_bytes_have_a_unit_that_suits_them(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_layouts_are_written_as_jax_writes_them() -> None:
    from jax.sharding import PartitionSpec as P

    spec = (("data", "tensor"), (), ("fsdp",), ())
    expected = P(("data", "tensor"), None, "fsdp")
    assert eval(spec_text(spec), {"P": P}) == expected
    assert spec_text(()) == spec_text(((), ())) == "P()"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], []),
        (["a/b"], ["a/b"]),
        (["b_3/w"], ["b_3/w"]),
        (["b_0/w", "b_1/w"], ["b_{0,1}/w"]),
        (["b_0/w", "b_1/w", "b_2/w"], ["b_{0..2}/w"]),
        (["b_0/w", "b_2/w", "b_4/w"], ["b_{0,2,..4}/w"]),
        (["b_0/w", "b_1/w", "b_7/w"], ["b_{0,1,7}/w"]),
        ([f"b_{i}" for i in (0, 1, 2, 3, 5, 6, 9)], ["b_{0..3,5,6,9}"]),
        (["b_0/n_0/w", "n_0/w", "b_1/n_0/w"], ["b_{0,1}/n_0/w", "n_0/w"]),
        (["b_10/w", "b_9/w", "b_8/w"], ["b_{8..10}/w"]),
        (["b_00/w", "b_01/w"], ["b_00/w", "b_01/w"]),
        ([f"b_{i}/c_{j}" for i in (0, 1) for j in (1, 2)], ["b_{0,1}/c_{1,2}"]),
        (["b_0/c_1", "b_0/c_2", "b_1/c_2"], ["b_0/c_{1,2}", "b_1/c_2"]),
    ],
)
def test_collapse_names_just_the_given_paths(
    paths: list[str], expected: list[str]
) -> None:
    assert collapse(paths) == expected


def expand(name: str) -> list[str]:
    """The names for which a name with braces stands."""
    found = re.search(r"\{([^}]*)\}", name)
    if found is None:
        return [name]
    numbers: list[int] = []
    for part in found[1].split(","):
        first, dots, last = part.partition("..")
        if dots and first:
            numbers += range(int(first), int(last) + 1)
        elif dots:  # {0,2,..8}
            step = numbers[-1] - numbers[-2]
            numbers += range(numbers[-1] + step, int(last) + 1, step)
        else:
            numbers.append(int(part))
    start, end = name[: found.start()], name[found.end() :]
    return [x for n in numbers for x in expand(f"{start}{n}{end}")]


WORDS = st.sampled_from(["", "0", "1", "2", "3", "4", "7", "11", "007", "/", "a", "b_"])


@given(st.lists(st.lists(WORDS, max_size=6).map("".join)))
def test_collapsed_names_expand_to_the_names(names: list[str]) -> None:
    found = [x for name in collapse(names) for x in expand(name)]
    assert sorted(found) == sorted(set(names))


def test_names_of_many_numbers_are_cut() -> None:
    """Numbers without order, and names without one in common, widen no table."""
    squares = tuple(f"received/sum:{1978 + k * k}" for k in range(100))
    plan = make_plan(dict.fromkeys(squares, SPLIT))
    assert max(map(len, render(plan).splitlines())) < 150
    assert "received/sum:{1978,1979,1982" in render(plan)

    names = tuple(f"{word * 9}_0/w" for word in "abcdefgh")
    (_, line) = collective_lines([dataclasses.replace(ROW, arrays=names)])
    assert len(line) < 150
    assert "aaaaaaaaa_0/w bbbbbbbbb_0/w ccccccccc_0/w ddddddddd_0/w and 4 more" in line


def test_columns_line_up() -> None:
    lines = columns([("a", "n"), ("long", "1"), ("b", "234")], right=(1,))
    assert lines == ["a       n", "long    1", "b     234"]


def test_layers_share_a_row_only_with_the_same_layout() -> None:
    plan = make_plan()
    rows = input_rows(plan, plan.stage)
    assert rows == [
        ("state/params/block_{0,1}/up/kernel", "parameter", "8x16", "P('data')"),
        ("state/params/block_2/up/kernel", "parameter", "8x16", "P()"),
        ("state/{mu,nu}/block_0/up/kernel", "optimizer state", "8x16", "P('data')"),
        ("batch/x", "batch", "8x16", "P('data')"),
        ("batch/n", "batch", "scalar", "P()"),
    ]


def test_moments_with_other_layouts_have_rows_of_their_own() -> None:
    plan = make_plan()
    inputs = plan.inputs | {"state/nu/block_0/up/kernel": WHOLE}
    changed = plan.with_stage(inputs=inputs)
    paths = [row[0] for row in input_rows(changed, changed.stage)]
    assert "state/mu/block_0/up/kernel" in paths
    assert "state/nu/block_0/up/kernel" in paths


def test_a_plan_without_shapes_is_printed_too() -> None:
    assert "batch/x" in render(make_plan(shapes={}))
    assert shape_text(None) == ""


def test_the_text_of_a_plan_says_what_matters() -> None:
    plan = make_plan()
    text = str(plan)
    assert text == render(plan)
    for part in ("2:cpu", "data=2", "proved optimal", "3.00 ms", "4.10 kB", "2.50 GB"):
        assert part in text
    assert "optimum" not in text
    assert "planned replicated" not in text


def test_the_gap_is_shown_where_there_is_one() -> None:
    solver = msgspec.structs.replace(
        make_plan().solver, status="best found, not proved", gap=0.031
    )
    text = "best found, proved within 3.10% of the optimum"
    plan = make_plan(solver=solver)
    assert f"solver   {text}\n" in str(plan)
    assert text in repr(plan)
    assert text in plan._repr_html_()
    assert text in render_html(plan, [])


def test_what_the_planner_could_not_know_is_named() -> None:
    text = str(make_plan(unsupported_ops=("fft", "eigh"), assumed=("while: 10",)))
    assert "for want of a rule: fft, eigh" in text
    assert "assumed of loops and of kernels: while: 10" in text


def test_the_text_does_not_depend_on_how_long_planning_took() -> None:
    slow = Seconds(trace=1.0, graph=2.0, solve=3.0, total=6.0)
    solver = msgspec.structs.replace(make_plan().solver, seconds=3.0)
    assert str(make_plan(seconds=slow, solver=solver)) == str(make_plan())
    assert planning_times(make_plan(seconds=slow)) == (
        "planned in 6.0 s: tracing 1.0 s, graph 2.0 s, solving 3.0 s"
    )


def test_collectives_are_a_table() -> None:
    heading, line = collective_lines([ROW])
    assert heading.split() == [
        "collective",
        "over",
        "of",
        "in",
        "times",
        "sends",
        "takes",
    ]
    words = ["all_gather", "data", "block_{0,1}/<up>", "forward", "2", "4.10", "kB"]
    assert line.split() == [*words, "1.00", "ms"]


def make_gradient(name: str, **changes: Any) -> GradientDecision:
    """A gradient with a relative error, of which a quarter of the bytes is sent."""
    base = {
        "dense_bytes": 4096.0,
        "wire_bytes": 1024.0,
        "error": 0.0134,
        "saved_s": 0.001,
    }
    return stage_plans.make_gradient(name, 2, **{**base, **changes})


def make_compressed(**changes: Any) -> Plan:
    """A plan with two equal layers, a different one, and a bias that is sent dense."""
    sketchy: dict[str, Any] = {"codec": "topk", "feedback": True, "average_every": 20}
    plain: dict[str, Any] = {"codec": "", "wire_bytes": 4096.0, "error": 0.0}
    gradients = (
        make_gradient("params/block_0/up"),
        make_gradient("params/block_1/up"),
        make_gradient("params/block_2/up", **sketchy),
        make_gradient("params/bias", saved_s=0.0, **plain),
    )
    compression = Compression(
        mode="auto",
        error_budget=0.1,
        metric="root mean square",
        error=0.0501,
        reason="x",
    )
    return make_plan(**{"gradients": gradients, "compression": compression, **changes})


def test_gradients_that_are_alike_share_a_row() -> None:
    """Bytes and seconds are of all gradients of a row, ratios and errors of each."""
    assert gradient_rows(make_compressed()) == [
        (
            "params/block_{0,1}/up",
            "int8",
            "data",
            "2.05 kB",
            "4.00 x",
            "0.013",
            "2.00 ms",
        ),
        (
            "params/block_2/up",
            "topk, feedback, averaged every 20 steps",
            "data",
            "1.02 kB",
            "4.00 x",
            "0.013",
            "1.00 ms",
        ),
        ("params/bias", "as it is", "data", "4.10 kB", "1.00 x", "0", "0 s"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "int4"},
        {"feedback": True},
        {"axes": ("tensor",)},
        {"wire_bytes": 2048.0},
        {"dense_bytes": 8192.0},
        {"error": 0.5},
    ],
)
def test_gradients_that_differ_have_rows_of_their_own(change: dict[str, Any]) -> None:
    pair = (make_gradient("params/0/up"), make_gradient("params/1/up", **change))
    assert len(gradient_rows(make_compressed(gradients=pair))) == 2


def test_the_text_says_how_gradients_are_sent_and_why() -> None:
    lines = str(make_compressed()).splitlines()
    heading = next(line for line in lines if line.startswith("gradient"))
    assert heading.split()[-4:] == ["sends", "ratio", "error", "saves"]
    assert "codecs   auto: x" in lines
    assert "error    0.0501, at most 0.1 (root mean square)" in lines
    # Behind the inputs.
    inputs = next(k for k, line in enumerate(lines) if line.startswith("input"))
    assert lines.index(heading) > inputs


def test_a_plan_without_codecs_says_only_why() -> None:
    plain = (make_gradient("params/0/up", codec=""),)
    text = str(make_compressed(gradients=plain))
    assert "codecs   auto: x" in text
    assert "error    " not in text
    assert "as it is" not in text


def test_nothing_is_said_where_nothing_was_asked_for() -> None:
    plain = (make_gradient("params/0/up", codec=""),)
    made = make_plan(gradients=plain)
    assert str(made) == str(make_plan())
    assert render_html(made, []) == render_html(make_plan(), [])


def test_a_codec_that_was_asked_for_has_no_budget() -> None:
    compression = Compression(mode="int8", error_budget=0.1, error=0.0134, metric="rms")
    text = str(make_compressed(compression=compression))
    assert "error    0.0134 (rms)" in text
    assert "codecs   int8\n" in text


def test_ratios_of_nothing_are_empty() -> None:
    assert ratio_text(0.0, 0.0) == ratio_text(100.0, 0.0) == ""
    assert ratio_text(1000.0, 10.0) == "100 x"
    assert method_text(make_gradient("w", codec="")) == "as it is"


class _Page(html.parser.HTMLParser):
    """Collects the text of a page, and checks that its tags are nested correctly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.words = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        del attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_holds_what_the_table_does() -> None:
    plan = make_plan(target="train.py:workload", options={"layers": "3"})
    page = _Page(render_html(plan, [ROW]))
    for row in input_rows(plan, plan.stage):
        assert row[0] in page.cells
    assert "block_{0,1}/<up>" in page.cells  # escaped, so it is text
    assert "train.py:workload layers=3" in page.words
    assert "all-gather" in page.words


def test_the_page_tells_of_gradients_too() -> None:
    plan = make_compressed()
    page = _Page(render_html(plan, []))
    for row in gradient_rows(plan):
        assert [page.cells.count(cell) >= 1 for cell in row] == [True] * len(row)
    assert "codecs: auto: x" in page.words
    assert "Gradients" in page.words


def test_the_page_needs_nothing_else() -> None:
    page = render_html(make_plan(), [])
    assert "http" not in page
    assert "src=" not in page
    assert "href=" not in page


def test_the_page_names_meshes_and_notes() -> None:
    solver = msgspec.structs.replace(
        make_plan().solver, meshes={"data=8": 0.2, "data=2 tensor=4": 0.1}
    )
    page = _Page(render_html(make_plan(solver=solver, unsupported_ops=("fft",)), []))
    assert page.cells.index("data=2 tensor=4") < page.cells.index("data=8")
    assert "fft" in page.words


def test_bars_are_as_long_as_their_values() -> None:
    import re

    chart = bars([("a", 2.0, "sent"), ("b", 1.0, "sent"), ("c", 0.0, "sent")])
    widths = [float(w) for w in re.findall(r'style="width: ([0-9.]+)%"', chart)]
    assert widths == [100.0, 50.0, 0.0]
    assert bars([]) == '<div class="bars"></div>'


def test_letters_are_large_enough_to_read() -> None:
    import re

    page = render_html(make_plan(), [ROW])
    sizes = re.findall(r'(?:font(?:-size)?: |font-size=")(\d+)(?:px)?["; /]', page)
    assert min(map(int, sizes)) >= 10
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page


def test_golden() -> None:
    """The text of a plan for a fixed model and cluster; see `two_layers.py`."""
    from autopar.api import plan
    from autopar.cli.target import load

    workload = load(f"{GOLDEN / 'two_layers.py'}:workload", {})
    found = plan(workload.step, *workload.args, cluster=Cluster.parse("2x4:cpu"))
    assert found.solver.status == "proved optimal"
    assert_golden(str(found), "two_layers_2x4_cpu.txt")
