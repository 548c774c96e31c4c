"""Which collectives of a step the compiler joins into one message.

XLA joins collectives of one kind over the same groups of devices, of one element
type and in one computation, where none needs the result of another
(``xla/service/collective_combiner_utils.h``, ``all_reduce_combiner.cc``,
``all_gather_combiner.cc`` and ``reduce_scatter_combiner.cc`` in openxla/xla). Then a
message pays the latency of its link once, however many arrays it carries.

Two kinds of collectives never need each other:

* sums of gradients that only the update reads, and of what the step only reports,
  its loss;
* gathers of parameters: of the step's inputs, as they are or cast, and of the state
  that leaves it.

Activations wait for each other from layer to layer, so theirs are taken to travel
alone. XLA does join a few of those, too; that is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.rules.factor_rule import FactorKind
from autopar_passes.sums.deferral import Deferral

SUMS = frozenset({"all_reduce", "reduce_scatter"})
GATHERS = frozenset({"all_gather"})
ALONE = frozenset[str]()

# Boundaries of loops that hand over what they get, whole or a part at a time.
_HANDING = ("enter", "slice_step")
# Kind and mesh axes: collectives of one group may share a message.
Group = tuple[str, tuple[int, ...]]
# Computation (the last operator of the innermost loop or branch) and element type.
Place = tuple[int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Combiner:
    """What one compiler joins.

    Attributes:
      kinds: of collectives.
      most_bytes: of the results of one message; a larger array travels alone.
      most_arrays: in one message.
    """

    kinds: frozenset[str]
    most_bytes: float
    most_arrays: int

    def packed(self, sizes: Iterable[float]) -> list[float]:
        """The bytes of the message that each array travels in.

        Arrays are taken in order; one that would make a message too large begins
        the next (``CombineInstructionsByKey`` in the first of the files above).

        >>> COMBINERS["gpu"].packed([10e6, 20e6, 10e6, 40e6, 5e6])
        [30000000.0, 30000000.0, 15000000.0, 40000000.0, 15000000.0]
        """
        messages: list[list[tuple[int, float]]] = [[]]
        alone: list[list[tuple[int, float]]] = []
        for place, size in enumerate(sizes):
            if size > self.most_bytes:
                alone.append([(place, size)])
                continue
            total = sum(s for _, s in messages[-1]) + size
            if total > self.most_bytes or len(messages[-1]) == self.most_arrays:
                messages.append([])
            messages[-1].append((place, size))
        out: dict[int, float] = {}
        for message in (*messages, *alone):
            nbytes = sum(s for _, s in message)
            out.update((place, nbytes) for place, _ in message)
        return [out[place] for place in sorted(out)]


# The GPU's thresholds: 30 MiB + 7 bytes (openxla/xla, xla/service/collective_utils.h,
# defaults of xla_gpu_{all_reduce,all_gather,reduce_scatter}_combine_threshold_bytes)
# and 256 arrays (xla/service/gpu/gpu_compiler.cc). The TPU's compiler is closed; the
# same is assumed for it. On CPUs (jaxlib 0.10.2) 3.2 GB of gradients in 25 arrays
# became one all-reduce and 401 arrays two, of 256 and 145, while no all-gathers were
# joined: benchmarks/combined_collectives.py.
_EVERY = Combiner(SUMS | GATHERS, 30 * 1024 * 1024 + 7, 256)
COMBINERS = {
    "cpu": Combiner(frozenset({"all_reduce"}), math.inf, 256),
    "gpu": _EVERY,
    "tpu": _EVERY,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Independent:
    """The operators whose collectives need no other's result.

    Attributes:
      summing: classes of operators whose partial results are such sums.
      gathered: classes of operators whose results are such parameters.
      computations: of each operator, the last operator of its computation.
    """

    summing: frozenset[int]
    gathered: frozenset[int]
    computations: tuple[int, ...]


def independent(graph: OperatorGraph, deferrals: Sequence[Deferral]) -> Independent:
    """Finds the collectives that compilers may join; all of a class or none."""
    final = {
        op
        for deferral in deferrals
        for op, ends in deferral.reach
        if deferral.gradients.issuperset(ends)
    }
    return Independent(
        _whole_classes(graph, final | _reported(graph)),
        _whole_classes(graph, _parameters(graph)),
        _computations(graph),
    )


def _reported(graph: OperatorGraph) -> set[int]:
    """Operators of the forward pass whose results go to the caller, in no other sum."""
    used: set[int] = set()
    out: set[int] = set()
    for op in reversed(graph.operators):
        if op.kind == "return":
            continue
        reported = op.role is Role.FORWARD and used.isdisjoint(op.outputs)
        if reported:
            out.add(op.index)
        if op.rule.reduced or not reported:
            used.update(v for v in op.inputs if v is not None)
    return out


def _parameters(graph: OperatorGraph) -> set[int]:
    """The operators that hand over inputs, cast or reshaped, or make new state."""
    carried = {graph.outputs[i.output] for i in graph.inputs if i.output >= 0}
    given: set[int] = set()
    out: set[int] = set()
    for op in graph.operators:
        arrays = [v for v in op.inputs if v is not None]
        passes = all(kind is FactorKind.PASS for kind in op.rule.kinds)
        hands_on = arrays and given.issuperset(arrays)
        if op.kind == "input" or (hands_on and (passes or op.kind in _HANDING)):
            given.update(op.outputs)
            out.add(op.index)
        elif op.outputs and carried.issuperset(op.outputs):
            out.add(op.index)
    return out


def _whole_classes(graph: OperatorGraph, operators: set[int]) -> frozenset[int]:
    """The classes of which every operator is among these."""
    rest = {op.class_index for op in graph.operators if op.index not in operators}
    return frozenset(graph.operators[i].class_index for i in operators) - rest


def _computations(graph: OperatorGraph) -> tuple[int, ...]:
    """The last operator of the innermost loop or branch that each operator is in."""
    open_until: list[int] = []
    out: list[int] = []
    for op in graph.operators:
        while open_until and op.index > open_until[-1]:
            open_until.pop()
        if op.until > op.index and (not open_until or op.until != open_until[-1]):
            open_until.append(op.until)
        out.append(open_until[-1] if open_until else len(graph.operators))
    return tuple(out)
