"""Tests explanations and audits of plans of several stages."""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stage_cases import LOSSES, adam, batch, copied, weights

import autopar
from autopar import audits
from autopar.cluster import Cluster
from autopar.compilers.targets import CPU
from autopar.errors import PlanError
from autopar.layouts.assignment import kept_layout
from autopar.planner.edited import carried_out
from autopar.planner.search import search_of_one
from autopar.reports.alternatives import alternatives, stage_trials
from autopar.reports.attribution import WAYS, step_of
from autopar.reports.audit import ACTIVATIONS, BATCH, COTANGENTS, ONCE
from autopar.reports.explain import input_decisions
from autopar.reports.schedule import play_plan
from autopar.reports.staged import WAITS, bind_stages, busy_s, links, staged_parts
from autopar.runtime.stages.held_bytes import held_bytes
from autopar.runtime.stages.run import _Run
from autopar.runtime.stages.stage import Sent
from autopar.steps.analysis import analyse

PINS = {"batch/*": P("data")}
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@functools.cache
def planned(name="mean", **options):
    """A step, its arguments, and a plan of two stages of two devices; made once."""
    step, state, example = adam(LOSSES[name])
    asked = {"stages": 2, "microbatches": 4, "cluster": "4:cpu", **options}
    asked = {"pins": PINS, "axis_names": ("data",), **asked}
    return step, (state, example), autopar.plan(step, state, example, **asked)


def sgd(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def bound(name="mean", **options):
    step, args, plan = planned(name, **options)
    return bind_stages(analyse(step, args), plan, plan.cluster.read())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_and_waits_add_up_to_the_step(schedule):
    found = bound(schedule=schedule)
    bubble = play_plan(found.plan)[2].bubble
    step_s = found.plan.predicted.step_s
    for by in WAYS:
        for number, parts in enumerate(staged_parts(found, by)):
            assert step_of(parts) == pytest.approx(step_s)
            (waits,) = [part for part in parts if part.what == WAITS]
            assert waits.seconds == pytest.approx(bubble[number] * step_s, rel=1e-6)


def test_codecs_are_part_of_what_a_stage_is_busy_with():
    step, rows = sgd(LOSSES["mean"]), np.ones((64, 64), np.float32)
    args = weights(width=64), {"x": rows, "y": rows}
    plan = autopar.plan(
        step, *args, cluster="4:cpu", stages=2, microbatches=2,
        pins={"*/x": P("data"), "received/*": P("data")}, compression="int8",
        axis_names=("data",),
    )  # fmt: skip
    found = bind_stages(analyse(step, args), plan, Cluster.parse("4:cpu"))
    assert any("codecs" in [p.what for p in ps] for ps in staged_parts(found, "layer"))
    busy = busy_s(found.plan)
    for seconds, parts in zip(busy, staged_parts(found, "layer"), strict=True):
        own = [part for part in parts if part.what != WAITS]
        assert step_of(own) == pytest.approx(seconds)


def test_links_are_those_of_the_schedule():
    found = bound(schedule="interleaved")
    stages = [(link.source, link.target) for link in links(found)]
    assert stages == [(0, 1), (1, 0), (0, 1)]
    for link in links(found):
        # A quarter of the rows, on two devices.
        assert link.activation_bytes == batch()["x"].nbytes / 4 / 2
        assert link.cotangent_bytes == link.activation_bytes


def sent_by_the_runtime(step, args, plan, monkeypatch):
    """Bytes that one device of another stage receives in a step, by direction."""
    run = autopar.parallelize(step, plan=plan, donate=False)
    run(*args)
    owner = {
        device: number
        for number, stage in enumerate(plan.stages)
        for device in (jax.devices()[d] for d in stage.devices)
    }
    landed, found = Sent.land_arrays, dict[tuple[int, int], float]()

    def counted(self, arrays):
        out = landed(self, arrays)
        for before, after in zip(arrays, out, strict=True):
            ways = [owner[next(iter(x.devices()))] for x in (before, after)]
            if ways[0] != ways[1]:
                nbytes = after.addressable_shards[0].data.nbytes
                found[tuple(ways)] = found.get(tuple(ways), 0.0) + nbytes
        return out

    monkeypatch.setattr(Sent, "land_arrays", counted)
    jax.block_until_ready(run(*args))
    return found


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("masked", "zero-bubble"), ("tied", "gpipe"), ("mean", "interleaved")],
)
def test_an_audit_counts_what_stages_send_each_other(monkeypatch, name, schedule):
    step, args, plan = planned(name, schedule=schedule)
    audit = autopar.audit(step, *args, plan=plan)
    expected = sent_by_the_runtime(step, (copied(args[0]), args[1]), plan, monkeypatch)
    told: dict[tuple[int, int], float] = {}
    for t in audit.transfers:
        way = (t.source, t.target)
        told[way] = told.get(way, 0.0) + t.sent_bytes
    assert told == expected


