"""CPU time of a call of a planned step, beyond that of `jax.jit`.

    python benchmarks/call_overhead.py [--rounds 60] [--leaves 1 20 200 2000] [--write]

A planned step of one stage and one microbatch is compared with ``jax.jit`` of the same
function, with the same shardings and the same donated arguments. The two are called in
turns, each on its own state. The overhead of a round is the difference between the two
medians of some calls, in CPU microseconds of the calling thread. The table has the
median over rounds, and its 95 % interval from 2,000 resamples. The arrays are small, so
that a call does little more than issue the program. The state is a dictionary, a Flax
`TrainState` or an `nnx.State`. The batch is a JAX array on the right devices, or a
NumPy array. ``--write`` writes docs/data/call_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

DEVICES = 2
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import autopar  # noqa: E402

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "call_overhead.json"
RESAMPLES = 2000
FIXED_US, LEAF_US = 30.0, 0.5

Step = Callable[[Any, Any], Any]


def made(kind: str, count: int) -> tuple[Any, Step]:
    """A state with this number of arrays, and a step that changes all of them.

    Args:
      kind: kind of the state.
      count: arrays.
    """
    arrays = {f"w{k}": jnp.full((8,), 1.0 + k) for k in range(count)}
    if kind == "nnx":
        state: Any = nnx.State({k: nnx.Param(x) for k, x in arrays.items()})
    elif kind == "TrainState":
        # The step counter is also an array.
        arrays.popitem()
        state = TrainState.create(
            apply_fn=None, params=arrays or {"w": jnp.ones(8)}, tx=optax.sgd(1e-3)
        )
    else:
        state = arrays

    def step(state: Any, batch: Any) -> Any:
        mean = jnp.mean(batch)
        return jax.tree.map(lambda x: x - (1e-3 * mean).astype(x.dtype), state)

    return state, step


def interval(found: list[float]) -> tuple[float, float]:
    """The 95 % interval of a median."""
    rng = np.random.default_rng(0)
    chosen = rng.choice(np.array(found), (RESAMPLES, len(found)))
    low, high = np.quantile(np.median(chosen, axis=1), (0.025, 0.975))
    return float(low), float(high)


def measured(kind: str, count: int, batch_of: str, rounds: int) -> dict[str, Any]:
    """One row of the table: kind of state, number of arrays, and kind of batch."""
    state, step = made(kind, count)
    batch = np.ones((8, 4), np.float32)
    planned = autopar.parallelize(step, cluster=f"{DEVICES}:cpu", microbatches=1)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    mine = planned.init(lambda: jax.tree.map(jnp.copy, state), batch=example)
    where = planned.shardings(mine)
    leaves, tree = jax.tree.flatten(mine)
    rows = planned.running.planned.in_shardings[len(leaves)]
    plain = jax.jit(
        step,
        in_shardings=(where, rows),
        out_shardings=where,
        donate_argnums=(0,),
    )
    theirs = jax.tree.unflatten(tree, [jnp.copy(x) for x in leaves])
    theirs = jax.device_put(theirs, where)
    given: Any = jax.device_put(batch, rows) if batch_of == "in place" else batch
    runs: list[tuple[Step, list[Any]]] = [(planned, [mine]), (plain, [theirs])]
    calls = max(3, min(50, 20_000 // (count + 20)))
    for function, held in 5 * runs:
        called(function, held, given)
    found: list[list[float]] = [[], []]
    for _ in range(rounds):
        spent: list[list[float]] = [[], []]
        for number in range(calls):
            for k in (0, 1) if number % 2 == 0 else (1, 0):
                function, held = runs[k]
                spent[k].append(called(function, held, given))
        for own, times in zip(found, spent, strict=True):
            own.append(statistics.median(times))
    extra = [a - b for a, b in zip(*found, strict=True)]
    low, high = interval(extra)
    return {
        "state": kind,
        "leaves": len(leaves),
        "batch": batch_of,
        "autopar_us": statistics.median(found[0]),
        "jit_us": statistics.median(found[1]),
        "overhead_us": statistics.median(extra),
        "interval_us": [low, high],
        "bar_us": FIXED_US + LEAF_US * len(leaves),
    }


def called(function: Step, held: list[Any], batch: Any) -> float:
    """CPU microseconds of this thread to issue a call.

    The function waits for the end of the call before the next call. Time of other
    programs does not count.
    """
    begin = time.thread_time()
    held[0] = function(held[0], batch)
    spent = time.thread_time() - begin
    jax.block_until_ready(held[0])
    return 1e6 * spent


def cases(leaves: list[int]) -> Iterator[tuple[str, int, str]]:
    """The rows of the table: kind of state, number of arrays, and kind of batch."""
    for count in leaves:
        yield "dict", count, "in place"
    for kind in ("TrainState", "nnx"):
        yield kind, 200, "in place"
    yield "dict", 200, "numpy"


def written(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, with the figures that docs/results.md shows."""
    summary = {
        f"us beyond jax.jit, {row['state']} of {row['leaves']}, batch {row['batch']}": (
            round(row["overhead_us"], 1)
        )
        for row in rows
    }
    command = "python benchmarks/call_overhead.py --write"
    return {"command": command, "devices": DEVICES, "summary": summary, "rows": rows}


def main() -> int:
    """Prints the table; returns 1 if a row misses its bar."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 20, 200, 2000])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind, count, batch in cases(options.leaves):
        row = measured(kind, count, batch, options.rounds)
        rows.append(row)
        low, high = row["interval_us"]
        print(
            f"{kind:10} {row['leaves']:5} leaves, batch {batch:8}: "
            f"{row['autopar_us']:8.1f} us, jax.jit {row['jit_us']:8.1f} us, overhead "
            f"{row['overhead_us']:7.1f} us ({low:.1f} to {high:.1f}), bar "
            f"{row['bar_us']:.1f}",
            flush=True,
        )
    if options.write:
        DATA.write_text(json.dumps(written(rows), indent=1) + "\n")
    return int(any(row["overhead_us"] > row["bar_us"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
