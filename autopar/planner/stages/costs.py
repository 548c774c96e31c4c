"""Builds the problem of the stages: the cost of each layer on each submesh.

A *submesh* is a slice of the cluster with a mesh and layouts.

*Bytes* of layers are counted on one device, for each number of microbatches. A device
always holds parameters, optimizer moments and accumulated gradients. Activations are
arrays that the forward pass computes and the backward pass reads. An activation belongs
to the layer that reads it last. All other arrays are transient: they exist only while a
layer runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.cluster.specs import DeviceSpec, LinkSpec
from autopar.cost.combining import SUMS
from autopar.cost.estimate import messages_of, work_of
from autopar.cost.live import SUMS as HELD_SUMS
from autopar.cost.live import Live, habits_of, live
from autopar.cost.traffic import Collective, compiled_traffic, join_messages
from autopar.layouts.layout import shards
from autopar.planner.stages.boundaries import (
    NO_CODECS,
    Crossings,
    SearchCodecs,
    crossings,
    device_bytes,
    encoded,
)
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.submeshes import Submesh, batch_splits, divides
from autopar.steps.lifetimes import Lifetimes, in_program_order
from autopar_passes.graph.roles import InputRole, Role
from autopar_solver import (
    DeviceGroup,
    LayerCosts,
    Schedule,
    SharedParameter,
    StageProblem,
    SubmeshOption,
)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerBytes:
    """Bytes of example layers.

    Attributes:
      state: float64 ``[examples]``, bytes of parameters, moments and the batch. There
        is one entry for each example layer, which stands for all equal layers.
      gradients: ``[examples]``, gradients accumulated over microbatches.
      accumulated: ``[examples]``, bytes read and written to add the gradients of one
        microbatch to the accumulated gradients.
      activations: ``[examples, scales]``, bytes of arrays kept from the forward to the
        backward pass. A scale stands for a number of microbatches.
      transient: ``[examples, scales]``, further bytes while a layer runs.
    """

    state: np.ndarray
    gradients: np.ndarray
    accumulated: np.ndarray
    activations: np.ndarray
    transient: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BytesPricer:
    """Counts bytes of layers.

    Attributes:
      layers: the layers.
      scales: for each number of microbatches, the rows of a microbatch divided by the
        rows of the program.
    """

    layers: LayerMap
    scales: np.ndarray

    def price(self, submesh: Submesh) -> LayerBytes:
        """Returns the bytes of the example layers on a device of a submesh."""
        device = submesh.pricer.cluster.device
        found = live(submesh.assignment, device, self.life(device), self.around)
        grown = found.nbytes[:, None] * self.scales ** found.degrees[:, None]
        keeper = self.keepers(found)
        layers = self.layers
        activations = np.zeros((len(layers.examples), len(self.scales)))
        state = np.zeros(len(layers.examples))
        for layer, row in layers.row.items():
            activations[row] = grown[keeper == layer].sum(axis=0)
        producer = layers.analysis.contraction.producer
        for k in range(found.held):
            if found.kinds[k] != HELD_SUMS:
                layer = int(layers.layer[producer[int(found.values[k])].index])
                if layer in layers.row:
                    state[layers.row[layer]] += found.nbytes[k]
        rest = keeper < 0
        rest[: found.held] = False
        return LayerBytes(
            state,
            *self.gradients(submesh),
            found.factor * activations,
            found.factor * self.transient(found, rest, grown) + found.workspace_bytes,
        )

    def life(self, device: DeviceSpec) -> Lifetimes:
        """Returns the lifetimes of values.

        Products that compute gradients run in program order.
        """
        habits = dataclasses.replace(habits_of(device), late_gradients=0)
        analysis = self.layers.analysis
        if habits.breadth_first:
            return in_program_order(analysis.life())
        return analysis.life(habits)

    @functools.cached_property
    def around(self) -> tuple[int, ...]:
        """The operators that affect the lifetimes of values of the example layers.

        The lifetimes of a layer's values depend on the layer's operators, the readers
        of their results, and the producers of their inputs.
        """
        graph = self.layers.analysis.graph
        producer = self.layers.analysis.contraction.producer
        within = set(self.layers.operators)
        made = {v for k in within for v in graph.operators[k].outputs}
        out = set(within)
        for op in graph.operators:
            if op.kind != "return" and made.intersection(op.inputs):
                out.add(op.index)
        for k in within:
            op = graph.operators[k]
            if op.kind != "return":
                out.update(producer[v].index for v in op.inputs if v is not None)
        return tuple(sorted(out))

    def keepers(self, found: Live) -> np.ndarray:
        """For each array, the layer whose backward pass needs it; -1 if none does."""
        layers, graph = self.layers, self.layers.analysis.graph
        producer = layers.analysis.contraction.producer
        forward = {v for v, op in producer.items() if op.role is Role.FORWARD}
        roles = np.array([op.role is Role.BACKWARD for op in graph.operators])
        # A gathered array that the backward pass uses first is gathered again for it.
        waits = np.array([int(v) in forward for v in found.values], dtype=bool)
        waits &= roles[found.last] & ~roles[found.first]
        waits[: found.held] = False
        return np.where(waits, layers.layer[found.last], -1)

    def transient(
        self, found: Live, chosen: np.ndarray, grown: np.ndarray
    ) -> np.ndarray:
        """The most bytes of the chosen arrays at once while each example layer runs."""
        layers = self.layers
        out = np.zeros((len(layers.examples), len(self.scales)))
        change = np.zeros((found.length + 1, len(self.scales)))
        np.add.at(change, found.first[chosen], grown[chosen])
        last = np.minimum(found.last[chosen], found.length - 1)
        np.add.at(change, last + 1, -grown[chosen])
        usage = np.cumsum(change[: found.length], axis=0)
        for layer, row in layers.row.items():
            within = (layers.layer == layer) & layers.in_passes
            if within.any():
                out[row] = usage[within].max(axis=0)
        return out

    def gradients(self, submesh: Submesh) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of accumulated gradients, and bytes moved to add to them, by example
        layer.

        An accumulated gradient has the layout of the product that computes the
        gradient. The addition reads the product, and reads and writes the sum.
        Operators between the product and the sum are fused into the addition.
        """
        held = np.zeros(len(self.layers.examples))
        moved = np.zeros(len(self.layers.examples))
        assignment = submesh.assignment
        values = assignment.graph.values
        for value, maker in self.layers.gradients.items():
            layer = int(self.layers.layer[maker])
            if layer not in self.layers.row:
                continue
            op = assignment.graph.operators[maker]
            layout = assignment.home_layout(value)
            if op.class_index in assignment.contraction.node_of:
                layout = assignment.layout(op, op.rule.results[0])
            split = shards(layout, assignment.sizes)
            row = self.layers.row[layer]
            held[row] += values[value].nbytes / split
            made = values[op.outputs[0]].nbytes
            moved[row] += (made + 2 * values[value].nbytes) / split
        return held, moved


