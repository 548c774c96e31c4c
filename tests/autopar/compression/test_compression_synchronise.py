"""Tests sums of gradients over four simulated workers, with error feedback."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compression_mesh import FED_BACK, WORKERS, begin, norm, normal, program, run

from autopar.compression.codecs.quantise import Bf16, Dense, Int4, Int8, Sign
from autopar.compression.codecs.registry import codec_names, parse_codec
from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Feedback, Gradient, check_gradient, init_state
from autopar.compression.synchronise import (
    ERROR,
    GRADIENT,
    NON_FINITE,
    RESIDUAL,
    SENT,
    WANTED,
    restore_unless_finite,
    synchronise,
)

ALL = tuple(codec_names())


def own_parts(whole, dim):
    """Each worker's part of a scattered sum, (n, *shape of a part)."""
    return np.stack(np.split(whole, WORKERS, axis=dim))


# --- Sums -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_dense_sum_keeps_the_dtype(dtype):
    gradient = Gradient("w", (3, 5), Dense())
    partials = normal(WORKERS, 3, 5).astype(dtype)
    (total,), _, _ = run([gradient], [partials])

    assert total.dtype == dtype
    expected = partials.astype(np.float32).sum(axis=0)
    resolution = float(ml_dtypes.finfo(dtype).eps)
    for worker in range(WORKERS):
        np.testing.assert_allclose(
            total[worker].astype(np.float32), expected, rtol=resolution, atol=1e-5
        )


@pytest.mark.parametrize("codec", [Dense(), Int8()], ids=["dense", "int8"])
def test_scatter_gives_worker_i_slice_i_of_the_dim(codec):
    shape = (8, 12, 4)
    gradients = [
        Gradient(f"w{dim}", shape, codec, scatter_dim=dim, seed=dim) for dim in range(3)
    ]
    partials = [normal(WORKERS, *shape, seed=dim) for dim in range(3)]
    totals, _, _ = run(gradients, partials)

    # Four values of a step of about 3 / 127, half a step each.
    tolerance = 1e-5 if codec == Dense() else 4 * 3.5 / 127 / 2
    for dim in range(3):
        expected = own_parts(partials[dim].sum(axis=0), dim)
        np.testing.assert_allclose(totals[dim], expected, atol=tolerance, rtol=0)


def test_workers_may_span_two_mesh_axes():
    gradients = [
        Gradient("whole", (6,), Sign()),
        Gradient("part", (8, 3), Dense(), scatter_dim=0),
    ]
    partials = [normal(WORKERS, 6), normal(WORKERS, 8, 3)]
    two = run(gradients, partials, axes=("a", "b"), sizes=(2, 2))
    one = run(gradients, partials)
    np.testing.assert_array_equal(two[0][0], one[0][0])
    expected = own_parts(partials[1].sum(axis=0), 0)
    np.testing.assert_allclose(two[0][1], expected, rtol=1e-5, atol=1e-5)


def everything(shape, scatter_dim=None, names=ALL):
    """A gradient with error feedback for each codec that can send the shape."""
    codecs = [parse_codec(name) for name in names]
    return tuple(
        Gradient(codec.name, shape, codec, FED_BACK, scatter_dim, seed)
        for seed, codec in enumerate(codecs)
        if not codec.check(shape, scatter=scatter_dim is not None)
    )


def test_replicas_have_the_same_bits_with_every_codec():
    gradients = everything((48, 40))
    assert len(gradients) == len(ALL)
    partials = [normal(WORKERS, 48, 40, seed=k) for k in range(len(gradients))]
    states = None
    for step in range(2):
        totals, states, sums = run(gradients, partials, states, step)
        for gradient, total in zip(gradients, totals, strict=True):
            assert np.isfinite(total).all(), gradient.name
            for replica in total[1:]:
                assert replica.tobytes() == total[0].tobytes(), gradient.name
        assert np.isfinite(sums).all()
        assert (sums[..., SENT] > 0).all()


def test_one_element_with_every_codec():
    shape = ()
    gradients = everything(shape)
    assert {g.name for g in gradients} >= {"dense", "bf16", "int8", "int4", "sign"}
    partials = [np.full((WORKERS, *shape), 0.5, np.float32)] * len(gradients)
    totals, _, sums = run(gradients, partials)
    for gradient, total, row in zip(
        gradients, totals, sums.swapaxes(0, 1), strict=True
    ):
        assert total.shape == (WORKERS, *shape)
        # Whatever was not sent is in the residuals.
        assert norm(total[0] - 2.0) <= norm(np.sqrt(row[:, ERROR])) * 4 + 0.05, (
            gradient.name
        )


def test_gradients_without_elements_pass_through():
    gradients = (
        Gradient("none", (0, 3), Int8(), FED_BACK),
        Gradient("some", (3,), Int8()),
        Gradient("scattered", (4, 0), Sign(), FED_BACK, scatter_dim=0),
    )
    partials = [
        np.zeros((WORKERS, 0, 3), np.float32),
        normal(WORKERS, 3),
        np.zeros((WORKERS, 4, 0), np.float32),
    ]
    totals, states, sums = run(gradients, partials)
    assert totals[0].shape == (WORKERS, 0, 3)
    assert totals[2].shape == (WORKERS, 1, 0)
    assert states[0] == {"residual": (), "codec": ()}
    assert not sums[:, [0, 2]].any()
    assert (sums[:, 1, WANTED] > 0).all()


