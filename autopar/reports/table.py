"""A plan as text: its decisions and its predicted cost.

The text depends only on the plan's decisions and predictions, not on planning times.
Therefore texts of plans can be stored and compared. `planning_times` has the time of
each part of planning.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

from autopar.compilers.options import options_text
from autopar.compilers.targets import room_options
from autopar.cost.breakdown import MEMORY_MORE, NEAR_LIMIT
from autopar.plans import (
    GATHER,
    RING,
    GatherDecision,
    GradientDecision,
    Plan,
    StagePlan,
)
from autopar.plans.schema import Predicted, set_renderer
from autopar.plans.specs import spec_text
from autopar.reports.schedule import STAGE_HEADING, bubble, drawing, stage_rows
from autopar.reports.worth import (
    faster_sending_text,
    has_codecs,
    sends_by_codecs,
    worth_lines,
)
from autopar.terminal import columns, cut_name, names_text
from autopar.units import (
    bytes_text,
    rounded_cluster,
    runs_of,
    seconds_text,
    share_text,
    three_digits,
)
from autopar_passes.remat.copies import DOTS, KERNELS, names_of

# `planning_times` shows the time to load the step if it is at least this many seconds.
_TOLD_S = 0.1
_MOMENTS = "optimizer state"
# The start of several joined words, such as {mu,nu}. (Braces with numbers are a range.)
_JOINED = re.compile(r"\{[^}0-9.,]")
_NUMBER = re.compile(r"\d+")


def mesh_text(plan: Plan | StagePlan) -> str:
    """The mesh of a stage, or of a plan of one stage, such as ``data=2 tensor=4``."""
    return " ".join(f"{name}={size}" for name, size in plan.mesh["axes"].items())


@set_renderer("table")
def render(plan: Plan) -> str:
    """Returns the plan as a table."""
    lines = summary_lines(plan)
    if plan.pipeline is not None:
        lines += ["", *columns([STAGE_HEADING, *stage_rows(plan)], range(4, 9))]
        lines += ["", *drawing(plan)]
    for number, stage in enumerate(plan.stages):
        title = [stage_text(number, stage)] if len(plan.stages) > 1 else []
        lines += ["", *title, *input_lines(plan, stage)]
    if has_codecs(plan):
        lines += ["", *gradient_lines(plan)]
    return "\n".join([*lines, *note_lines(plan)])


def note_lines(plan: Plan) -> list[str]:
    """What the plan replicates, computes by microbatch, and assumes, with reasons."""
    return [
        *_notes("planned replicated, for want of a rule", plan.unsupported_ops),
        *_notes("of each microbatch alone", plan.local),
        *_notes("assumed of loops and of kernels", plan.assumed),
    ]


def summary_lines(plan: Plan) -> list[str]:
    """The cluster, the mesh, how the plan was found, and the predictions."""
    expected = plan.predicted
    return [
        f"plan     {rounded_cluster(plan.cluster)}, {shape_of_plan(plan)}",
        f"solver   {plan.solver.text}",
        f"step     {seconds_text(expected.step_s)}: "
        f"compute {seconds_text(expected.compute_s)}, "
        f"communication {communication_text(expected)}",
        *range_lines(expected),
        f"sends    {sent_text(plan)}",
        *_wait_lines(plan),
        f"memory   {bytes_text(expected.peak_memory_bytes)} on each device at the peak"
        f"{compiled_text(plan)}",
        *(f"decided  {text}" for text in plan.decided),
        *_remat_lines(plan),
        *_offload_lines(plan),
        *compiler_lines(plan),
        *_bubble_lines(plan),
        *cut_lines(plan),
        *gather_lines(plan),
        *attention_lines(plan),
        *replica_lines(plan),
        *worth_lines(plan),
    ]


def sent_text(plan: Plan) -> str:
    """The bytes that a device sends; those between stages are not among them."""
    text = f"{bytes_text(plan.predicted.communication_bytes)} from each device"
    return f"{text}, besides messages between stages" if len(plan.stages) > 1 else text


# The extra of this package that installs the compiler for a kind of device. Compiling
# needs no such device.
_COMPILERS = {"gpu": "gpu-compiler", "tpu": "tpu-compiler"}


def compiled_text(plan: Plan) -> str:
    """The compiled memory of a plan, or a warning if the plan is near the limit of
    memory.
    """
    if plan.compiled_memory_bytes:
        return f" (compiled: {bytes_text(plan.compiled_memory_bytes)})"
    cluster = plan.cluster.read()
    if cluster.groups:  # each group of devices has a limit of its own
        return ""
    if plan.predicted.peak_memory_bytes <= NEAR_LIMIT * cluster.memory_bytes:
        return ""
    more = MEMORY_MORE[cluster.device.kind]
    text = f" (not compiled: such programs take up to {round(100 * more)} % more"
    if (1 + more) * plan.predicted.peak_memory_bytes > cluster.memory_bytes:
        text += ", which may not fit: planning for less memory leaves room"
        extra = _COMPILERS.get(cluster.device.kind) if len(plan.stages) <= 1 else None
        text += f", and autopar[{extra}] compiles it without devices" if extra else ""
    return f"{text})"


def range_lines(expected: Predicted) -> list[str]:
    """The range of step times as a line, if it is known."""
    if not expected.high_s:
        return []
    return [f"range    {range_text(expected)}, nine times in ten"]


def _remat_lines(plan: Plan) -> list[str]:
    """The plan's rematerialisation as a line, if there is any."""
    text = remat_text(plan)
    return [f"remat    {text}"] if text else []


