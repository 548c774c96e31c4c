"""The problem of the stages: what each layer costs on each submesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.layouts.layout import shards
from autopar.planner.stages.crossings import (
    Crossings,
    between,
    crossings,
    device_bytes,
    shared_parameters,
)
from autopar.planner.stages.layer_map import LayerMap
from autopar.planner.stages.memory import BytesPricer, LayerBytes
from autopar.planner.stages.seconds import LayerSeconds, SecondsPricer
from autopar.planner.stages.submeshes import Submesh, batch_splits, divides
from autopar_solver import (
    DeviceGroup,
    LayerCosts,
    Schedule,
    SharedParameter,
    StageProblem,
    SubmeshOption,
)

# A submesh is left out where another one of its size costs no more than this in
# anything.
_WORSE = 1.01


@dataclasses.dataclass(frozen=True, eq=False)
class Priced:
    """The layers on one submesh.

    Attributes:
      submesh: the devices and layouts.
      seconds: of the example layers.
      nbytes: of the example layers.
      accumulate: float64 ``[examples]``, seconds of adding a microbatch's gradients to
        their sums.
      possible: ``[scales]``, whether the layouts split a microbatch.
      sent: ``[layers - 1, scales]``, bytes of activations behind each layer.
      returned: the same of cotangents.
      entering: ``[layers, scales]``, bytes of activations that each layer reads.
    """

    submesh: Submesh
    seconds: LayerSeconds
    nbytes: LayerBytes
    accumulate: np.ndarray
    possible: np.ndarray
    sent: np.ndarray
    returned: np.ndarray
    entering: np.ndarray

    @property
    def measures(self) -> np.ndarray:
        """All that counts against it, flat."""
        s, n = self.seconds, self.nbytes
        found = [
            np.where(self.possible, table, np.inf)
            for table in (s.forward, s.backward_input, s.backward_weight, s.step)
        ]
        found += [n.state, n.gradients, n.activations, n.transient, self.sent]
        return np.concatenate([table.ravel() for table in found])


def priced(
    layers: LayerMap, found: Sequence[Submesh], scales: np.ndarray
) -> list[Priced]:
    """Prices the layers on submeshes; those that others dominate are left out.

    Args:
      layers: the layers.
      found: the submeshes.
      scales: rows of a microbatch over those of the program, for each number of them.
    """
    seconds, nbytes = SecondsPricer(layers, scales), BytesPricer(layers, scales)
    across = crossings(layers)
    out = [_priced(layers, s, scales, seconds, nbytes, across) for s in found]
    return [one for k, one in enumerate(out) if not _dominated(out, k)]


def _priced(
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


def _dominated(found: Sequence[Priced], number: int) -> bool:
    """Whether another submesh of the same devices is as good in everything."""
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
) -> StageProblem:
    """The problem that `autopar_solver.solve_stages` solves.

    Args:
      layers: the layers.
      cluster: the devices.
      found: the submeshes with their prices.
      microbatches: the numbers of microbatches, one for each scale of the prices.
      schedules: those that are allowed.
      max_stages: most stages; None for no limit.
      alone_again: whether stages on more than half of the devices may compute
        activations again. No plan of one stage can, so that the choice is then a plan.
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
    links = _Links(cluster, found, ends)
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
        shared=_shared(layers, cluster, found),
        max_stages=max_stages,
    )


def _link_ends(found: Sequence[Priced]) -> list[int]:
    """A number for each submesh; equal where they send and get the same bytes."""
    known: dict[object, int] = {}
    out: list[int] = []
    for one in found:
        key = (one.submesh.group, one.sent.tobytes(), one.returned.tobytes())
        out.append(known.setdefault(key, len(known)))
    return out


class _Links:
    """Seconds and latencies between kinds of ends of links."""

    def __init__(
        self, cluster: Cluster, found: Sequence[Priced], ends: Sequence[int]
    ) -> None:
        """One submesh stands for each end."""
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
        """``[layers - 1, links, links]``: the busier end decides."""
        nbytes = np.stack(
            [(e.returned if backward else e.sent)[:, scale] for e in self.examples], 1
        )
        most = np.maximum(nbytes[:, :, None], nbytes[:, None, :])
        return most / self.rate[None]


def _layer_costs(
    layers: LayerMap,
    found: Sequence[Priced],
    links: _Links,
    scale: int,
    microbatches: int,
    again: np.ndarray,
) -> LayerCosts:
    """The costs at one number of microbatches.

    Args:
      layers: the layers.
      found: the submeshes with their prices.
      links: seconds between them.
      scale: place of the number among those of the prices.
      microbatches: the number.
      again: bool ``[options]``, whether layers may compute activations again.
    """
    several = 1.0 if microbatches > 1 else 0.0

    def table(rows: Sequence[np.ndarray]) -> np.ndarray:
        """``[layers, options]`` of rows of example layers, one for each submesh."""
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


def _shared(
    layers: LayerMap, cluster: Cluster, found: Sequence[Priced]
) -> tuple[SharedParameter, ...]:
    """The parameters that several layers read, such as tied embeddings."""
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
