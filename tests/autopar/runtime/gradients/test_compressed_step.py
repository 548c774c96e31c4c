"""Tests steps with codecs: they train, and send the planned bytes."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import compressed_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressed_cases import CASES, WORKERS, case_of
from flax import nnx
from planner_steps import mlp_loss

from autopar.steps.sums import worth_a_codec
from autopar_passes.audit.partitioned import AuditedCollective

STEPS = 3
# Codecs by what they send: bytes, floating-point numbers, indices.
# With the part of the plain step's progress that a few steps make at least: a codec
# that sends one element of a hundred, or starts from a random basis, starts late.
CODECS = {"int4": 0.9, "powersgd:rank=2": 0.4, "blocktopk": 0.2}


# A copy of a float32 argument, with its shape.
COPIED = re.compile(r" = f32\[([\d,]+)\]\S* copy\(%?param[.\d]*\)")


def poisoned(leaf: Any) -> Any:
    return leaf * np.nan if leaf.ndim else leaf


def bits(state: Any) -> list[bytes]:
    """The arrays of a state, also of NNX objects."""
    if isinstance(state[0], nnx.Module):
        state = nnx.state(state)
    return [
        np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes()
        for x in jax.tree.leaves(state)
    ]


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@functools.cache
def trained(name: str, codec: str) -> tuple[Any, Any, list[float]]:
    """The step, its state and its losses after some steps."""
    case = case_of(name)
    step = case.parallel(codec, telemetry_every=1)
    state, losses = case.train(step, case.state(), case.batches(STEPS))
    return step, state, losses


@functools.cache
def program(name: str, codec: str) -> Any:
    step, state, _ = trained(name, codec)
    return cases.compiled(step, *state, case_of(name).batch(0))


@functools.cache
def sent(name: str, codec: str) -> tuple[AuditedCollective, ...]:
    """The collectives of a compiled step."""
    step, _, _ = trained(name, codec)
    return cases.collectives(program(name, codec), step.plan)


def of_codecs(name: str, codec: str) -> list[AuditedCollective]:
    """The collectives of the codecs, without those of telemetry.

    Some sums of the forward pass over several axes, such as that of the loss, are also
    stated in the program (``jvp``).
    """
    return [
        c
        for c in sent(name, codec)
        if "shard_map" in c.source
        and "telemetry" not in c.source
        and "jvp" not in c.source
    ]


@pytest.mark.parametrize("name", CASES)
class TestEveryCase:
    """Each form of state and each kind of parallelism."""

    def test_int8_trains_almost_as_the_plain_step(self, name: str) -> None:
        _, _, losses = trained(name, "int8")

        np.testing.assert_allclose(losses, cases.plain_losses(name, STEPS), rtol=2e-2)
        assert losses[-1] < losses[0]

    def test_every_large_gradient_is_compressed(self, name: str) -> None:
        step, _, _ = trained(name, "int8")

        large = [g for g in step.plan.gradients if worth_a_codec(g.shape)]
        matrices = [
            path
            for path, shape in step.plan.shapes.items()
            if worth_a_codec(shape)
            and not path.startswith(("batch", "optimizer", "state/opt", "state/0"))
            and "/mu/" not in path
            and "/nu/" not in path
        ]
        assert sorted(g.name for g in large) == sorted(matrices)
        assert {g.codec for g in large} == {"int8"}
        assert {g.codec for g in step.plan.gradients if g not in large} <= {"dense"}

    def test_what_is_sent_is_what_was_planned(self, name: str) -> None:
        step, _, _ = trained(name, "int8")

        found = of_codecs(name, "int8")

        wire = sum(g.wire_bytes for g in step.plan.gradients)
        within = sum(g.within_bytes for g in step.plan.gradients)
        assert sum(c.sent_bytes for c in found) == pytest.approx(wire + within)
        report = step.telemetry
        assert sum(r.wire_bytes for r in report.values()) == pytest.approx(wire)

    def test_gradients_travel_together_as_bytes(self, name: str) -> None:
        """One message a round, however many gradients; floats only the small ones."""
        step, _, _ = trained(name, "int8")
        coded = [g for g in step.plan.gradients if g.codec == "int8"]
        assert len(coded) > 1

        scattered = all(g.scatter for g in coded)
        rounds = ["all-to-all"] if scattered else ["all-gather", "all-to-all"]
        found = cases.payloads(program(name, "int8"))
        # Over fast links whole sums are gathered as they are.
        plain = any(g.within and not g.keeps for g in step.plan.gradients)
        around = [("all-gather", "f32")] if plain else []
        assert found == [*around, *((k, "u8") for k in rounds)]
        small = [g for g in step.plan.gradients if g.codec == "dense"]
        reduced = [c for c in of_codecs(name, "int8") if c.kind == "all_reduce"]
        assert sum(c.nbytes for c in reduced) == sum(
            4 * math.prod(g.local_shape) for g in small
        )

    def test_no_gradient_is_sent_as_it_is(self, name: str) -> None:
        """Over the axes that sum gradients, the backward pass reduces none."""
        step, _, _ = trained(name, "int8")
        coded = [g for g in step.plan.gradients if g.codec == "int8"]
        least = min(4 * math.prod(g.local_shape) for g in coded)
        (axes,) = {g.axes for g in coded}

        backward = [
            c
            for c in sent(name, "int8")
            if "transpose(" in c.source and set(c.axes) & set(axes)
        ]
        assert all(c.nbytes < least for c in backward)

    def test_a_gradient_that_is_not_finite_leaves_no_trace(self, name: str) -> None:
        """Wherever the plan keeps the state, and whatever makes it."""
        case, (step, _, _) = case_of(name), trained(name, "int8")
        state, _ = case.train(step, case.state(), case.batches(1))
        bad = case.batch(1)
        if "x" in bad:
            bad = {**bad, "x": np.full_like(bad["x"], np.inf)}
        else:
            state = jax.tree.map(poisoned, state)
        before = bits(state)

        state, (loss,) = case.train(step, state, [bad])

        assert not np.isfinite(loss)
        assert bits(state) == before
        with pytest.warns(UserWarning, match="not finite; the step was skipped"):
            assert next(iter(step.telemetry.values())).skipped == 1

    def test_replicas_stay_the_same(self, name: str) -> None:
        """To the bit: devices that hold the same part of an array."""
        _, state, _ = trained(name, "int8")

        for leaf in jax.tree.leaves(state):
            if is_key(leaf):
                continue
            parts: dict[str, np.ndarray] = {}
            for shard in leaf.addressable_shards:
                data = np.asarray(shard.data)
                first = parts.setdefault(str(shard.index), data)
                assert first.tobytes() == data.tobytes()


@pytest.mark.parametrize("name", ["data_parallel", "sharded_state", "nnx"])
def test_moments_are_updated_where_they_lie(name: str) -> None:
    """None is copied first for what the parameters are made of."""
    lines = program(name, "int8").as_text().splitlines()
    start = next(k for k, x in enumerate(lines) if x.startswith("ENTRY"))
    copied = [m for x in lines[start:] if (m := COPIED.search(x))]
    assert sum(math.prod(map(int, m[1].split(","))) for m in copied) < 128


@pytest.mark.parametrize(
    "name", ["data_parallel", "split_over_levels", "tensor_parallel", "tied_embedding"]
)
def test_dense_trains_as_the_plain_step(name: str) -> None:
    """A codec that loses nothing changes nothing but the order of sums."""
    step, _, losses = trained(name, "dense")

    np.testing.assert_allclose(losses, cases.plain_losses(name, STEPS), rtol=1e-5)
    assert {g.codec for g in step.plan.gradients} == {"dense"}


@pytest.mark.parametrize("codec", CODECS)
class TestEveryCodec:
    """Data parallel."""

    def test_sends_what_was_planned(self, codec: str) -> None:
        step, _, _ = trained("data_parallel", codec)

        wire = sum(g.wire_bytes for g in step.plan.gradients)
        found = of_codecs("data_parallel", codec)
        assert sum(c.sent_bytes for c in found) == pytest.approx(wire)
        assert wire < sum(g.dense_bytes for g in step.plan.gradients)

    def test_trains(self, codec: str) -> None:
        _, _, losses = trained("data_parallel", codec)
        want = cases.plain_losses("data_parallel", STEPS)

        assert losses[0] == pytest.approx(want[0], rel=1e-5)
        assert losses[0] - losses[-1] > CODECS[codec] * (want[0] - want[-1])

    def test_feedback_is_what_the_codec_needs(self, codec: str) -> None:
        step, _, _ = trained("data_parallel", codec)
        state = step.compression_state["gradients"]

        for g in step.plan.gradients:
            residual = state[g.name]["residual"]
            if g.feedback:
                assert residual.shape == (WORKERS, *g.shape)
                assert residual.sharding.shard_shape(residual.shape)[0] == 1
                report = step.telemetry[g.name]
                norm = float(np.linalg.norm(np.asarray(residual, np.float64)))
                assert report.residual_norm == pytest.approx(norm, rel=1e-4)
            else:
                assert residual == ()


class TestInt8:
    """The error of one step against the bound of its codec."""

    def test_error_of_a_step(self) -> None:
        """Half a level of each worker's block, and half a level of the sum's.

        A level is the largest magnitude of a block over 127; scales are rounded
        to 16 bits.
        """
        case = cases.plain(
            mlp_loss,
            cases.MLP,
            optax.sgd(1.0),
            {"params/*": jax.sharding.PartitionSpec()},
        )
        params, _ = case.state()
        batch = case.batch(0)
        (got, _), _ = case.train(case.parallel("int8"), case.state(), [batch])
        split = jax.tree.map(lambda x: x.reshape(WORKERS, -1, cases.WIDTH), batch)
        gradient = jax.jit(jax.grad(mlp_loss))
        parts = [
            gradient(params, {name: x[k] for name, x in split.items()})
            for k in range(WORKERS)
        ]
        for layer, (before, after) in enumerate(zip(params, got, strict=True)):
            for name in ("up", "down"):
                mine = [np.asarray(p[layer][name]) / WORKERS for p in parts]
                total = sum(mine)
                largest = sum(np.abs(g).max() for g in mine) + np.abs(total).max()
                error = np.abs((before[name] - np.asarray(after[name])) - total).max()
                assert 0 < error <= 1.01 * largest / (2 * 127)


def test_tensor_parallel_gradients_are_never_gathered() -> None:
    """Codecs work on each device's part; only the data axis sums."""
    step, _, _ = trained("tensor_parallel", "int8")
    assert {g.axes for g in step.plan.gradients} == {("data",)}
    for g in step.plan.gradients:
        assert math.prod(g.local_shape) == math.prod(g.shape) / 2
    gathered = [c for c in sent("tensor_parallel", "int8") if c.kind == "all_gather"]
    assert all("shard_map" in c.source for c in gathered)


