"""Tests predicted memory against the compiler, and against sums by hand."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planner_harness as harness
import pytest
import step_forms as forms
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from planner_steps import mlp_batch, mlp_loss, mlp_params, training
from property_tests import examples

import autopar
from autopar.cluster import DeviceSpec
from autopar.cost.buffers import buffers
from autopar.cost.live import (
    LOST,
    OVERHEAD,
    SUMS,
    WORK_SPACE,
    Live,
    habits_of,
    live,
    on_chip,
)
from autopar.cost.local import BUFFER_KINDS, local_bytes
from autopar.layouts.assignment import Assignment
from autopar.steps.analysis import analyse
from autopar.steps.lifetimes import PLAIN
from autopar_passes.graph.roles import Role

CLUSTER = forms.cheap("2x4:cpu")
HABITS = {
    "cpu": habits_of(CLUSTER.device),
    "gpu": habits_of(autopar.Cluster.parse("8:h100").device),
    "tpu": habits_of(autopar.Cluster.parse("8:v5e").device),
}
LOWEST, HIGHEST = -0.15, 0.40


def chain(layers: int, rows: int) -> Any:
    params = mlp_params(width=64, hidden=256, layers=layers)
    return training(mlp_loss, params, mlp_batch(rows, 64), optax.adam(1e-3))


def remat_chain() -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = jax.checkpoint(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"])(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    params = mlp_params(width=64, hidden=256, layers=3)
    return training(loss, params, mlp_batch(512, 64), optax.sgd(1e-2))


CASES = {
    "state": lambda: chain(layers=3, rows=64),
    "activations": lambda: chain(layers=2, rows=2048),
    "remat": remat_chain,
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_peak_is_near_the_compilers(name: str) -> None:
    step, args = CASES[name]()
    run = autopar.parallelize(step, cluster=forms.cheap("8:cpu"), seconds=5)
    found = run.lower(*args).compile().memory_analysis()
    assert found is not None
    actual = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )
    error = run.plan.predicted.peak_memory_bytes / actual - 1
    assert LOWEST <= error <= HIGHEST


@pytest.mark.parametrize("kind", sorted(HABITS))
def test_parts_of_a_step_follow_its_own_order(kind: str) -> None:
    """Nothing is made early for a program that runs later; 1.2 stands for the rest."""
    whole = prepared().analysis
    parts = dataclasses.replace(whole, programs={0: 0})
    life = parts.life(HABITS[kind])

    if kind == "cpu":
        assert life.time == whole.life().time
        assert not life.early
        assert (
            life.factor * CLUSTER.device.corrections.memory_overhead
            == pytest.approx(1.2)
        )
    else:
        assert life.time == whole.life(HABITS[kind]).time
        assert life.factor == 1


def prepared() -> harness.Case:
    return harness.prepare(*training(mlp_loss, mlp_params(), mlp_batch()))


def test_inputs_are_counted_in_their_shards() -> None:
    """The bytes that each device really gets."""
    case = prepared()
    plan = harness.random_plan(case, (2, 4), random.Random(5))
    expected = 0.0
    for one in case.graph.inputs:
        value = case.graph.values[one.value]
        layout = plan.home_layout(one.value)
        parts = harness.product((2, 4)[a] for d in layout for a in d)
        expected += value.nbytes / parts
    found = live(plan, CLUSTER.device).held_bytes()
    assert sum(found.values()) == pytest.approx(expected)


ARRAY = st.tuples(
    st.integers(1, 50),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 2),
    st.sampled_from(["results", "temporaries", "activations"]),
)
STATE = st.tuples(st.integers(1, 50), st.booleans(), st.booleans())


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(STATE, max_size=4),
    st.lists(ARRAY, max_size=9),
    st.sampled_from([0.0, 60.0]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([1, 2]),
    st.sampled_from([80.0, 1e9]),
)
def test_the_peak_is_the_most_that_is_there(
    state: list[tuple[int, bool, bool]],
    arrays: list[tuple[int, int, int, int, str]],
    room: float,
    rows: float,
    count: int,
    limit: float,
) -> None:
    """As sums over all arrays at every time, whatever the batch and microbatches.

    Over a limit, arrays of three times and more are there at their ends alone.
    """
    ends = [(x[1], min(19, x[1] + x[2])) for x in arrays]
    long = [k for k, (first, last) in enumerate(ends) if last - first > 1]
    kinds = ["optimizer state" if not sums else SUMS for _, _, sums in state]
    found = Live(
        values=np.zeros(len(state) + len(arrays), dtype=int),
        nbytes=np.array([float(x[0]) for x in (*state, *arrays)]),
        first=np.array([0] * len(state) + [x[1] for x in arrays], dtype=int),
        last=np.array([19] * len(state) + [min(19, x[1] + x[2]) for x in arrays], int),
        degrees=np.array([*(int(x[1]) for x in state), *(x[3] for x in arrays)], int),
        kinds=(*kinds, *(x[4] for x in arrays)),
        held=len(state),
        length=20,
        factor=1.25,
        workspace_bytes=7.0,
        on_chip_bytes=room,
        rest_part=0.95,
        gaps=np.array([(len(state) + k, *ends[k]) for k in long], int).reshape(-1, 3),
        room_bytes=limit,
        placed=False,
    )
    fixed = 0.0
    for nbytes, batch, sums in state:
        if not sums or count > 1:
            fixed += nbytes * (rows if batch else 1.0)
    sizes = [n * (rows / count) ** degree for n, _, _, degree, _ in arrays]
    spans = [range(s, min(19, s + n) + 1) for _, s, n, _, _ in arrays]
    inside = [k for k, x in enumerate(arrays) if x[4] != "results"]
    chip = on_chip(
        np.array([spans[k][0] for k in inside], dtype=int),
        np.array([spans[k][-1] for k in inside], dtype=int),
        np.array([sizes[k] for k in inside]),
        room,
    )
    held = {k for k, on in zip(inside, chip, strict=True) if on}

    def there(k: int, t: int, *, least: bool) -> bool:
        gone = least and k in long and ends[k][0] < t < ends[k][1]
        return t in spans[k] and k not in held and not gone

    def usage(t: int, *, least: bool) -> float:
        live = (b for k, b in enumerate(sizes) if there(k, t, least=least))
        return 7.0 + 1.25 * sum(live)

    whole = [usage(t, least=False) for t in range(20)]
    left = limit - 0.95 * fixed
    if max(whole) > left:
        whole = [max(min(x, left), usage(t, least=True)) for t, x in enumerate(whole)]
    by_time = [fixed + x for x in whole]

    np.testing.assert_allclose(found.timeline(rows, count), by_time)
    assert found.peak_bytes(rows, count) == pytest.approx(max(by_time))
    if rows == 1.0 and count == 1:
        total = sum(found.held_bytes().values()) + sum(found.at_peak().values())
        assert total == pytest.approx(max(by_time))


def test_a_resharded_form_takes_part_in_the_peak() -> None:
    """Gathered parameters are whole for a while, however they are stored."""
    case = prepared()
    sharded = [
        harness.random_plan(case, (8,), random.Random(s), density=1.0) for s in range(8)
    ]
    for plan in sharded:
        found = live(plan, CLUSTER.device)
        assert "gathered copies" in found.kinds
        assert found.peak_bytes() > sum(found.held_bytes().values())


def softmax_loss(params: Any, batch: Any) -> jax.Array:
    """A loss with scores that pass through an exponential and a hyperbolic tangent."""
    scores = batch["x"] @ params["a"]
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.mean((weights @ params["b"] - batch["y"]) ** 2)


def tanh_loss(params: Any, batch: Any) -> jax.Array:
    y = jnp.tanh(batch["x"] @ params["a"]) ** 2
    return jnp.mean((y @ params["b"] - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "dtype", "kind", "again"),
    [
        (softmax_loss, "float32", "exp", True),
        (tanh_loss, "float32", "tanh", True),
        (tanh_loss, "bfloat16", "tanh", False),
    ],
)
def test_gpus_make_cheap_results_again(
    loss: Any, dtype: str, kind: str, again: bool
) -> None:
    """An exponential is taken again; what takes many cycles is kept."""
    params = {"a": jnp.ones((64, 256), dtype), "b": jnp.ones((256, 64), dtype)}
    batch = {k: x.astype(dtype) for k, x in mlp_batch(512, 64).items()}
    case = harness.prepare(*training(loss, params, batch, optax.sgd(0.1)))
    (made,) = (op for op in case.graph.operators if op.kind == kind)

    plain = case.analysis.life(HABITS["cpu"]).written
    written = case.analysis.life(HABITS["gpu"]).written

    assert made.outputs[0] in plain
    assert (made.outputs[0] not in written) is again


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(softmax_loss, "exp"), (softmax_loss, "div"), (tanh_loss, "tanh")],
)
def test_tpus_make_what_their_products_read(loss: Any, kind: str) -> None:
    """Products take element-wise results as operands, whatever these cost."""
    params = {"a": jnp.ones((64, 256)), "b": jnp.ones((256, 64))}
    case = harness.prepare(*training(loss, params, mlp_batch(512, 64), optax.sgd(0.1)))
    (made,) = (
        op
        for op in case.graph.operators
        if op.kind == kind
        and op.role is Role.FORWARD
        and case.graph.values[op.outputs[0]].shape == (512, 256)
    )

    assert made.outputs[0] in case.analysis.life(HABITS["cpu"]).written
    assert made.outputs[0] not in case.analysis.life(HABITS["tpu"]).written


def test_tpus_write_for_a_gather_alone() -> None:
    """Logits are widened in memory for the label's; the loss widens them itself."""

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = (
            batch["x"].astype("bfloat16") @ params["w"].astype("bfloat16")
        ).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"]
        ).mean()

    batch = {"x": jnp.ones((512, 64)), "label": jnp.zeros((512,), jnp.int32)}
    params = {"w": jnp.ones((64, 256))}
    case = harness.prepare(*training(loss, params, batch, optax.sgd(0.1)))
    shape = (512, 256)
    (wide,) = (
        op.outputs[0]
        for op in case.graph.operators
        if op.kind == "convert_element_type"
        and op.role is Role.FORWARD
        and case.graph.values[op.outputs[0]].shape == shape
    )
    life = case.analysis.life(HABITS["tpu"])
    ((value, reader),) = life.copies
    large = {v for v in life.written if case.graph.values[v].shape == shape}

    assert (value, case.graph.operators[reader].kind) == (wide, "gather")
    # The product's own result alone is written: the label's part of the gradient is a
    # comparison of positions.
    assert {str(case.graph.values[v].dtype) for v in large} == {"bfloat16"}
    assert len(large) == 1