def test_no_gradients_at_all():
    totals, states, sums = synchronise(
        [], [], [], MeshLinks(("data",), 2), jnp.int32(0), jnp.int32(0)
    )
    assert (totals, states, sums.shape) == ([], [], (0, 6))


# --- Error feedback ---------------------------------------------------------


def test_nothing_is_lost_with_feedback():
    """The sums so far and the errors left make the sum of all that came in.

    A scattered sum has no second shot, so this holds for every codec, but for
    those that sum a part of the values in two shots of its own.
    """
    shape = (16, 24)
    names = [n if n != "predicted" else "predicted:values=f32" for n in ALL]
    gradients = everything(shape, scatter_dim=1, names=names)
    assert {g.name for g in gradients} >= {"dense", "bf16", "int8", "int4", "sign"}
    states, came, went = None, 0.0, 0.0
    for step in range(3):
        partials = [
            normal(WORKERS, *shape, seed=100 * step + k) for k in range(len(gradients))
        ]
        totals, states, _ = run(gradients, partials, states, step)
        came = came + np.stack([p.sum(axis=0) for p in partials])
        went = went + np.stack(totals)
    for k, gradient in enumerate(gradients):
        left = own_parts(states[k]["residual"].sum(axis=0), 1)
        expected = own_parts(came[k], 1)
        assert norm(went[k] + left - expected) <= 1e-5 * norm(expected), gradient.name


@pytest.mark.parametrize(
    "codec", [Int4(), Sign(), Int8(server_feedback=True)], ids=lambda c: c.name
)
def test_nothing_is_lost_in_the_second_shot_either(codec):
    gradients = (Gradient("w", (70,), codec, FED_BACK),)
    states, came, went = None, 0.0, 0.0
    for step in range(4):
        partials = normal(WORKERS, 70, seed=step)
        totals, states, _ = run(gradients, [partials], states, step)
        came, went = came + partials.sum(axis=0), went + totals[0][0]
    left = states[0]["residual"].sum(axis=0)
    server = states[0]["codec"]["server"].reshape(-1)[:70]
    assert norm(server) > 0
    assert norm(went + left + server - came) <= 1e-5 * norm(came)


def test_sums_are_the_norms_they_say():
    decay = 0.75
    gradients = (
        Gradient("w", (9, 5), Sign(), Feedback("residual", decay=decay)),
        Gradient("v", (9, 5), Int8()),
    )
    partials = [normal(WORKERS, 9, 5, seed=k) for k in range(2)]
    _, first, _ = run(gradients, partials)
    _, second, sums = run(gradients, partials, first, 1)

    before, after = first[0]["residual"], second[0]["residual"]
    for worker in range(WORKERS):
        wanted = partials[0][worker] + decay * before[worker]
        row = sums[worker, 0]
        assert row[WANTED] == pytest.approx(norm(wanted) ** 2, rel=1e-5)
        assert row[ERROR] == pytest.approx(norm(after[worker]) ** 2, rel=1e-5)
        assert row[RESIDUAL] == pytest.approx(norm(after[worker]) ** 2, rel=1e-5)
        alone = norm(partials[0][worker]) ** 2
        assert row[GRADIENT] == pytest.approx(alone, rel=1e-5)
        sent = norm(wanted - after[worker]) ** 2
        assert row[SENT] == pytest.approx(sent, rel=1e-5)
        plain = sums[worker, 1]
        expected = norm(partials[1][worker]) ** 2
        assert plain[WANTED] == pytest.approx(expected, rel=1e-5)
        assert plain[GRADIENT] == pytest.approx(expected, rel=1e-5)
        assert 0 < plain[ERROR] < 1e-3 * expected
        assert plain[RESIDUAL] == 0
    assert not sums[..., NON_FINITE].any()
    assert second[1]["residual"] == ()


def test_residual_in_bfloat16():
    partials = normal(WORKERS, 50)
    kept = {}
    for dtype in ("float32", "bfloat16"):
        gradient = Gradient("w", (50,), Sign(), Feedback("residual", dtype=dtype))
        _, states, _ = run([gradient], [partials])
        kept[dtype] = states[0]["residual"]
    assert kept["bfloat16"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        kept["bfloat16"], kept["float32"].astype(ml_dtypes.bfloat16)
    )


# --- Numbers that are not finite --------------------------------------------


