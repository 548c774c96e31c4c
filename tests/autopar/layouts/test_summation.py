"""Tests sums over fast links first: possible summations and their results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar import Cluster
from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.gradient import Feedback, Gradient
from autopar.cost.codecs import GradientRoute, added_s, route_of, within_s
from autopar.cost.collectives import collective_bytes
from autopar.layouts.layout import Axes, Layout
from autopar.layouts.summation import (
    Summation,
    summation_of,
    summations,
)
from autopar.plans import GradientDecision
from autopar.runtime.gradients.codec_state import carry_over
from autopar.runtime.gradients.sums import GradientSums, Member
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar_passes.layouts import partition_spec
from autopar_passes.sums.stacked import stack

# Axis 0 crosses hosts, axis 1 stays within one, axis 2 splits tensors.
SIZES = (2, 2, 2)
SHAPE = (8, 12)
ALL: Axes = (0, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout of a sum over axes 0 and 1, and a summation that it allows."""

    home: Layout
    within: Axes
    summation: Summation | None


CASES = {
    "whole": Case(((), ()), (1,), Summation((0,), 2, (8, 6), None, (1,), 1)),
    "whole beside tensor": Case(
        ((), (2,)), (1,), Summation((0,), 2, (4, 6), None, (1,), 0)
    ),
    "kept": Case(((1,), ()), (1,), Summation((0,), 2, (4, 12), None, (1,), 0, True)),
    "kept behind tensor": Case(
        ((2, 1), ()), (1,), Summation((0,), 2, (2, 12), None, (1,), 0, True)
    ),
    "scattered, hosts inner": Case(
        ((), (1, 0)), (1,), Summation((0,), 2, (8, 6), 1, (1,), 1, True)
    ),
    "scattered, hosts outer": Case(
        ((0, 1), ()), (1,), Summation((0,), 2, (4, 12), 0, (1,), 0, True, True)
    ),
    "at once": Case(((), ()), (), Summation((0, 1), 4, (8, 12), None)),
    "at once, scattered": Case(((1, 0), ()), (), Summation((1, 0), 4, (8, 12), 0)),
    "two dims": Case(((0,), (1,)), (1,), None),
    "hosts outer behind tensor": Case(((2, 0, 1), ()), (1,), None),
    "split over hosts alone": Case(((0,), ()), (1,), None),
    "before tensor": Case(((1, 2), ()), (1,), None),
}
USABLE = {name: case for name, case in CASES.items() if case.summation is not None}


@pytest.mark.parametrize("name", CASES)
def test_the_ways_of_layouts(name: str) -> None:
    case = CASES[name]
    assert summation_of(SHAPE, case.home, ALL, case.within, SIZES) == case.summation


def test_no_dim_divides() -> None:
    assert summation_of((3, 5), ((), ()), ALL, (1,), SIZES) is None


def test_dims_in_front_are_whole() -> None:
    summation = summation_of((4, *SHAPE), ((1,), ()), ALL, (1,), SIZES)
    assert summation == Summation((0,), 2, (4, 4, 12), None, (1,), 1, True)


@pytest.fixture(scope="module")
def axes() -> tuple[MeshAxis, ...]:
    cluster = Cluster.parse("2x4:h100,network=10Gb/s")
    (mesh,) = (m for m in cluster.mesh_shapes(2) if m.sizes == (2, 4))
    return mesh.axes


def test_only_faster_links_come_first(axes: tuple[MeshAxis, ...]) -> None:
    flat, layered = summations((64, 64), ((), ()), (0, 1), axes)
    assert (flat.within, layered.within) == ((), (1,))
    # Over one kind of link there is nothing to do first.
    assert len(summations((64, 64), ((), ()), (1,), axes)) == 1


def test_what_crosses_the_fast_links(axes: tuple[MeshAxis, ...]) -> None:
    _, gathered = summations((64, 64), ((), ()), (0, 1), axes)
    _, kept = summations((64, 64), ((1,), ()), (0, 1), axes)
    nbytes = 4.0 * 64 * 64
    both = (("reduce_scatter", nbytes), ("all_gather", nbytes))

    def sent(route: GradientRoute) -> tuple[tuple[str, float], ...]:
        return tuple((m.kind, m.nbytes) for m in route.within_messages)

    assert sent(route_of(gathered, axes)) == both
    assert sent(route_of(kept, axes)) == both[:1]
    expected = sum(added_s(kind, nbytes, (axes[1],)) for kind, _ in both)
    assert within_s(route_of(gathered, axes)) == pytest.approx(expected)
    assert collective_bytes("all_gather", nbytes, 4) == 0.75 * nbytes


