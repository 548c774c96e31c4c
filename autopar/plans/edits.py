"""Changes of a plan's layouts by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from autopar.errors import PlanError
from autopar.plans.specs import Entries, Spec, spec_of


def with_layouts(
    inputs: Mapping[str, Spec],
    shapes: Mapping[str, Sequence[int]],
    axes: Mapping[str, int],
    layouts: Mapping[str, Entries],
) -> dict[str, Spec]:
    """Returns the layouts of inputs, some of them replaced.

    Args:
      inputs: path of each input -> its layout.
      shapes: path of each input -> its shape.
      axes: size of each mesh axis, by name.
      layouts: path pattern -> layout; a later pattern wins.

    Raises:
      PlanError: a pattern matches nothing, or a layout does not fit its array.
    """
    out = dict(inputs)
    for pattern, entries in layouts.items():
        matched = [path for path in inputs if fnmatch.fnmatchcase(path, pattern)]
        if not matched:
            some = ", ".join(list(inputs)[:3])
            raise PlanError(
                f"edit: '{pattern}' matches no input; inputs are named like {some}."
            )
        for path in matched:
            # A plan may lack shapes; then the number of entries is that of its layout.
            shape = shapes.get(path, (0,) * len(inputs[path]))
            out[path] = spec_of(entries, shape, axes, f"edit: '{path}'")
    return out
