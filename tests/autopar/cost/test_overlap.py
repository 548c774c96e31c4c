"""Communication beside work: exposed times, and prices that bound them from below."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar.cluster import Cluster
from autopar.cost.breakdown import added_s, step_s
from autopar.cost.evaluate import evaluate
from autopar.cost.hidden_curve import hidden_curve
from autopar.cost.items import items, seconds_of, timelines
from autopar.cost.overlap import Stretch, Timeline, discounts
from autopar.cost.pricer import Pricer
from autopar.cost.scaling import item_pieces
from autopar.planner.candidate import candidate_of
from autopar.planner.hiding import best_weights, plane_of
from autopar.planner.problem import formulate
from autopar.planner.recipes import recipes, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import Role
from autopar_solver import Solution, Status, evaluate_choices

seconds = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def simulated_s(work: list[int], gathers: list[int]) -> float:
    """Seconds of a pass whose gathers are sent in the order of their readers."""
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
    """Three products with an update by gradient descent."""

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
    """A mesh of two axes on which no message has a latency of its own to share."""
    cluster = Cluster.parse(text)
    known = dataclasses.replace(
        cluster.device.calibrated, contention=contention, combined_kinds=()
    )
    device = dataclasses.replace(cluster.device, calibration=known)
    cluster = dataclasses.replace(cluster, device=device)
    return Pricer(cluster, candidate_meshes(cluster)[-1])


class TestStep:
    def test_hidden_communication_costs_its_contention(self) -> None:
        pricer = pricer_of("2x4:h100")
        found = solve_mesh(analysis(1 << 16), pricer).assignment
        cost = evaluate(found, pricer)
        assert 0 < cost.cover_s <= cost.hideable_total_s
        assert cost.contention_s == pytest.approx(0.2 * cost.cover_s)
        assert step_s(cost) == pytest.approx(added_s(cost) - 0.8 * cost.cover_s)

    def test_nothing_is_hidden_on_cpus(self) -> None:
        pricer = Pricer(
            Cluster.parse("8:cpu"), candidate_meshes(Cluster.parse("8:cpu"))[0]
        )
        cost = evaluate(solve_mesh(analysis(), pricer).assignment, pricer)
        assert cost.cover_s == cost.contention_s == 0
        assert step_s(cost) == added_s(cost)

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def test_prices_bound_every_plan_from_below(self, data: st.DataObject) -> None:
        """At any weights, the sum over decisions is no more than the time of a step."""
        pricer = pricer_of("2x4:h100,network=50Gb/s")
        known = pricer.cluster.device.calibrated
        count = len(analysis().graph.operators)
        weights: dict[Stretch, float] = {}
        for role in (Role.FORWARD, Role.BACKWARD):
            weight = data.draw(st.floats(0, 1))
            cut = data.draw(st.integers(0, count))
            early = data.draw(st.booleans())
            ends = (-1, cut) if early else (cut - 1, count)
            weights[Stretch(role, *ends)] = weight
        lowered = discounts(analysis(), weights, known.overlap, known.contention)
        priced = formulate(analysis(), pricer, discounts=lowered)
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

    def test_weights_move_to_where_planes_cross(self) -> None:
        """One plan computes more, the other sends more: the bound lies between."""
        known = dataclasses.replace(
            pricer_of("8:h100").cluster.device.calibrated, contention=0.0
        )
        nothing = np.zeros(1)

        def plan(work: float, sent: float):
            line = (
                Timeline(Role.FORWARD, np.array([work]), nothing, nothing),
                Timeline(Role.BACKWARD, np.array([work]), nothing, np.array([sent])),
            )
            both = 2 * work + sum(t.exposed_s(1.0) for t in line)
            return plane_of(both, line, known)

        weights = best_weights([plan(1.0, 4.0), plan(3.0, 0.0)], known)
        assert 0 < sum(weights.values()) <= 1 + 1e-9


def test_other_batches_hide_what_timelines_say() -> None:
    """The curve at a batch is the exact hidden time of the items at that batch."""
    pricer = pricer_of("2x4:h100,network=50Gb/s")
    assignment = solve_mesh(analysis(), pricer).assignment
    found = items(assignment, pricer)
    priced = [(i, item_pieces(assignment, pricer, i)) for i in found]
    curve = hidden_curve(assignment, pricer, priced)
    assert curve is not None
    lines = timelines(assignment, seconds_of(found))
    hidden = sum(t.communication_s - t.exposed_s(1.0) for t in lines)
    assert curve.saved_s(1.0, 1) == pytest.approx(0.8 * hidden, rel=1e-6)


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
    priced = [(i, item_pieces(plan.assignment, pricer, i)) for i in plan.items]
    curve = hidden_curve(plan.assignment, pricer, priced)
    assert curve is not None
    hidden = sum(t.communication_s - t.exposed_s(1.0) for t in plan.timelines)
    contention = cluster.device.calibrated.contention
    assert curve.saved_s(1.0, 1) == pytest.approx((1 - contention) * hidden, rel=1e-6)


@pytest.mark.parametrize("network", ["", ",network=25Gb/s"])
def test_the_bound_of_a_plan_is_its_time_without_shared_latencies(network: str) -> None:
    """At any weights, prices add up to what the plan's own plane says.

    A sum that goes on through the update, as under a clip by the global norm, is taken
    where it is made all the same.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    params, batch = mlp_params(width=256, hidden=1024, layers=3), mlp_batch(4096, 256)
    found = analyse(*training(mlp_loss, params, batch, optimizer))
    pricer = pricer_of(f"2x4:h100{network}")
    known = pricer.cluster.device.calibrated
    count = len(found.graph.operators)
    # Stretches that begin between a product and what makes it the gradient's sum.
    starts = [
        found.contraction.producer[end].index
        for deferral in found.deferrals[:4]
        for _, ends in deferral.reach
        for end in ends
    ]
    for first in (-1, *starts):
        weights = {Stretch(Role.BACKWARD, first, count): 1.0}
        plan = solve_mesh(found, pricer, weights=weights)
        plane = plane_of(plan.step_s, plan.timelines, known)
        moved = sum(w * plane.slope_s(s, known) for s, w in weights.items())
        assert plan.solution.cost == pytest.approx(plane.base_s + moved, rel=1e-9)
