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

EVERY, STEPS, SAVED = 2, 5, 3
OVERLAPS = (None, Overlap(1))


def training(overlap: Overlap | None) -> autopar.LocalSteps:
    """Two replicas; with an overlap, each process passes the whole batch."""
    return autopar.local_steps(
        forms.FORMS["plain"].step, every=EVERY, replicas=2, codec="int8",
        cluster="2x2:cpu", overlap=overlap, seconds=1,
        whole_argnames=() if overlap is None else "batch",
    )  # fmt: skip


def losses(
    process: int,
    count: int,
    overlap: Overlap | None = None,
    folder: pathlib.Path | None = None,
) -> tuple[list[float], Any, list[str]]:
    """The mean losses of this process's replicas, and parameters at the end.

    Args:
      process: number of this process.
      count: number of processes.
      overlap: how outer steps run beside training; None: they do not.
      folder: a folder that has a checkpoint after step `SAVED`, or gets one. The
        training goes on with the state that is restored from it.
    """
    form, made = forms.FORMS["plain"], training(overlap)
    rows = forms.BATCH // count
    mine = slice(None) if overlap else slice(process * rows, (process + 1) * rows)
    given = [{k: v[mine] for k, v in b.items()} for b in forms.batches(STEPS)]
    create = form.create, jax.random.key(0)
    state, first = None, 0
    if folder is None or not folder.exists():
        state = made.init(*create, batch=forms.batch_structs())
    else:
        first = SAVED
    found = []
    for step in range(first, STEPS):
        if folder is not None and step == SAVED:
            checkpoints = autopar.Checkpoints(folder)
            if state is not None:
                checkpoints.save(made, state, step=step)
                checkpoints.wait()
            made = training(overlap)
            restored = checkpoints.restore(made, *create, batch=forms.batch_structs())
            assert restored.step == SAVED
            state = restored.state
        state, *rest = made(state, given[step])
        found.append(float(jax.tree.leaves(rest)[0]))
    state = made.synchronise(state)
    ends = [_host(x).tolist() for x in jax.tree.leaves(state.state)]
    return found, ends, sorted(made.telemetry)


def restored_by_four(folder: pathlib.Path) -> list[Any]:
    """The states of this process's replicas, of four that restore those of two."""
    form = forms.FORMS["plain"]
    made = autopar.local_steps(
        form.step, every=EVERY, replicas=4, codec="int8", cluster="4x1:cpu", seconds=1
    )
    given = form.create, jax.random.key(0)
    structs = forms.batch_structs()
    state = autopar.Checkpoints(folder).restore(made, *given, batch=structs).state
    return [[_host(x).tolist() for x in jax.tree.leaves(own)] for own in state.replicas]


def chosen_interval(process: int, count: int, replicas: int) -> int:
    """The interval that all processes choose by what they measure."""
    form, rows = forms.FORMS["plain"], forms.BATCH // count
    made = autopar.local_steps(
        form.step, every="auto", replicas=replicas, cluster="2x2:cpu", seconds=1
    )
    state = made.init(form.create, jax.random.key(0), batch=forms.batch_structs())
    mine = slice(process * rows, (process + 1) * rows)
    for batch in forms.batches(12):
        state, *_ = made(state, {k: v[mine] for k, v in batch.items()})
    return made.interval


def refusal_of_stages() -> str:
    """What is said about stages in replicas of several processes."""
    form = forms.FORMS["plain"]
    made = autopar.local_steps(
        form.step, every=2, replicas=2, cluster="2x2:cpu", seconds=1, stages=2,
        microbatches=2,
    )  # fmt: skip
    try:
        made.init(form.create, jax.random.key(0), batch=forms.batch_structs())
    except autopar.PlanError as error:
        return str(error)
    return ""


def _host(x: jax.Array) -> np.ndarray:
    """The values of an array of a replica, of which other processes may have parts."""
    if isinstance(x.sharding, jax.sharding.NamedSharding):
        whole = jax.sharding.NamedSharding(
            x.sharding.mesh, jax.sharding.PartitionSpec()
        )
        x = jax.jit(lambda y: y, out_shardings=whole)(x)
    return np.asarray(x, np.float64)


def main() -> None:
    """Trains, and writes what was found."""
    process, count, port = map(int, sys.argv[1:4])
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", 4 // count)
        jax.distributed.initialize(f"localhost:{port}", count, process)
    out = pathlib.Path(f"{sys.argv[4]}.{process}")
    found = [losses(process, count, overlap) for overlap in OVERLAPS]
    for number, overlap in enumerate(OVERLAPS):
        folder = out.with_name(f"saved-{number}")
        found.append(losses(process, count, overlap, folder))
    found.append(restored_by_four(out.with_name("saved-0")))
    found.append([chosen_interval(process, count, n) for n in (2, 1)])
    if count > 2:
        found.append(refusal_of_stages())
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
