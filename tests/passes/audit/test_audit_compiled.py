"""Tests collectives of compiled programs against formulas."""

import doctest

import pytest

from autopar_passes.audit import compiled, hlo_text
from autopar_passes.audit.compiled import hlo_collectives
from autopar_passes.audit.hlo_text import device_groups, parse_instruction, parse_module
from autopar_passes.audit.partitioned import AuditedCollective

NUM_DEVICES = 8
AXES = (("a", 2), ("b", 4))
SUM = """
%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}
"""
HEAD = f"HloModule m, is_scheduled=true, num_partitions={NUM_DEVICES}\n{SUM}\n"
OVER_B = "replica_groups=[2,4]<=[8]"


def program(body, *, root="f32[16]{0}", before=""):
    lines = "\n".join(f"  {line}" for line in body.strip().split("\n"))
    return f"{HEAD}{before}\nENTRY %main (p: f32[64]) -> {root} {{\n{lines}\n}}\n"


def groups_of(notation):
    line = f"%r = f32[] all-reduce(), channel_id=1, {notation}, to_apply=%sum"
    return device_groups(parse_instruction(line), NUM_DEVICES).tolist()


def only(found):
    (one,) = found
    return one


# The notations of device groups.


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            "mesh['axis_0'=8,'axis_1'=1] {'axis_0':(4)2}",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (
            "mesh['axis_0'=4,'axis_1'=2,'axis_2'=1], device_ids=([2,2,2]T(0,2,1)) "
            "{'axis_0':(2)2}",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_device_groups(notation, groups):
    assert sorted(groups_of(f"replica_groups={notation}")) == groups


def test_transposed_mesh_gives_the_groups_of_the_transposed_axis():
    """The mesh [4, 2] of devices taken along axis 0 of [2, 4] joins strided devices."""
    notation = "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}"
    assert groups_of(f"replica_groups={notation}") == [[0, 4], [1, 5], [2, 6], [3, 7]]


# The text.


def test_parses_operands_calls_and_origins():
    line = (
        "ROOT %f.1 = (f32[2,3]{1,0}, /*index=1*/bf16[4]{0}) "
        "fusion(%a.b, /*index=1*/%c), "
        'kind=kLoop, calls=%fused, metadata={op_name="jit(f)/dot(x)" stack_frame_id=1}'
    )
    found = parse_instruction(line)

    assert (found.name, found.opcode) == ("f.1", "fusion")
    assert [s.nbytes for s in found.shapes] == [2 * 3 * 4, 4 * 2]
    assert found.operands == ("a.b", "c")
    assert found.called_names == ("fused",)
    assert found.source == "jit(f)/dot(x)"


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("pred", 1), ("s4", 0.5), ("f8e4m3fn", 1), ("bf16", 2), ("u32", 4), ("c64", 8)],
)
def test_bytes_of_an_element(dtype, nbytes):
    assert hlo_text.Shape(dtype, (10,)).nbytes == 10 * nbytes


def test_other_text_is_refused():
    with pytest.raises(ValueError, match=r"compiled\.as_text"):
        parse_module("module @jit_f {}")


def test_doctests():
    assert doctest.testmod(hlo_text).failed == 0
    assert doctest.testmod(compiled).failed == 0


# What each kind is charged.


@pytest.mark.parametrize(
    ("line", "kind", "group", "nbytes"),
    [
        (f"f32[64]{{0}} all-reduce(%p), {OVER_B}, to_apply=%sum", "all_reduce", 4, 256),
        (
            f"f32[256]{{0}} all-gather(%p), {OVER_B}, dimensions={{0}}",
            "all_gather",
            4,
            1024,
        ),
        (
            f"f32[16]{{0}} reduce-scatter(%p), {OVER_B}, to_apply=%sum",
            "reduce_scatter",
            4,
            256,
        ),
        (
            f"f32[64]{{0}} all-to-all(%p), {OVER_B}, dimensions={{0}}",
            "all_to_all",
            4,
            256,
        ),
    ],
)
def test_charged_bytes(line, kind, group, nbytes):
    text = program(f"%p = f32[64]{{0}} parameter(0)\nROOT %c = {line}")
    assert hlo_collectives(text) == (
        AuditedCollective(kind, (), group, nbytes, 1.0, ""),
    )


