"""Tests checkpoints of several processes, each of which writes and reads its shards."""

from __future__ import annotations

import pathlib

import checkpoint_plans as plans
import jax
import pytest
from processes import run_processes

from autopar import Checkpoints

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    found = tmp_path_factory.mktemp("processes")
    for name in ("fsdp-4", "tensor", "pipeline", "pipeline+codecs"):
        plans.plan(name).save(found / f"{name}.json")
    logs = run_processes("checkpoint_processes.py", 2, [str(found)])
    assert [log.splitlines()[-1] for log in logs] == ["done", "done"]
    return found


@pytest.mark.parametrize("name", ["fsdp-4", "pipeline"])
def test_one_process_restores_what_two_saved(
    directory: pathlib.Path, name: str
) -> None:
    found = Checkpoints(directory / name).restore(plans.parallel("2-D"), plans.create)
    assert plans.numbers(found.state) == plans.numbers(jax.jit(plans.create)())
    assert not list((directory / name).rglob("part-*"))


def test_one_process_restores_codecs_that_two_had_in_stages(
    directory: pathlib.Path,
) -> None:
    step = plans.parallel("compressed")
    found = Checkpoints(directory / "beside").restore(step, plans.create)
    assert (found.step, step.compression_state["step"]) == (1, 1)
