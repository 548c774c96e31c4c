"""Tests the work if a compiler computes operands while products read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.work import OperatorWork

ROWS, WIDTH = 64, 32
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
X_BYTES, W_BYTES = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


def works(step: Any, *arguments: Any, streamed: bool = True) -> list[OperatorWork]:
    return list(analyse(step, arguments).works(streamed=streamed).values())


def of(kind: str, found: list[OperatorWork]) -> OperatorWork:
    (work,) = [w for w in found if w.op.kind == kind]
    return work


def activated(w: Any, x: Any) -> Any:
    return (jnp.tanh(x) * 2.0 + jnp.sin(x)) @ w


def test_a_product_is_charged_what_its_operands_are_made_of() -> None:
    found = works(activated, W, X)
    # x once, w, and the result.
    assert of("dot_general", found).nbytes == 2 * X_BYTES + W_BYTES
    assert sum(w.nbytes for w in found) == of("dot_general", found).nbytes
    assert [w.op.kind for w in found if w.kernel] == ["dot_general"]


def test_others_charge_each_operator_what_it_reads() -> None:
    found = works(activated, W, X, streamed=False)
    assert of("tanh", found).nbytes == of("sin", found).nbytes == X_BYTES
    # Its operand is written for it, and read.
    assert of("dot_general", found).nbytes == 2 * X_BYTES + W_BYTES
    assert of("add", found).nbytes == X_BYTES


def test_a_part_of_an_array_is_all_that_is_read_of_it() -> None:
    def step(w: Any, x: Any) -> Any:
        return (2.0 * x[: ROWS // 2]) @ w

    read = of("dot_general", works(step, W, X)).nbytes
    assert read == X_BYTES / 2 + W_BYTES + X_BYTES / 2


def test_what_two_kernels_read_is_charged_to_both() -> None:
    def step(w: Any, x: Any) -> Any:
        y = jnp.tanh(x)
        return y @ w, y.T @ y

    found = works(step, W, X)
    first, second = sorted(w.nbytes for w in found if w.op.kind == "dot_general")
    assert first == X_BYTES + W_BYTES
    assert second == 2 * X_BYTES + W_BYTES


def test_operators_do_as_much_arithmetic() -> None:
    """Whatever is fused, all operators are there, with their FLOPs."""
    analysis: Analysis = analyse(activated, (W, X))
    flops = [
        {k: w.op.flops for k, w in analysis.works(streamed=streamed).items()}
        for streamed in (False, True)
    ]
    assert flops[0] == flops[1]


@pytest.mark.parametrize(("name", "streams"), [("v5e", 1), ("v5p", 1), ("h100", 0)])
def test_tpus_do(name: str, streams: int) -> None:
    assert Cluster.parse(f"4x4:{name}").device.streams == bool(streams)
