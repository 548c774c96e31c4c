"""Tests which dot products run on the matrix units, and the cost of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.cluster.presets import PRESETS
from autopar.cluster.specs import CALIBRATIONS, DeviceSpec
from autopar.cost.compute import product_s, rates_of, work_s
from autopar.steps.analysis import analyse
from autopar.steps.fusion import Fusion
from autopar.steps.work import InMemory, OperatorWork, in_memory, operator_work
from autopar_passes.graph.operators import OperatorGraph

Arrays = Callable[[jax.Array, jax.Array], jax.Array]
Numbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]
# Name -> dimensions that are contracted and shared, and the shapes.
MULTIPLIED: dict[str, tuple[Numbers, tuple[int, ...], tuple[int, ...]]] = {
    "head mask": ((((), ()), ((1,), (0,))), (8, 4, 64, 64), (4,)),
    "outer product": ((((), ()), ((), ())), (512,), (256,)),
    "gate": ((((), ()), ((0, 1), (0, 1))), (64, 512), (64, 512)),
    "one element contracted": ((((1,), (0,)), ((), ())), (512, 1), (1, 256)),
}
# What sums, too: the vector units do these as well.
SUMMED: dict[str, tuple[Numbers, tuple[int, ...], tuple[int, ...]]] = {
    "matrix and vector": ((((1,), (0,)), ((), ())), (512, 256), (256,)),
    "gradient of a mask": ((((0, 2), (0, 2)), ((1,), (1,))), (8, 4, 64), (8, 4, 64)),
}


def all_in_memory(graph: OperatorGraph) -> InMemory:
    """Lifetimes in which each value has its own buffer."""
    every = frozenset(range(len(graph.values)))
    return in_memory(graph, Fusion(every, every))


def the_dot(step: Arrays, *args: jax.Array) -> OperatorWork:
    """The work of the only `dot_general` of a program."""
    graph = analyse(step, args).graph
    (op,) = [op for op in graph.operators if op.kind == "dot_general"]
    return operator_work(graph, op, all_in_memory(graph))


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_dot_that_contracts_nothing_multiplies_elements(name: str) -> None:
    """The vector units do it."""
    numbers, left, right = MULTIPLIED[name]
    a, b = jnp.ones(left), jnp.ones(right)

    work = the_dot(lambda a, b: jax.lax.dot_general(a, b, numbers), a, b)

    assert not work.is_matrix


@pytest.mark.parametrize("name", SUMMED)
def test_a_dot_with_a_side_of_one_element_is_no_product(name: str) -> None:
    """It multiplies and adds, and the vector units do it."""
    numbers, left, right = SUMMED[name]
    a, b = jnp.ones(left), jnp.ones(right)

    work = the_dot(lambda a, b: jax.lax.dot_general(a, b, numbers), a, b)

    assert not work.is_matrix


def test_a_dot_that_contracts_two_elements_is_a_product() -> None:
    """Two are enough."""
    work = the_dot(jnp.dot, jnp.ones((512, 2)), jnp.ones((2, 256)))

    assert work.is_matrix


def _times(masked: Arrays, shape: tuple[int, ...]) -> float:
    """Predicted seconds of a step whose gradient passes through a mask of heads."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(masked(x, w))))(w)

    w = jax.ShapeDtypeStruct((shape[1],), jnp.float32)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = autopar.plan(lambda w, x: step(w, x.reshape(shape)), w, x, cluster="1:h100")
    return plan.predicted.step_s


def test_a_mask_of_heads_costs_what_its_product_of_elements_costs() -> None:
    """`einsum` makes a `dot_general` of it, `*` none."""
    shape = (64, 16, 512, 512)

    by_einsum = _times(lambda x, w: jnp.einsum("bhqk,h->bhqk", x, w), shape)
    by_product = _times(lambda x, w: x * w[:, None, None], shape)

    assert by_einsum == pytest.approx(by_product, rel=0.1)


