"""The analysis of a step: all its properties that do not depend on a cluster."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from autopar.garbage import collector_paused
from autopar.plans.records import AS_WRITTEN, Rematerialisation
from autopar.progress import say
from autopar.steps import spares
from autopar.steps.attention import Attention, written_attention
from autopar.steps.batch import (
    DimLabels,
    Labels,
    check_has_rows,
    dim_labels,
    factor_labels,
)
from autopar.steps.fusion import BOUNDARY, Fusion, fusion, looked_up, made_again
from autopar.steps.independence import Independent, independent
from autopar.steps.lifetimes import (
    PLAIN,
    Habits,
    Lifetimes,
    breadth_first,
    gaps,
    in_program_order,
    lifetimes,
    made_early,
    until_barriers,
)
from autopar.steps.nodes import Contraction, contract
from autopar.steps.orders import copies_in_orders
from autopar.steps.positions import Positions, behind, followers, positions
from autopar.steps.ragged import ragged_copies
from autopar.steps.rounding import (
    NOT_ROUNDED,
    Rounded,
    find_rounded,
    find_widened,
    rounded_results,
)
from autopar.steps.spares import Spares
from autopar.steps.sums import (
    CodedSums,
    PartialRuns,
    SharedSums,
    Sums,
    coded_sums,
    find_shared_sums,
    partial_runs,
    shares,
    sums_due,
)
from autopar.steps.uses import HomeValue, Readings, ValueClass, collect, readings
from autopar.steps.work import (
    OperatorWork,
    WorkTable,
    class_trips,
    in_memory,
    operator_work,
    work_table,
)
from autopar_errors import InputError
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import PRODUCTS, Operator, OperatorGraph, producers
from autopar_passes.graph.ring_order import RingOrder, ring_order
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.layer_loops.split import stacked_state
from autopar_passes.microbatches.facts import Microbatched
from autopar_passes.program.calls import NOT_NAMED, NamedRoles, StepCall
from autopar_passes.program.equations import Equation, Program
from autopar_passes.program.static_leaves import struct_of
from autopar_passes.program.trace import (
    TracedStep,
    open_arguments,
    step_name,
    trace_call,
)
from autopar_passes.sums.find import find_deferrals
from autopar_passes.sums.poisoned import Poisoned, find_poisoned
from autopar_passes.sums.stacked import (
    Deferral,
    Reassociation,
    reassociations,
)

# Two fingerprints of a step: one with all shapes, one without the batch size.


_DIGITS = 16


def fingerprint(graph: OperatorGraph, contraction: Contraction) -> str:
    """Returns 16 hex digits that identify operators, shapes and arguments of a step."""
    digest = hashlib.sha256()
    for given in graph.inputs:
        value = graph.values[given.value]
        digest.update(f"{given.path}{value.shape}{value.dtype}{given.output}".encode())
    for op in graph.operators:
        digest.update(f"{_kind(op)}{op.inputs}{op.outputs}{op.trips}".encode())
    for node in contraction.nodes:
        digest.update(f"{node.kind}{node.root}{node.factors}".encode())
    return digest.hexdigest()[:_DIGITS]


def structure(graph: OperatorGraph, contraction: Contraction) -> str:
    """Returns 16 hex digits that stay the same when only the batch of a step changes.

    The digits depend on the operators and their connections, the arguments with their
    dtypes, the shapes of carried state, and the nodes for which a plan can choose a
    sharding. They do not depend on other sizes: a plan can be used with any batch size
    of the same structure, as long as its mesh axes divide the new sizes.
    """
    digest = hashlib.sha256()
    for given in graph.inputs:
        value = graph.values[given.value]
        fixed = given.output >= 0 or given.role is not InputRole.BATCH
        shape = value.shape if fixed else len(value.shape)
        digest.update(f"{given.path}{shape}{value.dtype}{given.output}".encode())
    for op in graph.operators:
        digest.update(f"{_kind(op)}{op.inputs}{op.outputs}{op.class_index}".encode())
    for node in contraction.nodes:
        digest.update(f"{node.kind}{node.root}{len(node.factors)}".encode())
    return digest.hexdigest()[:_DIGITS]


def _kind(op: Operator) -> str:
    """Returns the kind of an operator, with the name of its kernel."""
    return op.kind if op.kernel is None else f"{op.kind} {op.kernel.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The function and the arguments from which a step was traced.

    Attributes:
      step: the train step.
      call: a call of the step, with ``ShapeDtypeStruct``s in place of arrays.
    """

    step: Callable[..., Any]
    call: StepCall