def _offload_lines(plan: Plan) -> list[str]:
    """The state that the plan keeps in the memory of the hosts, if there is any."""
    count = len(plan.offload)
    if not count:
        return []
    return [f"offload  {count} of {len(plan.inputs)} inputs in the memory of the hosts"]


# Level -> what a rematerialised layer keeps.
_KEPT = {DOTS: ", except matrix products", KERNELS: ", except attention kernels"}


def remat_text(plan: Plan) -> str:
    """How the plan changes the step's own rematerialisation, as text; '' for no change.

    The plan may recompute the activations of further layers, or drop the step's own
    ``jax.checkpoint``.
    """
    remat = plan.remat
    if not remat.checkpoints:
        return "nothing: the step's own jax.checkpoint is dropped"
    if not remat.layers:
        kernels = "the step's own jax.checkpoint keeps results of attention kernels"
        return kernels if remat.level == KERNELS else ""
    what = f"the activations of {len(remat.layers)} of {len(remat.starts)} layers"
    kept = _KEPT.get(remat.level, "")
    if names := names_of(remat.level):
        kept = f", except {', '.join(names)}"
    return f"{what}{kept}"


def compiler_lines(plan: Plan) -> list[str]:
    """The options of XLA's compiler that belong to the plan, and why, as a line."""
    cluster = plan.cluster.read()
    room = {
        name: value
        for name, value in room_options(cluster).items()
        if name not in plan.compiler_options
    }
    texts = list[str]()
    if room:
        limit = bytes_text(cluster.memory_bytes)
        texts.append(f"{options_text(room)}, to stay within {limit}")
    if plan.compiler_options:
        texts.append(f"{options_text(plan.compiler_options)}, as given")
    return [f"compiler {'; '.join(texts)}"] if texts else []


# If exposed communication takes at least this fraction of a step, the text of the plan
# says what may help.
_WAITS = 0.3


def _wait_lines(plan: Plan) -> list[str]:
    """The fraction of exposed communication and what may help, as a line."""
    expected = plan.predicted
    if plan.pipeline is not None or expected.exposed_s <= _WAITS * expected.step_s:
        return []
    part = share_text(expected.exposed_s / expected.step_s)
    return [
        f"waits    {part} of the step for messages, which `autopar explain` lists: "
        f"{faster_sending_text(plan)}"
    ]


def _bubble_lines(plan: Plan) -> list[str]:
    """The pipeline bubble as a line: the fraction of a step for which stages wait."""
    if plan.pipeline is None:
        return []
    return [f"bubble   a stage waits {bubble(plan):.1%} of the step on average"]


def cut_lines(plan: Plan) -> list[str]:
    """The codecs of stage cuts as a line, if values are sent encoded."""
    data = plan.pipeline
    if data is None:
        return []
    found = {
        "activations": data.activation_codecs,
        "cotangents": data.cotangent_codecs,
    }
    texts = [
        f"{what} {_codecs_text(codecs)}" for what, codecs in found.items() if codecs
    ]
    return [f"cuts     {', '.join(texts)}"] if texts else []


def gather_lines(plan: Plan) -> list[str]:
    """The codecs of gathered parameters, and why others are exact, as a line."""
    coded: dict[tuple[str, tuple[str, ...]], list[GatherDecision]] = {}
    exact: dict[str, int] = {}
    for gather in (g for stage in plan.stages for g in stage.gathers):
        if gather.codec:
            coded.setdefault((gather.codec, gather.axes), []).append(gather)
        else:
            exact[gather.reason] = exact.get(gather.reason, 0) + 1
    texts = [
        f"{len(alike)} as {codec} over {','.join(axes)}: "
        f"{bytes_text(sum(g.wire_bytes for g in alike))} in place of "
        f"{bytes_text(sum(g.dense_bytes for g in alike))}"
        for (codec, axes), alike in coded.items()
    ]
    texts += [f"{count} exact ({reason})" for reason, count in exact.items()]
    return [f"gathers  {'; '.join(texts)}"] if texts else []