def test_a_bad_step_leaves_no_trace_when_settled():
    gradients = (
        Gradient("w", (40,), Int4(), FED_BACK),
        Gradient("v", (4, 4), Sign(), FED_BACK, scatter_dim=0),
    )
    good = [normal(WORKERS, 40), normal(WORKERS, 4, 4)]
    _, states, sums = run(gradients, good)
    kept = restore_unless_finite(begin(gradients), states, jnp.asarray(True))
    jax.tree.map(np.testing.assert_array_equal, kept, states)

    bad = [good[0].copy(), good[1]]
    bad[0][2, :3] = np.inf, np.nan, -np.inf
    totals, poisoned, sums = run(gradients, bad, states, 1)
    np.testing.assert_array_equal(sums[:, 0, NON_FINITE], [0, 0, 3, 0])
    assert not sums[:, 1, NON_FINITE].any()
    assert not np.isfinite(totals[0]).all()
    assert np.isfinite(totals[1]).all()
    assert not np.isfinite(poisoned[0]["residual"]).all()

    finite = jnp.asarray(sums[..., NON_FINITE].sum() == 0)
    settled = restore_unless_finite(states, poisoned, finite)
    jax.tree.map(np.testing.assert_array_equal, settled, states)


# --- Wire -------------------------------------------------------------------


def collectives(gradients):
    """Kind, dtype and number of elements of the collectives' results in the HLO."""
    partials = [
        jax.ShapeDtypeStruct((WORKERS, *gradient.shape), jnp.float32)
        for gradient in gradients
    ]
    states = jax.eval_shape(lambda: begin(gradients))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    text = program(gradients).lower(partials, states, step).compile().as_text()
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    found = []
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
        elements = sum(math.prod(map(int, dims.split(","))) for _, dims in shapes)
        (dtype,) = {dtype for dtype, _ in shapes}
        found.append((kind, dtype, elements))
    return sorted(found)


@pytest.mark.parametrize(
    ("text", "scatter_dim"),
    [("bf16", None), ("int8", None), ("int4", None), ("sign", None), ("int4", 0)],
)
def test_wire_bytes_are_those_of_the_compiled_program(text, scatter_dim):
    codec, shape = parse_codec(text), (64, 33)
    gradients = (Gradient("w", shape, codec, scatter_dim=scatter_dim),)
    scatter = scatter_dim is not None
    found = collectives(gradients)
    kinds = ["all-to-all"] if scatter else ["all-gather", "all-to-all"]
    assert [kind for kind, _, _ in found] == kinds
    assert {dtype for _, dtype, _ in found} == {"u8"}
    # Both return n messages, of which one is the worker's own. It sends n - 1
    # others in the all-to-all, and its own to n - 1 others in the all-gather.
    sent = sum(nbytes * (WORKERS - 1) // WORKERS for _, _, nbytes in found)
    assert sent == codec.wire_bytes(shape, WORKERS, scatter=scatter)


def test_one_collective_of_each_kind_for_a_whole_bucket():
    codecs = (Int8(), Int4(), Sign(), Bf16(), Dense())
    gradients = tuple(
        Gradient(codec.name, (30 + k,), codec, seed=k) for k, codec in enumerate(codecs)
    )
    found = collectives(gradients)
    kinds = [kind for kind, _, _ in found]
    assert kinds == ["all-gather", "all-reduce", "all-to-all"]


# --- Checks -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "dtype", "workers", "message"),
    [
        ({}, jnp.int32, 4, r"'w' of shape \(6, 8\): only real .* got int32; sum it"),
        ({}, jnp.complex64, 4, "got complex64"),
        ({}, jnp.float32, 0, "at least one worker, got 0"),
        ({"scatter_dim": 2}, jnp.float32, 4, "there is no dim 2"),
        ({"scatter_dim": -1}, jnp.float32, 4, "there is no dim -1"),
        ({"scatter_dim": 0}, jnp.float32, 4, "dim 0 does not divide into 4 equal"),
    ],
)
def test_check_gradient(fields, dtype, workers, message):
    gradient = Gradient("w", (6, 8), Int8(), **fields)
    with pytest.raises(ValueError, match=message):
        check_gradient(gradient, dtype, workers)


def test_check_gradient_asks_the_codec():
    class Picky(Int8):
        def check(self, shape, *, scatter):
            return "" if scatter else "only scattered"

    check_gradient(Gradient("w", (8,), Picky(), scatter_dim=0), jnp.float32, 4)
    with pytest.raises(ValueError, match="codec int8: only scattered"):
        check_gradient(Gradient("w", (8,), Picky()), jnp.bfloat16, 4)


def test_calls_that_do_not_fit():
    gradient = Gradient("w", (6,), Dense())
    links, zero = MeshLinks(("data",), 2), jnp.int32(0)
    with pytest.raises(ValueError, match="got 1 gradients, 0 partials and 1 states"):
        synchronise([gradient], [], [{}], links, zero, zero)
    with pytest.raises(ValueError, match=r"of shape \(6,\), its partial of \(3,\)"):
        synchronise([gradient], [jnp.zeros(3)], [{}], links, zero, zero)


def test_scattered_sums_keep_no_state_of_the_second_shot():
    whole = init_state(Gradient("w", (8, 8), Sign(), FED_BACK), WORKERS)
    assert whole["codec"]["server"].shape == (16,)
    assert whole["residual"].shape == (8, 8)
    part = Gradient("w", (8, 8), Sign(), FED_BACK, scatter_dim=0)
    assert init_state(part, WORKERS)["codec"] == ()