def test_tpus_make_gradients_before_the_next_layer_is_made_again() -> None:
    """No product waits beyond the barrier of another layer under a checkpoint."""
    case = harness.prepare(*remat_chain())
    barriers = [
        op.index
        for op in case.graph.operators
        if op.kind == "optimization_barrier" and op.role is Role.BACKWARD
    ]
    late = case.analysis.life(HABITS["tpu"]).reads
    products = [op.index for op in case.graph.operators if op.kind == "dot_general"]

    assert barriers
    for index in products:
        following = [b for b in barriers if b > index]
        assert not following or late[index] <= following[0]
    assert any(late[index] > index for index in products)


def test_what_kernels_read_and_write_is_row_major() -> None:
    """64 lanes of 128 are empty there; elsewhere the rows lie along the lanes."""

    def double(x: Any, out: Any) -> None:
        out[...] = 2 * x[...]

    def step(x: jax.Array) -> jax.Array:
        kernel = pl.pallas_call(
            double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
        )
        return jnp.sin(kernel(jnp.cos(jnp.sin(x))))

    analysis = analyse(step, (jax.ShapeDtypeStruct((4096, 64), jnp.float32),))
    plain = Assignment(analysis, (), (), {})
    taken = {
        op.kind: local_bytes(plain, op.outputs[0], ((), ()), tiled=True)
        for op in analysis.graph.operators
        if op.outputs
    }
    once = 4096 * 64 * 4
    assert taken["cos"] == taken["pallas_call"] == 2 * once
    assert (
        local_bytes(plain, analysis.graph.outputs[0] or 0, ((), ()), tiled=True) == once
    )


