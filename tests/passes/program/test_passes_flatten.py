"""Tests that calls are inlined, and that control flow keeps its regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar_passes.program.equations import Program, Scalar, walk
from autopar_passes.program.flatten import flatten


def flat(step: Callable[..., Any], *args: Any) -> Program:
    return flatten(jax.make_jaxpr(step)(*args))


def primitives(program: Program) -> list[str]:
    return [e.primitive for e in walk(program.body)]


def check_numbering(program: Program) -> None:
    """Checks that every value is defined once, and before it is read."""

    def visit(region: Any, known: set[int]) -> None:
        own = known | set(region.inputs)
        for eqn in region.equations:
            assert own.issuperset(a for a in eqn.inputs if isinstance(a, int))
            for inner in eqn.regions:
                visit(inner, set())  # regions read only what is handed in
            assert own.isdisjoint(eqn.outputs)
            own |= set(eqn.outputs)
        assert own.issuperset(a for a in region.outputs if isinstance(a, int))

    visit(program.body, set())


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return x * 2.0


doubled.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * 3.0,))


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(jax.jit(f)),
        lambda f: lambda x: doubled(f(x)) / 2.0,
        lambda f: lambda x: jax.nn.relu(f(x)) + jnp.minimum(f(x), 0.0),
    ],
)
def test_calls_are_inlined(wrap: Any) -> None:
    program = flat(wrap(jnp.sin), jnp.ones(3))

    check_numbering(program)
    calls = {
        "jit",
        "pjit",
        "checkpoint",
        "remat2",
        "custom_vjp_call",
        "custom_jvp_call",
    }
    assert calls.isdisjoint(primitives(program))
    assert "sin" in primitives(program)


def test_what_nobody_reads_is_dropped() -> None:
    def step(x: jax.Array) -> jax.Array:
        del_me = jnp.exp(x) @ jnp.ones((3, 3))
        del del_me
        return x + 1.0

    assert primitives(flat(step, jnp.ones(3))) == ["add"]


def test_effects_are_kept() -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return x + 1.0

    assert "debug_callback" in primitives(flat(step, jnp.ones(3)))


def test_constants_become_inputs() -> None:
    table = np.arange(6.0, dtype=np.float32)

    program = flat(lambda x: x + jnp.asarray(table), jnp.ones(6))

    assert program.num_arguments == 1
    assert len(program.constants) == len(program.body.inputs) - 1


def test_scalars_stay_in_place() -> None:
    (eqn,) = flat(lambda x: x * 2.0, jnp.ones(3)).body.equations

    assert [type(a) for a in eqn.inputs] == [int, Scalar]


def test_control_flow_keeps_its_regions() -> None:
    def step(x: jax.Array, n: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)
        x = jax.lax.while_loop(lambda c: c.sum() < n, jnp.cos, x)
        return jax.lax.cond(n > 0, jnp.tanh, lambda x: x, x)

    program = flat(step, jnp.ones(3), jnp.float32(1.0))

    check_numbering(program)
    regions = {e.primitive: len(e.regions) for e in program.body.equations if e.regions}
    assert regions == {"scan": 1, "while": 2, "cond": 2}


def test_a_checkpoint_keeps_its_barrier_in_the_backward_pass() -> None:
    """Without it the compiler would merge the recomputation with the forward pass."""

    def loss(x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum()

    program = flat(jax.grad(loss), jnp.ones(3))

    assert "optimization_barrier" in primitives(program)


def test_a_linear_solve_is_its_solve() -> None:
    matrix = jnp.eye(4) * 2.0

    program = flat(lambda b: jnp.linalg.solve(matrix, b), jnp.ones((4, 2)))

    check_numbering(program)
    assert "custom_linear_solve" not in primitives(program)
    assert "triangular_solve" in primitives(program)


def test_shardings_that_the_user_states_are_left_to_the_plan() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, spec) + 1.0

    assert primitives(flat(step, jnp.ones(4))) == ["add"]
