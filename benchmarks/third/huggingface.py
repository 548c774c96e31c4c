"""Flax models of HuggingFace transformers 4, with the train steps of its scripts.

The scripts are ``examples/flax/*/run_*_flax.py``. Their steps are functions within
``main`` and cannot be imported, so they are repeated here. All steps are written for
``jax.pmap(step, "batch")``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from cases import Case, Size
from flax.training import train_state
from flax.training.common_utils import onehot
from flax_examples import PMAPPED, one_replica, returns_state

# The project does not depend on transformers. These rows run in a separate interpreter,
# which has it.
transformers: Any = importlib.import_module("transformers")


class TrainState(train_state.TrainState):
    """A train state with a random key for dropout, as in most of the scripts."""

    dropout_rng: jax.Array


def _mean_loss(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])).mean()


def _shifted_loss(logits: Any, labels: Any) -> Any:
    return _mean_loss(logits[..., :-1, :], labels[..., 1:])


def mean_step(loss_fn: Callable[..., Any], rate: Callable[..., Any]) -> Any:
    """The step of run_clm_flax.py and run_image_classification_flax.py."""

    def train_step(state: Any, batch: Any) -> Any:
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params: Any) -> Any:
            labels = batch.pop("labels")
            logits = state.apply_fn(
                **batch, params=params, dropout_rng=dropout_rng, train=True
            )[0]
            return loss_fn(logits, labels)

        grad_fn = jax.value_and_grad(compute_loss)
        loss, grad = grad_fn(state.params)
        grad = jax.lax.pmean(grad, "batch")
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        metrics = {"loss": loss, "learning_rate": rate(state.step)}
        metrics = jax.lax.pmean(metrics, axis_name="batch")
        return new_state, metrics

    return train_step


def masked_step(rate: Callable[..., Any]) -> Any:
    """The step of run_mlm_flax.py, which sums losses and returns a random key."""

    def train_step(state: Any, batch: Any, dropout_rng: Any) -> Any:
        dropout_rng, new_dropout_rng = jax.random.split(dropout_rng)

        def loss_fn(params: Any) -> Any:
            labels = batch.pop("labels")
            logits = state.apply_fn(
                **batch, params=params, dropout_rng=dropout_rng, train=True
            )[0]
            label_mask = jnp.where(labels > 0, 1.0, 0.0)
            wide = onehot(labels, logits.shape[-1])
            loss = optax.softmax_cross_entropy(logits, wide) * label_mask
            return loss.sum(), label_mask.sum()

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, num_labels), grad = grad_fn(state.params)
        num_labels = jax.lax.psum(num_labels, "batch")
        loss = jax.lax.psum(loss, "batch")
        loss = jax.tree_util.tree_map(lambda x: x / num_labels, loss)
        grad = jax.lax.psum(grad, "batch")
        grad = jax.tree_util.tree_map(lambda x: x / num_labels, grad)
        new_state = state.apply_gradients(grads=grad)
        metrics = {"loss": loss, "learning_rate": rate(state.step)}
        return new_state, metrics, new_dropout_rng

    return train_step


def smoothed_step(rate: Callable[..., Any]) -> Any:
    """The step of run_flax_speech_recognition_seq2seq.py."""

    def loss_fn(logits: Any, labels: Any, label_smoothing_factor: float) -> Any:
        vocab_size = logits.shape[-1]
        confidence = 1.0 - label_smoothing_factor
        low_confidence = (1.0 - confidence) / (vocab_size - 1)
        normalizing_constant = -(
            confidence * jnp.log(confidence)
            + (vocab_size - 1) * low_confidence * jnp.log(low_confidence + 1e-20)
        )
        soft_labels = onehot(
            labels, vocab_size, on_value=confidence, off_value=low_confidence
        )
        loss = optax.softmax_cross_entropy(logits, soft_labels) - normalizing_constant
        padding_mask = labels >= 0
        loss = loss * padding_mask
        return loss.sum(), padding_mask.sum()

    def train_step(state: Any, batch: Any, label_smoothing_factor: float = 0.0) -> Any:
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params: Any) -> Any:
            labels = batch.pop("labels")
            logits = state.apply_fn(
                **batch,
                params=params,
                dropout_rng=dropout_rng,
                train=True,
            )[0]
            return loss_fn(logits, labels, label_smoothing_factor)

        grad_fn = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, num_labels), grad = grad_fn(state.params)
        num_labels = jax.lax.psum(num_labels, "batch")
        loss = jax.lax.psum(loss, "batch")
        loss = jax.tree_util.tree_map(lambda x: x / num_labels, loss)
        grad = jax.lax.psum(grad, "batch")
        grad = jax.tree_util.tree_map(lambda x: x / num_labels, grad)
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        metrics = {"loss": loss, "learning_rate": rate(state.step)}
        return new_state, metrics

    return train_step


RATE = optax.join_schedules(
    [optax.linear_schedule(0.0, 1e-3, 2), optax.linear_schedule(1e-3, 0.0, 1000)], [2]
)


def _decay_mask(params: Any) -> Any:
    """Marks kernels, to which alone weight decay applies."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )


