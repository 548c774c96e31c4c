"""Tests the gradients for which an update waits against a search from each operator."""

from __future__ import annotations

import optax
import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar.steps.analysis import Analysis, analyse
from autopar.steps.lifetimes import replacing
from autopar_passes.graph.operators import OperatorGraph, readers
from autopar_passes.graph.roles import Role


def analysed(optimizer: optax.GradientTransformation) -> Analysis:
    params = mlp_params(width=8, hidden=16, layers=2)
    return analyse(*training(mlp_loss, params, mlp_batch(8, 8), optimizer))


def bits_of(graph: OperatorGraph) -> dict[int, int]:
    """A bit for each gradient that the update reads, in program order."""
    read = readers(graph.operators)
    found = [
        value
        for op in graph.operators
        if op.role is Role.BACKWARD
        for value in op.outputs
        if any(
            r.role is Role.UPDATE and r.kind != "return" for r, _ in read.get(value, [])
        )
    ]
    return {value: 1 << k for k, value in enumerate(found)}


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))


@pytest.mark.parametrize("optimizer", [optax.sgd(1e-2), CLIPPED])
def test_gradients_made_of_what_an_operator_makes(
    optimizer: optax.GradientTransformation,
) -> None:
    graph = analysed(optimizer).graph
    found = replacing(graph)
    read = readers(graph.operators)
    bits = bits_of(graph)

    for op in graph.operators:
        seen: set[int] = set()
        left = list(op.outputs)
        while left:
            value = left.pop()
            if value not in seen:
                seen.add(value)
                after = (r for r, _ in read.get(value, []) if r.role is not Role.UPDATE)
                left.extend(v for r in after for v in r.outputs)
        assert found.made_of[op.index] == sum(bits.get(v, 0) for v in seen)


def test_an_update_waits_for_its_own_gradient() -> None:
    graph = analysed(optax.sgd(1e-2)).graph
    found = replacing(graph)
    states = [i for i in graph.inputs if i.output >= 0 and i.value in found.waits_for]

    weights = [i for i in states if len(graph.values[i.value].shape) == 2]
    assert len(weights) == 4
    assert all(found.waits_for[i.value].bit_count() == 1 for i in weights)


def test_a_norm_makes_updates_wait_for_all_gradients() -> None:
    graph = analysed(CLIPPED).graph
    found = replacing(graph)
    every = sum(bits_of(graph).values())

    weights = [i for i in graph.inputs if len(graph.values[i.value].shape) == 2]
    waits = [found.waits_for[i.value] for i in weights if i.output >= 0]
    assert waits
    assert all(w == every for w in waits)
