"""Builds the operator graph of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.graph.operators import (
    UNKNOWN_TRIPS,
    GraphInput,
    Operator,
    OperatorGraph,
)
from autopar_passes.graph.repeats import repeated_classes
from autopar_passes.graph.roles import Role, input_roles, module_path, operator_roles
from autopar_passes.program.equations import (
    Constant,
    Equation,
    Program,
    Region,
    Value,
    walk,
)
from autopar_passes.rules import shardy
from autopar_passes.rules.factor_rule import (
    Dims,
    FactorKind,
    FactorRule,
    elementwise_rule,
)
from autopar_passes.rules.flops import equation_flops


def build_graph(
    program: Program,
    *,
    input_paths: Sequence[str],
    carried: dict[int, int],
    share_repeated: bool = True,
) -> OperatorGraph:
    """Builds the operator graph of a flat program.

    Args:
      program: the flat step.
      input_paths: a readable path for each flat argument.
      carried: flat argument -> flat output that is its next value.
      share_repeated: whether repeated layers share their decisions.
    """
    equations = walk(program.body)
    signatures = [shardy.signature(e, program.values) for e in equations]
    book = shardy.rule_book(program, equations, signatures)
    builder = _GraphBuilder(program, book.rules, carried)
    builder.inputs()
    builder.region(program.body, 1.0)
    builder.returns()
    operators = _with_roles(builder.operators, builder.stacks)
    inputs = _inputs(program, operators, input_paths, carried)
    operators = _with_classes(program, operators, inputs, share=share_repeated)
    outputs = tuple(a if isinstance(a, int) else None for a in program.body.outputs)
    return OperatorGraph(
        program.values,
        tuple(operators),
        inputs,
        outputs,
        book.unsupported,
        tuple(builder.assumed),
    )


class _GraphBuilder:
    """Emits operators region by region, with boundary operators between."""

    def __init__(
        self, program: Program, rules: dict[int, FactorRule], carried: dict[int, int]
    ) -> None:
        self.program = program
        self.rules = rules
        self.carried = carried
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
        """Values only pass through together; their layouts are independent."""
        for atom, value in zip(eqn.inputs, eqn.outputs, strict=True):
            rule = _identity(self.shape(value), 1)
            self.emit(eqn.primitive, _ids((atom,)), (value,), rule, trips, eqn=eqn)

    def close(self, eqn: Equation, start: int) -> None:
        """Tells the boundary operators of a region where it ends."""
        last = len(self.operators) - 1
        for k in range(start, len(self.operators)):
            if self.operators[k].equation == eqn.index:
                self.operators[k] = dataclasses.replace(self.operators[k], until=last)

    def plain(self, eqn: Equation, trips: float) -> None:
        values = self.program.values
        scalar = Value((), jnp.dtype("float32"))
        operands = [
            scalar if isinstance(a, Constant) else values[a] for a in eqn.inputs
        ]
        results = [values[v] for v in eqn.outputs]
        flops = equation_flops(eqn.primitive, operands, results, eqn.params)
        rule = self.rules[eqn.index]
        self.emit(
            eqn.primitive,
            _ids(eqn.inputs),
            eqn.outputs,
            rule,
            trips,
            eqn=eqn,
            flops=flops,
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
        """One sharding for a loop's carry at entry, inside and at exit."""
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
            rule = _sliced(self.shape(body.inputs[k]), params["length"], stack=False)
            self.emit(
                "slice_step", _ids((eqn.inputs[k],)), (body.inputs[k],), rule,
                inner_trips, eqn=eqn, input_trips=(trips,),
            )  # fmt: skip
        self.region(body, inner_trips)
        for k in range(carry, len(eqn.outputs)):
            atom = body.outputs[k]
            shape = self.shape(eqn.outputs[k])[1:]
            rule = _sliced(shape, params["length"], stack=True)
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
        count = _while_trips(eqn, self.program)
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


