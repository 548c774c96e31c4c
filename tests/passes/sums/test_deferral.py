"""Tests where the sum of a partial gradient may wait, found from the program alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from deferral_cases import (
    LAYERS,
    PARTS,
    ROWS,
    SPLIT,
    TIMES,
    WIDTH,
    Loss,
    W,
    X,
    descent,
    find,
    layers,
    ones,
    square,
    updated,
)


class TestOneContribution:
    """A gradient that one contraction makes."""

    def test_a_gradient_waits_through_its_transpose(self) -> None:
        found = find(descent(square), {"w": W}, X)

        (deferral,) = found.deferrals
        assert found.makers(deferral) == ["dot_general"]
        assert found.gradients() == [("transpose", (WIDTH, WIDTH))]
        assert len(deferral.members) == 2
        assert not deferral.hoisted
        assert deferral.sharing(deferral.ends[0]) == 1

    def test_a_bias_is_summed_over_rows(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

        found = find(descent(loss), {"b": ones(WIDTH), "w": W}, X)

        assert sorted(found.gradients()) == [
            ("reduce_sum", (WIDTH,)),
            ("transpose", (WIDTH, WIDTH)),
        ]

    def test_low_precision_is_widened_on_the_way(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            out = batch.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
            return jnp.mean(out.astype(jnp.float32) ** 2)

        found = find(descent(loss), {"w": W}, X)

        (deferral,) = [deferral for deferral in found.deferrals if deferral.gradients]
        assert found.gradients() == [("convert_element_type", (WIDTH, WIDTH))]
        types = {found.graph.values[v].dtype for v in deferral.members}
        assert types == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}

    def test_what_the_loss_slices_is_padded_with_zeros(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((batch @ params["w"][:, 2:6]) ** 2)

        assert find(descent(loss), {"w": W}, X).gradients() == [("pad", (WIDTH, WIDTH))]

    def test_the_optimizer_does_not_matter(self) -> None:
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))

        def step(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(jax.grad(square)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        found = find(step, {"w": W}, tx.init({"w": W}), X)

        assert found.gradients() == [("transpose", (WIDTH, WIDTH))]

    def test_a_convolution(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            out = jax.lax.conv_general_dilated(
                batch, params["k"], (1, 1), "SAME", feature_group_count=groups
            )
            return jnp.mean(out**2)

        images = ones(4, 2, 8, 8)
        groups = 1
        whole = find(descent(loss), {"k": ones(4, 2, 3, 3)}, images)
        groups = 2
        grouped = find(descent(loss), {"k": ones(4, 1, 3, 3)}, images)

        assert whole.makers(whole.only) == ["conv_general_dilated"]
        # It is replayed in another form, which no single operator contributes.
        assert not grouped.gradients()


class TestSeveralContributions:
    """Contributions that are added have one sum."""

    def test_tied_weights(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["w"].T) ** 2)

        found = find(descent(loss), {"w": W}, X)

        deferral = found.only
        assert found.makers(deferral) == ["dot_general", "dot_general"]
        assert found.gradients() == [("add_any", (WIDTH, WIDTH))]
        assert deferral.sharing(deferral.ends[0]) == 2

    def test_a_table_that_is_looked_up_and_multiplied(self) -> None:
        """The look-up's gradient is scattered into zeros."""

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((params["t"][batch] @ params["t"].T) ** 2)

        tokens = jnp.zeros((ROWS,), jnp.int32)
        found = find(descent(loss), {"t": ones(32, WIDTH)}, tokens)

        assert found.makers(found.only) == ["dot_general", "scatter-add"]
        assert found.gradients() == [("add_any", (32, WIDTH))]

    def test_a_scatter_into_something_else_is_no_contribution(self) -> None:
        """Each device would add it once more."""

        @jax.custom_vjp
        def looked_up(table: jax.Array, batch: jax.Array) -> jax.Array:
            return table[batch]

        looked_up.defvjp(
            lambda table, batch: (table[batch], (table, batch)),
            lambda kept, g: ((start * kept[0]).at[kept[1]].add(g), None),
        )

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean(looked_up(params["t"], batch) ** 2)

        tokens = jnp.zeros((ROWS,), jnp.int32)
        start = 0.01

        assert not find(descent(loss), {"t": ones(32, WIDTH)}, tokens).gradients()

    def test_two_halves_of_one_parameter(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            left, right = jnp.split(params["w"], 2, axis=1)
            return jnp.mean((batch @ left) ** 2) + jnp.mean(jnp.tanh(batch @ right))

        found = find(descent(loss), {"w": W}, X)

        assert found.gradients() == [("concatenate", (WIDTH, WIDTH))]
        assert found.only.sharing(found.only.ends[0]) == 2

    def test_two_parameters_of_one_product(self) -> None:
        """One deferral with two ends, of one contraction."""

        def loss(params: Any, batch: Any) -> jax.Array:
            joined = jnp.concatenate([params["a"], params["b"]], axis=1)
            return jnp.mean((batch @ joined) ** 2)

        found = find(descent(loss), {"a": W, "b": W}, X)

        assert found.gradients() == [("split", (WIDTH, WIDTH))] * 2
        deferral = found.only
        ((_, ends),) = deferral.reach
        assert ends == deferral.ends
        assert deferral.gradients == frozenset(deferral.ends)

    def test_what_is_whole_may_be_added(self) -> None:
        """A penalty's gradient needs no sum; it joins that of the loss."""

        def loss(params: Any, batch: Any) -> jax.Array:
            return square(params, batch) + 0.1 * jnp.sum(params["w"] ** 2)

        found = find(descent(loss), {"w": W}, X)

        assert found.gradients() == [("add_any", (WIDTH, WIDTH))]
        assert found.makers(found.only) == ["dot_general"]


def accumulated(loss: Loss) -> Callable[..., Any]:
    """Microbatches in a scan that also sums the losses."""

    def step(params: Any, batch: Any) -> Any:
        def one(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, part)
            return (jax.tree.map(jnp.add, total[0], grads), total[1] + value), None

        start = jax.tree.map(jnp.zeros_like, params), 0.0
        (grads, value), _ = jax.lax.scan(one, start, batch)
        return updated(params, grads), value

    return step


class TestLoops:
    """What a loop only adds up is summed once, after the loop."""

    def test_a_recurrence(self) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(x @ params["in"] + h @ params["rec"])
                return h, h

            return jnp.mean(jax.lax.scan(cell, ones(ROWS, WIDTH), batch)[1] ** 2)

        found = find(descent(loss), {"in": W, "rec": W}, ones(TIMES, ROWS, WIDTH))

        assert found.gradients() == [("carry", (WIDTH, WIDTH))] * 2
        for deferral in found.deferrals:
            assert deferral.hoisted == bool(deferral.gradients)
            for value in deferral.gradients and deferral.ends:
                # The last result of a carry is what is left after the loop.
                assert found.producer[value].outputs[-1] == value

    def test_micro_batches(self) -> None:
        found = find(accumulated(square), {"w": W}, SPLIT)

        assert found.gradients() == [("carry", (WIDTH, WIDTH))]
        assert found.only.hoisted

    def test_the_carry_inside_is_on_the_way(self) -> None:
        """From one iteration to the next the sum is not taken either."""
        found = find(accumulated(square), {"w": W}, SPLIT)

        (end,) = found.only.ends
        assert set(found.producer[end].outputs) <= found.only.members
        assert found.kinds(found.only) == {"dot_general", "transpose", "add", "carry"}

    def test_micro_batches_that_are_averaged(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            def one(total: Any, part: Any) -> Any:
                grads = jax.grad(square)(params, part)
                return jax.tree.map(lambda t, g: t + g / PARTS, total, grads), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            return updated(params, jax.lax.scan(one, zeros, batch)[0])

        found = find(step, {"w": W}, SPLIT)

        assert found.only.hoisted
        assert "div" in found.kinds(found.only)

    @pytest.mark.parametrize("known", [True, False])
    def test_counting_loops(self, known: bool) -> None:
        """With a bound that is an array it is a `while`, otherwise a scan."""

        def step(params: Any, batch: Any, count: Any) -> Any:
            def one(k: Any, total: Any) -> Any:
                grads = jax.grad(square)(params, batch[k])
                return jax.tree.map(jnp.add, total, grads)

            zeros = jax.tree.map(jnp.zeros_like, params)
            trips = PARTS if known else count
            return updated(params, jax.lax.fori_loop(0, trips, one, zeros))

        found = find(step, {"w": W}, SPLIT, jnp.int32(PARTS))

        assert found.gradients() == [("carry", (WIDTH, WIDTH))]
        assert found.only.hoisted

    def test_layers_are_stacked(self) -> None:
        """Each iteration makes its own part: nothing is summed more often."""
        found = find(descent(layers), {"w": ones(LAYERS, WIDTH, WIDTH)}, X)

        assert found.gradients() == [("stack_step", (LAYERS, WIDTH, WIDTH))]
        assert not found.only.hoisted

    def test_layers_within_micro_batches(self) -> None:
        params = {"w": ones(LAYERS, WIDTH, WIDTH)}
        found = find(accumulated(layers), params, SPLIT)

        assert found.gradients() == [("carry", (LAYERS, WIDTH, WIDTH))]
        assert found.only.hoisted
        assert "stack_step" in found.kinds(found.only)


class TestNotHoisted:
    """A carry that is more than a sum is due in every iteration."""

    @staticmethod
    def check(step: Callable[..., Any]) -> None:
        found = find(step, {"w": W}, SPLIT)
        assert found.deferrals
        assert not any(deferral.hoisted for deferral in found.deferrals)
        assert "carry" not in {
            k for deferral in found.deferrals for k in found.kinds(deferral)
        }

    def test_several_steps_with_momentum(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            def one(carried: Any, part: Any) -> Any:
                w, momentum = carried
                momentum = momentum + jax.grad(square)({"w": w}, part)["w"]
                return (w - 0.1 * momentum, momentum), None

            start = params["w"], jnp.zeros_like(params["w"])
            return {"w": jax.lax.scan(one, start, batch)[0][0]}

        self.check(step)

    def test_a_sum_that_fades(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            def one(total: Any, part: Any) -> Any:
                return 0.5 * total + jax.grad(square)(params, part)["w"], None

            start = jnp.zeros_like(params["w"])
            return {"w": params["w"] - jax.lax.scan(one, start, batch)[0]}

        self.check(step)

    def test_a_norm_of_the_sum_so_far(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            def one(total: Any, part: Any) -> Any:
                total = total + jax.grad(square)(params, part)["w"]
                return total, jnp.sum(total**2)

            total, norms = jax.lax.scan(one, jnp.zeros_like(params["w"]), batch)
            return {"w": params["w"] - total}, norms

        self.check(step)

    def test_a_condition_on_the_sum_so_far(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            def one(carried: Any) -> Any:
                k, total = carried
                return k + 1, total + jax.grad(square)(params, batch[k])["w"]

            _, total = jax.lax.while_loop(
                lambda carried: (carried[0] < PARTS) & (carried[1].sum() < 1e6),
                one,
                (0, jnp.zeros_like(params["w"])),
            )
            return {"w": params["w"] - total}

        self.check(step)


class TestEnds:
    """Where a sum is due, and which ends are gradients."""

    def test_the_update_ends_the_way(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            grads = jax.grad(square)(params, batch)
            return {"w": params["w"] - 0.1 * jnp.sign(grads["w"])}

        assert find(step, {"w": W}, X).gradients() == [("transpose", (WIDTH, WIDTH))]

    def test_several_readers_end_it(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            grads = jax.grad(square)(params, batch)
            return updated(params, grads), optax.tree.norm(grads)

        assert find(step, {"w": W}, X).gradients() == [("transpose", (WIDTH, WIDTH))]

    def test_what_is_not_linear_ends_it(self) -> None:
        """Within the backward pass: the end is no gradient, the update reads others."""

        @jax.custom_vjp
        def bounded(w: jax.Array) -> jax.Array:
            return w

        bounded.defvjp(lambda w: (w, None), lambda _, g: (jnp.tanh(g),))

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((batch @ bounded(params["w"])) ** 2)

        found = find(descent(loss), {"w": W}, X)

        (deferral,) = found.deferrals
        assert not deferral.gradients
        assert found.kinds(deferral) == {"dot_general", "transpose"}

    def test_a_product_of_two_sums_is_no_sum_of_products(self) -> None:
        """Recomputed in the backward pass, both may be partial over the same axes."""

        def loss(params: Any, batch: Any) -> jax.Array:
            covariances = batch.T @ batch, batch.T @ jnp.tanh(batch)
            return jnp.sum(params["w"] * covariances[0] * covariances[1])

        found = find(descent(jax.checkpoint(loss)), {"w": W}, X)

        assert len(found.deferrals) == 2
        assert not found.gradients() or found.makers(found.only) == ["dot_general"]
        for deferral in found.deferrals:
            assert len(deferral.contributions) == 1

    def test_a_gradient_that_is_returned(self) -> None:
        """The caller gets the sum, in the form that it asks for."""

        def step(params: Any, batch: Any) -> Any:
            grads = jax.grad(square)(params, batch)
            return updated(params, grads), grads

        found = find(step, {"w": W}, X)

        returned = found.graph.outputs[-1]
        assert all(
            returned not in deferral.members - set(deferral.ends)
            for deferral in found.deferrals
        )

    def test_an_activation_is_no_gradient(self) -> None:
        """What goes back to an earlier layer is read by the backward pass."""

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)

        found = find(descent(loss), {"a": W, "b": W}, X)

        assert found.gradients() == [("transpose", (WIDTH, WIDTH))] * 2
        activations = [
            deferral for deferral in found.deferrals if not deferral.gradients
        ]
        assert [found.graph.values[w.ends[0]].shape for w in activations] == [
            (ROWS, WIDTH)
        ]

    def test_a_branch_keeps_its_own(self) -> None:
        """Another branch makes another gradient: the sum is due within each."""

        def loss(params: Any, batch: Any) -> jax.Array:
            out = jax.lax.cond(
                batch.sum() > 0,
                lambda x: jnp.tanh(x @ params["w"]),
                lambda x: x @ params["w"],
                batch,
            )
            return jnp.mean(out**2)

        assert not find(descent(loss), {"w": W}, X).gradients()

    def test_no_backward_pass_no_ways(self) -> None:
        found = find(
            lambda params, batch: {"w": params["w"] - batch.T @ batch}, {"w": W}, X
        )

        assert found.deferrals == ()

    def test_the_same_program_has_the_same_ways(self) -> None:
        first, second = (find(accumulated(layers), {"w": ones(2, WIDTH, WIDTH)}, SPLIT)
                         for _ in range(2))  # fmt: skip
        assert first.deferrals == second.deferrals
