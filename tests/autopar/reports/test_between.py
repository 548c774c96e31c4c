"""Bytes between processes are those of the messages that a step is priced by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.layouts.pieces import blocks_of, landings, wire_layout
from autopar.reports.between import bytes_between
from autopar.steps.analysis import analyse

WIDTH, ROWS = 64, 32
FLOAT = 4
WEIGHT = WIDTH * WIDTH * FLOAT
ACTIVATION = ROWS * WIDTH * FLOAT


def loss_of(layers, batch):
    x = batch["x"]
    for w in layers:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def step(layers, batch):
    loss, grads = jax.value_and_grad(loss_of)(layers, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), loss


ARGS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4,
    dict.fromkeys("xy", jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)),
)


@functools.cache
def between(process_of, **options):
    asked = {"cluster": f"{len(process_of)}:cpu", "axis_names": ("data",), **options}
    pins = {"batch/*": P("data")}
    pins |= {} if options["stages"] == 1 else {"received/*": P("data")}
    pins |= {f"layers/{k}": P() for k in range(4)}
    plan = autopar.plan(step, *ARGS, pins=pins, **asked)
    return bytes_between(analyse(step, ARGS), plan, plan.cluster.read(), process_of)


def test_gradients_go_round_a_ring():
    """Of 4 devices each sends 3/2 of the gradients to the one after it."""
    found = between((0, 0, 1, 1), stages=1)
    sums = 4 * WEIGHT * 3 / 2
    assert found == {
        (0, 1): pytest.approx(sums, rel=1e-3),
        (1, 0): pytest.approx(sums, rel=1e-3),
    }
    assert between((0, 0, 0, 0), stages=1) == {}


def test_a_stage_sends_activations_and_gets_cotangents():
    """Each process has half of the rows, and stages want x and y on one side."""
    found = between((0, 0, 1, 1), stages=2, microbatches=4)
    rows = ACTIVATION / 2
    assert found == {
        (0, 1): pytest.approx(ACTIVATION + rows, rel=1e-2),
        (1, 0): pytest.approx(ACTIVATION + rows, rel=1e-2),
    }


def test_stages_over_both_processes_sum_gradients_between_them():
    """What goes to the next stage stays in the process that has the same rows."""
    found = between((0, 1, 0, 1), stages=2, microbatches=4)
    sums = 4 * WEIGHT
    assert found == {
        (0, 1): pytest.approx(sums, rel=1e-2),
        (1, 0): pytest.approx(sums, rel=1e-2),
    }


@pytest.mark.parametrize(
    "spec", [P(), P("a"), P(None, "b"), P(("b", "a")), P("b", "a")]
)
def test_blocks_are_those_of_jax(spec):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    sharding = NamedSharding(Mesh(devices, ("a", "b")), spec)
    layout = tuple(
        tuple("ab".index(n) for n in (names or ())) for names in (*spec, None, None)[:2]
    )
    found = blocks_of(layout, (8, 4), (2, 2), list(devices.flat))
    of = {d: block for block, holders in found.items() for d in holders}
    for device, index in sharding.devices_indices_map((8, 4)).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, (8, 4), strict=True)]
        assert of[device] == tuple(bounds)


def test_a_process_gets_a_piece_once_and_none_that_it_has():
    have = blocks_of(((0,),), (8,), (2,), [0, 2])
    need = blocks_of(((),), (8,), (2,), [1, 3])
    found = landings(have, need, lambda device: device // 2)
    sent = [
        (piece.process, landing.process, piece.shape)
        for landing in found
        for piece in landing.pieces
        if piece.process != landing.process
    ]
    assert sent == [(1, 0, (4,)), (0, 1, (4,))]


def test_a_value_travels_in_parts_that_both_stages_name():
    assert wire_layout(((0,), ()), (2,), ((), (0,)), (2,)) == ((), ())
    assert wire_layout(((0, 1),), (2, 2), ((0,),), (4,)) == ((0, 1),)
