"""The training script of `ray_elastic.py`: that of `soak.py`, which waits when told.

Usage: autopar run --backend ray benchmarks/ray_script.py OUT STEPS
The file `pace` beside OUT holds the seconds to wait after each step.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import jax
import soak_script as script

import autopar


def main() -> None:
    """Trains, and writes every step down."""
    pace = pathlib.Path(script.OUT).with_name("pace")
    run = autopar.elastic(
        script.train_step,
        script.create_state,
        script.source,
        batch=24,
        steps=script.STEPS,
        args=(jax.random.key(0),),
        survive=script.SURVIVE,
    )
    with open(f"{script.OUT}.{os.getpid()}", "a") as file:
        for done in run:
            line = [done.step, float(done.result), time.time()]
            print(json.dumps(line), file=file, flush=True)
            time.sleep(float(pace.read_text()))


if __name__ == "__main__":
    main()