def test_sharded_state_needs_half_the_messages() -> None:
    """ZeRO: a device gets only its part of a sum, the second shot falls away."""
    step, _, _ = trained("sharded_state", "int8")
    whole, _, _ = trained("data_parallel", "int8")

    found = {g.name: g for g in step.plan.gradients if g.codec == "int8"}
    assert all(g.scatter for g in found.values())
    for g in whole.plan.gradients:
        if g.codec == "int8":
            assert not g.scatter
            assert found[g.name].wire_bytes == pytest.approx(g.wire_bytes / 2)


def test_a_recurrent_gradient_is_sent_once() -> None:
    """After the loop over time, not in it."""
    step, _, _ = trained("recurrent", "int8")

    assert all("while" not in c.source for c in of_codecs("recurrent", "int8"))
    assert {g.name for g in step.plan.gradients} == {
        "params/in",
        "params/out",
        "params/rec",
    }


def test_layouts_of_a_plan_are_kept() -> None:
    case = case_of("data_parallel")
    args = (*case.state(), case.batch(0))
    without = case.parallel("none")
    without.prepare(*args)

    step = case.parallel("int4", layouts=without.plan)
    step.prepare(*args)

    assert step.plan.inputs == without.plan.inputs
    assert step.plan.nodes == without.plan.nodes
    assert not without.plan.gradients
    assert {"int4", "dense"} == {g.codec for g in step.plan.gradients}


def test_dense_and_none_agree_on_everything() -> None:
    """Not only the losses: parameters and optimizer state."""
    states = [trained("data_parallel", codec)[1] for codec in ("none", "dense")]

    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


def test_a_product_of_two_partial_sums_is_taken_of_the_sums() -> None:
    """Both factors are recomputed in the backward pass, split over the same axis."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        return jnp.mean(params["w"] * (x.T @ x) * (x.T @ batch["y"]))

    case = cases.plain(
        jax.checkpoint(loss),
        {"w": jnp.ones((cases.WIDTH, cases.WIDTH))},
        optax.sgd(1e-3),
        {"params/*": jax.sharding.PartitionSpec()},
    )
    want, _ = case.train(jax.jit(case.step), case.state(), case.batches(1))

    got, _ = case.train(case.parallel("dense"), case.state(), case.batches(1))

    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-5)
