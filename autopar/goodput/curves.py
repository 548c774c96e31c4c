"""Goodput curves: the goodput of a program on each configuration of devices.

A curve is a table. Each line is for one kind of devices, number of nodes and number of
devices. The line holds the best plan, batch size and codecs on these devices, and their
goodput. A scheduler can read curves without importing JAX.
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
from autopar.goodput.choice import CodecError, efficiency
from autopar.whole_files import export_whole

# The version of the file format. The version rises by one whenever the meaning of a
# field changes.
SCHEMA = 1


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration of devices, and a program's best plan and batch on it.

    Attributes:
      cluster: the cluster as text, such as ``2x8:h100``.
      kind: name of the devices.
      nodes: number of hosts.
      devices: number of devices.
      batch: rows of a step; 0 if the program cannot run.
      accumulation: number of microbatches into which the batch is split.
      step_s: seconds of a step.
      efficiency: progress per row, divided by that with the base batch.
      goodput: rows of the base batch per second; 0 if the program cannot run.
      peak_memory_bytes: peak memory of a device.
      plan: a digest of the plan; '' without a plan.
      scheme: the known parallelism scheme, such as data parallelism, that the plan's
        layouts resemble.
      codecs: codecs of gradients; empty: gradients are sent without codecs.
      own_error: squared error of unbiased codecs that is independent on each worker
        (`autopar.goodput.CodecError`).
      shared_error: squared error of unbiased codecs that is the same on all workers.
      workers: number of workers that send gradients.
      measured: number of measured steps whose seconds replaced the predicted
        ``step_s``; 0: it is a prediction.
      reason: why the program cannot run; '' if it can.
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
    own_error: float = 0.0
    shared_error: float = 0.0
    workers: int = 1
    measured: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        """Checks the numbers of the configuration.

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
    def error(self) -> CodecError:
        """The error of the configuration's codecs."""
        return CodecError(
            own=self.own_error, shared=self.shared_error, workers=self.workers
        )

    @property
    def shape(self) -> tuple[str, int, int]:
        """Kind of devices, number of nodes and number of devices."""
        return self.kind, self.nodes, self.devices


@dataclasses.dataclass(frozen=True, slots=True)
class KindCurve:
    """The curve on one kind of devices, as scheduling policies use it.

    A job need not use all devices that it gets. Therefore its goodput with N nodes and
    D devices is the largest goodput among the table's configurations with at most N
    nodes and at most D devices. This value never falls as devices are added, even where
    the goodput in the table falls.

    Attributes:
      points: the configurations on which the program runs.
    """

    points: tuple[CurvePoint, ...]

    def point_of(self, nodes: int, devices: int) -> CurvePoint | None:
        """The best configuration with at most this many nodes and devices, or None."""
        fit = [p for p in self.points if p.nodes <= nodes and p.devices <= devices]
        return max(fit, key=lambda p: (p.goodput, -p.devices), default=None)

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Rows of the base batch per second; 0 where the program cannot run."""
        pairs = np.broadcast(nodes, devices)
        found = [self.point_of(int(n), int(d)) for n, d in pairs]
        values = [0.0 if point is None else point.goodput for point in found]
        return np.array(values).reshape(pairs.shape)

    def step_s(self, nodes: int, devices: int) -> float:
        """Seconds of a step; infinite where the program cannot run."""
        point = self.point_of(nodes, devices)
        return math.inf if point is None else point.step_s

    def plan(self, nodes: int, devices: int) -> str:
        """The digest of the plan; '' where the program cannot run."""
        point = self.point_of(nodes, devices)
        return "" if point is None else point.plan

    @property
    def most(self) -> int:
        """The most devices that the program can use."""
        best = max(self.points, key=lambda p: (p.goodput, -p.devices), default=None)
        return 0 if best is None else best.devices


class CurveTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The goodput of a program on several configurations.

    Attributes:
      points: one point for each configuration.
      program: fingerprint of the planned step.
      target: the source of the step, as text.
      options: the arguments of the target, as text.
      base_batch: rows of the batch that the program was written for.
      max_batch: rows of the largest batch that the search considered.
      noise_scale: noise scale of the gradients, in rows. If it is None (not known), all
        points have the base batch.
      schema: version of this format.

    Raises:
      ScheduleError: the table has a configuration twice.
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
        """Checks that each configuration occurs once."""
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
        """The curve on a kind of devices; it is empty if the table lacks the kind."""
        own = (p for p in self.points if p.kind == kind and p.goodput > 0)
        return KindCurve(tuple(own))

    @property
    def by_kind(self) -> dict[str, KindCurve]:
        """The curve on each kind of devices."""
        return {kind: self.on(kind) for kind in self.kinds}

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Rows of the base batch per second on the first kind of devices."""
        return self.on(self.kinds[0] if self.kinds else "").goodput(nodes, devices)

    @property
    def dips(self) -> tuple[str, ...]:
        """A sentence for each configuration with less goodput than a smaller one."""
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
        """Reads a table that `save` wrote.

        Raises:
          ScheduleError: the file cannot be read, or is not a curve of this schema.
        """
        name = os.fspath(path)
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # the file name may be invalid
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


