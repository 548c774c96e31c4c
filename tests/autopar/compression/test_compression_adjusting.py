"""Tests that codecs with inputs give the results of constants, within their room."""

import dataclasses
import doctest
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_mesh import FED_BACK, WORKERS, begin, normal, program, run

from autopar.compression import adjusting
from autopar.compression.adjusting import (
    Adjustable,
    Adjusted,
    family_of,
    fits,
    limit_of,
    room_for,
    set_amounts,
)
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.gradient import Gradient

SHAPES = ((64, 40), (100, 32))
# Codecs of a bucket, before and after a change; of rows the largest error of totals.
BUCKETS = {
    "topk": (["topk:ratio=0.01", "topk:ratio=0.1"], 0.0),
    "topk f32": (["topk:ratio=0.2,values=f32"] * 2, 0.0),
    "threshold": (["threshold:ratio=0.02,every=2", "threshold"], 0.0),
    "exact": (["threshold:ratio=0.05,exact=true"] * 2, 0.0),
    "powersgd": (["powersgd:rank=3", "powersgd:rank=5"], 1e-4),
}


def gradients_of(texts, scatter=False):
    return tuple(
        Gradient(f"g{k}", shape, parse_codec(text), FED_BACK, 0 if scatter else None, k)
        for k, (shape, text) in enumerate(zip(SHAPES, texts, strict=False))
    )


def adjusted(gradients):
    """The same gradients with inputs, and with the limit and room that they need."""
    limit = limit_of([g.codec for g in gradients])
    room = room_for([described(g) for g in gradients], limit)
    codec = Adjustable(limit, room)
    return tuple(dataclasses.replace(g, codec=codec) for g in gradients)


def described(gradient):
    return Adjusted(gradient.codec, gradient.shape, WORKERS, gradient.scatter)


def with_amounts(states, gradients):
    """The states of all workers, with the amounts of some gradients."""
    out = []
    for state, g in zip(states, gradients, strict=True):
        amounts = g.codec.amounts(g.shape, WORKERS, scatter=g.scatter)
        now = {k: np.full(WORKERS, v, np.int32) for k, v in amounts.items()}
        out.append({**state, "codec": set_amounts(state["codec"], now)})
    return out


def test_examples():
    assert doctest.testmod(adjusting).failed == 0


