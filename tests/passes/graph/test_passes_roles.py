"""Roles of operators and inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.graph.roles import (
    InputRole,
    Role,
    input_roles,
    module_path,
    operator_roles,
)
from autopar_passes.program.trace import trace


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ("", ""),
        ("jvp(GPT)/Block_3/Dense_0", "GPT/Block_3/Dense_0"),
        ("transpose(jvp(GPT))/Block_3/Dense_0", "GPT/Block_3/Dense_0"),
        ("jit(step)/jvp(GPT/Block_0)/mlp", "step/GPT/Block_0/mlp"),
        ("vmap(transpose(jvp(a)))", "a"),
        ("checkpoint(Block)/jvp()", "Block"),
    ],
)
def test_module_path(stack: str, path: str) -> None:
    assert module_path(stack) == path


def test_operator_roles_follow_the_data() -> None:
    # A cast, the forward pass, the backward pass, a decay, the update, a metric.
    stacks = ["", "jvp(m)", "transpose(jvp(m))", "", "", ""]
    reads = [[], [0], [1], [], [2, 3], [0]]

    assert operator_roles(stacks, reads) == (
        Role.FORWARD,
        Role.FORWARD,
        Role.BACKWARD,
        Role.UPDATE,
        Role.UPDATE,
        Role.FORWARD,
    )


def test_input_roles() -> None:
    got = input_roles(
        num_inputs=4,
        carried=frozenset({0, 1, 3}),
        floating=[True, True, True, False],
        read_by=[[Role.FORWARD], [Role.UPDATE], [Role.FORWARD], [Role.FORWARD]],
        from_backward=[True, True, False, False],
    )

    assert got == (
        InputRole.PARAMETER,
        InputRole.OPTIMIZER_STATE,
        InputRole.BATCH,
        InputRole.OTHER,
    )


def roles_of(graph: OperatorGraph, kind: str) -> list[Role]:
    return [op.role for op in graph.operators if op.kind == kind]


def test_a_training_step() -> None:
    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)
        m = 0.9 * m + grad
        return w - 0.1 * m, m, value

    graph = step_graph(
        trace(step, (jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones((2, 4))))
    )

    assert roles_of(graph, "dot_general") == [Role.FORWARD, Role.BACKWARD]
    assert roles_of(graph, "sin") == [Role.FORWARD]
    assert set(roles_of(graph, "sub")) == {Role.UPDATE}
    assert [i.role for i in graph.inputs] == [
        InputRole.PARAMETER,
        InputRole.OPTIMIZER_STATE,
        InputRole.BATCH,
    ]


def test_gradients_in_a_scan_over_microbatches() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def one(total: jax.Array, part: jax.Array) -> Any:
            return total + jax.grad(lambda w: jnp.sum(jnp.sin(part @ w)))(w), None

        grad, _ = jax.lax.scan(one, jnp.zeros_like(w), x)
        return w - 0.1 * grad

    graph = step_graph(trace(step, (jnp.ones((4, 4)), jnp.ones((3, 2, 4)))))

    assert [i.role for i in graph.inputs] == [InputRole.PARAMETER, InputRole.BATCH]
    assert set(roles_of(graph, "sub")) == {Role.UPDATE}