def test_tpus_of_two_cores_only_round() -> None:
    """Their compiler writes more, and no rule for it is known."""
    device = autopar.Cluster.parse("2x2x4:v5p").device

    assert habits_of(device) == dataclasses.replace(PLAIN, rounds=True)
    assert habits_of(makes_room(device)).room == (0.93, 1.0)
    assert device.corrections.memory_overhead == 1.2


def test_gpus_make_gradients_behind_the_backward_pass() -> None:
    """None until two fifths of them could be there; the rest of the pass they share."""
    analysis = harness.prepare(*remat_chain()).analysis
    reads = analysis.life(HABITS["gpu"]).reads
    order = [
        op.index
        for op in analysis.graph.operators
        if op.role is Role.BACKWARD and op.class_index in analysis.independent.summing
    ]
    number = len(order)
    assert number >= 6
    for place, index in enumerate(order):
        then = order[min(number - 1, math.ceil(0.4 * number + 0.6 * place))]
        assert reads[index] == then


def makes_room(device: DeviceSpec) -> DeviceSpec:
    """A device whose compiler is assumed to save memory if memory is short."""
    own = dataclasses.replace(device.corrections, makes_room=True)
    return dataclasses.replace(device, calibration=own)


def short(seed: int, part: float) -> tuple[float, float, float]:
    """The peak of a step with enough memory and with little memory, and the little
    memory.
    """
    case = harness.prepare(*remat_chain())
    plan = harness.random_plan(case, (8,), random.Random(seed), replicated=True)
    device = dataclasses.replace(
        autopar.Cluster.parse("8:h100").device, workspace_bytes=0
    )
    free = live(plan, device).peak_bytes()
    little = dataclasses.replace(device, memory_bytes=int(part * free))
    # A plan does not rely on it.
    assert live(plan, little).peak_bytes() == free
    return free, live(plan, makes_room(little)).peak_bytes(), part * free


