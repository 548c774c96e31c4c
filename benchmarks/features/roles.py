"""Features: roles of arguments, unusual rows and states, and host callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from feature import (
    LABELS,
    ROWS,
    WIDTH,
    Feature,
    X,
    Y,
    between,
    descent,
    forward,
    layers,
    loss_of,
    numbers,
    updated,
)
from jax.experimental import io_callback

FLOAT = jax.ShapeDtypeStruct((), np.float32)


def features() -> Iterator[Feature]:
    """The features of this module."""
    for name, mixed in MIXED.items():
        loss = lambda w, x, y, mixed=mixed: loss_of(w, mixed(x), mixed(y))  # noqa: E731
        yield Feature(f"rows: {name}", descent(loss), layers, (X, Y))
    for name, function in NORMS.items():
        yield Feature(f"rows: {name}", descent(between(function)), layers, (X, Y))
    time_major = (np.swapaxes(numbers(7, ROWS, 3, WIDTH), 0, 1).copy(), Y)
    yield Feature("rows: time-major", descent(_recurrent), layers, time_major)
    yield Feature("rows: ragged bags", descent(_bags), _table, _bag_batch())
    yield Feature("rows: masked mean", descent(_masked), layers, (X, Y, LABELS > 1))
    yield Feature("rows: labels", descent(_labels), layers, (X, LABELS))
    yield Feature("rows: contrastive", descent(_contrastive), layers, (X, Y))
    yield Feature("rows: graph", descent(_graph), layers, (X, _edges(), Y))
    yield Feature("roles: teacher", _distill, lambda: (layers(), layers()), (X, Y))
    teacher = [np.asarray(w) for w in layers()]
    yield Feature("roles: teacher outside", _taught, layers, (teacher, X, Y))
    yield Feature("roles: LoRA", _lora, _lora_state, (X, Y))
    yield Feature(
        "roles: target network", _target, lambda: (layers(), layers()), (X, Y)
    )
    yield Feature("roles: average", _average, lambda: (layers(), layers()), (X, Y))
    yield Feature("roles: gan", _gan, lambda: (layers(2), layers(2)), (X, Y))
    yield Feature("roles: static", _static, layers, (X, Y, "mean"), static=("how",))
    yield Feature("state: fp8 scaling", _scaled, _scaled_state, (X, Y))
    yield Feature("state: batch statistics", _statistics, _statistics_state, (X, Y))
    yield Feature("state: integers and flags", _counted, _counted_state, (X, Y))
    yield Feature("state: complex", _complex, _complex_state, (X, Y))
    yield Feature("state: bfloat16", _mixed_precision, _halves, (X, Y))
    yield Feature("state: loss scale", _loss_scale, _scale_state, (X, Y))
    for name, call in CALLS.items():
        yield Feature(f"effect: {name}", _calling(call), layers, (X, Y))
    inner = descent(between(_printed))
    yield Feature("effect: print between layers", inner, layers, (X, Y))


MIXED = {
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: jnp.roll(x, 3, axis=0),
    "permuted": lambda x: x[jax.random.permutation(jax.random.key(0), x.shape[0])],
    "chosen": lambda x: x[jnp.argsort(x[:, 0])],
    "a half": lambda x: x[: x.shape[0] // 2],
    "doubled": lambda x: jnp.concatenate([x, -x]),
    "normalised": lambda x: (x - x.mean(0)) / (1 + x.std(0)),
}
NORMS = {
    "layer norm": lambda x: (x - x.mean(1, keepdims=True)) / (1 + x.std(1)[:, None]),
    "batch norm": lambda x: (x - x.mean(0)) / (1 + x.std(0)),
    "softmax over rows": lambda x: jax.nn.softmax(x, axis=0),
    "cumulative sum of rows": lambda x: jnp.cumsum(x, 0) / x.shape[0],
}


def _recurrent(weights: Any, x: Any, y: Any) -> Any:
    def cell(h: Any, x: Any) -> Any:
        return jnp.tanh(x @ weights[0] + h @ weights[1]), None

    h, _ = jax.lax.scan(cell, jnp.zeros_like(y), x)
    return jnp.mean((forward(weights[2:], h) - y) ** 2)


def _table() -> Any:
    return {"table": jnp.asarray(numbers(9, 32, WIDTH)), "layers": layers()}


def _bag_batch() -> tuple[Any, ...]:
    bags = np.sort(np.random.default_rng(0).integers(0, ROWS, 40)).astype(np.int32)
    return np.random.default_rng(1).integers(0, 32, 40).astype(np.int32), bags, Y


def _bags(state: Any, tokens: Any, bags: Any, y: Any) -> Any:
    rows = jax.ops.segment_sum(state["table"][tokens], bags, y.shape[0])
    return loss_of(state["layers"], rows, y)


def _masked(weights: Any, x: Any, y: Any, mask: Any) -> Any:
    errors = jnp.mean((forward(weights, x) - y) ** 2, 1)
    return jnp.sum(errors * mask) / jnp.sum(mask)


def _labels(weights: Any, x: Any, labels: Any) -> Any:
    logits = jax.nn.log_softmax(forward(weights, x))
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))


def _contrastive(weights: Any, x: Any, y: Any) -> Any:
    logits = forward(weights, x) @ forward(weights, y).T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))


def _edges() -> np.ndarray:
    return np.random.default_rng(2).integers(0, ROWS, (2, 32)).astype(np.int32)


def _graph(weights: Any, x: Any, edges: Any, y: Any) -> Any:
    sent, received = edges
    for w in weights:
        x = jnp.tanh(jax.ops.segment_sum((x @ w)[sent], received, x.shape[0]))
    return jnp.mean((x - y) ** 2)


def _distill(state: Any, x: Any, y: Any) -> Any:
    student, teacher = state
    target = jax.lax.stop_gradient(forward(teacher, x)) + 0.1 * y
    loss, gradient = jax.value_and_grad(loss_of)(student, x, target)
    return (updated(student, gradient), teacher), {"loss": loss}


def _taught(student: Any, teacher: Any, x: Any, y: Any) -> Any:
    target = forward(teacher, x) + 0.1 * y
    loss, gradient = jax.value_and_grad(loss_of)(student, x, target)
    return updated(student, gradient), {"loss": loss}


def _lora_state() -> Any:
    made = [jnp.asarray(numbers(k, WIDTH, 2) / 9) for k in range(8)]
    return {"base": layers(), "a": made[:4], "b": [w.T for w in made[4:]]}


def _lora(state: Any, x: Any, y: Any) -> Any:
    def loss(a: Any, b: Any) -> Any:
        whole = [w + p @ q for w, p, q in zip(state["base"], a, b, strict=True)]
        return loss_of(whole, x, y)

    value, (a, b) = jax.value_and_grad(loss, (0, 1))(state["a"], state["b"])
    made = {"base": state["base"], "a": updated(state["a"], a)}
    return {**made, "b": updated(state["b"], b)}, {"loss": value}


def _target(state: Any, x: Any, y: Any) -> Any:
    online, target = state
    wanted = y + 0.9 * jnp.max(forward(target, x), 1, keepdims=True)
    loss, gradient = jax.value_and_grad(loss_of)(online, x, wanted)
    online = updated(online, gradient)
    target = jax.tree.map(lambda t, o: 0.9 * t + 0.1 * o, target, online)
    return (online, target), {"loss": loss}


def _average(state: Any, x: Any, y: Any) -> Any:
    weights, mean = state
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    weights = updated(weights, gradient)
    mean = jax.tree.map(lambda a, w: 0.99 * a + 0.01 * w, mean, weights)
    return (weights, mean), {"loss": loss, "of mean": loss_of(mean, x, y)}


def _gan(state: Any, x: Any, y: Any) -> Any:
    def judged(judge: Any, maker: Any) -> Any:
        return jnp.mean(jax.nn.softplus(forward(judge, forward(maker, x)))) + jnp.mean(
            jax.nn.softplus(-forward(judge, y))
        )

    maker, judge = state
    loss, of_judge = jax.value_and_grad(judged)(judge, maker)
    of_maker = jax.grad(lambda m: -judged(judge, m))(maker)
    return (updated(maker, of_maker), updated(judge, of_judge)), {"loss": loss}


def _static(weights: Any, x: Any, y: Any, how: str) -> Any:
    reduce = {"mean": jnp.mean, "sum": jnp.sum}[how]
    step = descent(lambda w, x, y: reduce((forward(w, x) - y) ** 2))
    return step(weights, x, y)


def _scaled_state() -> Any:
    return {"w": layers(), "most": jnp.ones((4, 3))}


def _scaled(state: Any, x: Any, y: Any) -> Any:
    """Scales of fp8 values, from the largest absolute values of earlier steps."""

    def loss(weights: Any) -> Any:
        h, seen = x, list[Any]()
        for w, most in zip(weights, state["most"], strict=True):
            seen.append(jnp.max(jnp.abs(h)))
            scale = 448.0 / jnp.max(most)
            small = (h * scale).astype(jnp.float8_e4m3fn).astype(h.dtype) / scale
            h = jnp.tanh((h + jax.lax.stop_gradient(small - h)) @ w)
        return jnp.mean((h - y) ** 2), jnp.stack(seen)

    (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(state["w"])
    most = jnp.concatenate([seen[:, None], state["most"][:, :-1]], 1)
    return {"w": updated(state["w"], gradient), "most": most}, {"loss": value}


def _statistics_state() -> Any:
    return {"w": layers(), "mean": jnp.zeros(WIDTH)}


def _statistics(state: Any, x: Any, y: Any) -> Any:
    """A running mean of activations, kept next to the parameters."""

    def loss(weights: Any) -> Any:
        h = forward(weights[:2], x) - state["mean"]
        return loss_of(weights[2:], h, y), jnp.mean(h, 0)

    (value, mean), gradient = jax.value_and_grad(loss, has_aux=True)(state["w"])
    mean = 0.9 * state["mean"] + 0.1 * mean
    return {"w": updated(state["w"], gradient), "mean": mean}, {"loss": value}


def _counted_state() -> Any:
    zero = jnp.zeros((), jnp.int32)
    return {"w": layers(), "n": zero, "on": jnp.array(True), "last": LABELS[:4]}


def _counted(state: Any, x: Any, y: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_of)(state["w"], x, y)
    w = jax.tree.map(
        lambda p, g: jnp.where(state["on"], p - 0.1 * g, p), state["w"], gradient
    )
    made = {"w": w, "n": state["n"] + 1, "on": state["n"] % 2 == 1}
    return {**made, "last": state["last"] * 2 % 5}, {"loss": loss, "on": made["on"]}


def _complex_state() -> Any:
    return [w.astype(jnp.complex64) * (1 + 0.5j) for w in layers()]


def _complex(weights: Any, x: Any, y: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x.astype(jnp.complex64)
        for w in weights:
            h = jnp.tanh(h @ w / 4)
        return jnp.mean(jnp.abs(h - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return updated(weights, jax.tree.map(jnp.conj, gradient)), {"loss": value}


def _halves() -> Any:
    return layers()


def _mixed_precision(weights: Any, x: Any, y: Any) -> Any:
    def loss(weights: Any) -> Any:
        cast = [w.astype(jnp.bfloat16) for w in weights]
        return jnp.mean((forward(cast, x.astype(jnp.bfloat16)) - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return updated(weights, gradient), {"loss": value}


def _scale_state() -> Any:
    return {"w": layers(), "scale": jnp.float32(1024.0)}


def _loss_scale(state: Any, x: Any, y: Any) -> Any:
    def scaled(weights: Any) -> Any:
        return loss_of(weights, x, y) * state["scale"]

    value, gradient = jax.value_and_grad(scaled)(state["w"])
    gradient = jax.tree.map(lambda g: g / state["scale"], gradient)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in gradient]))
    w = jax.tree.map(
        lambda p, g: jnp.where(finite, p - 0.1 * g, p), state["w"], gradient
    )
    scale = jnp.where(finite, state["scale"], state["scale"] / 2)
    return {"w": w, "scale": scale}, {"loss": value / state["scale"], "ok": finite}


def _printed(x: Any) -> Any:
    jax.debug.callback(lambda v: None, x)
    return x


CALLS = {
    "debug callback": lambda v: jax.debug.callback(lambda x: None, v),
    "ordered callbacks": lambda v: [
        jax.debug.callback(lambda x: None, v + k, ordered=True) for k in range(2)
    ],
    "io callback": lambda v: io_callback(lambda x: np.float32(2 * x), FLOAT, v),
    "ordered io callback": lambda v: io_callback(
        lambda x: np.float32(2 * x), FLOAT, v, ordered=True
    ),
    "pure callback": lambda v: jax.pure_callback(
        lambda x: np.float32(np.sin(x)), FLOAT, v
    ),
}


def _calling(call: Any) -> Any:
    def step(weights: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
        made = call(loss)
        metrics = {"loss": loss}
        if isinstance(made, jax.Array):
            metrics["called"] = made
        return updated(weights, gradient), metrics

    return step
