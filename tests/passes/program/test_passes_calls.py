"""Tests calls of a step: its arrays, its static values and its results."""

from __future__ import annotations

import enum
import functools
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from autopar_passes.program.calls import (
    Parameters,
    StepCall,
    flat_function,
    open_call,
)
from autopar_passes.program.static_leaves import (
    Static,
    StaticError,
    part,
    struct_of,
    updating,
)

ARRAYS = st.sampled_from(
    [jnp.arange(3.0), np.arange(4), np.float32(2.0), 5, 0.5, True, 1j]
)
FIXED = st.sampled_from([jnp.tanh, len, Static("mean"), Static((1, 2))])
TREES = st.recursive(
    ARRAYS | FIXED | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def is_fixed(leaf: Any) -> bool:
    return callable(leaf) or isinstance(leaf, Static)


@given(st.lists(TREES, max_size=3))
def test_a_tree_is_its_arrays_and_what_stays_fixed(trees: list[Any]) -> None:
    arrays, fixed = part([f"x{k}" for k in range(len(trees))], trees)
    leaves, structure = jax.tree.flatten(tuple(trees))
    assert [id(a) for a in arrays] == [id(x) for x in leaves if not is_fixed(x)]
    joined, again = jax.tree.flatten(fixed.join(arrays))
    assert again == structure
    assert all(a is b for a, b in zip(joined, leaves, strict=True))


@given(TREES)
def test_arrays_of_other_values_have_the_same_form(tree: Any) -> None:
    def other(leaf: Any) -> Any:
        return leaf if is_fixed(leaf) else np.asarray(leaf) * 2

    first, second = (part(("x",), (t,))[1] for t in (tree, jax.tree.map(other, tree)))
    assert first == second
    assert hash(first) == hash(second)


def test_within_an_equinox_module_arrays_alone_are_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by ``equinox.filter_jit``; numbers beside the module are traced as ever."""

    @jax.tree_util.register_pytree_node_class
    class Module:
        def __init__(self, *held: Any) -> None:
            self.held = held

        def tree_flatten(self) -> tuple[Any, None]:
            return self.held, None

        @classmethod
        def tree_unflatten(cls, _: None, held: Any) -> Any:
            return cls(*held)

    tree = {"a": 1.0, "m": Module(2.0, jnp.ones(2), "relu", [3, len]), "z": 4.0}
    monkeypatch.setitem(sys.modules, "equinox", SimpleNamespace(Module=Module))
    arrays, fixed = part(("x",), (tree,))
    assert [np.shape(a) for a in arrays] == [(), (2,), ()]
    assert [leaf for _, leaf in fixed.leaves] == [2.0, "relu", 3, len]
    (joined,) = fixed.join(arrays)
    assert joined["z"] == 4.0
    assert joined["m"].held[3] == [3, len]
    with pytest.raises(StaticError, match="is static and cannot be hashed"):
        part(("x",), (Module(jnp.ones(1), {1}),))


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


def step(state: Any, batch: Any, mode: Mode, *, rate: Any = 1.0, **more: Any) -> Any:
    sign = 1.0 if mode is Mode.TRAIN else -1.0
    loss = (batch["x"] * state["w"]).sum() * sign * rate
    return {"w": state["w"] + sum(more.values(), rate)}, loss


STATE, BATCH = {"w": jnp.ones(3)}, {"x": jnp.arange(3.0)}


def opened(*args: Any, **kwargs: Any) -> StepCall:
    return open_call(Parameters.of(step), args, kwargs)


def test_arguments_by_name_take_their_places() -> None:
    by_place = opened(STATE, BATCH, Mode.TRAIN)
    by_name = opened(mode=Mode.TRAIN, batch=BATCH, state=STATE)
    assert by_place.form == by_name.form
    assert by_place.form.names == ("state", "batch", "mode")
    assert by_place.form.paths(by_place.arrays) == ["state/w", "batch/x"]


def test_keywords_come_last_and_in_order() -> None:
    call = opened(STATE, BATCH, Mode.TRAIN, b=2.0, rate=3.0, a=1.0)
    assert call.form.keywords == ("a", "b", "rate")
    assert call.arrays[2:] == [1.0, 2.0, 3.0]
    assert call.form.argument_of(call.arrays) == [0, 1, 3, 4, 5]
    assert call.form.paths(call.arrays)[2:] == ["a", "b", "rate"]


@pytest.mark.parametrize("mode", list(Mode))
def test_the_flat_function_does_what_the_step_does(mode: Mode) -> None:
    args, kwargs = (STATE, BATCH, mode), {"rate": 3.0, "a": jnp.float32(1.0)}
    call = opened(*args, **kwargs)
    flat, results = flat_function(step, call.form)
    found = results_of(flat, call)
    assert results[-1].paths(call.form.names, found) == ["result/0/w", "result/1"]
    state, loss = results[-1].return_value(found)
    expected, value = step(*args, **kwargs)
    np.testing.assert_array_equal(state["w"], expected["w"])
    assert loss == value


def results_of(flat: Any, call: StepCall) -> list[Any]:
    return jax.jit(flat)(*call.arrays)


def test_another_flag_is_another_form() -> None:
    train, evaluate = (opened(STATE, BATCH, mode).form for mode in Mode)
    assert train != evaluate
    assert train == opened(STATE, BATCH, Mode.TRAIN).form


def test_static_arguments_are_declared_or_known_to_jit() -> None:
    def scaled(x: Any, times: int) -> Any:
        return x * times

    told = jax.jit(scaled, static_argnames="times")
    for parameters in (Parameters.of(scaled, ["times"]), Parameters.of(told)):
        call = open_call(parameters, (jnp.ones(2), 3))
        assert len(call.arrays) == 1
        flat, results = flat_function(scaled, call.form)
        found = flat(*call.arrays)
        np.testing.assert_array_equal(results[-1].return_value(found), [3.0, 3.0])
    assert len(open_call(Parameters.of(scaled), (jnp.ones(2), 3)).arrays) == 2


def test_arguments_that_have_no_name_are_numbered() -> None:
    def many(first: Any, *rest: Any) -> Any:
        return first + sum(rest)

    call = open_call(Parameters.of(many), (1.0, 2.0, 3.0))
    assert call.form.paths(call.arrays) == ["first", "args1", "args2"]
    nameless = Parameters.of(functools.partial(max))
    assert open_call(nameless, (1.0, 2.0)).form.names == ("args0", "args1")


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.array(["a"]), "'x/k' is an array of dtype <U1, which JAX has no type for"),
        (np.array([None]), "is an array of dtype object"),
        (np.array("2026", "datetime64[Y]"), "is an array of dtype datetime64"),
        ("mean", "'x/k' is of type str, which is no JAX type. Leave it out"),
        (Static([1]), "make this list a tuple or a frozen dataclass"),
        (range(3), "is of type range"),
    ],
)
def test_what_is_neither_is_named(leaf: Any, message: str) -> None:
    with pytest.raises(StaticError, match=message.replace("(", r"\(")):
        part(("first", "x"), (1.0, {"k": leaf}))


def test_something_like_an_array_is_told_how_to_become_one() -> None:
    class Like:
        def __array__(self, *_: Any) -> np.ndarray:
            return np.ones(2)

    with pytest.raises(StaticError, match=r"Pass numpy\.asarray\(\.\.\.\) of it"):
        part(("x",), (Like(),))


@pytest.mark.parametrize(
    ("leaf", "shape", "dtype", "weak"),
    [
        (1, (), "int32", True),
        (np.float32(1), (), "float32", False),
        (jnp.ones((2, 3), jnp.bfloat16), (2, 3), "bfloat16", False),
        (jax.ShapeDtypeStruct((4,), "int8"), (4,), "int8", False),
    ],
)
def test_structs_keep_shape_dtype_and_weak_type(
    leaf: Any, shape: tuple[int, ...], dtype: str, weak: bool
) -> None:
    found = struct_of(leaf)
    assert (found.shape, str(found.dtype), found.weak_type) == (shape, dtype, weak)
    assert found.sharding is None


def test_objects_are_updated_and_stay_shared() -> None:
    """The caller's own object has the new arrays, in both places where it is."""
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    before = model.kernel[...]

    def doubled(pair: Any, x: Any) -> Any:
        pair["a"].kernel[...] *= 2
        return pair["b"](x), pair["b"]

    with updating():
        call = open_call(
            Parameters.of(doubled), ({"a": model, "b": model}, jnp.ones(2))
        )
        assert call.form.objects
        assert len(call.arrays) == 2
        flat, results = flat_function(doubled, call.form)
        found = results_of(flat, call)
        out, returned = results[-1].return_value(found)
    assert returned is model
    np.testing.assert_array_equal(model.kernel[...], 2 * before)
    np.testing.assert_allclose(out, jnp.ones(2) @ (2 * before))