@pytest.mark.parametrize("opcode", ["all-reduce", "all-gather", "collective-permute"])
def test_asynchronous_forms_count_once(opcode):
    attributes = {
        "all-reduce": f"{OVER_B}, to_apply=%sum",
        "all-gather": f"{OVER_B}, dimensions={{0}}",
        "collective-permute": "source_target_pairs={{0,1},{1,0}}",
    }[opcode]
    text = program(
        "%p = f32[64]{0} parameter(0)\n"
        f"%s = (f32[64]{{0}}, f32[64]{{0}}) {opcode}-start(%p), {attributes}\n"
        f"ROOT %d = f32[64]{{0}} {opcode}-done(%s)"
    )
    assert only(hlo_collectives(text)).kind == opcode.replace("-", "_")


def test_wrapped_asynchronous_form_counts_once():
    inner = (
        "%wrapped (q: f32[64]) -> f32[16] {\n  %q = f32[64]{0} parameter(0)\n"
        f"  ROOT %r = f32[16]{{0}} reduce-scatter(%q), {OVER_B}, to_apply=%sum\n}}\n"
    )
    text = program(
        "%p = f32[64]{0} parameter(0)\n"
        "%s = ((f32[64]{0}), f32[16]{0}) async-start(%p), calls=%wrapped\n"
        "ROOT %d = f32[16]{0} async-done(%s), calls=%wrapped",
        before=inner,
    )
    assert only(hlo_collectives(text)).nbytes == 256


def test_combined_all_reduces_are_listed_one_by_one():
    text = program(
        "%p = f32[64]{0} parameter(0)\n"
        "%q = f32[2]{0} constant({1, 2})\n"
        f"%c = (f32[64]{{0}}, f32[2]{{0}}) all-reduce(%p, %q), {OVER_B}, "
        "to_apply=%sum\n"
        "%g = f32[64]{0} get-tuple-element(%c), index=0, "
        'metadata={op_name="first"}\n'
        '%h = f32[2]{0} get-tuple-element(%c), index=1, metadata={op_name="second"}\n'
        "ROOT %t = (f32[64]{0}, f32[2]{0}) tuple(%g, %h)"
    )
    found = hlo_collectives(text)
    assert [(c.source, c.nbytes) for c in found] == [("first", 256), ("second", 8)]


def test_all_to_all_of_one_operand_per_device_sends_them_all():
    text = program(
        "%p = f32[16]{0} parameter(0)\n"
        "ROOT %c = (f32[16]{0}, f32[16]{0}) all-to-all(%p, %p), "
        "replica_groups=[4,2]<=[8]"
    )
    one = only(hlo_collectives(text))
    assert (one.group, one.nbytes) == (2, 2 * 16 * 4)


@pytest.mark.parametrize(
    ("pairs", "share"),
    [
        ("{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}", 1.0),
        ("{0,1},{1,2},{2,3},{3,3}", 3 / 8),
        ("{0,0},{1,1}", 0.0),
    ],
)
def test_permute_is_charged_for_the_devices_that_send(pairs, share):
    text = program(
        "%p = f32[64]{0} parameter(0)\n"
        "ROOT %c = f32[64]{0} collective-permute(%p), "
        f"source_target_pairs={{{pairs}}}"
    )
    assert sum(c.sent_bytes for c in hlo_collectives(text)) == share * 256


def test_axes_are_those_along_which_a_group_differs():
    text = program(
        "%p = f32[64]{0} parameter(0)\n"
        f"%c = f32[64]{{0}} all-reduce(%p), {OVER_B}, to_apply=%sum\n"
        "%d = f32[64]{0} all-reduce(%c), replica_groups=[4,2]<=[2,4]T(1,0), "
        "to_apply=%sum\n"
        "ROOT %e = f32[64]{0} all-reduce(%d), replica_groups={}, to_apply=%sum"
    )
    assert [c.axes for c in hlo_collectives(text, AXES)] == [("b",), ("a",), ("a", "b")]


# Loops, branches and calls.

