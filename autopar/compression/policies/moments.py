"""The second moments by which Adam's family divides, of whole gradients.

Adam divides by the root of ``v``, a running mean of the squares of what arrived, which
forgets over ``1 / (1 - b2)`` steps. After a change of codec that is still the ``v`` of
the codec before. A codec that keeps more waiting sends little at first: measured by
its own square that little looks like large updates, measured by ``v`` it is little.
The other way round, what bursts out of the residuals is measured by a small ``v``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.compression.policies.policy import GradientReport

Moments = dict[str, list[float]]
"""By gradient: running means of the squares sent, and of the dense ones, and how much
of a mean they are yet (Kingma and Ba, arXiv 1412.6980, section 3)."""


def remembered(
    moments: Moments, reports: Mapping[str, GradientReport], b2: float
) -> list[GradientReport]:
    """Reports whose squares are the second moments of now.

    Args:
      moments: of the observations before; this one is added.
      reports: by gradient; those without a signal stay as they are.
      b2: what the moments keep from one observation to the next.
    """
    return [_remembered(moments, n, report, b2) for n, report in reports.items()]


def _remembered(
    moments: Moments, name: str, report: GradientReport, b2: float
) -> GradientReport:
    found = report.signal
    if found is None:
        return report
    new = (found.sent_square, found.dense_square, 1.0)
    old = moments.get(name, [0.0, 0.0, 0.0])
    kept = [b2 * a + (1.0 - b2) * b for a, b in zip(old, new, strict=True)]
    moments[name] = kept
    sent, dense, weight = kept
    signal = dataclasses.replace(
        found, sent_square=sent / weight, dense_square=dense / weight
    )
    return dataclasses.replace(report, signal=signal)
