"""Tests sums that are computed again, for a branch that few steps take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_mesh import WORKERS, begin, normal
from jax.sharding import PartitionSpec

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Gradient
from autopar.compression.synchronise import synchronise_repeatably

CODECS = ("dense", "int8", "int4", "sign", "fp8", "topk", "powersgd:rank=2")
# Of whole blocks that are joined, of a part of one, of none, and a large one.
SHAPES = ((64 * WORKERS, 16), (8 * WORKERS, 16), (5, 3), (0, 4), (64 * WORKERS, 256))


def both(gradients: list[Gradient], partials: list[Any], states: Any) -> Any:
    """The first worker's sums, and the same sums computed again."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
    links = MeshLinks(("data",), WORKERS)

    def one(partials: Any, states: Any) -> Any:
        partials, states = jax.tree.map(lambda a: a[0], (partials, states))
        worker = jax.lax.axis_index("data")
        made = synchronise_repeatably(
            gradients, partials, states, links, worker, jnp.int32(0)
        )
        return jax.tree.map(lambda a: a[None], (made.totals, made.again()))

    whole = PartitionSpec("data")
    run = jax.shard_map(
        one, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False
    )
    return jax.jit(run)(partials, states)


@pytest.mark.parametrize("scatter_dim", [None, 0])
def test_they_are_the_same(scatter_dim: int | None) -> None:
    """Of gradients side by side, by themselves, scattered, and of no elements."""
    gradients = [
        Gradient(f"{name}-{k}", shape, codec, scatter_dim=scatter_dim, seed=k)
        for name in CODECS
        for k, shape in enumerate(SHAPES)
        if (codec := parse_codec(name))
        and (scatter_dim is None or shape[0] % WORKERS == 0)
        and not codec.check(shape, scatter=scatter_dim is not None)
    ]
    partials = [normal(WORKERS, *g.shape, seed=k) for k, g in enumerate(gradients)]
    totals, again = both(gradients, partials, begin(gradients))

    for gradient, total, anew in zip(gradients, totals, again, strict=True):
        np.testing.assert_array_equal(total, anew, err_msg=gradient.name)
