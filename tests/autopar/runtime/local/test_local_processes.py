"""Local steps in two and four processes, against one process with both replicas."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import local_worker
import numpy as np
import pytest
from processes import run_processes

from autopar.runtime.local.rules import Overlap

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", params=[2, 4])
def count(request: Any) -> int:
    """Processes: one for each replica, or two."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, count: int) -> pathlib.Path:
    return tmp_path_factory.mktemp(f"local{count}")


@pytest.fixture(scope="module")
def trained(folder: pathlib.Path, count: int) -> list[Any]:
    """What a process of each replica found: losses without an overlap and with one.

    Then the same from checkpoints.
    """
    run_processes("local_worker.py", count, [str(folder / "out")])
    found = [json.loads((folder / f"out.{k}").read_text()) for k in range(count)]
    each = count // 2
    # Processes of a replica have its loss and its state.
    for ways in range(4):
        for first, last in ((0, each - 1), (each, count - 1)):
            assert found[first][ways] == found[last][ways]
    return [[*found[k * each][:4], found] for k in range(2)]


@pytest.mark.parametrize("overlap", [None, Overlap(1)])
def test_processes_train_as_one(trained: Any, overlap: Overlap | None) -> None:
    first, second = (found[overlap is not None] for found in trained)
    losses, ends, paths = local_worker.losses(0, 1, overlap)
    means = np.mean([first[0], second[0]], axis=0)
    np.testing.assert_allclose(means, losses, rtol=1e-5)
    assert first[2] == second[2] == paths
    for own, other, one in zip(first[1], second[1], ends, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-4, atol=1e-6)
        assert np.shape(own) == np.shape(other)
    # The parameters come first in the state: they are equal after an outer step.
    assert first[1][0] == second[1][0]
    assert first[1][-1] != second[1][-1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_checkpoint_of_processes_goes_on(trained: Any, number: int) -> None:
    """The state that the processes restore has equal bits."""
    for found in trained:
        assert found[2 + number] == found[number]


def test_four_replicas_go_on_as_two(trained: Any) -> None:
    replicas = [x for found in trained[0][-1] for x in found[4]]
    assert len(replicas) == 4
    assert replicas[:2] == replicas[2:]
    assert replicas[0] != replicas[1]


@pytest.mark.parametrize("number", [0, 1])
def test_one_process_restores_the_checkpoint(
    trained: Any, folder: pathlib.Path, number: int
) -> None:
    overlap = local_worker.OVERLAPS[number]
    saved = folder / f"saved-{number}"
    losses, ends, _ = local_worker.losses(0, 1, overlap, saved)
    means = np.mean([found[number][0][local_worker.SAVED :] for found in trained], 0)
    np.testing.assert_allclose(means, losses, rtol=1e-5)
    for own, one in zip(trained[0][number][1], ends, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-4, atol=1e-6)


def test_processes_choose_one_interval(trained: Any) -> None:
    """With two replicas, and then with one that lies in all processes."""
    (chosen,) = {tuple(found[5]) for found in trained[0][-1]}
    assert all(1 <= interval <= 500 for interval in chosen)


def test_stages_in_replicas_of_several_processes_are_refused(
    trained: Any, count: int
) -> None:
    for found in trained[0][-1] if count > 2 else ():
        assert "a replica lies in several processes" in found[-1]