def mesh_of() -> Mesh:
    devices = np.array(jax.devices()[: math.prod(SIZES)], dtype=object).reshape(SIZES)
    return Mesh(devices, ("hosts", "local", "tensor"), axis_types=(AxisType.Auto,) * 3)


def member_of(case: Case, codec: str, number: int = 0) -> Member:
    summation = case.summation
    assert summation is not None
    stripped = tuple(tuple(a for a in split if a not in ALL) for split in case.home)
    decision = GradientDecision(
        name=f"w{number}",
        value=number,
        shape=SHAPE,
        local_shape=summation.local_shape,
        axes=(),
        workers=summation.workers,
        codec=codec,
        feedback=True,
    )
    gradient = Gradient(
        decision.name,
        summation.local_shape,
        parse_codec(codec),
        Feedback("residual"),
        summation.scatter_dim,
        number,
    )
    result = case.home if summation.scatter or summation.keeps else stripped
    return Member(decision, gradient, summation, (ALL, *stripped), result, case.home)


def taken(how: GradientSums, state: Any, arrays: list[np.ndarray]) -> Any:
    """Runs one step; returns the sums and the new state."""

    def step(state: Any, arrays: list[Any]) -> Any:
        synchroniser = CodecSynchroniser(how, state)
        partials = {
            v: stack(array, ALL, m.stacked[1:], how.mesh)
            for (v, m), array in zip(how.members.items(), arrays, strict=True)
        }
        totals: dict[int, Any] = {}
        for value in how.members:
            if value not in totals:
                group = synchroniser.takes(value)
                totals.update(synchroniser.take({v: partials[v] for v in group}))
        after, sums = synchroniser.finish()
        return totals, after, sums

    return jax.jit(step)(state, arrays)


def draw(seed: int, count: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((4, *SHAPE)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("name", USABLE)
def test_a_codec_that_loses_nothing_sums(name: str) -> None:
    how = GradientSums(mesh_of(), {0: member_of(CASES[name], "dense")})
    (array,) = draw(1)
    totals, _, _ = taken(how, how.init(), [array])
    np.testing.assert_allclose(totals[0], array.sum(0), rtol=1e-5, atol=1e-6)
    wanted = NamedSharding(how.mesh, partition_spec(how.mesh, CASES[name].home))
    assert totals[0].sharding.is_equivalent_to(wanted, 2)


@pytest.mark.parametrize("name", USABLE)
def test_what_was_not_sent_waits_in_its_own_place(name: str) -> None:
    how = GradientSums(mesh_of(), {0: member_of(CASES[name], "topk:ratio=0.25")})
    state, sent, given = how.init(), np.zeros(SHAPE), np.zeros(SHAPE)
    for seed in range(3):
        (array,) = draw(seed)
        totals, state, _ = taken(how, state, [array])
        sent += np.asarray(totals[0])
        given += array.sum(0)
    residual = np.asarray(state["gradients"]["w0"]["residual"], np.float64).sum(0)
    assert np.abs(residual).max() > 0.1
    # bfloat16 on the wire: what rounding took is in the residual as well.
    np.testing.assert_allclose(sent + residual.reshape(SHAPE), given, atol=1e-5)


def test_gradients_of_all_ways_in_one_step() -> None:
    members = {k: member_of(case, "dense", k) for k, case in enumerate(USABLE.values())}
    how = GradientSums(mesh_of(), members)
    arrays = draw(5, len(members))
    totals, _, sums = taken(how, how.init(), arrays)
    for k, array in enumerate(arrays):
        np.testing.assert_allclose(totals[k], array.sum(0), rtol=1e-5, atol=1e-6)
    assert sums.shape == (len(members), sums.shape[1])


@pytest.mark.parametrize("after", ["at once", "whole", "scattered, hosts outer"])
@pytest.mark.parametrize("before", ["kept", "scattered, hosts outer", "at once"])
def test_residuals_move_between_ways(before: str, after: str) -> None:
    codec = "topk:ratio=0.25"
    old = GradientSums(mesh_of(), {0: member_of(CASES[before], codec)})
    new = GradientSums(mesh_of(), {0: member_of(CASES[after], codec)})
    (array,) = draw(7)
    totals, state, _ = taken(old, old.init(), [array])
    moved = carry_over(state, new)["gradients"]["w0"]["residual"]
    left = np.asarray(moved, np.float64).sum(0).reshape(SHAPE)
    expected = array.sum(0) - np.asarray(totals[0])
    np.testing.assert_allclose(left, expected, atol=1e-5)
