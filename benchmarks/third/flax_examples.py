"""The train steps of google/flax's ``examples/``, run on random data.

Each function imports an example from a checkout. It builds the state with the example's
own classes, and with its own configuration or a small one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import Case, Size
from flax import nnx
from flax.training import train_state

# The change that a user makes to a step that was written for ``jax.pmap``.
PMAPPED = "no `jax.pmap` around it: whole state, whole batch"


def returns_state(arguments: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Makes the loop around ``state, metrics = train_step(state, ...)``.

    Args:
      arguments: ``(state, number)`` -> the positional and the keyword arguments of a
        call.
    """

    def call(step: Any, state: Any, number: int) -> tuple[Any, Any]:
        args, kwargs = arguments(state, number)
        return step(*args, **kwargs)

    return call


def one_replica(step: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """What ``jax.pmap(step, axis_name="batch")`` computes on one device."""
    mapped = jax.jit(jax.vmap(functools.partial(step, **static), axis_name="batch"))

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(lambda x: jnp.asarray(x)[None], (args, kwargs))
        return jax.tree.map(lambda x: x[0], mapped(*args, **kwargs))

    return run


def mnist(size: Size) -> Case:
    """An NNX convolutional network with batch norm, dropout and metrics."""
    train = importlib.import_module("train")
    config = importlib.import_module("configs.default").get_config()
    rows = size.of(16, config.batch_size)

    def state() -> Any:
        model = train.CNN(rngs=nnx.Rngs(0))
        sgd = optax.sgd(config.learning_rate, config.momentum)
        optimizer = nnx.Optimizer(model, sgd, wrt=nnx.Param)
        metrics = nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
        )
        model.train()
        return model, optimizer, metrics, nnx.Rngs(0)

    def call(step: Any, state: Any, number: int) -> tuple[Any, Any]:
        model, optimizer, metrics, rngs = state
        batch = {
            "image": size.uniform(number, rows, 28, 28, 1),
            "label": size.integers(number, 0, 10, rows),
        }
        out = step(model, optimizer, metrics, batch, rngs)
        return state, (out, metrics.compute())

    return Case(train.train_step, train.train_step, state, call)


def vae(size: Size) -> Case:
    """A Linen autoencoder; the step takes the number of latents as a plain int."""
    train = importlib.import_module("train")
    config = importlib.import_module("configs.default").get_config()
    rows = size.of(16, config.batch_size)
    model = train.models.model(config.latents)

    def state() -> Any:
        images = jnp.ones((rows, 784), jnp.float32)
        params = model.init(jax.random.key(0), images, jax.random.key(1))["params"]
        return train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adam(config.learning_rate)
        )

    def call(step: Any, state: Any, number: int) -> tuple[Any, Any]:
        images = size.uniform(number, rows, 784)
        state = step(state, images, jax.random.key(number), config.latents)
        return state, None

    return Case(
        train.train_step,
        jax.jit(train.train_step, static_argnames="latents"),
        state,
        call,
        changed='`static_argnames=("latents",)`: `latents` is an int that sets shapes',
        options={"static_argnames": ("latents",)},
    )


def sst2(size: Size) -> Case:
    """A Linen LSTM over texts, with dropout."""
    train = importlib.import_module("train")
    config = importlib.import_module("configs.default").get_config()
    config.vocab_size = size.of(100, 14_816)
    config.embedding_size = size.of(16, config.embedding_size)
    config.hidden_size = size.of(32, config.hidden_size)
    rows, length = size.of(16, config.batch_size), size.of(8, config.max_input_length)
    model = train.model_from_config(config)

    def arguments(state: Any, number: int) -> Any:
        batch = {
            "token_ids": size.integers(number, 2, config.vocab_size, rows, length),
            "length": size.integers(number, 1, length, rows),
            "label": size.integers(number, 0, 2, rows),
        }
        return (state, batch, {"dropout": jax.random.key(1)}), {}

    return Case(
        train.train_step,
        jax.jit(train.train_step),
        lambda: train.create_train_state(jax.random.key(0), config, model),
        returns_state(arguments),
    )


