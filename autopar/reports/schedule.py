"""The schedule of a pipeline as a table, a drawing in text, a picture and a trace."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopar.planner.stages.staged import schedule_of
from autopar.plans import PipelineData, Plan
from autopar.units import bytes_text, seconds_text
from autopar_solver import (
    Schedule,
    ScheduleTable,
    TaskKind,
    TaskSeconds,
    TaskTimes,
    make_table,
    play,
)

# Number of columns of a drawing in text.
_WIDTH = 72
_IDLE, _ONCE = ".", "*"
_LEGEND = (
    "digits: forward pass of a microbatch (its last digit); letters from a: backward;",
    "capital letters: gradients of weights; *: once a step; .: waits",
)
_COLOURS = {
    TaskKind.FORWARD: "#4c78a8",
    TaskKind.BACKWARD: "#f58518",
    TaskKind.BACKWARD_INPUT: "#f58518",
    TaskKind.BACKWARD_WEIGHT: "#54a24b",
}
_NAMES = {
    TaskKind.FORWARD: "forward",
    TaskKind.BACKWARD: "backward",
    TaskKind.BACKWARD_INPUT: "gradients of inputs",
    TaskKind.BACKWARD_WEIGHT: "gradients of weights",
}


def play_plan(plan: Plan) -> tuple[ScheduleTable, TaskSeconds, TaskTimes]:
    """The schedule of a plan of several stages, its seconds, and the times of tasks.

    Args:
      plan: a plan with ``pipeline``.
    """
    data = plan.pipeline
    assert data is not None
    schedule = schedule_of(plan)
    table = make_table(schedule, len(plan.stages), plan.microbatches)
    seconds = _seconds(data, schedule)
    return table, seconds, play(table, seconds)


def _seconds(data: PipelineData, schedule: Schedule) -> TaskSeconds:
    task_s = np.zeros((len(data.parts), len(TaskKind)))
    task_s[:, TaskKind.FORWARD] = data.forward_s
    if schedule.splits_backward:
        task_s[:, TaskKind.BACKWARD_INPUT] = data.backward_s
        task_s[:, TaskKind.BACKWARD_WEIGHT] = data.weight_s
    else:
        task_s[:, TaskKind.BACKWARD] = data.backward_s
    held = np.array(data.activation_bytes)
    return TaskSeconds(
        task_s=task_s,
        forward_link_s=np.array(data.forward_link_s),
        backward_link_s=np.array(data.backward_link_s),
        latency_s=np.array(data.latency_s),
        step_s=np.array(data.step_s),
        held_bytes=held,
        pending_bytes=held,
    )


StageRow = tuple[str, ...]
STAGE_HEADING: StageRow = (
    "stage", "devices", "mesh", "layers", "forward", "backward", "once", "memory",
    "waits",
)  # fmt: skip


def stage_rows(plan: Plan) -> list[StageRow]:
    """A row for each stage: its devices, layers, seconds, memory and waits.

    The seconds of the forward and the backward pass are for one microbatch.
    """
    data = plan.pipeline
    assert data is not None
    _, seconds, timeline = play_plan(plan)
    count = len(plan.stages)
    ends = (*data.parts[1:], len(data.layers))
    out: list[StageRow] = []
    for number, stage in enumerate(plan.stages):
        parts = range(number, len(data.parts), count)
        spans = [_span(data.parts[p], ends[p]) for p in parts]
        own = [k for p in parts for k in range(data.parts[p], ends[p])]
        again = len(set(own) & set(data.recomputed))
        mesh = " ".join(f"{k}={v}" for k, v in stage.mesh["axes"].items())
        backward = seconds.task_s[list(parts), 1:].sum()
        out.append(
            (
                str(number),
                _span(min(stage.devices), max(stage.devices) + 1),
                mesh,
                ", ".join(spans) + (f" ({again} computed again)" if again else ""),
                seconds_text(float(seconds.task_s[list(parts), 0].sum())),
                seconds_text(float(backward)),
                seconds_text(data.step_s[number]),
                bytes_text(data.memory_bytes[number]),
                f"{timeline.bubble[number]:.1%}",
            )
        )
    return out


def _span(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def bubble(plan: Plan) -> float:
    """The fraction of a step's time that a stage waits, averaged over stages."""
    return float(np.mean(play_plan(plan)[2].bubble))


def drawing(plan: Plan, width: int = _WIDTH) -> list[str]:
    """The schedule drawn in text: a line for each stage, time from left to right.

    Each column shows the task that runs for most of its time.
    """
    table, seconds, timeline = play_plan(plan)
    whole = timeline.makespan_s
    if whole <= 0:
        return []
    lines: list[str] = []
    for stage in range(table.stages):
        share = np.zeros((width, len(table.orders[stage]) + 1))
        spans = [
            (begin, end, task)
            for task, begin, end in _tasks(table, timeline, stage, seconds)
        ]
        marks = [_mark(task) for *_, task in spans]
        for k, (begin, end, _) in enumerate(spans):
            _cover(share[:, k], begin / whole * width, end / whole * width)
        line = "".join(
            marks[int(row.argmax())] if row.max() >= 0.5 else _IDLE for row in share
        )
        lines.append(f"{stage:>3} |{line}|")
    return [*lines, *(f"     {line}" for line in _LEGEND)]


