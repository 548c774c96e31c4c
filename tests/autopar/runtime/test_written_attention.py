"""Tests attention that a step writes out, computed in blocks on a split sequence."""

from __future__ import annotations

from typing import Any

import expert_steps
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from shared_keys import check_keys, force_keys
from sharing_links import small_devices

import autopar
from autopar.reports.table import note_lines
from autopar.steps import for_devices
from autopar.steps.analysis import analyse

BATCH, SEQ, HEADS, DIM, LAYERS, VOCAB = 4, 32, 2, 4, 2, 16
WIDTH = HEADS * DIM


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of (batch, sequence, heads, head_dim)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def shared_key_head(q: Any, k: Any, v: Any) -> Any:
    """All query heads share a key head, which the step repeats."""
    k, v = (jnp.repeat(x[:, :, :1], HEADS, axis=2) for x in (k, v))
    return attention(q, k, v)


def left_padded(q: Any, k: Any, v: Any) -> Any:
    """Causal attention whose first queries see no key that is not padding."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    real = jnp.arange(SEQ) >= jnp.asarray([0, 1, 6, 20])[:, None, None, None]
    seen = real & jnp.tril(jnp.ones((SEQ, SEQ), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def right_padded(q: Any, k: Any, v: Any) -> Any:
    """Attention in which several devices have nothing but padding."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    real = jnp.arange(SEQ) < jnp.asarray([SEQ, 1, 6, 20])[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(real, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def training(
    attend: Any = attention, *, remat: bool = False, scan: bool = False
) -> Any:
    """A step of a language model, its state, and tokens."""

    def block(p: Any, x: Any) -> Any:
        q, k, v = (
            (x @ p[n]).reshape(*x.shape[:2], HEADS, DIM) for n in ("q", "k", "v")
        )
        return jnp.tanh(x + attend(q, k, v).reshape(x.shape) @ p["o"])

    apply = jax.checkpoint(block) if remat else block

    def step(params: Any, tokens: Any) -> Any:
        def loss_of(params: Any) -> Any:
            x = params["table"][tokens[:, :-1]]
            if scan:
                x, _ = jax.lax.scan(
                    lambda x, p: (apply(p, x), None), x, params["layers"]
                )
            else:
                for p in params["layers"]:
                    x = apply(p, x)
            logs = jax.nn.log_softmax(x @ params["table"].T)
            return -jnp.take_along_axis(logs, tokens[:, 1:, None], -1).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (loss, grads)

    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 2))
    layers = [
        {n: 0.4 * jax.random.normal(next(keys), (WIDTH, WIDTH)) for n in "qkvo"}
        for _ in range(LAYERS)
    ]
    params = {
        "table": jax.random.normal(next(keys), (VOCAB, WIDTH)),
        "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers) if scan else layers,
    }
    tokens = jax.random.randint(next(keys), (BATCH, SEQ + 1), 0, VOCAB)
    return step, params, tokens


