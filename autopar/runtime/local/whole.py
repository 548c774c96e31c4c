"""The state of a training by local steps as whole arrays by path.

A `LocalState` is laid out for the plan of a replica. Its arrays and residuals become
whole arrays, whose first dim joins those of all replicas, and so depend on no plan. So
a checkpoint, or another training, can hold them in the layouts of its own plan with
equal bits. The other parts of a codec's state, such as PowerSGD's factors, belong to
the part of an array that a device sends. They fit equal layouts only.

A checkpoint may have another number of replicas than the training that restores it:
replica k then goes on as replica ``k % r`` of the checkpoint, and the states of codecs
besides residuals begin anew.

In shapes: r replicas, n the first dim of an array of a replica.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.errors import PlanError
from autopar.runtime import creation, placement
from autopar.runtime.local.outer import (
    Exchange,
    Leaf,
    join_replicas,
    joined_sharding,
    leaf_of,
    part_replicas,
)
from autopar.runtime.local.rows import check_alive
from autopar.runtime.local.state import LocalState
from autopar.runtime.local.steps import LocalSteps
from autopar_passes import jax_compat


class WholeState:
    """Takes states of one training apart into whole arrays, and makes them again.

    The paths begin with what an array is: ``replica`` (an array of the replicas'
    states, (r * n, ...)), ``anchor``, ``momentum``, ``move`` (r * n, ...), ``residual``
    (r * n, ...) and ``codec``, with a digest of its layout. ``count`` is of the numbers
    of steps and of outer steps, of when outer steps are merged, and of a rule's
    averages.
    """

    def __init__(self, train_step: LocalSteps, like: LocalState) -> None:
        """Takes the layouts from a state of the training.

        Args:
          train_step: the training.
          like: a state of arrays or structs, as `LocalSteps.describe` returns it.

        Raises:
          PlanError: a replica's plan has a state of its own beside the step's, so that
            the arrays of the `LocalState` are not all.
        """
        for step in train_step.steps:
            if step.compression_state is not None or step.noise_state is not None:
                raise PlanError(
                    f"{train_step.__name__}: the plan of a replica keeps residuals or "
                    "averages of the noise scale of its own, which are not a part of "
                    "the LocalState. To save or move it, plan replicas without "
                    "compression= and noise_scale=."
                )
        self._step, self._like = train_step, like
        self._fragments = train_step.find_fragments(like.state)
        self._arrays = [
            train_step.arrays(k, own, structs=True)
            for k, own in enumerate(like.replicas)
        ]
        self._meshes: dict[Mesh, Mesh] = {}

    def _joined(self, path: str) -> tuple[Leaf, Mesh]:
        """An array of the replicas' states, and the mesh of all replicas."""
        array = self._arrays[0][path]
        mesh = array.sharding.mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = self._step.mesh_of_all(mesh)
        bits = jax_compat.bits_struct(tuple(array.shape), array.dtype)
        struct = jax.ShapeDtypeStruct(*bits, sharding=_of_bits(array.sharding, bits[0]))
        return leaf_of(path, struct, outer=False), self._meshes[mesh]

    def _leaves(self) -> Iterator[tuple[int, int, Any, Leaf]]:
        """Fragment, position in it, exchange and description of each sent array."""
        for number, fragment in enumerate(self._fragments):
            position = 0
            for group in fragment:
                for leaf in group.exchange.leaves:
                    yield number, position, group.exchange, leaf
                    position += 1

    def arrays(self, state: LocalState) -> dict[str, jax.Array]:
        """The arrays of a state by path; they share its memory."""
        check_alive(self._step.__name__, state)
        each = [self._step.arrays(k, own) for k, own in enumerate(state.replicas)]
        found = {}
        for path in each[0]:
            leaf, mesh = self._joined(path)
            own = [jax_compat.key_bits(x[path]) for x in each]
            found[f"replica/{path}"] = join_replicas(leaf, own, mesh)
        for number, position, exchange, leaf in self._leaves():
            found[f"anchor/{leaf.path}"] = state.anchors[number][position]
            found[f"momentum/{leaf.path}"] = state.momenta[number][position]
            if self._step.adds_moves:
                found[f"move/{leaf.path}"] = state.moves[number][position]
            held = state.codecs[number][position]
            for path, x in _by_path(held):
                if path == _RESIDUAL:
                    whole = exchange.whole_residual(leaf, x)
                    found[f"residual/{leaf.path}"] = whole
                else:
                    found[_codec_path(exchange, leaf, path)] = x
        for name, value in self._counts(state).items():
            found[f"count/{name}"] = value
        return found

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes, dtypes and shardings of `arrays`."""
        found = {}
        for path in self._arrays[0]:
            leaf, mesh = self._joined(path)
            kind = self._arrays[0][path].sharding.memory_kind
            found[f"replica/{path}"] = _struct(leaf, mesh, kind)
        for _, _, exchange, leaf in self._leaves():
            sent = jax.ShapeDtypeStruct(
                leaf.shape,
                np.float32,
                sharding=NamedSharding(exchange.mesh, leaf.sent_spec),
            )
            found[f"anchor/{leaf.path}"] = found[f"momentum/{leaf.path}"] = sent
            if self._step.adds_moves:
                move = exchange.sent_struct(leaf, np.float32)
                found[f"move/{leaf.path}"] = move
            for path, x in _by_path(exchange.state_structs(leaf)):
                if path == _RESIDUAL:
                    found[f"residual/{leaf.path}"] = exchange.sent_struct(leaf, x.dtype)
                else:
                    found[_codec_path(exchange, leaf, path)] = x
        for name, shape in self._count_shapes().items():
            leaf, mesh = self._count(name, shape)
            found[f"count/{name}"] = _struct(leaf, mesh)
        return found

    def state(self, arrays: Mapping[str, jax.Array]) -> LocalState:
        """The state of whole arrays, which have the shardings of `structs`."""
        owns: list[list[Any]] = [[] for _ in self._arrays]
        for path in self._arrays[0]:
            leaf, _ = self._joined(path)
            like = [x[path] for x in self._arrays]
            shardings = [_of_bits(x.sharding, leaf.shape) for x in like]
            parts = part_replicas(leaf, arrays[f"replica/{path}"], shardings)
            for own, x, part in zip(owns, like, parts, strict=True):
                own.append(jax_compat.with_dtype(part, x.dtype))
        count = len(self._fragments)
        anchors: list[list[Any]] = [[] for _ in range(count)]
        momenta: list[list[Any]] = [[] for _ in range(count)]
        codecs: list[list[Any]] = [[] for _ in range(count)]
        moves: list[list[Any]] = [[] for _ in range(count)]
        for number, _, exchange, leaf in self._leaves():
            anchors[number].append(arrays[f"anchor/{leaf.path}"])
            momenta[number].append(arrays[f"momentum/{leaf.path}"])
            if self._step.adds_moves:
                moves[number].append(arrays[f"move/{leaf.path}"])
            shape = exchange.state_structs(leaf)
            made = [
                exchange.parted_residual(leaf, arrays[f"residual/{leaf.path}"])
                if path == _RESIDUAL
                else arrays[_codec_path(exchange, leaf, path)]
                for path, _ in _by_path(shape)
            ]
            codecs[number].append(jax.tree.unflatten(jax.tree.structure(shape), made))
        counts = {
            name: self._own_counts(name, shape, arrays[f"count/{name}"])
            for name, shape in self._count_shapes().items()
        }
        return LocalState(
            replicas=tuple(
                creation.replace_leaves(own, new)
                for own, new in zip(self._like.replicas, owns, strict=True)
            ),
            anchors=tuple(anchors),
            momenta=tuple(momenta),
            codecs=tuple(codecs),
            step=np.int64(int(counts["step"][0])),
            rounds=np.array(counts["rounds"][0], np.int64),
            averages=np.array(counts["average"], np.float32),
            moves=tuple(moves),
            merge_at=np.array(
                counts["merge"][0] if "merge" in counts else [-1] * count, np.int64
            ),
        )

    # Numbers, of which each replica has its own or a copy.

    def _count_shapes(self) -> dict[str, tuple[int, ...]]:
        each = (len(self._fragments),)
        shapes: dict[str, tuple[int, ...]] = {"step": (), "rounds": each, "average": ()}
        if self._step.overlap is not None:
            shapes["merge"] = each
        return shapes

    def _count(self, name: str, shape: tuple[int, ...]) -> tuple[Leaf, Mesh]:
        first = next(iter(self._arrays[0].values())).sharding.mesh
        dtype = np.float32 if name == "average" else np.int32
        spec = tuple(() for _ in shape)
        leaf = Leaf(name, shape, np.dtype(dtype), spec, (), -1, outer=False)
        return leaf, self._step.mesh_of_all(first)

    def _count_shardings(self) -> list[NamedSharding]:
        meshes = [next(iter(x.values())).sharding.mesh for x in self._arrays]
        return [NamedSharding(mesh, jax.sharding.PartitionSpec()) for mesh in meshes]

    def _counts(self, state: LocalState) -> dict[str, jax.Array]:
        places = self._count_shardings()
        own = len(places)
        values = {
            "step": [int(state.step)] * own,
            "rounds": [np.asarray(state.rounds)] * own,
            "average": list(np.asarray(state.averages)),
        }
        if self._step.overlap is not None:
            values["merge"] = [np.asarray(state.merge_at)] * own
        found = {}
        for name, each in values.items():
            leaf, mesh = self._count(name, np.shape(each[0]))
            arrays = [
                placement.place(np.asarray(x, leaf.dtype), place)
                for x, place in zip(each, places, strict=True)
            ]
            found[name] = join_replicas(leaf, arrays, mesh)
        return found

    def _own_counts(
        self, name: str, shape: tuple[int, ...], joined: jax.Array
    ) -> list[np.ndarray]:
        leaf, _ = self._count(name, shape)
        parts = part_replicas(leaf, joined, self._count_shardings())
        return [np.asarray(x) for x in parts]


# Of what kinds of whole arrays each replica has a part; anchors and momenta are common.
_OF_EACH = ("replica", "move", "residual", "count")
_CODEC, _STEP = "codec", "count/step"


def is_codec_state(path: str) -> bool:
    """Whether a path is that of a codec's own state, which depends on layouts."""
    return _is_of(path, _CODEC)


Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What to read of a checkpoint.

    Attributes:
      wanted: path -> struct of each array to read.
      left: the paths of the checkpoint that are not read.
      made: makes the arrays of the state of those that were read; all processes call
        it.
    """

    wanted: Mapping[str, jax.ShapeDtypeStruct]
    left: frozenset[str] = frozenset()
    made: Callable[[Arrays], Arrays] = lambda arrays: arrays


def from_other_replicas(
    train_step: LocalSteps,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    saved: Mapping[str, Sequence[int]],
) -> Reading:
    """What to read of a checkpoint that may have another number of replicas.

    Args:
      train_step: the training that restores, which is planned.
      wanted: its structs (`WholeState.structs`).
      saved: path -> shape of each array of the checkpoint.
    """
    (new,), (old,) = wanted[_STEP].shape, saved.get(_STEP, wanted[_STEP].shape)
    if old == new:
        return Reading(wanted)
    read = {path: x for path, x in wanted.items() if not is_codec_state(path)}
    for path, struct in read.items():
        if _is_of(path, *_OF_EACH):
            shape = (struct.shape[0] // new * old, *struct.shape[1:])
            mesh: Any = struct.sharding.mesh
            even = placement.even_sharding(shape, mesh)
            read[path] = jax.ShapeDtypeStruct(shape, struct.dtype, sharding=even)

    def made(arrays: Arrays) -> Arrays:
        found = dict(arrays)
        for path in read:
            if _is_of(path, *_OF_EACH):
                found[path] = _chosen(found.pop(path), old, new, wanted[path])
        found |= _first_states(train_step)
        return {path: found[path] for path in wanted}

    left = frozenset(path for path in saved if is_codec_state(path))
    return Reading(read, left, made)


def _is_of(path: str, *kinds: str) -> bool:
    return path.partition("/")[0] in kinds


def _first_states(train_step: LocalSteps) -> Arrays:
    """The states of codecs besides residuals, as before the first outer step."""
    found: Arrays = {}
    for group in train_step.groups:
        exchange = group.exchange
        for leaf, state in zip(exchange.leaves, exchange.states(), strict=True):
            for path, x in _by_path(state):
                if path != _RESIDUAL:
                    found[_codec_path(exchange, leaf, path)] = x
    return found


def _chosen(
    array: jax.Array, old: int, new: int, wanted: jax.ShapeDtypeStruct
) -> jax.Array:
    """The parts of a whole array, (old * n, ...), that new replicas go on with."""
    parts = (old, array.shape[0] // old, *array.shape[1:])

    def chosen(x: jax.Array) -> jax.Array:
        return x.reshape(parts)[np.arange(new) % old].reshape(wanted.shape)

    sharding = NamedSharding(wanted.sharding.mesh, wanted.sharding.spec)
    found = jax.jit(chosen, out_shardings=sharding)(array)
    return placement.place(found, wanted.sharding)


_RESIDUAL = "['residual']"


def _by_path(tree: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _codec_path(exchange: Exchange, leaf: Leaf, path: str) -> str:
    """The path of a codec's own state, with a digest of the parts that devices send.

    Two layouts may have parts of equal shapes, of other elements. Their states have
    equal shapes, too, and must not be taken for each other.
    """
    sharding = NamedSharding(exchange.mesh, leaf.sent_spec)
    where = sharding.devices_indices_map(leaf.shape)
    parts = [
        [s.indices(n) for s, n in zip(where[device], leaf.shape, strict=True)]
        for device in exchange.mesh.devices[0].flat
    ]
    return f"{_CODEC}/{leaf.path}@{zlib.crc32(repr(parts).encode()):08x}{path}"


def _of_bits(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array's bits; those of random keys have one dim more."""
    spec = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    return NamedSharding(
        sharding.mesh,
        jax.sharding.PartitionSpec(*spec),
        memory_kind=sharding.memory_kind,
    )


