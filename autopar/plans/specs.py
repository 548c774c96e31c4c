"""Layouts by names of mesh axes, and the check that a layout fits its array."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from autopar.errors import PlanError
from autopar_passes.layer_loops.split import whole_path

# For each dimension, the names of the mesh axes that split it, major to minor.
Spec = tuple[tuple[str, ...], ...]
# A layout in the form of a `jax.sharding.PartitionSpec`: dimensions at the end may be
# absent.
Entries = Iterable[str | Sequence[str] | None]


def spec_of(
    entries: Entries, shape: Sequence[int], axes: Mapping[str, int], owner: str
) -> Spec:
    """Returns a layout with an entry for each dimension of an array.

    Args:
      entries: a ``PartitionSpec``, or a layout.
      shape: shape of the array.
      axes: size of each mesh axis, by name.
      owner: name of the layout in errors, such as ``pin 'params/*'``.

    Raises:
      PlanError: the layout does not fit the array or the mesh.
    """
    given = tuple(entries)
    spec = [
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in given
    ]
    if len(spec) > len(shape):
        raise PlanError(
            f"{owner}: {spec_text(tuple(spec))} has more entries than shape "
            f"{tuple(shape)}."
        )
    spec += [()] * (len(shape) - len(spec))
    used = [axis for names in spec for axis in names]
    for axis in used:
        if axis not in axes:
            raise PlanError(
                f"{owner}: no mesh axis '{axis}'; the mesh has {', '.join(axes)}. Name "
                "axes with axis_names=."
            )
    if len(set(used)) < len(used):
        raise PlanError(f"{owner}: {spec_text(tuple(spec))} uses a mesh axis twice.")
    for size, names in zip(shape, spec, strict=True):
        check_divides(size, names, axes, owner)
    return tuple(spec)


def matches_path(path: str, pattern: str) -> bool:
    """Whether a pattern names an input, or the array of which the input is a piece.

    >>> matches_path("params/kernel@0:2", "params/ker*l")
    True
    """
    whole = whole_path(path) or path
    return any(fnmatch.fnmatchcase(name, pattern) for name in (path, whole))


def check_divides(
    size: int, names: Sequence[str], axes: Mapping[str, int], owner: str
) -> None:
    """Raises `PlanError` if mesh axes do not split a dimension evenly."""
    parts = 1
    for name in names:
        parts *= axes[name]
    if size % parts:
        split = " ".join(f"{name}={axes[name]}" for name in names)
        raise PlanError(
            f"{owner}: a dimension of {size} cannot be split {parts} ways ({split})."
        )


def spec_text(spec: Spec) -> str:
    """Returns a layout in JAX's notation of a `PartitionSpec`, without trailing None.

    >>> spec_text((("data", "tensor"), (), ("fsdp",), ()))
    "P(('data', 'tensor'), None, 'fsdp')"
    """
    entries = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
        for axes in spec
    ]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"
