"""The outer step: replicas send how far their parameters have moved, and agree.

Every replica starts a round at the same parameters, the *anchor*. After its local
steps, the *difference* of a replica is the anchor minus its parameters. The mean of all
differences is the gradient of an outer optimizer, which moves the anchor. All replicas
continue from the new anchor (DiLoCo, arXiv 2311.08105; with the mean alone: local SGD,
arXiv 1805.09767).

The differences are sent by a codec, with its error feedback, over the links between
replicas. If devices of a replica hold copies of a parameter, each of them sends another
part, and the new anchor is gathered over the links inside the replica.

With `StepAhead`, replicas continue from the anchor minus a part of their residual.

An outer step is one program (`Exchange.run`), or three, so that replicas may train
while differences are sent: `Exchange.take` copies the differences, `Exchange.send`
sends them and moves the anchors, and `Exchange.merge` brings the result into the
parameters that the replicas have reached by then.

In shapes: r replicas, d devices in all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster import DeviceSpec, MeshAxis
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Feedback, Gradient, init_state
from autopar.compression.synchronise import synchronise
from autopar.cost.codecs import local_s
from autopar.cost.collectives import collective_s
from autopar.errors import PlanError
from autopar.planner.replicas import axis_name
from autopar.runtime import placement
from autopar.runtime.local.rules import StepAhead, check_numbers
from autopar_passes.layouts import HOST_MEMORY


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
    """The outer optimizer: SGD with momentum on the mean difference.

    Attributes:
      rate: the outer learning rate. DiLoCo's is 0.7; with 1 and no momentum, replicas
        continue from the mean of their parameters.
      momentum: factor of the last outer gradient's sum. DiLoCo's is 0.9.
      nesterov: whether the momentum is Nesterov's, as in DiLoCo.

    Raises:
      InputTypeError: a value has a wrong type.
      PlanError: a value is out of range.
    """

    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_numbers(self, rate=numbers.Real, momentum=numbers.Real)
        if not (math.isfinite(self.rate) and self.rate > 0.0):
            raise PlanError(f"Outer: rate must be positive, got {self.rate!r}.")
        if not 0.0 <= self.momentum < 1.0:
            raise PlanError(
                f"Outer: momentum must be at least 0 and below 1, got "
                f"{self.momentum!r}."
            )

    def move(
        self, anchor: jax.Array, momentum: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The new anchor and momentum, float32, in the shape of the gradient."""
        kept = self.momentum * momentum + gradient
        step = gradient + self.momentum * kept if self.nesterov else kept
        return anchor - self.rate * step, kept


# Other state than parameters is sent as it is if it has fewer elements.
SMALL = 1024

MEAN = Outer(rate=1.0, momentum=0.0, nesterov=False)
"""The outer optimizer of local SGD: the mean of the parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the state that replicas synchronise.

    Attributes:
      path: its path in the state.
      shape: its global shape in one replica.
      dtype: its dtype.
      spec: its partition spec on the mesh of a replica, an entry for each dim.
      copies: the mesh axes over which a replica holds copies of the array.
      dim: the dim along which each copy sends another part; -1: no dim divides, so
        each copy sends the whole array.
      outer: whether the outer optimizer moves the array; else replicas take the mean.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: tuple[tuple[str, ...], ...]
    copies: tuple[str, ...]
    dim: int
    outer: bool

    def local_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of the part that one device sends."""
        shape = [
            n // math.prod(sizes[a] for a in names)
            for n, names in zip(self.shape, self.spec, strict=True)
        ]
        if self.dim >= 0:
            shape[self.dim] //= math.prod(sizes[a] for a in self.copies)
        return tuple(shape)

    @property
    def sent_spec(self) -> PartitionSpec:
        """The partition spec of the anchor: each device holds the part it sends."""
        spec = list(self.spec)
        if self.dim >= 0:
            spec[self.dim] = (*spec[self.dim], *self.copies)
        return _spec(spec)

    def stacked_spec(self, axis: str) -> PartitionSpec:
        """The partition spec of all replicas' arrays, joined along the first dim."""
        spec = list(self.spec) or [()]
        spec[0] = (axis, *spec[0])
        return _spec(spec)

    def sent_stacked_spec(self, axis: str) -> PartitionSpec:
        """The partition spec of what devices send, joined along the first dim."""
        sent = dataclasses.replace(self, spec=_names(self.sent_spec))
        return sent.stacked_spec(axis)


