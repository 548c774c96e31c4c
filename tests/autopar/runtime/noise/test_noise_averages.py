"""The averages of the noise scale, written out step by step."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.runtime.noise.averages import (
    Groups,
    NoiseOptions,
    NoiseScale,
    NoiseSpec,
    estimates,
    fresh,
    noise_options,
    noise_scale,
    update_averages,
)
from autopar.runtime.noise.sources import Sources

GROUPS = Groups((4, 1), 24)
BASE, DECAY = 12.0, 0.9


def norms_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 2.0, (2, 3)).astype(np.float32)


def by_definition(norms: np.ndarray) -> tuple[float, float]:
    """One group of 4 parts, and one gradient against that of the step before."""
    sqr = var = 0.0
    for (parts, whole, _), n, rows in zip(norms, (4, 2), (24, 48), strict=True):
        local = n * parts
        sqr += (n * whole - local) / (n - 1)
        var += (local - whole) * rows / (n - 1)
    return sqr, var


def test_estimates_of_one_step() -> None:
    for seed in range(4):
        found = estimates(jnp.asarray(norms_of(seed)), GROUPS)
        np.testing.assert_allclose(found, by_definition(norms_of(seed)), rtol=1e-5)


def test_averages_over_steps_that_are_measured_and_finite() -> None:
    state, weight, sqr, var, excess = fresh(BASE), 0.0, 0.0, 0.0, 0.0
    keep = DECAY ** (24 / BASE)
    last = 0
    for step in range(8):
        norms = norms_of(step)
        measured = step % 3 != 1
        if step == 5:
            norms[0, 1] = np.nan
        state = update_averages(
            state, jnp.asarray(norms), GROUPS, DECAY, jnp.bool_(measured)
        )
        if measured and step != 5:
            one = by_definition(norms)
            weight = keep * weight + 1 - keep
            sqr = keep * sqr + (1 - keep) * one[0]
            var = keep * var + (1 - keep) * one[1]
            excess = keep * excess + (1 - keep) * (norms[:, 2] - norms[:, 1]).sum()
            local, total = (norms[:, 0] * (4, 2)).sum(), norms[:, 1].sum()
            last = step + 1
    found = noise_scale(state, GROUPS)

    assert int(state["last"]) == last
    assert (found.steps, found.skipped, int(state["step"])) == (4, 1, 8)
    assert found.sqr == pytest.approx(max(0.0, sqr / weight), rel=1e-4)
    assert found.var == pytest.approx(max(0.0, var / weight), rel=1e-4)
    assert found.excess == pytest.approx(excess / weight, rel=1e-3)
    assert (found.local, found.total) == pytest.approx((local, total), rel=1e-5)
    assert (found.rows, found.groups, found.biased) == (24, 1, True)
    assert state["base_batch"] == BASE


def test_nothing_is_known_before_the_first_step() -> None:
    found = noise_scale(fresh(BASE), Groups((2, 3), 8))

    assert all(math.isnan(x) for x in (found.sqr, found.var, found.excess, found.phi))
    assert (found.steps, found.groups, found.biased) == (0, 2, False)
    assert noise_scale(fresh(BASE), Groups((2, 3), 8), ["w"]).biased


@pytest.mark.parametrize(
    ("sqr", "var", "phi"),
    [(2.0, 3.0, 1.5), (0.0, 3.0, math.inf), (0.0, 0.0, 0.0), (2.0, 0.0, 0.0)],
)
def test_the_noise_scale(sqr: float, var: float, phi: float) -> None:
    numbers = dict.fromkeys(
        ("rows", "groups", "steps", "skipped", "excess", "local", "total"), 0
    )
    found = NoiseScale(sqr=sqr, var=var, biased=False, **numbers)  # type: ignore[arg-type]
    assert found.phi == phi


def measured_steps(every: int | None, coded: bool) -> list[int]:
    spec = NoiseSpec(
        sources=Sources((), (), 0),
        options=NoiseOptions(every=every),
        everywhere=None,
        homes={},
        structs_of={},
        coded=frozenset({1} if coded else ()),
    )
    return [k for k in range(70) if bool(spec.is_measured(jnp.int32(k)))]


def test_steps_that_are_measured() -> None:
    assert measured_steps(None, coded=False) == list(range(70))
    assert measured_steps(None, coded=True) == [0, 4, 8, 12, 16, 20, 24, 28, 32, 64]
    assert measured_steps(30, coded=True) == [0, 30, 60]
    assert measured_steps(1, coded=True) == list(range(70))


@pytest.mark.parametrize(
    "given",
    [
        {"base_batch": 0},
        {"base_batch": True},
        {"every": 0},
        {"every": 1.5},
        {"decay": 1.0},
        {"decay": -0.1},
    ],
)
def test_options_out_of_range_are_refused(given: Any) -> None:
    with pytest.raises(PlanError, match=next(iter(given))):
        NoiseOptions(**given)


def test_options_at_the_ends_of_their_ranges() -> None:
    found = NoiseOptions(base_batch=1, every=1, decay=0.0)
    assert noise_options(found) is found
    assert noise_options(True) == NoiseOptions()
    assert NoiseOptions().decay == 0.999
    assert noise_options(False) is None
    with pytest.raises(PlanError, match="noise_scale=1"):
        noise_options(1)


def test_a_state_is_created_with_the_rows_of_the_batch() -> None:
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    spec = NoiseSpec(
        sources=Sources((), (), 24),
        options=NoiseOptions(),
        everywhere=home,
        homes={"w": home},
        structs_of={"w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)},
    )
    state = spec.init()

    assert float(state["base_batch"]) == 24.0
    assert (state["previous"]["w"].shape, state["previous"]["w"].dtype) == (
        (2, 3),
        jnp.bfloat16,
    )
    assert not any(
        float(x) for k, x in state.items() if k not in ("previous", "base_batch")
    )
