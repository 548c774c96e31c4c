"""The part of ``autopar explain`` about gradients: why they are sent as they are."""

import math
from collections.abc import Sequence
from typing import Any

from autopar.cost.codecs import CodecPrice
from autopar.plans import GradientDecision
from autopar.reports.explain import BoundPlan
from autopar.reports.gradients import codec_options
from autopar.reports.table import (
    bytes_text,
    collapse,
    method_text,
    over_text,
    ratio_text,
    seconds_text,
    template,
)
from autopar.steps.sums import worth_a_codec
from autopar.terminal import columns

_HEADING = ("codec", "sends", "ratio", "link", "device", "error", "counts as", "")


def gradients_of(
    bound: BoundPlan, paths: Sequence[str]
) -> list[list[GradientDecision]]:
    """The gradients of parameters, those that are alike together.

    Args:
      bound: the plan.
      paths: of the parameters.
    """
    groups: dict[tuple[object, ...], list[GradientDecision]] = {}
    for gradient in bound.plan.gradients:
        if gradient.name in paths:
            how = (template(gradient.name), method_text(gradient), over_text(gradient))
            key = (*how, gradient.local_shape, gradient.scatter)
            groups.setdefault(key, []).append(gradient)
    return list(groups.values())


def options_of(bound: BoundPlan, gradient: GradientDecision) -> list[CodecPrice]:
    """The ways to send a gradient, the fastest first."""
    value = bound.analysis.graph.values[gradient.value]
    itemsize = value.nbytes // max(1, value.size)
    return codec_options(gradient, itemsize, bound.pricer)


def gradient_lines(bound: BoundPlan, paths: Sequence[str], limit: int) -> list[str]:
    """Lists how the gradients of parameters are sent, and what other codecs would do.

    Args:
      bound: the plan.
      paths: of the parameters.
      limit: how many other codecs to list, the fastest ones.
    """
    lines: list[str] = []
    for alike in gradients_of(bound, paths):
        first = alike[0]
        names = " ".join(collapse([g.name for g in alike]))
        over = f"over {over_text(first)}, {first.workers} devices"
        lines += ["", f"  Gradient of {names}, {over}: {method_text(first)}"]
        if not worth_a_codec(first.shape):
            lines.append("    vectors and what is small have no codec")
            continue
        options = _options_to_show(options_of(bound, first), first.codec, limit)
        rows = [_HEADING, *(_cells(first, option) for option in options)]
        lines += [f"    {row}" for row in columns(rows, right=range(1, 7))]
    return lines


def _options_to_show(
    options: Sequence[CodecPrice], chosen: str, limit: int
) -> list[CodecPrice]:
    """The fastest others, the chosen one and what the compiler does."""
    usable = [o for o in options if not o.refused]
    others = [o for o in usable if o.codec not in (chosen, "")][:limit]
    return [o for o in usable if o in others or o.codec in (chosen, "")]


def _cells(gradient: GradientDecision, option: CodecPrice) -> tuple[str, ...]:
    return (
        option.codec or "as it is",
        bytes_text(option.wire_bytes),
        ratio_text(gradient.dense_bytes, option.wire_bytes),
        seconds_text(option.wire_s),
        seconds_text(option.local_s),
        f"{option.error:.2g}",
        f"{option.counted_error:.2g}",
        "chosen" if option.codec == gradient.codec else "",
    )


def gradient_data(bound: BoundPlan, paths: Sequence[str]) -> list[dict[str, Any]]:
    """The same for programs, one entry for each gradient and all of its options."""
    return [
        {
            "name": gradient.name,
            "codec": gradient.codec,
            "feedback": gradient.feedback,
            "axes": list(gradient.axes),
            "within": list(gradient.within),
            "workers": gradient.workers,
            "dense_bytes": gradient.dense_bytes,
            "wire_bytes": gradient.wire_bytes,
            "options": [_option(o) for o in options_of(bound, gradient)],
        }
        for alike in gradients_of(bound, paths)
        for gradient in alike
    ]


def _option(option: CodecPrice) -> dict[str, Any]:
    return {
        "codec": option.codec,
        "wire_bytes": option.wire_bytes,
        "wire_s": option.wire_s,
        "local_s": option.local_s,
        "error": option.error,
        "counted_error": option.counted_error,
        "usable": math.isfinite(option.seconds),
        "refused": option.refused,
    }
