"""Tests telemetry that is summed over the workers together with the gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from compression_mesh import FED_BACK, WORKERS, begin, normal, program, run
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.encoding import NOT_MEASURED, SentGroup
from autopar.compression.gradient import Feedback, Gradient
from autopar.compression.synchronise import ERROR, GRADIENT, NON_FINITE, WANTED
from autopar_passes.audit.compiled import hlo_collectives

CODECS = ("dense", "bf16", "int8", "topk", "powersgd:rank=2", "predicted")
# An element of what one worker wants to send.
ODD = {"": None, "nan": np.nan, "inf": -np.inf, "square overflows": 3e19}


def gradients_of(names: tuple[str, ...], scatter_dim: int | None) -> list[Gradient]:
    return [
        Gradient(
            f"{name}-{k}",
            (8 * WORKERS, 16),
            codec,
            feedback=FED_BACK if name != "dense" and k % 2 else Feedback(),
            scatter_dim=scatter_dim,
            seed=k,
        )
        for k, name in enumerate(names)
        if (codec := parse_codec(name))
        and not codec.check((8 * WORKERS, 16), scatter=scatter_dim is not None)
    ]


@settings(deadline=None, max_examples=examples(12))
@given(
    names=st.lists(st.sampled_from(CODECS), min_size=1, max_size=3).map(tuple),
    scatter_dim=st.sampled_from([None, None, 0]),
    measured=st.booleans(),
    odd=st.sampled_from(sorted(ODD)),
)
def test_it_is_the_sum_of_the_rows_of_workers(
    names: tuple[str, ...], scatter_dim: int | None, measured: bool, odd: str
) -> None:
    gradients = gradients_of(names, scatter_dim)
    if not gradients:
        return
    partials = [normal(WORKERS, *g.shape, seed=k) for k, g in enumerate(gradients)]
    if odd:
        partials[0][1, 3, 2] = ODD[odd]

    # With one that is not finite all workers measure where norms are summed with the
    # gradients, and not only who has it.
    all_measure = measured or (bool(odd) and scatter_dim is None)
    apart = run(gradients, partials, measured=all_measure)
    together = run(gradients, partials, measured=measured, summed=True)

    for one, other in zip(apart[:2], together[:2], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = apart[2].sum(axis=0, dtype=np.float32)
    for rows in together[2]:  # the same on all workers
        np.testing.assert_array_equal(rows, together[2][0])
        bad = rows[:, NON_FINITE]
        np.testing.assert_array_equal(bad > 0, expected[:, NON_FINITE] > 0)
        norms, known = rows[:, :NON_FINITE], expected[:, :NON_FINITE]
        whole = np.isfinite(known)
        np.testing.assert_allclose(norms[whole], known[whole], rtol=1e-5)
        np.testing.assert_array_equal(np.isfinite(norms), whole)
    assert (together[2][0][:, NON_FINITE] > 0).any() == (odd in ("nan", "inf"))


def test_an_unmeasured_step_knows_the_norms_of_what_was_to_be_sent() -> None:
    gradients = gradients_of(("int8", "dense"), None)
    partials = [normal(WORKERS, *g.shape, seed=k) for k, g in enumerate(gradients)]
    rows = run(gradients, partials, measured=False, summed=True)[2][0]
    squares = [np.square(p).sum() for p in partials]
    np.testing.assert_allclose(rows[:, WANTED], squares, rtol=1e-5)
    assert (rows[:, ERROR : GRADIENT + 1] == NOT_MEASURED).all()


@pytest.mark.parametrize("names", [("int8", "dense"), ("int8", "dense", "int8")])
def test_norms_travel_with_the_first_sums(names: tuple[str, ...]) -> None:
    """Outside the branch of measured steps no message is telemetry's own."""
    gradients = tuple(gradients_of(names, None))

    def sums(**options: Any) -> list[float]:
        made = program(gradients, **options)
        partials = [normal(WORKERS, *g.shape) for g in gradients]
        lowered = made.lower(partials, begin(gradients), np.int32(0))
        text = lowered.compile().as_text()
        found = hlo_collectives(text, [("data", WORKERS)])
        return sorted(
            c.nbytes
            for c in found
            if c.kind == "all_reduce" and "telemetry" not in c.source
        )

    dense = sum(4.0 * g.size for g in gradients if g.codec.name == "dense")
    assert sums() == [dense]
    assert sums(measured=False, summed=True) == [dense + 4.0 * len(gradients)]


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8"])
def test_a_branch_that_is_seldom_taken_reads_no_decoded_sum(codec: str) -> None:
    """What a branch reads has to be in memory: a codec's sum is decoded in it anew."""
    gradient = Gradient("w", (64 * WORKERS, 256), parse_codec(codec))
    traced = program((gradient,), measured=False, summed=True).trace(
        [normal(WORKERS, *gradient.shape)], begin((gradient,)), np.int32(0)
    )

    def reads(jaxpr: Any, found: list[list[Any]]) -> None:
        """The arrays that branches read to count the elements of a gradient."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "cond":
                if [v.aval.shape for v in eqn.outvars] == [(1,)]:
                    found.append([var.aval for var in eqn.invars[1:]])
                continue
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                reads(inner, found)

    found: list[list[Any]] = []
    reads(traced.jaxpr.jaxpr, found)
    assert found, "no branch counts the sums that overflow"
    decoded = [
        aval
        for read in found
        for aval in read
        if aval.dtype == np.float32 and aval.size >= gradient.size
    ]
    assert not decoded


def test_a_sum_that_is_decoded_anew_is_counted_alike() -> None:
    total = jnp.array([1.0, np.inf, 2.0, np.nan], np.float32)
    sent = SentGroup(total, total, jnp.zeros(4), (1,), again=lambda: total)
    assert float(sent.overflows_again()[0]) == 2.0
    plain = SentGroup(total, total, total, (1,))
    assert float(plain.overflows_again()[0]) == float(plain.overflows()[0]) == 2.0
