"""Tests that checksums do not depend on an array's sharding."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.checkpoint.store import Digest, block_digest, digest_of

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "int64", "complex128")


def plain_digest(words: list[int]) -> Digest:
    """As the formula says."""
    modulus = 1 << 64
    total = sum(words) % modulus
    return Digest(total, sum(i * w for i, w in enumerate(words)) % modulus)


@given(
    st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple), st.integers(0, 9)
)
def test_the_formula(shape: tuple[int, ...], seed: int) -> None:
    draw = np.random.default_rng(seed)
    block = draw.integers(0, 2**32, shape, np.uint32)
    found = block_digest(block, [0] * block.ndim, shape)
    assert found == plain_digest(block.reshape(-1).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(3, 5), (1, 1), (6, 2)])
def test_blocks_add_up(dtype: str, cuts: tuple[int, int]) -> None:
    draw = np.random.default_rng(0).standard_normal((6, 5, 3)) * 4
    whole = draw.astype(jnp.dtype(dtype) if dtype != "int64" else np.int64)
    total = Digest()
    for a, b in itertools.product(range(0, 6, cuts[0]), range(0, 5, cuts[1])):
        block = whole[a : a + cuts[0], b : b + cuts[1]]
        total += block_digest(block, (a, b, 0), whole.shape)
    assert total == block_digest(whole, (0, 0, 0), whole.shape)


def test_layouts_and_replicas_do_not_matter() -> None:
    array = jnp.arange(96.0).reshape(12, 8)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    specs = [("a", "b"), (None, "a"), (("b", "a"), None), (None, None)]
    found = {
        digest_of(jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))))
        for spec in specs
    }
    assert found == {digest_of(array)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_of_a_byte_is_seen(dtype: str) -> None:
    array = np.arange(8).astype(jnp.dtype(dtype) if dtype != "int64" else np.int64)
    before = block_digest(array, (0,), (8,))
    seen = 0
    for k in range(array.nbytes):
        changed = bytearray(array.tobytes())
        changed[k] ^= 1
        other = np.frombuffer(bytes(changed), array.dtype)
        seen += block_digest(other, (0,), (8,)) != before
    assert seen == array.nbytes


def test_swapped_elements_are_seen() -> None:
    one, other = np.array([1.0, 2.0, 3.0]), np.array([2.0, 1.0, 3.0])
    assert block_digest(one, (0,), (3,)) != block_digest(other, (0,), (3,))


def test_text() -> None:
    digest = Digest(2**64 - 1, 5)
    assert Digest.parse(str(digest)) == digest
    with pytest.raises(ValueError, match="32 hex digits"):
        Digest.parse("12")
