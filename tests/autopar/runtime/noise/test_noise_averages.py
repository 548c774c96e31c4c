"""Tests the averages of the noise scale against their definition."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.runtime.codec_run import carried_over, check
from autopar.runtime.noise.averages import (
    Groups,
    NoiseOptions,
    NoiseScale,
    NoiseSpec,
    Sources,
    estimates,
    fresh,
    noise_options,
    noise_scale,
    update_averages,
)

GROUPS = Groups((4, 1), 24)
BASE, DECAY = 12.0, 0.9


def norms_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 2.0, (2, 3)).astype(np.float32)


def by_definition(norms: np.ndarray) -> tuple[float, float]:
    """The averages by definition: one group of 4 parts, and one gradient compared with
    that of the step before.
    """
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


def test_averages_without_a_unit_do_not_depend_on_the_units_of_steps() -> None:
    """A step whose norms are zero has nothing to count."""
    units = (1.0, 0.0, 1e6, 1e-6)
    found: list[NoiseScale] = []
    for scales in (units, (1.0, 0.0, 1.0, 1.0)):
        state = fresh(BASE)
        for step, scale in enumerate(scales):
            norms = jnp.asarray(norms_of(step) * np.float32(scale))
            state = update_averages(
                state, norms, GROUPS, DECAY, jnp.bool_(True), unitless=True
            )
        found.append(noise_scale(state, GROUPS))
    assert found[0].phi == pytest.approx(found[1].phi, rel=1e-5)
    assert found[0].steps == found[1].steps == 3
    assert found[0].skipped == 0
    assert found[0].local == pytest.approx(1.0)


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


def spec_of(base_batch: int | None = None, **shapes: tuple[int, ...]) -> NoiseSpec:
    """Some gradients with one group, on one device."""
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    return NoiseSpec(
        sources=Sources((), (), 24),
        options=NoiseOptions(base_batch=base_batch),
        everywhere=home,
        homes=dict.fromkeys(shapes, home),
        structs_of=structs,
    )


def state_of(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Averages after some steps."""
    state = {k: np.float32(2 + n) for n, k in enumerate(sorted(fresh(1.0)))}
    previous = {k: np.full(shape, 3.0) for k, shape in shapes.items()}
    return {**state, "compared": np.int32(7), "previous": previous}


AVERAGED = ("weight", "sqr", "var", "excess", "steps")


def test_averages_are_carried_over_to_another_plan() -> None:
    state = state_of(w=(2, 3), b=(4,))
    found = carried_over(state, spec_of(w=(2, 3)))

    for name in (*AVERAGED, "step", "skipped", "base_batch", "compared"):
        assert found[name] == state[name], name
    assert list(found["previous"]) == ["w"]
    np.testing.assert_array_equal(found["previous"]["w"], np.full((2, 3), 3.0))


def test_a_gradient_without_its_last_value_is_compared_anew() -> None:
    state = state_of(w=(2, 3), b=(4,))
    for spec in (spec_of(w=(2, 3), v=(5,)), spec_of(w=(3, 2))):
        found = carried_over(state, spec)
        assert int(found["compared"]) == 0
        assert found["sqr"] == state["sqr"]
    assert not np.asarray(found["previous"]["w"]).any()


@pytest.mark.parametrize("before", [True, False])
def test_averages_of_one_group_are_not_those_of_several(before: bool) -> None:
    one, several = {"w": (2, 3)}, {}
    state = state_of(**(one if before else several))
    found = carried_over(state, spec_of(**(several if before else one)))

    assert all(float(found[name]) == 0.0 for name in AVERAGED)
    assert found["step"] == state["step"]
    assert found["skipped"] == state["skipped"]


def test_a_base_batch_that_is_asked_for_counts() -> None:
    assert carried_over(state_of(), spec_of(base_batch=5))["base_batch"] == 5.0


@pytest.mark.parametrize("state", [None, [], {}, {**fresh(1.0)}, {"sqr": 1.0}])
def test_another_state_is_refused(state: Any) -> None:
    with pytest.raises(PlanError, match=r"noise_state: expected what was read"):
        check(state)
    check(state_of())


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
