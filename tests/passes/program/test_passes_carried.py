"""Tests that carried state is found at any place of the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx, struct

from autopar_passes.program.trace import trace

W, B, X = jnp.zeros((4, 4)), jnp.zeros(4), jnp.zeros((8, 4))
STATE = {"w": W, "b": B, "count": 0}
KEY = jax.random.key(0)


def advanced(state: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, state)


def names(step: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, str]:
    """Path of each carried argument -> path of the result that is its next value."""
    found = trace(step, args, kwargs)
    return {
        found.input_paths[a]: found.output_paths[r] for a, r in found.carried.items()
    }


@struct.dataclass
class Out:
    loss: Any
    state: Any


class Pair(NamedTuple):
    state: Any
    loss: Any


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda s, loss: {"state": s, "loss": loss}, "result/state"),
        (lambda s, loss: Out(loss, s), "result/state"),
        (lambda s, loss: Pair(s, loss), "result/state"),
        (lambda s, loss: {"loss": loss, "new": {"deep": [s]}}, "result/new/deep/0"),
        (lambda s, loss: (loss, {"aux": 1, "state": s}), "result/1/state"),
        (lambda s, loss: s, "result"),
    ],
)
def test_wherever_it_is(wrap: Callable[..., Any], where: str) -> None:
    def step(state: Any, batch: Any) -> Any:
        return wrap(advanced(state), (batch @ state["w"]).sum())

    assert names(step, STATE, X) == {f"state/{k}": f"{where}/{k}" for k in STATE}


def test_a_part_of_an_argument() -> None:
    def step(carry: Any, batch: Any) -> Any:
        return advanced(carry["state"]), (batch @ carry["state"]["w"]).sum()

    found = names(step, {"state": STATE, "fixed": {"scale": W}}, X)
    assert found == {f"carry/state/{k}": f"result/0/{k}" for k in STATE}


def test_an_array_beside_state_needs_its_name() -> None:
    def step(carry: Any, batch: Any) -> Any:
        state, key = carry["state"], jax.random.split(carry["key"])[0]
        noise = jax.random.normal(key, batch.shape)
        return {"state": advanced(state), "key": key, "other": noise}

    found = names(step, {"state": STATE, "key": KEY}, X)
    assert found["carry/key"] == "result/key"
    assert "batch" not in found


def test_equal_arguments_go_by_their_names() -> None:
    def step(slow: Any, fast: Any, x: Any) -> Any:
        return {"fast": advanced(fast), "slow": slow, "loss": x.sum()}

    found = names(step, STATE, STATE, X)
    assert {k.split("/")[0]: v.split("/")[1] for k, v in found.items()} == {
        "slow": "slow",
        "fast": "fast",
    }


def test_without_names_they_go_by_their_order() -> None:
    found = names(lambda a, b, x: (advanced(a), advanced(b)), STATE, STATE, X)
    assert found["a/w"] == "result/0/w"
    assert found["b/w"] == "result/1/w"


def test_a_batch_is_no_state() -> None:
    def step(state: Any, batch: Any) -> Any:
        out = batch["x"] @ state["w"]
        return advanced(state), {"image": out, "label": batch["y"]}

    found = names(step, STATE, {"x": X, "y": X})
    assert all(name.startswith("state/") for name in found)


def test_an_array_that_changes_is_named() -> None:
    def step(state: Any, x: Any) -> Any:
        return {**advanced(state), "count": state["count"] + 0.5}, x.sum()

    found = trace(step, (STATE, X))
    assert [found.input_paths[k] for k in found.carried] == ["state/b", "state/w"]
    assert found.changed == ("state/count",)


def test_results_that_resemble_nothing() -> None:
    found = trace(lambda state, x: {k: x.sum() for k in state}, (STATE, X))
    assert (found.carried, found.changed) == ({}, ())


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        self.seen = nnx.Variable(x.sum())
        return x * self.count[...]


def test_objects_carry_what_they_had_and_have() -> None:
    found = names(lambda m, x: m(x).sum(), Counter(), X)
    assert found == {"m/count/value": "m/count/value"}


def test_arrays_beside_objects_are_batch() -> None:
    found = names(lambda both: both["m"](both["x"]).sum(), {"m": Counter(), "x": X})
    assert found == {"both/m/count/value": "both/m/count/value"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scale:
    """Checks its content whenever it is made, as ``jmp.LossScale`` does."""

    value: Any

    def __post_init__(self) -> None:
        if jax.eval_shape(lambda: self.value).dtype != jnp.float32:
            raise TypeError("a scale is a float32")


def test_a_class_that_checks_what_it_holds() -> None:
    """It sees arrays only, as under ``jax.jit``: nothing else stands for one."""

    def step(state: Any, batch: Any) -> Any:
        scale = Scale(state["scale"].value * 2.0)
        return {"scale": scale, "w": state["w"] + 1}, (batch @ state["w"]).sum()

    state = {"scale": Scale(jnp.ones(())), "w": W}

    assert names(step, state, X) == {
        "state/scale/value": "result/0/scale/value",
        "state/w": "result/0/w",
    }
