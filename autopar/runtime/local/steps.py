"""Local steps: each replica trains alone, and all synchronise once in several steps.

Between slow links, a sum of gradients in every step may take longer than the step. With
local steps, the devices on one side of the slow links are a *replica*. A replica runs
the step on its own part of the batch, with a state of its own, under a plan for its own
devices. Nothing crosses the slow links in such a step. Once in H steps, an outer step
joins the replicas (`autopar.runtime.local.outer`).

Local steps change what is trained: they are not the synchronous step with other
layouts. So they are never chosen without being asked for.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.cluster import Cluster, MeshAxis
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.runtime import arguments, creation
from autopar.runtime.local.devices import divide_devices, own_replicas, part_of
from autopar.runtime.local.outer import (
    Exchange,
    Group,
    Leaf,
    Outer,
    divide_evenly,
    joined_mesh,
)
from autopar.runtime.local.pace import Pace
from autopar.runtime.local.rows import (
    check_alive,
    check_kept,
    fit_rows,
    join_results,
    opened,
    rows_of,
    split_result,
)
from autopar.runtime.local.rules import Auto, Overlap, RelativeChange, StepAhead
from autopar.runtime.local.state import (
    LocalState,
    merging_at,
    with_arrays,
    with_part,
)
from autopar.runtime.local.synchronised import synchronised_leaves
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.parallelize import parallelize
from autopar.runtime.recent import Recent
from autopar.runtime.state_mover import name_arrays
from autopar.runtime.world import World
from autopar.units import bytes_text, number_of, seconds_text
from autopar_errors import check_type
from autopar_passes.program.calls import StepCall
from autopar_passes.program.trace import opened_within

# Batches whose rows are remembered.
_CALLS = 8


class LocalSteps:
    """A train step whose replicas synchronise once in several steps.

    See `autopar.local_steps`, which creates it.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        every: int | Auto | RelativeChange,
        replicas: int | None,
        outer: Outer,
        codec: str,
        fragments: int,
        overlap: Overlap | None,
        feedback: StepAhead | None,
        cluster: Cluster | None,
        world: World | None,
        options: Mapping[str, Any],
    ) -> None:
        """See `autopar.local_steps`."""
        self.function, self.every, self.outer = step, every, outer
        self.codec, self.fragments, self.overlap = codec, fragments, overlap
        self.feedback = feedback
        self.__name__ = getattr(step, "__name__", "step")
        self._replicas, self._cluster, self._world = replicas, cluster, world
        self._options = dict(options)
        self._rows: Recent[Any, tuple[dict[int, int], frozenset[int]]] = Recent(_CALLS)
        self._steps: tuple[ParallelStep[..., Any], ...] = ()
        self._interval: int | None = None
        # The step after which fragments have this interval.
        self._since = 0
        measured = isinstance(every, Auto) and every.measured
        self._pace = Pace(fragments) if measured else None
        self._by_fragment: tuple[tuple[Group, ...], ...] = ()
        # The programs of outer steps stay compiled when a training starts again, or
        # when a state is saved or restored.
        self._exchanges: dict[tuple[Any, tuple[Leaf, ...]], Exchange] = {}
        # Path -> the norms of the last outer step of all arrays, and the array's row.
        self._seen: dict[str, tuple[jax.Array, int]] = {}
        # JAX runs the programs that one thread starts in their order on the CPU. So
        # another thread starts the outer steps that run beside training.
        self._sender = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    # The devices.

    @property
    def world(self) -> World:
        """The processes and devices of all replicas."""
        if self._world is None:
            self._world = World.current()
        return self._world

    @property
    def cluster(self) -> Cluster:
        """The devices of all replicas, and the links between them."""
        if self._cluster is None:
            self._cluster = Cluster.local(len(self.world.devices))
        return self._cluster

    @property
    def replicas(self) -> int:
        """Number of replicas: by default the parts of the cluster's outermost level."""
        if self._replicas is None:
            sizes = [level.size for level in self.cluster.levels if level.size > 1]
            self._replicas = sizes[0] if sizes else 1
        return self._replicas

    @functools.cached_property
    def part(self) -> Cluster:
        """The devices of one replica.

        Raises:
          PlanError: the cluster has no such equal parts.
        """
        return part_of(self.cluster, self.replicas)

    @functools.cached_property
    def groups_of_devices(self) -> list[tuple[Any, ...]]:
        """The devices of each replica.

        Raises:
          PlanError: the world has too few, or its processes cannot be divided.
        """
        return divide_devices(self.world, self.replicas, self.part.num_devices)

    @functools.cached_property
    def own(self) -> list[int]:
        """The numbers of the replicas that have devices of this process."""
        return own_replicas(self.world, self.groups_of_devices)

    # Planning.

    @property
    def steps(self) -> tuple[ParallelStep[..., Any], ...]:
        """The planned step of each replica of this process."""
        if not self._steps:
            part, groups = self.part, self.groups_of_devices
            # A policy remembers what it has seen of one replica.
            options = [self._options]
            options += [copy.deepcopy(self._options) for _ in self.own[1:]]
            self._steps = tuple(
                parallelize(
                    self.function,
                    cluster=part,
                    world=self.world.part(groups[k], f"replica {k}"),
                    **given,
                )
                for k, given in zip(self.own, options, strict=True)
            )
        return self._steps

    @property
    def plan(self) -> Plan:
        """The plan of a replica."""
        return self.steps[0].plan

    def init(
        self,
        create_state: Callable[..., Any],
        *args: Any,
        batch: Any = None,
        others: Sequence[Any] | Mapping[str, Any] | None = None,
    ) -> LocalState:
        """Creates the state of all replicas, which start equal.

        Args:
          create_state: makes the state; a plain tuple holds several leading arguments
            of the step.
          args: the arguments of ``create_state``.
          batch: an example batch: arrays with the rows of this process's replicas, or
            structs with the rows of all. None for a step that takes nothing but its
            state.
          others: for any other step: all arguments after the state, as in
            `ParallelStep.init`.

        Raises:
          PlanError: the rows of the batch cannot be divided among the replicas, or the
            state has NNX objects.
        """
        creation.check_creation(self.__name__, create_state, batch, others)
        rest = creation.arguments_after(batch, others)
        shapes = creation.state_shapes(create_state, args)
        creation.check_tuple(
            self.__name__, self.steps[0].parameters.signature, shapes, rest
        )
        parts = self._divide(shapes.state(shapes.structs), *(rest or ((), {})))
        made = []
        for number, (in_order, words) in enumerate(parts):
            step = self._alike(number)
            others = None if rest is None else words or in_order
            made.append(step.init(create_state, *args, others=others))
        self._check_stages()
        return self._begin(made)

    def _check_stages(self) -> None:
        """Checks that replicas of several processes have no stages.

        Raises:
          PlanError: they have.
        """
        if len(self.plan.stages) > 1 and self.steps[0].world.process_count > 1:
            raise PlanError(
                f"{self.__name__}: the plan of a replica has {len(self.plan.stages)} "
                "stages, and a replica lies in several processes: this is not built. "
                "Use stages=1, or one process for each replica."
            )

    def _alike(self, number: int) -> ParallelStep[..., Any]:
        """The step of a replica of this process, which uses the plan of the first."""
        first, step = self.steps[0], self.steps[number]
        if number:
            analysed = first.running.analysed
            step.preparation.remember(analysed, step.setting, first.plan)
        return step

    def _begin(self, states: Sequence[Any]) -> LocalState:
        """The state of a start, from the equal states of the replicas."""
        self._by_fragment = self.find_fragments(states[0])
        anchors, momenta, codecs, moves = [], [], [], []
        arrays = [self.arrays(k, state) for k, state in enumerate(states)]
        for fragment in self._by_fragment:
            begun, moved = [], []
            for group in fragment:
                joined = group.join(arrays)
                own = group.exchange.anchors(joined)
                begun += own
                if self.adds_moves:
                    moved += group.exchange.take(joined, own)
            anchors.append(begun)
            moves.append(moved)
            momenta.append([jax.numpy.zeros_like(x) for x in begun])
            codecs.append([x for group in fragment for x in group.exchange.states()])
        return LocalState(
            replicas=tuple(states),
            anchors=tuple(anchors),
            momenta=tuple(momenta),
            codecs=tuple(codecs),
            step=np.int64(0),
            rounds=np.zeros(self.fragments, np.int64),
            averages=np.full(len(states), np.nan, np.float32),
            moves=tuple(moves),
            merge_at=np.full(self.fragments, -1),
        )

    @property
    def adds_moves(self) -> bool:
        """Whether outer steps run beside training, and are added to the parameters."""
        return self.overlap is not None and self.overlap.mixing is None

    def describe(
        self,
        create_state: Callable[..., Any],
        *args: Any,
        batch: Any = None,
        others: Sequence[Any] | Mapping[str, Any] | None = None,
    ) -> LocalState:
        """Plans, and returns the replicas of `init` as structs; no array is made.

        The other fields of the result are empty. Arguments and errors are those of
        `init`.
        """
        rest = creation.arguments_after(batch, others)
        shapes = creation.state_shapes(create_state, args)
        creation.check_tuple(
            self.__name__, self.steps[0].parameters.signature, shapes, rest
        )
        parts = self._divide(shapes.state(shapes.structs), *(rest or ((), {})))
        replicas = []
        for number, part in enumerate(parts):
            step = self._alike(number)
            planned = step.prepare(*shapes.arguments(), *part[0], **part[1])
            leaves = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x, sharding in zip(
                    shapes.structs, planned.in_shardings, strict=False
                )
            ]
            replicas.append(shapes.state(leaves))
        self._check_stages()
        self._by_fragment = self.find_fragments(replicas[0])
        none = np.zeros(self.fragments, np.int64)
        return LocalState(
            tuple(replicas), (), (), (), np.int64(0), none, none, (), none
        )

    def arrays(
        self, number: int, state: Any, *, structs: bool = False
    ) -> dict[str, Any]:
        """The arrays of a replica's state, by path; ``structs``: or their structs."""
        step = self.steps[number]
        analysis = step.running.analysed.analysis
        return name_arrays(self.__name__, analysis, state, structs=structs)

    def mesh_of_all(self, mesh: Any) -> Any:
        """The mesh of all replicas' devices, from a mesh of this process's first."""
        groups = self.groups_of_devices
        return joined_mesh(mesh, groups[self.own[0]], groups)

    def find_fragments(self, state: Any) -> tuple[tuple[Group, ...], ...]:
        """The arrays that replicas synchronise, by fragment and mesh."""
        arrays = self.arrays(0, state, structs=True)
        graph = self.steps[0].running.analysed.analysis.graph
        leaves, casts = synchronised_leaves(self.__name__, graph, arrays)
        found = []
        for members in divide_evenly(leaves, self.fragments):
            by_mesh: dict[Any, list[Leaf]] = {}
            for leaf in members:
                mesh = arrays[leaf.path].sharding.mesh
                by_mesh.setdefault(mesh, []).append(leaf)
            groups = []
            for mesh, alike in by_mesh.items():
                paths = {leaf.path for leaf in alike}
                own = tuple(cast for cast in casts if cast.master in paths)
                groups.append(Group(self._exchange(mesh, alike), own))
            found.append(tuple(groups))
        return tuple(found)

    def _exchange(self, mesh: Any, leaves: list[Leaf]) -> Exchange:
        key = mesh, tuple(leaves)
        if key not in self._exchanges:
            joined = self.mesh_of_all(mesh)
            axis = joined.axis_names[0]
            self._exchanges[key] = Exchange(
                leaves,
                joined,
                axis,
                self.outer,
                self.codec,
                self.feedback,
                donate=self._options.get("donate", True),
            )
        return self._exchanges[key]

    # Running.

    def __call__(self, state: LocalState, *rest: Any, **named: Any) -> Any:
        """Runs one step of every replica of this process, and outer steps that are due.

        Args:
          state: the state from `init` or from the last call, which is consumed, unless
            ``donate=False``.
          rest: the other arguments of the step. The rows of the batch are divided
            evenly among the replicas of this process, the first rows to the first
            replica. Under ``jax.distributed`` each process passes its own rows.
          named: arguments by name.

        Returns:
          What the step returns, with a `LocalState` in place of the state. With one
          replica in this process the other results are the replica's. With several,
          floating-point scalars are the means over these replicas, and other arrays
          get a leading dim over them.

        Raises:
          PlanError: the state is not of this training, or the rows cannot be divided.
          RunError: an error came after a part of the state was consumed.
        """
        self._check(state)
        fewer = self._options.get("last_batch", "run")
        parts = self._divide(state.state, rest, named, fewer)
        try:
            return self._take_step(state, parts)
        except Exception as error:
            check_kept(self.__name__, state, error)
            raise

    def _take_step(
        self, state: LocalState, parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> Any:
        """Runs a step of each replica on its part of the arguments, and outer steps."""
        states: list[Any] = []
        results: list[Any] = []
        if self._pace is not None:
            self._pace.begin(state)
        for step, own, part in zip(self.steps, state.replicas, parts, strict=True):
            several = type(own) is tuple
            given = own if several else (own,)
            out = step(*given, *part[0], **part[1])
            new, others = split_result(self.__name__, out, own)
            states.append(new)
            results.append(others)
        made = dataclasses.replace(
            state, replicas=tuple(states), step=np.int64(int(state.step) + 1)
        )
        if self._pace is not None:
            self._pace.end_step((states, results))
        made = self._join(*self._due(made, results))
        others = join_results(results)
        return made if others is None else (made, *others)

    def _check(self, state: Any) -> None:
        check_type(self.__name__, state, LocalState, "the state that init returned")
        check_alive(self.__name__, state)
        if not self._by_fragment:
            # A state that was restored: its layouts are those of its plan.
            self._by_fragment = self.find_fragments(state.state)
        if len(state.replicas) != len(self.steps):
            raise PlanError(
                f"{self.__name__}: the state has {len(state.replicas)} replicas in "
                f"this process, and the training {len(self.steps)}."
            )

    def _due(
        self, state: LocalState, results: Sequence[tuple[Any, ...] | None]
    ) -> tuple[LocalState, Sequence[int]]:
        """The fragments whose outer step follows the step just done.

        Returns:
          The state, with new averages if a rule keeps them, and the fragments.
        """
        done, rule = int(state.step), self.every
        if not isinstance(rule, RelativeChange):
            if done <= self._since:
                self._since = 0  # another training, or an earlier state
            every, since = self.interval, self._since
            starts = [
                since + k * every // self.fragments for k in range(self.fragments)
            ]
            due = [
                k for k, s in enumerate(starts) if done > s and not (done - s) % every
            ]
            return state, due
        seen = [
            rule.observe(float(average), others or ())
            for average, others in zip(state.averages, results, strict=True)
        ]
        asks = any(ask for _, ask in seen)
        if rule.most is not None:
            asks = asks or not done % rule.most
        told = self.world.channel.gather(bytes([asks]))
        averages = np.array([x for x, _ in seen], np.float32)
        made = dataclasses.replace(state, averages=averages)
        return made, range(self.fragments) if any(map(any, told)) else ()

    def _join(self, state: LocalState, due: Sequence[int]) -> LocalState:
        """Runs or starts the outer steps that are due, and merges those under way."""
        done = int(state.step)
        if self.overlap is not None:
            for k in np.flatnonzero(state.merge_at == done).tolist():
                state = self._merge(state, k)
        for k in due:
            if self._pace is not None:
                self._pace.begin(state)
            if self.overlap is None:
                state = self._synchronise(state, k)
            else:
                state = self._send(state, k, done + self.overlap.steps)
            if self._pace is not None:
                self._pace.end_outer(k, state)
        if self._pace is not None and self._pace.is_complete:
            self._measure(self._pace, done)
        return state

    def _measure(self, pace: Pace, done: int) -> None:
        """Chooses the interval by measured seconds, after a number of steps."""
        assert isinstance(self.every, Auto), "only an Auto measures"
        own_s, outer = pace.slowest_s(self.world.channel)
        waited_s = sum(max(0.0, s - self._beside * own_s) for s in outer)
        self._interval = self.every.interval(
            self._least_interval, own_s, waited_s, sum(outer)
        )
        self._since, self._pace = done, None

    @property
    def _least_interval(self) -> int:
        return max(1, self.fragments, self._beside)

    @property
    def _beside(self) -> int:
        """Number of steps beside which an outer step runs."""
        return 0 if self.overlap is None else self.overlap.steps

    def synchronise(self, state: LocalState) -> LocalState:
        """Runs the outer step of all fragments now; consumes the state as a call does.

        Outer steps that are under way are merged before.
        """
        self._check(state)
        for k in np.flatnonzero(state.merge_at >= 0).tolist():
            state = self._merge(state, k)
        for k in range(self.fragments):
            state = self._synchronise(state, k)
        return state

    def agreed(self, state: LocalState) -> Any:
        """The state of this process's first replica, with the arrays at the last outer
        step, which all replicas have in common.

        Nothing is consumed. Use it to evaluate while replicas differ.
        """
        self._check(state)
        arrays = self._named(state)
        for number, anchors in enumerate(state.anchors):
            for group, members in self._members(number):
                joined = [jax.numpy.copy(x) for x in group.join(arrays)]
                made = group.exchange.merge(joined, anchors[members], 0.0)
                group.part(made, arrays)
        return with_arrays(state, arrays).state

    def _named(self, state: LocalState) -> list[dict[str, Any]]:
        return [self.arrays(k, own) for k, own in enumerate(state.replicas)]

    def _members(self, number: int) -> Iterator[tuple[Group, slice]]:
        """The groups of a fragment, and where their arrays are in its lists."""
        start = 0
        for group in self._by_fragment[number]:
            end = start + len(group.exchange.leaves)
            yield group, slice(start, end)
            start = end

    def _synchronise(self, state: LocalState, number: int) -> LocalState:
        """Runs the outer step of a fragment."""
        arrays = self._named(state)
        found: list[list[Any]] = [[], [], []]
        for group, members in self._members(number):
            new, *rest, seen = group.exchange.run(
                int(state.rounds[number]),
                group.join(arrays),
                state.anchors[number][members],
                state.momenta[number][members],
                state.codecs[number][members],
            )
            group.part(new, arrays)
            for whole, more in zip(found, rest, strict=True):
                whole.extend(more)
            self._see(group, seen)
        return self._moved(with_arrays(state, arrays), number, *found)

    def _send(self, state: LocalState, number: int, merge_at: int) -> LocalState:
        """Starts an outer step of a fragment, which runs beside the next steps."""
        arrays = self._named(state)
        found: list[list[Any]] = [[], [], [], []]
        for group, members in self._members(number):
            anchors = state.anchors[number][members]
            given = (
                int(state.rounds[number]),
                group.exchange.take(group.join(arrays), anchors),
                anchors,
                state.momenta[number][members],
                state.codecs[number][members],
            )
            *rest, seen = self._sender.submit(group.exchange.send, *given).result()
            for whole, more in zip(found, rest, strict=True):
                whole.extend(more)
            self._see(group, seen)
        moves, *rest = found
        if self.adds_moves:
            state = dataclasses.replace(
                state, moves=with_part(state.moves, number, moves)
            )
        return self._moved(merging_at(state, number, merge_at), number, *rest)

    def _merge(self, state: LocalState, number: int) -> LocalState:
        """Merges the outer step of a fragment that is under way."""
        assert self.overlap is not None, "only an Overlap starts such outer steps"
        arrays, mixing = self._named(state), self.overlap.mixing
        given = (state.moves if mixing is None else state.anchors)[number]
        for group, members in self._members(number):
            joined = group.join(arrays)
            group.part(group.exchange.merge(joined, given[members], mixing), arrays)
        return merging_at(with_arrays(state, arrays), number, -1)

    def _see(self, group: Group, seen: jax.Array) -> None:
        for row, leaf in enumerate(group.exchange.leaves):
            self._seen[leaf.path] = seen, row

    def _moved(
        self,
        state: LocalState,
        number: int,
        anchors: list[Any],
        momenta: list[Any],
        codecs: list[Any],
    ) -> LocalState:
        """The state after an outer step of a fragment has moved its anchors."""
        rounds = np.array(state.rounds)
        rounds[number] += 1
        return dataclasses.replace(
            state,
            anchors=with_part(state.anchors, number, anchors),
            momenta=with_part(state.momenta, number, momenta),
            codecs=with_part(state.codecs, number, codecs),
            rounds=rounds,
        )

    def _divide(
        self,
        state: Any,
        rest: Sequence[Any],
        named: Mapping[str, Any],
        fewer: str = "run",
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments after the state, by replica; ``fewer`` is ``last_batch``."""
        given = state if type(state) is tuple else (state,)
        call = opened_within(self.steps[0].parameters, (*given, *rest), dict(named))
        if call.form.objects:
            raise PlanError(
                f"{self.__name__}: local steps take states of arrays; split NNX "
                "objects by nnx.split, and merge them in the step."
            )
        local = arguments.abstract(call)
        key = arguments.signature(local)
        known = self._rows.get(key)
        if known is None:
            rows = arguments.row_dims(self.function, local)
            self._check_result(local, state)
            paths, roles = local.form.paths(local.arrays), local.form.roles
            whole = frozenset(k for k in rows if roles.is_whole(paths[k]))
            known = self._rows.put(key, (rows, whole))
        rows, whole = known
        counts = {k: self._count(call.arrays[k], k in whole) for k in rows}
        call = fit_rows(self.__name__, call, rows, counts, fewer)
        found = []
        for replica, number in enumerate(self.own):
            arrays = list(call.arrays)
            for k, dim in rows.items():
                place = number if k in whole else replica
                arrays[k] = rows_of(arrays[k], dim, place, counts[k])
            args, words = opened(call, arrays)
            found.append((args[len(given) :], words))
        return found

    def _check_result(self, call: StepCall, state: Any) -> None:
        """Checks that the step returns its state first, and what its rule reads.

        Raises:
          PlanError: it does not.
        """

        def check(arrays: Sequence[Any]) -> None:
            args, words = opened(call, arrays)
            out = self.function(*args, **words)
            _, others = split_result(self.__name__, out, state)
            if isinstance(self.every, RelativeChange):
                self.every.check_norm(others or ())

        jax.eval_shape(check, call.arrays)

    def _count(self, rows: Any, whole: bool) -> int:
        """The number of replicas that share the rows of an array, or of a struct.

        Structs have the rows of all processes, as in `ParallelStep.init`.

        Args:
          rows: the array or struct.
          whole: whether each process passes the whole array.
        """
        whole = whole or isinstance(rows, jax.ShapeDtypeStruct)
        return self.replicas if whole else len(self.steps)

    @property
    def outer_s(self) -> float:
        """Predicted seconds of the outer steps of all fragments, once in `every` steps.

        Raises:
          PlanError: no state has been made yet, so nothing is planned.
        """
        return self._outer_s()[1]

    def _fragment_s(self, number: int) -> tuple[float, float]:
        """Predicted seconds of a fragment's outer step: of messages, and of work."""
        levels = [level for level in self.cluster.levels if level.size > 1]
        link = (levels or list(self.cluster.levels))[0].link
        axis = MeshAxis(name="replica", size=self.replicas, link=link, level=0)
        found = [group.exchange for group in self._by_fragment[number]]
        device = self.cluster.device
        return sum(x.wire_s(axis) for x in found), sum(x.work_s(device) for x in found)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step, with its share of the outer steps.

        Of an outer step that runs beside training, the seconds of work count, and those
        of messages that are longer than these steps.

        Raises:
          PlanError: a rule decides when replicas synchronise.
        """
        own, (waited, outer) = self.plan.predicted.step_s, self._outer_s()
        # Outer steps that run beside training share the links.
        return max(own + waited / self.interval, outer / self.interval)

    def _outer_s(self) -> tuple[float, float]:
        """Seconds that replicas wait for the outer steps of all fragments, and all."""
        _ = self.groups  # made
        hidden = self._beside * self.plan.predicted.step_s
        outer = [self._fragment_s(k) for k in range(self.fragments)]
        # A device that works for an outer step does not train meanwhile.
        waited = sum(max(0.0, wire - hidden) + work for wire, work in outer)
        return waited, sum(map(sum, outer))

    @property
    def interval(self) -> int:
        """Steps between two outer steps of a fragment, H.

        An `Auto` may change it once, after two outer steps of each fragment.

        Raises:
          PlanError: a rule decides when replicas synchronise; or no state has been made
            yet, so nothing is planned.
        """
        rule = self.every
        if isinstance(rule, RelativeChange):
            raise PlanError(
                f"{self.__name__}: how often a RelativeChange synchronises is known "
                "only after training: read rounds of the state."
            )
        if not isinstance(rule, Auto):
            return rule
        if self._interval is None:
            own = self.plan.predicted.step_s
            least = self._least_interval
            self._interval = rule.interval(least, own, *self._outer_s())
        return self._interval

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends between replicas in `every` steps."""
        messages = [g.exchange.messages for g in self.groups]
        return sum(sent for found in messages for _, sent in found.values())

    @property
    def groups(self) -> list[Group]:
        """The arrays that replicas synchronise, by fragment and mesh, in order.

        Raises:
          PlanError: no state has been made yet.
        """
        if not self._by_fragment:
            raise PlanError(
                f"{self.__name__}: no plan yet: make the state with init first."
            )
        return [group for fragment in self._by_fragment for group in fragment]

    def __str__(self) -> str:
        """What a step and an outer step take, as predicted, and what is sent."""
        plan, devices = self.plan, number_of(self.part.num_devices, "device")
        fixed = not isinstance(self.every, RelativeChange)
        each = f", {seconds_text(self.step_s)} a step" if fixed else ""
        when = f"once in {self.interval} steps" if fixed else "where gradients change"
        return "\n".join(
            (
                f"{self.replicas} replicas of {devices}{each}",
                f"step     {seconds_text(plan.predicted.step_s)} of a replica alone",
                f"outer    {seconds_text(self.outer_s)} {when}: "
                f"{bytes_text(self.sent_bytes)} a device by {self.codec}",
            )
        )

    @property
    def telemetry(self) -> dict[str, tuple[float, float, float]]:
        """Of the last outer step of each array: three squared norms.

        They are those of the replicas' differences and of the codec's error, both added
        up over the replicas, and of the mean difference.
        """
        found: dict[str, tuple[float, float, float]] = {}
        for path, (seen, row) in self._seen.items():
            sent, error, mean = np.asarray(seen.addressable_data(0))[row].tolist()
            found[path] = sent, error, mean
        return found

    def __repr__(self) -> str:
        """The step's name, the number of replicas and the interval in one line."""
        return (
            f"<LocalSteps {self.__name__}, {self.replicas} replicas of {self.part}, "
            f"an outer step every {self.every}>"
        )
