"""Tests the errors for steps that cannot be split into microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch_cases import assert_close, run, split

from autopar.errors import PlanError

ROWS, WIDTH, CLASSES = 8, 6, 5

W = jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
MORE = jax.ShapeDtypeStruct((3 * ROWS, WIDTH), jnp.float32)


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, batch)
        return w - 0.1 * grad, value

    return step


def contrastive(w: Any, x: Any) -> Any:
    a, b = x @ w, jnp.tanh(x @ w)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T)))


def by_the_batch(w: Any, x: Any) -> Any:
    return jnp.mean(jax.nn.softmax(x @ w, axis=0) ** 2)


def variance(w: Any, x: Any) -> Any:
    return jnp.sum(jax.nn.relu(1 - jnp.std(x @ w, axis=0)))


def running(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.cumsum(x @ w, axis=0) ** 2)


def ordered(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.sort(x @ w, axis=0)[:2])


def neighbours(w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.mean(h * h[(jnp.arange(x.shape[0]) + 1) % x.shape[0]])


def root(w: Any, x: Any) -> Any:
    return jnp.sqrt(jnp.mean((x @ w) ** 2))


def experts(w: Any, x: Any) -> Any:
    p = jax.nn.softmax(x @ w)
    chosen = jax.nn.one_hot(jnp.argmax(p, -1), CLASSES)
    return jnp.sum(chosen.mean(0) * p.mean(0))


def picked(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w)[jnp.argsort(w[:, 0])[:2]])


def changed(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w).at[0].set(0.0) ** 2)


def added_to(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w).at[jnp.array([1, 2])].add(1.0) ** 2)


def overwritten(w: Any, x: Any) -> Any:
    new = jnp.ones((2, CLASSES))
    return jnp.mean(jax.lax.dynamic_update_slice(x @ w, new, (0, 0)) ** 2)


def other_rows(w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.mean(h[jnp.arange(x.shape[0]) // 2, jnp.argmax(h, 1)])


def beside_each_other(w: Any, x: Any) -> Any:
    both = jnp.concatenate([x @ w, 2 * x @ w])
    return jnp.mean(jnp.prod(both.reshape(-1, 2, CLASSES), 1))


def of_segments(w: Any, x: Any) -> Any:
    sums = jax.ops.segment_sum(x @ w, jnp.argmax(x, -1), WIDTH)
    return jnp.mean(sums**2)


def sharpened(w: Any, x: Any) -> Any:
    """Sharpness-aware minimisation: a gradient at a point that a gradient gave."""
    step_ = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return jnp.mean((x @ (w + jax.lax.stop_gradient(step_))) ** 2)


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "contrastive": (contrastive, "two dimensions of the batch"),
    "softmax along the batch": (by_the_batch, "the loss of one row depends on"),
    "variance": (variance, "needs a sum over the batch"),
    "cumulative sum": (running, "'cumsum'"),
    "sorted": (ordered, "'sort'"),
    "neighbours": (neighbours, "no option helps"),
    "root": (root, "'sqrt'"),
    "picked": (picked, "takes rows by numbers"),
    "changed": (changed, "picks rows by an index"),
    "added to": (added_to, "takes rows by numbers"),
    "overwritten": (overwritten, "picks rows by an index"),
    "other rows": (other_rows, "takes rows by numbers"),
    "beside each other": (beside_each_other, "reads rows in two orders"),
    "of segments": (of_segments, "needs a sum over the batch"),
    "sharpened": (sharpened, "needs whole gradients"),
    "mixture of experts": (experts, "needs a sum over the batch"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_coupled_loss_is_refused(name: str) -> None:
    loss, reason = LOSSES[name]
    with pytest.raises(PlanError, match=reason) as raised:
        split(sgd(loss), (W, X), 2)

    assert "test_refusals.py" in str(raised.value) or "backward" in str(raised.value)


def test_two_dimensions_of_the_batch_are_refused_always() -> None:
    with pytest.raises(PlanError, match="two dimensions of the batch"):
        split(sgd(contrastive), (W, X), 2, couple=True)


def test_a_number_that_does_not_divide_the_rows_is_refused() -> None:
    with pytest.raises(PlanError, match="has 8 rows, which 3 does not divide"):
        split(sgd(root), (W, X), 3)


def test_groups_of_rows_stay_together_or_are_refused() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.softmax((x @ w).reshape(-1, 4, CLASSES), axis=1) ** 2)

    found = split(sgd(loss), (W, MORE), 3).split
    assert found is not None
    assert [rows.inner for rows in found.batch.values()] == [4]
    with pytest.raises(PlanError, match=r"microbatch of 6 rows.* cannot be traced"):
        split(sgd(loss), (W, MORE), 4)


@pytest.mark.parametrize("counts", [False, True])
def test_a_host_callback_that_knows_the_number_of_rows_is_refused(counts: bool) -> None:
    def loss(w: Any, x: Any) -> Any:
        known = x.shape[0] if counts else 0

        def told(_: Any) -> int:
            return known

        jax.debug.callback(told, x[0, 0])
        return jnp.mean((x @ w) ** 2)

    if not counts:
        assert split(sgd(loss), (W, X), 2, couple=True).split is not None
        return
    with pytest.raises(PlanError, match=r"debug_callback.*another 'callback'"):
        split(sgd(loss), (W, X), 2, couple=True)


def by_default(rows: int) -> Callable[..., Any]:
    def told(_: Any, known: int = rows) -> int:
        return known

    return told


def by_keyword(rows: int) -> Callable[..., Any]:
    def told(_: Any, *, known: int = rows) -> int:
        return known

    return told


def by_array(rows: int) -> Callable[..., Any]:
    known = np.zeros(rows)  # equal to one of any other length, if it is broadcast

    def told(_: Any) -> int:
        return len(known)

    return told


def by_itself(rows: int) -> Callable[..., Any]:
    def told(_: Any) -> Any:
        return told, rows

    return told


@pytest.mark.parametrize("made", [by_default, by_keyword, by_array, by_itself])
def test_what_a_host_callback_holds_is_compared(made: Callable[..., Any]) -> None:
    """Of each microbatch it would be told the rows that a microbatch has."""

    def loss(counts: bool, w: Any, x: Any) -> Any:
        jax.debug.callback(made(x.shape[0] if counts else 1), x[0, 0])
        return jnp.mean((x @ w) ** 2)

    same, other = (functools.partial(loss, counts) for counts in (False, True))
    assert split(sgd(same), (W, X), ROWS, couple=True).split is not None
    with pytest.raises(PlanError, match=r"debug_callback.*another 'callback'"):
        split(sgd(other), (W, X), ROWS, couple=True)


def test_a_second_update_is_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        once = w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return once - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(once)

    with pytest.raises(PlanError, match="gone through more than once"):
        split(step, (W, X), 2)


@pytest.mark.parametrize("couple", [False, True])
def test_rows_in_an_order_of_activations_are_refused(couple: Any) -> None:
    """Their numbers count the whole batch: taking a microbatch for it cannot help."""

    def loss(w: Any, x: Any) -> Any:
        h = x @ w
        return jnp.mean(jnp.tanh(h[jnp.argsort(h[:, 0])]) * h)

    with pytest.raises(PlanError, match=r"'gather'.*no option helps"):
        split(sgd(loss), (W, X), 2, couple=couple)


def test_a_loop_of_updates_is_refused() -> None:
    """Each of its minibatches is trained on with what the one before has made."""

    def step(w: Any, x: Any) -> Any:
        def turn(w: Any, part: Any) -> Any:
            return w - jax.grad(lambda w: jnp.mean((part @ w) ** 2))(w), None

        def epoch(w: Any, key: Any) -> Any:
            order = jax.random.permutation(key, x.shape[0]).reshape(2, -1)
            return jax.lax.scan(turn, w, x[order])

        return jax.lax.scan(epoch, w, jax.random.split(jax.random.key(0), 2))[0]

    with pytest.raises(PlanError, match=r"'scan'.*turn before.*more than once"):
        split(step, (W, X), 2)


def test_moments_of_a_first_update_are_no_batch_statistics() -> None:
    """State keeps them, and the new parameters that they make are used on rows."""

    def step(state: Any, x: Any) -> Any:
        critic, moment, w = state
        grad = jax.grad(lambda c: jnp.mean((x @ c) ** 2))(critic)
        moment = 0.9 * moment + 0.1 * grad**2
        critic = critic - grad / jnp.sqrt(moment + 1e-3)
        gain = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) * (x @ critic)))(w)
        return critic, moment, w + gain

    with pytest.raises(PlanError, match="gone through more than once"):
        split(step, ((W, W, W), X), 2)


def test_a_program_of_its_own_for_a_number_of_rows_is_refused() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w) if x.shape[0] > 4 else x @ w
        return jnp.mean(h**2)

    place = r"number of rows: it runs 'tanh' \(test_refusals"
    with pytest.raises(PlanError, match=place):
        split(sgd(loss), (W, X), 2)


def test_a_program_of_its_own_for_one_row_names_the_row() -> None:
    """The step also has another program for two rows."""

    def loss(w: Any, ids: Any) -> Any:
        scores = jax.nn.log_softmax(w[ids])
        if len(ids) == 2:
            scores = jnp.tanh(scores)
        return -jnp.mean(jnp.take_along_axis(scores, ids[..., None] % CLASSES, -1))

    ids = jax.ShapeDtypeStruct((ROWS, 4), jnp.int32)
    with pytest.raises(PlanError, match=r"would have one row, .* fewer microbatches"):
        split(sgd(loss), (W, ids), ROWS)


@pytest.mark.parametrize("raised", [TypeError, ValueError])
def test_a_step_that_states_its_number_of_rows_is_told_so(raised: Any) -> None:
    """The whole batch runs; that a microbatch does not is no error of the step's."""

    def loss(w: Any, x: Any) -> Any:
        if x.shape[0] != ROWS:
            raise raised("other rows")
        return jnp.mean((x @ w) ** 2)

    with pytest.raises(PlanError, match=r"of 4 rows .*other rows.*x\.shape\[0\]"):
        split(sgd(loss), (W, X), 2)


