"""Goodput curves: what a program makes of each configuration of devices.

A curve is a table: the best plan, batch and codecs for so many nodes and devices of a
kind, and the goodput with them. Schedulers read it, and nothing in it needs JAX.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from autopar.errors import ScheduleError
from autopar.whole_files import export_whole

# Raised by one whenever a field changes its meaning.
SCHEMA = 1


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration, and the best that a program makes of it.

    Attributes:
      cluster: its text, such as ``2x8:h100``.
      kind: name of its devices.
      nodes: number of hosts.
      devices: number of devices.
      batch: rows of a step; 0 where nothing runs.
      accumulation: into how many microbatches the batch is cut.
      step_s: seconds of a step.
      efficiency: progress of a row, as a part of that in the base batch.
      goodput: rows of the base batch per second; 0 where nothing runs.
      peak_memory_bytes: most bytes live at once on a device.
      plan: digits that change with the plan; '' without one.
      scheme: what the plan's layouts resemble.
      codecs: how its gradients are sent; none: as they are.
      measured: steps whose seconds replaced the predicted ones.
      reason: why nothing runs; '' where something does.
    """

    cluster: str
    kind: str
    nodes: int
    devices: int
    batch: int = 0
    accumulation: int = 1
    step_s: float = 0.0
    efficiency: float = 1.0
    goodput: float = 0.0
    peak_memory_bytes: float = 0.0
    plan: str = ""
    scheme: str = ""
    codecs: tuple[str, ...] = ()
    measured: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuses numbers that no configuration can have.

        Raises:
          ScheduleError: a number is out of its range.
        """
        where = f"curve, {self.cluster}"
        if not 1 <= self.nodes <= self.devices:
            raise ScheduleError(
                f"{where}: {self.nodes} nodes and {self.devices} devices; give at "
                "least one node, and a device on each."
            )
        if not (math.isfinite(self.goodput) and self.goodput >= 0):
            raise ScheduleError(
                f"{where}: its goodput is {self.goodput}; give a finite number of at "
                "least 0."
            )
        good = math.isfinite(self.step_s) and self.step_s > 0 and self.batch > 0
        if self.goodput > 0 and not good:
            raise ScheduleError(
                f"{where}: its step takes {self.step_s} s with a batch of "
                f"{self.batch}; give more than 0 of both."
            )

    @property
    def shape(self) -> tuple[str, int, int]:
        """Kind of devices, number of nodes and of devices."""
        return self.kind, self.nodes, self.devices


@dataclasses.dataclass(frozen=True, slots=True)
class KindCurve:
    """The curve on one kind of devices, as policies ask for it.

    A job need not use all that it is given. So its goodput on so many nodes and
    devices is the best of the table's configurations that are no larger: what a policy
    sees never falls with more devices, also where the table does.

    Attributes:
      points: the configurations that run.
    """

    points: tuple[CurvePoint, ...]

    def point_of(self, nodes: int, devices: int) -> CurvePoint | None:
        """The configuration that is used on so many nodes and devices; None: none."""
        fit = [p for p in self.points if p.nodes <= nodes and p.devices <= devices]
        return max(fit, key=lambda p: (p.goodput, -p.devices), default=None)

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Rows of the base batch per second; 0 where nothing runs."""
        pairs = np.broadcast(nodes, devices)
        found = [self.point_of(int(n), int(d)) for n, d in pairs]
        values = [0.0 if point is None else point.goodput for point in found]
        return np.array(values).reshape(pairs.shape)

    def step_s(self, nodes: int, devices: int) -> float:
        """Seconds of a step; infinite where nothing runs."""
        point = self.point_of(nodes, devices)
        return math.inf if point is None else point.step_s

    def plan(self, nodes: int, devices: int) -> str:
        """The digits of the plan that is used; '' where nothing runs."""
        point = self.point_of(nodes, devices)
        return "" if point is None else point.plan

    @property
    def most(self) -> int:
        """No more devices are of use."""
        best = max(self.points, key=lambda p: (p.goodput, -p.devices), default=None)
        return 0 if best is None else best.devices


class CurveTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The goodput of a program on several configurations.

    Attributes:
      points: one for each configuration.
      program: fingerprint of the step that was planned.
      target: where the step comes from, as text.
      options: the arguments of the target, as text.
      base_batch: rows of the batch that the program was written for.
      max_batch: no larger batch was looked at.
      noise_scale: of the gradients, in rows; None: not known, and the batch is kept.
      schema: version of this format.

    Raises:
      ScheduleError: a configuration stands in it twice.
    """

    points: tuple[CurvePoint, ...]
    program: str = ""
    target: str = ""
    options: dict[str, str] = {}
    base_batch: int = 0
    max_batch: int = 0
    noise_scale: float | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Checks that each configuration is there once."""
        counted = collections.Counter(point.shape for point in self.points)
        for (kind, nodes, devices), times in counted.items():
            if times > 1:
                raise ScheduleError(
                    f"curve: {nodes} nodes with {devices} devices of {kind} stand in "
                    f"it {times} times; give each configuration once."
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices."""
        return tuple(dict.fromkeys(point.kind for point in self.points))

    def on(self, kind: str) -> KindCurve:
        """The curve on a kind of devices; where nothing runs if it is not there."""
        own = (p for p in self.points if p.kind == kind and p.goodput > 0)
        return KindCurve(tuple(own))

    @property
    def by_kind(self) -> dict[str, KindCurve]:
        """The curve on each kind."""
        return {kind: self.on(kind) for kind in self.kinds}

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Rows of the base batch per second on the first kind of devices."""
        return self.on(self.kinds[0] if self.kinds else "").goodput(nodes, devices)

    @property
    def dips(self) -> tuple[str, ...]:
        """Where more devices do less, a sentence each."""
        found: list[str] = []
        for curve in self.by_kind.values():
            for point in curve.points:
                used = curve.point_of(point.nodes, point.devices)
                if used is not None and used.goodput > point.goodput:
                    found.append(
                        f"{point.cluster} does less than {used.cluster}: policies see "
                        "the latter's goodput there, and the other devices idle."
                    )
        return tuple(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON."""
        export_whole(path, msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CurveTable:
        """Reads what `save` wrote.

        Raises:
          ScheduleError: the file cannot be read, or is no curve of this schema.
        """
        name = os.fspath(path)
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # a name may hold what no name can
            reason = getattr(error, "strerror", None) or error
            raise ScheduleError(f"{name}: {reason}.") from error
        try:
            schema = msgspec.json.decode(data, type=_CurveHeader).schema
            if schema != SCHEMA:
                raise ScheduleError(
                    f"{name}: it is a curve of schema {schema}, and this version reads "
                    f"schema {SCHEMA}; make it anew with autopar goodput."
                )
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise ScheduleError(f"{name}: it is no goodput curve: {error}.") from error


class _CurveHeader(msgspec.Struct):
    schema: int


def corrected(table: CurveTable, lines: Iterable[Mapping[str, Any]]) -> CurveTable:
    """The table with measured seconds of steps in the place of predicted ones.

    Configurations that were not measured keep their shape: their seconds are scaled by
    the geometric mean of measured over predicted of those that were, kind by kind.

    Args:
      table: the table.
      lines: of ledgers: what runs of several processes tell of their progress, and
        the steps that others measured after a re-plan. They count if they are of a
        configuration and batch of the table. A line without ``device`` is of the only
        kind of the table, and counts for none where there are several.
    """
    found = tuple(_steps_of(tuple(lines)))
    only = table.kinds[0] if len(table.kinds) == 1 else ""
    seconds = [_measured_seconds(point, found, only) for point in table.points]
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    for point, (step_s, count) in zip(table.points, seconds, strict=True):
        if count:
            ratios[point.kind].append(step_s / point.step_s)
    means = {kind: statistics.geometric_mean(each) for kind, each in ratios.items()}
    made = [
        _with_seconds(
            point, step_s if count else point.step_s * means[point.kind], count
        )
        if point.goodput > 0 and point.kind in means
        else point
        for point, (step_s, count) in zip(table.points, seconds, strict=True)
    ]
    return msgspec.structs.replace(table, points=tuple(made))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Steps that were measured: what is '' or 0 of a configuration is not known."""

    step_s: float
    steps: int
    batch: float
    cluster: str = ""
    devices: int = 0
    device: str = ""

    def are_of(self, point: CurvePoint, only: str) -> bool:
        """Whether they are of a configuration; ``only``: the kind of all, or ''."""
        if self.batch != point.batch:
            return False
        if self.cluster:
            return self.cluster == point.cluster
        return (self.device or only, self.devices) == (point.kind, point.devices)


def _steps_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[_Steps]:
    """The measured steps that lines of a ledger tell of."""
    replans = {x.get("number"): x for x in lines if x.get("kind") == "replan"}
    for line in lines:
        replan = replans.get(line.get("number"), {})
        step_s = line.get("step_s")
        found: dict[str, Any] | None = None
        if line.get("kind") == "progress":
            found = {k: line.get(k, 0) for k in ("batch", "devices", "steps")}
            found["device"] = line.get("device", "")
        elif line.get("kind") == "measured" and replan.get("step"):
            step_s = line.get("step_after_s")
            cluster = replan.get("new", {}).get("cluster", "")
            batch = replan.get("position", 0) / replan["step"]
            found = {"cluster": cluster, "batch": batch, "steps": 1}
        if found is not None and isinstance(step_s, float) and 0 < step_s < math.inf:
            yield _Steps(step_s=step_s, **found)


def _measured_seconds(
    point: CurvePoint, found: Sequence[_Steps], only: str
) -> tuple[float, int]:
    """Median seconds of a configuration's steps, and how many were measured."""
    own = [each for each in found if each.are_of(point, only)]
    if not own or point.goodput <= 0:
        return 0.0, 0
    median_s = statistics.median(each.step_s for each in own)
    return median_s, max(sum(each.steps for each in own), 1)


def _with_seconds(point: CurvePoint, step_s: float, measured: int) -> CurvePoint:
    return msgspec.structs.replace(
        point,
        step_s=step_s,
        goodput=point.goodput * point.step_s / step_s,
        measured=measured or point.measured,
    )
