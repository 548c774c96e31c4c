"""A training script whose data source blocks when a test requests it.

Usage: autopar run ... hanging_script.py FOLDER STEPS PACE_S FIRST_S [STAGES]

The data source of worker K blocks while a file `hang.K` exists in FOLDER. In the first
step, the source of worker 1 takes FIRST_S seconds. A step with stages calls a host
function in its last stage, which blocks while a file `task` exists. Each of the last
steps takes a second until a file `go` exists.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import Any

import elastic_runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import step_forms as forms

import autopar
from autopar.elastic.processes.link import VARIABLE, Address

LAST = 20


def main() -> None:
    """Trains."""
    place, steps, pace_s, first_s, *more = sys.argv[1:]
    folder, worker = pathlib.Path(place), Address.parse(os.environ[VARIABLE]).worker
    stages = int(more[0]) if more else None

    def source(position: int, rows: int) -> np.ndarray:
        if worker == 1 and position < forms.BATCH:
            time.sleep(float(first_s))
        while (folder / f"hang.{worker}").exists():
            time.sleep(0.05)
        return elastic_runs.source(position, rows)

    def wait(number: np.ndarray) -> None:
        del number
        while (folder / "task").exists():
            time.sleep(0.05)

    def staged_step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
            out = hidden @ params["down"]
            jax.debug.callback(wait, out[0, 0])
            return jnp.mean((out - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = forms.TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    step = autopar.parallelize(
        staged_step if stages else forms.plain_step,
        cluster=forms.cheap("2:cpu"),
        seconds=2,
        stages=stages,
        microbatches=stages,
    )
    run = autopar.elastic(
        step,
        forms.create_plain,
        source,
        batch=forms.BATCH,
        steps=int(steps),
        args=(jax.random.key(0),),
        survive=1,
    )
    for done in run:
        last = done.step > int(steps) - LAST and not (folder / "go").exists()
        time.sleep(1.0 if last else float(pace_s))
    print(f"finished {run.step} steps", flush=True)


if __name__ == "__main__":
    main()