def over_rows(step: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that loops over the rows, and is linear in the carried value."""

    def loss(w: Any, x: Any) -> Any:
        def turn(kept: Any, row: Any) -> tuple[Any, None]:
            return step(kept, row @ w), None

        start = jnp.zeros((CLASSES,), jnp.float32)
        return jnp.mean(jax.lax.scan(turn, start, x)[0])

    return loss


@pytest.mark.parametrize(
    ("step", "refused"),
    [
        (lambda kept, row: jnp.tanh(kept) + row, True),
        (lambda kept, row: kept * jnp.sum(kept) + row, True),
        # What is linear in the rows needs no backward pass through the loop.
        (lambda kept, row: kept + kept + row, False),
        (lambda kept, row: row - kept, False),
        (lambda kept, row: kept + jnp.tanh(row), False),
    ],
)
def test_rows_that_depend_on_earlier_rows_are_never_added_up_alone(
    step: Callable[..., Any], refused: bool
) -> None:
    draw = np.random.default_rng(0)
    args = [draw.standard_normal(s.shape).astype(np.float32) for s in (W, X)]
    if refused:
        with pytest.raises(PlanError, match="goes through the rows one by one"):
            split(sgd(over_rows(step)), args, 2)
        return
    found = run(sgd(over_rows(step)), args, 2)
    assert_close(found, jax.jit(sgd(over_rows(step)))(*args), 1e-5)