@pytest.mark.parametrize("part", [1.5, 1.0, 0.9])
def test_gpus_give_arrays_up_where_memory_is_short(part: float) -> None:
    """Down to what their compiler keeps to, and never below what it cannot give up."""
    free, peak, memory = short(0, part)
    if part > 1.2:
        assert peak == free
    else:
        assert 0.8 * memory < peak < free


def test_memory_at_the_peak_is_named() -> None:
    case = prepared()
    plan = harness.random_plan(case, (2, 4), random.Random(1))
    life = case.analysis.life(HABITS["gpu"])
    found = live(plan, CLUSTER.device, life).at_peak()

    assert set(found) <= {*BUFFER_KINDS, LOST, OVERHEAD, WORK_SPACE}
    assert len(found) > 2


@pytest.mark.parametrize("kind", HABITS)
def test_the_peak_is_the_inputs_and_what_is_named(kind: str) -> None:
    case = prepared()
    plan = harness.random_plan(case, (2, 4), random.Random(1))
    found = live(plan, CLUSTER.device, case.analysis.life(HABITS[kind]))
    named = sum(found.held_bytes().values()) + sum(found.at_peak().values())

    assert named == pytest.approx(found.peak_bytes())


@pytest.mark.parametrize("kind", HABITS)
def test_an_array_is_there_until_it_is_brought_to_its_reader(kind: str) -> None:
    """In whatever layout it is read: until then it lies as it was made."""

    def step(x: Any, weights: Any) -> Any:
        first, second, third = (x @ w for w in weights)
        return x, jnp.sum((second @ third.T) @ first)

    weights = [jnp.ones((16, 16))] * 3
    case = harness.prepare(step, (jnp.ones((16, 16)), weights))
    first = next(op for op in case.graph.operators if op.kind == "dot_general")
    life = case.analysis.life(HABITS[kind])
    (read,) = (
        life.arrives(first.outputs[0], op.index)
        for op in case.graph.operators
        if first.outputs[0] in op.inputs
    )
    for seed in range(8):
        plan = harness.random_plan(case, (2, 4), random.Random(seed))
        found = [b for b in buffers(plan, life) if b.value == first.outputs[0]]
        there = {t for b in found for t in range(b.start, b.end + 1)}
        assert there >= set(range(life.time[first.index], read + 1))


