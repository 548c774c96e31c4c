"""Tests that losses stay the same when the devices of a run change."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import elastic_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_forms as forms
from jax.sharding import AxisType
from step_forms import FORMS

import autopar
from autopar import Cluster, PlanError
from autopar.errors import EventError

CHANGES = {2: forms.cheap("6:cpu"), 4: forms.cheap("4:cpu"), 6: forms.cheap("8:cpu")}


def devices_of(run: Any) -> int:
    leaves = jax.tree.leaves(run.state)
    return max(len(x.sharding.device_set) for x in leaves)


@pytest.mark.parametrize("name", FORMS)
def test_losses_are_those_of_the_uninterrupted_run(name: str) -> None:
    plain = elastic_runs.losses(elastic_runs.started(FORMS[name], 8))
    run = elastic_runs.started(FORMS[name], 8)
    np.testing.assert_allclose(elastic_runs.losses(run, CHANGES), plain, rtol=1e-5)
    assert [x["new"]["cluster"] for x in run.ledger.lines if x["kind"] == "replan"] == [
        str(c) for c in CHANGES.values()
    ]
    assert (run.step, run.position) == (8, 8 * forms.BATCH)


def test_a_run_under_an_explicit_mesh_of_the_caller(tmp_path: Any) -> None:
    """Devices go and come, and a second run goes on from the checkpoint."""
    form = FORMS["plain"]
    plain = elastic_runs.losses(elastic_runs.started(form, 5))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    with jax.set_mesh(mesh):
        found = list[float]()
        for steps, changes in ((4, {2: CHANGES[2], 3: CHANGES[6]}), (5, None)):
            run = elastic_runs.started(form, steps, checkpoint=tmp_path)
            found += elastic_runs.losses(run, changes)
            run.close()

    np.testing.assert_allclose(found, plain, rtol=1e-5)


def _recurrent(w: Any, batch: Any) -> Any:
    """A recurrent network; time is the first dimension of its batch."""

    def loss(w: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ w + h)
            return h, h

        seen = jax.lax.scan(cell, jnp.zeros(batch["x"].shape[1:]), batch["x"])[1]
        return jnp.mean((seen - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def _time_first(position: int, rows: int) -> Any:
    drawn = [elastic_runs.source(3 * (position + k), 3) for k in range(rows)]
    return jax.tree.map(lambda *x: np.stack(x, 1), *drawn)


@pytest.mark.parametrize("names", [None, {"batch/*": 1}])
def test_rows_of_a_source_may_lie_behind_time(names: Any) -> None:
    """Samples are counted in that dimension, and a wrong number is refused."""
    w = jnp.eye(forms.WIDTH) / 4
    plain, want = w, list[Any]()
    for k in range(3):
        plain, loss = jax.jit(_recurrent)(plain, _time_first(8 * k, 8))
        want.append(float(loss))
    step = autopar.parallelize(_recurrent, cluster="4:cpu", batch_argnames=names)
    options: dict[str, Any] = {"batch": 8, "steps": 3, "ahead": False}

    run = autopar.elastic(step, lambda: w, _time_first, **options)
    found = elastic_runs.losses(run, {1: "2:cpu"})
    short = autopar.elastic(
        step, lambda: w, lambda at, rows: _time_first(at, rows - at // 8), **options
    )

    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert run.position == 24
    with pytest.raises(PlanError, match=r"returned 7 rows in .*dimension 1"):
        elastic_runs.losses(short)


def test_events_larger_than_the_world_are_refused_in_a_line() -> None:
    run = elastic_runs.started(FORMS["plain"], 3)
    hosts = [f"new{k}" for k in range(9_000)]
    huge = Cluster.parse("100x100:cpu").slice((1, 4))
    for event in ["9:cpu", "1000000:cpu", huge, {"kind": "added", "hosts": hosts}]:
        begin = time.perf_counter()
        with pytest.raises(EventError, match="this world at most 8") as caught:
            run.change(event)
        assert time.perf_counter() - begin < 0.1
        assert len(str(caught.value)) < 300
        assert len(str(run.ledger.lines[-1])) < 700
    assert len(elastic_runs.losses(run)) == 3


def test_a_full_disk_is_said_once_and_the_ledger_resumes(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of a file refuses a write as a full disk does."""
    path = tmp_path / "ledger.jsonl"
    run = elastic_runs.started(FORMS["plain"], 1, ledger=path)

    def refuse_an_event() -> None:
        with pytest.raises(EventError):
            run.change("9:cpu")

    refuse_an_event()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        refuse_an_event()
        refuse_an_event()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    assert len(path.read_text().splitlines()) == 1
    assert capsys.readouterr().err.count("File too large") == 1
    refuse_an_event()
    assert len([json.loads(x) for x in path.read_text().splitlines()]) == 4
    run.close()