def correct_curve(
    table: CurveTable,
    lines: Iterable[Mapping[str, Any]],
    noise_scale: float | None = None,
) -> CurveTable:
    """The table after measured step times have replaced predicted ones.

    A measured configuration gets the batch, seconds and codecs of its measured steps.
    If several batches were measured, the batch with the most goodput is used.
    Unmeasured configurations are scaled: their rows per second and their batch size are
    each multiplied by a factor. The factor is the geometric mean of measured values
    divided by predicted values, over the measured configurations of the same kind of
    devices. Batch sizes stay between the table's base batch and largest batch. All
    efficiencies are computed anew from the measured noise scale.

    Args:
      table: the table.
      lines: lines of ledgers, the logs of runs (`autopar.elastic.ledger`). Two kinds of
        lines are used: lines of progress from runs with several processes, and step
        times that were measured after a re-plan. A line without ``device`` belongs to
        the table's only kind of devices; if the table has several kinds, the line is
        ignored. If the noise scale is not known, the efficiency of other batch sizes is
        unknown. Then only lines with the batch size of the table's point are used.
      noise_scale: noise scale of the gradients, in rows; infinite if the mean gradient
        cannot be distinguished from zero. If None, the last noise scale in the lines is
        used, or else the noise scale of the table.

    Raises:
      PlanError: the noise scale is negative or not a number.
    """
    lines = tuple(lines)
    judge = _Judge(
        table, _last_noise(table, lines) if noise_scale is None else noise_scale
    )
    found = tuple(_steps_of(lines))
    only = table.kinds[0] if len(table.kinds) == 1 else ""
    measured = [_measured_at(point, found, only, judge) for point in table.points]
    means = _scales_of(table.points, measured)
    made = [
        judge.change(point, steps)
        if steps
        else judge.follow(point, means.get(point.kind))
        for point, steps in zip(table.points, measured, strict=True)
    ]
    return msgspec.structs.replace(
        table, points=tuple(made), noise_scale=judge.noise_scale
    )


def noise_scale_of(line: Mapping[str, Any]) -> float | None:
    """The noise scale that a run has reported, in rows; None if it reported none.

    A run reports its progress as lines of JSON. JSON has no infinity, so a line holds
    the text ``inf`` for an infinite noise scale.

    >>> noise_scale_of({"noise_scale": "inf"}), noise_scale_of({"step": 3})
    (inf, None)
    """
    try:
        found = float(line.get("noise_scale") or 0.0)
    except (TypeError, ValueError):
        return None
    return found if line.get("noise_scale") is not None and found >= 0 else None


def _last_noise(table: CurveTable, lines: Sequence[Mapping[str, Any]]) -> float | None:
    told = (noise_scale_of(line) for line in reversed(lines))
    return next((phi for phi in told if phi is not None), table.noise_scale)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Measured steps of a configuration; a field that is '' or 0 is not known.

    ``codecs`` and ``error`` are None if the run used the plan's own codecs.
    """

    step_s: float
    steps: int
    batch: float
    cluster: str = ""
    devices: int = 0
    device: str = ""
    accumulation: int = 1
    scheme: str = ""
    codecs: tuple[str, ...] | None = None
    error: CodecError | None = None

    def are_of(self, point: CurvePoint, only: str) -> bool:
        """Whether the steps ran on this configuration of devices.

        Args:
          point: the configuration.
          only: the table's only kind of devices; '' if it has several.
        """
        if self.cluster:
            return self.cluster == point.cluster
        return (self.device or only, self.devices) == (point.kind, point.devices)


@dataclasses.dataclass(frozen=True, slots=True)
class _Scale:
    """Ratios of measurements to predictions on a kind of devices.

    Attributes:
      rows: measured rows of a batch divided by predicted rows.
      pace: measured rows per second divided by predicted rows per second.
    """

    rows: float
    pace: float


class _Judge:
    """Computes efficiencies with the latest known noise scale."""

    def __init__(self, table: CurveTable, noise_scale: float | None) -> None:
        self._before, self._base = table.noise_scale, table.base_batch
        self._most = table.max_batch
        self.noise_scale = noise_scale
        self.knows = noise_scale is not None and self._base > 0

    def efficiency(
        self, point: CurvePoint, batch: float, error: CodecError | None = None
    ) -> float:
        """Progress per row in a batch, divided by that with the base batch.

        The efficiency in the table already includes the loss by codecs. Therefore this
        method multiplies it by the effect of the new noise scale and batch size,
        instead of replacing it.
        """
        phi = self.noise_scale
        if phi is None or not self.knows:
            return point.efficiency
        before = 1.0
        if self._before is not None:
            before = efficiency(self._before, point.batch, self._base, point.error)
        now = efficiency(phi, batch, self._base, error or point.error)
        return point.efficiency * (now / before) if before > 0 else point.efficiency

    def change(self, point: CurvePoint, steps: _Steps) -> CurvePoint:
        """The configuration with measured values in place of predicted values."""
        fields: dict[str, Any] = {"measured": steps.steps}
        if steps.codecs is not None:
            fields["codecs"] = steps.codecs
        if steps.error is not None:
            own, shared, workers = dataclasses.astuple(steps.error)
            fields |= {"own_error": own, "shared_error": shared, "workers": workers}
        if int(steps.batch) != point.batch:
            fields["accumulation"] = steps.accumulation
        if steps.scheme:
            fields["scheme"] = steps.scheme
        return self._with(point, steps.batch, steps.step_s, steps.error, fields)

    def follow(self, point: CurvePoint, scale: _Scale | None) -> CurvePoint:
        """An unmeasured configuration, scaled by the ratios of the measured ones."""
        if point.goodput <= 0:
            return point
        batch = self._batch(point, 1.0 if scale is None else scale.rows)
        pace = 1.0 if scale is None else scale.pace
        step_s = point.step_s * (batch / point.batch) / pace
        return self._with(point, batch, step_s, None, {})

    def _batch(self, point: CurvePoint, rows: float) -> int:
        """The scaled batch: a multiple of the devices, within the table's range."""
        if math.isclose(rows, 1.0) or not self.knows:
            return point.batch
        found = point.devices * max(round(point.batch * rows / point.devices), 1)
        least = min(self._base, point.batch)
        most = max(self._most, point.batch) if self._most else found
        return min(max(found, least), most)

    def _with(
        self,
        point: CurvePoint,
        batch: float,
        step_s: float,
        error: CodecError | None,
        fields: Mapping[str, Any],
    ) -> CurvePoint:
        worth = self.efficiency(point, batch, error)
        ratio = worth / point.efficiency if point.efficiency > 0 else 1.0
        pace = (batch / point.batch) * (point.step_s / step_s)
        return msgspec.structs.replace(
            point,
            batch=int(batch),
            step_s=step_s,
            efficiency=worth,
            goodput=point.goodput * pace * ratio,
            **fields,
        )