def test_an_audit_finds_what_the_plan_predicts_of_each_stage():
    step, args, plan = normed()
    audit = autopar.audit(step, *args, plan=plan, compiled=True)
    assert audit.agrees
    for stage in audit.stages:
        assert sum(stage.predicted.values()) > 0
        assert stage.predicted["all_reduce"] == pytest.approx(
            stage.shardy["all_reduce"]
        )
        assert stage.compiled is not None
    kinds = {t.what for t in audit.transfers}
    assert {ACTIVATIONS, COTANGENTS} <= kinds <= {
        ACTIVATIONS, COTANGENTS, ONCE, BATCH,
    }  # fmt: skip
    text = str(audit)
    assert "stages send each other what the plan predicts" in text
    assert text.count("shardy communicates what the plan predicts") == 2
    assert len(audit.to_json()["stage_audits"]) == 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_an_audit_compiles_every_stage_for_a_target(monkeypatch, schedule):
    monkeypatch.setattr(audits, "target_of", {"cpu": CPU}.__getitem__)
    step, args, plan = planned(schedule=schedule)
    audit = autopar.audit(step, *args, plan=plan, target="cpu")
    assert len(audit.stages) == 2
    for stage, nbytes in zip(audit.stages, plan.pipeline.memory_bytes, strict=True):
        found = stage.target
        assert found.bytes_by_kind == pytest.approx(stage.predicted)
        assert found.predicted_memory_bytes == nbytes
        assert found.memory.peak_bytes > found.memory.argument_bytes > 0
        assert 0 < found.predicted_compute_s <= plan.predicted.step_s
    data = [stage["target"]["name"] for stage in audit.to_json()["stage_audits"]]
    assert data == ["cpu", "cpu"]
    assert str(audit).count("predicted / compiled") == 2


def test_a_target_that_no_stage_runs_on_is_named():
    step, args, plan = planned()
    with pytest.raises(PlanError, match=r"devices are cpus, and h100 is a gpu"):
        autopar.audit(step, *args, plan=plan, target="h100")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mean", "tied", "masked"])
def test_a_stage_holds_the_bytes_that_are_counted(monkeypatch, name, schedule):
    step, args, plan = planned(name, schedule=schedule)
    run = autopar.parallelize(step, plan=plan)
    pipeline = run.prepare(*args).pipeline
    pipeline.threads = None  # tasks are then issued in the order of the schedule
    held = dict[object, int]()

    def count(self, key, stage):
        kept = (self.step[stage], self.micro[stage], self.sums.get(stage, {}))
        arrays = {id(x): x for x in jax.tree.leaves(kept)}.values()
        device = jax.devices()[plan.stages[stage].devices[0]]
        now = sum(
            s.data.nbytes
            for x in arrays
            for s in x.addressable_shards
            if s.device == device
        )
        held[key] = max(held.get(key, 0), now)

    called = _Run.call_task

    def counted(self, call, number):
        if not call.idle:
            count(self, call.code.task.key, call.code.task.key.stage)
        return called(self, call, number)

    monkeypatch.setattr(_Run, "call_task", counted)
    jax.block_until_ready(run(copied(args[0]), args[1]))
    expected = held_bytes(pipeline)
    assert held == {key: expected[key] for key in held}


def normed_loss(params, batch):
    """Layers after a normalisation whose scale has another size than every operand."""
    x = batch["x"]
    for p in params:
        scale = jax.lax.rsqrt(jax.numpy.mean(x**2, -1, keepdims=True) + 1e-6) * p["b"]
        x = x + jax.numpy.tanh((x * scale) @ p["w"])
    return jax.numpy.mean((x - batch["y"]) ** 2)