def test_the_program_runs_on_the_devices_that_are_left() -> None:
    run = elastic_runs.started(FORMS["plain"], 3)
    assert next(run).plan is run.plan
    run.change({"kind": "gone", "devices": [0, 3]})
    done = next(run)
    assert done.plan is run.plan
    assert run.plan.cluster.read().ids == (1, 2, 4, 5, 6, 7)
    used = {d.id for x in jax.tree.leaves(run.state) for d in x.sharding.device_set}
    assert used == {1, 2, 4, 5, 6, 7}
    assert next(run).plan is None


def test_what_is_returned_besides_the_state() -> None:
    """Whatever the form of the result: the state goes on, the rest is given."""

    def step(state: Any, batch: Any) -> Any:
        loss = jnp.mean((batch["x"] * state["w"]) ** 2)
        new = {"w": state["w"] * 0.5, "count": state["count"] + 1}
        return {"state": new, "loss": loss, "norm": jnp.sum(new["w"])}

    def create() -> Any:
        return {"w": jnp.ones(forms.WIDTH), "count": jnp.zeros((), jnp.int32)}

    planned = autopar.parallelize(step, cluster="2:cpu", split_batch=False)
    source = elastic_runs.source
    run = autopar.elastic(planned, create, source, batch=4, steps=3, ahead=False)
    found = [done.result for done in run]
    assert [sorted(x) for x in found] == [["loss", "norm"]] * 3
    assert int(run.state["count"]) == 3
    assert [float(x["norm"]) for x in found] == [8.0, 4.0, 2.0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """A module that has its size and its activation among its leaves."""

    w: jax.Array
    size: int
    activation: Callable[[jax.Array], jax.Array]


def test_parts_of_the_state_that_are_no_arrays_are_not_given_back() -> None:
    def step(layer: Layer, moments: Any, batch: Any) -> Any:
        out = layer.activation(batch["x"] * layer.w)
        new = dataclasses.replace(layer, w=layer.w * 0.5)
        return new, moments + 1, jnp.sum(out) / layer.size

    def create() -> Any:
        return Layer(jnp.ones(forms.WIDTH), forms.WIDTH, jax.nn.relu), jnp.zeros(())

    planned = autopar.parallelize(step, cluster="2:cpu")
    run = autopar.elastic(planned, create, elastic_runs.source, batch=4, steps=2)
    assert [jnp.shape(done.result) for done in run] == [(), ()]
    np.testing.assert_allclose(run.state[0].w, 0.25)
    assert run.state[0].size == forms.WIDTH
    assert float(run.state[1]) == 2


def test_keys_that_follow_the_step() -> None:
    """Arguments after the batch, in order or by name, depend on the step alone."""

    def step(w: jax.Array, batch: Any, key: jax.Array) -> Any:
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return w * 0.9, jnp.sum(batch["x"] * kept) + jnp.sum(w)

    key = jax.random.key(3)

    def run(changes: Any, named: bool) -> list[float]:
        def others(k: int) -> Any:
            own = jax.random.fold_in(key, k)
            return {"key": own} if named else (own,)

        planned = autopar.parallelize(step, cluster=forms.cheap("8:cpu"))
        made = autopar.elastic(
            planned,
            lambda: jnp.ones(forms.WIDTH),
            elastic_runs.source,
            batch=24,
            steps=5,
            others=others,
            ahead=False,
        )
        return elastic_runs.losses(made, changes)

    plain = run({}, named=False)
    assert len(set(plain)) == 5
    changed = run({2: forms.cheap("6:cpu"), 3: forms.cheap("4:cpu")}, named=True)
    np.testing.assert_allclose(changed, plain, rtol=1e-5)


class TestRefusals:
    def test_more_devices_than_the_world_has(self) -> None:
        run = elastic_runs.started(FORMS["plain"], 2)
        next(run)
        with pytest.raises(EventError, match=r"16 devices, and this world at most 8"):
            run.change("16:cpu")
        assert next(run).plan is None

    def test_a_change_without_a_plan(self) -> None:
        """No plan fits the memory: the run goes on as it was, and says why."""
        run = elastic_runs.started(FORMS["plain"], 3)
        next(run)
        run.change(forms.with_memory(forms.cheap("4:cpu"), 100))
        done = next(run)
        assert done.plan is None
        assert devices_of(run) == 8
        (line,) = [x for x in run.ledger.lines if x["kind"] == "refused"]
        assert "fits" in line["reason"]
        run.change(forms.cheap("4:cpu"))
        assert next(run).plan is not None

    def test_nothing_is_left(self) -> None:
        run = elastic_runs.started(FORMS["plain"], 9)
        next(run)
        run.change({"kind": "gone", "hosts": [0], "deadline_s": 30})
        assert list(run) == []
        assert run.step == 1
        assert run.ledger.lines[-1]["kind"] == "stop"


def test_stop_and_close() -> None:
    run = elastic_runs.started(FORMS["plain"], 9)
    steps = [(done.step, run.stop() if done.step == 1 else None) for done in run]
    assert [number for number, _ in steps] == [0, 1]
    run.close()
    run.close()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"step": forms.plain_step}, "autopar.parallelize"),
        ({"source": 3}, "source must be a function"),
        ({"batch": 0}, "batch=0"),
        ({"steps": 1.5}, "steps=1.5"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {
        "step": autopar.parallelize(forms.plain_step, cluster="2:cpu"),
        "create_state": forms.create_plain,
        "source": elastic_runs.source,
        "batch": 8,
        "steps": 2,
    }
    with pytest.raises(PlanError, match=text):
        autopar.elastic(**{**given, **wrong})


def test_a_source_that_returns_too_few_rows() -> None:
    step = autopar.parallelize(forms.plain_step, cluster=Cluster.parse("2:cpu"))
    with pytest.raises(PlanError, match=r"source\(0, 8\) returned 4 rows"):
        autopar.elastic(
            step,
            forms.create_plain,
            lambda position, rows: elastic_runs.source(position, 4),
            batch=8,
            steps=2,
            args=(jax.random.key(0),),
        )


def blown_up(scale: str, **options: Any) -> Any:
    """A run in which losses, or only gradients, of some steps are not finite.

    The gradient of a square root is infinite at zero.
    """

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            some = jnp.where(jnp.isnan(x), 0.0, 1.0)
            h = jnp.nan_to_num(x) if scale == "gradient" else x
            for w in ws:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2 + jnp.sqrt(some * jnp.sum(ws[0] ** 2)))

        value, grads = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    def source(position: int, rows: int) -> Any:
        bad = position // rows in (2, 3, 5, 6, 7)
        return np.full((rows, 16), np.nan if bad else 1 + position / 100, np.float32)

    made = autopar.parallelize(step, cluster="2:cpu", **options.pop("plan", {}))
    create, kept = (lambda: [jnp.eye(16)] * 2), {"batch": 8, "steps": 10}
    return autopar.elastic(made, create, source, ahead=False, **kept, **options)


