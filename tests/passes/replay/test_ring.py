"""Attention over a ring of devices against attention on one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from cudnn_on_cpu import attention, block_gradients
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import PartitionSpec as P

from autopar_passes.replay.ring import Ring


@pytest.mark.parametrize("seq", [1, 2], ids=["sequence first", "heads first"])
@pytest.mark.parametrize(
    ("shape", "length"),
    [((2,), 8), ((2,), 6), ((4,), 16), ((2, 3), 24), ((4,), 12), ((8,), 16)],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_ring_attends_as_one_device(
    causal: bool, shape: tuple[int, ...], length: int, seq: int
) -> None:
    """Also with an odd number of rows a device, and over two axes of a mesh."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (4, 2, 2, 4)
    q, k, v, given = (
        jax.random.normal(key, (2, length, n, 5) if seq == 1 else (2, n, length, 5))
        for key, n in zip(keys, heads, strict=True)
    )
    names = ("a", "b")[: len(shape)]
    size = int(np.prod(shape))
    mesh = jax.make_mesh(
        shape,
        names,
        devices=jax.devices()[:size],
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
    )
    ring = Ring(axes=names, size=size, causal=causal, seq=seq)
    spec = P(*(names if d == seq else None for d in range(4)))
    row_spec = P(None, None, names)

    masks = fused.MaskType

    def params(causal: bool) -> dict[str, Any]:
        mask = masks.CAUSAL if causal else masks.NO_MASK
        return {"layout": int(seq == 2), "scale": 0.5, "mask_type": mask}

    def forward(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        return attention(q, k, v, params(causal))

    def backward(*arrays: Any) -> Any:
        q, k, v, out, rows, gradient, causal = arrays
        return block_gradients(q, k, v, rows, out, gradient, params(causal))

    def both(q: Any, k: Any, v: Any, given: Any) -> Any:
        out, rows = ring.forward(forward, q, k, v)
        return out, rows, ring.backward(backward, q, k, v, out, rows, given)

    run = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(spec,) * 4,
        out_specs=(spec, row_spec, (spec,) * 3),
        check_vma=False,
    )
    out, rows, found = jax.jit(run)(q, k, v, given)

    whole, whole_rows = forward(q, k, v, causal)
    loss = lambda *a: (given * forward(*a, causal)[0]).sum()  # noqa: E731
    np.testing.assert_allclose(out, whole, atol=2e-6)
    np.testing.assert_allclose(rows, whole_rows, atol=2e-6)
    for got, wanted in zip(found, jax.grad(loss, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
