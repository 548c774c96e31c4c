"""Tests the options of a re-plan, the cost of moves, and preparing ahead."""

from __future__ import annotations

import math
from typing import Any

import elastic_runs
import jax
import jax.numpy as jnp
import numpy as np
import small_step
import step_forms as forms
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar import Cluster
from autopar.elastic.replanning import (
    Horizon,
    ReplanOption,
    best_option,
    likely_next,
)
from autopar.errors import ClusterError
from autopar.planner.idle_devices import dividing_part
from autopar.runtime.state_mover import _lacking, move_of

CLUSTER = Cluster.parse("4:cpu")


def option(
    name: str, step_s: float, move_s: float = 0.0, compile_s: float = 0.0
) -> ReplanOption:
    return ReplanOption(
        name=name,
        cluster=CLUSTER,
        plan=small_step.plan("4:cpu"),
        step_s=step_s,
        move_bytes=0.0,
        move_s=move_s,
        compiled=not compile_s,
        compile_s=compile_s,
    )


class TestChoosing:
    """Costs count against what is gained until the next change."""

    def test_a_long_time_pays_for_a_compilation(self) -> None:
        found = [option("stay", 2.0), option("new", 1.0, 1.0, 9.0)]
        assert best_option(found, horizon_s=19.0).name == "stay"
        assert best_option(found, horizon_s=21.0).name == "new"

    def test_of_equal_ones_the_first(self) -> None:
        found = [option("stay", 1.0), option("new", 1.0)]
        assert best_option(found, horizon_s=100.0).name == "stay"

    def test_devices_that_go_soon(self) -> None:
        found = [option("new", 1.0, 1.0, 30.0), option("known", 2.0, 1.0)]
        assert best_option(found, horizon_s=1e4).name == "new"
        assert best_option(found, horizon_s=1e4, left_s=10.0).name == "known"
        assert best_option(found, horizon_s=1e4, left_s=0.5).name == "known"

    def test_the_horizon_learns(self) -> None:
        assert Horizon(usual_s=600.0).expected_s() == 600.0
        assert Horizon(usual_s=600.0, changes=5, seen_s=0.0).expected_s() == 100.0
        assert Horizon(usual_s=600.0).expected_s(rest_s=7.0) == 7.0


class TestMoving:
    @given(data=st.data())
    def test_what_each_device_lacks(self, data: Any) -> None:
        """Counted element by element, for any two layouts of a matrix."""
        shape, found = (24, 24), list[NamedSharding]()
        for _ in range(2):
            sizes = data.draw(st.sampled_from([(2, 2), (4, 1), (2, 3), (6, 1), (2, 4)]))
            first = data.draw(st.integers(0, 8 - math.prod(sizes)))
            devices = np.array(jax.devices()[first : first + math.prod(sizes)])
            mesh = Mesh(devices.reshape(sizes), ("a", "b"))
            axes = st.sampled_from(
                [(None, None), ("a", "b"), ("b", "a"), (("a", "b"),)]
            )
            found.append(NamedSharding(mesh, PartitionSpec(*data.draw(axes))))
        old, new = found
        cells = np.arange(math.prod(shape)).reshape(shape)
        held = {
            d: set(cells[i].flat) for d, i in old.devices_indices_map(shape).items()
        }
        lacks = {
            d: len(set(cells[i].flat) - held.get(d, set()))
            for d, i in new.devices_indices_map(shape).items()
        }
        assert _lacking(old, new, shape) == lacks

    def test_nothing_moves_where_a_plan_stays(self) -> None:
        plan = small_step.plan("4:cpu")
        step = autopar.parallelize(small_step.step, plan=plan)
        state = step.init(small_step.state, batch=small_step.batch())
        move = move_of([state.sharding], [state], plan, jax.devices()[:4])
        assert (move.nbytes, move.most_bytes) == (0.0, 0.0)
        other = move_of([state.sharding], [state], plan, jax.devices()[4:])
        held = sum(x.data.nbytes for x in state.addressable_shards)
        assert other.nbytes == held


