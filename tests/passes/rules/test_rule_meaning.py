"""Tests the meaning of sharding rules: separate shards make up the whole result.

Each equation runs on the shards of its operands, one factor at a time. If the factor is
parallel, the results are the shards of the whole result. If it is reduced, the results
are combined to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_cases import random

from autopar_passes import jax_compat
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import Operator
from autopar_passes.program.equations import Equation, Scalar
from autopar_passes.program.trace import trace
from autopar_passes.rules.factor_rule import INNER, Dims, FactorKind

COMBINE: dict[str, Callable[[list[Any]], Any]] = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "max": lambda parts: np.max(np.stack(parts), axis=0),
    "min": lambda parts: np.min(np.stack(parts), axis=0),
    "and": lambda parts: np.all(np.stack(parts), axis=0),
    "or": lambda parts: np.any(np.stack(parts), axis=0),
}
# Their parameters hold the shape of the result.
SHAPED = ("shape", "new_sizes", "limit_indices", "start_indices", "sizes")

A, B = random(0, 4, 6), random(1, 6, 2)
CUBE, IDS = random(2, 2, 4, 6), jnp.array([3, 0, 2, 1])
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lambda x, y: x + y, (A, A)),
    "scaled": (lambda x: x * 2.0, (A,)),
    "exp": (jnp.exp, (A,)),
    "compare": (lambda x, y: x < y, (A, A * 2.0)),
    "select": (lambda p, x, y: jax.lax.select(p, x, y), (A > 0, A, -A)),
    "clamp": (lambda x: jax.lax.clamp(-0.1, x, 0.1), (A,)),
    "convert": (lambda x: x.astype(jnp.bfloat16), (A,)),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), (CUBE,)),
    "matmul": (lambda x, y: x @ y, (A, B)),
    "outer": (lambda x, y: jnp.einsum("ab,cd->abcd", x, y), (A, B)),
    "batched": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (CUBE, CUBE)),
    "two contracted": (lambda x, y: jnp.einsum("bij,bij->", x, y), (CUBE, CUBE)),
    "sum": (lambda x: jnp.sum(x, axis=1), (CUBE,)),
    "max": (lambda x: jnp.max(x, axis=(0, 2)), (CUBE,)),
    "min": (lambda x: jnp.min(x, axis=0), (CUBE,)),
    "all": (lambda x: jnp.all(x, axis=1), (A > 0,)),
    "any": (lambda x: jnp.any(x, axis=0), (A > 0,)),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), (A,)),
    "sort": (lambda x: jax.lax.sort(x, dimension=0), (A,)),
    "argmax": (lambda x: jnp.argmax(x, axis=1), (A,)),
    "reverse": (lambda x: jax.lax.rev(x, (1,)), (CUBE,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], axis=1), (A, A)),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), (A,)),
    "take": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), (A, IDS)),
    "scatter": (lambda x, i, u: x.at[i].add(u), (A, IDS, A)),
    "barrier": (lambda x: jax.lax.optimization_barrier(x), (A,)),
    "top_k": (lambda x: jax.lax.top_k(x, 2)[0], (A,)),
    "erf_inv": (lambda x: jax.lax.erf_inv(x), (jnp.tanh(A),)),
}


Applied = tuple[Equation, Operator, list[Any], list[Any]]


@functools.cache
def equations(name: str) -> tuple[Applied, ...]:
    """Each equation of a case, with its operator, operands and results."""
    return tuple(applied(name))


def applied(name: str) -> Iterator[Applied]:
    step, args = CASES[name]
    traced = trace(step, args)
    body = traced.program.body
    graph = step_graph(traced)
    of_equation = {op.equation: op for op in graph.operators}
    known = dict(zip(body.inputs, (*args, *traced.program.constants), strict=True))
    for eqn in body.equations:
        operands = [a.value if isinstance(a, Scalar) else known[a] for a in eqn.inputs]
        results = jax_compat.bind(eqn.source, *operands)
        known.update(zip(eqn.outputs, results, strict=True))
        yield eqn, of_equation[eqn.index], operands, results


def shard(array: Any, dims: Dims, sizes: tuple[int, ...], factor: int, k: int) -> Any:
    """The k-th of two shards of an array along a factor, cut by index."""
    array = np.asarray(array)
    for position, dim in enumerate(dims):
        if factor not in dim:
            continue
        shape = [sizes[f] for f in dim]
        number = np.unravel_index(np.arange(math.prod(shape)), shape)
        half = sizes[factor] // 2
        mine = number[dim.index(factor)] // half == k
        array = np.take(array, np.flatnonzero(mine), axis=position)
    return array


def splits_cleanly(eqn: Equation, op: Operator, factor: int) -> bool:
    """Whether the equation has the same meaning on shards, without other parameters."""
    if not any(factor in op.rule.factors_of(dims) for dims in op.rule.operands):
        return False  # made out of nothing, or whole on each device
    if op.rule.sizes[factor] % 2 or op.rule.reduction == INNER:
        return False
    if any(name in eqn.params for name in SHAPED):
        return False
    # Numbers of rows are numbers in the whole table.
    return eqn.primitive not in ("gather", "scatter-add")


@pytest.mark.parametrize("name", sorted(CASES))
def test_shards_make_up_the_result(name: str) -> None:
    for eqn, op, operands, results in equations(name):
        rule = op.rule
        for factor, kind in enumerate(rule.kinds):
            if kind is FactorKind.BLOCKED or not splits_cleanly(eqn, op, factor):
                continue
            made = [
                jax_compat.bind(
                    eqn.source,
                    *(
                        jnp.asarray(shard(x, dims, rule.sizes, factor, k))
                        for x, dims in zip(operands, rule.operands, strict=True)
                    ),
                )
                for k in range(2)
            ]
            for slot, (whole, dims) in enumerate(
                zip(results, rule.results, strict=True)
            ):
                parts = [np.asarray(m[slot]) for m in made]
                if kind is FactorKind.REDUCE:
                    together = COMBINE[rule.reduction](parts)
                    np.testing.assert_allclose(together, whole, rtol=1e-5, atol=1e-6)
                    continue
                for k, part in enumerate(parts):
                    want = shard(whole, dims, rule.sizes, factor, k)
                    np.testing.assert_allclose(part, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "primitive", "kinds"),
    [
        ("matmul", "dot_general", {"parallel": 2, "reduced": 1}),
        ("batched", "dot_general", {"parallel": 3, "reduced": 1}),
        ("two contracted", "dot_general", {"reduced": 3}),
        ("outer", "dot_general", {"parallel": 4}),
        ("max", "reduce_max", {"parallel": 1, "reduced": 2}),
        ("cumsum", "cumsum", {"parallel": 1, "must be replicated": 1}),
        ("sort", "sort", {"parallel": 1, "must be replicated": 1}),
        ("concatenate", "concatenate", {"parallel": 1, "must be replicated": 1}),
        ("argmax", "argmax", {"parallel": 1, "must be replicated": 1}),
        ("top_k", "top_k", {"parallel": 1, "must be replicated": 2}),
        ("barrier", "optimization_barrier", {"parallel": 2}),
    ],
)
def test_kinds_of_factors(name: str, primitive: str, kinds: dict[str, int]) -> None:
    (rule,) = [op.rule for e, op, _, _ in equations(name) if e.primitive == primitive]
    got: dict[str, int] = {}
    for size, kind in zip(rule.sizes, rule.kinds, strict=True):
        word = kind.value.split(":")[0]
        got[word] = got.get(word, 0) + (size > 1)

    if name in ("concatenate", "top_k"):  # a factor for each array
        assert set(got) == set(kinds)
    else:
        assert got == kinds


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_dimension_is_its_factors(name: str) -> None:
    for _, op, operands, results in equations(name):
        pairs = [
            *zip(operands, op.rule.operands, strict=True),
            *zip(results, op.rule.results, strict=True),
        ]
        for array, dims in pairs:
            sizes = tuple(math.prod(op.rule.sizes[f] for f in dim) for dim in dims)
            assert sizes == np.shape(array)


@pytest.mark.parametrize(("mode", "reduction"), [("clip", "sum"), ("fill", INNER)])
def test_a_row_of_a_split_table_is_on_one_device(mode: str, reduction: str) -> None:
    traced = trace(lambda x, i: jnp.take(x, i, axis=0, mode=mode), (A, IDS))
    (op,) = [op for op in step_graph(traced).operators if op.kind == "gather"]
    (rows,), _ = op.rule.operands[0]

    assert op.rule.kinds[rows] is FactorKind.REDUCE
    assert op.rule.reduction == reduction


def test_equations_that_differ_in_their_values_share_a_rule() -> None:
    traced = trace(lambda x, y: jnp.sin(x) + jnp.sin(y), (A, A))
    first, second = [op for op in step_graph(traced).operators if op.kind == "sin"]

    assert first.rule is second.rule