def _names(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    return tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec
    )


def _spec(names: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in names))


def leaf_of(path: str, array: Any, *, outer: bool) -> Leaf:
    """Describes an array of a replica's state, or the struct of one.

    Raises:
      PlanError: the array has no layout on a mesh.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise PlanError(
            f"local steps: '{path}' lies on {sharding}, not on the mesh of a plan."
        )
    missing = (None,) * (array.ndim - len(sharding.spec))
    spec = _names(PartitionSpec(*sharding.spec, *missing))
    sizes = dict(sharding.mesh.shape)
    split = {name for names in spec for name in names}
    copies = tuple(a for a in sizes if a not in split and sizes[a] > 1)
    count = math.prod(sizes[a] for a in copies)
    held = [
        n // math.prod(sizes[a] for a in s)
        for n, s in zip(array.shape, spec, strict=True)
    ]
    dims = [k for k, n in enumerate(held) if n % count == 0] if count > 1 else []
    dim = max(dims, key=lambda k: held[k], default=-1)
    return Leaf(path, array.shape, array.dtype, spec, copies, dim, outer)


class Exchange:
    """The outer step of arrays that lie on one mesh in every replica."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        mesh: Mesh,
        axis: str,
        outer: Outer,
        codec: str,
        ahead: StepAhead | None = None,
        *,
        donate: bool = True,
    ) -> None:
        """Describes the outer step.

        Args:
          leaves: the arrays.
          mesh: the devices of all replicas; its first axis is that of the replicas.
          axis: the name of that axis.
          outer: the outer optimizer.
          codec: the codec of the differences, as text.
          ahead: how replicas apply their residuals ahead; None: they do not.
          donate: whether `run`, `send` and `merge` consume their arrays. If not, only
            the differences that `send` gets are consumed.

        Raises:
          InputError: there is no such codec, or it cannot send an array.
        """
        self.leaves, self.mesh, self.axis, self.outer = leaves, mesh, axis, outer
        self.ahead = ahead
        self.replicas = mesh.shape[axis]
        sizes = dict(mesh.shape)
        made = parse_codec(codec)
        kind = "residual" if made.feedback else "none"
        self.gradients = [
            self._gradient(k, leaf, sizes, made, kind) for k, leaf in enumerate(leaves)
        ]
        self._states = [init_state(g, self.replicas) for g in self.gradients]
        consumed = (1, 2, 3, 4) if donate else ()
        self.program = jax.jit(self._exchange, donate_argnums=consumed)
        self._taking = jax.jit(self._take)
        self._sending = jax.jit(self._send, donate_argnums=(1, *consumed[1:]))
        self._merging = jax.jit(
            self._merge, donate_argnums=0 if donate else (), static_argnums=2
        )

    def _gradient(
        self, number: int, leaf: Leaf, sizes: dict[str, int], codec: Any, kind: Any
    ) -> Gradient:
        shape = leaf.local_shape(sizes)
        small = len(leaf.shape) < 2 or math.prod(leaf.shape) < SMALL
        if (small and not leaf.outer) or codec.check(shape, scatter=False):
            # A codec of matrices, say, sends biases as they are.
            codec, kind = parse_codec("dense"), "none"
        every = self.ahead.average if self.ahead and kind == "residual" else 0
        feedback = Feedback(kind=kind, average_every=every)
        return Gradient(leaf.path, shape, codec, feedback, seed=number)

    @property
    def messages(self) -> dict[tuple[int, str], tuple[float, float]]:
        """The collectives of an outer step over the links between replicas.

        Returns:
          By round and kind: its size in bytes, by the convention of
          `autopar.cluster.specs.Kind`, and the bytes that one device sends.
        """
        found: dict[tuple[int, str], tuple[float, float]] = {}
        for gradient in self.gradients:
            if not gradient.size:
                continue
            made = gradient.codec.messages(gradient.shape, self.replicas, scatter=False)
            for turn, message in enumerate(made):
                size, sent = found.get((turn, message.kind), (0.0, 0.0))
                found[turn, message.kind] = (
                    size + message.nbytes,
                    sent + message.sent,
                )
            if every := gradient.feedback.average_every:
                # Round -1: of the sum of residuals, the part of one outer step.
                size, sent = found.get((-1, "all_reduce"), (0.0, 0.0))
                nbytes = 4.0 * gradient.size / every
                moved = 2.0 * nbytes * (self.replicas - 1) / self.replicas
                found[-1, "all_reduce"] = size + nbytes, sent + moved
        return found

    def wire_s(self, between: MeshAxis) -> float:
        """Predicted seconds of the messages of an outer step."""
        return sum(
            collective_s(kind, size, (between,))
            for (_, kind), (size, _) in self.messages.items()
        )

    def work_s(self, device: DeviceSpec) -> float:
        """Predicted seconds for which a device works for an outer step: its codec."""
        return sum(local_s(g.codec, g.shape, device) for g in self.gradients)

    def anchors(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The anchors of a start: the replicas' arrays, float32, without copies."""
        specs = [leaf.sent_spec for leaf in self.leaves]

        def begin(given: Sequence[jax.Array]) -> list[jax.Array]:
            return [
                self._own(leaf, x).astype(jnp.float32)
                for leaf, x in zip(self.leaves, given, strict=True)
            ]

        return self._map(begin, (self._stacked_specs,), specs)(list(arrays))

    def states(self) -> list[Any]:
        """The states of the codecs before the first exchange, (d, ...) each."""
        devices = self.mesh.size
        sharding = NamedSharding(self.mesh, self._all)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(
                (devices, *jnp.shape(x)),
                sharding,
                functools.partial(_repeated, np.asarray(x)),
            ),
            self._states,
        )

    def state_structs(self, leaf: Leaf) -> Any:
        """The state of an array's codec as structs, (d, ...) each."""
        sharding = NamedSharding(self.mesh, self._all)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.mesh.size, *jnp.shape(x)),
                jnp.asarray(x).dtype,
                sharding=sharding,
            ),
            self._states[self.leaves.index(leaf)],
        )

    def sent_struct(self, leaf: Leaf, dtype: Any) -> jax.ShapeDtypeStruct:
        """What devices send of an array, joined over replicas along the first dim."""
        shape = leaf.shape or (1,)
        return jax.ShapeDtypeStruct(
            (self.replicas * shape[0], *shape[1:]),
            dtype,
            sharding=NamedSharding(self.mesh, leaf.sent_stacked_spec(self.axis)),
        )

    def whole_residual(self, leaf: Leaf, residual: jax.Array) -> jax.Array:
        """The residuals of all replicas as whole arrays, joined along the first dim.

        Args:
          leaf: the array.
          residual: what each device did not send of its part, (d, ...).
        """
        struct = self.sent_struct(leaf, residual.dtype)
        local = struct.sharding.shard_shape(struct.shape)
        data = [s.data.reshape(local) for s in residual.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            struct.shape, struct.sharding, data
        )

    def parted_residual(self, leaf: Leaf, whole: jax.Array) -> jax.Array:
        """The residual of each device's part, (d, ...), from `whole_residual`."""
        shape = leaf.local_shape(dict(self.mesh.shape))
        data = [s.data.reshape((1, *shape)) for s in whole.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            (self.mesh.size, *shape), NamedSharding(self.mesh, self._all), data
        )

    @property
    def _all(self) -> PartitionSpec:
        return PartitionSpec(self.mesh.axis_names)

    @property
    def _stacked_specs(self) -> list[PartitionSpec]:
        return [leaf.stacked_spec(self.axis) for leaf in self.leaves]

    @property
    def _sent_stacked_specs(self) -> list[PartitionSpec]:
        return [leaf.sent_stacked_spec(self.axis) for leaf in self.leaves]

    def _map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def run(
        self,
        number: int,
        arrays: Sequence[jax.Array],
        anchors: Sequence[jax.Array],
        momenta: Sequence[jax.Array],
        states: Sequence[Any],
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], list[Any], jax.Array]:
        """Runs one outer step; all arrays are consumed.

        Args:
          number: number of the outer step, from 0.
          arrays: the arrays of all replicas, joined along the first dim.
          anchors: the anchors, as in `anchors`.
          momenta: the momenta, in the layouts of the anchors.
          states: the states of the codecs, as in `states`.

        Returns:
          The new arrays, anchors, momenta and states; and for each array three squared
          norms, summed over the replicas: of the differences, of the codec's error and
          of the mean difference (once).
        """
        return self.program(
            jnp.int32(number), list(arrays), list(anchors), list(momenta), list(states)
        )

    def take(
        self, arrays: Sequence[jax.Array], anchors: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The differences of the replicas, as copies; nothing is consumed.

        Args:
          arrays: the arrays of all replicas, joined along the first dim.
          anchors: the anchors, as in `anchors`.

        Returns:
          For each array what devices send, float32, as `sent_struct` describes it.
        """
        return self._taking(list(arrays), list(anchors))

    def send(
        self,
        number: int,
        differences: Sequence[jax.Array],
        anchors: Sequence[jax.Array],
        momenta: Sequence[jax.Array],
        states: Sequence[Any],
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], list[Any], jax.Array]:
        """Runs an outer step on the results of `take`; all arrays are consumed.

        Arguments and results are those of `run`, with differences in place of arrays.
        The first result is, for each array and replica, the new anchor minus the
        parameters from which the difference was taken.
        """
        return self._sending(
            jnp.int32(number),
            list(differences),
            list(anchors),
            list(momenta),
            list(states),
        )

    def merge(
        self,
        arrays: Sequence[jax.Array],
        given: Sequence[jax.Array],
        mixing: float | None,
    ) -> list[jax.Array]:
        """Brings a result of `send` into the replicas' arrays, which are consumed.

        Args:
          arrays: the arrays of all replicas, joined along the first dim.
          given: without mixing, the first result of `send`, which is added; with it,
            the new anchors.
          mixing: None; or the weight of a replica's own array against the anchor.
        """
        return self._merging(list(arrays), list(given), mixing)

    def _exchange(
        self, number: Any, arrays: Any, anchors: Any, momenta: Any, states: Any
    ) -> Any:
        sent = [leaf.sent_spec for leaf in self.leaves]
        held = jax.tree.map(lambda _: self._all, states)
        stacked = self._stacked_specs
        return self._map(
            self._on_device,
            (PartitionSpec(), stacked, sent, sent, held),
            (stacked, sent, sent, held, PartitionSpec()),
        )(number, arrays, anchors, momenta, states)

    def _on_device(
        self, number: Any, arrays: Any, anchors: Any, momenta: Any, states: Any
    ) -> Any:
        """The outer step on the arrays of one device."""
        differences = self._differences(arrays, anchors)
        anchors, momenta, held, seen = self._moved(
            number, differences, anchors, momenta, states
        )
        starts, held = self._starts(anchors, held)
        wholes = [
            self._whole(leaf, start).astype(leaf.dtype).reshape(old.shape)
            for leaf, start, old in zip(self.leaves, starts, arrays, strict=True)
        ]
        return wholes, anchors, momenta, held, seen

    def _starts(
        self, anchors: Sequence[jax.Array], held: Sequence[Any]
    ) -> tuple[list[jax.Array], list[Any]]:
        """Where a replica goes on, and the states of its codecs then (`StepAhead`)."""
        if self.ahead is None:
            return list(anchors), list(held)
        starts, states = [], []
        for leaf, gradient, anchor, state in zip(
            self.leaves, self.gradients, anchors, held, strict=True
        ):
            start = anchor
            if leaf.outer and gradient.feedback.active:
                residual, part = state["residual"], self.ahead.part
                start = anchor - part * residual.reshape(anchor.shape)
                state = {**state, "residual": (1.0 - part) * residual}
            starts.append(start)
            states.append(state)
        return starts, states

    def _take(self, arrays: Any, anchors: Any) -> Any:
        sent = [leaf.sent_spec for leaf in self.leaves]

        def taken(arrays: Any, anchors: Any) -> list[jax.Array]:
            return [_at_least_1d(x) for x in self._differences(arrays, anchors)]

        specs = (self._stacked_specs, sent)
        return self._map(taken, specs, self._sent_stacked_specs)(arrays, anchors)

    def _send(
        self, number: Any, differences: Any, anchors: Any, momenta: Any, states: Any
    ) -> Any:
        sent = [leaf.sent_spec for leaf in self.leaves]
        held = jax.tree.map(lambda _: self._all, states)

        def sending(
            number: Any, differences: Any, anchors: Any, momenta: Any, states: Any
        ) -> Any:
            taken = [
                x.reshape(anchor.shape)
                for x, anchor in zip(differences, anchors, strict=True)
            ]
            new, *rest = self._moved(number, taken, anchors, momenta, states)
            moves = []
            for leaf, after, anchor, x in zip(
                self.leaves, new, anchors, taken, strict=True
            ):
                own = _begin(leaf, anchor) - x
                # Equal infinities have no difference that could be added.
                moves.append(_at_least_1d(jnp.where(after == own, 0, after - own)))
            return moves, new, *rest

        stacked = self._sent_stacked_specs
        return self._map(
            sending,
            (PartitionSpec(), stacked, sent, sent, held),
            (stacked, sent, sent, held, PartitionSpec()),
        )(number, differences, anchors, momenta, states)

    def _merge(self, arrays: Any, given: Any, mixing: float | None) -> Any:
        own = 1.0 if mixing is None else mixing
        part = 1.0 if mixing is None else 1.0 - mixing
        sent = [leaf.sent_spec for leaf in self.leaves]

        def merged(arrays: Any, given: Any) -> list[jax.Array]:
            found = []
            for leaf, array, x in zip(self.leaves, arrays, given, strict=True):
                new = part * self._whole(leaf, x).reshape(array.shape)
                if own:  # 0 times infinity is not 0
                    new = own * array.astype(jnp.float32) + new
                found.append(new.astype(leaf.dtype))
            return found

        specs = self._sent_stacked_specs if mixing is None else sent
        stacked = self._stacked_specs
        return self._map(merged, (stacked, specs), stacked)(arrays, given)

    def _differences(self, arrays: Any, anchors: Any) -> list[jax.Array]:
        """The anchors minus the parts of its arrays that a device sends, float32."""
        owns = [self._own(leaf, x) for leaf, x in zip(self.leaves, arrays, strict=True)]
        return [
            _begin(leaf, anchor) - own.astype(jnp.float32)
            for leaf, anchor, own in zip(self.leaves, anchors, owns, strict=True)
        ]

    def _moved(
        self, number: Any, differences: Any, anchors: Any, momenta: Any, states: Any
    ) -> tuple[list[jax.Array], list[jax.Array], list[Any], jax.Array]:
        """The new anchors, momenta and states of one device, and all squared norms."""
        links = MeshLinks((self.axis,), self.replicas)
        before = [jax.tree.map(lambda x: x[0], state) for state in states]
        totals, after, rows = synchronise(
            self.gradients,
            differences,
            before,
            links,
            jax.lax.axis_index(self.axis),
            number,
        )
        new_anchors, new_momenta, means = [], [], []
        for k, leaf in enumerate(self.leaves):
            mean = totals[k] / self.replicas
            means.append(jnp.sum(jnp.square(mean)) / self._parts(leaf))
            if leaf.outer:
                anchor, momentum = self.outer.move(anchors[k], momenta[k], mean)
            else:
                anchor, momentum = _begin(leaf, anchors[k]) - mean, momenta[k]
            new_anchors.append(anchor)
            new_momenta.append(momentum)
        norms = jnp.stack([rows[:, 0], rows[:, 1]], axis=1)
        each = jnp.array([[self._parts(leaf)] for leaf in self.leaves], jnp.float32)
        seen = jnp.concatenate((norms, jnp.stack(means)[:, None]), axis=1)
        seen = seen / jnp.concatenate((each, each, jnp.ones_like(each)), axis=1)
        summed = jax.lax.psum(seen, self.mesh.axis_names)
        summed = summed.at[:, 2].divide(self.replicas)
        held = [jax.tree.map(lambda x: x[None], state) for state in after]
        return new_anchors, new_momenta, held, summed

    def _parts(self, leaf: Leaf) -> int:
        """How many devices of a replica send the same part of an array."""
        if leaf.dim >= 0:
            return 1
        return math.prod(self.mesh.shape[a] for a in leaf.copies)

    def _own(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        """The part of a device's array that the device sends."""
        array = array if leaf.shape else array.reshape(())
        if leaf.dim < 0:
            return array
        size = leaf.local_shape(dict(self.mesh.shape))[leaf.dim]
        start = jax.lax.axis_index(leaf.copies) * size
        return jax.lax.dynamic_slice_in_dim(array, start, size, leaf.dim)

    def _whole(self, leaf: Leaf, part: jax.Array) -> jax.Array:
        """A device's array, from the parts of the copies."""
        if leaf.dim < 0:
            return part
        return jax.lax.all_gather(part, leaf.copies, axis=leaf.dim, tiled=True)


def _begin(leaf: Leaf, anchor: jax.Array) -> jax.Array:
    """Where the differences of an array begin.

    Other state than parameters may hold infinities, such as the least loss so far
    before the first step. Its differences then begin at 0.
    """
    return anchor if leaf.outer else jnp.where(jnp.isfinite(anchor), anchor, 0.0)


def _at_least_1d(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape or (1,))


def joined_sharding(
    leaf: Leaf, mesh: Mesh, memory_kind: str | None = None
) -> NamedSharding:
    """The sharding of all replicas' arrays, joined along the first dim."""
    spec = leaf.stacked_spec(mesh.axis_names[0])
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def join_replicas(leaf: Leaf, arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """The arrays of all replicas, joined along the first dim, without copies.

    Args:
      leaf: describes the array of a replica.
      arrays: those of this process's replicas.
      mesh: the devices of all replicas; its first axis is that of the replicas.
    """
    data = [s.data for x in arrays for s in x.addressable_shards]
    shape = leaf.shape or (1,)
    if not leaf.shape:
        data = [x.reshape((1,)) for x in data]
    whole = (mesh.shape[mesh.axis_names[0]] * shape[0], *shape[1:])
    sharding = joined_sharding(leaf, mesh, arrays[0].sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(whole, sharding, data)


def part_replicas(
    leaf: Leaf, joined: jax.Array, shardings: Sequence[Any]
) -> list[jax.Array]:
    """The arrays of this process's replicas in a joined array, without copies."""
    by_device = {s.device: s.data for s in joined.addressable_shards}
    found = []
    for sharding in shardings:
        where = sharding.addressable_devices_indices_map(leaf.shape)
        data = [by_device[device] for device in where]
        if not leaf.shape:
            data = [x.reshape(()) for x in data]
        found.append(
            jax.make_array_from_single_device_arrays(leaf.shape, sharding, data)
        )
    return found


def _repeated(value: np.ndarray, index: Any) -> np.ndarray:
    rows = index[0]
    count = (rows.stop or 1) - (rows.start or 0)
    return np.broadcast_to(value, (count, *value.shape))


def joined_mesh(
    mesh: Mesh, own: Sequence[Any], groups: Sequence[Sequence[Any]]
) -> Mesh:
    """The mesh of all replicas' devices, from the mesh of one replica.

    Args:
      mesh: the mesh of one replica, or of one of its stages.
      own: the devices of that replica, in order.
      groups: the devices of each replica, in the same order.
    """
    place = {device.id: k for k, device in enumerate(own)}
    positions = [place[device.id] for device in mesh.devices.flat]
    devices = np.array([[group[k] for k in positions] for group in groups], object)
    shape = (len(groups), *mesh.devices.shape)
    return Mesh(devices.reshape(shape), (axis_name(mesh.axis_names), *mesh.axis_names))


def _of_devices(sharding: Any) -> NamedSharding:
    """The same sharding in the memory of the devices."""
    if sharding.memory_kind != HOST_MEMORY:
        return sharding
    return NamedSharding(sharding.mesh, sharding.spec)


def _on_devices(array: jax.Array) -> jax.Array:
    return placement.place(array, _of_devices(array.sharding))


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """A parameter that the step returns as a cast of another array of its state.

    Attributes:
      path: the path of the parameter.
      master: the path of the other array.
      dtypes: the dtypes to which the master is converted, one after the other.
    """

    path: str
    master: str
    dtypes: tuple[Any, ...]

    def write(self, arrays: dict[str, Any]) -> None:
        """Computes the parameter among the arrays of a replica again."""
        made = _on_devices(arrays[self.master])
        for dtype in self.dtypes:
            made = made.astype(dtype)
        arrays[self.path] = placement.place(made, arrays[self.path].sharding)


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The arrays of a fragment that lie on one mesh, their exchange and their casts."""

    exchange: Exchange
    casts: tuple[Cast, ...]

    def join(self, replicas: Sequence[Mapping[str, Any]]) -> list[jax.Array]:
        """The arrays of all replicas, joined along the first dim, on the devices.

        Only arrays in the memory of the hosts are copied.
        """
        return [
            join_replicas(
                leaf,
                [_on_devices(own[leaf.path]) for own in replicas],
                self.exchange.mesh,
            )
            for leaf in self.exchange.leaves
        ]

    def part(
        self, joined: Sequence[jax.Array], replicas: Sequence[dict[str, Any]]
    ) -> None:
        """Writes joined arrays back to the arrays of this process's replicas."""
        for leaf, whole in zip(self.exchange.leaves, joined, strict=True):
            homes = [own[leaf.path].sharding for own in replicas]
            parts = part_replicas(leaf, whole, [_of_devices(x) for x in homes])
            for own, part, home in zip(replicas, parts, homes, strict=True):
                own[leaf.path] = placement.place(part, home)
        for own in replicas:
            for cast in self.casts:
                cast.write(own)


def divide_evenly(leaves: Sequence[Leaf], count: int) -> list[list[Leaf]]:
    """Divides arrays into fragments of about equal size, in their order.

    Raises:
      PlanError: there are fewer arrays than fragments.
    """
    if count > len(leaves):
        raise PlanError(
            f"local_steps: fragments={count}, but only {len(leaves)} arrays are "
            "synchronised."
        )
    sizes = [int(np.prod(leaf.shape)) or 1 for leaf in leaves]
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    numbers = np.minimum(middles * count // sum(sizes), count - 1).astype(int)
    found = [
        [x for x, n in zip(leaves, numbers, strict=True) if n == k]
        for k in range(count)
    ]
    if all(found):
        return found
    # A large array fills several fragments alone: equal numbers of arrays instead.
    return [list(part) for part in np.array_split(np.array(leaves, object), count)]
