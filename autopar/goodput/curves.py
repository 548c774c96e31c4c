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
from autopar.goodput.efficiency import CodecError, efficiency
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
      own_error: of its unbiased codecs, that each worker makes by itself
        (`autopar.goodput.CodecError`).
      shared_error: that all workers make together.
      workers: number of workers that send.
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
    own_error: float = 0.0
    shared_error: float = 0.0
    workers: int = 1
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
    def error(self) -> CodecError:
        """The error of its codecs."""
        return CodecError(
            own=self.own_error, shared=self.shared_error, workers=self.workers
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


def corrected(
    table: CurveTable,
    lines: Iterable[Mapping[str, Any]],
    noise_scale: float | None = None,
) -> CurveTable:
    """The table with what was measured in the place of what was predicted.

    A configuration that was measured has the batch, the seconds and the codecs of its
    steps; of several batches, those with the most goodput. The others of its kind
    follow: their rows a second and their batch are scaled by the geometric means of
    measured over predicted of those that were measured, and no batch leaves the range
    of the table. The efficiency of all is that at the noise scale that was measured.

    Args:
      table: the table.
      lines: of ledgers: what runs of several processes tell of their progress, and
        the steps that others measured after a re-plan. A line without ``device`` is of
        the only kind of the table, and counts for none where there are several. Where
        no noise scale is known, nobody can say what another batch is worth: only lines
        with the batch of the table count.
      noise_scale: of the gradients, in rows; infinite where noise hides the mean
        gradient. None: the last that a line tells, or else that of the table.

    Raises:
      PlanError: the noise scale is negative or no number.
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
    """The noise scale that a line of progress tells, in rows; None: it tells none.

    JSON has no infinity, so a line has the text ``inf``.

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
    """Steps that were measured: what is '' or 0 of a configuration is not known.

    ``codecs`` and ``error`` are None where the line says that they are as planned.
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
        """Whether they are of a configuration; ``only``: the kind of all, or ''."""
        if self.cluster:
            return self.cluster == point.cluster
        return (self.device or only, self.devices) == (point.kind, point.devices)


@dataclasses.dataclass(frozen=True, slots=True)
class _Scale:
    """How far what is measured of a kind is from what was predicted.

    Attributes:
      rows: batch over that of the table.
      pace: rows a second over those of the table.
    """

    rows: float
    pace: float


class _Judge:
    """Says what a batch is worth at the noise scale that is known now."""

    def __init__(self, table: CurveTable, noise_scale: float | None) -> None:
        self._before, self._base = table.noise_scale, table.base_batch
        self._most = table.max_batch
        self.noise_scale = noise_scale
        self.knows = noise_scale is not None and self._base > 0

    def efficiency(
        self, point: CurvePoint, batch: float, error: CodecError | None = None
    ) -> float:
        """Progress of a row in a batch, as the table counts it.

        A table's own figure is scaled, so that what it knows of its codecs stays.
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
        """A configuration with what was measured of it."""
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
        """A configuration that was not measured, beside those that were."""
        if point.goodput <= 0:
            return point
        batch = self._batch(point, 1.0 if scale is None else scale.rows)
        pace = 1.0 if scale is None else scale.pace
        step_s = point.step_s * (batch / point.batch) / pace
        return self._with(point, batch, step_s, None, {})

    def _batch(self, point: CurvePoint, rows: float) -> int:
        """A batch in proportion that all devices share, in the range of the table."""
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
    """The measured steps that lines of a ledger tell of."""
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
    """What a line says of its plan; lines of earlier releases say nothing."""
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
    """What was measured of a configuration; None: nothing was."""
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
    """How far each kind of devices is from what was predicted of it."""
    rows: dict[str, list[float]] = collections.defaultdict(list)
    pace: dict[str, list[float]] = collections.defaultdict(list)
    for point, steps in zip(points, measured, strict=True):
        if steps is not None:
            rows[point.kind].append(steps.batch / point.batch)
            pace[point.kind].append(rows[point.kind][-1] * point.step_s / steps.step_s)
    mean = statistics.geometric_mean
    return {kind: _Scale(mean(rows[kind]), mean(pace[kind])) for kind in rows}
