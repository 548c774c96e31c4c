"""Tests the audit of hand-written programs against bytes by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar_passes import jax_compat
from autopar_passes.audit.partitioned import AuditedCollective, shardy_collectives
from autopar_passes.graph.emit import UNKNOWN_TRIPS

MESH = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
)


def state(array: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, NamedSharding(MESH, P(*spec)))


def audit(
    step: Callable[..., Any], *args: tuple[tuple[int, ...], P], dtype: Any = jnp.float32
) -> list[AuditedCollective]:
    shardings = tuple(NamedSharding(MESH, spec) for _, spec in args)
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, _ in args]
    jitted = jax.jit(step, in_shardings=shardings)
    return list(shardy_collectives(jitted.trace(*structs).lower()))


def test_nothing_is_communicated_in_silence_or_in_vain() -> None:
    assert audit(lambda x: x * 2.0, ((8, 16), P("x", "y"))) == []


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(jnp.float32, 4), (jnp.bfloat16, 2), (jnp.int8, 1), (jnp.complex64, 8), (bool, 1)],
)
def test_a_gather_is_charged_what_a_device_gets(dtype: Any, size: int) -> None:
    (found,) = audit(lambda x: state(x, None, "x"), ((8, 16), P("y", "x")), dtype=dtype)

    assert (found.kind, found.axes, found.group) == ("all_gather", ("y",), 4)
    assert found.nbytes == 8 * 16 * size / 2
    assert found.sent_bytes == found.nbytes * 3 / 4


def test_a_sum_that_is_asked_for_and_cut_is_a_reduce_scatter() -> None:
    """As in the form that the partitioner leaves; a part that is smaller is not."""

    def cut(part: int) -> Callable[[jax.Array], jax.Array]:
        def own(shard: jax.Array) -> jax.Array:
            whole = jax.lax.psum(shard, "y")
            start = jax.lax.axis_index("y") * part
            return jax.lax.dynamic_slice_in_dim(whole, start, part)

        return lambda x: jax.shard_map(
            own, mesh=MESH, in_specs=P(), out_specs=P("y"), check_vma=False
        )(x)

    (found,) = audit(cut(2), ((8, 16), P()))
    assert (found.kind, found.axes, found.group) == ("reduce_scatter", ("y",), 4)
    assert found.sent_bytes == 8 * 16 * 4 * 3 / 4
    (found,) = audit(cut(1), ((8, 16), P()))
    assert (found.kind, found.sent_bytes) == ("all_reduce", 2 * 8 * 16 * 4 * 3 / 4)


def test_an_all_to_all_is_charged_what_a_device_puts_in() -> None:
    (found,) = audit(lambda x: state(x, None, "y"), ((8, 16), P("y", None)))

    assert (found.kind, found.axes) == ("all_to_all", ("y",))
    assert found.sent_bytes == 8 * 16 * 4 / 4 * 3 / 4


def test_a_partial_product_is_reduced() -> None:
    (found,) = audit(
        lambda x, w: state(x @ w, None, None),
        ((8, 16), P(None, "y")), ((16, 4), P("y", None)),
    )  # fmt: skip

    assert (found.kind, found.axes) == ("all_reduce", ("y",))
    assert found.sent_bytes == 2 * (8 * 4 * 4) * 3 / 4


def test_a_reduction_that_is_sliced_is_a_reduce_scatter() -> None:
    (found,) = audit(
        lambda x, w: state(state(x @ w, None, None), "y", None),
        ((8, 16), P(None, "y")), ((16, 4), P("y", None)),
    )  # fmt: skip

    assert (found.kind, found.axes) == ("reduce_scatter", ("y",))
    assert found.sent_bytes == (8 * 4 * 4) * 3 / 4


def test_a_slice_over_other_axes_is_no_reduce_scatter() -> None:
    (found,) = audit(
        lambda x, w: state(state(x @ w, None, None), ("x", "y"), None),
        ((8, 16), P(None, "y")), ((16, 4), P("y", None)),
    )  # fmt: skip

    assert found.kind == "all_reduce"


def test_a_reduction_with_two_readers_is_not_scattered() -> None:
    def step(x: jax.Array, w: jax.Array) -> Any:
        whole = state(x @ w, None, None)
        return state(whole, "y", None), whole * 2.0

    found = audit(step, ((8, 16), P(None, "y")), ((16, 4), P("y", None)))

    assert [f.kind for f in found] == ["all_reduce"]


def test_the_same_collective_twice_is_one() -> None:
    def step(x: jax.Array) -> Any:
        return state(x, None, None) * 2.0, state(x, None, None) * 3.0

    assert len(audit(step, ((8, 16), P("y", None)))) == 1


def test_collectives_in_a_scan_count_its_trips() -> None:
    def step(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: Any) -> tuple[jax.Array, None]:
            whole = state(state(c, "y", None) * 2.0, None, None)
            return state(jnp.sin(whole), "y", None), None

        return jax.lax.scan(body, x, length=6)[0]

    (found,) = audit(step, ((8, 16), P("y", None)))

    assert found.trips == 6
    assert found.sent_bytes == 6 * (8 * 16 * 4) * 3 / 4


@pytest.mark.parametrize(("start", "stop", "trips"), [(0, 5, 5.0), (2, 5, 3.0)])
def test_a_counting_while_has_its_trips(start: int, stop: int, trips: float) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda c: c[0] < stop, lambda c: (c[0] + 1, _round_trip(c[1])), (start, x)
        )[1]

    (found,) = audit(step, ((8, 16), P("y", None)))

    assert found.trips == trips


def test_another_while_has_the_trips_that_are_assumed() -> None:
    def step(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda c: c[0] < n[0], lambda c: (c[0] + 1.0, _round_trip(c[1])), (0.0, x)
        )[1]

    (found,) = audit(step, ((8, 16), P("y", None)), ((1,), P()))

    assert found.trips == UNKNOWN_TRIPS


def test_a_while_has_the_trips_that_it_expects() -> None:
    """The number goes with the loop. The name of a scope does not count."""

    def step(x: jax.Array, n: jax.Array) -> jax.Array:
        def run(x: jax.Array) -> jax.Array:
            more = lambda c: (c[0] + 1.0, _round_trip(c[1]))  # noqa: E731
            return jax.lax.while_loop(lambda c: c[0] < n[0], more, (0.0, x))[1]

        with jax_compat.expecting_runs(0.25):
            x = run(x)
        with jax.named_scope(jax_compat.EXPECTED_RUNS):
            return run(x)

    found = audit(step, ((8, 16), P("y", None)), ((1,), P()))

    assert {c.trips for c in found} == {0.25, UNKNOWN_TRIPS}


def _round_trip(x: jax.Array) -> jax.Array:
    return state(jnp.sin(state(state(x, "y", None) * 2.0, None, None)), "y", None)


def test_no_devices_are_needed() -> None:
    mesh = AbstractMesh((64, 8), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x", "y"))
    jitted = jax.jit(lambda x: x + 1.0, in_shardings=split, out_shardings=whole)
    low = jitted.trace(jax.ShapeDtypeStruct((512, 512), jnp.float32)).lower(
        lowering_platforms=("tpu",)
    )

    found = shardy_collectives(low)

    assert {f.kind for f in found} == {"all_gather"}
    assert sum(f.sent_bytes for f in found) == pytest.approx(512 * 512 * 4 * 511 / 512)


# What a program asks for inside a shard_map, on arrays f32 (4, 4) of one device: the
# axes, the devices of a group and the bytes that are charged.
ASKED: list[tuple[str, Callable[[jax.Array], jax.Array], tuple[str, ...], int]] = [
    ("all_reduce", lambda x: jax.lax.psum(x, "y"), ("y",), 64),
    ("all_reduce", lambda x: jax.lax.psum(x, ("x", "y")), ("x", "y"), 64),
    ("all_gather", lambda x: jax.lax.all_gather(x, "x"), ("x",), 128),
    (
        "reduce_scatter",
        lambda x: jax.lax.psum_scatter(x, "y", scatter_dimension=1),
        ("y",),
        64,
    ),
    ("all_to_all", lambda x: jax.lax.all_to_all(x, "y", 0, 1), ("y",), 64),
    (
        "all_to_all",
        lambda x: jax.lax.all_to_all(x.astype(jnp.uint8), ("y",), 0, 0, tiled=True),
        ("y",),
        16,
    ),
]


@pytest.mark.parametrize(("kind", "ask", "axes", "nbytes"), ASKED)
def test_what_a_manual_computation_asks_for_is_charged_as_it_is(
    kind: str, ask: Callable[[jax.Array], jax.Array], axes: tuple[str, ...], nbytes: int
) -> None:
    (found,) = audit(_manual(ask), ((8, 16), P("x", "y")))

    sizes = {"x": 2, "y": 4}
    assert (found.kind, found.axes) == (kind, axes)
    assert found.group == math.prod(sizes[a] for a in axes)
    assert found.nbytes == nbytes


def test_a_permute_is_charged_for_the_devices_that_send() -> None:
    def ask(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "y", [(0, 1), (1, 2), (3, 3)])

    (found,) = audit(_manual(ask), ((8, 16), P("x", "y")))

    # Of four devices on y, two send to another one.
    assert found.kind == "collective_permute"
    assert found.sent_bytes == 64 * 2 / 4


def test_a_manual_loop_counts_its_trips() -> None:
    def ask(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "y"), None), x, length=3)[0]

    (found,) = audit(_manual(ask), ((8, 16), P("x", "y")))

    assert (found.kind, found.trips) == ("all_reduce", 3)


def test_equal_collectives_of_a_manual_computation_are_both_run() -> None:
    def ask(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "y") + jax.lax.psum(x, "y")

    assert len(audit(_manual(ask), ((8, 16), P("x", "y")))) == 2


def _manual(ask: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A step that stores the results of a query, one entry for each device."""

    def own(x: jax.Array) -> jax.Array:
        return ask(x)[None]

    return jax.shard_map(
        own, mesh=MESH, in_specs=P("x", "y"), out_specs=P(("x", "y")), check_vma=False
    )
