"""Local steps against a loop over replicas that is written by hand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import InputTypeError
from autopar.runtime.local.outer import MEAN, Outer
from autopar.runtime.local.pace import Pace
from autopar.runtime.local.rules import Auto, Overlap, RelativeChange, StepAhead
from autopar.runtime.world import LoneChannel
from autopar_passes.audit.compiled import compiled_audit

TX = optax.adam(1e-2)
ROWS = 16


def create(key: jax.Array, dtype: Any = jnp.float32) -> Any:
    """A small network with a scalar, vectors, and a matrix that 3 devices divide."""
    first, second = jax.random.split(key)
    params = {
        "first": (0.2 * jax.random.normal(first, (16, 24))).astype(dtype),
        "bias": jnp.zeros(24, dtype),
        "second": (0.2 * jax.random.normal(second, (24, 7))).astype(dtype),
        "scale": jnp.asarray(1.0, dtype),
    }
    return {"params": params, "opt": TX.init(params), "count": jnp.int32(0)}


def step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["first"] + params["bias"])
        out = params["scale"] * (hidden @ params["second"])
        return jnp.mean((out - batch["y"]).astype(jnp.float32) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(gradients, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "count": state["count"] + 1}, loss


def batch(number: int) -> Any:
    x = np.random.default_rng(number).normal(size=(ROWS, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :7])}


def by_hand(replicas: int, every: int, outer: Outer, steps: int) -> Any:
    """The mean losses of the steps, and the parameters at the end."""
    states = [create(jax.random.key(0)) for _ in range(replicas)]
    anchor = {k: np.asarray(x) for k, x in states[0]["params"].items()}
    momentum = {k: np.zeros_like(x) for k, x in anchor.items()}
    run, losses = jax.jit(step), []
    for number in range(1, steps + 1):
        parts = [
            {
                k: x.reshape(replicas, -1, *x.shape[1:])[r]
                for k, x in batch(number).items()
            }
            for r in range(replicas)
        ]
        made = [run(s, part) for s, part in zip(states, parts, strict=True)]
        states = [state for state, _ in made]
        losses.append(float(np.mean([loss for _, loss in made])))
        if number % every:
            continue
        for k, before in anchor.items():
            moved = [before - np.asarray(s["params"][k]) for s in states]
            gradient = np.mean(moved, axis=0)
            momentum[k] = outer.momentum * momentum[k] + gradient
            taken = momentum[k]
            if outer.nesterov:
                taken = gradient + outer.momentum * momentum[k]
            anchor[k] = before - outer.rate * taken
        for state in states:
            state["params"] = {k: jnp.asarray(x) for k, x in anchor.items()}
    return losses, [s["params"] for s in states]


def overlapped_by_hand(
    replicas: int, every: int, overlap: Overlap, outer: Outer, steps: int, first: set
) -> list[float]:
    """The mean losses of steps beside which outer steps run, for two fragments.

    The parameters named by ``first`` are synchronised after steps ``every``, twice
    ``every`` and so on, the others half an ``every`` later.
    """
    states = [create(jax.random.key(0)) for _ in range(replicas)]
    anchor = {k: np.asarray(x) for k, x in states[0]["params"].items()}
    momentum = {k: np.zeros_like(x) for k, x in anchor.items()}
    run, losses, under_way = jax.jit(step), [], {}
    for number in range(1, steps + 1):
        parts = [
            {
                k: x.reshape(replicas, -1, *x.shape[1:])[r]
                for k, x in batch(number).items()
            }
            for r in range(replicas)
        ]
        made = [run(s, part) for s, part in zip(states, parts, strict=True)]
        states = [state for state, _ in made]
        losses.append(float(np.mean([loss for _, loss in made])))
        for k, (new, taken) in under_way.pop(number, {}).items():
            for state, x in zip(states, taken, strict=True):
                own, mixing = np.asarray(state["params"][k]), overlap.mixing
                merged = own + (new - x)
                if mixing is not None:
                    merged = mixing * own + (1 - mixing) * new
                state["params"] = {**state["params"], k: jnp.asarray(merged)}
        for k, before in anchor.items():
            offset = 0 if k in first else every // 2
            if number <= offset or (number - offset) % every:
                continue
            taken = [np.asarray(s["params"][k]) for s in states]
            gradient = np.mean([before - x for x in taken], axis=0)
            momentum[k] = outer.momentum * momentum[k] + gradient
            moved = momentum[k]
            if outer.nesterov:
                moved = gradient + outer.momentum * momentum[k]
            anchor[k] = before - outer.rate * moved
            due = under_way.setdefault(number + overlap.steps, {})
            due[k] = anchor[k], taken
    return losses


def train(made: Any, steps: int, **options: Any) -> Any:
    state = made.init(create, jax.random.key(0), batch=batch(1), **options)
    losses = []
    for number in range(1, steps + 1):
        state, loss = made(state, batch(number))
        losses.append(float(loss))
    return losses, state


@pytest.mark.parametrize(
    ("cluster", "outer", "options"),
    [
        ("4x2:cpu,network=100Mb/s", Outer(), {}),
        ("2x4:cpu,network=100Mb/s", MEAN, {"replicas": 4}),
        ("2x1:cpu,network=10Mb/s", Outer(0.5, 0.3, nesterov=False), {}),
        ("2x4:cpu,network=100Mb/s", Outer(), {"microbatches": 2}),
    ],
)
def test_losses_are_those_of_the_loop_by_hand(
    cluster: str, outer: Outer, options: Any
) -> None:
    made = autopar.local_steps(
        step, every=3, outer=outer, cluster=cluster, seconds=1, **options
    )
    losses, state = train(made, 8)
    wanted, params = by_hand(made.replicas, 3, outer, 8)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for own, hand in zip(state.replicas, params, strict=True):
        for k, x in hand.items():
            np.testing.assert_allclose(own["params"][k], x, rtol=1e-4, atol=1e-6)
    assert int(state.step) == 8


def test_copies_send_parts_and_bytes_are_those_of_the_program() -> None:
    # In a data-parallel replica all devices hold copies, so each sends a part.
    pins = {"state/*": jax.sharding.PartitionSpec()}
    made = autopar.local_steps(
        step, every=2, cluster="2x4:cpu,network=1Mb/s", seconds=1, pins=pins
    )
    losses, state = train(made, 4)
    np.testing.assert_allclose(losses, by_hand(2, 2, Outer(), 4)[0], rtol=1e-5)
    (group,) = made.groups
    exchange = group.exchange
    sizes = {leaf.path: leaf for leaf in exchange.leaves}
    assert sizes["state/params/first"].dim >= 0
    assert sizes["state/params/scale"].dim < 0
    given = (
        jnp.int32(0),
        group.join([made.arrays(k, s) for k, s in enumerate(state.replicas)]),
        state.anchors[0],
        state.momenta[0],
        state.codecs[0],
    )
    text = exchange.program.lower(*given).compile()
    mesh = tuple(exchange.mesh.shape.items())
    between = [c for c in compiled_audit(text, mesh).collectives if "replica" in c.axes]
    told = 4 * 3 * len(exchange.leaves)  # the norms, of which all devices are told
    sent = sum(c.sent_bytes for c in between)
    assert made.sent_bytes < sent <= made.sent_bytes + 2 * told


def test_fragments_are_synchronised_in_turn() -> None:
    made = autopar.local_steps(
        step, every=4, fragments=2, outer=MEAN, cluster="2x1:cpu", seconds=1
    )
    state = made.init(create, jax.random.key(0), batch=batch(1))
    equal = []
    for number in range(1, 9):
        state, _ = made(state, batch(number))
        first, second = (s["params"] for s in state.replicas)
        same = {k: bool(jnp.all(x == np.asarray(second[k]))) for k, x in first.items()}
        equal.append(same)
    # The first fragment after steps 4 and 8, the second after step 6.
    paths = [group.exchange.leaves for group in made.groups]
    names = [[x.path.rpartition("/")[2] for x in leaves] for leaves in paths]
    assert all(equal[3][k] and equal[7][k] for k in names[0])
    assert all(equal[5][k] for k in names[1])
    assert not any(equal[3][k] for k in names[1])
    assert not any(equal[4].values())
    state = made.synchronise(state)
    first, second = (s["params"] for s in state.replicas)
    assert all(bool(jnp.all(x == np.asarray(second[k]))) for k, x in first.items())


@pytest.mark.parametrize(
    ("cluster", "outer", "overlap"),
    [
        ("2x1:cpu", MEAN, Overlap(1)),
        ("2x2:cpu", Outer(), Overlap(4)),
        ("2x2:cpu", Outer(), Overlap(3, mixing=0.5)),
        ("4x1:cpu", MEAN, Overlap(2, mixing=0.25)),
    ],
)
def test_outer_steps_run_beside_training(
    cluster: str, outer: Outer, overlap: Overlap
) -> None:
    made = autopar.local_steps(
        step, every=4, fragments=2, outer=outer, overlap=overlap, cluster=cluster,
        seconds=1,
    )  # fmt: skip
    losses, state = train(made, 14)
    leaves = made.groups[0].exchange.leaves
    first = {leaf.path.rpartition("/")[2] for leaf in leaves}
    assert 0 < len(first) < 4
    wanted = overlapped_by_hand(made.replicas, 4, overlap, outer, 14, first)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert state.rounds.tolist() == [3, 3]
    state = made.synchronise(state)
    assert state.merge_at.tolist() == [-1, -1]
    one, other = (state.replicas[k]["params"] for k in (0, 1))
    assert all(bool(jnp.all(x == np.asarray(other[k]))) for k, x in one.items())
    losses = [float(made(state, batch(15))[1])]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("codec", ["int8", "int4", "powersgd:rank=4"])
def test_codecs_err_and_feed_back(codec: str) -> None:
    made = autopar.local_steps(
        step, every=2, codec=codec, outer=MEAN, cluster="2x2:cpu", seconds=1
    )
    losses, state = train(made, 12)
    dense, _ = by_hand(2, 2, MEAN, 12)
    np.testing.assert_allclose(losses, dense, rtol=0.1)
    assert losses != pytest.approx(dense, rel=1e-6)
    sent, error, mean = made.telemetry["state/params/first"]
    assert 0.0 < error < sent
    assert mean > 0.0
    kept = [np.asarray(x) for x in jax.tree.leaves(state.codecs)]
    assert any(np.any(x) for x in kept) == (codec != "int8")


def test_a_replica_may_have_stages() -> None:
    made = autopar.local_steps(
        step, every=2, outer=MEAN, cluster="2x2:cpu", seconds=1, stages=2,
        microbatches=2,
    )  # fmt: skip
    losses, _ = train(made, 6)
    np.testing.assert_allclose(losses, by_hand(2, 2, MEAN, 6)[0], rtol=1e-5)
    assert len(made.plan.stages) == 2


def test_anchors_of_bfloat16_are_float32() -> None:
    made = autopar.local_steps(step, every=1, cluster="2x1:cpu", seconds=1)
    half = functools.partial(create, dtype=jnp.bfloat16)
    state = made.init(half, jax.random.key(0), batch=batch(1))
    state, _ = made(state, batch(1))
    assert {x.dtype for x in state.anchors[0]} == {jnp.dtype(jnp.float32)}
    for path, anchor in zip(
        made.groups[0].exchange.leaves, state.anchors[0], strict=True
    ):
        own = state.state["params"][path.path.rpartition("/")[2]]
        assert own.dtype == jnp.bfloat16
        np.testing.assert_array_equal(own, np.asarray(anchor).astype(jnp.bfloat16))


def test_predictions_add_up() -> None:
    made = autopar.local_steps(step, every=8, cluster="2x2:cpu,network=1Mb/s")
    with pytest.raises(autopar.PlanError, match="init"):
        _ = made.outer_s
    train(made, 1)
    one = made.plan.predicted.step_s
    assert made.step_s == pytest.approx(one + made.outer_s / 8)
    assert made.outer_s > made.sent_bytes / (1e6 / 8)
    assert "once in 8 steps" in str(made)
    beside = autopar.local_steps(
        step, every=8, overlap=Overlap(8), cluster="2x2:cpu,network=1Mb/s"
    )
    train(beside, 1)
    assert beside.step_s == pytest.approx(max(one, made.outer_s / 8))
    # Devices encode for an outer step, so this is never hidden.
    coded = autopar.local_steps(
        step, every=8, codec="int8", overlap=Overlap(8), cluster="2x2:cpu"
    )
    train(coded, 1)
    work = sum(g.exchange.work_s(coded.cluster.device) for g in coded.groups)
    assert work > 0
    assert coded.step_s == pytest.approx(one + work / 8)


def test_programs_of_outer_steps_stay_compiled_in_the_next_training() -> None:
    made = autopar.local_steps(step, every=2, fragments=2, cluster="2x2:cpu")
    found = []
    for _ in range(2):
        losses, state = train(made, 4)
        fragments = made.find_fragments(state.state)
        found.append((losses, [g.exchange for groups in fragments for g in groups]))
    (first, exchanges), (second, again) = found
    assert first == second
    assert len(exchanges) == 2
    assert all(a is b for a, b in zip(exchanges, again, strict=True))


class StatedPace(Pace):
    """Steps take 1 s, and outer steps of a fragment 3 s."""

    def end_step(self, arrays: Any) -> None:
        self._steps.append(1.0)

    def end_outer(self, fragment: int, arrays: Any) -> None:
        self._outer[fragment].append(3.0)


@pytest.mark.parametrize("overlap", [None, Overlap(1)])
def test_auto_chooses_again_by_what_was_measured(overlap: Overlap | None) -> None:
    made = autopar.local_steps(
        step, every=Auto(0.5), outer=MEAN, cluster="2x1:cpu", seconds=1,
        fragments=2, overlap=overlap,
    )  # fmt: skip
    made._pace = StatedPace(2)
    state = made.init(create, jax.random.key(0), batch=batch(0))
    assert made.interval < 8
    number = 0
    while made._pace is not None:
        state, _ = made(state, batch(number))
        number += 1
    rounds = np.array(state.rounds)
    assert rounds.min() >= 2
    # Outer steps take 6 s, of which 2 are hidden where each runs beside a step.
    chosen = made.interval
    assert chosen == (12 if overlap is None else 8)
    for _ in range(2 * chosen):
        state, _ = made(state, batch(number))
        number += 1
    assert (np.array(state.rounds) - rounds).tolist() == [2, 1]
    # Another training keeps the interval, and begins anew.
    again = made.init(create, jax.random.key(0), batch=batch(0))
    for k in range(chosen):
        again, _ = made(again, batch(k))
    assert np.array(again.rounds).tolist() == [1, 0]


def test_a_pace_measures_after_the_first_steps_and_outer_steps() -> None:
    times = iter([0.0, 9.0, 0.0, 9.0, *(x for k in range(5) for x in (k, k + 1.5 + k))])
    outer = iter([20.0, 29.0, 30.0, 33.0])
    now = [times]
    pace = Pace(1, clock=lambda: next(now[0]))
    for _ in range(7):
        pace.begin(())
        pace.end_step(())
    now[0] = outer
    for _ in range(2):
        assert not pace.is_complete
        pace.begin(())
        pace.end_outer(0, ())
    assert pace.is_complete
    assert pace.slowest_s(LoneChannel()) == (3.5, [3.0])


def test_auto_chooses_the_least_interval_that_costs_little() -> None:
    many, cluster = 10**9, "2x2:cpu,network=1Mb/s"
    made = autopar.local_steps(step, every=Auto(most=many), cluster=cluster)
    with pytest.raises(autopar.PlanError, match="init"):
        _ = made.interval
    train(made, 1)
    own, every = made.plan.predicted.step_s, made.interval
    assert 1 < every < many
    assert own + made.outer_s / every <= 1.1 * own < own + made.outer_s / (every - 1)
    # Beside training an outer step may take as long as the steps.
    beside = autopar.local_steps(
        step, every=Auto(0.5, most=many), overlap=Overlap(2), cluster=cluster
    )
    train(beside, 1)
    assert 2 <= beside.interval < every
    assert beside.step_s <= 1.5 * own * (1 + 1e-9)
    capped = autopar.local_steps(step, every="auto", cluster=cluster)
    train(capped, 1)
    assert capped.interval == 500
    assert Auto(0.5).interval(1, 1.0, 0.0, 3.0) == 2
    with pytest.raises(autopar.PlanError, match="at least 9"):
        Auto(most=7).interval(9, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0}, "at least 1"),
        ({"every": 2, "fragments": 3}, "more than every"),
        ({"every": 2, "plan": "x"}, "own devices"),
        ({"every": 2, "outer": Outer, "replicas": 3}, "Outer"),
        ({"every": 2, "replicas": 3}, "equal parts"),
        ({"every": 2, "codec": "int9"}, "int9"),
        ({"every": 2, "overlap": Overlap(3)}, "at most as many"),
        ({"every": "often"}, "whole number"),
        ({"every": 2, "overlap": 1}, "an Overlap"),
        ({"every": 2, "microbatch": 1}, "no option 'microbatch'"),
        ({"every": 2, "world": 1}, "World"),
    ],
)
def test_refused_options(given: Any, words: str) -> None:
    def begin() -> None:
        made = autopar.local_steps(step, cluster="2x2:cpu", **given)
        made.init(create, jax.random.key(0), batch=batch(1))

    with pytest.raises((autopar.AutoparError, ValueError, TypeError), match=words):
        begin()


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (Overlap, (1.5,), "Overlap: steps=: expected a whole number"),
        (Overlap, (1, "x"), "Overlap: mixing=: expected a number"),
        (Auto, ("x",), "Auto: share=: expected a number"),
        (Outer, ("x",), "Outer: rate=: expected a number"),
        (StepAhead, (1, 1.5), "StepAhead: average=: expected a whole number"),
        (RelativeChange, (0.1, 3), "RelativeChange: norm=: expected a function"),
        (RelativeChange, ("x", abs), "RelativeChange: delta=: expected a number"),
    ],
)
def test_settings_of_a_wrong_type_are_refused(
    kind: Any, given: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(InputTypeError, match=words):
        kind(*given)


@pytest.mark.parametrize("norm", [None, np.ones(3), "x"])
def test_a_norm_that_is_no_number_is_refused(norm: Any) -> None:
    rule = RelativeChange(0.1, lambda _: norm)
    with pytest.raises(autopar.PlanError, match=r"norm returned .* a scalar"):
        rule.observe(1.0, (0.5,))


def test_a_norm_is_looked_at_before_the_first_step() -> None:
    """A norm that runs on no traced array is called after the step, as before."""

    def of_results(loss: Any) -> Any:
        return {"loss": loss}

    rule = RelativeChange(0.1, of_results)
    made = autopar.local_steps(step, every=rule, cluster="2x1:cpu", seconds=1)
    with pytest.raises(autopar.PlanError, match=r"norm returned a dict; .* a scalar"):
        made.init(create, jax.random.key(0), batch=batch(1))
    rule = RelativeChange(0.1, float)
    made = autopar.local_steps(step, every=rule, cluster="2x1:cpu", seconds=1)
    state, _ = made(made.init(create, jax.random.key(0), batch=batch(1)), batch(1))
    assert state.step == 1


def test_refused_calls_change_nothing() -> None:
    made = autopar.local_steps(step, every=2, cluster="2x1:cpu", seconds=1)
    state = made.init(create, jax.random.key(0), batch=batch(1))
    odd = {k: x[:5] for k, x in batch(1).items()}
    with pytest.raises(autopar.PlanError, match="5 rows"):
        made(state, odd)
    with pytest.raises(TypeError, match="init"):
        made(state.state, batch(1))
    made(state, batch(1))

    def loss_first(state: Any, batch: Any) -> Any:
        return step(state, batch)[::-1]

    other = autopar.local_steps(loss_first, every=2, cluster="2x1:cpu", seconds=1)
    with pytest.raises(autopar.PlanError, match="first"):
        other.init(create, jax.random.key(0), batch=batch(1))


@pytest.mark.parametrize("donate", [True, False])
def test_an_error_in_the_middle_of_a_step_says_whether_the_state_is_left(
    donate: bool,
) -> None:
    made = autopar.local_steps(
        step, every=2, cluster="2x1:cpu", seconds=1, donate=donate
    )
    state = made.init(create, jax.random.key(0), batch=batch(1))
    known = made.steps

    def fail(*args: Any) -> Any:
        raise FloatingPointError("the second replica")

    made._steps = (known[0], fail)
    wanted = autopar.errors.RunError if donate else FloatingPointError
    with pytest.raises(wanted, match="the second replica") as caught:
        made(state, batch(1))
    assert ("this state is gone" in str(caught.value)) is donate
    made._steps = known
    if not donate:
        made(state, batch(1))


def test_replicas_synchronise_where_gradients_change() -> None:
    def with_norm(state: Any, batch: Any) -> Any:
        new, loss = step(state, batch)
        return new, {"loss": loss, "norm": batch["x"][0, 0] ** 2}

    rule = RelativeChange(0.5, lambda metrics: metrics["norm"], weight=0.5)
    made = autopar.local_steps(
        with_norm, every=rule, outer=MEAN, cluster="2x1:cpu", seconds=1
    )
    state = made.init(create, jax.random.key(0), batch=batch(1))
    averages, rounds = np.full(2, np.nan), 0
    for number in range(1, 9):
        rows = batch(number)
        rows["x"][0, 0] = 1.0 if number < 4 else 3.0 * number
        rows["x"][ROWS // 2, 0] = 1.0
        state, _ = made(state, rows)
        norms = np.array([rows["x"][0, 0] ** 2, 1.0])
        new = np.where(np.isnan(averages), norms, (averages + norms) / 2)
        changes = np.abs(new - averages) / averages
        rounds += bool(np.any(~(changes < 0.5)))
        averages = new
        assert int(state.rounds[0]) == rounds
    np.testing.assert_allclose(state.averages, averages, rtol=1e-6)
    assert 1 < rounds < 8