def attention_lines(plan: Plan) -> list[str]:
    """How devices that split a sequence share keys and values, as a line."""
    found = [d.keys for stage in plan.stages for d in stage.attention]
    texts = {GATHER: "gathered", RING: "around a ring"}
    parts = [
        f"{text} for {found.count(keys)} of {len(found)} attention kernels"
        for keys, text in texts.items()
        if keys in found
    ]
    return [f"keys     {', '.join(parts)}"] if parts else []


def _codecs_text(codecs: Sequence[str]) -> str:
    """The codec of all cuts, or the codec of each cut."""
    if len(set(codecs)) == 1:
        return codecs[0]
    return " and ".join(f"{codec} at cut {k}" for k, codec in enumerate(codecs))


def replica_lines(plan: Plan) -> list[str]:
    """A line for each replica: its microbatches, seconds, memory and devices."""
    return [
        f"replica  {k}: {r.microbatches} of {plan.microbatches} microbatches in "
        f"{seconds_text(r.step_s)}, {bytes_text(r.peak_memory_bytes)}, on {r.devices}"
        for k, r in enumerate(plan.replicas)
    ]


def range_text(expected: Predicted) -> str:
    """The range of step times as text."""
    return f"{seconds_text(expected.low_s)} to {seconds_text(expected.high_s)}"


def communication_text(expected: Predicted) -> str:
    """Seconds of communication, such as ``12 ms (9 ms hidden)``."""
    text = seconds_text(expected.communication_s)
    hidden = expected.hidden_s
    return f"{text} ({seconds_text(hidden)} hidden)" if hidden else text


def shape_of_plan(plan: Plan) -> str:
    """The mesh of a plan of one stage, or the stages and schedule of other plans."""
    if len(plan.stages) == 1:
        parts = plan.microbatches
        split = f", {parts} microbatches" if parts > 1 else ""
        if plan.row_multiple > 1:
            split += f", rows padded to a multiple of {plan.row_multiple}"
        if plan.row_blocks > 1:
            split += f", rows sorted in {plan.row_blocks} blocks"
        if plan.row_capacity:
            split += f", slots for {plan.row_capacity:g} times the mean of a group"
        if plan.attention_kernel:
            split += f", attention by {plan.attention_kernel}"
        if plan.loss_blocks > 1:
            split += f", loss in {plan.loss_blocks} blocks of tokens"
        if plan.stage.sums_each_microbatch:
            split += ", gradients summed in each"
        if plan.replicas:
            each = " + ".join(str(r.microbatches) for r in plan.replicas)
            split = f", {each} microbatches"
        return f"mesh {mesh_text(plan.stage)}{split}"
    return (
        f"{len(plan.stages)} stages, {plan.schedule} of {plan.microbatches} "
        "microbatches"
    )


def stage_text(number: int, stage: StagePlan) -> str:
    """A stage in one line: its devices and their mesh."""
    first, last = min(stage.devices), max(stage.devices)
    row = last - first + 1 == len(stage.devices)
    if first == last:
        devices = f"device {first}"
    elif row:
        devices = f"devices {first} to {last}"
    else:
        devices = f"devices {', '.join(map(str, stage.devices))}"
    name = "" if stage.name == f"stage {number}" else f", {stage.name}"
    return f"stage {number}{name}: {devices}, mesh {mesh_text(stage)}"


def planning_times(plan: Plan) -> str:
    """The time of each part of planning, in one line."""
    spent = plan.seconds
    parts_s = (spent.trace, spent.graph, spent.solve, spent.compile)
    rest_s = spent.total - sum(parts_s)
    compiled = f", compiling {spent.compile:.1f} s" if spent.compile else ""
    rest = f", loading the step {rest_s:.1f} s" if rest_s >= _TOLD_S else ""
    return (
        f"planned in {spent.total:.1f} s: tracing {spent.trace:.1f} s, "
        f"graph {spent.graph:.1f} s, solving {spent.solve:.1f} s{compiled}{rest}"
    )


# Path, role, shape and layout.
InputRow = tuple[str, str, str, str]
INPUT_HEADING = ("input", "role", "shape", "layout")


