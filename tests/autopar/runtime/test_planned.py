"""Tests the compiled step: its results, and when it is compiled."""

from __future__ import annotations

import dataclasses
import logging
import types
from typing import Any

import jax
import numpy as np
import pytest
import small_step

import autopar
from autopar import Cluster, PlanError
from autopar.compilers.targets import room_options
from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.layouts.assignment import Assignment
from autopar.planner.record import restore
from autopar.runtime import planned
from autopar.runtime.placement import abstract_mesh, device_mesh
from autopar.runtime.planned import _compiler_options, planned_step
from autopar.steps.analysis import Analysis, analyse


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyse(small_step.step, small_step.structs())


def test_carried_state_leaves_as_it_came(analysis: Analysis) -> None:
    plan = small_step.plan("4:cpu")
    planned = planned_step(analysis, plan, device_mesh(plan), donate=False)
    args = (small_step.state(), small_step.batch())
    where = planned.in_shardings
    placed = [jax.device_put(x, s) for x, s in zip(args, where, strict=True)]
    out = planned.function(*placed)
    assert analysis.carried_arguments == {0: 0}
    assert out[0].sharding.is_equivalent_to(where[0], 2)


def test_layouts_that_do_not_carry_the_state(
    analysis: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_step.plan("4:cpu")
    restored = restore(analysis, plan)
    home = restored.home_layout(analysis.graph.inputs[0].value)
    other = ((0,), ()) if home != ((0,), ()) else ((), (0,))
    monkeypatch.setattr(planned, "restore", lambda *_: restored)
    monkeypatch.setattr(Assignment, "output", lambda *_: other)
    with pytest.raises(PlanError, match="do not carry 'w': it comes in as"):
        planned_step(analysis, plan, abstract_mesh(plan))


def test_a_mesh_takes_the_first_devices() -> None:
    plan, devices = small_step.plan("4:cpu"), jax.devices()
    assert list(device_mesh(plan).devices.flat) == devices[:4]
    assert list(device_mesh(plan, devices[3:]).devices.flat) == devices[3:7]


def test_a_step_is_compiled_when_it_is_replanned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And not again by the call that follows."""
    step = autopar.parallelize(small_step.step, cluster="2:cpu")
    state: Any = step.init(small_step.state, batch=small_step.structs()[1])

    def compiled() -> list[str]:
        found = [r.getMessage() for r in caplog.records]
        caplog.clear()
        return [m for m in found if m.startswith("Compiling jit(")]

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        state = step.replan("4:cpu", state)
        assert len(compiled()) == 1
        small_step.trained(step, state, 1)
        assert compiled() == []


def test_compiler_options_of_a_platform() -> None:
    def on(platform: str, text: str, **options: Any) -> Any:
        device = types.SimpleNamespace(platform=platform)
        mesh = types.SimpleNamespace(devices=np.array([device]))
        plan = small_step.plan(text)
        given = analyse(small_step.step, small_step.structs())
        # Without copies that the backward pass makes again, as of a plain program.
        plain = dataclasses.replace(restore(given, plan), copies={})
        return _compiler_options(plain, plan, mesh, **options)

    little = "1x8:h100,memory=40GB"
    limited = room_options(Cluster.parse(little))
    assert limited
    assert on("gpu", little) == limited
    assert on("gpu", "1x8:h100") is None
    assert on("tpu", little) is None
    assert on("cpu", "1:cpu") is None
    assert on("cpu", "1:cpu", codecs=True) == WITH_BARRIERS
    assert on("tpu", "1:cpu", codecs=True) is None