def held(run: Any) -> np.ndarray:
    return np.stack([np.asarray(w) for w in run.state])


@pytest.mark.parametrize(
    ("scale", "plan"),
    [
        ("loss", {}),
        ("gradient", {}),
        ("gradient", {"microbatches": 2}),
        ("loss", {"stages": 2, "microbatches": 2}),
    ],
)
def test_steps_that_are_not_finite_end_a_run(scale: str, plan: Any) -> None:
    """The third in a row does; the state is that of the last good step."""
    run = blown_up(scale, plan=plan)
    skipped = blown_up(scale, plan=plan, on_nan="skip")
    with pytest.raises(autopar.NotFiniteError, match="steps 5 to 7"):
        for _ in run:
            pass
    seen = [(done.finite, held(skipped)) for done in skipped]

    assert run.step == 5
    lines = [x for x in run.ledger.lines if x["kind"] == "not finite"]
    assert [x["number"] for x in lines] == [2, 3, 5, 6, 7]
    assert [x["count"] for x in lines] == [1, 2, 3, 4, 5]
    bad = {2, 3, 5, 6, 7}
    assert [finite for finite, _ in seen] == [k not in bad for k in range(10)]
    for k in bad:
        np.testing.assert_array_equal(seen[k][1], seen[k - 1][1])
    np.testing.assert_array_equal(held(run), seen[4][1])
    assert np.isfinite(seen[9][1]).all()
    assert (seen[9][1] != seen[7][1]).any()


def test_a_run_goes_on_where_it_is_asked_to() -> None:
    run = blown_up("loss", on_nan="continue")
    assert [done.finite for done in run] == [True] * 2 + [False] * 8
    assert run.nans.count == 8
    with pytest.raises(autopar.PlanError, match="on_nan='ignore'"):
        blown_up("loss", on_nan="ignore")
