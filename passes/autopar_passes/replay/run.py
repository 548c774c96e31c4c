"""Replays a flat program with the layouts of a plan stated in it.

The replay states the layout of every value where the value is computed. If a reader
needs another layout, the replay also states every layout on the way to it. So the
compiler's partitioner has no choice left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator, OperatorGraph, producers
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Value,
)
from autopar_passes.replay.primitives import placed_order, run_barrier, run_primitive
from autopar_passes.replay.replicas import Replicas, side_by_side
from autopar_passes.replay.values import (
    LayoutPlan,
    Synchroniser,
    Values,
    Watch,
)
from autopar_passes.sums import stacked
from autopar_passes.sums.finish import Sum
from autopar_passes.sums.stacked import Stacked

# Runs a loop or a branch and states the layouts of a plan inside their regions.

# Runs one equation and adds its results to the values.
Run = Callable[[Equation], None]


class ControlFlow:
    """Runs the equations with regions of one program."""

    def __init__(
        self,
        values: Values,
        types: Sequence[Value],
        run: Run,
        replicas: Replicas | None = None,
    ) -> None:
        """Starts with no region entered.

        Args:
          values: the values of the program.
          types: shape and dtype of each value.
          run: runs one equation of a region.
          replicas: distributes the iterations of one scan over groups of devices; None
            if every device runs all iterations.
        """
        self._values = values
        self._types = types
        self._run = run
        self._replicas = replicas

    def scan(self, eqn: Equation, ops: Sequence[Operator]) -> list[Any]:
        """Runs a scan; returns its results."""
        params, body = eqn.params, eqn.regions[0]
        consts, carry = params["num_consts"], params["num_carry"]
        first = consts + carry
        enters, stacks = ops[: len(eqn.inputs)], ops[len(eqn.inputs) :]
        carries = enters[consts:first]
        outer = self._hand_in(enters, eqn.inputs)

        def step(given: Any, carried: Any, sliced: Any) -> tuple[Any, Any]:
            with self._inside(body, enters, (*given, *carried, *sliced)):
                ends = self._hand_on(carries, 1, body.outputs[:carry])
                ys = self._hand_on(stacks, 0, body.outputs[carry:])
                seen = self._watch(eqn)
            return _as_arrays(ends, carried), (ys, seen)

        if self._replicas is not None and self._replicas.loop == eqn.index:
            ends, (ys, seen) = self._replicas.run(
                self._values, step, outer[:consts], outer[consts:first], outer[first:]
            )
            if self._values.watch is not None:
                self._values.watch.after(eqn.index, side_by_side(seen))
            left = [*zip(carries, ends, strict=True), *zip(stacks, ys, strict=True)]
            return [
                self._replicas.add_up(self._values, op, x, self._types[v].dtype)
                for v, (op, x) in zip(eqn.outputs, left, strict=True)
            ]

        def turn(carried: Any, sliced: Any) -> tuple[Any, Any]:
            after, (ends, left) = self._in_turn(
                carried[0], step, outer[:consts], carried[1], sliced
            )
            return (after, ends), left

        (after, end), (ys, seen) = jax.lax.scan(
            turn,
            (self._turn(eqn), outer[consts:first]), outer[first:],
            length=params["length"], reverse=params["reverse"],
            unroll=params["unroll"],
        )  # fmt: skip
        self._after_callbacks(after)
        if self._values.watch is not None:
            self._values.watch.after(eqn.index, seen)
        return self._hand_out(carries, 1, end) + self._hand_out(stacks, 0, ys)

    def _watch(self, eqn: Equation) -> Any:
        """Returns what a `Watch` observes in one iteration; () without a watch."""
        watch = self._values.watch
        if watch is None:
            return ()
        return watch.inside(eqn.index, self._values.as_held, self._values.mesh)

    def loop(self, eqn: Equation, ops: Sequence[Operator]) -> list[Any]:
        """Runs a ``while``; returns its results."""
        cond, body = eqn.regions
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        outer = self._hand_in(ops, eqn.inputs)
        carries = ops[n_cond + n_body :]
        # Under `jax.vmap`, each element of the batch leaves the loop at its own
        # iteration.
        mapped = bool(eqn.params["cond_jaxpr"].out_avals[0].shape)

        def goes_on(carried: Any) -> Any:
            with self._inside(cond, ops, (*_behind_barrier(outer[:n_cond]), *carried)):
                return self._values.plain(cond.outputs[0])

        def test(carried: Any) -> Any:
            return jax.numpy.any(goes_on(carried))

        def step(carried: Any) -> Any:
            consts = _behind_barrier(outer[n_cond : n_cond + n_body])
            with self._inside(body, ops, (*consts, *carried)):
                ends = self._hand_on(carries, 1, body.outputs)
            made = _as_arrays(ends, carried)
            return _where(goes_on(carried), made, carried) if mapped else made

        with jax_compat.with_expected_runs(eqn.source):
            after, end = jax.lax.while_loop(
                lambda carried: self._in_turn(carried[0], test, carried[1])[1],
                lambda carried: self._in_turn(carried[0], step, carried[1]),
                (self._turn(eqn), outer[n_cond + n_body :]),
            )
        self._after_callbacks(after)
        return self._hand_out(carries, 2, end)

    def cond(self, eqn: Equation, ops: Sequence[Operator]) -> list[Any]:
        """Runs the branches of a ``cond``; returns its results."""
        count = len(eqn.inputs) - 1
        merges = ops[count * len(eqn.regions) :]
        branches: list[Callable[..., Any]] = []
        arguments: list[Any] = []
        for b, region in enumerate(eqn.regions):
            enters = ops[b * count : (b + 1) * count]
            arguments.append(self._operands(enters, 0, eqn.inputs[1:]))
            branches.append(self._branch(region, enters, merges, b))
        index = self._values.plain(eqn.inputs[0])
        after, out = jax.lax.switch(
            index,
            [
                lambda turn, args, f=f, b=b: self._in_turn(turn, f, args[b])
                for b, f in enumerate(branches)
            ],
            self._turn(eqn),
            arguments,
        )
        self._after_callbacks(after)
        plan = self._values.plan
        return [
            self._values.pin(x, plan.results(op, 0))
            for x, op in zip(out, merges, strict=True)
        ]

    def _turn(self, eqn: Equation) -> tuple[Any, ...]:
        """The token that a region's callbacks wait for; () if they are not ordered."""
        ordered = any(jax_compat.is_ordered(e.source) for e in eqn.inner)
        return (self._values.turn,) if ordered else ()

    def _in_turn(
        self, turn: tuple[Any, ...], run: Callable[..., Any], *args: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Runs a region after earlier callbacks; returns the next token and results."""
        before, values = self._values.turn, self._values
        values.turn = turn[0] if turn else before
        made = run(*args)
        after = (values.turn,) if turn else ()
        values.turn = before
        return after, made

    def _after_callbacks(self, turn: tuple[Any, ...]) -> None:
        """Makes later callbacks wait for the callbacks of a region."""
        self._values.turn = turn[0] if turn else self._values.turn

    def _branch(
        self,
        region: Region,
        enters: Sequence[Operator],
        merges: Sequence[Operator],
        slot: int,
    ) -> Callable[[Any], list[Any]]:
        def run(args: Any) -> list[Any]:
            with self._inside(region, enters, args):
                ends = self._operands(merges, slot, region.outputs)
            return _as_arrays(ends, [self._types[op.outputs[0]] for op in merges])

        return run

    @contextlib.contextmanager
    def _inside(
        self, region: Region, ops: Sequence[Operator], args: Sequence[Any]
    ) -> Generator[None]:
        """Opens the scope of a region, in which the region's inputs are known.

        Args:
          region: the body.
          ops: the operators that stand in the graph for the loop's operands and
            results. They give values to the region.
          args: the arrays of the region's inputs.
        """
        with self._values.inside(self._region_inputs(ops, region.inputs, args)):
            for eqn in region.equations:
                self._run(eqn)
            yield

    def _region_inputs(
        self, ops: Sequence[Operator], inputs: Sequence[int], args: Sequence[Any]
    ) -> dict[int, Any]:
        """A region's inputs, in the layouts that the loop or branch gives them."""
        plan, mesh = self._values.plan, self._values.mesh
        found = dict(zip(inputs, args, strict=True))
        for op in ops:
            for slot, value in enumerate(op.outputs):
                if value not in found:
                    continue
                partial = plan.partial_layout(value)
                found[value] = (
                    self._values.pin(found[value], plan.results(op, slot))
                    if partial is None
                    else stacked.stack(found[value], *partial, mesh)
                )
        return found

    def _operands(
        self, ops: Sequence[Operator], slot: int, atoms: Sequence[Atom]
    ) -> list[Any]:
        return [
            self._values.operand(op, slot, a) for op, a in zip(ops, atoms, strict=True)
        ]

    def _hand_in(self, ops: Sequence[Operator], atoms: Sequence[Atom]) -> list[Any]:
        """Returns a loop's inputs.

        A carry that stays partial becomes a stacked array.
        """
        return [self._first_carry(op, a) for op, a in zip(ops, atoms, strict=True)]

    def _first_carry(self, op: Operator, atom: Atom) -> Any:
        values = self._values
        partial = (
            values.plan.partial_layout(op.outputs[0]) if op.kind == "carry" else None
        )
        if partial is None:
            return values.operand(op, 0, atom)
        axes, layout = partial
        whole = values.read(atom, layout, values.plan.is_backward(op))
        return stacked.lift(whole, axes, layout, values.mesh).array

    def _hand_on(
        self, ops: Sequence[Operator], slot: int, atoms: Sequence[Atom]
    ) -> list[Any]:
        """Returns the results of an iteration, partial values as stacked arrays."""
        arrays = [
            self._values.partial_operand(op, slot, atom)
            for op, atom in zip(ops, atoms, strict=True)
        ]
        return [x.array if isinstance(x, Stacked) else x for x in arrays]

    def _hand_out(
        self, ops: Sequence[Operator], slot: int, arrays: Sequence[Any]
    ) -> list[Any]:
        """Returns the results of a loop."""
        return [
            self._loop_result(op, slot, x) for op, x in zip(ops, arrays, strict=True)
        ]

    def _loop_result(self, op: Operator, slot: int, array: Any) -> Any:
        """Returns one result of a loop.

        A stacked result has an entry for each iteration. In such a result, the
        dimension of partial sums is moved in front of the dimension of iterations.
        """
        value, plan = op.outputs[slot], self._values.plan
        if plan.partial_layout(value) is None:
            return self._values.pin(array, plan.results(op, slot))
        if op.kind == "stack_step":
            array = jax.numpy.moveaxis(array, 1, 0)
        return self._values.defer(value, array)


def _behind_barrier(constants: Sequence[Any]) -> list[Any]:
    """Returns the constants of a while loop, behind a barrier.

    JAX makes the constants part of the carry. Without the barrier, Shardy would reshard
    them in every iteration: to the last layout that the body states, and back for the
    next iteration.
    """
    return [jax.lax.optimization_barrier(x) for x in constants]


def _where(test: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Selects new arrays where a test of their first dimensions holds."""
    return [
        jax.numpy.where(jax.numpy.expand_dims(test, range(test.ndim, x.ndim)), x, y)
        for x, y in zip(new, old, strict=True)
    ]


def _as_arrays(ends: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Turns constants that a region returns into arrays of its result types."""
    return [
        e if hasattr(e, "aval") else jax.numpy.asarray(e, t.dtype)
        for e, t in zip(ends, types, strict=True)
    ]


# A function from a value's number and its array to the array that replaces it.
Made = Callable[[int, Any], Any]


def replay(
    program: Program,
    graph: OperatorGraph,
    plan: LayoutPlan,
    mesh: Any,
    replicas: Replicas | None = None,
) -> Callable[..., list[Any]]:
    """Returns a function of the flat arguments that states the plan's layouts.

    Args:
      program: the step, with its calls inlined.
      graph: its operator graph.
      plan: the layouts.
      mesh: a `jax.sharding.Mesh` or ``AbstractMesh`` with automatic axes.
      replicas: distribute the microbatches over the mesh's first axis; None if every
        device runs all microbatches.

    The function's keyword ``synchroniser`` computes the deferred sums; without one they
    are plain reductions. Its keyword ``made`` is called with each value that is
    computed outside of loops, and returns the array that replaces the value. Its
    keyword ``watch`` observes values.
    """
    operators = operators_of(graph)
    made_by, sources = producers(graph.operators), program.by_index()
    order = placed_order(program, graph, plan, mesh)

    def run(
        *arguments: Any,
        synchroniser: Synchroniser | None = None,
        made: Made = as_it_is,
        watch: Watch | None = None,
    ) -> list[Any]:
        arrays = dict(
            zip(program.body.inputs, (*arguments, *program.constants), strict=True)
        )
        values = Values(made_by, sources, plan, mesh, synchroniser, arrays, watch)
        for op in (x for x in operators.get(-1, []) if x.kind == "input"):
            value = op.outputs[0]
            arrays[value] = values.pin(arrays[value], plan.results(op, 0))
        values.order = order
        return Replayer(program, operators, values, replicas).step(made)

    return run


def operators_of(graph: OperatorGraph) -> dict[int, list[Operator]]:
    """Returns the operators of each equation.

    Key -1 has those of inputs and results.
    """
    found: dict[int, list[Operator]] = {}
    for op in graph.operators:
        found.setdefault(op.equation, []).append(op)
    return found


def as_it_is(value: int, array: Any) -> Any:
    """Returns a `Made` function that changes nothing."""
    del value
    return array


class Replayer:
    """Runs the equations of a program, one by one or all."""

    def __init__(
        self,
        program: Program,
        operators: Mapping[int, list[Operator]],
        values: Values,
        replicas: Replicas | None = None,
    ) -> None:
        """Starts with the inputs.

        Args:
          program: the flat program.
          operators: the operators of each equation (`operators_of`).
          values: the values that are known so far.
          replicas: see `replay`.
        """
        self.program = program
        self.operators = operators
        self.values = values
        self.control_flow = ControlFlow(values, program.values, self.equation, replicas)

    def step(self, made: Made) -> list[Any]:
        """Runs the program; each new state gets the layout of the old state."""
        body, values = self.program.body, self.values
        self.run(body.equations, made)
        if values.watch is not None:
            values.watch.end(values.as_held)
        layouts = [values.plan.output(k) for k in range(len(body.outputs))]
        return [
            values.plain(a) if layout is None else values.read(a, layout, True)
            for a, layout in zip(body.outputs, layouts, strict=True)
        ]

    def run(self, equations: Iterable[Equation], made: Made) -> None:
        """Runs equations in order.

        ``made`` may replace the results of the equations (see `replay`).
        """
        for eqn in equations:
            self.equation(eqn)
            self.replace(eqn, made)

    def replace(self, eqn: Equation, made: Made) -> None:
        """Replaces an equation's results by what ``made`` returns for them."""
        arrays = self.values.scope.values
        for value in eqn.outputs:
            array = arrays[value]
            if array is not None and not isinstance(array, Stacked):
                arrays[value] = made(value, array)

    def equation(self, eqn: Equation) -> None:
        """Runs one equation and adds its results to the values."""
        ops = self.operators[eqn.index]
        with jax_compat.source_of(eqn.source):
            match eqn.primitive:
                case "scan":
                    out = self.control_flow.scan(eqn, ops)
                case "while":
                    out = self.control_flow.loop(eqn, ops)
                case "cond":
                    out = self.control_flow.cond(eqn, ops)
                case "optimization_barrier":
                    out = run_barrier(self.values, eqn, ops)
                case _:
                    out = run_primitive(self.values, eqn, ops[0])
        self.values.scope.values.update(zip(eqn.outputs, out, strict=True))


# Replays a part of a program: some of its equations, with input and output values.
#
# A segment states the layouts of the plan of the whole program, so another segment
# reads a value in the layout in which it left its segment. If the plan computes a sum
# over devices later, the segment returns stacked partial values, and a later segment
# sums them.


class PlainSums:
    """Computes the sums of partial values with plain reductions."""

    def __init__(self, plan: LayoutPlan, mesh: Any) -> None:
        """Stores the plan, which gives the layouts of the sums."""
        self._plan = plan
        self._mesh = mesh

    def takes(self, value: int) -> frozenset[int]:
        """Returns only the value itself: each sum is computed separately."""
        return frozenset({value})

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Computes the sums."""
        return {v: self._sum(v, partial) for v, partial in partials.items()}

    def _sum(self, value: int, partial: Stacked) -> Any:
        array = stacked.total(partial)
        for layout in self._plan.due(value) or ():
            array = stacked.constrain(array, self._mesh, layout)
        return array


class _Within:
    """A plan for one segment, in which no reader recomputes an input of the segment."""

    def __init__(
        self, plan: LayoutPlan, inputs: Collection[int], outputs: Collection[int]
    ) -> None:
        self._plan = plan
        self._inputs = frozenset(inputs)
        self._outputs = frozenset(outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def floating(self, value: int) -> bool:
        return value not in self._inputs and self._plan.floating(value)

    def sums(self, value: int, *, handed: bool = False) -> tuple[Sum, ...]:
        return self._plan.sums(value, handed=handed or value in self._outputs)


class Later(PlainSums):
    """Leaves the sums of partial values to a later segment.

    If the segment itself reads a sum, the sum is computed for this reader. The segment
    still returns the partial value.
    """

    def __init__(self, plan: LayoutPlan, mesh: Any) -> None:
        """Stores the plan, which gives the layouts of the computed sums."""
        super().__init__(plan, mesh)
        self.held: dict[int, Stacked] = {}

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Computes the sums that the segment reads."""
        self.held |= partials
        return super().take(partials)


def replay_segment(
    program: Program,
    graph: OperatorGraph,
    plan: LayoutPlan,
    mesh: Any,
    *,
    equations: Sequence[Equation],
    inputs: Sequence[int],
    outputs: Sequence[int],
    whole: Collection[int],
) -> Callable[..., list[Any]]:
    """Returns a function of a segment's inputs that returns its outputs.

    Args:
      program: the whole program.
      graph: the operator graph of the program.
      plan: the layouts of the program.
      mesh: see `autopar_passes.replay.run.replay`.
      equations: the equations of the segment, in their order in the program.
      inputs: the values that the function is called with. Constants of the program
        are available without being passed.
      outputs: the values that the function returns.
      whole: the outputs whose sums are computed before they are returned.

    Partial inputs and outputs are stacked arrays, with one partial sum per entry of
    their leading dimension. The function's keyword ``synchroniser`` computes sums;
    without it, values stay partial. For the keyword ``made`` see `replay`.
    """
    operators, made_by = operators_of(graph), producers(graph.operators)
    sources = program.by_index()
    within: Any = _Within(plan, inputs, outputs)
    constants = program.constant_arrays

    def run(
        *arguments: Any, synchroniser: Synchroniser | None = None, made: Made = as_it_is
    ) -> list[Any]:
        arrays = constants | _state_inputs(plan, mesh, inputs, arguments)
        later = Later(plan, mesh)
        values = Values(made_by, sources, within, mesh, synchroniser or later, arrays)
        Replayer(program, operators, values).run(equations, made)
        return [_as_array(values, v, v in whole, later.held) for v in outputs]

    return run


def _state_inputs(
    plan: LayoutPlan, mesh: Any, inputs: Sequence[int], arguments: Sequence[Any]
) -> dict[int, Any]:
    """Returns the inputs of a segment, with stacked arrays for partial inputs."""
    out: dict[int, Any] = {}
    for value, array in zip(inputs, arguments, strict=True):
        partial = plan.partial_layout(value)
        if partial is not None:
            array = stacked.stack(array, *partial, mesh)
        out[value] = array
    return out


def _as_array(
    values: Values, value: int, whole: bool, held: Mapping[int, Stacked]
) -> Any:
    if whole:
        return values.whole(value)
    if value in held:
        return held[value].array
    if values.plan.floating(value):
        return values.make(value, None, False)
    array = values.scope.values[value]
    return array.array if isinstance(array, Stacked) else array
