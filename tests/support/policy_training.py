"""Runs codec policies on simulated telemetry."""

import math

from autopar.compression.policies.policy import GradientReport, Observation


def report(
    codec="int8", norm=1.0, gain=1.0, residual=0.0, elements=4096, gradient=None
):
    return GradientReport(
        codec=codec,
        elements=elements,
        wire_bytes=1.0,
        dense_bytes=4.0,
        norm=norm,
        relative_error=math.sqrt(1.0 - gain),
        gain=gain,
        residual_norm=residual,
        gradient_norm=norm if gradient is None else gradient,
    )


class Training:
    """Gives a policy reports that depend on the codec in use, and adopts its codecs."""

    def __init__(self, policy, codecs, gains=None, seconds=None):
        self.policy = policy
        self.codecs = dict(codecs)
        self.gains = gains or {}
        self.seconds = seconds or {}
        self.step = 0
        self.history = []

    def observe(self, norms=None, residuals=None, finite=True):
        self.step += self.policy.every
        reports = {
            name: report(
                codec,
                norm=(norms or {}).get(name, 1.0),
                gain=self.gains.get(codec, 1.0),
                residual=(residuals or {}).get(name, 0.0),
            )
            for name, codec in self.codecs.items()
        }
        seconds = max(self.seconds.get(c, 1.0) for c in self.codecs.values())
        wish = self.policy.observe(Observation(self.step, seconds, reports, finite))
        assert wish is None or wish
        self.codecs.update(wish or {})
        self.history.append(dict(self.codecs))
        return wish