@pytest.mark.parametrize(
    ("name", "scatter"),
    [
        ("topk", False),
        ("topk f32", True),
        ("threshold", True),
        ("exact", False),
        ("powersgd", False),
    ],
)
def test_it_makes_what_constants_make(name, scatter):
    texts, tolerance = BUCKETS[name]
    constants = gradients_of(texts, scatter)
    inputs = adjusted(constants)
    states, others = None, with_amounts(begin(inputs), constants)
    for step in range(4):
        partials = [normal(WORKERS, *shape, seed=step) for shape in SHAPES]
        totals, states, sums = run(constants, partials, states, step)
        found, others, seen = run(inputs, partials, others, step)
        for a, b in zip(totals, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
        np.testing.assert_allclose(sums, seen, rtol=1e-4)


def test_a_threshold_of_a_sample():
    """Of so many elements a refresh looks at some."""
    (constant,) = gradients_of(["threshold:ratio=0.02"])
    constant = dataclasses.replace(constant, shape=(512, 300))
    inputs = adjusted([constant])
    partials = [normal(WORKERS, *constant.shape)]
    expected, _, _ = run([constant], partials)
    found, _, _ = run(inputs, partials, with_amounts(begin(inputs), [constant]))
    np.testing.assert_array_equal(expected[0], found[0])


def test_other_amounts_compile_nothing():
    """And a larger amount makes room where a smaller one leaves it."""
    before = gradients_of(["topk:ratio=0.02", "topk:ratio=0.2"])
    after = gradients_of(["topk:ratio=0.2", "topk:ratio=0.03"])
    inputs = adjusted(before)
    assert fits([described(g) for g in after], inputs[0].codec.codec, 1.0)
    states = with_amounts(begin(inputs), before)
    partials = [normal(WORKERS, *shape) for shape in SHAPES]
    run(inputs, partials, states)
    compiled = program(inputs)._cache_size()

    found, _, _ = run(inputs, partials, with_amounts(states, after))

    assert program(inputs)._cache_size() == compiled
    for a, b in zip(run(after, partials)[0], found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_basis_starts_anew_where_the_rank_changes():
    (low,) = gradients_of(["powersgd:rank=2"])
    (high,) = gradients_of(["powersgd:rank=3"])
    inputs = adjusted([high])
    partials = [normal(WORKERS, *low.shape)]
    _, states, _ = run(inputs, partials, with_amounts(begin(inputs), [low]))
    found, _, _ = run(inputs, partials, with_amounts(states, [high]), step=1)

    states = [{"residual": states[0]["residual"], "codec": begin([high])[0]["codec"]}]
    expected, _, _ = run([high], partials, states, step=1)
    np.testing.assert_allclose(expected[0], found[0], atol=1e-4)


@pytest.mark.parametrize("name", ["topk", "exact", "powersgd"])
def test_bytes_are_those_of_the_compiled_program(name):
    """Beside gradients whose codecs have constants."""
    constants = gradients_of(BUCKETS[name][0])
    inputs = (*adjusted(constants), Gradient("d", (8, 8), parse_codec("topk"), seed=7))
    partials = [jax.ShapeDtypeStruct((WORKERS, *g.shape), jnp.float32) for g in inputs]
    states = jax.eval_shape(lambda: begin(inputs))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    text = program(inputs).lower(partials, states, step).compile().as_text()
    sent = 0.0
    for result, kind in re.findall(r"= (\S+) (all-gather|all-reduce)\(", text):
        dtype, dims = re.findall(r"(\w+)\[([\d,]*)\]", result)[0]
        size = math.prod(map(int, dims.split(","))) * {"u8": 1, "f32": 4}[dtype]
        part = (WORKERS - 1) / WORKERS * (2 if kind == "all-reduce" else 1)
        sent += part * size
    assert sent == sum(g.codec.wire_bytes(g.shape, WORKERS) for g in inputs)


def test_rooms_hold_what_they_must_and_little_more():
    random = np.random.default_rng(0)
    least = {"topk": 0.002, "threshold": 0.002}
    for _ in range(8):
        name = random.choice(["topk", "threshold", "powersgd"])
        count = int(random.integers(1, 5))
        if name == "powersgd":
            texts = [f"powersgd:rank={r}" for r in random.integers(1, 33, count)]
        else:
            ratios = np.exp(random.uniform(np.log(least[name]), 0, count))
            texts = [f"{name}:ratio={ratio:.5f}" for ratio in ratios]
        shapes = random.integers(64, 200, (count, 2))
        group = [
            Adjusted(parse_codec(t), tuple(map(int, s)), WORKERS, False)
            for t, s in zip(texts, shapes, strict=True)
        ]
        limit = limit_of([g.codec for g in group])
        room = room_for(group, limit)
        assert fits(group, limit, room)
        smaller = room * 2**-0.5
        assert not fits(group, limit, smaller) or smaller < 2**-16
        exact = sum(g.codec.wire_bytes(g.shape, WORKERS) for g in group)
        codec = Adjustable(limit, room)
        there = sum(codec.wire_bytes(g.shape, WORKERS) for g in group)
        # Each message is rounded up; of the two of powersgd one decides for both.
        most = 1.6 if name == "powersgd" else 1.415
        assert exact <= there <= most * exact + 24 * WORKERS * count


def test_families():
    family = family_of(parse_codec("threshold:ratio=0.1,every=7,exact=true"))
    assert family == family_of(parse_codec("threshold:exact=true"))
    assert family != family_of(parse_codec("threshold"))
    assert family_of(parse_codec("powersgd:rank=2,values=bf16")) is None
    assert family_of(parse_codec("int8")) is None
