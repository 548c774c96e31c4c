"""Tests the seconds and bytes of layers."""

from __future__ import annotations

import pytest
from layer_cases import BLOCKS, COUNTS, SCALES, WIDTH, layers_of, on

from autopar.cost.estimate import estimate
from autopar.cost.live import live
from autopar.cost.rows import exchange_s
from autopar.planner.stages.costs import BytesPricer, LayerSeconds, SecondsPricer
from autopar.planner.stages.submeshes import Submesh


def whole_s(case: str, found: LayerSeconds) -> list[float]:
    """Seconds of a step on one stage, for each number of microbatches."""
    layers = layers_of(case)
    tables = (found.forward, found.backward_input, found.backward_weight)
    each = [
        sum(layers.spread(t)[:, k].sum() for t in tables) for k in range(len(COUNTS))
    ]
    once = layers.spread(found.step).sum(axis=0)
    return [m * e + float(o) for m, e, o in zip(COUNTS, each, once, strict=True)]


def program_s(submesh: Submesh) -> list[float]:
    """Seconds of the program in one piece, without the addition of gradients.

    Nor with the exchange of rows, which reach a stage over the links between stages.
    """
    found = estimate(submesh.assignment, submesh.pricer)
    rows_s = exchange_s(submesh.assignment, submesh.pricer)
    return [
        found.seconds(1.0, count)
        - (count * found.accumulate_s if count > 1 else 0.0)
        - rows_s
        for count in COUNTS
    ]


@pytest.mark.parametrize("case", ["mlp", "tied"])
def test_layers_together_take_what_the_program_takes(case: str) -> None:
    """Without overlap nothing is lost or counted twice, at any size of a microbatch."""
    pricer = SecondsPricer(layers_of(case), SCALES)
    for submesh in on(case, "2x4:cpu"):
        expected = program_s(submesh)
        found = whole_s(case, pricer.price(submesh))
        # A message has fewer arrays in it where only some layers are priced, and
        # gradients of weights that layers share are added up once.
        assert found == pytest.approx(expected, rel=6e-3)


def test_what_is_hidden_of_layers_is_about_what_is_hidden_of_the_program() -> None:
    case = "mlp"
    pricer = SecondsPricer(layers_of(case), SCALES)
    for submesh in on(case, "2x4:a100"):
        expected = program_s(submesh)
        found = whole_s(case, pricer.price(submesh))
        # A message of many layers exposes more than the messages of each of them do.
        assert found == pytest.approx(expected, rel=0.13)


@pytest.mark.parametrize("case", ["mlp", "tied"])
def test_bytes_of_layers_cover_the_peak_of_the_program(case: str) -> None:
    """State is exact; the neediest layer's transient bytes make it a little more."""
    layers = layers_of(case)
    pricer = BytesPricer(layers, SCALES)
    for submesh in on(case, "2x4:cpu"):
        found = pricer.price(submesh)
        state = float(layers.spread(found.state).sum())
        device = submesh.pricer.cluster.device
        whole = live(submesh.assignment, device, pricer.life(device))
        assert state == pytest.approx(sum(whole.held_bytes().values()))
        kept = float(layers.spread(found.activations)[:, 0].sum())
        most = float(found.transient[:, 0].max())
        peak = whole.peak_bytes()
        assert peak <= (state + kept + most) * (1 + 1e-9)
        assert state + kept + most <= 1.5 * peak


def test_activations_shrink_with_the_microbatch() -> None:
    found = BytesPricer(layers_of("mlp"), SCALES).price(on("mlp", "2x4:cpu")[0])
    assert found.activations[1, 1] == pytest.approx(found.activations[1, 0] / 2)
    # The hidden array, before and behind the tanh perhaps, and the block's input.
    assert found.activations[1, 0] >= 4 * 32 * 64


def test_sums_of_gradients_are_as_large_as_partial_products() -> None:
    """Data parallel products are whole on each device, whatever the update splits."""
    layers = layers_of("mlp")
    pricer = BytesPricer(layers, SCALES)
    weights = 4 * 2 * 4 * WIDTH * WIDTH * BLOCKS
    found = {
        (s.devices, s.rule): float(layers.spread(pricer.price(s).gradients).sum())
        for s in on("mlp", "2x4:cpu")
    }
    assert found[1, "fastest"] == weights
    # The model is split four ways, and the two replicas have sums of their own.
    assert found[8, "fastest"] == weights / 4
