"""Tests that collectives in one message pay its latency once."""

from __future__ import annotations

import doctest
import functools
import itertools
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from planner_steps import mlp_batch, mlp_loss, mlp_params, training
from sharing_links import in_one_host, sharing

import autopar
from autopar import Cluster, Plan
from autopar.cluster.specs import CALIBRATIONS
from autopar.cost import combining
from autopar.cost.collectives import collective_s
from autopar.cost.combining import FREE, NORMS, Combiner
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective, join_messages, messages
from autopar.layouts.layout import ReshardStep
from autopar.planner.candidate import candidate_of
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.problem import formulate
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.reports.explain import BoundPlan, bind_plan, group_collectives
from autopar.reports.gradients import codec_rows
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import Analysis, analyse
from autopar_solver import Solution, Status
from autopar_solver import evaluate_choices as check_choices

WIDTH, HIDDEN, LAYERS, ROWS = 32, 64, 3, 256
# The loss, and of each layer two products and a bias, all of float32.
SUMS = 1 + 3 * LAYERS
SUM_BYTES = 4 + 4 * LAYERS * (2 * WIDTH * HIDDEN + HIDDEN)
# Batches split and parameters whole, or both split.
# Data parallelism in the step as it is written.
ONE_PROGRAM: dict[str, Any] = {
    "axis_names": ("data",),
    "max_axes": 1,
    "stages": 1,
    "microbatches": 1,
    "remat": 0,
}
WHOLE = {"params/*": P(), "batch/*": P("data")}
SPLIT = {"params/*": P("data"), "batch/*": P("data")}
LATENCIES_S = (1e-4, 5e-3)


@functools.cache
def analysis() -> Analysis:
    step, args = training(
        mlp_loss, mlp_params(WIDTH, HIDDEN, LAYERS), mlp_batch(ROWS, WIDTH)
    )
    return analyse(step, args)


def hosts(latency_s: float, kind: str = "cpu", count: int = 4) -> Cluster:
    """Hosts of one device each."""
    return Cluster.parse(f"{count}x1:{kind},network_latency={latency_s * 1e6:g}us")


def together(latency_s: float) -> Cluster:
    """The same hosts, with links that carry all arrays of a message at once."""
    return sharing(hosts(latency_s))


def planned(cluster: Cluster, pins: Any, **options: Any) -> tuple[Plan, BoundPlan]:
    plan = plan_analysis(
        analysis(),
        cluster,
        PlanOptions(**ONE_PROGRAM, pins=pins, **options),
    )
    return plan, bind_plan(analysis(), plan, cluster)


def number_of(collectives: Sequence[Collective]) -> float:
    """The number of messages in a step, in which each array counts as a fraction."""
    return sum(c.trips * c.size / (c.message_bytes or c.size) for c in collectives)


class TestPacking:
    @given(
        st.lists(st.integers(1, 50), max_size=60),
        st.integers(5, 100),
        st.integers(1, 9),
    )
    def test_messages_are_filled_in_order(
        self, sizes: list[int], most_bytes: int, most_arrays: int
    ) -> None:
        packed = Combiner(frozenset(), most_bytes, most_arrays).bytes_of_messages(sizes)

        assert [p for n, p in zip(sizes, packed, strict=True) if n > most_bytes] == [
            n for n in sizes if n > most_bytes
        ]
        left = [(n, p) for n, p in zip(sizes, packed, strict=True) if n <= most_bytes]
        while left:
            # The longest beginning that fits is one message.
            totals = list(itertools.accumulate(n for n, _ in left[:most_arrays]))
            count = sum(total <= most_bytes for total in totals)
            assert {p for _, p in left[:count]} == {totals[count - 1]}
            left = left[count:]

    def test_examples_in_docstrings_run(self) -> None:
        assert doctest.testmod(combining) == (0, 3)


