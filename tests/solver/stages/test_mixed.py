"""Tests of `autopar_solver.stages.solve`."""

import dataclasses
import math
import time

import numpy as np

from autopar_solver import (
    DeviceGroup,
    LayerCosts,
    Schedule,
    ScheduleKind,
    StageProblem,
    SubmeshOption,
)
from autopar_solver.clock import Clock
from autopar_solver.stages.completion import PipelineIncumbent
from autopar_solver.stages.solve import offer_mixed


def problem(speeds: list[float], layers: int = 12) -> StageProblem:
    """A problem with one device group per speed, and eight microbatches."""
    seconds = np.ones((layers, 1)) / np.array(speeds)
    none = np.zeros_like(seconds)
    link = np.zeros((layers - 1, 1, 1))
    return StageProblem(
        groups=tuple(DeviceGroup(devices=1) for _ in speeds),
        options=tuple(SubmeshOption(group=k, devices=1) for k in range(len(speeds))),
        costs=(
            LayerCosts(
                microbatches=8,
                forward_s=seconds,
                backward_input_s=seconds,
                backward_weight_s=seconds,
                step_s=none,
                resident_bytes=none,
                activation_bytes=none,
                boundary_bytes=none,
                recompute_s=seconds,
                transient_bytes=none,
                forward_link_s=link,
                backward_link_s=link,
                latency_s=np.zeros((1, 1)),
            ),
        ),
        schedules=(Schedule(ScheduleKind.ONE_F_ONE_B),),
    )


def offered(problem: StageProblem) -> PipelineIncumbent:
    incumbent = PipelineIncumbent(problem)
    offer_mixed(problem, incumbent, Clock(time.monotonic(), None))
    return incumbent


def test_layers_follow_the_speed_of_devices() -> None:
    """Devices three times as fast get three times the layers."""
    found = offered(problem([3.0, 1.0]))
    assert found.pipeline is not None
    by_group = dict(
        zip(found.pipeline.options, np.diff(found.pipeline.cuts), strict=True)
    )
    assert by_group == {0: 9, 1: 3}


def test_three_groups_have_a_stage_each() -> None:
    found = offered(problem([1.0, 2.0, 3.0]))
    assert found.pipeline is not None
    by_group = dict(
        zip(found.pipeline.options, np.diff(found.pipeline.cuts), strict=True)
    )
    assert by_group == {0: 2, 1: 4, 2: 6}


def test_no_more_stages_than_there_may_be() -> None:
    one = dataclasses.replace(problem([1.0, 2.0]), max_stages=1)
    assert offered(one).step_s == math.inf


def test_nothing_is_offered_for_equal_devices_or_too_few_layers() -> None:
    assert offered(problem([1.0])).step_s == math.inf
    assert offered(problem([1.0, 2.0, 3.0], layers=2)).step_s == math.inf