def _ids(atoms: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(a if isinstance(a, int) else None for a in atoms)


def _identity(shape: tuple[int, ...], operands: int, results: int = 1) -> FactorRule:
    rule = elementwise_rule([shape] * operands, [shape])
    return dataclasses.replace(rule, results=rule.results * results)


def _sliced(shape: tuple[int, ...], length: int, *, stack: bool) -> FactorRule:
    """One step of a scanned array: the leading dimension stays whole."""
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


def _while_trips(eqn: Equation, program: Program) -> float | None:
    """Reads the count of a counting loop: ``while i < n: ...; i += 1``."""
    cond, body = eqn.regions
    if len(cond.equations) != 1 or cond.equations[0].primitive != "lt":
        return None
    left, right = cond.equations[0].inputs
    skip = eqn.params["cond_nconsts"]
    if left not in cond.inputs[skip:] or cond.outputs != cond.equations[0].outputs:
        return None
    position = cond.inputs[skip:].index(left)
    start = eqn.inputs[skip + eqn.params["body_nconsts"] + position]
    if not isinstance(right, Constant):
        if right not in cond.inputs[:skip]:
            return None
        right = eqn.inputs[cond.inputs.index(right)]
    step = body.outputs[position]
    counts = [
        e for e in body.equations if step in e.outputs and e.primitive == "add"
    ]  # fmt: skip
    if not (isinstance(start, Constant) and isinstance(right, Constant) and counts):
        return None
    by = [a for a in counts[0].inputs if isinstance(a, Constant)]
    if len(by) != 1 or float(by[0].value) <= 0:
        return None
    return max(0.0, (float(right.value) - float(start.value)) / float(by[0].value))


def _reads(operators: Sequence[Operator]) -> list[list[int]]:
    producer = {v: op.index for op in operators for v in op.outputs}
    return [
        [producer[v] for v in op.inputs if v is not None and v in producer]
        for op in operators
    ]


def _with_roles(operators: list[Operator], stacks: Sequence[str]) -> list[Operator]:
    roles = operator_roles(stacks, _reads(operators))
    return [
        dataclasses.replace(op, role=role)
        for op, role in zip(operators, roles, strict=True)
    ]


def _inputs(
    program: Program,
    operators: Sequence[Operator],
    paths: Sequence[str],
    carried: dict[int, int],
) -> tuple[GraphInput, ...]:
    values = program.body.inputs[: program.num_arguments]
    readers: dict[int, list[Role]] = {v: [] for v in values}
    inner_of: dict[int, int] = {v: v for v in values}
    producer: dict[int, Operator] = {}
    for op in operators:
        producer.update((v, op) for v in op.outputs)
        for v in op.inputs:
            if v in inner_of and op.kind not in ("input", "return"):
                readers[inner_of[v]].append(op.role)
                if op.kind in ("enter", "slice_step"):
                    inner_of.update((out, inner_of[v]) for out in op.outputs)
    after = (Role.BACKWARD, Role.UPDATE)
    outputs = program.body.outputs
    makers = [outputs[carried[i]] if i in carried else None for i in range(len(values))]
    roles = input_roles(
        num_inputs=len(values),
        carried=frozenset(carried),
        floating=[_floating(program.values[v]) for v in values],
        read_by=[readers[v] for v in values],
        from_backward=[
            isinstance(m, int) and producer[m].role in after for m in makers
        ],
    )
    return tuple(
        GraphInput(v, paths[i], roles[i], carried.get(i, -1))
        for i, v in enumerate(values)
    )


def _floating(value: Value) -> bool:
    return not jax_compat.is_extended(value.dtype) and bool(
        jnp.issubdtype(value.dtype, jnp.floating)
    )


def _with_classes(
    program: Program,
    operators: list[Operator],
    inputs: Sequence[GraphInput],
    *,
    share: bool,
) -> list[Operator]:
    if not share:
        return [dataclasses.replace(op, class_index=op.index) for op in operators]
    role_of = {i.value: (i.role, i.output >= 0) for i in inputs}
    keys = [
        (
            _class_key(program, op),
            role_of.get(op.outputs[0]) if op.kind == "input" else None,
        )
        for op in operators
    ]
    classes = repeated_classes(keys)
    return [
        dataclasses.replace(op, class_index=int(c))
        for op, c in zip(operators, classes, strict=True)
    ]


def _class_key(program: Program, op: Operator) -> tuple[Any, ...]:
    shapes = tuple(
        None if v is None else (program.values[v].shape, str(program.values[v].dtype))
        for v in (*op.inputs, *op.outputs)
    )
    return (op.kind, op.role, op.rule, shapes, op.trips)
