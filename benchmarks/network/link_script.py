"""The training script of `link_change.py` and `throttled_host.py`: a GPT.

Usage: autopar run ... link_script.py OUT CLUSTER CODEC LAYERS BATCH [MICROBATCHES]
BATCH is a number of rows and their length, such as 32x64.
MICROBATCHES is a number, or one for each replica, such as 3+3+1.
The first process of a world appends to OUT when each step had ended, worlds to the
ledger OUT.ledger, and the microbatches of each replica of a plan to OUT.shares.
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

OUT, CLUSTER, CODEC, LAYERS, SIZES, *SHARES = sys.argv[1:]
BATCH, SEQUENCE = map(int, SIZES.split("x"))
TRAINING = gpt.training(layers=int(LAYERS), batch=BATCH, seq=SEQUENCE)


def source(position: int, rows: int) -> Any:
    """Samples by their number, the same for any process and batch size."""
    words = [np.random.default_rng(position + k) for k in range(rows)]
    text = np.stack([w.integers(0, 64, SEQUENCE + 1, dtype=np.int32) for w in words])
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def main() -> None:
    """Trains until it is stopped."""
    shares = [int(n) for text in SHARES for n in text.split("+")]
    step = autopar.parallelize(
        TRAINING.step, cluster=CLUSTER, compression=CODEC, microbatches=shares or None
    )
    run = autopar.elastic(
        step,
        TRAINING.create_state,
        source,
        batch=BATCH,
        steps=10**7,
        args=(jax.random.key(0),),
        ledger=f"{OUT}.ledger",
    )
    with open(OUT, "a") as file, open(f"{OUT}.shares", "a") as shares_file:
        for done in run:
            if jax.process_index() != 0:
                continue
            print(time.time(), file=file, flush=True)
            if (plan := done.plan) is not None:
                dealt = [r.microbatches for r in plan.replicas] or [plan.microbatches]
                print("+".join(map(str, dealt)), file=shares_file, flush=True)


if __name__ == "__main__":
    main()
