"""Tests state in host memory: the rewritten program, and its steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar_passes.graph.build import build_graph
from autopar_passes.graph.operators import TO_DEVICES, TO_HOST
from autopar_passes.program.equations import Program, evaluate
from autopar_passes.program.flatten import flatten
from autopar_passes.program.offload import offload_state

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
ROW = jax.ShapeDtypeStruct((4,), jnp.float32)


def step(a: jax.Array, b: jax.Array, c: jax.Array, x: jax.Array) -> tuple[object, ...]:
    """A step with three arrays of state; the last one is returned unchanged."""
    new = 0.9 * a + x
    return new, b * new + jnp.sin(b), c, new.sum() + c.sum()


def program_of(function: object, count: int = 4) -> Program:
    return flatten(jax.make_jaxpr(function)(*[ROW] * count))  # type: ignore[arg-type]


def on_host(program: Program, atoms: tuple[object, ...]) -> list[bool]:
    return [isinstance(a, int) and program.values[a].on_host for a in atoms]


@given(st.sets(st.integers(0, 2)))
def test_values_stay_and_only_chosen_state_moves(moved: set[int]) -> None:
    program = program_of(step)
    made = offload_state(program, {k: k for k in sorted(moved)})
    rows = [np.arange(4, dtype=np.float32) + k for k in range(4)]
    for found, want in zip(
        evaluate(made, *rows), evaluate(program, *rows), strict=True
    ):
        np.testing.assert_array_equal(found, want)
    expected = [k in moved for k in range(4)]
    assert on_host(made, made.body.inputs) == expected
    assert on_host(made, made.body.outputs) == expected


def test_each_array_is_copied_once_a_way_and_unchanged_state_never() -> None:
    made = offload_state(program_of(step), {0: 0, 1: 1, 2: 2})
    copies = [e for e in made.body.equations if e.primitive == "device_put"]
    there = [made.values[e.outputs[0]].on_host for e in copies]
    # Each of the three is read; the third is returned without a copy.
    assert sorted(there) == [False, False, False, True, True]
    assert made.body.outputs[2] == made.body.inputs[2]


def test_a_step_that_moves_its_own_state_is_the_same_program() -> None:
    def own(a: jax.Array, x: jax.Array) -> jax.Array:
        return jax.device_put(0.9 * jax.device_put(a, DEVICE) + x, HOST)

    program = program_of(own, 2)
    assert on_host(program, program.body.inputs) == [True, False]
    assert on_host(program, program.body.outputs) == [True]
    graph = build_graph(program, input_paths=["a", "x"], carried={0: 0})
    kinds = [op.kind for op in graph.operators]
    assert kinds.count(TO_DEVICES) == kinds.count(TO_HOST) == 1


def test_an_argument_that_is_read_on_devices_too_lies_there() -> None:
    program = program_of(lambda a: (jax.device_put(a, DEVICE), a + 1), 1)
    assert on_host(program, program.body.inputs) == [False]


def layers(w: jax.Array, b: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """Two loops over the rows of ``w``, the second of which reads all of ``b``, too."""

    def layer(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return h * row + 1.0, row

    def back(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return h + row[0] * b[1], h * row

    h, rows = jax.lax.scan(layer, x, w)
    h, grads = jax.lax.scan(back, h, w, reverse=True)
    return w - grads, b + h, rows.sum() + h.sum()


@given(st.sets(st.integers(0, 1)))
def test_loops_copy_slices(moved: set[int]) -> None:
    shapes = [(3, 4), (2, 4), (4,)]
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    program = flatten(jax.make_jaxpr(layers)(*structs))
    made = offload_state(program, {k: k for k in sorted(moved)})
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(s).astype(np.float32) for s in shapes]
    for found, want in zip(
        evaluate(made, *arrays), evaluate(program, *arrays), strict=True
    ):
        np.testing.assert_array_equal(found, want)
    scans = [e for e in made.body.equations if e.primitive == "scan"]
    sliced = [e.inputs[-1] for e in scans]
    assert [0 in moved] * 2 == [made.values[v].on_host for v in sliced if v >= 0]
    inside = [
        made.values[one.outputs[0]].shape
        for e in scans
        for one in e.inner
        if one.primitive == "device_put"
    ]
    assert inside == ([(4,), (4,)] if 0 in moved else [])
    outside = [
        made.values[e.outputs[0]].shape
        for e in made.body.equations
        if e.primitive == "device_put" and not made.values[e.outputs[0]].on_host
    ]
    # The update reads both whole arrays, and the second loop reads ``b``.
    expected = ([(3, 4)] if 0 in moved else []) + ([(2, 4)] * 2 if 1 in moved else [])
    assert sorted(outside) == sorted(expected)


def test_an_array_is_copied_again_after_a_product() -> None:
    def twice(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        early = jnp.sin(w) + jnp.cos(w)
        y = early @ x
        return w - y @ x, y

    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    program = flatten(jax.make_jaxpr(twice)(square, square))
    made = offload_state(program, {0: 0})
    order = [e.primitive for e in made.body.equations]
    assert order.count("device_put") == 3  # two to devices, one back
    first = order.index("dot_general")
    assert "device_put" in order[:first]
    assert "device_put" in order[first:-1]
