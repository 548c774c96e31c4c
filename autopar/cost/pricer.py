"""Prices of strategies and reshardings, in seconds and in bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.cluster import Cluster, MeshShape
from autopar.cluster.mesh import MeshAxis
from autopar.cost.collectives import (
    collective_bytes,
    collective_s,
    collective_s_per_byte,
    least_s_per_byte,
)
from autopar.cost.combining import NO_COMBINER, SUMS, Combiner, Group, combiner_of
from autopar.layouts.gathering import GatherRequest
from autopar.layouts.layout import Axes, Layout, ReshardStep, reshard_steps, shards


@dataclasses.dataclass(frozen=True, slots=True)
class CodedRate:
    """The approximate price of gathering an array as codes, for any layout of it.

    Attributes:
      axes: the mesh axes over which gathers are encoded.
      ratio: bytes of the codes, divided by bytes of the array.
      coding_s: seconds to encode the whole array, or to decode it.
    """

    axes: frozenset[int]
    ratio: float
    coding_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pricer:
    """Prices reshardings on one mesh of one cluster.

    Attributes:
      cluster: the devices and links.
      mesh: the mesh.
      combining: whether several collectives may be sent as one message.
      joined_bytes: total bytes of the sums that may share messages, and total bytes of
        the gathers that may share messages.
      messages: for each group, bytes of its largest message in a plan. None if messages
        may be as large as ``joined_bytes``.
      gathers: the request to encode gathers of parameters; None: they are exact.
    """

    cluster: Cluster
    mesh: MeshShape
    combining: bool = True
    joined_bytes: tuple[float, float] = (math.inf, math.inf)
    messages: tuple[tuple[Group, float], ...] | None = None
    gathers: GatherRequest | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each mesh axis."""
        return self.mesh.sizes

    def skew(self, axes: Sequence[MeshAxis]) -> float:
        """The factor by which waiting for other devices lengthens a collective.

        The factor is 1 if the collective runs only between hosts, because only devices
        of one host share hardware.

        Args:
          axes: the mesh axes over which the collective runs.
        """
        innermost = len(self.cluster.levels) - 1
        shared = any(axis.level == innermost and axis.size > 1 for axis in axes)
        return self.cluster.device.corrections.skew if shared else 1.0

    def _axes(self, axes: Axes) -> tuple[MeshAxis, ...]:
        return tuple(self.mesh.axes[a] for a in axes)

    def group(self, axes: Axes) -> int:
        """Number of devices in a group over these mesh axes."""
        out = 1
        for a in axes:
            out *= self.mesh.axes[a].size
        return out

    @property
    def combiner(self) -> Combiner:
        """The limits of one message on this kind of device."""
        known = self.cluster.device.corrections
        return combiner_of(known) if self.combining else NO_COMBINER

    @property
    def reassociates(self) -> bool:
        """Whether the compiler merges two all-reduces whose results are added."""
        return self.cluster.device.corrections.reassociates

    def collective_s(
        self, step: ReshardStep, nbytes: float, message_bytes: float = 0.0
    ) -> float:
        """Seconds of one elementary collective on an array of ``nbytes``.

        If a message of ``message_bytes`` carries the collective, the collective's
        seconds are its share of the message's time, in proportion to its bytes.
        """
        kind = self.runs_as(step.kind)
        if kind == "slice":
            return 0.0
        size = step.fraction * nbytes
        whole = self.whole(step, size, message_bytes)
        wire = _collective_s(kind, whole, step.axes, self.mesh)
        part = size / whole if whole else 1.0
        waiting = self.skew(self._axes(step.axes))
        return waiting * part * wire + self.move_s(step, size)

    def apart(self, step: ReshardStep) -> bool:
        """Whether the arrays of a message are sent one by one, each with a latency."""
        innermost = len(self.cluster.levels) - 1
        return self.cluster.device.corrections.arrays_apart and any(
            axis.level < innermost and axis.size > 1 for axis in self._axes(step.axes)
        )

    @property
    def packed(self) -> Pricer:
        """Prices of arrays that are packed into one before they are sent.

        autopar packs small gradients in this way if gradients are sent by codecs.
        """
        device = self.cluster.device
        if not device.corrections.arrays_apart:
            return self
        known = dataclasses.replace(device.corrections, arrays_apart=False)
        device = dataclasses.replace(device, calibration=known)
        cluster = dataclasses.replace(self.cluster, device=device)
        return dataclasses.replace(self, cluster=cluster)

    def whole(self, step: ReshardStep, size: float, message_bytes: float) -> float:
        """Bytes that share one latency with an array, including the array's own bytes.

        Args:
          step: the collective.
          size: the collective's size in bytes (`autopar.cluster.specs.Kind`).
          message_bytes: bytes of the message that carries the array; 0 if the array has
            a separate message.
        """
        return size if self.apart(step) else message_bytes or size

    def group_of(self, step: ReshardStep) -> Group:
        """The kind and axes of a collective.

        Only collectives with equal kinds and axes may share a message.
        """
        return self.runs_as(step.kind), tuple(sorted(step.axes))

    def bytes_s(self, step: ReshardStep, nbytes: float) -> float:
        """Seconds of a collective at the least seconds per byte of any message."""
        axes = self._axes(step.axes)
        size = step.fraction * nbytes
        wire = collective_s_per_byte(self.runs_as(step.kind), axes) * size
        return self.skew(axes) * wire + self.move_s(step, size)

    def least_s(self, step: ReshardStep, nbytes: float) -> float:
        """A lower bound of a collective's seconds, for all messages that may carry it.

        The message holds the array itself. It is at most as large as the compiler
        allows, and at most as large as all arrays that may be joined. A larger array
        has a separate message, for which the bound is exact.
        """
        size = step.fraction * nbytes
        if not size or step.kind == "slice":
            return 0.0
        if self.apart(step):
            return self.collective_s(step, nbytes)
        kind, _ = group = self.group_of(step)
        parts = self.group(step.axes) if kind == "reduce_scatter" else 1
        every = self.joined_bytes[step.kind not in SUMS]
        if self.messages is not None:
            every = next((own for g, own in self.messages if g == group), 0.0)
        most = max(size, min(every, parts * self.combiner.most_bytes))
        axes = self._axes(step.axes)
        wire = least_s_per_byte(kind, size, most, axes) * size
        return self.skew(axes) * wire + self.move_s(step, size)

    def price_s(
        self, step: ReshardStep, nbytes: float, together: frozenset[str]
    ) -> float:
        """Seconds of a collective, or a lower bound if it may share a message.

        Args:
          step: the collective.
          nbytes: bytes of the unsharded array.
          together: kinds of collectives that the compiler may join.
        """
        group = self.group_of(step)
        if step.kind not in together or group[0] not in self.combiner.kinds:
            return self.collective_s(step, nbytes)
        return self.least_s(step, nbytes)

    def move_s(self, step: ReshardStep, size: float) -> float:
        """Seconds to copy the pieces of a collective on one device.

        The pieces of an all-gather arrive one after the other and are copied into the
        array. An all-to-all also packs the pieces before it sends them. A
        reduce-scatter copies its piece out of the sum. Each copy reads and writes the
        bytes once. A compiler that adapts the order of dimensions to collectives makes
        no copies.
        """
        if not self.cluster.device.corrections.copies_pieces:
            return 0.0
        copies = {"all_gather": 1.0, "all_to_all": 2.0}.get(step.kind, 0.0)
        if step.kind == "reduce_scatter":
            copies = 1.0 / self.group(step.axes)
        return 2.0 * copies * size / self.cluster.device.memory_bandwidth_bytes_per_s

    def runs_as(self, kind: str) -> str:
        """The kind of collective that this device's compiler emits for a planned kind.

        A compiler that forms no reduce-scatter emits an all-reduce and a slice.
        """
        forms = self.cluster.device.corrections.forms_reduce_scatter
        return kind if forms or kind != "reduce_scatter" else "all_reduce"

    def sent_bytes(self, step: ReshardStep, nbytes: float) -> float:
        """Bytes that one device sends in one run of a collective."""
        if step.kind == "slice":
            return 0.0
        return collective_bytes(
            step.kind, step.fraction * nbytes, self.group(step.axes)
        )

    def reshard_s(
        self,
        start: Layout,
        target: Layout,
        partial: Axes,
        reduction: str,
        nbytes: float,
        together: frozenset[str],
        share: float = 1.0,
    ) -> float:
        """Seconds to reshard an array from one layout to another; see `price_s`.

        If all steps are sums or slices, the seconds are multiplied by ``share``, the
        fraction of a sum that is charged to one operator.
        """
        steps = reshard_steps(start, target, partial, reduction, self.sizes)
        part = share if all(s.kind in (*SUMS, "slice") for s in steps) else 1.0
        return part * sum(self.price_s(s, nbytes, together) for s in steps)

    def reshard_matrix(
        self,
        starts: Sequence[tuple[Layout, Axes]],
        targets: Sequence[Layout],
        reduction: str,
        nbytes: float,
        together: frozenset[str],
        share: float = 1.0,
        coded: CodedRate | None = None,
    ) -> np.ndarray:
        """Seconds to reshard from every start to every target, ``[starts, targets]``.

        A start is a layout and the mesh axes over which the array is partial.
        For pairs whose steps are only sums or slices, the seconds are multiplied by
        ``share``. ``coded`` is the price of gathers of codes; None: gathers are exact.
        """
        start_ids, unique_starts = _unique(starts)
        target_ids, unique_targets = _unique(targets)
        table = _reshard_table(
            self if together else _alone(self),
            tuple(unique_starts),
            tuple(unique_targets),
            reduction,
            float(nbytes),
            together,
            coded,
        )
        if share != 1.0:
            kinds, index, _ = _step_table(
                tuple(unique_starts), tuple(unique_targets), reduction, self.sizes
            )
            # Index -1, the last entry, stands for no step.
            summing = np.array([*(kind in SUMS for kind, _ in kinds), True])
            table = np.where(summing[index].all(axis=-1), share * table, table)
        return table[np.ix_(start_ids, target_ids)]


