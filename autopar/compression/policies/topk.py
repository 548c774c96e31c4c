"""Levels of compression by top-k, from the least factor to the largest."""

from __future__ import annotations

from typing import Literal

from autopar.compression.policies.signals import canonical
from autopar_errors import InputError, check_type

Stepping = Literal["geometric", "exponential"]

TEN_TO_THOUSAND = ("topk:ratio=0.1", "topk:ratio=0.01", "topk:ratio=0.001")
"""Factors 10, 100 and 1000, the range of the paper's top-k."""


def topk_levels(
    least: float = 10.0,
    most: float = 1000.0,
    factor: float = 10.0,
    stepping: Stepping = "geometric",
) -> tuple[str, ...]:
    """Levels of top-k from one compression factor to another.

    Args:
      least: the first factor, elements by elements sent.
      most: the last one.
      factor: by what the first step multiplies.
      stepping: whether all steps multiply by it, or each by the square of what the
        one before multiplied by.

    >>> topk_levels(10, 1000)
    ('topk:ratio=0.1', 'topk', 'topk:ratio=0.001')
    >>> topk_levels(10, 1000, 2, "exponential")
    ('topk:ratio=0.1', 'topk:ratio=0.05', 'topk:ratio=0.0125', 'topk:ratio=0.001')
    """
    for name, given in (("least", least), ("most", most), ("factor", factor)):
        check_type(f"topk_levels: {name}", given, (int, float), "a number, such as 10")
    if not (1.0 <= least <= most and factor > 1.0):
        raise InputError(
            "topk_levels: needs 1 <= least <= most and factor > 1, got least="
            f"{least}, most={most}, factor={factor}."
        )
    if stepping not in ("geometric", "exponential"):
        raise InputError(
            f"topk_levels: stepping must be geometric or exponential, got {stepping!r}."
        )
    factors = [least]
    while factors[-1] < most:
        factors.append(min(factors[-1] * factor, most))
        factor = factor**2 if stepping == "exponential" else factor
    return tuple(canonical(f"topk:ratio={1.0 / f:.6g}") for f in factors)
