"""Tests that the workspace of products is subtracted from the memory for layouts."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar import Cluster, InfeasibleError
from autopar.planner.search import search
from autopar.steps.analysis import Analysis, analyse


@functools.cache
def mlp() -> Analysis:
    params = mlp_params(width=32, hidden=128, layers=1)
    return analyse(*training(mlp_loss, params, mlp_batch(64, 32)))


def test_work_space_lowers_what_layouts_may_use() -> None:
    """As much memory more as products work in: the same plan, the same bound."""
    analysis, cluster = mlp(), Cluster.parse("2:h100")
    room = 2**25

    def of(nbytes: int, workspace: int) -> Cluster:
        device = dataclasses.replace(
            cluster.device, memory_bytes=nbytes, workspace_bytes=workspace
        )
        return dataclasses.replace(cluster, device=device)

    free = search(analysis, of(2**30, 0), seconds=2).best
    for share in (0.5, 0.9):
        memory, found = int(share * free.peak_memory_bytes), []
        for more in (0, room):
            try:
                best = search(analysis, of(memory + more, more), seconds=2).best
                assert best.peak_memory_bytes <= memory + more
                found.append((True, best.step_s))
            except InfeasibleError as error:
                found.append((False, error.least_bytes - more))
        assert found[0] == pytest.approx(found[1], rel=0.01)


def test_work_space_alone_may_be_too_much() -> None:
    analysis, cluster = mlp(), Cluster.parse("4:h100,memory=20MB")
    with pytest.raises(InfeasibleError, match="products' work space") as e:
        search(analysis, cluster, seconds=2)
    assert e.value.least_bytes > 2**25
    assert e.value.enough_bytes is not None
    assert "no choice of layouts was found" not in str(e.value)


def test_what_the_chip_holds_is_no_work_space() -> None:
    """A TPU keeps some values on the chip: less memory, which no message lists."""
    with pytest.raises(InfeasibleError, match="largest") as e:
        search(mlp(), Cluster.parse("4:v5e,memory=1kB"), seconds=2)
    assert not re.search(r" -\d", str(e.value))
