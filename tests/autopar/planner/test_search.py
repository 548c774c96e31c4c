"""Tests that the search finds the best plan of its space, within its limits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import re
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import planner_cases
import pytest
import step_forms as forms
from jax.sharding import PartitionSpec
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

import autopar
from autopar import Cluster, InfeasibleError, PlanError
from autopar.cluster.text import parse_quantity
from autopar.cost.pricer import Pricer
from autopar.planner.candidate import (
    WORTHWHILE,
    Candidate,
    SearchResult,
    candidate_of,
    choices_of,
    split_most,
    with_bound,
)
from autopar.planner.experts import expert_plans
from autopar.planner.hints import pin_restriction, pinned_layouts
from autopar.planner.infeasible import size_text
from autopar.planner.problem import FEW_NODES, Formulation, formulate, small_state
from autopar.planner.record import make_plan
from autopar.planner.search import candidate_meshes, search
from autopar.planner.solving import TimeOutError, solve_mesh
from autopar.steps.analysis import Analysis, analyse
from autopar_solver import Solution, Status, solve
from autopar_solver import evaluate_choices as check_choices

CLUSTERS = {"cheap": forms.cheap("2x4:cpu"), "cpu": Cluster.parse("8:cpu")}
# The solver stops once it is within this of the proved optimum.
GAP = 1e-4


def analysed(name: str) -> Analysis:
    return analyse(*planner_cases.workload(name))


@functools.cache
def mlp(rows: int = 64, layers: int = 2) -> Analysis:
    params = mlp_params(width=32, hidden=128, layers=layers)
    return analyse(*training(mlp_loss, params, mlp_batch(rows, 32)))


@functools.cache
def searched(cluster: str) -> SearchResult:
    """From a cold start."""
    return search(mlp(), CLUSTERS[cluster], seconds=5)


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
@pytest.mark.parametrize(
    "name", ["mlp_adamw_clip", "attention", "embedding", "mixture_of_experts"]
)
def test_never_slower_than_an_expert(name: str, cluster: str) -> None:
    analysis, on = analysed(name), CLUSTERS[cluster]
    experts = expert_plans(analysis, on, seconds=5)
    known = [e.candidate for e in experts if e.candidate is not None]
    assert known
    result = search(analysis, on, seconds=5, starts=known)
    assert result.best.step_s <= min(c.step_s for c in known)


def test_a_plan_without_a_bound_is_saved_and_read(tmp_path) -> None:
    """A search that ended early may know nothing of other plans."""
    result = searched("cheap")
    best = dataclasses.replace(result.best, lower_s=-math.inf)
    plan = make_plan(mlp(), dataclasses.replace(result, best=best, floor_s=-math.inf))
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json").solver
    assert (read.gap, read.bound) == (1.0, 0.0)


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
def test_without_warm_starts_neither(cluster: str) -> None:
    """Up to what is worth the time: every expert plan is one of the search's space."""
    experts = expert_plans(mlp(), CLUSTERS[cluster], seconds=5)
    known = [e.candidate.step_s for e in experts if e.candidate is not None]
    found = searched(cluster).best
    assert found.step_s <= (1 + WORTHWHILE) * min(known)


def test_the_best_of_all_meshes_is_taken() -> None:
    result = searched("cpu")
    assert [str(m) for m, _ in result.tried] == [
        str(m) for m in candidate_meshes(CLUSTERS["cpu"])
    ]
    assert result.best.step_s == min(c.step_s for _, c in result.tried if c)


