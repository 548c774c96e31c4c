"""Emits the operators of a program, with boundary operators around regions.

A *region* is the body of a loop or of a branch. A *boundary operator* passes a value
into a region or out of it, such as a loop's carry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.graph.operators import TO_DEVICES, TO_HOST, Operator
from autopar_passes.graph.roles import Role, module_path
from autopar_passes.program.equations import Equation, Program, Region, Scalar, Value
from autopar_passes.rules.factor_rule import (
    Dims,
    FactorKind,
    FactorRule,
    KernelWork,
    elementwise_rule,
)
from autopar_passes.rules.flops import equation_flops

# Trip counts: the number of iterations of a loop.

# Assumed trip count of a `while` whose count cannot be derived. XLA's own auto-sharding
# assumes the same number (openxla/xla, auto_sharding_option.h,
# loop_iteration_count_estimate).
UNKNOWN_TRIPS = 100.0


def while_trips(eqn: Equation) -> float | None:
    """Returns the count of ``while i < n: ...; i += 1``; None if it is unknown."""
    cond, body = eqn.regions
    if len(cond.equations) != 1 or cond.equations[0].primitive != "lt":
        return None
    left, right = cond.equations[0].inputs
    skip = eqn.params["cond_nconsts"]
    if left not in cond.inputs[skip:] or cond.outputs != cond.equations[0].outputs:
        return None
    position = cond.inputs[skip:].index(left)
    start = eqn.inputs[skip + eqn.params["body_nconsts"] + position]
    if not isinstance(right, Scalar):
        if right not in cond.inputs[:skip]:
            return None
        right = eqn.inputs[cond.inputs.index(right)]
    step = body.outputs[position]
    counts = [
        e for e in body.equations if step in e.outputs and e.primitive == "add"
    ]  # fmt: skip
    if not (isinstance(start, Scalar) and isinstance(right, Scalar) and counts):
        return None
    by = [a for a in counts[0].inputs if isinstance(a, Scalar)]
    if len(by) != 1 or float(by[0].value) <= 0:
        return None
    return max(0.0, (float(right.value) - float(start.value)) / float(by[0].value))


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """The operators of a program, without roles and classes.

    Attributes:
      operators: the operators, all with role forward and without a class.
      stacks: the name stack of each operator.
      assumed_trips: loops with an unknown trip count, and assumptions about the work of
        kernels.
    """

    operators: tuple[Operator, ...]
    stacks: tuple[str, ...]
    assumed_trips: tuple[str, ...]


def emit_operators(
    program: Program,
    rules: Mapping[int, FactorRule],
    kernels: Mapping[int, KernelWork] | None = None,
) -> Emitted:
    """Emits the operators of a program, in a valid order of execution.

    Args:
      program: the flat program.
      rules: the sharding rule of each equation without regions.
      kernels: the work of the equations that are hand-written kernels.
    """
    emitter = _Emitter(program, rules, kernels or {})
    emitter.inputs()
    emitter.region(program.body, 1.0)
    emitter.returns()
    return Emitted(
        tuple(emitter.operators), tuple(emitter.stacks), tuple(emitter.assumed)
    )


# Stands for any operand that is a scalar constant.
_SCALAR = Value((), jnp.dtype("float32"))


class _Emitter:
    """Emits operators region by region."""

    def __init__(
        self,
        program: Program,
        rules: Mapping[int, FactorRule],
        kernels: Mapping[int, KernelWork],
    ) -> None:
        self.program = program
        self.rules = rules
        self.kernels = kernels
        self.operators: list[Operator] = []
        self.stacks: list[str] = []
        self.assumed: list[str] = []

    def shape(self, atom: int | None) -> tuple[int, ...]:
        return () if atom is None else self.program.values[atom].shape

    def emit(
        self,
        kind: str,
        inputs: Sequence[int | None],
        outputs: Sequence[int],
        rule: FactorRule,
        trips: float,
        *,
        eqn: Equation | None = None,
        flops: float = 0.0,
        input_trips: Sequence[float] | None = None,
        kernel: KernelWork | None = None,
    ) -> None:
        self.operators.append(
            Operator(
                index=len(self.operators),
                kind=kind,
                equation=-1 if eqn is None else eqn.index,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                rule=rule,
                role=Role.FORWARD,
                module="" if eqn is None else module_path(eqn.name_stack),
                flops=flops,
                trips=trips,
                input_trips=tuple(input_trips or (trips,) * len(inputs)),
                source="" if eqn is None else jax_compat.source_line(eqn.source),
                kernel=kernel,
            )
        )
        self.stacks.append("" if eqn is None else eqn.name_stack)

    def inputs(self) -> None:
        for value in self.program.body.inputs:
            rule = _identity(self.shape(value), 0)
            self.emit("input", (), (value,), rule, 1.0)

    def returns(self) -> None:
        for atom in self.program.body.outputs:
            if isinstance(atom, int):
                rule = _identity(self.shape(atom), 1, results=0)
                self.emit("return", (atom,), (), rule, 1.0)

    def region(self, region: Region, trips: float) -> None:
        for eqn in region.equations:
            start = len(self.operators)
            match eqn.primitive:
                case "scan":
                    self.scan(eqn, trips)
                case "while":
                    self.loop(eqn, trips)
                case "cond":
                    self.cond(eqn, trips)
                case "optimization_barrier":
                    self.barrier(eqn, trips)
                    continue
                case _:
                    self.plain(eqn, trips)
                    continue
            self.close(eqn, start)

    def barrier(self, eqn: Equation, trips: float) -> None:
        """Emits one operator per value, because the values' layouts are independent."""
        for atom, value in zip(eqn.inputs, eqn.outputs, strict=True):
            rule = _identity(self.shape(value), 1)
            self.emit(eqn.primitive, _ids((atom,)), (value,), rule, trips, eqn=eqn)

    def close(self, eqn: Equation, start: int) -> None:
        """Writes a region's last operator into the region's boundary operators."""
        last = len(self.operators) - 1
        for k in range(start, len(self.operators)):
            if self.operators[k].equation == eqn.index:
                self.operators[k] = dataclasses.replace(self.operators[k], until=last)

    def plain(self, eqn: Equation, trips: float) -> None:
        values = self.program.values
        operands = [_SCALAR if isinstance(a, Scalar) else values[a] for a in eqn.inputs]
        results = [values[v] for v in eqn.outputs]
        kernel = self.kernels.get(eqn.index)
        if kernel is None:
            flops = equation_flops(eqn.primitive, operands, results, eqn.params)
        else:
            flops = kernel.flops
            if kernel.assumed and kernel.assumed not in self.assumed:
                self.assumed.append(kernel.assumed)
        rule = self.rules[eqn.index]
        self.emit(
            _kind(eqn.primitive, operands, results),
            _ids(eqn.inputs),
            eqn.outputs,
            rule,
            trips,
            eqn=eqn,
            flops=flops,
            kernel=kernel,
        )

    def enter(self, eqn: Equation, outer: Any, inner: int, trips: float) -> None:
        rule = _identity(self.shape(inner), 1)
        self.emit("enter", _ids((outer,)), (inner,), rule, trips, eqn=eqn)

    def carry(
        self,
        eqn: Equation,
        ends: tuple[Any, Any],
        outputs: Sequence[int],
        trips: tuple[float, float],
    ) -> None:
        """Emits a carry, which has the same sharding at entry, inside and at exit."""
        rule = _identity(self.shape(outputs[0]), 2, results=len(outputs))
        self.emit(
            "carry", _ids(ends), outputs, rule, trips[0], eqn=eqn, input_trips=trips
        )

    def scan(self, eqn: Equation, trips: float) -> None:
        params, body = eqn.params, eqn.regions[0]
        consts, carry = params["num_consts"], params["num_carry"]
        inner_trips = trips * params["length"]
        for k in range(consts):
            self.enter(eqn, eqn.inputs[k], body.inputs[k], trips)
        for k in range(carry):
            ends = (eqn.inputs[consts + k], body.outputs[k])
            values = (body.inputs[consts + k], eqn.outputs[k])
            self.carry(eqn, ends, values, (trips, inner_trips))
        for k in range(consts + carry, len(eqn.inputs)):
            rule = _slice_rule(
                self.shape(body.inputs[k]), params["length"], stack=False
            )
            self.emit(
                "slice_step", _ids((eqn.inputs[k],)), (body.inputs[k],), rule,
                inner_trips, eqn=eqn, input_trips=(trips,),
            )  # fmt: skip
        self.region(body, inner_trips)
        for k in range(carry, len(eqn.outputs)):
            atom = body.outputs[k]
            shape = self.shape(eqn.outputs[k])[1:]
            rule = _slice_rule(shape, params["length"], stack=True)
            self.emit(
                "stack_step",
                _ids((atom,)),
                (eqn.outputs[k],),
                rule,
                inner_trips,
                eqn=eqn,
            )

    def loop(self, eqn: Equation, trips: float) -> None:
        cond, body = eqn.regions
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        count = while_trips(eqn)
        if count is None:
            count = jax_compat.expected_runs(eqn.source)
        if count is None:
            self.assumed.append(f"while at {jax_compat.source_line(eqn.source)}")
            count = UNKNOWN_TRIPS
        for k in range(n_cond):
            self.enter(eqn, eqn.inputs[k], cond.inputs[k], trips)
        for k in range(n_body):
            self.enter(eqn, eqn.inputs[n_cond + k], body.inputs[k], trips)
        for k, init in enumerate(eqn.inputs[n_cond + n_body :]):
            values = (body.inputs[n_body + k], cond.inputs[n_cond + k], eqn.outputs[k])
            ends = (init, body.outputs[k])
            self.carry(eqn, ends, values, (trips, trips * count))
        self.region(cond, trips * count)
        self.region(body, trips * count)

    def cond(self, eqn: Equation, trips: float) -> None:
        for branch in eqn.regions:
            for outer, inner in zip(eqn.inputs[1:], branch.inputs, strict=True):
                self.enter(eqn, outer, inner, trips)
            self.region(branch, trips)
        for k, value in enumerate(eqn.outputs):
            ends = [branch.outputs[k] for branch in eqn.regions]
            rule = _identity(self.shape(value), len(ends))
            self.emit("merge", _ids(ends), (value,), rule, trips, eqn=eqn)


