"""Golden tasks of stages: their order, code, messages, sums and memory.

Other tests compare the results of stages with one device. These files show every
unintended message, copy or computation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stage_cases as cases
from figures import row
from golden import assert_golden
from program_figures import check_sum

import autopar
from autopar.runtime.stages.pipeline import StagePipeline


def reread_loss(params: Any, batch: Any) -> jax.Array:
    """A loss for which both stages read the rows of the batch."""
    out = cases.chain(params, batch["x"]) - 0.5 * batch["x"]
    return jnp.mean((out - batch["y"]) ** 2)


CASES: dict[str, tuple[Callable[[], cases.Case], dict[str, Any]]] = {
    "tied_1f1b": (lambda: cases.adam(cases.tied_loss), {"microbatches": 4}),
    "masked_zero_bubble": (
        lambda: cases.adam(cases.masked_loss),
        {"microbatches": 2, "schedule": "zero-bubble"},
    ),
    "mean_interleaved": (
        lambda: cases.adam(cases.mean_loss),
        {"microbatches": 2, "schedule": "interleaved"},
    ),
    "skip_gpipe": (
        lambda: cases.adam(cases.skip_loss),
        {"microbatches": 2, "schedule": "gpipe"},
    ),
    "reread": (lambda: cases.adam(reread_loss), {"microbatches": 2}),
    "loop": (
        lambda: (cases.layer_loop, cases.looped_layers(4), cases.batch()),
        {"microbatches": 2},
    ),
    "mean_kept": (
        lambda: cases.adam(cases.mean_loss),
        {"microbatches": 2, "donate": False, "noise_scale": True},
    ),
}


def key_text(key: Any) -> str:
    return f"{key.phase.name.lower()}{key.stage}.{key.number}"


def sent_text(sends: Any) -> str:
    return " ".join(f"{s.stage}:{','.join(map(str, s.values))}" for s in sends)


def call_lines(pipeline: StagePipeline) -> Iterator[str]:
    for key, call in pipeline.calls.items():
        code = call.code
        traced = code.function.trace(*code.in_structs)
        text = re.sub(r"id=\d+", "", str(traced.jaxpr))
        yield row(
            key_text(key),
            inputs=code.inputs,
            outputs=code.outputs,
            sent=sent_text(code.sent),
            sums=code.accumulated,
            donated=code.donated,
            restores=len(code.restores),
            last=call.last,
            waits=" ".join(sorted(map(key_text, pipeline.waits_for[key]))),
            idle=call.idle,
            text=check_sum(text),
        )


def rest_lines(pipeline: StagePipeline) -> Iterator[str]:
    yield row(
        "order",
        tasks=" ".join(f"{key_text(i.key)}#{i.microbatch}" for i in pipeline.order),
    )
    for stage, values in pipeline.sums.items():
        yield row(
            f"sums {stage}",
            values=sorted(values),
            held=sorted(pipeline.held[stage]),
            sent=sent_text(pipeline.finish_sent[stage]),
        )
    for name in ("copies", "late_copies"):
        found = getattr(pipeline, name)
        text = " ".join(f"{c.stage}>{sent_text([c.sent])}" for c in found)
        yield row(name, sent=text)
    yield row(
        "pipeline",
        microbatches=pipeline.microbatches,
        unsummed=[x for pair in pipeline.unsummed for x in pair],
        outputs=sorted(pipeline.outputs),
        given=[x for pair in pipeline.given.items() for x in pair],
        joint=pipeline.joint,
        alone=pipeline.alone,
    )


@pytest.mark.parametrize("name", CASES)
def test_tasks(name: str) -> None:
    make, options = CASES[name]
    step, state, batch = make()
    run = autopar.parallelize(
        step, cluster="2x2:cpu", stages=2, seconds=None, **options
    )
    planned = run.prepare(state, batch)
    lines = [row("places", shardings=check_sum(str(planned.in_shardings)))]
    lines += [*call_lines(planned.pipeline), *rest_lines(planned.pipeline)]
    after, losses = cases.train(run, cases.copied(state), 2)
    same, plain = cases.train(jax.jit(step), cases.copied(state), 2)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert cases.distance(same, after) < 1e-4
    lines.append(row("losses", losses=[f"{x:.4g}" for x in losses]))
    norms = [
        float(np.linalg.norm(np.asarray(x, np.float64))) for x in jax.tree.leaves(after)
    ]
    lines.append(row("state", norms=[f"{x:.3g}" for x in norms]))

    assert_golden("\n".join(lines), f"tasks/{name}.txt")