_Fact = TypeVar("_Fact")


class _untimed(Generic[_Fact]):
    """A cached property that does not depend on the number of runs of operators.

    The analysis of a replica differs from the analysis in `Analysis.counted` only in
    how often operators run, so it takes the property from `Analysis.counted`.
    """

    def __init__(self, find: Callable[[Any], _Fact]) -> None:
        self.find, self.name = find, find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, instance: Analysis | None, owner: type | None = None) -> _Fact:
        if instance is None:
            raise AttributeError(self.name)
        if instance.counted is not None:
            return getattr(instance.counted, self.name)
        # From now on, the instance dictionary holds the property, and this method is
        # not called again.
        return instance.__dict__.setdefault(self.name, self.find(instance))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """A program, its operator graph and its nodes, which all plans of a step share.

    Attributes:
      program: the flat program.
      graph: its operator graph.
      contraction: the nodes: groups of operators that share one choice of a sharding
        (`autopar.steps.nodes`).
      sources: the uses of each class of values: which nodes read them
        (`autopar.steps.uses`).
      deferrals: the paths along which sums over devices may stay partial.
      output_paths: a readable path for each flat output.
      traced: the traced step with its pytrees; None for a program without pytrees.
      origin: the step, and the shapes with which it was traced; None for a program that
        was not traced from a step.
      split: the microbatches into which the program splits its batch; None if it does
        not split the batch.
      whole: if the batch was split into microbatches or padded, the analysis of the
        step as the user wrote it.
      row_multiple: the number to a multiple of which programs of the step pad the rows
        of each microbatch (`autopar.steps.padding`); 1: rows are not padded.
      pieces: flat argument -> the number of layers of each of its pieces
        (`autopar.steps.stages`).
      spares: the additional copies of the state that devices hold.
      remat: the layers that the program rematerialises (`autopar.steps.remat`).
      written: if the checkpoints of the step were dropped or keep more than the step
        says, the analysis of the step with its checkpoints.
      turns: the number of the step's microbatches that one replica runs
        (`autopar.steps.microbatches`); None if it runs all of them.
      counted: the analysis that differs from this one only in the number of runs of
        each operator, and shares its cached properties; None if there is no such
        analysis.
      alone: if the update computes equal matrices in batches
        (`autopar.steps.for_devices`), the analysis of the step that computes each
        matrix separately.
      batches: the number of matrices in each of these batches.
      row_blocks: the number of blocks in which rows are sorted that are sorted only to
        group them; 1 if all rows are sorted together.
      row_capacity: the slots of each group in a block, divided by its mean number of
        rows (`autopar_passes.graph.row_slots`); 0 if rows have no slots.
      attention_kernel: how attention that the step writes out is computed
        (`autopar.steps.for_devices`).
      loss_blocks: the number of blocks of tokens in which the loss is computed; 1 if it
        is computed for all tokens at once.
      offload: paths of the state that the plan keeps in host memory
        (`autopar.steps.offload`).
      on_devices: if there is such state, the analysis of the step with all its state in
        device memory.
      programs: for a pipeline stage, equation -> the number of the program that runs
        it, since the passes of a stage are separate programs; None if one program
        runs the whole step.
      trace_s: the seconds of tracing.
      graph_s: the seconds of building the graph and the contraction.
    """

    program: Program
    graph: OperatorGraph
    contraction: Contraction
    sources: dict[ValueClass, HomeValue]
    deferrals: tuple[Deferral, ...]
    output_paths: tuple[str, ...]
    traced: TracedStep | None = None
    origin: Origin | None = None
    split: Microbatched | None = None
    whole: Analysis | None = None
    row_multiple: int = 1
    pieces: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    spares: Spares = spares.NONE
    remat: Rematerialisation = AS_WRITTEN
    written: Analysis | None = None
    turns: int | None = None
    counted: Analysis | None = None
    alone: Analysis | None = None
    batches: tuple[int, ...] = ()
    row_blocks: int = 1
    row_capacity: float = 0.0
    attention_kernel: str = ""
    loss_blocks: int = 1
    offload: tuple[str, ...] = ()
    on_devices: Analysis | None = None
    programs: Mapping[int, int] | None = None
    trace_s: float = 0.0
    graph_s: float = 0.0

    @property
    def microbatches(self) -> int:
        """The number of microbatches into which the program splits its batch."""
        return 1 if self.split is None else self.split.microbatches

    @functools.cached_property
    def _memory(self) -> dict[Hashable, Any]:
        return {}

    def remember(self, key: Hashable, make: Callable[[], _Fact]) -> _Fact:
        """Returns what a function returned when it was first called for a key."""
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]

    @_untimed
    def attention(self) -> tuple[Attention, ...]:
        """The attention that the step computes without a hand-written kernel."""
        return written_attention(self.graph, self.program.constant_arrays)

    @_untimed
    def ring_order(self) -> RingOrder | str:
        """The values whose tokens may be in the order of a ring, or why there are none.

        See `autopar_passes.graph.ring_order`.
        """
        return ring_order(self.program, self.graph.operators)

    @_untimed
    def stacked_inputs(self) -> dict[int, int]:
        """Flat argument that holds stacked layers -> the number of layers."""
        return stacked_state(self.program, self.carried_arguments)

    @property
    def pytrees(self) -> TracedStep:
        """The pytrees of the traced step.

        Raises:
          InputError: the program was not traced from a step.
        """
        if self.traced is None:
            raise InputError(
                "this analysis is of a program alone: make it with analyse(step, args)."
            )
        return self.traced

    @_untimed
    def loop_equations(self) -> frozenset[int]:
        """Returns the equations inside of the loop over microbatches."""
        return frozenset(e.index for e in self.loop.inner)

    @_untimed
    def loop(self) -> Equation:
        """Returns the loop over microbatches of a step that has one."""
        index = self.pytrees.loop
        return next(e for e in self.program.body.equations if e.index == index)

    @_untimed
    def carried_arguments(self) -> dict[int, int]:
        """Flat argument -> the flat output that is its value for the next step."""
        inputs = enumerate(self.graph.inputs)
        return {k: given.output for k, given in inputs if given.output >= 0}

    @_untimed
    def input_paths(self) -> dict[int, str]:
        """Value of an input -> the path of the input in the arguments."""
        return {given.value: given.path for given in self.graph.inputs}

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits that depend on all operators, shapes and arguments."""
        return fingerprint(self.graph, self.contraction)

    @functools.cached_property
    def structure(self) -> str:
        """16 hex digits that stay the same when only the batch of the step changes."""
        return structure(self.graph, self.contraction)

    @functools.cached_property
    def trips(self) -> dict[int, float]:
        """Class of operators -> how often its operators run in a step, in total."""
        return class_trips(self.graph)

    @_untimed
    def fusion(self) -> Fusion:
        """Returns the values that are in memory after fusion."""
        return fusion(self.graph, frozenset(self.contraction.floating))

    def works(self, *, streamed: bool = False) -> dict[int, OperatorWork]:
        """Returns the work of the operators of each class with a choice of a sharding.

        Args:
          streamed: whether the compiler computes the operands of a product in bfloat16
            while the product reads them (`autopar.cluster.DeviceSpec.streams`).
        """
        return self.remember(("works", streamed), lambda: self._find_works(streamed))

    def _find_works(self, streamed: bool) -> dict[int, OperatorWork]:
        fused = self._streamed_fusion if streamed else self.fusion
        narrow = self.rounded_values if streamed else NOT_ROUNDED
        memory = in_memory(self.graph, fused, by_kernel=streamed, rounded=narrow)
        return {
            member: operator_work(self.graph, self.graph.operators[member], memory)
            for node in self.contraction.nodes
            for member in node.members
            if self.graph.operators[member].kind not in BOUNDARY
        }

    def work_table(self, *, streamed: bool = False) -> WorkTable:
        """`works` as arrays, for the same argument."""
        works, labels = self.works(streamed=streamed), self.dim_labels
        return self.remember(
            ("work table", streamed),
            lambda: work_table(works, self.contraction, labels, self.trips),
        )

    @_untimed
    def _streamed_fusion(self) -> Fusion:
        """`fusion` of a compiler that also fuses operators into products."""
        floating = frozenset(self.contraction.floating)
        return made_again(self.graph, floating, into_products=True)

    def with_operators(self, graph: OperatorGraph) -> Analysis:
        """Returns the analysis of the step with other numbers of runs of operators.

        Args:
          graph: the graph of the step. Its operators and values have the same numbers
            as in this analysis.
        """
        contraction = dataclasses.replace(
            self.contraction, producer=producers(graph.operators)
        )
        return dataclasses.replace(
            self,
            graph=graph,
            contraction=contraction,
            sources=collect(graph, contraction),
        )

    def life(self, habits: Habits = PLAIN) -> Lifetimes:
        """Returns the times at which values are computed and last read.

        Args:
          habits: the memory optimisations of the compiler
            (`autopar.cost.live.habits_of`).
        """
        known, masked = self._lives.get(habits), habits.masks_rows
        if known is None and self.programs is not None and habits.breadth_first:
            plain = self.life(dataclasses.replace(PLAIN, masks_rows=masked))
            known = self._lives[habits] = in_program_order(plain)
        if known is None:
            floating = frozenset(self.contraction.floating)
            fused = self.fusion
            if habits.into_products:
                fused = self._streamed_fusion
            elif habits.makes_again:
                fused = made_again(self.graph, floating)
            late = self._summing if habits.late_gradients else {}
            if habits.late_until_barrier:
                late = until_barriers(self.graph, late)
            written = fused.buffers
            copies = copies_in_orders(self.graph) if habits.keeps_orders else {}
            if habits.into_products:
                copies |= looked_up(self.graph, floating, fused)
            if habits.widens:
                written |= rounded_results(self.graph, floating)
            first = habits.breadth_first
            times = breadth_first(self.graph, written) if first else None
            known = lifetimes(
                self.graph, written, late, habits.late_gradients, copies, times
            )
            if first:
                known = made_early(known, self.graph, floating)
            known = dataclasses.replace(
                known,
                on_chip_bytes=habits.on_chip_bytes,
                tiled=habits.tiled,
                joined_sums=habits.joined_sums,
                placed=habits.placed,
                moves_sums=habits.moves_sums,
                ragged=ragged_copies(self.graph, known.time) if masked else {},
                widens=habits.widens,
                widened=find_widened(self.graph) if habits.widens else known.widened,
                rounded=self.rounded_values if habits.rounds else known.rounded,
            )
            if any(op.kind in PRODUCTS for op in self.graph.operators):
                room = habits.workspace_bytes
                known = dataclasses.replace(known, workspace_bytes=room)
            if habits.room[0]:
                prompt = self.life(
                    dataclasses.replace(habits, late_gradients=0, room=(0.0, 0.0))
                )
                where = self.independent.computations
                found = gaps(self.graph, known, prompt, where)
                known = dataclasses.replace(known, gaps=found, room=habits.room)
            self._lives[habits] = known
        return known

    @_untimed
    def rounded_values(self) -> Rounded:
        """Returns the values that compilers for TPUs keep or send in bfloat16."""
        equations = self.program.by_index()
        return find_rounded(self.graph, self.contraction, self.readings, equations)

    @_untimed
    def in_kernels(self) -> frozenset[int]:
        """Returns the values that hand-written kernels read and write."""
        kernels = [op for op in self.graph.operators if op.kernel is not None]
        arrays = (v for op in kernels for v in (*op.inputs, *op.outputs))
        return frozenset(v for v in arrays if v is not None)

    @_untimed
    def _lives(self) -> dict[Habits, Lifetimes]:
        return {}

    @_untimed
    def _gradients(self) -> dict[int, int]:
        """Returns the backward pass's products that compute gradients for the update.

        Some products compute gradients for which only the update waits. The dictionary
        maps each of these products to the last operator of its loop, or of the program
        if the product is in no loop.
        """
        kinds = {op.index for op in self.graph.operators if op.kind in PRODUCTS}
        return {k: end for k, end in self._summing.items() if k in kinds}

    @_untimed
    def _summing(self) -> dict[int, int]:
        """`_gradients`, and sums of elements over rows, such as gradients of scales."""
        return {
            op.index: self.independent.computations[op.index]
            for op in self.graph.operators
            if op.role is Role.BACKWARD and op.class_index in self.independent.summing
        }

    @_untimed
    def readings(self) -> Readings:
        """Returns the operands of operators, grouped by how they are resharded."""
        return readings(self.graph, self.contraction)

    @_untimed
    def independent(self) -> Independent:
        """Returns the operators whose collectives do not depend on each other."""
        return independent(self.graph, self.deferrals)

    @_untimed
    def followers(self) -> tuple[Operator, ...]:
        """Returns the update, and the operators that only the update waits for."""
        return followers(self.graph, self.independent.summing)

    @_untimed
    def ranks(self) -> np.ndarray:
        """The position of each operator if products that compute gradients run last.

        Compilers that overlap communication with computation run operators in this
        order.

        In this order, products that compute gradients run after the rest of the
        backward pass, at the end of their loop. These products keep their order among
        each other.
        """
        late, until = self._gradients, self.independent.computations
        last = behind(self.followers, late)
        keys = np.arange(len(self.graph.operators), dtype=float)
        for index in (*late, *last):
            keys[index] = until[index] + 0.5
        ranks = np.empty(len(keys), int)
        ranks[np.argsort(keys, kind="stable")] = np.arange(len(keys))
        return ranks

    @functools.cached_property
    def positions(self) -> Positions:
        """The pass of each operator, and where its sums over devices are complete."""
        return positions(self.graph, self.contraction, self.deferrals, self.trips)

    @_untimed
    def dim_labels(self) -> DimLabels:
        """Returns the dimensions and factors that grow with the batch."""
        return dim_labels(self.graph)

    @_untimed
    def node_labels(self) -> Labels:
        """The factors of nodes that grow with the batch or with the sequence."""
        return factor_labels(self.dim_labels, self.contraction)

    @functools.cached_property
    def poisoned_results(self) -> Poisoned:
        """The results that would not be finite if a gradient were not finite."""
        gradients = set[int]().union(*(d.gradients for d in self.deferrals))
        return find_poisoned(
            self.program,
            self.graph,
            gradients,
            frozenset(self.carried_arguments.values()),
        )

    @functools.cached_property
    def sums(self) -> Sums:
        """The sums over devices that complete the partial results of each class."""
        hoisted = [d for d in self.deferrals if d.hoisted]
        return sums_due(self.graph, self.contraction, hoisted)

    @_untimed
    def shared_sums(self) -> SharedSums:
        """Returns the sums over devices that a compiler may combine into one.

        Sums that are deferred past a loop are left out.
        """
        waiting = set[int]().union(*(d.members for d in self.deferrals if d.hoisted))
        found = [r for r in self.reassociations if waiting.isdisjoint(r.between)]
        return find_shared_sums(self.graph, found)

    @_untimed
    def shares(self) -> dict[int, float]:
        """Class -> the fraction of a combined sum that is charged to an operator."""
        return shares(self.graph, self.shared_sums)

    @_untimed
    def reassociations(self) -> tuple[Reassociation, ...]:
        """The additions of two sums over devices that a compiler may combine."""
        return reassociations(self.graph)

    @functools.cached_property
    def coded_gradients(self) -> CodedSums:
        """The gradients that a codec may compress, by the classes that contribute."""
        return coded_sums(self.graph, self.contraction, self.deferrals)

    @functools.cached_property
    def partial_runs(self) -> PartialRuns:
        """How often operators run on partial values whose sum follows a loop."""
        return partial_runs(self.graph, self.contraction, self.deferrals, self.trips)


def analyse(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    static: Collection[str] = (),
    roles: NamedRoles = NOT_NAMED,
) -> Analysis:
    """Traces a step and analyses its program.

    Args:
      step: the train step, in any of the forms of `autopar_passes.program.trace`.
      args: its arguments, arrays or ``ShapeDtypeStruct``s.
      kwargs: arguments by name.
      static: names of arguments whose values are constants of the program.
      roles: the roles of arguments, as the user names them.

    Raises:
      TraceError: JAX cannot trace the step.
      PlanError: the batch has no rows.
    """
    return analyse_call(step, open_arguments(step, args, kwargs, static, roles))


@collector_paused()
def analyse_call(step: Callable[..., Any], call: StepCall) -> Analysis:
    """Like `analyse`, for a call whose arrays have already been extracted."""
    start = time.perf_counter()
    say(f"tracing {step_name(step)}")
    check_has_rows(step, call)
    traced = trace_call(step, call)
    traced_at = time.perf_counter()
    made = analyse_program(
        traced.program, step_graph(traced), output_paths=traced.output_paths
    )
    structs = [struct_of(x) for x in call.arrays]
    return dataclasses.replace(
        made,
        traced=traced,
        origin=Origin(step, dataclasses.replace(call, arrays=structs)),
        trace_s=traced_at - start,
        graph_s=time.perf_counter() - traced_at,
    )


def analyse_again(
    base: Analysis,
    traced: TracedStep,
    start: float,
    *,
    same_inputs: bool = True,
    **changes: Any,
) -> Analysis:
    """Analyses another program of the same step.

    Args:
      base: the analysis of the program that was rewritten.
      traced: the other program.
      start: when the rewriting began, by `time.perf_counter`.
      same_inputs: whether the inputs keep the roles that they have in ``base``.
      changes: fields of the analysis whose values differ from those in ``base``.
    """
    graph = step_graph(traced, like=base.graph if same_inputs else None)
    made = analyse_program(traced.program, graph, output_paths=traced.output_paths)
    names = ("origin", "row_multiple", "spares", "remat")
    known: dict[str, Any] = {name: getattr(base, name) for name in names}
    return dataclasses.replace(
        made,
        traced=traced,
        trace_s=base.trace_s,
        graph_s=base.graph_s + time.perf_counter() - start,
        **(known | changes),
    )


def with_program(
    base: Analysis, program: Program, start: float, **changes: Any
) -> Analysis:
    """Analyses a program that replaces the current program of a step.

    The step stays split into microbatches, and keeps what earlier rewrites changed.

    Args:
      base: the analysis of the program that was rewritten.
      program: the other program.
      start: when the rewriting began, by `time.perf_counter`.
      changes: fields of the analysis whose values differ from those in ``base``.
    """
    names = ("split", "written", "offload", "on_devices")
    kept: dict[str, Any] = {name: getattr(base, name) for name in names}
    traced = dataclasses.replace(base.pytrees, program=program)
    whole = base.whole or base
    return analyse_again(base, traced, start, whole=whole, **(kept | changes))


def analyse_program(
    program: Program,
    graph: OperatorGraph,
    *,
    output_paths: Sequence[str] | None = None,
) -> Analysis:
    """Analyses a program, which need not come from a traced step.

    Args:
      program: the flat program.
      graph: its operator graph.
      output_paths: a readable path for each flat output; by default ``output0`` and so
        on.
    """
    contraction, count = contract(graph), len(graph.outputs)
    return Analysis(
        program=program,
        graph=graph,
        contraction=contraction,
        sources=collect(graph, contraction),
        deferrals=find_deferrals(program, graph),
        output_paths=tuple(output_paths or (f"output{k}" for k in range(count))),
    )