LOOP = """
%body{n} (s: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %s = (s32[], f32[64]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[64]{{0}} get-tuple-element(%s), index=1
{inner}
  ROOT %o = (s32[], f32[64]{{0}}) tuple(%i, %w)
}}

%compare{n} (c: s32[], d: s32[]) -> pred[] {{
  %c = s32[] parameter(0)
  %d = s32[] parameter(1)
  ROOT %l = pred[] compare(%c, %d), direction=LT
}}

%condition{n} (s: (s32[], f32[64])) -> pred[] {{
  %s = (s32[], f32[64]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %bound = s32[] constant({bound})
  ROOT %l = pred[] fusion(%i, %bound), kind=kLoop, calls=%compare{n}
}}
"""
REDUCE = f"  %w = f32[64]{{0}} all-reduce(%v), {OVER_B}, to_apply=%sum"
ENTER = (
    "%p = f32[64]{{0}} parameter(0)\n"
    "%z = s32[] constant(0)\n"
    "%t = (s32[], f32[64]{{0}}) tuple(%z, %p)\n"
    "ROOT %l = (s32[], f32[64]{{0}}) while(%t), condition=%condition{n}, "
    "body=%body{n}{note}"
)
NOTE = ', backend_config={"known_trip_count":{"n":"7"}}'


@pytest.mark.parametrize(("note", "trips"), [("", 5), (NOTE, 7)])
def test_loop_counts_its_trips(note, trips):
    text = program(
        ENTER.format(n=0, note=note), before=LOOP.format(n=0, inner=REDUCE, bound=5)
    )
    assert only(hlo_collectives(text)).trips == trips


def test_loop_without_a_bound_counts_once():
    text = program(
        ENTER.format(n=0, note=""), before=LOOP.format(n=0, inner=REDUCE, bound=0)
    )
    assert only(hlo_collectives(text)).trips == 1


def test_nested_loops_multiply():
    inner = "\n".join(
        f"  {line}" for line in ENTER.format(n=0, note="").split("\n")[1:]
    )
    inner = inner.replace("%p", "%v").replace("ROOT %l", "%l")
    inner += "\n  %w = f32[64]{0} get-tuple-element(%l), index=1"
    loops = LOOP.format(n=0, inner=REDUCE, bound=3) + LOOP.format(
        n=1, inner=inner, bound=5
    )
    text = program(ENTER.format(n=1, note=""), before=loops)
    assert only(hlo_collectives(text)).trips == 15


CALLED = (
    "%f (q: f32[64]) -> f32[64] {\n  %q = f32[64]{0} parameter(0)\n"
    f"  ROOT %r = f32[64]{{0}} all-reduce(%q), {OVER_B}, to_apply=%sum\n}}\n"
)


def test_computation_called_twice_counts_twice():
    text = program(
        "%p = f32[64]{0} parameter(0)\n"
        "%c = f32[64]{0} call(%p), to_apply=%f\n"
        "ROOT %d = f32[64]{0} call(%c), to_apply=%f",
        before=CALLED,
    )
    assert len(hlo_collectives(text)) == 2


def test_each_branch_counts_once():
    text = program(
        "%p = f32[64]{0} parameter(0)\n"
        "%k = s32[] constant(0)\n"
        "ROOT %c = f32[64]{0} conditional(%k, %p, %p), branch_computations={%f, %f}",
        before=CALLED,
    )
    assert len(hlo_collectives(text)) == 2


# Reduce-scatters that run as all-reduces.

# Offset of the shard along axis b, and along both axes, of an array of 64.
TABLES = {
    "b": "{0, 16, 32, 48, 0, 16, 32, 48}",
    "a": "{0, 0, 0, 0, 32, 32, 32, 32}",
    "ab": "{0, 8, 16, 24, 32, 40, 48, 56}",
}
KEPT = {"b": 16, "a": 32, "ab": 8}


def sliced(axes, groups, *, table=None):
    """An all-reduce, and a fusion that slices its result along mesh axes."""
    kept = KEPT[axes]
    fused = (
        f"%cut (v: f32[64], t: s32[8], d: u32[]) -> f32[{kept}] {{\n"
        "  %v = f32[64]{0} parameter(0)\n"
        "  %t = s32[8]{0} parameter(1)\n"
        "  %d = u32[] parameter(2)\n"
        "  %at = s32[1]{0} dynamic-slice(%t, %d), dynamic_slice_sizes={1}\n"
        "  %o = s32[] bitcast(%at)\n"
        "  %k = f32[64]{0} copy(%v)\n"
        f"  ROOT %r = f32[{kept}]{{0}} dynamic-slice(%k, %o), "
        f"dynamic_slice_sizes={{{kept}}}\n}}\n"
    )
    return program(
        "%p = f32[64]{0} parameter(0)\n"
        f"%t = s32[8]{{0}} constant({table or TABLES[axes]})\n"
        "%d = u32[] partition-id()\n"
        f"%c = f32[64]{{0}} all-reduce(%p), {groups}, to_apply=%sum\n"
        f"ROOT %r = f32[{kept}]{{0}} fusion(%c, %t, %d), kind=kLoop, calls=%cut",
        before=fused,
    )


