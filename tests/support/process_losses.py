"""Compares the losses of a run of several processes with those of one process."""

from __future__ import annotations

import elastic_runs
import jax
import numpy as np
import step_forms as forms
from elastic_processes import Run

import autopar


def check_losses(run: Run, steps: int) -> None:
    """Checks that a run did all steps with the losses of one undisturbed process."""
    check_steps(run.steps(), steps)


def check_steps(found: list[tuple[int, float]], steps: int) -> None:
    """As `check_losses`, for the steps and losses that processes wrote."""
    step = autopar.parallelize(forms.plain_step, cluster="1:cpu", split_batch=False)
    alone = autopar.elastic(
        step,
        forms.create_plain,
        elastic_runs.source,
        batch=forms.BATCH,
        steps=steps,
        args=(jax.random.key(0),),
        ahead=False,
    )
    want = elastic_runs.losses(alone)
    assert {k for k, _ in found} == set(range(steps))
    np.testing.assert_allclose(
        [loss for _, loss in found], [want[k] for k, _ in found], rtol=2e-5
    )
