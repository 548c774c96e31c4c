"""Converts the solution of a planning problem to layouts of operands and results.

*All-gathers over all devices of a TPU slice* are stated in a form that the compiler
does not change. On slices of 64 chips or more, XLA's TPU compiler turns an all-gather
over all devices into an all-reduce: each device pads its shard with zeros, and twice
the bytes are sent. On v5e the compiler does so for results up to 16 MiB, on v5p for any
size (libtpu 0.0.42; slices of 8 to 256 chips, float32 and bfloat16, either dimension,
arrays of .25 MiB to 1 GiB). It does not change an all-gather along one dimension of the
torus. So the program gathers over one mesh axis at a time. Gathering axis by axis sends
the same bytes as a single all-gather, so the cost model prices a single one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from autopar.cluster.specs import DeviceSpec
from autopar.layouts.gathering import CodedGather, GatherCodec, coded_gather
from autopar.layouts.layout import Axes, Layout, ReshardStep, reshard_steps
from autopar.layouts.stacking import (
    SCATTER,
    Stacking,
    stack_between,
    stacking_of,
    whole_rows,
)
from autopar.layouts.strategies import Copy, Mode, Strategy, layout_of, partial_axes
from autopar.steps.analysis import Analysis
from autopar.steps.independence import Independent
from autopar.steps.nodes import Contraction
from autopar.steps.uses import ValueClass, node_dims, required_values, value_class
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.replay.values import LayoutRoute
from autopar_passes.rules.factor_rule import Dims
from autopar_passes.sums.finish import Sum
from autopar_passes.sums.stacked import Deferral

# Sums over devices that a planned program writes as explicit collectives.


def written_sums(
    start: Layout, steps: Sequence[ReshardStep], kept: Layout | None = None
) -> tuple[Sum, ...]:
    """Returns the sums over devices that a program must state for a resharding.

    The result is empty if the compiler inserts the sums itself.

    XLA inserts a sum over one axis itself, as planned. On some platforms XLA cuts a sum
    over several axes into other collectives than those of the plan
    (`autopar_passes.sums.finish`).

    Args:
      start: the layout before the steps.
      steps: from `reshard_steps`.
      kept: if readers use only slices of the result of the last step, the layout of
        these slices (`kept_slices`); None if readers use more.
    """
    out: list[Sum] = []
    layout = start
    for step in steps:
        if step.kind == "reduce_scatter":
            out += _scatters(layout, step.layout)
        elif step.kind == "all_reduce":
            split = [] if kept is None else _scatters(layout, kept)
            left = set(step.axes).difference(*(s.axes for s in split))
            out += split
            if left:
                layout = kept or step.layout
                out.append(Sum(tuple(sorted(left)), None, layout))
        layout = step.layout
    return tuple(out) if sum(len(s.axes) for s in out) > 1 else ()


def _scatters(before: Layout, after: Layout) -> list[Sum]:
    """The reduce-scatters between two layouts: one for each additional axis of a
    dimension.
    """
    out: list[Sum] = []
    layout = before
    for dim, (have, want) in enumerate(zip(before, after, strict=True)):
        for end in range(len(have), len(want)):
            layout = (*layout[:dim], want[: end + 1], *layout[dim + 1 :])
            out.append(Sum((want[end],), dim, layout))
    return out


def kept_slices(
    ways: Collection[tuple[Sequence[ReshardStep], bool]], axes: Axes
) -> Layout | None:
    """Returns the layout of the slice with which the resharding to every reader begins.

    Args:
      ways: the resharding to each reader (`Assignment.fetch_steps`).
      axes: the mesh axes that may split the slice.

    Returns:
      The layout; None if some reader takes the array unchanged, or takes another slice.
    """
    layout: Layout | None = None
    if not ways or any(fresh for _, fresh in ways):
        return None
    for k in itertools.count():
        following = {steps[k] if k < len(steps) else None for steps, _ in ways}
        step = following.pop()
        if following or step is None or step.kind != "slice":
            return layout
        if not set(axes).issuperset(step.axes):
            return layout
        layout = step.layout
    return None


# The resharding steps to a reader's layout, and whether they make a new copy for the
# backward pass.
Way = tuple[tuple[ReshardStep, ...], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class CopyChoice:
    """The layout of a copy that several readers share.

    ``reuse`` says whether the backward pass uses the forward copy again.
    """

    layout: Layout
    reuse: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """Strategies of all nodes and copies of one graph (a `LayoutPlan`).

    Attributes:
      analysis: the program.
      sizes: size of each mesh axis.
      strategies: the strategy of each node.
      copies: (value class, whether backward readers use the copy) -> the choice of the
        copy.
      codecs: value at which a postponed sum is computed -> the codec of the sum, as
        text. Other values are summed without a codec.
      waiting: values without a codec whose sum is postponed too, because an operator
        reads their partial sums.
      settled: values whose postponed sum has been computed already, so that they are no
        longer partial.
      sums_each_microbatch: whether gradients are summed over devices in each
        microbatch, so that they are stored sharded. If False, gradients whose sum can
        be postponed are summed once a step.
      apart_bytes: arrays of at most this many bytes are gathered over all devices axis
        by axis (`autopar.layouts.assignment`).
      replicas: the mesh axes of the replicas that share the microbatches; they split no
        array. (): every device runs all microbatches.
      gathers: value class -> the codec with which its values are gathered. Other values
        are gathered as they are.
      gathered: nodes of attention kernels that gather keys and values over the devices
        that split the sequence. Other such kernels pass them around a ring.
      graph: the graph of the analysis.
      contraction: the contraction of the analysis.
    """

    analysis: Analysis
    sizes: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    copies: dict[tuple[ValueClass, bool], CopyChoice]
    codecs: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    waiting: frozenset[int] = frozenset()
    settled: frozenset[int] = frozenset()
    sums_each_microbatch: bool = False
    apart_bytes: float = 0.0
    replicas: Axes = ()
    gathers: dict[ValueClass, GatherCodec] = dataclasses.field(
        default_factory=dict[ValueClass, GatherCodec]
    )
    gathered: frozenset[int] = frozenset()
    # Copies of fields of the analysis, because they are read for every operator.
    graph: OperatorGraph = dataclasses.field(init=False, repr=False)
    contraction: Contraction = dataclasses.field(init=False, repr=False)
    # Cached results by operator class, because every repeated layer needs the same
    # results. A changed assignment starts with an empty cache.
    _known: dict[tuple[object, ...], Any] = dataclasses.field(
        default_factory=dict[tuple[object, ...], Any],
        init=False,
        compare=False,
        repr=False,
    )

    def __post_init__(self) -> None:
        """Copies the graph and its nodes from the analysis."""
        object.__setattr__(self, "graph", self.analysis.graph)
        object.__setattr__(self, "contraction", self.analysis.contraction)

    def _memo(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found

    def home_layout(self, value: int) -> Layout:
        """Returns the layout in which a value is kept for its readers."""
        home = self.contraction.homes.get(value)
        if home is None:
            return ((),) * len(self.graph.values[value].shape)
        return self._memo(
            ("home", home.node, home.dims),
            lambda: layout_of(self.strategies[home.node], home.dims),
        )

    def layout(self, op: Operator, dims: Dims) -> Layout:
        """The layout of an operand or result under the operator's own strategy."""
        node = self.contraction.node_of[op.class_index]
        return self._memo(
            ("layout", op.class_index, dims),
            lambda: layout_of(
                self.strategies[node], node_dims(self.contraction, op, dims)
            ),
        )

    def works_as(self, op: Operator) -> Strategy:
        """Returns the axes that split each factor of a node while it computes.

        Axes over which the result is partial are left out: on each device, the summand
        has the full size of the result.
        """
        strategy = self.strategies[self.contraction.node_of[op.class_index]]
        held = next((h for v in op.outputs if (h := self.stackings.get(v))), None)
        if held is None or op.index in held.deferral.contributions:
            return strategy
        return held.strip(strategy)

    def partial(self, op: Operator) -> Axes:
        """Returns the axes over which an operator's results are partial."""
        return self._memo(("partial", op.class_index), lambda: self._partial(op))

    def _partial(self, op: Operator) -> Axes:
        node = self.contraction.node(op)
        return partial_axes(self.strategies[node.index], node.factors_reduced(op))

    def _summed_axes(self, op: Operator, slot: int) -> Axes:
        """Returns the axes over which an operator itself sums a result."""
        node = self.contraction.node(op)
        return partial_axes(self.strategies[node.index], node.summed_factors(op)[slot])

    def partial_of(self, op: Operator) -> Axes:
        """Like `partial`, but () for an operator without a node."""
        has = op.class_index in self.contraction.node_of
        return self.partial(op) if has else ()

    def operand(self, op: Operator, slot: int) -> Layout | None:
        """See `LayoutPlan`."""
        if op.class_index not in self.contraction.node_of:
            return None
        layout = self.layout(op, op.rule.operands[slot])
        if self.stackings and op.outputs and op.kind != "carry":
            partial = self.stackings.get(op.outputs[0])
            if partial is not None and op.index not in partial.deferral.contributions:
                return partial.strip(layout)
        return layout

    def gathers_keys(self, op: Operator) -> bool:
        """See `LayoutPlan`."""
        return self.contraction.node_of.get(op.class_index) in self.gathered

    def results(self, op: Operator, slot: int) -> tuple[Layout, ...]:
        """See `LayoutPlan`."""
        if not self.graph.values[op.outputs[slot]].shape:
            return ()
        if op.class_index not in self.contraction.node_of:
            return ()
        own = self.layout(op, op.rule.results[slot])
        steps = self.result_steps(op, slot)
        layouts = self._stated_layouts(op.outputs[slot], own, steps)
        return (own, *(layout for layout in layouts if layout != own))

    def result_steps(self, op: Operator, slot: int) -> tuple[ReshardStep, ...]:
        """Returns the collectives between an operator and the home of its result."""
        key = ("result", op.class_index, slot)
        return self._memo(key, lambda: self._result_steps(op, slot))

    def _result_steps(self, op: Operator, slot: int) -> tuple[ReshardStep, ...]:
        own = self.layout(op, op.rule.results[slot])
        if op.rule.sums:
            return reshard_steps(
                own, own, self._summed_axes(op, slot), "all", self.sizes
            )
        home = self.home_layout(op.outputs[slot])
        kind = op.rule.reduction
        if op.outputs[slot] not in self.contraction.homes:
            home = own
        if self.contraction.node(op).kind != "contraction":
            kind = "all"
        partial = self.stackings.get(op.outputs[slot])
        if partial is not None:
            start, end = partial.strip(own), partial.strip(home)
            return reshard_steps(start, end, (), "", self.sizes)
        return reshard_steps(own, home, self.partial(op), kind, self.sizes)

    @property
    def independent(self) -> Independent:
        """The operators whose collectives do not wait for other collectives."""
        return self.analysis.independent

    @property
    def stackings(self) -> dict[int, Stacking]:
        """The values that stay partial under this plan, each with its stacking."""
        return self._memo(("stackings",), self._stackings)

    def _stackings(self) -> dict[int, Stacking]:
        # The check of the deferrals reads layouts, which depend on the result of the
        # check. Until the result is known, no value counts as partial.
        self._known["stackings",] = {}
        found: dict[int, Stacking] = {}
        for d in self.analysis.deferrals:
            sent = any(v in self.codecs or v in self.waiting for v in d.ends)
            waits = sent or (d.hoisted and not self.sums_each_microbatch)
            found |= self.stack(d, waits=waits)
        self._known.clear()
        return found

    def stack(self, deferral: Deferral, *, waits: bool = True) -> dict[int, Stacking]:
        """Returns the values of a deferral that stay partial, each with its stacking.

        Args:
          deferral: a deferral of the analysis.
          waits: whether its sum over devices may wait if the layouts allow it. Sums
            over replicas always wait for the end of the loop over microbatches.
        """
        each = bool(self.replicas) and deferral.hoisted and self.sums_each_microbatch
        within = stacking_of(self, deferral) if waits and not each else None
        found = {} if within is None else within.whole
        if not self.replicas:
            return found
        loop, inside = self.analysis.loop, self.analysis.loop_equations
        return found | stack_between(
            self, deferral, within, self.replicas, loop.outputs, inside
        )

    def partial_layout(self, value: int) -> tuple[Axes, Layout] | None:
        """See `LayoutPlan`."""
        held = None if value in self.settled else self.stackings.get(value)
        return held and (held.axes, held.strip(self.home_layout(value)))

    def due(self, value: int) -> tuple[Layout, ...] | None:
        """See `LayoutPlan`."""
        held = self.stackings.get(value)
        if held is None or value not in held.deferral.ends or value in self.settled:
            return None
        home = self.home_layout(value)
        start = held.strip(home)
        layouts = (start, *self._stated_layouts(value, start, self.due_steps(value)))
        return tuple(dict.fromkeys(layouts))

    def sums(self, value: int, *, handed: bool = False) -> tuple[Sum, ...]:
        """See `LayoutPlan`: sums over several axes (`autopar_passes.sums.finish`)."""
        if value in self.stackings:
            start = self.stackings[value].strip(self.home_layout(value))
            steps = self.due_steps(value) if self.due(value) is not None else ()
        else:
            op = self.contraction.producer[value]
            if op.class_index not in self.contraction.node_of:
                return ()
            if op.kind == SCATTER and not self._scatters_apart(op):
                return ()
            slot = op.outputs.index(value)
            start = self.layout(op, op.rule.results[slot])
            steps = self.result_steps(op, slot)
        kept = None
        if steps and steps[-1].kind == "all_reduce" and not handed:
            kept = kept_slices(self._ways_of().get(value, set()), steps[-1].axes)
        return written_sums(start, steps, kept)

    def _scatters_apart(self, op: Operator) -> bool:
        """Whether a scatter's result is the sum of the results on all devices.

        In this case each device scatters its own updates into an array of zeros.
        """
        makers: frozenset[int] = self._memo(
            ("makers",),
            lambda: frozenset(
                m for d in self.analysis.deferrals for m in d.contributions
            ),
        )
        return op.index in makers and whole_rows(self, op)

    def _ways_of(self) -> dict[int, set[Way]]:
        """Returns the reshardings of each value with a layout to its readers."""
        return self._memo(("ways of",), self._list_ways)

    def _list_ways(self) -> dict[int, set[Way]]:
        out: dict[int, set[Way]] = {}
        for readings in self.analysis.readings.of:
            for reading in readings:
                ways = self.ways[reading.group]
                for source, way in zip(reading.sources, ways, strict=True):
                    out.setdefault(source, set()).add(way)
        operators = self.graph.operators
        backward = bool(operators) and self.is_backward(operators[-1])
        for position, value in enumerate(self.graph.outputs):
            layout = self.output(position)
            if value is not None and layout is not None:
                for source, wanted in self.required_layouts(value, layout):
                    way = self.fetch_steps(source, wanted, backward)
                    out.setdefault(source, set()).add(way)
        return out

    def due_steps(self, value: int) -> tuple[ReshardStep, ...]:
        """Returns the collectives of a postponed sum."""
        held = self.stackings[value]
        home = self.home_layout(value)
        return reshard_steps(held.strip(home), home, held.axes, "sum", self.sizes)

    def floating(self, value: int) -> bool:
        """See `LayoutPlan`."""
        return value in self.contraction.floating

    def output(self, position: int) -> Layout | None:
        """See `LayoutPlan`: carried state is returned in its input layout, other
        results in their own layout.
        """
        value = self.graph.outputs[position]
        if value is None:
            return None
        carried: dict[int, int] = self._memo(
            ("carried",),
            lambda: {i.output: i.value for i in self.graph.inputs if i.output >= 0},
        )
        return self.home_layout(carried.get(position, value))

    def is_backward(self, op: Operator) -> bool:
        """See `LayoutPlan`."""
        return op.role is not Role.FORWARD or op.kind == "return"

    def route(self, value: int, layout: Layout, backward: bool) -> LayoutRoute:
        """See `LayoutPlan`."""
        steps, fresh = self.fetch_steps(value, layout, backward)
        # The program also states the home layout, because the compiler could otherwise
        # choose any layout in between.
        layout = self.home_layout(value)
        stated, gathers = [layout] if fresh else [], dict[int, CodedGather]()
        for step in steps:
            gather = self.coded_gather(value, layout, step)
            if gather is None:
                stated += self._stated_layouts(value, layout, (step,))
            else:
                gathers[len(stated)] = gather
                stated.append(step.layout)
            layout = step.layout
        return LayoutRoute(tuple(stated), fresh, gathers)

    def coded_gather(
        self, value: int, before: Layout, step: ReshardStep
    ) -> CodedGather | None:
        """The gather of codes for a step of a value's resharding; None: it is exact.

        Args:
          value: the value.
          before: the layout before the step.
          step: the step.
        """
        if not self.gathers:
            return None
        chosen = self.gathers.get(value_class(self.contraction, value))
        if chosen is None:
            return None
        known = self.graph.values[value]
        shape, dtype = tuple(known.shape), str(known.dtype)
        return coded_gather(chosen, shape, dtype, before, step, self.sizes)

    def _stated_layouts(
        self, value: int, start: Layout, steps: tuple[ReshardStep, ...]
    ) -> tuple[Layout, ...]:
        nbytes = self.graph.values[value].nbytes
        return stated_layouts(start, steps, self.sizes, nbytes, self.apart_bytes)

    def required_layouts(self, value: int, layout: Layout) -> list[tuple[int, Layout]]:
        """The values with a home that ``value`` is computed from, and the layouts that
        they need.
        """
        return required_values(self.graph, self.contraction, value, layout)

    @property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The resharding steps (`fetch_steps`) of each part of each group of readings.

        The groups are those of `autopar.steps.uses.Readings`. All readings of a group
        need the same resharding steps.
        """
        return self._memo(("ways",), self._ways)

    def _ways(self) -> tuple[tuple[Way, ...], ...]:
        out: list[tuple[Way, ...]] = []
        for group in self.analysis.readings.groups:
            op = group.operator
            layout = self.layout(op, op.rule.operands[group.slot])
            backward = self.is_backward(op)
            out.append(
                tuple(
                    self.fetch_steps(source, _layout_of_part(layout, dims), backward)
                    for source, dims in group.parts
                )
            )
        return tuple(out)

    def fetch_steps(self, value: int, layout: Layout, backward: bool) -> Way:
        """The steps from a value's home layout, through its copy, to a reader's layout.

        The function also returns whether this resharding writes a new copy for the
        backward pass.
        """
        home = self.home_layout(value)
        if value not in self.contraction.homes or layout == home:
            return (), False
        key = value_class(self.contraction, value)
        choice = self.copies.get((key, backward))
        if choice is None:
            return reshard_steps(home, layout, (), "", self.sizes), False
        steps = (
            *reshard_steps(home, choice.layout, (), "", self.sizes),
            *reshard_steps(choice.layout, layout, (), "", self.sizes),
        )
        anew = backward and not choice.reuse and (key, False) in self.copies
        return steps, anew and any(s.kind != "slice" for s in steps)


def _layout_of_part(layout: Layout, dims: Dims) -> Layout:
    """The layout of a part of an operand (`autopar.steps.uses.ReadingGroup`)."""
    return tuple(layout[d[0]] if d else () for d in dims)


def assign(
    analysis: Analysis,
    sizes: tuple[int, ...],
    strategies: Sequence[Strategy],
    copies: Sequence[tuple[Copy, int]],
    codecs: dict[int, str] | None = None,
) -> Assignment:
    """Makes an assignment from strategies and the chosen strategy of each copy."""
    chosen = {
        (c.value_class, c.backward): CopyChoice(
            layout_of(c.space.strategies[k], c.dims), c.modes[k] is Mode.REUSE
        )
        for c, k in copies
    }
    return Assignment(analysis, sizes, tuple(strategies), chosen, codecs or {})


def unsplit(analysis: Analysis, sizes: Sequence[int]) -> Assignment:
    """The assignment in which every device computes the whole step without sharding."""
    nodes = analysis.contraction.nodes
    whole = tuple(((),) * len(node.factors) for node in nodes)
    return Assignment(analysis, tuple(sizes), whole, {})


_DEVICES = 64
_ONE_CORE_BYTES = 16 * 2**20


def apart_bytes(device: DeviceSpec, devices: int) -> float:
    """Returns the most bytes of arrays that are gathered axis by axis.

    An array of at most so many bytes must not be gathered over all devices in one
    collective.
    """
    if device.kind != "tpu" or devices < _DEVICES:
        return 0.0
    # Only device specs of chips with one core (v5e) have `on_chip_bytes`.
    return _ONE_CORE_BYTES if device.on_chip_bytes else math.inf


def stated_layouts(
    start: Layout,
    steps: Sequence[ReshardStep],
    sizes: Sequence[int],
    nbytes: float,
    most_bytes: float,
) -> tuple[Layout, ...]:
    """Returns the layouts that a program states for a resharding.

    Args:
      start: the layout before the steps.
      steps: from `reshard_steps`.
      sizes: size of each mesh axis.
      nbytes: bytes of the whole array.
      most_bytes: from `apart_bytes`.
    """
    out: list[Layout] = []
    layout = start
    for step in steps:
        whole = math.prod(sizes[a] for a in step.axes) == math.prod(sizes)
        small = nbytes * step.fraction <= most_bytes
        if step.kind == "all_gather" and whole and small:
            out += _by_axis(layout, step.layout)
        else:
            out.append(step.layout)
        layout = step.layout
    return tuple(out)


def _by_axis(before: Layout, after: Layout) -> Iterator[Layout]:
    """Removes the axes of the gathered dimension one by one, the last axis first."""
    (dim,) = (d for d, axes in enumerate(before) if axes != after[d])
    for end in range(len(before[dim]) - 1, len(after[dim]) - 1, -1):
        yield (*before[:dim], before[dim][:end], *before[dim + 1 :])


# The layouts in which values without a home pass from one program to the next.


def kept_layout(assignment: Assignment, value: int) -> Layout:
    """Returns the layout in which a value is kept at the end of a program.

    A value with a home keeps its home layout. A value without a home normally takes the
    layout of its reader. At the end of a program such a value keeps the layout of the
    values that it is computed from, so that nothing is gathered.

    Args:
      assignment: the layouts of the program that computes the value.
      value: the value.
    """
    return _kept_layout(assignment, value, {})


def _kept_layout(
    assignment: Assignment, value: int, known: dict[int, Layout]
) -> Layout:
    contraction = assignment.contraction
    if value in contraction.homes or value not in contraction.floating:
        return assignment.home_layout(value)
    if value not in known:
        known[value] = _result_layout(assignment, value, known)
    return known[value]


def _result_layout(
    assignment: Assignment, value: int, known: dict[int, Layout]
) -> Layout:
    """Returns the layout that an element-wise operator gives its result."""
    op = assignment.contraction.producer[value]
    axes_of: dict[int, tuple[int, ...]] = {}
    used: set[int] = set()
    for operand, dims in zip(op.inputs, op.rule.operands, strict=True):
        if operand is None:
            continue
        for factors, axes in zip(
            dims, _kept_layout(assignment, operand, known), strict=True
        ):
            if len(factors) != 1 or used.intersection(axes) or factors[0] in axes_of:
                continue
            parts = math.prod(assignment.sizes[a] for a in axes)
            if axes and op.rule.sizes[factors[0]] % parts == 0:
                axes_of[factors[0]] = axes
                used.update(axes)
    slot = op.outputs.index(value)
    return tuple(
        axes_of.get(factors[0], ()) if len(factors) == 1 else ()
        for factors in op.rule.results[slot]
    )
