"""Experts without a capacity whose tokens move to the devices of their experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expert_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_runs import after, assert_equal, slow_devices
from jax.sharding import PartitionSpec as P

import autopar

# Tokens and experts share one axis of devices, so that tokens have to move.
EXPERT_PARALLEL = {
    "axis_names": ("data",),
    "pins": {
        "x": P("data"),
        **{f"*/{name}": P("data") for name in ("gate", "up", "down")},
        "*/router": P(),
        "*/mix": P(),
    },
}
STACKED = EXPERT_PARALLEL | {
    "pins": EXPERT_PARALLEL["pins"]
    | {f"*/{name}": P(None, "data") for name in ("gate", "up", "down")}
}


def to_few(router: jax.Array) -> jax.Array:
    """All gates are equal, so that all tokens go to the first two experts."""
    return jnp.zeros_like(router)


def to_one(router: jax.Array) -> jax.Array:
    """Nearly all tokens go to one expert first, of either sign."""
    return 0.1 * router.at[..., 3].set(40.0 * router[..., 3])


def to_some(router: jax.Array) -> jax.Array:
    """Two experts get nothing."""
    return jnp.concatenate([router[..., :6], router[..., :2] - router[..., 4:6]], -1)


ROUTINGS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "random": lambda router: router,
    "few": to_few,
    "one": to_one,
    "some": to_some,
}


def routed(state: Any, routing: str) -> Any:
    """The state with other routers."""

    def change(path: Any, x: jax.Array) -> jax.Array:
        params = path[0].key == "params"
        return ROUTINGS[routing](x) if params and path[-1].key == "router" else x

    return jax.tree_util.tree_map_with_path(change, state)


def planned(given: Any, **options: Any) -> Any:
    """A step that is planned with slots."""
    step = autopar.parallelize(
        given[0],
        cluster=slow_devices("8:cpu"),
        **({"stages": 1, "seconds": 2} | options),
    )
    step.lower(*given[1:])
    assert step.plan.row_capacity > 0, str(step.plan)
    assert step.plan.row_blocks == 8
    return step


def most_rows(given: Any) -> int:
    """The most rows of one expert on one device in the first layer."""
    _, state, x = given
    router = state["params"][0]["router"]
    gates = jax.nn.softmax(x.reshape(-1, x.shape[-1]) @ router)
    chosen = np.asarray(jax.lax.top_k(gates, expert_steps.CHOSEN)[1]).reshape(8, -1)
    return max(int(np.bincount(block).max()) for block in chosen)


@pytest.mark.parametrize("form", ["inverse", "setting"])
def test_tokens_move_and_none_is_dropped(form: str) -> None:
    given = expert_steps.training(form, rows=64, length=4, layers=1)
    step = planned(given, microbatches=1, **EXPERT_PARALLEL)
    slots = step.plan.row_capacity * 64 / expert_steps.EXPERTS
    found = autopar.audit(*given, plan=step.plan)

    assert found.agrees, str(found)
    assert found.stages[0].predicted["all_to_all"] > 0
    overflows = 0
    for routing in ROUTINGS:
        own = given[0], routed(given[1], routing), given[2]
        assert_equal(step, own)
        overflows += most_rows(own) > slots + 8
    assert overflows  # The rows of some routing need further rounds.


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"microbatches": 2}, {"again": True}),
        ({"microbatches": 1, "remat": "all"}, {"form": "addition"}),
    ],
)
def test_tokens_move_in_microbatches_and_again(
    options: dict[str, Any], made: dict[str, Any]
) -> None:
    given = expert_steps.training(rows=64, length=4, **({"layers": 1} | made))
    step = planned(given, **options, **EXPERT_PARALLEL)
    for routing in ("random", "few"):
        assert_equal(step, (given[0], routed(given[1], routing), given[2]))


def test_tokens_move_in_a_scan_over_layers() -> None:
    given = expert_steps.training(rows=64, length=4, again=True, scanned=True)
    step = planned(given, microbatches=1, **STACKED)
    for routing in ("random", "few"):
        assert_equal(step, (given[0], routed(given[1], routing), given[2]))


def test_rows_have_no_slots_beside_compressed_gradients() -> None:
    given = expert_steps.training(rows=64, length=4, layers=1)
    step = autopar.parallelize(
        given[0],
        cluster=slow_devices("8:cpu"),
        stages=1,
        seconds=2,
        microbatches=2,
        compression="int8",
        axis_names=("data",),
        pins={"*/params/*": P(), "x": P("data")},
    )
    losses, _ = after(step, *given[1:])
    exact, _ = after(jax.jit(given[0]), *given[1:])
    np.testing.assert_allclose(losses, exact, rtol=1e-3)
    sent = {g.codec for g in step.plan.stages[0].gradients if "gate" in g.name}
    assert sent == {"int8"}
    assert step.plan.row_capacity == 0
    said = " ".join(str(step.plan).split())
    assert "so that the codec that was asked for can send" in said


def test_rows_may_have_slots_beside_codecs_that_the_planner_chooses() -> None:
    """The compiler then sums the gradients of the experts, whatever other ones do."""
    step, *args = expert_steps.training(rows=64, length=4, layers=1)
    options = EXPERT_PARALLEL | {"microbatches": 1, "stages": 1, "seconds": 2}
    cluster = slow_devices("8:cpu")
    made = autopar.plan(step, *args, cluster=cluster, compression="auto", **options)
    assert made.row_capacity > 0, str(made)
    assert not any("gate" in g.name for g in made.gradients)


def test_slots_run_beside_chosen_codecs_on_a_slow_link() -> None:
    """Of two hosts: a codec sends the dense matrices, and tokens have slots."""
    _, state, x = expert_steps.training(rows=64, length=4, layers=1)
    wide = 8192
    keys = jax.random.split(jax.random.key(1))
    params = {
        "experts": state["params"],
        "up": 0.02 * jax.random.normal(keys[0], (expert_steps.WIDTH, wide)),
        "down": 0.02 * jax.random.normal(keys[1], (wide, expert_steps.WIDTH)),
    }

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        y = x + jnp.tanh(x @ params["up"]) @ params["down"]
        own = params["experts"][0]
        y = y + expert_steps.by_inverse(y.reshape(-1, y.shape[-1]), own).reshape(
            y.shape
        )
        return jnp.mean((y - x[..., ::-1]) ** 2)

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    run = autopar.parallelize(
        step,
        cluster=slow_devices("2x4:cpu,network=10Mb/s"),
        compression="auto",
        stages=1,
        seconds=2,
        microbatches=1,
        remat=0,
        axis_names=("data", "inner"),
        pins={"x": P(("data", "inner")), "params/up": P(), "params/down": P()},
    )
    losses, left = after(run, params, x, steps=4)
    exact, wanted = after(jax.jit(step), params, x, steps=4)

    assert run.plan.row_capacity > 0, str(run.plan)
    sent = {g.name: g.codec for g in run.plan.gradients if g.codec not in ("", "dense")}
    assert set(sent) == {"params/up", "params/down"}, str(run.plan)
    np.testing.assert_allclose(losses, exact, rtol=1e-3)
    assert losses != exact
    assert exact[-1] < 0.95 * exact[0]
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * float(np.abs(b).max()))


def test_a_plan_says_why_rows_have_no_slots() -> None:
    """Keys may be larger than the number of groups; such rows are in no group."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            keys = jnp.argmax(x @ p["router"], -1)
            order = jnp.argsort(keys)
            sizes = jnp.bincount(keys, length=6)
            made = jax.lax.ragged_dot(x[order], p["up"], sizes)
            return jnp.mean((made[jnp.argsort(order)] + 1.0) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    keys = jax.random.split(jax.random.key(0), 3)
    state = {
        "router": jax.random.normal(keys[0], (16, 8)),
        "up": jax.random.normal(keys[1], (6, 16, 32)),
    }
    given = step, state, jax.random.normal(keys[2], (64, 16))
    made = autopar.parallelize(step, cluster=slow_devices("8:cpu"), stages=1)
    assert_equal(made, given)
    assert made.plan.row_capacity == 0
    assert "rows may have other keys than the numbers of groups" in str(made.plan)
