"""The speed-up and utilisation of a plan on its cluster, in words."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plans.records import AxisUse, Worth
from autopar.plans.schema import Plan
from autopar.units import (
    bytes_text,
    count_text,
    number_of,
    seconds_text,
    share_text,
    three_digits,
)

# Mesh axes are named if all devices along the axis repeat at least this fraction of the
# work.
_TOLD = 0.1
# The saving of a fused attention kernel is named if it is at least this fraction of a
# step.
_TOLD_SAVED = 0.02


def worth_lines(plan: Plan) -> list[str]:
    """The lines about speed-up and utilisation in a plan's table, if they are known."""
    worth = plan.worth
    if worth is None:
        return []
    found = [
        ("worth", worth_text(worth)),
        ("scheme", worth.scheme),
        *zip(("idle", *[""] * 9), idle_texts(plan), strict=False),
    ]
    if fused := fused_text(worth):
        found.append(("kernels", fused))
    return [f"{name:9}{text}" for name, text in found]


def worth_text(worth: Worth) -> str:
    """Speed-up, MFU and rows and tokens per second, in one line."""
    return ", ".join([speed_up_text(worth), *rates(worth)])


def speed_up_text(worth: Worth) -> str:
    """The speed-up over one device, with a remark if the step does not fit into one."""
    text = f"{three_digits(worth.speed_up)} x one device"
    alone = seconds_text(worth.one_device_s)
    if not worth.one_device_fits:
        alone += f", if it held {bytes_text(worth.one_device_bytes)}"
    return f"{text} ({alone})"


def rates(worth: Worth) -> Iterator[str]:
    """Yields model FLOPs utilisation, rows and tokens per second, if known."""
    if worth.model_flops:
        yield f"MFU {mfu_text(worth)}"
    if worth.rows:
        yield f"{count_text(worth.rows_per_s)} rows/s"
    if worth.tokens:
        yield f"{count_text(worth.tokens_per_s)} tokens/s"


def mfu_text(worth: Worth) -> str:
    """Model FLOPs utilisation, and a second value that counts half of the FLOPs of
    causal attention.
    """
    whole, half = share_text(worth.mfu), share_text(worth.causal_mfu)
    causal = 0.0 < worth.causal_mfu < worth.mfu and half != whole
    return f"{whole} ({half} with causal attention at half)" if causal else whole


def fused_text(worth: Worth) -> str:
    """The saving of a fused attention kernel; '' if it is small."""
    step_s = worth.step_s
    if worth.fused_saves_s < _TOLD_SAVED * step_s or not step_s:
        return ""
    saved, part = seconds_text(worth.fused_saves_s), worth.fused_saves_s / step_s
    return (
        f"a fused kernel of attention would save about {saved} of a step "
        f"({share_text(part)})"
    )


def sends_by_codecs(plan: Plan) -> bool:
    """Whether the plan has codecs."""
    return any(gradient.codec for stage in plan.stages for gradient in stage.gradients)


def has_codecs(plan: Plan) -> bool:
    """Whether the user asked for codecs, or the plan has codecs."""
    return plan.compression.mode != "none" or sends_by_codecs(plan)


def idle_texts(plan: Plan) -> Iterator[str]:
    """Yields a sentence for each group of mesh axes that shorten the step little."""
    worth = plan.worth
    if worth is None:
        return
    idle = [axis for axis in worth.unused_axes if not axis.holds]
    if idle:
        verb = "axis {} is" if len(idle) == 1 else "axes {} are"
        names = verb.format(" and ".join(map(_axis_text, idle)))
        count = worth.needed_devices
        fewer = "1 device" if count == 1 else f"{count} devices"
        yield f"{names} unused: {fewer} would be as fast"
        yield from filter(None, (_sums_text(plan, worth, axis) for axis in idle))
    for axis in worth.axes:
        if axis.is_unused and axis.holds:
            yield f"axis {_axis_text(axis)} splits what is held and no work"
        elif axis.size > 1 and not axis.is_unused and axis.repeated >= _TOLD:
            part, less = share_text(axis.repeated), share_text(axis.shortens)
            told = f"repeats {part} of the work, shortens it by {less}"
            yield f"axis {_axis_text(axis)} {told}"
    if worth.devices > 1 and worth.one_device_fits and worth.speed_up < 1.0:
        yield "one device alone would be faster"


def _sums_text(plan: Plan, worth: Worth, axis: AxisUse) -> str:
    """The sentence that the links of an unused axis are too slow to split rows over it.

    '' if they are not too slow.
    """
    if axis.sums_s <= (1.0 - 1.0 / axis.size) * worth.step_s:
        return ""
    rate = axis.pays_bytes_per_s
    links = f"links of at least {count_text(8 * rate)}b/s" if rate else "faster links"
    return (
        f"to split rows over {axis.name} takes {seconds_text(axis.sums_s)} a step for "
        f"sums of gradients: {_compression(plan)}a larger batch, local steps or "
        f"{links} may help"
    )


def faster_sending_text(plan: Plan) -> str:
    """What may help if links are too slow for a plan's messages."""
    return f"{_compression(plan)}a larger batch or faster links may help"


def _compression(plan: Plan) -> str:
    return "" if has_codecs(plan) else "compression, "


def scheme_text(plan: Plan) -> str:
    """The scheme of a plan and its unused axes, in a line; '' for one device."""
    if plan.worth is None:
        return number_of(len(plan.stages), "stage") if len(plan.stages) > 1 else ""
    if plan.worth.devices == 1:
        return ""
    return "; ".join([plan.worth.scheme, *idle_texts(plan)])


def unused_text(worth: Worth | None) -> str:
    """The unused axes in a few words, such as ``data (8) unused``; '' for none."""
    names = [_axis_text(axis) for axis in worth.unused_axes] if worth else []
    return f"{' and '.join(names)} unused" if names else ""


def worth_facts(plan: Plan) -> list[tuple[str, str]]:
    """The content of `worth_lines` as pairs of a name and a text."""
    worth = plan.worth
    if worth is None:
        return []
    idle = "; ".join(idle_texts(plan))
    facts = [("worth", worth_text(worth)), ("resembles", worth.scheme)]
    facts += [("idle", idle)] if idle else []
    fused = fused_text(worth)
    return facts + ([("kernels", fused)] if fused else [])


def _axis_text(axis: AxisUse) -> str:
    return f"{axis.name} ({axis.size})"
