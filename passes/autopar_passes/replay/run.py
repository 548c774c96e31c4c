"""Replays a flat program with the layouts of a plan stated in it.

Every value is pinned where it is made, and every resharding is stated step by
step where a reader needs another layout, so that the compiler's partitioner
has nothing left to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator, OperatorGraph, producers
from autopar_passes.program.equations import Equation, Program
from autopar_passes.replay.control_flow import ControlFlow
from autopar_passes.replay.layout_plan import LayoutPlan, Synchroniser, Watch
from autopar_passes.replay.primitives import run_barrier, run_primitive
from autopar_passes.replay.replicas import Replicas
from autopar_passes.replay.values import Values
from autopar_passes.sums.stacked import Stacked

# A value and what was made of it -> what is used instead.
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
      program: the flat step.
      graph: its operator graph.
      plan: the layouts.
      mesh: a `jax.sharding.Mesh` or ``AbstractMesh`` with automatic axes.
      replicas: deal the microbatches out over the mesh's first axis; None: every
        device goes through all of them.

    The function's keyword ``synchroniser`` takes the deferred sums; without one they
    are plain reductions. Its keyword ``made`` is called with each value that is made
    outside of loops, and returns what is used instead; ``watch`` looks at values.
    """
    operators = operators_of(graph)
    made_by, sources = producers(graph.operators), program.by_index()

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
        return Replayer(program, operators, values, replicas).step(made)

    return run


def operators_of(graph: OperatorGraph) -> dict[int, list[Operator]]:
    """Returns the operators of each equation, -1 for those of inputs and results."""
    found: dict[int, list[Operator]] = {}
    for op in graph.operators:
        found.setdefault(op.equation, []).append(op)
    return found


def as_it_is(value: int, array: Any) -> Any:
    """The `Made` that changes nothing."""
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
          operators: by the equation that they stand for (`operators_of`).
          values: what is known so far.
          replicas: as of `replay`.
        """
        self.program = program
        self.operators = operators
        self.values = values
        self.control_flow = ControlFlow(values, program.values, self.equation, replicas)

    def step(self, made: Made) -> list[Any]:
        """Runs the program; carried state leaves in the layout it came in."""
        body, values = self.program.body, self.values
        self.run(body.equations, made)
        if values.watch is not None:
            values.watch.end(values.held)
        layouts = [values.plan.output(k) for k in range(len(body.outputs))]
        return [
            values.plain(a) if layout is None else values.read(a, layout, True)
            for a, layout in zip(body.outputs, layouts, strict=True)
        ]

    def run(self, equations: Iterable[Equation], made: Made) -> None:
        """Runs equations in their order, and takes what is used instead of results."""
        for eqn in equations:
            self.equation(eqn)
            self.replace(eqn, made)

    def replace(self, eqn: Equation, made: Made) -> None:
        """Takes what is used instead of an equation's results; as of `replay`."""
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
