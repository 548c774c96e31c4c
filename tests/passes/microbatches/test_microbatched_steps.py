"""Tests that steps with microbatches give the results on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from microbatch_cases import assert_close, run, split

from autopar.steps.analysis import analyse
from autopar.steps.microbatches import in_microbatches
from autopar_passes.microbatches.facts import Combine

ROWS, WIDTH, CLASSES, COUNT = 16, 8, 5, 4


@pytest.fixture(autouse=True)
def _double_precision() -> Generator[None]:
    with jax.enable_x64(True):
        yield


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


W, X = drawn(WIDTH, CLASSES), drawn(ROWS, WIDTH, seed=1)
Y = np.random.default_rng(2).integers(0, CLASSES, ROWS)
# Some microbatches have no row that counts, none has as many as another.
MASK = np.zeros(ROWS)
MASK[[1, 5, 6, 9, 13, 14]] = 1.0


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, *batch)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grad), value

    return step


def by_take(w: Any, x: Any, y: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], -1)
    return -jnp.mean(picked)


def by_position(w: Any, x: Any, y: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(x.shape[0]), y])


def masked(w: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(jnp.sum((x @ w) ** 2, -1) * mask) / jnp.sum(mask)


def guarded(w: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(jnp.sum(x @ w, -1) ** 2 * mask) / jnp.maximum(jnp.sum(mask), 1)


def two_means(w: Any, x: Any, mask: Any) -> Any:
    return masked(w, x, mask) + 3 * jnp.mean(jnp.tanh(x @ w)) + jnp.sum(x @ w)


def decayed(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2) + 0.01 * jnp.sum(w**2)


def grouped(w: Any, x: Any) -> Any:
    pairs = (x @ w).reshape(-1, 2, CLASSES)
    return jnp.mean(jax.nn.softmax(pairs, axis=1)[..., :2] ** 2)


def two_views(w: Any, x: Any) -> Any:
    half = x.shape[0] // 2
    return jnp.mean((x[:half] @ w) * jnp.tanh(x[half:] @ w))


def joined_views(w: Any, x: Any) -> Any:
    both = jnp.concatenate([x, 2 * x]) @ w
    return jnp.mean(both[: x.shape[0]] * jnp.tanh(both[x.shape[0] :]))


def through_layers(w: Any, x: Any) -> Any:
    def layer(h: Any, _: Any) -> Any:
        return jnp.tanh(h @ w @ w.T), jnp.sum(h)

    h, sums = jax.lax.scan(jax.checkpoint(layer), x, None, length=3)
    return jnp.mean(h**2) + 1e-3 * jnp.sum(sums)


def through_time(w: Any, x: Any, mask: Any) -> Any:
    def turn(h: Any, m: Any) -> Any:
        h = jnp.where(m[:, None] > 0, jnp.tanh(x @ w + h), h)
        return h, h

    masks = jnp.stack([mask, 1 - mask, mask])
    _, hs = jax.lax.scan(turn, jnp.zeros((x.shape[0], CLASSES)), masks)
    return jnp.sum(hs * masks[..., None]) / jnp.sum(masks)


def regrouped(w: Any, x: Any) -> Any:
    """Groups of two rows of logits, and columns of several rows."""
    h = x @ w
    flat = jax.nn.softmax(h.reshape(-1, 2 * CLASSES), -1)
    turned = jax.nn.softmax(h.T.reshape(-1, 2), -1)
    return jnp.mean(flat**2) + jnp.mean(turned**3)


def split_views(w: Any, x: Any) -> Any:
    one, two = jnp.split(jnp.concatenate([x @ w, jnp.tanh(x @ w)]), 2)
    return jnp.mean(one * two)


def looked_up(w: Any, x: Any) -> Any:
    """A table whose gradient is summed by a scatter, and writes within rows."""
    h = w[jnp.argmax(x, -1)]
    h = h.at[:, 2].set(0.0).at[jnp.arange(x.shape[0]), jnp.argmax(h, 1)].add(1.0)
    return jnp.sum(jax.vmap(lambda a: jax.lax.dynamic_slice(a, (1,), (2,)))(h) ** 2)


def of_the_inputs(w: Any, x: Any) -> Any:
    """A step that normalises inputs by statistics and a maximum of the whole batch."""
    scaled = (x - x.mean(0)) / x.std(0) / jnp.max(jnp.abs(x))
    return jnp.mean(jnp.tanh(scaled @ w)) * jnp.where(jnp.mean(x) > 0, 1.0, 2.0)


def penalised(w: Any, x: Any) -> Any:
    slope = jax.vmap(jax.grad(lambda row: jnp.sum(jnp.tanh(row @ w))))(x)
    return jnp.mean((jnp.sqrt(jnp.sum(slope**2, -1)) - 1) ** 2)


LOSSES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mean": (lambda w, x: jnp.mean((x @ w) ** 2), (X,)),
    "sum": (lambda w, x: jnp.sum((x @ w) ** 2), (X,)),
    "decayed": (decayed, (X,)),
    "masked": (masked, (X, MASK)),
    "guarded": (guarded, (X, MASK)),
    "two means": (two_means, (X, MASK)),
    "by take": (by_take, (X, Y)),
    "by position": (by_position, (X, Y)),
    "grouped": (grouped, (X,)),
    "two views": (two_views, (X,)),
    "joined views": (joined_views, (X,)),
    "regrouped": (regrouped, (X,)),
    "split views": (split_views, (X,)),
    "looked up": (looked_up, (X,)),
    "of the inputs": (of_the_inputs, (X,)),
    "penalised": (penalised, (X,)),
    "through layers": (through_layers, (X,)),
    "through time": (through_time, (X, MASK)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_gives_what_it_gives_on_the_whole_batch(name: str) -> None:
    loss, batch = LOSSES[name]
    step = sgd(loss)

    assert_close(run(step, (W, batch), COUNT), jax.jit(step)(W, batch))


@pytest.mark.parametrize("count", [2, 8])
def test_any_number_of_microbatches_does(count: int) -> None:
    step, batch = sgd(two_means), (X, MASK)

    assert_close(run(step, (W, batch), count), jax.jit(step)(W, batch))


def test_traces_before_and_after_caches_are_cleared_are_alike() -> None:
    """Processes clear JAX's caches when they leave a world."""
    step = sgd(looked_up)
    whole = analyse(step, (W, (X,)))
    jax.clear_caches()
    assert in_microbatches(whole, COUNT).microbatches == COUNT