# Products on devices with a table of rates.
H100 = PRESETS["h100"].device
TABLED = sorted(name for name, p in PRESETS.items() if p.device.rates)
DTYPES = st.sampled_from([("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)])
sides = st.floats(1.0, 1e5)


def time_s(
    device: DeviceSpec, dtype: tuple[str, int], batch: float, *mnk: float
) -> float:
    return product_s(*dtype, device, batch, *mnk)


@given(st.sampled_from(TABLED), DTYPES, st.floats(1.0, 1e3), sides, sides, sides)
def test_products_take_at_least_their_peak(
    name: str, dtype: tuple[str, int], batch: float, m: float, n: float, k: float
) -> None:
    """XLA's 2501 TFLOP/s of float8 on an H100 are above the datasheet's 1979."""
    device, part = PRESETS[name].device, 0.7 if dtype[1] == 1 else 0.95
    least = part * 2.0 * batch * m * n * k / device.peak(dtype[0])
    assert time_s(device, dtype, batch, m, n, k) > max(1e-6, least)


@given(st.sampled_from(TABLED), DTYPES, sides, sides, sides, st.integers(0, 3))
def test_twice_the_work_takes_longer(
    name: str, dtype: tuple[str, int], m: float, n: float, k: float, which: int
) -> None:
    """Up to what the measurements say otherwise between two of their knots."""
    device, shape = PRESETS[name].device, [1.0, m, n, k]
    more = [2 * s if i == which else s for i, s in enumerate(shape)]
    assert time_s(device, dtype, *more) > 0.8 * time_s(device, dtype, *shape)


@given(DTYPES, sides, sides, sides)
def test_times_of_products_have_no_jumps(
    dtype: tuple[str, int], m: float, n: float, k: float
) -> None:
    near = time_s(H100, dtype, 1.0, m * 1.0001, n * 1.0001, k * 1.0001)
    assert near == pytest.approx(time_s(H100, dtype, 1.0, m, n, k), rel=2e-3)


@pytest.mark.parametrize("name", TABLED)
def test_large_products_attain_the_efficiency(name: str) -> None:
    """About: the tables' largest products are smaller."""
    device = PRESETS[name].device
    for dtype in (("bfloat16", 2), ("float16", 2)):
        found = 2.0 * 16384.0**3 / time_s(device, dtype, 1.0, *[16384.0] * 3)
        attained = device.peak(dtype[0]) * device.matmul_efficiency
        assert 0.8 * attained < found < 1.1 * attained


def test_the_efficiency_of_the_user_counts() -> None:
    half = dataclasses.replace(H100, matmul_efficiency=H100.matmul_efficiency / 2)
    shape = (1.0, 16384.0, 16384.0, 16384.0)
    times = [time_s(device, ("bfloat16", 2), *shape) for device in (half, H100)]
    assert times[0] == pytest.approx(2 * times[1], rel=0.05)


def test_the_half_rate_side_of_the_user_replaces_the_table() -> None:
    own = dataclasses.replace(CALIBRATIONS["gpu"], half_rate_side=1.0)
    other = dataclasses.replace(CALIBRATIONS["gpu"], skew=1.5)

    assert rates_of(H100, 2) is not None
    assert rates_of(dataclasses.replace(H100, calibration=other), 2) is not None
    assert rates_of(dataclasses.replace(H100, calibration=own), 2) is None


@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_what_no_matrix_unit_takes_runs_on_the_vector_units(dtype: str) -> None:
    assert H100.peak(dtype) == H100.vector_peak
    assert H100.peak("int8") > H100.peak("bfloat16")


def test_a_convolution_of_each_channel_waits_for_memory() -> None:
    """Nearly all of a tile would be empty."""
    x, kernel = jnp.ones((32, 56, 56, 256)), jnp.ones((3, 3, 1, 256))
    graph = analyse(
        lambda x, kernel: jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=256,
        ),
        (x, kernel),
    ).graph
    (op,) = [op for op in graph.operators if op.kind == "conv_general_dilated"]
    work = operator_work(graph, op, all_in_memory(graph))

    (found,) = work_s(work, np.ones((1, len(op.rule.sizes))), H100)

    memory_s = 2 * x.nbytes / H100.memory_bandwidth_bytes_per_s
    assert memory_s <= found < 1.5 * memory_s
