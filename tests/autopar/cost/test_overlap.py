"""Tests overlap: exposed times, and the lower bounds of the planner's prices."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.cluster import Cluster
from autopar.cost.breakdown import added_s, step_s
from autopar.cost.estimate import estimate
from autopar.cost.overlap import Stretch, Timeline
from autopar.cost.pricer import Pricer
from autopar.planner.candidate import candidate_of
from autopar.planner.problem import formulate
from autopar.planner.recipes import recipes, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.planner.weights import nowhere, weights_of
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import Role
from autopar_solver import Solution, Status, evaluate_choices

seconds = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def simulated_s(work: list[int], gathers: list[int]) -> float:
    """Simulated seconds of a pass whose gathers are sent in the order of readers."""
    clock, link = 0.0, 0.0
    for own, moved in zip(work, gathers, strict=True):
        link += moved
        clock = max(clock, link) + own
    return clock


class TestTimeline:
    @given(seconds, st.data())
    def test_gathers_alone_take_what_a_link_takes(self, work: list[int], data) -> None:
        size = len(work)
        moved = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
        none = np.zeros(size)
        line = Timeline(Role.FORWARD, np.array(work, float), np.array(moved), none)
        want = simulated_s(work, moved) - sum(work)
        assert line.exposed_s(1.0) == pytest.approx(want)

    @given(seconds, st.data())
    def test_sums_alone_take_what_a_link_takes(self, work: list[int], data) -> None:
        size = len(work)
        moved = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
        none = np.zeros(size)
        line = Timeline(Role.BACKWARD, np.array(work, float), none, np.array(moved))
        clock = link = 0.0
        for own, sent in zip(work, moved, strict=True):
            clock += own
            link = max(link, clock) + sent if sent else link
        want = max(clock, link) - sum(work)
        assert line.exposed_s(1.0) == pytest.approx(want)

    @given(seconds, st.data())
    def test_the_tightest_stretch_is_that_of_all(self, work: list[int], data) -> None:
        size = len(work)
        lists = st.lists(st.integers(0, 6), min_size=size, max_size=size)
        gathers, sums = (np.array(data.draw(lists), float) for _ in range(2))
        line = Timeline(Role.BACKWARD, np.array(work, float), gathers, sums)
        every = [Stretch(Role.BACKWARD, -1, last) for last in range(size + 1)]
        every += [Stretch(Role.BACKWARD, first, size) for first in range(size)]
        most = max(line.excess_s(s, 0.5) for s in every)
        assert line.excess_s(line.tightest(0.5), 0.5) == pytest.approx(most)

    def test_without_overlap_everything_is_exposed(self) -> None:
        line = Timeline(Role.FORWARD, np.array([5.0]), np.array([2.0]), np.array([1.0]))
        assert line.exposed_s(0.0) == 3.0


def step(state: dict[str, jax.Array], batch: jax.Array):
    """Three products, with an update by gradient descent."""

    def loss(state: dict[str, jax.Array]) -> jax.Array:
        x = batch
        for name in sorted(state):
            x = jnp.tanh(x @ state[name])
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


@functools.cache
def analysis(rows: int = 512, width: int = 1024) -> Analysis:
    shape = jax.ShapeDtypeStruct((width, width), jnp.float32)
    state = dict.fromkeys(("a", "b", "c"), shape)
    return analyse(step, (state, jax.ShapeDtypeStruct((rows, width), jnp.float32)))


def pricer_of(text: str, contention: float = 0.2) -> Pricer:
    """A mesh of two axes on which messages have no latency."""
    cluster = Cluster.parse(text)
    known = dataclasses.replace(
        cluster.device.corrections, contention=contention, combined_kinds=()
    )
    device = dataclasses.replace(cluster.device, calibration=known)
    cluster = dataclasses.replace(cluster, device=device)
    return Pricer(cluster, candidate_meshes(cluster)[-1])


class TestStep:
    def test_hidden_communication_costs_its_contention(self) -> None:
        pricer = pricer_of("2x4:h100")
        found = solve_mesh(analysis(1 << 16), pricer).assignment
        cost = estimate(found, pricer).cost
        assert 0 < cost.cover_s <= cost.hideable_total_s
        assert cost.contention_s == pytest.approx(0.2 * cost.cover_s)
        assert step_s(cost) == pytest.approx(added_s(cost) - 0.8 * cost.cover_s)

    def test_nothing_is_hidden_on_cpus(self) -> None:
        pricer = Pricer(
            Cluster.parse("8:cpu"), candidate_meshes(Cluster.parse("8:cpu"))[0]
        )
        cost = estimate(solve_mesh(analysis(), pricer).assignment, pricer).cost
        assert cost.cover_s == cost.contention_s == 0
        assert step_s(cost) == added_s(cost)

    @pytest.mark.parametrize("cluster", ["2x4:h100,network=50Gb/s", "2x2x2:v5p"])
    @settings(max_examples=examples(15), deadline=None)
    @given(st.data())
    def test_prices_bound_every_plan_from_below(
        self, cluster: str, data: st.DataObject
    ) -> None:
        """At any weights of stretches, the sum over decisions is at most the time."""
        pricer = pricer_of(cluster)
        known = pricer.cluster.device.corrections
        size = len(nowhere())
        drawn = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
        parts = np.array(drawn) / max(1, sum(drawn))
        weights = weights_of(parts, known).with_least(known.contention)
        priced = formulate(analysis(), pricer, weights=weights)
        plain = formulate(analysis(), pricer)
        choices = [
            data.draw(st.integers(0, len(c) - 1)) for c in priced.problem.node_costs
        ]
        sums = [evaluate_choices(f.problem, choices).cost for f in (priced, plain)]
        if not np.isfinite(sums[1]):
            return
        solution = Solution(
            choices=tuple(choices), cost=0, bound=0, status=Status.FEASIBLE, seconds=0
        )
        found = candidate_of(analysis(), plain, solution)
        # What readers are charged for alike is made once; that is no matter of overlap.
        merged_s = sums[1] - added_s(found.cost)
        assert sums[0] <= found.step_s + max(0.0, merged_s) + 1e-12

    @pytest.mark.parametrize("network", ["", ",network=20Gb/s"])
    def test_the_best_plan_is_that_of_brute_force(self, network: str) -> None:
        """No expert or random plan is faster than what is called proved."""
        pricer = pricer_of(f"2x4:h100{network}")
        best = solve_mesh(analysis(), pricer)
        rng = np.random.default_rng(0)
        plain = formulate(analysis(), pricer)
        sizes = [len(c) for c in plain.problem.node_costs]
        start = list(best.solution.choices)
        times: list[float] = []
        for node, other in itertools.product(range(len(sizes)), range(4)):
            choices = list(start)
            choices[node] = int(rng.integers(sizes[node])) if other else 0
            if np.isfinite(evaluate_choices(plain.problem, choices).cost):
                solution = Solution(
                    choices=tuple(choices),
                    cost=0,
                    bound=0,
                    status=Status.FEASIBLE,
                    seconds=0,
                )
                times.append(candidate_of(analysis(), plain, solution).step_s)
        assert best.step_s <= min(times) * (1 + 5e-3)
        assert best.report.bound <= best.step_s


def test_microbatches_hide_their_gathers_and_the_last_the_sums() -> None:
    pricer = pricer_of("2x4:h100,network=50Gb/s")
    found = estimate(solve_mesh(analysis(1 << 16), pricer).assignment, pricer)
    cost = found.cost
    assert found.seconds() == pytest.approx(step_s(cost))
    hidden_s = added_s(cost) - step_s(cost)
    assert hidden_s > 0
    each_s = found.microbatch_s() + found.accumulate_s
    once_s = added_s(cost) - found.microbatch_s()
    three_s = 3 * each_s + once_s - hidden_s
    # The first two may hide gathers, too, and no more than the last hides.
    assert three_s - 2 * hidden_s <= found.seconds(3, accumulation=3) <= three_s


def projected(w: jax.Array, batch: jax.Array):
    """A step whose update reads the whole parameter in a product."""
    value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(w)
    return w - 0.1 * w @ (w.T @ grad), value


def test_what_the_update_gathers_is_hidden_at_no_batch() -> None:
    """No work is left beside the update: its gathers are in no timeline."""
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (4096, 512))]
    found = analyse(projected, tuple(arrays))
    cluster = Cluster.parse("8:h100")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    recipe = next(r for r in recipes(1) if r.name == "FSDP (ZeRO-3)")
    limit = restriction_of(found, recipe, pricer)
    plan = solve_mesh(found, pricer, limit)
    roles = {found.graph.operators[c.ready].role for c in plan.collectives if c.place}
    assert Role.UPDATE in roles
    assert plan.estimate.seconds() == pytest.approx(plan.step_s)
    assert plan.cost.cover_s == pytest.approx(
        sum(t.communication_s - t.exposed_s(1.0) for t in plan.timelines)
    )