class TestWhatIsProved:
    """Of the plans of all meshes, not of those of the best one alone."""

    def test_no_plan_of_any_mesh_is_faster_than_the_bound(self) -> None:
        result = searched("cpu")
        bounds = [c.bound_s for _, c in result.tried if c is not None]
        assert len(bounds) > 1
        assert result.floor_s == min(bounds)
        assert result.report.bound <= min(bounds)

    @pytest.mark.parametrize(
        ("floor_s", "status", "gap"),
        [
            (2.0, Status.OPTIMAL, 0.0),
            (0.998, Status.OPTIMAL, 0.002),
            (0.9, Status.FEASIBLE, 0.1),
            (0.0, Status.FEASIBLE, 1.0),
        ],
    )
    def test_a_lower_bound_elsewhere(
        self, floor_s: float, status: Status, gap: float
    ) -> None:
        known = Solution(
            choices=(0,), cost=1.0, bound=1.0, status=Status.OPTIMAL, seconds=0.0
        )
        found = with_bound(known, floor_s)
        assert found.status is status
        assert found.gap == pytest.approx(gap)
        assert found.bound == min(1.0, floor_s)

    def test_what_was_not_proved_stays_so(self) -> None:
        known = Solution(
            choices=(0,), cost=1.0, bound=0.98, status=Status.FEASIBLE, seconds=0.0
        )
        assert with_bound(known, 0.97).status is Status.FEASIBLE

    def test_a_mesh_without_time_proves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = candidate_meshes(CLUSTERS["cpu"])[-1]

        def solved(analysis: Analysis, pricer: Pricer, *args: Any, **kw: Any) -> Any:
            if pricer.mesh == late:
                raise TimeOutError("no time")
            return solve_mesh(analysis, pricer, *args, **kw)

        monkeypatch.setattr("autopar.planner.search.solve_mesh", solved)
        result = search(mlp(layers=1), CLUSTERS["cpu"], seconds=5)
        assert result.best.report.gap < 1.0
        assert result.report.status is Status.FEASIBLE
        assert result.report.gap == 1.0


class TestSmallState:
    """Biases are split where that is faster, in programs where it may matter."""

    @staticmethod
    @functools.cache
    def wide() -> Analysis:
        """A step whose biases are less than a hundredth of the state."""
        params = mlp_params(width=128, hidden=256, layers=2)
        return analyse(*training(mlp_loss, params, mlp_batch(256, 128)))

    @pytest.mark.parametrize("cluster", ["2x4:cpu", "8:cpu"])
    def test_no_plan_with_split_biases_is_faster(self, cluster: str) -> None:
        analysis, parsed = self.wide(), Cluster.parse(cluster)
        mesh = candidate_meshes(parsed)[-1]
        free = search(analysis, parsed, meshes=[mesh], seconds=5).best
        pins = {"*/bias": PartitionSpec(mesh.names[-1])}
        layouts = pinned_layouts(analysis, pins, mesh)
        assert len(layouts) == 2
        limit = pin_restriction(analysis, layouts)
        pinned = solve_mesh(analysis, Pricer(parsed, mesh), limit, 5)
        assert free.step_s <= (1 + GAP) * pinned.step_s

    def test_in_large_programs_it_stays_whole(self) -> None:
        analysis = self.wide()
        nodes = analysis.contraction.nodes
        assert len(nodes) <= FEW_NODES
        assert not small_state(analysis.graph, analysis.contraction, 1e9)
        many = dataclasses.replace(
            analysis.contraction, nodes=(*nodes, *(nodes[-1:] * FEW_NODES))
        )
        small = small_state(analysis.graph, many, 1e9)
        values = {i.path: i.value for i in analysis.graph.inputs if i.output >= 0}
        kept = {
            p for p, v in values.items() if analysis.contraction.homes[v].node in small
        }
        assert kept == {"params/0/bias", "params/1/bias"}


