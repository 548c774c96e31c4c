"""A loss that is computed in blocks of tokens, against the loss of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import loss_steps
import numpy as np
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.microbatches.loss_blocks import loss_in_blocks
from autopar_passes.microbatches.losses import find_losses
from autopar_passes.program.equations import Program, evaluate, walk
from autopar_passes.program.trace import open_arguments, trace_call


def traced(step: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """The program of a step, and its sharding rules."""
    found = trace_call(step, open_arguments(step, args))
    rules = {op.equation: op.rule for op in step_graph(found).operators}
    return found.program, rules


def largest(program: Program) -> int:
    """The number of elements of the largest array that the program computes."""
    made = (v for eqn in walk(program.body) for v in eqn.outputs)
    return max(program.values[v].size for v in made)


def check_equal(
    plain: Program, made: Program, args: Any, tolerance: float = 1e-5
) -> None:
    flat = jax.tree.leaves(args)
    for a, b in zip(evaluate(plain, *flat), evaluate(made, *flat), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, tolerance, tolerance * np.abs(b).max())


def check_blocks(step: Callable[..., Any], args: Any, tolerance: float = 1e-5) -> None:
    """Compares the program with the program in 8 blocks, which has no large array."""
    program, rules = traced(step, *args)
    found = find_losses(program, rules)
    assert found.elements, found.refused
    assert found.tokens % 8 == 0

    made = loss_in_blocks(program, rules, 8)

    assert largest(made) <= found.elements / 4
    check_equal(program, made, args, tolerance)


@pytest.mark.parametrize("form", loss_steps.FORMS)
def test_blocks_leave_results_as_they_are(form: str) -> None:
    loss = loss_steps.FORMS[form]
    step, state, batch = loss_steps.training(loss, layers=1)

    check_blocks(step, (state, *batch), 0.02 if form == "of_half" else 1e-5)


@pytest.mark.parametrize(
    "how",
    [{"tied": True}, {"bias": True}, {"scanned": True}, {"again": True}, {"rows": 1}],
    ids=lambda how: "-".join(how),
)
def test_models_of_any_form_have_a_loss_in_blocks(how: dict[str, Any]) -> None:
    step, state, batch = loss_steps.training(layers=2, **how)

    check_blocks(step, (state, *batch))


def test_sums_in_half_precision_are_added_in_single_precision() -> None:
    """The gradient is as near to that of a step in float32 as without blocks."""
    half = loss_steps.training(loss_steps.of_half, layers=0, tokens=512)
    exact = loss_steps.training(loss_steps.masked, layers=0, tokens=512)
    args = jax.tree.leaves((half[1], *half[2]))
    program, rules = traced(half[0], half[1], *half[2])
    made = loss_in_blocks(program, rules, 128)
    true = jax.tree.leaves(exact[0](exact[1], *exact[2]))

    def error(found: list[Any]) -> float:
        pairs = [(a, b) for a, b in zip(found, true, strict=True) if b.ndim == 2]
        return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs[-2:])

    assert error(evaluate(made, *args)) < 1.2 * error(evaluate(program, *args))


def test_a_loss_in_the_loop_over_microbatches_is_found() -> None:
    def step(matrix: Any, x: Any, labels: Any) -> Any:
        def loss_of(matrix: Any, x: Any, labels: Any) -> Any:
            return loss_steps.PER_TOKEN(x @ matrix, labels).sum()

        def turn(total: Any, part: Any) -> Any:
            found = jax.value_and_grad(loss_of)(matrix, *part)
            return jax.tree.map(jnp.add, total, found), None

        zero = jnp.float32(0), jnp.zeros_like(matrix)
        return jax.lax.scan(turn, zero, (x, labels))[0]

    x = jax.random.normal(jax.random.key(0), (2, 4, 16, 8))
    matrix = jax.random.normal(jax.random.key(1), (8, 256))

    check_blocks(step, (matrix, x, jnp.ones((2, 4, 16), jnp.int32)))


def test_two_heads_are_both_in_blocks() -> None:
    """A second head predicts the token after the next one."""

    def step(heads: Any, x: Any, labels: Any) -> Any:
        def loss_of(heads: Any) -> Any:
            losses = [
                loss_steps.PER_TOKEN(x @ w, y)
                for w, y in zip(heads, labels, strict=True)
            ]
            return sum(y.mean() for y in losses)

        return jax.value_and_grad(loss_of)(heads)

    x = jax.random.normal(jax.random.key(0), (4, 32, 8))
    heads = list(jax.random.normal(jax.random.key(1), (2, 8, 256)))
    labels = jax.random.randint(jax.random.key(2), (2, 4, 32), 0, 256)

    check_blocks(step, (heads, x, labels))


def test_the_loss_of_an_evaluation_is_in_blocks() -> None:
    def step(matrix: Any, x: Any, labels: Any) -> Any:
        return loss_steps.PER_TOKEN(jnp.tanh(x) @ matrix, labels)

    x = jax.random.normal(jax.random.key(0), (4, 32, 8))
    matrix = jax.random.normal(jax.random.key(1), (8, 256))

    check_blocks(step, (matrix, x, jnp.ones((4, 32), jnp.int32)))


def counted_by_logits(logits: Any, labels: Any, mask: Any) -> Any:
    """The number of tokens in the mean depends on the logits."""
    seen = mask * (logits.max(-1) < 20)
    return loss_steps.masked_mean(loss_steps.PER_TOKEN(logits, labels), seen), ()


def root(logits: Any, labels: Any, mask: Any) -> Any:
    del mask
    return jnp.sqrt(loss_steps.PER_TOKEN(logits, labels).mean()), ()


def of_neighbours(logits: Any, labels: Any, mask: Any) -> Any:
    """The logits of a token depend on those of the token before."""
    return loss_steps.masked(logits + jnp.roll(logits, 1, 1), labels, mask)


def normalised_over_tokens(logits: Any, labels: Any, mask: Any) -> Any:
    return loss_steps.masked(logits - logits.mean((0, 1)), labels, mask)


def largest_first(logits: Any, labels: Any, mask: Any) -> Any:
    """The loss of the tokens that are hardest to predict."""
    del mask
    losses = loss_steps.PER_TOKEN(logits, labels).reshape(-1)
    return jnp.sort(losses)[-8:].mean(), ()


def returned(logits: Any, labels: Any, mask: Any) -> Any:
    return loss_steps.masked(logits, labels, mask)[0], logits


def with_noise(logits: Any, labels: Any, mask: Any) -> Any:
    noise = jax.random.normal(jax.random.key(0), logits.shape)
    return loss_steps.masked(logits + noise, labels, mask)


def of_each_position(logits: Any, labels: Any, mask: Any) -> Any:
    place = jax.lax.broadcasted_iota(jnp.float32, logits.shape, 1)
    return loss_steps.masked(logits * place, labels, mask)


def shifted(logits: Any, labels: Any, mask: Any) -> Any:
    return loss_steps.masked(logits[:, :-1], labels[:, 1:], mask[:, 1:])


def by_number(logits: Any, labels: Any, mask: Any) -> Any:
    logs = jax.nn.log_softmax(logits).reshape(-1, logits.shape[-1])
    found = logs[jnp.arange(labels.size), labels.reshape(-1)]
    return -loss_steps.masked_mean(found, mask.reshape(-1)), ()


def printed(logits: Any, labels: Any, mask: Any) -> Any:
    jax.debug.print("{}", logits)
    return loss_steps.masked(logits, labels, mask)


REFUSED: Mapping[str, tuple[Any, str]] = {
    f.__name__: (f, why)
    for f, why in (
        (counted_by_logits, "needs a sum over all tokens"),
        (root, "needs a sum over all tokens"),
        (normalised_over_tokens, "needs a sum over all tokens"),
        (of_neighbours, ""),
        (largest_first, ""),
        (returned, "returns the logits"),
        (with_noise, ""),
        (of_each_position, "positions of tokens"),
        (shifted, "takes some of the tokens"),
        (by_number, "positions of tokens"),
        (printed, "has side effects"),
    )
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_losses_are_refused(name: str) -> None:
    loss, why = REFUSED[name]
    step, state, batch = loss_steps.training(loss, layers=1, rows=1)
    program, rules = traced(step, state, *batch)

    found = find_losses(program, rules)

    assert not found.elements
    assert found.refused
    assert why in found.refused[0]
    assert loss_in_blocks(program, rules, 8) is program


def test_a_number_of_blocks_that_does_not_divide_the_tokens_changes_nothing() -> None:
    step, state, batch = loss_steps.training(layers=1)
    program, rules = traced(step, state, *batch)

    assert loss_in_blocks(program, rules, 7) is program
    assert loss_in_blocks(program, rules, 1) is program


def test_an_array_with_two_meanings_is_refused() -> None:
    """The same numbers are added to words and to tokens, whose numbers are equal."""

    def step(matrix: Any, x: Any, numbers: Any) -> Any:
        def loss_of(matrix: Any) -> Any:
            logits = x @ matrix + numbers
            return (jax.nn.logsumexp(logits, -1) * numbers).sum()

        return jax.value_and_grad(loss_of)(matrix)

    x = jax.random.normal(jax.random.key(0), (64, 8))
    program, rules = traced(step, jnp.ones((8, 64)), x, jnp.arange(64.0))

    found = find_losses(program, rules)

    made = loss_in_blocks(program, rules, 4)
    if found.elements:
        check_equal(program, made, (jnp.ones((8, 64)), x, jnp.arange(64.0)))
    else:
        assert found.refused


def test_layers_without_a_loss_are_no_loss() -> None:
    """The wide product in the middle of a layer reduces nothing."""

    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            y = jax.nn.silu(x @ params["up"]) @ params["down"]
            return ((y - x) ** 2).mean()

        return jax.value_and_grad(loss_of)(params)

    shapes = {"up": jnp.ones((8, 64)), "down": jnp.ones((64, 8))}
    program, rules = traced(step, shapes, jnp.ones((4, 16, 8)))

    assert find_losses(program, rules) == find_losses(program, rules, 1e9)
    assert not find_losses(program, rules).refused


def test_blocks_need_less_memory() -> None:
    """The compiled program holds the logits of one block."""
    step, state, batch = loss_steps.training(layers=1, tokens=512, rows=4, words=2048)
    args = (state, *batch)
    program, rules = traced(step, *args)

    def temporary_bytes(program: Program) -> int:
        run = jax.jit(lambda *flat: evaluate(program, *flat))
        compiled = run.lower(*jax.tree.leaves(args)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits_bytes = 4 * 4 * 512 * 2048
    before = temporary_bytes(program)
    assert before > logits_bytes
    assert temporary_bytes(loss_in_blocks(program, rules, 16)) < before - logits_bytes
