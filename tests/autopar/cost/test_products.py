"""Which dot products the matrix units do, and what the others cost."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.steps.analysis import analyse
from autopar.steps.work import OperatorWork, operator_work

Arrays = Callable[[jax.Array, jax.Array], jax.Array]
Numbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]
# Name -> dimensions that are contracted and shared, and the shapes.
MULTIPLIED: dict[str, tuple[Numbers, tuple[int, ...], tuple[int, ...]]] = {
    "head mask": ((((), ()), ((1,), (0,))), (8, 4, 64, 64), (4,)),
    "outer product": ((((), ()), ((), ())), (512,), (256,)),
    "gate": ((((), ()), ((0, 1), (0, 1))), (64, 512), (64, 512)),
    "one element contracted": ((((1,), (0,)), ((), ())), (512, 1), (1, 256)),
}
# What sums, too: the vector units do these as well.
SUMMED: dict[str, tuple[Numbers, tuple[int, ...], tuple[int, ...]]] = {
    "matrix and vector": ((((1,), (0,)), ((), ())), (512, 256), (256,)),
    "gradient of a mask": ((((0, 2), (0, 2)), ((1,), (1,))), (8, 4, 64), (8, 4, 64)),
}


def the_dot(step: Arrays, *args: jax.Array) -> OperatorWork:
    """The work of the only `dot_general` of a program."""
    graph = analyse(step, args).graph
    (op,) = [op for op in graph.operators if op.kind == "dot_general"]
    return operator_work(graph, op, frozenset(range(len(graph.values))))


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_dot_that_contracts_nothing_multiplies_elements(name: str) -> None:
    """The vector units do it."""
    numbers, left, right = MULTIPLIED[name]
    a, b = jnp.ones(left), jnp.ones(right)

    work = the_dot(lambda a, b: jax.lax.dot_general(a, b, numbers), a, b)

    assert not work.is_matrix


@pytest.mark.parametrize("name", SUMMED)
def test_a_dot_with_a_side_of_one_element_is_no_product(name: str) -> None:
    """It multiplies and adds, and the vector units do it."""
    numbers, left, right = SUMMED[name]
    a, b = jnp.ones(left), jnp.ones(right)

    work = the_dot(lambda a, b: jax.lax.dot_general(a, b, numbers), a, b)

    assert not work.is_matrix


def test_a_dot_that_contracts_two_elements_is_a_product() -> None:
    """Two are enough."""
    work = the_dot(jnp.dot, jnp.ones((512, 2)), jnp.ones((2, 256)))

    assert work.is_matrix


def _times(masked: Arrays, shape: tuple[int, ...]) -> float:
    """Predicted seconds of a step whose gradient passes through a mask of heads."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(masked(x, w))))(w)

    w = jax.ShapeDtypeStruct((shape[1],), jnp.float32)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = autopar.plan(lambda w, x: step(w, x.reshape(shape)), w, x, cluster="1:h100")
    return plan.predicted.step_s


def test_a_mask_of_heads_costs_what_its_product_of_elements_costs() -> None:
    """`einsum` makes a `dot_general` of it, `*` none."""
    shape = (64, 16, 512, 512)

    by_einsum = _times(lambda x, w: jnp.einsum("bhqk,h->bhqk", x, w), shape)
    by_product = _times(lambda x, w: x * w[:, None, None], shape)

    assert by_einsum == pytest.approx(by_product, rel=0.1)