def seq2seq(size: Size) -> Case:
    """A Linen LSTM encoder and decoder that samples in a scan."""
    train = importlib.import_module("train")
    hidden = size.of(32, 512)
    train.FLAGS(["seq2seq", f"--hidden_size={hidden}"])
    rows = size.of(16, train.FLAGS.batch_size)
    table = train.CTable("0123456789+= ", train.FLAGS.max_len_query_digit)

    def arguments(state: Any, number: int) -> Any:
        rng = np.random.default_rng(number)
        pairs = [sorted(rng.integers(0, 99, 2).tolist()) for _ in range(rows)]
        batch = {
            "query": table.encode_onehot([f"{a}+{b}" for a, b in pairs]),
            "answer": table.encode_onehot([f"={a + b}" for a, b in pairs]),
        }
        return (state, batch, jax.random.key(0), table.eos_id), {}

    return Case(
        train.train_step,
        train.train_step,
        lambda: train.get_train_state(jax.random.key(0), table),
        returns_state(arguments),
    )


def ogbg_molpcba(size: Size) -> Case:
    """A graph network over padded batches of molecules; the example itself jits the
    step.
    """
    train = importlib.import_module("train")
    config = importlib.import_module("configs.default").get_config()
    config.latent_size = size.of(16, config.latent_size)
    config.message_passing_steps = size.of(2, config.message_passing_steps)
    graphs, nodes, edges = size.of((16, 128, 256), (256, 6592, 20928))

    def batch(number: int) -> Any:
        spread = np.full(graphs - 1, nodes // graphs, np.int32)
        links = np.full(graphs - 1, edges // graphs, np.int32)
        return train.jraph.GraphsTuple(
            nodes=size.normal(number, nodes, 9),
            edges=size.normal(number, edges, 3),
            senders=size.integers(number, 0, nodes, edges),
            receivers=size.integers(number + 1, 0, nodes, edges),
            # The last graph is padding, as the example's own pipeline makes it.
            n_node=np.append(spread, nodes - spread.sum()).astype(np.int32),
            n_edge=np.append(links, edges - links.sum()).astype(np.int32),
            globals=size.flags(number, graphs, config.num_classes),
        )

    def state() -> Any:
        example = train.replace_globals(jax.tree.map(_zeros, batch(0)))
        net = train.create_model(config, deterministic=True)
        params = net.init(jax.random.key(0), example)
        return train_state.TrainState.create(
            apply_fn=train.create_model(config, deterministic=False).apply,
            params=params,
            tx=train.create_optimizer(config),
        )

    def arguments(state: Any, number: int) -> Any:
        return (state, batch(number)), {"rngs": {"dropout": jax.random.key(number)}}

    return Case(train.train_step, train.train_step, state, returns_state(arguments))


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype)


def ppo(size: Size) -> Case:
    """An epoch of reinforcement learning over minibatches; the batch size is static."""
    train = importlib.import_module("ppo_lib")
    config = importlib.import_module("configs.default").get_config()
    config.batch_size = size.of(16, config.batch_size)
    rows = size.of(32, config.num_agents * config.actor_steps)
    model = train.models.ActorCritic(num_outputs=6)

    def state() -> Any:
        params = train.get_initial_params(jax.random.key(0), model)
        return train.create_train_state(params, model, config, 1000)

    def arguments(state: Any, number: int) -> Any:
        screens = size.uniform(number, rows, 84, 84, 4)
        trajectories = (
            screens if size.full else 255 * screens,
            size.integers(number, 0, 6, rows),
            size.normal(number + 1, rows),
            size.normal(number + 2, rows),
            size.normal(number + 3, rows),
        )
        named = {
            "clip_param": config.clip_param,
            "vf_coeff": config.vf_coeff,
            "entropy_coeff": config.entropy_coeff,
        }
        return (state, trajectories, config.batch_size), named

    return Case(train.train_step, train.train_step, state, returns_state(arguments))


def _batch_shape(size: Size, config: Any) -> tuple[int, int]:
    """The number of rows of a batch of texts, and their length."""
    rows = size.of(16, size.devices * config.per_device_batch_size)
    return rows, size.of(16, config.max_target_length)


def _transformer(size: Size, config: Any) -> dict[str, Any]:
    """The options that the transformers of lm1b and of wmt share."""
    vocabulary = size.of(64, config.vocab_size)
    small = {
        "emb_dim": 32,
        "num_heads": 4,
        "num_layers": 2,
        "qkv_dim": 32,
        "mlp_dim": 64,
    }
    return {
        "vocab_size": vocabulary,
        "output_vocab_size": vocabulary,
        "logits_via_embedding": config.logits_via_embedding,
        "dtype": size.of(jnp.float32, jnp.bfloat16),
        **{
            name: size.of(value, getattr(config, name)) for name, value in small.items()
        },
    }


def lm1b(size: Size) -> Case:
    """A Linen language model; the example jits it with shardings and static arguments.

    Here the step is jitted without the shardings of the example's mesh.
    """
    train = importlib.import_module("train")
    config = importlib.import_module("configs.default").get_config()
    rows, length = _batch_shape(size, config)
    model = train.models.TransformerConfig(
        **_transformer(size, config),
        max_len=size.of(16, config.max_eval_target_length),
    )
    rate = train.create_learning_rate_schedule(config.learning_rate, size.of(2, 1000))
    tx = train.optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    config.per_device_batch_size, config.max_target_length = rows, length

    def state() -> Any:
        module = train.models.TransformerLM(model.replace(deterministic=True))
        boxed = train.utils.init_train_state(module, tx, config, jax.random.PRNGKey(0))
        return train.utils.unbox_logicallypartioned_trainstate(boxed)

    def arguments(state: Any, number: int) -> Any:
        batch = {"inputs": size.integers(number, 0, model.vocab_size, rows, length)}
        return (state, batch, model, rate, 0.0, jax.random.PRNGKey(1)), {}

    jitted = jax.jit(train.train_step, static_argnums=(2, 3, 4), donate_argnums=0)
    changed = "`jax.jit` without the shardings of its own mesh"
    return Case(jitted, jitted, state, returns_state(arguments), changed)


def wmt(size: Size) -> Case:
    """A Linen encoder and decoder, written for ``jax.pmap``."""
    train = importlib.import_module("train")
    config = importlib.import_module("configs.default").get_config()
    rows, length = _batch_shape(size, config)
    model = train.models.TransformerConfig(
        **_transformer(size, config),
        share_embeddings=config.share_embeddings,
        max_len=length,
    )
    rate = train.create_learning_rate_schedule(config.learning_rate, size.of(2, 1000))

    def state() -> Any:
        module = train.models.Transformer(model.replace(deterministic=True))
        ones = jnp.ones((rows, length), jnp.float32)
        return train.TrainState.create(
            apply_fn=module.apply,
            params=module.init(jax.random.key(0), ones, ones)["params"],
            tx=optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.0),
            dynamic_scale=None,
        )

    def arguments(state: Any, number: int) -> Any:
        batch = {
            "inputs": size.integers(number, 0, model.vocab_size, rows, length),
            "targets": size.integers(number + 1, 0, model.vocab_size, rows, length),
        }
        return (state, batch), {"dropout_rng": jax.random.key(1)}

    step = functools.partial(
        train.train_step,
        config=model,
        learning_rate_fn=rate,
        label_smoothing=config.label_smoothing,
    )
    return Case(step, one_replica(step), state, returns_state(arguments), PMAPPED)


