"""A training script for several processes whose batch size follows the noise.

Usage: autopar run ... train_script.py OUT STEPS SURVIVE PACE_S
"""

from __future__ import annotations

import json
import os
import sys
import time

import following_cases as cases
import step_forms as forms

import autopar


def main() -> None:
    """Trains, and writes each step, its loss and its batch size to the file OUT.PID."""
    out, steps, survive, pace_s = sys.argv[1:]
    tx = cases.optimizer()
    pins = {"state/*": cases.PINS["state/*"]}
    step = cases.parallel(tx, cluster=forms.cheap("2:cpu"), seconds=2, pins=pins)

    def source(position: int, rows: int) -> object:
        time.sleep(float(pace_s))  # a step takes the same time for any number of rows
        return cases.source(position, rows)

    run = autopar.train(
        step,
        lambda: cases.create(tx),
        source,
        base_batch=cases.BASE,
        max_batch=4 * cases.BASE,
        # A condition in place of `steps=`, so that a change of the batch size pays off
        # even on a busy machine.
        until=lambda done: done.step + 1 >= int(steps),
        survive=int(survive),
        ledger=f"{out}.ledger",
    )
    begin = run.position
    with open(f"{out}.{os.getpid()}", "a") as file:
        for done in run:
            begin = done.position
            line = [done.step, float(done.result), begin, run.batch_size]
            print(json.dumps(line), file=file, flush=True)
    print(f"finished {run.step} steps, {run.progress:.0f} rows", flush=True)


if __name__ == "__main__":
    main()
