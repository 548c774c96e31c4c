"""Tests repeated layers: one class per operator of a layer, for any number of them."""

from __future__ import annotations

import time
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.graph.build import repeated_classes, step_graph
from autopar_passes.program.trace import trace


@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=12, unique=True),
    st.integers(2, 20),
    st.integers(0, 5),
)
@settings(max_examples=examples(50), deadline=None, derandomize=True)
def test_a_repeated_sequence_has_one_class_an_offset(
    layer: list[int], times: int, around: int
) -> None:
    before = [100 + i for i in range(around)]
    after = [200 + i for i in range(around)]

    classes = repeated_classes(before + layer * times + after)

    assert len(set(classes.tolist())) == 2 * around + len(layer)
    body = classes[around : around + len(layer) * times].reshape(times, -1)
    assert (body == body[0]).all()


@given(st.lists(st.integers(0, 4), max_size=60))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_operators_of_a_class_have_one_signature(codes: list[int]) -> None:
    classes = repeated_classes(codes)

    for index, first in enumerate(classes.tolist()):
        assert codes[index] == codes[first]
        assert first <= index
        assert classes[first] == first


def test_the_shortest_period_is_found() -> None:
    classes = repeated_classes([1, 2, 3] * 8)

    assert len(set(classes.tolist())) == 3


def test_nothing_repeats() -> None:
    assert repeated_classes(list(range(20))).tolist() == list(range(20))
    assert repeated_classes([]).tolist() == []


def model_classes(layers: int, *, share: bool = True) -> tuple[int, int]:
    optimizer = optax.adamw(1e-3)

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            h = jax.nn.relu(x @ p["up"]) @ p["down"]
            x = x + h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        return jnp.mean(x**2)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    up, down = (
        jax.ShapeDtypeStruct((8, 16), "float32"),
        jax.ShapeDtypeStruct((16, 8), "float32"),
    )
    params = [{"up": up, "down": down}] * layers
    state = jax.eval_shape(optimizer.init, params)
    batch = jax.ShapeDtypeStruct((4, 8), "float32")
    graph = step_graph(trace(step, (params, state, batch)), share_repeated=share)
    return graph.num_classes, len(graph.operators)


def test_classes_do_not_grow_with_the_layers() -> None:
    few, _ = model_classes(6)
    many, operators = model_classes(12)

    assert few == many
    assert many < operators / 3


def test_sharing_can_be_turned_off() -> None:
    classes, operators = model_classes(4, share=False)

    assert classes == operators


@pytest.mark.parametrize("period", [50, 400])
def test_the_search_is_about_linear(period: int) -> None:
    """Eight times the operators may cost at most some thirty times the time."""
    layer = np.random.default_rng(0).integers(0, 40, period).tolist()

    def seconds(times: int) -> float:
        start = time.thread_time()
        repeated_classes(layer * times)
        return time.thread_time() - start

    short = min(seconds(8) for _ in range(3))
    assert seconds(64) < 30 * short + 0.05
