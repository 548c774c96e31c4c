"""Efficiency: formulas against sampled gradients."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compression.policies.policy import GradientReport
from autopar.errors import PlanError
from autopar.goodput.choice import (
    CodecError,
    codec_error,
    efficiency,
    gain,
    goodput,
)
from autopar.runtime.noise.averages import Groups, NoiseScale, estimates

# Elements of a gradient, squared norm of its mean, variance of one row, draws.
SIZE, SQR, VAR, DRAWS = 40, 2.0, 400.0, 4000
PHI, BASE = VAR / SQR, 32


def draws(workers: int, rows: int, seed: int = 0) -> np.ndarray:
    """Gradients of workers, float64 (draws, workers, elements)."""
    draw = np.random.default_rng(seed)
    mean = np.full(SIZE, math.sqrt(SQR / SIZE))
    spread = math.sqrt(VAR / SIZE / rows)
    return mean + spread * draw.standard_normal((DRAWS, workers, SIZE))


def thinned(
    gradients: np.ndarray, keep: float, *, alike: bool, seed: int = 1
) -> np.ndarray:
    """An unbiased codec with w = 1 / keep - 1, which sends some elements, scaled up.

    Alike: whether all workers draw the same elements.
    """
    draw = np.random.default_rng(seed)
    shape = list(gradients.shape)
    if alike:
        shape[1] = 1
    return gradients * (draw.random(shape) < keep) / keep


def realised_gain(sent: np.ndarray) -> float:
    """The possible progress of a step, |E G|^2 / E |G|^2, over the base batch's."""
    applied = np.square(sent.mean(1)).sum(1).mean()
    return (SQR / applied) / (SQR / (SQR + VAR / BASE))


def estimated_phi(gradients: np.ndarray, rows: int) -> float:
    """Pollux's estimate of the noise scale from the gradients of workers."""
    workers = gradients.shape[1]
    parts = np.square(gradients / workers).sum((1, 2)).mean()
    total = np.square(gradients.mean(1)).sum(1).mean()
    norms = np.array([[parts, total, total]])
    sqr, var = estimates(norms, Groups((workers,), workers * rows))
    return float(var / sqr)


class TestFormulas:
    def test_pollux(self) -> None:
        assert efficiency(200.0, 512, 32) == pytest.approx(232 / 712)
        assert gain(200.0, 512, 32) == pytest.approx(16 * 232 / 712)
        assert goodput(100.0, 200.0, 512, 32) == pytest.approx(100 * 232 / 712)

    @pytest.mark.parametrize(("w", "workers"), [(0.5, 4), (3.0, 8)])
    def test_own_errors(self, w: float, workers: int) -> None:
        error = CodecError(own=w, workers=workers)
        expected = (200 + 32) / ((1 + w) * 200 + (1 + w / workers) * 512)

        assert efficiency(200.0, 512, 32, error) == pytest.approx(expected)

    def test_shared_errors(self) -> None:
        expected = (200 + 32) / (4 * (200 + 512))

        assert efficiency(200.0, 512, 32, CodecError(shared=3.0)) == pytest.approx(
            expected
        )

    def test_noise_that_hides_the_gradient(self) -> None:
        """Every row is worth as much, but for what the codec adds."""
        assert efficiency(math.inf, 512, 32) == 1.0
        assert efficiency(math.inf, 512, 32, CodecError(own=1.0)) == 0.5
        near = efficiency(1e12, 512, 32, CodecError(own=1.0, workers=2))
        assert near == pytest.approx(0.5, rel=1e-6)

    @pytest.mark.parametrize(
        "given", [(-1.0, 32, 32), (math.nan, 32, 32), (1.0, 0, 32), (1.0, 32, -2)]
    )
    def test_numbers_out_of_range(self, given: tuple[float, float, float]) -> None:
        with pytest.raises(PlanError, match="efficiency: expected"):
            efficiency(*given)

    def test_errors_out_of_range(self) -> None:
        with pytest.raises(PlanError, match="CodecError: expected"):
            CodecError(own=-0.1)


class TestSampled:
    """What the formulas say is what sampled gradients do."""

    @pytest.mark.parametrize("rows", [8, 64])
    @pytest.mark.parametrize("alike", [False, True])
    @pytest.mark.parametrize("keep", [1.0, 0.25])
    def test_gain(self, rows: int, alike: bool, keep: float) -> None:
        workers, w = 4, 1 / keep - 1
        sent = thinned(draws(workers, rows), keep, alike=alike)
        error = CodecError(
            own=0.0 if alike else w, shared=w if alike else 0.0, workers=workers
        )

        found = gain(PHI, workers * rows, BASE, error)
        assert found == pytest.approx(realised_gain(sent), rel=0.05)

    @pytest.mark.parametrize("rows", [8, 64])
    def test_the_trap(self, rows: int) -> None:
        """Compressed gradients read as a noise scale that grows with the batch."""
        workers, w = 4, 3.0
        exact = draws(workers, rows)
        sent = thinned(exact, 0.25, alike=False)
        naive = estimated_phi(sent, rows)

        assert estimated_phi(exact, rows) == pytest.approx(PHI, rel=0.1)
        assert naive == pytest.approx((1 + w) * PHI + w * rows, rel=0.15)

        batch = workers * rows
        true = realised_gain(sent)
        wrong = gain(naive, batch, BASE)
        right = gain(PHI, batch, BASE, CodecError(own=w, workers=workers))
        assert right == pytest.approx(true, rel=0.05)
        assert wrong / true > 1.5


class TestMeasured:
    """Errors are read from telemetry and the averages."""

    def report(self, error: float, norm: float = 10.0) -> GradientReport:
        return GradientReport("int8", 64, 1.0, 4.0, norm, error, 1.0, 0.0, norm)

    def scale(self, excess: float) -> NoiseScale:
        return NoiseScale(
            sqr=SQR, var=VAR, rows=128, groups=4, steps=9, skipped=0, biased=False,
            excess=excess, local=0.0, total=0.0,
        )  # fmt: skip

    def test_own_and_shared_are_told_apart(self) -> None:
        reports = {"a": self.report(0.5), "b": self.report(0.1, 20.0)}
        own = (0.25 * 100 + 0.01 * 400) / 500
        of_own = own * (SQR / 4 + VAR / 128)
        found = codec_error(
            self.scale(of_own + 0.3 * (SQR + VAR / 128)), reports, workers=4
        )

        assert found.own == pytest.approx(own)
        assert found.shared == pytest.approx(0.3)
        assert found.workers == 4

    def test_exact_sums_have_none(self) -> None:
        assert codec_error(self.scale(0.0), {}, 4) == CodecError(workers=4)

    def test_nothing_measured(self) -> None:
        scale = self.scale(0.0)
        unknown = type(scale)(
            **{f: getattr(scale, f) for f in scale.__dataclass_fields__}
            | {"sqr": math.nan}
        )
        with pytest.raises(PlanError, match="codec_error"):
            codec_error(unknown, {}, 4)
        with pytest.raises(PlanError, match="codec_error"):
            codec_error(scale, {"a": self.report(math.nan)}, 4)


def test_estimates_of_gradients_add_up() -> None:
    """Two gradients with other numbers of groups give what they do apart."""
    norms = jnp.asarray([[0.5, 0.3, 0.3], [0.2, 0.1, 0.1]])
    both = estimates(norms, Groups((4, 8), 64))
    one = estimates(norms[:1], Groups((4,), 64))
    other = estimates(norms[1:], Groups((8,), 64))

    np.testing.assert_allclose(both, np.add(one, other), rtol=1e-6)
