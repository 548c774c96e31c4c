"""A training script for tests of elastic runs with several processes.

Usage: autopar run ... elastic_script.py OUT STEPS SURVIVE PACE_S [CHECKPOINTS [CODEC
[STAGES]]]

Unless PACE_S is 0, each of the last steps takes a second until a file `go` exists
beside OUT. The script reads events from the file `events` beside OUT.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import elastic_runs
import jax
import step_forms as forms

import autopar

LAST = int(os.environ.get("ELASTIC_LAST", "40"))


def main() -> None:
    """Trains, and writes each step and its loss to the file OUT.PID."""
    out, steps, survive, pace_s, *more = sys.argv[1:]
    folder = f"{out}.{more[0]}" if more and more[0] else None
    codec = more[1] if len(more) > 1 else "none"
    go = pathlib.Path(out).with_name("go")
    stages = int(more[2]) if len(more) > 2 else None
    cluster = forms.cheap("2:cpu")
    step = autopar.parallelize(
        forms.plain_step,
        cluster=cluster,
        seconds=2,
        compression=codec,
        stages=stages,
        microbatches=stages,
    )
    run = autopar.elastic(
        step,
        forms.create_plain,
        elastic_runs.source,
        batch=forms.BATCH,
        steps=int(steps),
        args=(jax.random.key(0),),
        survive=int(survive),
        checkpoint=folder,
        ledger=f"{out}.ledger",
        events=[f"file:{go.with_name('events')}"],
    )
    with open(f"{out}.{os.getpid()}", "a") as file:
        for done in run:
            print(json.dumps([done.step, float(done.result)]), file=file, flush=True)
            # The last steps are slow until all events of the test have happened, even
            # if the machine is busy.
            last = done.step > int(steps) - LAST and not go.exists()
            time.sleep(1.0 if last and float(pace_s) else float(pace_s))
    print(f"finished {run.step} steps", flush=True)


if __name__ == "__main__":
    main()
