"""Changes the devices and the number of replicas of a training by local steps.

A `LocalState` is taken apart into what all replicas share, such as the anchors, and
what each replica has, such as its optimizer. Another number of replicas, on other
devices, is put together from these parts. A replica that goes on keeps its arrays and
its residuals, with equal bits. A replica that joins begins at the anchors.

Only this module may change private attributes of `LocalSteps`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.runtime import changing_batches, creation, placement
from autopar.runtime.local.outer import (
    Exchange,
    Group,
    Leaf,
    join_replicas,
    part_replicas,
)
from autopar.runtime.local.rows import check_alive
from autopar.runtime.local.rules import RelativeChange
from autopar.runtime.local.state import LocalState
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.world import World

_RESIDUAL = "residual"


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What all replicas of a `LocalState` have in common.

    Attributes:
      anchors: path of an array in the state -> its anchor.
      momenta: the same for the momenta of the outer optimizer.
      step: number of steps done.
      rounds: for each fragment, the number of outer steps done.
      merge_at: as in `LocalState`.
    """

    anchors: Mapping[str, Any]
    momenta: Mapping[str, Any]
    step: int
    rounds: tuple[int, ...]
    merge_at: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """What one replica has of a `LocalState`, as whole arrays by their paths in it.

    Attributes:
      arrays: the arrays of its state.
      residuals: what its codecs have not sent yet.
      moves: what an outer step under way adds to its parameters.
      average: the average that a `RelativeChange` keeps; NaN without one.
    """

    arrays: Mapping[str, Any]
    residuals: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moves: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    average: float = float("nan")

    @property
    def nbytes(self) -> int:
        """The bytes of its state."""
        return sum(placement_bytes(x) for x in self.arrays.values())


def placement_bytes(array: Any) -> int:
    """The bytes of one copy of an array."""
    return int(np.prod(array.shape, dtype=np.int64)) * array.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """A replica that begins at the anchors.

    Attributes:
      like: the replica whose arrays it takes besides those that replicas synchronise,
        such as the state of its optimizer and its random keys.
    """

    like: Replica


def check_whole(step: LocalSteps) -> None:
    """Checks that a `LocalState` of a planned training holds all that replicas carry.

    Raises:
      PlanError: the plan of a replica keeps residuals, or averages of the noise scale.
    """
    for own in step.steps:
        planned = own.running.planned
        if planned.sums is not None or planned.noise is not None:
            raise PlanError(
                f"{step.__name__}: the plan of a replica keeps residuals or averages "
                "of the noise scale of its own, which are no part of the LocalState "
                "and would be lost when devices change. Plan replicas without "
                "compression= and noise_scale=."
            )


def take_apart(step: LocalSteps, state: LocalState) -> tuple[Shared, list[Replica]]:
    """The parts of a state; the replicas are those of this process.

    The arrays of the parts share the memory of the state.
    """
    check_alive(step.__name__, state)
    named = [step.arrays(k, own) for k, own in enumerate(state.replicas)]
    fragments = step._by_fragment or step.find_fragments(state.state)
    anchors: dict[str, Any] = {}
    momenta: dict[str, Any] = {}
    residuals: list[dict[str, Any]] = [{} for _ in named]
    moves: list[dict[str, Any]] = [{} for _ in named]
    for number, position, exchange, leaf in _leaves(fragments):
        anchors[leaf.path] = state.anchors[number][position]
        momenta[leaf.path] = state.momenta[number][position]
        sent, places = _sent(leaf), _places(leaf, named)
        held = state.codecs[number][position]
        if _has_residual(held):
            whole = exchange.whole_residual(leaf, held[_RESIDUAL])
            for own, x in zip(
                residuals, part_replicas(sent, whole, places), strict=True
            ):
                own[leaf.path] = x
        if step.adds_moves:
            move = state.moves[number][position]
            for own, x in zip(moves, part_replicas(sent, move, places), strict=True):
                own[leaf.path] = x
    shared = Shared(
        anchors,
        momenta,
        int(state.step),
        tuple(int(n) for n in state.rounds),
        tuple(int(n) for n in state.merge_at),
    )
    averages = [float(x) for x in np.asarray(state.averages)]
    parts = zip(named, residuals, moves, averages, strict=True)
    return shared, [Replica(*part) for part in parts]


