"""Tests attention whose sequence is split over devices, in planned steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cudnn_on_cpu import cudnn_on_cpu
from jax.sharding import PartitionSpec as P
from shared_keys import check_keys, force_keys
from sharing_links import sharing

import autopar
from autopar.steps.analysis import analyse
from autopar.steps.remat import rematerialise
from autopar_passes.graph import ring_order
from autopar_passes.replay import primitives

BATCH, SEQ, HEADS, KV, DIM, LAYERS = 2, 64, 4, 2, 8, 2
WIDTH = HEADS * DIM
OPTIMIZER = optax.adamw(1e-2)


@pytest.fixture(autouse=True)
def _on_cpu() -> Generator[None]:
    with cudnn_on_cpu():
        yield


@pytest.fixture(params=["ring", "gather"])
def keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How all plans of a test share keys and values."""
    force_keys(monkeypatch, request.param)
    return request.param


def slow_devices(text: str) -> autopar.Cluster:
    """A cluster with devices so slow that all work is worth splitting."""
    cluster = sharing(autopar.Cluster.parse(text))
    rates = tuple(
        (dtype, 1e-4 * rate) for dtype, rate in cluster.device.peak_flops_per_s
    )
    device = dataclasses.replace(cluster.device, peak_flops_per_s=rates)
    return dataclasses.replace(cluster, device=device)


def layer(p: Any, x: Any, *, causal: bool) -> Any:
    rows = x.shape[0]
    q = (x @ p["q"].astype(x.dtype)).reshape(rows, SEQ, HEADS, DIM)
    k = (x @ p["k"].astype(x.dtype)).reshape(rows, SEQ, KV, DIM)
    v = (x @ p["v"].astype(x.dtype)).reshape(rows, SEQ, KV, DIM)
    mixed = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation="cudnn"
    )
    return x + mixed.reshape(x.shape) @ p["o"].astype(x.dtype)


def training(*, causal: bool = True, remat: bool = False, batch: int = BATCH) -> Any:
    """A step of two layers, its state and a batch."""
    one = lambda p, x: layer(p, x, causal=causal)  # noqa: E731
    apply = jax.checkpoint(one) if remat else one

    def step(state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for p in params:
                y = apply(p, y)
            return jnp.mean((y - x[:, ::-1]).astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, moments = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": moments}, value

    key = jax.random.key(0)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, KV * DIM), "v": (WIDTH, KV * DIM)}
    shapes["o"] = (WIDTH, WIDTH)
    params = [
        {
            n: 0.2 * jax.random.normal(jax.random.fold_in(key, 10 * i + j), s)
            for j, (n, s) in enumerate(shapes.items())
        }
        for i in range(LAYERS)
    ]
    x = jax.random.normal(key, (batch, SEQ, WIDTH))
    return step, {"params": params, "opt": OPTIMIZER.init(params)}, x


VOCAB = 32


def turned(x: Any) -> Any:
    """Rotary positions of (batch, sequence, heads, head_dim)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def language_model(*, remat: bool = False, scan: bool = False) -> Any:
    """A step on tokens with rotary positions, its state and a batch."""
    _, state, _ = training()
    key = jax.random.key(1)

    def block(p: Any, x: Any) -> Any:
        rows = x.shape[0]
        q, k, v = (
            (x @ p[n]).reshape(rows, SEQ, heads, DIM)
            for n, heads in (("q", HEADS), ("k", KV), ("v", KV))
        )
        mixed = jax.nn.dot_product_attention(
            turned(q), turned(k), v, is_causal=True, implementation="cudnn"
        )
        return jnp.tanh(x + mixed.reshape(x.shape) @ p["o"])

    apply = jax.checkpoint(block) if remat else block

    def loss_of(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens[:, :-1]]
        if scan:
            layers = jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])
            x, _ = jax.lax.scan(lambda x, p: (apply(p, x), None), x, layers)
        else:
            for p in params["layers"]:
                x = apply(p, x)
        scores = x @ params["table"].T
        found = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
        return found.mean(), found

    def step(state: Any, tokens: Any) -> Any:
        (value, each), grads = jax.value_and_grad(loss_of, has_aux=True)(
            state["params"], tokens
        )
        updates, moments = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": moments}, (value, each)

    table = jax.random.normal(key, (VOCAB, WIDTH))
    params = {"table": table, "layers": state["params"]}
    tokens = jax.random.randint(key, (2 * BATCH, SEQ + 1), 0, VOCAB)
    return step, {"params": params, "opt": OPTIMIZER.init(params)}, tokens


@contextlib.contextmanager
def plain_order() -> Generator[None]:
    """Lets kernels bring tokens into their order themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ring_order, primitives):
            patch.setattr(module, "ring_order", lambda *_: "a test")
        yield


def results_of(run: Any, state: Any, tokens: Any) -> list[Any]:
    """Losses of tokens, and gradients (as first moments after one step)."""
    new, (value, each) = run(state, tokens)
    return [value, each, *jax.tree.leaves(new["opt"][0].mu)]


