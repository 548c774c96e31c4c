"""Tests bytes between processes against the priced messages of a step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.layouts.pieces import blocks_of, landings, wire_layout
from autopar.reports.between import _collective, bytes_between
from autopar.steps.analysis import analyse

WIDTH, ROWS = 64, 32
FLOAT = 4
WEIGHT = WIDTH * WIDTH * FLOAT
ACTIVATION = ROWS * WIDTH * FLOAT
# Of a message in gloo: two headers of 48 bytes go with the data, and one comes back.
WITH, BACK = 96, 48
# The processes gather 42 bytes of each in 3 times 2 messages, on both devices of each.
CHECKS = 2 * (42 + 6 * (WITH + BACK))


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
    """Of 4 devices each sends 3/2 of the gradients to the one before it.

    It does so in 12 messages for each gradient. The loss is one message: of its two
    phases, device 2 takes part in both and device 0 in the second.
    """
    found = between((0, 0, 1, 1), stages=1)
    sums = 4 * (WEIGHT * 3 / 2 + 12 * (WITH + BACK))
    assert found == {
        (0, 1): sums + (WITH + FLOAT) + 2 * BACK,
        (1, 0): sums + 2 * (WITH + FLOAT) + BACK,
    }
    assert between((0, 0, 0, 0), stages=1) == {}


def test_a_stage_sends_activations_and_gets_cotangents():
    """Each process has half of the rows, and stages want x and y on one side."""
    found = between((0, 0, 1, 1), stages=2, microbatches=4)
    rows = ACTIVATION / 2
    assert found == {
        (0, 1): ACTIVATION + rows + CHECKS,
        (1, 0): ACTIVATION + rows + CHECKS,
    }


def test_stages_over_both_processes_sum_gradients_between_them():
    """What goes to the next stage stays in the process that has the same rows."""
    found = between((0, 1, 0, 1), stages=2, microbatches=4)
    losses = 4 * (WITH + FLOAT + BACK)
    sums = 4 * (WEIGHT + 4 * (WITH + BACK)) + losses
    assert found == {(0, 1): sums + CHECKS, (1, 0): sums + CHECKS}


@pytest.mark.parametrize("elements", [1, 3, 8, 1001, 3_000_000])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_all_reduce_sends_the_segments_of_gloo(elements, count):
    """The loops of ``ring`` in ``gloo/allreduce.cc``."""
    total = elements * FLOAT
    segments = max(-(-total // 2**20), 2 * count)
    segments = -(-segments // count) * count
    each, segment = segments // count, -(-total // segments)
    segment = -(-segment // FLOAT) * FLOAT
    expected = dict.fromkeys(itertools.permutations(range(count), 2), 0)
    for rank, phase, i in itertools.product(
        range(count), (1, 0), range(segments - each)
    ):
        offset = ((rank + phase) * each + i) * segment % (segments * segment)
        if (length := min(segment, total - offset)) > 0:
            expected[rank, (rank - 1) % count] += length + WITH
            expected[(rank - 1) % count, rank] += BACK
    assert sent("all_reduce", total, count) == expected


def test_a_reduce_scatter_exchanges_halves_and_quarters():
    """Devices 1 and 2 have each other's quarter at the end; a notice has 4 bytes."""
    half, quarter = WEIGHT / 2 + WITH + FLOAT, WEIGHT / 4 + WITH + FLOAT
    halves = dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], half)
    pairs = [(0, 2), (2, 0), (1, 3), (3, 1), (1, 2), (2, 1)]
    expected = halves | dict.fromkeys(pairs, quarter) | {(0, 3): 0, (3, 0): 0}
    assert sent("reduce_scatter", WEIGHT, 4) == expected


@pytest.mark.parametrize(
    ("kind", "messages", "data"),
    [("all_gather", 6, 3 / 4), ("all_to_all", 1, 1 / 4), ("collective_permute", 1, 1)],
)
def test_each_message_has_headers(kind, messages, data):
    found = sent(kind, WEIGHT, 4)
    onward = data * WEIGHT + messages * WITH
    back = messages * BACK
    assert found[0, 1] == onward + (back if kind == "all_to_all" else 0)
    assert found[1, 0] == (onward if kind == "all_to_all" else 0) + back
    assert bool(found[0, 2]) == (kind == "all_to_all")


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_elsewhere_no_header_counts(kind):
    found = sent(kind, WEIGHT, 4, is_gloo=False)
    each = WEIGHT * (3 / 2 if kind == "all_reduce" else 3 / 4)
    assert sorted(found.values()) == [0] * 8 + [each] * 4


def test_codecs_send_their_messages():
    """All gradients in bfloat16, four squares, six measured numbers each, the loss."""
    found = between((0, 0, 1, 1), stages=1, compression="bf16")
    messages = [("all_to_all", 2 * WEIGHT), ("all_gather", 2 * WEIGHT)]
    messages += [("all_reduce", FLOAT * count) for count in (4, 4 * 6, 1)]
    expected = {(0, 1): 0, (1, 0): 0}
    for kind, nbytes in messages:
        for (a, b), more in sent(kind, nbytes, 4).items():
            if a // 2 != b // 2:
                expected[a // 2, b // 2] += more
    assert found == expected


def sent(kind, nbytes, count, *, is_gloo=True):
    """Bytes that the devices of a collective send each other."""
    found = dict.fromkeys(itertools.permutations(range(count), 2), 0)
    for a, b, more in _collective(kind, nbytes, range(count), FLOAT, is_gloo):
        found[a, b] += more
    return found


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
