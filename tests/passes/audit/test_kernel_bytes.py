"""Tests the bytes that kernels of compiled programs read and write."""

import pytest

from autopar_passes.audit.compiled import device_events
from autopar_passes.audit.kernels import Kernel

# A layer's part of weights that are stacked, times two.
SLICED = """
%body (w: f32[8,16,4], k: s32[]) -> f32[16,4] {
  %w = f32[8,16,4]{2,1,0} parameter(0)
  %k = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1,16,4]{2,1,0} dynamic-slice(%w, %k, %zero, %zero), \
dynamic_slice_sizes={1,16,4}
  %b = f32[16,4]{1,0} bitcast(%s)
  ROOT %m = f32[16,4]{1,0} add(%b, %b)
}
"""
# It is written to its place among those of all layers.
PLACED = """
%body (w: f32[8,16], x: f32[1,16], k: s32[]) -> f32[8,16] {
  %w = f32[8,16]{1,0} parameter(0)
  %x = f32[1,16]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %zero = s32[] constant(0)
  %n = f32[1,16]{1,0} negate(%x)
  ROOT %u = f32[8,16]{1,0} dynamic-update-slice(%w, %n, %k, %zero)
}
"""
# Rows of a gradient are added to those of an array, in place.
SCATTERED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (w: f32[8,16], i: s32[2], u: f32[2,16]) -> f32[8,16] {
  %w = f32[8,16]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  %u = f32[2,16]{1,0} parameter(2)
  ROOT %s = f32[8,16]{1,0} scatter(%w, %i, %u), to_apply=%add
}
"""
# Every other row, and a sum over the columns of it.
REDUCED = """
%body (x: f32[8,16]) -> f32[4] {
  %x = f32[8,16]{1,0} parameter(0)
  %s = f32[4,16]{1,0} slice(%x), slice={[0:8:2], [0:16]}
  %zero = f32[] constant(0)
  ROOT %r = f32[4]{0} reduce(%s, %zero), dimensions={1}, to_apply=%sum
}
"""
# All of an array, which is also sliced.
BOTH = """
%body (x: f32[8,16]) -> (f32[8,16], f32[1,16]) {
  %x = f32[8,16]{1,0} parameter(0)
  %n = f32[8,16]{1,0} negate(%x)
  %s = f32[1,16]{1,0} slice(%x), slice={[0:1], [0:16]}
  ROOT %t = (f32[8,16]{1,0}, f32[1,16]{1,0}) tuple(%n, %s)
}
"""
CASES = {
    "a slice of an operand": (
        SLICED, "%w = f32[8,16,4]{2,1,0} parameter(0)\n%k = s32[] parameter(1)",
        "f32[16,4]{1,0} fusion(%w, %k)", 4 * (64 + 64) + 4,
    ),
    "a slice in place": (
        PLACED,
        "%w = f32[8,16]{1,0} parameter(0)\n%x = f32[1,16]{1,0} parameter(1)\n"
        "%k = s32[] parameter(2)",
        "f32[8,16]{1,0} fusion(%w, %x, %k)", 4 * (16 + 16) + 4,
    ),
    "a sum of rows of a slice": (
        REDUCED, "%w = f32[8,16]{1,0} parameter(0)", "f32[4]{0} fusion(%w)",
        4 * (64 + 4),
    ),
    "an operand that is read whole, too": (
        BOTH, "%w = f32[8,16]{1,0} parameter(0)",
        "(f32[8,16]{1,0}, f32[1,16]{1,0}) fusion(%w)", 4 * (128 + 128 + 16),
    ),
    "rows that are added in place": (
        SCATTERED, "%w = f32[8,16]{1,0} parameter(0)\n%i = s32[2]{0} parameter(1)\n"
        "%u = f32[2,16]{1,0} parameter(2)", "f32[8,16]{1,0} fusion(%w, %i, %u)",
        4 * (32 + 2 + 32),
    ),
    "a slice that is a kernel": (
        "", "%w = f32[8,16]{1,0} parameter(0)",
        "f32[2,16]{1,0} slice(%w), slice={[0:2], [0:16]}", 2 * 4 * 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_reads_what_its_result_needs(name):
    body, given, kernel, expected = CASES[name]
    called = ", kind=kLoop, calls=%body" if body else ""
    text = f"HloModule m\n{body}\nENTRY %main () -> f32[] {{\n"
    lines = [*given.split("\n"), f"ROOT %r = {kernel}{called}"]
    text += "".join(f"  {line}\n" for line in lines) + "}\n"
    (found,) = device_events(text)

    assert isinstance(found, Kernel)
    assert found.nbytes == expected