TX = optax.adamw(RATE, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, mask=_decay_mask)


def _state(model: Any, *, keyed: bool = True) -> Callable[[], Any]:
    def make() -> Any:
        key = jax.random.PRNGKey(0)
        params = model.init_weights(key, model.input_shape)
        kind = TrainState if keyed else train_state.TrainState
        named = {"dropout_rng": jax.random.PRNGKey(1)} if keyed else {}
        return kind.create(apply_fn=model.__call__, params=params, tx=TX, **named)

    return make


def _case(step: Any, model: Any, batch: Callable[[int], Any], **named: Any) -> Case:
    def arguments(state: Any, number: int) -> Any:
        return (state, batch(number)), {}

    step = functools.partial(step, **named) if named else step
    return Case(
        step, one_replica(step), _state(model), returns_state(arguments), PMAPPED
    )


# The options of a small transformer, and of a small one for texts.
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_SMALL_TEXT = {**_SMALL, "vocab_size": 64, "max_position_embeddings": 16}


def _texts(size: Size, number: int, config: Any, *shape: int) -> dict[str, Any]:
    """A batch of texts, (rows, length), with the words to predict."""
    tokens = size.integers(number, 0, config.vocab_size, *shape)
    return {
        "input_ids": tokens,
        "attention_mask": size.integers(number, 1, 2, *shape),
        "labels": tokens,
    }


def _language_model(size: Size, model: Any, *shape: int) -> Case:
    """A model of the next word, with the step of run_clm_flax.py."""

    def batch(number: int) -> Any:
        return _texts(size, number, model.config, *shape)

    return _case(mean_step(_shifted_loss, RATE), model, batch)


def gpt2(size: Size) -> Case:
    """GPT-2 with the step of run_clm_flax.py."""
    tiny = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 64,
        "n_positions": 16,
    }
    config = transformers.GPT2Config(**size.of(tiny, {}))
    model = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)
    return _language_model(size, model, *size.of((16, 16), (8 * size.devices, 1024)))


def llama(size: Size) -> Case:
    """Llama (7B) with the step of run_clm_flax.py."""
    tiny = {**_SMALL_TEXT, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**size.of(tiny, {}))
    model = transformers.FlaxLlamaForCausalLM(config, _do_init=False)
    return _language_model(size, model, *size.of((16, 16), (size.devices, 1024)))


def bert(size: Size) -> Case:
    """BERT with the step of run_mlm_flax.py."""
    config = transformers.BertConfig(**size.of(_SMALL_TEXT, {}))
    model = transformers.FlaxBertForMaskedLM(config, _do_init=False)
    shape = size.of((16, 16), (512, 128))
    step = masked_step(RATE)

    def call(step: Any, state: Any, number: int) -> tuple[Any, Any]:
        state, key = state
        batch = _texts(size, number, config, *shape)
        batch["token_type_ids"] = size.integers(number, 0, 1, *shape)
        state, metrics, key = step(state, batch, key)
        return (state, key), metrics

    make = _state(model, keyed=False)
    return Case(
        step, one_replica(step), lambda: (make(), jax.random.PRNGKey(1)), call, PMAPPED
    )


def vit(size: Size) -> Case:
    """ViT with the step of run_image_classification_flax.py."""
    tiny = {**_SMALL, "image_size": 16, "patch_size": 4, "num_labels": 10}
    config = transformers.ViTConfig(**size.of(tiny, {"num_labels": 1000}))
    model = transformers.FlaxViTForImageClassification(config, _do_init=False)
    rows, pixels = size.of(16, 512), config.image_size

    def batch(number: int) -> Any:
        return {
            "pixel_values": size.normal(number, rows, 3, pixels, pixels),
            "labels": size.integers(number, 0, config.num_labels, rows),
        }

    return _case(mean_step(_mean_loss, RATE), model, batch)


def whisper(size: Size) -> Case:
    """Whisper with the step of run_flax_speech_recognition_seq2seq.py."""
    tiny = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 64,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    config = transformers.WhisperConfig(**size.of(tiny, {}))
    model = transformers.FlaxWhisperForConditionalGeneration(config, _do_init=False)
    rows, length = size.of((16, 8), (256, 128))
    frames = 2 * config.max_source_positions

    def batch(number: int) -> Any:
        tokens = size.integers(number, 3, config.vocab_size, rows, length)
        return {
            "input_features": size.normal(number, rows, config.num_mel_bins, frames),
            "decoder_input_ids": tokens,
            "labels": tokens,
        }

    return _case(smoothed_step(RATE), model, batch, label_smoothing_factor=0.1)


CASES: dict[str, Callable[[Size], Case]] = {
    f.__name__: f for f in (gpt2, bert, vit, whisper, llama)
}