def test_gradients_of_a_loop_are_made_in_the_loop() -> None:
    """A loop adds up gradients of parts of the batch; one more gradient follows it."""

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)

    def step(params: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part)), None

        parts = tuple(batch[k].reshape(4, 128, 64) for k in ("x", "y"))
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        again = jax.grad(loss)(params, batch["x"], batch["y"])
        new = jax.tree.map(lambda p, g, h: p - 0.1 * (g + h), params, total, again)
        return new, jnp.zeros(())

    params = mlp_params(width=64, hidden=256, layers=1)[0]
    analysis = harness.prepare(step, (params, mlp_batch(512, 64))).analysis
    length = len(analysis.graph.operators)
    reads = analysis.life(HABITS["gpu"]).reads
    ends = analysis.independent.computations
    products = [o.index for o in analysis.graph.operators if o.kind == "dot_general"]
    inside = [index for index in products if ends[index] < length]
    behind = [index for index in products if index > ends[inside[0]]]

    assert len(inside) == 5
    assert all(reads[index] <= ends[index] for index in inside)
    # The first gradient behind the loop is put off; what another product reads is not.
    assert sum(reads[index] > index for index in behind) == 1


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_loop_holds_its_carry_to_its_end_and_a_slice_until_it_is_read(
    kind: str,
) -> None:
    def step(c: Any, xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            y = jnp.sin(c @ x)
            y = jnp.cos(y @ y.T) @ y
            return y @ y.T, y

        _, ys = jax.lax.scan(body, jnp.sin(c @ c), xs)
        return c, jnp.sum(ys[0] @ c)

    case = harness.prepare(step, (jnp.ones((16, 16)), jnp.ones((8, 16, 16))))
    plan = harness.random_plan(case, (2,), random.Random(0), replicated=True)
    life = case.analysis.life(HABITS[kind])
    ends = {b.value: b.end for b in buffers(plan, life)}
    (carry,) = (op for op in case.graph.operators if op.kind == "carry")
    (piece,) = (op for op in case.graph.operators if op.kind == "slice_step")
    (reader,) = (op for op in case.graph.operators if piece.outputs[0] in op.inputs)
    last = life.until[carry.index]

    # Nothing reads the last carry.
    assert ends[carry.outputs[1]] == last
    assert ends[piece.outputs[0]] == life.time[reader.index] < last


def test_products_have_work_space() -> None:
    """From Hopper on 32 MiB, before 4 MiB; without a product none."""
    life = prepared().analysis.life
    rooms = [
        life(habits_of(autopar.Cluster.parse(text).device)).workspace_bytes
        for text in ("8:cpu", "8:a100", "8:h100", "8:b200")
    ]

    def step(params: Any, batch: Any) -> Any:
        return params - jnp.mean(batch), jnp.zeros(())

    without = harness.prepare(step, (jnp.ones((8,)), jnp.ones((8,)))).analysis

    assert rooms == [0, 2**22, 2**25, 2**25]
    # A fact of the device, which another name does not change.
    own = dataclasses.replace(autopar.Cluster.parse("8:v100").device, name="mine")
    assert life(habits_of(own)).workspace_bytes == 2**22
    assert without.life(HABITS["gpu"]).workspace_bytes == 0
