"""Train steps of many kinds on abstract arrays, for `memory.py`.

Each function returns a step and its arguments. Parameters are float32 unless they are
frozen, and are cast where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decoder
import jax
import jax.numpy as jnp
import optax
import unet
import workloads

Made = tuple[Callable[..., Any], tuple[Any, ...]]
Struct = jax.ShapeDtypeStruct


def training(
    loss_of: Callable[..., jax.Array],
    params: Any,
    *beside: Any,
    optimizer: optax.GradientTransformation | None = None,
) -> Made:
    """A step that trains parameters with a loss; by default with AdamW."""
    update = optimizer or optax.adamw(1e-4)

    def step(params: Any, moments: Any, *beside: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, *beside)
        changes, moments = update.update(grads, moments, params)
        return optax.apply_updates(params, changes), moments, loss

    return step, (params, jax.eval_shape(update.init, params), *beside)


def plain(family: str = "gpt", layers: int = 24, **given: Any) -> Made:
    """A decoder with unrolled layers (`decoder.train_step`)."""
    model, run = _decoder(family, layers, **given)
    return decoder.train_step(model, run)


def _decoder(
    family: str,
    layers: int,
    *,
    d_model: int = 1024,
    sequence: int = 1024,
    batch: int = 64,
    remat: str = "none",
    attention: str = "plain",
    dtype: str = "bfloat16",
    vocab: int = 32000,
) -> tuple[decoder.Decoder, decoder.Run]:
    heads = d_model // 64
    model = decoder.Decoder(
        family=family,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads if family == "gpt" else heads // 2,
        head_dim=64,
        ffn=4 * d_model if family == "gpt" else 11 * d_model // 4,
        vocab=vocab,
    )
    return model, decoder.Run(
        sequence=sequence, batch=batch, dtype=dtype, remat=remat, attention=attention
    )


def scanned(family: str = "gpt", layers: int = 24, **given: Any) -> Made:
    """A decoder with one loop over the stacked parameters of its layers."""
    return scanned_decoder(*_decoder(family, layers, **given))


def scanned_decoder(model: decoder.Decoder, run: decoder.Run) -> Made:
    """A model with one loop over the stacked parameters of its layers."""
    blocks, rest = _stacked(model, run)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return decoder.block(p, x, family=model.family, how=run.attention), None

    body = layer
    if run.remat != "none":
        body = jax.checkpoint(layer, policy=decoder.POLICIES[run.remat])

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"].astype(run.dtype)[tokens[:, :-1]]
        x, _ = jax.lax.scan(body, x, params["blocks"])
        logits = (x @ params["head"].astype(run.dtype)).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return found.mean()

    tokens = Struct((run.batch, run.sequence + 1), jnp.int32)
    return training(loss_of, {**rest, "blocks": blocks}, tokens)


def _stacked(model: decoder.Decoder, run: decoder.Run) -> tuple[Any, Any]:
    """The stacked parameters of all layers, and the other parameters."""
    known = decoder.shapes(model, run.sequence)
    blocks = jax.tree.map(
        lambda s: Struct((model.layers, *s.shape), s.dtype), known["block_0"]
    )
    head = Struct((model.d_model, model.vocab), jnp.float32)
    return blocks, {"embedding": known["embedding"], "head": head}


def lora(*, scan: bool, layers: int = 12, rank: int = 16, **given: Any) -> Made:
    """Low-rank updates of a frozen decoder in bfloat16 (LoRA)."""
    model, run = _decoder("llama", layers, **given)
    blocks, rest = _stacked(model, run)
    frozen = jax.tree.map(
        lambda s: Struct(s.shape, jnp.bfloat16), {**rest, "b": blocks}
    )
    d = model.d_model
    low = {
        name: {
            "a": Struct((layers, d, rank), jnp.float32),
            "b": Struct((layers, rank, n), jnp.float32),
        }
        for name, n in (("query", model.heads * 64), ("up", model.ffn))
    }

    def layer(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
        p, change = both
        p = dict(p)
        for name, one in change.items():
            product = one["a"].astype(x.dtype) @ one["b"].astype(x.dtype)
            p[name] = p[name] + product.reshape(p[name].shape)
        return decoder.block(p, x, family="llama", how=run.attention), None

    def loss_of(low: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        x = frozen["embedding"][tokens[:, :-1]]
        if scan:
            x, _ = jax.lax.scan(layer, x, (frozen["b"], low))
        else:
            for k in range(layers):
                own = jax.tree.map(lambda a, k=k: a[k], (frozen["b"], low))
                x, _ = layer(x, own)
        logits = (x @ frozen["head"]).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return found.mean()

    tokens = Struct((run.batch, run.sequence + 1), jnp.int32)
    return training(loss_of, low, frozen, tokens)


def state_space(
    *, layers: int = 4, d_model: int = 512, states: int = 8, batch: int = 64
) -> Made:
    """Layers that are linear recurrences by an associative scan, each with an MLP."""
    sequence, ffn = 512, 2 * d_model
    one = {
        "into": Struct((d_model, d_model), jnp.float32),
        "rate": Struct((d_model, states), jnp.float32),
        "drive": Struct((d_model, states), jnp.float32),
        "read": Struct((d_model, states), jnp.float32),
        "up": Struct((d_model, ffn), jnp.float32),
        "down": Struct((ffn, d_model), jnp.float32),
    }

    def joined(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def layer(p: Any, x: jax.Array) -> jax.Array:
        step = jax.nn.softplus(x @ p["into"])[..., None]
        decay = jnp.exp(-step * jnp.exp(p["rate"]))
        driven = step * x[..., None] * p["drive"]
        _, h = jax.lax.associative_scan(joined, (decay, driven), axis=1)
        x = x + (h * p["read"]).sum(-1)
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = layer(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    rows = Struct((batch, sequence, d_model), jnp.float32)
    return training(loss_of, [one] * layers, {"x": rows, "y": rows})


def graph_network(*, layers: int = 4, width: int = 256, nodes: int = 2048) -> Made:
    """A graph network on a batch of graphs: messages along edges, summed per node."""
    edges, graphs = 8 * nodes, 16
    one = {
        "message": Struct((2 * width, width), jnp.float32),
        "update": Struct((2 * width, width), jnp.float32),
    }

    def layer(p: Any, x: jax.Array, ends: jax.Array) -> jax.Array:
        def alone(x: jax.Array, ends: jax.Array) -> jax.Array:
            both = jnp.concatenate([x[ends[:, 0]], x[ends[:, 1]]], -1)
            sent = jax.nn.relu(both @ p["message"])
            got = jax.ops.segment_sum(sent, ends[:, 1], num_segments=nodes)
            return x + jax.nn.relu(jnp.concatenate([x, got], -1) @ p["update"])

        return jax.vmap(alone)(x, ends)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = layer(p, x, batch["ends"])
        return jnp.mean((x.mean(1) - batch["y"]) ** 2)

    rows = {
        "x": Struct((graphs, nodes, width), jnp.float32),
        "ends": Struct((graphs, edges, 2), jnp.int32),
        "y": Struct((graphs, width), jnp.float32),
    }
    return training(loss_of, [one] * layers, rows)


def mixer(*, layers: int = 8, width: int = 768, patches: int = 256) -> Made:
    """Layers with an MLP over patches and an MLP over channels."""
    one = {
        "scale": Struct((width,), jnp.float32),
        "patch_up": Struct((patches, 2 * patches), jnp.float32),
        "patch_down": Struct((2 * patches, patches), jnp.float32),
        "up": Struct((width, 4 * width), jnp.float32),
        "down": Struct((4 * width, width), jnp.float32),
    }

    def layer(p: Any, x: jax.Array) -> jax.Array:
        y = x - x.mean(-1, keepdims=True)
        y = p["scale"] * y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        turned = jax.nn.gelu(y.swapaxes(1, 2) @ p["patch_up"]) @ p["patch_down"]
        x = x + turned.swapaxes(1, 2)
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = layer(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    rows = Struct((256, patches, width), jnp.float32)
    return training(loss_of, [one] * layers, {"x": rows, "y": rows})


def translation(*, layers: int = 6, d_model: int = 512, batch: int = 64) -> Made:
    """An encoder, and a decoder that attends to the encoder's output."""
    heads, sequence, vocab, ffn = d_model // 64, 512, 32000, 4 * d_model
    square = Struct((d_model, heads, 64), jnp.float32)
    own = {"query": square, "key": square, "value": square, "out": square}
    mlp = {
        "up": Struct((d_model, ffn), jnp.float32),
        "down": Struct((ffn, d_model), jnp.float32),
    }

    def attend(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        q, k, v = (
            jnp.einsum("bsd,dhk->bshk", a, p[name].astype(x.dtype))
            for name, a in (("query", x), ("key", y), ("value", y))
        )
        mixed = decoder.attention(q, k, v, "plain")
        return jnp.einsum("bshk,dhk->bsd", mixed, p["out"].astype(x.dtype))

    def layer(p: Any, x: jax.Array, beside: jax.Array | None) -> jax.Array:
        y = decoder.normalised(x, jnp.ones(()), "gpt")
        x = x + attend(p["own"], y, y)
        if beside is not None:
            x = x + attend(p["cross"], x, beside)
        y = jax.nn.relu(x @ p["mlp"]["up"].astype(x.dtype))
        return x + y @ p["mlp"]["down"].astype(x.dtype)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        x, y = table[batch["source"]], table[batch["target"][:, :-1]]
        for p in params["encoder"]:
            x = layer(p, x, None)
        for p in params["decoder"]:
            y = layer(p, y, x)
        logits = (y @ table.T).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["target"][:, 1:]
        )
        return found.mean()

    params = {
        "embedding": Struct((vocab, d_model), jnp.float32),
        "encoder": [{"own": own, "mlp": mlp}] * layers,
        "decoder": [{"own": own, "cross": own, "mlp": mlp}] * layers,
    }
    tokens = {
        "source": Struct((batch, sequence), jnp.int32),
        "target": Struct((batch, sequence + 1), jnp.int32),
    }
    return training(loss_of, params, tokens)


def muon(*, layers: int = 8, width: int = 1024) -> Made:
    """A stack of dense layers, trained with Muon."""
    one = {
        "up": Struct((width, 4 * width), jnp.float32),
        "down": Struct((4 * width, width), jnp.float32),
    }

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        x = batch.astype(jnp.bfloat16)
        for p in params:
            up = jax.nn.gelu(x @ p["up"].astype(x.dtype))
            x = x + up @ p["down"].astype(x.dtype)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    rows = Struct((64, 512, width), jnp.float32)
    return training(loss_of, [one] * layers, rows, optimizer=optax.contrib.muon(2e-2))


def example(name: str, **options: Any) -> Made:
    """A model of the examples."""
    return workloads.arguments(name, **options)


def diffusion(**options: Any) -> Made:
    """The U-Net of `unet.py`."""
    return unet.train_step(**options)
