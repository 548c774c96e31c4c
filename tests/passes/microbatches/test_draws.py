"""Tests random numbers of a microbatch's rows against those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_passes.microbatches import draws
from autopar_passes.microbatches.facts import Rows, take_microbatch
from autopar_passes.program.equations import Equation
from autopar_passes.program.flatten import flatten

KEY = jax.random.key(7)


def equation(function: Callable[[Any], Any], key: Any = KEY) -> Equation:
    """The equation of a function that draws once."""
    (found,) = flatten(jax.make_jaxpr(function)(key)).body.equations
    return found


@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_bits_are_those_of_the_whole_batch(data: st.DataObject) -> None:
    count, inner, groups = (data.draw(st.integers(1, 4)) for _ in range(3))
    others = data.draw(st.lists(st.integers(1, 3), max_size=2))
    dim = data.draw(st.integers(0, len(others)))
    width = data.draw(st.sampled_from(["uint8", "uint16", "uint32", "uint64"]))
    keys = data.draw(st.sampled_from([(), (2,)]))
    whole, some = list(others), list(others)
    whole.insert(dim, count * inner * groups)
    some.insert(dim, inner * groups)
    rows = Rows(dim, inner)

    with jax.enable_x64(True):

        def bits(shape: list[int]) -> Callable[[Any], Any]:
            def draw(key: Any) -> Any:
                return jax.random.bits(key, shape, width)

            return jax.vmap(draw) if keys else draw

        key = jax.random.split(KEY, keys) if keys else KEY
        exact = bits(whole)(key)
        eqn = equation(bits(some), key)
        for number in range(count):
            made = draws.draw_rows(
                eqn, key, np.int32(number), shape=tuple(whole), rows=rows
            )
            behind = Rows(dim + len(keys), inner)
            want = take_microbatch(exact, behind, count, np.int32(number))
            assert made.dtype == want.dtype
            np.testing.assert_array_equal(made, want)


def test_keys_are_those_of_the_whole_batch() -> None:
    eqn = equation(lambda k: jax.random.split(k, (3, 2)))
    exact = jax.random.key_data(jax.random.split(KEY, (12, 2)))
    for number in range(4):
        made = draws.draw_rows(eqn, KEY, np.int32(number), shape=(12, 2), rows=Rows(0))
        want = take_microbatch(exact, Rows(0), 4, np.int32(number))
        np.testing.assert_array_equal(jax.random.key_data(made), want)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2**40))
def test_products_have_two_words(index: int, stride: int) -> None:
    high, low = draws._times(np.uint32([index]), stride)
    if index * stride < 2**64:
        assert (int(high[0]) << 32) + int(low[0]) == index * stride


def test_numbers_go_on_behind_the_first_word() -> None:
    """The last row of a large array, of which nothing else is made."""
    whole = (2**19, 2**14)
    count = 2**19
    high, low = jax.jit(lambda n: draws._numbers(whole, Rows(0), count, n))(
        np.int32(count - 1)
    )
    made = (np.asarray(high, np.uint64) << np.uint64(32)) + np.asarray(low, np.uint64)
    np.testing.assert_array_equal(made[0], np.arange(2**33 - 2**14, 2**33))


def test_what_it_does_not_know() -> None:
    rbg = jax.random.key(0, impl="rbg")
    bits = equation(lambda k: jax.random.bits(k, (4,)))
    assert draws.can_draw(bits, KEY.dtype)
    assert not draws.can_draw(bits, rbg.dtype)
    assert not draws.can_draw(equation(lambda k: jax.random.key_data(k)), KEY.dtype)
    jax.config.update("jax_threefry_partitionable", False)
    try:
        assert not draws.can_draw(bits, KEY.dtype)
    finally:
        jax.config.update("jax_threefry_partitionable", True)
