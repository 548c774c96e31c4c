"""A process of a training by local steps; test_local_processes.py runs it.

Usage: python local_worker.py PROCESS COUNT PORT OUT
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import step_forms as forms

import autopar
from autopar.runtime.local.rules import Overlap

EVERY, STEPS = 2, 5


def losses(
    process: int, count: int, overlap: Overlap | None = None
) -> tuple[list[float], Any, list[str]]:
    """The mean losses of this process's replicas, and parameters at the end."""
    form = forms.FORMS["plain"]
    made = autopar.local_steps(
        form.step, every=EVERY, replicas=2, codec="int8", cluster="2x2:cpu",
        overlap=overlap, seconds=1,
    )  # fmt: skip
    rows = forms.BATCH // count
    mine = slice(process * rows, (process + 1) * rows)
    given = [{k: v[mine] for k, v in b.items()} for b in forms.batches(STEPS)]
    state = made.init(form.create, jax.random.key(0), batch=forms.batch_structs())
    found = []
    for rows_of_step in given:
        state, *rest = made(state, rows_of_step)
        found.append(float(jax.tree.leaves(rest)[0]))
    state = made.synchronise(state)
    ends = [np.asarray(x, np.float64).tolist() for x in jax.tree.leaves(state.state)]
    return found, ends, sorted(made.telemetry)


def main() -> None:
    """Trains, and writes what was found."""
    process, count, port = map(int, sys.argv[1:4])
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", 4 // count)
        jax.distributed.initialize(f"localhost:{port}", count, process)
    out = pathlib.Path(f"{sys.argv[4]}.{process}")
    found = [losses(process, count, overlap) for overlap in (None, Overlap(1))]
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