def _steps_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[_Steps]:
    """Yields the measured steps in the lines of a ledger, the log of a run."""
    replans = {x.get("number"): x for x in lines if x.get("kind") == "replan"}
    for line in lines:
        replan = replans.get(line.get("number"), {})
        step_s = line.get("step_s")
        found: dict[str, Any] | None = None
        if line.get("kind") == "progress":
            found = {k: line.get(k, 0) for k in ("batch", "devices", "steps")}
            found["device"] = line.get("device", "")
            found |= _way_of(line)
        elif line.get("kind") == "measured" and replan.get("step"):
            step_s = line.get("step_after_s")
            cluster = replan.get("new", {}).get("cluster", "")
            batch = replan.get("position", 0) / replan["step"]
            found = {"cluster": cluster, "batch": batch, "steps": 1}
        if found is not None and isinstance(step_s, float) and 0 < step_s < math.inf:
            yield _Steps(step_s=step_s, **found)


def _way_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ledger's line about the plan in use; empty if an old release
    wrote the line.
    """
    found: dict[str, Any] = {
        "accumulation": line.get("microbatches", 1),
        "scheme": line.get("scheme", ""),
    }
    if "noise_scale" in line:
        found["codecs"] = tuple(line.get("codecs", ()))
    if "codec_error" in line:
        found["error"] = CodecError(**line["codec_error"])
    return found


def _measured_at(
    point: CurvePoint, found: Sequence[_Steps], only: str, judge: _Judge
) -> _Steps | None:
    """The measured steps of a configuration; None if there are none."""
    if point.goodput <= 0:
        return None
    groups: dict[Any, list[_Steps]] = collections.defaultdict(list)
    for each in found:
        same = each.batch == point.batch
        if each.are_of(point, only) and (same or (judge.knows and each.batch > 0)):
            groups[each.batch, each.codecs, each.accumulation].append(each)
    best, worth = None, -1.0
    for own in groups.values():
        step_s = statistics.median(each.step_s for each in own)
        last = own[-1]
        now = last.batch / step_s * judge.efficiency(point, last.batch, last.error)
        if now > worth:
            count = max(sum(each.steps for each in own), 1)
            best = dataclasses.replace(last, step_s=step_s, steps=count)
            worth = now
    return best


def _scales_of(
    points: Sequence[CurvePoint], measured: Sequence[_Steps | None]
) -> dict[str, _Scale]:
    """The ratios of measurements to predictions for each kind of devices."""
    rows: dict[str, list[float]] = collections.defaultdict(list)
    pace: dict[str, list[float]] = collections.defaultdict(list)
    for point, steps in zip(points, measured, strict=True):
        if steps is not None:
            rows[point.kind].append(steps.batch / point.batch)
            pace[point.kind].append(rows[point.kind][-1] * point.step_s / steps.step_s)
    mean = statistics.geometric_mean
    return {kind: _Scale(mean(rows[kind]), mean(pace[kind])) for kind in rows}
