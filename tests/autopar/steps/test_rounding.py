"""Tests the values of a float32 program that TPUs keep and send in bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, normal, training

from autopar.cluster import Cluster
from autopar.cost.buffers import buffers
from autopar.cost.live import habits_of
from autopar.cost.local import local_bytes, sent_bytes
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import compiled_traffic
from autopar.layouts.assignment import Assignment
from autopar.planner.recipes import recipes, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse

ROWS, WIDTH, HIDDEN = 64, 32, 48


def kinds(analysis: Analysis, values: frozenset[int]) -> set[str]:
    """The operators that compute some values."""
    made_by = analysis.contraction.producer
    return {made_by[v].kind for v in values}


def analysed(function: Any, *shapes: tuple[int, ...], dtype: Any = None) -> Analysis:
    dtype = dtype or jnp.float32
    return analyse(function, [jax.ShapeDtypeStruct(s, dtype) for s in shapes])


def chained(precision: Any = None) -> Any:
    """Two products, with a bias between them."""

    def function(w: Any, b: Any, v: Any, x: Any) -> Any:
        y = jnp.dot(x, w, precision=precision) + b
        return jnp.dot(y, v, precision=precision)

    return function


CHAIN = ((WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (ROWS, WIDTH))


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT])
def test_what_products_alone_read_is_rounded(precision: Any) -> None:
    """With the product whose kernel adds the bias; inputs lie as they came."""
    found = analysed(chained(precision), *CHAIN)
    assert kinds(found, found.rounded_values.stored) == {"dot_general", "add"}
    (first, _) = [op for op in found.graph.operators if op.kind == "dot_general"]
    assert first.outputs[0] in found.rounded_values.stored


@pytest.mark.parametrize("precision", ["high", "highest", "float32"])
def test_other_precisions_take_float32(precision: Any) -> None:
    found = analysed(chained(precision), *CHAIN)
    assert found.rounded_values.stored == found.rounded_values.brought == frozenset()
    with jax.default_matmul_precision(precision):
        found = analysed(chained(), *CHAIN)
    assert found.rounded_values.stored == found.rounded_values.brought == frozenset()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_types_stay_what_they_are(dtype: Any) -> None:
    found = analysed(chained(), *CHAIN, dtype=dtype)
    assert found.rounded_values.stored == found.rounded_values.brought == frozenset()


def test_what_others_read_stays_in_float32() -> None:
    """Element-wise readers keep it, sums that its kernel takes do not."""

    def kept(w: Any, v: Any, x: Any) -> Any:
        y = x @ w
        return y @ v, jnp.exp(y)

    def summed(w: Any, v: Any, x: Any) -> Any:
        y = x @ w
        return y.T @ (x @ v), y.sum(axis=0)

    shapes = ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, WIDTH))
    assert not analysed(kept, *shapes).rounded_values.stored
    square = (WIDTH, WIDTH)
    found = analysed(summed, square, square, (ROWS, WIDTH))
    assert kinds(found, found.rounded_values.stored) == {"dot_general", "transpose"}


def test_parameters_stay_and_their_copies_are_rounded() -> None:
    found = analyse(*training(mlp_loss, mlp_params(), mlp_batch()))
    paths = {i.value: i.path for i in found.graph.inputs}
    brought = {paths[v] for v in found.rounded_values.brought if v in paths}
    weights = {p for p in paths.values() if "up" in p or "down" in p}
    assert weights
    assert weights <= brought
    assert not any("bias" in p for p in brought)
    assert found.rounded_values.stored.isdisjoint(paths)
    gradients = {v for d in found.deferrals for v in d.gradients}
    assert gradients.isdisjoint(found.rounded_values.stored)


def test_a_table_that_is_looked_up_is_sent_as_it_is() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        rows = params["table"][batch["words"]]
        logits = jnp.tanh(rows @ params["up"]) @ params["table"].T
        return jnp.mean(logits**2)

    params = {"table": normal(1, 128, WIDTH), "up": normal(2, WIDTH, WIDTH)}
    batch = {"words": jnp.zeros((ROWS,), jnp.int32)}
    found = analyse(*training(loss, params, batch))
    paths = {i.value: i.path for i in found.graph.inputs}
    brought = {paths[v] for v in found.rounded_values.brought if v in paths}
    assert any("up" in p for p in brought)
    assert not any("table" in p for p in brought)


def planned(cluster: str) -> tuple[Assignment, Pricer]:
    """A plan that splits parameters."""
    found = analyse(*training(mlp_loss, mlp_params(64, 256), mlp_batch(8192, 64)))
    machine = Cluster.parse(cluster)
    pricer = Pricer(machine, candidate_meshes(machine)[0])
    (recipe,) = [r for r in recipes(1) if "FSDP" in r.name]
    limit = restriction_of(found, recipe, pricer)
    return solve_mesh(found, pricer, limit, 10.0).assignment, pricer


def test_half_the_bytes_of_gathered_parameters_are_sent() -> None:
    """Sums of their gradients are sent in float32."""
    assignment, pricer = planned("8:v5e")
    values, rounded = assignment.graph.values, assignment.analysis.rounded_values
    found = compiled_traffic(assignment, pricer)
    gathered = [c for c in found if c.step.kind == "all_gather"]
    summed = [c for c in found if c.step.kind in ("all_reduce", "reduce_scatter")]
    narrow = [c for c in gathered if c.value in rounded.brought]
    assert narrow
    assert summed
    assert all(c.nbytes == values[c.value].nbytes / 2 for c in narrow)
    assert all(c.nbytes == values[c.value].nbytes for c in summed)
    assert all(c.place is None or c.place[2] == "bfloat16" for c in narrow)
    for c in narrow:
        whole = sent_bytes(assignment.analysis, c.value, rounds=False)
        assert whole == values[c.value].nbytes == 2 * c.nbytes


@pytest.mark.parametrize(("cluster", "part"), [("8:v5e", 0.5), ("8:h100", 1.0)])
def test_gathered_copies_take_half_the_memory(cluster: str, part: float) -> None:
    assignment, pricer = planned(cluster)
    life = assignment.analysis.life(habits_of(pricer.cluster.device))
    graph = assignment.graph
    parameters = {
        i.value for i in graph.inputs
    } & assignment.analysis.rounded_values.brought
    copies = [
        b
        for b in buffers(assignment, life)
        if b.kind == "gathered copies" and b.value in parameters
    ]
    assert copies
    for b in copies:
        whole = ((),) * len(graph.values[b.value].shape)
        nbytes = local_bytes(assignment, b.value, whole, tiled=life.tiled)
        assert b.nbytes == part * nbytes


@pytest.mark.parametrize(("name", "rounds"), [("v5e", 1), ("v5p", 1), ("h100", 0)])
def test_tpus_round(name: str, rounds: int) -> None:
    device = Cluster.parse(f"8:{name}").device
    assert device.rounds_operands is bool(rounds)
    assert habits_of(device).rounds is bool(rounds)


def test_products_read_two_bytes_an_element() -> None:
    """One writes what the next one reads; the bias and the inputs are in float32."""
    found = analysed(chained(), *CHAIN)
    works = found.works(streamed=True).values()
    nbytes = sum(w.nbytes for w in works if w.op.kind == "dot_general")
    inputs = 4 * (WIDTH * HIDDEN * 2 + HIDDEN + ROWS * WIDTH)
    assert nbytes == inputs + 2 * 2 * ROWS * HIDDEN + 4 * ROWS * WIDTH