def nlp_seq(size: Size) -> Case:
    """A Linen tagger, written for ``jax.pmap``."""
    train = importlib.import_module("train")
    model = train.models.TransformerConfig(
        vocab_size=size.of(64, 20_000),
        output_vocab_size=size.of(16, 50),
        emb_dim=size.of(32, 512),
        num_heads=size.of(4, 8),
        num_layers=size.of(2, 6),
        qkv_dim=size.of(32, 512),
        mlp_dim=size.of(64, 2048),
        max_len=size.of(16, 256),
    )
    rows, length = size.of(16, 64), model.max_len
    module = train.models.Transformer(model)
    rate = train.create_learning_rate_scheduler(base_learning_rate=0.05)

    def state() -> Any:
        ones = jnp.ones((length, 1), jnp.float32)
        return train_state.TrainState.create(
            apply_fn=module.apply,
            params=module.init(jax.random.key(0), inputs=ones, train=False)["params"],
            tx=optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=1e-1),
        )

    def arguments(state: Any, number: int) -> Any:
        batch = {
            "inputs": size.integers(number, 0, model.vocab_size, rows, length),
            "targets": size.integers(
                number + 1, 0, model.output_vocab_size, rows, length
            ),
        }
        return (state, batch), {"dropout_rng": jax.random.key(1)}

    step = functools.partial(train.train_step, model=module, learning_rate_fn=rate)
    return Case(step, one_replica(step), state, returns_state(arguments), PMAPPED)


