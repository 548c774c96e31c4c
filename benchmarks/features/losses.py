"""Features: derivatives of higher order, losses over the batch, and layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from feature import (
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
from jax.ad_checkpoint import checkpoint_name

HARD = 4


def features() -> Iterator[Feature]:
    """The features of this module."""
    for name, step in GRADIENTS.items():
        yield Feature(f"gradient: {name}", step, layers, (X, Y))
    for name, loss in LOSSES.items():
        yield Feature(f"loss: {name}", descent(loss), layers, (X, Y))
    for name, function in LAYERS.items():
        yield Feature(f"layer: {name}", descent(between(function)), layers, (X, Y))
    yield Feature("loss: triplet", descent(_triplet), layers, (X, Y, X[::-1].copy()))
    yield Feature("loss: ctc", descent(_ctc), layers, _ctc_batch())


# ---- gradients ----


def _penalty(weights: Any, x: Any, y: Any) -> Any:
    def value(v: Any) -> Any:
        return jnp.sum(forward(weights, v[None]))

    norms = jnp.linalg.norm(jax.vmap(jax.grad(value))(x) + 1e-3, axis=1)
    return loss_of(weights, x, y) + 0.1 * jnp.mean((norms - 1) ** 2)


def _jacobian(weights: Any, x: Any, y: Any) -> Any:
    jacobians = jax.vmap(jax.jacfwd(lambda v: forward(weights, v)))(x)
    return loss_of(weights, x, y) + 0.01 * jnp.mean(jacobians**2)


def _physics(weights: Any, x: Any, y: Any) -> Any:
    """The trace of each row's Hessian, as in the loss of a differential equation."""

    def value(v: Any) -> Any:
        return jnp.sum(forward(weights, v))

    traces = jax.vmap(lambda v: jnp.trace(jax.hessian(value)(v)))(x)
    return jnp.mean((traces - jnp.sum(y, 1)) ** 2)


def _curvature(weights: Any, x: Any, y: Any) -> Any:
    def gradient_of(w: Any) -> Any:
        return jax.grad(loss_of)(w, x, y)

    gradient = gradient_of(weights)
    along = jax.tree.map(jnp.ones_like, weights)
    _, curved = jax.jvp(gradient_of, (weights,), (along,))
    curvature = sum(jnp.vdot(a, b) for a, b in zip(along, curved, strict=True))
    return updated(weights, gradient), {"curvature": curvature}


def _newton(weights: Any, x: Any, y: Any) -> Any:
    """A step along the gradient, scaled by the curvature in this direction."""

    def gradient_of(w: Any) -> Any:
        return jax.grad(loss_of)(w, x, y)

    gradient = gradient_of(weights)
    _, curved = jax.jvp(gradient_of, (weights,), (gradient,))
    square = optax.tree.vdot(gradient, gradient)
    rate = square / (jnp.abs(optax.tree.vdot(gradient, curved)) + 1.0)
    return jax.tree.map(lambda w, g: w - rate * g, weights, gradient), {"rate": rate}


def _forward_mode(weights: Any, x: Any, y: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), len(weights))
    along = [jax.random.normal(k, w.shape) for k, w in zip(keys, weights, strict=True)]
    loss, slope = jax.jvp(lambda w: loss_of(w, x, y), (weights,), (along,))
    return updated(weights, [slope * a for a in along]), {"loss": loss}


def _clipped_rows(weights: Any, x: Any, y: Any) -> Any:
    """Gradients of single rows, each clipped, as in differential privacy."""

    def one(x: Any, y: Any) -> Any:
        gradient = jax.grad(loss_of)(weights, x[None], y[None])
        scale = 1 / jnp.maximum(1.0, optax.global_norm(gradient) / 0.1)
        return jax.tree.map(lambda g: g * scale, gradient)

    gradient = jax.tree.map(lambda g: jnp.mean(g, 0), jax.vmap(one)(x, y))
    return updated(weights, gradient), {"norm": optax.global_norm(gradient)}


def _sharpness(weights: Any, x: Any, y: Any) -> Any:
    gradient = jax.grad(loss_of)(weights, x, y)
    scale = 0.05 / optax.global_norm(gradient)
    moved = jax.tree.map(lambda w, g: w + scale * g, weights, gradient)
    loss, gradient = jax.value_and_grad(loss_of)(moved, x, y)
    return updated(weights, gradient), {"loss": loss}


