"""Tests the noise scale under plans against the gradients of single rows."""

from __future__ import annotations

from typing import Any

import noise_cases as cases
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from noise_cases import MODEL, REPLICATED, ROWS, SPLIT

# Name -> replicas, microbatches, and what is asked for.
PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "data": (8, 1, {"axis_names": ("data",), "pins": REPLICATED}),
    "fsdp": (8, 1, {"axis_names": ("data",), "pins": SPLIT}),
    "tensor": (
        1,
        4,
        {
            "axis_names": ("model",),
            "pins": {"batch": PartitionSpec(), **MODEL},
            "microbatches": 4,
        },
    ),
    "two axes": (
        4,
        1,
        {
            "axis_names": ("data", "model"),
            "pins": {"batch": PartitionSpec("data"), **MODEL},
        },
    ),
    "accumulated": (
        8,
        4,
        {"axis_names": ("data",), "pins": REPLICATED, "microbatches": 4},
    ),
    "int8": (
        8,
        1,
        {"axis_names": ("data",), "pins": REPLICATED, "compression": "int8"},
    ),
    "powersgd": (
        8,
        1,
        {
            "axis_names": ("data",),
            "pins": REPLICATED,
            "compression": "powersgd:rank=2",
        },
    ),
    # The microbatches of replicas of unequal devices are groups of equal size.
    **{
        f"replicas {name} {shares}": (
            replicas,
            sum(shares),
            {
                "cluster": "1x4:cpu+1x4:cpu,efficiency=0.2",
                "microbatches": list(shares),
                **options,
            },
        )
        for shares, name, replicas, options in (
            ((3, 1), "data", 4, {"axis_names": ("data",), "pins": REPLICATED}),
            ((1, 1), "fsdp", 4, {"axis_names": ("data",), "pins": SPLIT}),
            (
                (2, 6),
                "tensor",
                1,
                {
                    "axis_names": ("model",),
                    "pins": {"batch": PartitionSpec(), **MODEL},
                },
            ),
            (
                (3, 1),
                "int8",
                4,
                {
                    "axis_names": ("data",),
                    "pins": REPLICATED,
                    "compression": "int8",
                },
            ),
        )
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_norms_are_those_of_the_plans_groups(name: str) -> None:
    """Each parameter counts once, and codecs do not touch what is measured."""
    replicas, microbatches, options = PLANS[name]
    run = cases.parallel(**options)
    run(cases.state(), cases.batch())
    found = run.noise_scale
    wanted = cases.expected(cases.groups(ROWS, replicas, microbatches))

    assert found.groups == replicas * microbatches
    assert (found.biased, found.left_out, found.steps) == (False, (), 1)
    assert found.local == pytest.approx(wanted.local, rel=1e-5)
    assert found.total == pytest.approx(wanted.total, rel=1e-5)


@pytest.mark.parametrize("name", ["accumulated", "replicas data (3, 1)"])
def test_the_noise_scale_is_that_of_the_rows(name: str) -> None:
    """The estimate is unbiased: its mean over batches is what rows have."""
    options = PLANS[name][2]
    run = cases.parallel(**options)
    w = cases.state()
    sqr, var = [], []
    for seed in range(12):
        run.noise_state = None
        run({k: x.copy() for k, x in w.items()}, cases.batch(seed=seed))
        sqr.append(run.noise_scale.sqr)
        var.append(run.noise_scale.var)
    rows = cases._row_gradients(ROWS, 1)
    spread = rows.var(axis=0, ddof=1).sum()

    assert np.mean(var) == pytest.approx(spread, rel=0.1)
    assert np.mean(sqr) == pytest.approx(
        np.square(rows.mean(0)).sum() - spread / ROWS, rel=0.1
    )


def test_losses_stay_what_they_were() -> None:
    """Measuring changes nothing of a step."""
    _, _, options = PLANS["accumulated"]
    found = []
    for measured in (False, True):
        run, w = cases.parallel(**options | {"noise_scale": measured}), cases.state()
        for seed in range(3):
            w, loss = run(w, cases.batch(seed=seed))
        found.append((float(loss), {k: np.asarray(x) for k, x in w.items()}))

    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for k, x in found[0][1].items():
        np.testing.assert_allclose(x, found[1][1][k], rtol=1e-5, atol=1e-7)
