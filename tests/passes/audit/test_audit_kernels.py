"""Tests kernels of compiled programs: their products and their bytes."""

import pytest

from autopar_passes.audit.compiled import device_events
from autopar_passes.audit.kernels import Kernel, Product

HEAD = """HloModule m, is_scheduled=true, num_partitions=8

%cut (p: f32[8,64], i: s32[]) -> f32[1,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1,64]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,64}
  ROOT %n = f32[1,64]{1,0} negate(%s)
}

%update (p: f32[8,64], u: f32[1,64], i: s32[]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %d = f32[8,64]{1,0} dynamic-update-slice(%p, %u, %i, %zero)
}

%twice (p: f32[8,64], i: s32[]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1,64]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,64}
  %b = f32[8,64]{1,0} broadcast(%s), dimensions={0,1}
  ROOT %a = f32[8,64]{1,0} add(%p, %b)
}

%dotted (p: bf16[16,32], q: bf16[32,64]) -> bf16[16,64] {
  %p = bf16[16,32]{1,0} parameter(0)
  %q = bf16[32,64]{1,0} parameter(1)
  ROOT %d = bf16[16,64]{1,0} dot(%p, %q), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""
ROW, WHOLE, INDEX = 4 * 64, 4 * 8 * 64, 4


def kernel(body: str) -> Kernel:
    """The last kernel of a program."""
    lines = "\n".join(f"  {line}" for line in body.strip().split("\n"))
    text = f"{HEAD}\nENTRY %main (p: f32[16]) -> f32[16] {{\n{lines}\n}}\n"
    found = [e for e in device_events(text) if isinstance(e, Kernel)]
    return found[-1]


def fused(name: str, result: str, operands: str) -> Kernel:
    return kernel(f"""
%p = f32[8,64]{{1,0}} parameter(0)
%u = f32[1,64]{{1,0}} parameter(1)
%i = s32[] parameter(2)
ROOT %r = {result} fusion({operands}), kind=kLoop, calls=%{name}
""")


def test_what_is_only_sliced_is_read_in_part() -> None:
    found = fused("cut", "f32[1,64]{1,0}", "%p, %i")

    assert found.nbytes == ROW + INDEX + ROW


def test_what_is_read_as_a_whole_too_counts_once() -> None:
    found = fused("twice", "f32[8,64]{1,0}", "%p, %i")

    assert found.nbytes == WHOLE + INDEX + WHOLE


def test_an_update_in_place_moves_the_update() -> None:
    found = fused("update", "f32[8,64]{1,0}", "%p, %u, %i")

    assert found.nbytes == ROW + INDEX + ROW


def test_a_product_of_a_library_has_its_sides() -> None:
    found = kernel("""
%p = bf16[12,16,32]{2,1,0} parameter(0)
%q = bf16[12,64,32]{2,1,0} parameter(1)
ROOT %r = (f32[12,16,64]{2,1,0}, s8[4096]{0}) custom-call(%p, %q), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],\
"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"],\
"rhs_batch_dimensions":["0"]}}}
""")

    assert found.products == (Product(12, 16, 64, 32, "bfloat16", 2),)
    assert found.flops == 2 * 12 * 16 * 64 * 32


def test_a_product_in_a_fusion_counts() -> None:
    found = kernel("""
%p = bf16[16,32]{1,0} parameter(0)
%q = bf16[32,64]{1,0} parameter(1)
ROOT %r = bf16[16,64]{1,0} fusion(%p, %q), kind=kCustom, calls=%dotted
""")

    assert found.products == (Product(1, 16, 64, 32, "bfloat16", 2),)


IMAGE, WEIGHTS, MADE = "f32[2,8,8,6]", "f32[3,3,3,16]", "f32[2,8,8,16]"
# Images of 8 x 8 with 6 channels in 2 groups, 16 channels out, windows of 3 x 3.
CONVOLUTIONS = {
    "Forward": (IMAGE, WEIGHTS, MADE, (2 * 64, 8, 9 * 3)),
    "BackwardInput": (MADE, WEIGHTS, IMAGE, (2 * 64, 3, 9 * 8)),
    "BackwardFilter": (IMAGE, MADE, WEIGHTS, (9 * 3, 8, 2 * 64)),
}


@pytest.mark.parametrize("direction", CONVOLUTIONS)
def test_a_convolution_is_a_product_of_patches(direction: str) -> None:
    left, right, made, (rows, columns, depth) = CONVOLUTIONS[direction]
    found = kernel(f"""
%p = {left}{{3,2,1,0}} parameter(0)
%q = {right}{{3,2,1,0}} parameter(1)
ROOT %r = ({made}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%p, %q), \
window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_01io->b01f, feature_group_count=2, \
custom_call_target="__cudnn$conv{direction}"
""")

    assert found.products == (Product(2, rows, columns, depth, "float32", 4),)
