"""A picture of a mesh, and of arrays split over it, as SVG.

Each device of a mesh has a colour: its index along the first axis chooses the hue, its
index along the second one the lightness. A part of an array has the colour of the
devices that hold it, so an array that is split like the mesh looks like the mesh. A
part that all devices hold is grey.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.plans.specs import Spec, spec_text

# Most parts of an array, and devices of a mesh, that are drawn along a side; more would
# be too small to see.
MOST_PARTS, MOST_DEVICES = 8, 64
_SIDE, _GAP, _LABELS = 96, 56, 34


def picture(axes: Mapping[str, int], arrays: Sequence[tuple[str, Spec]]) -> str:
    """Draws the mesh, and the arrays beside it.

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
    """The first two dimensions that are split, filled up with whole ones."""
    split = [names for names in spec if names][:2]
    if len(split) == 1:
        whole = spec[0] != split[0]
        return ((), split[0]) if whole else (split[0], ())
    return (*split, (), ())[:2]


def _drawing(
    axes: Mapping[str, int], name: str, label: str, spec: Spec, is_mesh: bool
) -> str:
    """Parts in rows and columns, with the name and the label below.

    An array is a square. A device of a mesh is one, so that a mesh is to scale.
    """
    most = MOST_DEVICES if is_mesh else MOST_PARTS
    sides = [_drawn(axes, names, most) for names in (*spec, (), ())[:2]]
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
    """The left, the top, the width, the height and the colour of each part."""
    down, along = sides
    height, width = size[0] / len(down), size[1] / len(along)
    for (i, row), (j, column) in itertools.product(enumerate(down), enumerate(along)):
        colour = _colour(axes, {**row, **column})
        yield j * width, i * height, width, height, colour


def _drawn(
    axes: Mapping[str, int], names: Sequence[str], most: int
) -> list[dict[str, int]]:
    """The mesh indices of the parts along one side, or of some of them."""
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
    """The colour of devices with these mesh indices, along the axes that are named."""
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
