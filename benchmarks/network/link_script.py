"""The training script of `link_change.py`: a GPT for a cluster with given links.

Usage: autopar run ... link_script.py OUT CLUSTER CODEC LAYERS
The first process of a world appends to OUT when each step had ended, and worlds to
the ledger OUT.ledger.
"""

from __future__ import annotations

import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

import gpt

import autopar

OUT, CLUSTER, CODEC, LAYERS = sys.argv[1:]
BATCH, SEQUENCE = 32, 64
TRAINING = gpt.training(layers=int(LAYERS), batch=BATCH, seq=SEQUENCE)


def source(position: int, rows: int) -> Any:
    """Samples by their number, the same for any process and batch size."""
    words = [np.random.default_rng(position + k) for k in range(rows)]
    text = np.stack([w.integers(0, 64, SEQUENCE + 1, dtype=np.int32) for w in words])
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def main() -> None:
    """Trains until it is stopped."""
    step = autopar.parallelize(TRAINING.step, cluster=CLUSTER, compression=CODEC)
    run = autopar.elastic(
        step,
        TRAINING.create_state,
        source,
        batch=BATCH,
        steps=10**7,
        args=(jax.random.key(0),),
        ledger=f"{OUT}.ledger",
    )
    with open(OUT, "a") as file:
        for _ in run:
            if jax.process_index() == 0:
                print(time.time(), file=file, flush=True)


if __name__ == "__main__":
    main()
