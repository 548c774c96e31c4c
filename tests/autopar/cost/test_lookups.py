"""Tests the bytes of table look-ups if the rows of the table are split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cluster import DeviceSpec
from autopar.cost.compute import work_s
from autopar.steps.analysis import analyse
from autopar.steps.work import OperatorWork

ROWS, WIDTH, IDS, PARTS = 4096, 32, 512, 4
# Memory is what takes the time.
DEVICE = DeviceSpec(
    name="round numbers",
    kind="cpu",
    peak_flops_per_s=(("float32", 1e12),),
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e9,
    matmul_efficiency=1.0,
    kernel_latency_s=0.0,
)


def step(table: Any, ids: Any) -> Any:
    def loss_of(table: Any) -> Any:
        return jnp.sum(table[ids] ** 2)

    return table - jax.grad(loss_of)(table)


@functools.cache
def works() -> dict[str, OperatorWork]:
    table = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    ids = jax.ShapeDtypeStruct((IDS,), jnp.int32)
    found = analyse(step, (table, ids)).works().values()
    return {w.op.kind: w for w in found}


def seconds(work: OperatorWork, *factors: int) -> float:
    """Seconds of one shard if each factor is split into `PARTS`."""
    split = [PARTS if f in factors else 1 for f in range(len(work.op.rule.sizes))]
    return float(work_s(work, np.array([split], float), DEVICE)[0])


@pytest.mark.parametrize("kind", ["gather", "scatter-add"])
def test_no_device_knows_its_rows_before_it_looked(kind: str) -> None:
    work = works()[kind]
    table, rule = work.op.rule.operands[0], work.op.rule
    (row,), (column,) = table

    assert work.looked_up == {row}
    assert rule.sizes[row] == ROWS
    assert seconds(work, row) == seconds(work)
    assert seconds(work, column) == pytest.approx(seconds(work) / PARTS, rel=0.05)


def test_a_lookup_does_not_read_the_table() -> None:
    slower = DEVICE.corrections.vector_slowdown
    read, written, indices = IDS * WIDTH * 4, IDS * WIDTH * 4, IDS * 4
    most_s = slower * (read + written + indices) * 1e-9

    assert 0.4 * most_s < seconds(works()["gather"]) <= most_s
    assert most_s < slower * ROWS * WIDTH * 4e-9
