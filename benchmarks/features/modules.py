"""Features: models of Flax NNX, Flax Linen and Equinox, and in plain containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from feature import WIDTH, Feature, X, Y, layers, loss_of
from flax import linen, nnx
from flax.training import train_state


def features() -> Iterator[Feature]:
    """The features of this module."""
    yield Feature("model: nnx", _nnx_step, _nnx(0.0), (X, Y), objects=True)
    yield Feature("model: nnx dropout", _nnx_step, _nnx(0.3), (X, Y), objects=True)
    yield Feature("model: linen", _linen_step, _linen, (X, Y))
    for name, make in NETS.items():
        state = _objects(make)
        yield Feature(f"model: nnx {name}", _nnx_step, state, (X, Y), objects=True)
    yield Feature("model: nnx metrics", _metric_step, _metrics, (X, Y), objects=True)
    yield Feature("model: nnx split and merge", _merged, _split, (X, Y))
    yield Feature("model: nnx lora", _lora_step, _lora, (X, Y), objects=True)
    yield Feature("model: linen batch norm", _normed_step, _normed, (X, Y))
    yield Feature("model: linen scan", _scanned_step, _scanned, (X, Y))
    yield Feature("model: dict of dicts", _dict_step, _dict, (X, Y))
    yield Feature("model: dataclass", _dataclass_step, _dataclass, (X, Y))
    try:
        import equinox
    except ImportError:
        return
    yield _equinox_feature(equinox)


class Net(nnx.Module):
    """Four layers with dropout and normalisation."""

    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        """Makes the layers."""
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Runs them."""
        for layer in self.layers:
            x = self.dropout(jnp.tanh(layer(self.norm(x))))
        return x


def _nnx(rate: float) -> Any:
    def state() -> Any:
        model = Net(rate, nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    return state


def _nnx_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return {"loss": value}


class Dense(linen.Module):
    """Four layers."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Runs them."""
        for _ in range(4):
            x = jnp.tanh(linen.Dense(WIDTH)(linen.LayerNorm()(x)))
        return x


def _linen() -> Any:
    model = Dense()
    params = model.init(jax.random.key(0), X)["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(1e-2)
    )


def _linen_step(state: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), {"loss": value}


def _dict() -> Any:
    return {"a": {"w": layers(2)}, "b": {"w": layers(2), "none": None}}


def _dict_step(state: Any, x: Any, y: Any) -> Any:
    def loss(state: Any) -> Any:
        return loss_of([*state["a"]["w"], *state["b"]["w"]], x, y)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), {"loss": value}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    """Weights, and a static number."""

    arrays: list[Any]
    rate: float = dataclasses.field(metadata={"static": True})


def _dataclass() -> Any:
    return Weights(layers(), 0.1)


def _dataclass_step(state: Any, x: Any, y: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda s: loss_of(s.arrays, x, y))(state)
    made = jax.tree.map(lambda p, g: p - state.rate * g, state, gradient)
    return made, {"loss": value}


