"""Hints a user may give: layouts of inputs, and rules for Flax's logical axes.

Hints are optional. Hints restrict the search, so a plan with hints is at most as good
as a plan without hints.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.linen import spmd
from jax.sharding import PartitionSpec

from autopar.cluster import MeshShape
from autopar.cluster.mesh import DEFAULT_NAMES
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout, from_spec
from autopar.layouts.strategies import Strategy, layout_of
from autopar.planner.problem import Restriction
from autopar.planner.scheme import is_axis_name
from autopar.plans.specs import spec_of
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar_errors import InputError
from autopar_passes.program.calls import StepCall
from autopar_passes.program.static_leaves import is_object_state

# Maps patterns of inputs' paths to layouts.
Pins = Mapping[str, PartitionSpec]
# Pairs of a logical axis name of Flax and mesh axes; the first pair that fits is used.
LogicalRules = Sequence[tuple[str, Any]]


def pinned_layouts(
    analysis: Analysis, pins: Pins, mesh: MeshShape
) -> dict[int, Layout]:
    """Returns the layout of each pinned input, by its value.

    Raises:
      PlanError: a pattern matches no input, or a spec does not fit its array.
    """
    out: dict[int, Layout] = {}
    axes = dict(zip(mesh.names, mesh.sizes, strict=True))
    for pattern, spec in pins.items():
        matched = [
            i for i in analysis.graph.inputs if fnmatch.fnmatchcase(i.path, pattern)
        ]
        if not matched:
            some = ", ".join(i.path for i in analysis.graph.inputs[:3])
            raise PlanError(
                f"pin '{pattern}' matches no input; inputs are named like {some}."
            )
        for given in matched:
            shape = analysis.graph.values[given.value].shape
            fitting = spec_of(spec, shape, axes, f"pin '{pattern}'")
            out[given.value] = from_spec(fitting, mesh.names)
    return out


def fitting_meshes(
    analysis: Analysis, pins: Pins, meshes: Sequence[MeshShape]
) -> list[MeshShape]:
    """Returns the meshes on which the pins are possible.

    The pins are possible on a mesh if it has all axes that the pins name, and if the
    sizes of these axes divide the pinned arrays. The axes of the returned meshes have
    the names that the pins use.

    Raises:
      PlanError: no mesh fits; the message is about the last mesh, which has the most
        axes.
    """
    out: list[MeshShape] = []
    failure: PlanError | None = None
    for mesh in itertools.chain.from_iterable(_named_meshes(m, pins) for m in meshes):
        try:
            pinned_layouts(analysis, pins, mesh)
            out.append(mesh)
        except PlanError as error:
            failure = error
    if failure is not None and not out:
        raise failure
    return out


def _named_meshes(mesh: MeshShape, pins: Pins) -> Iterator[MeshShape]:
    """Yields a mesh once for every way to give the pins' names to its axes.

    Pins may use the names that printed plans give to axes (`is_axis_name`), such as
    ``data``. Only if all unknown names of the pins are such names, they are tried on
    the axes in every order. If not, every axis keeps the default name of its position,
    and an unknown name in a pin leads to an error later.
    """
    wanted = dict.fromkeys(
        axis
        for spec in pins.values()
        for entry in spec
        for axis in ((entry,) if isinstance(entry, str) else entry or ())
    )
    new = [name for name in wanted if name not in (*mesh.names, *DEFAULT_NAMES)]
    free = [
        position
        for position, axis in enumerate(mesh.axes)
        if not axis.named and axis.name not in wanted
    ]
    if len(new) > len(free) or not all(map(is_axis_name, new)):
        new = []
    for places in itertools.permutations(free, len(new)):
        given = dict(zip(places, new, strict=True))
        yield MeshShape(
            axes=tuple(
                dataclasses.replace(
                    axis, name=given.get(position, axis.name), named=True
                )
                for position, axis in enumerate(mesh.axes)
            )
        )


def check_pinned(
    pins: Pins, analysis: Analysis, assignment: Assignment, mesh: MeshShape
) -> None:
    """Raises `PlanError` if an assignment contradicts a pin."""
    for pattern, spec in pins.items():
        for value, layout in pinned_layouts(analysis, {pattern: spec}, mesh).items():
            if assignment.home_layout(value) != layout:
                path = next(i.path for i in analysis.graph.inputs if i.value == value)
                raise PlanError(
                    f"pin '{pattern}': '{path}' cannot be stored as {spec} on mesh "
                    f"{mesh}: another pin of the same array, or the way it is used, "
                    "rules it out. Remove the pin or change its axes."
                )


def logical_pins(call: StepCall, rules: LogicalRules) -> dict[str, PartitionSpec]:
    """Turns Flax's logical axis names into pins.

    Args:
      call: a call of the step; the leaves of its arguments may be boxed with names by
        ``nn.with_logical_partitioning``.
      rules: Flax's rules, pairs of a logical name and mesh axes.
    """
    out: dict[str, PartitionSpec] = {}
    if not rules:
        return out
    trees = call.form.fixed.join(call.arrays)
    for prefix, tree in zip(call.form.names, trees, strict=True):
        if any(map(is_object_state, jax.tree.leaves(tree, is_leaf=is_object_state))):
            continue
        specs = spmd.logical_to_mesh(nn.get_partition_spec(tree), rules)
        keyed, _ = jax.tree_util.tree_flatten_with_path(
            specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        for path, spec in keyed:
            if isinstance(spec, PartitionSpec) and any(e is not None for e in spec):
                key = jax.tree_util.keystr(path, simple=True, separator="/")
                # The box is a pytree node whose only leaf is `value`.
                out[f"{prefix}/{key}/value"] = spec
    return out


def pin_restriction(analysis: Analysis, layouts: Mapping[int, Layout]) -> Restriction:
    """A rule: an input's node may use only strategies with the pinned layout."""
    homes = analysis.contraction.homes
    wanted: dict[int, list[tuple[Any, Layout]]] = {}
    for value, layout in layouts.items():
        if value in homes:
            home = homes[value]
            wanted.setdefault(home.node, []).append((home.dims, layout))

    def is_allowed(node: Node, strategy: Strategy) -> bool:
        return all(
            layout_of(strategy, dims) == layout
            for dims, layout in wanted.get(node.index, [])
        )

    return is_allowed


