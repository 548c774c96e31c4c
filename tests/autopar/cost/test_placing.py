"""Tests where messages may run: their windows, loops, and the update."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cost.buffers import Brought, buffers
from autopar.cost.combining import SUMS
from autopar.cost.estimate import MessagePlaces, placing
from autopar.cost.live import habits_of
from autopar.cost.pricer import Pricer
from autopar.planner.candidate import Candidate
from autopar.planner.recipes import recipes, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import analyse
from autopar_passes.graph.roles import Role

WIDTH, LAYERS = 512, 4


def body(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def written_out(state: tuple[jax.Array, ...], batch: jax.Array) -> jax.Array:
    for w in state:
        batch = body(batch, w)
    return jnp.mean(batch**2)


def scanned(state: jax.Array, batch: jax.Array) -> jax.Array:
    batch, _ = jax.lax.scan(lambda x, w: (body(x, w), None), batch, state)
    return jnp.mean(batch**2)


@functools.cache
def fsdp(scan: bool, machine: str = "8:h100") -> Candidate:
    """Parameters split over 8 devices: each is gathered, and its gradient scattered."""
    loss = scanned if scan else written_out

    def step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    one = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    stacked = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    rows = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    found = analyse(step, (stacked if scan else (one,) * LAYERS, rows))
    cluster = Cluster.parse(machine)
    mesh = candidate_meshes(cluster)[0]
    pricer = Pricer(cluster, mesh)
    recipe = next(r for r in recipes(len(mesh.axes)) if r.name == "FSDP (ZeRO-3)")
    return solve_mesh(found, pricer, restriction_of(found, recipe, pricer))


def placed(plan: Candidate) -> MessagePlaces:
    return placing(plan.assignment, plan.collectives)


def test_a_message_has_the_window_of_the_array_that_decides() -> None:
    plan = fsdp(False)
    ranks = plan.assignment.analysis.ranks
    slots = placed(plan).slots
    shared = 0
    for c, slot in zip(plan.collectives, slots, strict=True):
        if slot is None:
            continue
        with_it = [
            other.ready
            for other, theirs in zip(plan.collectives, slots, strict=True)
            if other is c
            or (
                (c.message >= 0 and other.message == c.message)
                and theirs is not None
                and theirs.key == slot.key
            )
        ]
        shared += len(with_it) > 1
        want = max(ranks[with_it]) if c.step.kind in SUMS else min(with_it)
        assert slot.position == want
    assert shared


def test_products_of_gradients_run_behind_the_backward_pass() -> None:
    analysis = fsdp(False).assignment.analysis
    makers = [
        op.index
        for op in analysis.graph.operators
        if op.kind == "dot_general"
        and op.role is Role.BACKWARD
        and op.class_index in analysis.independent.summing
    ]
    others = np.setdiff1d(np.arange(len(analysis.graph.operators)), makers)
    assert makers
    assert sorted(analysis.ranks) == list(range(len(analysis.ranks)))
    assert list(analysis.ranks[makers]) == sorted(analysis.ranks[makers])
    backward = [k for k in others if analysis.graph.operators[k].role is Role.FORWARD]
    assert min(analysis.ranks[makers]) > max(analysis.ranks[backward])


def test_each_update_needs_the_message_of_its_gradient() -> None:
    plan = fsdp(False)
    found = placed(plan)
    operators = plan.assignment.graph.operators
    sums = {s.position for s in found.slots if s is not None and s.sums}
    needs = {
        int(found.needs[op.index]) for op in operators if op.role is Role.UPDATE
    } - {-1}
    assert needs <= sums
    assert needs
    others = [op.index for op in operators if op.role is not Role.UPDATE]
    assert set(found.needs[others].tolist()) == {len(operators)}


def test_a_loop_that_communicates_is_a_part_of_its_own() -> None:
    plan = fsdp(True)
    known = plan.assignment.independent
    whole = len(plan.assignment.graph.operators)
    found = placed(plan)
    loops = {key[1] for key in found.inside} - {whole}
    assert loops
    for (_, computation), inside in found.inside.items():
        own = {known.computations[k] for k in np.flatnonzero(inside)}
        assert computation == whole or own == {computation}
        assert computation != whole or own.isdisjoint(loops)


def test_sums_that_the_program_writes_are_moved_out_of_a_loop() -> None:
    """Sums over two mesh axes are written as collectives, and those over one are not.

    XLA takes the sums of the last of ``LAYERS`` iterations out of the loop.
    """
    assert {s.last for s in placed(fsdp(True)).slots if s is not None} == {0}
    two = fsdp(True, "2x4:h100")
    found = placed(two)
    whole = len(two.assignment.graph.operators)
    moved = [s for s in found.slots if s is not None and s.last]
    assert moved
    assert {s.last for s in moved} == {1 / LAYERS}
    assert all(s.sums and s.key[1] < whole for s in moved)

    seconds = [0.0 if s is None else float(s.sums) for s in found.slots]
    parts = {p.key: p for p in found.parts(np.zeros(whole), seconds)}
    inside, after = (parts[Role.BACKWARD, k] for k in (moved[0].key[1], whole))
    assert inside.pipelined_s == pytest.approx(len(moved) * (1 - 1 / LAYERS))
    assert inside.sums.sum() == 0
    rank = two.assignment.analysis.ranks[moved[0].key[1]]
    assert after.sums[rank] == pytest.approx(len(moved) / LAYERS)


def test_operands_of_moved_sums_are_in_memory_during_the_loop() -> None:
    layouts = fsdp(True, "2x4:h100").assignment
    device = Cluster.parse("2x4:h100").device
    life = layouts.analysis.life(habits_of(device))
    known = np.array(layouts.independent.computations)
    (end,) = {
        s.key[1]
        for s in placed(fsdp(True, "2x4:h100")).slots
        if s is not None and s.last
    }
    times = np.array(life.time)[known == end]
    span = int(times.min()), int(times.max())
    moved, stays = (
        buffers(layouts, dataclasses.replace(life, moves_sums=moves))
        for moves in (True, False)
    )
    more = [b for b in moved if b not in stays]
    assert [b.nbytes for b in more] == [4 * WIDTH * WIDTH]
    assert [(b.start, b.end) for b in more] == [span]


@pytest.mark.parametrize("scan", [False, True])
def test_messages_expose_no_less_than_their_arrays(scan: bool) -> None:
    plan = fsdp(scan)
    for line in plan.timelines:
        assert line.exposed_s(1.0) >= line.least_s(1.0)
    assert plan.report.bound <= plan.step_s


def test_a_gpu_copies_no_pieces() -> None:
    plan = fsdp(False)
    gather = next(c for c in plan.collectives if c.step.kind == "all_gather")
    cluster = plan.pricer.cluster
    known = dataclasses.replace(cluster.device.corrections, copies_pieces=True)
    device = dataclasses.replace(cluster.device, calibration=known)
    copying = dataclasses.replace(
        plan.pricer, cluster=dataclasses.replace(cluster, device=device)
    )
    twice_s = 2 * gather.size / device.memory_bandwidth_bytes_per_s

    assert plan.pricer.move_s(gather.step, gather.size) == 0
    assert math.isclose(copying.move_s(gather.step, gather.size), twice_s)


def test_arrays_that_are_gathered_before_a_loop_are_received_together() -> None:
    layouts = fsdp(True).assignment
    life = layouts.analysis.life(habits_of(Cluster.parse("8:h100").device))
    brought = Brought(layouts, life)
    keys = [(value, False, ()) for value in range(3)]
    spans = [(4, 30), (7, 30), (20, 25)]
    brought.forms.update({k: (8.0, s) for k, s in zip(keys, spans, strict=True)})
    brought.sliced[1] = [
        (start, k) for (start, _), k in zip(spans[:2], keys, strict=False)
    ]
    found = {
        b.value: (b.start, b.end)
        for b in brought.buffers()
        if b.kind == "collective buffers"
    }
    assert found == {0: (4, 7), 1: (4, 7), 2: (20, 20)}
