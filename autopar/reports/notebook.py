"""The display of a plan in a notebook: one line of text, or HTML with a picture."""

from __future__ import annotations

import html
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from autopar.plans import Plan, StagePlan
from autopar.plans.schema import set_renderer
from autopar.plans.specs import Spec, spec_text
from autopar.reports.table import (
    bytes_text,
    communication_text,
    cut_lines,
    input_rows,
    mesh_text,
    seconds_text,
    sent_text,
    shape_of_plan,
    stage_text,
    template,
)
from autopar.reports.worth import sends_by_codecs, unused_text, worth_facts

# A picture of a mesh, and of arrays split over it, as SVG.
#
# Each device of a mesh has a colour. The device's index along the first mesh axis
# determines the hue, and its index along the second axis the lightness. A shard of an
# array has the colour of the devices that hold it. Therefore an array that is split
# like the mesh looks like the mesh. A shard that all devices hold is grey.

# The most shards of an array, and the most devices of a mesh, that are drawn along a
# side. More of them would be too small to see.
MOST_PARTS, MOST_DEVICES = 8, 64
_SIDE, _GAP, _LABELS = 96, 56, 34


def picture(axes: Mapping[str, int], arrays: Sequence[tuple[str, Spec]]) -> str:
    """Draws the mesh, and to the right of it the arrays, as SVG.

    Args:
      axes: size of each mesh axis, outermost first.
      arrays: name and layout of each array to draw.
    """
    names = list(axes)
    mesh = (tuple(names[:1]), tuple(names[1:]))
    label = " x ".join(f"{name}={size}" for name, size in axes.items())
    drawn = [("mesh", label, mesh)]
    drawn += [(name, spec_text(spec), two_dims(spec)) for name, spec in arrays]
    step = _SIDE + _GAP
    width, height = step * len(drawn), _SIDE + _LABELS
    parts = [
        f'<g transform="translate({k * step} 0)">{_drawing(axes, *each, k == 0)}</g>'
        for k, each in enumerate(drawn)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" font-size="11" '
        f'font-family="sans-serif" style="max-width:none">{"".join(parts)}</svg>'
    )


def two_dims(spec: Spec) -> Spec:
    """The first two sharded dimensions, filled up with unsharded dimensions."""
    split = [names for names in spec if names][:2]
    if len(split) == 1:
        whole = spec[0] != split[0]
        return ((), split[0]) if whole else (split[0], ())
    return (*split, (), ())[:2]


def _drawing(
    axes: Mapping[str, int], name: str, label: str, spec: Spec, is_mesh: bool
) -> str:
    """Draws shards in rows and columns, with the name and the label below.

    An array is drawn as a square. For a mesh, each device is drawn as a square.
    """
    most = MOST_DEVICES if is_mesh else MOST_PARTS
    sides = [_drawn_indices(axes, names, most) for names in (*spec, (), ())[:2]]
    longest = max(map(len, sides))
    size = [_SIDE * len(x) / longest if is_mesh else _SIDE for x in sides]
    stroke = 1 if longest <= MOST_PARTS else 0
    cells = "".join(
        f'<path d="M{x:g} {y:g}h{w:g}v{h:g}h{-w:g}z" fill="{colour}"/>'
        for x, y, w, h, colour in _cells(axes, sides, size)
    )
    texts = "".join(
        f'<text x="0" y="{_SIDE + offset}" fill="currentColor">{html.escape(t)}</text>'
        for t, offset in ((_short(name), 13), (_short(label), 27))
    )
    return (
        f"<title>{html.escape(f'{name}: {label}')}</title>"
        f'<g stroke="#fff" stroke-width="{stroke}">{cells}</g>{texts}'
    )


def _short(text: str, most: int = 22) -> str:
    return text if len(text) <= most else f"...{text[3 - most :]}"


def _cells(
    axes: Mapping[str, int],
    sides: Sequence[Sequence[Mapping[str, int]]],
    size: Sequence[float],
) -> Iterator[tuple[float, float, float, float, str]]:
    """Yields the left, top, width, height and colour of each shard."""
    down, along = sides
    height, width = size[0] / len(down), size[1] / len(along)
    for (i, row), (j, column) in itertools.product(enumerate(down), enumerate(along)):
        colour = _colour(axes, {**row, **column})
        yield j * width, i * height, width, height, colour


def _drawn_indices(
    axes: Mapping[str, int], names: Sequence[str], most: int
) -> list[dict[str, int]]:
    """The mesh indices of the shards along one side; at most ``most`` are returned."""
    sizes = [axes[name] for name in names]
    parts = math.prod(sizes)
    count = min(parts, most)
    found: list[dict[str, int]] = []
    for k in range(count):
        number = k * parts // count
        indices: dict[str, int] = {}
        for name, size in zip(reversed(names), reversed(sizes), strict=True):
            number, indices[name] = divmod(number, size)
        found.append(indices)
    return found


def _colour(axes: Mapping[str, int], indices: Mapping[str, int]) -> str:
    """The colour of devices with given mesh indices; grey without any index."""
    names = list(axes)[:2]
    known = [name in indices for name in names]
    if not any(known):
        return "#bbb"
    hue = 360 * indices.get(names[0], 0) // axes[names[0]]
    saturation = 65 if known[0] else 0
    lightness = 60
    if len(names) > 1 and known[1]:
        lightness = 42 + 38 * indices[names[1]] // max(1, axes[names[1]] - 1)
    return f"hsl({hue},{saturation}%,{lightness}%)"