def input_lines(plan: Plan, stage: StagePlan) -> list[str]:
    """The inputs of a stage as text, aligned under a heading."""
    rows = [(cut_name(path), *rest) for path, *rest in input_rows(plan, stage)]
    return columns([INPUT_HEADING, *rows])


def input_rows(plan: Plan, stage: StagePlan) -> list[InputRow]:
    """A row for each input; repeated layers with the same layout share a row."""
    groups: dict[InputRow, list[str]] = {}
    for path, spec in stage.inputs.items():
        shape = shape_text(plan.shapes.get(path))
        key = (template(path), plan.roles.get(path, ""), shape, spec_text(spec))
        groups.setdefault(key, []).append(path)
    rows = [
        (path, role, shape, spec)
        for (_, role, shape, spec), paths in groups.items()
        for path in collapse(paths)
    ]
    moments = [row for row in rows if row[1] == _MOMENTS]
    depth = max((row[0].count("/") + 1 for row in moments), default=0)
    for k in range(depth):
        rows = _join_moments(rows, k)
    return rows


def _join_moments(rows: Sequence[InputRow], depth: int) -> list[InputRow]:
    """Joins rows of the optimizer's state that differ in one word, as mu and nu."""
    groups: dict[tuple[object, ...], list[InputRow]] = {}
    for row in rows:
        words: list[str | None] = [*row[0].split("/")]
        join = (
            row[1] == _MOMENTS and depth < len(words) and _JOINED.search(row[0]) is None
        )
        words[depth : depth + 1] = [None] if join else words[depth : depth + 1]
        groups.setdefault((tuple(words), row[1:]), []).append(row)
    return [_join(alike, depth) for alike in groups.values()]


def _join(alike: Sequence[InputRow], depth: int) -> InputRow:
    if len(alike) == 1:
        return alike[0]
    words = alike[0][0].split("/")
    words[depth] = f"{{{','.join(row[0].split('/')[depth] for row in alike)}}}"
    return ("/".join(words), *alike[0][1:])


def shape_text(shape: Sequence[int] | None) -> str:
    """Sizes joined by ``x``; ``scalar`` for a scalar, '' for an unknown shape."""
    if shape is None:
        return ""
    return "x".join(map(str, shape)) or "scalar"


def _notes(title: str, names: Sequence[str]) -> list[str]:
    return ["", f"{title}: {', '.join(names)}"] if names else []


def template(path: str) -> str:
    """The path with its numbers masked, which is equal for repeated layers."""
    return _NUMBER.sub("#", path)


def collapse(paths: Iterable[str]) -> list[str]:
    """Joins paths that differ only in numbers.

    Paths are joined only if the joined path stands for no path that was not given.

    >>> collapse(["block_0/up", "block_1/up", "block_2/up", "head/up"])
    ['block_{0..2}/up', 'head/up']
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for path in paths:
        words = [path]
        if all(n == str(int(n)) for n in _NUMBER.findall(path)):  # "01" is not 1
            words = _NUMBER.split(path)
        numbers = tuple(map(int, _NUMBER.findall(path)[: len(words) - 1]))
        groups.setdefault(tuple(words), []).append(numbers)
    return [
        words[0] + "".join(map("".join, zip(numbers, words[1:], strict=True)))
        for words, tuples in groups.items()
        for numbers in _products(tuples)
    ]


def _products(tuples: list[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Splits a set of tuples into Cartesian products of sets, each as text."""
    sets = [sorted(set(column)) for column in zip(*tuples, strict=True)]
    if len(set(tuples)) == math.prod(map(len, sets)):
        return [tuple(map(_numbers, sets))]
    first = next(k for k, values in enumerate(sets) if len(values) > 1)
    return [
        text
        for value in sets[first]
        for text in _products([t for t in tuples if t[first] == value])
    ]


def _numbers(values: Sequence[int]) -> str:
    """Numbers as text, such as ``3``, ``{0..5}``, ``{0,2,..8}`` or ``{1,4..6}``."""
    if len(values) == 1:
        return str(values[0])
    stride = values[1] - values[0]
    even = all(b - a == stride for a, b in itertools.pairwise(values))
    if len(values) > 2 and stride > 1 and even:
        return f"{{{values[0]},{values[1]},..{values[-1]}}}"
    texts = [
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs_of(values)
    ]
    return f"{{{','.join(texts)}}}"


GRADIENT_HEADING = ("gradient", "sent as", "over", "sends", "ratio", "error", "saves")
# The columns of the table of gradients that hold numbers.
GRADIENT_NUMBERS = (3, 4, 5, 6)


