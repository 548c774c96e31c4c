"""Tests which dimension of a batch must be divisible."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import small_step

import autopar
from autopar import PlanError

STEPS = 3


def several(w: jax.Array, batches: jax.Array) -> Any:
    """Runs several steps in one call, with one batch each."""
    return jax.lax.scan(small_step.step, w, batches)


def accumulated(w: jax.Array, parts: jax.Array) -> Any:
    """Runs one step over the parts of a batch, in two nested loops."""

    def turn(_: Any, part: jax.Array) -> Any:
        return None, small_step.step(w, part)

    def outer(_: Any, inner: jax.Array) -> Any:
        return None, jax.lax.scan(turn, None, inner)[1]

    _, (new, losses) = jax.lax.scan(outer, None, parts)
    return new.mean((0, 1)), losses


def structs(*front: int) -> tuple[Any, Any]:
    w, batch = small_step.structs()
    return w, jax.ShapeDtypeStruct((*front, *batch.shape), batch.dtype)


@pytest.mark.parametrize(("step", "front"), [(several, (3,)), (accumulated, (3, 5))])
def test_a_loop_goes_through_what_lies_in_front_of_the_rows(
    step: Any, front: tuple[int, ...]
) -> None:
    plan = autopar.plan(step, *structs(*front), cluster="4:cpu", seconds=None)

    assert plan.shapes[next(p for p in plan.inputs if p != "w")][: len(front)] == front


def test_the_rows_behind_the_loop_must_be_divisible() -> None:
    w, _ = small_step.structs()
    batches = jax.ShapeDtypeStruct((8, 3, small_step.WIDTH), np.float32)

    with pytest.raises(PlanError, match="is 3 "):
        autopar.plan(several, w, batches, cluster="8:cpu")
