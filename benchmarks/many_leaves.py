"""Time of the first call of a step, by the number of arrays in its state.

    python benchmarks/many_leaves.py [--leaves 300 1000 5000] [--plain 300] [--write]

Each row is a separate process. It has the CPU seconds of the first call of
`autopar.parallelize` on 8 simulated devices (tracing, planning, compiling and running),
and the largest resident memory. The states are: matrices of one shape that each
multiply the batch (`equal`), matrices of ten shapes (`shapes`), and a tower of layers
with Adam, whose moments are arrays as well (`tower`). ``--plain`` names the numbers of
arrays for which `jax.jit` is also timed. ``--write`` writes docs/data/many_leaves.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax

import autopar

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "many_leaves.json"
ROWS = 64
KINDS = "equal", "shapes", "tower"
# Limit of CPU seconds for 5,000 arrays.
BAR_S = 30.0


def state_and_step(kind: str, count: int) -> tuple[Any, Callable[..., Any], jax.Array]:
    """A state with about this number of arrays, its training step, and a batch."""
    if kind == "tower":
        # A layer has three arrays: its weight and two moments.
        weights = [0.1 * jnp.eye(16) + k / count for k in range(count // 3)]
        adam = optax.adam(1e-3)

        def train(state: Any, batch: Any) -> Any:
            def loss(weights: Any) -> Any:
                x = batch
                for w in weights:
                    x = x + jnp.tanh(x @ w)
                return jnp.mean(x**2)

            value, gradients = jax.value_and_grad(loss)(state[0])
            updates, moments = adam.update(gradients, state[1], state[0])
            return (optax.apply_updates(state[0], updates), moments), value

        return (weights, adam.init(weights)), train, jnp.ones((ROWS, 16))
    widths = range(16, 26) if kind == "shapes" else [16]
    weights = [jnp.ones((16, widths[k % len(widths)])) for k in range(count)]

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            return sum(jnp.mean((jnp.tanh(batch @ w) - 1) ** 2) for w in weights)

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * d for w, d in zip(weights, gradients, strict=True)], value

    return weights, step, jnp.ones((ROWS, 16))


def measure_row(kind: str, count: int, plain: bool) -> dict[str, Any]:
    """The figures of one row, in this process."""
    state, step, batch = state_and_step(kind, count)
    leaves = len(jax.tree.leaves(state))
    begin = time.process_time()
    run: Any = jax.jit(step) if plain else autopar.parallelize(step, seconds=2)
    jax.block_until_ready(run(state, batch))
    return {
        "state": kind,
        "leaves": leaves,
        "by": "jax.jit" if plain else "autopar",
        "cpu_s": round(time.process_time() - begin, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }


def main() -> int:
    """Prints the table; returns 1 if a row with at most 5,000 arrays misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[300, 1000, 5000])
    parser.add_argument("--plain", type=int, nargs="*", default=[300])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        kind, count, by = given.row
        print(json.dumps(measure_row(kind, int(count), by == "jax.jit")))
        return 0
    rows: list[dict[str, Any]] = []
    for kind in given.kinds:
        for count in given.leaves:
            for by in ["autopar", *(["jax.jit"] if count in given.plain else [])]:
                words = [sys.executable, __file__, "--row", kind, str(count), by]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                row = json.loads(done.stdout.splitlines()[-1])
                rows.append(row)
                print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    ours = [row for row in rows if row["by"] == "autopar" and row["leaves"] <= 5000]
    if given.write:
        summary = {
            f"CPU s of the first call, {x['state']} of {x['leaves']}": x["cpu_s"]
            for x in ours
        }
        found = {
            "command": "python benchmarks/many_leaves.py --write",
            "bar_cpu_s": BAR_S,
            "summary": summary,
            "rows": rows,
        }
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["cpu_s"] > BAR_S for row in ours))


if __name__ == "__main__":
    sys.exit(main())
