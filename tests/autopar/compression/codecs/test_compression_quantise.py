"""Tests blockwise quantisers: bytes, errors, rounding and the two shots."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_workers import (
    assert_conserved,
    assert_same_everywhere,
    initial_states,
    relative_error,
    simulate,
    wire_cost,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.compression.codecs.blocks import hadamard, mix, uniform
from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.eden import Eden, code_bytes
from autopar.compression.codecs.quantise import Fp8, Int4, Int8, Sign
from autopar.compression.codecs.registry import format_codec

PLAIN_INT4 = Int4(hadamard=False)
CODECS = (
    Int8(),
    Int8(rounding="stochastic"),
    Int4(),
    PLAIN_INT4,
    Int4(rounding="stochastic"),
    Eden(block=256),
    Eden(levels=6, block=256),
    Sign(),
    Sign(second="int4"),
    Fp8(),
    Fp8(format="e5m2"),
)
# The scale is a bfloat16 rounded up: at most 2 ** -7 above the exact one.
SCALE_UP = 1 + 2**-7


def named(codecs):
    return pytest.mark.parametrize("codec", codecs, ids=format_codec)


@functools.lru_cache(maxsize=256)
def coder(codec, elements):
    """Compiled functions that encode and decode rows without padding."""

    def run(rows, salt):
        lengths = jnp.full((rows.shape[0],), elements, jnp.int32)
        payload = codec.encode(rows, lengths, salt)
        return payload, codec.decode(payload, elements)

    return jax.jit(run)


def round_trip(codec, rows, salt=0):
    """Encodes and decodes rows, (m, c)."""
    rows = np.atleast_2d(np.asarray(rows, np.float32))
    payload, decoded = coder(codec, rows.shape[1])(rows, jnp.uint32(salt))
    assert payload.dtype == jnp.uint8
    return np.array(decoded)


def error_of(codec, rows, **options):
    decoded = round_trip(codec, rows, **options).astype(np.float64)
    return float(np.linalg.norm(decoded - rows) / norm(rows))


def norm(values):
    return float(np.linalg.norm(np.asarray(values, np.float64)))


def samples(kind, *shape, seed=0):
    rng = np.random.default_rng(seed)
    draw = {
        "normal": lambda: rng.standard_normal(shape),
        "t4": lambda: rng.standard_t(4, shape),
    }[kind]
    return draw().astype(np.float32)


# --- Errors -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "normal", "t4"),
    [
        # Relative L2 errors of a million samples, normal and Student t with 4
        # degrees of freedom, from a numpy implementation of the same rules.
        (Int8(), 0.0070, 0.0130),
        (Int4(block=64, hadamard=False), 0.108, 0.160),
        (PLAIN_INT4, 0.126, 0.230),
        (Int4(block=1024, hadamard=False), 0.143, 0.323),
        (Int4(), 0.1265, 0.1238),
        # Of normal samples by Max (1960), table II: sqrt(D / (1 - D)).
        (Eden(levels=4), 0.367, 0.365),
        (Eden(levels=6), 0.253, 0.251),
        (Eden(), 0.197, 0.194),
        (Eden(levels=16), 0.108, 0.106),
        (Eden(levels=32), 0.0593, 0.0577),
        (Sign(), 0.602, 0.705),
        (Fp8(), 0.0261, 0.0248),
        (Fp8(format="e5m2"), 0.0520, 0.0493),
    ],
    ids=lambda value: format_codec(value) if isinstance(value, Codec) else "",
)
def test_error_constants(codec, normal, t4):
    assert error_of(codec, samples("normal", 1, 1 << 17)) == pytest.approx(
        normal, rel=0.05
    )
    assert error_of(codec, samples("t4", 1, 1 << 17)) == pytest.approx(t4, rel=0.1)


def test_sign_error_is_that_of_the_best_scale():
    # min over s of E(|x| - s)^2 / E x^2 = 1 - (E|x|)^2 / E x^2 = 1 - 2 / pi.
    error = error_of(Sign(block=4096), samples("normal", 1, 1 << 17))
    assert error == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.01)


def test_stochastic_rounding_costs_sqrt_two():
    rows = samples("normal", 1, 1 << 16)
    nearest = error_of(Int8(), rows)
    stochastic = error_of(Int8(rounding="stochastic"), rows)
    # Errors uniform in +-1/2: 1 / 12; Bernoulli of a uniform p: E p(1-p) = 1 / 6.
    assert stochastic / nearest == pytest.approx(math.sqrt(2), rel=0.02)


@pytest.mark.parametrize("codec", [Int8, Int4], ids=["int8", "int4"])
def test_stochastic_rounding_has_no_bias(codec):
    rows = samples("normal", 1, 256)
    trials = 400
    codec = codec(rounding="stochastic")
    one = error_of(codec, rows)
    run = jax.jit(jax.vmap(lambda salt: coder(codec, 256)(jnp.asarray(rows), salt)[1]))
    mean = np.asarray(run(mix(jnp.arange(trials, dtype=jnp.uint32)))).mean(axis=0)
    error = np.linalg.norm(mean - rows) / np.linalg.norm(rows)
    # Independent errors average out to 1 / sqrt(trials); a bias would stay.
    assert error == pytest.approx(one / math.sqrt(trials), rel=0.25)


@named([Int8(), PLAIN_INT4])
@given(
    rows=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
        min_size=5,
        max_size=5,
    )
)
@settings(max_examples=examples(60), deadline=None)
def test_no_element_is_off_by_more_than_half_a_step(codec, rows):
    rows = np.asarray(rows, np.float32)
    decoded = round_trip(codec, [rows, rows])[0]
    top = 127 if isinstance(codec, Int8) else 7
    step = np.abs(rows).max() / top * SCALE_UP
    tiny = top * np.finfo(np.float32).tiny
    assert (np.abs(decoded - rows) <= step * 0.5001 + tiny).all()


@named([Int8(), PLAIN_INT4, Int4(), Eden(), Sign(), Fp8(), Fp8(format="e5m2")])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1.0, 1e6, 1e30])
def test_error_does_not_depend_on_magnitude(codec, magnitude):
    rows = samples("normal", 2, 576)
    scaled = rows * np.float32(magnitude)
    # The scale's rounding to bfloat16 moves a little with the magnitude. Eden also has
    # other random signs, and there are ten blocks.
    spread = 0.15 if isinstance(codec, Eden) else 0.05
    expected = error_of(codec, rows)
    assert error_of(codec, scaled) == pytest.approx(expected, rel=spread)


def test_hadamard_spreads_an_outlier():
    rows = samples("normal", 16, 256)
    rows[:, 3] = 40.0
    assert error_of(Int4(), rows) < 0.7 * error_of(PLAIN_INT4, rows)


# --- Special blocks ---------------------------------------------------------


@named(CODECS)
@pytest.mark.parametrize("elements", [1, 576])
def test_zeros_stay_zero(codec, elements):
    assert not round_trip(codec, np.zeros((2, elements))).any()


# Their random rotation leaves no element alone.
NOT_TURNED = tuple(codec for codec in CODECS if not isinstance(codec, Eden))


@named(NOT_TURNED)
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-9, 1e6])
@pytest.mark.parametrize("elements", [1, 576])
def test_equal_elements(codec, value, elements):
    """Off by the rounding of the scale only: 576 is two blocks and one of 64."""
    rows = np.full((2, elements), value, np.float32)
    tolerance = 2**-7
    if getattr(codec, "rounding", "") == "stochastic":
        tolerance += 1 / {Int8: 127, Int4: 7}[type(codec)]
    np.testing.assert_allclose(round_trip(codec, rows), rows, rtol=tolerance)


@named(CODECS)
def test_denormals_become_zero(codec):
    rows = np.full((2, 576), 1e-40, np.float32)
    assert rows.all()
    assert not round_trip(codec, rows).any()


@named(CODECS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_stays_in_its_block(codec, bad):
    rows = samples("normal", 2, 576)
    rows[1, 300] = bad
    decoded = round_trip(codec, rows)
    assert np.isnan(decoded[1, 256:512]).all()
    decoded[1, 256:512] = 0
    assert np.isfinite(decoded).all()


@named(CODECS)
@given(values=st.lists(st.floats(width=32), min_size=5, max_size=5))
@settings(max_examples=examples(30), deadline=None)
def test_any_row_is_finite_or_seen_to_be_not(codec, values):
    rows = np.asarray([values, values], np.float32)
    length = norm(rows)
    decoded = round_trip(codec, rows)
    if not np.isfinite(rows).all():
        assert not np.isfinite(decoded).all()
    elif length < 1e37:
        # At worst sqrt(8) steps of a seventh of the norm, rounded at random.
        assert np.isfinite(decoded).all()
        assert norm(decoded) <= 2 * length


def test_largest_floats():
    top = np.finfo(np.float32).max
    for codec in (Int8(), PLAIN_INT4, Sign(), Fp8()):
        decoded = round_trip(codec, np.full((2, 5), top / 2))
        np.testing.assert_allclose(decoded, top / 2, rtol=2**-7)


def test_one_element_has_only_the_error_of_its_scale():
    for codec in NOT_TURNED:
        if getattr(codec, "rounding", "nearest") == "nearest":
            decoded = round_trip(codec, [[0.3], [0.3]])
            np.testing.assert_allclose(decoded, 0.3, rtol=2**-7)


def test_sign_scale_does_not_count_padding():
    gradients = np.full((2, 3), 0.5, np.float32)
    result = simulate(Sign(), gradients)
    sent = result.sent.reshape(2, -1)[:, :3]
    np.testing.assert_array_equal(sent, 0.5)
    np.testing.assert_array_equal(result.total[0].reshape(-1)[:3], 1.0)


# --- Bytes ------------------------------------------------------------------


BITS = {"int8": 8, "fp8": 8, "int4": 4, "eden": 3, "sign": 1}


def payload_bytes(codec, elements):
    """Bytes by the formula: whole blocks, a shorter last block, and two bytes per
    scale.
    """
    bits = BITS[codec.name]
    blocks, rest = divmod(elements, codec.block)
    width = -(-rest * bits // 8) * 8 // bits
    if codec.name == "int4" and codec.hadamard and rest:
        width = max(2, 1 << math.ceil(math.log2(rest)))
    if codec.name == "eden" and rest:
        width = max(8, 1 << math.ceil(math.log2(rest)))
    scales = blocks + (rest > 0)
    return (blocks * codec.block + width) * bits // 8 + 2 * scales


@named(
    [
        Int8(),
        Int8(block=10),
        Int4(),
        PLAIN_INT4,
        Int4(block=6, hadamard=False),
        Eden(),
        Eden(block=8),
        Sign(),
        Sign(block=8),
        Fp8(),
    ]
)
@pytest.mark.parametrize("elements", [1, 2, 5, 8, 255, 256, 257, 1030])
def test_payload_size(codec, elements):
    payload, decoded = jax.eval_shape(
        coder(codec, elements),
        jax.ShapeDtypeStruct((3, elements), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.uint32),
    )
    assert payload.shape == (3, payload_bytes(codec, elements))
    assert payload.dtype == jnp.uint8
    assert decoded.shape == (3, elements)


@pytest.mark.parametrize("levels", [4, 6, 8, 16, 32])
@pytest.mark.parametrize("elements", [8, 128, 300])
def test_few_levels_take_few_bytes(levels, elements):
    """Codes of 4, 8, 16 and 32 levels take whole bits; three of 6 levels, a byte."""
    codec = Eden(levels=levels)
    widths = {8: [8], 128: [128], 300: [128, 128, 64]}[elements]
    bits = {4: 2, 6: 8 / 3, 8: 3, 16: 4, 32: 5}[levels]
    assert [code_bytes(levels, w) for w in widths] == [
        math.ceil(w * bits / 8) for w in widths
    ]
    payload, _ = jax.eval_shape(
        coder(codec, elements),
        jax.ShapeDtypeStruct((1, elements), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.uint32),
    )
    assert payload.shape[1] == sum(2 + code_bytes(levels, w) for w in widths)


def test_similar_blocks_have_independent_errors():
    """The error of a mean over blocks that differ in scale is far below that of each.

    With the same signs in all blocks, both are equal.
    """
    factors = np.linspace(0.7, 1.4, 256, dtype=np.float32)[:, None]
    rows = samples("normal", 1, 128) * factors
    lost = (round_trip(Eden(levels=6), rows) - rows) / factors
    each = np.sqrt(np.mean(lost**2))
    assert np.sqrt(np.mean(lost.mean(axis=0) ** 2)) < 0.2 * each


@named([Int8(), Int4(), Eden(), Sign(), Fp8()])
@pytest.mark.parametrize("size", [1, 1000, 4 * 256 * 40])
def test_wire_is_two_shots(codec, size):
    workers = 4
    chunk = codec.chunk(-(-size // workers))
    row = payload_bytes(codec, chunk)
    assert wire_cost(codec, (size,), workers) == (2 * (workers - 1) * row, 2)
    if size % workers == 0:
        scattered = payload_bytes(codec, size // workers)
        assert wire_cost(codec, (size,), workers, scatter=True) == (
            (workers - 1) * scattered,
            1,
        )


@pytest.mark.parametrize("block", [256, 24])
def test_second_shot_of_sign_as_int4(block):
    """A bit there and four back, and a sum that is as exact as that of int4."""
    codec, workers = Sign(block=block, second="int4"), 4
    shape = (workers * 40 * block,)
    rows = 40 * block * (1 / 8 + 1 / 2) + 2 * 40 * 2
    assert wire_cost(codec, shape, workers) == ((workers - 1) * rows, 2)

    gradients = samples("normal", workers, *shape)
    result = simulate(codec, gradients)
    sums = result.sent.astype(np.float64).sum(axis=0).reshape(-1)
    lost = result.total[0].reshape(-1) - sums
    # Of normal samples int4 loses an eighth, sign 0.6.
    assert 0.05 < np.linalg.norm(lost) / np.linalg.norm(sums) < 0.15


@named([Int8(), Int4(), Eden(), Sign(), Fp8()])
def test_wire_of_whole_blocks_is_the_formula_of_the_field(codec):
    size, workers = 1 << 20, 8
    bits = BITS[codec.name]
    expected = 2 * (workers - 1) / workers * size * (bits / 8 + 2 / codec.block)
    assert codec.wire_bytes((size,), workers) == expected


@named([Int8(), Int4(), Eden(), Sign(), Fp8()])
@given(elements=st.integers(1, 100_000))
@settings(max_examples=examples(50), deadline=None)
def test_chunk_is_enough_and_not_much_more(codec, elements):
    chunk = codec.chunk(elements)
    assert elements <= chunk <= elements * (1 + 1 / 32)
    assert codec.chunk(chunk) == chunk


# --- Two shots --------------------------------------------------------------


@named([Int8(rounding="stochastic"), Int4(), Eden(), Sign(second="int4")])
def test_workers_agree_and_nothing_is_lost(codec):
    gradients = samples("normal", 2, 310)
    result = simulate(codec, gradients)

    assert_same_everywhere(result)
    assert_conserved(result, exact=False)


@named([Int4(), Eden(), Sign()])
def test_sent_is_what_the_owners_understood(codec):
    gradients = samples("normal", 4, 8, 64)
    result = simulate(codec, gradients, scatter=True)

    expected = result.sent.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(result.total, expected, rtol=1e-5, atol=1e-5)


@named([Int8(), PLAIN_INT4])
def test_total_error_of_both_shots(codec):
    gradients = samples("normal", 4, 1 << 14)
    one = error_of(codec, gradients)
    # n independent errors in the sum of n independent gradients are as large
    # relative to it as one; the second shot adds another.
    total = relative_error(simulate(codec, gradients), gradients)
    assert total == pytest.approx(math.sqrt(2) * one, rel=0.05)


@named([Eden(), Sign(), Sign(second="int4"), Int8(server_feedback=True)])
def test_server_feedback_keeps_what_the_second_shot_dropped(codec):
    """The totals of all steps and the errors left make the sums of what was sent."""
    gradients = samples("normal", 2, 999)
    states = initial_states(codec, (999,), 2)
    assert states["server"].shape == (2, codec.chunk(500))
    totals, sums = np.zeros(1000), np.zeros(1000)
    for step in range(4):
        result = simulate(codec, gradients, states, step=step)
        states = result.states
        totals += result.total[0].reshape(-1)
        sums += result.sent.astype(np.float64).sum(axis=0).reshape(-1)
    left = np.asarray(states["server"]).reshape(-1)
    np.testing.assert_allclose((totals + left)[:999], sums[:999], rtol=1e-5, atol=1e-5)
    assert left[999] == 0.0
    assert np.linalg.norm(left) > 0


def test_no_server_state_without_feedback():
    assert initial_states(Int8(), (64,), 2) == ()
    assert Sign().for_scattered_sum() == Sign(server_feedback=False)
    assert Int8().for_scattered_sum() == Int8()


def test_stochastic_rounding_differs_between_workers_steps_and_seeds():
    codec = Int8(rounding="stochastic")
    gradients = np.tile(samples("normal", 1, 512), (2, 1))
    first = simulate(codec, gradients, step=3, seed=1)
    np.testing.assert_array_equal(
        first.sent, simulate(codec, gradients, step=3, seed=1).sent
    )
    assert (first.sent[0] != first.sent[1]).any()
    assert (first.sent != simulate(codec, gradients, step=4, seed=1).sent).any()
    assert (first.sent != simulate(codec, gradients, step=3, seed=2).sent).any()


# --- Parts ------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 8, 256, 512, 2048])
def test_hadamard_is_its_own_inverse_and_has_the_entries_of_sylvester(width):
    rows = samples("normal", 3, width)
    once = np.asarray(hadamard(jnp.asarray(rows)))
    index = np.arange(width)
    column = min(5, width - 1)
    signs = [(-1.0) ** bin(i & column).count("1") for i in index]
    np.testing.assert_allclose(once[:, column], rows @ signs, rtol=1e-3, atol=1e-3)
    twice = np.asarray(hadamard(jnp.asarray(once)))
    np.testing.assert_allclose(twice / width, rows, rtol=1e-3, atol=1e-5)


def test_hadamard_of_codes_is_exact():
    codes = np.random.default_rng(0).integers(-7, 8, (4, 256))
    index = np.arange(256)
    matrix = np.array([[(-1) ** bin(i & j).count("1") for j in index] for i in index])
    got = np.asarray(hadamard(jnp.asarray(codes, jnp.float32)))
    np.testing.assert_array_equal(got, codes @ matrix)


def test_uniform_looks_uniform():
    values = np.asarray(uniform((64, 1024), jnp.uint32(12345))).reshape(-1)
    assert values.min() >= 0
    assert values.max() < 1
    count = values.size
    expected = count / 64
    histogram = np.bincount((values * 64).astype(int), minlength=64)
    chi_squared = ((histogram - expected) ** 2 / expected).sum()
    # Mean 63, standard deviation sqrt(2 * 63) = 11.2.
    assert chi_squared < 63 + 5 * 11.2
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(count)
    other = np.asarray(uniform((64, 1024), jnp.uint32(12346))).reshape(-1)
    assert abs(np.corrcoef(values, other)[0, 1]) < 5 / math.sqrt(count)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(block=0), "int8: block must be a positive multiple of 1, got 0"),
        (lambda: Int4(block=3), "multiple of 2, got 3"),
        (lambda: Int4(block=6), "power of two, got 6; use block=4 or hadamard=False"),
        (lambda: Eden(block=4), "multiple of 8, got 4"),
        (lambda: Eden(block=24), "power of two, got 24; use block=16"),
        (lambda: Eden(levels=5), "levels must be one of 4, 6, 8, 16, 32, got 5"),
        (lambda: Sign(block=4), "multiple of 8, got 4"),
        (lambda: Sign(second="int8"), "second must be one of sign, int4"),
        (lambda: Int8(rounding="up"), "rounding must be one of nearest, stochastic"),
        (lambda: Fp8(format="e3m4"), "format must be one of e4m3, e5m2"),
    ],
)
def test_bad_fields(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_which_codecs_need_feedback():
    codecs = (Int8, Fp8, Int4, Eden, Sign)
    assert [c.feedback for c in codecs] == [False, False, True, True, True]