# The most rows of the table by role of an input, and the most arrays in the picture.
_SHOWN = {"parameter": 8, "batch": 2}
MOST_DRAWN = 4


@set_renderer("line")
def line(plan: Plan) -> str:
    """Returns the plan in one line: cluster, mesh and predicted cost of a step.

    An example is ``<Plan 8:cpu, mesh data=8, step 3.46 ms, 1.2 MB on each device,
    proved optimal, no codecs>``.
    """
    expected = plan.predicted
    unused = unused_text(plan.worth)
    return (
        f"<Plan {plan.cluster}, {shape_of_plan(plan)}, "
        f"step {seconds_text(expected.step_s)}, "
        f"{bytes_text(expected.peak_memory_bytes)} on each device, "
        f"{plan.solver.text}, {_all_codecs_text(plan)}"
        f"{f', {unused}' if unused else ''}>"
    )


def _all_codecs_text(plan: Plan) -> str:
    """The codecs of gradients, of gathered parameters and of stage cuts."""
    gathers = _counts_text(g.codec for stage in plan.stages for g in stage.gathers)
    texts = [" ".join(text.split()) for text in cut_lines(plan)]
    if gathers:
        texts.insert(0, f"gathers {gathers}")
    if sends_by_codecs(plan) or not texts:
        texts.insert(0, codecs_text(plan))
    return ", ".join(texts)


def codecs_text(plan: Plan) -> str:
    """The codecs with their numbers of gradients, ``codecs int4 x12, dense x3``."""
    counts = _counts_text(g.codec for stage in plan.stages for g in stage.gradients)
    return f"codecs {counts}" if counts else "no codecs"


def _counts_text(codecs: Iterable[str]) -> str:
    """The names of codecs with their numbers; '' stands for no codec."""
    counts = Counter(codec.partition(":")[0] for codec in codecs if codec)
    return ", ".join(f"{name} x{count}" for name, count in counts.most_common())


@set_renderer("cell")
def cell(plan: Plan) -> str:
    """Returns the plan as self-contained HTML for a notebook."""
    parts = [_table(facts(plan))]
    for number, stage in enumerate(plan.stages):
        if len(plan.stages) > 1:
            parts.append(f"<p>{html.escape(stage_text(number, stage))}</p>")
        largest = largest_inputs(plan, stage)
        rows = input_rows(plan, largest)
        parts += [
            _table([("largest inputs", "role", "shape", "layout"), *rows], head=True),
            f'<div style="overflow-x:auto">{plan_picture(plan, largest)}</div>',
        ]
    return f"<div>{''.join(parts)}</div>"


def facts(plan: Plan) -> list[tuple[str, str]]:
    """The rows of the first table, as pairs of a name and a text."""
    expected = plan.predicted
    meshes = ", ".join(mesh_text(stage) for stage in plan.stages)
    return [
        ("cluster", str(plan.cluster)),
        ("mesh", meshes),
        (
            "predicted step",
            f"{seconds_text(expected.step_s)} (compute "
            f"{seconds_text(expected.compute_s)}, communication "
            f"{communication_text(expected)})",
        ),
        ("memory", f"{bytes_text(expected.peak_memory_bytes)} on each device"),
        ("sends", sent_text(plan)),
        *worth_facts(plan),
        ("solver", plan.solver.text),
        ("gradients", codecs_text(plan)),
    ]


def largest_inputs(plan: Plan, stage: StagePlan) -> StagePlan:
    """The stage with only its largest parameters and largest arrays of the batch.

    Repeated layers count once. The optimizer's state is left out, because it usually
    has the layouts of its parameters.
    """
    kept: set[str] = set()
    for role, most in _SHOWN.items():
        sizes: dict[str, int] = {}
        for path in stage.inputs:
            if plan.roles.get(path) == role:
                size = math.prod(plan.shapes.get(path, ()))
                sizes[template(path)] = max(size, sizes.get(template(path), 0))
        kept.update(sorted(sizes, key=lambda path: -sizes[path])[:most])
    inputs = {
        path: spec
        for path, spec in stage.inputs.items()
        if template(path) in kept and plan.roles.get(path) in _SHOWN
    }
    return msgspec.structs.replace(stage, inputs=inputs)


def plan_picture(plan: Plan, stage: StagePlan) -> str:
    """A picture of the mesh and of the largest array of each layout."""
    sizes = {path: math.prod(plan.shapes.get(path, ())) for path in stage.inputs}
    drawn: dict[str, str] = {}
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        drawn.setdefault(spec_text(stage.inputs[path]), path)
    arrays = [(path, stage.inputs[path]) for path in drawn.values()]
    return picture(stage.mesh["axes"], arrays[:MOST_DRAWN])


def _table(rows: Sequence[Sequence[str]], *, head: bool = False) -> str:
    """Rows as an HTML table; with ``head`` the first row is the heading."""
    lines = [
        "".join(
            f'<{tag} style="text-align:left">{html.escape(text)}</{tag}>'
            for text in row
        )
        for k, row in enumerate(rows)
        for tag in ["th" if head and k == 0 else "td"]
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
