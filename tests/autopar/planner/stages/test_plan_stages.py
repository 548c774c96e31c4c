"""Tests of `autopar.planner.stages.plan`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import (
    ROWS,
    analysed,
    block,
    blocks,
    mlp,
    residual,
    struct,
    tied,
    tied_loss,
)

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.stages.entry import (
    PipelineLimits,
    best_pipeline,
    plan_pipeline,
    plan_wanted,
    wanted_of,
)
from autopar.planner.stages.plan import (
    SCHEDULES,
    covering,
    divisors,
    microbatch_counts,
    plan_stages,
    rows_to_split,
)
from autopar.planner.stages.submeshes import Rule, batch_splits, divides, submeshes
from autopar.planner.weights import WHOLE
from autopar.plans import Plan
from autopar.steps.analysis import analyse
from autopar.steps.batch import BATCH, SEQUENCE
from autopar_solver import Schedule, ScheduleKind

SLOW = "2x2:cpu,network=100Mb/s"


def test_never_slower_than_one_stage_and_the_bound_holds() -> None:
    found = plan_stages(mlp(), Cluster.parse("2x2:cpu"))
    assert found.bound_s <= found.step_s <= found.one_stage_s
    assert found.step_s == pytest.approx(found.timeline.makespan_s)


def test_a_slow_network_makes_stages_worth_it() -> None:
    """Activations are far smaller than the gradients of wide layers."""
    wide = analysed(residual, blocks(6, 512), struct(ROWS, 512))
    found = plan_stages(wide, Cluster.parse(SLOW))
    assert len(found.stages) >= 2
    assert found.step_s < 0.9 * found.one_stage_s


def test_stages_have_all_layers_and_devices_of_their_own() -> None:
    wide = analysed(residual, blocks(6, 512), struct(ROWS, 512))
    found = plan_stages(wide, Cluster.parse(SLOW))
    layers = sorted(k for stage in found.stages for k in stage.layers)
    assert layers == list(range(len(found.layer_starts)))
    devices = [d for stage in found.stages for d in stage.devices]
    assert len(devices) == len(set(devices))
    assert [found.layer_starts[cut] for cut in found.cuts[:-1]] == list(found.starts)
    for stage in found.stages:
        assert len(stage.devices) == math.prod(stage.submesh.pricer.sizes)
        assert stage.memory_bytes <= stage.limit_bytes


def test_the_number_of_stages_and_the_schedule_can_be_given() -> None:
    one = plan_stages(mlp(), Cluster.parse(SLOW), stages=1, microbatches=[4])
    assert len(one.stages) == 1
    assert one.microbatches == 4
    gpipe = Schedule(ScheduleKind.GPIPE)
    two = plan_stages(mlp(), Cluster.parse(SLOW), schedules=[gpipe], microbatches=[2])
    assert (two.schedule, two.microbatches) == (gpipe, 2)


def test_the_analysis_of_a_microbatch_gives_about_the_same_plan() -> None:
    """Costs are scaled, from wherever they were analysed."""
    cluster = Cluster.parse("1x2:cpu")
    whole = plan_stages(mlp(), cluster, microbatches=[4])
    part = analysed(residual, blocks(6), struct(ROWS // 4, 64))
    found = plan_stages(part, cluster, analysed=4, microbatches=[4])
    assert found.step_s == pytest.approx(whole.step_s, rel=0.02)


def test_a_parameter_of_two_layers_is_a_cost_of_parting_them() -> None:
    found = plan_stages(tied(), Cluster.parse("1x2:cpu"))
    assert found.bound_s <= found.step_s <= found.one_stage_s


def test_unequal_devices_get_unequal_layers() -> None:
    """A stage on slower devices has fewer layers."""
    text = "1x1:cpu+1x1:cpu,efficiency=0.1"
    wide = analysed(residual, blocks(8, 256), struct(256, 256))
    found = plan_stages(wide, Cluster.parse(text), microbatches=[8])
    by_group = {s.submesh.group: len(s.layers) for s in found.stages}
    assert by_group.get(1, 0) < by_group[0]


def test_nothing_that_fits_is_an_error_that_names_layers() -> None:
    wide = analysed(residual, blocks(6, 512), struct(ROWS, 512))
    with pytest.raises(
        InfeasibleError, match=r"no pipeline fits: layers \d[^\\]*\n  try: more"
    ):
        plan_stages(wide, Cluster.parse("1x2:cpu,memory=1MB"))


def test_numbers_of_microbatches_divide_the_rows() -> None:
    counts = microbatch_counts(mlp())
    assert counts == [1, 2, 4, 8, 16, 32]
    assert microbatch_counts(mlp(), 4)[-1] == 4 * ROWS
    assert rows_to_split(mlp()) == ROWS


def test_a_step_without_layers_is_refused() -> None:
    def constant(params: object, x: object) -> object:
        return np.float32(0.0) * params[0].sum()  # pyright: ignore

    with pytest.raises(PlanError, match="no layers"):
        plan_stages(
            analysed(constant, [struct(4, 4)], struct(8, 4)), Cluster.parse("2:cpu")
        )


def test_every_schedule_is_in_the_space() -> None:
    assert {schedule.kind for schedule in SCHEDULES} == set(ScheduleKind)


def test_layers_predict_what_planning_each_stage_comes_to() -> None:
    """Stages are planned anew, one by one; their costs are those of their layers."""
    wide = analysed(residual, blocks(6, 512), struct(ROWS, 512))
    cluster = Cluster.parse(SLOW)
    found = plan_stages(wide, cluster, microbatches=[4])
    plan = plan_wanted(wide, cluster, PlanOptions(), wanted_of(found), 4)
    assert len(plan.stages) == len(found.stages) > 1
    assert plan.predicted.step_s == pytest.approx(found.step_s, rel=0.03)
    most = max(stage.memory_bytes for stage in found.stages)
    assert plan.predicted.peak_memory_bytes == pytest.approx(most, rel=0.15)


def test_no_number_of_stages_is_faster_than_the_one_that_is_found() -> None:
    """The first and the last stage share weights, which they send each other once."""
    params = {"table": struct(512, 256), "blocks": blocks(6, 256)}
    shared = analysed(tied_loss, params, struct(128, 64, dtype=jnp.int32))
    cluster = Cluster.parse("4x1:cpu,network=100Mb/s")

    def plan_with(**said: Any) -> Plan:
        return plan_analysis(shared, cluster, PlanOptions(**said))

    best_s = plan_with(stages="auto").predicted.step_s
    for stages in (1, 2, 4):
        assert best_s <= plan_with(stages=stages).predicted.step_s
    many = plan_with(stages=4, microbatches=32)
    assert best_s <= many.predicted.step_s
    assert many.pipeline is not None
    table_s = 512 * 256 * 4 / 12.5e6
    assert many.pipeline.step_s[0] > table_s
    assert max(many.pipeline.backward_link_s) < 1.5 * min(many.pipeline.backward_link_s)


def test_computing_again_fits_where_keeping_does_not() -> None:
    """Just under the memory of the plan that keeps all activations."""
    tall = analysed(residual, blocks(6, 64), struct(4096, 64))
    roomy = plan_stages(tall, Cluster.parse("1x1:cpu"), microbatches=[1])
    limit = round(0.7 * roomy.stages[0].memory_bytes)
    tight = Cluster.parse(f"1x1:cpu,memory={limit}B")
    found = plan_stages(tall, tight, microbatches=[1])
    assert not roomy.stages[0].recomputed
    assert found.stages[0].recomputed
    assert found.stages[0].memory_bytes <= limit
    # One product of two again, and the tanh.
    assert roomy.step_s < found.step_s < 1.4 * roomy.step_s


def test_every_size_of_a_microbatch_is_tried_on_every_submesh() -> None:
    """Of 48 rows, three devices need a multiple of three, four one of four."""
    batch = analysed(residual, blocks(6), struct(48, 64))
    found = submeshes(batch, Cluster.parse("6x1:cpu"), WHOLE)
    counts = covering(divisors(48), found, 1)
    assert set(counts) <= set(divisors(48))
    for submesh in found:
        splits = batch_splits(submesh.assignment)
        able = [n for n in divisors(48) if divides(splits, 1 / n)]
        tried = [n for n in counts if divides(splits, 1 / n)]
        for n in able:
            assert any(n / 1.4 < t < 1.4 * n for t in tried)


def test_microbatches_of_a_row_have_layouts_where_the_fastest_split_rows() -> None:
    """Of the whole batch the rows are split; one row cannot be."""
    tall = analysed(residual, blocks(2), struct(4096, 64))
    found = plan_stages(
        tall, Cluster.parse("1x2:cpu"), microbatches=[4096], stages=1, seconds=5
    )
    assert found.microbatches == 4096
    (stage,) = found.stages
    assert len(stage.devices) == 2


def test_a_rule_that_splits_the_model_splits_sequences_between_products_alone() -> None:
    """Unless it says so: weights would have gradients that devices add up."""
    tensor = Rule("tensor", tensor=(0,))
    sequence = dataclasses.replace(tensor, sequence=True)
    for rule in (tensor, sequence):
        for kind in ("contraction", "elementwise"):
            assert rule.allows(kind, "", (0,))
            assert rule.allows(kind, BATCH, (1,))
            assert not rule.allows(kind, BATCH, (0,))
    assert tensor.allows("elementwise", SEQUENCE, (0,))
    assert not tensor.allows("contraction", SEQUENCE, (0,))
    assert sequence.allows("contraction", SEQUENCE, (0,))


def test_stages_split_state_where_the_schedule_keeps_many_activations() -> None:
    """One microbatch fits beside whole state, all of them do not."""
    narrow = analysed(residual, blocks(4, 64), struct(1024, 64))
    options = PlanOptions(stages=2, schedule="gpipe", microbatches=4)
    roomy = plan_pipeline(narrow, Cluster.parse("2x2:cpu"), options, 2)
    most = roomy.predicted.peak_memory_bytes
    limit = round(0.95 * most)
    tight = plan_pipeline(narrow, Cluster.parse(f"2x2:cpu,memory={limit}B"), options, 2)
    assert tight.predicted.peak_memory_bytes <= limit < most
    whole, split = (plan.stages[0].inputs["params/0/down"] for plan in (roomy, tight))
    assert not any(whole)
    assert any(split)


def test_a_plan_says_how_near_it_is_to_the_best_pipeline() -> None:
    wide = analysed(residual, blocks(6, 512), struct(ROWS, 512))
    plan = best_pipeline(wide, Cluster.parse(SLOW), PlanOptions(stages="auto"))
    assert plan is not None
    assert plan.solver.status == "proved optimal"
    # The bound is of layers, of which the plan differs a little.
    assert 0 <= plan.solver.gap < 0.2
    assert plan.changed_parts == ()


def looped(params: Any, x: jax.Array) -> jax.Array:
    """`residual` as a loop over stacked blocks."""
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    ("width", "rows", "network", "in_chunks"),
    [(64, 65536, "10Gb/s", True), (256, 2048, "100Mb/s", False)],
)
def test_loops_are_in_chunks_where_that_is_fastest(
    width: int, rows: int, network: str, in_chunks: bool
) -> None:
    """Copies of the layers cost more than they save on a slow network."""
    up, down = struct(8, width, 4 * width), struct(8, 4 * width, width)
    loop = analysed(looped, {"up": up, "down": down}, struct(rows, width))
    cluster = Cluster.parse(f"4x1:cpu,network={network}")
    options = PlanOptions(stages="auto", microbatches=4)
    found = best_pipeline(loop, cluster, options, limits=PipelineLimits(alone=False))
    assert found is not None
    assert (found.schedule == "interleaved") is in_chunks
    for stages, chunks in ((2, 1), (4, 1), (2, 2), (4, 2), (2, 4)):
        kind = ScheduleKind.INTERLEAVED if chunks > 1 else ScheduleKind.ONE_F_ONE_B
        schedule = Schedule(kind, chunks)
        even = plan_pipeline(loop, cluster, options, stages, schedule=schedule)
        assert found.predicted.step_s <= even.predicted.step_s


def test_a_schedule_that_keeps_too_much_is_an_error_that_names_the_stage() -> None:
    wide = analysed(residual, blocks(4, 128), struct(256, 128))
    options = PlanOptions(stages=2, schedule="gpipe", microbatches=4)
    with pytest.raises(InfeasibleError, match="stage 0 of 2 does not fit: a device"):
        plan_pipeline(wide, Cluster.parse("2x2:cpu,memory=3600000B"), options, 2)


def test_computing_again_costs_what_the_backward_pass_needs() -> None:
    """Layers and planned stages agree where all activations are computed again."""
    wide = analysed(residual, blocks(6, 512), struct(ROWS, 512))
    cluster = Cluster.parse(SLOW)
    found = plan_stages(wide, cluster, microbatches=[4])
    whole = Schedule(ScheduleKind.ONE_F_ONE_B)
    wanted = dataclasses.replace(wanted_of(found), schedule=whole, recomputed=())
    again = dataclasses.replace(wanted, recomputed=tuple(range(len(wanted.layers))))
    kept, anew = (
        plan_wanted(wide, cluster, PlanOptions(), w, 4).pipeline
        for w in (wanted, again)
    )
    assert kept is not None
    assert anew is not None
    forward_s, more_s = sum(kept.forward_s), sum(anew.backward_s) - sum(kept.backward_s)
    # Of a block's two products, the first one.
    assert 0.4 * forward_s < more_s < 0.6 * forward_s
    assert max(anew.activation_bytes) < 0.5 * max(kept.activation_bytes)


def test_stages_are_found_where_one_stage_fits_only_by_computing_again() -> None:
    """No plan of one stage computes again, so that the choice has several."""
    tall = analysed(residual, blocks(6, 64), struct(4096, 64))
    roomy = plan_stages(tall, Cluster.parse("1x2:cpu"), stages=1, microbatches=[1])
    limit = round(0.85 * roomy.stages[0].memory_bytes)
    tight = Cluster.parse(f"1x2:cpu,memory={limit}B")
    options = PlanOptions(stages="auto", microbatches=1)
    alone = plan_stages(tall, tight, stages=1, microbatches=[1])
    assert alone.stages[0].recomputed
    plan = best_pipeline(tall, tight, options)
    assert plan is not None
    assert len(plan.stages) == 2
    assert plan.predicted.peak_memory_bytes <= limit


def test_no_pipeline_is_no_error_where_a_plan_of_one_stage_is_known() -> None:
    """Every pipeline needs more; the plan of one stage is kept."""
    tall = analysed(residual, blocks(6, 64), struct(4096, 64))
    alone = PlanOptions(stages=1, microbatches=1, remat=0)
    roomy = plan_analysis(tall, Cluster.parse("1x2:cpu"), alone)
    limit = round(1.05 * roomy.predicted.peak_memory_bytes)
    tight = Cluster.parse(f"1x2:cpu,memory={limit}B")
    options = PlanOptions(stages="auto", microbatches=1)
    found = plan_analysis(tall, tight, options)
    assert len(found.stages) == 1
    assert best_pipeline(tall, tight, options, most_s=found.predicted.step_s) is None


def test_a_random_key_is_no_part_of_the_batch() -> None:
    """Neither are other arguments with another number of rows."""

    def step(params: Any, key: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            x = batch + 0.1 * jax.random.normal(key, batch.shape)
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    known = analyse(step, ([struct(8, 8)] * 2, key, struct(12, 8)))
    assert rows_to_split(known) == 12