_EXAMPLE = "Write it like 'params/*/kernel=None,tensor' or \"...=P(None, 'tensor')\"."
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def parse_pins(words: Sequence[str]) -> dict[str, PartitionSpec]:
    """Reads the values of ``--pin``.

    Raises:
      PlanError: a word is not ``PATH=SPEC``, or two words name the same path.
    """
    out: dict[str, PartitionSpec] = {}
    for word in words:
        path, equals, text = word.partition("=")
        path = path.strip()
        if not path or not equals:
            raise PlanError(f"--pin {word!r} is not PATH=SPEC. {_EXAMPLE}")
        if path in out:
            raise PlanError(f"--pin: '{path}' is pinned twice.")
        try:
            out[path] = PartitionSpec(*parse_entries(text))
        except ValueError as error:
            raise PlanError(f"--pin {word!r}: {error}. {_EXAMPLE}") from error
    return out


def parse_entries(text: str) -> tuple[str | tuple[str, ...] | None, ...]:
    """Reads a layout, in the notation of printed tables or in short notation.

    >>> parse_entries("P(None, ('data', 'tensor'))")
    (None, ('data', 'tensor'))
    >>> parse_entries("data+fsdp,None")
    (('data', 'fsdp'), None)

    Raises:
      InputError: the text is in neither notation.
    """
    text = text.strip()
    if text.startswith(("P(", "PartitionSpec(")):
        return _entries_of_call(text)
    if text in ("", "None"):
        return () if not text else (None,)
    return tuple(_short_entry(part.strip()) for part in text.split(","))


def _short_entry(part: str) -> str | tuple[str, ...] | None:
    if part == "None":
        return None
    names = tuple(name.strip() for name in part.split("+"))
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} is no name of a mesh axis")
    return names[0] if len(names) == 1 else names


def _entries_of_call(text: str) -> tuple[str | tuple[str, ...] | None, ...]:
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise InputError(f"{text!r} is no layout") from error
    if not isinstance(call, ast.Call) or call.keywords:
        raise InputError(f"{text!r} is no layout")
    return tuple(_entry(argument) for argument in call.args)


def _entry(node: ast.expr) -> str | tuple[str, ...] | None:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(name)):
            return name
        case ast.Tuple(elts=[*names]) if names:
            return tuple(_name(name) for name in names)
        case _:
            raise InputError(
                f"{ast.unparse(node)} is no entry: None, a name in quotes, or a tuple "
                "of names"
            )


def _name(node: ast.expr) -> str:
    found = _entry(node)
    if not isinstance(found, str):
        raise InputError(f"{ast.unparse(node)} is no name of a mesh axis")
    return found
