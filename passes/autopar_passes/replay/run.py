"""Replays a flat program with the layouts of a plan stated in it.

Every value is pinned where it is made, and every resharding is stated step by
step where a reader needs another layout, so that the compiler's partitioner
has nothing left to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.layouts import Layout, constrain
from autopar_passes.program.equations import (
    Atom,
    Constant,
    Equation,
    Program,
    Region,
    walk,
)
from autopar_passes.replay.layout_plan import LayoutPlan, Synchroniser
from autopar_passes.rules import convolution
from autopar_passes.sums import stacked
from autopar_passes.sums.stacked import Stacked

# A value and what was made of it -> what is used instead.
Made = Callable[[int, Any], Any]


def replay(
    program: Program, graph: OperatorGraph, plan: LayoutPlan, mesh: Any
) -> Callable[..., list[Any]]:
    """Returns a function of the flat arguments that states the plan's layouts.

    Args:
      program: the flat step.
      graph: its operator graph.
      plan: the layouts.
      mesh: a `jax.sharding.Mesh` or ``AbstractMesh`` with automatic axes.

    The function's keyword ``synchroniser`` takes sums that were put off; without
    one they are plain reductions. Its keyword ``made`` is called with each value
    that the step makes outside of loops, and what it returns is used instead.
    """
    operators: dict[int, list[Operator]] = {}
    producer: dict[int, Operator] = {}
    for op in graph.operators:
        operators.setdefault(op.equation, []).append(op)
        producer.update((v, op) for v in op.outputs)
    sources = {e.index: e for e in walk(program.body)}

    def run(
        *arguments: Any,
        synchroniser: Synchroniser | None = None,
        made: Made = _as_it_is,
    ) -> list[Any]:
        replayer = _Replayer(
            program, operators, producer, sources, plan, mesh, synchroniser
        )
        values = dict(
            zip(program.body.inputs, (*arguments, *program.constants), strict=True)
        )
        for op in operators.get(-1, []):
            if op.kind == "input":
                value = op.outputs[0]
                values[value] = replayer.pin(values[value], plan.results(op, 0))
        return replayer.step(program.body, values, made)

    return run


def _as_it_is(value: int, array: Any) -> Any:
    del value
    return array


class _Forms:
    """The values of one scope and their resharded forms."""

    def __init__(self, values: dict[int, Any], outer: _Forms | None) -> None:
        self.values = values
        self.forms: dict[tuple[Any, ...], Any] = {}
        self.outer = outer

    def value(self, number: int) -> Any:
        scope: _Forms | None = self
        while scope is not None:
            if number in scope.values:
                return scope.values[number]
            scope = scope.outer
        raise KeyError(number)


class _Replayer:
    def __init__(
        self,
        program: Program,
        operators: dict[int, list[Operator]],
        producer: dict[int, Operator],
        sources: dict[int, Equation],
        plan: LayoutPlan,
        mesh: Any,
        synchroniser: Synchroniser | None,
    ) -> None:
        self.synchroniser = synchroniser
        self.program = program
        self.operators = operators
        self.producer = producer
        self.sources = sources
        self.plan = plan
        self.mesh = mesh
        self.scope: _Forms | None = None

    def step(self, body: Region, values: dict[int, Any], made: Made) -> list[Any]:
        """The whole program; carried state leaves in the layout it came in."""
        self.scope = _Forms(values, None)
        for eqn in body.equations:
            self.equation(eqn)
            for value in eqn.outputs:
                array = self.scope.values[value]
                if array is not None and not isinstance(array, Stacked):
                    self.scope.values[value] = made(value, array)
        layouts = [self.plan.output(k) for k in range(len(body.outputs))]
        return [
            self.plain(a) if layout is None else self.read(a, layout, True)
            for a, layout in zip(body.outputs, layouts, strict=True)
        ]

    def region(self, region: Region, values: dict[int, Any]) -> list[Any]:
        self.scope = _Forms(values, self.scope)
        for eqn in region.equations:
            self.equation(eqn)
        out = [self.plain(a) for a in region.outputs]
        self.scope = self.scope.outer
        return out

    def forms(self) -> _Forms:
        assert self.scope is not None
        return self.scope

    def pin(self, array: Any, layouts: Sequence[Layout]) -> Any:
        for layout in layouts:
            array = constrain(array, self.mesh, layout)
        return array

    def plain(self, atom: Atom) -> Any:
        """A value as it comes, without a layout of the reader's."""
        if isinstance(atom, Constant):
            return atom.value
        if self.plan.floating(atom) and atom not in self.forms().values:
            return self.make(atom, None, False)
        return self.whole(atom)

    def whole(self, value: int) -> Any:
        """A value with a home; its sum is taken now if that is still due."""
        array = self.forms().value(value)
        return self.summed(value) if isinstance(array, Stacked) else array

    def summed(self, value: int) -> Any:
        """Takes the sums that the synchroniser takes together with that of a value."""
        assert self.synchroniser is not None
        scope = self.forms()
        while value not in scope.values:
            assert scope.outer is not None
            scope = scope.outer
        together = {
            v: scope.values[v]
            for v in sorted(self.synchroniser.takes(value))
            if isinstance(scope.values.get(v), Stacked)
        }
        scope.values.update(self.synchroniser.take(together))
        return scope.values[value]

    def read(self, atom: Atom, layout: Layout | None, backward: bool) -> Any:
        if isinstance(atom, Constant):
            return atom.value
        if self.plan.floating(atom):
            return self.make(atom, layout, backward)
        array = self.whole(atom)
        if layout is None:
            return array
        forms = self.forms().forms
        route = self.plan.route(atom, layout, backward)
        key: tuple[Any, ...] = (atom, route.fresh)
        if route.fresh:
            if key not in forms:
                forms[key] = jax.lax.optimization_barrier(array)
            array = forms[key]
        for stated in route.layouts:
            key = (*key, stated)
            if key not in forms:
                forms[key] = constrain(array, self.mesh, stated)
            array = forms[key]
        return array

    def make(self, value: int, layout: Layout | None, backward: bool) -> Any:
        """Makes a floating value in the layout that its reader wants."""
        key = ("floating", value, layout, backward)
        forms = self.forms().forms
        if key not in forms:
            op = self.producer[value]
            eqn = self.sources[op.equation]
            wanted = _operand_layouts(op, layout)
            args = [
                self.read(a, w, backward)
                for a, w in zip(eqn.inputs, wanted, strict=True)
            ]
            with jax_compat.source_of(eqn.source):
                (array,) = jax_compat.bind(eqn.source, *args)
            forms[key] = (
                array if layout is None else constrain(array, self.mesh, layout)
            )
        return forms[key]

    def operand(self, op: Operator, slot: int, atom: Atom) -> Any:
        layout = self.plan.operand(op, slot)
        return self.read(atom, layout, self.plan.is_backward(op))

    def equation(self, eqn: Equation) -> None:
        ops = self.operators[eqn.index]
        with jax_compat.source_of(eqn.source):
            match eqn.primitive:
                case "scan":
                    out = self.scan(eqn, ops)
                case "while":
                    out = self.loop(eqn, ops)
                case "cond":
                    out = self.cond(eqn, ops)
                case "optimization_barrier":
                    out = self.barrier(eqn, ops)
                case _:
                    out = self.primitive(eqn, ops[0])
        self.forms().values.update(zip(eqn.outputs, out, strict=True))

    def primitive(self, eqn: Equation, op: Operator) -> list[Any]:
        if len(eqn.outputs) == 1 and self.plan.floating(eqn.outputs[0]):
            return [None]
        if eqn.outputs and self.plan.stacked(eqn.outputs[0]) is not None:
            return self.partial(eqn, op)
        args = [self.operand(op, k, a) for k, a in enumerate(eqn.inputs)]
        out = self.bind(eqn, op, args)
        return [self.pin(x, self.plan.results(op, k)) for k, x in enumerate(out)]

    def partial(self, eqn: Equation, op: Operator) -> list[Any]:
        """An operator whose results stay partial."""
        found = self.plan.stacked(eqn.outputs[0])
        assert found is not None
        axes, layout = found
        operands = [self.partial_operand(op, k, a) for k, a in enumerate(eqn.inputs)]
        given = [self.plan.operand(op, k) for k in range(len(operands))]
        if any(isinstance(x, Stacked) for x in operands):
            out = stacked.linear(eqn, operands, given, axes, self.mesh)
        else:
            layouts = [
                ((),) * jax.numpy.ndim(x) if layout is None else layout
                for x, layout in zip(operands, given, strict=True)
            ]
            own = self.plan.results(op, 0)
            layout = own[0] if own else layout
            out = [stacked.contribute(eqn, operands, layouts, layout, axes, self.mesh)]
        return [self.put_off(v, x) for v, x in zip(eqn.outputs, out, strict=True)]

    def partial_operand(self, op: Operator, slot: int, atom: Atom) -> Any:
        """A partial operand as it is, any other one apart from the partial axes."""
        if (
            isinstance(atom, int)
            and self.plan.stacked(atom) is not None
            and self.plan.due(atom) is None
        ):
            array = self.forms().value(atom)
            if isinstance(array, Stacked):
                return array
        return self.operand(op, slot, atom)

    def put_off(self, value: int, array: Any) -> Any:
        """Pins a stacked array; where its sum is due and nobody else takes it, sums."""
        found = self.plan.stacked(value)
        assert found is not None
        partial = stacked.stack(array, *found, self.mesh)
        due = self.plan.due(value)
        if due is None:
            return partial
        if self.synchroniser is not None and self.synchroniser.takes(value):
            return partial
        return self.pin(stacked.total(partial), due)

    def barrier(self, eqn: Equation, ops: list[Operator]) -> list[Any]:
        """One equation, but an operator for each value that passes through it."""
        args = [self.operand(op, 0, a) for op, a in zip(ops, eqn.inputs, strict=True)]
        out = jax_compat.bind(eqn.source, *args)
        return [
            self.pin(x, self.plan.results(op, 0))
            for op, x in zip(ops, out, strict=True)
        ]

    def bind(self, eqn: Equation, op: Operator, args: list[Any]) -> list[Any]:
        if eqn.primitive != convolution.PRIMITIVE or not convolution.is_grouped(
            eqn.params
        ):
            return jax_compat.bind(eqn.source, *args)
        left, right = (self.plan.operand(op, slot) for slot in range(2))
        result = self.plan.results(op, 0)
        assert left is not None
        assert right is not None
        layouts = (left, right, result[0])
        return [convolution.grouped(eqn.params, args, layouts, op.rule, self.mesh)]

    def enter(
        self, ops: Sequence[Operator], inputs: Sequence[int], args: Any
    ) -> dict[int, Any]:
        """The values of a region's inputs, pinned as their boundary operators say."""
        found = dict(zip(inputs, args, strict=True))
        for op in ops:
            for slot, value in enumerate(op.outputs):
                if value not in found:
                    continue
                partial = self.plan.stacked(value)
                found[value] = (
                    self.pin(found[value], self.plan.results(op, slot))
                    if partial is None
                    else stacked.stack(found[value], *partial, self.mesh)
                )
        return found

    def hand_in(self, op: Operator, atom: Atom) -> Any:
        """What a loop starts with; a carry that stays partial starts lifted."""
        partial = self.plan.stacked(op.outputs[0]) if op.kind == "carry" else None
        if partial is None:
            return self.operand(op, 0, atom)
        axes, layout = partial
        whole = self.read(atom, layout, self.plan.is_backward(op))
        return stacked.lift(whole, axes, layout, self.mesh).array

    def hand_on(self, op: Operator, slot: int, atom: Atom) -> Any:
        """What an iteration ends with; a partial value as its stacked array."""
        array = self.partial_operand(op, slot, atom)
        return array.array if isinstance(array, Stacked) else array

    def hand_out(self, op: Operator, slot: int, array: Any) -> Any:
        """What is left after a loop; stacked results of all iterations in front."""
        value = op.outputs[slot]
        if self.plan.stacked(value) is None:
            return self.pin(array, self.plan.results(op, slot))
        if op.kind == "stack_step":
            array = jax.numpy.moveaxis(array, 1, 0)
        return self.put_off(value, array)

    def scan(self, eqn: Equation, ops: list[Operator]) -> list[Any]:
        params, body = eqn.params, eqn.regions[0]
        consts, carry = params["num_consts"], params["num_carry"]
        first = consts + carry
        enters, stacks = ops[: len(eqn.inputs)], ops[len(eqn.inputs) :]
        outer = [self.hand_in(op, a) for op, a in zip(enters, eqn.inputs, strict=True)]

        def step(carried: Any, sliced: Any) -> tuple[Any, Any]:
            args = (*outer[:consts], *carried, *sliced)
            self.scope = _Forms(self.enter(enters, body.inputs, args), self.scope)
            for inner in body.equations:
                self.equation(inner)
            ends = [
                self.hand_on(op, 1, a)
                for op, a in zip(enters[consts:first], body.outputs, strict=False)
            ]
            ys = [
                self.hand_on(op, 0, a)
                for op, a in zip(stacks, body.outputs[carry:], strict=True)
            ]
            self.scope = self.scope.outer
            return _as_avals(ends, carried), ys

        end, stacked = jax.lax.scan(
            step, outer[consts:first], outer[first:], length=params["length"],
            reverse=params["reverse"], unroll=params["unroll"],
        )  # fmt: skip
        pinned = [
            self.hand_out(op, 1, x)
            for x, op in zip(end, enters[consts:first], strict=True)
        ]
        pinned += [
            self.hand_out(op, 0, x) for x, op in zip(stacked, stacks, strict=True)
        ]
        return pinned

    def loop(self, eqn: Equation, ops: list[Operator]) -> list[Any]:
        cond, body = eqn.regions
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        outer = [self.hand_in(op, a) for op, a in zip(ops, eqn.inputs, strict=True)]
        carries = ops[n_cond + n_body :]

        def test(carried: Any) -> Any:
            args = (*_kept(outer[:n_cond]), *carried)
            return self.region(cond, self.enter(ops, cond.inputs, args))[0]

        def step(carried: Any) -> Any:
            args = (*_kept(outer[n_cond : n_cond + n_body]), *carried)
            self.scope = _Forms(self.enter(ops, body.inputs, args), self.scope)
            for inner in body.equations:
                self.equation(inner)
            ends = [
                self.hand_on(op, 1, a)
                for op, a in zip(carries, body.outputs, strict=True)
            ]
            self.scope = self.scope.outer
            return _as_avals(ends, carried)

        end = jax.lax.while_loop(test, step, outer[n_cond + n_body :])
        return [self.hand_out(op, 2, x) for x, op in zip(end, carries, strict=True)]

    def cond(self, eqn: Equation, ops: list[Operator]) -> list[Any]:
        count = len(eqn.inputs) - 1
        merges = ops[count * len(eqn.regions) :]
        branches: list[Callable[..., Any]] = []
        arguments: list[Any] = []
        for b, region in enumerate(eqn.regions):
            enters = ops[b * count : (b + 1) * count]
            arguments.append(
                [
                    self.operand(op, 0, a)
                    for op, a in zip(enters, eqn.inputs[1:], strict=True)
                ]
            )
            branches.append(self.branch(region, enters, merges, b))
        index = self.plain(eqn.inputs[0])
        out = jax.lax.switch(
            index,
            [lambda args, f=f, b=b: f(args[b]) for b, f in enumerate(branches)],
            arguments,
        )
        return [
            self.pin(x, self.plan.results(op, 0))
            for x, op in zip(out, merges, strict=True)
        ]

    def branch(
        self, region: Region, enters: list[Operator], merges: list[Operator], slot: int
    ) -> Callable[[Any], list[Any]]:
        def run(args: Any) -> list[Any]:
            self.scope = _Forms(self.enter(enters, region.inputs, args), self.scope)
            for inner in region.equations:
                self.equation(inner)
            ends = [
                self.operand(op, slot, a)
                for op, a in zip(merges, region.outputs, strict=True)
            ]
            self.scope = self.scope.outer
            types = [self.program.values[op.outputs[0]] for op in merges]
            return [
                jax.numpy.asarray(x, v.dtype) if not hasattr(x, "dtype") else x
                for x, v in zip(ends, types, strict=True)
            ]

        return run


def _kept(constants: Sequence[Any]) -> list[Any]:
    """The constants of a while loop, apart from what the loop hands back.

    JAX makes them part of the carry. Shardy would reshard what the body returns
    to the last layout that is stated of them, and back for the next iteration.
    """
    return [jax.lax.optimization_barrier(x) for x in constants]


def _as_avals(ends: Sequence[Any], carried: Sequence[Any]) -> list[Any]:
    """Turns constants that end a loop into arrays of the carry's type."""
    return [
        e if hasattr(e, "aval") else jax.numpy.asarray(e, c.dtype)
        for e, c in zip(ends, carried, strict=True)
    ]


def _operand_layouts(op: Operator, layout: Layout | None) -> list[Layout | None]:
    """What a floating operator needs of its operands to make this layout."""
    if layout is None:
        return [None] * len(op.inputs)
    given = {
        dim[0]: axes
        for dim, axes in zip(op.rule.results[0], layout, strict=True)
        if dim
    }
    return [
        tuple(given.get(d[0], ()) if d else () for d in dims)
        for dims in op.rule.operands
    ]
