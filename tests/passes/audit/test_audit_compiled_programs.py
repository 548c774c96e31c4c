"""Tests the collectives and the memory of programs that XLA has compiled."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar_passes import jax_compat
from autopar_passes.audit.compiled import (
    SCATTERED,
    WIDENED,
    compiled_audit,
    hlo_collectives,
)

NUM_DEVICES = 8
AXES = (("a", 2), ("b", 4))


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < NUM_DEVICES:
        pytest.skip("needs 8 simulated devices")
    devices = np.array(jax.devices()[:NUM_DEVICES]).reshape(2, 4)
    return Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def pinned(mesh, array, *axes):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(array, sharding)


def compiled(mesh, function, *arguments):
    shardings = [NamedSharding(mesh, PartitionSpec(*axes)) for _, _, axes in arguments]
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in arguments]
    return jax.jit(function, in_shardings=shardings).lower(*structs).compile()


def sums(collectives):
    out = {}
    for c in collectives:
        key = (c.kind, c.axes)
        out[key] = out.get(key, 0.0) + c.sent_bytes
    return out


def test_resharding_of_a_matrix(mesh):
    """Gather along b, then exchange along a."""

    def step(x):
        gathered = pinned(mesh, x, "a", None)
        return pinned(mesh, jnp.sin(gathered), None, "a")

    found = compiled_audit(
        compiled(mesh, step, ((64, 128), "float32", ("a", "b"))), AXES
    )
    whole = 64 * 128 * 4
    assert sums(found.collectives) == {
        ("all_gather", ("b",)): whole / 2 * 3 / 4,
        ("all_to_all", ("a",)): whole / 2 * 1 / 2,
    }
    assert found.communication_bytes == whole / 2 * (3 / 4 + 1 / 2)
    assert found.exceptions == ()


@pytest.mark.parametrize("scattered", [False, True])
def test_sum_of_a_product(mesh, scattered):
    def step(x, y):
        return pinned(mesh, x @ y, "b" if scattered else None, None)

    arguments = ((64, 32), "float32", (None, "b")), ((32, 16), "float32", ("b", None))
    found = compiled_audit(compiled(mesh, step, *arguments), AXES)
    kind = "reduce_scatter" if scattered else "all_reduce"
    sent = 64 * 16 * 4 * 3 / 4 * (1 if scattered else 2)
    assert sums(found.collectives) == {(kind, ("b",)): sent}
    assert found.exceptions == ((SCATTERED,) if scattered else ())


def test_loops_run_as_often_as_they_expect(mesh):
    """The number goes with the loop into the compiled program."""

    def step(x, n):
        def more(c):
            y = jax.lax.with_sharding_constraint(jnp.sin(c[1]), whole)
            return c[0] + 1.0, pinned(mesh, jnp.cos(y), "b", None)

        with jax_compat.expecting_runs(0.25):
            return jax.lax.while_loop(lambda c: c[0] < n[0], more, (0.0, x))[1]

    whole = NamedSharding(mesh, PartitionSpec())
    program = compiled(
        mesh, step, ((8, 16), jnp.float32, ("b", None)), ((1,), jnp.float32, ())
    )
    found = hlo_collectives(program.as_text())

    assert found
    assert {c.trips for c in found} == {0.25}


def test_loop_of_products(mesh):
    def step(x, ws):
        def body(carry, w):
            hidden = pinned(mesh, carry @ w, None, "b")
            return pinned(mesh, jnp.tanh(hidden) @ w.T, None, None), None

        return jax.lax.scan(body, x, ws)[0]

    arguments = ((64, 32), "float32", ()), ((5, 32, 16), "float32", (None, None, "b"))
    found = compiled_audit(compiled(mesh, step, *arguments), AXES)
    assert sums(found.collectives) == {
        ("all_reduce", ("b",)): 5 * 2 * 3 / 4 * 64 * 32 * 4
    }
    assert [c.trips for c in found.collectives] == [5]


def test_widened_halves_are_charged_in_their_own_width(mesh):
    def step(x, y):
        product = pinned(mesh, x @ y, None, None)
        return pinned(mesh, pinned(mesh, product, "b", None) * 2, None, None)

    arguments = ((64, 32), "bfloat16", (None, "b")), ((32, 16), "bfloat16", ("b", None))
    done = compiled(mesh, step, *arguments)
    found = compiled_audit(done, AXES)
    whole = 64 * 16 * 2
    assert WIDENED in found.exceptions
    assert {c.nbytes for c in found.collectives} == {whole}
    run = hlo_collectives(done.as_text(), AXES, as_run=True)
    assert {c.nbytes for c in run} == {2 * whole}


def test_memory_adds_up(mesh):
    found = compiled_audit(
        compiled(mesh, lambda x: jnp.sin(x) @ x.T, ((64, 32), "float32", ("b",)))
    )
    assert found.argument_bytes == 64 * 32 * 4 / 4
    assert found.alias_bytes == 0
    assert found.peak_memory_bytes == (
        found.argument_bytes + found.output_bytes + found.temp_bytes
    )


def test_barrier_keeps_a_second_gather(mesh):
    """A gather that is repeated behind a barrier is not merged with the first."""

    def step(x, w, barrier):
        hidden = jnp.tanh(x @ pinned(mesh, w, None, None))
        again = jax.lax.optimization_barrier(w) if barrier else w
        return hidden @ pinned(mesh, again, None, None).T

    counts = []
    for barrier in (False, True):
        done = compiled(
            mesh,
            lambda x, w, b=barrier: step(x, w, b),
            ((64, 32), "float32", ("a",)),
            ((32, 32), "float32", ("b",)),
        )
        found = hlo_collectives(done.as_text(), AXES)
        assert all(c.kind == "all_gather" for c in found)
        counts.append(len(found))
    assert counts == [1, 2]


def test_every_group_divides_the_devices(mesh):
    done = compiled(
        mesh,
        lambda x: pinned(mesh, x.reshape(32, 256).sum(0), "b"),
        ((64, 128), "float32", ("a", "b")),
    )
    for found in hlo_collectives(done.as_text(), AXES):
        assert NUM_DEVICES % found.group == 0
        assert found.group == math.prod(dict(AXES)[axis] for axis in found.axes)
