"""Tests the codes of arrays that cross stage cuts: their bytes, errors and bits."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.compression.cut_codes import (
    ROW,
    CutCode,
    cut_codecs_text,
    parse_cut_codecs,
)
from autopar.errors import AutoparError

SHAPES = [(6, 8, 96), (96,), (3, 5, 70), (4, 16, 16, 2), (16, 16), (2000,), (2, 3, 4)]
CODECS = [
    "int8",
    "int8:block=32",
    "int4",
    "int4:block=64,hadamard=false",
    "fp8",
    "fp8:format=e5m2",
    "eden:levels=32",
    "eden:levels=6",
    "sign",
    "topk:ratio=0.1",
    "topk:ratio=0.25",
]
# Of a block's largest element, the largest error of one element. The scale is rounded
# up to bfloat16, by at most 1/128. e4m3 has 3 bits of mantissa, so its relative error
# is at most 1/16 of the element, and e5m2 has 2.
UP = 1 + 1 / 128
LARGEST = {
    "int8": UP * 0.5 / 127,
    "int8:block=32": UP * 0.5 / 127,
    "int4:block=64,hadamard=false": UP * 0.5 / 7,
    "fp8": UP / 16,
    "fp8:format=e5m2": UP / 8,
}


def coded(code: CutCode, array: Any) -> tuple[np.ndarray, np.ndarray]:
    """The code of an array, and the decoded array."""
    made = jax.jit(code.encode)(array)
    assert made.shape == code.struct.shape
    assert made.dtype == code.struct.dtype == jnp.uint8
    return np.asarray(made), np.asarray(jax.jit(code.decode)(made))


def blocks_of(code: CutCode, array: np.ndarray, block: int) -> list[np.ndarray]:
    """The blocks of each row."""
    rows = array.reshape(-1, code.elements)
    return [row[k : k + block] for row in rows for k in range(0, len(row), block)]


@pytest.mark.parametrize("codec", sorted(LARGEST))
@given(
    seed=st.integers(0, 2**16),
    shape=st.sampled_from(SHAPES),
    power=st.integers(-20, 20),
)
@settings(max_examples=8, deadline=None)
def test_the_error_of_each_element_is_bounded(
    codec: str, seed: int, shape: tuple[int, ...], power: int
) -> None:
    code = CutCode(codec, shape, "float32")
    given_ = np.random.default_rng(seed).standard_t(3.0, shape) * 2.0**power
    array = given_.astype(np.float32)
    _, decoded = coded(code, array)
    block = 64 if "64" in codec else 32 if "32" in codec else 256
    pairs = zip(
        blocks_of(code, array, block), blocks_of(code, decoded, block), strict=True
    )
    for before, after in pairs:
        most = LARGEST[codec] * np.abs(before).max()
        assert np.abs(before - after).max() <= most * (1 + 1e-5)


@pytest.mark.parametrize(
    ("codec", "error"), [("int4", 0.14), ("eden:levels=6", 0.26), ("sign", 0.64)]
)
def test_the_error_of_rotated_and_of_sign_codes(codec: str, error: float) -> None:
    code = CutCode(codec, (64, 512), "float32")
    array = np.random.default_rng(0).standard_normal(code.shape).astype(np.float32)
    _, decoded = coded(code, array)
    assert np.linalg.norm(decoded - array) <= error * np.linalg.norm(array)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_array_has_the_same_code(codec: str, shape: tuple[int, ...]) -> None:
    """Also for each row alone, and a decoded array is decoded again as it was."""
    code = CutCode(codec, shape, "float32")
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    made, decoded = coded(code, array)
    again, same = coded(code, array)
    np.testing.assert_array_equal(made, again)
    np.testing.assert_array_equal(decoded, same)
    if code.lead:
        alone = CutCode(codec, (1, *shape[1:]), "float32")
        if alone.lead == code.lead:
            one, _ = coded(alone, array[:1])
            np.testing.assert_array_equal(one, made[:1])


@pytest.mark.parametrize(
    ("codec", "bits", "block"), [("int8:block=32", 8, 32), ("int4:block=32", 4, 32)]
)
def test_bytes_follow_from_bits_and_blocks(codec: str, bits: int, block: int) -> None:
    code = CutCode(codec, (8, 16, 96), "float32")
    elements = math.prod(code.shape)
    assert code.nbytes == elements * bits // 8 + elements // block * 2
    assert code.dense_bytes == 4 * elements
    assert CutCode(codec, code.shape, "bfloat16").dense_bytes == 2 * elements


@pytest.mark.parametrize("shape", [(), *SHAPES])
def test_rows_have_enough_elements_and_keep_the_leading_dims(
    shape: tuple[int, ...],
) -> None:
    code = CutCode("int8", shape, "float32")
    assert code.struct.shape[: code.lead] == shape[: code.lead]
    assert code.elements >= min(ROW, math.prod(shape[1:]) if shape[1:] else 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_number_that_is_not_finite_spoils_its_block_alone(dtype: str) -> None:
    code = CutCode("int8:block=32", (4, 64), dtype)
    array = np.ones(code.shape, np.float32)
    array[1, 40] = np.inf
    made = jax.jit(code.decode)(jax.jit(code.encode)(jnp.asarray(array, dtype)))
    assert made.dtype == jnp.dtype(dtype)
    bad = np.isnan(np.asarray(made, np.float32))
    assert bad[1, 32:].all()
    assert bad.sum() == 32


@pytest.mark.parametrize("ratio", [1 / 16, 1 / 4])
@given(
    seed=st.integers(0, 2**16),
    shape=st.sampled_from([(4, 96), (3, 5, 70), (2, 700)]),
    zeros=st.booleans(),
)
@settings(max_examples=4, deadline=None)
def test_the_largest_elements_are_kept_and_a_masked_code_keeps_the_same(
    ratio: float, seed: int, shape: tuple[int, ...], zeros: bool
) -> None:
    """A reference in numpy: of equal elements, the first are kept."""
    text = f"topk:ratio={ratio}"
    code, masked = (CutCode(text, shape, "float32", m) for m in (False, True))
    array, other = np.random.default_rng(seed).standard_normal((2, *shape)).astype("f4")
    array = np.maximum(array, 1.0) - 1.0 if zeros else array
    kept = np.zeros((math.prod(shape) // code.elements, code.elements), bool)
    for row, values in enumerate(array.reshape(kept.shape)):
        for begin in range(0, code.elements, 256):
            block = np.abs(values[begin : begin + 256])
            count = max(1, round(ratio * len(block)))
            kept[row, begin + np.argsort(-block, kind="stable")[:count]] = True
    kept = kept.reshape(shape)
    made, decoded = coded(code, array)
    again = jax.jit(masked.encode)(other, made)
    assert again.shape == masked.struct.shape
    spread = np.asarray(jax.jit(masked.decode)(again, made))
    for before, after in ((array, decoded), (other, spread)):
        step = UP * np.abs(before).max() / 127
        assert np.abs(after - before * kept).max() <= 0.51 * step


def test_bytes_of_kept_elements() -> None:
    """One of 8 needs 1 byte for its position, one of 4 less: a bit for each element."""
    shape = (16, 512)
    pairs = {r: [CutCode(f"topk:ratio={r}", shape, "float32", m).nbytes
             for m in (False, True)] for r in (1 / 8, 1 / 4)}  # fmt: skip
    assert pairs[1 / 8] == [16 * 2 * (32 + 32 + 2), 16 * 2 * (32 + 2)]
    assert pairs[1 / 4] == [16 * 2 * (32 + 64 + 2), 16 * 2 * (64 + 2)]


def test_zeros_stay_zeros() -> None:
    for codec in ("int8", "int4", "fp8"):
        _, decoded = coded(CutCode(codec, (4, 64), "float32"), np.zeros((4, 64), "f4"))
        assert not decoded.any()


def test_texts_name_one_codec_or_two() -> None:
    assert parse_cut_codecs("int4:block=64 / int8") == ("int4:block=64", "int8")
    assert cut_codecs_text({"activations": "fp8"}) == "fp8/dense"
    assert cut_codecs_text("none") == "none"
    assert parse_cut_codecs("topk:ratio=0.1+int8/dense")[0] == "topk:ratio=0.1+int8"


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ("powersgd", "take a codec of blocks"),
        ("topk:values=f32", "leave values= out"),
        ("int8:rounding=stochastic", "leave rounding= out"),
        ("int8/int8/int8", "names 3 codecs"),
        ("int9", "unknown codec 'int9'"),
        ("int8+int9", "unknown codec 'int9'"),
        ({"weights": "int8"}, "unknown key 'weights'"),
        ({"activations": 8}, "8 is not the text of a codec"),
    ],
)
def test_other_codecs_are_refused(given_: Any, said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        cut_codecs_text(given_)