class TestMaxAxes:
    """As many axes as were asked for, or an error."""

    @pytest.mark.parametrize(("text", "limit"), [("8:cpu", 1), ("2x4:cpu", 2)])
    def test_no_mesh_has_more(self, text: str, limit: int) -> None:
        meshes = candidate_meshes(Cluster.parse(text), limit)
        assert meshes
        assert all(len(mesh.axes) <= limit for mesh in meshes)

    @pytest.mark.parametrize(
        ("text", "limit", "message"),
        [
            ("2x4:cpu", 1, "max_axes=1 is too few: 2x4:cpu has 2 levels"),
            ("8x8:h100", 1, "Give 2 or more"),
            ("8:cpu", 0, "max_axes=0 is too few: 8:cpu has 1 level of"),
        ],
    )
    def test_too_few(self, text: str, limit: int, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            candidate_meshes(Cluster.parse(text), limit)

    def test_names_of_more_axes_contradict_it(self) -> None:
        with pytest.raises(PlanError, match="max_axes=1 contradicts axis_names="):
            candidate_meshes(Cluster.parse("8:cpu"), 1, ("a", "b"))


class TestMemory:
    """A step of which a device cannot hold all."""

    CLUSTER = forms.cheap("2x4:cpu")

    def test_tighter_limits_never_give_faster_plans(self) -> None:
        analysis = mlp(layers=1)
        free = search(analysis, self.CLUSTER, seconds=5).best
        before = free.step_s
        for share in (0.9, 0.7):
            limit = int(share * free.peak_memory_bytes)
            try:
                found = search(
                    analysis, forms.with_memory(self.CLUSTER, limit), seconds=5
                ).best
            except InfeasibleError:
                break
            assert found.peak_memory_bytes <= limit
            assert found.step_s >= (1 - 2 * GAP) * before
            before = found.step_s

    def test_plenty_of_memory_changes_nothing(self) -> None:
        analysis = mlp(layers=1)
        plans = [
            search(analysis, forms.with_memory(self.CLUSTER, n), seconds=None).best
            for n in (2**40, 2**41)
        ]
        assert plans[0].assignment.strategies == plans[1].assignment.strategies

    def test_a_limit_makes_state_split(self) -> None:
        """Whole parameters do not fit where links are slow; split ones do."""
        analysis = mlp(rows=8, layers=1)
        cluster = Cluster.parse("8:cpu")
        free = search(analysis, cluster, seconds=5).best
        limit = int(0.6 * free.peak_memory_bytes)
        found = search(analysis, forms.with_memory(cluster, limit), seconds=5).best
        assert found.peak_memory_bytes <= limit
        assert found.step_s > free.step_s

    def test_why_nothing_fits(self) -> None:
        state = forms.create_plain(jax.random.key(0))
        small = forms.with_memory(self.CLUSTER, 1500)
        with pytest.raises(InfeasibleError) as caught:
            autopar.plan(
                forms.plain_step, *state, forms.batch_structs(), cluster=small,
                seconds=5, microbatches=1, remat=0, stages=1,
            )  # fmt: skip
        first, largest, held, fixes = str(caught.value).split("\n")
        assert caught.value.least_bytes > 1500
        assert "no plan fits" in first
        assert "the device has 1.5kB" in first
        assert "per device" in first
        assert largest.startswith("  largest: ")
        assert any(n in largest for n in ("params/", "opt_state/", "batch/"))
        count = self.CLUSTER.num_devices
        assert held.startswith("  state: ")
        assert held.endswith(f" per device where it is split over all {count}")
        assert fixes.startswith("  try: ")
        assert "devices" in fixes
        assert "memory=" in fixes

    @pytest.mark.parametrize(
        ("rows", "layers", "spec", "share"),
        [(48, 2, "2x2:cpu", 0.1), (48, 2, "3:cpu", 0.3), (8, 1, "3:cpu", 0.1)],
    )
    def test_the_advice_is_true(
        self, rows: int, layers: int, spec: str, share: float
    ) -> None:
        """What it advises is enough, and what it calls a bound is one."""
        analysis = mlp(rows=rows, layers=layers)
        cluster = forms.cheap(spec)
        peaks = [search(analysis, cluster, seconds=2).best.peak_memory_bytes]
        limit = int(share * peaks[0])
        with pytest.raises(InfeasibleError) as caught:
            search(analysis, forms.with_memory(cluster, limit), seconds=2)
        text, enough = str(caught.value), caught.value.enough_bytes
        assert enough is not None
        assert f"memory={size_text(enough)}, for which a plan was found" in text
        assert parse_quantity(size_text(enough), "bytes") == enough > limit
        again = search(analysis, forms.with_memory(cluster, enough), seconds=2)
        peaks += [again.best.peak_memory_bytes]
        for tried in (0.5, 0.7, 0.8, 0.9):
            with contextlib.suppress(InfeasibleError):
                roomy = forms.with_memory(cluster, int(tried * peaks[0]))
                found = search(analysis, roomy, seconds=2)
                peaks.append(found.best.peak_memory_bytes)
        assert 0 < caught.value.least_bytes <= min(peaks) * (1 + 1e-9)
        # The message does not contradict itself.
        bound = re.search(r"every plan needs at least (\S+) per device", text)
        assert bound is not None
        assert parse_quantity(bound[1], "bytes") <= caught.value.least_bytes
        if caught.value.least_bytes <= limit:
            assert "no choice of layouts was found" in text

    def test_a_mesh_that_runs_out_of_time_does_not_end_the_search(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        analysis, cluster = mlp(layers=1), forms.cheap("4:cpu")
        first, *others = candidate_meshes(cluster)
        solve_one = solve_mesh

        def slow(
            analysis: Analysis, pricer: Pricer, *rest: Any, **more: Any
        ) -> Candidate:
            if pricer.mesh == first:
                raise PlanError("no time")
            return solve_one(analysis, pricer, *rest, **more)

        monkeypatch.setattr("autopar.planner.search.solve_mesh", slow)
        assert search(analysis, cluster, seconds=2).best.pricer.mesh in others
        with pytest.raises(PlanError, match="no time"):
            search(analysis, cluster, meshes=[first], seconds=2)


# Brute force ----------------------------------------------------------------


def product_step(w: Any, batch: Any) -> Any:
    return w - 0.1 * batch["x"].T @ (batch["x"] @ w), (batch["x"] @ w).sum()


def chain_step(state: Any, batch: Any) -> Any:
    out = jnp.tanh(batch["x"] @ state["a"]) @ state["b"]
    return {"a": state["a"] * 0.9, "b": state["b"] + out.sum(0)}, out.sum()


def scale_step(state: Any, batch: Any) -> Any:
    return state * 0.9 + (batch["x"] ** 2).mean(0), state.sum()


TINY = {
    "product": (product_step, (jnp.ones((32, 64)), {"x": jnp.ones((64, 32))})),
    "chain": (
        chain_step,
        ({"a": jnp.ones((16, 32)), "b": jnp.ones((32, 8))}, {"x": jnp.ones((64, 16))}),
    ),
    "scale": (scale_step, (jnp.ones(64), {"x": jnp.ones((128, 64))})),
}
SAMPLES = 20_000


def all_choices(formulation: Formulation) -> Sequence[tuple[int, ...]]:
    """Every assignment, or a random subset if there are too many."""
    counts = [len(c) for c in formulation.problem.node_costs]
    if math.prod(counts) <= SAMPLES:
        return list(itertools.product(*map(range, counts)))
    draw = random.Random(0)
    return [tuple(draw.randrange(n) for n in counts) for _ in range(SAMPLES)]


@pytest.mark.parametrize(("text", "cheap"), [("4:cpu", False), ("2x2:cpu", True)])
@pytest.mark.parametrize("name", sorted(TINY))
def test_nothing_is_cheaper_than_what_the_solver_finds(
    name: str, cheap: bool, text: str
) -> None:
    step, args = TINY[name]
    analysis = analyse(step, args)
    cluster = forms.cheap(text) if cheap else Cluster.parse(text)
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    formulation = formulate(analysis, pricer)
    found = solve(formulation.problem, seconds=5)

    assert found.status is Status.OPTIMAL
    checked = check_choices(formulation.problem, found.choices)
    assert checked.cost == pytest.approx(found.cost, rel=1e-9)
    best = min(
        check_choices(formulation.problem, choices).cost
        for choices in all_choices(formulation)
    )
    assert found.cost <= (1 + GAP) * best


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_solver_counts_what_the_plan_does(name: str) -> None:
    """Random assignments: the cost is the time of their work and traffic.

    What messages share is no part of it (`Collective.shared_s`).
    """
    step, args = TINY[name]
    analysis = analyse(step, args)
    cluster = Cluster.parse("2x2:cpu")
    formulation = formulate(analysis, Pricer(cluster, candidate_meshes(cluster)[0]))
    counts = [len(c) for c in formulation.problem.node_costs]
    draw, seen = random.Random(name), 0
    while seen < 30:
        choices = tuple(draw.randrange(n) for n in counts)
        cost = check_choices(formulation.problem, choices).cost
        if math.isinf(cost):
            continue
        seen += 1
        solution = Solution(
            choices=choices, cost=cost, bound=0.0, status=Status.FEASIBLE, seconds=0.0
        )
        candidate = candidate_of(analysis, formulation, solution)
        # Copies that turn out alike are sent once, so it may be less.
        shared_s = sum(c.shared_s(candidate.pricer) for c in candidate.collectives)
        assert candidate.step_s - shared_s <= cost * (1 + 1e-9)


class TestTies:
    """Of layouts at the same price, a batch input takes the one split most."""

    def tie(self, cluster: Cluster, rows: int) -> tuple[Any, Any]:
        analysis = mlp(rows=rows)
        pricer = Pricer(cluster, candidate_meshes(cluster)[-1])
        formulation = formulate(analysis, pricer)
        solution = solve(formulation.problem, seconds=5)
        plain = candidate_of(analysis, formulation, solution)
        split = split_most(analysis, formulation, solution)
        return plain, candidate_of(analysis, formulation, split)

    @pytest.mark.parametrize("rows", [64, 1024, 8192])
    @pytest.mark.parametrize("cluster", sorted(CLUSTERS))
    def test_the_price_stays(self, cluster: str, rows: int) -> None:
        plain, split = self.tie(CLUSTERS[cluster], rows)
        assert split.step_s == pytest.approx(plain.step_s, rel=1e-9)
        assert split.communication_bytes == plain.communication_bytes
        assert split.peak_memory_bytes <= plain.peak_memory_bytes

    def test_a_batch_that_is_only_sliced_is_stored_in_parts(self) -> None:
        args = (*forms.create_plain(jax.random.key(0)), forms.batch_structs(768))
        plan = autopar.plan(forms.plain_step, *args, cluster=CLUSTERS["cheap"])
        parts = [
            math.prod(plan.mesh["axes"][a] for a in plan.inputs[f"batch/{n}"][0])
            for n in "xy"
        ]
        assert parts == [8, 8]


class TestWarmStarts:
    def test_a_candidate_is_found_again(self) -> None:
        analysis = mlp()
        cluster = CLUSTERS["cheap"]
        pricer = Pricer(cluster, candidate_meshes(cluster)[0])
        found = solve_mesh(analysis, pricer, seconds=5)
        again = formulate(analysis, pricer)
        choices = choices_of(again, found.assignment)
        assert choices is not None
        cost = check_choices(again.problem, choices).cost
        assert cost == pytest.approx(found.solution.cost, rel=1e-9)

    def test_the_result_is_at_least_as_good(self) -> None:
        analysis = mlp()
        cluster = CLUSTERS["cpu"]
        best = searched("cpu").best
        warm = search(analysis, cluster, seconds=5, starts=[best]).best
        assert warm.step_s <= best.step_s

    def test_a_start_that_does_not_fit_is_not_returned(self) -> None:
        analysis = mlp(layers=1)
        cluster = forms.cheap("2x4:cpu")
        best = search(analysis, cluster, seconds=5).best
        over = dataclasses.replace(best, peak_memory_bytes=1e18)
        found = search(analysis, cluster, seconds=5, starts=[over]).best
        assert found.peak_memory_bytes < 1e18


def test_a_result_compares_all_meshes() -> None:
    """With memory for everything, without codecs, or the best alone."""
    mesh: Any = None

    def made(plain_s: float, before_s: Any = None, free_s: Any = None) -> Any:
        return types.SimpleNamespace(plain_s=plain_s, before_s=before_s, free_s=free_s)

    best = made(4.0)
    tried = ((mesh, made(2.0)), (mesh, made(5.0, 1.5, 0.5)), (mesh, None))
    found = SearchResult(best, tried, 0.0)

    assert found.before_s == 1.5
    assert found.slowdown == 1.5 / 0.5
    assert dataclasses.replace(found, short=True).slowdown == math.inf
    alone = SearchResult(best, ((mesh, None),), 0.0)
    assert (alone.before_s, alone.slowdown) == (4.0, 1.0)
    free = SearchResult(best, ((mesh, made(1.0, free_s=0.0)),), 0.0)
    assert free.slowdown == math.inf
