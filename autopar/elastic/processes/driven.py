"""What the training loop of one process of several asks of its train step.

A planned step and local steps give the same answers, so that one loop trains both
(`autopar.elastic.processes.training`). A *world* is a set of processes that train
together. The state of a planned step is one state, of which processes hold parts. Of
local steps, each process is a replica: the anchors and momenta are the same in all
processes, and the rest of its state is the process's own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.cluster import Cluster
from autopar.elastic.driven import Rest, TrainStep
from autopar.elastic.processes import beside, holding, programs, tiles
from autopar.elastic.processes.holding import Holding, place
from autopar.elastic.processes.programs import ReadyProgram, StoredPrograms
from autopar.elastic.processes.sizing import cluster_of
from autopar.elastic.processes.team import Joined
from autopar.elastic.replicas import OuterSteps, finite_of, others_of, run_step
from autopar.elastic.samples import Samples, placed_rest, planned_batch
from autopar.elastic.saves import carried_out, splat
from autopar.planner.cache import PlanCache
from autopar.plans import Plan
from autopar.reports.worth import scheme_text
from autopar.runtime import changing_batches
from autopar.runtime.creation import (
    StateShapes,
    flat_state,
    replace_leaves,
    state_shapes,
)
from autopar.runtime.local import changing_replicas
from autopar.runtime.local.changing_replicas import Joining, Replica, Shared
from autopar.runtime.local.state import LocalState
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import World
from autopar.units import number_of
from autopar_passes import jax_compat
from autopar_passes.program.static_leaves import struct_of

Create = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Entering:
    """A world for which a train step is planned.

    Attributes:
      world: its processes and devices.
      cluster: describes the devices.
      donate: whether steps consume the state.
      cache: the plans on disk.
    """

    world: World
    cluster: Cluster
    donate: bool
    cache: PlanCache


class TeamDriven(Protocol):
    """A train step that the loop of one process of several runs."""

    # Whether all processes save their state together before an error ends the run.
    saves_together: bool

    @property
    def step(self) -> TrainStep:
        """The user's train step, for checkpoints."""
        ...

    @property
    def given_cluster(self) -> Cluster | None:
        """The cluster that the user gave; None: the devices that exist."""
        ...

    @property
    def world(self) -> World:
        """The processes and devices of the step."""
        ...

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        ...

    @property
    def current(self) -> Any:
        """An object that is another one under each plan."""
        ...

    @property
    def scheme(self) -> str:
        """The parallelism in words."""
        ...

    @property
    def finite(self) -> Any:
        """Whether the last step was finite; None: the step does not look."""
        ...

    @property
    def compression_state(self) -> Any:
        """The state of the codecs that the step holds itself; None: it holds none."""
        ...

    @property
    def is_pure(self) -> bool:
        """Whether a call changes nothing outside its results, and so may be left."""
        ...

    def rows(self, samples: Samples) -> int:
        """Rows that the devices must split evenly; 0: there is no such condition."""
        ...

    def tasks(self) -> dict[str, Any]:
        """The pipeline task that this process is running; empty without stages."""
        ...

    def study(self, create: Create, args: Sequence[Any], samples: Samples) -> None:
        """Analyses the step before a world forms, so that the world starts sooner."""
        ...

    def enter(self, entered: Entering) -> None:
        """Moves the step to another world; it has no plan then."""
        ...

    def prepare(self, samples: Samples, step: int) -> None:
        """Plans for the world, whose processes all call this."""
        ...

    def load(self, stored: StoredPrograms) -> ReadyProgram:
        """Loads or compiles the program of the plan."""
        ...

    def others(self, samples: Samples, step: int) -> Any:
        """Shapes of the arguments after the state, as ``others`` of `init`."""
        ...

    def init(self, create: Create, args: Sequence[Any], samples: Samples) -> Any:
        """Creates the state of a run that begins."""
        ...

    def take_up(self, joined: Joined, state: Any) -> tuple[Any, int]:
        """The state that the processes hold, in the layouts of the plan.

        Args:
          joined: the world, whose state is fetched.
          state: the state of this process in its last world; None: it has none.

        Returns:
          The state, and the number of the next step of this process.
        """
        ...

    def held(self, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays of a state by path, and plain data, to keep for the next world."""
        ...

    def arguments(
        self, samples: Samples, step: int, state: Any, entered: Callable[[str], None]
    ) -> Rest:
        """The arguments of a step after the state; ``entered`` is told of samples."""
        ...

    def call(
        self, state: Any, rest: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Runs a step and waits for it; returns what `after` takes."""
        ...

    def after(self, state: Any, returned: Any) -> tuple[Any, Any]:
        """The next state and the other results, from the result of `call`."""
        ...

    def part(self, state: Any) -> Any:
        """The state with which this process leaves a world whose processes all live."""
        ...

    def share(self, state: Any) -> Mapping[str, Any] | None:
        """Tells all processes of a new world what this process has; all call it.

        Returns:
          What was lost with processes, for the ledger; None: nothing, or another
          process reports it.
        """
        ...


class TeamOfPlan:
    """A planned step (`TeamDriven`)."""

    saves_together = True

    def __init__(self, step: ParallelStep[..., Any]) -> None:
        """See `TeamDriven`.

        Args:
          step: the step.
        """
        self.step, self._donate = step, True
        self._shapes: StateShapes | None = None

    @property
    def given_cluster(self) -> Cluster | None:
        """See `TeamDriven`."""
        return self.step.setting.cluster

    @property
    def world(self) -> World:
        """See `TeamDriven`."""
        return self.step.world

    @property
    def plan(self) -> Plan:
        """See `TeamDriven`."""
        return self.step.plan

    @property
    def current(self) -> Any:
        """See `TeamDriven`."""
        return self.step.running.planned

    @property
    def scheme(self) -> str:
        """See `TeamDriven`."""
        return scheme_text(self.plan)

    @property
    def finite(self) -> Any:
        """See `TeamDriven`."""
        return self.step.finite

    @property
    def compression_state(self) -> Any:
        """See `TeamDriven`."""
        return self.step.compression_state

    @property
    def is_pure(self) -> bool:
        """See `TeamDriven`; pipeline stages notice a lost process themselves."""
        return len(self.plan.stages) == 1 and changing_batches.is_pure(self.step)

    def rows(self, samples: Samples) -> int:
        """See `TeamDriven`."""
        splits = self.step.preparation.planner.options.split_batch
        return samples.batch if splits else 0

    def tasks(self) -> dict[str, Any]:
        """See `TeamDriven`."""
        pipeline = self.step.running.planned.pipeline
        return {} if pipeline is None else pipeline.progress()

    def study(self, create: Create, args: Sequence[Any], samples: Samples) -> None:
        """See `TeamDriven`."""
        self._shapes = shapes = state_shapes(create, programs.from_host(args))
        changing_batches.read_rows(self.step, len(shapes.arguments()))
        structs = (*shapes.arguments(), *self.others(samples, 0))
        changing_batches.study_step(self.step, *structs)

    def enter(self, entered: Entering) -> None:
        """See `TeamDriven`."""
        changing_batches.enter_world(
            self.step,
            entered.world,
            entered.cluster,
            donate=entered.donate,
            cache=entered.cache,
        )
        self._donate = entered.donate

    def prepare(self, samples: Samples, step: int) -> None:
        """See `TeamDriven`."""
        assert self._shapes is not None
        others = self.others(samples, step)
        self.step.prepare(*self._shapes.arguments(), *others)

    def load(self, stored: StoredPrograms) -> ReadyProgram:
        """See `TeamDriven`."""
        planned = self.step.running.planned
        program = stored.ready(planned, self.world, donate=self._donate)
        if program.function is not None:
            changing_batches.load(self.step, program.function)
        return program

    def others(self, samples: Samples, step: int) -> Any:
        """See `TeamDriven`."""
        assert self._shapes is not None
        return beside.rest_structs(self.step, samples, self._shapes, step)

    def init(self, create: Create, args: Sequence[Any], samples: Samples) -> Any:
        """See `TeamDriven`."""
        return self.step.init(create, *args)

    def take_up(self, joined: Joined, state: Any) -> tuple[Any, int]:
        """See `TeamDriven`."""
        assert self._shapes is not None
        fetch = joined.fetch
        assert fetch is not None
        planned = self.step.running.planned
        inputs = planned.analysis.graph.inputs
        wanted = {
            given.path: (struct, sharding)
            for given, struct, sharding in zip(
                inputs, self._shapes.structs, planned.in_shardings, strict=False
            )
        }
        leaves = list(place(wanted, fetch).values())
        made = self._shapes.state(leaves) if state is None else None
        made = replace_leaves(state, leaves) if made is None else made
        beside.take_up(self.step, fetch, joined.extra)
        jax.block_until_ready(leaves)
        return made, joined.step

    def held(self, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `TeamDriven`."""
        arrays, trees = beside.state_beside(self.step)
        leaves, _ = flat_state(state)
        inputs = self.step.running.analysed.analysis.graph.inputs
        named = {given.path: x for given, x in zip(inputs, leaves, strict=False)}
        return arrays | named, trees

    def arguments(
        self, samples: Samples, step: int, state: Any, entered: Callable[[str], None]
    ) -> Rest:
        """See `TeamDriven`."""
        planned, world = self.step.running.planned, self.world
        count = len(splat(state))
        known = planned_batch(planned, count, world)
        entered("samples")
        rest, named = samples.arguments(step, world, known)
        if world.process_count > 1 and len(self.plan.stages) == 1:
            rest = (rest[0], *placed_rest(planned, count + 1, rest[1:]))
        return rest, named

    def call(
        self, state: Any, rest: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """See `TeamDriven`."""
        return jax.block_until_ready(self.step(*splat(state), *rest, **named))

    def after(self, state: Any, returned: Any) -> tuple[Any, Any]:
        """See `TeamDriven`."""
        return carried_out(self.step.running.analysed.analysis, state, returned)

    def part(self, state: Any) -> Any:
        """See `TeamDriven`."""
        return state

    def share(self, state: Any) -> Mapping[str, Any] | None:
        """See `TeamDriven`: a state is whole, or it is lost."""
        return None


# Names in the paths of the arrays that a replica keeps.
_KINDS = ("arrays", "residuals", "moves")
_NOTES = "replica"


class TeamOfReplicas:
    """Local steps, of which each process is a replica (`TeamDriven`)."""

    saves_together = False  # replicas find out alone that they are not finite

    def __init__(self, step: LocalSteps, worker: int, *, guards: bool) -> None:
        """See `TeamDriven`.

        Args:
          step: the local steps.
          worker: number of this process's worker.
          guards: whether a replica keeps its state if its step is not finite.

        Raises:
          PlanError: an option of the local steps does not fit such a run.
        """
        changing_replicas.check_for_processes(step)
        self.step, self._worker, self._guards = step, worker, guards
        self.given_cluster = changing_replicas.given_cluster(step)
        self.outer = OuterSteps()
        self._made: tuple[Create, Sequence[Any], int] | None = None
        self._like: LocalState | None = None
        self._donate = True
        # The workers of the last world, and the rounds at the begin of this one.
        self._workers: frozenset[int] = frozenset()
        self._begun: tuple[int, ...] | None = None

    @property
    def world(self) -> World:
        """See `TeamDriven`."""
        return self.step.world

    @property
    def plan(self) -> Plan:
        """See `TeamDriven`: the plan of a replica."""
        return self.step.plan

    @property
    def current(self) -> Any:
        """See `TeamDriven`."""
        return self.step.steps[0].running.planned

    @property
    def scheme(self) -> str:
        """See `TeamDriven`."""
        count = number_of(self.step.replicas, "replica")
        inside = scheme_text(self.plan)
        return f"local steps of {count}" + (f", each {inside}" if inside else "")

    @property
    def finite(self) -> Any:
        """See `TeamDriven`."""
        return finite_of(self.step.steps)

    @property
    def compression_state(self) -> Any:
        """See `TeamDriven`: the states of codecs are in the `LocalState`."""
        return None

    @property
    def is_pure(self) -> bool:
        """See `TeamDriven`: the first outer steps of a world compile."""
        begun = self._begun
        if self._donate or begun is None:
            return False
        return all(n > b for n, b in zip(self.outer.rounds, begun, strict=True))

    def rows(self, samples: Samples) -> int:
        """See `TeamDriven`: the number of processes divides the batch."""
        return samples.batch * jax.local_device_count()

    def tasks(self) -> dict[str, Any]:
        """See `TeamDriven`."""
        return {}

    def study(self, create: Create, args: Sequence[Any], samples: Samples) -> None:
        """See `TeamDriven`."""
        shapes = state_shapes(create, programs.from_host(args))
        self._made = create, args, len(shapes.arguments())

    def enter(self, entered: Entering) -> None:
        """See `TeamDriven`."""
        world, cluster = entered.world, entered.cluster
        if cluster.groups:  # replicas are equal
            local = len(world.devices) // world.process_count
            cluster = cluster_of(self.given_cluster, world.process_count, local)
        made = changing_replicas.on_devices(
            self.step, world, cluster, world.process_count, donate=entered.donate
        )
        changing_replicas.adopt(self.step, made)
        if self._guards:
            changing_replicas.guard(self.step)
        self._donate, self._begun = entered.donate, None

    def prepare(self, samples: Samples, step: int) -> None:
        """See `TeamDriven`."""
        assert self._made is not None
        create, args, _ = self._made
        others = self.others(samples, step)
        self._like = self.step.describe(
            create, *programs.from_host(args), others=others
        )
        changing_replicas.check_whole(self.step)

    def load(self, stored: StoredPrograms) -> ReadyProgram:
        """See `TeamDriven`: programs of replicas are compiled at their first call."""
        del stored
        return ReadyProgram(None, "compiled", 0.0)

    def others(self, samples: Samples, step: int) -> Any:
        """See `TeamDriven`."""
        assert self._made is not None
        rest = samples.arguments(step, self.world)
        structs = jax.tree.map(struct_of, rest)
        return others_of(self.step, self._made[2], structs)

    def init(self, create: Create, args: Sequence[Any], samples: Samples) -> Any:
        """See `TeamDriven`."""
        others = self.others(samples, 0)
        return self.step.init(create, *args, others=others)

    def begin(self, state: LocalState, last: Sequence[int] | None = None) -> None:
        """Takes note of the state with which this process begins in a world."""
        self.outer.begin(state, last)
        self._begun = self.outer.rounds

    def take_up(self, joined: Joined, state: Any) -> tuple[Any, int]:
        """See `TeamDriven`."""
        del state
        assert self._like is not None
        fetch = joined.fetch
        assert fetch is not None
        notes = joined.extra[_NOTES]
        own = fetch.own_state(_path(self._worker, ""))
        anchors = {p: fetch.whole(f"anchor/{p}") for p in notes["synchronised"]}
        momenta = {p: fetch.whole(f"momentum/{p}") for p in notes["synchronised"]}
        structs = self.step.arrays(0, self._like.replicas[0], structs=True)
        replica: Replica | Joining
        if own is None:
            workers = sorted(_workers_of(fetch.paths))
            source = workers[self.world.process_index % len(workers)]
            replica = Joining(_replica(fetch.paths, fetch.whole, source, structs))
        else:
            read = _Tiles(own)
            replica = _replica(own.shapes, read.whole, self._worker, structs)
            mine = own.extra[_NOTES]
            if mine["rounds"] == notes["rounds"]:
                notes = mine
            else:
                # The last outer step has ended in other processes, not here. They
                # have what this replica learnt until then.
                step = max(mine["step"], max(notes["last"]))
                notes = {**notes, "step": step}
                replica = Joining(replica)
        shared = Shared(
            anchors,
            momenta,
            notes["step"],
            tuple(notes["rounds"]),
            tuple(notes["merge_at"]),
        )
        made = changing_replicas.put_together(self.step, self._like, shared, [replica])
        jax.block_until_ready(jax.tree.leaves(made))
        self.begin(made, notes["last"])
        return made, notes["step"]

    def share(self, state: Any) -> Mapping[str, Any] | None:
        """See `TeamDriven`: the replicas of workers that died are lost."""
        if self._begun is None:
            self.begin(state)
        told = json.dumps([self._worker, bool(self._workers), int(state.step)])
        found = self.world.channel.exchange(told.encode(), "sharing replicas")
        each = [json.loads(x) for _, x in sorted(found.items())]
        before, self._workers = self._workers, frozenset(w for w, *_ in each)
        reporter = min((w for w, had, _ in each if had), default=None)
        lost = sorted(before - self._workers)
        steps = self.outer.open_steps(state)
        if not lost or not steps or reporter != self._worker:
            return None
        since = int(state.step) - steps
        print(
            f"autopar: lost the replica of worker {', '.join(map(str, lost))} with "
            f"what it learnt since its last outer step, after step {since}; this "
            f"worker has done {number_of(steps, 'step')} since then.",
            file=sys.stderr,
            flush=True,
        )
        return {"workers": lost, "since_step": since, "steps": steps}

    def held(self, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `TeamDriven`."""
        if self._begun is None:
            self.begin(state)
        shared, (own,) = changing_replicas.take_apart(self.step, state)
        arrays = {f"anchor/{p}": x for p, x in shared.anchors.items()}
        arrays |= {f"momentum/{p}": x for p, x in shared.momenta.items()}
        for kind in _KINDS:
            for path, x in getattr(own, kind).items():
                arrays[_path(self._worker, f"{kind}/{path}")] = x
        notes = {
            "synchronised": list(shared.anchors),
            "step": shared.step,
            "rounds": list(shared.rounds),
            "merge_at": list(shared.merge_at),
            "last": list(self.outer.last),
        }
        return arrays, {_NOTES: notes}

    def arguments(
        self, samples: Samples, step: int, state: Any, entered: Callable[[str], None]
    ) -> Rest:
        """See `TeamDriven`."""
        del state
        entered("samples")
        world = self.world
        return samples.part(step, world.process_index, world.process_count)

    def call(
        self, state: Any, rest: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """See `TeamDriven`."""
        return jax.block_until_ready(run_step(self.step, state, rest, named))

    def after(self, state: Any, returned: Any) -> tuple[Any, Any]:
        """See `TeamDriven`."""
        self.outer.look(returned[0])
        return returned

    def part(self, state: Any) -> Any:
        """See `TeamDriven`: an outer step, so that nothing that was learnt is lost."""
        made = jax.block_until_ready(self.step.synchronise(state))
        self.outer.look(made)
        return made


def _path(worker: int, name: str) -> str:
    """The path of an array that only the process of a worker has."""
    return f"{holding.PRIVATE}{worker}/{name}"


def _workers_of(paths: Sequence[str]) -> set[int]:
    """The workers whose replicas have arrays of these paths."""
    own = [p.removeprefix(holding.PRIVATE) for p in paths if holding.is_private(p)]
    return {int(p.partition("/")[0]) for p in own}


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """Joins the tiles of a state that this process holds alone."""

    held: Holding

    def whole(self, path: str) -> np.ndarray:
        """The whole array of a path."""
        shape, dtype = self.held.shapes[path]
        whole = tiles.whole(shape)
        out = np.empty(shape, holding.numpy_dtype(dtype))
        for tile, x in self.held.tiles[path].items():
            out[tiles.within(tile, whole)] = x
        return out


def _replica(
    paths: Sequence[str] | Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    worker: int,
    structs: Mapping[str, Any],
) -> Replica:
    """The arrays of a worker's replica, from host memory."""
    found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
    for kind in _KINDS:
        begin = _path(worker, f"{kind}/")
        for path in (p for p in paths if p.startswith(begin)):
            name, x = path.removeprefix(begin), read(path)
            if kind == "arrays" and jax_compat.is_extended(structs[name].dtype):
                x = jax_compat.with_dtype(jnp.asarray(x), structs[name].dtype)
            found[kind][name] = x
    return Replica(found["arrays"], found["residuals"], found["moves"])


def team_driven_of(step: TrainStep, worker: int, *, guards: bool) -> TeamDriven:
    """What the loop asks of a planned step, or of local steps.

    Args:
      step: the train step.
      worker: number of this process's worker.
      guards: whether the state stays as it is if a step is not finite.
    """
    if isinstance(step, LocalSteps):
        return TeamOfReplicas(step, worker, guards=guards)
    return TeamOfPlan(step)
