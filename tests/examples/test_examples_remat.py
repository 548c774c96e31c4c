"""Tests that the examples with rematerialised layers give the plain step's results."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch_cases import assert_close, evaluated
from remat_cases import again

import autopar
from autopar.planner.scheme import is_repeated
from autopar.plans import Rematerialisation
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.remat import rematerialise
from autopar_passes.program.trace import open_arguments

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = {"layers": 2, "d_model": 32, "seq": 16, "batch": 8}
IMAGES = {"size": 16, "classes": 4, "batch": 8}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", TEXT),
    "llama": ("llama", TEXT | {"remat": False}),
    "moe": ("moe", TEXT | {"experts": 4, "ffn": 32}),
    "resnet": ("resnet", IMAGES | {"stages": 2, "blocks": 1, "width": 8}),
    "vit": ("vit", IMAGES | {"layers": 2, "d_model": 32}),
}
# Nothing is decided but layouts.
ONE_PROGRAM: dict[str, Any] = {"stages": 1, "microbatches": 1, "remat": 0}


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def made(name: str, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The step of an example, and its arguments."""
    module, given = STEPS[name]
    training = importlib.import_module(module).training(**{**given, **options})
    state = training.create_state(jax.random.key(0))
    batch = next(iter(training.batches(seed=0)))
    parts = state if isinstance(state, tuple) else (state,)
    return training.step, (*parts, batch)


def results(analysis: Analysis, args: tuple[Any, ...]) -> list[Any]:
    assert analysis.origin is not None
    flat = [jnp.asarray(x) for x in open_arguments(analysis.origin.step, args).arrays]
    return jax.jit(lambda *x: evaluated(analysis.program, x))(*flat)


# The level of products is the same rewriting: one example of each kind of product.
LEVELS = dict.fromkeys(STEPS, ("full",)) | {
    "gpt": ("full", "dots"),
    "resnet": ("full", "dots"),
}


@pytest.mark.parametrize("name", STEPS)
def test_results_are_those_of_the_plain_step(name: str) -> None:
    step, args = made(name)
    plain = analyse(step, args)
    expected = results(plain, args)

    for level in LEVELS[name]:
        found = again(plain, None, level)
        assert any(is_repeated(op) for op in found.graph.operators)
        assert_close(results(found, args), expected, 2e-5)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_losses_are_those_of_one_device(name: str) -> None:
    step, (state, batch) = made(name)
    run = autopar.parallelize(
        step,
        cluster="2:cpu",
        donate=False,
        axis_names=("data",),
        **{**ONE_PROGRAM, "remat": "all"},
    )

    for _ in range(2):
        _, expected = jax.jit(step)(state, batch)
        state, found = run(state, batch)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4)
    assert run.plan.remat.layers


def test_the_checkpoints_of_a_step_can_be_dropped() -> None:
    step, args = made("gpt", remat=True)
    kept = analyse(step, args)
    dropped = rematerialise(kept, Rematerialisation(checkpoints=False))

    def products(analysis: Analysis) -> int:
        return sum(op.kind == "dot_general" for op in analysis.graph.operators)

    assert products(dropped) == products(analyse(*made("gpt"))) < products(kept)
    assert_close(results(dropped, args), results(kept, args), 2e-5)


def test_layers_in_a_loop_are_computed_again() -> None:
    step, args = made("gpt", scan=True)

    def planned(**asked: Any) -> autopar.Plan:
        options = {**ONE_PROGRAM, "axis_names": ("data",), **asked}
        return autopar.plan(step, *args, cluster="2:cpu", **options)

    again = planned(remat="all")
    assert again.remat.layers
    assert again.predicted.peak_memory_bytes < planned().predicted.peak_memory_bytes