def windowed(q: Any, k: Any, v: Any) -> Any:
    """Causal attention in a window, with a limit of scores and a bias of distances."""
    away = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    scores = 2.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0) - 0.1 * away
    scores = jnp.where((away >= 0) & (away < 7), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, "ring"),
        ({}, "gather"),
        ({"microbatches": 2}, "gather"),
        ({"remat": True}, "ring"),
        ({"remat": True}, "gather"),
        ({"attend": shared_key_head}, "ring"),
        ({"attend": shared_key_head}, "gather"),
        ({"attend": left_padded}, "ring"),
        ({"attend": right_padded}, "ring"),
        ({"attend": right_padded}, "gather"),
        ({"attend": windowed}, "gather"),
    ],
    ids=lambda o: (
        o
        if isinstance(o, str)
        else "-".join(getattr(x, "__name__", k) for k, x in o.items())
    ),
)
def test_a_split_sequence_trains_as_one_device(
    options: dict[str, Any], keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are tried although these scores are few, and are faster."""
    monkeypatch.setattr(for_devices, "_SCORES", 0.0)
    force_keys(monkeypatch, keys)
    options = dict(options)
    attend = options.pop("attend", attention)
    step, params, tokens = training(attend, remat=options.pop("remat", False))
    planned = autopar.parallelize(
        step,
        donate=False,
        cluster=small_devices(90_000),
        axis_names=("sequence",),
        max_axes=1,
        stages=1,
        seconds=1,
        **options,
    )

    got = planned(params, tokens)

    assert planned.plan.attention_kernel == "blocks", str(planned.plan)
    order = "order of the ring" if keys == "ring" else "zigzag order"
    placed = f"tokens: in the {order}" in planned.plan.decided
    assert placed == (attend in (attention, shared_key_head))
    audit = autopar.audit(step, params, tokens, plan=planned.plan)
    assert audit.agrees, str(audit)
    check_keys(planned.plan, audit.shardy, keys)
    expected = jax.jit(step)(params, tokens)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(abs(b).max()))


def test_a_loop_over_layers_is_priced_in_the_layouts_of_a_plan_with_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search also tries layers that are computed again, beside such a plan."""
    monkeypatch.setattr(for_devices, "_SCORES", 0.0)
    step, params, tokens = training(remat=True, scan=True)

    plan = autopar.plan(
        step,
        params,
        tokens,
        cluster=small_devices(90_000),
        max_axes=1,
        stages=1,
        remat="auto",
        seconds=1,
    )

    assert plan.attention_kernel == "blocks", str(plan)


def test_rows_of_written_attention_gather_keys_and_values() -> None:
    """The solver splits the rows of a product as any other dimension."""
    x = jax.ShapeDtypeStruct((1, SEQ, WIDTH), jnp.float32)

    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params)
            return (attention(q, k, v) ** 2).sum()

        grads = jax.grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = structs([(WIDTH, HEADS, DIM)] * 3)
    plan = autopar.plan(
        step, params, x, cluster=small_devices(10**9), axis_names=("sequence",),
        max_axes=1, stages=1, seconds=1, pins={"x": P(None, "sequence")},
    )  # fmt: skip

    assert plan.attention_kernel == ""
    audit = autopar.audit(step, params, x, plan=plan)
    assert audit.agrees, str(audit)
    keys_and_values = 2 * 7 / 8 * SEQ * WIDTH * 4
    assert audit.shardy["all_gather"] == keys_and_values
    assert audit.shardy["reduce_scatter"] == keys_and_values