# Seconds of the layers on a submesh, for each number of microbatches.
#
# The work and the messages of a step (`autopar.cost.estimate`) are summed by layer, for
# the rows that a microbatch has. Of equal layers, only the example layer is computed.
#
# Communication that no operator waits for overlaps with the work of its own layer.
# Gathers of parameters overlap with the work of every microbatch. Sums of gradients
# overlap with the backward pass of the last microbatch.

# Columns of a table of seconds: what each second is spent on.
FORWARD, INPUT, WEIGHT, STEP, AGAIN = range(5)
_COLUMNS = 5


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSeconds:
    """Seconds of example layers, float64 ``[examples, scales]``.

    Attributes:
      forward: the forward pass of one microbatch.
      backward_input: the gradients that an earlier layer waits for.
      backward_weight: the other gradients.
      step: work done once a step.
      again: rematerialising the activations before the backward pass of a microbatch.
    """

    forward: np.ndarray
    backward_input: np.ndarray
    backward_weight: np.ndarray
    step: np.ndarray
    again: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class SecondsPricer:
    """Computes the seconds of layers.

    Attributes:
      layers: the layers.
      scales: rows of a microbatch divided by rows of the program, for each number of
        microbatches.
    """

    layers: LayerMap
    scales: np.ndarray

    def price(self, submesh: Submesh) -> LayerSeconds:
        """Returns the seconds of the example layers on a submesh."""
        shape = (_COLUMNS, len(self.layers.examples), len(self.scales))
        work, waiting, free = (np.zeros(shape) for _ in range(3))
        self._add_work(submesh, work)
        self._add_communication(submesh, waiting, free)
        known = submesh.pricer.cluster.device.corrections
        return _overlap(work, waiting, free, known.overlap, known.contention)

    def _add_work(self, submesh: Submesh, out: np.ndarray) -> None:
        work = work_of(submesh.assignment, submesh.pricer)
        table = work.table
        # The optimizer update takes the same time for any microbatch size.
        run_s = np.where(
            table.update[:, None], work.run_s(np.ones(1)), work.run_s(self.scales)
        )
        run_s += work.device.kernel_latency_s * table.kernels[:, None]
        row_of = {member: row for row, member in enumerate(table.operators.tolist())}
        places, trips = self._runs
        members = [row_of[member] for _, _, member in places]
        columns, rows = np.array([place[:2] for place in places], int).reshape(-1, 2).T
        np.add.at(out, (columns, rows), trips[:, None] * run_s[members])

    @functools.cached_property
    def _runs(self) -> tuple[list[tuple[int, int, int]], np.ndarray]:
        """Pairs the runs of operators with where their seconds are added.

        The function returns two parallel lists. The first has triples: column of the
        table of seconds, example layer, class of operators. The second has the number
        of runs of each triple.
        """
        layers = self.layers
        out: dict[tuple[int, int, int], float] = {}
        works = layers.analysis.works()
        for index in layers.operators:
            op = layers.analysis.graph.operators[index]
            if op.class_index not in works or layers.layer[index] < 0:
                continue
            row = layers.row[int(layers.layer[index])]
            for column in self._columns(index):
                place = column, row, op.class_index
                out[place] = out.get(place, 0.0) + op.trips
        return list(out), np.array(list(out.values()), float)

    def _add_communication(
        self, submesh: Submesh, waiting: np.ndarray, free: np.ndarray
    ) -> None:
        layers, assignment = self.layers, submesh.assignment
        found = self._collectives(submesh)
        sent = messages_of(assignment, submesh.pricer, [c for c, _ in found])
        # Sums of gradients have the same bytes for any microbatch size.
        each_s = np.where(
            sent.once[:, None], sent.planned_s[:, None], sent.seconds(self.scales)
        )
        for (c, layer), once, seconds in zip(
            found, sent.once.tolist(), each_s, strict=True
        ):
            summed = c.place is not None and c.step.kind in SUMS
            hides = c.place is not None and (summed or not once)
            for column in (STEP,) if once else self._columns(c.operator):
                (free if hides else waiting)[column, layers.row[layer]] += seconds

    def _columns(self, operator: int) -> tuple[int, ...]:
        """Returns the columns of the table to which an operator contributes."""
        again = self.layers.again(operator)
        return (self.layers.column(operator), AGAIN)[: 2 if again else 1]

    def _collectives(self, submesh: Submesh) -> list[tuple[Collective, int]]:
        """Returns the collectives of example layers, each with its layer.

        Message sizes are those of all layers: a collective shares its message with the
        collectives of equal layers.
        """
        layers = self.layers
        found = [
            (c, layers.layer_of(c.operator, c.value))
            for c in compiled_traffic(
                submesh.assignment, submesh.pricer, layers.operators
            )
        ]
        found = [(c, layer) for c, layer in found if layer in layers.row]
        times = np.bincount(layers.kept, minlength=layers.count)
        whole = [c for c, layer in found for _ in range(times[layer])]
        sent = join_messages(submesh.pricer, whole)
        middles = np.cumsum([0] + [int(times[layer]) for _, layer in found])
        return [
            (sent[(first + last) // 2], layer)
            for (_, layer), first, last in zip(
                found, middles[:-1].tolist(), middles[1:].tolist(), strict=True
            )
        ]


def _overlap(
    work: np.ndarray,
    waiting: np.ndarray,
    free: np.ndarray,
    share: float,
    contention: float,
) -> LayerSeconds:
    """Adds up the seconds of work and communication, which may partly overlap.

    Args:
      work: float64 ``[columns, examples, scales]``, seconds of work.
      waiting: seconds of communication that an operator waits for.
      free: seconds of communication that may overlap with work.
      share: fraction of the work that communication may overlap with.
      contention: seconds by which each second of overlapping communication lengthens
        the work.
    """
    saved = np.zeros_like(work)
    backward = work[INPUT] + work[WEIGHT]
    gathers = free[INPUT] + free[WEIGHT]
    beside = {
        FORWARD: np.minimum(free[FORWARD], share * work[FORWARD]),
        AGAIN: np.minimum(free[AGAIN], share * work[AGAIN]),
        STEP: np.minimum(free[STEP], np.maximum(0.0, share * backward - gathers)),
    }
    hidden = np.minimum(gathers, share * backward)
    part = np.divide(hidden, gathers, out=np.zeros_like(hidden), where=gathers > 0)
    beside[INPUT], beside[WEIGHT] = part * free[INPUT], part * free[WEIGHT]
    for column, seconds in beside.items():
        saved[column] = (1.0 - contention) * seconds
    total = work + waiting + free - saved
    return LayerSeconds(*total)


# Links between stages, and parameters that several layers read.


def between(cluster: Cluster, first: Submesh, second: Submesh) -> LinkSpec:
    """Returns the link between two stages: that of the outermost level.

    Levels of size one are ignored.

    The devices of the stages are not chosen yet, so some stages may be closer to each
    other than this link assumes.
    """
    if first.group != second.group:
        assert cluster.between is not None
        return cluster.between
    levels = (cluster.groups[first.group] if cluster.groups else cluster).levels
    several = [level for level in levels if level.size > 1]
    return (several or list(levels))[0].link


@dataclasses.dataclass(frozen=True, eq=False)
class SharedLayerParameter:
    """A parameter that several layers read in their forward pass.

    Attributes:
      value: the input.
      source: the first layer that reads the parameter, and holds it.
      target: another layer that reads the parameter.
    """

    value: int
    source: int
    target: int


def shared_parameters(layers: LayerMap) -> Iterator[SharedLayerParameter]:
    """The parameters that the forward passes of several layers read, directly or after
    a cast.

    The cost of sending small parameters is neglected.
    """
    flow, part = layers.parts.flow, layers.parts.part
    read: dict[int, set[int]] = {}
    for index in flow.equations:
        if flow.roles[index] is not Role.FORWARD or index not in part:
            continue
        for value in flow.equations[index].inputs:
            for given in flow.of_state.get(value, ()) if isinstance(value, int) else ():
                read.setdefault(given, set()).add(part[index])
    for given in layers.analysis.graph.inputs:
        found = sorted(read.get(given.value, ()))
        if given.role is InputRole.PARAMETER and len(found) > 1:
            for target in found[1:]:
                yield SharedLayerParameter(given.value, found[0], target)


# A submesh is left out if another submesh of the same size costs at most this many
# times as much in every measure (`Priced.measures`).
_WORSE = 1.01


@dataclasses.dataclass(frozen=True, eq=False)
class Priced:
    """The layers on one submesh.

    Attributes:
      submesh: the devices and layouts.
      seconds: of the example layers.
      nbytes: of the example layers.
      accumulate: float64 ``[examples]``, seconds of adding the gradients of one
        microbatch to the accumulated gradients.
      possible: ``[scales]``, whether the layouts can split the rows of a microbatch.
      sent: ``[layers - 1, scales]``, bytes of activations that each layer sends forward
        to the next.
      returned: ``[layers - 1, scales]``, bytes of cotangents that the next layer sends
        back to each layer.
      entering: ``[layers, scales]``, bytes of activations that each layer reads.
      encoded: by direction (forward, backward), the bytes of ``sent`` and ``returned``
        with codecs of cuts, and the seconds of encoding and decoding; empty without
        codecs.
    """

    submesh: Submesh
    seconds: LayerSeconds
    nbytes: LayerBytes
    accumulate: np.ndarray
    possible: np.ndarray
    sent: np.ndarray
    returned: np.ndarray
    entering: np.ndarray
    encoded: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    @property
    def measures(self) -> np.ndarray:
        """All costs of the submesh, as one flat array of measures."""
        s, n = self.seconds, self.nbytes
        found = [
            np.where(self.possible, table, np.inf)
            for table in (s.forward, s.backward_input, s.backward_weight, s.step)
        ]
        found += [n.state, n.gradients, n.activations, n.transient, self.sent]
        return np.concatenate([table.ravel() for table in found])


def price_layers(
    layers: LayerMap,
    found: Sequence[Submesh],
    scales: np.ndarray,
    codecs: SearchCodecs = NO_CODECS,
) -> list[Priced]:
    """Prices the layers on submeshes, and leaves out dominated submeshes.

    Args:
      layers: the layers.
      found: the submeshes.
      scales: rows of a microbatch divided by rows of the program, for each number of
        microbatches.
      codecs: the codecs of cuts.
    """
    seconds, nbytes = SecondsPricer(layers, scales), BytesPricer(layers, scales)
    across = crossings(layers)
    out = [_price_submesh(layers, s, scales, seconds, nbytes, across) for s in found]
    if codecs != NO_CODECS:
        ways = [(across.forward, False), (across.backward, True)]
        out = [
            dataclasses.replace(
                one,
                encoded=tuple(
                    encoded(
                        layers,
                        values,
                        one.submesh,
                        scales,
                        codecs.of(backward=backward),
                        masked=codecs.masked(backward=backward),
                    )
                    for values, backward in ways
                ),
            )
            for one in out
        ]
    return [one for k, one in enumerate(out) if not _is_dominated(out, k)]


def _price_submesh(
    layers: LayerMap,
    submesh: Submesh,
    scales: np.ndarray,
    seconds: SecondsPricer,
    nbytes: BytesPricer,
    across: Crossings,
) -> Priced:
    held = nbytes.price(submesh)
    bandwidth = submesh.pricer.cluster.device.memory_bandwidth_bytes_per_s
    sent, returned, entering = (
        device_bytes(layers, values, submesh, scales)
        for values in (across.forward, across.backward, across.entering)
    )
    splits = batch_splits(submesh.assignment)
    return Priced(
        submesh,
        seconds.price(submesh),
        held,
        held.accumulated / bandwidth,
        np.array([divides(splits, float(x)) for x in scales]),
        sent,
        returned,
        entering,
    )


def _is_dominated(found: Sequence[Priced], number: int) -> bool:
    """Whether another submesh of the same devices is about as good in each measure."""
    mine = found[number]
    key = (mine.submesh.group, mine.submesh.devices)
    for k, other in enumerate(found):
        if k == number or (other.submesh.group, other.submesh.devices) != key:
            continue
        a, b = other.measures, mine.measures
        if (a <= _WORSE * b).all() and (k < number or not (b <= _WORSE * a).all()):
            return True
    return False


def stage_problem(
    layers: LayerMap,
    cluster: Cluster,
    found: Sequence[Priced],
    microbatches: Sequence[int],
    schedules: Sequence[Schedule],
    max_stages: int | None = None,
    *,
    alone_again: bool = True,
    optional_codecs: bool = False,
) -> StageProblem:
    """Returns the problem that `autopar_solver.solve_stages` solves.

    Args:
      layers: the layers.
      cluster: the devices.
      found: the submeshes with their prices.
      microbatches: the numbers of microbatches, one for each scale of the prices.
      schedules: the allowed schedules.
      max_stages: the most stages; None: no limit.
      alone_again: whether stages on more than half of the devices may rematerialise
        activations. False makes sure that a choice of one stage can become a plan,
        because a plan of one stage cannot rematerialise in this way.
      optional_codecs: whether values are sent exactly where this is faster than with
        the codecs of the prices.
    """
    groups = tuple(
        DeviceGroup(devices=part.num_devices, memory_bytes=float(part.memory_bytes))
        for part in cluster.groups or (cluster,)
    )
    ends = _link_ends(found)
    options = tuple(
        SubmeshOption(
            group=one.submesh.group,
            devices=one.submesh.devices,
            link=end,
            name=one.submesh.name,
        )
        for one, end in zip(found, ends, strict=True)
    )
    links = _Links(cluster, found, ends, optional_codecs)
    again = np.array(
        [alone_again or 2 * o.devices <= cluster.num_devices for o in options]
    )
    return StageProblem(
        name="stages",
        groups=groups,
        options=options,
        costs=tuple(
            _layer_costs(layers, found, links, k, count, again)
            for k, count in enumerate(microbatches)
        ),
        schedules=tuple(schedules),
        shared=_shared_parameters(layers, cluster, found),
        max_stages=max_stages,
    )


def with_copied_layers(
    problem: StageProblem, layers: LayerMap, cluster: Cluster, found: Sequence[Priced]
) -> StageProblem:
    """The problem in which stages get the state of their layers from other stages.

    A stage with several chunks runs layers that are not consecutive, but it holds
    consecutive layers of stacked arrays. So layers are sent to the stages that run them
    before the microbatches, and sent back after the update, and a stage holds two
    copies. How many layers are sent depends on the number of stages. The costs assume
    that all are sent.

    Args:
      problem: the problem, with the costs of stages whose layers stay in place.
      layers: the layers.
      cluster: the devices.
      found: the submeshes with their prices.
    """
    state = layers.spread(np.stack([one.nbytes.state for one in found], 1))
    links = [between(cluster, one.submesh, one.submesh) for one in found]
    sent_s = 2 * state / np.array([link.bandwidth_bytes_per_s for link in links])
    costs = tuple(
        dataclasses.replace(
            own, step_s=own.step_s + sent_s, resident_bytes=own.resident_bytes + state
        )
        for own in problem.costs
    )
    return dataclasses.replace(problem, costs=costs)


def _link_ends(found: Sequence[Priced]) -> list[int]:
    """Numbers the submeshes, equal numbers for those that send equal bytes."""
    known: dict[object, int] = {}
    out: list[int] = []
    for one in found:
        key = (one.submesh.group, one.sent.tobytes(), one.returned.tobytes())
        out.append(known.setdefault(key, len(known)))
    return out


class _Links:
    """Seconds and latencies of links between numbered submeshes (`_link_ends`)."""

    def __init__(
        self,
        cluster: Cluster,
        found: Sequence[Priced],
        ends: Sequence[int],
        optional_codecs: bool,
    ) -> None:
        """Computes bandwidth and latency for one submesh of each number."""
        self.optional_codecs = optional_codecs
        first = dict(zip(reversed(ends), reversed(found), strict=True))
        self.examples = [first[end] for end in range(len(first))]
        count = len(self.examples)
        self.rate = np.zeros((count, count))
        self.latency = np.zeros((count, count))
        for a, source in enumerate(self.examples):
            for b, target in enumerate(self.examples):
                link = between(cluster, source.submesh, target.submesh)
                self.rate[a, b] = link.bandwidth_bytes_per_s
                self.latency[a, b] = link.latency_s

    def seconds(self, scale: int, *, backward: bool) -> np.ndarray:
        """Returns the seconds for which a link is busy, at the end with more bytes.

        The shape is ``[layers - 1, numbers, numbers]``.
        """
        every = [e.returned if backward else e.sent for e in self.examples]
        exact = _larger(every, scale) / self.rate[None]
        if not self.examples[0].encoded:
            return exact
        coded = [e.encoded[1 if backward else 0] for e in self.examples]
        seconds = _larger([nbytes for nbytes, _ in coded], scale) / self.rate[None]
        seconds = seconds + _larger([coding_s for _, coding_s in coded], scale)
        return np.minimum(exact, seconds) if self.optional_codecs else seconds


def _larger(tables: Sequence[np.ndarray], scale: int) -> np.ndarray:
    """The larger of the values of two ends, ``[layers - 1, numbers, numbers]``."""
    found = np.stack([table[:, scale] for table in tables], 1)
    return np.maximum(found[:, :, None], found[:, None, :])


def _layer_costs(
    layers: LayerMap,
    found: Sequence[Priced],
    links: _Links,
    scale: int,
    microbatches: int,
    again: np.ndarray,
) -> LayerCosts:
    """Returns the costs at one number of microbatches.

    Args:
      layers: the layers.
      found: the submeshes with their prices.
      links: seconds of the links between submeshes.
      scale: index of the number of microbatches among the scales of the prices.
      microbatches: the number of microbatches.
      again: bool ``[options]``, whether layers may rematerialise activations.
    """
    several = 1.0 if microbatches > 1 else 0.0

    def table(rows: Sequence[np.ndarray]) -> np.ndarray:
        """Expands rows of example layers, one row per submesh, to ``[layers,
        options]``.
        """
        return layers.spread(np.stack(rows, 1))

    possible = np.array([one.possible[scale] for one in found])
    forward = table([one.seconds.forward[:, scale] for one in found])
    return LayerCosts(
        microbatches=microbatches,
        forward_s=np.where(possible[None], forward, np.inf),
        backward_input_s=table([o.seconds.backward_input[:, scale] for o in found]),
        backward_weight_s=table(
            [
                o.seconds.backward_weight[:, scale] + several * o.accumulate
                for o in found
            ]
        ),
        step_s=table([one.seconds.step[:, scale] for one in found]),
        resident_bytes=table(
            [one.nbytes.state + several * one.nbytes.gradients for one in found]
        ),
        activation_bytes=table([one.nbytes.activations[:, scale] for one in found]),
        boundary_bytes=np.stack([one.entering[:, scale] for one in found], 1),
        recompute_s=np.where(
            again[None], table([one.seconds.again[:, scale] for one in found]), np.inf
        ),
        transient_bytes=table([one.nbytes.transient[:, scale] for one in found]),
        forward_link_s=links.seconds(scale, backward=False),
        backward_link_s=links.seconds(scale, backward=True),
        latency_s=links.latency,
    )


def _shared_parameters(
    layers: LayerMap, cluster: Cluster, found: Sequence[Priced]
) -> tuple[SharedParameter, ...]:
    """Returns the parameters that several layers read, such as tied embeddings."""
    out: list[SharedParameter] = []
    for shared in shared_parameters(layers):
        held = np.array([_held_bytes(one.submesh, shared.value) for one in found])
        rates = np.array(
            [
                between(cluster, one.submesh, one.submesh).bandwidth_bytes_per_s
                for one in found
            ]
        )
        out.append(
            SharedParameter(
                source=shared.source,
                target=shared.target,
                step_s=held / rates,
                copy_bytes=held,
            )
        )
    return tuple(out)


def _held_bytes(submesh: Submesh, value: int) -> float:
    assignment = submesh.assignment
    nbytes = float(assignment.graph.values[value].nbytes)
    if value not in assignment.contraction.homes:
        return nbytes
    return nbytes / shards(assignment.home_layout(value), assignment.sizes)
