"""Tests which arguments are the batch, and which are the same for all rows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import Run, assert_fails
from step_forms import cheap

import autopar

ROWS, WIDTH, TIME, LAYERS, BAG = 8, 16, 6, 4, 3


def array(*shape: int) -> np.ndarray:
    values = np.random.default_rng(len(shape)).standard_normal(shape)
    return values.astype(np.float32)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step that trains its first argument, with a loss of all arguments."""

    def step(w: Any, *rest: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, *rest)
        return jax.tree.map(lambda x, g: x - 0.1 * g, w, grads), value

    return step


def distilled(w: Any, x: Any, teacher: Any) -> Any:
    """A teacher whose inner dimension is the largest and meets no parameter."""
    wanted = jnp.tanh(x @ teacher["inner"]) @ teacher["outer"]
    return jnp.mean((x @ w - wanted) ** 2)


def adapted(w: Any, x: Any, base: Any) -> Any:
    def layer(h: Any, given: Any) -> tuple[Any, None]:
        frozen, (a, b) = given
        return h + jnp.tanh(h @ frozen + h @ a @ b), None

    return jnp.mean(jax.lax.scan(layer, x, (base, w))[0] ** 2)


def recurrent(w: Any, batch: Any) -> Any:
    def cell(h: Any, given: Any) -> tuple[Any, Any]:
        x, mask = given
        h = jnp.where(mask[:, None], jnp.tanh(x @ w + h), h)
        return h, h

    start = jnp.zeros(batch["x"].shape[1:])
    seen = jax.lax.scan(cell, start, (batch["x"], batch["mask"]))[1]
    return jnp.mean(jnp.sum(seen**2, -1) * batch["mask"])


def bags(w: Any, batch: Any) -> Any:
    rows = batch["wanted"].shape[0]
    looked_up = batch["table"][batch["ids"]]
    summed = jax.ops.segment_sum(looked_up, batch["segments"], rows)
    return jnp.mean((jnp.sum(summed @ w, -1) - batch["wanted"]) ** 2)


TEACHER = {"inner": array(WIDTH, 8 * WIDTH), "outer": array(8 * WIDTH, WIDTH)}
TIMED = {"x": array(TIME, ROWS, WIDTH), "mask": np.ones((TIME, ROWS), bool)}
BAGS = {
    "ids": np.arange(ROWS * BAG, dtype=np.int32) % 50,
    "segments": np.repeat(np.arange(ROWS, dtype=np.int32), BAG),
    "table": array(50, WIDTH),
    "wanted": array(ROWS),
}
LOW = (array(LAYERS, WIDTH, 2) / 8, array(LAYERS, 2, WIDTH) / 8)


@pytest.mark.parametrize(
    ("loss", "args"),
    [
        (distilled, (array(WIDTH, WIDTH), array(ROWS, WIDTH), TEACHER)),
        (adapted, (LOW, array(ROWS, WIDTH), array(LAYERS, WIDTH, WIDTH) / 8)),
        (recurrent, (array(WIDTH, WIDTH) / 8, TIMED)),
        (bags, (array(WIDTH, 4), BAGS)),
    ],
)
def test_rows_are_what_stays_apart(loss: Callable[..., Any], args: Any) -> None:
    """Neither the largest array nor the first dimension decides."""
    plan = autopar.plan(trained(loss), *args, cluster="4:cpu", seconds=None)

    assert plan.worth is not None
    assert plan.worth.rows == ROWS