def _vjp(weights: Any, x: Any, y: Any) -> Any:
    out, back = jax.vjp(lambda w: forward(w, x), weights)
    (gradient,) = back(2 * (out - y) / out.size)
    return updated(weights, gradient), {"loss": jnp.mean((out - y) ** 2)}


def _linearized(weights: Any, x: Any, y: Any) -> Any:
    out, move = jax.linearize(lambda w: forward(w, x), weights)
    along = jax.tree.map(jnp.sign, weights)
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    return updated(weights, gradient), {"l": loss, "m": jnp.mean(move(along) * out)}


def _two_tasks(weights: Any, x: Any, y: Any) -> Any:
    """The gradients of two losses, one projected onto the normal plane of the other
    (PCGrad).
    """
    a = jax.grad(loss_of)(weights, x, y)
    b = jax.grad(lambda w: jnp.mean(jnp.abs(forward(w, x) - 1)))(weights)
    inner = jnp.minimum(optax.tree.vdot(a, b), 0.0) / optax.tree.vdot(b, b)
    gradient = jax.tree.map(lambda a, b: a - inner * b + b, a, b)
    return updated(weights, gradient), {"inner": inner}


def _noisy(weights: Any, x: Any, y: Any) -> Any:
    """Evolution strategies: no gradient at all."""

    def one(key: Any) -> Any:
        noise = [0.1 * jax.random.normal(key, w.shape) for w in weights]
        moved = [w + n for w, n in zip(weights, noise, strict=True)]
        value = loss_of(moved, x, y)
        return value, [value * n for n in noise]

    losses, parts = jax.vmap(one)(jax.random.split(jax.random.key(0), 4))
    gradient = [jnp.mean(p, 0) for p in parts]
    return updated(weights, gradient), {"loss": jnp.mean(losses)}


def _accumulated(weights: Any, x: Any, y: Any) -> Any:
    def body(total: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weights, *batch)
        return jax.tree.map(jnp.add, total, gradient), loss

    zero = jax.tree.map(jnp.zeros_like, weights)
    split = (x.reshape(4, -1, WIDTH), y.reshape(4, -1, WIDTH))
    gradient, losses = jax.lax.scan(body, zero, split)
    gradient = jax.tree.map(lambda g: g / 4, gradient)
    return updated(weights, gradient), {"loss": jnp.mean(losses)}


GRADIENTS = {
    "penalty of rows": descent(_penalty),
    "jacobian of rows": descent(_jacobian),
    "hessian of rows": descent(_physics),
    "curvature as a metric": _curvature,
    "newton along the gradient": _newton,
    "forward mode": _forward_mode,
    "clipped by rows": _clipped_rows,
    "sharpness-aware": _sharpness,
    "vjp": _vjp,
    "linearize": _linearized,
    "projected tasks": _two_tasks,
    "evolution strategies": _noisy,
    "accumulated in the step": _accumulated,
}


# ---- losses ----


def _hard_rows(weights: Any, x: Any, y: Any) -> Any:
    errors = jnp.mean((forward(weights, x) - y) ** 2, 1)
    return jnp.mean(jax.lax.top_k(errors, HARD)[0])


def _hard_columns(weights: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jax.lax.top_k((forward(weights, x) - y) ** 2, HARD)[0])


def _ranked(weights: Any, x: Any, y: Any) -> Any:
    """A loss of the order of a row's columns (ListNet)."""
    return -jnp.mean(jax.nn.softmax(y) * jax.nn.log_softmax(forward(weights, x)))


def _wasserstein(weights: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.sort(forward(weights, x), 0) - jnp.sort(y, 0)) ** 2)


def _spread(weights: Any, x: Any, y: Any) -> Any:
    """A loss of variances over rows and of covariances of columns (VICReg)."""
    out = forward(weights, x)
    centred = out - out.mean(0)
    covariance = centred.T @ centred / ROWS
    apart = covariance - jnp.diag(jnp.diag(covariance))
    return loss_of(weights, x, y) + jnp.mean(apart**2)


def _root(weights: Any, x: Any, y: Any) -> Any:
    return jnp.sqrt(loss_of(weights, x, y))