def _kind(primitive: str, operands: Sequence[Value], results: Sequence[Value]) -> str:
    """Returns the kind of an operator: its primitive, or a copy between memories."""
    if primitive != "device_put" or operands[0].on_host == results[0].on_host:
        return primitive
    return TO_HOST if results[0].on_host else TO_DEVICES


def _ids(atoms: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(a if isinstance(a, int) else None for a in atoms)


def _identity(shape: tuple[int, ...], operands: int, results: int = 1) -> FactorRule:
    rule = elementwise_rule([shape] * operands, [shape])
    return dataclasses.replace(rule, results=rule.results * results)


def _slice_rule(shape: tuple[int, ...], length: int, *, stack: bool) -> FactorRule:
    """Returns the rule of slicing, or of stacking, one iteration's part of an array.

    The leading dimension, over which the scan loops, is never sharded.
    """
    rule = _identity(shape, 1)
    lead: Dims = ((len(rule.sizes),),) if length > 1 else ((),)
    whole = (lead + rule.results[0],)
    part = (rule.results[0],)
    return FactorRule(
        rule.sizes + ((length,) if length > 1 else ()),
        rule.kinds + ((FactorKind.BLOCKED,) if length > 1 else ()),
        part if stack else whole,
        whole if stack else part,
    )
