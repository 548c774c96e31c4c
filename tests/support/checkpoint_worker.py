"""Saves checkpoints in child processes that it kills, and then a complete one.

python checkpoint_worker.py DIRECTORY FOREVER|ONCE
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from autopar.checkpoint import checkpoints, folders, manifest, store
from autopar.checkpoint.manifest import ArrayEntry, Manifest, PlanEntry

# A checkpoint is four arrays of 256 KiB, which it takes some milliseconds to write.
NAMES, SHAPE = ("a", "b", "c", "d"), (256, 256)


def numbers(step: int) -> dict[str, jax.Array]:
    """The arrays of the state after a step."""
    draw = np.random.default_rng(step)
    return {x: jnp.asarray(draw.standard_normal(SHAPE, np.float32)) for x in NAMES}


def save_of(directory: pathlib.Path, step: int) -> checkpoints.Save:
    """A save of a step's state, which has begun."""
    arrays = store.copy_arrays(numbers(step))
    files = store.file_names(arrays)
    entries = {
        name: ArrayEntry(
            shape=SHAPE,
            dtype="float32",
            file=files[name],
            digest="",
            num_bytes=store.num_bytes(array),
        )
        for name, array in arrays.items()
    }
    made = Manifest(
        schema=manifest.SCHEMA,
        version="0",
        step=step,
        position=step,
        created=0.0,
        name="worker",
        state=entries,
        codecs={},
        codec_tree=None,
        plan=PlanEntry(digest="", fingerprint="", structure="", text=""),
    )
    folder = directory / folders.folder_name(step, step)
    folders.begin(folder)
    return checkpoints.Save(
        folder=folder, manifest=made, plan=_Plan(), arrays=arrays, keep=2
    )


class _Plan:
    """A plan whose saved file is empty."""

    def save(self, path: pathlib.Path) -> None:
        path.write_text("{}")


def save_for_ever(directory: pathlib.Path) -> None:
    for step in itertools.count(1):
        save_of(directory, step).write(threading.Event())


def save_once(directory: pathlib.Path) -> None:
    running = checkpoints.Background(save_of(directory, 1))
    checkpoints.wait_at_end(running.wait)


def killed(directory: pathlib.Path, after_s: float) -> bool:
    """Kills a saving child after two checkpoints; returns whether the kill ended it."""
    child = os.fork()
    if child == 0:
        save_for_ever(directory)
    end = time.monotonic() + 120
    while len(folders.complete(directory)) < 2 and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(directory: pathlib.Path, seconds: list[float]) -> None:
    for k, after_s in enumerate(seconds):
        assert killed(directory / str(k), after_s), "it ended by itself"
    save_once(directory / "end")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), [float(x) for x in sys.argv[2:]])