@functools.lru_cache(maxsize=1 << 6)
def _alone(pricer: Pricer) -> Pricer:
    """A pricer with the same prices for collectives that share no message."""
    return dataclasses.replace(pricer, joined_bytes=(math.inf, math.inf), messages=None)


# The cache sizes below fit a GPT of 2 layers on 2x4x4, planned with compression="auto".
# For this GPT, this cache gets 300 different collectives. An entry takes about 380
# bytes, so a full cache takes 6 MB.
@functools.lru_cache(maxsize=1 << 14)
def _collective_s(kind: str, nbytes: float, axes: Axes, mesh: MeshShape) -> float:
    return collective_s(kind, nbytes, tuple(mesh.axes[a] for a in axes))


# For this GPT, this cache gets 600 different tables of 25 kB. A full cache takes 25 MB.
@functools.lru_cache(maxsize=1 << 10)
def _reshard_table(
    pricer: Pricer,
    starts: tuple[tuple[Layout, Axes], ...],
    targets: tuple[Layout, ...],
    reduction: str,
    nbytes: float,
    together: frozenset[str],
    coded: CodedRate | None,
) -> np.ndarray:
    kinds, index, fractions = _step_table(starts, targets, reduction, pricer.sizes)
    out = np.zeros((len(starts), len(targets)))
    for number, (kind, axes) in enumerate(kinds):
        here = index == number
        values, inverse = np.unique(fractions[here], return_inverse=True)
        steps = [ReshardStep(kind, axes, float(f), ()) for f in values]
        sent, more_s = nbytes, 0.0
        if coded and kind == "all_gather" and not coded.axes.isdisjoint(axes):
            sent = coded.ratio * nbytes
            more_s = (1.0 + 1.0 / pricer.group(axes)) * coded.coding_s
        seconds = np.array([pricer.price_s(s, sent, together) for s in steps])
        seconds += more_s * values
        pairs = np.nonzero(here)
        np.add.at(out, (pairs[0], pairs[1]), seconds[inverse])
    return out


