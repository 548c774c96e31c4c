"""Data parallelism with int8 gradients, written by hand with `jax.shard_map`.

A planned step should be as fast as this one. All gradients form one vector. It is
quantised in blocks with one scale each, exchanged by an all-to-all, summed in float32,
quantised again and gathered. There is no error feedback.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import language_model
import worker
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

BLOCK = 256
AXIS = "data"


def _quantised(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks (..., blocks, BLOCK) as int8, with the scale of each, float32."""
    scale = jnp.max(jnp.abs(values), axis=-1, keepdims=True) / 127.0
    safe = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(values / safe).astype(jnp.int8), scale


def mean(values: jax.Array, workers: int) -> jax.Array:
    """The mean of a float32 vector over the devices of `AXIS`, by int8."""
    size = values.size
    padded = jnp.pad(values, (0, -size % (workers * BLOCK)))
    blocks = padded.reshape(workers, -1, BLOCK)
    sent = jax.lax.optimization_barrier(_quantised(blocks))
    codes, scales = (jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True) for x in sent)
    part = jnp.sum(codes.astype(jnp.float32) * scales, axis=0) / workers
    kept = jax.lax.optimization_barrier(_quantised(part))
    codes, scales = (jax.lax.all_gather(x, AXIS, tiled=True) for x in kept)
    return (codes.astype(jnp.float32) * scales).reshape(-1)[:size]


class HandwrittenStep:
    """The step, with those methods of a planned step that the benchmark calls."""

    def __init__(self, workload: language_model.Workload) -> None:
        """Stores the workload; compiles nothing yet."""
        self.plan = None
        count = worker.count()
        mesh = jax.make_mesh((count,), (AXIS,), (jax.sharding.AxisType.Auto,))
        self._rows = NamedSharding(mesh, PartitionSpec(AXIS))
        self._whole = NamedSharding(mesh, PartitionSpec())

        def local_step(state: Any, data: Any) -> Any:
            loss, grads = jax.value_and_grad(workload.eval_loss)(state.params, data)
            flat, unravel = ravel_pytree(grads)
            after = state.apply_gradients(grads=unravel(mean(flat, count)))
            return after, {"loss": jax.lax.pmean(loss, AXIS)}

        mapped = jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        self._step = jax.jit(mapped, donate_argnums=0)

    def init(self, create: Any, batch: Any) -> Any:
        """The initial state, whole on every device."""
        del batch
        return jax.jit(create, out_shardings=self._whole)()

    def __call__(self, state: Any, data: Any) -> Any:
        """One step on this process's rows of the batch."""
        rows = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(self._rows, x), data
        )
        return self._step(state, rows)
