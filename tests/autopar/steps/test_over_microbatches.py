"""Tests the analysis of a step whose forward and backward pass run several times."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from step_forms import cheap

from autopar.cost.buffers import buffers
from autopar.cost.traffic import traffic
from autopar.planner.candidate import Candidate
from autopar.planner.search import candidate_meshes, search
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.microbatches import (
    in_microbatches,
    one_microbatch,
    over_microbatches,
)
from autopar_passes.graph.roles import Role
from autopar_passes.microbatches.facts import (
    Combine,
    Crossing,
    Microbatched,
    Rows,
)

COUNT = 4
WIDTH, ROWS = 512, 65536


def step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ w) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * grad, loss


@functools.cache
def analysis() -> Analysis:
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return analyse(step, (w, batch))


@functools.cache
def repeated(count: int = COUNT) -> Analysis:
    """The step with its gradient summed over microbatches."""
    found = analysis()
    update = {op.equation for op in found.graph.operators if op.role is Role.UPDATE}
    (gradient,) = found.deferrals[0].ends
    known = Microbatched(
        microbatches=count,
        traced=found.pytrees,
        once=frozenset(update),
        crossings=(Crossing(gradient, Combine.SUM),),
        batch={1: Rows(0)},
    )
    return over_microbatches(found, known)


def test_the_update_runs_once() -> None:
    before, after = analysis().graph.operators, repeated().graph.operators

    for old, new in zip(before, after, strict=True):
        runs = old.kind not in ("input", "return") and old.role is not Role.UPDATE
        times = COUNT if runs else 1
        assert new.trips == old.trips * times
        assert new.input_trips == tuple(t * times for t in old.input_trips)


def test_all_reads_of_a_value_are_counted() -> None:
    def reads(found: Analysis) -> float:
        return sum(u.weight for s in found.sources.values() for u in s.uses)

    assert reads(analysis()) < reads(repeated()) < COUNT * reads(analysis())


def data_parallel(found: Analysis) -> Candidate:
    """The best plan on four devices, each of which has all weights."""
    cluster = cheap("1x4:h100")
    meshes = candidate_meshes(cluster, 1, None)
    return search(found, cluster, meshes=meshes, seconds=None).best


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_gradient_is_summed_over_devices_once(count: int) -> None:
    """The number of its sums does not grow with the number of microbatches."""
    best = data_parallel(repeated(count))
    (gradient,) = repeated(count).graph.accumulated
    sums = [c for c in traffic(best.assignment) if c.value == gradient]

    assert [c.step.kind for c in sums] == ["all_reduce"]
    assert [c.trips for c in sums] == [1]


def test_what_is_added_to_is_kept_from_the_first_microbatch_on() -> None:
    best = data_parallel(repeated())
    (gradient,) = repeated().graph.accumulated
    kept = [
        b
        for b in buffers(best.assignment, repeated().life())
        if b.value == gradient and b.start == 0
    ]

    assert [b.nbytes for b in kept] == [4 * WIDTH * WIDTH]
    assert kept[0].end > 0


def test_it_costs_what_the_loop_over_microbatches_costs() -> None:
    """The program of one microbatch, counted, and the one with the loop."""
    whole = analysis()
    looped = data_parallel(in_microbatches(whole, COUNT))
    one = one_microbatch(whole, COUNT)
    assert one.split is not None
    counted = data_parallel(over_microbatches(one, one.split))

    # The loop deals the rows out and adds the gradients up, too.
    assert 0.84 * looped.step_s < counted.step_s < looped.step_s
    assert counted.communication_bytes == pytest.approx(looped.communication_bytes)
    # It holds the whole batch beside the rows of a microbatch.
    batch_bytes = 4 * ROWS * WIDTH / 4
    assert counted.peak_memory_bytes == pytest.approx(
        looped.peak_memory_bytes - batch_bytes, rel=0.01
    )