def test_a_table_is_frozen_and_sorted_rows_are_not() -> None:
    """Both are read at numbers alone; only the sorted ones are of the rows."""

    def sorted_and_looked_up(w: Any, x: Any, lengths: Any, table: Any) -> Any:
        order = jnp.argsort(lengths)
        wanted = table[lengths[order] % ROWS]
        return jnp.mean((jnp.tanh(x[order] @ w) - wanted) ** 2)

    step = trained(sorted_and_looked_up)
    lengths = np.arange(ROWS, 0, -1, dtype=np.int32)
    given = array(WIDTH, WIDTH), array(ROWS, WIDTH), lengths, array(ROWS, WIDTH)
    run = autopar.parallelize(step, cluster="2:cpu", microbatches=2, donate=False)

    found, want = run(*given), jax.jit(step)(*given)

    roles = [*run.plan.roles.values()]
    assert roles == ["parameter", "batch", "batch", "frozen"]
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_a_rate_is_no_earlier_loss() -> None:
    """Both are a number; the rate stays with the caller, whatever is donated."""

    def step(w: Any, x: Any, rate: Any, count: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - rate * grad, loss, count * 0.5

    w, x, rate = jnp.asarray(array(WIDTH, WIDTH)), array(ROWS, WIDTH), jnp.float32(0.1)
    run = autopar.parallelize(step, cluster="2:cpu")

    first, loss, count = run(w, x, rate, jnp.float32(8.0))
    second, _, count = run(first, x, rate, count)

    assert run.plan.roles["rate"] == "other"
    assert float(count) == 2.0
    want = jax.jit(step)(array(WIDTH, WIDTH), x, rate, 8.0)
    np.testing.assert_allclose(loss, want[1], rtol=2e-5)
    want = jax.jit(step)(want[0], x, rate, want[2])
    np.testing.assert_allclose(second, want[0], rtol=2e-5, atol=2e-6)


def attend(h: Any, w: Any) -> Any:
    """Causal attention of (rows, time, width), with rotary positions."""
    time, width = h.shape[1:]
    angle = jnp.einsum("t,d->td", jnp.arange(1.0 * time), jnp.arange(1.0 * width))
    h = h * jnp.cos(angle)
    scores = jnp.einsum("btd,bsd->bts", h @ w, h)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), h)


def attention(w: Any, x: Any) -> Any:
    return jnp.mean((attend(x, w) @ w) ** 2)


def attention_of_time_first(w: Any, x: Any) -> Any:
    return attention(w, x.swapaxes(0, 1))


def rotary(w: Any, x: Any) -> Any:
    """A step in which only the positions distinguish time from rows."""
    return jnp.mean((attend(x, 0 * w)[:, :1] * 0 + jnp.tanh(x @ w)) ** 2)


def cumulative(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jax.lax.associative_scan(jnp.add, x @ w, axis=1) @ w))


def shifted(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x[:, :-1] @ w) - x[:, 1:]) ** 2)


def dropped(w: Any, x: Any, key: Any) -> Any:
    """A step with one dropout mask for all times of a row."""
    keep = jax.random.bernoulli(key, 0.9, (x.shape[0], 1, x.shape[2]))
    return jnp.mean(jnp.tanh((x * keep) @ w) ** 2)


def picked(w: Any, x: Any) -> Any:
    """A step that indexes rows, as for the logit of a label."""
    rows, times = jnp.arange(x.shape[0]), jnp.arange(x.shape[1])
    return jnp.mean(attend(x, w)[rows[:, None], times, 0])


def mapped(w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.map(lambda row: jnp.mean(jnp.tanh(row @ w) ** 2), x))


def paired(w: Any, x: Any) -> Any:
    """A step whose loss couples rows."""
    pooled = jnp.mean(jnp.tanh(x @ w), 1) @ w
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(pooled @ pooled.T)))


@pytest.mark.parametrize(
    "loss",
    [
        attention,
        attention_of_time_first,
        rotary,
        cumulative,
        shifted,
        dropped,
        picked,
        mapped,
        paired,
    ],
)
def test_time_is_not_taken_for_rows(loss: Callable[..., Any]) -> None:
    """Whichever is longer, and where a batch has one row."""
    for rows, time in ((4, 12), (12, 4), (1, 4)):
        first = loss is attention_of_time_first
        shape = (time, rows) if first and rows > 1 else (rows, time)
        keys = [jax.random.key(0)] if loss is dropped else []
        args = array(WIDTH, WIDTH), array(*shape, WIDTH), *keys
        plan = autopar.plan(trained(loss), *args, cluster="1:cpu", seconds=None)

        assert plan.worth is not None
        assert plan.worth.rows == rows


def test_rows_are_told_from_as_many_times() -> None:
    args = array(WIDTH, WIDTH), array(ROWS, ROWS, WIDTH)
    plan = autopar.plan(trained(attention), *args, cluster=cheap("2:cpu"), seconds=None)

    batch = list(plan.inputs.values())[1]
    assert [bool(axes) for axes in batch] == [True, False, False]