class TestGradients:
    """Sums of gradients, of which a data-parallel step has nothing but these."""

    @pytest.mark.parametrize("latency_s", LATENCIES_S)
    def test_all_gradients_are_one_message(self, latency_s: float) -> None:
        plan, bound = planned(together(latency_s), WHOLE)

        link = Pricer(together(latency_s), bound.pricer.mesh).mesh.axes[0].link
        bandwidth = link.bandwidth_bytes_per_s
        ring = 6 * link.latency_s + 1.5 * SUM_BYTES / bandwidth
        doubling = 2 * (link.latency_s + SUM_BYTES / bandwidth)
        assert plan.predicted.communication_s == pytest.approx(min(ring, doubling))
        assert len(bound.collectives) == SUMS
        assert {c.message_bytes for c in bound.collectives} == {SUM_BYTES}

    def test_a_latency_counts_once(self) -> None:
        low, high = (
            planned(together(s), WHOLE)[0].predicted.communication_s
            for s in LATENCIES_S
        )
        # Recursive doubling among four has two steps.
        more = 2 * (LATENCIES_S[1] - LATENCIES_S[0])
        assert high - low == pytest.approx(more, rel=0.02)

    def test_each_array_pays_it_where_they_are_sent_one_by_one(self) -> None:
        """Still they are one message."""
        latency_s = LATENCIES_S[1]
        plan, joint = planned(together(latency_s), WHOLE)
        apart = bind_plan(analysis(), plan, hosts(latency_s))
        assert number_of(apart.collectives) == number_of(joint.collectives) == 1
        apart_s, joint_s = (
            sum(c.seconds(bound.pricer) for c in bound.collectives)
            for bound in (apart, joint)
        )
        more = 2 * (SUMS - 1) * latency_s
        assert apart_s - joint_s == pytest.approx(more, rel=0.02)

    def test_the_compiler_sends_as_many(self) -> None:
        cluster = Cluster.parse("8:cpu")
        plan, bound = planned(cluster, WHOLE)

        program = planned_step(analysis(), plan, device_mesh(plan)).lower().compile()
        found = re.findall(r"= \((.*)\) all-reduce\(", program.as_text())
        assert len(found) == number_of(bound.collectives) == 1
        assert found[0].count("f32[") == SUMS

    def test_accelerators_fill_messages(self) -> None:
        """Those of a step are 1.4 of the compiler's limit, so they take two."""
        scale = math.ceil(
            math.sqrt(1.4 * CALIBRATIONS["gpu"].combined_bytes / SUM_BYTES)
        )
        step, args = training(
            mlp_loss,
            jax.eval_shape(lambda: mlp_params(scale * WIDTH, scale * HIDDEN, LAYERS)),
            jax.eval_shape(lambda: mlp_batch(1000 * ROWS, scale * WIDTH)),
        )
        large = analyse(step, args)
        cluster = hosts(1e-5, "h100")
        plan = plan_analysis(
            large,
            cluster,
            PlanOptions(**ONE_PROGRAM, pins=WHOLE),
        )
        found = bind_plan(large, plan, cluster).collectives
        assert number_of(found) == pytest.approx(2)
        assert len({c.message_bytes for c in found}) == 2
        assert max(c.message_bytes for c in found) <= CALIBRATIONS["gpu"].combined_bytes

    def test_other_dtypes_and_loops_travel_apart(self) -> None:
        """As do other axes, which the compiler cannot join either."""
        places = [
            (9, -1, "float32"),
            (9, -1, "float32"),
            (9, -1, "bfloat16"),
            (5, -1, "float32"),
            (9, 3, "float32"),
            None,
        ]
        pricer = Pricer(
            Cluster.parse("2x2:cpu"), Cluster.parse("2x2:cpu").mesh_shapes()[-1]
        )
        made = [
            Collective(ReshardStep("all_reduce", axes, 0.5, ()), 8, 1.0, 0, 0, place)
            for axes in ((0,), (1,))
            for place in places
        ]
        found = join_messages(pricer, made)
        assert [c.message_bytes for c in found] == 2 * [8.0, 8.0, 4.0, 4.0, 4.0, 0.0]


class TestParameters:
    """Parameters that are split are gathered before they are read."""

    def gathers(self, kind: str) -> list[Collective]:
        _, bound = planned(hosts(1e-4, kind), SPLIT)
        return [c for c in bound.collectives if c.step.kind == "all_gather"]

    def test_accelerators_join_gathers(self) -> None:
        found = self.gathers("h100")
        assert len(found) > 1
        assert number_of(found) == pytest.approx(1)

    def test_cpus_do_not(self) -> None:
        found = self.gathers("cpu")
        assert found
        assert {c.message_bytes for c in found} == {0.0}


