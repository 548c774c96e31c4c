"""Tests the number of rematerialised layers against all possible numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from remat_cases import (
    again,
    blocks,
    checkpointed,
    descent,
    drawn,
    in_loop,
    mlp,
    named,
    stacked,
)

import autopar
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner import deciding
from autopar.planner.deciding import alone_on, first_that, least_s
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.programs import price_in_layouts
from autopar.planner.proposals import recorded_proposals
from autopar.planner.stages.entry import issue_s
from autopar.plans import AS_WRITTEN, Rematerialisation
from autopar.steps.analysis import analyse

# One microbatch passes the stages in turn, whatever the schedule.
PIPELINES = (
    *((2, 1, "gpipe"), (4, 1, "1f1b"), (4, 8, "gpipe"), (2, 8, "1f1b")),
    *((n, 8, schedule) for n in (2, 4) for schedule in ("interleaved", "zero-bubble")),
)
X = drawn(2048, 16, seed=5)
STEPS: dict[str, tuple[Any, Any]] = {
    "mlp": (descent(mlp), (blocks(4), X)),
    "loop": (descent(in_loop), (stacked(4), X)),
    "named": (descent(named), (blocks(2), X)),
}
NAMED = "names=act,down,up"
# Nothing is decided but layouts.
AS_WRITTEN_OPTIONS: dict[str, Any] = {"remat": 0, "microbatches": 1, "stages": 1}


def cluster(memory: float | None = None) -> Cluster:
    found = Cluster.parse("8:cpu")
    if memory is None:
        return found
    device = dataclasses.replace(found.device, memory_bytes=int(memory))
    return dataclasses.replace(found, device=device)


def planned(name: str, share: float | None = None, **options: Any) -> autopar.Plan:
    """A plan within a fraction of the memory that the unchanged step needs."""
    memory = None if share is None else share * plain(name).predicted.peak_memory_bytes
    step, args = STEPS[name]
    return autopar.plan(
        step,
        *args,
        cluster=cluster(memory),
        axis_names=("data",),
        **{**AS_WRITTEN_OPTIONS, **options},
    )


@functools.cache
def plain(name: str) -> autopar.Plan:
    return planned(name)


@pytest.mark.parametrize(
    ("name", "share"), [("mlp", 0.7), ("loop", 3.0), ("named", 0.8)]
)
def test_no_number_of_layers_is_faster(name: str, share: float) -> None:
    levels = ["full", "dots", *([NAMED] if name == "named" else [])]
    layers = len(planned(name, remat="all").remat.starts)
    found: list[float] = []
    for asked in (0, *(f"{n + 1}:{v}" for v in levels for n in range(layers))):
        try:
            found.append(planned(name, share, remat=asked).predicted.step_s)
        except InfeasibleError:
            continue

    chosen = planned(name, share, remat="auto").predicted.step_s

    assert chosen <= min(found) * 1.005


def test_layers_are_computed_again_where_that_is_faster_though_all_fits() -> None:
    """The stacks of a loop are written and read; its layers are quickly computed."""
    found = planned("loop", 3.0, remat="auto")

    assert found.remat.layers
    assert found.predicted.step_s < plain("loop").predicted.step_s
    assert planned("mlp", 3.0, remat="auto").remat == AS_WRITTEN


@pytest.mark.parametrize("name", ["mlp", "loop"])
def test_a_plans_layouts_bound_the_plan_with_layers_computed_again(name: str) -> None:
    step, args = STEPS[name]
    analysis = analyse(step, args)
    roomy = cluster(1e18)

    same = price_in_layouts(plain(name), analysis, analysis, roomy)
    more = price_in_layouts(plain(name), analysis, again(analysis, None), roomy)

    assert same.step_s == pytest.approx(plain(name).predicted.step_s, rel=1e-6)
    best = planned(name, remat="all").predicted
    assert more.step_s >= best.step_s * 0.995
    assert more.step_s <= best.step_s * 1.05


def test_the_first_number_is_found_by_few_questions() -> None:
    draw = random.Random(0)
    for _ in range(300):
        low, high = 0, draw.randint(1, 60)
        first, few = draw.randint(1, high), draw.randint(-3, high + 3)
        asked: list[int] = []

        def holds(n: int, first: int = first, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n >= first

        assert first_that(holds, low, high, few) == first
        assert len(asked) == len(set(asked))
        assert all(low < n < high for n in asked)
        if 0 <= few < first:
            assert len(asked) <= 1 + (high - few).bit_length()
        assert len(asked) <= 2 + 2 * high.bit_length()


def test_layers_that_cannot_be_enough_are_not_planned() -> None:
    """A plan that does not fit says what every plan needs."""
    step = descent(mlp), blocks(8), X
    needed = autopar.plan(
        *step, cluster=cluster(), axis_names=("data",), **AS_WRITTEN_OPTIONS
    )
    limit = 0.5 * needed.predicted.peak_memory_bytes
    options = PlanOptions(axis_names=("data",), remat="auto", microbatches=1, stages=1)
    with recorded_proposals() as proposals:
        found = plan_analysis(analyse(step[0], step[1:]), cluster(limit), options)
    again = {p.program for p in proposals if p.program.startswith("remat ")}
    numbers = [int(p[6:].partition(":")[0]) for p in again if p.endswith(":full")]
    assert found.remat.layers
    assert min(numbers) >= 3
    assert len(again) <= 8


def test_a_proposal_says_whether_memory_ruled_it_out() -> None:
    step, args = STEPS["mlp"]
    analysis = analyse(step, args)
    state = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    options = PlanOptions(**{**AS_WRITTEN_OPTIONS, "offload": "none"})
    with recorded_proposals() as proposals, pytest.raises(InfeasibleError):
        plan_analysis(analysis, cluster(state // 2), options)

    assert {p.note for p in proposals if p.note} == {"does not fit"}


def test_far_too_little_memory_is_told_what_all_that_saves_it_needs() -> None:
    """Where the state alone is too large, nothing is tried that could be enough."""
    step, args = STEPS["mlp"]
    state = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    plan = functools.partial(autopar.plan, step, *args)
    with pytest.raises(InfeasibleError) as caught:
        plan(cluster=f"1:cpu,memory={state // 2}B")
    enough, least = caught.value.enough_bytes, caught.value.least_bytes
    found = plan(cluster=f"1:cpu,memory={enough}B")
    assert least <= found.predicted.peak_memory_bytes <= enough
    assert found.remat.layers
    assert found.microbatches > 1
    assert "this is with what needs least memory: " in str(caught.value)


def test_a_plan_says_what_layers_again_gain() -> None:
    found = planned("mlp", 0.7, remat="auto")

    (line,) = found.decided
    layers = f"{len(found.remat.layers)} of {len(found.remat.starts)} layers again"
    assert line.startswith(f"{layers}: fits in ")
    assert line.endswith(" without")
    assert f"decided  {line}" in str(found)


def test_what_saves_memory_is_not_tried_where_memory_is_enough() -> None:
    options = PlanOptions(remat="auto", microbatches="auto", stages="auto")
    with recorded_proposals() as proposals:
        found = plan_analysis(analyse(descent(mlp), (blocks(4), X)), cluster(), options)
    notes = {p.proposer: p.note for p in proposals if p.note.startswith("not tried: ")}
    hosts = "state in the memory of the hosts"
    assert notes.keys() == {"layers again", "more microbatches", "stages", hosts}
    assert {p.program for p in proposals} <= {"", "as written"}
    assert (len(found.stages), found.microbatches, found.remat) == (1, 1, AS_WRITTEN)
    assert not found.decided


@pytest.mark.parametrize("text", ["2x2:cpu", "2x2:h100"])
def test_no_pipeline_is_faster_than_what_pipelines_take_at_least(text: str) -> None:
    """Whatever stages, schedule and microbatches."""
    cluster = Cluster.parse(text)
    analysis = analyse(descent(mlp), (blocks(8), X))
    alone_s, starts_s = alone_on(analysis, cluster)
    assert starts_s > 0
    planned_ones = 0
    for stages, count, schedule in PIPELINES:
        options = PlanOptions(stages=stages, microbatches=count, schedule=schedule)
        with contextlib.suppress(PlanError):  # interleaved parts may be too many
            found = plan_analysis(analysis, cluster, options)
            took_s = found.predicted.step_s + issue_s(stages, count)
            assert least_s(alone_s / 4, starts_s, 2, stages, count) <= took_s
            planned_ones += 1
    assert planned_ones >= len(PIPELINES) - 1


def test_options_of_one_stage_are_said_in_the_plan() -> None:
    step, args = STEPS["mlp"]
    found = autopar.plan(step, *args, cluster=cluster(), remat=2)

    assert found.decided == ("one stage: remat=2 was given, and stages= was not",)
    with pytest.raises(PlanError, match="schedule='gpipe' is for a pipeline, and"):
        autopar.plan(
            step, *args, cluster=cluster(), microbatches=[2, 2], schedule="gpipe"
        )


def test_what_nobody_asked_for_does_not_stop_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: Any) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr(deciding, "_limits_of_pipelines", fails)
    step, args = STEPS["mlp"]
    with pytest.warns(RuntimeWarning, match="others were not looked at, as KeyError"):
        found = autopar.plan(step, *args, cluster=cluster())
    assert len(found.stages) == 1
    with pytest.raises(KeyError):
        autopar.plan(
            step, *args, cluster=cluster(), stages="auto", microbatches=1, remat="auto"
        )


def test_microbatches_are_chosen_where_checkpoints_are_left_out() -> None:
    """A plan is priced in more microbatches of the program that it is for."""
    plan = autopar.plan(
        descent(checkpointed),
        blocks(2),
        X,
        cluster="2:h100",
        microbatches="auto",
        remat="none",
        seconds=1,
    )

    assert plan.microbatches == 1
    assert not plan.remat.checkpoints


def attending(params: Any, x: jax.Array) -> jax.Array:
    """Layers with cuDNN's attention, each behind a checkpoint."""

    def layer(w: Any, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split((x @ w[0]).reshape(*x.shape[:2], 24, 64), 3, 2)
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        return x + mixed.reshape(x.shape) @ w[1]

    for w in params:
        x = jax.checkpoint(layer)(w, x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def test_checkpoints_keep_kernels_if_memory_is_enough() -> None:
    """The step as it is written has more work, so it is not planned, too."""
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    params = [(struct((512, 1536)), struct((512, 512))) for _ in range(2)]
    args = params, struct((4, 2048, 512))
    step = descent(attending)

    with recorded_proposals() as proposals:
        found = autopar.plan(step, *args, cluster="4:h100", compile_check=False)

    written = autopar.plan(step, *args, cluster="4:h100", remat=0, compile_check=False)
    assert found.remat == Rematerialisation(level="kernels")
    assert found.predicted.step_s < written.predicted.step_s
    assert {p.program for p in proposals if p.program} == {"remat 0:kernels"}
