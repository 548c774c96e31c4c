"""Features: every sampler of `jax.random`, and kinds of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from feature import WIDTH, Feature, X, Y, layers

SAMPLERS = {
    "ball": lambda k, n: jax.random.ball(k, WIDTH, shape=(n,)),
    "bernoulli": lambda k, n: jax.random.bernoulli(k, 0.7, (n, WIDTH)),
    "beta": lambda k, n: jax.random.beta(k, 2.0, 3.0, (n, WIDTH)),
    "binomial": lambda k, n: jax.random.binomial(k, 5, 0.5, (n, WIDTH)),
    "bits": lambda k, n: jax.random.bits(k, (n, WIDTH)) % 7,
    "categorical": lambda k, n: jax.random.categorical(k, jnp.zeros((n, WIDTH, 3))),
    "cauchy": lambda k, n: jnp.tanh(jax.random.cauchy(k, (n, WIDTH))),
    "chisquare": lambda k, n: jax.random.chisquare(k, 3.0, shape=(n, WIDTH)),
    "choice": lambda k, n: jax.random.choice(k, jnp.arange(5.0), (n, WIDTH)),
    "dirichlet": lambda k, n: jax.random.dirichlet(k, jnp.ones(WIDTH), (n,)),
    "double_sided_maxwell": lambda k, n: jax.random.double_sided_maxwell(
        k, 0.0, 1.0, (n, WIDTH)
    ),
    "exponential": lambda k, n: jax.random.exponential(k, (n, WIDTH)),
    "f": lambda k, n: jnp.tanh(jax.random.f(k, 3.0, 4.0, (n, WIDTH))),
    "gamma": lambda k, n: jax.random.gamma(k, 2.0, (n, WIDTH)),
    "generalized_normal": lambda k, n: jax.random.generalized_normal(
        k, 1.5, (n, WIDTH)
    ),
    "geometric": lambda k, n: jax.random.geometric(k, 0.5, (n, WIDTH)),
    "gumbel": lambda k, n: jax.random.gumbel(k, (n, WIDTH)),
    "laplace": lambda k, n: jax.random.laplace(k, (n, WIDTH)),
    "loggamma": lambda k, n: jax.random.loggamma(k, 2.0, (n, WIDTH)),
    "logistic": lambda k, n: jax.random.logistic(k, (n, WIDTH)),
    "lognormal": lambda k, n: jnp.tanh(jax.random.lognormal(k, shape=(n, WIDTH))),
    "maxwell": lambda k, n: jax.random.maxwell(k, (n, WIDTH)),
    "multinomial": lambda k, n: jax.random.multinomial(
        k, jnp.full((n,), 5.0), jnp.full((n, WIDTH), 1 / WIDTH)
    ),
    "multivariate_normal": lambda k, n: jax.random.multivariate_normal(
        k, jnp.zeros(WIDTH), jnp.eye(WIDTH), (n,)
    ),
    "normal": lambda k, n: jax.random.normal(k, (n, WIDTH)),
    "orthogonal": lambda k, n: jax.random.orthogonal(k, WIDTH, (n,))[:, 0],
    "pareto": lambda k, n: jnp.tanh(jax.random.pareto(k, 3.0, (n, WIDTH))),
    "permutation of columns": lambda k, n: (
        jnp.ones((n, 1)) * jax.random.permutation(k, WIDTH)
    ),
    "permutation of rows": lambda k, n: jax.random.permutation(
        k, jnp.arange(n, dtype=jnp.float32)
    )[:, None],
    "poisson": lambda k, n: jax.random.poisson(k, 3.0, (n, WIDTH)),
    "rademacher": lambda k, n: jax.random.rademacher(k, (n, WIDTH)),
    "randint": lambda k, n: jax.random.randint(k, (n, WIDTH), 0, 9),
    "rayleigh": lambda k, n: jax.random.rayleigh(k, 1.0, (n, WIDTH)),
    "t": lambda k, n: jnp.tanh(jax.random.t(k, 4.0, (n, WIDTH))),
    "triangular": lambda k, n: jax.random.triangular(k, 0.0, 0.5, 1.0, (n, WIDTH)),
    "truncated_normal": lambda k, n: jax.random.truncated_normal(
        k, -1.0, 1.0, (n, WIDTH)
    ),
    "uniform": lambda k, n: jax.random.uniform(k, (n, WIDTH)),
    "wald": lambda k, n: jax.random.wald(k, 1.0, (n, WIDTH)),
    "weibull_min": lambda k, n: jax.random.weibull_min(k, 1.0, 2.0, (n, WIDTH)),
    "vmap of fold_in": lambda k, n: jax.vmap(
        lambda i: jax.random.normal(jax.random.fold_in(k, i), (WIDTH,))
    )(jnp.arange(n)),
    "a key for each row": lambda k, n: jax.vmap(
        lambda key: jax.random.uniform(key, (WIDTH,))
    )(jax.random.split(k, n)),
}


def features() -> Iterator[Feature]:
    """The features of this module."""
    for name, draw in SAMPLERS.items():
        yield Feature(f"random: {name}", _step(draw), _state, (X, Y))
    for kind in ("rbg", "unsafe_rbg"):
        yield Feature(f"random: {kind}", _step(SAMPLERS["normal"]), _of(kind), (X, Y))
    raw = lambda: (layers(), jax.random.PRNGKey(3))  # noqa: E731
    yield Feature("random: raw key", _step(SAMPLERS["normal"]), raw, (X, Y))


def _state() -> Any:
    return layers(), jax.random.key(3)


def _of(kind: str) -> Any:
    return lambda: (layers(), jax.random.key(3, impl=kind))


def _step(draw: Any) -> Any:
    def loss(weights: Any, key: Any, x: Any, y: Any) -> Any:
        for k, w in enumerate(weights):
            x = jnp.tanh(x @ w)
            if k == 1:
                drawn = jax.lax.stop_gradient(draw(key, x.shape[0]))
                x = x + 0.1 * drawn.astype(x.dtype).reshape(x.shape[0], -1)
        return jnp.mean((x - y) ** 2)

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, key = state
        key, own = jax.random.split(key)
        value, gradient = jax.value_and_grad(loss)(weights, own, x, y)
        weights = jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradient)
        return (weights, key), {"loss": value}

    return step
