"""Tests schedules of accelerators' programs, from hand-written texts."""

from autopar_passes.audit.compiled import (
    Done,
    EventLoop,
    Kernel,
    Start,
    device_events,
    hlo_collectives,
)

AXES = (("data", 4), ("tensor", 2))
HEAD = """HloModule m, is_scheduled=true, num_partitions=8

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%body (state: (s32[], f32[16])) -> (s32[], f32[16]) {
  %state = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %v = f32[16]{0} get-tuple-element(%state), index=1
  %scaled = f32[16]{0} fusion(%v), kind=kLoop, calls=%double
  ROOT %next = (s32[], f32[16]{0}) tuple(%i, %scaled)
}

%condition (state: (s32[], f32[16])) -> pred[] {
  %state = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%double (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %d = f32[16]{0} add(%p, %p)
}
"""
# The groups of `tensor` on a mesh whose devices are listed in another order.
OVER_DATA = (
    "replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], "
    "device_ids=([4,2]T(1,0)) {'axis_2'}"
)


def program(body, more=""):
    lines = "\n".join(f"  {line}" for line in body.strip().split("\n"))
    return f"{HEAD}{more}\nENTRY %main (p: f32[16]) -> f32[16] {{\n{lines}\n}}\n"


GATHER = f"""
%p = f32[16]{{0}} parameter(0)
%q = f32[8,16]{{1,0}} broadcast(%p), dimensions={{1}}
%begin = ((f32[16]{{0}}, f32[8,16]{{1,0}}), (f32[64]{{0}}, f32[32,16]{{1,0}})) \
all-gather-start(%p, %q), channel_id=1, {OVER_DATA}, dimensions={{0}}, \
backend_config={{"collective_backend_config":{{"is_sync":false}}}}
%beside = f32[16]{{0}} fusion(%p), kind=kLoop, calls=%double
%end = (f32[64]{{0}}, f32[32,16]{{1,0}}) all-gather-done(%begin)
ROOT %r = f32[16]{{0}} fusion(%beside), kind=kLoop, calls=%double
"""


def test_a_pair_of_start_and_done_with_a_kernel_between():
    broadcast, begin, beside, end, last = device_events(program(GATHER), AXES)

    assert isinstance(broadcast, Kernel)
    assert isinstance(begin, Start)
    assert not begin.waits
    assert [c.kind for c in begin.collectives] == ["all_gather", "all_gather"]
    # Sizes are those of results; a start's shape names operands beside them.
    assert [c.nbytes for c in begin.collectives] == [4 * 16 * 4, 4 * 8 * 16 * 4]
    assert {c.axes for c in begin.collectives} == {("data",)}
    assert isinstance(beside, Kernel)
    assert beside.nbytes == 2 * 16 * 4
    assert end == Done("begin")
    assert isinstance(last, Kernel)


def test_what_is_marked_synchronous_waits():
    text = program(GATHER.replace('"is_sync":false', '"is_sync":true'))
    (begin,) = (e for e in device_events(text, AXES) if isinstance(e, Start))

    assert begin.waits


def test_a_loop_has_its_trips():
    body = """
%p = f32[16]{0} parameter(0)
%zero = s32[] constant(0)
%state = (s32[], f32[16]{0}) tuple(%zero, %p)
%loop = (s32[], f32[16]{0}) while(%state), condition=%condition, body=%body
ROOT %r = f32[16]{0} get-tuple-element(%loop), index=1
"""
    (loop,) = device_events(program(body))

    assert isinstance(loop, EventLoop)
    assert loop.trips == 5
    assert [e.name for e in loop.body if isinstance(e, Kernel)] == ["scaled"]


def test_products_count_a_multiply_add_as_two():
    body = """
%p = bf16[16,32]{1,0} parameter(0)
%q = bf16[64,32]{1,0} parameter(1)
ROOT %r = (f32[16,64]{1,0}, s8[4096]{0}) custom-call(%p, %q), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"]}}}
"""
    (kernel,) = device_events(program(body))

    assert isinstance(kernel, Kernel)
    assert kernel.flops == 2 * 16 * 64 * 32
    assert kernel.dtype == "bfloat16"
    # The library's work space is not read or written as an array is.
    assert kernel.nbytes == 2 * 16 * 32 + 2 * 64 * 32 + 4 * 16 * 64


def test_convolutions_count_their_kernels():
    body = """
%p = f32[2,8,8,3]{3,2,1,0} parameter(0)
%k = f32[3,3,3,16]{3,2,1,0} parameter(1)
ROOT %r = f32[2,8,8,16]{3,2,1,0} convolution(%p, %k), \
window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, \
backend_config={"estimated_cycles":"1200"}
"""
    (kernel,) = device_events(program(body))

    assert isinstance(kernel, Kernel)
    assert kernel.flops == 2 * (2 * 8 * 8 * 16) * (3 * 3 * 3)
    assert kernel.cycles == 1200


ASYNC = """
%first (p: f32[16]) -> f32[32] {
  %p = f32[16]{0} parameter(0)
  %g = f32[32]{0} all-gather(%p), channel_id=9, replica_groups=[4,2]<=[8], \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c = f32[32]{0} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%second (p: f32[16]) -> f32[32] {
  %p = f32[16]{0} parameter(0)
  %g = f32[32]{0} all-gather(%p), channel_id=9, replica_groups=[4,2]<=[8], \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c = f32[32]{0} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  %zero = s32[] constant(0)
  %r = f32[16]{0} all-reduce(%p), channel_id=10, replica_groups=[4,2]<=[8], \
to_apply=%sum
  ROOT %s = f32[8]{0} dynamic-slice(%r, %zero), dynamic_slice_sizes={8}
}
"""


def test_pieces_of_one_collective_in_tpu_programs_count_once():
    body = """
%p = f32[16]{0} parameter(0)
%a = f32[32]{0} fusion(%p), kind=kCustom, calls=%first
ROOT %b = f32[32]{0} fusion(%p), kind=kCustom, calls=%second
"""
    (found,) = hlo_collectives(program(body, ASYNC), AXES, as_run=True)

    assert (found.kind, found.nbytes, found.axes) == ("all_gather", 128, ("tensor",))


def test_a_sum_in_a_fusion_runs_as_a_reduce_scatter():
    body = """
%p = f32[16]{0} parameter(0)
ROOT %a = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
"""
    (found,) = hlo_collectives(program(body, ASYNC), AXES, as_run=True)

    assert (found.kind, found.nbytes) == ("reduce_scatter", 64)
