"""Tests that a program's collectives are those that its compiler runs on 64 TPUs."""

from __future__ import annotations

import importlib.util
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from autopar.cluster import Cluster
from autopar.compilers.compiled import compile_for
from autopar.compilers.targets import target_of
from autopar.layouts.assignment import apart_bytes, stated_layouts, written_sums
from autopar.layouts.layout import Layout, reshard_steps
from autopar_passes.audit.compiled import hlo_collectives
from autopar_passes.jax_compat import lowered_without_devices
from autopar_passes.layouts import constrain, partition_spec
from autopar_passes.sums.finish import run_and_sum

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("needs the extra tpu-compiler", allow_module_level=True)

CLUSTER = Cluster.parse("8x8:v5e")
SIZES = (8, 8)
MESH = AbstractMesh(SIZES, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
BOTH: Layout = ((0, 1), ())
WHOLE: Layout = ((), ())
SIDE = 1024


def compiled(function: object, *layouts: Layout) -> Counter[str]:
    """The bytes that one device sends for products of square matrices in layouts."""
    structs = [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)] * len(layouts)
    shardings = [NamedSharding(MESH, partition_spec(MESH, x)) for x in layouts]
    traced = jax.jit(function, in_shardings=shardings).trace(*structs)  # type: ignore[arg-type]
    with lowered_without_devices():
        lowered = traced.lower(lowering_platforms=("tpu",))
    (program,) = compile_for([lowered], target_of("v5e"), CLUSTER)
    text = program.text
    found: Counter[str] = Counter()
    for collective in hlo_collectives(text, as_run=True):
        found[collective.kind] += int(collective.sent_bytes)
    return found


def test_gathers_over_all_devices_send_what_is_planned() -> None:
    nbytes = 2 * SIDE**2
    steps = reshard_steps(BOTH, WHOLE, (), "", SIZES)
    most = apart_bytes(CLUSTER.device, CLUSTER.num_devices)

    def gathered(array: jax.Array) -> jax.Array:
        for layout in stated_layouts(BOTH, steps, SIZES, nbytes, most):
            array = constrain(array, MESH, layout)
        return array

    assert compiled(gathered, BOTH) == {"all_gather": nbytes * 63 // 64}


@pytest.mark.parametrize("target", [((), (0, 1)), ((0, 1), ())])
def test_scatters_of_odd_tiles_send_what_is_planned(target: Layout) -> None:
    """Of 1024 columns each device keeps 128 and then 16."""
    nbytes = 2 * SIDE**2
    sums = written_sums(WHOLE, reshard_steps(WHOLE, target, (0, 1), "sum", SIZES))

    def summed(left: jax.Array, right: jax.Array) -> jax.Array:
        return run_and_sum(
            lambda a, b: a.T @ b, (left, right), (BOTH, BOTH), sums, MESH
        )

    assert compiled(summed, BOTH, BOTH) == {"reduce_scatter": nbytes * 63 // 64}