def biased_attention(params: Any, x: Any) -> Any:
    """Heads learn how much their scores fall with the distance."""
    away = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None]
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params["qkv"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores -= params["slopes"][:, None, None] * jnp.abs(away)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def biased_step(params: Any, x: Any) -> Any:
    grads = jax.grad(lambda p: biased_attention(p, x).sum())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def scanned_step(params: Any, x: Any) -> Any:
    """Layers in a loop that stores their weights for the backward pass."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        q, k, v = jnp.einsum("bsd,ndhk->nbshk", x, w)
        return jnp.tanh(x + attention(q, k, v).reshape(x.shape)), None

    def loss_of(params: Any) -> Any:
        return jax.lax.scan(layer, x, params["layers"])[0].sum()

    grads = jax.grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def expert_step(params: Any, x: Any) -> Any:
    """Tokens are sorted by their experts after the attention."""

    def loss_of(params: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params["qkv"])
        tokens = attention(q, k, v).reshape(-1, WIDTH)
        return (expert_steps.by_inverse(tokens, params["experts"]) ** 2).mean()

    grads = jax.grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def biased_expert_step(params: Any, x: Any) -> Any:
    """The same after attention with a learned bias, which keeps all scores."""

    def loss_of(params: Any) -> Any:
        tokens = biased_attention(params, x).reshape(-1, WIDTH)
        return (expert_steps.by_inverse(tokens, params["experts"]) ** 2).mean()

    grads = jax.grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_a_batch_that_cannot_be_split_says_what_keeps_the_sequence_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(for_devices, "_SCORES", 0.0)
    shapes = {"qkv": [(WIDTH, HEADS, DIM)] * 3, "slopes": (HEADS,)}
    x = jax.ShapeDtypeStruct((2, SEQ, WIDTH), jnp.float32)

    why = r"its rows is 2 .*\n  its sequence .*gradients of a bias\n  try: "
    with pytest.raises(autopar.PlanError, match=why):
        autopar.plan(biased_step, structs(shapes), x, cluster="8:cpu", max_axes=1)


EXPERT_SHAPES = {
    "qkv": [(WIDTH, HEADS, DIM)] * 3,
    "experts": {
        "router": (WIDTH, expert_steps.EXPERTS),
        "gate": (expert_steps.EXPERTS, WIDTH, WIDTH),
        "up": (expert_steps.EXPERTS, WIDTH, WIDTH),
        "down": (expert_steps.EXPERTS, WIDTH, WIDTH),
    },
}


def structs(shapes: Any) -> Any:
    """Arrays of these shapes, without values."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize(
    ("step", "shapes", "reason"),
    [
        (
            biased_step,
            {"qkv": [(WIDTH, HEADS, DIM)] * 3, "slopes": (HEADS,)},
            "gradients of a bias",
        ),
        (
            scanned_step,
            {"layers": (LAYERS, 3, WIDTH, HEADS, DIM)},
            "put jax.checkpoint around each layer",
        ),
        (
            biased_expert_step,
            {**EXPERT_SHAPES, "slopes": (HEADS,)},
            "gradients of a bias",
        ),
    ],
    ids=["bias", "loop", "experts"],
)
def test_a_plan_says_why_attention_stays_written_out(
    step: Any, shapes: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(for_devices, "_SCORES", 0.0)
    x = jax.ShapeDtypeStruct((8, SEQ, WIDTH), jnp.float32)

    plan = autopar.plan(
        step, structs(shapes), x, cluster="8:cpu", max_axes=1, stages=1, seconds=1
    )

    assert plan.attention_kernel == ""
    (line,) = (a for a in plan.assumed if "attention that is written out" in a)
    assert reason in line
    assert line in str(plan)
    assert any(line in text for text in note_lines(plan))


@pytest.mark.parametrize("experts", [False, True])
def test_a_part_of_the_attention_is_computed_in_blocks(
    experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers, the one without a learned bias; beside experts, too."""
    monkeypatch.setattr(for_devices, "_SCORES", 0.0)

    def loss_of(params: Any, x: Any) -> Any:
        x = x + biased_attention(params, x).reshape(x.shape)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params["qkv"])
        tokens = attention(q, k, v).reshape(-1, WIDTH)
        if experts:
            tokens = expert_steps.by_inverse(tokens, params["experts"])
        return (tokens**2).mean()

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    shapes = {**EXPERT_SHAPES, "slopes": (HEADS,)}
    x = jax.ShapeDtypeStruct((8, SEQ, WIDTH), jnp.float32)
    found = for_devices.for_devices(analyse(step, (structs(shapes), x)), 8)
    device = autopar.Cluster.parse("8:cpu").device
    made = for_devices.alternatives(found, 8, device)

    assert {a.attention_kernel for a in made} == {"", "blocks"}
    for each in made:
        notes = [a for a in each.graph.assumed_trips if "keeps all scores" in a]
        assert len(notes) == 1
        assert "gradients of a bias" in notes[0]
    assert any(a.row_capacity and a.attention_kernel for a in made) == experts


def test_a_step_that_does_not_fit_says_why_attention_stays_written_out() -> None:
    """Scores of long sequences are most often what does not fit."""
    shapes = {"qkv": [(WIDTH, HEADS, DIM)] * 3, "slopes": (HEADS,)}
    x = jax.ShapeDtypeStruct((8, SEQ, WIDTH), jnp.float32)
    with pytest.raises(autopar.PlanError, match="no plan fits") as caught:
        autopar.plan(
            biased_step, structs(shapes), x, cluster="8:cpu,memory=10kB",
            max_axes=1, stages=1, microbatches=1, remat=0, seconds=1,
        )  # fmt: skip
    assert "gradients of a bias" in str(caught.value)


@pytest.mark.parametrize("slots", [True, False])
def test_attention_is_computed_in_blocks_beside_experts(
    slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have slots, or are sorted in blocks, in the program with the kernels."""
    if not slots:
        refused = for_devices.RowSlots({}, refused="this test wants none")
        monkeypatch.setattr(for_devices, "give_slots", lambda p, *_: (p, refused))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s.shape, scale=0.3), s.dtype),
        structs(EXPERT_SHAPES),
    )
    x = jnp.asarray(rng.normal(size=(2, 16 * SEQ, WIDTH)), jnp.float32)
    planned = autopar.parallelize(
        expert_step, cluster=small_devices(4_000_000), max_axes=2, stages=1,
        microbatches=1, remat=0, seconds=1, donate=False,
    )  # fmt: skip

    got = planned(params, x)

    plan = planned.plan
    assert plan.attention_kernel == "blocks", str(plan)
    assert (plan.row_capacity > 0) == slots
    assert plan.row_blocks == 8
    audit = autopar.audit(expert_step, params, x, plan=plan)
    assert audit.agrees, str(audit)
    expected = jax.jit(expert_step)(params, x)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(abs(b).max()))
    again = autopar.parallelize(
        expert_step,
        plan=autopar.Plan.from_json(msgspec.json.encode(plan)),
        donate=False,
    )
    jax.tree.map(np.testing.assert_array_equal, again(params, x), got)
