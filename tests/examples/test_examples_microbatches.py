"""Tests the examples with microbatches: gradients of the first step, in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch_cases import each, mean_of, run

from autopar.errors import PlanError

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT = 2
TEXT = {"layers": 1, "d_model": 32, "seq": 16, "batch": 4, "dtype": "float64"}
IMAGES = {"size": 16, "classes": 4, "batch": 4, "dtype": "float64"}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_scan": ("gpt", TEXT | {"scan": True, "remat": True, "clip": 1.0}),
}
LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("resnet", IMAGES | {"stages": 1, "blocks": 1, "width": 8}),
    "moe": ("moe", TEXT | {"layers": 2, "experts": 4, "ffn": 32, "clip": 0.0}),
}


@pytest.fixture(autouse=True)
def _double_precision(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.enable_x64(True):
        yield


def precise(x: Any) -> Any:
    single = getattr(x, "dtype", None) == jnp.float32
    return x.astype(jnp.float64) if single else x


def made(name: str, options: dict[str, Any]) -> tuple[Callable[..., Any], Any, Any]:
    """A step of one state, the state, and a batch, in float64."""
    training = importlib.import_module(name).training(**options)
    state = training.create_state(jax.random.key(0))
    batch = next(iter(training.batches(seed=0)))

    def step(state: Any, batch: Any) -> Any:
        if not isinstance(state, tuple):
            return training.step(state, batch)
        *after, loss = training.step(*state, batch)
        return tuple(after), loss

    return step, *jax.tree.map(precise, (state, batch))


def first_moments(result: Any) -> list[np.ndarray]:
    """The optimizer's arrays that accumulate gradients: multiples of the first
    gradients.
    """
    keyed = jax.tree_util.tree_flatten_with_path(result)[0]
    kept = (".mu", ".trace", "['mu']", "['trace']")
    named = [(jax.tree_util.keystr(path), x) for path, x in keyed]
    found = [np.asarray(x) for name, x in named if any(k in name for k in kept)]
    assert found
    return found


@pytest.mark.parametrize("example", EXACT)
def test_gradients_are_those_of_the_whole_batch(example: str) -> None:
    step, state, batch = made(*EXACT[example])
    found = first_moments(run(step, (state, batch), COUNT))
    expected = first_moments(jax.jit(step)(state, batch))

    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("example", LOCAL)
def test_gradients_are_the_mean_of_those_of_each_microbatch(example: str) -> None:
    """Without momentum or clipping, which are not linear in the gradient."""
    step, state, batch = made(*LOCAL[example])
    couple = example == "moe"
    found = first_moments(run(step, (state, batch), COUNT, couple=couple))
    expected = first_moments(mean_of(each(step, state, batch, COUNT)))

    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


def test_a_mixture_of_experts_is_refused_by_itself() -> None:
    step, state, batch = made(*LOCAL["moe"])
    with pytest.raises(PlanError, match=r"moe\.py:\d+.*depends on the others"):
        run(step, (state, batch), COUNT)