def _explained(weights: Any, x: Any, y: Any) -> Any:
    return loss_of(weights, x, y) / (1 + jnp.var(y))


def _groups(weights: Any, x: Any, y: Any) -> Any:
    """The mean of each class's mean."""
    errors = jnp.mean((forward(weights, x) - y) ** 2, 1)
    labels = jnp.argmax(y, 1)
    sums = jax.ops.segment_sum(errors, labels, WIDTH)
    counts = jax.ops.segment_sum(jnp.ones_like(errors), labels, WIDTH)
    return jnp.mean(sums / jnp.maximum(counts, 1))


def _worst_group(weights: Any, x: Any, y: Any) -> Any:
    errors = jnp.mean((forward(weights, x) - y) ** 2, 1)
    return jnp.max(jax.ops.segment_sum(errors, jnp.argmax(y, 1), WIDTH))


def _mixup(weights: Any, x: Any, y: Any) -> Any:
    mix, order = jax.random.split(jax.random.key(1))
    part = jax.random.beta(mix, 0.4, 0.4)
    other = jax.random.permutation(order, x.shape[0])
    x, y = (part * v + (1 - part) * v[other] for v in (x, y))
    return loss_of(weights, x, y)


def _variational(weights: Any, x: Any, y: Any) -> Any:
    mean, scale = forward(weights[:2], x), jnp.exp(x @ weights[2])
    drawn = mean + scale * jax.random.normal(jax.random.key(1), mean.shape)
    apart = jnp.mean(scale**2 + mean**2 - 1 - 2 * jnp.log(scale))
    return jnp.mean((drawn @ weights[3] - y) ** 2) + 0.1 * apart


def _diffusion(weights: Any, x: Any, y: Any) -> Any:
    key, noise = jax.random.split(jax.random.key(1))
    t = jax.random.randint(key, (x.shape[0], 1), 0, 10) / 10
    noise = jax.random.normal(noise, x.shape)
    return loss_of(weights, jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise, noise + y)


def _chunked(weights: Any, x: Any, y: Any) -> Any:
    """Applies the head to a few rows at a time, as for large vocabularies."""
    hidden = forward(weights[:3], x)

    @jax.checkpoint
    def chunk(total: Any, batch: Any) -> Any:
        h, y = batch
        return total + jnp.sum((h @ weights[3] - y) ** 2), None

    split = (hidden.reshape(4, -1, WIDTH), y.reshape(4, -1, WIDTH))
    return jax.lax.scan(chunk, 0.0, split)[0] / y.size


def _orthogonal(weights: Any, x: Any, y: Any) -> Any:
    apart = [jnp.sum((w.T @ w - jnp.eye(WIDTH)) ** 2) for w in weights]
    singular = jnp.linalg.svd(weights[0], compute_uv=False)
    return loss_of(weights, x, y) + 0.01 * (sum(apart) + singular[0])


def _triplet(weights: Any, x: Any, y: Any, z: Any) -> Any:
    a, p, n = (forward(weights, v) for v in (x, y, z))
    near, far = jnp.sum((a - p) ** 2, 1), jnp.sum((a - n) ** 2, 1)
    return jnp.mean(jax.nn.relu(near - far + 1))


def _ctc_batch() -> tuple[Any, ...]:
    labels = np.random.default_rng(0).integers(1, WIDTH, (ROWS, 2)).astype(np.int32)
    return numbers(5, ROWS, 6, WIDTH), labels


def _ctc(weights: Any, x: Any, labels: Any) -> Any:
    logits = forward(weights, x)
    nothing = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    return jnp.mean(optax.ctc_loss(logits, nothing[0], labels, nothing[1]))


LOSSES = {
    "hardest rows": _hard_rows,
    "hardest columns": _hard_columns,
    "order of columns": _ranked,
    "sorted rows": _wasserstein,
    "variance over rows": _spread,
    "root of the mean": _root,
    "over the variance of targets": _explained,
    "mean of classes": _groups,
    "worst class": _worst_group,
    "mixup": _mixup,
    "variational": _variational,
    "diffusion": _diffusion,
    "chunks of rows": _chunked,
    "of weights alone": _orthogonal,
}


# ---- layers ----