def _struct(
    leaf: Leaf, mesh: Mesh, memory_kind: str | None = None
) -> jax.ShapeDtypeStruct:
    shape = leaf.shape or (1,)
    replicas = mesh.shape[mesh.axis_names[0]]
    return jax.ShapeDtypeStruct(
        (replicas * shape[0], *shape[1:]),
        leaf.dtype,
        sharding=joined_sharding(leaf, mesh, memory_kind),
    )


def move_state(
    state: LocalState, old: LocalSteps, new: LocalSteps, like: LocalState
) -> LocalState:
    """Moves a state to another training, with equal bits.

    Args:
      state: a state of the old training, which is consumed: where layouts are equal,
        the result shares its memory.
      old: the old training.
      new: the new training, on the same devices.
      like: the state that the new training would create (`LocalSteps.describe`).

    Raises:
      PlanError: the trainings have other models, replicas or fragments; or a codec has
        a learned state for other layouts.
    """
    made = WholeState(new, like)
    arrays, wanted = WholeState(old, state).arrays(state), made.structs()
    for path in sorted({*arrays, *wanted}):
        have, want = (_text(x.get(path)) for x in (arrays, wanted))
        if have != want:
            raise PlanError(
                f"{new.__name__}: the state has {have} as '{path}', and this training "
                f"{want}. A state moves between trainings with equal models, replicas, "
                "fragments and codecs; the learned state of a codec, such as "
                "powersgd, needs equal layouts too."
            )
    moved = {p: placement.place(arrays[p], s.sharding) for p, s in wanted.items()}
    return made.state(moved)


def _text(array: Any) -> str:
    if array is None:
        return "nothing"
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
