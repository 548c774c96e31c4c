"""Steps on padded rows give what they give on their own rows."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from microbatch_cases import assert_close, evaluated

from autopar.errors import PlanError
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.microbatches import in_microbatches
from autopar.steps.padding import padded_whole, with_row_multiple
from autopar_passes.program.static_leaves import updating
from autopar_passes.program.trace import open_arguments

# The rows of a batch, padded to 15 or, in two microbatches, to 20.
ROWS, MULTIPLE, WIDTH, CLASSES, TIMES = 12, 5, 6, 4, 3


@pytest.fixture(autouse=True)
def _double_precision() -> Generator[None]:
    with jax.enable_x64(True):
        yield


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


W, X = drawn(WIDTH, CLASSES), drawn(ROWS, WIDTH, seed=1)
Y = np.random.default_rng(2).integers(0, CLASSES, ROWS)
TOKENS = np.random.default_rng(3).integers(0, WIDTH, (ROWS, TIMES))
SEQUENCES = drawn(ROWS, TIMES, WIDTH, seed=4)
MASK = (np.arange(ROWS) % 3 > 0).astype(float)
KEY = jax.random.key(0)


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, *batch)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grad), value

    return step


def classified(w: Any, x: Any, y: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], -1)
    return -jnp.mean(picked)


def by_position(w: Any, x: Any, y: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(x.shape[0]), y])


def masked(w: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(jnp.sum((x @ w) ** 2, -1) * mask) / jnp.maximum(jnp.sum(mask), 1)


def extremes(w: Any, x: Any) -> Any:
    out = x @ w
    kept = jnp.all(out < 9) & jnp.any(out > -9)
    return jnp.max(out) - jnp.min(out, 0).sum() * kept


def normalised(w: Any, x: Any) -> Any:
    out = x @ w
    out = (out - out.mean(0)) / jnp.sqrt(out.var(0) + 1e-3)
    return jnp.mean(jnp.tanh(out) ** 3)


def embedded(w: Any, tokens: Any) -> Any:
    return jnp.mean(jnp.tanh(w[tokens]) @ w.T[:, :2])


def flattened(w: Any, x: Any) -> Any:
    out = jax.nn.gelu(x.reshape(-1, WIDTH) @ w).reshape(x.shape[0], -1)
    return jnp.mean(jax.nn.logsumexp(out, -1))


def time_major(w: Any, x: Any) -> Any:
    def turn(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w + h)
        return h, h.sum()

    start = jnp.zeros((x.shape[0], CLASSES))
    end, sums = jax.lax.scan(turn, start, jnp.swapaxes(x, 0, 1))
    return jnp.mean(end**2) + jnp.mean(sums)


def scanned_layers(w: Any, x: Any) -> Any:
    layers = jnp.stack([w @ w.T, 0.5 * w @ w.T])
    out, _ = jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, layers)
    return jnp.mean(out**2)


def again(w: Any, x: Any) -> Any:
    def layer(x: Any) -> Any:
        return jnp.sin(x @ w) / jnp.full((x.shape[0], 1), 2.0)

    return jnp.mean(jax.checkpoint(layer)(x))


def dropped(w: Any, x: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(7), 0.5, (x.shape[0], CLASSES))
    return jnp.mean(jnp.where(kept, x @ w, 0.0) ** 2)


def key_of_each_row(w: Any, x: Any) -> Any:
    keys = jax.random.split(jax.random.key(3), x.shape[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, (CLASSES,)))(keys)
    return jnp.mean((x @ w + noise) ** 2)


def mapped(w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ w), x))


def convolved(w: Any, x: Any) -> Any:
    kernel = jnp.reshape(w, (2, 3, CLASSES))
    rows = x.reshape(-1, TIMES, 2)
    out = jax.lax.conv_general_dilated(
        rows,
        kernel.transpose(1, 0, 2),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    return jnp.mean(jax.nn.relu(out) ** 2)


def until_converged(w: Any, x: Any) -> Any:
    def halve(out: Any) -> Any:
        return jnp.where(jnp.abs(out) > 0.1, out / 2, out)

    out = jax.lax.while_loop(lambda out: jnp.any(jnp.abs(out) > 0.1), halve, x)
    return jnp.mean((out @ w) ** 2)


def clipped_gradient(w: Any, x: Any) -> Any:
    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x * 1.0

    same.defvjp(
        lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, 0.01, 0.02) / (1 + g),)
    )
    return jnp.mean(same(x @ w))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "classified": (classified, (X, Y)),
    "by position": (by_position, (X, Y)),
    "masked": (masked, (X, MASK)),
    "extremes": (extremes, (X,)),
    "normalised": (normalised, (X,)),
    "embedded": (embedded, (TOKENS,)),
    "flattened": (flattened, (SEQUENCES,)),
    "time major": (time_major, (SEQUENCES,)),
    "scanned layers": (scanned_layers, (X,)),
    "again": (again, (X,)),
    "dropped": (dropped, (X,)),
    "key of each row": (key_of_each_row, (X,)),
    "mapped": (
        lambda w, x: jnp.mean((x @ w) ** 2) + 0 * mapped(jax.lax.stop_gradient(w), x),
        (X,),
    ),
    "convolved": (convolved, (X,)),
    "until converged": (until_converged, (X,)),
    "clipped gradient": (clipped_gradient, (X,)),
}


def padded(step: Callable[..., Any], *args: Any) -> Analysis:
    return padded_whole(with_row_multiple(analyse(step, args), MULTIPLE))


def run(found: Analysis, args: Any) -> Any:
    flat = [jnp.asarray(x) for x in open_arguments(lambda *_: 0, args).arrays]
    out = jax.jit(lambda *arrays: evaluated(found.program, arrays))(*flat)
    with updating():
        return found.pytrees.result.return_value(out)


@pytest.mark.parametrize("name", CASES)
def test_results_stay_the_same(name: str) -> None:
    loss, batch = CASES[name]
    step = sgd(loss)
    found = padded(step, W, batch)
    sizes = {n for v in found.program.values for n in v.shape}
    assert sizes & {15, 15 * TIMES}
    assert_close(run(found, (W, batch)), jax.jit(step)(W, batch))


@pytest.mark.parametrize("name", ["classified", "masked", "embedded", "dropped"])
def test_in_two_microbatches(name: str) -> None:
    loss, batch = CASES[name]
    step = sgd(loss)
    found = in_microbatches(with_row_multiple(analyse(step, (W, batch)), MULTIPLE), 2)
    assert any(10 in v.shape for v in found.program.values)
    assert_close(run(found, (W, batch)), jax.jit(step)(W, batch))


def test_rows_in_results_and_in_state() -> None:
    def step(w: Any, hidden: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ w + hidden)
        return w - jnp.mean(hidden), hidden, jnp.cumsum(hidden.sum(1))

    args = W, drawn(ROWS, CLASSES), X
    assert_close(run(padded(step, *args), args), jax.jit(step)(*args))


def test_a_layer_of_batch_statistics() -> None:
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(KEY, X)

    def step(variables: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out, kept = model.apply(
                {**variables, "params": params}, x, mutable=["batch_stats"]
            )
            return jnp.mean(out**3), kept

        grads, kept = jax.grad(loss, has_aux=True)(variables["params"])
        return {"params": grads, **kept}

    args = variables, X
    assert_close(run(padded(step, *args), args), jax.jit(step)(*args))


def test_gradients_need_no_mask_of_their_own() -> None:
    """Zeros of padded rows go through the backward pass: one mask makes all of them."""

    def deep(ws: Any, x: Any) -> Any:
        for w in ws:
            one, other = jnp.split(jnp.tanh(x @ w), 2, axis=-1)
            x = jnp.concatenate([other, -one], axis=-1)
        return jnp.mean(x**2)

    ws = [drawn(WIDTH, WIDTH, seed=k) for k in range(4)]
    found = padded(sgd(deep), ws, (X,))
    made = [e.primitive for e in found.program.body.equations]
    plain = [e.primitive for e in analyse(sgd(deep), (ws, (X,))).program.body.equations]
    assert made.count("select_n") - plain.count("select_n") == 2


def test_a_callback_gets_the_rows_of_the_batch() -> None:
    shapes: list[tuple[int, ...]] = []

    def step(w: Any, x: Any) -> Any:
        out = x @ w
        jax.debug.callback(lambda out: shapes.append(out.shape), out)
        return w - jnp.mean(out)

    run(padded(step, W, X), (W, X))
    jax.effects_barrier()
    assert shapes == [(ROWS, CLASSES)]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "sorted": (lambda w, x: jnp.mean(jnp.sort(x @ w, 0)[0]), "'sort'"),
    "reversed": (lambda w, x: jnp.sum((x[::-1] @ w) * x[:, :1]), "'rev'"),
    "two views": (lambda w, x: jnp.sum((x[:6] @ w) * (x[6:] @ w)), "on a padded batch"),
    "contrastive": (lambda w, x: jnp.mean(jnp.exp((x @ w) @ (x @ w).T)), "12x12"),
    "picked": (
        lambda w, x: jnp.mean((x @ w)[jnp.argsort(x[:, 0])[:4]] ** 2),
        "'sort'",
    ),
    "one by one": (
        lambda w, x: jax.lax.scan(lambda h, r: (jnp.tanh(h + r @ w), None), w[0], x)[
            0
        ].sum(),
        "'scan'",
    ),
    "argmax": (lambda w, x: jnp.sum(w[jnp.argmax(x @ w, 0)]), "'argmax'"),
    "from behind": (
        lambda w, x: jnp.mean(jax.lax.cumsum(x @ w, 0, reverse=True)),
        "'cumsum'",
    ),
    "other keys": (
        lambda w, x: jnp.mean(
            x @ w * jax.random.normal(jax.random.key(0, impl="rbg"), (x.shape[0], 1))
        ),
        "draws other numbers",
    ),
    "pairs": (
        lambda w, x: jnp.mean((x @ w).reshape(-1, 2, CLASSES) ** 3),
        "on a padded batch of 15 rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    loss, why = REFUSED[name]
    with pytest.raises(PlanError, match=f"12 rows cannot be padded to 15 .*{why}"):
        padded(sgd(loss), W, (X,))
