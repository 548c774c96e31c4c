"""Tests codecs chosen together with layouts, within an error budget."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planner_cases
import pytest
from jax.sharding import PartitionSpec
from planner_steps import mlp_batch, mlp_loss, mlp_params, trained, training
from sharing_links import in_one_host

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.compression.codecs.registry import offered_codecs, parse_codec
from autopar.compression.gradient import MOST_LOST, effective_error
from autopar.cost.breakdown import step_s
from autopar.cost.pricer import Pricer
from autopar.planner.codecs.choose import (
    DEFAULT_BUDGET,
    MOST_OF_BUDGET,
    request_of,
    sent_as_asked,
    with_less_error,
)
from autopar.planner.codecs.sites import gradients_of, parameter_names
from autopar.planner.hints import pin_restriction, pinned_layouts
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.record import restore
from autopar.planner.search import candidate_meshes, search_of_one
from autopar.planner.solving import solve_mesh
from autopar.planner.warm import warm_plan
from autopar.steps.analysis import Analysis, analyse
from autopar.units import seconds_text
from autopar_solver import CodecSelection, solve_selection

ROWS, WIDTH, HIDDEN = 1024, 128, 256
SPLIT = {"batch/*": PartitionSpec("data")}
# Four hosts with one device each.
SLOW, MEDIUM, FAST = "100Mb/s", "500Mb/s", "100Gb/s"


@functools.cache
def analysis() -> Analysis:
    step, args = training(
        mlp_loss,
        mlp_params(WIDTH, HIDDEN, 1),
        mlp_batch(ROWS, WIDTH),
        optax.adamw(1e-2),
    )
    return analyse(step, args)


def cluster(bandwidth: str) -> Cluster:
    return in_one_host(Cluster.parse(f"4x1:cpu,network={bandwidth}"))


def planned(bandwidth: str, compression: str, **options: Any) -> Plan:
    return plan_analysis(
        analysis(),
        cluster(bandwidth),
        PlanOptions(
            axis_names=("data",),
            max_axes=1,
            compression=compression,
            **{"seconds": None, **options},
        ),
    )


@functools.cache
def data_parallel(bandwidth: str, compression: str) -> Plan:
    return planned(bandwidth, compression, pins=SPLIT)


@functools.cache
def free(bandwidth: str, compression: str) -> Plan:
    """A plan for which the planner chooses all layouts."""
    return planned(bandwidth, compression)


def splits_batch(plan: Plan) -> bool:
    return any(plan.inputs["batch/x"][0])


class TestLinks:
    """What is chosen depends on what a second on the link is worth."""

    def test_on_fast_links_nothing_is_compressed(self) -> None:
        plan = data_parallel(FAST, "auto")

        assert {g.codec for g in plan.gradients} == {""}
        assert all(g.wire_bytes == g.dense_bytes for g in plan.gradients)
        assert plan.predicted.step_s == data_parallel(FAST, "none").predicted.step_s

    def test_the_reason_for_nothing(self) -> None:
        found = data_parallel(FAST, "auto").compression

        assert found.mode == "auto"
        assert found.error == 0.0
        assert found.reason.startswith("dense: no codecs within the error budget save")
        assert "(76.3 us of it gradients) after encoding" in found.reason

    def test_on_slow_links_large_gradients_are(self) -> None:
        plan, without = (data_parallel(SLOW, mode) for mode in ("auto", "none"))

        found = {g.name: g for g in plan.gradients}
        assert found["params/0/bias"].codec == "dense"
        for name in ("params/0/up", "params/0/down"):
            assert found[name].codec in offered_codecs()
            assert found[name].wire_bytes < found[name].dense_bytes / 4
            assert found[name].saved_s > 0
        assert plan.predicted.step_s < without.predicted.step_s / 2
        assert plan.compression.reason.startswith("codecs save ")

    def test_the_prediction_counts_what_is_sent(self) -> None:
        plan = data_parallel(SLOW, "int8")
        without = data_parallel(SLOW, "none")

        assert plan.inputs == without.inputs
        wire = sum(g.wire_bytes for g in plan.gradients)
        dense = sum(g.dense_bytes for g in plan.gradients)
        # A ring of four sends 3/2 of what it sums.
        elements = 2 * WIDTH * HIDDEN + HIDDEN
        assert dense == 1.5 * 4 * elements
        assert wire == pytest.approx(
            1.5 * ((1 + 2 / 256) * 2 * WIDTH * HIDDEN) + 6 * HIDDEN
        )
        gone = (
            without.predicted.communication_bytes - plan.predicted.communication_bytes
        )
        assert gone == pytest.approx(dense - wire)

    def test_residuals_take_memory(self) -> None:
        """Without feedback nothing is kept, with it an array of each gradient."""
        plain, int8, int4 = (
            data_parallel(SLOW, c).predicted.peak_memory_bytes
            for c in ("none", "int8", "int4")
        )
        assert int8 == plain
        assert int4 >= plain + 4 * 2 * WIDTH * HIDDEN

    def test_slower_links_never_help(self) -> None:
        steps = [
            data_parallel(b, "auto").predicted.step_s for b in (FAST, MEDIUM, SLOW)
        ]
        assert steps == sorted(steps)

    def test_a_codec_that_is_asked_for_is_used(self) -> None:
        """Even where it does not pay; the plan says that."""
        plan = data_parallel(FAST, "int8")

        codecs = {g.name: g.codec for g in plan.gradients}
        assert codecs == {
            "params/0/up": "int8",
            "params/0/down": "int8",
            "params/0/bias": "dense",
        }
        assert plan.predicted.step_s > data_parallel(FAST, "none").predicted.step_s
        assert plan.compression.reason.startswith("asked for; costs ")

    def test_without_gradients_to_send_the_plan_says_so(self) -> None:
        auto = free("1Mb/s", "auto")
        with pytest.warns(UserWarning, match="'int8' is used for no gradient"):
            named = planned("1Mb/s", "int8")
        for plan in (auto, named):
            assert plan.gradients == ()
            assert plan.compression.reason.startswith("no gradient is summed")


class TestJoint:
    """Layouts and codecs together."""

    def test_the_layouts_change_with_the_codecs(self) -> None:
        """Replicated without; data parallel once gradients are small."""
        without, plan = free(MEDIUM, "none"), free(MEDIUM, "auto")

        assert not splits_batch(without)
        assert splits_batch(plan)
        assert plan.predicted.step_s < without.predicted.step_s
        before_s = without.predicted.step_s
        saved, before, rest = re.fullmatch(
            r"codecs save (\S+) ms of a step of (\S+) ms \(in other layouts; (.*)\)",
            plan.compression.reason,
        ).groups()
        assert float(before) == pytest.approx(1e3 * before_s, rel=5e-3)
        gained_s = before_s - plan.predicted.step_s
        assert float(saved) == pytest.approx(1e3 * gained_s, rel=5e-3)
        assert re.fullmatch(r"\S+ ms in these, \S+ ms of it gradients", rest)

    @pytest.mark.parametrize("codec", ["int8", "bf16"])
    def test_what_was_asked_for_is_beside_the_best_plan_without(
        self, codec: str
    ) -> None:
        """Though its layouts would not be those without codecs."""
        without, plan = free(MEDIUM, "none"), free(MEDIUM, codec)

        gained_s = without.predicted.step_s - plan.predicted.step_s
        verb = "saves" if gained_s > 0 else "costs"
        start = f"asked for; {verb} {seconds_text(abs(gained_s))} of a step of "
        before = seconds_text(without.predicted.step_s)
        assert plan.compression.reason.startswith(f"{start}{before}")

    @pytest.mark.parametrize("pinned", [True, False])
    @pytest.mark.parametrize("bandwidth", ["10Mb/s", SLOW, MEDIUM, "10Gb/s", FAST])
    def test_never_worse_than_layouts_first(self, bandwidth: str, pinned: bool) -> None:
        make = data_parallel if pinned else free
        without = make(bandwidth, "none")
        after = planned(bandwidth, "auto", layouts=without)

        together = make(bandwidth, "auto").predicted.step_s

        assert together <= after.predicted.step_s * (1 + 1e-9)
        assert after.predicted.step_s <= without.predicted.step_s * (1 + 1e-9)
        assert after.inputs == without.inputs

    @pytest.mark.parametrize("compression", ["auto", "int8"])
    def test_a_replan_is_as_good_as_a_new_plan(self, compression: str) -> None:
        """A link that gets slower: the layouts change with the codecs."""
        running = free("10Gb/s", compression)
        options = PlanOptions(axis_names=("data",), max_axes=1, compression=compression)
        for bandwidth in ("1Gb/s", MEDIUM):
            made = warm_plan(analysis(), cluster(bandwidth), options, running)
            cold = free(bandwidth, compression)
            assert made.predicted.step_s <= 1.02 * cold.predicted.step_s
            assert made.compression.mode == compression
        assert splits_batch(made)
        assert any(g.codec for g in made.gradients)

    def test_the_same_call_gives_the_same_plan(self) -> None:
        plans = [planned(MEDIUM, "auto") for _ in range(2)]

        first, second = plans
        assert first.gradients == second.gradients
        assert first.nodes == second.nodes
        assert first.compression == second.compression
        assert first.predicted == second.predicted


class TestBudget:
    """The root mean square, over elements, of each gradient's effective error.

    And none of these is far above it.
    """

    BUDGETS = (0.0, 0.002, 0.01, 0.03, 0.1, 0.3, 1.0)

    @staticmethod
    @functools.cache
    def plan(budget: float) -> Plan:
        return planned(
            SLOW, "auto", layouts=data_parallel(SLOW, "none"), error_budget=budget
        )

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_it_is_kept(self, budget: float) -> None:
        plan = self.plan(budget)

        squares = total = 0.0
        for g in plan.gradients:
            codec = parse_codec(g.codec or "dense")
            error = codec.error(g.local_shape)
            counted = effective_error(error, feedback=codec.feedback)
            assert counted <= min(MOST_OF_BUDGET * budget, MOST_LOST)
            squares += math.prod(g.shape) * counted**2
            total += math.prod(g.shape)
        assert math.sqrt(squares / total) <= budget * (1 + 1e-9)
        assert plan.compression.error == pytest.approx(math.sqrt(squares / total))
        assert plan.compression.error_budget == budget

    def test_less_error_is_never_faster(self) -> None:
        steps = [self.plan(budget).predicted.step_s for budget in self.BUDGETS]

        assert steps == sorted(steps, reverse=True)
        assert steps[-1] < steps[0]

    def test_less_error_is_never_faster_with_other_layouts(self) -> None:
        plans = [
            planned(SLOW, "auto", pins=SPLIT, error_budget=b)
            for b in (0.002, DEFAULT_BUDGET, 1.0)
        ]
        steps = [plan.predicted.step_s for plan in plans]
        assert steps == sorted(steps, reverse=True)
        # The bounds are those of layouts without codecs.
        assert plans[-1].solver.text == "best found, not proved"

    def test_without_a_budget_nothing_is_lost(self) -> None:
        assert {g.codec for g in self.plan(0.0).gradients} <= {"", "dense"}

    def test_the_default(self) -> None:
        plan = planned(SLOW, "auto", layouts=data_parallel(SLOW, "none"))
        assert plan.compression.error_budget == DEFAULT_BUDGET
        assert plan.solver.status == "layouts as they were given"
        assert plan.solver.gap == 0
        assert plan.gradients == self.plan(DEFAULT_BUDGET).gradients

    def test_a_saved_plan_is_not_taken_for_an_edited_one(self) -> None:
        plan = self.plan(DEFAULT_BUDGET)
        loaded = Plan.from_json(json.dumps(plan.to_json()))
        assert (loaded.digest, loaded.changed_parts) == (plan.digest, ())


def test_measured_errors_take_the_place_of_expected_ones() -> None:
    """Where all codecs but one do badly on a gradient, that one is used."""
    plan = data_parallel(SLOW, "none")
    kept = restore(analysis(), plan)
    candidate = search_of_one(analysis(), cluster(SLOW), kept, plan.axis_names).best
    bad = dict.fromkeys(offered_codecs(), 1.0)
    up = "params/0/up"

    def chosen(errors: Any) -> dict[str, str]:
        asked = request_of(PlanOptions(compression="auto"), errors=errors)
        made = sent_as_asked(analysis(), candidate, asked).sending
        assert made is not None
        return {s.name: c for s, c in zip(made.sites, made.codecs, strict=True)}

    assert chosen({})[up] != "int8"
    assert chosen({up: {**bad, "int8": 0.01}})[up] == "int8"
    assert chosen({up: bad})[up] in ("", "dense")


class TestNames:
    """A gradient is named by the parameter that it updates."""

    @staticmethod
    def names(found: Analysis) -> list[str]:
        values = gradients_of(found)
        return sorted(parameter_names(found.graph, found.contraction, values).values())

    @pytest.mark.parametrize(
        "optimizer",
        [
            optax.sgd(0.1, momentum=0.9),
            optax.adamw(1e-2),
            optax.lion(1e-2),
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
            optax.chain(
                optax.clip(1.0), optax.add_decayed_weights(0.1), optax.lamb(0.1)
            ),
            optax.MultiSteps(
                optax.adam(1e-2), every_k_schedule=2
            ).gradient_transformation(),
        ],
        ids=["sgd", "adamw", "lion", "clip_norm", "lamb", "multi_steps"],
    )
    def test_whatever_the_optimizer(self, optimizer: Any) -> None:
        """Also where several parameters have the same shape."""
        params = mlp_params(16, 32, 2)
        step, args = training(mlp_loss, params, mlp_batch(), optimizer)

        found = self.names(analyse(step, args))

        assert found == sorted(
            f"params/{k}/{name}" for k in range(2) for name in ("up", "bias", "down")
        )

    @pytest.mark.parametrize(
        ("name", "prefix"),
        [("nnx_mutated", "model/"), ("conv_batchnorm", "state/params/")],
    )
    def test_whatever_the_form(self, name: str, prefix: str) -> None:
        step, args = planner_cases.workload(name)

        found = self.names(analyse(step, args))

        assert found
        assert all(n.startswith(prefix) for n in found)

    def test_each_value_has_its_own(self) -> None:
        """The gradient of a value is that of the parameter it is named by."""
        params = {"first": jnp.ones((16, 16)), "second": jnp.ones((16, 16))}

        def loss(params: Any, batch: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["first"])
            return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)

        tx = optax.sgd(0.1)
        found = analyse(trained(loss, tx), (params, tx.init(params), mlp_batch()))
        names = parameter_names(found.graph, found.contraction, gradients_of(found))

        # The backward pass meets the second layer first.
        order = [names[v] for v in sorted(names)]
        assert order == ["params/second", "params/first"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "auto", "error_budget": -1}, "a number of at least 0"),
        ({"compression": "auto", "error_budget": math.nan}, "a number of at least 0"),
        ({"compression": "auto", "error_budget": "0.1"}, "a number of at least 0"),
        ({"compression": "int8", "error_budget": 0.1}, "leave it out with"),
        ({"compression": None}, "expected 'none', 'auto' or the text of a codec"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_analysis(analysis(), cluster("1Gb/s"), PlanOptions(**options))


@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=4", "bf16"])
def test_the_cost_of_a_choice_is_a_value(codec: str) -> None:
    """On CPU devices nothing is hidden, so its parts add up to the step."""
    made_for = cluster(SLOW)
    pricer = Pricer(made_for, candidate_meshes(made_for)[0])
    pins = pinned_layouts(analysis(), SPLIT, pricer.mesh)
    best = solve_mesh(analysis(), pricer, pin_restriction(analysis(), pins), seconds=5)
    choice = sent_as_asked(analysis(), best, request_of(PlanOptions(compression=codec)))
    cost = choice.cost
    assert choice.sending is not None
    assert choice.sending.has_codecs
    assert cost.codec_s > 0
    assert cost.codec_bytes > 0
    assert step_s(cost) == pytest.approx(choice.step_s, rel=1e-9)
    assert cost.work_s == pytest.approx(best.cost.work_s, rel=1e-12)
    found = choice.sending.decisions(choice.mesh.axes)
    sent = sum(g.wire_bytes + g.within_bytes for g in found if g.codec)
    assert cost.codec_bytes == pytest.approx(sent, rel=1e-9)


class TestErrors:
    """Errors that were measured count instead of expected ones."""

    def test_measured_ones_decide(self) -> None:
        """A codec that loses more than was expected is not chosen, and the reverse."""
        before = {g.name: g for g in data_parallel(SLOW, "auto").gradients}
        name = "params/0/up"
        bad = {name: {before[name].codec: 0.9}}
        found = {g.name: g for g in self.planned(bad)}
        assert found[name].codec not in ("", before[name].codec)
        other = found["params/0/down"]
        expected = parse_codec(other.codec).error(other.local_shape)
        assert other.error == expected

        found = {g.name: g for g in self.planned({name: {"sign": 1e-3}})}
        assert (found[name].codec, found[name].error) == ("sign", 1e-3)

    def planned(self, errors: Any) -> Any:
        options = PlanOptions(
            axis_names=("data",),
            max_axes=1,
            seconds=None,
            compression="auto",
            pins=SPLIT,
        )
        return plan_analysis(
            analysis(), cluster(SLOW), options, errors=errors
        ).gradients

    @staticmethod
    def selection(**fields: Any) -> CodecSelection:
        """Two gradients with three options each: dense, int8 and int4."""
        rows = {
            "wire_s": (4.0, 1.0, 0.5),
            "local_s": (0.0, 0.1, 0.1),
            "error": (0.0, 0.01, 0.1),
        }
        made: dict[str, Any] = {"ready_s": (0.0, 0.0), "backward_s": 2.0, **fields}
        two: dict[str, Any] = {k: (np.array(row),) * 2 for k, row in rows.items()}
        return CodecSelection(**two, **made)

    def test_of_equal_codecs_the_smaller_error(self) -> None:
        """Where the link is hidden int8 takes no more time than int4."""
        found = solve_selection(self.selection())
        for choices in ((2, 2), (1, 2), tuple(found.choices)):
            search_of_one = dataclasses.replace(
                found, choices=choices, cost_s=0.2, local_s=0.2, exposed_s=0.0
            )
            assert with_less_error(self.selection(), search_of_one).choices == (1, 1)

    def test_not_where_it_costs_time_or_memory(self) -> None:
        exposed = self.selection(backward_s=0.0)
        found = solve_selection(exposed)
        assert found.choices == (2, 2)
        assert with_less_error(exposed, found).choices == (2, 2)

        memory = (np.array([0.0, 8.0, 1.0]),) * 2
        tight = self.selection(memory_bytes=memory, memory_budget_bytes=9.0)
        made = with_less_error(tight, solve_selection(tight))
        assert sorted(made.choices) == [1, 2]
        assert made.memory_bytes == 9.0


class TestLeftOut:
    """What a codec does not send, and why, is said."""

    @staticmethod
    def planned(compression: str, hidden: int) -> Plan:
        """A step with a penalty whose gradient is whole on each device."""

        def loss(params: Any, batch: Any) -> jax.Array:
            penalty = jnp.mean((params[1] @ params[2]) ** 2)
            return mlp_loss(params[:1], batch) + penalty

        alone = jnp.ones((16, WIDTH)), jnp.ones((WIDTH, 16))
        params = [*mlp_params(WIDTH, hidden, 1), *alone]
        batch = mlp_batch(ROWS, WIDTH)
        step, args = training(loss, params, batch, optax.adamw(1e-2))
        return plan_analysis(
            analyse(step, args),
            cluster(SLOW),
            PlanOptions(
                axis_names=("data",),
                max_axes=1,
                seconds=None,
                compression=compression,
                pins={**SPLIT, "params/*": PartitionSpec()},
            ),
        )

    def test_what_is_not_summed_need_not_wait(self) -> None:
        found = self.planned("auto", HIDDEN)
        names = {g.name for g in found.gradients}
        assert {"params/0/up", "params/0/down"} <= names
        assert "params/1" not in names
        assert "wait" not in found.compression.reason

    def test_a_codec_that_is_of_no_use(self) -> None:
        with pytest.warns(UserWarning, match="used for no gradient") as caught:
            found = self.planned("int8", 4)
        (said,) = [str(w.message) for w in caught]
        assert "compression='int8'" in said
        assert "a vector, or of fewer than 1024 elements (3): params/0/" in said
        assert "not summed over devices (2): params/2, params/1\n" in said
        assert "pins={path: PartitionSpec()}" in said
        assert caught[0].filename == __file__
        assert not any(g.codec == "int8" for g in found.gradients)


def test_a_gradient_summed_in_bfloat16_is_half_as_dear() -> None:
    """What a codec saves of it is half; a codec of two bytes then saves nothing."""

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = (
                batch["x"].astype("bfloat16") @ params["narrow"].astype("bfloat16")
            ) ** 2
            x = jnp.tanh(x.astype("float32") @ params["wide"])
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    keys = jax.random.split(jax.random.key(0), 4)
    rows = (WIDTH, WIDTH, ROWS, ROWS)
    narrow, wide, x, y = map(jax.random.normal, keys, [(n, WIDTH) for n in rows])
    state, batch = {"narrow": narrow / 9, "wide": wide / 9}, {"x": x, "y": y}
    expected, loss = jax.jit(step)(state, batch)

    planned = autopar.parallelize(
        step,
        cluster="4x1:cpu,network=100Mb/s",
        compression="auto",
        error_budget=0.003,
        axis_names=("data",),
        pins=SPLIT,
    )
    placed = planned.init(lambda: state, batch=batch)
    after, found = planned(placed, batch)

    plan = planned.plan
    gradients = {g.name.split("/")[-1]: g for g in plan.gradients}
    assert {k: g.codec for k, g in gradients.items()} == {"narrow": "", "wide": "bf16"}
    one, other = gradients["narrow"], gradients["wide"]
    assert (one.dense_bytes, one.saved_s) == (other.dense_bytes / 2, 0.0)
    assert one.wire_bytes == pytest.approx(other.wire_bytes)
    np.testing.assert_allclose(found, loss, rtol=1e-2)
    for name, value in expected.items():
        np.testing.assert_allclose(after[name], value, atol=2e-4)


def layers_with_vectors(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """Layers of a matrix, a scale and a bias; small gradients are two of three."""

    def loss_of(state: Any) -> jax.Array:
        x = batch
        for name in sorted(state):
            layer = state[name]
            x = jnp.tanh(x @ layer["w"] * layer["scale"] + layer["bias"])
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


def test_small_gradients_that_codecs_pack_do_not_count_as_messages() -> None:
    """Over processes, arrays are sent one by one, but gradients by codecs are packed.

    So data parallelism is fast only with codecs, and the search must see that.
    """
    width, rows = 384, 4096
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    matrix = jax.ShapeDtypeStruct((width, width), jnp.float32)
    layer = {"w": matrix, "scale": vector, "bias": vector}
    state = {f"layer{k}": layer for k in range(6)}
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    slow = "4x1:cpu,network=1000Mb/s,network_latency=8ms"
    fast = "4x1:cpu,network=1000Gb/s,network_latency=1us"
    make = functools.partial(
        autopar.plan, layers_with_vectors, state, batch, stages=1, microbatches=1
    )
    split = {"state/*": PartitionSpec(), "batch": PartitionSpec("data")}
    layouts = make(cluster=fast, pins=split, remat=0)

    given = make(cluster=slow, layouts=layouts, compression="auto", remat=0)
    free = make(cluster=slow, compression="auto", remat=0)
    assert any(g.codec for g in given.gradients)
    assert free.predicted.step_s <= 1.001 * given.predicted.step_s
