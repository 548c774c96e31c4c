"""The operator graph: the facts about a program that the planner needs.

Control flow is represented by boundary operators that pass values into and out of
regions (``enter``, ``slice_step``, ``carry``, ``stack_step``, ``merge``). Each boundary
operator has a sharding rule like any other operator. The planner therefore sees one
flat list of operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.equations import Program, Value
from autopar_passes.rules.factor_rule import FactorRule, KernelWork

# Primitives that multiply each row with the matrix of its group.
RAGGED_PRODUCTS = frozenset({"ragged_dot_general", "ragged_dot_in_blocks"})
# Primitives of matrix products and convolutions.
PRODUCTS = RAGGED_PRODUCTS | {"dot_general", "conv_general_dilated"}
# Operators that pass values into a region or out of it.
BOUNDARIES = frozenset({"enter", "slice_step", "carry", "stack_step", "merge"})
# Kinds of operators that copy an array between the memories of a host and its devices.
TO_HOST, TO_DEVICES = "to_host", "to_devices"


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the graph.

    Attributes:
      index: position in `OperatorGraph.operators`, which is the order of execution.
      kind: name of the primitive or boundary operator, or ``input`` or ``return``.
      equation: index of the operator's equation; -1 for ``input`` and ``return``.
      inputs: value numbers; None for a scalar constant.
      outputs: value numbers.
      rule: the sharding rule, with the factors of all dimensions.
      role: forward, backward or update.
      module: Flax module path; '' if it is unknown.
      flops: floating-point operations of one run, on whole arrays.
      trips: the number of runs in a step.
      input_trips: for each operand, how often in a step the operator reads it. A carry
        reads its initial value once per loop, and the next value once per iteration.
      class_index: index of the first operator of its class (see
        `autopar_passes.graph.build`); a class shares one set of decisions.
      source: ``file:line`` of the user's code.
      until: for an operator that passes values into or out of a region, the index of
        the region's last operator.
      kernel: the work of a hand-written kernel; None for other operators.
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
        """Sets role and class; like `dataclasses.replace`, but faster."""
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
      value: the value number of the input.
      path: the input's path in the arguments, such as ``state.params['dense']``.
      role: parameter, optimizer state, batch, frozen or other.
      output: the flat output that is the input's value in the next step, or -1.
      rows: the dimension that grows with the batch (its rows are the batch's examples),
        or -1. State may have such a dimension too, for example the activations that a
        recurrent network passes to the next step.
      unit: the number of entries along dimension ``rows`` for each example of the
        batch; 0 if the number is not an integer.
      turns: the number of batches or microbatches in the dimensions before ``rows``; a
        loop of the step runs over them.
      at_hand: whether each of several processes has all rows that it needs.
    """

    value: int
    path: str
    role: InputRole
    output: int = -1
    rows: int = -1
    unit: int = 1
    turns: int = 1
    at_hand: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorGraph:
    """A train step as operators over values.

    Attributes:
      values: all arrays; operators refer to them by position.
      operators: the operators, in a valid order of execution.
      inputs: flat inputs, in the order of the step's arguments.
      outputs: the value of each flat output (None for a constant).
      unsupported: primitives without a sharding rule, which are replicated.
      assumed_trips: loops whose trip count is unknown, with the assumed count; and the
        assumptions behind the FLOPs of kernels.
      accumulated: values that the step sums over its microbatches: the sum is complete
        only after the last of them.
      microbatches: the number of microbatches.
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
        """Number of operator classes, each with its own set of decisions."""
        return len({op.class_index for op in self.operators})

    @property
    def flops(self) -> float:
        """Floating-point operations of one step on the whole batch."""
        return sum(op.flops * op.trips for op in self.operators)


def update_equations(program: Program, graph: OperatorGraph) -> frozenset[int]:
    """Returns the indices of the top-level equations of a program's update."""
    top = {eqn.index for eqn in program.body.equations}
    return frozenset(
        op.equation
        for op in graph.operators
        if op.role is Role.UPDATE and op.equation in top
    )


def producers(operators: Iterable[Operator]) -> dict[int, Operator]:
    """Returns the operator that computes each value."""
    return {value: op for op in operators for value in op.outputs}


def readers(operators: Iterable[Operator]) -> dict[int, list[tuple[Operator, int]]]:
    """Returns the readers of each value: operators, with the operand's position."""
    out: dict[int, list[tuple[Operator, int]]] = {}
    for op in operators:
        for slot, value in enumerate(op.inputs):
            if value is not None:
                out.setdefault(value, []).append((op, slot))
    return out


def users(operators: Iterable[Operator]) -> dict[int, list[Operator]]:
    """Value -> the operators that read it, each once."""
    out: dict[int, list[Operator]] = {}
    for op in operators:
        for value in {v for v in op.inputs if v is not None}:
            out.setdefault(value, []).append(op)
    return out


def read_operators(operators: Sequence[Operator]) -> list[list[int]]:
    """Returns, for each operator, the positions of the operators that it reads."""
    made_by = producers(operators)
    return [
        [made_by[v].index for v in op.inputs if v is not None and v in made_by]
        for op in operators
    ]
