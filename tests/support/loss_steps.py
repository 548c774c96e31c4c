"""Train steps of small language models, with a loss in one of several forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, TOKENS, WIDTH, WORDS, LAYERS = 8, 32, 8, 256, 2
PER_TOKEN = optax.softmax_cross_entropy_with_integer_labels
Loss = Callable[[Any, Any, Any], Any]


def masked_mean(losses: Any, mask: Any) -> Any:
    return (losses * mask).sum() / mask.sum()


def masked(logits: Any, labels: Any, mask: Any) -> Any:
    return masked_mean(PER_TOKEN(logits, labels), mask), ()


def mean(logits: Any, labels: Any, mask: Any) -> Any:
    del mask
    return PER_TOKEN(logits, labels).mean(), ()


def one_hot_sum(logits: Any, labels: Any, mask: Any) -> Any:
    """Sums words and tokens at once."""
    hot = jax.nn.one_hot(labels, logits.shape[-1]) * mask[..., None]
    return -(jax.nn.log_softmax(logits) * hot).sum() / labels.size, ()


def smoothed(logits: Any, labels: Any, mask: Any) -> Any:
    hot = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    return masked_mean(optax.softmax_cross_entropy(logits, hot), mask), ()


def softcapped(logits: Any, labels: Any, mask: Any) -> Any:
    return masked(3 * jnp.tanh(logits / 3), labels, mask)


def with_z_loss(logits: Any, labels: Any, mask: Any) -> Any:
    logs = jax.nn.logsumexp(logits, -1)
    return masked_mean(PER_TOKEN(logits, labels) + 0.01 * logs**2, mask), logs.mean()


def with_metrics(logits: Any, labels: Any, mask: Any) -> Any:
    losses = PER_TOKEN(logits, labels)
    right = (logits.argmax(-1) == labels).mean()
    among = (jax.lax.top_k(logits, 5)[1] == labels[..., None]).any(-1).sum()
    weights = jax.nn.softmax(logits)
    entropy = -(weights * jax.nn.log_softmax(logits)).sum(-1).mean()
    return masked_mean(losses, mask), (right, among, entropy, jnp.exp(losses.mean()))


def repeated(logits: Any, labels: Any, mask: Any) -> Any:
    """The softmax is computed again for the backward pass."""
    return masked_mean(jax.checkpoint(PER_TOKEN)(logits, labels), mask), ()


def flat(logits: Any, labels: Any, mask: Any) -> Any:
    words = logits.shape[-1]
    return masked(logits.reshape(-1, words), labels.reshape(-1), mask.reshape(-1))


def without_padding(logits: Any, labels: Any, mask: Any) -> Any:
    """The last words of the output matrix are padding."""
    return masked(logits[..., :-6], labels % (logits.shape[-1] - 6), mask)


def of_half(logits: Any, labels: Any, mask: Any) -> Any:
    """The logits are in bfloat16, the loss in float32."""
    return masked(logits.astype(jnp.float32), labels, mask)


FORMS: dict[str, Loss] = {
    f.__name__: f
    for f in (
        mean, masked, one_hot_sum, smoothed, softcapped, with_z_loss, with_metrics,
        repeated, flat, without_padding, of_half,
    )
}  # fmt: skip


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of (batch, sequence, heads, head_dim)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def block(p: Any, x: Any) -> Any:
    q, k, v = ((x @ p[n]).reshape(*x.shape[:2], 2, -1) for n in "qkv")
    return jnp.tanh(x + attention(q, k, v).reshape(x.shape) @ p["o"])


def training(
    loss: Loss = masked,
    *,
    rows: int = ROWS,
    tokens: int = TOKENS,
    words: int = WORDS,
    layers: int = LAYERS,
    tied: bool = False,
    bias: bool = False,
    scanned: bool = False,
    again: bool = False,
) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """A train step, its state, and a batch.

    Args:
      loss: the loss of logits, labels and a mask, with further results.
      rows: rows of the batch.
      tokens: tokens of a row.
      words: words of the vocabulary.
      layers: layers of attention.
      tied: whether the output matrix is the table of embeddings.
      bias: whether the logits have a bias.
      scanned: whether the layers are in a loop, and computed again.
      again: whether the whole loss is computed again for the backward pass.
    """
    optimizer = optax.adam(1e-2)
    half = loss is of_half

    def loss_of(params: Any, given: Any, labels: Any, mask: Any) -> Any:
        x = params["table"][given]
        if scanned:
            run = jax.checkpoint(block)
            x = jax.lax.scan(lambda x, p: (run(p, x), None), x, params["layers"])[0]
        else:
            for k in range(layers):
                x = block(jax.tree.map(lambda p, k=k: p[k], params["layers"]), x)
        matrix = params["table"].T if tied else params["head"]
        if half:
            x, matrix = (y.astype(jnp.bfloat16) for y in (x, matrix))
        logits = x @ matrix
        if bias:
            logits = logits + params["bias"]
        return loss(logits, labels, mask)

    def step(state: Any, given: Any, labels: Any, mask: Any) -> Any:
        params, moments = state
        run = jax.checkpoint(loss_of) if again else loss_of
        (found, more), grads = jax.value_and_grad(run, has_aux=True)(
            params, given, labels, mask
        )
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), (found, more, grads)

    keys = iter(jax.random.split(jax.random.key(0), 10))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape)

    params = {"table": normal(words, WIDTH)}
    params["layers"] = {n: 0.4 * normal(layers, WIDTH, WIDTH) for n in "qkvo"}
    if not tied:
        params["head"] = normal(WIDTH, words)
    if bias:
        params["bias"] = normal(words)
    given = jax.random.randint(next(keys), (rows, tokens), 0, words)
    mask = (jax.random.uniform(next(keys), (rows, tokens)) > 0.3).astype(jnp.float32)
    batch = given, jnp.roll(given, -1, 1), mask
    return step, (params, optimizer.init(params)), batch
