"""Tests of `autopar.planner.stages.layer_map`."""

from __future__ import annotations

import re

import numpy as np
from layer_cases import BLOCKS, layers_of

from autopar_passes.graph.roles import InputRole, Role


def test_equal_blocks_are_stood_for_by_one() -> None:
    """The first and the last differ: no gradient goes on, and the loss follows."""
    found = layers_of("mlp")
    assert found.count == BLOCKS
    assert found.examples == (0, 2, BLOCKS - 1)
    assert list(found.kept) == [0, *[2] * (BLOCKS - 2), BLOCKS - 1]


def test_rows_of_examples_become_rows_of_all() -> None:
    found = layers_of("mlp")
    rows = np.arange(len(found.examples))
    assert list(found.spread(rows)) == [0, *[1] * (BLOCKS - 2), 2]


def test_state_and_its_update_are_in_the_layer_that_reads_it() -> None:
    """Each weight, its moments and its update belong to the block that uses it."""
    found = layers_of("mlp")
    graph = found.analysis.graph
    place = {
        v: int(found.layer[op.index]) for op in graph.operators for v in op.outputs
    }
    state = [i for i in graph.inputs if i.role is not InputRole.BATCH and i.output >= 0]
    numbers = {i.value: re.search(r"/(\d)/(?:up|down)$", i.path) for i in state}
    blocks = {v: int(found[1]) for v, found in numbers.items() if found}
    assert len(blocks) == 6 * BLOCKS
    for given in state:
        if given.value in blocks:
            assert place[given.value] == blocks[given.value]
            made = graph.outputs[given.output]
            assert made is not None
            assert place[made] == blocks[given.value]


def test_only_gradients_that_others_wait_for_are_of_inputs() -> None:
    """The first layer sends nothing back; others send what their input gets."""
    found = layers_of("mlp")
    columns: dict[int, set[int]] = {}
    for op in found.analysis.graph.operators:
        if op.role is Role.BACKWARD and op.kind == "dot_general":
            columns.setdefault(int(found.layer[op.index]), set()).add(
                found.column(op.index)
            )
    assert columns == {0: {2}} | {k: {1, 2} for k in range(1, BLOCKS)}


def test_a_cast_that_several_layers_read_counts_in_the_first() -> None:
    found = layers_of("tied")
    graph = found.analysis.graph
    casts = [
        op
        for op in graph.operators
        if op.kind == "convert_element_type"
        and graph.values[op.outputs[0]].shape[:1] == (512,)
        and op.role is Role.FORWARD
    ]
    assert [int(found.layer[op.index]) for op in casts] == [0] * len(casts) != []


def test_what_only_the_next_layer_reads_is_not_computed_again() -> None:
    """The product up and its tanh are; the product down is not."""
    found = layers_of("mlp")
    again = [
        op.kind
        for op in found.analysis.graph.operators
        if int(found.layer[op.index]) == 2
        and op.role is Role.FORWARD
        and found.again(op.index)
    ]
    assert again.count("dot_general") == 1
    assert again.count("tanh") == 1
    forward = [
        op.kind
        for op in found.analysis.graph.operators
        if int(found.layer[op.index]) == 2 and op.role is Role.FORWARD
    ]
    assert forward.count("dot_general") == 2