def on_ring(step: Any, **options: Any) -> Any:
    """The step on 8 devices that split the sequence, whose length 8 does not divide."""
    return with_split_sequence(step, **{"pins": None} | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2},
        {"checkpoint": True, "remat": "0:kernels"},
        {"scan": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_tokens_in_the_order_of_a_ring_train_as_one_device(
    options: dict[str, Any], keys: str
) -> None:
    """Layers in a loop keep the plain order, as each iteration would permute tokens."""
    options = dict(options)
    remat, scan = options.pop("checkpoint", False), options.pop("scan", False)
    step, state, tokens = language_model(remat=remat, scan=scan)
    planned = on_ring(step, **options)

    got = results_of(planned, state, tokens)

    graph, program = (
        getattr(rematerialise(analyse(step, (state, tokens)), planned.plan.remat), n)
        for n in ("graph", "program")
    )
    found = ring_order.ring_order(program, graph.operators)
    assert isinstance(found, str) == scan, found
    audit = autopar.audit(step, state, tokens, plan=planned.plan)
    assert audit.agrees, str(audit)
    check_keys(planned.plan, audit.shardy, keys)
    for a, b in zip(got, results_of(jax.jit(step), state, tokens), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(abs(b).max()))


def test_the_order_of_a_ring_saves_exchanges_and_errs_as_much_with_a_codec(
    keys: str,
) -> None:
    step, state, tokens = language_model()
    exact = results_of(jax.jit(step), state, tokens)

    def run() -> tuple[float, float]:
        """The bytes that devices send each other, and the error."""
        planned = on_ring(step, compression="int8")
        found = results_of(planned, state, tokens)
        assert any(g.codec == "int8" for g in planned.plan.gradients)
        audit = autopar.audit(step, state, tokens, plan=planned.plan)
        errors = [
            float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
            for a, b in zip(found[2:], exact[2:], strict=True)
        ]
        check_keys(planned.plan, audit.shardy, keys)
        return audit.shardy.get("collective_permute", 0.0), float(np.mean(errors))

    ordered_bytes, ordered_error = run()
    with plain_order():
        plain_bytes, plain_error = run()

    assert ordered_bytes < plain_bytes
    assert 0 < ordered_error < 1.5 * plain_error


def losses(step: Any, state: Any, x: Any) -> list[float]:
    found: list[float] = []
    for _ in range(3):
        state, value = step(state, x)
        found.append(float(value))
    return found


def with_split_sequence(step: Any, **options: Any) -> Any:
    """The step on 8 devices that split the sequence."""
    options = options_of(P(None, "sequence")) | options
    return autopar.parallelize(step, donate=False, **options)


def options_of(layout: P) -> dict[str, Any]:
    """Options of plans on 8 devices with a layout of the batch."""
    return {
        "cluster": slow_devices("8:cpu"),
        "pins": {"x": layout},
        "axis_names": ("sequence",),
        "max_axes": 1,
        "seconds": 2,
    }


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, "ring"),
        ({}, "gather"),
        ({"microbatches": 2}, "ring"),
        ({"stages": 2, "microbatches": 2}, "gather"),
        ({"remat": True}, "ring"),
    ],
    ids=lambda o: o if isinstance(o, str) else "-".join(o) or "plain",
    indirect=["keys"],
)
def test_a_split_sequence_trains_as_one_device(
    options: dict[str, Any], causal: bool, keys: str
) -> None:
    options = dict(options)
    step, state, x = training(causal=causal, remat=options.pop("remat", False))
    planned = with_split_sequence(step, **options)

    got = losses(planned, state, x)

    found = autopar.audit(step, state, x, plan=planned.plan)
    assert found.agrees, str(found)
    if len(planned.plan.stages) == 1:
        check_keys(planned.plan, found.shardy, keys)
    np.testing.assert_allclose(got, losses(jax.jit(step), state, x), rtol=1e-5)


def test_a_codec_errs_as_without_a_split_sequence() -> None:
    """Devices send parts of the same gradients, of rows or of parts of rows."""
    step, state, x = training(batch=8)
    exact = np.asarray(losses(jax.jit(step), state, x))

    def error(layout: P) -> float:
        planned = autopar.parallelize(
            step, donate=False, compression="int8", **options_of(layout)
        )
        found = np.asarray(losses(planned, state, x))
        assert any(g.codec == "int8" for g in planned.plan.gradients)
        return float(np.abs(found - exact).max())

    of_rows, of_sequences = error(P("sequence")), error(P(None, "sequence"))

    assert of_rows > 0
    assert of_sequences < 2 * of_rows


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 2}, {"compression": "int8"}],
    ids=lambda o: "-".join(o) or "plain",
)
@pytest.mark.parametrize("keys", ["ring"], indirect=True)
def test_kept_results_of_attention_change_no_numbers(
    options: dict[str, Any], keys: str
) -> None:
    """Also the gradients, which are the first moments after one step.

    With a codec, the numbers are those of the same codec without kept results.
    """
    step, state, x = training(remat=True)
    planned = with_split_sequence(step, remat="0:kernels", **options)
    plain: Any = jax.jit(step)
    if "compression" in options:
        plain = with_split_sequence(step, remat=0, **options)

    got, expected = losses(planned, state, x), losses(plain, state, x)

    assert planned.plan.remat.level == "kernels"
    audit = autopar.audit(step, state, x, plan=planned.plan)
    check_keys(planned.plan, audit.shardy, keys)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    moments, others = (
        jax.tree.leaves(run(state, x)[0]["opt"][0].mu) for run in (planned, plain)
    )
    for a, b in zip(moments, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(abs(b).max()))


def test_a_plan_with_kept_results_has_less_work() -> None:
    step, state, x = training(remat=True)
    options = options_of(P(None, "sequence"))
    plans = [
        autopar.plan(step, state, x, remat=remat, **options)
        for remat in (0, "0:kernels")
    ]

    before, after = (plan.predicted for plan in plans)
    assert after.compute_s < before.compute_s
    assert after.communication_s < before.communication_s


def test_kept_results_without_a_kernel_to_keep_are_refused() -> None:
    step, state, x = training(remat=False)

    with pytest.raises(autopar.PlanError, match="step computes an attention"):
        with_split_sequence(step, remat="0:kernels")(state, x)
