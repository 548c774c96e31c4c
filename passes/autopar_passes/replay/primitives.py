"""Runs equations without regions on values in the layouts of a plan."""

from __future__ import annotations

from typing import Any

import jax

from autopar_passes import jax_compat, jax_effects
from autopar_passes.graph.operators import Operator
from autopar_passes.layouts import Layout
from autopar_passes.program.equations import Equation
from autopar_passes.replay.grouped_convolution import grouped_convolution
from autopar_passes.replay.kernel_shards import kernel_on_shards
from autopar_passes.replay.values import Values
from autopar_passes.rules import convolution
from autopar_passes.sums import stacked
from autopar_passes.sums.finish import BY_SHARDS, Sum, behind, finished
from autopar_passes.sums.stacked import Stacked


def run_primitive(values: Values, eqn: Equation, op: Operator) -> list[Any]:
    """Runs an equation without regions; returns its results."""
    if len(eqn.outputs) == 1 and values.plan.floating(eqn.outputs[0]):
        return [None]
    if eqn.outputs and values.plan.stacked(eqn.outputs[0]) is not None:
        return _partial(values, eqn, op)
    args = [values.operand(op, k, a) for k, a in enumerate(eqn.inputs)]
    if eqn.primitive in BY_SHARDS and (sums := values.plan.sums(eqn.outputs[0])):
        return [_finished(values, eqn, op, args, sums)]
    out = _bind(values, eqn, op, args)
    return [values.pin(x, values.plan.results(op, k)) for k, x in enumerate(out)]


def _partial(values: Values, eqn: Equation, op: Operator) -> list[Any]:
    """Runs an operator whose results stay partial."""
    found = values.plan.stacked(eqn.outputs[0])
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


def _finished(
    values: Values, eqn: Equation, op: Operator, args: list[Any], sums: tuple[Sum, ...]
) -> Any:
    """Runs a contraction and the collectives that end its sum."""

    def run(*shards: Any) -> Any:
        (out,) = jax_compat.bind(eqn.source, *shards)
        return out

    layouts = [
        values.plan.operand(op, slot) or ((),) * jax.numpy.ndim(x)
        for slot, x in enumerate(args)
    ]
    out = finished(run, args, layouts, sums, values.mesh)
    return values.pin(out, behind(values.plan.results(op, 0), sums))


def run_barrier(values: Values, eqn: Equation, ops: list[Operator]) -> list[Any]:
    """Runs a barrier: one equation, and an operator for each value that it hands on."""
    args = [values.operand(op, 0, a) for op, a in zip(ops, eqn.inputs, strict=True)]
    out = jax_compat.bind(eqn.source, *args)
    return [
        values.pin(x, values.plan.results(op, 0))
        for op, x in zip(ops, out, strict=True)
    ]


def _bind(values: Values, eqn: Equation, op: Operator, args: list[Any]) -> list[Any]:
    if jax_effects.is_ordered(eqn.source):
        out, values.turn = jax_effects.bind_in_turn(eqn.source, args, values.turn)
        return out
    if op.kernel is not None:
        return _kernel(values, eqn, op, args)
    if eqn.primitive != convolution.PRIMITIVE or not convolution.is_grouped(eqn.params):
        return jax_compat.bind(eqn.source, *args)
    left, right = (values.plan.operand(op, slot) for slot in range(2))
    result = values.plan.results(op, 0)
    assert left is not None
    assert right is not None
    layouts = (left, right, result[0])
    return [grouped_convolution(eqn.params, args, layouts, op.rule, values.mesh)]


def _kernel(values: Values, eqn: Equation, op: Operator, args: list[Any]) -> list[Any]:
    """Runs a hand-written kernel on shards."""
    given = [
        values.plan.operand(op, slot) or ((),) * jax.numpy.ndim(x)
        for slot, x in enumerate(args)
    ]
    made: list[Layout] = []
    for slot, dims in enumerate(op.rule.results):
        own = values.plan.results(op, slot)
        made.append(own[0] if own else ((),) * len(dims))
    return kernel_on_shards(eqn, op.rule, args, given, made, values.mesh)
