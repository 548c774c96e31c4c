"""Tests the parser of compiled programs: errors for malformed texts, and rare forms."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.audit.hlo_text import (
    WHOLE,
    Need,
    Scope,
    Shape,
    ValueFollower,
    device_groups,
    element_index,
    parse_instruction,
    parse_module,
    split_groups,
)
from autopar_passes.audit.partitioned import AuditedCollective, differing_axes

checked = settings(max_examples=examples(60), deadline=None, derandomize=True)
MODULE = """HloModule m, num_partitions=4

%inner (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%id, %two)
  ROOT %cut = f32[2]{0} dynamic-slice(%p, %at), dynamic_slice_sizes={2}
}

ENTRY %main (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, metadata={op_name="a/b"}
  %copied = f32[8]{0} copy(%sum)
  ROOT %out = f32[2]{0} fusion(%copied), kind=kLoop, calls=%inner
}
"""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "module @jit_step {}",
        "HloModule without_an_entry\n\n%a (x: f32[]) -> f32[] {\n}\n",
        "ENTRY %main (x: f32[]) -> f32[] {\n}\n",
    ],
)
def test_what_is_no_module(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected the text of an HLO module"):
        parse_module(text)


@pytest.mark.parametrize(
    "line",
    ["", "ROOT", "%a = ", "}", "// a comment", "a: b", "%a = b", "%a = f32[] add"],
)
def test_what_is_no_instruction(line: str) -> None:
    with pytest.raises(ValueError, match=r"hlo: .* is not an instruction"):
        parse_instruction(line)


def test_a_parenthesis_that_does_not_close() -> None:
    with pytest.raises(ValueError, match="no closing parenthesis"):
        parse_instruction("%a = f32[4]{0} add(%b, %c")


def test_a_module_is_read() -> None:
    module = parse_module(MODULE)
    entry = module.computations[module.entry]

    assert module.num_devices == 4
    assert list(entry.instructions) == ["x", "sum", "copied", "out"]
    assert entry.root == "out"
    assert entry.parameters == {0: "x"}
    assert [u.name for u in entry.users["sum"]] == ["copied"]
    assert entry.instructions["sum"].source == "a/b"
    assert entry.instructions["copied"].source == ""
    assert entry.instructions["out"].called_names == ("inner",)
    assert entry.instructions["out"].callee("calls") == "inner"
    assert entry.instructions["out"].callee("body") == ""


def test_an_instruction_with_a_tuple() -> None:
    op = parse_instruction(
        "ROOT %w = (s32[], f32[4,8]{1,0}, (pred[3], token[])) "
        'while((s32[], f32[4,8]) %t), condition=%c, body=%b, metadata={op_name="x(y"}'
    )

    assert (op.name, op.opcode, op.operands) == ("w", "while", ("t",))
    assert [s.dims for s in op.shapes] == [(), (4, 8), (3,), ()]
    assert [s.nbytes for s in op.shapes] == [4, 128, 3, 0]
    assert op.called_names == ("c", "b")


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("f32", 4), ("bf16", 2), ("f64", 8), ("s8", 1), ("u4", 0.5), ("pred", 1),
        ("f8e4m3fn", 1), ("c64", 8), ("token", 0), ("opaque", 0), ("unheard", 4),
    ],
)  # fmt: skip
def test_bytes_of_an_element(dtype: str, nbytes: float) -> None:
    assert Shape(dtype, ()).nbytes == nbytes
    assert Shape(dtype, (3, 5)).nbytes == 15 * nbytes
    assert Shape(dtype, (3, 0)).nbytes == 0


def groups(notation: str, devices: int) -> list[list[int]]:
    line = f"%a = f32[] all-reduce(), replica_groups={notation}, channel_id=1"
    return device_groups(parse_instruction(line), devices).tolist()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.randoms())
@checked
def test_groups_of_an_iota(dims: list[int], random: object) -> None:
    """``[rows,columns]<=[dims]T(order)`` is what numpy makes of it."""
    devices = math.prod(dims)
    order = list(range(len(dims)))
    random.shuffle(order)  # type: ignore[attr-defined]
    columns = dims[order[-1]]
    text = ",".join(map(str, dims)), ",".join(map(str, order))
    notation = f"[{devices // columns},{columns}]<=[{text[0]}]T({text[1]})"

    want = np.arange(devices).reshape(dims).transpose(order).reshape(-1, columns)
    assert groups(notation, devices) == want.tolist()


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.data())
@checked
def test_groups_of_mesh_axes(sizes: list[int], data: st.DataObject) -> None:
    names = [f"a{k}" for k in range(len(sizes))]
    joined = data.draw(st.sets(st.sampled_from(names), min_size=1))
    mesh = ",".join(f"'{n}'={s}" for n, s in zip(names, sizes, strict=True))
    notation = f"mesh[{mesh}] {{{','.join(repr(n) for n in names if n in joined)}}}"

    got = groups(notation, math.prod(sizes))

    for group in got:
        axes = differing_axes(list(zip(names, sizes, strict=True)), np.array(group))
        assert set(axes) == joined
    assert sorted(d for group in got for d in group) == list(range(math.prod(sizes)))


def test_groups_that_are_left_out_are_all_devices() -> None:
    assert groups("{}", 4) == [[0, 1, 2, 3]]
    assert groups("{{0,2},{1,3}}", 4) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("group", "axes"),
    [([0], ()), ([0, 1], ("y",)), ([0, 4], ("x",)), ([0, 5], ("x", "y"))],
)
def test_axes_along_which_a_group_differs(group: list[int], axes: tuple[str]) -> None:
    assert differing_axes((("x", 2), ("y", 4)), np.array(group)) == axes
    assert differing_axes((), np.array(group)) == ()


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_reduce", 2 * 3 / 4 * 100),
        ("all_gather", 3 / 4 * 100),
        ("reduce_scatter", 3 / 4 * 100),
        ("all_to_all", 3 / 4 * 100),
        ("collective_permute", 100),
    ],
)
def test_bytes_that_a_device_sends(kind: str, sent: float) -> None:
    collective = AuditedCollective(kind, ("x",), 4, 100.0, 6.0, "")

    assert collective.sent_bytes == sent * 6


def test_the_slice_of_each_device_is_found_through_fusions() -> None:
    module = parse_module(MODULE)
    follower = ValueFollower(module)
    scope = Scope(module.computations[module.entry])

    need = follower.need(scope, "sum", None)

    assert need.fraction == 0.25
    assert need.slices == tuple(frozenset({(2 * d,)}) for d in range(4))
    scattered, reduced = split_groups(need, np.array([[0, 1, 2, 3]]))
    assert scattered.tolist() == [[0, 1, 2, 3]]
    assert reduced.tolist() == [[0]]


def test_numbers_of_devices_are_computed() -> None:
    module = parse_module(MODULE)
    follower = ValueFollower(module)
    inner = follower.inside(
        Scope(module.computations["main"]),
        module.computations["main"].instructions["out"],
    )

    offsets = follower.per_device(inner, "at")
    assert offsets is not None
    assert offsets.reshape(-1).tolist() == [0, 2, 4, 6]
    assert follower.per_device(inner, "p") is None
    assert follower.depends_on_device(inner, "at")
    assert not follower.depends_on_device(inner, "two")
    assert follower.origin(inner, "p")[1].name == "sum"


def test_devices_that_use_slices_together() -> None:
    own = tuple(frozenset({(d,)}) for d in range(4))
    need = Need(0.25, own)

    joined = need.join_groups(np.array([[0, 1], [2, 3]]))

    assert joined.share == 0.5
    assert joined.slices[0] == joined.slices[1] == {(0,), (1,)}
    assert joined.join_groups(np.array([[0, 2], [1, 3]])).share == 1.0
    assert WHOLE.join_groups(np.array([[0, 1, 2, 3]])) is WHOLE
    assert Need(0.25).join_groups(np.array([[0, 1]])).fraction == 0.5
    assert Need(0.75).join_groups(np.array([[0, 1]])).fraction == 1.0


def test_groups_whose_devices_keep_one_slice() -> None:
    """Two devices keep each slice: a scatter, and then a sum between the two."""
    slices = tuple(frozenset({(d // 2,)}) for d in range(4))

    scattered, reduced = split_groups(Need(0.5, slices), np.array([[0, 1, 2, 3]]))

    assert scattered.tolist() == [[0, 2]]
    assert reduced.tolist() == [[0, 1]]
    unknown, _ = split_groups(Need(0.25), np.array([[0, 1, 2, 3]]))
    assert unknown.shape == (1, 4)


def test_the_element_of_a_tuple() -> None:
    element = parse_instruction("%e = f32[] get-tuple-element(%t), index=3")

    assert element_index(element) == 3
    assert element_index(parse_instruction("%e = f32[] copy(%t)")) == 0
