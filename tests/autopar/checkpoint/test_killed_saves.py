"""Tests saves that are killed, and programs that end during a save."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import checkout
import checkpoint_worker as worker
import jax
import numpy as np
import pytest

from autopar.checkpoint import folders, manifest, restoring
from autopar.runtime.world import World

SCRIPT = checkout.ROOT / "tests" / "support" / "checkpoint_worker.py"
# How long after its second checkpoint each process is killed.
SECONDS = (0.0, 0.004, 0.011, 0.023, 0.037)
PATHS = [str(checkout.ROOT / x) for x in ("", "solver", "passes")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folders of killed processes (0, 1 ...), and of one that ended by itself
    (end).
    """
    found = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, SCRIPT, found, *map(str, SECONDS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return found


def check(folder: pathlib.Path) -> int:
    """Checks that a checkpoint is whole; returns its step."""
    held = manifest.read(folder)
    sharding = jax.device_put(np.zeros(1)).sharding
    arrays = restoring.read_arrays(
        folder,
        held.state,
        dict.fromkeys(held.state, sharding),
        dict.fromkeys(held.state, np.dtype(np.float32)),
        World.current(),
    )
    for name, expected in worker.numbers(held.step).items():
        np.testing.assert_array_equal(arrays[name], expected)
    return held.step


@pytest.mark.parametrize("number", range(len(SECONDS)))
@pytest.mark.cluster
def test_a_kill_leaves_the_last_complete_one(
    directory: pathlib.Path, number: int
) -> None:
    """Every one that has a manifest is whole; the one that was begun is named."""
    left = directory / str(number)
    steps = [check(folder) for folder in folders.complete(left)]
    assert len(steps) >= 2
    torn = [folders.step_of(x) for x in folders.incomplete(left)]
    assert len(torn) <= 2
    assert all(step <= max(steps) + 1 for step in torn)


@pytest.mark.cluster
def test_a_program_that_ends_completes_its_save(directory: pathlib.Path) -> None:
    assert [check(x) for x in folders.complete(directory / "end")] == [1]
