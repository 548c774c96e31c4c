"""Moves the state of a small GPT between all pairs of eight plans, in two ways.

    python benchmarks/plan_pairs.py [--folder FOLDER]

The state is moved in memory, freeing each array as soon as it is moved, and through a
checkpoint. For each pair, the benchmark prints the milliseconds of both ways, and
checks that every bit of the state is the same. The residuals of the plan with codecs
are those of a step. The next plan with codecs must start from residuals with the same
sum over workers, up to 1e-6.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

import jax
import msgspec
import numpy as np
import workloads
from jax.sharding import PartitionSpec

NAMES = (
    *("data", "fsdp", "tensor", "2-D"),
    *("pipeline", "pipeline+tensor", "compressed", "remat"),
)
SIZES = {"layers": 2, "d_model": 128, "heads": 8, "seq": 64, "vocab": 512}
ROWS = 24


def main() -> int:
    """Prints the table; returns 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    try:
        return _run(folder)
    finally:
        shutil.rmtree(folder)


def _run(folder: pathlib.Path) -> int:
    import autopar

    run = workloads.training("gpt", batch=ROWS, **SIZES)
    batch = next(iter(run.batches()))
    shapes = jax.eval_shape(run.create_state, jax.random.key(0))
    steps: dict[str, Any] = {}
    for name in NAMES:
        plan = _plan(name, run.step, shapes, batch)
        steps[name] = autopar.parallelize(run.step, plan=plan)
        steps[name].prepare(shapes, batch)
        print(f"{name}: {plan!r}", flush=True)
    workloads.row("from \\ to: in memory / checkpoint, ms", *NAMES)
    workloads.row("---", *["---"] * len(NAMES))
    worst = 0
    for source in NAMES:
        cells, differ = _row(source, steps, run, batch, folder / source)
        workloads.row(source, *cells)
        worst = max(worst, differ)
    print(f"arrays that differ: {worst}")
    return int(worst > 0)


def _row(
    source: str, steps: dict[str, Any], run: Any, batch: Any, folder: pathlib.Path
) -> tuple[list[str], int]:
    """Milliseconds to each plan, and the number of arrays that differ."""
    from autopar import Checkpoints
    from autopar.runtime.preparation import moved_state

    step, cells, differ = steps[source], list[str](), 0
    state = step.init(run.create_state, jax.random.key(0))
    state = jax.tree.map(jax.device_put, state, step.shardings(state))
    if source == "compressed":
        state, _ = step(state, batch)
    bits = _bits(state)
    with Checkpoints(folder) as made:
        made.save(step, state, step=1, position=ROWS)
    for target in NAMES:
        other = steps[target]
        copy = jax.tree.map(
            lambda x: jax.device_put(x, x.sharding, may_alias=False), state
        )
        paths = [i.path for i in step.running.planned.analysis.graph.inputs]
        arrays = dict(zip(paths, jax.tree.leaves(copy), strict=False))
        jax.block_until_ready(copy)
        begin = time.perf_counter()
        old, new = step.running.planned, other.running.planned
        moved = moved_state(arrays, old, new, consume=True)
        jax.block_until_ready(moved)
        moved_s = time.perf_counter() - begin
        begin = time.perf_counter()
        found = made.restore(other, run.create_state, jax.random.key(0))
        jax.block_until_ready(jax.tree.leaves(found.state))
        restored_s = time.perf_counter() - begin
        differ += sum(a != b for a, b in zip(_bits(moved), bits, strict=True))
        differ += sum(a != b for a, b in zip(_bits(found.state), bits, strict=True))
        if source == "compressed":
            differ += _residuals_differ(step, other, steps["compressed"])
        cells.append(f"{1e3 * moved_s:.0f} / {1e3 * restored_s:.0f}")
    return cells, differ


def _residuals_differ(before: Any, after: Any, compressed: Any) -> int:
    """The number of residuals whose sum changes under a plan with fewer workers."""
    from autopar.runtime.gradients.codec_state import carry_over

    held = carry_over(after.compression_state, compressed.running.planned.sums)
    old = before.compression_state["gradients"]
    return sum(
        not np.allclose(_sum(held["gradients"][name]), _sum(old[name]), 0, 1e-6)
        for name in old
    )


def _sum(held: Any) -> Any:
    residual = held["residual"]
    return 0.0 if isinstance(residual, tuple) else np.asarray(residual, float).sum(0)


def _bits(state: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def _plan(name: str, step: Any, shapes: Any, batch: Any) -> Any:
    import autopar

    asked = dict(_options(name))
    cluster = autopar.Cluster.parse(asked.pop("cluster"))
    found = autopar.plan(step, shapes, batch, cluster=cluster, **asked)
    if name != "remat":
        return found
    every = tuple(range(len(found.pipeline.layers)))
    again = msgspec.structs.replace(found.pipeline, recomputed=every)
    return msgspec.structs.replace(found, pipeline=again).with_checks()


def _options(name: str) -> dict[str, Any]:
    whole, rows = PartitionSpec(), PartitionSpec("data")
    every = {"state/*": whole}
    sharded = {"*/up/kernel": rows, "*/down/kernel": rows}
    tensor = {
        "*/up/kernel": PartitionSpec(None, "t"),
        "*/up/bias": PartitionSpec("t"),
        "*/down/kernel": PartitionSpec("t"),
    }
    staged: dict[str, Any] = {"stages": 2, "seconds": 5}
    return {
        "data": _one("8:cpu", every),
        "fsdp": _one("8:cpu", sharded),
        "tensor": _one("4:cpu", tensor, axes=("t",), batch={}),
        "2-D": _one("2x4:cpu", tensor, axes=("data", "t")),
        "pipeline": {"cluster": "2:cpu", "microbatches": 2, **staged},
        # A microbatch has three rows, so stages split their weights and not the rows.
        "pipeline+tensor": {"cluster": "8:cpu", "microbatches": ROWS // 3, **staged},
        "compressed": {
            **_one("4x1:cpu,network=1Gb/s", every),
            "compression": "int4",
        },
        "remat": {"cluster": "4:cpu", "microbatches": 2, **staged},
    }[name]


def _one(
    cluster: str, pins: Any, axes: tuple[str, ...] = ("data",), batch: Any = None
) -> dict[str, Any]:
    split = {"batch*": PartitionSpec("data")} if batch is None else batch
    return {
        "cluster": cluster,
        "pins": {**pins, **split},
        "axis_names": axes,
        "max_axes": len(axes),
        "seconds": 5,
        "split_batch": False,
    }


if __name__ == "__main__":
    sys.exit(main())
