"""Tests attention over a ring of devices against attention on one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from cudnn_on_cpu import attention, block_gradients, cudnn_on_cpu
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import PartitionSpec as P
from kernel_cases import cudnn, gradient, struct, traced

from autopar_passes.graph.operators import Operator
from autopar_passes.replay.primitives import kernel_on_shards
from autopar_passes.replay.ring import Ring


@pytest.mark.parametrize("gathered", [False, True], ids=["ring", "gathered"])
@pytest.mark.parametrize("seq", [1, 2], ids=["sequence first", "heads first"])
@pytest.mark.parametrize(
    ("shape", "length"),
    [((2,), 8), ((2,), 6), ((4,), 16), ((2, 3), 24), ((4,), 12), ((8,), 16)],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_ring_attends_as_one_device(
    causal: bool, shape: tuple[int, ...], length: int, seq: int, gathered: bool
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
    ring = Ring(axes=names, size=size, causal=causal, seq=seq, gathered=gathered)
    spec = P(*(names if d == seq else None for d in range(4)))
    row_spec = P(None, None, names)

    masks = fused.MaskType

    def params(causal: bool) -> dict[str, Any]:
        mask = masks.CAUSAL if causal else masks.NO_MASK
        return {"layout": int(seq == 2), "scale": 0.5, "mask_type": mask}

    def forward(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        return attention(q, k, v, params(causal))

    def block(own: Any, moved: Any, causal: bool) -> tuple[Any, Any]:
        return forward(*own, *moved, causal)

    def backward(own: Any, moved: Any, *rest: Any) -> Any:
        out, rows, gradient, causal = rest
        given = (*own, *moved, rows, out, gradient)
        return block_gradients(*given, params(causal))

    def both(q: Any, k: Any, v: Any, given: Any) -> Any:
        out, rows = ring.forward(block, (q,), (k, v))
        return out, rows, ring.backward(backward, (q,), (k, v), out, rows, given)

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


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_kernel_runs_on_an_axis_of_any_number_of_devices(
    causal: bool, devices: int
) -> None:
    """A plan may give an axis of one device to a sequence, which is no ring then."""
    shape = (2, 16, 2, 4)
    mesh = jax.make_mesh(
        (devices,),
        ("a",),
        devices=jax.devices()[:devices],
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    with cudnn_on_cpu():
        arrays = [struct(*shape, dtype=np.float32)] * 3
        made, graph = traced(gradient(cudnn(is_causal=causal)), *arrays)
        equations = made.program.by_index()
        forward, backward = [op for op in graph.operators if op.kernel is not None]

        def both(op: Operator, *given: Any) -> tuple[Any, Any]:
            """The results of a kernel on whole arrays, and on shards."""
            eqn = equations[op.equation]
            (factor,) = {e.factor for e in op.rule.exchanges}
            operands, results = (
                [tuple((0,) if factor in d else () for d in dims) for dims in arrays]
                for arrays in (op.rule.operands, op.rule.results)
            )

            def on_shards(*x: Any) -> Any:
                return kernel_on_shards(eqn, op.rule, x, operands, results, mesh)

            def whole(*x: Any) -> Any:
                return eqn.source.primitive.bind(*x, **eqn.params)

            return jax.jit(whole)(*given), jax.jit(on_shards)(*given)

        given = [
            jax.random.normal(jax.random.key(k), made.program.values[v].shape)
            for k, v in enumerate(equations[forward.equation].inputs)
        ]
        wanted, got = both(forward, *given)
        out, rows = wanted
        of_whole, of_shards = both(backward, *given, rows, out, out + 1)
    pairs = zip((*wanted, *of_whole), (*got, *of_shards), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-5)
