"""Runs hand-written kernels shard by shard: no compiler can partition them.

Every device runs the kernel on its own shards. A Pallas kernel gets the grid of the
shards; its blocks and its body stay as they are. What a kernel adds up over its shards
(`FactorRule.sums`) is summed before it is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar_passes import jax_compat
from autopar_passes.layouts import Layout, automatic_axes, partition_spec
from autopar_passes.program.equations import Equation
from autopar_passes.replay.local_body import run_body
from autopar_passes.rules import manual, pallas_grid
from autopar_passes.rules.factor_rule import FactorRule


def kernel_on_shards(
    eqn: Equation,
    rule: FactorRule,
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    results: Sequence[Layout],
    mesh: Any,
) -> list[Any]:
    """Runs a kernel on each device's shards.

    Args:
      eqn: the equation of the kernel.
      rule: its rule.
      operands: the whole operands, in their layouts.
      layouts: of the operands.
      results: layouts of the results.
      mesh: the mesh of the layouts.
    """
    axes = _axes_of_factors(rule, layouts)
    if eqn.primitive == manual.PRIMITIVE:
        return _manual(eqn, axes, operands, mesh)

    def run(*shards: Any) -> tuple[Any, ...]:
        out = _bind(eqn, shards)
        for slot, factors in enumerate(rule.sums):
            names = tuple(mesh.axis_names[a] for f in factors for a in axes.get(f, ()))
            if names:
                out[slot] = jax.lax.psum(out[slot], names)
        return tuple(out)

    return list(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=tuple(partition_spec(mesh, layout) for layout in layouts),
            out_specs=tuple(partition_spec(mesh, layout) for layout in results),
            axis_names=automatic_axes(mesh),
            check_vma=False,
        )(*operands)
    )


def _manual(
    eqn: Equation,
    axes: dict[int, tuple[int, ...]],
    operands: Sequence[Any],
    mesh: Any,
) -> list[Any]:
    """Runs a step's own ``shard_map`` over the planned mesh, under its own names."""
    names = [f"_{name}" for name in mesh.axis_names]
    for f, own in enumerate(manual.manual_axes(eqn.params)):
        (axis,) = axes[f]
        names[axis] = own
    taken = set(names)

    def spec(given: Any) -> Any:
        return jax.sharding.PartitionSpec(*(_kept(entry, taken) for entry in given))

    return list(
        jax.shard_map(
            lambda *shards: tuple(run_body(eqn.params, shards)),
            mesh=jax_compat.renamed_mesh(mesh, tuple(names)),
            in_specs=tuple(spec(s) for s in eqn.params["in_specs"]),
            out_specs=tuple(spec(s) for s in eqn.params["out_specs"]),
            check_vma=eqn.params["check_vma"],
        )(*operands)
    )


def _kept(entry: Any, names: set[str]) -> Any:
    """An entry of a spec without axes of size one, which the mesh may not have."""
    if not isinstance(entry, tuple):
        return entry if entry in names else None
    return tuple(n for n in entry if n in names) or None


def _bind(eqn: Equation, shards: Sequence[Any]) -> list[Any]:
    if eqn.primitive != pallas_grid.PRIMITIVE:
        return jax_compat.bind(eqn.source, *shards)
    shapes = [jax.numpy.shape(x) for x in shards]
    params = pallas_grid.localised(eqn.params, shapes)
    return jax_compat.bind_with(eqn, params, *shards)


def _axes_of_factors(
    rule: FactorRule, layouts: Sequence[Layout]
) -> dict[int, tuple[int, ...]]:
    """The mesh axes that split each factor.

    Of the factors of a dimension at most one may be split, or each of them is split
    by one axis (`FactorRule.whole`).
    """
    found: dict[int, tuple[int, ...]] = {}
    for dims, layout in zip(rule.operands, layouts, strict=True):
        for factors, axes in zip(dims, layout, strict=True):
            free = [f for f in factors if f in rule.free]
            if rule.whole:
                found.update((f, (a,)) for f, a in zip(free, axes, strict=True))
            else:
                found.update((f, axes) for f in free)
    return found