# For this GPT, this cache gets 59 different tables of 28 kB. A full cache takes 7 MB.
@functools.lru_cache(maxsize=1 << 8)
def _step_table(
    starts: tuple[tuple[Layout, Axes], ...],
    targets: tuple[Layout, ...],
    reduction: str,
    sizes: tuple[int, ...],
) -> tuple[list[tuple[str, Axes]], np.ndarray, np.ndarray]:
    """The resharding steps of every pair, independent of the size of the array.

    A dimension with the same sharding in the start and the target does not affect the
    steps. It only divides the bytes. Therefore the steps are computed once for all
    pairs that agree in the other dimensions.

    Returns:
      The distinct pairs (kind, axes) of steps. Then, for each pair of layouts and each
      position in its sequence of steps: the index of the step's (kind, axes), or -1 for
      no step. For each step, `ReshardStep.fraction`.
    """
    codes: dict[Axes, int] = {}
    numbers: dict[tuple[str, Axes], int] = {}

    def coded_seconds(layouts: Iterable[Layout]) -> np.ndarray:
        rows = [[codes.setdefault(axes, len(codes)) for axes in x] for x in layouts]
        return np.array(rows, dtype=int).reshape(len(rows), -1)

    begin, end = (
        coded_seconds(s for s, _ in starts)[:, None],
        coded_seconds(targets)[None],
    )
    summed = coded_seconds((partial,) for _, partial in starts)
    stays = begin == end
    moves = np.where(stays, 0, 1 + begin * len(codes) + end)
    moves = np.take_along_axis(moves, np.argsort(stays, axis=-1, kind="stable"), -1)
    pair = np.repeat(summed, len(targets))
    for move in moves.reshape(len(pair), -1).T:
        pair = np.unique((1 + len(codes) ** 2) * pair + move, return_inverse=True)[1]
    _, first, pair = np.unique(pair, return_index=True, return_inverse=True)
    paths: list[list[tuple[int, float]]] = []
    for row, column in zip(*np.divmod(first, len(targets)), strict=True):
        (start, partial), target = starts[row], targets[column]
        moved = [d for d, same in enumerate(stays[row, column]) if not same]
        own = _sent_steps(
            tuple(start[d] for d in moved),
            tuple(target[d] for d in moved),
            partial,
            reduction,
            sizes,
        )
        paths.append([(numbers.setdefault(k, len(numbers)), part) for k, part in own])
    longest = max((1, *map(len, paths)))
    index = np.full((len(paths), longest), -1)
    fractions = np.zeros(index.shape)
    for k, path in enumerate(paths):
        for step, (number, fraction) in enumerate(path):
            index[k, step], fractions[k, step] = number, fraction
    split = np.array([shards((axes,), sizes) for axes in codes], dtype=float)
    kept = np.where(stays, split[begin], 1.0).prod(axis=-1)
    shape = (len(starts), len(targets), longest)
    every = fractions[pair].reshape(shape) / kept[..., None]
    return list(numbers), index[pair].reshape(shape), every


# A GPT of 12 layers on 2x4x4 has some thousand different reshardings in 65 tables.
@functools.lru_cache(maxsize=1 << 14)
def _sent_steps(
    start: Layout, target: Layout, partial: Axes, reduction: str, sizes: tuple[int, ...]
) -> tuple[tuple[tuple[str, Axes], float], ...]:
    """The kind, axes and fraction of each resharding step that communicates."""
    steps = reshard_steps(start, target, partial, reduction, sizes)
    return tuple(((s.kind, s.axes), s.fraction) for s in steps if s.kind != "slice")


def _unique(items: Sequence[object]) -> tuple[list[int], list[object]]:
    table: dict[object, int] = {}
    ids = [table.setdefault(item, len(table)) for item in items]
    return ids, list(table)