def test_where_no_row_counts_the_others_are_not_spoilt() -> None:
    """A mean over no rows is not a number; the mask is taken of the whole batch."""
    mask = np.zeros(ROWS)
    mask[0] = 1.0
    step = sgd(masked)
    found = run(step, (W, (X, mask)), COUNT)

    assert np.isfinite(found[0]).all()
    assert_close(found, jax.jit(step)(W, (X, mask)))


def test_metrics_are_those_of_the_whole_batch() -> None:
    def step(w: Any, batch: Any) -> Any:
        x, y = batch

        def loss_of(w: Any) -> Any:
            logits = x @ w
            return by_take(w, x, y), logits

        (loss, logits), grad = jax.value_and_grad(loss_of, has_aux=True)(w)
        right = jnp.argmax(logits, -1) == y
        return w - grad, {
            "loss": loss,
            "perplexity": jnp.exp(loss),
            "accuracy": jnp.mean(right),
            "right": jnp.sum(right),
            "largest": jnp.max(logits),
            "each": jnp.max(logits, -1),
            "sorted": jnp.sort(logits[:, 0]),
            "order": jnp.argsort(logits[:, 0]),
            "numbers": jnp.arange(x.shape[0]),
            "flat": logits.reshape(-1),
            "norm": jnp.linalg.norm(grad),
            "rows": x.shape[0] * jnp.ones(()),
        }

    assert_close(run(step, (W, (X, Y)), COUNT), jax.jit(step)(W, (X, Y)))


def test_counters_and_averages_are_carried_on() -> None:
    def step(state: Any, batch: Any) -> Any:
        w, average, seen, right = state
        x, y = batch
        loss, grad = jax.value_and_grad(by_take)(w, x, y)
        hits = jnp.sum(jnp.argmax(x @ w, -1) == y)
        average = 0.9 * average + 0.1 * loss
        return (w - grad, average, seen + x.shape[0], right + hits), loss

    state = (W, jnp.float64(1.0), jnp.int64(3), jnp.int64(5))

    assert_close(run(step, (state, (X, Y)), COUNT), jax.jit(step)(state, (X, Y)))


class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.gelu(nn.Dense(8, param_dtype=jnp.float64)(x))
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(x)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        optax.MultiSteps(optax.adam(1e-2), 2),
        optax.apply_if_finite(optax.sgd(0.1), 3),
    ],
    ids=["clipped", "several steps", "if finite"],
)
def test_optimizers_see_the_gradient_of_the_whole_batch(tx: Any) -> None:
    net = Net()
    params = net.init(jax.random.key(0), X)["params"]
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["y"]
            ).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    batch = {"x": X, "y": Y}

    assert_close(run(step, (state, batch), COUNT), jax.jit(step)(state, batch), 1e-9)