def put_together(
    step: LocalSteps,
    like: LocalState,
    shared: Shared,
    replicas: Sequence[Replica | Joining],
) -> LocalState:
    """A state of other replicas; the states of codecs besides residuals begin anew.

    Args:
      step: the training that goes on with the state.
      like: the state that it would create (`LocalSteps.describe`).
      shared: what all replicas have in common.
      replicas: those of this process.
    """
    step._by_fragment = fragments = step.find_fragments(like.state)
    structs = [step.arrays(k, own, structs=True) for k, own in enumerate(like.replicas)]
    arrays = [
        _arrays_of(replica, shared, own, fragments)
        for replica, own in zip(replicas, structs, strict=True)
    ]
    anchors: list[list[Any]] = [[] for _ in fragments]
    momenta: list[list[Any]] = [[] for _ in fragments]
    codecs: list[list[Any]] = [[] for _ in fragments]
    moves: list[list[Any]] = [[] for _ in fragments]
    for number, fragment in enumerate(fragments):
        for group in fragment:
            states = group.exchange.states()
            for leaf, held in zip(group.exchange.leaves, states, strict=True):
                mesh = group.exchange.mesh
                place = NamedSharding(mesh, leaf.sent_spec)
                anchor, momentum = shared.anchors[leaf.path], shared.momenta[leaf.path]
                anchors[number].append(placement.place(anchor, place))
                momenta[number].append(placement.place(momentum, place))
                join = _Join(leaf, _places(leaf, structs), mesh)
                if _has_residual(held):
                    own = [_part(r, "residuals", leaf.path) for r in replicas]
                    whole = join.join(own)
                    parted = group.exchange.parted_residual(leaf, whole)
                    held = {**held, _RESIDUAL: parted}
                codecs[number].append(held)
                if step.adds_moves:
                    own = [_part(r, "moves", leaf.path) for r in replicas]
                    moves[number].append(join.join(own))
    averages = [r.average if isinstance(r, Replica) else np.nan for r in replicas]
    return LocalState(
        replicas=tuple(
            creation.replace_leaves(own, list(found.values()))
            for own, found in zip(like.replicas, arrays, strict=True)
        ),
        anchors=tuple(anchors),
        momenta=tuple(momenta),
        codecs=tuple(codecs),
        step=np.int64(shared.step),
        rounds=np.array(shared.rounds, np.int64),
        averages=np.array(averages, np.float32),
        moves=tuple(moves),
        merge_at=np.array(shared.merge_at, np.int64),
    )


def _arrays_of(
    replica: Replica | Joining,
    shared: Shared,
    structs: Mapping[str, Any],
    fragments: Sequence[Sequence[Group]],
) -> dict[str, Any]:
    """The arrays of a replica's state, in the layouts of its plan."""
    given = replica if isinstance(replica, Replica) else replica.like
    found = {
        path: placement.place(given.arrays[path], x.sharding)
        for path, x in structs.items()
    }
    if isinstance(replica, Replica):
        return found
    for group in (group for fragment in fragments for group in fragment):
        for leaf in group.exchange.leaves:
            anchor = jnp.asarray(shared.anchors[leaf.path]).astype(leaf.dtype)
            found[leaf.path] = placement.place(anchor, structs[leaf.path].sharding)
        for cast in group.casts:
            cast.write(found)
    return found


def _part(replica: Replica | Joining, kind: str, path: str) -> Any:
    """A residual or a move of a replica; None: it is zero."""
    return getattr(replica, kind).get(path) if isinstance(replica, Replica) else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Join:
    """Joins what devices send of an array, over all replicas.

    Attributes:
      leaf: the array.
      places: the sharding of what the devices of each own replica send.
      mesh: the devices of all replicas.
    """

    leaf: Leaf
    places: Sequence[NamedSharding]
    mesh: Mesh

    def join(self, given: Sequence[Any]) -> Any:
        """Joins the arrays of this process's replicas; None stands for zeros."""
        arrays = [
            placement.place(
                np.zeros(self.leaf.shape, np.float32) if x is None else x, place
            )
            for x, place in zip(given, self.places, strict=True)
        ]
        return join_replicas(_sent(self.leaf), arrays, self.mesh)


def _leaves(
    fragments: Sequence[Sequence[Group]],
) -> Iterator[tuple[int, int, Exchange, Leaf]]:
    """Fragment, position in it, exchange and description of each sent array."""
    for number, fragment in enumerate(fragments):
        position = 0
        for group in fragment:
            for leaf in group.exchange.leaves:
                yield number, position, group.exchange, leaf
                position += 1


def _sent(leaf: Leaf) -> Leaf:
    """An array in the layout in which the devices of a replica send it."""
    # Its own layout has no copies: each device has another part.
    sent = dataclasses.replace(leaf, dim=-1, copies=())
    spec = tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in leaf.sent_spec
    )
    return dataclasses.replace(sent, spec=spec)


def _places(leaf: Leaf, replicas: Sequence[Mapping[str, Any]]) -> list[NamedSharding]:
    """For each replica, the sharding of what its devices send of an array."""
    return [
        NamedSharding(own[leaf.path].sharding.mesh, leaf.sent_spec) for own in replicas
    ]


