"""Tests sums of gradients in one message, and the memory that they need."""

from __future__ import annotations

import dataclasses
import random

import planner_harness as harness
import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

import autopar
from autopar.cost.buffers import buffers, sending_times
from autopar.cost.live import habits_of
from autopar.layouts.assignment import Assignment
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.record import restore
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.lifetimes import Lifetimes

CLUSTER = autopar.Cluster.parse("8:cpu")


@pytest.fixture(scope="module")
def data_parallel() -> tuple[Analysis, Assignment]:
    """A small model with large batches, for which data parallelism is fastest."""
    analysis = analyse(*training(mlp_loss, mlp_params(), mlp_batch(4096, 16)))
    plan = plan_analysis(analysis, CLUSTER, PlanOptions(seconds=5))
    return analysis, restore(analysis, plan)


def life_of(analysis: Analysis, joined_sums: int) -> Lifetimes:
    habits = dataclasses.replace(habits_of(CLUSTER.device), joined_sums=joined_sums)
    return analysis.life(habits)


def test_the_number_of_a_message_is_that_of_the_cluster() -> None:
    own = dataclasses.replace(CLUSTER.device.corrections, combined_arrays=7)
    device = dataclasses.replace(CLUSTER.device, calibration=own)

    assert habits_of(CLUSTER.device).joined_sums == 256
    assert habits_of(device).joined_sums == 7


def test_one_message_waits_for_the_last_gradient(
    data_parallel: tuple[Analysis, Assignment],
) -> None:
    analysis, assignment = data_parallel
    life = life_of(analysis, 256)
    sent = sending_times(assignment, life, analysis.graph.operators)
    weights = [v for v in sent if len(analysis.graph.values[v].shape) == 2]
    makers = analysis.contraction.producer

    assert len(weights) == 4
    assert len(set(sent.values())) == 1
    assert set(sent.values()) == {max(life.time[makers[v].index] for v in sent)}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_message_holds_so_many_sums(
    data_parallel: tuple[Analysis, Assignment], number: int
) -> None:
    analysis, assignment = data_parallel
    every = sending_times(assignment, life_of(analysis, 256), analysis.graph.operators)
    sent = sending_times(
        assignment, life_of(analysis, number), analysis.graph.operators
    )

    assert set(sent) == set(every)
    messages = [list(sent.values()).count(time) for time in set(sent.values())]
    assert max(messages) <= number
    assert len(messages) == -(-len(sent) // number)


def test_without_a_combiner_nothing_waits(
    data_parallel: tuple[Analysis, Assignment],
) -> None:
    analysis, assignment = data_parallel
    life = life_of(analysis, 0)
    assert not sending_times(assignment, life, analysis.graph.operators)


def test_gradients_and_their_sums_are_there_at_once(
    data_parallel: tuple[Analysis, Assignment],
) -> None:
    """Twice the bytes of all weights, when the message runs."""
    analysis, assignment = data_parallel
    life = life_of(analysis, 256)
    sent = sending_times(assignment, life, analysis.graph.operators)
    time = next(iter(sent.values()))
    found = [
        b
        for b in buffers(assignment, life)
        if b.value in sent and b.start <= time <= b.end
    ]

    expected = 2 * sum(analysis.graph.values[v].nbytes for v in sent)
    assert sum(b.nbytes for b in found) == expected


@pytest.mark.parametrize("seed", range(4))
def test_every_sum_is_sent_behind_its_maker(seed: int) -> None:
    case = harness.prepare(*training(mlp_loss, mlp_params(), mlp_batch()))
    plan = harness.random_plan(case, (2, 4), random.Random(seed))
    life = life_of(case.analysis, 256)
    makers = case.analysis.contraction.producer

    for value, time in sending_times(plan, life, case.graph.operators).items():
        assert life.time[makers[value].index] <= time
