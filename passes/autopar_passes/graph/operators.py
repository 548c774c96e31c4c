"""The operator graph: what the planner needs to know about a program.

Control flow appears as boundary operators that hand values in and out of
regions (``enter``, ``slice_step``, ``carry``, ``stack_step``, ``merge``), each with
a sharding rule like any other operator. So the planner sees one flat list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.equations import Program, Value
from autopar_passes.rules.factor_rule import FactorRule, KernelWork

# Primitives that multiply matrices, as they are or as a convolution.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
# They hand values into a region and out of it.
BOUNDARIES = frozenset({"enter", "slice_step", "carry", "stack_step", "merge"})


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the graph.

    Attributes:
      index: position in `OperatorGraph.operators`; the time of the operator.
      kind: name of the primitive, of a boundary operator, ``input`` or ``return``.
      equation: index of the equation it stands for, -1 for ``input``/``return``.
      inputs: value numbers, None where the operand is a scalar constant.
      outputs: value numbers.
      rule: the factors of its dimensions.
      role: forward, backward or update.
      module: Flax module path, '' where unknown.
      flops: floating-point operations on whole arrays, each time it runs.
      trips: how often it runs in a step.
      input_trips: how often each operand is handed over in a step.
      class_index: the first operator that shares its decisions.
      source: ``file:line`` of the user's code.
      until: for a boundary operator, the last operator of its region.
      kernel: what it does, if it is a hand-written kernel.
    """

    index: int
    kind: str
    equation: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    rule: FactorRule
    role: Role
    module: str
    flops: float
    trips: float
    input_trips: tuple[float, ...]
    class_index: int = -1
    source: str = ""
    until: int = -1
    kernel: KernelWork | None = None

    def with_role(self, role: Role, class_index: int) -> Operator:
        """The operator with its role and class; `dataclasses.replace`, but faster."""
        return Operator(
            self.index,
            self.kind,
            self.equation,
            self.inputs,
            self.outputs,
            self.rule,
            role,
            self.module,
            self.flops,
            self.trips,
            self.input_trips,
            class_index,
            self.source,
            self.until,
            self.kernel,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class GraphInput:
    """One flat input of the step.

    Attributes:
      value: its value number.
      path: where it is in the arguments, such as ``state.params['dense']``.
      role: parameter, optimizer state, batch, frozen or other.
      output: flat output that carries it to the next step, or -1.
      rows: the dimension that grows with the rows of the batch, or -1. State may have
        one, too: the activations that a recurrent net hands to the next step.
      unit: entries of that dimension for each row; 0 where that is no whole number.
      turns: the batches, or parts of one, in the dimensions before that one; a loop
        goes through them.
    """

    value: int
    path: str
    role: InputRole
    output: int = -1
    rows: int = -1
    unit: int = 1
    turns: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorGraph:
    """A train step as operators over values.

    Attributes:
      values: all arrays; operators name them by position.
      operators: in an order in which the program may run.
      inputs: flat inputs, in the order of the step's arguments.
      outputs: value of each flat output (None for a constant).
      unsupported: primitives without a sharding rule, planned replicated.
      assumed_trips: loops whose trip count is unknown, and the count assumed; and
        what the FLOPs of kernels assume.
      accumulated: values that are added up over the microbatches of a step, and
        complete after the last of them.
      microbatches: how many there are.
    """

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[int | None, ...]
    unsupported: tuple[str, ...] = ()
    assumed_trips: tuple[str, ...] = ()
    accumulated: frozenset[int] = frozenset()
    microbatches: int = 1

    @property
    def num_classes(self) -> int:
        """Number of operators with decisions of their own."""
        return len({op.class_index for op in self.operators})

    @property
    def flops(self) -> float:
        """Floating-point operations of one step on the whole batch."""
        return sum(op.flops * op.trips for op in self.operators)


def update_equations(program: Program, graph: OperatorGraph) -> frozenset[int]:
    """Indices of the top-level equations of a program's update."""
    top = {eqn.index for eqn in program.body.equations}
    return frozenset(
        op.equation
        for op in graph.operators
        if op.role is Role.UPDATE and op.equation in top
    )


def producers(operators: Iterable[Operator]) -> dict[int, Operator]:
    """Returns the operator that makes each value."""
    return {value: op for op in operators for value in op.outputs}


def readers(operators: Iterable[Operator]) -> dict[int, list[tuple[Operator, int]]]:
    """Returns what reads each value: operators, each with the operand's position."""
    out: dict[int, list[tuple[Operator, int]]] = {}
    for op in operators:
        for slot, value in enumerate(op.inputs):
            if value is not None:
                out.setdefault(value, []).append((op, slot))
    return out


def read_operators(operators: Sequence[Operator]) -> list[list[int]]:
    """Returns, for each operator, the positions of those whose results it reads."""
    made_by = producers(operators)
    return [
        [made_by[v].index for v in op.inputs if v is not None and v in made_by]
        for op in operators
    ]