def test_objects_are_updated() -> None:
    def made() -> tuple[nnx.Linear, nnx.Optimizer[Any]]:
        model = nnx.Linear(WIDTH, CLASSES, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return jnp.mean((model(batch) - 1) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    args = (*made(), X)
    found = split(step, args, COUNT)
    plain, optimizer = made()
    loss = nnx.jit(step)(plain, optimizer, X)

    assert_close(run(step, args, COUNT), loss)
    assert found.split is not None
    kinds = [c.combine for c in found.split.crossings]
    assert kinds.count(Combine.SUM) == 3


def test_a_step_that_adds_up_itself_may_be_split_further() -> None:
    def step(w: Any, batch: Any) -> Any:
        def part(total: Any, x: Any) -> Any:
            found = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return jax.tree.map(jnp.add, total, found), None

        parts = batch.reshape(2, -1, WIDTH)
        (loss, grad), _ = jax.lax.scan(part, (0.0, jnp.zeros_like(w)), parts)
        return w - 0.05 * grad, loss / 2

    assert_close(run(step, (W, X), COUNT), jax.jit(step)(W, X))


def test_half_precision_is_added_up_in_single_precision() -> None:
    """Sixteen parts of 1 and one of 256 lose nothing, as they would in bfloat16."""

    def step(w: Any, batch: Any) -> Any:
        grad = jax.grad(lambda w: jnp.sum(w * batch[:, None]))(w)
        return w - grad

    w = jnp.zeros((4,), jnp.bfloat16)
    rows = jnp.asarray([256.0] + [1.0] * 16 + [0.0] * 47, jnp.bfloat16)

    assert_close(run(step, (w, rows), 32), jnp.full((4,), -272, jnp.bfloat16))


def test_gradients_of_single_rows_are_clipped_in_each_microbatch() -> None:
    """They never cross as rows: only their sum does."""

    def step(w: Any, batch: Any) -> Any:
        def one(w: Any, x: Any, y: Any) -> Any:
            return -jax.nn.log_softmax(x @ w)[y]

        grads = jax.vmap(jax.grad(one), (None, 0, 0))(w, *batch)
        norm = jnp.sqrt(jnp.sum(grads**2, axis=(1, 2)))
        grads = grads * jnp.minimum(1.0, 0.5 / norm)[:, None, None]
        return w - grads.mean(0), jnp.mean(norm)

    found = split(step, (W, (X, Y)), COUNT).split

    assert found is not None
    assert {c.combine for c in found.crossings} == {Combine.SUM}
    assert_close(run(step, (W, (X, Y)), COUNT), jax.jit(step)(W, (X, Y)))


def test_a_teacher_is_no_batch() -> None:
    def step(w: Any, teacher: Any, batch: Any) -> Any:
        target = jax.nn.softmax(jnp.tanh(batch @ teacher["up"]) @ teacher["down"])

        def loss_of(w: Any) -> Any:
            return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(batch @ w), -1))

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - grad, loss

    teacher = {"up": drawn(WIDTH, 16, seed=4), "down": drawn(16, CLASSES, seed=5)}
    args = (W, teacher, X)

    assert_close(run(step, args, COUNT), jax.jit(step)(*args))


def test_a_loop_of_the_update_leaves_what_it_reads_to_the_update() -> None:
    """Its counter depends on no gradient; momentum is added once all the same."""

    def step(w: Any, kept: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w)))(w)
        kept = 0.9 * kept + grad
        turned = jax.lax.fori_loop(0, 3, lambda _, u: u - u @ u.T @ u, kept)
        return w - turned, kept, loss

    args = (W, jnp.ones_like(W), X)
    found = split(step, args, COUNT).split
    assert found is not None
    made_by = {
        v: e.primitive for e in found.traced.program.body.equations for v in e.outputs
    }

    assert "add" not in {made_by[c.value] for c in found.crossings}
    assert_close(run(step, args, COUNT), jax.jit(step)(*args))


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("length", [4, 1])
@pytest.mark.parametrize("scanned", [False, True], ids=["in line", "in a loop"])
def test_microbatches_of_one_row_look_up_labels(
    scanned: bool, length: int, rows: int
) -> None:
    """JAX leaves the dimension of one row out of the indices of such lookups."""

    def loss_of(w: Any, x: Any, y: Any) -> Any:
        scores = jax.nn.log_softmax(x @ w + jnp.ones((len(x), 1, 1)))
        return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

    def loss(w: Any, x: Any, y: Any) -> Any:
        if not scanned:
            return loss_of(w, x, y)
        layers = jnp.stack([jnp.eye(WIDTH), 2 * jnp.eye(WIDTH)])
        x, _ = jax.lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, layers)
        return loss_of(w, x, y)

    def step(w: Any, x: Any, y: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, x, y)
        return w - 0.1 * grad, value

    x = drawn(rows, length, WIDTH, seed=3)
    y = np.random.default_rng(4).integers(0, CLASSES, (rows, length))

    assert_close(run(step, (W, x, y), rows), step(W, x, y))