@pytest.mark.parametrize("options", [{}, {"stages": 2}])
def test_state_with_rows_and_time_first_is_split(options: Any) -> None:
    """What a recurrent net hands on to the next step has a part for each row."""

    def step(ws: Any, memory: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            def cell(h: Any, x: Any) -> tuple[Any, Any]:
                h = jnp.tanh(x @ ws[0] + h)
                return h, h

            last, seen = jax.lax.scan(cell, memory, x)
            return jnp.mean((seen @ ws[1]) ** 2), last

        (value, memory), grads = jax.value_and_grad(loss, has_aux=True)(ws)
        return jax.tree.map(lambda w, g: w - g, ws, grads), memory, value

    start = [array(WIDTH, WIDTH) / 8] * 2, array(ROWS, WIDTH)
    batches = [array(TIME, ROWS, WIDTH) * k for k in (1, 2)]
    run = autopar.parallelize(
        step, cluster="2:cpu", microbatches=4, donate=False, seconds=1, **options
    )
    plain, planned = start, start
    for x in batches:
        *plain, loss = jax.jit(step)(*plain, x)
        *planned, found = run(*planned, x)
        np.testing.assert_allclose(found, loss, rtol=1e-5)
    for want, got in zip(jax.tree.leaves(plain), jax.tree.leaves(planned), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert run.plan.worth is None or run.plan.worth.rows == ROWS


def ambiguous(w: Any, x: Any, y: Any) -> Any:
    """A step in which each dimension of ``x`` may be rows, and ``y`` may have more."""
    return jnp.mean(jnp.tanh(x * w)) + jnp.mean(y * w)


X, Y = array(6, 4), array(2, 3)


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ({"batch_argnames": "x"}, 6),
        ({"batch_argnames": {"x": 1}}, 4),
        ({"batch_argnames": ["y"]}, 2),
        ({"frozen_argnames": "x"}, 2),
    ],
)
def test_roles_can_be_named(names: Any, rows: int) -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return trained(ambiguous)(w, x, y)

    args = np.float32(2), X, Y
    plan = autopar.plan(step, *args, cluster="2:cpu", seconds=None, **names)
    run = autopar.parallelize(
        step, cluster="1:cpu", microbatches=2, seconds=None, **names
    )
    run(*args)

    assert plan.worth is not None
    assert plan.worth.rows == rows
    assert run.plan.microbatches == 2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"batch_argnames": "z"}, "batch_argnames='z' names no array.* w, x, y"),
        ({"frozen_argnames": "w"}, "names 'w', which comes back"),
        ({"batch_argnames": "x", "frozen_argnames": "x"}, "by both"),
        ({"batch_argnames": {"x": 2}}, "dimension 2 of 'x'"),
    ],
)
def test_names_that_fit_no_argument(names: Any, message: str) -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return trained(ambiguous)(w, x, y)

    with pytest.raises(autopar.TraceError, match=message):
        autopar.plan(step, np.float32(2), X, Y, cluster="2:cpu", **names)


TARGET = """
import jax
import jax.numpy as jnp

S = jax.ShapeDtypeStruct

def step(w, x, key):
    def loss(w):
        return jnp.mean(((x + jax.random.normal(key, x.shape)) @ w) ** 2)
    value, grad = jax.value_and_grad(loss)(w)
    return w - grad, value

def arguments():
    return S((16, 16), jnp.float32), S((8, 16), jnp.float32), S((2,), jnp.uint32)

def workload():
    return (step, *arguments())

def named():
    return {"step": step, "args": arguments(), "batch_argnames": {"x": 0}}

def misspelt():
    return {"step": step, "args": arguments(), "batch": "x"}
"""


def test_a_target_returns_more_arguments_or_names_them(
    tmp_path: pathlib.Path, run: Run
) -> None:
    (tmp_path / "keyed.py").write_text(TARGET)
    target, cluster = f"{tmp_path}/keyed.py", ("--cluster", "4:cpu", "--json")
    more, named = (
        run("plan", f"{target}:{name}", *cluster).json for name in ("workload", "named")
    )
    wrong = run("plan", f"{target}:misspelt", *cluster[:2])

    assert more["worth"]["rows"] == named["worth"]["rows"] == ROWS
    assert_fails(wrong, "'batch'", "batch_argnames")