def imagenet(size: Size) -> Case:
    """A ResNet with batch norm, written for ``jax.pmap``."""
    train = importlib.import_module("train")
    config = importlib.import_module("configs.default").get_config()
    rows, pixels = size.of(8, config.batch_size), size.of(32, 224)
    model_cls = getattr(train.models, size.of("_ResNet1", config.model))
    model = train.create_model(model_cls=model_cls, half_precision=False)
    rate = train.create_learning_rate_fn(config, config.learning_rate, size.of(2, 1000))
    step = functools.partial(train.train_step, learning_rate_fn=rate)

    def arguments(state: Any, number: int) -> Any:
        batch = {
            "image": size.normal(number, rows, pixels, pixels, 3),
            "label": size.integers(number, 0, 1000, rows),
        }
        return (state, batch), {}

    return Case(
        step,
        one_replica(step),
        lambda: train.create_train_state(
            jax.random.key(0), config, model, pixels, rate
        ),
        returns_state(arguments),
        PMAPPED,
    )


def gemma(size: Size) -> Case:
    """An NNX Gemma with metrics, as the example runs it with ``nnx.jit``."""
    train = importlib.import_module("train")
    transformer = train.transformer_lib
    vocabulary = size.of(64, 35_008)
    rows, length = size.of(8, size.devices * 32), size.of(16, 128)
    if size.full:
        config = transformer.TransformerConfig.from_version_name(
            "gemma3_270m", num_embed=vocabulary, dtype=jnp.bfloat16
        )
    else:
        tiny = importlib.import_module("configs.tiny").get_config()
        small = {"embed_dim": 32, "hidden_dim": 64, "head_dim": 16, "num_layers": 2}
        config = transformer.TransformerConfig.from_dict(
            **(tiny.transformer_params | small), num_embed=vocabulary
        )
    rate = train.create_learning_rate_schedule(0.0016, size.of(2, 1000))

    def state() -> Any:
        rngs = nnx.Rngs(params=0, dropout=0)
        model = transformer.Transformer(config, rngs=rngs)
        tx = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
        metrics = nnx.MultiMetric(
            loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
        )
        return model, nnx.Optimizer(model, tx=tx, wrt=nnx.Param), rngs, metrics

    def call(step: Any, state: Any, number: int) -> tuple[Any, Any]:
        model, optimizer, rngs, metrics = state
        tokens = size.integers(number, 0, vocabulary, rows, length)
        batch = {
            "inputs": tokens,
            "inputs_position": size.integers(number, 0, length, rows, length),
            "inputs_segmentation": size.integers(number, 1, 2, rows, length),
            "targets": tokens,
        }
        out = step(model, optimizer, rngs, batch, metrics, 0.0, 0)
        return state, (out, metrics.compute())

    step = nnx.jit(
        functools.partial(train.nnx_train_step, with_capture=False),
        static_argnames=("label_smoothing", "pad_id"),
        donate_argnames=("model", "optimizer"),
    )
    return Case(step, step, state, call)


CASES: dict[str, Callable[[Size], Case]] = {
    f.__name__: f
    for f in (
        mnist,
        vae,
        sst2,
        seq2seq,
        ogbg_molpcba,
        ppo,
        lm1b,
        gemma,
        imagenet,
        wmt,
        nlp_seq,
    )
}
