"""Tests roles of operators and inputs in whole steps, and their closure."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from property_tests import examples
from step_cases import NAMES, X, case, descent

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph, producers, readers
from autopar_passes.graph.roles import InputRole, Role, dependents, operator_roles
from autopar_passes.program.trace import trace

checked = settings(max_examples=examples(100), deadline=None, derandomize=True)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[str], list[list[int]]]:
    """Name stacks and operands of a random straight-line program."""
    count = draw(st.integers(1, 12))
    stacks = ["", "jvp(m)", "transpose(jvp(m))"]
    reads = [
        draw(st.lists(st.integers(0, k - 1), max_size=3, unique=True)) if k else []
        for k in range(count)
    ]
    return [draw(st.sampled_from(stacks)) for _ in range(count)], reads


def ancestors(reads: list[list[int]], k: int) -> set[int]:
    """All operators on which one operator depends, including itself."""
    found, left = {k}, [k]
    while left:
        new = set(reads[left.pop()]) - found
        found |= new
        left.extend(new)
    return found


@given(programs())
@checked
def test_dependents_are_those_with_a_marked_ancestor(
    program: tuple[list[str], list[list[int]]],
) -> None:
    stacks, reads = program
    marked = ["transpose" in s for s in stacks]

    got = dependents(marked, reads)

    assert got == [
        any(marked[j] for j in ancestors(reads, k)) for k in range(len(stacks))
    ]


@given(programs())
@checked
def test_roles_by_their_definition(
    program: tuple[list[str], list[list[int]]],
) -> None:
    stacks, reads = program
    roles = operator_roles(stacks, reads)
    late = dependents(["transpose" in s for s in stacks], reads)

    for k, (stack, role) in enumerate(zip(stacks, roles, strict=True)):
        assert (role is Role.BACKWARD) == ("transpose" in stack)
        if stack == "jvp(m)":
            assert role is Role.FORWARD
        if role is Role.FORWARD:
            assert not any(roles[j] is Role.UPDATE and late[j] for j in reads[k])
        if role is Role.UPDATE and not late[k]:
            assert any(
                k in reads[j] for j in range(len(roles)) if roles[j] is Role.UPDATE
            )


def test_a_loop_hands_dependence_on_through_its_carry() -> None:
    """A carry comes before the operators that make its next value."""
    reads: list[list[int]] = [[3], [0], [1], [2], [0]]

    assert dependents([False, False, True, False, False], reads) == [True] * 5


def roles_of(graph: OperatorGraph, kind: str) -> set[Role]:
    return {op.role for op in graph.operators if op.kind == kind}


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_step(name: str) -> None:
    """A step that differentiates has all parts; one that does not is forward."""
    found = {op.role for op in case(name).graph.operators}

    assert found == ({Role.FORWARD} if name == "while" else set(Role))


@pytest.mark.parametrize("name", ["mlp", "momentum", "remat", "custom"])
def test_products_are_forward_or_backward(name: str) -> None:
    assert roles_of(case(name).graph, "dot_general") == {Role.FORWARD, Role.BACKWARD}
    graph = case(name).graph
    made_by = producers(graph.operators)
    carried = [graph.outputs[g.output] for g in graph.inputs if g.output >= 0]
    assert {made_by[v].role for v in carried if v is not None} == {Role.UPDATE}


def test_roles_of_the_inputs_of_a_step_with_momentum() -> None:
    given_inputs = case("momentum").graph.inputs
    roles = {path.path.split("/")[0]: path.role for path in given_inputs}

    assert roles == {
        "params": InputRole.PARAMETER,
        "moments": InputRole.OPTIMIZER_STATE,
        "x": InputRole.BATCH,
    }


def test_two_steps_in_one_program() -> None:
    """The second forward pass reads what the first update made: it is no update."""

    def twice(params: Any, x: Any) -> Any:
        step = descent(lambda w, x: jnp.mean(x @ w))
        params, _ = step(params, x)
        return step(params, x)

    graph = step_graph(trace(twice, (jnp.ones((6, 6)), X)))
    first, second = [op for op in graph.operators if op.kind == "sub"]

    assert (first.role, second.role) == (Role.FORWARD, Role.UPDATE)


def test_a_metric_of_the_gradients_is_of_the_update() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        grads = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - grads, jnp.max(jnp.abs(grads)), jnp.max(jnp.abs(x))

    graph = step_graph(trace(step, (jnp.ones((6, 6)), X)))

    (first, second) = sorted(op.index for op in graph.operators if op.kind == "abs")
    roles = {graph.operators[k].role for k in (first, second)}
    assert roles == {Role.UPDATE, Role.FORWARD}


@pytest.mark.parametrize("name", NAMES)
def test_makers_and_readers(name: str) -> None:
    """Each value has one maker; its readers are the operators that name it."""
    graph = case(name).graph
    made_by, read_by = producers(graph.operators), readers(graph.operators)

    for value, op in made_by.items():
        assert value in op.outputs
    for value, found in read_by.items():
        assert value in made_by
        for op, slot in found:
            assert op.inputs[slot] == value
    count = sum(v is not None for op in graph.operators for v in op.inputs)
    assert sum(map(len, read_by.values())) == count
