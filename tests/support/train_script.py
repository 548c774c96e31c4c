"""A training script for several processes whose batch size follows the noise.

Usage: autopar run ... train_script.py OUT STEPS SURVIVE PACE_S [COMPILES_S]
If COMPILES_S is given, each compilation beside the steps takes so many seconds, and
writes the file OUT.compiles.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import time
from typing import Any

import following_cases as cases
import step_forms as forms

import autopar
from autopar.runtime import planned
from autopar.runtime.background import abandonable


def compile_slowly(out: str, seconds: float) -> None:
    """Makes compilations beside the steps take many seconds, as on a busy machine."""
    compile_lowered = planned.compile_lowered

    def slowly(lowered: Any) -> None:
        if threading.current_thread().name == "autopar-beside":
            with abandonable():
                pathlib.Path(f"{out}.compiles").touch()
                time.sleep(seconds)
        compile_lowered(lowered)

    planned.compile_lowered = slowly


def main() -> None:
    """Trains, and writes each step, its loss and its batch size to the file OUT.PID."""
    out, steps, survive, pace_s, *compiles_s = sys.argv[1:]
    if compiles_s:
        compile_slowly(out, float(compiles_s[0]))
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
