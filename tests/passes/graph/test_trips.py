"""Tests the trip counts of counted loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.graph.emit import while_trips
from autopar_passes.program.flatten import flatten

Carry = tuple[Any, Any]


def trips(test: Callable[[Any], Any], body: Callable[[Any], Any], *init: Any) -> Any:
    def run(x: jax.Array) -> Any:
        return jax.lax.while_loop(test, body, (*init, x))

    program = flatten(jax.make_jaxpr(run)(jnp.ones(2)))
    (eqn,) = [e for e in program.body.equations if e.primitive == "while"]
    return while_trips(eqn)


@given(st.integers(-5, 20), st.integers(-5, 20), st.integers(1, 4))
@settings(max_examples=examples(25), deadline=None, derandomize=True)
def test_a_count_is_what_the_loop_counts(start: int, stop: int, by: int) -> None:
    got = trips(lambda c: c[0] < stop, lambda c: (c[0] + by, c[1] * 2.0), start)

    assert -(-got // 1) == len(range(start, stop, by))


def test_a_loop_that_jax_counts_itself() -> None:
    program = flatten(
        jax.make_jaxpr(lambda x, n: jax.lax.fori_loop(0, n, lambda i, v: v * 2.0, x))(
            jnp.ones(2), 5
        )
    )
    (eqn,) = [e for e in program.body.equations if e.primitive == "while"]

    assert while_trips(eqn) is None  # its bound is an argument


@pytest.mark.parametrize(
    ("test", "body", "init"),
    [
        # The bound is not a scalar of the program.
        (lambda c: c[0] < c[1][0], lambda c: (c[0] + 1.0, c[1]), (0.0,)),
        # It counts down.
        (lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1]), (5,)),
        (lambda c: c[0] < 5, lambda c: (c[0] + -1, c[1]), (0,)),
        # It multiplies, or the condition computes.
        (lambda c: c[0] < 64, lambda c: (c[0] * 2, c[1]), (1,)),
        (lambda c: c[0] * 2 < 64, lambda c: (c[0] + 1, c[1]), (1,)),
        # It tests the values.
        (lambda c: jnp.sum(c[1]) < 64.0, lambda c: (c[0] + 1, c[1] * 2.0), (1,)),
        # The counter takes steps of a size that is computed.
        (lambda c: c[0] < 64, lambda c: (c[0] + c[0], c[1]), (1,)),
    ],
)
def test_other_loops_are_not_counted(
    test: Callable[[Any], Any], body: Callable[[Any], Any], init: tuple[Any, ...]
) -> None:
    assert trips(test, body, *init) is None


def test_a_counter_among_other_carries() -> None:
    got = trips(
        lambda c: c[1] < 7, lambda c: (c[0] * 2.0, c[1] + 2, c[2] + 1.0), 1.0, 1
    )

    assert got == 3.0
