"""A process that trains with others by `autopar.train`, without a supervisor.

Usage: python train_worker.py PROCESS COUNT PORT OUT
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import following_cases as cases
import jax
import numpy as np
import step_forms as forms

import autopar
from autopar.elastic.train import TrainRun

STEPS, PACE_S = 150, 0.02


def main() -> None:
    """Trains, and writes a line for each step.

    A line has the loss, the batch, the loss of one process on this batch, the requested
    rows, and whether a change was being prepared at that time.
    """
    process, count, port, out = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"localhost:{port}", int(count), int(process), initialization_timeout=240
    )
    tx = cases.optimizer()
    step = cases.parallel(tx, cluster=forms.cheap(f"{count}:cpu"), seconds=2)

    asked: list[tuple[int, int]] = []

    def source(position: int, rows: int) -> object:
        time.sleep(PACE_S)  # a step takes the same time for any number of rows
        asked.append((position, rows))
        return cases.source(position, rows)

    run = autopar.train(
        step,
        lambda: cases.create(tx),
        source,
        base_batch=cases.BASE,
        max_batch=4 * cases.BASE,
        until=lambda done: done.step + 1 >= STEPS,
        progress=False,
    )
    assert isinstance(run, TrainRun)
    lines: list[object] = []
    weights, size = np.asarray(run.state["w"].addressable_data(0)), run.batch_size
    for done in run:
        wanted = cases.loss_of(weights, cases.source(done.position, size))
        lines.append(
            {
                "loss": float(done.result),
                "alone": float(wanted),
                "rows": [done.position, size],
                "asked": asked[-1],
                "busy": run.loop.busy,
            }
        )
        weights, size = np.asarray(run.state["w"].addressable_data(0)), run.batch_size
    pathlib.Path(f"{out}_{process}.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main()