def test_sliced_all_reduce_is_a_reduce_scatter():
    text = sliced("b", OVER_B)
    assert hlo_collectives(text, AXES) == (
        AuditedCollective("reduce_scatter", ("b",), 4, 256, 1.0, ""),
    )
    assert hlo_collectives(text, AXES, as_run=True) == (
        AuditedCollective("all_reduce", ("b",), 4, 256, 1.0, ""),
    )


@pytest.mark.parametrize(("axes", "parts"), [("b", 4), ("a", 2)])
def test_slice_along_some_axes_leaves_an_all_reduce_of_the_slice(axes, parts):
    other = "a" if axes == "b" else "b"
    scatter, reduce = hlo_collectives(sliced(axes, "replica_groups={}"), AXES)
    assert scatter == AuditedCollective("reduce_scatter", (axes,), parts, 256, 1.0, "")
    assert reduce == AuditedCollective(
        "all_reduce", (other,), NUM_DEVICES // parts, 256 / parts, 1.0, ""
    )
    whole, rest = 256, 256 / parts
    sent = whole * (parts - 1) / parts
    sent += 2 * rest * (8 / parts - 1) / (8 / parts)
    assert scatter.sent_bytes + reduce.sent_bytes == sent


def test_slice_along_another_axis_is_not_a_scatter():
    """All devices of a group keep the same part."""
    one = only(hlo_collectives(sliced("a", OVER_B), AXES))
    assert one == AuditedCollective("all_reduce", ("b",), 4, 256, 1.0, "")


def test_scatter_of_two_axes():
    one = only(hlo_collectives(sliced("ab", "replica_groups={}"), AXES))
    assert (one.kind, one.axes, one.group) == ("reduce_scatter", ("a", "b"), 8)


def test_offsets_left_out_of_the_text_are_guessed_from_the_slice():
    one = only(hlo_collectives(sliced("b", OVER_B, table="{...}")))
    assert (one.kind, one.group) == ("reduce_scatter", 4)


def test_slice_that_every_device_takes_alike_is_not_a_scatter():
    same = "{16, 16, 16, 16, 16, 16, 16, 16}"
    one = only(hlo_collectives(sliced("b", OVER_B, table=same)))
    assert (one.kind, one.nbytes) == ("all_reduce", 256)


def test_result_that_is_also_read_wholly_is_not_a_scatter():
    text = sliced("b", OVER_B).replace(
        "ROOT %r = f32[16]{0} fusion(%c",
        "ROOT %n = f32[64]{0} negate(%c)\n  %r = f32[16]{0} fusion(%c",
    )
    assert only(hlo_collectives(text)).kind == "all_reduce"


def test_two_all_reduces_before_a_slice_are_two_scatters():
    text = sliced("ab", OVER_B).replace(
        "ROOT %r = f32[8]{0} fusion(%c",
        "%e = f32[64]{0} all-reduce(%c), replica_groups=[4,2]<=[2,4]T(1,0), "
        "to_apply=%sum\n  ROOT %r = f32[8]{0} fusion(%e",
    )
    first, second = hlo_collectives(text, AXES)
    assert first == AuditedCollective("reduce_scatter", ("b",), 4, 256, 1.0, "")
    assert second == AuditedCollective("reduce_scatter", ("a",), 2, 64, 1.0, "")


def test_gather_by_summing_shards_in_zeros():
    text = program(
        "%p = f32[16]{0} parameter(0)\n"
        "%z = f32[] constant(0)\n"
        "%b = f32[64]{0} broadcast(%z), dimensions={}\n"
        "%o = s32[] constant(16)\n"
        "%u = f32[64]{0} dynamic-update-slice(%b, %p, %o)\n"
        f"ROOT %c = f32[64]{{0}} all-reduce(%u), {OVER_B}, to_apply=%sum"
    )
    assert hlo_collectives(text) == (
        AuditedCollective("all_gather", (), 4, 256, 1.0, ""),
    )


# Programs that XLA compiles.