def _gradients(plan: Plan) -> list[GradientDecision]:
    return [gradient for stage in plan.stages for gradient in stage.gradients]


def gradient_lines(plan: Plan) -> list[str]:
    """The gradients' codecs and the reason; without codecs, only the reason."""
    rows = gradient_rows(plan)
    table = columns([GRADIENT_HEADING, *rows], right=GRADIENT_NUMBERS)
    notes = [f"{name:9}{text}" for name, text in compression_notes(plan)]
    return [*table, "", *notes] if rows else notes


def gradient_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The rows under `GRADIENT_HEADING`; equal repeated layers share a row.

    Bytes and seconds are totals over all gradients of a row. A plan without codecs has
    no rows.
    """
    if not sends_by_codecs(plan):
        return []
    groups: dict[tuple[object, ...], list[GradientDecision]] = {}
    for gradient in _gradients(plan):
        cost = (gradient.dense_bytes, gradient.wire_bytes, gradient.error)
        over = (gradient.axes, gradient.within)
        key = (template(gradient.name), method_text(gradient), *over, *cost)
        groups.setdefault(key, []).append(gradient)
    return [_gradient_cells(alike) for alike in groups.values()]


def _gradient_cells(alike: Sequence[GradientDecision]) -> tuple[str, ...]:
    first = alike[0]
    return (
        names_text(collapse(g.name for g in alike)),
        method_text(first),
        over_text(first),
        bytes_text(sum(g.wire_bytes for g in alike)),
        ratio_text(first.dense_bytes, first.wire_bytes),
        f"{first.error:.2g}",
        seconds_text(sum(g.saved_s for g in alike)),
    )


def method_text(gradient: GradientDecision) -> str:
    """The codec of a gradient and its options, such as ``int4, feedback``."""
    words = [gradient.codec or "as it is"]
    if gradient.limit:
        words.append(f"by inputs of {gradient.limit}")
    if gradient.feedback:
        words.append("feedback")
    if gradient.average_every:
        words.append(f"averaged every {gradient.average_every} steps")
    return ", ".join(words)


def over_text(gradient: GradientDecision) -> str:
    """The mesh axes over which a gradient is sent, such as ``data``.

    ``data after tensor``: the gradient is first summed over the axis tensor without a
    codec.
    """
    axes = ",".join(gradient.axes)
    return f"{axes} after {','.join(gradient.within)}" if gradient.within else axes


def ratio_text(dense_bytes: float, wire_bytes: float) -> str:
    """The ratio of dense bytes to sent bytes; '' if no bytes are sent.

    >>> ratio_text(28672, 7224)
    '3.97 x'
    """
    if not dense_bytes or not wire_bytes:
        return ""
    return f"{three_digits(dense_bytes / wire_bytes)} x"


def compression_notes(plan: Plan) -> list[tuple[str, str]]:
    """The codecs in use and their relative error, as pairs of a title and a text."""
    made = plan.compression
    reason = f": {made.reason}" if made.reason else ""
    notes = [("codecs", f"{made.mode}{reason}")]
    if sends_by_codecs(plan):
        bounded = made.mode == "auto" and made.error_budget is not None
        limit = f", at most {made.error_budget:g}" if bounded else ""
        metric = f" ({made.metric})" if made.metric else ""
        notes.append(("error", f"{made.error:.3g}{limit}{metric}"))
    return notes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Equal collectives of one step, in repeated layers.

    Attributes:
      kind: the kind of collective, such as ``all_gather``.
      axes: the mesh axes over which the collectives run.
      arrays: names of the arrays.
      phase: forward, backward or update.
      trips: number of runs in a step, over all arrays.
      sent_bytes: bytes that one device sends in a step, over all arrays.
      seconds: seconds in a step, over all arrays.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: tuple[str, ...]
    phase: str
    trips: float
    sent_bytes: float
    seconds: float


COLLECTIVE_HEADING = ("collective", "over", "of", "in", "times", "sends", "takes")


def collective_cells(row: CollectiveRow) -> tuple[str, ...]:
    """The texts of a row, under `COLLECTIVE_HEADING`."""
    return (
        row.kind,
        ",".join(row.axes),
        names_text(collapse(row.arrays)),
        row.phase,
        f"{row.trips:g}",
        bytes_text(row.sent_bytes),
        seconds_text(row.seconds),
    )


def collective_lines(rows: Sequence[CollectiveRow]) -> list[str]:
    """The rows as text, aligned under a heading."""
    cells = [COLLECTIVE_HEADING, *map(collective_cells, rows)]
    return columns(cells, right=(4, 5, 6))