def _until(x: Any) -> Any:
    """Halves each row until it is small, with another number of iterations for each
    row.
    """

    def halve(v: Any) -> Any:
        small = lambda v: jnp.max(jnp.abs(v)) > 0.2  # noqa: E731
        return jax.lax.while_loop(small, lambda v: v / 2, v)

    return x + jax.vmap(halve)(jax.lax.stop_gradient(x))


def _until_all(x: Any) -> Any:
    held = jax.lax.stop_gradient(x)
    out = jax.lax.while_loop(lambda v: jnp.max(jnp.abs(v)) > 0.2, lambda v: v / 2, held)
    return x + out


def _fixed_point(x: Any) -> Any:
    """A fixed point, with the derivative of the implicit function."""

    @jax.custom_vjp
    def solve(x: Any) -> Any:
        return jax.lax.fori_loop(0, 8, lambda _, z: 0.5 * jnp.tanh(z) + x, x)

    def back(z: Any, g: Any) -> Any:
        slope = 0.5 * (1 - jnp.tanh(z) ** 2)
        return (jax.lax.fori_loop(0, 8, lambda _, u: g + slope * u, g),)

    def forward(x: Any) -> Any:
        z = solve(x)
        return z, z

    solve.defvjp(forward, back)
    return solve(x)


def _names(x: Any) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    run = lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "kept"))  # noqa: E731
    return jax.checkpoint(run, policy=policy)(x)


def _state_space(x: Any) -> Any:
    """A linear recurrence over the columns."""

    def join(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    decay = jax.nn.sigmoid(x)
    return jax.lax.associative_scan(join, (decay, x), axis=1)[1]


def _experts(x: Any) -> Any:
    """Rows sorted by expert, and one product for each expert's rows."""
    expert = jnp.argmax(x[:, :3], 1)
    order = jnp.argsort(expert)
    made = jnp.stack([jnp.eye(WIDTH) * (k + 1) for k in range(3)])
    sizes = jnp.bincount(expert, length=3)
    out = jax.lax.ragged_dot(x[order], made, sizes.astype(jnp.int32))
    return out[jnp.argsort(order)]


def _capacity(x: Any) -> Any:
    """Experts that each take a limited number of rows: the first rows."""
    expert = jax.nn.one_hot(jnp.argmax(x[:, :2], 1), 2)
    place = jnp.cumsum(expert, 0) * expert
    return x * jnp.sum(place * (place <= ROWS // 4), 1, keepdims=True)


def _transposed(x: Any) -> Any:
    kernel = jnp.ones((3, 1, 1)) / 3
    out = jax.lax.conv_transpose(x[:, :, None], kernel, (2,), "SAME")
    return out.reshape(x.shape[0], WIDTH, 2).mean(2)


def _pooled(x: Any) -> Any:
    image = x.reshape(-1, 2, 4, 1)
    most = jax.lax.reduce_window(
        image, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 2, 1), "SAME"
    )
    return x + jax.image.resize(most, image.shape, "bilinear").reshape(x.shape)


def _quantised(x: Any) -> Any:
    """Rounding to 8 bits with the gradient of the identity."""
    scale = jnp.max(jnp.abs(x), 1, keepdims=True) / 127
    small = jnp.round(x / scale).astype(jnp.int8).astype(x.dtype) * scale
    return x + jax.lax.stop_gradient(small - x)


def _sinkhorn(x: Any) -> Any:
    """Scales rows and columns in turn (Sinkhorn), an assignment over the batch."""
    v = jnp.exp(x)
    for _ in range(2):
        v = v / jnp.sum(v, 1, keepdims=True)
        v = v / jnp.sum(v, 0, keepdims=True)
    return v * x.shape[0]


LAYERS = {
    "a while loop of each row": _until,
    "a while loop of all rows": _until_all,
    "fixed point": _fixed_point,
    "names that are saved": _names,
    "state space": _state_space,
    "dropless experts": _experts,
    "experts with a capacity": _capacity,
    "transposed convolution": _transposed,
    "pooling and resizing": _pooled,
    "quantised": _quantised,
    "sinkhorn": _sinkhorn,
    "cholesky of the batch": lambda x: (
        jnp.linalg.solve(x.T @ x / ROWS + jnp.eye(WIDTH), x.T).T
    ),
}
