"""Tests the messages of a plan's codecs against the compiled program."""

import math
from typing import Any

import msgspec
import pytest
from checkout import GOLDEN
from jax.sharding import PartitionSpec as P

from autopar.audits import audit_analysis
from autopar.cli.target import load
from autopar.cluster import Cluster
from autopar.compression.codecs.registry import offered_codecs, parse_codec
from autopar.compression.gradient import effective_error
from autopar.cost.codecs import SQUARES_BYTES, TELEMETRY_BYTES
from autopar.cost.pricer import Pricer
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.plans import GradientDecision, Plan
from autopar.reports.explain import mesh_of
from autopar.reports.gradients import codec_options, codec_rows
from autopar.steps.analysis import Analysis, analyse

TARGET = GOLDEN / "two_layers.py"
DEVICES = 8
# Batches split and parameters whole: gradients are summed over all devices.
WHOLE = {"params/*": P(), "batch/*": P("data")}
# Parameters split too: each device needs its part of a sum only.
SPLIT = {"params/*/kernel": P("data"), "batch/*": P("data")}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.parse(f"{DEVICES}:cpu")


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    workload = load(f"{TARGET}:workload", {"width": "64", "batch": "2048"})
    return analyse(workload.step, workload.args)


def make(analysis: Analysis, cluster: Cluster, codec: str, pins: Any = None) -> Plan:
    pins = WHOLE if pins is None else pins
    return plan_analysis(
        analysis, cluster, PlanOptions(max_axes=1, pins=pins, compression=codec)
    )


def pricer_of(plan: Plan, cluster: Cluster) -> Pricer:
    return Pricer(cluster, mesh_of(plan, cluster))


@pytest.mark.parametrize(
    ("codec", "pins"),
    [
        ("int8", SPLIT),
        ("powersgd:rank=2", WHOLE),
        ("topk", WHOLE),
        ("predicted", WHOLE),
    ],
)
def test_audits_find_the_bytes_that_are_predicted(
    analysis: Analysis, cluster: Cluster, codec: str, pins: Any
) -> None:
    plan = make(analysis, cluster, codec, pins)
    assert {g.codec for g in plan.gradients} == {codec, "dense"}
    assert {g.scatter for g in plan.gradients if g.codec == codec} == {pins is SPLIT}
    found = audit_analysis(analysis, plan, cluster, compiled=True).to_json()
    predicted = found["predicted_by_kind"]
    total = sum(predicted.values())
    for audit in ("shardy", "xla"):
        assert found[audit]["by_kind"] == pytest.approx(predicted, rel=1e-6)
        assert found[audit]["communication_bytes"] == pytest.approx(total, rel=1e-6)
    whole = not any(g.scatter for g in plan.gradients)
    each = TELEMETRY_BYTES + whole * SQUARES_BYTES
    telemetry = each * len(plan.gradients) * 2 * (DEVICES - 1) / DEVICES
    expected = plan.predicted.communication_bytes + telemetry
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_round_of_all_gradients_is_one_message(
    analysis: Analysis, cluster: Cluster
) -> None:
    plan = make(analysis, cluster, "int8")
    rows = codec_rows(plan.gradients, pricer_of(plan, cluster))
    kernels = {f"params/{k}/kernel" for k in range(2)}
    biases = {f"params/{k}/bias" for k in range(2)}
    by_kind = {row.kind: row for row in rows if row.arrays != ("telemetry",)}
    assert set(by_kind) == {"all_to_all", "all_gather", "all_reduce", "encode"}
    assert set(by_kind["all_to_all"].arrays) == kernels
    assert set(by_kind["all_gather"].arrays) == kernels
    assert set(by_kind["all_reduce"].arrays) == biases | {"telemetry"}
    assert set(by_kind["encode"].arrays) == kernels | biases
    assert {row.trips for k, row in by_kind.items() if k != "encode"} == {1.0}
    sent = sum(row.sent_bytes for row in by_kind.values())
    squares = SQUARES_BYTES * len(plan.gradients) * 2 * (DEVICES - 1) / DEVICES
    assert sent == pytest.approx(squares + sum(g.wire_bytes for g in plan.gradients))
    assert all(row.seconds > 0 for row in rows)


def test_a_plan_without_codecs_has_no_messages(
    analysis: Analysis, cluster: Cluster
) -> None:
    plan = make(analysis, cluster, "none")
    assert codec_rows(plan.gradients, pricer_of(plan, cluster)) == ()


def test_averages_of_residuals_are_sent_whole(
    analysis: Analysis, cluster: Cluster
) -> None:
    plan = make(analysis, cluster, "topk")
    pricer = pricer_of(plan, cluster)
    gradients = tuple(
        msgspec.structs.replace(g, average_every=20 if g.codec == "topk" else 0)
        for g in plan.gradients
    )
    averaged = plan.with_stage(gradients=gradients)

    def sent(made: Plan) -> float:
        return sum(row.sent_bytes for row in codec_rows(made.gradients, pricer))

    elements = sum(math.prod(g.shape) for g in gradients if g.average_every)
    expected = 4 * elements * 2 * (DEVICES - 1) / DEVICES
    assert sent(averaged) - sent(plan) == pytest.approx(expected)


def kernel_of(plan: Plan) -> GradientDecision:
    return next(g for g in plan.gradients if g.name == "params/0/kernel")


def test_options_are_those_of_auto_and_the_chosen_one(
    analysis: Analysis, cluster: Cluster
) -> None:
    plan = make(analysis, cluster, "int4:block=64")
    options = codec_options(kernel_of(plan), pricer_of(plan, cluster))
    assert {o.codec for o in options} == {"int4:block=64", "", *offered_codecs()}
    times = [o.seconds for o in options]
    assert times == sorted(times)
    plain = next(o for o in options if not o.codec)
    # A ring all-reduce of 64 x 64 elements of four bytes.
    assert plain.wire_bytes == 2 * (DEVICES - 1) / DEVICES * 4 * 64 * 64
    assert (plain.local_s, plain.error) == (0.0, 0.0)
    for option in options:
        if not option.codec or option.refused:
            continue
        codec = parse_codec(option.codec)
        sent = codec.messages((64, 64), DEVICES)
        assert option.wire_bytes == pytest.approx(sum(m.sent for m in sent))
        error = codec.error((64, 64))
        assert option.error == error
        assert option.counted_error == effective_error(error, feedback=codec.feedback)


def test_what_cannot_be_used_says_why_and_comes_last(
    analysis: Analysis, cluster: Cluster
) -> None:
    plan = make(analysis, cluster, "int8", SPLIT)
    options = codec_options(kernel_of(plan), pricer_of(plan, cluster))
    refused = [o for o in options if o.refused]
    assert {o.codec.partition(":")[0] for o in refused} >= {"powersgd"}
    assert options[-len(refused) :] == refused
    assert all(o.seconds == math.inf for o in refused)
