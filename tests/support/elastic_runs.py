"""Elastic runs of the small steps in one process, and their losses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import step_forms as forms

import autopar
from autopar.elastic.loop import ElasticRun


def source(position: int, rows: int) -> Any:
    """Samples that depend only on their position, not on how many are requested."""
    draws = [np.random.default_rng(position + k) for k in range(rows)]
    x = np.stack([d.standard_normal(forms.WIDTH) for d in draws]).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def started(
    form: forms.Form, steps: int, batch: int = forms.BATCH, **options: Any
) -> ElasticRun:
    """A run on eight devices with links so cheap that plans shard the step."""
    planned = {k: options.pop(k) for k in ("compression", "programs") if k in options}
    step = autopar.parallelize(form.step, cluster=forms.cheap("8:cpu"), **planned)
    options.setdefault("ahead", False)
    return autopar.elastic(
        step,
        form.create,
        source,
        batch=batch,
        steps=steps,
        args=(jax.random.key(0),),
        **options,
    )


def losses(run: ElasticRun, changes: dict[int, Any] | None = None) -> list[float]:
    """The losses of a run until its end; `changes` maps steps to changes before."""
    waiting = dict(changes or {})
    found: list[float] = []
    for done in run:
        found.append(float(done.result))
        if done.step + 1 in waiting:
            run.change(waiting.pop(done.step + 1))
    assert not waiting
    return found
