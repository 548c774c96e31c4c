"""Tests steps on replicas with unequal shares of microbatches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar import audits
from autopar.compilers.targets import CPU
from autopar.errors import PlanError
from autopar.planner.search import search_of_one
from autopar.plans import StagePlan
from autopar.reports.alternatives import alternatives, trials_of
from autopar.reports.explain import bind_plan, input_decisions
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import analyse

ROWS, WIDTH = 1536, 64
# Four devices as they are, and four with products of a fifth of their speed.
MIXED = "1x4:cpu+1x4:cpu,efficiency=0.1"
DATA = {"batch": PartitionSpec("data"), "w*": PartitionSpec()}
TENSOR = {"w/up": PartitionSpec(None, "data"), "w/down": PartitionSpec("data")}
FSDP = {"batch": PartitionSpec("data"), "w*": PartitionSpec("data")}


def step(w: Any, batch: Any) -> Any:
    def loss_of(w: Any) -> Any:
        made = jnp.tanh(batch @ w["up"]) @ w["down"]
        return jnp.mean((made - 1.0) ** 2), made

    (loss, made), grads = jax.value_and_grad(loss_of, has_aux=True)(w)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, 0.1 / norm)
    new = jax.tree.map(lambda a, b: a - scale * b, w, grads)
    return new, (loss, made.mean(1), (made > 0).sum(), made[:, 0] > 0)


def state() -> Any:
    draw = np.random.default_rng(0)
    shape = (WIDTH, WIDTH)
    return {k: jnp.asarray(0.1 * draw.standard_normal(shape), jnp.float32)
            for k in ("up", "down")}  # fmt: skip


def batch(rows: int = ROWS) -> Any:
    draw = np.random.default_rng(1)
    return draw.standard_normal((rows, WIDTH)).astype(np.float32)


SHAPES = jax.eval_shape(lambda: (state(), jnp.asarray(batch())))


def parallel(counts: Any, pins: Any = DATA, **options: Any) -> Any:
    asked = {"cluster": MIXED, "axis_names": ("data",), **options}
    return autopar.parallelize(step, microbatches=counts, pins=pins, **asked)


def check_same(run: Any, steps: int = 3) -> None:
    """Compares all results of steps with those of one device."""
    plain = jax.jit(step)
    w, other = state(), state()
    for _ in range(steps):
        w, (loss, means, count, signs) = run(w, batch())
        other, expected = plain(other, batch())
        np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
        np.testing.assert_allclose(means, expected[1], rtol=1e-4, atol=1e-6)
        assert int(count) == int(expected[2])
        np.testing.assert_array_equal(signs, expected[3])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            w,
            other,
        )


@pytest.mark.parametrize("pins", [DATA, TENSOR, FSDP], ids=["data", "tensor", "fsdp"])
def test_steps_are_those_of_one_device(pins: Any) -> None:
    run = parallel([8, 4], pins)
    check_same(run)

    plan = run.plan
    assert [r.microbatches for r in plan.replicas] == [8, 4]
    assert plan.mesh == {"axes": {"replica": 2, "data": 4}}
    assert "8 + 4 microbatches" in str(plan)
    assert all("replica" not in names for s in plan.inputs.values() for names in s)


def test_sums_over_two_axes_are_taken_axis_by_axis_on_each_replica() -> None:
    """On CPUs an all-reduce for each of the axes, of which a slice is kept."""

    def update(w: Any, batch: Any) -> Any:
        def loss_of(w: Any) -> Any:
            made = jnp.tanh(batch @ w["up"]) @ w["down"]
            return jnp.mean((made - 1.0) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), loss

    run = autopar.parallelize(
        update, cluster=MIXED, microbatches=[3, 1], axis_names=("a", "b"),
        pins={"batch": PartitionSpec(("a", "b")), "w*": PartitionSpec("a", "b")},
        donate=False,
    )  # fmt: skip
    given = state(), batch()

    text = run.lower(*given).as_text()
    scatters = re.compile(r"(%\w+) = \"stablehlo.all_reduce.*?dynamic_slice \1,", re.S)
    assert len(scatters.findall(text)) == 4
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        run(*given),
        jax.jit(update)(*given),
    )


def test_a_group_may_have_several_replicas() -> None:
    run = parallel([3, 2, 1], cluster="2x2:cpu+1x2:cpu,efficiency=0.1")
    check_same(run, 1)
    assert run.plan.axis_sizes == (3, 2)


@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [("1x4:cpu+1x2:cpu,efficiency=0.1", (3, 2)), ("2x1:cpu+1x2:cpu", (4, 1))],
)
def test_hosts_of_unequal_sizes_are_cut_into_replicas(
    cluster: str, sizes: tuple[int, ...]
) -> None:
    run = parallel(12, cluster=cluster)
    check_same(run, 1)
    assert run.plan.axis_sizes == sizes
    assert autopar.audit(step, *SHAPES, plan=run.plan).agrees


def test_devices_that_are_gone_are_not_used() -> None:
    whole = autopar.Cluster.parse("2x2:cpu+2x2:cpu,efficiency=0.1")
    left = whole.without(hosts=[0])
    planned = parallel([4, 1, 1], cluster=left).prepare(*SHAPES)
    used = {d.id for d in planned.mesh.devices.flat}
    assert used == {2, 3, 4, 5, 6, 7}


def test_half_precision_is_added_up_as_on_equal_devices() -> None:
    def half(cluster: str, counts: Any) -> Any:
        run = parallel(counts, TENSOR, cluster=cluster)
        w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state())
        return run(w, batch().astype(jnp.bfloat16))

    (w, (loss, means, *_)), (other, expected) = half(MIXED, [8, 4]), half("1x4:cpu", 12)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(means, expected[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        np.float32(a), np.float32(b), rtol=1e-2), w, other)  # fmt: skip


def test_a_saved_plan_runs_without_being_planned_again(tmp_path: Path) -> None:
    made = autopar.plan(
        step, *SHAPES, cluster=MIXED, microbatches=[5, 1], pins=DATA,
        axis_names=("data",),
    )  # fmt: skip
    made.save(tmp_path / "plan.json")
    run = autopar.parallelize(step, plan=str(tmp_path / "plan.json"))

    check_same(run, 1)
    assert run.plan == made


def test_the_compiler_communicates_what_the_plan_says() -> None:
    for pins in (DATA, FSDP):
        plan = autopar.plan(
            step, *SHAPES, cluster=MIXED, microbatches=[8, 4], pins=pins,
            axis_names=("data",),
        )  # fmt: skip
        assert autopar.audit(step, *SHAPES, plan=plan).agrees


def test_a_smaller_last_batch_runs() -> None:
    run = parallel([8, 4], FSDP)
    w, _ = run(state(), batch())
    found = run(w, batch(40))[1][0]

    w, _ = jax.jit(step)(state(), batch())
    np.testing.assert_allclose(found, jax.jit(step)(w, batch(40))[1][0], rtol=1e-5)


def test_a_training_moves_to_replicas_and_back() -> None:
    run = autopar.parallelize(step, cluster="8:cpu", microbatches=4, donate=False)
    w, found = run(state(), batch())
    w = run.replan(MIXED, w)
    assert len(run.plan.replicas) == 2
    w, _ = run(w, batch())
    w = run.replan("8:cpu", w)
    w, found = run(w, batch())

    plain, other = jax.jit(step), state()
    for _ in range(3):
        other, expected = plain(other, batch())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


def test_state_is_made_where_the_replicas_want_it() -> None:
    run = parallel([8, 4])
    w = run.init(state)
    _, (loss, *_) = run(w, batch())

    np.testing.assert_allclose(loss, jax.jit(step)(state(), batch())[1][0], rtol=1e-5)


def test_each_replica_runs_its_own_turns() -> None:
    plan = autopar.plan(
        step, *SHAPES, cluster=MIXED, microbatches=[8, 4], pins=DATA,
        axis_names=("data",),
    )  # fmt: skip
    seen: list[tuple[int, int]] = []

    def note(position: Any, number: Any) -> Any:
        jax.debug.callback(lambda p, n: seen.append((int(p), int(n))), position, number)
        return number

    made = planned_step(
        analyse(step, SHAPES), plan, device_mesh(plan), donate=False, wait=note
    )
    flat = jax.tree.leaves((state(), batch()))
    placed = [
        jax.device_put(x, s) for x, s in zip(flat, made.in_shardings, strict=True)
    ]
    jax.block_until_ready(made.function(*placed))
    jax.effects_barrier()

    assert set(seen) == {(int(n >= 8), n) for n in range(12)}


def drawn(w: Any, key: Any, batch: Any) -> Any:
    """A step with dropout, whose random key is carried."""
    key, own = jax.random.split(key)

    def loss_of(w: Any) -> Any:
        kept = jax.random.bernoulli(own, 0.5, batch.shape)
        return jnp.mean((jnp.where(kept, batch, 0.0) @ w) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - grad, key, loss


def test_random_numbers_are_those_of_equal_shares() -> None:
    w, key = state()["up"], jax.random.key(0)
    one = autopar.parallelize(drawn, cluster="local", microbatches=6, donate=False)
    run = autopar.parallelize(drawn, cluster=MIXED, microbatches=[5, 1], donate=False)

    np.testing.assert_allclose(
        run(w, key, batch())[2], one(w, key, batch())[2], rtol=1e-5
    )


def test_layers_may_be_computed_again() -> None:
    run = parallel([8, 4], remat="all")
    check_same(run, 1)
    assert run.plan.remat.layers


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatches": 1}, "runs one or more"),
        ({"microbatches": [1, 2, 3]}, "has 2 replicas, and 3 are given"),
        ({"microbatches": [8, 3]}, "11 does not divide"),
        ({"stages": "auto"}, "are those of replicas"),
        ({"cluster": "8:cpu"}, "has equal ones"),
        ({"cluster": "1x4:cpu+4:cpu"}, "groups of as many levels"),
        ({"microbatches": [8, 0]}, "such as \\[8, 4\\]"),
    ],
)
def test_what_is_not_carried_out_is_refused(options: Any, says: str) -> None:
    asked = {"cluster": MIXED, "microbatches": [8, 4], **options}
    with pytest.raises(PlanError, match=says):
        autopar.plan(step, *SHAPES, **asked)


def test_plans_that_contradict_themselves_are_refused() -> None:
    plan = autopar.plan(step, *SHAPES, cluster=MIXED, microbatches=[8, 4])
    first, second = plan.replicas
    more = msgspec.structs.replace(second, microbatches=5)
    with pytest.raises(PlanError, match="have 13 together"):
        msgspec.structs.replace(plan, replicas=(first, more))
    with pytest.raises(PlanError, match="is split over 'replica'"):
        plan.edit({"w/up": PartitionSpec("replica")})


def planned(**options: Any) -> autopar.Plan:
    asked: dict[str, Any] = {"cluster": MIXED, "microbatches": [8, 4], **options}
    return autopar.plan(step, *SHAPES, axis_names=("data",), **asked)


def test_edited_shares_are_run() -> None:
    plan = planned(pins=DATA)
    first, second = plan.replicas
    swapped = msgspec.structs.replace(
        plan,
        replicas=(
            msgspec.structs.replace(first, microbatches=4),
            msgspec.structs.replace(second, microbatches=8),
        ),
    )
    run = autopar.parallelize(step, plan=swapped)
    check_same(run, 1)
    assert [r.microbatches for r in run.plan.replicas] == [4, 8]
    assert run.plan.predicted.step_s > plan.predicted.step_s
    assert run.plan.solver.status.startswith("edited: replicas changed by hand")


def test_edited_layouts_are_run() -> None:
    plan = planned(pins=DATA)
    run = autopar.parallelize(step, plan=plan.edit({"w/up": PartitionSpec("data")}))
    check_same(run, 1)
    assert run.plan.inputs["w/up"] == (("data",), ())
    assert run.plan.inputs["w/down"] == plan.inputs["w/down"]
    assert [r.microbatches for r in run.plan.replicas] == [8, 4]
    assert autopar.audit(step, *SHAPES, plan=run.plan).agrees
    fewer = tuple(
        msgspec.structs.replace(r, microbatches=r.microbatches // 2)
        for r in plan.replicas
    )
    other = msgspec.structs.replace(plan, microbatches=6, replicas=fewer)
    run = autopar.parallelize(step, plan=other)
    with pytest.raises(PlanError, match="microbatches"):
        run(state(), batch())


def test_edited_codecs_are_run() -> None:
    plan = planned(pins=DATA, compression="int8")
    coded = [msgspec.structs.replace(g, codec="dense") for g in plan.gradients]
    run = autopar.parallelize(step, plan=plan.with_gradients(coded))
    check_same(run, 1)
    assert {g.codec for g in run.plan.gradients} == {"dense"}


def test_layouts_are_kept() -> None:
    kept = planned(pins=FSDP)
    plan = planned(layouts=kept, microbatches=[5, 7])
    assert plan.inputs == kept.inputs
    assert [r.microbatches for r in plan.replicas] == [5, 7]
    check_same(autopar.parallelize(step, plan=plan), 1)
    assert planned(layouts=kept, microbatches=None).replicas == kept.replicas
    with pytest.raises(PlanError, match="has 12"):
        planned(layouts=kept, microbatches=[5, 6])
    with pytest.raises(PlanError, match="the plan has 2 replicas"):
        planned(layouts=kept, cluster="2x2:cpu+1x2:cpu", microbatches=None)


def test_keys_of_rows_are_put_together() -> None:
    def keyed(w: Any, keys: Any, batch: Any) -> Any:
        def loss_of(w: Any) -> Any:
            noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(keys)
            return jnp.mean((batch @ w + noise) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - grad, jax.vmap(lambda k: jax.random.split(k)[0])(keys), loss

    w, keys = state()["up"], jax.random.split(jax.random.key(0), ROWS)
    run = autopar.parallelize(keyed, cluster=MIXED, microbatches=[5, 1], donate=False)
    found, expected = run(w, keys, batch()), jax.jit(keyed)(w, keys, batch())
    assert len(run.plan.replicas) == 2
    one, other = jax.random.key_data(found[1]), jax.random.key_data(expected[1])
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-5)


def test_an_audit_compiles_for_the_devices_of_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audits, "target_of", {"cpu": CPU}.__getitem__)
    options: Any = {"pins": DATA, "axis_names": ("data",)}
    plan = autopar.plan(step, *SHAPES, cluster=MIXED, microbatches=[8, 4], **options)
    found = autopar.audit(step, *SHAPES, plan=plan, target="cpu").target
    assert found is not None
    slowest = max(plan.replicas, key=lambda replica: replica.step_s)
    assert found.predicted_memory_bytes == slowest.peak_memory_bytes
    assert found.memory.peak_bytes > 0
    assert found.bytes_by_kind["all_reduce"] > 0
    assert found.messages.keys() == found.predicted_messages.keys()


def test_a_target_that_no_replica_runs_on_is_named() -> None:
    plan = autopar.plan(step, *SHAPES, cluster="1x4:h100+1x4:a100", microbatches=[8, 4])
    with pytest.raises(PlanError, match=r"no replica .* such devices; .*h100, a100"):
        autopar.audit(step, *SHAPES, plan=plan, target="v100")


def test_other_layouts_are_judged_on_all_replicas() -> None:
    options: Any = {"pins": DATA, "axis_names": ("data",)}
    plan = autopar.plan(step, *SHAPES, cluster=MIXED, microbatches=[8, 4], **options)
    cluster = plan.cluster.read()
    bound = bind_plan(analyse(step, SHAPES), plan, cluster)
    trials = trials_of(bound, cluster)
    names = trials.pricer.mesh.names
    stated = search_of_one(
        trials.analysis, trials.pricer.cluster, trials.assignment, names
    )
    assert trials.judge(stated.best) == pytest.approx(
        (plan.predicted.step_s, plan.predicted.peak_memory_bytes)
    )
    ((_, decision),) = input_decisions([bound], "w/up")
    others = alternatives(trials, decision, limit=2, seconds=2.0, say=lambda _: None)
    assert len({decision.spec, *(a.spec for a in others)}) == 3
    assert all(a.step_s >= plan.predicted.step_s for a in others)


def test_an_edited_mesh_keeps_the_name_of_its_replicas() -> None:
    plan = planned(pins=DATA)

    def renamed(old: str, new: str) -> Any:
        text = msgspec.json.encode(plan.stages).decode().replace(f'"{old}"', f'"{new}"')
        stages = msgspec.json.decode(text, type=tuple[StagePlan, ...])
        return autopar.parallelize(
            step, plan=msgspec.structs.replace(plan, stages=stages)
        )

    run = renamed("data", "rows")
    check_same(run, 1)
    assert run.plan.axis_names == ("replica", "rows")
    with pytest.raises(PlanError, match="the axis of replicas is named 'replica'"):
        renamed("replica", "group")(state(), batch())
