"""Comparison of the plans of a sweep over batches, models and numbers of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.plans import Plan, Worth
from autopar.plans.schema import Predicted
from autopar.reports.schedule import bubble
from autopar.reports.worth import unused_text
from autopar.terminal import columns, shorten
from autopar.units import bytes_text, count_text, number_of, seconds_text, share_text

_FIGURES = ("step", "rows/s", "MFU", "efficiency", "memory", "lost to", "fits")
# From this efficiency on, a table does not say what the rest is lost to.
_HIGH = 0.9
# The least part of a step or of its work that counts as a loss.
_LEAST_LOST = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep.

    Attributes:
      options: the options of the target that vary, as text.
      cluster: the cluster as text.
      device: name of the devices.
      devices: number of devices.
      plan: the plan; None if planning failed.
      reason: why planning failed.
      fits: whether some plan fits into the memory of the devices; None if planning
        failed for another reason.
    """

    options: dict[str, str]
    cluster: str
    device: str
    devices: int
    plan: Plan | None = None
    reason: str = ""
    fits: bool | None = True

    @property
    def predictions(self) -> Predicted | None:
        """The predictions of the point's plan."""
        return self.plan and self.plan.predicted

    @property
    def worth(self) -> Worth | None:
        """Speed-up and utilisation of the point's plan."""
        return self.plan and self.plan.worth

    @property
    def efficiency(self) -> float | None:
        """The speed-up over one device, divided by the number of devices.

        Devices that the plan leaves idle count, too.
        """
        return self.worth and self.worth.speed_up / self.devices

    @property
    def losses(self) -> tuple[str, ...]:
        """What devices lose time to, each in a few words; nothing if they lose little.

        Parts are parts of a step's seconds.
        """
        plan, worth, efficiency = self.plan, self.worth, self.efficiency
        if plan is None or worth is None or efficiency is None or efficiency >= _HIGH:
            return ()
        found: list[str] = []
        if worth.devices < self.devices:
            found.append(f"{number_of(self.devices - worth.devices, 'device')} idle")
        found += filter(None, [unused_text(worth)])
        found += (
            f"{axis.name} ({axis.size}) repeats {share_text(axis.repeated)} of the work"
            for axis in worth.axes
            if axis.size > 1 and not axis.is_unused and axis.repeated >= _LEAST_LOST
        )
        if plan.pipeline is not None:
            name, part = "waits of stages", bubble(plan)
        else:
            name, part = "messages", plan.predicted.exposed_s / plan.predicted.step_s
        found += [f"{name} {share_text(part)}"] if part >= _LEAST_LOST else []
        return tuple(found)

    @property
    def data(self) -> dict[str, Any]:
        """The point as plain data."""
        worth, expected = self.worth, self.predictions
        return {
            "options": self.options,
            "cluster": self.cluster,
            "devices": self.devices,
            "fits": self.fits,
            "reason": self.reason,
            "step_s": expected and expected.step_s,
            "peak_memory_bytes": expected and expected.peak_memory_bytes,
            "rows_per_s": worth and worth.rows_per_s,
            "tokens_per_s": worth and worth.tokens_per_s,
            "mfu": worth and worth.mfu,
            "speed_up": worth and worth.speed_up,
            "efficiency": self.efficiency,
            "lost_to": list(self.losses),
            "scheme": worth and worth.scheme,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class WorthIt:
    """The largest number of devices with enough efficiency for one model and batch.

    Attributes:
      options: the options that vary.
      device: name of the devices.
      best: the point with the most devices, among the points whose efficiency is high
        enough; None if there is no such point.
      beyond: the point with the next larger number of devices than ``best``; None if no
        such point has a plan.
    """

    options: dict[str, str]
    device: str
    best: Point | None
    beyond: Point | None

    @property
    def data(self) -> dict[str, Any]:
        """The answer as plain data."""
        return {
            "options": self.options,
            "device": self.device,
            "devices": self.best and self.best.devices,
            "efficiency": self.best and self.best.efficiency,
        }


def worth_it(points: Sequence[Point], share: float) -> list[WorthIt]:
    """For each model and batch, the largest number of devices with enough efficiency.

    Args:
      points: all points; points without a plan are ignored.
      share: the least efficiency, 0 to 1.
    """
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        if point.efficiency is not None:
            key = (*point.options.items(), point.device)
            groups.setdefault(key, []).append(point)
    found: list[WorthIt] = []
    for alike in groups.values():
        alike.sort(key=lambda p: p.devices)
        if alike[0].devices == alike[-1].devices:
            continue
        good = [p for p in alike if (p.efficiency or 0.0) >= share]
        best = good[-1] if good else None
        most = best.devices if best else 0
        beyond = next((p for p in alike if p.devices > most), None)
        found.append(WorthIt(alike[0].options, alike[0].device, best, beyond))
    return found


def largest(points: Iterable[Point], name: str) -> list[Point]:
    """The points with the largest value of an option for which a plan was found.

    One point is returned for each combination of the other options and the cluster.

    Args:
      points: all points.
      name: the option, which has numbers as values.
    """
    best: dict[tuple[object, ...], Point] = {}
    for point in points:
        if point.plan is None or not point.options.get(name, "").isdigit():
            continue
        others = tuple((k, v) for k, v in point.options.items() if k != name)
        known = best.get((others, point.cluster))
        if known is None or int(known.options[name]) < int(point.options[name]):
            best[others, point.cluster] = point
    return list(best.values())


def table_lines(points: Sequence[Point]) -> list[str]:
    """The points as a table."""
    names = list(dict.fromkeys(name for p in points for name in p.options))
    heading = (*names, "cluster", *_FIGURES)
    rows = [heading, *((*_point_names(p, names), *_figures(p)) for p in points)]
    return columns(rows, right=range(len(names) + 1, len(heading) - 2))


def _point_names(point: Point, names: Sequence[str]) -> tuple[str, ...]:
    return (*(point.options.get(name, "") for name in names), point.cluster)


def _figures(point: Point) -> tuple[str, ...]:
    worth, expected, efficiency = point.worth, point.predictions, point.efficiency
    if expected is None or worth is None or efficiency is None:
        why = "no" if point.fits is False else shorten(point.reason)
        return ("", "", "", "", "", "", why)
    return (
        seconds_text(expected.step_s),
        count_text(worth.rows_per_s) if worth.rows else "",
        share_text(worth.mfu) if worth.model_flops else "",
        share_text(efficiency),
        bytes_text(expected.peak_memory_bytes),
        ", ".join(point.losses),
        "yes",
    )


def conclusion_lines(
    points: Sequence[Point], share: float, sized: str | None
) -> list[str]:
    """Conclusions from the points, each as a sentence.

    Args:
      points: all points.
      share: the least efficiency, 0 to 1, for a number of devices to be worth it.
      sized: the option whose largest fitting value is to be stated; None: no option.
    """
    lines = [_worth_line(found, share) for found in worth_it(points, share)]
    if sized is not None:
        for point in largest(points, sized):
            others = {k: v for k, v in point.options.items() if k != sized}
            where = ", ".join([*_words(others), point.cluster])
            lines.append(
                f"{where}: {sized}={point.options[sized]} is the largest found"
            )
    return lines


def _worth_line(found: WorthIt, share: float) -> str:
    where = ", ".join([*_words(found.options), found.device])
    beyond = ""
    if found.beyond is not None and found.beyond.efficiency is not None:
        part = share_text(found.beyond.efficiency)
        beyond = f"{_count(found.beyond.devices)} reach {part}"
    if found.best is None or found.best.efficiency is None:
        return (
            f"{where}: nothing reaches an efficiency of {share_text(share)}; {beyond}"
        )
    part = share_text(found.best.efficiency)
    verb = "is" if found.best.devices == 1 else "are"
    text = f"{where}: {_count(found.best.devices)} {verb} worth it, efficiency {part}"
    return f"{text}; {beyond}" if beyond else text


def _words(options: dict[str, str]) -> list[str]:
    return [f"{k}={v}" for k, v in options.items()]


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
