"""Tests that a flat program gives bit-identical results to the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_cases import DEPTH, STEPS, WIDTH, X, random

from autopar_passes import jax_compat
from autopar_passes.program.equations import Program, Region, Scalar, walk
from autopar_passes.program.flatten import flatten
from autopar_passes.program.trace import trace


def evaluate(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a program equation by equation; control flow by its definition."""
    known: dict[int, Any] = {}

    def read(atom: Any) -> Any:
        return atom.value if isinstance(atom, Scalar) else known[atom]

    def run(region: Region, args: Sequence[Any]) -> list[Any]:
        known.update(zip(region.inputs, args, strict=True))
        for eqn in region.equations:
            operands = [read(a) for a in eqn.inputs]
            match eqn.primitive:
                case "scan":
                    out = scan(eqn, operands)
                case "while":
                    out = loop(eqn, operands)
                case "cond":
                    out = run(eqn.regions[int(operands[0])], operands[1:])
                case _:
                    out = jax_compat.bind(eqn.source, *operands)
            known.update(zip(eqn.outputs, out, strict=True))
        return [read(a) for a in region.outputs]

    def scan(eqn: Any, operands: list[Any]) -> list[Any]:
        consts, count = eqn.params["num_consts"], eqn.params["num_carry"]
        carry = operands[consts : consts + count]
        rows: list[list[Any]] = []
        order = range(eqn.params["length"])
        for k in reversed(order) if eqn.params["reverse"] else order:
            sliced = [x[k] for x in operands[consts + count :]]
            out = run(eqn.regions[0], (*operands[:consts], *carry, *sliced))
            carry = [jnp.asarray(x) for x in out[:count]]
            rows.append(out[count:])
        if eqn.params["reverse"]:
            rows.reverse()
        return carry + [jnp.stack(column) for column in zip(*rows, strict=True)]

    def loop(eqn: Any, operands: list[Any]) -> list[Any]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, body = eqn.regions
        carry = operands[n_cond + n_body :]
        while run(cond, (*operands[:n_cond], *carry))[0]:
            carry = run(body, (*operands[n_cond : n_cond + n_body], *carry))
        return carry

    return run(program.body, (*arguments, *program.constants))


def assert_equal_bits(got: Sequence[Any], want: Sequence[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert np.asarray(one).dtype == np.asarray(other).dtype


@pytest.mark.parametrize("name", ["remat", "custom", "scan", "while", "cond"])
def test_a_flat_step_has_equal_bits(name: str) -> None:
    """Both run operation by operation, so that nothing is fused differently."""
    step, args = STEPS[name]
    program = trace(step, args).program

    with jax.disable_jit():
        want = jax.tree.leaves(step(*args))

    assert_equal_bits(evaluate(program, jax.tree.leaves(args)), want)


def plain_scan(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, r: (jnp.sin(c + r), c * 2.0), x, w, reverse=True)


def nested_calls(w: jax.Array, x: jax.Array) -> Any:
    inner = jax.jit(lambda a: jax.jit(jnp.tanh)(a) + 1.0)
    return jax.checkpoint(inner)(w) @ inner(x)


def table_inside(w: jax.Array, x: jax.Array) -> Any:
    """A loop that reads an array which is a constant of the function."""
    table = jnp.arange(float(WIDTH))
    out, _ = jax.lax.scan(lambda c, r: (c + r * table, None), x, w)
    return out


def switch(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tanh], w) + x


def stopped(w: jax.Array, x: jax.Array) -> Any:
    return jax.grad(lambda w: jnp.sum(jax.lax.stop_gradient(w) * jnp.sin(w) * x))(w)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (plain_scan, ((DEPTH, WIDTH), (WIDTH,))),
        (nested_calls, ((WIDTH, WIDTH), (WIDTH, WIDTH))),
        (table_inside, ((DEPTH, WIDTH), (WIDTH,))),
        (switch, ((WIDTH,), (WIDTH,))),
        (stopped, ((WIDTH,), (WIDTH,))),
    ],
)
def test_a_flat_function_has_equal_bits(function: Any, shapes: Any) -> None:
    args = [random(k, *shape) for k, shape in enumerate(shapes)]
    program = flatten(jax.make_jaxpr(function)(*args))

    with jax.disable_jit():
        want = jax.tree.leaves(function(*args))

    assert_equal_bits(evaluate(program, args), want)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_numbers_are_their_own(name: str) -> None:
    """Values are made once, equations are numbered once, constants are inputs."""
    step, args = STEPS[name]
    program = trace(step, args).program
    equations = walk(program.body)

    indices = [eqn.index for eqn in equations]
    assert len(set(indices)) == len(indices)
    assert program.by_index() == {eqn.index: eqn for eqn in equations}
    made = [v for eqn in equations for v in eqn.outputs]
    made += [
        v for eqn in equations for region in eqn.regions for v in region.inputs
    ] + list(program.body.inputs)
    assert len(set(made)) == len(made)
    assert max(made) < len(program.values)
    assert program.num_arguments == len(jax.tree.leaves(args))


def test_the_types_of_values() -> None:
    program = flatten(
        jax.make_jaxpr(lambda x, i, k: (x, i, jax.random.key_data(k), x > 0))(
            X, jnp.int8(1), jax.random.key(0)
        )
    )
    x, i, key = (program.values[v] for v in program.body.inputs)

    assert (x.shape, x.size, x.nbytes) == (X.shape, X.size, 4 * X.size)
    assert (i.shape, i.size, i.nbytes) == ((), 1, 1)
    assert (key.shape, key.nbytes) == ((), 8)
    assert [v.floating for v in (x, i, key)] == [True, False, False]
