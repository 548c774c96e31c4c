"""Tests stages that send each other encoded activations and cotangents.

The reference is a program of one device with the same codecs at the same places.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from cut_codec_cases import (
    ASKED,
    CODECS,
    COUNT,
    NONE,
    ROWS,
    WIDTH,
    Cuts,
    batch,
    chain_loss,
    descended,
    run,
    weights,
)
from stage_cases import distance

import autopar
from autopar.compression.cut_codes import CutCode
from autopar.errors import PlanError
from autopar.planner.stages.entry import cut_as
from autopar.planner.stages.stage_costs import stage_messages
from autopar.reports.audit import ACTIVATIONS, COTANGENTS
from autopar.reports.staged import bind_stages, links
from autopar.steps.analysis import analyse


def bfloat16_loss(params: Any, batch: Any, cuts: Cuts = NONE) -> Any:
    x = batch["x"].astype(jnp.bfloat16)
    for k, w in enumerate(params):
        x = x + jnp.tanh(x @ w.astype(jnp.bfloat16))
        x = cuts[k](x) if k in cuts else x
    return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)


def skip_loss(params: Any, batch: Any, cuts: Cuts = NONE) -> Any:
    """The first activation skips the stage in the middle."""
    x = first = jnp.tanh(batch["x"] @ params[0])
    x = jnp.tanh(x @ params[1])
    x = jnp.tanh(x @ params[2])
    x = jnp.tanh(x @ params[3] + first)
    return jnp.mean((x - batch["y"]) ** 2)


def straight_through(activations: str, cotangents: str, dtype: str = "float32") -> Any:
    """Encodes and decodes an array, and separately its cotangent."""
    shape = ROWS // COUNT, WIDTH
    codes = [None if c == "dense" else CutCode(c, shape, dtype)
             for c in (activations, cotangents)]  # fmt: skip

    def sent(code: CutCode | None, x: Any) -> Any:
        return x if code is None else code.decode(code.encode(x))

    @jax.custom_vjp
    def cut(x: Any) -> Any:
        return sent(codes[0], x)

    cut.defvjp(lambda x: (cut(x), None), lambda _, g: (sent(codes[1], g),))
    return cut


def one_device(loss: Any, cuts: Cuts) -> Any:
    """A step of one device that takes one microbatch after the other."""

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        own = functools.partial(loss, cuts=cuts)
        each = jax.tree.map(lambda x: x.reshape(COUNT, -1, WIDTH), batch)
        value, grads = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        for k in range(COUNT):
            rows = jax.tree.map(lambda x, k=k: x[k], each)
            one, more = jax.value_and_grad(own)(params, rows)
            value, grads = value + one, jax.tree.map(jnp.add, grads, more)
        step = 0.1 / COUNT
        return jax.tree.map(lambda w, g: w - step * g, params, grads), value / COUNT

    return step


def staged(loss: Any = chain_loss, **options: Any) -> Any:
    asked = {**ASKED, "stages": 2, "cut_codecs": CODECS, "donate": False, **options}
    return autopar.parallelize(descended(loss), **asked)


@pytest.mark.parametrize(
    ("schedule", "stages", "cuts"),
    [
        ("1f1b", 2, (1,)),
        ("gpipe", 4, (0, 1, 2)),
        ("interleaved", 2, (0, 1, 2)),
        ("zero-bubble", 2, (1,)),
    ],
)
def test_results_are_those_of_one_device_with_the_same_codecs(
    schedule: str, stages: int, cuts: tuple[int, ...]
) -> None:
    step = staged(schedule=schedule, stages=stages)
    params, losses = run(step, weights())
    cut = straight_through(*CODECS.split("/"))
    same, expected = run(one_device(chain_loss, dict.fromkeys(cuts, cut)), weights())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert distance(same, params) < 1e-5
    data = step.plan.pipeline
    assert data.activation_codecs == ("int4:block=32",) * len(cuts)
    assert data.cotangent_codecs == ("int8:block=32",) * len(cuts)
    # The codecs have an effect: without them the results are others.
    exact, _ = run(one_device(chain_loss, {}), weights())
    assert distance(exact, params) > 1e-4


@pytest.mark.parametrize("codecs", ["fp8:block=32/dense", "dense/sign:block=32"])
def test_activations_and_cotangents_have_codecs_of_their_own(codecs: str) -> None:
    given = dict(zip(("activations", "cotangents"), codecs.split("/"), strict=True))
    step = staged(cut_codecs=given)
    params, losses = run(step, weights())
    cut = straight_through(*codecs.split("/"))
    same, expected = run(one_device(chain_loss, {1: cut}), weights())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert distance(same, params) < 1e-5


TOP = "topk:ratio=0.125"


def masked(text: str = TOP) -> Any:
    """Keeps the largest elements, and the elements of the cotangent at their places."""
    shape = ROWS // COUNT, WIDTH
    ahead, back = (CutCode(text, shape, "float32", m) for m in (False, True))

    @jax.custom_vjp
    def cut(x: Any) -> Any:
        return ahead.decode(ahead.encode(x))

    def forward(x: Any) -> Any:
        mask = ahead.encode(x)
        return ahead.decode(mask), mask

    cut.defvjp(forward, lambda mask, g: (back.decode(back.encode(g, mask), mask),))
    return cut


@pytest.mark.parametrize(
    ("schedule", "cuts"),
    [("1f1b", (1,)), ("zero-bubble", (1,)), ("interleaved", (0, 1, 2))],
)
def test_cotangents_are_sent_at_the_places_of_their_activations(
    schedule: str, cuts: tuple[int, ...]
) -> None:
    step = staged(schedule=schedule, cut_codecs=TOP)
    params, losses = run(step, weights())
    same, expected = run(
        one_device(chain_loss, dict.fromkeys(cuts, masked())), weights()
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert distance(same, params) < 1e-5
    own, _ = run(
        one_device(chain_loss, dict.fromkeys(cuts, straight_through(TOP, TOP))),
        weights(),
    )
    assert distance(own, params) > 1e-4


def test_cotangents_without_positions_have_fewer_bytes() -> None:
    step, params = staged(cut_codecs=TOP), weights()
    step.prepare(params, batch())
    # Two devices of a stage have half of a microbatch each. Of a row's 32 elements, 4
    # are kept, each with one byte and one of position.
    rows = ROWS // COUNT // 2
    expected = [rows * (4 + 4 + 2), rows * (4 + 2)]
    assert link_bytes(step.plan, descended(chain_loss), params) == expected
    audit = autopar.audit(descended(chain_loss), params, batch(), plan=step.plan)
    assert audit.agrees
    sent = {t.what: t.sent_bytes / COUNT for t in audit.transfers}
    assert [sent[ACTIVATIONS], sent[COTANGENTS]] == expected


def test_recomputed_layers_read_the_same_decoded_activations() -> None:
    step = staged(remat="all")
    params, losses = run(step, weights())
    cut = straight_through(*CODECS.split("/"))
    same, expected = run(one_device(chain_loss, {1: cut}), weights())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert distance(same, params) < 1e-5


def test_the_same_step_twice_gives_the_same_bits() -> None:
    step = staged()
    one, other = (run(step, weights())[0] for _ in range(2))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_narrow_floats_are_encoded_in_their_own_dtype() -> None:
    step = staged(bfloat16_loss, cut_codecs="int4:block=32")
    _, losses = run(step, weights())
    cut = straight_through("int4:block=32", "int4:block=32", "bfloat16")
    _, expected = run(one_device(bfloat16_loss, {1: cut}), weights())
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


def link_bytes(plan: Any, step: Any, params: Any) -> list[float]:
    """The bytes of activations and of cotangents on the link between two stages."""
    cluster = plan.cluster.read()
    (link,) = links(bind_stages(analyse(step, (params, batch())), plan, cluster))
    return [link.activation_bytes, link.cotangent_bytes]


def test_bytes_of_links_are_those_of_the_codes_and_the_audit_agrees() -> None:
    step, params = staged(), weights()
    step.prepare(params, batch())
    # Two devices of a stage have half of a microbatch each.
    elements = ROWS // COUNT // 2 * WIDTH
    expected = [elements / 2 + elements / 32 * 2, elements + elements / 32 * 2]
    assert link_bytes(step.plan, descended(chain_loss), params) == expected
    audit = autopar.audit(descended(chain_loss), params, batch(), plan=step.plan)
    assert audit.agrees
    sent = {t.what: t.sent_bytes / COUNT for t in audit.transfers}
    assert [sent[ACTIVATIONS], sent[COTANGENTS]] == expected
    text = str(step.plan)
    assert "cuts     activations int4:block=32, cotangents int8:block=32" in text


def test_a_skip_connection_is_encoded_where_it_leaves_its_stage() -> None:
    """It has one reader; the value that two stages read is sent exactly."""
    step = staged(skip_loss, stages=4)
    step.prepare(weights(), batch())
    analysis = analyse(descended(skip_loss), (weights(), batch()))
    cut = cut_as(analysis, step.plan)
    sent = [len(found) for found in _readers(cut).values()]
    assert sorted(set(sent)) == [1, 2]
    assert all(len(_readers(cut)[v]) == 1 for v in cut.codes)
    _, losses = run(step, weights())
    _, exact = run(one_device(skip_loss, {}), weights())
    np.testing.assert_allclose(losses, exact, rtol=0.1)


def two_values_loss(params: Any, batch: Any) -> Any:
    """The last layer also reads a few columns of the first one's results."""
    x = jnp.tanh(batch["x"] @ params[0])
    few = jnp.sin(x[:, :NARROW])
    x = jnp.tanh(x @ params[1])
    x = jnp.tanh(x @ params[2])
    x = jnp.tanh(x @ params[3] + few @ params[3][:NARROW])
    return jnp.mean((x - batch["y"]) ** 2)


