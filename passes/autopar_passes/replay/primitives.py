"""Runs equations other than loops and branches, in the layouts of a plan."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.ring_order import RingOrder, ring_order
from autopar_passes.layouts import Layout, on_shards, partition_spec
from autopar_passes.program.equations import Equation, Program
from autopar_passes.program.flatten import INLINED, call_body
from autopar_passes.replay.ring import ring_of, run_around
from autopar_passes.replay.values import LayoutPlan, PlacedOrder, Values
from autopar_passes.rules import (
    manual,
    pallas_grid,
    ragged,
    shardy,
)
from autopar_passes.rules.factor_rule import FactorKind, FactorRule
from autopar_passes.sums import stacked
from autopar_passes.sums.finish import BY_SHARDS, Sum, behind, run_and_sum
from autopar_passes.sums.stacked import Stacked, stack_partials, sum_partials

# Hand-written kernels, such as Pallas kernels, run shard by shard, because no compiler
# can partition them.
#
# Every device runs the kernel on its own shards. A Pallas kernel gets the grid of the
# shards; its blocks and its body are unchanged. A result that a kernel sums over its
# shards (`FactorRule.sums`) is also summed over devices before it is used.


# The body of a step's own `jax.shard_map` runs over the mesh of the plan.
#
# The types inside a jaxpr name the mesh that the jaxpr was traced on. The body is
# therefore run equation by equation, with calls inlined and loops traced anew. Every
# type then refers to the mesh that the body runs on.


def run_body(params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Runs the body of a ``shard_map`` on one device's shards.

    The mesh of the ``shard_map`` may have axes of size one that the plan's mesh lacks.
    The function binds these axis names.

    Args:
      params: parameters of the ``shard_map``.
      args: one device's shards of the operands.
    """
    body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    alone = {n: 1 for n, size in params["mesh"].shape.items() if size == 1}
    with jax_compat.axis_env(alone):
        return _run(body, (), args)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            # A NumPy array has no mesh in its type, unlike the constant.
            return np.asarray(atom.val)
        return env[atom]

    for eqn in jaxpr.eqns:
        out = _equation(eqn, [read(a) for a in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in INLINED and (body := call_body(eqn)) is not None:
        return _run(*body, args)
    match name:
        case "scan":
            return _scan(eqn.params, args)
        case "while":
            return _while(eqn.params, args)
        case "cond":
            branches = [_function(b) for b in eqn.params["branches"]]
            return jax.lax.switch(args[0], branches, *args[1:])
        case _:
            return jax_compat.bind_anywhere(eqn, *args)


def _function(closed: Any) -> Callable[..., list[Any]]:
    return lambda *args: _run(closed.jaxpr, closed.consts, args)


def _scan(params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    body, consts = _function(params["jaxpr"]), args[: params["num_consts"]]
    end = params["num_consts"] + params["num_carry"]

    def step(carry: Any, xs: Any) -> Any:
        out = body(*consts, *carry, *xs)
        return out[: params["num_carry"]], out[params["num_carry"] :]

    carry, stacked = jax.lax.scan(
        step,
        args[params["num_consts"] : end],
        args[end:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while(params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    first, both = params["cond_nconsts"], params["body_nconsts"]
    cond, body = _function(params["cond_jaxpr"]), _function(params["body_jaxpr"])
    of_cond, of_body = args[:first], args[first : first + both]
    return jax.lax.while_loop(
        lambda carry: cond(*of_cond, *carry)[0],
        lambda carry: body(*of_body, *carry),
        args[first + both :],
    )


def kernel_on_shards(
    eqn: Equation,
    rule: FactorRule,
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    results: Sequence[Layout],
    mesh: Any,
    *,
    ordered: bool = False,
    gathered: bool = False,
) -> list[Any]:
    """Runs a kernel on each device's shards.

    Args:
      eqn: the equation of the kernel.
      rule: the rule of the kernel.
      operands: the whole operands, in their layouts.
      layouts: the layouts of the operands.
      results: the layouts of the results.
      mesh: the mesh of the layouts.
      ordered: see `autopar_passes.replay.ring.Ring`.
      gathered: see `autopar_passes.replay.ring.Ring`.
    """
    axes = _axes_of_factors(rule, layouts)
    if eqn.primitive == manual.PRIMITIVE:
        return _manual(eqn, axes, operands, mesh)

    ring = ring_of(eqn, rule, axes, mesh, ordered, gathered)

    def run(*shards: Any) -> tuple[Any, ...]:
        if ring is None:
            out = _kernel_shards_bind(eqn, shards)
        else:
            out = run_around(eqn, ring, shards)
        for slot, factors in enumerate(rule.sums):
            names = tuple(mesh.axis_names[a] for f in factors for a in axes.get(f, ()))
            if names:
                out[slot] = jax.lax.psum(out[slot], names)
        return tuple(out)

    made = tuple(partition_spec(mesh, layout) for layout in results)
    return list(on_shards(run, operands, layouts, made, mesh))


def _manual(
    eqn: Equation,
    axes: dict[int, tuple[int, ...]],
    operands: Sequence[Any],
    mesh: Any,
) -> list[Any]:
    """Runs a step's own ``shard_map`` over the plan's mesh, under its own names."""
    names = [f"_{name}" for name in mesh.axis_names]
    for f, own in enumerate(manual.manual_axes(eqn.params)):
        (axis,) = axes[f]
        names[axis] = own
    taken = set(names)

    def spec(given: Any) -> Any:
        return jax.sharding.PartitionSpec(
            *(_without_small_axes(entry, taken) for entry in given)
        )

    return list(
        jax.shard_map(
            lambda *shards: tuple(run_body(eqn.params, shards)),
            mesh=jax_compat.renamed_mesh(mesh, tuple(names)),
            in_specs=tuple(spec(s) for s in eqn.params["in_specs"]),
            out_specs=tuple(spec(s) for s in eqn.params["out_specs"]),
            check_vma=eqn.params["check_vma"],
        )(*operands)
    )


def _without_small_axes(entry: Any, names: set[str]) -> Any:
    """Drops from a partition spec's entry the axes that are not in ``names``."""
    if not isinstance(entry, tuple):
        return entry if entry in names else None
    return tuple(n for n in entry if n in names) or None


def _kernel_shards_bind(eqn: Equation, shards: Sequence[Any]) -> list[Any]:
    if eqn.primitive != pallas_grid.PRIMITIVE:
        return jax_compat.bind(eqn.source, *shards)
    shapes = [jax.numpy.shape(x) for x in shards]
    params = pallas_grid.localise_params(eqn.params, shapes)
    return jax_compat.bind_with(eqn, params, *shards)


def _axes_of_factors(
    rule: FactorRule, layouts: Sequence[Layout]
) -> dict[int, tuple[int, ...]]:
    """Returns the mesh axes that shard each factor of an operator's rule.

    At most one factor of a dimension may be sharded, unless its factors are in
    `FactorRule.whole`: then each of them is sharded over one axis.
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


# Grouped convolutions run shard by shard, because XLA's partitioner fails on them.


def grouped_convolution(
    params: Mapping[str, Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    rule: FactorRule,
    mesh: Any,
) -> Any:
    """Runs a grouped convolution shard by shard and sums the partial results.

    The partial results are stacked along a new leading dimension, which is sharded over
    the mesh axes that shard a contracted factor. They are summed over this dimension.

    Args:
      params: parameters of the primitive.
      operands: left and right operand, in their layouts.
      layouts: the layouts of the left operand, the right operand and the result.
      rule: the rule of the convolution.
      mesh: the mesh of the layouts.
    """
    left, right, result = layouts
    kept = {a for axes in result for a in axes}
    summed = tuple(sorted({a for x in (left, right) for d in x for a in d} - kept))
    sizes = [mesh.shape[name] for name in mesh.axis_names]
    local = dict(params)
    split = _group_split(rule, result, sizes)
    for name in ("feature_group_count", "batch_group_count"):
        local[name] = max(1, params[name] // split)

    def run(*shards: Any) -> Any:
        return jax.lax.conv_general_dilated_p.bind(*shards, **local)

    stacked = stack_partials(run, operands, (left, right), result, summed, mesh)
    return sum_partials(stacked)


def _group_split(rule: FactorRule, result: Layout, sizes: Sequence[int]) -> int:
    """Returns the number of parts into which a convolution's feature groups are split.

    The groups are the only factor that both operands and the result share. In their
    dimension, such as the channels of the result, the groups are the outer factor, and
    the channels within a group the inner factor. The inner factor is sharded only if
    every group lies on devices of its own.
    """
    common = frozenset.intersection(
        *(rule.factors_of(dims) for dims in (*rule.operands, *rule.results))
    )
    for factors, axes in zip(rule.results[0], result, strict=True):
        if factors and factors[0] in common:
            return min(rule.sizes[factors[0]], math.prod(sizes[a] for a in axes))
    return 1


def run_primitive(values: Values, eqn: Equation, op: Operator) -> list[Any]:
    """Runs an equation that is no loop or branch; returns its results."""
    if len(eqn.outputs) == 1 and values.plan.floating(eqn.outputs[0]):
        return [None]
    if eqn.outputs and values.plan.partial_layout(eqn.outputs[0]) is not None:
        return _partial(values, eqn, op)
    args = [values.operand(op, k, a) for k, a in enumerate(eqn.inputs)]
    if eqn.primitive in BY_SHARDS and (sums := values.plan.sums(eqn.outputs[0])):
        return [_contract(values, eqn, op, args, sums)]
    out = _bind(values, eqn, op, args)
    return [values.pin(x, values.plan.results(op, k)) for k, x in enumerate(out)]


def _partial(values: Values, eqn: Equation, op: Operator) -> list[Any]:
    """Runs an operator whose results stay partial, as stacked arrays."""
    found = values.plan.partial_layout(eqn.outputs[0])
    assert found is not None
    axes, layout = found
    operands = [values.partial_operand(op, k, a) for k, a in enumerate(eqn.inputs)]
    given = [values.plan.operand(op, k) for k in range(len(operands))]
    if any(isinstance(x, Stacked) for x in operands):
        out = stacked.linear(eqn, operands, given, axes, values.mesh)
    else:
        layouts = [
            ((),) * jax.numpy.ndim(x) if layout is None else layout
            for x, layout in zip(operands, given, strict=True)
        ]
        own = values.plan.results(op, 0)
        layout = own[0] if own else layout
        out = [stacked.contribute(eqn, operands, layouts, layout, axes, values.mesh)]
    return [values.defer(v, x) for v, x in zip(eqn.outputs, out, strict=True)]


def _contract(
    values: Values, eqn: Equation, op: Operator, args: list[Any], sums: tuple[Sum, ...]
) -> Any:
    """Runs a contraction and the collectives that complete its sum."""

    def run(*shards: Any) -> Any:
        (out,) = jax_compat.bind(eqn.source, *shards)
        return out

    layouts = [
        values.plan.operand(op, slot) or ((),) * jax.numpy.ndim(x)
        for slot, x in enumerate(args)
    ]
    out = run_and_sum(run, args, layouts, sums, values.mesh)
    return values.pin(out, behind(values.plan.results(op, 0), sums))


def run_barrier(values: Values, eqn: Equation, ops: list[Operator]) -> list[Any]:
    """Runs an optimization barrier: one equation, with one operator per value."""
    args = [values.operand(op, 0, a) for op, a in zip(ops, eqn.inputs, strict=True)]
    out = jax_compat.bind(eqn.source, *args)
    return [
        values.pin(x, values.plan.results(op, 0))
        for op, x in zip(ops, out, strict=True)
    ]


def _bind(values: Values, eqn: Equation, op: Operator, args: list[Any]) -> list[Any]:
    if jax_compat.is_ordered(eqn.source):
        out, values.turn = jax_compat.bind_in_turn(eqn.source, args, values.turn)
        return out
    if op.kernel is not None:
        return _kernel(values, eqn, op, args)
    if eqn.primitive == ragged.IN_BLOCKS:
        return [_ragged_product(values, eqn, op, args)]
    if eqn.primitive != shardy.PRIMITIVE or not shardy.is_grouped(eqn.params):
        return jax_compat.bind(eqn.source, *args)
    left, right = (values.plan.operand(op, slot) for slot in range(2))
    result = values.plan.results(op, 0)
    assert left is not None
    assert right is not None
    layouts = (left, right, result[0])
    return [grouped_convolution(eqn.params, args, layouts, op.rule, values.mesh)]


def _ragged_product(
    values: Values, eqn: Equation, op: Operator, args: list[Any]
) -> Any:
    """Runs a ragged product of blocks of rows, each device with its own blocks."""

    def run(*shards: Any) -> Any:
        (out,) = jax_compat.bind(eqn.source, *shards)
        return out

    layouts, (result,) = _layouts_of(values, op)
    axes = _axes_of_factors(op.rule, layouts)
    reduced = (f for f, k in enumerate(op.rule.kinds) if k is FactorKind.REDUCE)
    summed = tuple(sorted({a for f in reduced for a in axes.get(f, ())}))
    if not summed:
        made = partition_spec(values.mesh, result)
        return on_shards(run, args, layouts, made, values.mesh)
    partials = stack_partials(run, args, layouts, result, summed, values.mesh)
    return sum_partials(partials)


def _layouts_of(values: Values, op: Operator) -> tuple[list[Layout], list[Layout]]:
    """The layouts in which an operator reads its operands and makes its results."""
    given = [
        values.plan.operand(op, slot) or ((),) * len(dims)
        for slot, dims in enumerate(op.rule.operands)
    ]
    made: list[Layout] = []
    for slot, dims in enumerate(op.rule.results):
        own = values.plan.results(op, slot)
        made.append(own[0] if own else ((),) * len(dims))
    return given, made


def _kernel(values: Values, eqn: Equation, op: Operator, args: list[Any]) -> list[Any]:
    """Runs a hand-written kernel on shards."""
    given, made = _layouts_of(values, op)
    run = functools.partial(
        kernel_on_shards,
        eqn,
        op.rule,
        mesh=values.mesh,
        gathered=values.plan.gathers_keys(op),
    )
    order = values.order
    if order is None or eqn.index not in order.of.kernels:
        return run(args, given, made)
    if _ring_axes(op, given) == order.axes:
        return run(args, given, made, ordered=True)
    # The layouts of this kernel are not those of the other kernels.
    (factor,) = op.rule.halved_factors

    def turned(arrays: Any, dims: Any, layouts: Any, turn: int) -> list[Any]:
        return [
            order.turned(x, found, turn, layout, values.mesh)
            if (found := [k for k, f in enumerate(own) if factor in f])
            else x
            for x, own, layout in zip(arrays, dims, layouts, strict=True)
        ]

    out = run(turned(args, op.rule.operands, given, -1), given, made)
    return turned(out, op.rule.results, made, 1)


def placed_order(
    program: Program, graph: OperatorGraph, plan: LayoutPlan, mesh: Any
) -> PlacedOrder | None:
    """Returns the order in which a plan holds tokens; None for the plain order.

    The order is that of the ring over which most attention kernels shard the sequence.
    """
    found = ring_order(program, graph.operators)
    if not isinstance(found, RingOrder):
        return None
    rings = collections.Counter(
        _ring_axes(op, [plan.operand(op, k) or () for k in range(len(op.inputs))])
        for op in graph.operators
        if op.equation in found.kernels
    )
    rings.pop((), None)
    for axes, _ in rings.most_common(1):
        size = math.prod(mesh.shape[mesh.axis_names[a]] for a in axes)
        if size > 1 and found.fits(program.values, size):
            return PlacedOrder(found, axes, size)
    return None


def _ring_axes(op: Operator, layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The mesh axes over which an attention kernel shards its sequence."""
    (factor,) = op.rule.halved_factors
    for dims, layout in zip(op.rule.operands, layouts, strict=True):
        for factors, axes in zip(dims, layout, strict=False):
            if factor in factors:
                return tuple(axes)
    return ()
