"""Local steps in two processes, one replica in each, against one process with both."""

from __future__ import annotations

import json
import pathlib

import local_worker
import numpy as np
import pytest
from processes import run_processes

pytestmark = pytest.mark.cluster


def test_two_processes_train_as_one(tmp_path: pathlib.Path) -> None:
    run_processes("local_worker.py", 2, [str(tmp_path / "out")])
    first, second = (json.loads((tmp_path / f"out.{k}").read_text()) for k in range(2))
    losses, ends, paths = local_worker.losses(0, 1)
    means = np.mean([first[0], second[0]], axis=0)
    np.testing.assert_allclose(means, losses, rtol=1e-5)
    assert first[2] == second[2] == paths
    for own, other, one in zip(first[1], second[1], ends, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-4, atol=1e-6)
        assert np.shape(own) == np.shape(other)
    # The parameters come first in the state: they are equal after an outer step.
    assert first[1][0] == second[1][0]
    assert first[1][-1] != second[1][-1]