def layers_step(params: Any, batch: Any, *, checkpoint: bool) -> Any:
    """A step of unrolled layers."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]

    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        run = jax.checkpoint(layer) if checkpoint else layer
        for w in params:
            x = run(x, w)
        return (x**2).sum()

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads)


def layers_bound(
    kind: str, *, checkpoint: bool = False
) -> tuple[Analysis, Plan, BoundPlan]:
    """A plan that splits the batch and the matrices of three layers over 8 devices."""
    shapes = {"up": (512, 1024), "bias": (1024,), "down": (1024, 512)}
    layer = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    step = functools.partial(layers_step, checkpoint=checkpoint)
    args = ([layer] * LAYERS, {"x": jax.ShapeDtypeStruct((1 << 16, 512), "float32")})
    found = analyse(step, args)
    cluster = Cluster.parse(f"8:{kind}")
    pins = {"*/up": P("data"), "*/down": P("data"), "*/bias": P(), "*/x": P("data")}
    options = PlanOptions(**ONE_PROGRAM, pins=pins)
    plan = plan_analysis(found, cluster, options)
    return found, plan, bind_plan(found, plan, cluster)


class TestWhatNeedsOthers:
    def gathers(self, *, checkpoint: bool) -> list[Collective]:
        _, _, bound = layers_bound("h100", checkpoint=checkpoint)
        return [c for c in bound.collectives if c.step.kind == "all_gather"]

    def test_gathers_of_the_backward_pass_wait_in_checkpointed_layers(self) -> None:
        """One message for the forward pass, and one for each layer on the way back."""
        kept, again = (self.gathers(checkpoint=c) for c in (False, True))

        assert number_of(kept) == pytest.approx(1)
        assert len(again) > len(kept)
        backward = {c.place for c in again if c.place is not None and c.place[1] != -1}
        assert number_of(again) == pytest.approx(1 + len(backward))
        assert len(backward) == LAYERS

    @pytest.mark.parametrize(
        ("kind", "gradients", "expected"),
        [
            ("h100", 2, 1.0),  # with the gradients
            ("h100", 0, 1.0),  # with each other
            ("cpu", 2, 4.0),  # behind sums that run as the same
        ],
    )
    def test_messages_of_norms(
        self, kind: str, gradients: int, expected: float
    ) -> None:
        cluster = Cluster.parse(f"4:{kind}")
        pricer = Pricer(cluster, candidate_meshes(cluster)[0])
        sums = ReshardStep("all_reduce", (0,), 1.0, ())
        made = [
            Collective(sums, 8, 1.0, 0, 0, (9, behind, "float32"))
            for behind in gradients * [FREE] + 3 * [NORMS]
        ]

        found = join_messages(pricer, made)

        assert messages(pricer, found) == pytest.approx({"all_reduce": expected})
        # The prices say nothing of it.
        assert {c.message_bytes for c in found[gradients:]} == {0.0}


@pytest.mark.filterwarnings("ignore:compression='int8' is used for no gradient")
@pytest.mark.parametrize("kind", ["cpu", "h100"])
@pytest.mark.parametrize("pins", [WHOLE, SPLIT])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_rows_add_up_to_the_prediction(kind: str, pins: Any, codec: str) -> None:
    plan, bound = planned(hosts(1e-3, kind), pins, compression=codec)
    rows = group_collectives(bound, bound.collectives)
    rows += codec_rows(plan.gradients, bound.pricer)
    total = sum(row.seconds for row in rows)
    assert total == pytest.approx(plan.predicted.communication_s, rel=1e-9)


# Against the problem, and brute force -----------------------------------------


def product_step(w: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return ((batch["x"] @ w["a"] + w["b"]) ** 2).sum()

    return optax.apply_updates(w, jax.tree.map(lambda g: -0.1 * g, jax.grad(loss)(w)))


@functools.cache
def product() -> Analysis:
    args = ({"a": jnp.ones((64, 64)), "b": jnp.ones(64)}, {"x": jnp.ones((4096, 64))})
    return analyse(product_step, args)


def some_candidates(pricer: Pricer, count: int) -> list[Any]:
    """Random assignments that the problem allows, with their objective values."""
    formulation = formulate(product(), pricer)
    counts = [len(c) for c in formulation.problem.node_costs]
    draw = random.Random(0)
    out: list[Any] = []
    while len(out) < count:
        choices = tuple(draw.randrange(n) for n in counts)
        cost = check_choices(formulation.problem, choices).cost
        if math.isfinite(cost):
            solution = Solution(
                choices=choices, cost=cost, bound=0.0, status=Status.FEASIBLE, seconds=0
            )
            out.append((cost, candidate_of(product(), formulation, solution)))
    return out


@pytest.mark.parametrize("text", ["4x1:cpu", "2x2:cpu", "2x2:h100"])
def test_the_problem_holds_all_but_what_messages_share(text: str) -> None:
    cluster = sharing(Cluster.parse(f"{text},network_latency=2ms"))
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    shared = 0
    for cost, found in some_candidates(pricer, 60):
        shared_s = sum(c.shared_s(found.pricer) for c in found.collectives)
        assert shared_s >= -1e-12
        # Copies that turn out alike are sent once, so it may be less.
        assert found.step_s - shared_s <= cost * (1 + 1e-9)
        shared += shared_s > 0
        for c in found.collectives:
            if c.message_bytes:
                axes = tuple(pricer.mesh.axes[a] for a in c.step.axes)
                kind = pricer.runs_as(c.step.kind)
                whole = pricer.skew(axes) * collective_s(kind, c.message_bytes, axes)
                move = pricer.move_s(c.step, c.size)
                part = c.size / c.message_bytes
                assert c.seconds(pricer) == pytest.approx(
                    c.trips * (part * whole + move)
                )
    assert shared > 5


@pytest.mark.parametrize(
    ("text", "latency", "apart"),
    [
        ("4x1:cpu", "1us", False),
        ("2x2:cpu", "300us", False),
        ("4x1:cpu", "300us", True),
        ("2x2:cpu", "300us", True),
        ("4x1:cpu", "20ms", False),
        ("2x2:cpu", "20ms", True),
    ],
)
def test_no_sample_is_faster_than_the_search(
    text: str, latency: str, apart: bool
) -> None:
    """Where latencies are high, what sends nothing is found too."""
    cluster = Cluster.parse(f"{text},network={10}Gb/s,network_latency={latency}")
    cluster = cluster if apart else sharing(cluster)
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    best = solve_mesh(product(), pricer)
    assert best.solution.status is Status.OPTIMAL
    assert best.pricer == pricer
    sampled = min(found.step_s for _, found in some_candidates(pricer, 400))
    assert best.step_s <= sampled * (1 + 5e-3)


def test_high_latencies_are_avoided() -> None:
    """Between them lies a latency that one message is worth and nine are not."""
    steps: dict[str, tuple[float, int]] = {}
    for latency in ("1us", "20ms"):
        text = f"4x1:cpu,network=10Gb/s,network_latency={latency}"
        cluster = in_one_host(Cluster.parse(text))
        pricer = Pricer(cluster, candidate_meshes(cluster)[0])
        found = solve_mesh(product(), pricer)
        steps[latency] = found.step_s, len(found.collectives)
    assert steps["1us"][1] > 0
    assert steps["20ms"][1] == 0


def test_a_pinned_batch_may_leave_no_plan_without_messages() -> None:
    """The search for plans with fewer combining then has nothing to find."""

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            scaled = p["v"] * batch["x"].mean(-1)
            return jnp.mean((batch["x"] @ p["w"]) ** 2) + jnp.mean(scaled**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {"v": jnp.ones(()), "w": jnp.ones((32, 64))}
    made = autopar.plan(
        step,
        params,
        {"x": jnp.ones((64, 32))},
        cluster=Cluster.parse("2x4:cpu,network=1Gb/s"),
        pins={"batch/*": P("data")},
    )
    assert made.inputs["batch/x"][0] == ("data",)
