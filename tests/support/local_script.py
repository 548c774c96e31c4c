"""A training script by local steps for tests of elastic runs with several processes.

Usage: autopar run ... local_script.py OUT STEPS SURVIVE PACE_S [CHECKPOINTS]

Each process is a replica. Each of the last steps takes a second until a file `go`
exists beside OUT. A line of OUT.PID has the number of a step, its loss, the number of
outer steps, a number of the anchors and one of the parameters.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import zlib

import elastic_runs
import jax
import numpy as np
import step_forms as forms

import autopar

EVERY, LAST = int(os.environ.get("LOCAL_EVERY", "5")), 40


def digest(tree: object) -> int:
    """A number of the bits of the arrays that this process has."""
    parts = [x.addressable_data(0) for x in jax.tree.leaves(tree)]
    return zlib.crc32(b"".join(np.asarray(x).tobytes() for x in parts))


def main() -> None:
    """Trains, and writes each step and its loss to the file OUT.PID."""
    out, steps, survive, pace_s, *more = sys.argv[1:]
    go = pathlib.Path(out).with_name("go")
    step = autopar.local_steps(forms.plain_step, every=EVERY, codec="int8", seconds=1)
    run = autopar.elastic(
        step,
        forms.create_plain,
        elastic_runs.source,
        batch=forms.BATCH,
        steps=int(steps),
        args=(jax.random.key(0),),
        survive=int(survive),
        checkpoint=f"{out}.{more[0]}" if more else None,
        ledger=f"{out}.ledger",
    )
    with open(f"{out}.{os.getpid()}", "a") as file:
        for done in run:
            state = run.state
            seen = int(state.rounds[0]), digest(state.anchors), digest(state.state[0])
            line = [done.step, float(done.result), *seen]
            print(json.dumps(line), file=file, flush=True)
            last = done.step > int(steps) - LAST and not go.exists()
            time.sleep(1.0 if last else float(pace_s))
    print(f"finished {run.step} steps", flush=True)


if __name__ == "__main__":
    main()
