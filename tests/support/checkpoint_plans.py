"""A small step under several kinds of plans, and its state under each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax.sharding import PartitionSpec
from planner_steps import mlp_loss, mlp_params, trained

import autopar
from autopar import Cluster, Plan

# Each of eight microbatches has 65 rows, so stages must weight uneven shares.
ROWS, WIDTH, HIDDEN, LAYERS = 8 * 65, 64, 256, 2
TX = optax.adamw(1e-2, eps=1e-3)
WHOLE, ROW, COLUMN = PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "t")
BATCH = {"batch/*": PartitionSpec("data")}
STAGED: dict[str, Any] = {"stages": 2, "microbatches": 2}
# The parameters and moments that tensor parallelism shards, by their names.
TENSOR = {"*/up": COLUMN, "*/bias": PartitionSpec("t"), "*/down": PartitionSpec("t")}

step = trained(mlp_loss, TX)


def create(seed: int = 0) -> Any:
    params = mlp_params(WIDTH, HIDDEN, LAYERS)
    params = jax.tree.map(lambda x: x + seed, params)
    return params, TX.init(params)


def batch(seed: int = 0) -> Any:
    x = np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def options(name: str) -> dict[str, Any]:
    """The arguments of `autopar.plan` for the plan of a name."""
    slow = "network=1Gb/s"
    return {
        "data": _one("8:cpu", {"params/*": WHOLE, "state/*": WHOLE}),
        "fsdp": _one("8:cpu", {"*/up": ROW, "*/down": ROW}),
        "fsdp-4": _one("4:cpu", {"*/up": ROW, "*/down": ROW}),
        "tensor": _one("4:cpu", TENSOR, axes=("t",), batch={}),
        "2-D": _one("2x4:cpu", TENSOR, axes=("data", "t")),
        "pipeline": {"cluster": "2:cpu", **STAGED},
        "pipeline+tensor": {"cluster": "4:cpu", "stages": 2, "microbatches": 8},
        "compressed": {
            **_one(f"4x1:cpu,{slow}", {"params/*": WHOLE}),
            "compression": "int4",
        },
        "compressed-2": {
            **_one(f"2x1:cpu,{slow}", {"params/*": WHOLE}),
            "compression": "int4",
        },
        "pipeline+codecs": {
            **{"cluster": f"4x1:cpu,{slow}", **STAGED, "pins": BATCH},
            **{"axis_names": ("data",), "compression": "topk:ratio=0.25"},
        },
        "remat": {"cluster": "4:cpu", **STAGED},
    }[name]


def _one(
    cluster: str, pins: Any, axes: tuple[str, ...] = ("data",), batch: Any = BATCH
) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "pins": {**batch, **pins},
        "axis_names": axes,
        "max_axes": len(axes),
        "seconds": None,
        "split_batch": False,
    }


NAMES = (
    *("data", "fsdp", "tensor", "2-D"),
    *("pipeline", "pipeline+tensor", "compressed", "remat"),
)


@functools.cache
def plan(name: str) -> Plan:
    """The plan of a name. The plan "remat" recomputes every layer."""
    asked = dict(options(name))
    cluster = Cluster.parse(asked.pop("cluster"))
    structs = jax.eval_shape(lambda: (*create(), jax.tree.map(jnp.asarray, batch())))
    found = autopar.plan(step, *structs, cluster=cluster, **asked)
    if name != "remat":
        return found
    assert found.pipeline is not None
    every = tuple(range(len(found.pipeline.layers)))
    again = msgspec.structs.replace(found.pipeline, recomputed=every)
    return msgspec.structs.replace(found, pipeline=again).with_checks()


def parallel(name: str) -> Any:
    """The step under the plan of a name, prepared but not compiled."""
    made = autopar.parallelize(step, plan=plan(name))
    made.prepare(*jax.eval_shape(create), batch())
    return made


def numbers(state: Any) -> list[bytes]:
    """The bits of each array of a state."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]
