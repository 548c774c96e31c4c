"""The training script of `soak.py` and `reform.py`: a small model.

Usage: autopar run --processes 2 benchmarks/soak_script.py OUT STEPS [WIDTH [DEPTH]]
Every process appends a line to OUT.PID for each step: [step, loss, time].
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

OUT, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH = int(sys.argv[3]) if len(sys.argv) > 3 else 16
DEPTH = int(sys.argv[4]) if len(sys.argv) > 4 else 2
PACE_S = float(os.environ.get("SOAK_PACE_S", "0.01"))
# With links that cost nothing, plans split even small states, so processes need each
# other's shards. With expensive links, plans keep the whole state in every process.
SPLIT = os.environ.get("SOAK_SPLIT", "1")
LINKS = {"1": (1e-12, 1e15), "whole": (1.0, 1e6)}
SURVIVE = int(os.environ.get("SOAK_SURVIVE", "2"))
# Weight decay makes rounding differences fade, so that other orders of summation in
# other worlds do not add up.
TX = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.02, momentum=0.9))


def cluster() -> autopar.Cluster | None:
    """A cluster of one process, which is extended to a world; None: this machine's."""
    if SPLIT not in LINKS:
        return None
    latency_s, bandwidth = LINKS[SPLIT]
    found = autopar.Cluster.parse("2:cpu")
    links = [
        dataclasses.replace(
            x.link, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth
        )
        for x in found.levels
    ]
    levels = tuple(
        dataclasses.replace(x, link=link)
        for x, link in zip(found.levels, links, strict=True)
    )
    return dataclasses.replace(found, levels=levels)


@autopar.parallelize(
    cluster=cluster(), seconds=2, compression=os.environ.get("SOAK_CODEC", "none")
)
def train_step(state: Any, batch: Any) -> Any:
    """One step of a sum of layers, which is linear in its parameters.

    In a linear model, rounding differences between worlds do not grow as in a deep
    network.
    """

    def loss(params: Any) -> jax.Array:
        out = jnp.zeros_like(batch["y"])
        for k, layer in enumerate(params["layers"]):
            features = jnp.sin((k + 1) * batch["x"])
            out = out + features @ layer["weight"] + layer["bias"]
        return jnp.mean((out - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, opt = TX.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def create_state(key: jax.Array) -> Any:
    """The initial state of a run."""
    params = {
        "layers": [
            {
                "weight": 0.1 * jax.random.normal(own, (WIDTH, WIDTH)),
                "bias": jnp.zeros(WIDTH),
            }
            for own in jax.random.split(key, DEPTH)
        ]
    }
    return {"params": params, "opt": TX.init(params)}


def source(position: int, rows: int) -> Any:
    """Samples by their number, the same for any process and batch size."""
    number = np.arange(position, position + rows, dtype=np.float32)[:, None]
    x = np.sin(number * np.arange(1, WIDTH + 1, dtype=np.float32)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x)}


def started(**options: Any) -> Any:
    """Starts the run of this process, with further options of `autopar.elastic`."""
    return autopar.elastic(
        train_step,
        create_state,
        source,
        batch=24,
        steps=STEPS,
        args=(jax.random.key(0),),
        survive=SURVIVE,
        **options,
    )


def main() -> None:
    """Trains, and writes a line for every step."""
    folder = os.environ.get("SOAK_CHECKPOINT")
    options = {"checkpoint": folder, "every": 200} if folder else {}
    run = started(ledger=f"{OUT}.ledger", **options)
    with open(f"{OUT}.{os.getpid()}", "a") as file:
        for done in run:
            line = [done.step, float(done.result), time.time()]
            print(json.dumps(line), file=file, flush=True)
            time.sleep(PACE_S)


if __name__ == "__main__":
    main()