class TestBatchesThatDoNotDivide:
    def test_the_largest_part_that_does(self) -> None:
        parts = {
            n: dividing_part(Cluster.parse(f"{n}:cpu"), 32) for n in (8, 7, 6, 5, 3)
        }
        counts = {n: part and part.num_devices for n, part in parts.items()}
        assert counts == {8: None, 7: 4, 6: 4, 5: 4, 3: 2}

    def test_a_run_goes_on_with_fewer_devices(self) -> None:
        """Five devices cannot split 24 rows: four of them can, and one waits."""
        plain = elastic_runs.losses(elastic_runs.started(forms.FORMS["plain"], 6))
        run = elastic_runs.started(forms.FORMS["plain"], 6)
        changes = {2: {"kind": "gone", "devices": [1, 4, 6]}}
        np.testing.assert_allclose(elastic_runs.losses(run, changes), plain, rtol=1e-5)
        assert run.plan.cluster.read().num_devices == 4
        (line,) = [x for x in run.ledger.lines if x["kind"] == "replan"]
        assert line["chosen"] == "fewer"
        # The fifth device is there still: with one more, six of them train.
        assert run.change({"kind": "added", "devices": [1]}).cluster is not None

    def test_a_device_that_waits_may_go(self) -> None:
        run = elastic_runs.started(forms.FORMS["plain"], 6)
        next(run)
        run.change({"kind": "gone", "devices": [5, 6, 7]})
        next(run)
        assert run.plan.cluster.read().ids == (0, 1, 2, 3)
        run.change({"kind": "gone", "devices": [4]})
        assert next(run).plan is None
        assert run.ledger.lines[-1]["chosen"] == "stay"


class TestLinks:
    """A link that is slower than planned changes the codecs, and nothing moves."""

    def test_codecs_follow(self) -> None:
        cluster = Cluster.parse("8:cpu")
        step = autopar.parallelize(
            wide_step,
            cluster=cluster,
            compression="auto",
            error_budget=1.0,
            pins={"batch": PartitionSpec("data"), "w": PartitionSpec()},
        )
        run = autopar.elastic(
            step, wide_state, wide_source, batch=4096, steps=10**6, ahead=False
        )
        next(run)
        assert not any(g.codec for g in run.plan.gradients)
        rate = {"kind": "link", "level": cluster.levels[0].name}
        run.change({**rate, "bandwidth_bytes_per_s": 1e6})
        done = next(run)
        assert done.plan is not None
        assert any(g.codec for g in done.plan.gradients)
        assert run.change({**rate, "bandwidth_bytes_per_s": 1e6}).status == "repeated"

    def test_a_small_difference_changes_nothing(self) -> None:
        run = elastic_runs.started(forms.FORMS["plain"], 4)
        next(run)
        before = run.plan
        level = before.cluster.read().levels[0].name
        run.change({"kind": "link", "level": level, "bandwidth_bytes_per_s": 9e14})
        assert next(run).plan is None
        assert run.plan is before
        assert run.ledger.lines[-1]["chosen"] == "stay"
        assert run.ledger.lines[-1]["measured"]["move_s"] < 0.01


def wide_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ w) ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def wide_state() -> jax.Array:
    return jnp.ones((64, 64)) * 0.01


def wide_source(position: int, rows: int) -> np.ndarray:
    return (
        np.random.default_rng(position).standard_normal((rows, 64)).astype(np.float32)
    )


class TestAhead:
    def test_likely_next(self) -> None:
        def check(found: Cluster) -> None:
            if max(found.ids) >= 8:
                raise ClusterError("there are 8")

        found = likely_next(Cluster.parse("8:cpu"), (), check)
        assert [c.num_devices for c in found] == [7, 4]
        half = Cluster.parse("8:cpu").without(devices=(4, 5, 6, 7))
        found = likely_next(half, (Cluster.parse("8:cpu"),), check)
        assert [c.num_devices for c in found] == [8, 3, 2]

    def test_what_is_prepared_is_found(self) -> None:
        run = elastic_runs.started(forms.FORMS["plain"], 9, ahead=True)
        assert run.ahead is not None
        for _ in range(4):
            next(run)
        run.ahead.wait()
        run.change({"kind": "gone", "devices": [4, 5, 6, 7]})
        assert next(run).plan is not None
        line = run.ledger.lines[-1]
        assert line["chosen"] == "known"
        assert line["predicted"]["compiled"]
        run.close()

    def test_a_text_finds_what_was_prepared_for_these_devices(self) -> None:
        run = elastic_runs.started(forms.FORMS["plain"], 9, ahead=True)
        assert run.ahead is not None
        for _ in range(4):
            next(run)
        run.ahead.wait()
        run.change(forms.cheap("4:cpu"))
        next(run)
        assert run.ledger.lines[-1]["chosen"] == "known"
        run.close()

    def test_what_cannot_be_planned_stops_nothing(self) -> None:
        run = elastic_runs.started(forms.FORMS["plain"], 4, ahead=True)
        assert run.ahead is not None
        run.ahead.prepare([forms.with_memory(CLUSTER, 10)])
        run.ahead.wait()
        assert [done.step for done in run] == [0, 1, 2, 3]
        run.ahead.wait()