def _has_residual(held: Any) -> bool:
    return isinstance(held, dict) and hasattr(held.get(_RESIDUAL), "dtype")


# The devices of a training.


def on_devices(
    step: LocalSteps,
    world: World,
    cluster: Cluster,
    replicas: int,
    **options: Any,
) -> LocalSteps:
    """The same training on other devices; it has no plan yet.

    Args:
      step: the training.
      world: the processes and devices.
      cluster: describes all devices of the world, and the links between them.
      replicas: number of replicas.
      options: options of `autopar.parallelize` that replace those of the training.

    Raises:
      PlanError: the devices cannot be divided among the replicas.
    """
    made = LocalSteps(
        step.function,
        every=step.every,
        replicas=replicas,
        outer=step.outer,
        codec=step.codec,
        fragments=step.fragments,
        overlap=step.overlap,
        feedback=step.feedback,
        # The world has these devices only, so they are a whole cluster.
        cluster=dataclasses.replace(cluster, members=None),
        world=world,
        options={**step._options, **options},
    )
    if is_guarded(step):
        guard(made)
    return made


def adopt(step: LocalSteps, made: LocalSteps) -> None:
    """Lets a training go on as another one, which `on_devices` made of it."""
    step._sender.shutdown(wait=False)
    vars(step).clear()
    vars(step).update(vars(made))


def given_cluster(step: LocalSteps) -> Cluster | None:
    """The cluster that the user gave; None: the devices that exist."""
    return step._cluster


def check_for_processes(step: LocalSteps) -> None:
    """Checks a training for a run in which each process is a replica.

    Raises:
      PlanError: an option does not fit such a run.
    """
    if step._replicas is not None:
        raise PlanError(
            f"elastic: replicas={step._replicas}: under `autopar run` each process is "
            "a replica, and processes come and go; leave replicas= out."
        )
    if isinstance(step.every, RelativeChange):
        raise PlanError(
            "elastic: a RelativeChange asks all processes in every step, so a replica "
            "cannot go on from another step than others after a loss; choose a number "
            "of steps, such as every=16."
        )
    if step._options.get("whole_argnames"):
        raise PlanError(
            "elastic: under `autopar run` a process reads the rows of its own replica; "
            "leave whole_argnames= out, and give arrays that are no batch as others=."
        )


def guard(step: LocalSteps) -> None:
    """Lets a replica keep its old state if a result of its step is not finite."""
    for own in step.steps:
        changing_batches.guard(own)


def is_guarded(step: LocalSteps) -> bool:
    """Whether `guard` was called."""
    return any(changing_batches.is_guarded(own) for own in step._steps)


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Which replicas of a whole cluster train.

    The devices of a whole cluster are divided in their order into parts of equal size,
    the *slots*. A replica trains where all devices of its slot are there.

    Attributes:
      size: devices of a slot.
      used: numbers of the slots that train, ascending.
    """

    size: int
    used: tuple[int, ...]

    def next(self, cluster: Cluster, divides: Callable[[int], bool]) -> Slots:
        """The slots that train on a cluster, as many as possible.

        Args:
          cluster: the devices that are there.
          divides: whether a number of replicas can share the rows of a batch.

        Raises:
          PlanError: there is none.
        """
        there = _available(cluster)
        count = (max(there) + 1) // self.size
        whole = [
            k
            for k in range(count)
            if all(d in there for d in range(k * self.size, (k + 1) * self.size))
        ]
        # Replicas that train already come first.
        whole.sort(key=lambda k: (k not in self.used, k))
        for number in range(len(whole), 0, -1):
            if divides(number):
                return Slots(self.size, tuple(sorted(whole[:number])))
        raise PlanError(
            f"local_steps: {cluster} has no replica of {self.size} devices whose "
            "devices are all there; the run keeps the replicas that it has."
        )

    def cluster(self, given: Cluster) -> Cluster:
        """The part of a cluster that the slots use.

        Raises:
          PlanError: the cluster has unequal groups of devices.
        """
        used = {d for k in self.used for d in range(k * self.size, (k + 1) * self.size)}
        others = sorted(_available(given) - used)
        found = given.without(devices=others) if others else given
        if found.groups or set(found.ids) != used:
            raise PlanError(
                f"local_steps: replicas of {self.size} devices cannot be cut out of "
                f"{given}; name a cluster whose outermost level are the replicas."
            )
        return found


def _available(cluster: Cluster) -> set[int]:
    """The ids of all devices of a cluster, used or idle."""
    if cluster.members is None:
        return set(cluster.ids)
    of = cluster.members
    return {of.start + p for p in (*of.positions, *of.idle)}