@functools.cache
def normed():
    """A plan whose forward passes keep values without a home layout."""

    step, args = sgd(normed_loss), (weights(), batch(rows=256))
    plan = autopar.plan(
        step, *args, cluster="4:cpu", stages=2, microbatches=2,
        pins=PINS, axis_names=("data",),
    )  # fmt: skip
    return step, args, plan


def test_values_without_a_home_are_kept_as_they_are_made():
    step, args, plan = normed()
    found = bind_stages(analyse(step, args), plan, Cluster.parse("4:cpu"))
    kept = [
        (stage.assignment, value)
        for key, task in found.cut.cut.tasks.items()
        for stage in [found.stages[key.stage]]
        for value in task.outputs
        if value in stage.assignment.contraction.floating
    ]
    layouts = [kept_layout(assignment, value) for assignment, value in kept]
    assert any(layout[0] == (0,) for layout in layouts)
    assert autopar.audit(step, *args, plan=plan).agrees
    state, example = args
    _, loss = autopar.parallelize(step, plan=plan, donate=False)(state, example)
    _, expected = jax.jit(step)(state, example)
    assert math.isclose(loss, expected, rel_tol=1e-5)


def test_kept_layouts_split_what_they_can():
    step, args, plan = normed()
    found = bind_stages(analyse(step, args), plan, Cluster.parse("4:cpu"))
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    for stage in found.stages:
        graph = stage.analysis.graph
        for value in stage.assignment.contraction.floating:
            layout = kept_layout(stage.assignment, value)
            spec = P(*("data" if axes else None for axes in layout))
            shape = tuple(graph.values[value].shape)
            NamedSharding(mesh, spec).shard_shape(shape)  # raises where it cannot


def stated(trials):
    """A plan whose layouts are those of a search."""
    names = trials.pricer.mesh.names
    found = search_of_one(
        trials.analysis, trials.pricer.cluster, trials.assignment, names
    )
    return found.best


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_other_layouts_of_a_stage_are_judged_by_the_whole_step(schedule):
    found = bound(schedule=schedule)
    cluster, predicted = found.plan.cluster.read(), found.plan.predicted
    trials = stage_trials(found, cluster, 2.0)
    for own in trials:
        assert own.step_s == pytest.approx(predicted.step_s)
        step_s, held = own.judge(stated(own))
        assert step_s == pytest.approx(predicted.step_s)
        assert held == pytest.approx(predicted.peak_memory_bytes)
    (number, decision), *_ = input_decisions(found.stages, "state/*/3/w")
    assert number == found.plan.home(decision.inputs[0].path)
    others = alternatives(
        trials[number], decision, limit=2, seconds=2.0, say=lambda _: None
    )
    assert len({decision.spec, *(a.spec for a in others)}) == 3
    assert all(a.step_s > 0 and not a.proved for a in others)


def test_pieces_of_an_array_get_another_layout_on_all_stages():
    def loss(params, example):
        x, _ = jax.lax.scan(
            lambda x, w: (x + jax.numpy.tanh(x @ w), None), example["x"], params
        )
        return jax.numpy.mean((x - example["y"]) ** 2)

    rows = np.ones((64, 64), np.float32)
    step, args = sgd(loss), (np.ones((4, 64, 64), np.float32), {"x": rows, "y": rows})
    plan = autopar.plan(
        step, *args, cluster="4:cpu", stages=2, microbatches=4,
        pins={"batch/*": P("data"), "params": P()}, axis_names=("data",),
    )  # fmt: skip
    found = bind_stages(analyse(step, args), plan, Cluster.parse("4:cpu"))
    ((number, decision),) = input_decisions(found.stages, "params")
    assert [i.path for i in decision.inputs] == ["params@0:2"]
    trials = stage_trials(found, plan.cluster.read(), 2.0)
    others = alternatives(
        trials[number], decision, limit=2, seconds=2.0, say=lambda _: None
    )
    for other in others:
        edited = plan.edit({"params": P(*(axes or None for axes in other.spec))})
        again = carried_out(analyse(step, args), edited, seconds=2.0)
        assert other.step_s == pytest.approx(again.predicted.step_s, rel=0.2)
        assert other.step_s > plan.predicted.step_s