def _equinox_feature(equinox: Any) -> Feature:
    def state() -> Any:
        return equinox.nn.MLP(WIDTH, WIDTH, WIDTH, 3, key=jax.random.key(0))

    def step(model: Any, x: Any, y: Any) -> Any:
        def loss(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradient = equinox.filter_value_and_grad(loss)(model)
        updates = jax.tree.map(lambda g: -0.1 * g, gradient)
        return equinox.apply_updates(model, updates), {"loss": value}

    return Feature("model: equinox", step, state, (X, Y))


class Normed(nnx.Module):
    """Layers with a normalisation over the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Makes the layers."""
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Runs them."""
        for k, layer in enumerate(self.layers):
            x = jnp.tanh(layer(x))
            x = self.norm(x) if k == 1 else x
        return x


class Repeated(nnx.Module):
    """Stacked weights of several layers, and a rematerialised loop over them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Makes the stack."""

        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Any:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layer = make(rngs)

    def __call__(self, x: Any) -> Any:
        """Runs the stack."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: Any, layer: Any) -> Any:
            return jnp.tanh(layer(x))

        return run(x, self.layer)


class Recurrent(nnx.Module):
    """An LSTM over the columns."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Makes the cell and the head."""
        self.run = nnx.RNN(nnx.OptimizedLSTMCell(2, WIDTH, rngs=rngs))
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Runs them."""
        return self.head(self.run(x.reshape(x.shape[0], -1, 2))[:, -1])


class Attention(nnx.Module):
    """Attention with dropout, and layers with group normalisation."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Makes the layers."""
        self.attend = nnx.MultiHeadAttention(
            2,
            2,
            dropout_rate=0.2,
            use_bias=False,  # of keys, it has no gradient but rounding
            decode=False,
            deterministic=False,
            rngs=rngs,
        )
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.GroupNorm(WIDTH, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Runs them."""
        y = self.attend(x.reshape(x.shape[0], -1, 2)).reshape(x.shape)
        for layer in self.layers:
            y = jnp.tanh(layer(self.norm(y)))
        return y


NETS = {
    "batch norm": Normed,
    "scan of remat": Repeated,
    "lstm": Recurrent,
    "attention": Attention,
}


def _objects(make: Any) -> Any:
    def state() -> Any:
        model = make(nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    return state


def _metrics() -> Any:
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return *_nnx(0.0)(), metrics


def _metric_step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> Any:
    made = _nnx_step(model, optimizer, x, y)
    metrics.update(loss=made["loss"])
    return metrics.compute()


_GRAPH, _ = nnx.split(Net(0.3, nnx.Rngs(0, dropout=1)))


def _split() -> Any:
    _, params, rest = nnx.split(Net(0.3, nnx.Rngs(0, dropout=1)), nnx.Param, ...)
    return params, rest


def _merged(state: Any, x: Any, y: Any) -> Any:
    params, rest = state

    def loss(params: Any) -> Any:
        model = nnx.merge(_GRAPH, params, rest, copy=True)
        value = jnp.mean((model(x) - y) ** 2)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    (value, rest), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    return (params, rest), {"loss": value}


def _lora() -> Any:
    class Adapted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List(
                [nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs) for _ in "1234"]
            )

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    model = Adapted(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)


def _lora_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    only = nnx.DiffState(0, nnx.LoRAParam)
    value, gradient = nnx.value_and_grad(loss, argnums=only)(model)
    optimizer.update(model, gradient)
    return {"loss": value}


class LinenNormed(linen.Module):
    """Layers with a normalisation over the batch, and dropout."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Runs them."""
        for _ in range(4):
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(WIDTH)(x))
            x = linen.Dropout(0.2, deterministic=False)(jnp.tanh(x))
        return x


def _normed() -> Any:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    made = LinenNormed().init(keys, X)
    return made, jax.random.key(2)


def _normed_step(state: Any, x: Any, y: Any) -> Any:
    variables, key = state
    key, own = jax.random.split(key)

    def loss(params: Any) -> Any:
        out, made = LinenNormed().apply(
            {**variables, "params": params},
            x,
            rngs={"dropout": own},
            mutable=["batch_stats"],
        )
        return jnp.mean((out - y) ** 2), made

    (value, made), gradient = jax.value_and_grad(loss, has_aux=True)(
        variables["params"]
    )
    params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradient)
    return ({"params": params, **made}, key), {"loss": value}


class Scanned(linen.Module):
    """A loop over stacked layers that sow auxiliary losses."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Runs it."""

        class Block(linen.Module):
            @linen.compact
            def __call__(self, x: Any, _: Any) -> Any:
                x = jnp.tanh(linen.Dense(WIDTH)(x))
                self.sow("aux", "size", jnp.mean(x**2))
                return x, None

        scan = linen.scan(
            linen.remat(Block),
            variable_axes={"params": 0, "aux": 0},
            split_rngs={"params": True},
            length=4,
        )
        return scan()(x, None)[0]


def _scanned() -> Any:
    return Scanned().init(jax.random.key(0), X)["params"]


def _scanned_step(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        out, made = Scanned().apply({"params": params}, x, mutable=["aux"])
        return jnp.mean((out - y) ** 2) + 0.1 * sum(
            jnp.sum(v) for v in jax.tree.leaves(made)
        )

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), {"loss": value}