NARROW = WIDTH // 2


def test_arrays_of_a_cut_may_have_codecs_of_their_own() -> None:
    codecs = "topk:ratio=0.125+int8:block=16"
    step = staged(two_values_loss, cut_codecs=codecs)
    step.prepare(weights(), batch())
    assert step.plan.pipeline.activation_codecs == (codecs,)
    cut = cut_as(analyse(descended(two_values_loss), (weights(), batch())), step.plan)
    found = sorted((c.shape[-1], c.codec, c.masked) for c in cut.codes.values())
    narrow, wide = (NARROW, "int8:block=16", False), (WIDTH, "topk:ratio=0.125")
    assert found == [narrow, narrow, (*wide, False), (*wide, True)]


def _readers(cut: Any) -> dict[int, set[int]]:
    """Value of rows that a task sends -> the stages that read it."""
    out: dict[int, set[int]] = {}
    for m in stage_messages(cut):
        if m.maker is not None and not m.late:
            out.setdefault(m.value, set()).add(m.target)
    return {v: s for v, s in out.items() if cut.analysis.dim_labels.degree(v)}


def test_a_saved_plan_keeps_its_codecs_and_they_can_be_edited(tmp_path: Any) -> None:
    step, path = staged(), tmp_path / "plan.json"
    params, losses = run(step, weights())
    step.plan.save(path)
    made = descended(chain_loss)
    again = autopar.parallelize(made, plan=str(path), donate=False)
    same, told = run(again, weights())
    assert told == losses
    assert distance(same, params) == 0.0
    data = msgspec.structs.replace(
        step.plan.pipeline, activation_codecs=("int8:block=32",), cotangent_codecs=()
    )
    edited = msgspec.structs.replace(step.plan, pipeline=data)
    other = autopar.parallelize(made, plan=edited, donate=False)
    _, moved = run(other, weights())
    cut = straight_through("int8:block=32", "dense")
    _, expected = run(one_device(chain_loss, {1: cut}), weights())
    np.testing.assert_allclose(moved, expected, rtol=1e-5)
    assert link_bytes(other.plan, made, weights())[1] == ROWS // COUNT // 2 * WIDTH * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation_codecs": ("int8", "int8")}, "has 1 cuts .* 2 codecs are given"),
        ({"activation_codecs": ("sketch",)}, "take a codec of blocks"),
        ({"cotangent_codecs": ("int9",)}, "unknown codec 'int9'"),
    ],
)
def test_edits_that_name_no_codec_are_refused(changes: Any, said: str) -> None:
    plan = autopar.plan(
        descended(chain_loss), weights(), batch(), **ASKED, stages=2, cut_codecs=CODECS
    )
    data = msgspec.structs.replace(plan.pipeline, **changes)
    edited = msgspec.structs.replace(plan, pipeline=data)
    with pytest.raises(PlanError, match=said):
        autopar.parallelize(descended(chain_loss), plan=edited)(weights(), batch())


def test_numbers_that_are_not_finite_show_in_the_loss() -> None:
    step = staged()
    assert not np.isfinite(float(step(weights(), batch(bad=True))[1]))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"stages": 1}, "there is one stage. Ask for stages=2"),
        ({"cut_codecs": "powersgd"}, "take a codec of blocks"),
        ({"cut_codecs": {"gradients": "int8"}}, "unknown key 'gradients'"),
    ],
)
def test_codecs_are_refused_where_they_do_not_apply(asked: Any, said: str) -> None:
    given = {**ASKED, "stages": 2, "cut_codecs": "int8", **asked}
    with pytest.raises(PlanError, match=said):
        autopar.plan(descended(chain_loss), weights(), batch(), **given)
