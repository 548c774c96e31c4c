"""Tests that programs with rematerialised layers give the plain results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch_cases import evaluated
from remat_cases import CASES, DEPTH, again, analysed, blocks, descent, drawn, flat, mlp
from remat_cases import results as results_of

from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.planner.scheme import is_repeated
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import Role
from autopar_passes.graph.verify import verify
from autopar_passes.program.equations import Program, Region
from autopar_passes.remat.copies import DOTS, FULL, RematError
from autopar_passes.remat.loops import Recomputation, recompute_layers


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_the_same(name: str) -> None:
    """Bit for bit, where no compiler fuses them otherwise."""
    plain, arrays = analysed(name), flat(name)
    expected = results_of(plain, arrays)

    for layers, level in ((1, "full"), *((None, level) for level in (FULL, DOTS))):
        found = again(plain, layers, level)

        verify(found.graph)
        for a, b in zip(results_of(found, arrays), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_values_are_made_once_and_before_they_are_read(name: str) -> None:
    check(again(analysed(name), None).program)


def check(program: Program) -> None:
    check_region(program.body, set())
    indices = [eqn.index for eqn in program.by_index().values()]
    assert len(indices) == len(set(indices))


def check_region(region: Region, known: set[int]) -> None:
    assert known.isdisjoint(region.inputs)
    known.update(region.inputs)
    for eqn in region.equations:
        assert known.issuperset(a for a in eqn.inputs if isinstance(a, int))
        for inner in eqn.regions:
            check_region(inner, known)
        assert known.isdisjoint(eqn.outputs)
        known.update(eqn.outputs)
    assert known.issuperset(a for a in region.outputs if isinstance(a, int))


def repeated(analysis: Analysis) -> list[str]:
    return [op.kind for op in analysis.graph.operators if is_repeated(op)]


def test_only_what_the_backward_pass_needs_is_computed_again() -> None:
    """Both products of a layer, but for the one that only the next layer reads."""
    plain = analysed("mlp")

    found = repeated(again(plain, 2))

    # tanh's derivative needs its result, so both products are there.
    assert found.count("dot_general") == 4
    assert found.count("add") < 2 * len(blocks())


def test_dots_keeps_products() -> None:
    found = repeated(again(analysed("mlp"), 2, "dots"))

    assert "dot_general" not in found
    assert "tanh" in found


def test_what_is_computed_again_is_of_the_backward_pass() -> None:
    found = again(analysed("mlp"), 2).graph

    assert {op.role for op in found.operators if is_repeated(op)} == {Role.BACKWARD}


def test_roles_and_inputs_stay() -> None:
    plain = analysed("batch norm")
    found = again(plain, None)

    assert found.graph.inputs == plain.graph.inputs
    assert found.carried_arguments == plain.carried_arguments


def test_each_layer_waits_for_its_cotangent() -> None:
    """The barrier takes a value of the backward pass: nothing starts too early."""
    found = again(analysed("mlp"), 2)
    made = {v: op.role for op in found.graph.operators for v in op.outputs}
    barriers = [
        eqn
        for eqn in found.program.body.equations
        if eqn.primitive == "optimization_barrier"
    ]

    assert len(barriers) == 2
    for eqn in barriers:
        given = [made[v] for v in eqn.inputs if isinstance(v, int)]
        assert Role.BACKWARD in given


def test_the_compiler_keeps_less() -> None:
    step, args = descent(mlp), (blocks(6), drawn(512, 16))
    plain = analyse(step, args)

    def temporary_bytes(analysis: Analysis) -> int:
        run = jax.jit(
            lambda *x: evaluated(analysis.program, x), compiler_options=WITH_BARRIERS
        )
        compiled = run.lower(*jax.tree.leaves(args)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    most = temporary_bytes(plain)
    assert temporary_bytes(again(plain, 5, "dots")) < 0.8 * most
    assert temporary_bytes(again(plain, 5)) < 0.5 * most


def test_effects_stay_once() -> None:
    seen: list[float] = []

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
            jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return jnp.mean(x**2)

    args = ([drawn(16, 16, seed=k) for k in range(DEPTH)], drawn(8, 16))
    found = again(analyse(descent(loss), args), None)
    evaluated(found.program, jax.tree.leaves(args))
    jax.effects_barrier()

    assert len(seen) == DEPTH


def test_wrong_layers_are_refused() -> None:
    plain = analysed("mlp")
    right = again(plain, 1).remat
    wanted = Recomputation(right.starts, right.layers)

    def rewrite(**changes: Any) -> None:
        recompute_layers(
            plain.program, plain.graph, dataclasses.replace(wanted, **changes), ()
        )

    with pytest.raises(RematError, match="there are full, dots, kernels and names="):
        rewrite(level="half")
    with pytest.raises(RematError, match="layer 7: there are"):
        rewrite(layers=(7,))
    with pytest.raises(RematError, match="different top-level equations"):
        rewrite(starts=(10_000,))
    with pytest.raises(RematError, match="different top-level equations"):
        rewrite(starts=right.starts[::-1])