def _cover(column: np.ndarray, begin: float, end: float) -> None:
    """Adds to each cell of a column the fraction of it that a time span covers."""
    cells = np.arange(len(column))
    column += np.clip(np.minimum(end, cells + 1) - np.maximum(begin, cells), 0, None)


_Task = tuple[TaskKind, int, int] | None


def _tasks(
    table: ScheduleTable, timeline: TaskTimes, stage: int, seconds: TaskSeconds
) -> Iterator[tuple[_Task, float, float]]:
    """Yields the tasks of a stage with their starts and ends.

    None stands for the work that runs once per step.
    """
    starts, ends = timeline.starts_s[stage], timeline.ends_s[stage]
    for task, begin, end in zip(table.tasks(stage), starts, ends, strict=True):
        yield (task.kind, task.microbatch, task.chunk), float(begin), float(end)
    last = float(ends[-1]) if len(ends) else 0.0
    if seconds.step_s[stage] > 0:
        yield None, last, last + float(seconds.step_s[stage])


def _mark(task: _Task) -> str:
    if task is None:
        return _ONCE
    kind, microbatch, _ = task
    if kind is TaskKind.FORWARD:
        return str(microbatch % 10)
    letter = chr(ord("a") + microbatch % 26)
    return letter.upper() if kind is TaskKind.BACKWARD_WEIGHT else letter


def trace_events(plan: Plan) -> dict[str, Any]:
    """The predicted schedule as a trace in Chrome's format, which Perfetto reads.

    The trace has one row per stage. Times are in microseconds, as the format requires.
    """
    table, seconds, timeline = play_plan(plan)
    events: list[dict[str, Any]] = []
    for stage in range(table.stages):
        events.append(row_name(stage, f"stage {stage}"))
        for task, begin, end in _tasks(table, timeline, stage, seconds):
            events.append(_event(stage, task, begin, end))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def row_name(row: int, name: str) -> dict[str, Any]:
    """The event that names a row of a trace."""
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": 0,
        "tid": row,
        "args": {"name": name},
    }


def _event(stage: int, task: _Task, begin: float, end: float) -> dict[str, Any]:
    name, args = "once a step", dict[str, Any]()
    if task is not None:
        kind, microbatch, chunk = task
        name = f"{_NAMES[kind]} {microbatch}"
        args = {"microbatch": microbatch, "chunk": chunk}
    return {
        "ph": "X",
        "name": name,
        "cat": "task",
        "pid": 0,
        "tid": stage,
        "ts": begin * 1e6,
        "dur": (end - begin) * 1e6,
        "args": args,
    }


def trace_text(plan: Plan) -> str:
    """`trace_events` as JSON text."""
    return json.dumps(trace_events(plan), indent=1) + "\n"


def timeline_html(plan: Plan) -> str:
    """The schedule as a picture: a row for each stage, time from left to right."""
    table, seconds, timeline = play_plan(plan)
    whole, height, width, left = timeline.makespan_s, 22, 960, 64
    parts: list[str] = []
    for stage in range(table.stages):
        top = stage * (height + 4)
        parts.append(
            f'<text x="0" y="{top + height * 0.7:.0f}" font-size="12">stage '
            f"{stage}</text>"
        )
        for task, begin, end in _tasks(table, timeline, stage, seconds):
            parts.append(_box(task, begin, end, whole, top, height, width, left))
    total = table.stages * (height + 4)
    names = ", ".join(
        f'<span style="color:{_COLOURS[k]}">{html.escape(_NAMES[k])}</span>'
        for k in _kinds(table)
    )
    return (
        f'<svg viewBox="0 0 {width + left} {total}" role="img" '
        f'aria-label="The schedule of the stages">{"".join(parts)}</svg>'
        f"<p>{names}; grey: once a step. {seconds_text(whole)} from left to right; "
        f"a stage waits {bubble(plan):.1%} of it on average.</p>"
    )


def _kinds(table: ScheduleTable) -> Sequence[TaskKind]:
    found = {int(kind) for order in table.orders for kind in order[:, 0]}
    return [TaskKind(kind) for kind in sorted(found)]


def _box(
    task: _Task,
    begin: float,
    end: float,
    whole: float,
    top: float,
    height: float,
    width: float,
    left: float,
) -> str:
    x, w = left + begin / whole * width, max(0.4, (end - begin) / whole * width)
    colour = "#999" if task is None else _COLOURS[task[0]]
    name = "once a step" if task is None else f"{_NAMES[task[0]]} {task[1]}"
    title = f"{name}: {seconds_text(begin)} to {seconds_text(end)}"
    label = ""
    if task is not None and w > 14:
        label = (
            f'<text x="{x + w / 2:.1f}" y="{top + height * 0.7:.0f}" font-size="10" '
            f'fill="white" text-anchor="middle">{task[1]}</text>'
        )
    return (
        f'<g><title>{html.escape(title)}</title><rect x="{x:.1f}" y="{top}" '
        f'width="{w:.2f}" height="{height}" fill="{colour}" stroke="white" '
        f'stroke-width="0.4"/>{label}</g>'
    )
